"""The limiter as an isolation mechanism: our own library, preloaded into the container's processes.

Per share a directory below the run directory holds the files that the container is given: limits
and ld.so.preload read-only, the state file writable by any user. The pod's environment cannot change
any of it. What is claimed is `cooperative`: a program that wants to can get round a library.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgeagent import __version__
from edgeagent.config.schema import LimiterConfig
from edgeagent.errors import IsolationError
from edgeagent.gpus.model import Gpu
from edgeagent.hostroot import HostRoot
from edgeagent.isolation.backend import ProbeResult, RunningContainer, ShareToEnforce
from edgeagent.isolation.levels import Axis, AxisLevel, Level
from edgeagent.isolation.limiter import files
from edgeagent.isolation.limiter.build import library_name, native_arch
from edgeagent.node.cdi import ContainerEdits, Mount

log = logging.getLogger(__name__)

PRELOAD_PATH = "/etc/ld.so.preload"
CANARY_DEADLINE_S = 6.0  # below the time that a container's start waits for probes
MAPS_MAX_BYTES = 8 * 1024 * 1024  # a Python with PyTorch maps some thousand lines
PACKAGE_DIR = Path(files.__file__).parent

_SHARE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")
_READ_ONLY = ("ro", "nosuid", "nodev", "rbind", "rprivate")
_WRITABLE = ("rw", "nosuid", "nodev", "noexec", "rbind", "rprivate")
# Where a driver lies that is not on this process's own library path: an agent in a pod sees the host's
# under its root, and the GPU operator keeps one of its own.
_DRIVER_DIRS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu/nvidia",
    "/usr/lib/aarch64-linux-gnu/tegra",
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "/run/nvidia/driver/usr/lib64",
)


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """What the canary said. `problem`: the library does not do what it must on this host.
    `untried`: it could not be tried against a driver, and why."""

    problem: str | None = None
    untried: str | None = None
    driver: str | None = None


_SHORT_DIR = "/tmp"  # noqa: S108 - TemporaryDirectory's name below it must be no longer than CONTAINER_DIR
_LEFT_BEHIND: list[subprocess.Popen[bytes]] = []

Canary = Callable[[Path, str], CanaryResult]


def run_canary(library: Path, driver: str, deadline_s: float = CANARY_DEADLINE_S) -> CanaryResult:
    """Runs canary.py with a copy of the library that looks for its files in a temporary directory: no
    privilege is needed. `driver`: the name or path of libcuda.so.1."""
    try:
        with tempfile.TemporaryDirectory(
            prefix="ea-", dir=_SHORT_DIR, ignore_cleanup_errors=True
        ) as directory:
            copy = library.with_name(f".canary-{os.path.basename(directory)}.so")
            try:
                content = redirected(library.read_bytes(), directory)
                if content is None:
                    return CanaryResult(problem=f"{library} is not the library that this agent expects")
                copy.write_bytes(content)
                return _run_canary(copy, directory, driver, deadline_s)
            finally:
                copy.unlink(missing_ok=True)
    except OSError as e:
        return CanaryResult(untried=f"the canary could not be prepared: {e.strerror}")


def redirected(library: bytes, directory: str) -> bytes | None:
    """The library with its files' directory replaced, byte for byte as long; None: it names none, or
    `directory` is too long."""
    wanted = files.CONTAINER_DIR.encode()
    if wanted not in library or len(os.fsencode(directory)) > len(wanted):
        return None
    return library.replace(wanted, os.fsencode(directory).ljust(len(wanted), b"/"))


def _run_canary(library: Path, directory: str, driver: str, deadline_s: float) -> CanaryResult:
    command = [sys.executable, "-I", "-S", str(PACKAGE_DIR / "canary.py"), directory, driver]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={"LD_PRELOAD": str(library), "PATH": os.defpath},
            start_new_session=True,
        )
        try:
            status = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                _LEFT_BEHIND.append(process)  # a driver that hangs does not let it be killed
            return CanaryResult(problem=f"the canary did not end within {deadline_s:.0f} s")
        out.seek(0)
        err.seek(0)
        return judge_canary(status, out.read(65536), err.read(4096))


def judge_canary(status: int, out: bytes, err: bytes) -> CanaryResult:
    """Pure: what a canary's exit status and output mean."""
    said = err.decode("utf-8", "replace").strip()
    if status == -signal.SIGKILL:
        return CanaryResult(untried="the canary was killed: the control group may lack memory for a driver")
    if status < 0:
        return CanaryResult(problem=f"the canary was ended by {signal.Signals(-status).name}")
    try:
        report = json.loads(out)
        stage, wrong, why = report["stage"], report["wrong"], report["why"]
    except (ValueError, KeyError, TypeError):
        return CanaryResult(problem=f"the canary said nothing to be understood: {said or out[:200]!r}")
    if wrong:
        return CanaryResult(problem="; ".join(str(w) for w in wrong))
    if said:  # "cannot be preloaded: ignored", or output where there must be none
        return CanaryResult(problem=said.splitlines()[0])
    if stage != "done":
        return CanaryResult(untried=str(why))
    return CanaryResult(driver=str(report.get("driver")))


