"""Choosing mechanisms from probes, and claiming per container only what was seen."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from edgeagent.errors import IsolationError
from edgeagent.gpus.model import Gpu, GpuKind
from edgeagent.isolation.backend import ProbeResult, RunningContainer, ShareToEnforce
from edgeagent.isolation.levels import Axis, AxisLevel, Level
from edgeagent.isolation.manager import IsolationManager, choose
from edgeagent.node.cdi import ContainerEdits

GPU = Gpu("GPU-1", 0, GpuKind.DISCRETE, "nvml", "L4", 23034)
SHARE = ShareToEnforce("uid", "app", "m000000", GPU, 2000, 30)
BOTH = frozenset({Axis.MEMORY, Axis.COMPUTE})


@dataclass
class Mechanism:
    """A mechanism whose probe and evidence the test sets."""

    name: str
    level: Level
    axes: frozenset[Axis] = BOTH
    seen: AxisLevel = AxisLevel(Level.NONE, reason="not_preloaded")
    prepared: list[frozenset[Axis]] = field(default_factory=list)
    released: int = 0

    def probe(self, gpu: Gpu, axis: Axis) -> ProbeResult:
        problem = "it is broken" if self.level is Level.NONE else None
        return ProbeResult(self.level, "probed", problem)

    def prepare(self, share: ShareToEnforce, axes: frozenset[Axis]) -> ContainerEdits:
        self.prepared.append(axes)
        return ContainerEdits(env={self.name: ",".join(sorted(a.value for a in axes))})

    def evidence(self, share: ShareToEnforce, running: RunningContainer, axis: Axis) -> AxisLevel:
        return self.seen

    def release(self, share: ShareToEnforce) -> None:
        self.released += 1

    def close(self) -> None: ...


def manager(
    *mechanisms: Mechanism, memory: str = "auto", compute: str = "auto", **more: bool
) -> IsolationManager:
    options = {"fallback": False, "allow_mps": False} | more
    made = IsolationManager(mechanisms, memory=memory, compute=compute, **options)
    made.probe(GPU, watchdog=True)
    return made


def running(used_mib: float | None = None) -> RunningContainer:
    return RunningContainer("c" * 64, "/sys/fs/cgroup/x", (1,), (1,), used_mib)


CHOICES = {
    "strongest wins": ({"hard": "nvml-cgroup", "coop": "limiter"}, "auto", {}, "nvml-cgroup", None),
    "equal levels: preference": ({"coop": "limiter", "coop2": "hami-core"}, "auto", {}, "limiter", None),
    "mps only when allowed": ({"hard": "mps", "coop": "limiter"}, "auto", {}, "limiter", None),
    "mps when allowed": ({"hard": "mps", "coop": "limiter"}, "auto", {"allow_mps": True}, "mps", None),
    "hami-core never by auto": ({"coop": "hami-core"}, "auto", {}, None, None),
    "named": ({"hard": "nvml-cgroup", "coop": "limiter"}, "limiter", {}, "limiter", None),
    "named and broken": ({"none": "mps", "coop": "limiter"}, "mps", {}, None, "mps cannot be used: broken"),
    "named, broken, fallback": ({"none": "mps", "coop": "limiter"}, "mps", {"fallback": True}, "limiter", "mps cannot be used"),
    "named and unknown here": ({"coop": "limiter"}, "nvgpu-sched", {}, None, "nvgpu-sched cannot be used"),
    "nothing works": ({"none": "limiter"}, "auto", {}, None, None),
    "none wanted": ({"hard": "nvml-cgroup"}, "none", {}, None, None),
}  # fmt: skip

_LEVEL = {"hard": Level.HARD, "coop": Level.COOPERATIVE, "coop2": Level.COOPERATIVE, "none": Level.NONE}


@pytest.mark.parametrize(
    ("probed", "wanted", "options", "chosen", "problem"), CHOICES.values(), ids=CHOICES.keys()
)
def test_choice(
    probed: dict[str, str], wanted: str, options: dict[str, bool], chosen: str | None, problem: str | None
) -> None:
    """Which mechanism is chosen, and which sentence the status shows."""
    probes = [
        (Mechanism(name, _LEVEL[kind]), ProbeResult(_LEVEL[kind], "e", None if kind != "none" else "broken"))
        for kind, name in probed.items()
    ]
    given = {"fallback": False, "allow_mps": False} | options
    choice = choose(Axis.MEMORY, wanted, probes, watchdog=True, **given)
    assert (choice.backend.name if choice.backend else None) == chosen
    assert (problem is None) == (choice.problem is None)
    assert problem is None or problem in (choice.problem or "")


@pytest.mark.parametrize(("watchdog", "level"), [(True, Level.REACTIVE), (False, Level.NONE)])
def test_without_a_mechanism_memory_is_reactive_only_where_use_is_seen(watchdog: bool, level: Level) -> None:
    choice = choose(Axis.MEMORY, "auto", [], fallback=False, allow_mps=False, watchdog=watchdog)
    assert choice.level.level is level
    compute = choose(Axis.COMPUTE, "auto", [], fallback=False, allow_mps=False, watchdog=watchdog)
    assert compute.level.level is Level.NONE


def test_a_named_mechanism_that_fails_is_a_problem_not_a_silent_fallback() -> None:
    m = manager(Mechanism("limiter", Level.NONE), Mechanism("nvml-cgroup", Level.HARD), memory="limiter")
    assert m.levels(GPU.uuid).memory.level is Level.REACTIVE
    assert m.problems() == ("isolation.memory: limiter cannot be used: it is broken",)


def test_prepare_calls_each_mechanism_once_with_its_axes() -> None:
    both = Mechanism("limiter", Level.COOPERATIVE)
    m = manager(both)
    assert m.prepare(SHARE).env == {"limiter": "compute,memory"}
    hard = Mechanism("nvml-cgroup", Level.HARD, frozenset({Axis.MEMORY}))
    m = manager(both, hard)
    assert m.prepare(SHARE).env == {"nvml-cgroup": "memory", "limiter": "compute"}


def test_uncapped_compute_is_not_enforced_and_not_claimed() -> None:
    mechanism = Mechanism("limiter", Level.COOPERATIVE, seen=AxisLevel(Level.COOPERATIVE, "limiter"))
    m = manager(mechanism)
    uncapped = ShareToEnforce("uid", "app", "m000000", GPU, 2000, None)
    assert m.prepare(uncapped).env == {"limiter": "memory"}
    assert m.observe(uncapped, running()).compute == AxisLevel(Level.NONE, reason="uncapped")


def test_nothing_is_claimed_from_configuration_alone() -> None:
    """A mechanism that probed well but is not seen in the container gives no level, with the reason."""
    m = manager(Mechanism("limiter", Level.COOPERATIVE))
    assert m.levels(GPU.uuid).memory.level is Level.COOPERATIVE
    assert m.observe(SHARE, running()).memory == AxisLevel(Level.NONE, reason="not_preloaded")
    seen_use = m.observe(SHARE, running(used_mib=1500)).memory
    assert (seen_use.level, seen_use.reason) == (Level.REACTIVE, "not_preloaded")


def test_lost_evidence_lowers_the_level_at_the_second_poll_and_is_told_once() -> None:
    lost: list[tuple[Axis, Level, Level]] = []
    mechanism = Mechanism("limiter", Level.COOPERATIVE, seen=AxisLevel(Level.COOPERATIVE, "limiter"))
    m = IsolationManager(
        [mechanism], memory="auto", compute="none", fallback=False, allow_mps=False,
        on_level_lost=lambda share, axis, before, now: lost.append((axis, before.level, now.level)),
    )  # fmt: skip
    m.probe(GPU, watchdog=False)
    assert m.observe(SHARE, running()).memory.level is Level.COOPERATIVE
    mechanism.seen = AxisLevel(Level.NONE, reason="not_preloaded")
    assert m.observe(SHARE, running()).memory.level is Level.COOPERATIVE
    assert m.observe(SHARE, running()).memory.level is Level.NONE
    assert m.observe(SHARE, running()).memory.level is Level.NONE
    assert lost == [(Axis.MEMORY, Level.COOPERATIVE, Level.NONE)]
    mechanism.seen = AxisLevel(Level.COOPERATIVE, "limiter")
    assert m.observe(SHARE, running()).memory.level is Level.COOPERATIVE


def test_release_reaches_every_mechanism_in_charge() -> None:
    a, b = (
        Mechanism("nvml-cgroup", Level.HARD, frozenset({Axis.MEMORY})),
        Mechanism("limiter", Level.COOPERATIVE),
    )
    m = manager(a, b)
    m.release(SHARE)
    assert (a.released, b.released) == (1, 1)


def lossy() -> tuple[Mechanism, IsolationManager, list[Level]]:
    lost: list[Level] = []
    mechanism = Mechanism("limiter", Level.COOPERATIVE, seen=AxisLevel(Level.COOPERATIVE, "limiter"))
    m = IsolationManager(
        [mechanism], memory="auto", compute="none", fallback=False, allow_mps=False,
        on_level_lost=lambda share, axis, before, now: lost.append(now.level),
    )  # fmt: skip
    m.probe(GPU, watchdog=True)
    assert m.observe(SHARE, running(0.0)).memory.level is Level.COOPERATIVE
    return mechanism, m, lost


@pytest.mark.parametrize(
    ("pids", "seen"),
    [
        pytest.param((), AxisLevel(Level.NONE, "limiter", reason="not_preloaded"), id="no process any more"),
        pytest.param(
            (1,), AxisLevel(Level.NONE, "limiter", reason="no_gpu_use_yet"), id="GPU not in use now"
        ),
    ],
)
def test_a_container_that_ends_or_leaves_the_gpu_alone_has_lost_nothing(
    pids: tuple[int, ...], seen: AxisLevel
) -> None:
    mechanism, m, lost = lossy()
    mechanism.seen = seen
    for _ in range(3):
        assert m.observe(SHARE, RunningContainer(None, None, pids, (), 0.0)).memory.level is Level.REACTIVE
    assert lost == []


def test_a_new_start_is_judged_afresh() -> None:
    """What was proved of the start before is neither claimed for the new one nor reported as lost."""
    mechanism, m, lost = lossy()
    m.prepare(SHARE)
    mechanism.seen = AxisLevel(Level.NONE, "limiter", reason="musl_image")
    level = m.observe(SHARE, running(1500.0)).memory
    assert (level.level, level.mechanism, level.reason) == (Level.REACTIVE, "watchdog", "musl_image")
    assert lost == []


def test_early_binding_prepares_compute_before_the_cores_are_known() -> None:
    limiter = Mechanism("limiter", Level.COOPERATIVE)
    m = manager(limiter)
    m.prepare(ShareToEnforce("", "", "m000000", GPU, 2000, None))
    assert limiter.prepared == [BOTH]


class Broken(Mechanism):
    def probe(self, gpu: Gpu, axis: Axis) -> ProbeResult:
        raise IsolationError("cannot even try")

    def evidence(self, share: ShareToEnforce, running: RunningContainer, axis: Axis) -> AxisLevel:
        raise IsolationError("state unreadable")

    def release(self, share: ShareToEnforce) -> None:
        raise IsolationError("cannot tidy up")


def test_a_mechanism_that_fails_harms_nobody_else() -> None:
    good = Mechanism("limiter", Level.COOPERATIVE)
    m = manager(Broken("nvml-cgroup", Level.HARD), good)
    assert m.levels(GPU.uuid).memory.mechanism == "limiter"
    m.release(SHARE)
    assert good.released == 1
    half = Mechanism("nvml-cgroup", Level.HARD)
    broken = Broken("nvml-cgroup", Level.HARD)
    half.evidence = broken.evidence  # type: ignore[method-assign]
    level = manager(half).observe(SHARE, running(5.0)).memory
    assert (level.level, level.reason, level.evidence) == (
        Level.REACTIVE,
        "evidence_failed",
        "state unreadable",
    )


def test_fallback_means_what_auto_would_choose() -> None:
    probed: list[str] = []

    class Watched(Mechanism):
        def probe(self, gpu: Gpu, axis: Axis) -> ProbeResult:
            probed.append(self.name)
            return super().probe(gpu, axis)

    every = [
        Watched("limiter", Level.NONE),
        Watched("mps", Level.HARD),
        Watched("hami-core", Level.COOPERATIVE),
    ]
    m = manager(*every, memory="limiter", compute="none", fallback=True, allow_mps=True)
    assert m.levels(GPU.uuid).memory.mechanism == "mps"
    assert probed == ["limiter", "mps"], "hami-core is never chosen unless it is named"


def test_running_containers_are_made_known_to_those_who_must_know() -> None:
    @dataclass
    class Remembers(Mechanism):
        adopted: list[ShareToEnforce] = field(default_factory=list)

        def adopt(self, share: ShareToEnforce) -> None:
            self.adopted.append(share)

    remembers = Remembers("nvml-cgroup", Level.HARD)
    manager(remembers, Mechanism("limiter", Level.COOPERATIVE)).adopt(SHARE)
    assert remembers.adopted == [SHARE]


def test_a_start_that_one_mechanism_refuses_leaves_nothing_with_the_others() -> None:
    class Refuses(Mechanism):
        def prepare(self, share: ShareToEnforce, axes: frozenset[Axis]) -> ContainerEdits:
            raise IsolationError("no room")

    first = Mechanism("nvml-cgroup", Level.HARD, frozenset({Axis.MEMORY}))
    m = manager(first, Refuses("limiter", Level.COOPERATIVE, frozenset({Axis.COMPUTE})))
    with pytest.raises(IsolationError, match="no room"):
        m.prepare(SHARE)
    assert (first.prepared, first.released) == ([frozenset({Axis.MEMORY})], 1)


def test_what_failed_is_tried_again_and_its_problem_goes() -> None:
    mechanism = Mechanism("limiter", Level.NONE)
    m = manager(mechanism, memory="limiter", compute="none")
    assert m.failed() == {GPU.uuid}
    mechanism.level = Level.COOPERATIVE
    m.probe(GPU, watchdog=True)
    assert (m.failed(), m.problems()) == (frozenset(), ())
    assert m.levels(GPU.uuid).memory.mechanism == "limiter"
