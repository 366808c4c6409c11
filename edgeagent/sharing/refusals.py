"""Why a container cannot start, as the reader of `kubectl describe pod` should read it.

Sentences hold no times and no changing counts, so that Kubernetes folds the same refusal into one event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgeagent.sharing.placement import Candidate
from edgeagent.sharing.shares import GpuCapacity, Refusal, RefusalCode, Wording
from edgeagent.sharing.tokens import CORES, MEMORY, NUMBER, Amounts, Demand, lowest, token_id

_NAMES_IN_A_SENTENCE = 3


@dataclass(frozen=True, slots=True)
class Fit:
    """How a demand would lie on one GPU. `missing`: room that it lacks there; `displace`: leftover of
    the pod that makes way; `possible`: the GPU is large enough; `closed`: it takes nothing new, or is
    sick; `kept`: it would use up room that is kept for others."""

    capacity: GpuCapacity
    candidate: Candidate
    missing: Amounts
    displace: Amounts
    possible: bool
    closed: bool
    kept: bool

    @property
    def fits(self) -> bool:
        return not any(self.missing) and not self.closed


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A pod on a GPU. `whole`: one of its containers has the GPU for itself; `own`: it is the pod of the
    container that is refused."""

    pod_uid: str
    amounts: Amounts
    whole: bool = False
    own: bool = False


