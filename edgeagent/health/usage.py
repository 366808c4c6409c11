"""Who uses a GPU's memory: each container, the host, and what cannot be attributed.

The parts sum to the card's used memory. Where the process lists add up to more than the card reports
(the two are read one after the other), the sum counts as used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from edgeagent.gpus.model import Gpu, GpuProcess, GpuReading, ProcessType
from edgeagent.node.cgroups import OwnerKind
from edgeagent.node.processes import ProcessInfo
from edgeagent.snapshot import HostUse

# Above this share of the card's memory a per-process number is a wrapped or stale one, not a use.
_PLAUSIBLE = 1.05


@dataclass(frozen=True, slots=True)
class ContainerUse:
    """One container's use of one GPU, all its processes together. `container_id` None: the pod is
    known, the container is not. `used_mib`/`util_pct` None: the driver does not tell."""

    pod_uid: str
    container_id: str | None
    used_mib: float | None
    util_pct: float | None
    processes: tuple[ProcessInfo, ...]
    container: str | None = None
    mps_pids: frozenset[int] = frozenset()  # clients of an MPS daemon: never to be killed outright

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(p.pid for p in self.processes)


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """One GPU's memory by user. `host` None: the driver lists no processes, so nobody can say."""

    uuid: str
    used_mib: float | None
    containers: tuple[ContainerUse, ...] = ()
    host: HostUse | None = None
    unattributed_mib: float | None = None
    incomplete: bool = False  # of some processes it is not known whose they are, or what they use

    def of(self, pod_uid: str, container: str | None = None) -> ContainerUse | None:
        """The use of one container; of the whole pod where `container` is None or where it is not
        known which container the pod's processes are in."""
        pod = [c for c in self.containers if c.pod_uid == pod_uid]
        if container is not None:
            named = [c for c in pod if c.container == container]
            pod = named or [c for c in pod if c.container is None]
        return _together(pod)

    def beyond_promises_mib(self, holders: Iterable[str]) -> float | None:
        """MiB used by anything but the pods in `holders` (pod UIDs with a share of this GPU). What
        cannot be attributed counts, unless it may be theirs."""
        if self.host is None:
            return None
        held = set(holders)
        others = sum(c.used_mib or 0.0 for c in self.containers if c.pod_uid not in held)
        unattributed = 0.0 if self.incomplete else self.unattributed_mib or 0.0
        return self.host.used_mib + others + unattributed


def attribute(
    gpu: Gpu,
    reading: GpuReading,
    processes: Mapping[int, ProcessInfo],
    container_name: Callable[[str], str | None] = lambda _: None,
) -> GpuUsage:
    """Joins a reading's process list with what is known of the processes.

    A PID missing in `processes` has vanished since: it is skipped, and what the card still counts for
    it is unattributed. On unified memory the card's own number is the process lists' sum.
    """
    if reading.processes is None:
        return GpuUsage(gpu.uuid, reading.memory_used_mib)
    members: dict[tuple[str, str | None], list[tuple[ProcessInfo, GpuProcess]]] = {}
    host: list[tuple[int, str, float | None]] = []
    for p in sorted(reading.processes, key=lambda p: p.pid):
        info = processes.get(p.pid)
        if info is None:
            continue
        if info.owner.kind is OwnerKind.POD and info.owner.pod_uid is not None:
            members.setdefault((info.owner.pod_uid, info.owner.container_id), []).append((info, p))
        elif info.owner.kind is OwnerKind.HOST:
            host.append((p.pid, p.name or info.name, _plausible(gpu, p.used_mib)))
    containers = tuple(
        ContainerUse(
            pod_uid,
            container_id,
            _sum(_plausible(gpu, p.used_mib) for _, p in found),
            _sum(p.sm_util_pct for _, p in found),
            tuple(info for info, _ in found),
            container_name(container_id) if container_id else None,
            frozenset(p.pid for _, p in found if ProcessType.MPS in p.types),
        )
        for (pod_uid, container_id), found in sorted(members.items(), key=lambda m: (m[0][0], m[0][1] or ""))
    )
    host_mib = _sum(mib for _, _, mib in host) or 0.0
    attributed = host_mib + sum(c.used_mib or 0.0 for c in containers)
    used = attributed if gpu.unified_memory else reading.memory_used_mib
    if used is not None:
        used = max(used, attributed)
    return GpuUsage(
        gpu.uuid,
        used,
        containers,
        HostUse(host_mib, tuple(host)),
        None if used is None else used - attributed,
        incomplete=any(
            info.owner.kind is OwnerKind.UNKNOWN or _plausible(gpu, p.used_mib) is None
            for p in reading.processes
            if (info := processes.get(p.pid)) is not None
        ),
    )


def _together(parts: list[ContainerUse]) -> ContainerUse | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return ContainerUse(
        parts[0].pod_uid,
        None,
        _sum(c.used_mib for c in parts),
        _sum(c.util_pct for c in parts),
        tuple(p for c in parts for p in c.processes),
        parts[0].container,
        frozenset(pid for c in parts for pid in c.mps_pids),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    """The sum of what is known; None when nothing is."""
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def _plausible(gpu: Gpu, used_mib: float | None) -> float | None:
    if used_mib is None or not 0 <= used_mib <= gpu.memory_total_mib * _PLAUSIBLE:
        return None
    return used_mib
