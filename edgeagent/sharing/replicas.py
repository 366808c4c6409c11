"""IDs of whole cards, replicas and MIG instances: they name their device, as NVIDIA's plugin does it, so
that other exporters understand them.

A device alone is its UUID; replica n of it is `<uuid>::<n>`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from edgeagent.errors import AllocationError

SEPARATOR = "::"
POLICIES = ("distributed", "packed")


def replica_ids(uuid: str, replicas: int) -> tuple[str, ...]:
    """The IDs of a device that is offered `replicas` times (1: as it is)."""
    return (uuid,) if replicas == 1 else tuple(f"{uuid}{SEPARATOR}{n}" for n in range(replicas))


def device_of(device_id: str) -> str:
    """The UUID in an ID."""
    return device_id.partition(SEPARATOR)[0]


def devices_of(ids: Sequence[str], offered: Collection[str]) -> tuple[str, ...]:
    """The devices behind `ids`, each once, in their order.

    Raises AllocationError: INVALID_ARGUMENT for no ID, NOT_FOUND for one never offered, ALREADY_EXISTS
    for one that comes twice.
    """
    if not ids:
        raise AllocationError(
            "cannot grant nothing: the request names no device ID", code="INVALID_ARGUMENT", permanent=True
        )
    for device_id, times in Counter(ids).items():
        if device_id not in offered:
            raise AllocationError(
                f"cannot grant {device_id[:80]!r}: this node never offered it",
                code="NOT_FOUND",
                permanent=True,
            )
        if times > 1:
            raise AllocationError(
                f"cannot grant {device_id} twice in one request", code="ALREADY_EXISTS", permanent=True
            )
    return tuple(dict.fromkeys(map(device_of, ids)))


def check_request_size(resource: str, ids: Sequence[str], *, fail_above_one: bool) -> None:
    """NVIDIA's failRequestsGreaterThanOne: two replicas give no more compute than one, so a request for
    more than one is refused instead of misunderstood. Raises AllocationError (INVALID_ARGUMENT)."""
    if fail_above_one and len(ids) > 1:
        raise AllocationError(
            f"cannot grant {resource}: {len(ids)}: replicas of a GPU share it, more than one give no more "
            f"of it (failRequestsGreaterThanOne)",
            code="INVALID_ARGUMENT",
            permanent=True,
        )


def preferred_replicas(
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    replicas: Mapping[str, int],
    policy: str = "distributed",
) -> tuple[str, ...]:
    """`size` of `available`, all of `must_include` among them. `distributed`: from the devices with the
    fewest replicas in use (different ones for one container while there are any), `packed`: the most.
    `replicas`: how often each device is offered; ties go to the order of `available`."""
    if policy not in POLICIES:
        raise ValueError(f"unknown policy for replicas {policy!r}")
    chosen = list(dict.fromkeys(must_include))
    queues: dict[str, list[str]] = {}
    for device_id in dict.fromkeys(available):
        if device_id not in chosen:
            queues.setdefault(device_of(device_id), []).append(device_id)
    in_use = {device: replicas.get(device, len(queue)) - len(queue) for device, queue in queues.items()}
    sign = 1 if policy == "distributed" else -1
    while len(chosen) < size and queues:
        device = min(queues, key=lambda d: sign * in_use[d])
        chosen.append(queues[device].pop(0))
        in_use[device] += 1
        if not queues[device]:
            del queues[device]
    return tuple(chosen[:size])
