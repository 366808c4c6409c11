"""IDs that name their device."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.errors import AllocationError
from edgeagent.sharing.replicas import (
    check_request_size,
    device_of,
    devices_of,
    preferred_replicas,
    replica_ids,
)

OFFERED = {*replica_ids("GPU-a", 3), *replica_ids("GPU-b", 3), *replica_ids("MIG-c", 1)}


def test_ids_are_nvidias():
    assert replica_ids("GPU-a", 1) == ("GPU-a",)
    assert replica_ids("GPU-a", 3) == ("GPU-a::0", "GPU-a::1", "GPU-a::2")
    assert [device_of(i) for i in ("GPU-a", "GPU-a::2", "MIG-c::10")] == ["GPU-a", "GPU-a", "MIG-c"]


def test_devices_behind_ids():
    assert devices_of(["GPU-b::1", "GPU-a::0", "GPU-b::0", "MIG-c"], OFFERED) == ("GPU-b", "GPU-a", "MIG-c")


@pytest.mark.parametrize(
    ("ids", "code"),
    [
        ([], "INVALID_ARGUMENT"),
        (["GPU-a::3"], "NOT_FOUND"),
        (["GPU-a"], "NOT_FOUND"),
        (["GPU-a::0", "GPU-b::1", "GPU-a::0"], "ALREADY_EXISTS"),
    ],
)
def test_bad_ids(ids, code):
    with pytest.raises(AllocationError) as refused:
        devices_of(ids, OFFERED)
    assert (refused.value.code, refused.value.permanent) == (code, True)


def test_requests_for_more_than_one_replica_fail_where_that_is_asked_for():
    ids = ["GPU-a::0", "GPU-a::1"]
    check_request_size("nvidia.com/gpu", ids, fail_above_one=False)
    check_request_size("nvidia.com/gpu", ids[:1], fail_above_one=True)
    with pytest.raises(AllocationError, match=r"nvidia\.com/gpu: 2: .*failRequestsGreaterThanOne") as refused:
        check_request_size("nvidia.com/gpu", ids, fail_above_one=True)
    assert refused.value.code == "INVALID_ARGUMENT"


A = list(replica_ids("GPU-a", 4))
B = list(replica_ids("GPU-b", 4))


@pytest.mark.parametrize(
    ("available", "must", "size", "distributed", "packed"),
    [
        (A + B, [], 2, ["GPU-a::0", "GPU-b::0"], ["GPU-a::0", "GPU-a::1"]),
        (A[1:] + B, [], 1, ["GPU-b::0"], ["GPU-a::1"]),
        (A[3:] + B[2:], [], 2, ["GPU-b::2", "GPU-a::3"], ["GPU-a::3", "GPU-b::2"]),
        (A + B, ["GPU-a::2"], 2, ["GPU-a::2", "GPU-b::0"], ["GPU-a::2", "GPU-a::0"]),
        (A[:1], [], 3, ["GPU-a::0"], ["GPU-a::0"]),
        (A, ["GPU-a::0", "GPU-a::1"], 1, ["GPU-a::0"], ["GPU-a::0"]),
    ],
    ids=["empty", "one in use", "uneven", "must include", "too few", "must include more than asked"],
)
def test_distributed_and_packed(available, must, size, distributed, packed):
    replicas = {"GPU-a": 4, "GPU-b": 4}
    assert list(preferred_replicas(available, must, size, replicas)) == distributed
    assert list(preferred_replicas(available, must, size, replicas, "packed")) == packed


@settings(max_examples=50, deadline=None)
@given(
    st.sets(st.sampled_from(A + B)),
    st.sets(st.sampled_from(A + B), max_size=3),
    st.integers(0, 8),
    st.sampled_from(["distributed", "packed"]),
)
def test_the_answer_is_made_of_what_is_available(available, must, size, policy):
    everything = sorted(available | must)
    chosen = preferred_replicas(everything, sorted(must), size, {"GPU-a": 4, "GPU-b": 4}, policy)
    assert len(chosen) == len(set(chosen)) == min(size, len(everything))
    assert set(chosen) <= set(everything)
    if size >= len(must):
        assert must <= set(chosen)


def test_an_unknown_policy_is_an_error():
    with pytest.raises(ValueError, match="'random'"):
        preferred_replicas(A, [], 1, {}, "random")
