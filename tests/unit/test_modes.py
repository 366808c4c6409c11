"""Which GPU is in which mode."""

from __future__ import annotations

import pytest

from edgeagent.sharing.modes import GpuFacts, GpuMode, ModeDefaults, ModeRule, TimeSlicingBlock, plan_modes

A2000 = GpuFacts("GPU-a", 0, "NVIDIA RTX A2000")
L4 = GpuFacts("GPU-b", 1, "NVIDIA L4", mig_enabled=None)
A100 = GpuFacts("GPU-c", 2, "NVIDIA A100-SXM4-40GB", mig_enabled=False)
SLICED = GpuFacts("GPU-d", 3, "NVIDIA A100-SXM4-40GB", mig_enabled=True, mig_profiles=("1g.5gb", "2g.10gb"))
ALL = (A2000, L4, A100, SLICED)


def modes(plan) -> list[str]:
    return [gpu.mode.value for gpu in plan.gpus]


def rule(**fields) -> ModeRule:
    return ModeRule("sharing.gpus[0]", **fields)


def test_without_rules_gpus_are_shared_and_mig_is_followed():
    plan = plan_modes(ALL)
    assert modes(plan) == ["shared", "shared", "shared", "mig"]
    assert plan.of("GPU-d").mig_replicas == {"1g.5gb": 1, "2g.10gb": 1}
    assert plan.problems == ()
    assert plan.notes == ("GPU-d has MIG enabled: its instances are offered (mode mig), not the GPU",)
    assert [g.uuid for g in plan.in_mode(GpuMode.SHARED)] == ["GPU-a", "GPU-b", "GPU-c"]
    assert plan.of("GPU-z") is None


@pytest.mark.parametrize(
    ("match", "hits"),
    [
        ({"uuid": "gpu-B"}, [1]),
        ({"index": 0}, [0]),
        ({"model": "*a2000*"}, [0]),
        ({"model": "NVIDIA *"}, [0, 1, 2, 3]),
        ({"uuid": "GPU-nope"}, []),
        ({}, []),
    ],
)
def test_rules_match_by_uuid_index_or_model(match, hits):
    plan = plan_modes(ALL, [rule(mode=GpuMode.OFF, **match)])
    assert [i for i, gpu in enumerate(plan.gpus) if gpu.mode is GpuMode.OFF] == hits
    assert any("matches none" in note for note in plan.notes) == (not hits)


def test_the_first_matching_rule_counts_with_all_its_fields():
    rules = [
        rule(model="*L4*", max_shares=4),
        rule(index=1, mode=GpuMode.OFF, reserve_mib=9),
        rule(index=0, mode=GpuMode.EXCLUSIVE, reserve_mib=0),
    ]
    plan = plan_modes((A2000, L4), rules, ModeDefaults(reserve_mib=256, max_shares=16))
    assert modes(plan) == ["exclusive", "shared"]
    assert (plan.gpus[0].max_shares, plan.gpus[0].reserve_mib) == (16, 0)
    assert (plan.gpus[1].max_shares, plan.gpus[1].reserve_mib) == (4, 256)


@pytest.mark.parametrize(
    ("gpu", "asked", "mode", "problem"),
    [
        (SLICED, "shared", "off", "GPU-d has MIG enabled and cannot be in mode shared"),
        (SLICED, "exclusive", "off", "disable MIG (nvidia-smi -mig 0), or use mode mig"),
        (SLICED, "off", "off", None),
        (SLICED, "mig", "mig", None),
        (A100, "mig", "mig", "MIG is not enabled: enable it with nvidia-smi -mig 1"),
        (L4, "mig", "mig", "MIG is not enabled: this GPU has no MIG"),
        (L4, "timeslice", "off", "mode timeslice without replicas"),
    ],
)
def test_what_cannot_be_done_is_said(gpu, asked, mode, problem):
    plan = plan_modes([gpu], [rule(uuid=gpu.uuid, mode=GpuMode(asked))])
    assert modes(plan) == [mode]
    assert len(plan.problems) == (problem is not None)
    if problem:
        assert problem in plan.problems[0]


def test_a_parent_of_mig_instances_is_never_sliced():
    for asked in GpuMode:
        plan = plan_modes([SLICED], [rule(index=3, mode=asked, replicas=4)])
        assert plan.gpus[0].mode in (GpuMode.MIG, GpuMode.OFF)
        assert plan.gpus[0].replicas == 1


def test_replicas_by_rule():
    plan = plan_modes([A2000, L4], [rule(index=0, mode=GpuMode.TIMESLICE, replicas=4)])
    assert modes(plan) == ["timeslice", "shared"]
    assert plan.gpus[0].replicas == 4
    stray = plan_modes([A2000], [rule(index=0, replicas=4)])
    assert modes(stray) == ["shared"]
    assert stray.problems == ("sharing.gpus[0]: replicas needs mode: timeslice, and GPU-a is in mode shared",)


def test_a_pasted_time_slicing_block_works_as_it_is():
    block = TimeSlicingBlock((("nvidia.com/gpu", 4), ("nvidia.com/mig-1g.5gb", 2)), ignored=("devices",))
    plan = plan_modes(ALL, [rule(index=1, mode=GpuMode.EXCLUSIVE)], time_slicing=block)
    assert modes(plan) == ["timeslice", "exclusive", "timeslice", "mig"]
    assert [gpu.replicas for gpu in plan.gpus] == [4, 1, 4, 1]
    assert plan.of("GPU-d").mig_replicas == {"1g.5gb": 2, "2g.10gb": 1}
    assert plan.problems == ()
    assert plan.notes[0] == "timeSlicing: devices is accepted and has no effect, as in NVIDIA's plugin"


def test_rules_go_before_the_block():
    block = TimeSlicingBlock((("nvidia.com/gpu", 4),))
    rules = [rule(index=0, mode=GpuMode.TIMESLICE, replicas=8), rule(index=1, mode=GpuMode.SHARED)]
    plan = plan_modes([A2000, L4, A100], rules, ModeDefaults(mode=GpuMode.EXCLUSIVE), block)
    assert [(gpu.mode.value, gpu.replicas) for gpu in plan.gpus] == [
        ("timeslice", 8),
        ("shared", 1),
        ("timeslice", 4),
    ]


def test_a_block_without_effect_is_told():
    block = TimeSlicingBlock((("nvidia.com/gpu", 4), ("nvidia.com/gpu", 2), ("nvidia.com/mig-7g.40gb", 2)))
    plan = plan_modes([A2000], [], ModeDefaults(mode=GpuMode.OFF), block)
    assert modes(plan) == ["off"]
    assert plan.problems == ("timeSlicing: a resource name is there twice; its last replicas count",)
    assert plan.notes == (
        "timeSlicing: nvidia.com/gpu is offered by no GPU that is here now",
        "timeSlicing: nvidia.com/mig-7g.40gb is offered by no GPU that is here now",
    )


def test_no_gpus_no_complaints():
    block = TimeSlicingBlock((("nvidia.com/gpu", 4),))
    plan = plan_modes([], [rule(index=0)], time_slicing=block)
    assert (plan.gpus, plan.problems, plan.notes) == ((), (), ())
