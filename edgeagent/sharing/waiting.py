"""The line of containers whose start waits for room, and what is kept for those who wait long.

Whoever waits longest starts first when room frees up. That alone does not help a large container among
small ones that come and go, so after `reserve_after_s` a waiter gets a GPU kept: the one on which the
least is missing. Others may still take room there as long as enough is left for it, and everything on
other GPUs; so nobody is held up by a reservation whose room could not be used. While a GPU is kept, what
is missing on it only shrinks; the reservation moves to another GPU only when less is missing there, so it
ends.

A waiter stays in line between the kubelet's tries (about 12 s) and leaves it when it starts, when its pod
is gone, or when the kubelet has not come back for `forget_after_s`. Pure: `now_s` is any monotonic clock.
Not thread-safe: the caller locks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from edgeagent.sharing.ledger import ContainerKey, Ledger, Outlook, Placement, Refusal, RefusalCode
from edgeagent.sharing.tokens import Amounts, Demand


@dataclass(frozen=True, slots=True)
class Waiter:
    """A container that waits. `in_call`: one of the kubelet's calls is held for it now; `running` and
    `only`: see Ledger.place; `kept_uuid`: the GPU on which room is kept for it."""

    key: ContainerKey
    demand: Demand
    since_s: float
    seen_s: float
    refusal: Refusal
    in_call: bool = True
    running: tuple[str, ...] = ()
    only: str | None = None
    kept_uuid: str | None = None


class WaitingLine:
    """See the module's docstring."""

    def __init__(self, reserve_after_s: float = 60.0, forget_after_s: float = 120.0) -> None:
        """Both may be changed at any time."""
        self.reserve_after_s = reserve_after_s
        self.forget_after_s = forget_after_s
        self._waiters: dict[ContainerKey, Waiter] = {}

    def join(
        self,
        key: ContainerKey,
        demand: Demand,
        refusal: Refusal,
        now_s: float,
        running: Collection[str] = (),
        only: str | None = None,
    ) -> Waiter:
        """A call of the kubelet for `key` cannot be answered with a start now. A container that is in
        line already keeps its place. A permanent refusal is in line too, only to be shown: nothing is
        ever kept for it."""
        known = self._waiters.get(key)
        since_s = known.since_s if known else now_s
        kept_uuid = known.kept_uuid if known else None
        waiter = Waiter(key, demand, since_s, now_s, refusal, True, tuple(running), only, kept_uuid)
        self._waiters[key] = waiter
        return waiter

    def call_ended(self, key: ContainerKey, now_s: float) -> None:
        """The kubelet was told to come again."""
        if waiter := self._waiters.get(key):
            self._waiters[key] = replace(waiter, in_call=False, seen_s=now_s)

    def leave(self, key: ContainerKey) -> bool:
        """The container started, or is not wanted any more. True when it was in line."""
        return self._waiters.pop(key, None) is not None

    def leave_pod(self, pod_uid: str) -> bool:
        """The pod is gone. True when any of its containers was in line."""
        gone = [key for key in self._waiters if key.pod_uid == pod_uid]
        for key in gone:
            del self._waiters[key]
        return bool(gone)

    def forget(self, now_s: float) -> tuple[ContainerKey, ...]:
        """Drops those for whom the kubelet has not come back, and says which."""
        gone = tuple(
            w.key for w in self.waiters() if not w.in_call and now_s - w.seen_s > self.forget_after_s
        )
        for key in gone:
            del self._waiters[key]
        return gone

    def waiters(self) -> tuple[Waiter, ...]:
        """The longest waiting first."""
        return tuple(sorted(self._waiters.values(), key=lambda w: (w.since_s, w.key)))

    def get(self, key: ContainerKey) -> Waiter | None:
        return self._waiters.get(key)

    def kept_for_others(self, key: ContainerKey, ledger: Ledger, now_s: float) -> dict[str, Amounts]:
        """Room per GPU that `key` must leave alone: what is kept for those who wait longer than it (for
        everyone in line, when it is not in line itself)."""
        kept: dict[str, Amounts] = {}
        for waiter, room in self._reservations(ledger, now_s):
            if waiter.key == key:
                break
            if room:
                kept[room.uuid] = room.new
        return kept

    def place(
        self,
        key: ContainerKey,
        demand: Demand,
        ledger: Ledger,
        now_s: float,
        running: Collection[str] = (),
        only: str | None = None,
    ) -> Placement | Refusal:
        """Ledger.place for a container in line or a newcomer, with what is kept for others left alone
        and, when it is refused for that, the name of the one it is kept for."""
        kept = self.kept_for_others(key, ledger, now_s)
        answer = ledger.place(key, demand, kept=kept, running=running, only=only)
        if isinstance(answer, Refusal) and answer.code is RefusalCode.KEPT:
            keepers = [w for w in self.waiters() if w.kept_uuid in kept and w.key != key]
            names = dict.fromkeys(ledger.wording.pod_name(w.key.pod_uid) for w in keepers)
            if names:
                message = f"{answer.message}: {', '.join(list(names)[:3])}"
                return replace(answer, message=message, in_the_way=tuple(w.key.pod_uid for w in keepers))
        return answer

    def next_start(self, ledger: Ledger, now_s: float) -> tuple[Waiter, Placement] | None:
        """Who of those whose call is held can start now, the longest waiting first. The caller binds it,
        takes it out of line and asks again until None."""
        kept: dict[str, Amounts] = {}
        for waiter, room in self._reservations(ledger, now_s):
            if waiter.in_call:
                placement = ledger.could_start(
                    waiter.key, waiter.demand, kept=kept, running=waiter.running, only=waiter.only
                )
                if placement:
                    return waiter, placement
            if room:
                kept[room.uuid] = room.new
        return None

    def _reservations(self, ledger: Ledger, now_s: float) -> list[tuple[Waiter, Outlook | None]]:
        """Every waiter in order with the room that is kept for it: one waiter a GPU, and only where
        others' leaving helps. Notes the choice in the waiter."""
        found = []
        taken: set[str] = set()
        for waiter in self.waiters():
            room = None
            if now_s - waiter.since_s >= self.reserve_after_s:
                outlook = [
                    o
                    for o in ledger.outlook(waiter.key, waiter.demand)
                    if o.uuid not in taken and waiter.only in (None, o.uuid)
                ]
                room = min(outlook, key=lambda o: (o.missing, o.uuid != waiter.kept_uuid), default=None)
            uuid = room.uuid if room else None
            if uuid is not None:
                taken.add(uuid)
            if uuid != waiter.kept_uuid:
                waiter = self._waiters[waiter.key] = replace(waiter, kept_uuid=uuid)
            found.append((waiter, room))
        return found
