"""The words of sharing: what is asked for, what is placed, booked or refused. All frozen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from edgeagent.errors import AllocationError
from edgeagent.sharing.tokens import Amounts, Demand


@dataclass(frozen=True, slots=True, order=True)
class ContainerKey:
    """A container of a pod, as the kubelet's checkpoint names it."""

    pod_uid: str
    container: str


@dataclass(frozen=True, slots=True)
class GpuCapacity:
    """What a GPU in mode `shared` has to give. `accepting` False: nothing new goes there (cordoned,
    host overcommit); `sick`: nothing at all, restarts included. `reason` says why, for the pod's
    author ("cordoned", "XID 79: fallen off the bus"). `withheld`: memory units that programs outside
    of pods use: nobody new gets them, and what lies there already stays."""

    uuid: str
    memory_units: int
    cores: int = 100
    shares: int = 16
    accepting: bool = True
    sick: bool = False
    reason: str = ""
    withheld: int = 0

    @property
    def amounts(self) -> Amounts:
        return Amounts(self.memory_units, self.cores, self.shares)

    @property
    def givable(self) -> Amounts:
        """What may be promised in all: without what is withheld."""
        return self.amounts.minus(Amounts(memory=self.withheld))


class RefusalCode(str, Enum):
    """Why a demand is not placed. The value is the machine form in events; `status` the gRPC name."""

    EMPTY = "empty"  # no token at all
    CORES_WITHOUT_MEMORY = "cores_without_memory"
    NUMBER_ABOVE_ONE = "number_above_one"
    BELOW_MINIMUM = "below_minimum"  # smaller than minShareMiB
    TOO_LARGE = "too_large"  # larger than every GPU of this node
    NO_ROOM = "no_room"  # would fit a GPU, not now
    KEPT = "kept"  # there is room, kept for a container that waits longer
    GPU_UNAVAILABLE = "gpu_unavailable"  # only a sick, cordoned or vanished GPU could hold it
    HELD = "held"  # another living pod holds some of the same IDs
    STILL_RUNNING = "still_running"  # a running container of the same pod uses some of the same IDs

    @property
    def status(self) -> str:
        return _STATUS[self]


_STATUS = {
    RefusalCode.EMPTY: "INVALID_ARGUMENT",
    RefusalCode.CORES_WITHOUT_MEMORY: "FAILED_PRECONDITION",
    RefusalCode.NUMBER_ABOVE_ONE: "UNIMPLEMENTED",
    RefusalCode.BELOW_MINIMUM: "OUT_OF_RANGE",
    RefusalCode.TOO_LARGE: "OUT_OF_RANGE",
    RefusalCode.NO_ROOM: "RESOURCE_EXHAUSTED",
    RefusalCode.KEPT: "RESOURCE_EXHAUSTED",
    RefusalCode.GPU_UNAVAILABLE: "UNAVAILABLE",
    RefusalCode.HELD: "ABORTED",
    RefusalCode.STILL_RUNNING: "ABORTED",
}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a container may start. Nothing is booked until `bind`.

    `memory_units` is its limit (all of the GPU's for a whole card); `cores` None: compute uncapped;
    `whole`: it asked for a number only and gets the GPU for itself. `previous_uuid` is the GPU of its
    last start, when that was another one (the runtime may have cached the old CDI spec)."""

    uuid: str
    memory_units: int
    cores: int | None
    whole: bool = False
    previous_uuid: str | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a container cannot start now (`permanent` False: waiting helps) or ever on this node.
    `message` is for the reader of `kubectl describe pod`; `in_the_way` are pods whose end would help."""

    code: RefusalCode
    message: str
    permanent: bool = False
    in_the_way: tuple[str, ...] = ()  # pod UIDs

    @property
    def status(self) -> str:
        """Name of the gRPC status code."""
        return self.code.status

    def error(self) -> AllocationError:
        return AllocationError(self.message, code=self.status, permanent=self.permanent)


@dataclass(frozen=True, slots=True)
class Booking:
    """One container in the ledger. `uuid` None: restored without knowing its GPU (it counts on every
    GPU until it is bound again or gone). `retired`: it has ended for good or another container of the
    pod took its tokens over; it has no limit any more, what is left of its tokens is the pod's."""

    key: ContainerKey
    demand: Demand
    uuid: str | None
    memory_units: int
    cores: int | None
    whole: bool = False
    retired: bool = False


@dataclass(frozen=True, slots=True)
class Leftover:
    """Tokens that a pod holds and none of its containers uses. `uuid` None: they lie on no GPU (they
    made way for another container of the pod)."""

    pod_uid: str
    uuid: str | None
    tokens: Demand


@dataclass(frozen=True, slots=True)
class Wording:
    """How the ledger's sentences name things. `pod_name` turns a pod UID into what people know it by
    ("default/train")."""

    memory: str = "volcano.sh/vgpu-memory"
    cores: str = "volcano.sh/vgpu-cores"
    number: str = "volcano.sh/vgpu-number"
    pod_name: Callable[[str], str] = str


@dataclass(frozen=True, slots=True)
class Outlook:
    """A GPU that could hold a demand once others have left: `new` is the room it needs there, `missing`
    how much of it is not free yet."""

    uuid: str
    new: Amounts
    missing: Amounts
