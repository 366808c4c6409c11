"""Which GPU is offered in which mode.

The first rule that matches a GPU counts; a GPU that none matches is in the node's default mode. A pasted
`sharing.timeSlicing` block of NVIDIA's plugin makes every GPU whose rule names no mode a time-sliced one.
What cannot be done as it was asked for is a sentence in the plan, and the GPU is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase

from edgeagent.sharing.names import GPU, mig_name


class GpuMode(str, Enum):
    SHARED = "shared"
    EXCLUSIVE = "exclusive"
    TIMESLICE = "timeslice"
    MIG = "mig"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What rules look at. `mig_enabled` None: the GPU has no MIG; `mig_profiles`: of its instances."""

    uuid: str
    index: int
    model: str
    mig_enabled: bool | None = None
    mig_profiles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModeRule:
    """Matches by UUID, index or a shell pattern on the model (the one that is given). `where` names the
    rule in sentences ("sharing.gpus[0]")."""

    where: str
    uuid: str | None = None
    index: int | None = None
    model: str | None = None
    mode: GpuMode | None = None
    replicas: int | None = None
    reserve_mib: int | None = None
    max_shares: int | None = None

    def matches(self, gpu: GpuFacts) -> bool:
        if self.uuid is not None:
            return gpu.uuid.lower() == self.uuid.lower()
        if self.index is not None:
            return gpu.index == self.index
        return self.model is not None and fnmatchcase(gpu.model.lower(), self.model.lower())


@dataclass(frozen=True, slots=True)
class TimeSlicingBlock:
    """NVIDIA's `sharing.timeSlicing`: (resource name, replicas) in their order. `ignored`: keys in it
    that NVIDIA's plugin accepts and ignores."""

    resources: tuple[tuple[str, int], ...]
    rename_by_default: bool = False
    fail_requests_greater_than_one: bool = False
    ignored: tuple[str, ...] = ()

    def replicas(self) -> dict[str, int]:
        return dict(self.resources)


@dataclass(frozen=True, slots=True)
class ModeDefaults:
    mode: GpuMode = GpuMode.SHARED
    reserve_mib: int | None = None
    max_shares: int = 16


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """How one GPU is offered. `replicas`: mode timeslice, per GPU; `mig_replicas`: mode mig, by profile
    (1 where it is not time-sliced). `reserve_mib` None: the default for this kind of GPU."""

    uuid: str
    mode: GpuMode
    max_shares: int
    reserve_mib: int | None = None
    replicas: int = 1
    mig_replicas: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModePlan:
    """`problems`: what was asked for and cannot be done; `notes`: what is done and worth knowing."""

    gpus: tuple[GpuPlan, ...]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, uuid: str) -> GpuPlan | None:
        return next((g for g in self.gpus if g.uuid == uuid), None)

    def in_mode(self, mode: GpuMode) -> tuple[GpuPlan, ...]:
        return tuple(g for g in self.gpus if g.mode is mode)


def plan_modes(
    gpus: Sequence[GpuFacts],
    rules: Sequence[ModeRule] = (),
    defaults: ModeDefaults | None = None,
    time_slicing: TimeSlicingBlock | None = None,
) -> ModePlan:
    """The mode of every GPU, in their order."""
    defaults = defaults or ModeDefaults()
    problems: list[str] = []
    notes = [
        f"timeSlicing: {key} is accepted and has no effect, as in NVIDIA's plugin"
        for key in (time_slicing.ignored if time_slicing else ())
    ]
    sliced = time_slicing.replicas() if time_slicing else {}
    if time_slicing and len(sliced) < len(time_slicing.resources):
        problems.append("timeSlicing: a resource name is there twice; its last replicas count")
    plans = []
    used_names: set[str] = set()
    for gpu in gpus:
        rule = next((r for r in rules if r.matches(gpu)), None)
        plan = _plan_gpu(gpu, rule, defaults, sliced, problems, notes)
        plans.append(plan)
        if plan.mode is GpuMode.TIMESLICE:
            used_names.add(GPU)
        used_names.update(mig_name(p) for p in plan.mig_replicas)
    for rule in rules:
        if gpus and not any(rule.matches(gpu) for gpu in gpus):
            notes.append(f"{rule.where} matches none of the GPUs that are here now")
    for name in sliced:
        if gpus and name not in used_names:
            notes.append(f"timeSlicing: {name} is offered by no GPU that is here now")
    return ModePlan(tuple(plans), tuple(problems), tuple(notes))


def _plan_gpu(
    gpu: GpuFacts,
    rule: ModeRule | None,
    defaults: ModeDefaults,
    sliced: Mapping[str, int],
    problems: list[str],
    notes: list[str],
) -> GpuPlan:
    asked = rule.mode if rule else None
    mode = asked or defaults.mode
    replicas = 1
    if asked is None and GPU in sliced and mode in (GpuMode.SHARED, GpuMode.EXCLUSIVE):
        mode = GpuMode.TIMESLICE
    if gpu.mig_enabled and mode not in (GpuMode.MIG, GpuMode.OFF):
        if asked is None:
            notes.append(f"{gpu.uuid} has MIG enabled: its instances are offered (mode mig), not the GPU")
            mode = GpuMode.MIG
        else:
            problems.append(
                f"{gpu.uuid} has MIG enabled and cannot be in mode {mode.value}: disable MIG "
                f"(nvidia-smi -mig 0), or use mode mig"
            )
            mode = GpuMode.OFF
    elif mode is GpuMode.MIG and not gpu.mig_enabled:
        # Stays in mode mig, offering nothing: MIG may be enabled while we run.
        how = "this GPU has no MIG" if gpu.mig_enabled is None else "enable it with nvidia-smi -mig 1"
        problems.append(f"{gpu.uuid} is in mode mig and MIG is not enabled: {how}")
    if mode is GpuMode.TIMESLICE:
        replicas = (rule.replicas if rule else None) or sliced.get(GPU, 1)
        if replicas < 2:
            problems.append(
                f"{gpu.uuid} is in mode timeslice without replicas: set replicas in its rule, or a "
                f"timeSlicing block with {GPU}"
            )
            mode, replicas = GpuMode.OFF, 1
    elif rule and rule.replicas:
        problems.append(
            f"{rule.where}: replicas needs mode: timeslice, and {gpu.uuid} is in mode {mode.value}"
        )
    return GpuPlan(
        gpu.uuid,
        mode,
        max_shares=(rule.max_shares if rule else None) or defaults.max_shares,
        reserve_mib=rule.reserve_mib if rule and rule.reserve_mib is not None else defaults.reserve_mib,
        replicas=replicas,
        mig_replicas={p: sliced.get(mig_name(p), 1) for p in gpu.mig_profiles} if mode is GpuMode.MIG else {},
    )
