"""Units of memory: how many a GPU gives, how many a demand takes, and what the kubelet can swallow.

MiB is 2**20 bytes. Supply is floored, demand is ceiled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edgeagent.sharing.tokens import ID_BYTES, MAX_TOKENS

KUBELET_MESSAGE_BYTES = 4_194_304  # gRPC's default receive cap, which the kubelet does not raise
LIST_BYTES = KUBELET_MESSAGE_BYTES - 65_536  # what we send at most: a margin for what we do not know

# From 1.36 ResourceHealthStatus is on by default: the kubelet's cost of an update grows with
# (flipped IDs) x (allocated IDs), so a node should stay near a thousand.
COSTLY_FROM_VERSION = (1, 36)
COSTLY_IDS = 1_280
RECOMMENDED_UNIT_MIB = 64  # the unit of the shipped admission policy; never recommend a finer one

UNIFIED_RESERVE_MIB = 1_536
UNIFIED_RESERVE_FRACTION = 0.2

_VERSION = re.compile(r"v?(\d+)\.(\d+)")


def usable_mib(total_mib: int, driver_reserved_mib: int | None = None, reserve_mib: int = 0) -> int:
    """MiB of a discrete GPU that may be promised."""
    return max(0, total_mib - (driver_reserved_mib or 0) - reserve_mib)


def unified_reserve_mib(mem_total_mib: int, configured_mib: int | None = None) -> int:
    """MiB of a unified-memory machine kept for the host: as configured, else max(1536, 20 %)."""
    if configured_mib is not None:
        return configured_mib
    return max(UNIFIED_RESERVE_MIB, math.ceil(mem_total_mib * UNIFIED_RESERVE_FRACTION))


def unified_usable_mib(mem_total_mib: int, configured_reserve_mib: int | None = None) -> int:
    """MiB of a unified-memory GPU (Jetson, GB10) that may be promised."""
    return max(0, mem_total_mib - unified_reserve_mib(mem_total_mib, configured_reserve_mib))


def supply_units(mib: int, unit_mib: int) -> int:
    """Whole units in `mib`."""
    return mib // unit_mib


def demand_units(mib: int, unit_mib: int) -> int:
    """Units that hold `mib`."""
    return -(-mib // unit_mib)


def entry_bytes(id_bytes: int, *, numa: bool = False, unhealthy: bool = True) -> int:
    """Bytes of one device in a ListAndWatch message: its ID, "Unhealthy" or "Healthy", and, with
    `numa`, a topology of one NUMA node below 128."""
    # Fields of Device: ID = 1, health = 2, topology = 3 {nodes = 1 {ID = 1}}; one tag byte each.
    body = _field_bytes(id_bytes) + _field_bytes(9 if unhealthy else 7) + (6 if numa else 0)
    return _field_bytes(body)


def _field_bytes(length: int) -> int:
    """Bytes of a length-delimited protobuf field with a tag below 16."""
    return 1 + _varint_bytes(length) + length


def _varint_bytes(value: int) -> int:
    return max(1, (value.bit_length() + 6) // 7)


def list_bytes(count: int, id_bytes: int = ID_BYTES, *, numa: bool = False, unhealthy: bool = True) -> int:
    """Bytes of a ListAndWatch message of `count` devices; by default in the worst case, all Unhealthy."""
    return count * entry_bytes(id_bytes, numa=numa, unhealthy=unhealthy)


def max_count(id_bytes: int = ID_BYTES, *, numa: bool = False) -> int:
    """The most devices of one resource that the kubelet takes, even if all are Unhealthy."""
    return min(MAX_TOKENS, LIST_BYTES // entry_bytes(id_bytes, numa=numa))


def node_units(usable_mibs: Iterable[int], unit_mib: int) -> int:
    """Units of a node: each GPU's floored on its own."""
    return sum(supply_units(mib, unit_mib) for mib in usable_mibs)


