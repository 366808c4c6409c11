"""What happens on the node, told to whoever should know: the fleet, the cluster, the counters.

Nothing here decides or waits; the uplink and the cluster link only note what they are given.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from edgeagent.cluster import ClusterLink
from edgeagent.gpus.model import Gpu
from edgeagent.health.conditions import ConditionType
from edgeagent.health.monitor import HealthChange, SeenEvent
from edgeagent.isolation.backend import ShareToEnforce
from edgeagent.isolation.levels import Axis, AxisLevel
from edgeagent.isolation.watchdog import OverLimit
from edgeagent.kubelet.gate import AllocEvent
from edgeagent.node.apiserver import PodRef
from edgeagent.node.kmsg import OomKill
from edgeagent.snapshot import Condition, ContainerShare

if TYPE_CHECKING:  # imported where an uplink is wanted
    from edgeagent.fleet.publisher import Uplink

log = logging.getLogger(__name__)

_HEAT_AND_POWER = (ConditionType.THERMAL_SLOWDOWN, ConditionType.OVER_TEMPERATURE, ConditionType.POWER_BRAKE)

PodName = Callable[[str], tuple[str, str] | None]


class Notices:
    """`pod_name(uid)` and `gpu(uuid)` answer from memory. `uplink` and `cluster` are set once they are
    made; None where they are not wanted."""

    def __init__(self, pod_name: PodName, gpu: Callable[[str], Gpu | None]) -> None:
        self._pod_name = pod_name
        self._gpu = gpu
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self.uplink: Uplink | None = None
        self.cluster: ClusterLink | None = None

    @property
    def counters(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + 1

    def changed(self) -> None:
        """The snapshot may be another one now."""
        if self.uplink is not None:
            self.uplink.changed()

    def conditions(self, change: HealthChange) -> None:
        """Alerts say what is true now; these say what was, also while the link was down."""
        for c in change.raised:
            self._condition(c, "condition_raised", c.severity)
        for c in change.cleared:
            self._condition(c, "condition_cleared", "info")

    def _condition(self, c: Condition, type_: str, severity: str) -> None:
        if self.uplink is not None:
            self.uplink.event(
                "thermal" if c.type in _HEAT_AND_POWER else "agent", type_, c.message, severity=severity,
                gpu_uuid=c.gpu_uuid, facts={**c.facts, "condition": c.type, "since": c.since_ms},
            )  # fmt: skip

    def gpu_event(self, seen: SeenEvent) -> None:
        event = seen.event
        self._count(f"gpu_events_{event.kind.value}_total")
        if self.uplink is None:
            return
        what = f"XID {event.xid}" if event.xid is not None else event.kind.value
        name = f" ({seen.xid.name})" if seen.xid is not None else ""
        fatal = seen.xid is not None and seen.xid.xid_class.makes_unhealthy
        self.uplink.event(
            "xid",
            event.kind.value,
            f"{what}{name} on GPU {seen.gpu.index if seen.gpu else 'unknown'}",
            severity="critical" if fatal else "warning",
            gpu_uuid=event.uuid,
            facts={
                **({"xid": event.xid} if event.xid is not None else {}),
                **({"detail": event.detail} if event.detail else {}),
                **({"repeats": seen.repeats} if seen.repeats else {}),
            },
        )

    def alloc_event(self, event: AllocEvent) -> None:
        self._count(f"alloc_{event.kind}_total")
        if self.uplink is None:
            return
        name = self._pod_name(event.pod_uid) if event.pod_uid else None
        self.uplink.event(
            "alloc",
            event.kind,
            event.message or self._said(event),
            severity="info" if event.kind in ("bound", "released", "waiting") else "warning",
            gpu_uuid=event.gpu_uuid,
            namespace=name[0] if name else None,
            pod=name[1] if name else None,
            container=event.container or None,
            facts={"code": event.code} if event.code else None,
        )

    def _said(self, event: AllocEvent) -> str:
        gpu = self._gpu(event.gpu_uuid) if event.gpu_uuid else None
        where = f" on GPU {gpu.index} ({gpu.model})" if gpu is not None else ""
        if event.kind == "bound":
            return f"container {event.container} starts{where}"
        return "its share is free again" if event.kind == "released" else event.kind

    def over_limit(self, over: OverLimit) -> None:
        use = over.use
        message = (
            f"uses {use.used_mib or 0:.0f} MiB of GPU memory, its limit is {use.limit_mib} ({over.action})"
        )
        name = self._pod_name(use.pod_uid)
        if self.cluster is not None and name is not None:
            self.cluster.pod_event("GpuMemoryOverLimit", message, PodRef(*name, use.pod_uid))
        if self.uplink is not None:
            self.uplink.event(
                "overlimit", "over_limit", message, severity="warning", gpu_uuid=use.gpu_uuid,
                namespace=name[0] if name else None, pod=name[1] if name else None,
                container=use.container, facts={"limitMiB": use.limit_mib, "usedMiB": use.used_mib or 0},
            )  # fmt: skip
        self.changed()

    def oom_kill(self, share: ContainerShare, killed: OomKill) -> None:
        """`share`: of the pod, with the container where that is known."""
        self._count("oom_kills_total")
        if self.uplink is not None:
            self.uplink.event(
                "oom", "oom_kill", f"the kernel ended {killed.name} (pid {killed.pid}) for lack of memory",
                severity="warning", gpu_uuid=share.gpu_uuid, namespace=share.namespace, pod=share.pod,
                container=share.container or None, facts={"pid": killed.pid, "process": killed.name},
            )  # fmt: skip

    def level_lost(self, share: ShareToEnforce, axis: Axis, before: AxisLevel, now: AxisLevel) -> None:
        self._count("isolation_levels_lost_total")
        message = (
            f"{axis.value} limit is no longer proved: {before.level.value} -> {now.level.value} "
            f"({now.reason or 'no evidence'})"
        )
        name = self._pod_name(share.pod_uid)
        if self.cluster is not None and name is not None:
            text = f"container {share.container}: {message}"
            self.cluster.pod_event("GpuLimitNotProved", text, PodRef(*name, share.pod_uid))
        if self.uplink is not None:
            self.uplink.event(
                "agent", "level_lost", message, severity="warning", gpu_uuid=share.gpu.uuid,
                namespace=name[0] if name else None, pod=name[1] if name else None,
                container=share.container,
                facts={"axis": axis.value, "reason": now.reason or "", "evidence": now.evidence},
            )  # fmt: skip
        self.changed()

    def evict(self, pod_uid: str, reason: str, message: str) -> bool:
        """Asks the API server to end a pod; whether that could be asked for."""
        name = self._pod_name(pod_uid)
        if self.cluster is None or name is None:
            log.warning("cannot evict, no API server access pod=%s reason=%s", pod_uid, message)
            return False
        self.cluster.evict(PodRef(*name, pod_uid), reason, message)
        return True

    def evict_waiting(self, pod_uid: str, reason: str) -> None:
        self.evict(pod_uid, "GpuShareWaitedTooLong", reason)

    def evict_over_limit(self, over: OverLimit) -> None:
        self.evict(over.use.pod_uid, "GpuMemoryOverLimit", f"over its limit of {over.use.limit_mib} MiB")
