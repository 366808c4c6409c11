"""Which tokens are Unhealthy (rule 5)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.sharing.health_tokens import Giving, GpuTokens, unhealthy_mask
from edgeagent.sharing.tokens import full, numbers

ALL, NOTHING_NEW, NOTHING = Giving.ALL, Giving.NOTHING_NEW, Giving.NOTHING


def mask(*tokens: int) -> int:
    return sum(1 << n for n in tokens)


@pytest.mark.parametrize(
    ("offered", "held", "gpus", "expected"),
    [
        (8, mask(0, 5), [(4, mask(0), ALL), (4, mask(5), ALL)], []),
        (8, mask(0, 5), [(4, mask(0), NOTHING), (4, mask(5), ALL)], [0, 4, 6, 7]),
        (8, 0, [(4, 0, NOTHING), (4, 0, ALL)], [4, 5, 6, 7]),
        (8, 0, [(4, 0, NOTHING), (4, 0, NOTHING)], list(range(8))),
        (8, mask(0, 5), [(4, mask(0), NOTHING_NEW), (4, mask(5), ALL)], [4, 6, 7]),
        (8, mask(0), [(0, mask(0), NOTHING), (4, 0, ALL)], [0, 5, 6, 7]),
        (8, 0, [(3, 0, ALL), (3, 0, ALL)], [6, 7]),
        (8, full(7), [(4, 0, NOTHING), (4, 0, ALL)], [7]),
        (8, mask(0, 1, 2), [(2, mask(0, 1, 2), ALL), (4, 0, ALL)], [7]),
        (0, 0, [], []),
        (4, mask(1), [], [0, 2, 3]),
    ],
    ids=[
        "all well",
        "sick: what lies there, then the highest free",
        "sick and empty",
        "all sick",
        "cordoned: what lies there stays Healthy",
        "vanished: what lies there, and surplus",
        "surplus",
        "never one that somebody holds and that lies elsewhere",
        "a GPU that shrank under its pods takes nothing from others",
        "nothing offered",
        "no GPU: what is held stays Healthy",
    ],
)
def test_table(offered, held, gpus, expected):
    assert list(numbers(unhealthy_mask(offered, held, [GpuTokens(*g) for g in gpus]))) == expected


GPUS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 20), st.sampled_from(list(Giving))), min_size=1, max_size=4
)


@settings(max_examples=50, deadline=None)
@given(GPUS, st.integers(0, 10), st.randoms())
def test_the_sum_is_what_the_gpus_give(gpus, waiting, random):
    """Healthy tokens are: those of GPUs that give, and those that lie on GPUs that keep."""
    offered = sum(units for units, _, _ in gpus)
    tokens = list(range(offered))
    random.shuffle(tokens)
    placed = []
    held = 0
    for units, lying, giving in gpus:
        here = mask(*(tokens.pop() for _ in range(min(lying, units))))
        held |= here
        placed.append(GpuTokens(units, here, giving))
    granted = mask(*(tokens.pop() for _ in range(min(waiting, len(tokens)))))
    held |= granted
    unhealthy = unhealthy_mask(offered, held, placed)
    sick = sum(g.lying for g in placed if g.giving is NOTHING)
    assert unhealthy & held == sick
    gives = sum(
        g.units if g.giving is ALL else g.lying.bit_count() for g in placed if g.giving is not NOTHING
    )
    healthy = offered - unhealthy.bit_count()
    # What is granted and lies nowhere yet stays Healthy even where nothing gives room for it.
    assert healthy == max(gives, (held & ~sick).bit_count())


@settings(max_examples=50, deadline=None)
@given(GPUS, st.integers(0, 2**20 - 1))
def test_fewest_flips(gpus, listed):
    offered = sum(units for units, _, _ in gpus)
    placed = [GpuTokens(units, 0, giving) for units, _, giving in gpus]
    fresh = unhealthy_mask(offered, 0, placed)
    kept = unhealthy_mask(offered, 0, placed, listed)
    assert kept.bit_count() == fresh.bit_count()
    assert (kept & listed).bit_count() == min(kept.bit_count(), (listed & full(offered)).bit_count())
    assert unhealthy_mask(offered, 0, placed, kept) == kept
