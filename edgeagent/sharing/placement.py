"""Which of the GPUs that have room a container goes to.

`binpack` fills the fullest first, so that the largest blocks stay free for large demands; `spread`
evens the load out. Both weigh memory, compute and shares together: a GPU with much memory and no
compute left is worth little to the next pod, so it is the one to fill. Same input, same choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeagent.sharing.tokens import Amounts

POLICIES = ("binpack", "spread")

_PPM = 1_000_000


@dataclass(frozen=True, slots=True)
class Candidate:
    """A GPU with room. `new`: room it would newly give (none in the container's own room); `displaced`:
    leftover units of the pod that would have to make way; `crowded`: an uncapped container would come
    where no compute is left; `position`: place in the node's list of GPUs."""

    uuid: str
    position: int
    capacity: Amounts
    free_after: Amounts
    new: Amounts
    displaced: int = 0
    crowded: bool = False


def choose(policy: str, candidates: Sequence[Candidate]) -> Candidate:
    """The best of `candidates` (at least one). What the pod holds already comes before the policy."""
    if policy not in POLICIES:
        raise ValueError(f"unknown placement policy {policy!r}")
    rank = _binpack_rank(candidates) if policy == "binpack" else [_spread_rank(c) for c in candidates]
    return min(
        zip(candidates, rank, strict=True),
        key=lambda pair: (pair[0].displaced, pair[0].new, pair[0].crowded, pair[1], pair[0].position),
    )[0]


def _binpack_rank(candidates: Sequence[Candidate]) -> list[tuple[int, ...]]:
    """Room left behind as a part of the largest GPU's, so that a small card fills before a large one."""
    memory = max(c.capacity.memory for c in candidates)
    cores = max(c.capacity.cores for c in candidates)
    shares = max(c.capacity.shares for c in candidates)
    return [
        (
            _ppm(c.free_after.memory, memory)
            + _ppm(c.free_after.cores, cores)
            + _ppm(c.free_after.shares, shares),
            c.free_after.memory,
        )
        for c in candidates
    ]


def _spread_rank(candidate: Candidate) -> tuple[int, ...]:
    """Room left behind as a part of this GPU's own, the most first."""
    free, capacity = candidate.free_after, candidate.capacity
    left = sum(_ppm(f, c) for f, c in zip(free, capacity, strict=True))
    return (-left, -free.memory)


def _ppm(part: int, whole: int) -> int:
    return part * _PPM // whole if whole else 0
