"""Memory that programs outside of pods use (field case E3): not promised to anybody new, while what is
promised stays, and is not "too large for ever" either."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.agent import WITHDRAWN_STEP_MIB, _in_steps
from edgeagent.config.schema import SharingConfig
from edgeagent.gpus.model import Gpu, GpuKind, GpuProcess, GpuReading, ProcessType
from edgeagent.health.usage import attribute
from edgeagent.kubelet.offers import plan_offers
from edgeagent.node.cgroups import HOST, CgroupOwner, OwnerKind
from edgeagent.node.processes import ProcessInfo
from edgeagent.sharing.ledger import ContainerKey, GpuCapacity, Ledger, Placement, Refusal, RefusalCode
from edgeagent.sharing.tokens import MEMORY, Demand, full

GPU = Gpu("GPU-1", 0, GpuKind.DISCRETE, "nvml", "L4", 8192)
POD = "aaaaaaaa-0000-4000-8000-000000000001"


def ledger(withheld: int, units: int = 8000) -> Ledger:
    made = Ledger()
    made.set_capacities([GpuCapacity("GPU-1", units, withheld=withheld)])
    return made


def demand(units: int, first: int = 0) -> Demand:
    return Demand(memory=full(units) << first)


def test_free_is_what_the_host_leaves() -> None:
    assert ledger(2660).free_on("GPU-1").memory == 5340


def test_what_fits_only_without_the_host_waits_with_that_reason() -> None:
    answer = ledger(2660).place(ContainerKey(POD, "app"), demand(6000))
    assert isinstance(answer, Refusal)
    assert (answer.code, answer.permanent) == (RefusalCode.NO_ROOM, False)
    assert "largest free block: 5340 MiB" in answer.message
    assert "programs outside of pods use memory there" in answer.message


def test_free_tokens_are_withdrawn_and_held_ones_are_not() -> None:
    made = ledger(0)
    key = ContainerKey(POD, "app")
    made.bind(key, demand(4096), "GPU-1")
    made.set_capacities([GpuCapacity("GPU-1", 8000, withheld=3904)])
    unhealthy = made.unhealthy()
    assert unhealthy.of(MEMORY) == full(8000) & ~full(4096)
    assert not unhealthy.overlaps(demand(4096))
    assert made.free_on("GPU-1").memory == 0
    assert isinstance(made.place(key, demand(4096)), Placement), "a restart in its own room"


def test_more_withheld_than_is_there_hurts_nobody() -> None:
    made = ledger(0, units=100)
    made.bind(ContainerKey(POD, "app"), demand(60), "GPU-1")
    made.set_capacities([GpuCapacity("GPU-1", 100, withheld=500)])
    assert made.free_on("GPU-1").memory == 0
    assert not made.unhealthy().overlaps(demand(60))


@given(
    units=st.integers(1, 400),
    held=st.integers(0, 400),
    withheld=st.integers(0, 500),
    more=st.integers(1, 400),
)
@settings(max_examples=150)
def test_the_sum_promised_never_reaches_what_is_withheld(
    units: int, held: int, withheld: int, more: int
) -> None:
    """Whoever is placed beside `held` leaves the withheld units alone, and the list never offers more
    than can be given."""
    held = min(held, units)
    made = ledger(0, units)
    if held:
        made.bind(ContainerKey(POD, "a"), demand(held), "GPU-1")
    made.set_capacities([GpuCapacity("GPU-1", units, withheld=withheld)])
    healthy = units - made.unhealthy().of(MEMORY).bit_count()
    assert healthy == max(held, units - withheld)
    if held + more <= units:
        answer = made.place(ContainerKey(POD, "b"), demand(more, held))
        assert isinstance(answer, Placement) == (held + more <= units - withheld)


def test_the_offer_carries_it_in_whole_units() -> None:
    (offer,) = plan_offers([GPU], SharingConfig(), withdrawn={"GPU-1": 2660}).gpus
    assert (offer.usable_mib, offer.withdrawn_mib, offer.nothing_new) == (8192, 2660, None)


@pytest.mark.parametrize(
    ("mib", "before", "expected"),
    [
        (0, 0, 0),
        (1, 0, 64),
        (64, 0, 64),
        (65, 64, 128),
        (60, 128, 128),
        (64, 192, 64),
        (0, 64, 0),
        (2660, 0, 2688),
    ],
)
def test_small_movements_of_the_hosts_use_change_nothing(mib: int, before: int, expected: int) -> None:
    assert WITHDRAWN_STEP_MIB == 64
    assert _in_steps(mib, before) == expected


def seen(*found: tuple[int, CgroupOwner, float | None], used: float) -> float | None:
    """What beyond the pod's promises is used, from (pid, owner, MiB) of each process."""
    reading = GpuReading(
        "GPU-1",
        0.0,
        memory_used_mib=used,
        processes=tuple(GpuProcess(pid, frozenset({ProcessType.COMPUTE}), mib) for pid, _, mib in found),
    )
    processes = {pid: ProcessInfo(pid, "x", 1, owner) for pid, owner, _ in found}
    return attribute(GPU, reading, processes).beyond_promises_mib([POD])


OWN = CgroupOwner(OwnerKind.POD, POD, "c" * 64)
UNKNOWN = CgroupOwner(OwnerKind.UNKNOWN)


@pytest.mark.parametrize(
    ("processes", "used", "beyond"),
    [
        pytest.param([(1, OWN, 1000.0), (2, HOST, 300.0)], 1400.0, 400.0, id="unattributed counts"),
        pytest.param([(1, UNKNOWN, 1000.0), (2, HOST, 300.0)], 1400.0, 300.0, id="may be a pod's own"),
        pytest.param([(1, OWN, None), (2, HOST, 300.0)], 1400.0, 300.0, id="a pod's use is not told"),
    ],
)
def test_a_pods_own_use_is_never_withdrawn_from_it(
    processes: list[tuple[int, CgroupOwner, float | None]], used: float, beyond: float
) -> None:
    assert seen(*processes, used=used) == beyond
