"""A stand-in for NVIDIA's MPS control daemon, protocol 2 and 3, that keeps its state in a file.

`FakeMps(root)` puts the program into a host tree; `daemon(uuid)` is what the agent's daemon of a GPU
knows: its limits, its clients, what it was told. Tests change it as drivers and clients would.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeagent.errors import IsolationError
from tests.fakes.mps import control

SERVER_PID = "48201"


class Daemon:
    """One daemon's state; see control.py for its keys."""

    def __init__(self, directory: Path) -> None:
        self.pipe = directory / "pipe"

    @property
    def state(self) -> dict[str, Any]:
        state = json.loads((self.pipe / "state.json").read_text())
        assert isinstance(state, dict)
        return state

    @property
    def running(self) -> bool:
        return (self.pipe / "control").exists() and bool(self.state["alive"])

    @property
    def calls(self) -> list[str]:
        return list(self.state["calls"])

    def change(self, edit: Callable[[dict[str, Any]], None]) -> None:
        state = self.state
        edit(state)
        fresh = self.pipe / f".state.test.{os.getpid()}"
        fresh.write_text(json.dumps(state))
        fresh.rename(self.pipe / "state.json")

    def die(self) -> None:
        """Killed: its socket file stays behind."""
        self.change(lambda s: s.update(alive=False))

    def hang(self, *commands: str) -> None:
        self.change(lambda s: s.update(hang=list(commands)))

    def refuse(self, *commands: str) -> None:
        self.change(lambda s: s.update(refuse=list(commands)))

    def serve(self, status: str = "ACTIVE") -> None:
        """Protocol 2: a server process runs."""
        self.change(lambda s: s["servers"].update({SERVER_PID: status}))

    def connect(self, pid: int, namespace: str = "default") -> None:
        """A process becomes a client."""

        def edit(state: dict[str, Any]) -> None:
            server = "shares" if state["protocol"] == 3 else SERVER_PID
            if state["protocol"] == 2:
                state["servers"].setdefault(SERVER_PID, "ACTIVE")
            state["clients"][str(pid)] = {"server": server, "namespace": namespace}

        self.change(edit)

    @property
    def clients(self) -> set[int]:
        return {int(pid) for pid in self.state["clients"]}

    def namespaces(self) -> dict[str, tuple[str, str]]:
        """Name -> (memory limit, thread percentage) as set."""
        found = self.state["servers"].get("shares", {}).get("namespaces", {})
        return {name: (n["pinned-memory-limit"], n["active-thread-percentage"]) for name, n in found.items()}


class FakeMps:
    """`protocols`: those the program knows; `multiuser`: whether protocol 2 knows -multiuser-server."""

    def __init__(
        self,
        root: Path,
        protocols: Iterable[int] = (2, 3),
        multiuser: bool = True,
        pipe_root: str = "run/edgeagent/mps",
    ) -> None:
        self.root = root
        self._pipe_root = root / pipe_root
        self._bin = root / "usr/bin"
        self._bin.mkdir(parents=True, exist_ok=True)
        (root / "dev/shm").mkdir(parents=True, exist_ok=True)
        source = Path(__file__).with_name("control.py").read_text()
        self.program = self._bin / "nvidia-cuda-mps-control"
        self.program.write_text(f"#!{sys.executable} -IS\n{source}")
        self.program.chmod(0o755)
        self._settings = {"protocols": [str(p) for p in protocols], "multiuser": multiuser}
        self._write_settings()

    def _write_settings(self) -> None:
        (self._bin / "mps-settings.json").write_text(json.dumps(self._settings))

    def start_fails(self, message: str | None) -> None:
        self._settings["fails"] = message or ""
        self._write_settings()

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], lines: str, timeout_s: float, shown: str
    ) -> tuple[int, str]:
        """As mps_control.run_bounded, without a process."""
        assert command[0] == str(self.program), "only the program is run without a process"
        known = json.loads((self._bin / "mps-settings.json").read_text())
        try:
            return control.run(list(command[1:]), environment, lines, known)
        except control.HangError:
            raise IsolationError(f"{shown} did not answer within {timeout_s:g} s") from None

    def daemon(self, uuid: str) -> Daemon:
        return Daemon(self._pipe_root / uuid)

    def operators_daemon(self, uuid: str, protocol: int = 2) -> Daemon:
        """One that somebody else started at the place where the agent looks."""
        return self._elsewhere(self._pipe_root / uuid, protocol)

    def foreign_daemon(self) -> Daemon:
        """One that somebody started without naming a directory."""
        made = self._elsewhere(self.root / "run/nvidia-mps", 2)
        (self.root / "run/nvidia-mps/control").touch()
        made.pipe.joinpath("state.json").rename(self.root / "run/nvidia-mps/state.json")
        return made

    @staticmethod
    def _elsewhere(directory: Path, protocol: int) -> Daemon:
        made = Daemon(directory)
        made.pipe.mkdir(parents=True)
        state = {
            "alive": True, "protocol": protocol, "multiuser": True, "devices": None, "servers": {},
            "clients": {}, "hang": [], "refuse": [], "calls": [],
        }  # fmt: skip
        (made.pipe / "state.json").write_text(json.dumps(state))
        (made.pipe / "control").touch()
        return made
