"""How the configuration's rules become offers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgeagent.config.schema import GpuMatch, GpuRule, SharingConfig, TimeSlicing, TimeSlicingResource
from edgeagent.gpus.model import Gpu, GpuKind, MigInstance
from edgeagent.kubelet.offers import plan_offers

A2000 = Gpu("GPU-a", 0, GpuKind.DISCRETE, "nvml", "NVIDIA RTX A2000", 6138, memory_reserved_mib=300)
L4 = Gpu("GPU-b", 1, GpuKind.DISCRETE, "nvml", "NVIDIA L4", 23034)
ORIN = Gpu("GPU-o", 0, GpuKind.INTEGRATED, "tegra", "Orin", 15656)


@pytest.mark.parametrize(
    ("gpu", "config", "usable"),
    [
        pytest.param(A2000, SharingConfig(), 5838, id="less what the driver keeps"),
        pytest.param(A2000, SharingConfig(reserve_mib=500), 5338, id="less the operator's reserve"),
        pytest.param(ORIN, SharingConfig(), 15656 - 3132, id="unified: less a fifth"),
        pytest.param(
            ORIN, SharingConfig(unified_reserve_mib=4000, reserve_mib=1), 11656, id="unified: as configured"
        ),
        pytest.param(A2000, SharingConfig(reserve_mib=10**6), 0, id="never below nothing"),
    ],
)
def test_what_may_be_promised(gpu: Gpu, config: SharingConfig, usable: int) -> None:
    (offer,) = plan_offers([gpu], config).gpus
    assert (offer.usable_mib, offer.reserved_mib) == (usable, gpu.memory_total_mib - usable)


def test_the_first_rule_that_matches_counts() -> None:
    config = SharingConfig(
        gpus=(
            GpuRule(match=GpuMatch(model="*a2000*"), mode="exclusive"),
            GpuRule(match=GpuMatch(uuid="GPU-b"), reserve_mib=1000, max_shares=4),
            GpuRule(match=GpuMatch(index=1), mode="off"),
        )
    )
    first, second = plan_offers([A2000, L4], config).gpus
    assert first.mode.value == "exclusive"
    assert (second.mode.value, second.usable_mib, second.max_shares) == ("shared", 22034, 4)


def test_a_time_slicing_block_and_mig() -> None:
    block = TimeSlicing(resources=(TimeSlicingResource("nvidia.com/gpu", 4, devices="all"),))
    mig = replace(L4, mig_enabled=True, mig_instances=(MigInstance("MIG-1", "1g.6gb", 1, 0),))
    offers = plan_offers([A2000, mig], SharingConfig(time_slicing=block))
    assert [(o.mode.value, o.replicas) for o in offers.gpus] == [("timeslice", 4), ("mig", 1)]
    assert any("devices" in note for note in offers.notes)
    broken = plan_offers([L4], SharingConfig(mode="mig"))
    assert any("no MIG" in problem for problem in broken.problems)


def test_why_a_gpu_takes_nothing() -> None:
    offers = plan_offers(
        [A2000, L4, replace(L4, uuid="GPU-c", index=2), replace(L4, uuid="GPU-d", index=3)],
        SharingConfig(),
        sick={"GPU-a": "XID 79"},
        cordoned={"GPU-b"},
        closed={"GPU-c": "the host uses 900 MiB"},
        absent={"GPU-d"},
    )
    assert [(o.unusable, o.nothing_new) for o in offers.gpus] == [
        ("XID 79", "XID 79"),
        (None, "cordoned"),
        (None, "the host uses 900 MiB"),
        ("it is not there any more", "it is not there any more"),
    ]
    assert offers.of("GPU-b") is offers.gpus[1]
    assert offers.of("GPU-x") is None
