"""Which resources a node offers, from its GPUs and the configuration. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edgeagent.config.schema import SharingConfig
from edgeagent.gpus.model import GpuLink, Topology
from edgeagent.kubelet.named import NamedDevice, NamedPlan
from edgeagent.kubelet.offers import Offers
from edgeagent.sharing import names as resource_names
from edgeagent.sharing import units
from edgeagent.sharing.modes import GpuMode
from edgeagent.sharing.names import ResourceNames
from edgeagent.sharing.tokens import CORES, MEMORY, NUMBER, Amounts
from edgeagent.sharing.topology import Link, Links


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be offered. `problems`: resource -> why it is not."""

    tokens: Mapping[str, str] = field(default_factory=dict)  # resource -> letter
    named: Mapping[str, NamedPlan] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def resources(self) -> frozenset[str]:
        return frozenset((*self.tokens, *self.named))


def letters(names: ResourceNames) -> dict[str, str]:
    """The token resources of the shared mode and their letters."""
    return {names.memory: MEMORY, names.cores: CORES, names.number: NUMBER}


def make_plan(
    offers: Offers,
    config: SharingConfig,
    names: ResourceNames,
    offered: Amounts,
    *,
    links: Links,
    cluster_version: str | None = None,
) -> Plan:
    """`offered`: what the ledger lists so far (never less than before)."""
    problems: dict[str, str] = {}
    notes: list[str] = []
    tokens: dict[str, str] = {}
    shared = offers.in_mode(GpuMode.SHARED)
    if shared or any(offered):
        sized = units.memory_units([offer.usable_mib for offer in shared], names.unit_mib, cluster_version)
        problem = sized.problem
        if problem is None and offered.memory > units.max_count():
            problem = (
                f"cannot offer {offered.memory} units of {names.unit_mib} MiB: the kubelet takes at most "
                f"{units.max_count()}; set a coarser memoryUnitMiB"
            )
        if problem is not None:
            problems.update(dict.fromkeys(letters(names), problem))
        else:
            tokens = letters(names)
        if sized.warning is not None:
            notes.append(sized.warning)
    if names.note is not None and tokens:
        notes.append(names.note)
    named = named_plans(offers, config, links)
    by_mode = {mode: [p.resource for p in named if p.mode is mode] for mode in GpuMode}
    clashes = resource_names.collisions(
        names if tokens else None, by_mode[GpuMode.EXCLUSIVE], by_mode[GpuMode.TIMESLICE]
    )
    used: dict[str, NamedPlan] = {}
    for plan in named:
        if plan.resource in tokens or plan.resource in used:
            problems[plan.resource] = next((c for c in clashes if plan.resource in c), "named twice")
        else:
            used[plan.resource] = plan
    return Plan(tokens, used, problems, tuple(notes))


def named_plans(offers: Offers, config: SharingConfig, links: Links) -> list[NamedPlan]:
    """In a fixed order: with a clash of names, whole cards come first."""
    block = config.time_slicing
    renamed = block is not None and block.rename_by_default
    fail_above_one = block is not None and block.fail_requests_greater_than_one
    found: dict[tuple[str, GpuMode], list[NamedDevice]] = {}
    for offer in offers.gpus:
        gpu = offer.gpu
        if offer.mode is GpuMode.EXCLUSIVE:
            device = NamedDevice(gpu.uuid, gpu, None, 1, offer.unusable, offer.nothing_new)
            found.setdefault((resource_names.GPU, offer.mode), []).append(device)
        elif offer.mode is GpuMode.TIMESLICE:
            name = resource_names.timeslice_name(resource_names.GPU, renamed=renamed)
            device = NamedDevice(gpu.uuid, gpu, None, offer.replicas, offer.unusable, offer.nothing_new)
            found.setdefault((name, offer.mode), []).append(device)
        elif offer.mode is GpuMode.MIG:
            for instance in gpu.mig_instances:
                replicas = offer.mig_replicas.get(instance.profile, 1)
                name = resource_names.mig_name(instance.profile)
                name = resource_names.timeslice_name(name, renamed=renamed and replicas > 1)
                device = NamedDevice(
                    instance.uuid, gpu, instance, replicas, offer.unusable, offer.nothing_new
                )
                found.setdefault((name, offer.mode), []).append(device)
    order = (GpuMode.EXCLUSIVE, GpuMode.TIMESLICE, GpuMode.MIG)
    return [
        NamedPlan(
            name, mode, tuple(devices), links,
            fail_above_one and any(d.replicas > 1 for d in devices),
        )
        for (name, mode), devices in sorted(found.items(), key=lambda item: order.index(item[0][1]))
    ]  # fmt: skip


def links_of(topology: Topology) -> Links:
    """The inventory's links as sharing/topology.py counts them."""
    return {pair: _score(link) for pair, link in topology.items()}


def _score(link: GpuLink) -> int:
    if link.kind == "nvlink":
        return Link.NVLINK * max(1, link.nvlinks)
    if link.kind in ("board", "pix", "pxb"):
        return Link.PCIE_SWITCH
    return Link.NUMA_NODE if link.kind in ("phb", "node") else Link.FAR


def unit_in_name(resource: str, base: str) -> int | None:
    """The unit of a memory resource's name (`…-64mi`); None where it is no memory resource of ours."""
    if resource == base:
        return 1
    unit = resource.removeprefix(f"{base}-").removesuffix("mi")
    return int(unit) if resource == f"{base}-{unit}mi" and unit.isascii() and unit.isdigit() else None