def smallest_unit_mib(usable_mibs: Sequence[int], at_most: int, at_least_mib: int = 1) -> int:
    """The smallest power of two of MiB, not below `at_least_mib`, with at most `at_most` units."""
    unit = 1
    while unit < at_least_mib or node_units(usable_mibs, unit) > at_most:
        unit *= 2
    return unit


@dataclass(frozen=True, slots=True)
class MemoryUnits:
    """How a node's memory is offered. `problem`: it cannot be, and why, with the unit that fits;
    `warning`: it can, but this many IDs hurt the kubelet of this cluster."""

    unit_mib: int
    count: int
    list_bytes: int
    problem: str | None = None
    warning: str | None = None


def memory_units(
    usable_mibs: Sequence[int],
    unit_mib: int,
    cluster_version: str | None = None,
) -> MemoryUnits:
    """Sizes the list of memory units of a node before it is sent. `usable_mibs`: one per GPU in mode
    shared; `cluster_version`: "v1.36.2+k3s1", or None where it is not known."""
    count = node_units(usable_mibs, unit_mib)
    size = list_bytes(count)
    most = max_count()
    problem = warning = None
    if count > most:
        fits = smallest_unit_mib(usable_mibs, most)
        problem = (
            f"cannot offer {count} units of {unit_mib} MiB: the list would be {size} bytes and the kubelet "
            f"takes {KUBELET_MESSAGE_BYTES} (at most {most} units); set memoryUnitMiB to {fits} or more"
        )
    elif usable_mibs and count == 0:
        problem = (
            f"cannot offer units of {unit_mib} MiB: no GPU has that much usable memory "
            f"(largest: {max(usable_mibs)} MiB)"
        )
    elif (version := parse_version(cluster_version)) and version >= COSTLY_FROM_VERSION:
        better = recommended_unit_mib(usable_mibs, cluster_version)
        if count > COSTLY_IDS and better > unit_mib:
            warning = (
                f"{count} IDs of {unit_mib} MiB make the kubelet of Kubernetes {version[0]}.{version[1]} "
                f"slow (its cost grows with their square); set memoryUnitMiB to {better} and apply the "
                f"admission policy that rewrites MiB"
            )
    return MemoryUnits(unit_mib, count, size, problem, warning)


def recommended_unit_mib(usable_mibs: Sequence[int], cluster_version: str | None) -> int:
    """The unit to offer: the finest that the kubelet takes, and from Kubernetes 1.36 one that keeps the
    node near a thousand IDs."""
    version = parse_version(cluster_version)
    if version is not None and version >= COSTLY_FROM_VERSION:
        return smallest_unit_mib(usable_mibs, COSTLY_IDS, RECOMMENDED_UNIT_MIB)
    return smallest_unit_mib(usable_mibs, max_count())


def parse_version(text: str | None) -> tuple[int, int] | None:
    """(1, 36) of "v1.36.2+k3s1" or "1.36"; None when it is not a version."""
    match = _VERSION.match(text or "")
    return (int(match[1]), int(match[2])) if match else None


def unit_to_use(configured_mib: int, in_use: Mapping[int, Sequence[str]]) -> tuple[int, str | None]:
    """The unit to offer now, and why it is not the configured one.

    `in_use`: for each unit in which living pods hold memory tokens, their names. A token of one unit
    must never be read as one of another, so a new unit waits until the holders of the old one are gone.
    """
    others = {unit: pods for unit, pods in in_use.items() if unit != configured_mib and pods}
    if not others:
        return configured_mib, None
    # More than one: an earlier change was forced. The one with the most holders stays.
    unit = max(others, key=lambda u: (len(others[u]), u))
    pods = list(dict.fromkeys(others[unit]))
    names = ", ".join(pods[:3]) + (f" and {len(pods) - 3} more" if len(pods) > 3 else "")
    return unit, (
        f"cannot change memoryUnitMiB from {unit} to {configured_mib} under running pods: still held by "
        f"{names}; the old unit stays until they are gone and the agent starts again"
    )
