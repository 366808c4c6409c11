"""binpack and spread."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.sharing.ledger import ContainerKey, GpuCapacity, Ledger, Placement
from edgeagent.sharing.placement import Candidate, choose
from edgeagent.sharing.tokens import Amounts, Demand, full


def ledger(policy: str, *gpus: tuple[int, int, int]) -> Ledger:
    """GPUs as (units, used memory, used cores)."""
    book = Ledger(policy=policy)
    book.set_capacities(GpuCapacity(f"GPU-{i}", units) for i, (units, _, _) in enumerate(gpus))
    memory = cores = 0
    for i, (_, used, compute) in enumerate(gpus):
        if used or compute:
            demand = Demand(full(used) << memory, full(compute) << cores)
            book.restore(ContainerKey(f"there{i}", "main"), demand, f"GPU-{i}")
            memory, cores = memory + used, cores + compute
    return book


def place(book: Ledger, memory: int, cores: int = 0, shares: int = 0) -> str:
    demand = Demand(full(memory) << 10_000, full(cores) << 10_000, full(shares) << 10_000)
    answer = book.place(ContainerKey("new", "main"), demand)
    assert isinstance(answer, Placement), answer
    return answer.uuid


@pytest.mark.parametrize(
    ("gpus", "demand", "binpack", "spread"),
    [
        ([(32, 0, 0), (32, 0, 0)], (8, 0), 0, 0),
        ([(32, 0, 0), (32, 8, 0)], (8, 0), 1, 0),
        ([(32, 20, 0), (32, 16, 0)], (8, 0), 0, 1),
        ([(32, 28, 0), (32, 16, 0)], (8, 0), 1, 1),
        ([(80, 0, 0), (24, 0, 0)], (8, 0), 1, 0),
        ([(80, 40, 0), (24, 0, 0)], (8, 0), 1, 1),
        ([(32, 16, 90), (32, 20, 0)], (4, 10), 0, 1),
        ([(32, 0, 100), (32, 20, 0)], (4, 10), 1, 1),
        ([(32, 8, 30), (32, 8, 0)], (8, 0), 0, 1),
    ],
    ids=[
        "all empty: the first",
        "the fuller one",
        "the fullest that has room",
        "where it fits",
        "the small card before the large",
        "the small card even when empty",
        "compute used up counts as full",
        "compute full does not fit",
        "compute decides between equals",
    ],
)
def test_policies(gpus, demand, binpack, spread):
    assert place(ledger("binpack", *gpus), *demand) == f"GPU-{binpack}"
    assert place(ledger("spread", *gpus), *demand) == f"GPU-{spread}"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(8, 64), st.integers(0, 8)), min_size=2, max_size=5), st.integers(1, 20))
def test_binpack_keeps_the_largest_block_free(gpus, want):
    """By memory alone: the largest block is touched only when nothing smaller would do."""
    book = ledger("binpack", *((units, used, 0) for units, used in gpus))
    free = {f"GPU-{i}": units - used for i, (units, used) in enumerate(gpus)}
    if max(free.values()) < want:
        return
    chosen = place(book, want)
    after = {**free, chosen: free[chosen] - want}
    best = max(max({**free, u: free[u] - want}.values()) for u in free if free[u] >= want)
    assert max(after.values()) == best


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.builds(Amounts, st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)), min_size=1),
    st.randoms(),
    st.sampled_from(["binpack", "spread"]),
)
def test_the_choice_does_not_depend_on_the_order_of_looking(rooms, random, policy):
    room = Amounts(9, 9, 3)
    candidates = [Candidate(f"GPU-{i}", i, room, free, Amounts()) for i, free in enumerate(rooms)]
    chosen = choose(policy, candidates)
    random.shuffle(candidates)
    assert choose(policy, candidates) is chosen


def test_what_is_held_already_comes_before_the_policy():
    room = Amounts(10, 100, 16)
    own = Candidate("own", 1, room, free_after=room, new=Amounts())
    full_one = Candidate("full", 0, room, free_after=Amounts(), new=Amounts(4))
    way = Candidate("way", 0, room, free_after=Amounts(), new=Amounts(), displaced=1)
    assert choose("binpack", [full_one, way, own]) is own
    assert choose("binpack", [way, full_one]) is full_one


def test_an_unknown_policy_is_an_error():
    with pytest.raises(ValueError, match="'tetris'"):
        choose("tetris", [Candidate("a", 0, Amounts(), Amounts(), Amounts())])
