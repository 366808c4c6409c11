"""One MPS control daemon of NVIDIA's: how it is started, asked and told.

`nvidia-cuda-mps-control` is daemon and client in one program; CUDA_MPS_PIPE_DIRECTORY says which daemon
is meant. Protocol 2 takes commands as lines on standard input, protocol 3 (driver r615 and newer) as
module and verb in its arguments. A client may hang for ever when its daemon does: every call is bounded.
Source: NVIDIA's MPS documentation (v2 and v3 interface). Not run on hardware by us.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgeagent.errors import IsolationError
from edgeagent.hostroot import HostRoot

log = logging.getLogger(__name__)

PROGRAM = "nvidia-cuda-mps-control"
PROGRAM_DIRS = ("/usr/bin", "/usr/local/bin", "/usr/sbin", "/run/nvidia/driver/usr/bin")
# Where a daemon is that was started without naming a directory; as a service the agent has a /tmp of its
# own, and the host's is init's.
_INIT = "/proc/1/root"
DEFAULT_PIPE_DIRS = ("/run/nvidia-mps", "/tmp/nvidia-mps", f"{_INIT}/tmp/nvidia-mps")  # noqa: S108
SERVER = "shares"  # protocol 3: the one server whose namespaces the shares are

ANSWER_S = 0.9  # of the second that nobody who prepares a container may take
TERMINATE_S = 3.0
START_S = 4.0
MAX_OUTPUT_CHARS = 256 * 1024

_SYSTEMD = "/run/systemd/system"
_LEFT_BEHIND: list[subprocess.Popen[str]] = []
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*$")


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace of protocol 3 as the daemon lists it; None: no limit, or one that cannot be read."""

    name: str
    memory_mib: int | None
    thread_pct: int | None


# Command, environment, lines for its standard input, seconds, how to name it -> exit status and output.
Runner = Callable[[Sequence[str], Mapping[str, str], str, float, str], tuple[int, str]]


