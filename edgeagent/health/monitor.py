"""Watches the GPUs: polls, driver events and kernel log lines in, one frozen HealthState out.

Two services: `poll` reads every GPU each poll interval and looks for lost ones again; `events` waits for
the driver. An event never waits for a poll: it changes the state and calls the listeners by itself.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from edgeagent.config import HealthConfig
from edgeagent.errors import GpuError
from edgeagent.gpus.model import (
    Gpu,
    GpuBackend,
    GpuEvent,
    GpuEventKind,
    GpuFault,
    GpuReading,
    Inventory,
)
from edgeagent.health.conditions import (
    RULES,
    Books,
    ConditionType,
    Limits,
    Track,
    advance,
    condition_id,
    describe,
    raised_by_event,
    sign_of_event,
    signs_of,
)
from edgeagent.health.remembered import RememberedGpus
from edgeagent.health.usage import GpuUsage
from edgeagent.health.xid import Xid, XidCatalogue
from edgeagent.snapshot import Condition

log = logging.getLogger(__name__)

EVENT_WAIT_S = 30.0
BURST_S = 5.0
BURST_MAX_S = 60.0
REINVENTORY_S = 600.0
LATE_S = 30.0
_MAX_EVENT_BACKOFF_S = 30.0

# A GPU in one of these is looked for again at every poll; its handle is not used meanwhile.
_REPROBE = frozenset(
    {
        GpuFault.LOST,
        GpuFault.NOT_FOUND,
        GpuFault.RESET_REQUIRED,
        GpuFault.DRIVER_MISMATCH,
        GpuFault.DRIVER_NOT_LOADED,
        GpuFault.LIBRARY_MISSING,
        GpuFault.LOST_DEVICE_ACCESS,
        GpuFault.NO_PERMISSION,
        GpuFault.FAILED,
    }
)


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """One GPU as health sees it. `reading` is the latest, also when it shows a fault."""

    gpu: Gpu
    present: bool = True
    reading: GpuReading | None = None
    conditions: tuple[Condition, ...] = ()
    usage: GpuUsage | None = None

    @property
    def sick(self) -> bool:
        """Its shares are to be withdrawn."""
        return any(c.makes_unhealthy for c in self.conditions)


@dataclass(frozen=True, slots=True)
class HealthState:
    """All GPUs ever found in this run, by UUID, in the driver's order. `conditions` are of the node.
    `version` grows with every change of a condition, of presence or of the inventory."""

    gpus: Mapping[str, GpuHealth] = field(default_factory=dict)
    inventory: Inventory = Inventory(())
    conditions: tuple[Condition, ...] = ()
    version: int = 0
    polls: int = 0

    @property
    def sick(self) -> frozenset[str]:
        return frozenset(uuid for uuid, g in self.gpus.items() if g.sick)

    def all_conditions(self) -> tuple[Condition, ...]:
        return (*self.conditions, *(c for g in self.gpus.values() for c in g.conditions))


@dataclass(frozen=True, slots=True)
class HealthChange:
    """What is different in a new state. `updated`: the same condition with another message or pods."""

    raised: tuple[Condition, ...] = ()
    updated: tuple[Condition, ...] = ()
    cleared: tuple[Condition, ...] = ()
    became_sick: frozenset[str] = frozenset()
    recovered: frozenset[str] = frozenset()
    inventory: bool = False  # GPUs came, went or changed their facts

    def __bool__(self) -> bool:
        return bool(self.raised or self.updated or self.cleared or self.inventory)


@dataclass(frozen=True, slots=True)
class SeenEvent:
    """A driver event as told to listeners. `xid` is set for XIDs. A burst of the same XID on the same
    GPU is told once; `repeats` is how many of the previous burst were swallowed."""

    event: GpuEvent
    at_ms: int
    gpu: Gpu | None = None
    xid: Xid | None = None
    repeats: int = 0


@dataclass(frozen=True, slots=True)
class _Burst:
    first_s: float
    last_s: float
    repeats: int = 0


_NO_BURST = _Burst(float("-inf"), float("-inf"))

StateListener = Callable[[HealthState, HealthChange], None]
EventListener = Callable[[SeenEvent], None]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What health asks of the rest of the agent. All must answer at once and from memory, except
    `usage` and `gpu_places`, which only the poll calls.

    `pods_on(uuid)`: names of the pods that hold a share of the GPU. `books(uuid)`: what is promised.
    `usage(gpu, reading)`: who uses it. `gpu_places()`: anything that differs when a GPU was plugged in
    or out (the names in /proc/driver/nvidia/gpus).
    `mps_problem(uuid)`: why the MPS daemon that its containers depend on is of no use, if so.
    `restart_needed(reason)`: called once when only a restart of the agent can help.
    """

    pods_on: Callable[[str], tuple[str, ...]] = lambda _: ()
    books: Callable[[str], Books | None] = lambda _: None
    usage: Callable[[Gpu, GpuReading], GpuUsage] | None = None
    gpu_places: Callable[[], object] = lambda: None
    mps_problem: Callable[[str], str | None] = lambda _: None
    restart_needed: Callable[[str], None] = lambda _: None


