"""Which whole cards go together when a container asks for several.

NVLink beats a shared PCIe switch, which beats a shared NUMA node; among equal choices the one that
leaves the other cards best connected to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import combinations
from math import comb

# More ways to choose than this are not all tried: eight of sixteen cards are 12,870.
_TRIED_AT_MOST = 20_000


class Link(IntEnum):
    """How two cards are connected, as a score: one better link outweighs any number of worse ones
    (16 cards have 120 pairs)."""

    FAR = 0
    NUMA_NODE = 1
    PCIE_SWITCH = 1_000
    NVLINK = 1_000_000


Links = Mapping[frozenset[str], int]
"""Score of each pair of UUIDs; a pair that is not there is FAR. Several NVLinks add up."""


def preferred_cards(
    available: Sequence[str], must_include: Sequence[str], size: int, links: Links
) -> tuple[str, ...]:
    """`size` of `available` (whose order breaks ties), all of `must_include` among them."""
    must = list(dict.fromkeys(must_include))
    rest = [uuid for uuid in dict.fromkeys(available) if uuid not in must]
    missing = min(size - len(must), len(rest))
    if missing <= 0:
        return tuple(must[:size])
    if comb(len(rest), missing) <= _TRIED_AT_MOST:
        best = max(
            combinations(rest, missing),
            key=lambda chosen: (
                _inner([*must, *chosen], links),
                _inner([uuid for uuid in rest if uuid not in chosen], links),
            ),
        )
        return (*must, *best)
    chosen = list(must)
    while missing:
        nearest = max(rest, key=lambda uuid: (_to(uuid, chosen, links), _to(uuid, rest, links)))
        chosen.append(nearest)
        rest.remove(nearest)
        missing -= 1
    return tuple(chosen)


def _inner(uuids: Sequence[str], links: Links) -> int:
    return sum(links.get(frozenset(pair), 0) for pair in combinations(uuids, 2))


def _to(uuid: str, others: Sequence[str], links: Links) -> int:
    return sum(links.get(frozenset((uuid, other)), 0) for other in others if other != uuid)