class LimiterBackend:
    """`run_dir` and `config.library_dir` are host paths. `built` is the library for this machine."""

    name = "limiter"
    axes = frozenset({Axis.MEMORY, Axis.COMPUTE})

    def __init__(
        self,
        config: LimiterConfig,
        host: HostRoot,
        run_dir: str,
        *,
        built: Path | None = None,
        canary: Canary = run_canary,
    ) -> None:
        self._overhead_mib = config.overhead_mib
        self._library_dir = config.library_dir.rstrip("/")
        self._host = host
        self._shares_dir = f"{run_dir.rstrip('/')}/limiter"
        self._built = PACKAGE_DIR / library_name(native_arch()) if built is None else built
        self._canary = canary
        self._lock = threading.Lock()
        self._probed: ProbeResult | None = None
        self._library: str | None = None  # host path of the installed library

    # ---- probe ---------------------------------------------------------------------------------

    def probe(self, gpu: Gpu, axis: Axis) -> ProbeResult:
        """The same for every GPU and axis of a host; tried once and remembered."""
        with self._lock:
            if self._probed is None:
                self._probed = self._probe()
            return self._probed

    def _probe(self) -> ProbeResult:
        try:
            library = self._install()
        except IsolationError as e:
            return ProbeResult(Level.NONE, "", str(e))
        result = self._canary(self._host.path(library), self._find_driver())
        if result.problem is not None:
            return ProbeResult(Level.NONE, "", f"the library failed on this host: {result.problem}")
        self._library = library
        if result.untried is not None:
            return ProbeResult(
                Level.COOPERATIVE,
                f"the library loads; not tried against a driver here ({result.untried}); "
                "proved per container",
            )
        return ProbeResult(
            Level.COOPERATIVE, f"a canary was refused memory above its limit by {result.driver}"
        )

    def _find_driver(self) -> str:
        if str(self._host.root) != "/":
            for directory in _DRIVER_DIRS:
                if self._host.exists(f"{directory}/libcuda.so.1"):
                    return str(self._host.path(f"{directory}/libcuda.so.1"))
        return "libcuda.so.1"

    def _install(self) -> str:
        """Puts the library where containers get it from; gives its host path. Its name has its
        content's hash: running containers keep the one they started with."""
        try:
            content = self._built.read_bytes()
        except OSError:
            raise IsolationError(
                f"not_built: no library for {native_arch()} in this installation "
                "(install a wheel, or run python -m edgeagent.isolation.limiter.build where there is "
                "a C compiler or ziglang)"
            ) from None
        if content[:4] != b"\x7fELF":
            raise IsolationError(f"not_built: {self._built} is not a shared library")
        digest = hashlib.sha256(content).hexdigest()[:12]
        path = f"{self._library_dir}/libedgeagent-limiter-{__version__}-{digest}.so"
        directory, target = self._host.path(self._library_dir), self._host.path(path)
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o755)
            if self._host.read_bytes(path, len(content) + 1) != content:
                _write(target, content, 0o755)
        except OSError as e:
            raise IsolationError(f"cannot write {path}: {e.strerror}") from e
        return path

    # ---- prepare and release -------------------------------------------------------------------

    def _share_dir(self, share: ShareToEnforce) -> str:
        if not _SHARE_NAME.match(share.share):
            raise IsolationError(f"share name {share.share!r} cannot be a directory's")
        return f"{self._shares_dir}/{share.share}"

    def limits_for(self, share: ShareToEnforce, axes: frozenset[Axis]) -> files.Limits:
        """What the limits file of a share says. An axis that another mechanism keeps is left open.
        Raises IsolationError for a share that no process could use."""
        memory_bytes, overhead_bytes = files.MAX_MEMORY_BYTES, 0
        if Axis.MEMORY in axes:
            if share.memory_mib <= self._overhead_mib:
                raise IsolationError(
                    f"a share of {share.memory_mib} MiB holds no process: each is charged "
                    f"{self._overhead_mib} MiB for what the driver takes (isolation.limiter.overheadMiB)"
                )
            memory_bytes, overhead_bytes = share.memory_mib * files.MIB, self._overhead_mib * files.MIB
        limits = files.Limits(
            memory_bytes=memory_bytes,
            cores_pct=100 if share.cores_pct is None or Axis.COMPUTE not in axes else share.cores_pct,
            overhead_bytes=overhead_bytes,
            unified=share.gpu.unified_memory,
            share=share.share,
            gpu=share.gpu.uuid,
        )
        problems = limits.problems()
        if problems:
            raise IsolationError(f"share {share.share} cannot be limited: {'; '.join(problems)}")
        return limits

    def prepare(self, share: ShareToEnforce, axes: frozenset[Axis]) -> ContainerEdits:
        library = self._library
        if library is None:
            raise IsolationError("the limiter's library is not in place")
        if not self._host.exists(library):
            library = self._install()  # somebody tidied up
        directory = self._share_dir(share)
        limits = self.limits_for(share, axes)
        where = self._host.path(directory)
        try:
            where.mkdir(parents=True, exist_ok=True, mode=0o755)
            _write(where / "limits", limits.text().encode(), 0o444)
            _write(where / "ld.so.preload", f"{files.CONTAINER_DIR}/{files.LIBRARY_NAME}\n".encode(), 0o444)
            # A new file for every start: what an earlier container's processes left is not counted.
            fresh = where / "state.new"
            fresh.unlink(missing_ok=True)
            files.write_state(fresh)
            fresh.replace(where / "state")
        except OSError as e:
            raise IsolationError(f"cannot write {directory}: {e.strerror}") from e
        return ContainerEdits(
            mounts=(
                Mount(library, f"{files.CONTAINER_DIR}/{files.LIBRARY_NAME}", _READ_ONLY),
                Mount(f"{directory}/limits", f"{files.CONTAINER_DIR}/limits", _READ_ONLY),
                Mount(f"{directory}/state", f"{files.CONTAINER_DIR}/state", _WRITABLE),
                Mount(f"{directory}/ld.so.preload", PRELOAD_PATH, _READ_ONLY),
            )
        )

    def release(self, share: ShareToEnforce) -> None:
        shutil.rmtree(self._host.path(self._share_dir(share)), ignore_errors=True)

    def close(self) -> None: ...

    # ---- evidence ------------------------------------------------------------------------------

    def state(self, share: ShareToEnforce) -> files.State | None:
        """What the container's processes are charged now; None where the state file cannot be used."""
        data = self._host.read_bytes(f"{self._share_dir(share)}/state", files.STATE_BYTES + 1)
        return None if data is None else files.parse_state(data)

    def evidence(self, share: ShareToEnforce, running: RunningContainer, axis: Axis) -> AxisLevel:
        """Every process that the driver lists on the GPU must have the library mapped, by its inode,
        and must be in the state file. Before any uses the GPU: some process has it mapped."""
        inodes = self._installed_inodes()
        if not running.gpu_pids:
            return self._evidence_before_use(share, running, inodes)
        state = self.state(share)
        for pid in running.gpu_pids:
            reason, text = self._missing(pid, inodes, state)
            if reason is not None:
                return AxisLevel(Level.NONE, self.name, text, reason)
        count = len(running.gpu_pids)
        used = f", {state.total_bytes // files.MIB} MiB charged" if state is not None else ""
        return AxisLevel(
            Level.COOPERATIVE, self.name, f"mapped and accounted in {count} of {count} GPU processes{used}"
        )

    def _evidence_before_use(
        self, share: ShareToEnforce, running: RunningContainer, inodes: frozenset[int]
    ) -> AxisLevel:
        """Also for a driver that lists no processes (Orin): then the account says who uses the GPU."""
        mapped = [pid for pid in running.pids if self._mapped(self._maps(pid), inodes)]
        if mapped:
            state = self.state(share)
            accounted = 0 if state is None else sum(self._accounted(pid, state) for pid in mapped)
            return AxisLevel(
                Level.COOPERATIVE,
                self.name,
                f"mapped in {len(mapped)} of {len(running.pids)} processes, {accounted} of them accounted; "
                "the driver lists none",
            )
        for pid in running.pids:
            reason, text = self._missing(pid, inodes, None)
            if reason is not None:
                return AxisLevel(Level.NONE, self.name, text, reason)
        return AxisLevel(Level.NONE, self.name, reason="no_gpu_use_yet")

    def _installed_inodes(self) -> frozenset[int]:
        """Of every version installed here: a container keeps the one it was started with."""
        found = set()
        for name in self._host.listdir(self._library_dir):
            if name.startswith("libedgeagent-limiter-") and name.endswith(".so"):
                try:
                    found.add(os.stat(self._host.path(f"{self._library_dir}/{name}")).st_ino)
                except OSError:
                    continue  # removed meanwhile
        return frozenset(found)

    def _maps(self, pid: int) -> str | None:
        return self._host.read_text(f"/proc/{pid}/maps", MAPS_MAX_BYTES)

    @staticmethod
    def _mapped(maps: str | None, inodes: frozenset[int]) -> bool:
        for line in (maps or "").splitlines():
            # address perms offset device inode path
            parts = line.split(None, 5)
            if len(parts) == 6 and parts[5].rpartition("/")[2] == files.LIBRARY_NAME and parts[4].isdigit():
                return int(parts[4]) in inodes
        return False

    def _missing(self, pid: int, inodes: frozenset[int], state: files.State | None) -> tuple[str | None, str]:
        """(reason, what was seen) when a process is not kept by the limiter; (None, "") when it is,
        or when it ended while it was looked at."""
        maps = self._maps(pid)
        if not maps:
            return None, ""
        if self._mapped(maps, inodes):
            if state is None or not self._accounted(pid, state):
                return "state_denied", f"process {pid} has the library but is not in the state file"
            return None, ""
        root = f"/proc/{pid}/root"
        preload = self._host.read_text(f"{root}{PRELOAD_PATH}") or ""
        if self._namespaces(pid) > 2:
            return "nested", f"process {pid} runs in a container inside the container"
        if files.LIBRARY_NAME not in preload:
            return "opted_out", f"{PRELOAD_PATH} of process {pid} does not name the library"
        if "ld-musl-" in maps or (
            "libc.so.6" not in maps
            and any(n.startswith("ld-musl-") for n in self._host.listdir(f"{root}/lib"))
        ):
            return "musl_image", f"process {pid} runs with musl, which preloads nothing from {PRELOAD_PATH}"
        head = self._host.read_bytes(f"{root}{files.CONTAINER_DIR}/{files.LIBRARY_NAME}", 4)
        if head != b"\x7fELF":
            return "empty_library", f"the library that process {pid} sees is empty or missing"
        return "not_preloaded", f"process {pid} does not have the library mapped"

    def _namespaces(self, pid: int) -> int:
        """How many PID namespaces deep a process is, counted from the host's."""
        return len(self._status_field(pid, "NSpid"))

    def _status_field(self, pid: int, name: str) -> list[str]:
        for line in (self._host.read_text(f"/proc/{pid}/status") or "").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return value.split()
        return []

    def _accounted(self, pid: int, state: files.State) -> bool:
        inner = self._status_field(pid, "NSpid")
        own_pid = int(inner[-1]) if inner and inner[-1].isdigit() else pid
        started = self._started_ticks(pid)
        return any(
            slot.pid == own_pid and (started is None or slot.started_ticks in (0, started))
            for slot in state.slots
        )

    def _started_ticks(self, pid: int) -> int | None:
        text = self._host.read_text(f"/proc/{pid}/stat") or ""
        fields = text.rpartition(")")[2].split()
        return int(fields[19]) if len(fields) > 19 and fields[19].isdigit() else None


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replaces a file in one step, its mode independent of the umask."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(content)
            f.flush()
            os.fchmod(f.fileno(), mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
