"""Device lists on the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeagent.kubelet.encode import HEALTHY_STRIDE, UNHEALTHY_STRIDE, TokenEntries, named_payload
from edgeagent.kubelet.protos.deviceplugin import ListAndWatchResponse
from edgeagent.sharing import units


def read(payload: bytes) -> list[tuple[str, str]]:
    return [(d.ID, d.health) for d in ListAndWatchResponse.FromString(payload).devices]


@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001, 2500, 10_007])
def test_every_token_is_listed_once_in_order(count: int) -> None:
    assert read(TokenEntries("c", count).payload()) == [(f"c{n:06d}", "Healthy") for n in range(count)]


@given(st.integers(1, 2300), st.data())
def test_exactly_the_marked_ones_are_unhealthy(count: int, data: st.DataObject) -> None:
    runs = data.draw(st.lists(st.tuples(st.integers(0, count), st.integers(0, 1500)), max_size=4))
    mask = 0
    for start, length in runs:
        mask |= ((1 << length) - 1) << start
    listed = read(TokenEntries("m", count).payload(mask))
    assert listed == [(f"m{n:06d}", "Unhealthy" if mask >> n & 1 else "Healthy") for n in range(count)]


def test_the_size_is_what_the_sizing_says() -> None:
    assert units.entry_bytes(7, unhealthy=False) == HEALTHY_STRIDE
    assert units.entry_bytes(7) == UNHEALTHY_STRIDE
    entries = TokenEntries("m", 163_840)
    assert len(entries.payload(1 << 163_839)) == 163_839 * HEALTHY_STRIDE + UNHEALTHY_STRIDE
    assert len(entries.payload((1 << 163_840) - 1)) == units.list_bytes(163_840)


def test_all_healthy_is_no_copy() -> None:
    entries = TokenEntries("m", 5000)
    assert entries.payload() is entries.payload(1 << 5000)  # a bit beyond the list means nothing


@pytest.mark.parametrize(("letter", "count"), [("", 1), ("mm", 1), ("m", -1), ("m", 1_000_001)])
def test_what_cannot_be_named_is_refused(letter: str, count: int) -> None:
    with pytest.raises(ValueError, match="cannot encode"):
        TokenEntries(letter, count)


def test_named_devices_carry_health_and_numa_node() -> None:
    message = ListAndWatchResponse.FromString(
        named_payload(
            {"GPU-1": True, "GPU-2::0": False, "GPU-3": True}, {"GPU-1": 1, "GPU-2::0": None, "GPU-3": -1}
        )
    )
    assert [(d.ID, d.health) for d in message.devices] == [
        ("GPU-1", "Healthy"), ("GPU-2::0", "Unhealthy"), ("GPU-3", "Healthy")
    ]  # fmt: skip
    assert [[n.ID for n in d.topology.nodes] for d in message.devices] == [[1], [], []]