class MpsControl:
    """The daemon of one GPU. `directory` is a host path; its pipe and log directories lie below it."""

    def __init__(self, host: HostRoot, gpu_uuid: str, directory: str, runner: Runner | None = None) -> None:
        self._runner = runner or run_bounded
        self._host = host
        self.gpu_uuid = gpu_uuid
        self.pipe_dir = f"{directory}/pipe"
        self._log_dir = f"{directory}/log"
        self.protocol = 2

    # ---- the program -----------------------------------------------------------------------------

    def program(self) -> str:
        """Path of the program for this process. Raises IsolationError where there is none."""
        for directory in PROGRAM_DIRS:
            if self._host.exists(f"{directory}/{PROGRAM}"):
                return str(self._host.path(f"{directory}/{PROGRAM}"))
        raise IsolationError(
            f"{PROGRAM} is not installed (looked in {', '.join(PROGRAM_DIRS)}); it comes with the driver's "
            "compute utilities"
        )

    def _environment(self, pipe_dir: str | None = None) -> dict[str, str]:
        return {
            "PATH": os.defpath,
            "LC_ALL": "C",
            "CUDA_MPS_PIPE_DIRECTORY": str(self._host.path(pipe_dir or self.pipe_dir)),
            "CUDA_MPS_LOG_DIRECTORY": str(self._host.path(self._log_dir)),
        }

    def _run(
        self,
        arguments: Sequence[str],
        lines: str = "",
        timeout_s: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """What the client printed. Raises IsolationError when it failed or did not end in time."""
        shown = " ".join((PROGRAM, *arguments)) + (f" <<< {lines!r}" if lines else "")
        status, said = self._runner(
            [self.program(), *arguments],
            environment or self._environment(),
            lines,
            timeout_s or ANSWER_S,
            shown,
        )
        if status != 0:
            raise IsolationError(f"{shown} failed: {said or f'exit status {status}'}")
        return said

    # ---- life ------------------------------------------------------------------------------------

    def find(self) -> bool:
        """Whether a daemon answers here; learns its protocol. A client follows the daemon's."""
        if not self._host.exists(f"{self.pipe_dir}/control"):
            return False
        try:
            if "memacct" in self._run(("feature", "describe", "--format=csv,noheader")):
                self.protocol = 3
                return True
        except IsolationError:
            pass  # protocol 2 knows no features
        self.protocol = 2
        try:
            float(self._run((), "get_default_active_thread_percentage"))
        except (IsolationError, ValueError):
            return False
        return True

    def foreign(self) -> str | None:
        """The pipe directory of a daemon that somebody started at NVIDIA's default place, or None."""
        for directory in DEFAULT_PIPE_DIRS:
            if self._host.exists(f"{directory}/control"):
                try:
                    self._run((), "get_server_list", environment=self._environment(directory))
                except IsolationError:
                    continue
                return directory.removeprefix(_INIT)
        return None

    def start(self, protocol: int) -> None:
        """Starts a daemon for this GPU and waits until it answers. Raises IsolationError.

        It must outlive this agent, whose restarts may not cost containers their GPU: under systemd it
        becomes a unit of its own. Clients of any user share it, where the program can do that.
        """
        for directory in (self.pipe_dir, self._log_dir):
            try:
                self._host.path(directory).mkdir(parents=True, exist_ok=True, mode=0o755)
            except OSError as e:
                raise IsolationError(f"cannot make {directory}: {e.strerror}") from e
        problem: IsolationError | None = None
        tries = (("-d", "-p", "3", "-m"),) if protocol == 3 else (("-d", "-multiuser-server"), ("-d",))
        for arguments in tries:
            try:
                self._launch(arguments)
            except IsolationError as e:
                problem = problem or e
                continue
            if self._answers():
                if self.protocol == 3:
                    self._make_server()
                log.info("MPS daemon started gpu=%s protocol=%s", self.gpu_uuid, self.protocol)
                return
        raise problem or IsolationError(f"{PROGRAM} was started and does not answer")

    def _launch(self, arguments: tuple[str, ...]) -> None:
        environment = {**self._environment(), "CUDA_VISIBLE_DEVICES": self.gpu_uuid}
        if not self._host.exists(_SYSTEMD):
            self._run(arguments, timeout_s=START_S, environment=environment)
            return
        command = [
            "systemd-run", "--quiet", "--collect", "--service-type=forking",
            f"--unit=edgeagent-mps-{self.gpu_uuid}", "--description=MPS daemon of edgeagent's shares",
            *(f"--setenv={key}={value}" for key, value in environment.items()),
            self.program(), *arguments,
        ]  # fmt: skip
        status, said = self._runner(command, {"PATH": os.defpath}, "", START_S, "systemd-run")
        if status != 0:
            raise IsolationError(f"cannot start {PROGRAM} through systemd-run: {said}")

    def _answers(self) -> bool:
        until_s = time.monotonic() + START_S
        pause = threading.Event()
        while not self.find():
            if time.monotonic() >= until_s:
                return False
            pause.wait(0.05)
        return True

    def quit(self) -> None:
        """Ends the daemon and its servers. Raises IsolationError."""
        if self.protocol == 3:
            self._run(("-q",), timeout_s=TERMINATE_S)
        else:
            self._run((), "quit", timeout_s=TERMINATE_S)

    # ---- health ----------------------------------------------------------------------------------

    def fault(self) -> str | None:
        """What is wrong with the servers; None when nothing is. Raises IsolationError when the daemon
        does not answer."""
        if self.protocol == 3:
            states = [(row[0], row[3]) for row in self._rows("server", "list") if len(row) > 3]
        else:
            pids = [pid for pid in self._run((), "get_server_list").split() if pid.isdigit()]
            states = [(f"server {pid}", self._run((), f"get_server_status {pid}")) for pid in pids]
        bad = [f"{name}: {state}" for name, state in states if "fault" in state.lower()]
        return f"MPS {bad[0]}; it takes no new client until all of its clients have ended" if bad else None

    # ---- clients ---------------------------------------------------------------------------------

    def clients(self) -> dict[int, str]:
        """Client PID -> the server it is at (a PID, or a name in protocol 3)."""
        if self.protocol == 3:
            rows = self._rows("client", "list", "--all")
            return {int(row[0]): row[1] for row in rows if len(row) > 1 and row[0].isdigit()}
        found = {}
        for server in self._run((), "get_server_list").split():
            if server.isdigit():
                for pid in self._run((), f"get_client_list {server}").split():
                    if pid.isdigit():
                        found[int(pid)] = server
        return found

    def terminate(self, pid: int) -> bool:
        """Ends a client's work on the GPU in order; whether the daemon says that it did."""
        server = self.clients().get(pid)
        if server is None:
            return False
        if self.protocol == 3:
            self._run(("client", "terminate", str(pid)), timeout_s=TERMINATE_S)
            return True
        said = self._run((), f"terminate_client {server} {pid}", timeout_s=TERMINATE_S)
        return said in ("0", "CUDA_SUCCESS")

    # ---- namespaces (protocol 3) -----------------------------------------------------------------

    def namespace_dir(self, name: str) -> str:
        """Host path of the directory through which clients come into a namespace."""
        return f"{self.pipe_dir}/{SERVER}/{name}"

    def _make_server(self) -> None:
        if not any(row and row[0] == SERVER for row in self._rows("server", "list")):
            self._run(
                ("server", "create", SERVER, "--uid=0", f"--allowed-devices={self.gpu_uuid}"),
                timeout_s=START_S,
            )

    def make_namespace(self, name: str, memory_mib: int | None, thread_pct: int | None) -> None:
        """A fresh namespace with these limits. Raises IsolationError."""
        self._make_server()
        if name in self.namespaces():
            self.remove_namespace(name)
        self._run(("namespace", "create", name, f"--server={SERVER}"))
        self.limit_namespace(name, memory_mib, thread_pct)

    def limit_namespace(self, name: str, memory_mib: int | None, thread_pct: int | None) -> None:
        limits = []
        if memory_mib is not None:
            limits.append(f"--pinned-memory-limit={memory_mib}M")
        if thread_pct is not None:
            limits.append(f"--active-thread-percentage={thread_pct}")
        if limits:
            self._run(("namespace", "set", name, f"--server={SERVER}", *limits))

    def remove_namespace(self, name: str) -> None:
        self._run(("namespace", "delete", name, f"--server={SERVER}", "--force"))

    def namespaces(self) -> dict[str, Namespace]:
        rows = self._rows("namespace", "list", f"--server={SERVER}")
        return {
            row[0]: Namespace(row[0], size_mib(row[3]), percentage(row[4])) for row in rows if len(row) > 4
        }

    def _rows(self, *arguments: str) -> list[list[str]]:
        said = self._run((*arguments, "--format=csv,noheader"))
        return [[field.strip() for field in line.split(",")] for line in said.splitlines() if line.strip()]


def run_bounded(
    command: Sequence[str], environment: Mapping[str, str], lines: str, timeout_s: float, shown: str
) -> tuple[int, str]:
    """Exit status and output of a command. Its output goes to a file: a daemon that it leaves behind
    would keep a pipe open. Raises IsolationError when it cannot be run or does not end in time."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                text=True,
            )
        except OSError as e:
            raise IsolationError(f"cannot run {shown}: {e.strerror}") from e
        try:
            process.communicate(f"{lines}\n" if lines else "", timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            try:
                process.communicate(timeout=0.5)
            except subprocess.TimeoutExpired:
                _LEFT_BEHIND.append(process)  # it cannot even be killed
            raise IsolationError(f"{shown} did not answer within {timeout_s:g} s") from None
        out.seek(0)
        return process.returncode, out.read(MAX_OUTPUT_CHARS).strip()


def size_mib(text: str) -> int | None:
    """ "2000M", "1.5G" or a number of bytes in MiB; None for anything else ("-", "unlimited")."""
    found = _SIZE.match(text)
    if found is None:
        return None
    return round(float(found.group(1)) * _UNITS[found.group(2)] / _UNITS["M"])


def percentage(text: str) -> int | None:
    """ "30" or "30.0"."""
    try:
        return round(float(text.strip().rstrip("%")))
    except ValueError:
        return None
