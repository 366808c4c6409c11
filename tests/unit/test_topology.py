"""Which whole cards go together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.sharing.topology import Link, preferred_cards

NVLINK, SWITCH, NUMA = Link.NVLINK, Link.PCIE_SWITCH, Link.NUMA_NODE


def links(**pairs: int) -> dict[frozenset[str], int]:
    return {frozenset(pair): score for pair, score in pairs.items()}


BOARD = links(ab=NVLINK, cd=NVLINK, ac=SWITCH, bd=SWITCH, ef=SWITCH, ad=NUMA, bc=NUMA)


@pytest.mark.parametrize(
    ("available", "must", "size", "chosen"),
    [
        ("abcdef", "", 2, "ab"),
        ("bcdef", "", 2, "cd"),
        ("adf", "", 2, "ad"),
        ("acef", "", 2, "ac"),
        ("abcdef", "c", 2, "cd"),
        ("abcdef", "b", 2, "ba"),
        ("abcdef", "", 4, "abcd"),
        ("abcdef", "", 1, "e"),
        ("abcde", "", 1, "e"),
        ("abc", "", 1, "c"),
        ("abcdef", "ce", 2, "ce"),
        ("abcdef", "ce", 1, "c"),
        ("ab", "", 5, "ab"),
        ("abcdef", "", 0, ""),
        ("ace", "e", 2, "ea"),
    ],
    ids=[
        "NVLink pair",
        "the other NVLink pair",
        "NUMA node before far",
        "switch before far",
        "partner of what must be included",
        "partner of what must be included (2)",
        "two pairs on one switch",
        "one card: leaves the NVLink pairs whole",
        "one card: the lone one",
        "one card: the one without a partner",
        "nothing to choose",
        "more must be included than asked",
        "fewer than asked",
        "none",
        "no links: in order",
    ],
)
def test_choice(available, must, size, chosen):
    assert preferred_cards(available, must, size, BOARD) == tuple(chosen)


def test_more_links_are_better():
    two = links(ab=NVLINK, bc=2 * NVLINK)
    assert set(preferred_cards("abc", "", 2, two)) == {"b", "c"}


def test_one_better_link_outweighs_many_worse():
    star = links(ab=NVLINK, cd=SWITCH, ce=SWITCH, de=SWITCH)
    assert set(preferred_cards("abcde", "", 3, star)) >= {"a", "b"}


def test_many_cards_are_chosen_greedily():
    cards = [f"GPU-{i}" for i in range(24)]
    ring = {frozenset((cards[i], cards[i ^ 1])): int(NVLINK) for i in range(24)}
    chosen = preferred_cards(cards, ["GPU-5"], 8, ring)
    assert len(set(chosen)) == 8
    assert chosen[:2] == ("GPU-5", "GPU-4")
    assert sum(frozenset((c, cards[int(c[4:]) ^ 1])) <= set(chosen) for c in chosen) == 8


@settings(max_examples=50, deadline=None)
@given(st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef"), max_size=3), st.integers(0, 6))
def test_the_answer_is_made_of_what_is_available(available, must, size):
    everything = sorted(available | must)
    chosen = preferred_cards(everything, sorted(must), size, BOARD)
    assert len(chosen) == len(set(chosen)) == min(size, len(everything))
    assert set(chosen) <= set(everything)
    if size >= len(must):
        assert must <= set(chosen)