class Refusals:
    """Composes refusals in a node's words."""

    def __init__(self, unit_mib: int, wording: Wording) -> None:
        self._unit_mib = unit_mib
        self._words = wording

    def of_demand(self, amounts: Amounts, min_share_mib: int) -> Refusal | None:
        """What no GPU would be asked for."""
        words = self._words
        memory_mib = amounts.memory * self._unit_mib
        if amounts.shares > 1:
            return Refusal(
                RefusalCode.NUMBER_ABOVE_ONE,
                f"cannot give {words.number}: {amounts.shares}: a container gets a share of one GPU, so at "
                f"most 1 (several whole GPUs are mode exclusive's nvidia.com/gpu)",
                permanent=True,
            )
        if amounts.cores and not amounts.memory:
            return Refusal(
                RefusalCode.CORES_WITHOUT_MEMORY,
                f"cannot give {words.cores}: {amounts.cores} without memory: add {words.memory} to the "
                f"container",
                permanent=True,
            )
        if not amounts.memory and not amounts.shares:
            return Refusal(RefusalCode.EMPTY, "cannot place a container that holds no ID", permanent=True)
        if amounts.memory and memory_mib < min_share_mib:
            return Refusal(
                RefusalCode.BELOW_MINIMUM,
                f"cannot give {memory_mib} MiB: the least share on this node is {min_share_mib} MiB (a CUDA "
                f"context needs room)",
                permanent=True,
            )
        return None

    def held(self, holders: Mapping[str, Demand]) -> Refusal:
        """Other pods (by UID) hold some of the same tokens."""
        names = _listed([f"{self._words.pod_name(uid)} ({_sample(held)})" for uid, held in holders.items()])
        return Refusal(
            RefusalCode.HELD,
            f"waiting for {names} to be gone: the kubelet gave this container IDs that are in use there",
            in_the_way=tuple(holders),
        )

    def still_running(self, pod_uid: str, container: str, common: Demand) -> Refusal:
        """A container of the same pod runs with some of the same tokens."""
        return Refusal(
            RefusalCode.STILL_RUNNING,
            f"waiting for container {container} of the same pod to end: the kubelet gave this container IDs "
            f"that it uses ({_sample(common)})",
            in_the_way=(pod_uid,),
        )

    def of_room(
        self,
        demand: Amounts,
        whole: bool,
        fits: Sequence[Fit],
        free_on: Callable[[str], Amounts],
        on_gpu: Callable[[str], Sequence[Obstacle]],
    ) -> Refusal:
        """None of the GPUs looked at takes the demand. `free_on`: what a GPU has free; `on_gpu`: who is
        on it."""
        want = "a whole GPU" if whole else self._text(demand, demand)
        possible = [f for f in fits if f.possible]
        if not fits:
            return Refusal(
                RefusalCode.GPU_UNAVAILABLE, f"waiting for a GPU: none that could give {want} is present now"
            )
        if not possible:
            largest = max((f.capacity for f in fits), key=lambda c: (c.memory_units, c.cores))
            return Refusal(
                RefusalCode.TOO_LARGE,
                f"can never fit here: {want} asked of one GPU, and the largest of this node has "
                f"{self._text(largest.amounts, demand)} to give",
                permanent=True,
            )
        kept = next((f for f in possible if f.fits and f.kept), None)
        if kept:
            return Refusal(
                RefusalCode.KEPT,
                f"waiting: there is room for {want} on {_short(kept.capacity.uuid)}, but it is kept for a "
                f"container that waits longer",
            )
        shut = _listed([_shut(f.capacity) for f in possible if f.closed])
        usable = sorted((f for f in possible if not f.closed), key=lambda f: f.missing)
        if not usable:
            return Refusal(
                RefusalCode.GPU_UNAVAILABLE,
                f"waiting for a GPU: {want} would fit only {shut}, which takes no containers now",
            )
        nearest = usable[0]
        blockers = [_in_the_way(f, on_gpu(f.capacity.uuid)) for f in usable]
        message = (
            f"waiting for room: {'no GPU is empty' if whole else f'no GPU has {want} free'} now; "
            f"{self._largest_block(demand, nearest, usable, free_on)}"
        )
        if blockers[0]:
            names = _listed([self._obstacle(o) for o in blockers[0]])
            message += f"; in the way on {_short(nearest.capacity.uuid)}: {names}"
        if any(f.capacity.withheld and f.missing.memory for f in usable):
            message += "; programs outside of pods use memory there"
        if shut:
            message += f"; not available: {shut}"
        pods = dict.fromkeys(o.pod_uid for found in blockers for o in found)
        return Refusal(RefusalCode.NO_ROOM, message, in_the_way=tuple(pods))

    def _largest_block(
        self, demand: Amounts, nearest: Fit, usable: Sequence[Fit], free_on: Callable[[str], Amounts]
    ) -> str:
        """Of the GPUs with most memory free, the one on which least is missing."""
        if not any(nearest.missing[:2]):
            return f"{_short(nearest.capacity.uuid)} has the memory, but no {self._words.number} left"
        block = max((f.capacity.uuid for f in usable), key=lambda uuid: free_on(uuid).memory)
        if not free_on(block).memory:
            return "no memory is free"
        return f"largest free block: {self._text(free_on(block), demand)} on {_short(block)}"

    def _obstacle(self, obstacle: Obstacle) -> str:
        name = "this pod itself" if obstacle.own else self._words.pod_name(obstacle.pod_uid)
        what = "the whole GPU" if obstacle.whole else self._text(obstacle.amounts, obstacle.amounts)
        return f"{name} ({what})"

    def _text(self, amounts: Amounts, asked: Amounts) -> str:
        """Compute is named where it was `asked` for."""
        text = f"{amounts.memory * self._unit_mib} MiB"
        return f"{text} and {amounts.cores} % of compute" if asked.cores else text


def _in_the_way(fit: Fit, on_gpu: Sequence[Obstacle]) -> list[Obstacle]:
    """Those that hold what is missing, the largest first."""
    holding = [
        o for o in on_gpu if o.whole or any(m and a for m, a in zip(fit.missing, o.amounts, strict=True))
    ]
    return sorted(holding, key=lambda o: (tuple(-a for a in o.amounts), o.pod_uid))


def _sample(tokens: Demand) -> str:
    """ "m000012 and 7 more"."""
    letter, mask = next((x, tokens.of(x)) for x in (MEMORY, CORES, NUMBER) if tokens.of(x))
    more = sum(tokens.amounts) - 1
    return token_id(letter, lowest(mask)) + (f" and {more} more" if more else "")


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - _NAMES_IN_A_SENTENCE
    return ", ".join(texts[:_NAMES_IN_A_SENTENCE]) + (f" and {more} more" if more > 0 else "")


def _shut(capacity: GpuCapacity) -> str:
    state = "sick" if capacity.sick else "takes nothing new"
    return f"{_short(capacity.uuid)} ({capacity.reason or state})"


def _short(uuid: str) -> str:
    """A GPU's UUID as people can still tell it from others: "GPU-1a2b3c4d"."""
    return uuid if len(uuid) <= 20 else uuid[:12]
