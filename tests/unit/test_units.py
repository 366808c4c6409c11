"""Capacity arithmetic and the size of the list (field cases S1 and K3)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.sharing.units import (
    COSTLY_IDS,
    KUBELET_MESSAGE_BYTES,
    demand_units,
    entry_bytes,
    list_bytes,
    max_count,
    memory_units,
    node_units,
    parse_version,
    recommended_unit_mib,
    smallest_unit_mib,
    supply_units,
    unified_reserve_mib,
    unified_usable_mib,
    unit_to_use,
    usable_mib,
)

L4, T4, RTX_4070_TI_SUPER = 23034, 15360, 16376


@pytest.mark.parametrize(
    ("total", "usable", "units"),
    [(L4, 22234, 222), (T4, 14560, 145), (RTX_4070_TI_SUPER, 15576, 155)],
    ids=["L4", "T4", "RTX 4070 Ti SUPER"],
)
def test_s1_supply_of_100_mib_units_with_reserves(total, usable, units):
    assert usable_mib(total, driver_reserved_mib=300, reserve_mib=500) == usable
    assert supply_units(usable, 100) == units


def test_s1_a_pod_that_holds_every_unit_gets_no_more_than_there_is():
    assert supply_units(L4, 100) == 230  # never 231
    assert supply_units(L4, 100) * 100 <= L4


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(0, 300_000),
    reserved=st.one_of(st.none(), st.integers(0, 2_000)),
    reserve=st.integers(0, 5_000),
    unit=st.integers(1, 70_000),
    wants=st.lists(st.integers(1, 50_000), max_size=20),
)
def test_s1_limits_never_exceed_the_usable_memory(total, reserved, reserve, unit, wants):
    """Supply floors, demand ceils, and the unit is applied once: whatever fits in units fits in MiB."""
    usable = usable_mib(total, reserved, reserve)
    assert 0 <= usable <= total
    free = supply_units(usable, unit)
    limits = []
    for mib in wants:
        units = demand_units(mib, unit)
        assert mib <= units * unit < mib + unit
        if units <= free:
            free -= units
            limits.append(units * unit)
    assert sum(limits) <= usable


@pytest.mark.parametrize(
    ("mem_total", "configured", "reserve"),
    [
        (4096, None, 1536),
        (7620, None, 1536),
        (15_400, None, 3080),
        (62_817, None, 12_564),  # 12,563.4, rounded up: the host gets the rest
        (62_817, 2048, 2048),
        (62_817, 0, 0),
    ],
)
def test_unified_memory_keeps_room_for_the_host(mem_total, configured, reserve):
    assert unified_reserve_mib(mem_total, configured) == reserve
    assert unified_usable_mib(mem_total, configured) == mem_total - reserve


def test_memory_never_goes_below_zero():
    assert usable_mib(300, 500) == 0
    assert unified_usable_mib(1024) == 0


@pytest.mark.parametrize(
    ("id_bytes", "numa", "healthy"),
    [(12, False, 25), (40, False, 53), (46, False, 59), (7, False, 20)],
    ids=["12 characters", "40", "46", "a token"],
)
def test_k3_bytes_of_an_entry_as_measured_on_a_kubelet(id_bytes, numa, healthy):
    assert entry_bytes(id_bytes, numa=numa, unhealthy=False) == healthy
    assert entry_bytes(id_bytes, numa=numa) == healthy + 2
    assert entry_bytes(id_bytes, numa=True, unhealthy=False) == healthy + 6


def test_k3_long_entries_need_longer_lengths():
    assert entry_bytes(200, unhealthy=False) == 2 + 1 + 1 + 2 + 200 + 9


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 260), st.booleans())
def test_k3_the_largest_count_passes_even_all_unhealthy(id_bytes, numa):
    assert list_bytes(max_count(id_bytes, numa=numa), id_bytes, numa=numa) < KUBELET_MESSAGE_BYTES


def test_k3_two_80_gib_cards_fit_in_1_mib_tokens():
    offer = memory_units([81_920, 81_920], 1)
    assert (offer.count, offer.problem, offer.warning) == (163_840, None, None)
    assert offer.list_bytes < KUBELET_MESSAGE_BYTES


def test_k3_eight_140_gib_cards_do_not_and_the_sentence_names_the_unit():
    gpus = [143_771] * 8
    offer = memory_units(gpus, 1)
    assert offer.problem is not None
    assert "1150168 units of 1 MiB" in offer.problem
    assert str(max_count()) in offer.problem
    assert "memoryUnitMiB to 8 " in offer.problem
    assert memory_units(gpus, 8).problem is None
    assert memory_units(gpus, 4).problem is not None


def test_a_unit_larger_than_every_gpu_is_a_problem_not_a_silent_zero():
    assert "no GPU has that much" in (memory_units([8000], 65_536).problem or "")
    assert memory_units([], 64).problem is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=8), st.integers(1, 5_000))
def test_the_smallest_unit_is_a_power_of_two_that_fits_and_half_of_it_does_not(gpus, most):
    unit = smallest_unit_mib(gpus, most)
    assert unit & (unit - 1) == 0
    assert node_units(gpus, unit) <= most
    assert unit == 1 or node_units(gpus, unit // 2) > most


@pytest.mark.parametrize(
    ("version", "gpus", "unit", "recommended"),
    [
        ("v1.35.9+k3s1", [24_576], 1, None),
        (None, [24_576], 1, None),
        ("rubbish", [24_576], 1, None),
        ("v1.36.2+k3s1", [24_576], 1, 64),
        ("1.36", [24_576], 64, None),
        ("1.40.0", [81_920, 81_920], 64, 128),
        ("1.36.0", [1_000], 1, None),
        ("2.0", [24_576], 16, 64),
    ],
)
def test_many_ids_on_clusters_where_they_hurt_are_warned_of(version, gpus, unit, recommended):
    offer = memory_units(gpus, unit, version)
    assert offer.problem is None
    if recommended is None:
        assert offer.warning is None
    else:
        assert f"memoryUnitMiB to {recommended} " in (offer.warning or "")
        assert recommended_unit_mib(gpus, version) == recommended
        assert node_units(gpus, recommended) <= COSTLY_IDS


def test_recommended_unit_is_1_mib_where_many_ids_are_cheap():
    assert recommended_unit_mib([81_920, 81_920], "1.35") == 1
    assert recommended_unit_mib([143_771] * 8, None) == 8


@pytest.mark.parametrize(
    ("text", "version"),
    [("v1.36.2+k3s1", (1, 36)), ("1.9", (1, 9)), ("", None), (None, None), ("k3s v1.30", None)],
)
def test_versions(text, version):
    assert parse_version(text) == version


def test_the_unit_is_not_changed_under_running_pods():
    assert unit_to_use(64, {}) == (64, None)
    assert unit_to_use(64, {64: ["default/a"], 1: []}) == (64, None)
    unit, problem = unit_to_use(64, {1: ["default/a", "default/b", "default/a"]})
    assert unit == 1
    assert problem is not None
    assert "from 1 to 64" in problem
    assert "default/a, default/b;" in problem
    unit, problem = unit_to_use(1, {64: [f"p{i}" for i in range(6)], 32: ["x"]})
    assert unit == 64
    assert "p0, p1, p2 and 3 more" in (problem or "")
