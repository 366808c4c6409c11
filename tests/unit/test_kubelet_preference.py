"""GetPreferredAllocation on the wire gives what sharing's rule gives, in every layout of the request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeagent.errors import AllocationError
from edgeagent.kubelet.preference import answer
from edgeagent.kubelet.protos.deviceplugin import PreferredAllocationRequest, PreferredAllocationResponse
from edgeagent.sharing.tokens import full, ids_of, preferred, read_ids

TOKENS = st.sets(st.integers(0, 400), max_size=300)


def mask_of(numbers: set[int]) -> int:
    return sum(1 << n for n in numbers)


def ask(request: PreferredAllocationRequest, free: int) -> list[list[str]]:
    response = PreferredAllocationResponse.FromString(answer(request.SerializeToString(), "m", free))
    return [list(r.deviceIDs) for r in response.container_responses]


@given(TOKENS, TOKENS, TOKENS, st.integers(0, 320), st.randoms(use_true_random=False))
def test_never_more_than_asked_always_what_must_be_and_only_what_is_available(
    available: set[int], must: set[int], free: set[int], size: int, rng: object
) -> None:
    request = PreferredAllocationRequest()
    ids = [f"m{n:06d}" for n in sorted(available | must)]
    rng.shuffle(ids)  # type: ignore[attr-defined]
    request.container_requests.add(
        available_deviceIDs=ids,
        must_include_deviceIDs=[f"m{n:06d}" for n in sorted(must)],
        allocation_size=size,
    )
    ((chosen),) = ask(request, mask_of(free))
    numbers = {int(i[1:]) for i in chosen}
    assert len(chosen) == len(numbers) == min(size, len(available | must))
    assert numbers <= available | must
    if size >= len(must):
        assert must <= numbers
    # Tokens that somebody is known to hold are taken only when the free ones do not suffice.
    if len((available & free) | must) >= size:
        assert numbers <= (available & free) | must


def test_the_answer_is_the_lowest_piece_that_is_free() -> None:
    request = PreferredAllocationRequest()
    request.container_requests.add(available_deviceIDs=ids_of("m", full(30_000)), allocation_size=7_000)
    free = full(30_000) & ~full(2_500) & ~(full(10) << 5_000)
    assert ask(request, free) == [ids_of("m", preferred(free, 0, 7_000))]
    assert read_ids("m", ask(request, free)[0]) == full(7_000) << 5_010


def test_a_wish_over_many_ten_thousands() -> None:
    request = PreferredAllocationRequest()
    request.container_requests.add(available_deviceIDs=ids_of("m", full(100_000)), allocation_size=70_000)
    assert len(ask(request, full(100_000))[0]) == 70_000


@pytest.mark.parametrize("containers", [0, 1, 3])
def test_any_number_of_containers(containers: int) -> None:
    request = PreferredAllocationRequest()
    for _ in range(containers):
        request.container_requests.add(available_deviceIDs=["m000003", "m000001"], allocation_size=1)
    assert ask(request, full(10)) == [["m000001"]] * containers


def test_what_is_no_token_is_left_out() -> None:
    request = PreferredAllocationRequest()
    request.container_requests.add(
        available_deviceIDs=["m000001", "GPU-1", "c000002", "m00000x", "m0000002", ""], allocation_size=3
    )
    assert ask(request, full(10)) == [["m000001"]]


def test_an_empty_list_and_a_negative_size() -> None:
    request = PreferredAllocationRequest()
    request.container_requests.add(allocation_size=2)
    request.container_requests.add(available_deviceIDs=["m000001"], allocation_size=-5)
    assert ask(request, full(10)) == [[], []]


@given(st.binary(max_size=60))
def test_junk_is_an_answer_or_a_refusal(raw: bytes) -> None:
    try:
        PreferredAllocationResponse.FromString(answer(raw, "m", full(10)))
    except AllocationError as e:
        assert e.code == "INVALID_ARGUMENT"
