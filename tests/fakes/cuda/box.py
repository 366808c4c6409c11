"""A directory that plays a container: limits and state beside the limiter, programs run inside."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from edgeagent.isolation.limiter import files
from tests.fakes.cuda.tools import Tools


@dataclass(frozen=True, slots=True)
class Line:
    """One line that `drive` printed: the command, the driver's answer, further values."""

    name: str
    rc: int
    values: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Line:
        name, *rest = text.split()
        return cls(name, int(rest[0]) if rest else 0, tuple(float(v) for v in rest[1:]))


class Box:
    def __init__(self, directory: Path, tools: Tools) -> None:
        self.directory = directory
        self.tools = tools
        directory.chmod(0o755)

    def limit(
        self, memory_mib: int, *, cores_pct: int = 100, overhead_mib: int = 0, unified: bool = False
    ) -> Box:
        """Fresh files, as at a container's start."""
        limits = files.Limits(
            memory_mib * files.MIB, cores_pct, overhead_mib * files.MIB, unified, "m000001", "GPU-1"
        )
        assert limits.problems() == []
        (self.directory / "limits").write_text(limits.text())
        (self.directory / "state").unlink(missing_ok=True)
        files.write_state(self.directory / "state")
        return self

    def state(self) -> files.State:
        state = files.parse_state((self.directory / "state").read_bytes())
        assert state is not None
        return state

    def environment(self, preload: bool = True, **more: str) -> dict[str, str]:
        libraries = [self.tools.runtime or "", str(self.tools.limiter) if preload else ""]
        return {
            "PATH": os.defpath,
            "LD_LIBRARY_PATH": str(self.tools.directory),
            "LD_PRELOAD": " ".join(lib for lib in libraries if lib),
            "ASAN_OPTIONS": "detect_leaks=0",
            "TSAN_OPTIONS": "halt_on_error=1",
            **more,
        }

    def command(self, how: str, *commands: str) -> list[str]:
        return [str(self.tools.drive_linked if how == "linked" else self.tools.drive), how, *commands]

    def run(
        self, how: str, *commands: str, preload: bool = True, stderr: str | None = "", **environment: str
    ) -> list[Line]:
        """Runs commands in one process; its stderr must be `stderr` (None: whatever)."""
        done = subprocess.run(
            self.command(how, *commands),
            cwd=self.directory,
            env=self.environment(preload, **environment),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
        if stderr is not None:
            assert done.stderr == stderr
        return [Line.parse(line) for line in done.stdout.splitlines()]

    def start(self, how: str, *commands: str, **environment: str) -> subprocess.Popen[str]:
        """Starts a process; a `wait` among its commands lasts until a line is written to it."""
        return subprocess.Popen(
            self.command(how, *commands),
            cwd=self.directory,
            env=self.environment(**environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


def read_until(process: subprocess.Popen[str], name: str) -> list[Line]:
    """Reads a started process's lines up to the one called `name`."""
    assert process.stdout is not None
    lines: list[Line] = []
    for text in process.stdout:
        lines.append(Line.parse(text))
        if lines[-1].name == name:
            return lines
    raise AssertionError(f"{name} did not come: {lines}")


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def finish(process: subprocess.Popen[str]) -> list[Line]:
    """Lets a process go on to its end and gives the lines it still prints."""
    rest, _ = process.communicate("\n", timeout=60)
    return [Line.parse(line) for line in rest.splitlines()]
