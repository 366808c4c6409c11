"""Field cases E2 and E3: one number per container and GPU, host use by name, parts that sum up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.gpus.model import GpuKind, GpuProcess, ProcessType
from edgeagent.health.usage import GpuUsage, attribute
from edgeagent.node.cgroups import HOST, CgroupOwner, OwnerKind, unknown
from edgeagent.node.processes import ProcessInfo
from tests.fakes.gpus import make_gpu, make_reading

GPU = make_gpu()
POD_A, POD_B = "aaaaaaaa-0000-4000-8000-000000000001", "bbbbbbbb-0000-4000-8000-000000000002"
C1, C2 = "c1" * 32, "c2" * 32
BOTH = frozenset({ProcessType.COMPUTE, ProcessType.GRAPHICS})


def pod(uid: str, container: str | None = C1) -> CgroupOwner:
    return CgroupOwner(OwnerKind.POD, uid, container)


def run(
    processes: list[tuple[int, float | None, CgroupOwner | None]], card_mib: float | None, **kind: Any
) -> GpuUsage:
    """(pid, MiB, owner; None: vanished) and what the card says."""
    gpu = make_gpu(**kind)
    listed = tuple(GpuProcess(pid, BOTH, mib) for pid, mib, _ in processes)
    known = {pid: ProcessInfo(pid, f"p{pid}", 1, owner) for pid, _, owner in processes if owner is not None}
    reading = make_reading(gpu.uuid, memory_used_mib=card_mib, processes=listed)
    return attribute(gpu, reading, known, {C1: "main", C2: "side"}.get)


def test_one_number_per_container_however_often_its_process_is_listed() -> None:
    usage = run([(4100, 1660.0, pod(POD_A)), (4101, 300.0, None)], 1700.0)
    use = usage.of(POD_A)
    assert use is not None
    assert use.used_mib == 1660.0
    assert use.pids == (4100,)
    assert usage.unattributed_mib == 40.0, "the vanished process is skipped without losing the rest"


def test_host_processes_are_named_and_never_a_pods() -> None:
    usage = run([(1, 450.0, HOST), (2, 210.0, HOST), (3, 2000.0, HOST)], 2700.0)
    assert usage.containers == ()
    assert usage.host is not None
    assert usage.host.used_mib == 2660.0
    assert usage.host.processes == ((1, "p1", 450.0), (2, "p2", 210.0), (3, "p3", 2000.0))
    assert usage.unattributed_mib == 40.0


def test_what_cannot_be_attributed_is_neither_pod_nor_host() -> None:
    usage = run([(1, 500.0, unknown("namespaced"))], 500.0)
    assert usage.host is not None
    assert (usage.containers, usage.host.used_mib, usage.unattributed_mib) == ((), 0.0, 500.0)


def test_containers_of_a_pod_are_apart_and_can_be_taken_together() -> None:
    usage = run([(1, 100.0, pod(POD_A, C1)), (2, 50.0, pod(POD_A, C2)), (3, 7.0, pod(POD_B, None))], 157.0)
    assert [(c.container, c.used_mib) for c in usage.containers] == [
        ("main", 100.0),
        ("side", 50.0),
        (None, 7.0),
    ]
    main, whole, other = usage.of(POD_A, "main"), usage.of(POD_A), usage.of(POD_B, "main")
    assert main is not None
    assert whole is not None
    assert other is not None
    assert (main.used_mib, whole.used_mib) == (100.0, 150.0)
    assert other.used_mib == 7.0, "which container is not known: the pod's use counts"
    assert usage.of(POD_A, "elsewhere") is None
    assert usage.of("cccccccc-0000-4000-8000-000000000003") is None


def test_use_beyond_promises_counts_pods_without_a_share() -> None:
    usage = run([(1, 100.0, pod(POD_A)), (2, 50.0, pod(POD_B)), (3, 30.0, HOST)], 200.0)
    assert usage.beyond_promises_mib({POD_A}) == 100.0
    assert usage.beyond_promises_mib({POD_A, POD_B}) == 50.0


def test_without_process_lists_nobody_can_say() -> None:
    usage = attribute(GPU, make_reading(GPU.uuid, memory_used_mib=500.0, processes=None), {})
    assert (usage.host, usage.unattributed_mib, usage.used_mib) == (None, None, 500.0)
    assert usage.beyond_promises_mib(()) is None


@pytest.mark.parametrize("wrapped", [17592186044134.0, -3.0, 8192 * 1.06])
def test_wrapped_numbers_are_not_used(wrapped: float) -> None:
    usage = run([(1, wrapped, pod(POD_A)), (2, 100.0, pod(POD_A))], 100.0)
    use = usage.of(POD_A)
    assert use is not None
    assert use.used_mib == 100.0
    assert usage.unattributed_mib == 0.0


def test_a_process_without_a_number_leaves_its_containers_number_unknown() -> None:
    usage = run([(1, None, pod(POD_A))], 300.0)
    use = usage.of(POD_A)
    assert use is not None
    assert use.used_mib is None
    assert usage.unattributed_mib == 300.0


def test_on_unified_memory_the_lists_are_the_card() -> None:
    usage = run([(1, 100.0, pod(POD_A)), (2, 50.0, HOST)], None, kind=GpuKind.INTEGRATED)
    assert (usage.used_mib, usage.unattributed_mib) == (150.0, 0.0)


OWNERS = st.sampled_from(
    [pod(POD_A, C1), pod(POD_A, C2), pod(POD_B, C1), pod(POD_B, None), HOST, unknown("x"), None]
)


@given(
    st.lists(st.tuples(st.one_of(st.none(), st.floats(0, 9000)), OWNERS), max_size=12),
    st.floats(0, 8192),
)
@settings(max_examples=200)
def test_parts_always_sum_to_the_card(
    parts: list[tuple[float | None, CgroupOwner | None]], card: float
) -> None:
    usage = run([(i, mib, owner) for i, (mib, owner) in enumerate(parts, 1)], card)
    assert usage.host is not None
    assert usage.used_mib is not None
    assert usage.unattributed_mib is not None
    assert usage.unattributed_mib >= 0
    total = sum(c.used_mib or 0.0 for c in usage.containers) + usage.host.used_mib + usage.unattributed_mib
    assert total == pytest.approx(usage.used_mib, rel=0.01)
    assert usage.used_mib >= card
