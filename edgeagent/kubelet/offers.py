"""How each GPU is offered: the configuration's rules applied to the GPUs that were found."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from edgeagent.config.schema import SharingConfig
from edgeagent.gpus.model import Gpu
from edgeagent.sharing import units
from edgeagent.sharing.modes import (
    GpuFacts,
    GpuMode,
    ModeDefaults,
    ModePlan,
    ModeRule,
    TimeSlicingBlock,
    plan_modes,
)


@dataclass(frozen=True, slots=True)
class GpuOffer:
    """One GPU as the kubelet side offers it. `usable_mib` may be promised, `reserved_mib` not.
    `sick` and `closed` (it takes nothing new: the host uses more than its reserve) are reasons in
    words, or None; `present` False: it has been here and is not now. `withdrawn_mib` of what is usable
    are not promised to anybody new because programs outside of pods use them."""

    gpu: Gpu
    mode: GpuMode
    usable_mib: int
    reserved_mib: int
    max_shares: int = 16
    replicas: int = 1
    mig_replicas: Mapping[str, int] = field(default_factory=dict)  # by profile
    sick: str | None = None
    cordoned: bool = False
    closed: str | None = None
    present: bool = True
    withdrawn_mib: int = 0

    @property
    def uuid(self) -> str:
        return self.gpu.uuid

    @property
    def unusable(self) -> str | None:
        """Why no container can start on it, or None."""
        # A driver that cannot be used hides its GPUs: that says more than their absence.
        return self.sick or (None if self.present else "it is not there any more")

    @property
    def nothing_new(self) -> str | None:
        """Why it takes no new container, or None."""
        return self.unusable or ("cordoned" if self.cordoned else self.closed)


@dataclass(frozen=True, slots=True)
class Offers:
    """All GPUs in the order they are listed. `problems`: what was configured and cannot be done."""

    gpus: tuple[GpuOffer, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def in_mode(self, mode: GpuMode) -> tuple[GpuOffer, ...]:
        return tuple(offer for offer in self.gpus if offer.mode is mode)

    def of(self, uuid: str) -> GpuOffer | None:
        return next((offer for offer in self.gpus if offer.uuid == uuid), None)


def plan_offers(
    gpus: Iterable[Gpu],
    config: SharingConfig,
    *,
    sick: Mapping[str, str] | None = None,
    cordoned: Collection[str] = (),
    closed: Mapping[str, str] | None = None,
    absent: Collection[str] = (),
    withdrawn: Mapping[str, int] | None = None,
) -> Offers:
    """The offers for `gpus`, in their order. `sick` and `closed`: UUID -> why; `absent`: those of
    `gpus` that have vanished and may come back; `withdrawn`: UUID -> MiB that the host uses."""
    gpus = tuple(gpus)
    modes = mode_plan(gpus, config)
    offers = []
    for gpu in gpus:
        plan = modes.of(gpu.uuid)
        assert plan is not None
        if gpu.unified_memory:
            configured = config.unified_reserve_mib if plan.reserve_mib is None else plan.reserve_mib
            usable = units.unified_usable_mib(gpu.memory_total_mib, configured)
        else:
            reserve = config.reserve_mib if plan.reserve_mib is None else plan.reserve_mib
            usable = units.usable_mib(gpu.memory_total_mib, gpu.memory_reserved_mib, reserve)
        offers.append(
            GpuOffer(
                gpu=gpu,
                mode=plan.mode,
                usable_mib=usable,
                reserved_mib=gpu.memory_total_mib - usable,
                max_shares=plan.max_shares,
                replicas=plan.replicas,
                mig_replicas=plan.mig_replicas,
                sick=(sick or {}).get(gpu.uuid),
                cordoned=gpu.uuid in cordoned,
                closed=(closed or {}).get(gpu.uuid),
                present=gpu.uuid not in absent,
                withdrawn_mib=(withdrawn or {}).get(gpu.uuid, 0),
            )
        )
    return Offers(tuple(offers), modes.problems, modes.notes)


def mode_plan(gpus: Iterable[Gpu], config: SharingConfig) -> ModePlan:
    """The configuration's rules in the terms of sharing/modes.py."""
    block = config.time_slicing
    return plan_modes(
        [
            GpuFacts(g.uuid, g.index, g.model, g.mig_enabled, tuple(i.profile for i in g.mig_instances))
            for g in gpus
        ],
        [
            ModeRule(
                f"sharing.gpus[{i}]",
                rule.match.uuid,
                rule.match.index,
                rule.match.model,
                GpuMode(rule.mode) if rule.mode else None,
                rule.replicas,
                rule.reserve_mib,
                rule.max_shares,
            )
            for i, rule in enumerate(config.gpus)
        ],
        ModeDefaults(GpuMode(config.mode), None, config.max_shares_per_gpu),
        TimeSlicingBlock(
            tuple((r.name, r.replicas) for r in block.resources),
            block.rename_by_default,
            block.fail_requests_greater_than_one,
            tuple(
                f"resources[{i}].{key}"
                for i, r in enumerate(block.resources)
                for key, given in (("rename", r.rename), ("devices", r.devices))
                if given is not None
            ),
        )
        if block is not None
        else None,
    )
