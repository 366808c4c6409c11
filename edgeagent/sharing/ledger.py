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

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from edgeagent.sharing.health_tokens import Giving, GpuTokens, unhealthy_mask
from edgeagent.sharing.placement import Candidate, choose
from edgeagent.sharing.refusals import Fit, Obstacle, Refusals
from edgeagent.sharing.shares import (
    Booking,
    ContainerKey,
    GpuCapacity,
    Leftover,
    Outlook,
    Placement,
    Refusal,
    RefusalCode,
    Wording,
)
from edgeagent.sharing.tokens import CORES, MEMORY, NUMBER, Amounts, Demand, highest_n

__all__ = [
    "Booking",
    "ContainerKey",
    "Demand",
    "GpuCapacity",
    "Ledger",
    "Leftover",
    "Outlook",
    "Placement",
    "Refusal",
    "RefusalCode",
    "Wording",
]

NOTHING = Demand()
NO_AMOUNTS = Amounts()


def _union(demands: Iterable[Demand]) -> Demand:
    memory = cores = shares = 0
    for demand in demands:
        memory |= demand.memory
        cores |= demand.cores
        shares |= demand.shares
    return Demand(memory, cores, shares)


def _wants_whole(demand: Demand) -> bool:
    """A number and nothing else: one whole GPU."""
    return bool(demand.shares) and not demand.memory and not demand.cores


