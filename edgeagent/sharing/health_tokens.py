"""Which tokens are listed as Unhealthy, so that the scheduler's node sum is what the node can give.

Tokens belong to no GPU, so a GPU that cannot give its room takes as many tokens out of the sum as it
has units:

- A sick or vanished GPU: those that lie on it first (their pods are hurt, and the kubelet says so), then
  free ones.
- A GPU that gives no new room (cordoned, host overcommit, one container alone on it): those that lie on
  it stay Healthy; free ones for the rest of its units.
- Tokens beyond the units that are there now (a GPU was taken out, the reserve was raised): free ones.
  They stay listed, because IDs that vanish still show Healthy in a pod's status.

A token that somebody holds is never made Unhealthy for a GPU that it does not lie on: a pod that is
being admitted with it would fail ("previously allocated devices are no longer healthy"). Of the free
ones those that are Unhealthy already come first (each flip costs the kubelet), then the highest numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from edgeagent.sharing.tokens import full, highest_n


class Giving(Enum):
    """What a GPU gives."""

    ALL = "all"
    NOTHING_NEW = "nothing_new"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class GpuTokens:
    """One GPU and one letter: how many units it has (0 when it has vanished) and which tokens lie on it."""

    units: int
    lying: int
    giving: Giving


def unhealthy_mask(offered: int, held: int, gpus: Iterable[GpuTokens], listed: int = 0) -> int:
    """The tokens of one letter to list as Unhealthy, of 0 … offered-1.

    `held`: every token that is granted or bound to anybody; `listed`: those listed Unhealthy now.
    """
    sick = 0
    withdrawn = offered  # what is left of it is to be taken out of the free tokens
    for gpu in gpus:
        lying = gpu.lying.bit_count()
        if gpu.giving is Giving.NOTHING:
            sick |= gpu.lying
            withdrawn -= lying  # they are out of the sum already
        elif gpu.giving is Giving.NOTHING_NEW:
            withdrawn -= lying
        else:
            withdrawn -= max(lying, gpu.units)  # more than it has only where it shrank under its pods
    free = full(offered) & ~held
    if withdrawn <= 0 or not free:
        return sick
    keep = highest_n(free & listed, withdrawn)
    return sick | keep | highest_n(free & ~keep, withdrawn - keep.bit_count())
