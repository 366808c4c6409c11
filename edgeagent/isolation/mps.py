"""Limits through NVIDIA's MPS: its clients run side by side on a GPU, each with so much pinned device
memory and such a part of the multiprocessors.

Opt-in, because a fault of one client hits all clients of that GPU. One control daemon per GPU, found at
`<pipeRoot>/<GPU uuid>` or started there. With protocol 3 every share is a namespace of the daemon, and a
container gets that namespace's directory alone; with protocol 2 the values are in its environment.

What is claimed: memory is cooperative (a program that names another GPU in the limit's variable, or that
keeps away from the daemon, has no limit). Compute is hard where the daemon keeps the value (protocol 3)
and the GPU reads back EXCLUSIVE_PROCESS, so that nobody can work beside the daemon; else cooperative.
Both count per client process: a container with several is not limited as a whole, and that is said.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from edgeagent.config.schema import MpsConfig
from edgeagent.errors import GpuError, IsolationError
from edgeagent.gpus.model import ComputeModes, Gpu
from edgeagent.hostroot import HostRoot
from edgeagent.isolation.backend import ProbeResult, RunningContainer, ShareToEnforce
from edgeagent.isolation.levels import Axis, AxisLevel, Level
from edgeagent.isolation.mps_control import MpsControl, Namespace, Runner
from edgeagent.node.cdi import ContainerEdits, Mount

log = logging.getLogger(__name__)

PIPE_DIR = "/run/edgeagent-mps"  # in the container
PIPE_ENV = "CUDA_MPS_PIPE_DIRECTORY"
MEMORY_ENV = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
THREADS_ENV = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
EXCLUSIVE = "exclusive_process"

MAX_CLIENTS = 48  # per GPU, Volta and newer
FIRST_PROTOCOL_3 = 615  # driver branch
VOLTA = (7, 0)
FRESH_S = 1.0  # what was read this long ago still counts
RESTART_PAUSE_S = 5.0

_MOUNT = ("rw", "nosuid", "nodev", "noexec", "rbind", "rprivate")
_MAX_ENVIRON_BYTES = 256 * 1024


@dataclass(slots=True)
class _Share:
    """A share in force. `run`: which run of the daemon it was made in."""

    share: ShareToEnforce
    axes: frozenset[Axis]
    run: int


@dataclass(slots=True)
class _Daemon:
    """The daemon of one GPU and what is known of it. `run` counts the starts by this agent; 0: it was
    found running. `problem`: why it cannot be used now."""

    control: MpsControl
    gpu: Gpu
    lock: threading.RLock = field(default_factory=threading.RLock)
    run: int = 0
    found: bool = False
    needed: bool = False  # a container has been prepared for it, or was found on it
    problem: str | None = None
    checked_s: float = float("-inf")
    started_s: float = float("-inf")
    namespaces: dict[str, Namespace] | None = None
    clients: frozenset[int] | None = None


class MpsBackend:
    """`opted_in`: the configuration names MPS or allows it. `manage`: start a daemon where none runs."""

    name = "mps"
    axes = frozenset({Axis.MEMORY, Axis.COMPUTE})

    def __init__(
        self,
        config: MpsConfig,
        host: HostRoot,
        compute_modes: ComputeModes | None,
        *,
        opted_in: bool,
        manage: bool,
        runner: Runner | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = config.pipe_root.rstrip("/")
        self._host = host
        self._modes = compute_modes
        self._opted_in = opted_in
        self._manage = manage
        self._runner = runner
        self._clock = clock
        self._lock = threading.Lock()
        self._daemons: dict[str, _Daemon] = {}
        self._shares: dict[tuple[str, str], _Share] = {}  # (pod uid, container)

    # ---- probe -----------------------------------------------------------------------------------

    def probe(self, gpu: Gpu, axis: Axis) -> ProbeResult:
        """Starts the daemon if need be and asks it; changes nothing else on the GPU."""
        problem = self._impossible(gpu)
        if problem is not None:
            return ProbeResult(Level.NONE, "", problem)
        daemon = self._daemon(gpu)
        with daemon.lock:
            self._ensure(daemon)
            if daemon.problem is not None:
                return ProbeResult(Level.NONE, "", daemon.problem)
            protocol = daemon.control.protocol
        how = "found" if daemon.run == 0 else "started"
        evidence = f"control daemon {how} at {daemon.control.pipe_dir}, protocol {protocol}"
        if axis is Axis.MEMORY:
            return ProbeResult(Level.COOPERATIVE, evidence)
        try:
            mode = self._mode(gpu.uuid)
            self._set_mode(gpu.uuid, mode)  # as it is: whether it may be set is what counts
        except IsolationError as e:
            return ProbeResult(Level.COOPERATIVE, f"{evidence}; {e}")
        if protocol == 2:
            return ProbeResult(Level.COOPERATIVE, f"{evidence}; values are in the container's environment")
        return ProbeResult(Level.HARD, f"{evidence}; compute mode can be set")

    def _impossible(self, gpu: Gpu) -> str | None:
        if not self._opted_in:
            return "not asked for: a client's fault hits its neighbours (isolation.allowMps, or name it)"
        if gpu.source != "nvml":
            return "MPS with limits is not confirmed on Jetson"
        if gpu.mig_enabled:
            return "not available while the GPU is in MIG mode"
        if gpu.compute_capability is not None and gpu.compute_capability < VOLTA:
            return "limits need a GPU of the Volta generation or newer"
        return None

    def _daemon(self, gpu: Gpu) -> _Daemon:
        with self._lock:
            known = self._daemons.get(gpu.uuid)
            if known is None:
                control = MpsControl(self._host, gpu.uuid, f"{self._root}/{gpu.uuid}", self._runner)
                known = self._daemons[gpu.uuid] = _Daemon(control, gpu)
            return known

    def _ensure(self, daemon: _Daemon) -> None:
        """Has a daemon run, or says in `problem` why none does. With its lock held."""
        daemon.namespaces = daemon.clients = None
        daemon.checked_s = self._clock()
        try:
            daemon.control.program()
            if not daemon.found:
                daemon.found = daemon.control.find()
            if daemon.found:
                try:
                    daemon.problem = daemon.control.fault()
                    return
                except IsolationError as e:
                    log.warning("MPS daemon does not answer gpu=%s: %s", daemon.gpu.uuid, e)
                    daemon.found = daemon.control.find()
                    if daemon.found:
                        daemon.problem = str(e)
                        return
            self._start(daemon)
        except IsolationError as e:
            daemon.problem = str(e)

    def _start(self, daemon: _Daemon) -> None:
        where = daemon.control.pipe_dir
        if not self._manage:
            raise IsolationError(f"no MPS control daemon answers at {where}, and the agent starts none here")
        if self._clock() - daemon.started_s < RESTART_PAUSE_S:
            raise IsolationError(f"the MPS control daemon at {where} ended; it is started again soon")
        foreign = daemon.control.foreign()
        if foreign is not None:
            raise IsolationError(
                f"another MPS control daemon runs at {foreign}: end it, or have it use {where}"
            )
        daemon.started_s = self._clock()
        branch = (daemon.gpu.driver_version or "").split(".")[0]
        newer = branch.isdigit() and int(branch) >= FIRST_PROTOCOL_3
        try:
            daemon.control.start(3 if newer else 2)
        except IsolationError:
            if not newer:
                raise
            daemon.control.start(2)
        daemon.run += 1
        daemon.found = True
        daemon.problem = None

    # ---- compute mode ----------------------------------------------------------------------------

    def _mode(self, uuid: str) -> str:
        if self._modes is None:
            raise IsolationError("compute modes cannot be read here")
        try:
            return self._modes.get_compute_mode(uuid)
        except GpuError as e:
            raise IsolationError(str(e)) from e

    def _set_mode(self, uuid: str, mode: str) -> None:
        assert self._modes is not None
        try:
            self._modes.set_compute_mode(uuid, mode)
        except GpuError as e:
            raise IsolationError(str(e)) from e

    def _exclusive(self, uuid: str) -> str | None:
        """Sees to it that only MPS uses the GPU; why it did not until now, or None."""
        try:
            mode = self._mode(uuid)
            if mode == EXCLUSIVE:
                return None
            self._set_mode(uuid, EXCLUSIVE)
        except IsolationError as e:
            return str(e)
        log.info("compute mode set gpu=%s mode=%s before=%s", uuid, EXCLUSIVE, mode)
        return f"compute mode was {mode}"

    # ---- before the start, and after the end -------------------------------------------------------

    def adopt(self, share: ShareToEnforce) -> None:
        with self._lock:
            self._shares[_key(share)] = _Share(share, self.axes, 0)

    def prepare(self, share: ShareToEnforce, axes: frozenset[Axis]) -> ContainerEdits:
        daemon = self._daemon(share.gpu)
        with daemon.lock:
            if daemon.problem is not None or not self._is_fresh(daemon):
                self._ensure(daemon)
            if daemon.problem is not None:
                raise IsolationError(daemon.problem)
            with self._lock:
                others = [s for k, s in self._shares.items() if k != _key(share)]
                if sum(s.share.gpu.uuid == share.gpu.uuid for s in others) >= MAX_CLIENTS:
                    raise IsolationError(f"{MAX_CLIENTS} containers share this GPU, more MPS does not take")
            daemon.needed = True
            self._exclusive(share.gpu.uuid)
            memory_mib = share.memory_mib if Axis.MEMORY in axes else None
            threads = (share.cores_pct or 100) if Axis.COMPUTE in axes else None
            if daemon.control.protocol == 3:
                daemon.namespaces = None
                daemon.control.make_namespace(share.share, memory_mib, threads)
                pipe_dir, env = daemon.control.namespace_dir(share.share), {PIPE_ENV: PIPE_DIR}
            else:
                pipe_dir, env = daemon.control.pipe_dir, self._environment(share, axes)
            if not share.early:
                with self._lock:
                    self._shares[_key(share)] = _Share(share, axes, daemon.run)
        # The daemon's own /dev/shm: clients and servers meet there.
        mounts = (Mount(pipe_dir, PIPE_DIR, _MOUNT), Mount("/dev/shm", "/dev/shm", _MOUNT))  # noqa: S108
        return ContainerEdits(env=env, mounts=mounts)

    @staticmethod
    def _environment(share: ShareToEnforce, axes: frozenset[Axis]) -> dict[str, str]:
        """Protocol 2. Device 0 is the daemon's one GPU: a limit for one that the client cannot see would
        void all limits."""
        env = {PIPE_ENV: PIPE_DIR}
        if Axis.MEMORY in axes:
            env[MEMORY_ENV] = f"0={share.memory_mib}M"
        if Axis.COMPUTE in axes and share.cores_pct is not None:
            env[THREADS_ENV] = str(share.cores_pct)
        return env

    def release(self, share: ShareToEnforce) -> None:
        with self._lock:
            known = self._shares.pop(_key(share), None)
            daemon = self._daemons.get(share.gpu.uuid)
        if known is None or daemon is None:
            return
        with daemon.lock:
            if daemon.control.protocol == 3 and daemon.found and known.run == daemon.run:
                daemon.namespaces = None
                if share.share in daemon.control.namespaces():
                    daemon.control.remove_namespace(share.share)

    def close(self) -> None:
        """Ends daemons that were started to be tried only. The others outlive the agent, as the
        containers on them do."""
        with self._lock:
            unused = [d for d in self._daemons.values() if d.run and d.found and not d.needed]
        for daemon in unused:
            try:
                daemon.control.quit()
            except IsolationError as e:
                log.warning("MPS daemon not ended gpu=%s: %s", daemon.gpu.uuid, e)

    # ---- health ----------------------------------------------------------------------------------

    def tend(self) -> None:
        """Looks at every daemon that containers depend on, and starts again those that ended."""
        with self._lock:
            adopted = {s.share.gpu.uuid for s in self._shares.values()}
            daemons = [d for d in self._daemons.values() if d.needed or d.gpu.uuid in adopted]
        for daemon in daemons:
            with daemon.lock:
                daemon.needed = True
                self._ensure(daemon)

    def problem(self, uuid: str) -> str | None:
        """Why the daemon that containers of a GPU depend on is of no use, as of the last look."""
        daemon = self._daemons.get(uuid)
        return daemon.problem if daemon is not None and daemon.needed else None

    def terminate_client(self, pid: int) -> bool:
        """Has MPS end a client's work in order; whether it did. Never longer than a few seconds."""
        with self._lock:
            daemons = [d for d in self._daemons.values() if d.found]
        for daemon in daemons:
            try:
                if daemon.control.terminate(pid):
                    return True
            except IsolationError as e:
                log.warning("MPS client not terminated pid=%s gpu=%s: %s", pid, daemon.gpu.uuid, e)
        return False

    # ---- evidence --------------------------------------------------------------------------------

    def evidence(self, share: ShareToEnforce, running: RunningContainer, axis: Axis) -> AxisLevel:
        """The daemon answers, all of the container's GPU processes are its clients, and the limits read
        back: in the namespace, or in the processes' environment."""
        with self._lock:
            known = self._shares.get(_key(share))
            daemon = self._daemons.get(share.gpu.uuid)
        if known is None or daemon is None:
            return self._none("not_set_at_start", "it was started without MPS")
        with daemon.lock:
            if not self._is_fresh(daemon):
                self._ensure(daemon)
            if daemon.problem is not None:
                return self._none("mps_daemon", daemon.problem)
            if daemon.control.protocol == 3 and known.run != daemon.run:
                return self._none("mps_daemon_restarted", "its daemon ended; it has to start again too")
            if not running.pids and not running.gpu_pids:
                return self._none("not_running", "no process is seen")
            try:
                seen = self._clients_only(daemon, running) or (
                    self._in_namespace(daemon, known, running, axis)
                    if daemon.control.protocol == 3
                    else self._in_environment(known, running, axis)
                )
            except IsolationError as e:
                return self._none("limit_not_readable", str(e))
            if seen is not None:
                return seen
            return self._claim(daemon, share, axis)

    def _claim(self, daemon: _Daemon, share: ShareToEnforce, axis: Axis) -> AxisLevel:
        three = daemon.control.protocol == 3
        what = "limits of its namespace read back" if three else "limits are in its environment"
        open_before = self._exclusive(share.gpu.uuid)
        if axis is Axis.COMPUTE and open_before is None and three:
            return AxisLevel(Level.HARD, self.name, f"{what}; compute mode is {EXCLUSIVE}")
        reason = None
        if open_before is not None:
            reason, what = "compute_mode_changed", f"{what}; {open_before}"
        elif axis is Axis.COMPUTE:
            reason = "limit_in_environment"
        return AxisLevel(Level.COOPERATIVE, self.name, what, reason)

    def _clients_only(self, daemon: _Daemon, running: RunningContainer) -> AxisLevel | None:
        if len(running.gpu_pids) > 1:
            return self._none(
                "several_clients", f"{len(running.gpu_pids)} processes use the GPU, each up to the limit"
            )
        outside = set(running.gpu_pids) - running.mps_pids
        if outside:
            if daemon.clients is None:
                daemon.clients = frozenset(daemon.control.clients())
            outside -= daemon.clients
        if outside:
            return self._none("not_mps_client", f"process {min(outside)} uses the GPU without MPS")
        return None

    def _in_namespace(
        self, daemon: _Daemon, known: _Share, running: RunningContainer, axis: Axis
    ) -> AxisLevel | None:
        share = known.share
        if axis is Axis.MEMORY:
            for pid in running.gpu_pids:
                if MEMORY_ENV in self._environ(pid):
                    return self._none("opted_out", f"process {pid} sets {MEMORY_ENV}, which can void limits")
        if daemon.namespaces is None:
            daemon.namespaces = daemon.control.namespaces()
        now = daemon.namespaces.get(share.share)
        if now is None:
            return self._none("limit_not_readable", f"the daemon has no namespace {share.share}")
        is_mib, wanted = (
            (now.memory_mib, share.memory_mib)
            if axis is Axis.MEMORY
            else (now.thread_pct, share.cores_pct or 100)
        )
        if is_mib == wanted:
            return None
        log.warning("somebody changed an MPS limit, set again share=%s axis=%s", share.share, axis.value)
        daemon.namespaces = None
        daemon.control.limit_namespace(
            share.share,
            share.memory_mib if axis is Axis.MEMORY else None,
            (share.cores_pct or 100) if axis is Axis.COMPUTE else None,
        )
        return self._none("limit_changed", f"read {is_mib} instead of {wanted}; set again")

    def _in_environment(self, known: _Share, running: RunningContainer, axis: Axis) -> AxisLevel | None:
        wanted = self._environment(known.share, frozenset({axis}))
        for pid in running.gpu_pids or running.pids[:1]:
            environ = self._environ(pid)
            for key, value in wanted.items():
                if environ.get(key) != value:
                    now = f"{key}={environ[key]}" if key in environ else f"no {key}"
                    return self._none("opted_out", f"process {pid} has {now} instead of {value}")
        return None

    def _environ(self, pid: int) -> dict[str, str]:
        data = self._host.read_bytes(f"/proc/{pid}/environ", _MAX_ENVIRON_BYTES) or b""
        pairs = (item.partition("=") for item in data.decode("utf-8", "replace").split("\0"))
        return {key: value for key, equals, value in pairs if equals}

    def _is_fresh(self, daemon: _Daemon) -> bool:
        return daemon.found and self._clock() - daemon.checked_s < FRESH_S

    def _none(self, reason: str, evidence: str) -> AxisLevel:
        return AxisLevel(Level.NONE, self.name, evidence, reason)


def _key(share: ShareToEnforce) -> tuple[str, str]:
    return share.pod_uid, share.container
