"""The ledger: which container holds which tokens, and which GPU they lie on.

A token's way: **granted** by Allocate (nobody knows yet for whom), **bound** to a container and a GPU
when the container starts, **released** when the pod is gone. The rules:

- A container is on one GPU, memory, cores and share together. A token lies on at most one GPU and is
  held by at most one pod; the sums on a GPU never exceed its capacity.
- Memory without cores: compute uncapped. It may run where others fill the compute (it was promised
  none), but goes where compute is left when it can. Cores without memory are refused, and so is a number
  above 1. Cores 100 fill the GPU's compute; the memory limit still holds.
- A number alone (`vgpu-number: 1` or HAMi's `nvidia.com/gpu: 1`, nothing else) is what Volcano's and
  HAMi's users write for "one whole GPU": it gets all memory and all compute of a GPU on which nobody
  else is, waits until there is one, and nobody else comes while it is there.
- Containers of one pod share tokens: the kubelet gives an ordinary init container's IDs to the app
  containers. Whoever binds last has them; the former holder has ended. What nobody uses any more stays
  the pod's **leftover** until the pod is gone: no other pod gets it, the pod's own containers may.
- Binding is for one start of a container. The same key binds again at every restart: in its own room,
  which was kept, or on another GPU when its own is sick.
- A GPU that does not accept (cordoned, host overcommit) gives no new room; what lies there stays.

Not thread-safe: the caller locks. No method but `set_capacities`, `grant`, `settle`, `bind`, `retire`,
`rekey`, `release`, `release_pod` and `restore` changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
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
    author ("cordoned", "XID 79: fallen off the bus")."""

    uuid: str
    memory_units: int
    cores: int = 100
    shares: int = 16
    accepting: bool = True
    sick: bool = False
    reason: str = ""

    @property
    def amounts(self) -> Amounts:
        return Amounts(self.memory_units, self.cores, self.shares)


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


class Ledger:
    """See the module's docstring for the rules."""

    def __init__(
        self,
        *,
        unit_mib: int = 1,
        policy: str = "binpack",
        min_share_mib: int = 0,
        wording: Wording | None = None,
    ) -> None:
        """`policy`: "binpack" or "spread" (see placement.py); may be changed at any time."""
        raise NotImplementedError

    # --- what there is ---

    def set_capacities(self, capacities: Iterable[GpuCapacity]) -> None:
        """The GPUs in mode `shared`, in the order they are listed to people; replaces the last set. A
        GPU that is not in it any more counts as sick for those who are bound to it. Raises `offered`."""
        raise NotImplementedError

    def capacities(self) -> tuple[GpuCapacity, ...]:
        raise NotImplementedError

    @property
    def offered(self) -> Amounts:
        """How many tokens of each letter are listed to the kubelet: never fewer than before, and never
        fewer than what anybody holds, while the process lives."""
        raise NotImplementedError

    # --- granted ---

    def grant(self, tokens: Demand) -> None:
        """Allocate gave these to a container yet unknown. Idempotent (replay)."""
        raise NotImplementedError

    def settle(self, held_by_kubelet: Demand) -> None:
        """The kubelet's checkpoint, read while no Allocate was in flight, says that these are held:
        grants that are not among them have been given back."""
        raise NotImplementedError

    def granted(self) -> Demand:
        """Granted and not bound yet."""
        raise NotImplementedError

    # --- bound ---

    def place(
        self,
        key: ContainerKey,
        demand: Demand,
        *,
        kept: Mapping[str, Amounts] | None = None,
        running: Collection[str] = (),
        only: str | None = None,
    ) -> Placement | Refusal:
        """Where `key` may start with the joint `demand` of all its resources; changes nothing.

        `kept`: room per GPU kept for containers that wait longer (`WaitingLine.kept_for_others`).
        `running`: containers of the same pod known to run now; their tokens are not taken over.
        `only`: no other GPU will do (early binding: its UUID is already in the container's env).
        """
        raise NotImplementedError

    def bind(self, key: ContainerKey, demand: Demand, uuid: str) -> Booking:
        """Books `key` on the GPU that `place` named, taking over its tokens from other containers of
        the pod. The same call again changes nothing. Raises AllocationError, with nothing changed, when
        it does not fit there (any more)."""
        raise NotImplementedError

    def restore(self, key: ContainerKey, demand: Demand, uuid: str | None) -> Refusal | None:
        """Books what is known to be so (placements persisted before a restart, oldest first), whatever
        the capacities say: the GPU may be sick, gone or smaller now. Only tokens that another pod holds
        are refused, and then nothing is booked."""
        raise NotImplementedError

    def rekey(self, old: ContainerKey, new: ContainerKey) -> None:
        """A booking made before the container was known (early binding) gets its real key."""
        raise NotImplementedError

    # --- released ---

    def retire(self, key: ContainerKey) -> bool:
        """The container has ended for good (an ordinary init container): its tokens become the pod's
        leftover. True when that changed anything."""
        raise NotImplementedError

    def release(self, key: ContainerKey) -> bool:
        """The container is gone and the kubelet does not keep its tokens. True when it was booked."""
        raise NotImplementedError

    def release_pod(self, pod_uid: str) -> bool:
        """The pod is gone, with everything it held. True when it held anything."""
        raise NotImplementedError

    # --- reading ---

    def booking(self, key: ContainerKey) -> Booking | None:
        raise NotImplementedError

    def bookings(self) -> tuple[Booking, ...]:
        """Every booking, retired ones too, ordered by pod and container."""
        raise NotImplementedError

    def leftovers(self) -> tuple[Leftover, ...]:
        raise NotImplementedError

    def pods(self) -> frozenset[str]:
        """UIDs of pods that hold anything."""
        raise NotImplementedError

    def pod_total(self, pod_uid: str) -> Amounts:
        """What the pod holds: every token once, leftovers included."""
        raise NotImplementedError

    def held(self) -> Demand:
        """Every token that is granted or bound."""
        raise NotImplementedError

    def held_on(self, uuid: str) -> Demand:
        """Tokens that lie on this GPU, leftovers included."""
        raise NotImplementedError

    def used_on(self, uuid: str) -> Amounts:
        """What is promised on this GPU (everything, where one container has it for itself)."""
        raise NotImplementedError

    def free_on(self, uuid: str) -> Amounts:
        """What a new container may get there now: nothing when sick, not accepting, or unknown."""
        raise NotImplementedError

    def unhealthy(self, listed: Demand | None = None) -> Demand:
        """The tokens to list as Unhealthy now, of 0 … offered-1 of each letter. `listed`: those that
        are listed so already (fewest flips). See health_tokens.py for the rule."""
        raise NotImplementedError
