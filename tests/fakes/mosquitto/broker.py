"""Starts, stops, kills and freezes Debian's mosquitto."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path


def available() -> str | None:
    """The path of mosquitto, None where it is not installed."""
    return shutil.which("mosquitto") or next(
        (p for p in ("/usr/sbin/mosquitto", "/usr/local/sbin/mosquitto") if os.access(p, os.X_OK)), None
    )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Mosquitto:
    """One broker. `config` is added to the file; `listener` adds options to the plain listener."""

    def __init__(
        self, directory: Path, config: str = "", *, anonymous: bool = True, log: bool = True
    ) -> None:
        self.directory = directory
        self.port = free_port()
        self.log_file = directory / "mosquitto.log"
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        lines = ["per_listener_settings false", f"listener {self.port} 127.0.0.1"]
        if os.geteuid() == 0:
            lines.insert(0, "user root")
        if anonymous:
            lines.append("allow_anonymous true")
        if log:
            lines += [f"log_dest file {self.log_file}", "log_type all"]
        self.config_file = directory / "mosquitto.conf"
        self.config_file.write_text("\n".join([*lines, config, ""]))

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def start(self) -> Mosquitto:
        path = available()
        assert path is not None, "mosquitto is not installed"
        self._process = subprocess.Popen(
            [path, "-c", str(self.config_file)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return self
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"mosquitto did not start:\n{self.log()[-2000:]}") from None
                time.sleep(0.01)

    def _end(self, sig: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(sig)
        self._process.wait(10)
        self._process = None

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def restart(self, *, hard: bool = True) -> None:
        (self.kill if hard else self.stop)()
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    def __enter__(self) -> Mosquitto:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()
