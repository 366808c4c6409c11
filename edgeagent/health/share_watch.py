"""What each share's container really uses, and how far its limits are proved, look after look.

Joins the bound shares with cgroups, processes and the driver's process lists, asks the isolation
mechanisms for evidence, and hands use against limit to the watchdog.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgeagent.gpus.model import Gpu, GpuReading
from edgeagent.health.usage import ContainerUse, GpuUsage, attribute
from edgeagent.hostroot import HostRoot
from edgeagent.isolation.backend import RunningContainer, ShareToEnforce
from edgeagent.isolation.levels import Levels
from edgeagent.isolation.manager import IsolationManager
from edgeagent.isolation.watchdog import WatchedUse
from edgeagent.node.cgroups import PodCgroups
from edgeagent.node.podlogs import PodLogs
from edgeagent.node.processes import Processes

log = logging.getLogger(__name__)

Key = tuple[str, str]  # pod UID, container


@dataclass(frozen=True, slots=True)
class ShareSight:
    """One share as last seen. `use` None: the driver lists none of its processes (or lists none at
    all); `running` False: the container has no process."""

    levels: Levels
    use: ContainerUse | None
    running: bool


class ShareWatch:
    """`shares()` are the containers bound to a GPU; `read(uuid)` is one poll of a GPU."""

    def __init__(
        self,
        host: HostRoot,
        isolation: IsolationManager,
        cgroups: PodCgroups,
        processes: Processes,
        logs: PodLogs,
        shares: Callable[[], Sequence[ShareToEnforce]],
        read: Callable[[str], GpuReading],
    ) -> None:
        self._host = host
        self._isolation = isolation
        self._cgroups = cgroups
        self._processes = processes
        self._logs = logs
        self._shares = shares
        self._read = read
        self._lock = threading.Lock()
        self._seen: Mapping[Key, ShareSight] = {}

    def usage(self, gpu: Gpu, reading: GpuReading) -> GpuUsage:
        """Who uses a GPU, from one reading of it."""
        pids = [p.pid for p in reading.processes or ()]
        return attribute(gpu, reading, self._processes.find_all(pids), self._container_name)

    def _container_name(self, container_id: str) -> str | None:
        name = self._logs.container(container_id)
        return name.container if name is not None else None

    def seen(self, pod_uid: str, container: str) -> ShareSight | None:
        with self._lock:
            return self._seen.get((pod_uid, container))

    def levels(self) -> dict[Key, tuple[object, ...]]:
        """What is claimed of each share, without the evidence's wording."""
        with self._lock:
            seen = dict(self._seen)
        return {
            key: tuple((a.level, a.mechanism, a.reason) for a in (sight.levels.memory, sight.levels.compute))
            for key, sight in seen.items()
        }

    def measure(self) -> list[WatchedUse]:
        """One look at every share: what the watchdog compares. Costs nothing where there is none."""
        shares = self._shares()
        usages: dict[str, GpuUsage] = {}
        for share in shares:
            if share.gpu.uuid not in usages:
                reading = self._read(share.gpu.uuid)
                usages[share.gpu.uuid] = (
                    self.usage(share.gpu, reading)
                    if reading.fault is None
                    else GpuUsage(share.gpu.uuid, None)
                )
        sharers = Counter((share.pod_uid, share.gpu.uuid) for share in shares)
        seen: dict[Key, ShareSight] = {}
        watched: list[WatchedUse] = []
        for share in shares:
            usage = usages[share.gpu.uuid]
            containers = self._cgroups.containers(share.pod_uid)
            container_id = self._container_id(share, containers)
            use = _use(share, usage, container_id, alone=sharers[share.pod_uid, share.gpu.uuid] == 1)
            # A list without the container's processes means it uses nothing; no list means nobody knows.
            used_mib = use.used_mib if use is not None else (0.0 if usage.host is not None else None)
            running = RunningContainer(
                container_id,
                self._cgroups.container_dir(share.pod_uid, container_id) if container_id else None,
                containers.get(container_id, ()) if container_id else (),
                use.pids if use is not None else (),
                used_mib,
                use.mps_pids if use is not None else frozenset(),
            )
            seen[share.pod_uid, share.container] = ShareSight(
                self._isolation.observe(share, running), use, bool(running.pids)
            )
            watched.append(
                WatchedUse(
                    share.pod_uid,
                    share.container,
                    share.gpu.uuid,
                    share.memory_mib,
                    used_mib,
                    use.processes if use is not None else (),
                    running.mps_pids,
                )
            )
        with self._lock:
            self._seen = seen
        return watched

    def _container_id(self, share: ShareToEnforce, containers: Mapping[str, tuple[int, ...]]) -> str | None:
        """Which of the pod's container ids is the share's: by its log's name, else by the share's own
        environment in one of its processes."""
        for container_id in containers:
            if self._container_name(container_id) == share.container:
                return container_id
        mark = f"EDGEAGENT_SHARE={share.share}".encode()
        for container_id, pids in containers.items():
            for pid in pids[:1]:
                environ = self._host.read_bytes(f"/proc/{pid}/environ") or b""
                if mark in environ.split(b"\0"):
                    return container_id
        return None


def _use(
    share: ShareToEnforce, usage: GpuUsage, container_id: str | None, *, alone: bool
) -> ContainerUse | None:
    """What the share's container uses. `alone`: no other container of its pod has a share of this GPU,
    so whatever the pod uses without a known container is its own."""
    exact = [c for c in usage.containers if c.pod_uid == share.pod_uid and c.container_id == container_id]
    if container_id is not None and exact:
        return exact[0]
    use = usage.of(share.pod_uid, share.container)
    if use is not None and (alone or use.container == share.container):
        return use
    return None
