"""Token IDs and sets."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.errors import AllocationError
from edgeagent.sharing.tokens import (
    Amounts,
    Demand,
    demand_of,
    describe,
    full,
    highest_n,
    ids_of,
    lowest,
    lowest_n,
    lowest_run,
    numbers,
    parse_ids,
    preferred,
    ranges,
    read_ids,
    token_id,
)

SETS = st.sets(st.integers(0, 3000), max_size=200)


def mask_of(tokens: set[int]) -> int:
    return sum(1 << n for n in tokens)


@settings(max_examples=50, deadline=None)
@given(SETS, st.randoms())
def test_ids_and_masks_are_two_forms_of_the_same_set(tokens, random):
    mask = mask_of(tokens)
    ids = ids_of("m", mask)
    assert ids == [f"m{n:06d}" for n in sorted(tokens)]
    assert list(numbers(mask)) == sorted(tokens)
    random.shuffle(ids)
    assert read_ids("m", ids) == mask
    if tokens:
        assert parse_ids("m", ids, 3001) == mask


@settings(max_examples=50, deadline=None)
@given(SETS)
def test_ranges_are_the_maximal_runs(tokens):
    runs = list(ranges(mask_of(tokens)))
    assert {n for start, stop in runs for n in range(start, stop)} == tokens
    assert all(stop < start for (_, stop), (start, _) in pairwise(runs))


@pytest.mark.parametrize(
    ("ids", "code", "part"),
    [
        ([], "INVALID_ARGUMENT", "names no device ID"),
        (["c000001"], "INVALID_ARGUMENT", "'c000001'"),
        (["m000001", "m00002"], "INVALID_ARGUMENT", "'m00002'"),
        (["m00001", "m0000022"], "INVALID_ARGUMENT", "'m00001'"),
        (["m000001 m000002", ""], "INVALID_ARGUMENT", "'m000001 m000002'"),
        (["m00000¹"], "INVALID_ARGUMENT", "not an ID"),
        (["m٠٠٠٠٠١"], "INVALID_ARGUMENT", "not an ID"),
        (["m+00001"], "INVALID_ARGUMENT", "not an ID"),
        (["m-00001"], "INVALID_ARGUMENT", "not an ID"),
        (["m0_0001"], "INVALID_ARGUMENT", "not an ID"),
        (["m 00001"], "INVALID_ARGUMENT", "not an ID"),
        (["mm00001"], "INVALID_ARGUMENT", "not an ID"),
        (["M000001"], "INVALID_ARGUMENT", "not an ID"),
        (["GPU-1a2b::3"], "INVALID_ARGUMENT", "'GPU-1a2b::3'"),
        (["x" * 10_000], "INVALID_ARGUMENT", "not an ID"),
        (["m000100"], "NOT_FOUND", "m000100: this node never offered it (100 offered)"),
        (["m000099", "m999999"], "NOT_FOUND", "m999999"),
        (["m000007", "m000001", "m000007"], "ALREADY_EXISTS", "m000007 twice"),
    ],
)
def test_bad_ids_are_refused_each_with_its_code(ids, code, part):
    with pytest.raises(AllocationError) as refused:
        parse_ids("m", ids, 100)
    assert refused.value.code == code
    assert refused.value.permanent
    assert part in str(refused.value)
    assert len(str(refused.value)) < 200


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=9), max_size=5))
def test_any_text_is_parsed_or_refused(ids):
    try:
        mask = parse_ids("n", ids, 50)
    except AllocationError:
        assert read_ids("n", ids).bit_count() <= len(ids)
    else:
        assert sorted(ids) == ids_of("n", mask)


def test_junk_among_recorded_ids_is_left_out():
    assert read_ids("m", ["m000003", "GPU-1", "", "c000001", "m00000x", "mm00004", "m000001"]) == 0b1010
    assert read_ids("m", ["junk"]) == 0


def test_nothing_offered_accepts_nothing():
    with pytest.raises(AllocationError, match="0 offered"):
        parse_ids("m", ["m000000"], 0)


@settings(max_examples=50, deadline=None)
@given(SETS, st.integers(0, 250))
def test_lowest_and_highest(tokens, count):
    mask = mask_of(tokens)
    assert list(numbers(lowest_n(mask, count))) == sorted(tokens)[:count]
    assert list(numbers(highest_n(mask, count))) == sorted(tokens)[max(0, len(tokens) - count) :]
    if tokens:
        assert lowest(mask) == min(tokens)


def test_an_empty_set_has_no_lowest_token():
    with pytest.raises(ValueError, match="no lowest"):
        lowest(0)


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 60)), st.integers(1, 20))
def test_lowest_run(tokens, count):
    starts = [n for n in range(61) if all(n + i in tokens for i in range(count))]
    assert lowest_run(mask_of(tokens), count) == (full(count) << starts[0] if starts else 0)


@settings(max_examples=50, deadline=None)
@given(SETS, SETS, st.integers(1, 200))
def test_preference_has_what_must_be_included_and_is_of_the_right_size(available, must, count):
    chosen = preferred(mask_of(available | must), mask_of(must), count)
    assert chosen.bit_count() == min(count, len(available | must))
    assert not chosen & ~mask_of(available | must)
    if count >= len(must):
        assert not mask_of(must) & ~chosen


@pytest.mark.parametrize(
    ("available", "must", "count", "expected"),
    [
        ({0, 1, 2, 3}, set(), 2, {0, 1}),
        ({0, 2, 3, 4, 9}, set(), 3, {2, 3, 4}),
        ({0, 2, 4, 6}, set(), 2, {0, 2}),
        ({0, 1, 5, 6, 7}, {6}, 3, {0, 1, 6}),
        ({5, 6}, {5, 6}, 1, {5}),
    ],
    ids=["lowest", "first run that is long enough", "no run", "must be included", "more than asked"],
)
def test_preference_is_the_lowest_consecutive_tokens(available, must, count, expected):
    assert set(numbers(preferred(mask_of(available), mask_of(must), count))) == expected


def test_demand_is_a_set_of_three_letters():
    a = Demand(memory=0b0111, cores=0b01, shares=0b1)
    b = Demand(memory=0b0100, cores=0b10)
    assert (a | b) == Demand(0b0111, 0b11, 0b1)
    assert (a & b) == Demand(0b0100, 0, 0)
    assert (a - b) == Demand(0b0011, 0b01, 0b1)
    assert a.overlaps(b)
    assert not (a - b).overlaps(b)
    assert a.amounts == Amounts(3, 1, 1)
    assert a.span == Amounts(3, 1, 1)
    assert [a.of(letter) for letter in "mcn"] == [0b0111, 0b01, 0b1]
    assert not Demand()
    assert demand_of("c", 5) == Demand(cores=5)


@pytest.mark.parametrize(
    ("demand", "name"),
    [
        (Demand(memory=0b1100, cores=1, shares=1), "m000002"),
        (Demand(shares=0b10, cores=1), "n000001"),
        (Demand(cores=0b100), "c000002"),
        (Demand(), None),
    ],
)
def test_a_share_is_named_after_its_lowest_token(demand, name):
    assert demand.share_name == name


def test_demands_can_be_shown_however_large():
    assert repr(Demand(memory=full(160_000), shares=0b101)) == "Demand(m0-159999 n0,2)"
    assert describe("m", sum(1 << n for n in range(0, 20, 2))) == "m0,2,4,6,…"


def test_amounts():
    assert Amounts(3, 2, 1).plus(Amounts(1, 1, 1)) == Amounts(4, 3, 2)
    assert Amounts(3, 2, 1).minus(Amounts(5, 1, 1)) == Amounts(0, 1, 0)
    assert Amounts(3, 2, 1).at_least(Amounts(1, 5, 0)) == Amounts(3, 5, 1)


def test_token_ids_sort_as_numbers():
    assert token_id("m", 123) == "m000123"
    assert sorted(token_id("m", n) for n in (10, 9, 100)) == ["m000009", "m000010", "m000100"]