class HealthMonitor:
    """See the module. `backend` must not hang (gpus/guard). Listeners are called one after the other, in
    the order of the changes, from the services' threads; they must be quick."""

    def __init__(
        self,
        backend: GpuBackend,
        config: HealthConfig,
        catalogue: XidCatalogue,
        *,
        poll_seconds: float = 5.0,
        surroundings: Surroundings | None = None,
        remembered: RememberedGpus | None = None,
        mono: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self._backend = backend
        self._around = surroundings or Surroundings()
        self._mono = mono
        self._unix = unix
        self._lock = threading.Lock()  # state and tracks
        self._telling = threading.RLock()  # order of listener calls
        self._queue: deque[tuple[HealthState, HealthChange]] = deque()
        self._state_listeners: list[StateListener] = []
        self._event_listeners: list[EventListener] = []
        self._poll_listeners: list[Callable[[], None]] = []
        self._wanted = threading.Event()
        self._state = HealthState()
        self._tracks: dict[str, dict[ConditionType, Track]] = {}
        self._good_readings: dict[str, GpuReading] = {}
        self._bursts: dict[tuple[str | None, GpuEventKind, int | None], _Burst] = {}
        self._inventory_at_s: float | None = None
        self._places: object = None
        self._polled_s = mono()
        self._doubted: set[str] = set()
        self._rescan = False
        self._restart_asked = False
        self._remembered = remembered
        if remembered is not None:
            known = {g.uuid: GpuHealth(g, present=False) for g in remembered.load(self._now_ms())}
            self._state = replace(self._state, gpus=known)
        self.counters: dict[str, int] = {}  # with labels in the key: see counter_key
        self.configure(config, catalogue, poll_seconds)

    # -- for the agent ------------------------------------------------------------------------------

    @property
    def state(self) -> HealthState:
        """The latest state; frozen, read without a lock."""
        return self._state

    def late(self, call_timeout_s: float) -> str | None:
        """A sentence when the polls have stopped. A driver call takes `call_timeout_s` at most, so even
        a driver that hangs everywhere does not make them this late."""
        calls = len(self._state.gpus) + 2  # one each, and looks for others
        age_s = self._mono() - self._polled_s
        if age_s <= 2 * self._poll_s + calls * call_timeout_s + LATE_S:
            return None
        return f"GPUs were last read {age_s:.0f} s ago instead of every {self._poll_s:g} s"

    def configure(self, config: HealthConfig, catalogue: XidCatalogue, poll_seconds: float) -> None:
        """Takes a new configuration; conditions that are there keep their since-times."""
        self._limits = Limits.of(config)
        self._catalogue = catalogue.with_overrides(config.xid_classes)
        self._poll_s = poll_seconds

    def on_change(self, listener: StateListener) -> None:
        self._state_listeners.append(listener)

    def on_event(self, listener: EventListener) -> None:
        self._event_listeners.append(listener)

    def on_poll(self, listener: Callable[[], None]) -> None:
        """Called after every round of readings, for what changes without any condition changing."""
        self._poll_listeners.append(listener)

    def rescan(self) -> None:
        """Look for GPUs again, now."""
        self._rescan = True
        self._wanted.set()

    def poll_now(self) -> None:
        """Read all GPUs soon instead of at the next interval."""
        self._wanted.set()

    def wake(self) -> None:
        """Makes both services look at their stop event."""
        self._wanted.set()
        self._backend.wake()

    def gpu_at(self, device: str) -> str | None:
        """UUID of the GPU at a PCI address, from memory; a name that is no PCI address means the
        integrated GPU. For the kernel log: must not call the driver."""
        gpus = [g.gpu for g in self._state.gpus.values()]
        found = next((g.uuid for g in gpus if g.pci_address == device), None)
        if found is None and ":" not in device:
            found = next((g.uuid for g in gpus if g.unified_memory), None)
        return found

    # -- services -----------------------------------------------------------------------------------

    def poll(self, stop: threading.Event) -> None:
        """Reads every GPU each interval. The first round is immediate unless poll_once ran before."""
        next_s = self._mono() + (self._poll_s if self._state.polls else 0.0)
        while not stop.is_set():
            asked = self._wanted.wait(max(0.0, next_s - self._mono()))
            if stop.is_set():
                return
            self._wanted.clear()
            now = self._mono()
            scheduled = not asked or now >= next_s
            if scheduled:
                # From now, not from then: after a suspend or a hang there is nothing to catch up.
                next_s = now + self._poll_s
            self.poll_once(scheduled)

    def events(self, stop: threading.Event) -> None:
        """Waits for driver events. A wait that fails is repeated with growing pauses, never at once."""
        pause_s, warned = 1.0, False
        while not stop.is_set():
            try:
                event = self._backend.wait_event(EVENT_WAIT_S)
            except GpuError as e:
                log.log(
                    logging.DEBUG if warned else logging.WARNING, "cannot wait for GPU events error=%s", e
                )
                warned = True
                stop.wait(pause_s)
                pause_s = min(pause_s * 2, _MAX_EVENT_BACKOFF_S)
                continue
            pause_s = 1.0
            if event is not None:
                if warned:
                    log.info("GPU events arrive again")
                    warned = False
                self.handle_event(event)

    # -- events -------------------------------------------------------------------------------------

    def handle_event(self, event: GpuEvent, age_s: float = 0.0) -> None:
        """Takes an event from whatever source. `age_s`: how long ago it happened (kernel log lines read
        after a start); one older than the XID hold is told but raises nothing, the polls say what is."""
        now_s, now_ms = self._mono(), self._now_ms()
        if event.kind in (GpuEventKind.ECC_SINGLE_BIT, GpuEventKind.CLOCK):
            return
        if event.kind is GpuEventKind.MIG_CONFIG:
            self.rescan()
            return
        if event.kind is GpuEventKind.UNAVAILABLE:
            # The reading, which comes at once, says what it is; it is told here if it says nothing.
            if event.uuid is not None:
                self._doubted.add(event.uuid)
            self._wanted.set()
            return
        known = self._state.gpus.get(event.uuid) if event.uuid else None
        gpu = known.gpu if known else None
        xid = self._catalogue[event.xid] if event.kind is GpuEventKind.XID and event.xid is not None else None
        repeats = self._burst(event, now_s)
        if repeats is None:
            self._repeated(gpu, event, xid, now_s - age_s, now_ms)
            return
        seen = SeenEvent(event, now_ms - round(age_s * 1000), gpu, xid, repeats)
        if gpu is not None and age_s <= self._limits.xid_hold_s:
            with self._lock:
                raised = self._raise(event, gpu, xid, now_s - age_s, seen.at_ms)
                if raised:
                    self._renew(gpu.uuid)
            if raised:
                self._tell()
        _log_event(seen)
        self._count(event)
        for listener in self._event_listeners:
            listener(seen)
        if xid is None or xid.xid_class.makes_unhealthy or event.kind is not GpuEventKind.XID:
            self._wanted.set()  # the reading says more: recovery action, lost, remapped rows

    def _count(self, event: GpuEvent) -> None:
        labels = {"gpu_uuid": event.uuid or ""}
        if event.xid is not None:
            key = counter_key("xid_events_total", **labels, xid=str(event.xid))
        else:
            key = counter_key("gpu_events_total", **labels, kind=event.kind.value)
        with self._lock:
            # A new dictionary: readers copy it without a lock.
            self.counters = {**self.counters, key: self.counters.get(key, 0) + 1}

    def _burst(self, event: GpuEvent, now_s: float) -> int | None:
        """How many repeats the previous burst of this event had; None when it is such a repeat itself.
        The same XID told by the driver and by the kernel log is one event. A burst without end is told
        again once a minute."""
        key = (event.uuid, event.kind, event.xid)
        with self._lock:
            burst = self._bursts.get(key, _NO_BURST)
            if now_s - burst.last_s < BURST_S and now_s - burst.first_s < BURST_MAX_S:
                self._bursts[key] = replace(burst, last_s=now_s, repeats=burst.repeats + 1)
                return None
            self._bursts = {k: b for k, b in self._bursts.items() if now_s - b.last_s < BURST_MAX_S}
            self._bursts[key] = _Burst(now_s, now_s)
            return burst.repeats

    def _raise(self, event: GpuEvent, gpu: Gpu, xid: Xid | None, at_s: float, at_ms: int) -> bool:
        """Raises what the event means for the GPU, if anything. With the lock held."""
        found = sign_of_event(gpu, event, xid)
        if found is None:
            return False
        kind, sign = found
        tracks = self._tracks.setdefault(gpu.uuid, {})
        tracks[kind] = raised_by_event(
            tracks.get(kind, Track()), kind, sign, gpu.uuid, self._limits, at_s, at_ms
        )
        return True

    def _repeated(self, gpu: Gpu | None, event: GpuEvent, xid: Xid | None, at_s: float, at_ms: int) -> None:
        """A swallowed repeat still counts: the condition holds from now on, or comes back."""
        found = sign_of_event(gpu, event, xid) if gpu is not None else None
        if gpu is None or found is None:
            return
        with self._lock:
            tracks = self._tracks.setdefault(gpu.uuid, {})
            track = tracks.get(found[0])
            back = track is None or track.condition is None
            if track is not None and not back:
                tracks[found[0]] = replace(track, good=0, hold_until_s=at_s + self._limits.xid_hold_s)
            elif self._raise(event, gpu, xid, at_s, at_ms):
                self._renew(gpu.uuid)
        if back:
            self._tell()

    # -- polls --------------------------------------------------------------------------------------

    def poll_once(self, scheduled: bool = True) -> HealthState:
        """One round: look for GPUs where that is due, read each, renew the conditions."""
        looked = self._inventory_due()
        if looked:
            self._take_inventory()
        for uuid, known in list(self._state.gpus.items()):
            reading = self._read(known)
            if reading.fault is GpuFault.FAILED and not _failed(known.reading) and not looked:
                # No reason given: a look at everything tells a failed GPU from our own lost access.
                self._take_inventory()
                looked = True
                reading = self._read(self._state.gpus[uuid])
            self._take_reading(uuid, reading, scheduled)
        with self._lock:
            self._state = replace(self._state, polls=self._state.polls + 1)
        self._tell()
        for listener in self._poll_listeners:
            listener()
        self._polled_s = self._mono()
        return self._state

    def _inventory_due(self) -> bool:
        found = self._state.inventory
        if self._rescan or self._inventory_at_s is None or not found.gpus or found.fault is not None:
            return True
        if any(
            not g.present or (g.reading and g.reading.fault in _REPROBE) for g in self._state.gpus.values()
        ):
            return True
        return (
            self._around.gpu_places() != self._places or self._mono() - self._inventory_at_s >= REINVENTORY_S
        )

    def _take_inventory(self) -> None:
        self._rescan = False
        try:
            found = self._backend.inventory()
        except GpuError as e:
            found = Inventory((), (), str(e), _fault(e))
        self._places = self._around.gpu_places()
        self._inventory_at_s = self._mono()
        with self._lock:
            old = self._state
            present = {g.uuid: g for g in found.gpus}
            slots = {g.pci_address for g in found.gpus if g.pci_address}
            gpus = {
                uuid: replace(known, gpu=present.get(uuid, known.gpu), present=uuid in present)
                for uuid, known in old.gpus.items()
                if uuid in present or known.gpu.pci_address not in slots  # else the card was exchanged
            }
            for uuid, gpu in present.items():
                gpus.setdefault(uuid, GpuHealth(gpu))
            gpus = dict(sorted(gpus.items(), key=lambda item: (item[1].gpu.index, item[0])))
            changed = _known_facts(found) != _known_facts(old.inventory) or gpus != dict(old.gpus)
            explained = bool(gpus) if not found.gpus else any(not g.present for g in gpus.values())
            conditions = self._node_conditions(found, explained, old.conditions)
            self._commit(gpus, conditions, found, changed)
        if self._remembered is not None:
            self._remembered.save((g.gpu for g in gpus.values()), self._now_ms())
        if changed:
            log.info(
                "GPUs found count=%s uuids=%s problem=%s",
                len(found.gpus), ",".join(present) or "-", found.problem or "-",
            )  # fmt: skip
        if found.fault is GpuFault.LOST_DEVICE_ACCESS:
            self._ask_restart(found.problem or "this process lost access to the GPU's device nodes")

    def _read(self, known: GpuHealth) -> GpuReading:
        """A reading of a GPU; one that is not there is not touched."""
        uuid = known.gpu.uuid
        if not known.present:
            inventory = self._state.inventory
            # A library that cannot be used at all hides its GPUs; it does not remove them.
            fault = inventory.fault or GpuFault.NOT_FOUND
            previous = known.reading
            if fault is GpuFault.NOT_FOUND and previous is not None and previous.fault in (
                GpuFault.LOST, GpuFault.RESET_REQUIRED,
            ):  # fmt: skip
                fault = previous.fault  # it says more than that the inventory lacks it
            return GpuReading(uuid, self._mono(), fault, inventory.problem)
        try:
            return self._backend.read(uuid)
        except GpuError as e:
            return GpuReading(uuid, self._mono(), _fault(e), str(e))

    def _take_reading(self, uuid: str, reading: GpuReading, scheduled: bool) -> None:
        usage = None
        known = self._state.gpus.get(uuid)
        if known is None:
            return  # exchanged meanwhile
        books = self._around.books(uuid)
        if reading.fault is None and self._around.usage is not None:
            usage = self._around.usage(known.gpu, reading)
        beyond = usage.beyond_promises_mib(books.holders) if usage is not None and books is not None else None
        now_s, now_ms = self._mono(), self._now_ms()
        with self._lock:
            tracks = self._tracks.setdefault(uuid, {})
            active = frozenset(kind for kind, t in tracks.items() if t.condition is not None)
            previous = self._good_readings.get(uuid)
            mps_problem = self._around.mps_problem(uuid)
            signs = signs_of(known.gpu, reading, previous, self._limits, active, books, beyond, mps_problem)
            for kind, sign in signs.items():
                tracks[kind] = advance(
                    tracks.get(kind, Track()), kind, sign, uuid, self._limits, now_s, now_ms, scheduled
                )
            if reading.fault is None:
                self._good_readings[uuid] = reading
                if uuid in self._doubted:
                    self._raise(GpuEvent(GpuEventKind.UNAVAILABLE, uuid), known.gpu, None, now_s, now_ms)
            self._doubted.discard(uuid)
            self._renew(uuid, reading, usage)
        if reading.fault is GpuFault.LOST_DEVICE_ACCESS:
            self._ask_restart(reading.fault_detail or "this process lost access to the GPU's device nodes")
        self._tell()

    # -- state: with the lock held ------------------------------------------------------------------

    def _renew(self, uuid: str, reading: GpuReading | None = None, usage: GpuUsage | None = None) -> None:
        """The GPU's entry from its tracks, with the pods that are hurt now."""
        tracks = self._tracks[uuid]
        found = [t.condition for kind in RULES if (t := tracks.get(kind)) and t.condition is not None]
        pods = self._around.pods_on(uuid) if found else ()
        conditions = tuple(replace(c, pods_hurt=pods) for c in found)
        known = self._state.gpus[uuid]
        entry = replace(
            known,
            conditions=conditions,
            reading=reading if reading is not None else known.reading,
            usage=usage if reading is not None else known.usage,
        )
        self._commit({**self._state.gpus, uuid: entry}, self._state.conditions, self._state.inventory, False)

    def _commit(
        self,
        gpus: Mapping[str, GpuHealth],
        conditions: tuple[Condition, ...],
        inventory: Inventory,
        inventory_changed: bool,
    ) -> None:
        old = self._state
        new = replace(old, gpus=gpus, conditions=conditions, inventory=inventory)
        change = _difference(old, new, inventory_changed)
        if change:
            new = replace(new, version=old.version + 1)
            self._queue.append((new, change))
        self._state = new

    def _node_conditions(
        self, found: Inventory, explained: bool, old: tuple[Condition, ...]
    ) -> tuple[Condition, ...]:
        """Why the node has no GPU to offer, or not its card. Where GPUs known from before are missing,
        theirs say it instead (`explained`), except that the loss of our own device access is never a
        GPU's trouble."""
        if found.fault is None:
            return ()
        if found.fault is GpuFault.LOST_DEVICE_ACCESS:
            kind = "LostDeviceAccess"
        elif explained or found.fault is GpuFault.NOT_FOUND:
            return ()
        else:
            kind = _NODE_KINDS.get(found.fault, ConditionType.NOT_READY).value
        ident = condition_id(kind, None)
        since = next((c.since_ms for c in old if c.id == ident), self._now_ms())
        message = found.problem or "no GPU can be read"
        facts = {"fault": found.fault.value}
        return (Condition(ident, kind, "critical", since, message, makes_unhealthy=True, facts=facts),)

    # -- telling ------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Calls the listeners for every change not told yet, in order."""
        with self._telling:
            while self._queue:
                state, change = self._queue.popleft()
                _log_change(state, change)
                for listener in self._state_listeners:
                    listener(state, change)

    def _ask_restart(self, reason: str) -> None:
        if not self._restart_asked:
            self._restart_asked = True
            log.warning("the agent has to be restarted reason=%s", reason)
            self._around.restart_needed(reason)

    def _now_ms(self) -> int:
        return round(self._unix() * 1000)


_NODE_KINDS = {
    GpuFault.DRIVER_MISMATCH: ConditionType.DRIVER_MISMATCH,
    GpuFault.DRIVER_NOT_LOADED: ConditionType.DRIVER_NOT_LOADED,
    GpuFault.LIBRARY_MISSING: ConditionType.DRIVER_NOT_LOADED,
    GpuFault.UNRESPONSIVE: ConditionType.DRIVER_UNRESPONSIVE,
}


def counter_key(name: str, **labels: str) -> str:
    """The key of a counter with labels in NodeSnapshot.counters:
    counter_key("xid_events_total", xid="79") -> 'xid_events_total{xid="79"}'."""
    inner = ",".join(f'{k}="{_LABEL_UNSAFE.sub("_", v)}"' for k, v in labels.items())
    return f"{name}{{{inner}}}" if inner else name


_LABEL_UNSAFE = re.compile(r'["\\\n]')


def _fault(e: GpuError) -> GpuFault:
    try:
        return GpuFault(e.fault)
    except ValueError:  # a word of the back end's own
        return GpuFault.FAILED


def _failed(reading: GpuReading | None) -> bool:
    return reading is not None and reading.fault is GpuFault.FAILED


def _known_facts(inventory: Inventory) -> object:
    return inventory.gpus, inventory.problem, inventory.fault


def _difference(old: HealthState, new: HealthState, inventory_changed: bool) -> HealthChange:
    before = {c.id: c for c in old.all_conditions()}
    after = {c.id: c for c in new.all_conditions()}
    return HealthChange(
        raised=tuple(c for i, c in after.items() if i not in before),
        updated=tuple(c for i, c in after.items() if i in before and before[i] != c),
        cleared=tuple(c for i, c in before.items() if i not in after),
        became_sick=new.sick - old.sick,
        recovered=old.sick - new.sick,
        inventory=inventory_changed,
    )


def _log_change(state: HealthState, change: HealthChange) -> None:
    for c in change.raised:
        level = logging.ERROR if c.severity == "critical" else logging.WARNING
        log.log(level, "condition raised type=%s gpu=%s: %s", c.type, c.gpu_uuid or "-", c.message)
    for c in change.cleared:
        log.info("condition cleared type=%s gpu=%s", c.type, c.gpu_uuid or "-")
    for uuid in change.recovered:
        log.info("GPU is healthy again gpu=%s what=%s", uuid, describe(state.gpus[uuid].gpu))


def _log_event(seen: SeenEvent) -> None:
    event = seen.event
    log.warning(
        "GPU event kind=%s xid=%s class=%s gpu=%s source=%s detail=%s",
        event.kind.value,
        event.xid if event.xid is not None else "-",
        seen.xid.xid_class.value if seen.xid else "-",
        event.uuid or "-",
        event.source,
        event.detail or "-",
    )
