"""Puts the node's picture together from what the parts know. Pure: no I/O, no locks, no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from edgeagent.gpus.model import GpuFault
from edgeagent.health.monitor import GpuHealth, HealthState
from edgeagent.health.share_watch import ShareSight
from edgeagent.isolation.levels import Levels
from edgeagent.kubelet.offers import GpuOffer
from edgeagent.kubelet.plugin import GpuRoom
from edgeagent.snapshot import (
    ContainerShare,
    GpuMode,
    GpuState,
    Health,
    HostFacts,
    NodeSnapshot,
    NodeState,
    ResourceState,
    UplinkState,
    WaitingContainer,
)


@dataclass(frozen=True, slots=True)
class Identity:
    """What does not change while the agent runs."""

    node: str
    site: str
    agent_version: str
    started_ms: int
    binding: str


@dataclass(frozen=True, slots=True)
class KubeletPart:
    """The kubelet side's contribution. `expected`: a resource ought to be registered."""

    offers: Sequence[GpuOffer]
    room: Callable[[str], GpuRoom]
    containers: Sequence[ContainerShare]
    waiting: Sequence[WaitingContainer]
    resources: Sequence[ResourceState]
    problems: Sequence[str]
    connected: bool
    memory_unit_mib: int


def build(
    identity: Identity,
    config_hash: str,
    now_ms: int,
    health: HealthState,
    kubelet: KubeletPart,
    levels: Callable[[str], Levels],
    sight: Callable[[str, str], ShareSight | None],
    over_limit: frozenset[tuple[str, str, str]],
    isolation_problems: Sequence[str],
    host: HostFacts,
    uplink: UplinkState,
    counters: Mapping[str, int],
    draining: bool,
) -> NodeSnapshot:
    """The snapshot. `over_limit`: (pod UID, container, GPU) of containers over their limit now."""
    gpus = tuple(
        _gpu_state(offer, health.gpus.get(offer.uuid), kubelet.room(offer.uuid), levels(offer.uuid))
        for offer in kubelet.offers
    )
    containers = tuple(_container(c, sight(c.pod_uid, c.container), over_limit) for c in kubelet.containers)
    reasons = _reasons(health, kubelet, isolation_problems, containers)
    state = NodeState.DRAINING if draining else NodeState.READY
    return NodeSnapshot(
        node=identity.node,
        site=identity.site,
        agent_version=identity.agent_version,
        config_hash=config_hash,
        started_ms=identity.started_ms,
        taken_ms=now_ms,
        state=state,
        health=_overall(gpus, health, reasons),
        reasons=reasons,
        gpus=gpus,
        containers=containers,
        waiting=tuple(kubelet.waiting),
        resources=tuple(kubelet.resources),
        host=host,
        uplink=uplink,
        conditions=health.conditions,
        binding=identity.binding,
        memory_unit_mib=kubelet.memory_unit_mib,
        kubelet_connected=kubelet.connected,
        evidence=health.inventory.evidence,
        counters=counters,
    )


def _gpu_state(offer: GpuOffer, seen: GpuHealth | None, room: GpuRoom, levels: Levels) -> GpuState:
    shared = offer.mode is GpuMode.SHARED
    conditions = seen.conditions if seen is not None else ()
    sick = offer.unusable is not None
    usage = seen.usage if seen is not None else None
    return GpuState(
        gpu=offer.gpu,
        mode=offer.mode,
        health=Health.SICK if sick else (Health.DEGRADED if conditions else Health.OK),
        usable_mib=offer.usable_mib,
        reserved_mib=offer.reserved_mib,
        promised_mib=room.promised_mib if shared else 0,
        free_mib=room.free_mib if shared else 0,
        promised_cores_pct=room.promised_cores_pct if shared else 0,
        free_cores_pct=room.free_cores_pct if shared else 0,
        cordoned=offer.cordoned,
        present=offer.present,
        reading=seen.reading if seen is not None else None,
        levels=levels if shared else Levels(),  # other modes set no limits
        conditions=conditions,
        host_use=usage.host if usage is not None else None,
        unattributed_mib=usage.unattributed_mib if usage is not None else None,
        withdrawn_mib=offer.withdrawn_mib,
    )


def _container(
    share: ContainerShare, sight: ShareSight | None, over_limit: frozenset[tuple[str, str, str]]
) -> ContainerShare:
    if sight is None:
        return share
    use = sight.use
    return replace(
        share,
        used_mib=use.used_mib if use is not None else share.used_mib,
        util_pct=use.util_pct if use is not None else share.util_pct,
        levels=sight.levels,
        running=sight.running or share.running,
        over_limit=(share.pod_uid, share.container, share.gpu_uuid) in over_limit,
    )


def _reasons(
    health: HealthState,
    kubelet: KubeletPart,
    isolation_problems: Sequence[str],
    containers: Sequence[ContainerShare],
) -> tuple[str, ...]:
    """One sentence each, the worst first."""
    found = [c.message for c in health.conditions]
    if not health.inventory.gpus and not health.gpus and health.polls:
        found.append(health.inventory.problem or "no GPU was found")
    elif not health.polls:
        found.append("looking for GPUs")
    for gpu in health.gpus.values():
        found += [c.message for c in gpu.conditions]
    if not kubelet.connected and health.gpus:
        found.append("the kubelet does not listen to this agent yet: is K3s running?")
    found += kubelet.problems
    found += isolation_problems
    over = [c for c in containers if c.over_limit]
    found += [f"{c.pod_label} container {c.container} is over its memory limit" for c in over]
    return tuple(dict.fromkeys(found))


def _overall(gpus: Sequence[GpuState], health: HealthState, reasons: Sequence[str]) -> Health:
    nothing_works = health.inventory.fault not in (None, GpuFault.NOT_FOUND) and not health.inventory.gpus
    if nothing_works or any(g.health is Health.SICK for g in gpus):
        return Health.SICK
    return Health.DEGRADED if reasons else Health.OK
