"""The real agent as a child process, against a generated root, with everything around it faked.

`AgentProcess` writes a configuration, starts `python -m edgeagent run`, learns of its readiness through
systemd's notify protocol, asks it over its local socket, and collects its log. No sleeps: whoever waits
for a state waits for a message, a snapshot or the process's end.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from edgeagent.control import ControlClient
from edgeagent.errors import ControlError

CHECKOUT = Path(__file__).resolve().parents[3]


class AgentProcess:
    """`root` is the host tree, with the agent's run and state directories; `work` has its configuration and log."""

    def __init__(
        self,
        root: Path,
        work: Path,
        config: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.root = root
        self.work = work
        self.run_dir = root / "run/edgeagent"
        self.state_dir = root / "var/lib/edgeagent"
        self.config_path = work / "agent.yaml"
        self.log_path = work / "agent.log"
        self._env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = threading.Event()
        self.notified: list[str] = []
        work.mkdir(parents=True, exist_ok=True)
        self.write_config(config or {})

    def write_config(self, config: Mapping[str, Any]) -> None:
        base: dict[str, Any] = {
            "hostRoot": str(self.root),
            "node": {"name": "edge-1", "site": "lab"},
            "kubernetes": {"enabled": False},
            "metrics": {"enabled": False},
        }
        self.config_path.write_text(yaml.safe_dump(_merged(base, config)))

    # -- life --

    def start(self) -> AgentProcess:
        notify_path = self.work / "notify.sock"
        notify_path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listener.bind(str(notify_path))
        self._ready.clear()
        env = {
            **os.environ,
            "PYTHONPATH": str(CHECKOUT),
            "NOTIFY_SOCKET": str(notify_path),
            "PYTHONUNBUFFERED": "1",
            **self._env,
        }
        log = self.log_path.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "edgeagent", "run", "-c", str(self.config_path)],
            env=env, stdout=log, stderr=log, cwd=CHECKOUT,
        )  # fmt: skip
        log.close()
        threading.Thread(target=self._listen, args=(listener,), name="notify", daemon=True).start()
        return self

    def _listen(self, listener: socket.socket) -> None:
        listener.settimeout(0.2)
        process = self._process
        assert process is not None
        with listener:
            while process.poll() is None:
                try:
                    text = listener.recv(4096).decode()
                except TimeoutError:
                    continue
                self.notified.append(text)
                if "READY=1" in text:
                    self._ready.set()

    def wait_ready(self, timeout_s: float = 20.0) -> AgentProcess:
        deadline = time.monotonic() + timeout_s
        while not self._ready.wait(0.05):
            assert self.running, f"the agent ended with {self.exit_code}:\n{self.log()}"
            assert time.monotonic() < deadline, f"not ready after {timeout_s} s:\n{self.log()}"
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait_exit(self, timeout_s: float = 10.0) -> int:
        assert self._process is not None
        return self._process.wait(timeout_s)

    def stop(self, timeout_s: float = 10.0) -> int:
        """SIGTERM and the exit status."""
        if self.running:
            self.signal(signal.SIGTERM)
        return self.wait_exit(timeout_s)

    def kill(self) -> None:
        if self.running:
            self.signal(signal.SIGKILL)
            self.wait_exit()

    def __enter__(self) -> AgentProcess:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        if self._process is not None and self.running:
            self.signal(signal.SIGCONT)
            try:
                self.stop(8.0)
            except subprocess.TimeoutExpired:
                self.kill()
                raise

    # -- what it says --

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def call(self, verb: str, **args: Any) -> Any:
        return ControlClient(self.run_dir).call(verb, **args)

    def snapshot(self) -> dict[str, Any]:
        result = self.call("snapshot")
        assert isinstance(result, dict)
        return result

    def wait_snapshot(
        self, predicate: Callable[[dict[str, Any]], object], timeout_s: float = 15.0
    ) -> dict[str, Any]:
        """The first snapshot for which `predicate` holds; AssertionError with the last one otherwise."""
        deadline = time.monotonic() + timeout_s
        tick = threading.Event()
        last: dict[str, Any] = {}
        while time.monotonic() < deadline:
            try:
                last = self.snapshot()
                if predicate(last):
                    return last
            except ControlError:
                assert self.running, f"the agent ended with {self.exit_code}:\n{self.log()}"
            tick.wait(0.03)
        raise AssertionError(
            f"not true after {timeout_s} s; last snapshot {last}\nlog:\n{self.log()[-6000:]}"
        )


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        mine = out.get(key)
        out[key] = _merged(mine, value) if isinstance(mine, dict) and isinstance(value, Mapping) else value
    return out