class _Pod:
    """What one pod holds. `lies`: its tokens by the GPU they lie on (None: on no known GPU)."""

    __slots__ = ("bookings", "lies")

    def __init__(self) -> None:
        self.bookings: dict[str, Booking] = {}
        self.lies: dict[str | None, Demand] = {}

    def holds(self) -> Demand:
        return _union(self.lies.values())

    def lies_on(self, uuid: str | None) -> Demand:
        return self.lies.get(uuid, NOTHING)

    def living(self) -> list[Booking]:
        return [b for b in self.bookings.values() if not b.retired]


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
        self.unit_mib = unit_mib
        self.policy = policy
        self.min_share_mib = min_share_mib
        self.wording = wording or Wording()
        self._refusals = Refusals(unit_mib, self.wording)
        self._capacities: dict[str, GpuCapacity] = {}
        self._offered = Amounts()
        self._granted = NOTHING
        self._pods: dict[str, _Pod] = {}
        # Derived from _pods, kept up to date by _lay and _lift: what all pods hold, and how much of it
        # lies where.
        self._held = NOTHING
        self._used: dict[str | None, Amounts] = {}

    # --- what there is ---

    def set_capacities(self, capacities: Iterable[GpuCapacity]) -> None:
        """The GPUs in mode `shared`, in the order they are listed to people; replaces the last set.
        A GPU that has vanished should be listed as sick for as long as it may come back (a demand that
        only it could hold then waits instead of being refused for ever); one that is not listed counts
        as sick for those who are bound to it. Raises `offered`."""
        self._capacities = {c.uuid: c for c in capacities}
        total = Amounts()
        for capacity in self._capacities.values():
            total = total.plus(capacity.amounts)
        self._offered = self._offered.at_least(total)
        for pod in self._pods.values():
            for booking in pod.living():
                if booking.whole and booking.uuid in self._capacities:
                    units = self._capacities[booking.uuid].memory_units
                    pod.bookings[booking.key.container] = replace(booking, memory_units=units)

    def capacities(self) -> tuple[GpuCapacity, ...]:
        return tuple(self._capacities.values())

    @property
    def offered(self) -> Amounts:
        """How many tokens of each letter are listed to the kubelet: never fewer than before, and never
        fewer than what anybody holds, while the process lives."""
        return self._offered

    # --- granted ---

    def grant(self, tokens: Demand) -> None:
        """Allocate gave these to a container yet unknown. Idempotent (replay)."""
        self._granted |= tokens
        self._offered = self._offered.at_least(tokens.span)

    def settle(self, held_by_kubelet: Demand) -> None:
        """The kubelet's checkpoint, read while no Allocate was in flight, says that these are held:
        grants that are not among them have been given back."""
        self._granted &= held_by_kubelet

    def granted(self) -> Demand:
        """Granted by Allocate and not bound since."""
        return self._granted

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
        refusal = self._refuse_demand(demand) or self._refuse_tokens(key, demand, running)
        if refusal:
            return refusal
        fits = self._fits(key, demand, kept or {}, only)
        return self._choose(key, demand, fits) or self._refuse_room(key, demand, fits)

    def could_start(
        self,
        key: ContainerKey,
        demand: Demand,
        *,
        kept: Mapping[str, Amounts] | None = None,
        running: Collection[str] = (),
        only: str | None = None,
    ) -> Placement | None:
        """As `place`, without composing the reason where it cannot."""
        if self._refuse_demand(demand) or self._refuse_tokens(key, demand, running):
            return None
        return self._choose(key, demand, self._fits(key, demand, kept or {}, only))

    def bind(self, key: ContainerKey, demand: Demand, uuid: str) -> Booking:
        """Books `key` on the GPU that `place` named, taking over its tokens from other containers of
        the pod. The same call again changes nothing. Raises AllocationError, with nothing changed, when
        it does not fit there (any more)."""
        refusal = self._refuse_demand(demand) or self._refuse_tokens(key, demand, ())
        if refusal:
            raise refusal.error()
        capacity = self._capacities.get(uuid)
        fit = self._fit(key, demand, capacity, 0, {}) if capacity else None
        if fit is None or not fit.fits:
            raise self._refuse_room(key, demand, [fit] if fit else []).error()
        self._make_way(key, demand, uuid, fit.displace)
        return self._book(key, demand, uuid)

    def restore(self, key: ContainerKey, demand: Demand, uuid: str | None) -> Refusal | None:
        """Books what is known to be so (placements persisted before a restart, oldest first), whatever
        the capacities say: the GPU may be sick, gone or smaller now. Only tokens that another pod holds
        are refused, and then nothing is booked."""
        if not demand:
            return Refusal(RefusalCode.EMPTY, "cannot restore a share without IDs", permanent=True)
        refusal = self._refuse_tokens(key, demand, ())
        if refusal is None:
            self._book(key, demand, uuid)
        return refusal

    def undo(self, key: ContainerKey, before: Booking | None) -> None:
        """The start for which `key` was bound did not come about: its booking is again what it was
        `before`, unless somebody has taken that room since (then it stays where it is now)."""
        if before is None:
            self.release(key)
            return
        capacity = self._capacities.get(before.uuid or "")
        if capacity is None or not any(self._fit(key, before.demand, capacity, 0, {}).missing):
            self._book(key, before.demand, before.uuid)

    def rekey(self, old: ContainerKey, new: ContainerKey) -> None:
        """A booking made before the container was known (early binding) gets its real key. KeyError
        when there is none."""
        booking = self.booking(old)
        if booking is None:
            raise KeyError(old)
        if old != new:
            self.release(old)
            self._book(new, booking.demand, booking.uuid)

    # --- released ---

    def retire(self, key: ContainerKey) -> bool:
        """The container has ended for good (an ordinary init container): its tokens become the pod's
        leftover. True when that changed anything."""
        booking = self.booking(key)
        if booking is None or booking.retired:
            return False
        self._pods[key.pod_uid].bookings[key.container] = replace(booking, retired=True)
        return True

    def release(self, key: ContainerKey) -> bool:
        """The container is gone and the kubelet does not keep its tokens. True when it was booked."""
        pod = self._pods.get(key.pod_uid)
        booking = pod.bookings.pop(key.container, None) if pod else None
        if pod is None or booking is None:
            return False
        self._lift(pod, booking.demand - _union(b.demand for b in pod.bookings.values()))
        if not pod.bookings:
            del self._pods[key.pod_uid]
        return True

    def release_pod(self, pod_uid: str) -> bool:
        """The pod is gone, with everything it held. True when it held anything."""
        pod = self._pods.pop(pod_uid, None)
        if pod is None:
            return False
        self._lift(pod, pod.holds())
        return True

    # --- reading ---

    def booking(self, key: ContainerKey) -> Booking | None:
        pod = self._pods.get(key.pod_uid)
        return pod.bookings.get(key.container) if pod else None

    def bookings(self) -> tuple[Booking, ...]:
        """Every booking, retired ones too, ordered by pod and container."""
        every = (b for pod in self._pods.values() for b in pod.bookings.values())
        return tuple(sorted(every, key=lambda b: b.key))

    def leftovers(self) -> tuple[Leftover, ...]:
        """What pods hold and no container of theirs uses, ordered by pod and GPU."""
        found = []
        for pod_uid, pod in sorted(self._pods.items()):
            used = _union(b.demand for b in pod.living())
            for uuid, tokens in sorted(pod.lies.items(), key=lambda item: item[0] or ""):
                if left := tokens - used:
                    found.append(Leftover(pod_uid, uuid, left))
        return tuple(found)

    def pods(self) -> frozenset[str]:
        """UIDs of pods that hold anything."""
        return frozenset(self._pods)

    def pod_total(self, pod_uid: str) -> Amounts:
        """What the pod holds: every token once, leftovers included."""
        pod = self._pods.get(pod_uid)
        return pod.holds().amounts if pod else Amounts()

    def held(self) -> Demand:
        """Every token that is granted or bound."""
        return self._held | self._granted

    def held_on(self, uuid: str) -> Demand:
        """Tokens that lie on this GPU, leftovers included."""
        return _union(pod.lies_on(uuid) for pod in self._pods.values())

    def used_on(self, uuid: str) -> Amounts:
        """What is promised on this GPU (everything, where one container has it for itself)."""
        used = self._used.get(uuid, Amounts()).plus(self._unlocated())
        capacity = self._capacities.get(uuid)
        if capacity and self._whole_on(uuid):
            return used.at_least(capacity.amounts)
        return used

    def free_on(self, uuid: str) -> Amounts:
        """What a new container may get there now: nothing when sick, not accepting, or unknown."""
        capacity = self._capacities.get(uuid)
        if capacity is None or capacity.sick or not capacity.accepting:
            return Amounts()
        return capacity.givable.minus(self.used_on(uuid))

    def unhealthy(self, listed: Demand | None = None) -> Demand:
        """The tokens to list as Unhealthy now, of 0 … offered-1 of each letter. `listed`: those that
        are listed so already (fewest flips). See health_tokens.py for the rule."""
        held = self.held()
        listed = listed or NOTHING
        lying = {uuid: self.held_on(uuid) for uuid in {*self._capacities, *self._used} if uuid is not None}
        masks = []
        for i, letter in enumerate((MEMORY, CORES, NUMBER)):
            gpus = []
            for uuid, tokens in lying.items():
                capacity = self._capacities.get(uuid)
                units = capacity.givable[i] if capacity else 0
                gpus.append(GpuTokens(units, tokens.of(letter), self._giving(capacity)))
            masks.append(unhealthy_mask(self._offered[i], held.of(letter), gpus, listed.of(letter)))
        return Demand(*masks)

    def _giving(self, capacity: GpuCapacity | None) -> Giving:
        if capacity is None or capacity.sick:
            return Giving.NOTHING
        if not capacity.accepting or self._whole_on(capacity.uuid):
            return Giving.NOTHING_NEW
        return Giving.ALL

    # --- where tokens lie ---

    def _lay(self, pod: _Pod, uuid: str | None, tokens: Demand) -> None:
        """Tokens of the pod, lying nowhere, lie on a GPU now."""
        if tokens:
            pod.lies[uuid] = pod.lies_on(uuid) | tokens
            self._used[uuid] = self._used.get(uuid, Amounts()).plus(tokens.amounts)
            self._held |= tokens

    def _lift(self, pod: _Pod, tokens: Demand) -> None:
        """Tokens of the pod lie nowhere now and are not held any more."""
        for uuid, lying in list(pod.lies.items()):
            lifted = lying & tokens
            if not lifted:
                continue
            self._used[uuid] = self._used[uuid].minus(lifted.amounts)
            if not any(self._used[uuid]):
                del self._used[uuid]
            pod.lies[uuid] = lying - lifted
            if not pod.lies[uuid]:
                del pod.lies[uuid]
        self._held -= tokens

    def _book(self, key: ContainerKey, demand: Demand, uuid: str | None) -> Booking:
        pod = self._pods.setdefault(key.pod_uid, _Pod())
        previous = pod.bookings.pop(key.container, None)
        for other in pod.living():
            if other.demand.overlaps(demand):
                pod.bookings[other.key.container] = replace(other, retired=True)
        if previous and previous.demand != demand:
            self._lift(pod, previous.demand - _union(b.demand for b in pod.bookings.values()))
        if pod.lies_on(uuid) & demand != demand:
            self._lift(pod, demand)
            self._lay(pod, uuid, demand)
        self._granted -= demand
        self._offered = self._offered.at_least(demand.span)
        whole = _wants_whole(demand)
        if whole:
            capacity = self._capacities.get(uuid or "")
            units = capacity.memory_units if capacity else 0
        else:
            units = demand.memory.bit_count()
        booking = Booking(key, demand, uuid, units, demand.cores.bit_count() or None, whole)
        pod.bookings[key.container] = booking
        return booking

    def _make_way(self, key: ContainerKey, demand: Demand, uuid: str, amounts: Amounts) -> None:
        """Takes that much of the pod's leftover off the GPU."""
        if any(amounts):
            pod = self._pods[key.pod_uid]
            leftover = self._leftover_on(pod, key, demand, uuid)
            moved = Demand(
                highest_n(leftover.memory, amounts.memory),
                highest_n(leftover.cores, amounts.cores),
                highest_n(leftover.shares, amounts.shares),
            )
            self._lift(pod, moved)
            self._lay(pod, None, moved)

    @staticmethod
    def _leftover_on(pod: _Pod, key: ContainerKey, demand: Demand, uuid: str) -> Demand:
        """What of the pod lies on the GPU and nobody would use once `key` has `demand`."""
        lying = pod.lies_on(uuid) - demand
        for other in pod.living():
            if other.key != key and not other.demand.overlaps(demand):
                lying -= other.demand
        return lying

    def _unlocated(
        self, own: _Pod | None = None, key: ContainerKey | None = None, demand: Demand = NOTHING
    ) -> Amounts:
        """What living containers hold on a GPU that is not known, but for what `key` of pod `own` holds
        itself or takes over with `demand`."""
        total = Amounts()
        if None in self._used:
            for pod in self._pods.values():
                if None in pod.lies:
                    unknown = [b for b in pod.living() if b.uuid is None]
                    if pod is own:
                        unknown = [b for b in unknown if b.key != key and not b.demand.overlaps(demand)]
                    total = total.plus(_union(b.demand for b in unknown).amounts)
        return total

    def _whole_on(self, uuid: str) -> Booking | None:
        """The container that has this GPU for itself."""
        for pod in self._pods.values():
            if uuid in pod.lies:
                for booking in pod.living():
                    if booking.whole and booking.uuid == uuid:
                        return booking
        return None

    # --- deciding ---

    def _fit(
        self,
        key: ContainerKey,
        demand: Demand,
        capacity: GpuCapacity,
        position: int,
        kept: Mapping[str, Amounts],
    ) -> Fit:
        uuid = capacity.uuid
        pod = self._pods.get(key.pod_uid) or _Pod()
        previous = pod.bookings.get(key.container)
        leftover = self._leftover_on(pod, key, demand, uuid)
        used = self._used.get(uuid, Amounts()).plus(self._unlocated(pod, key, demand))
        holder = self._whole_on(uuid)
        whole = _wants_whole(demand)
        own_room = previous is not None and not previous.retired and previous.uuid == uuid
        displace = Amounts()
        if whole and not own_room:
            # Everything on it is in the way but what is the pod's own and idle.
            new = capacity.amounts
            free = new.minus(used)
            missing = used.minus((leftover | (pod.lies_on(uuid) & demand)).amounts)
            free_after = Amounts()
        elif holder is None or _steps_aside(holder, key, demand):
            new = (demand - pod.lies_on(uuid)).amounts
            free = capacity.givable.minus(used)
            displace = Amounts(*map(min, new.minus(free), leftover.amounts))
            missing = new.minus(free).minus(displace)
            free_after = free.minus(new)
        else:
            # Even what the pod holds here is of no use beside a container that has the GPU for itself.
            new = missing = demand.amounts
            free = free_after = Amounts()
        taken = Amounts(*map(min, new, free))
        keep = kept.get(uuid, NO_AMOUNTS)
        candidate = Candidate(
            uuid,
            position,
            capacity.amounts,
            free_after,
            new,
            sum(displace),
            crowded=not whole and not demand.cores and not free_after.cores,
        )
        return Fit(
            capacity,
            candidate,
            missing,
            displace,
            possible=whole or not any(demand.amounts.minus(capacity.amounts)),
            closed=capacity.sick or (not capacity.accepting and any(new)),
            kept=any(t and f - t < k for t, f, k in zip(taken, free, keep, strict=True)),
        )

    def _fits(
        self, key: ContainerKey, demand: Demand, kept: Mapping[str, Amounts], only: str | None = None
    ) -> list[Fit]:
        return [
            self._fit(key, demand, capacity, position, kept)
            for position, capacity in enumerate(self._capacities.values())
            if only is None or capacity.uuid == only
        ]

    def _choose(self, key: ContainerKey, demand: Demand, fits: Sequence[Fit]) -> Placement | None:
        candidates = [f.candidate for f in fits if f.fits and not f.kept]
        if not candidates:
            return None
        uuid = choose(self.policy, candidates).uuid
        whole = _wants_whole(demand)
        units = self._capacities[uuid].memory_units if whole else demand.memory.bit_count()
        previous = self.booking(key)
        moved = previous.uuid if previous and previous.uuid != uuid else None
        return Placement(uuid, units, demand.cores.bit_count() or None, whole, moved)

    def outlook(self, key: ContainerKey, demand: Demand) -> tuple[Outlook, ...]:
        """The GPUs on which a waiting container could start if others left, in the order listed; none
        when its IDs are the obstacle, not room."""
        if self._refuse_demand(demand) or self._refuse_tokens(key, demand, ()):
            return ()
        return tuple(
            Outlook(f.capacity.uuid, f.candidate.new, f.missing)
            for f in self._fits(key, demand, {})
            if f.possible and not f.closed
        )

    # --- refusing ---

    def _refuse_demand(self, demand: Demand) -> Refusal | None:
        return self._refusals.of_demand(demand.amounts, self.min_share_mib)

    def _refuse_tokens(self, key: ContainerKey, demand: Demand, running: Collection[str]) -> Refusal | None:
        """IDs that others use."""
        pod = self._pods.get(key.pod_uid)
        if (demand - (pod.holds() if pod else NOTHING)).overlaps(self._held):
            common = {uid: p.holds() & demand for uid, p in self._pods.items() if uid != key.pod_uid}
            return self._refusals.held({uid: tokens for uid, tokens in common.items() if tokens})
        for other in pod.living() if pod else ():
            name = other.key.container
            if other.key != key and name in running and other.demand.overlaps(demand):
                return self._refusals.still_running(key.pod_uid, name, other.demand & demand)
        return None

    def _refuse_room(self, key: ContainerKey, demand: Demand, fits: Sequence[Fit]) -> Refusal:
        """None of the GPUs looked at takes the demand."""

        def on_gpu(uuid: str) -> list[Obstacle]:
            holder = self._whole_on(uuid)
            found = []
            for uid, pod in self._pods.items():
                lying = pod.lies_on(uuid)
                own = uid == key.pod_uid
                if own:  # its leftover makes way, and so does what the container itself holds
                    lying &= _union(b.demand for b in pod.living() if b.key != key)
                if lying:
                    whole = holder is not None and holder.key.pod_uid == uid
                    found.append(Obstacle(uid, lying.amounts, whole, own))
            return found

        return self._refusals.of_room(demand.amounts, _wants_whole(demand), fits, self.free_on, on_gpu)


def _steps_aside(holder: Booking, key: ContainerKey, demand: Demand) -> bool:
    """Whether the container that has a GPU for itself is this one, or ends by this one's start."""
    return holder.key == key or (holder.key.pod_uid == key.pod_uid and holder.demand.overlaps(demand))
