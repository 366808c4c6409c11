"""The gate: which GPU a container gets, decided when it starts.

Allocate grants whatever tokens the kubelet chose. PreStartContainer finds the container that holds
them in the kubelet's checkpoint, learns its joint demand, asks the ledger for a GPU, has the limits
prepared and writes the CDI spec of the share. Where there is no room now the call is held and served
within milliseconds of room being free, in the order in which the containers began to wait.

One lock guards ledger, line and starts; no file is written and no mechanism called under it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from edgeagent.errors import AllocationError, IsolationError, KubeletError, NodeError
from edgeagent.gpus.model import Gpu
from edgeagent.isolation.backend import ShareToEnforce
from edgeagent.kubelet.bookings import BookingFile, SavedBooking
from edgeagent.kubelet.checkpoint import Checkpoint, CheckpointView, HeldDevices
from edgeagent.kubelet.containers import GPU_ENV, SHARE_ENV, Containers
from edgeagent.kubelet.podresources import AllocateGuard
from edgeagent.kubelet.share_specs import MEMORY_ENV, POD_ENV, ShareSpecs, spec_names
from edgeagent.node.cdi import SHARE_CLASS, ContainerEdits, qualified_name
from edgeagent.sharing.ledger import (
    Booking,
    ContainerKey,
    GpuCapacity,
    Ledger,
    Placement,
    Refusal,
)
from edgeagent.sharing.names import ResourceNames
from edgeagent.sharing.tokens import (
    CORES,
    MEMORY,
    NUMBER,
    Demand,
    demand_of,
    full,
    lowest,
    token_id,
)
from edgeagent.sharing.waiting import WaitingLine

log = logging.getLogger(__name__)

MAX_HELD_CALLS = 24  # of server.MAX_WORKERS: what Allocate needs is never taken by waiting
SHOW_S = 1.0  # how long the checkpoint may take to show a container whose PreStartContainer is here
ROUND_S = 30.0  # the calls for one container's resources belong to one start when within this
SETTLE_S = 10.0  # the kubelet writes its checkpoint after the last Allocate of a container
VERIFY_S = 120.0  # how long after its start a container is looked at until its processes are seen

SWEEP_HELD_S = 0.05
SWEEP_STARTING_S = 0.5
SWEEP_IDLE_S = 2.0
EXITS_EVERY_S = 5.0

_GRANT_UID = "grant"  # pod UID of bookings made in Allocate (early binding)


class Isolation(Protocol):
    """isolation.manager.IsolationManager, as far as the gate needs it."""

    def adopt(self, share: ShareToEnforce) -> None: ...

    def prepare(self, share: ShareToEnforce) -> ContainerEdits: ...

    def release(self, share: ShareToEnforce) -> None: ...


@dataclass(frozen=True, slots=True)
class AllocEvent:
    """Something that happened to a container's share, for events and logs. `kind`: "bound", "refused",
    "waiting", "released", "wrong_gpu", "no_share", "evict". `code`: the gRPC status of a refusal."""

    kind: str
    message: str
    pod_uid: str | None = None
    container: str | None = None
    gpu_uuid: str | None = None
    code: str | None = None
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class GateHooks:
    """What the gate tells others. Called without its lock; none may block or raise."""

    on_change: Callable[[], None] = lambda: None
    on_event: Callable[[AllocEvent], None] = lambda event: None
    evict: Callable[[str, str], None] = lambda pod_uid, reason: None  # waited too long
    gpu_edits: Callable[[Gpu], ContainerEdits] = lambda gpu: ContainerEdits()
    # What early binding has to tell NVIDIA's runtime, where that is not the GPU's UUID.
    early_env: Callable[[Gpu], Mapping[str, str]] = lambda gpu: {}
    # Containers of a pod that are no ordinary init containers, as far as is known.
    not_init: Callable[[str], frozenset[str]] = lambda pod_uid: frozenset()


@dataclass(frozen=True, slots=True)
class GateSettings:
    """`binding`: "late" or "early"; `visible_devices`: what early binding's env names ("uuid", "index",
    "all"); `wait_s` 0: nobody is evicted for waiting."""

    hold_s: float = 25.0
    wait_s: float = 0.0
    binding: str = "late"
    visible_devices: str = "uuid"


@dataclass(slots=True)
class Start:
    """What is known of one booked container beyond the ledger. `served`: letters whose call belongs to
    the start at `began_s`; `state`: "starting" | "running" | "exited"."""

    began_s: float
    since_ms: int
    served: set[str] = field(default_factory=set)
    state: str = "starting"
    share: ShareToEnforce | None = None
    files: tuple[str, ...] = ()  # CDI device names whose specs it has


@dataclass(slots=True)
class _Held:
    """A call that is held. `placed`: whoever made room has booked it for this call already; `gone`:
    its pod does not exist any more."""

    woken: threading.Event = field(default_factory=threading.Event)
    placed: bool = False
    gone: bool = False


class Gate:
    """Thread-safe. `restore` once, then `sweep` in a thread of its own."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        line: WaitingLine,
        names: ResourceNames,
        checkpoint: Checkpoint,
        specs: ShareSpecs,
        bookings: BookingFile,
        containers: Containers,
        isolation: Isolation,
        guard: AllocateGuard,
        settings: GateSettings,
        hooks: GateHooks,
        stop: threading.Event,
        clock: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self.names = names
        self._ledger = ledger
        self._line = line
        self._checkpoint = checkpoint
        self._checkpoint_lock = threading.Lock()
        self._specs = specs
        self._bookings = bookings
        self._containers = containers
        self._isolation = isolation
        self._guard = guard
        self._hooks = hooks
        self._stop = stop
        self._clock = clock
        self._wall_s = wall_s

        self._lock = threading.RLock()
        self._gpus: dict[str, Gpu] = {}
        self._starts: dict[ContainerKey, Start] = {}
        self._held: dict[ContainerKey, _Held] = {}
        self._evicted: set[str] = set()
        self._told: dict[ContainerKey | None, str] = {}  # the last refusal that was reported
        self._cgroups_seen = False  # a pod's cgroup has been seen: where there is none, the pod is gone
        self._last_grant_s = float("-inf")
        self._exits_s = float("-inf")
        self._counts: dict[str, int] = {}

        self._key_locks: dict[ContainerKey, list[Any]] = {}  # [lock, users]
        self._save_lock = threading.Lock()
        self._sweep_now = threading.Event()

    # --- what there is ---

    def set_gpus(self, capacities: Sequence[GpuCapacity], gpus: Mapping[str, Gpu]) -> None:
        """The GPUs in mode `shared` with what they have to give, and all GPUs by UUID."""
        with self._lock:
            self._gpus = dict(gpus)
            if tuple(capacities) != self._ledger.capacities():
                self._ledger.set_capacities(capacities)
                self._dispatch()

    def set_policy(self, policy: str) -> None:
        with self._lock:
            self._ledger.policy = policy
            self._dispatch()

    # --- Allocate ---

    def free_tokens(self, letter: str) -> int:
        """The tokens of a letter that nobody is known to hold."""
        with self._lock:
            index = (MEMORY, CORES, NUMBER).index(letter)
            return full(self._ledger.offered[index]) & ~self._ledger.held().of(letter)

    def offered(self, letter: str) -> int:
        with self._lock:
            return self._ledger.offered[(MEMORY, CORES, NUMBER).index(letter)]

    def grant(self, letter: str, mask: int) -> tuple[str | None, ContainerEdits]:
        """Allocate: the CDI device to name in the answer, or what else the container gets for these
        tokens. Memory and number name a share each (a number may come alone), cores nothing."""
        tokens = demand_of(letter, mask)
        name = tokens.share_name if letter != CORES else None
        early = self.settings.binding == "early"
        with self._lock:
            self._ledger.grant(tokens)
            self._last_grant_s = self._clock()
            self._count("allocations_total")
            uuid = self._choose_early(letter, tokens) if early and name else None
        self._hooks.on_change()
        if not early:
            return (qualified_name(SHARE_CLASS, name) if name else None), ContainerEdits()
        if uuid is None or name is None:
            return None, ContainerEdits()
        self._save()
        return None, self._early_edits(uuid, name, letter, mask)

    def _choose_early(self, letter: str, tokens: Demand) -> str | None:
        """The GPU named in the container's env before anybody knows the container; None: this
        resource names none."""
        uuids = [c.uuid for c in self._ledger.capacities() if not c.sick] or [
            c.uuid for c in self._ledger.capacities()
        ]
        if len(self._ledger.capacities()) > 1 and letter != MEMORY:
            return None  # two resources that name different GPUs: the kubelet takes one at random
        key = ContainerKey(_GRANT_UID, tokens.share_name or "")
        if letter == MEMORY:
            placed = self._ledger.place(key, tokens)
            if isinstance(placed, Placement):
                self._ledger.bind(key, tokens, placed.uuid)
                return placed.uuid
        # No room now: the largest that could hold it, and the gate waits for room there.
        return max(uuids, key=lambda u: self._ledger.free_on(u).memory, default=None)

    def _early_edits(self, uuid: str, name: str, letter: str, mask: int) -> ContainerEdits:
        with self._lock:
            gpu = self._gpus.get(uuid)
        if gpu is None:
            return ContainerEdits()
        units = mask.bit_count() if letter == MEMORY else 0
        env = {
            "NVIDIA_VISIBLE_DEVICES": self._visible(gpu),
            **self._hooks.early_env(gpu),
            SHARE_ENV: name,
            GPU_ENV: uuid,
        }
        if units:
            env[MEMORY_ENV] = str(units * self._ledger.unit_mib)
        edits = ContainerEdits(env=env)
        if not units:
            return edits
        share = ShareToEnforce("", "", name, gpu, units * self._ledger.unit_mib, None)
        try:
            return self._isolation.prepare(share).merged(edits)
        except IsolationError as e:
            # The container's start tries again, and refuses there what cannot be kept.
            log.warning("limits not prepared at Allocate share=%s error=%s", name, e)
            return edits

    def _visible(self, gpu: Gpu) -> str:
        if self.settings.visible_devices == "index":
            return str(gpu.index)
        return "all" if self.settings.visible_devices == "all" else gpu.uuid

    # --- PreStartContainer ---

    def pre_start(self, letter: str, mask: int) -> None:
        """Lets one container start, or raises AllocationError with the reason why it cannot (now)."""
        begun_s = self._clock()
        try:
            key, demand, held = self._identify(letter, mask)
        except AllocationError as e:
            self._refused(None, e)
            raise
        with self._alone(key):
            if self._continues(key, demand, letter):
                return
            try:
                self._start(key, demand, held, letter, begun_s)
            except AllocationError as e:
                self._refused(key, e)
                raise

    def _continues(self, key: ContainerKey, demand: Demand, letter: str) -> bool:
        """Whether this is a further call of a start that has been let through already."""
        with self._lock:
            start, booking = self._starts.get(key), self._ledger.booking(key)
            if (
                start is None
                or booking is None
                or booking.retired
                or booking.demand != demand
                or letter in start.served
                or start.state != "starting"
                or self._clock() - start.began_s > ROUND_S
            ):
                return False
            capacity = next((c for c in self._ledger.capacities() if c.uuid == booking.uuid), None)
            if capacity is None or capacity.sick:
                return False
            start.served.add(letter)
            return True

    def _start(
        self, key: ContainerKey, demand: Demand, held: HeldDevices, letter: str, begun_s: float
    ) -> None:
        only = self._early_uuid(key, demand, held) if self.settings.binding == "early" else None
        with self._lock:
            self._leave_dead_gpu(key)
            before = self._ledger.booking(key)
        booking = self._room(key, demand, only, begun_s)
        try:
            start = self._let_through(key, booking, letter)
        except AllocationError:
            dropped = None
            with self._lock:  # nothing changes in the ledger for a start that was refused
                self._ledger.undo(key, before)
                if before is None:
                    dropped = self._starts.pop(key, None)
                self._dispatch()
            if dropped is not None and dropped.share is not None:
                self._isolation.release(dropped.share)
            raise
        self._save()
        log.info(
            "container may start pod=%s container=%s gpu=%s memory_mib=%d cores=%s share=%s",
            key.pod_uid, key.container, booking.uuid, booking.memory_units * self._ledger.unit_mib,
            booking.cores, start.share.share if start.share else None,
        )  # fmt: skip
        self._event("bound", "", key, booking.uuid)
        self._hooks.on_change()

    def _leave_dead_gpu(self, key: ContainerKey) -> None:
        """A container that is about to start does not run: on a GPU that is sick or gone it has nothing
        left, and its tokens are not the GPU's any more. (As Unhealthy ones they would make the kubelet
        reject the pod when it restarts.) With the lock held."""
        booking = self._ledger.booking(key)
        if booking is None or booking.retired or booking.uuid is None:
            return
        capacity = next((c for c in self._ledger.capacities() if c.uuid == booking.uuid), None)
        if capacity is None or capacity.sick:
            self._ledger.release(key)
            self._ledger.grant(booking.demand)

    # Who is it?

    def _identify(self, letter: str, mask: int) -> tuple[ContainerKey, Demand, HeldDevices]:
        until_s = self._clock() + SHOW_S
        problem: KubeletError | None = None
        while True:
            try:
                view = self._read_checkpoint()
            except KubeletError as e:
                problem = e
            else:
                problem = None
                found = view.holding_tokens(self._resource(letter), mask)
                living = [key for key in found if self._containers.pod_alive(key.pod_uid) is not False]
                if living or found:
                    return self._choose(living or found, letter, view)
            if self._clock() >= until_s or self._stop.wait(0.02):
                break
        if problem is not None:
            raise AllocationError(
                f"cannot tell which container starts: {problem}; trying again", code="DATA_LOSS"
            )
        raise AllocationError(
            f"cannot tell which container starts: the kubelet's checkpoint names none that holds "
            f"{_shown(letter, mask)}; trying again",
            code="DEADLINE_EXCEEDED",
        )

    def _choose(
        self, candidates: Sequence[ContainerKey], letter: str, view: CheckpointView
    ) -> tuple[ContainerKey, Demand, HeldDevices]:
        """Which of the containers that hold exactly these tokens is starting, and what it needs.

        Containers of one pod may hold the same ones (the kubelet passes an init container's on), and
        so may, by a fault of the kubelet, containers of two pods.
        """
        demands = {key: self._demand(view.containers[key]) for key in candidates}
        later: dict[str, frozenset[str]] = {}
        if len(candidates) > 1:
            later = {uid: self._hooks.not_init(uid) for uid in {key.pod_uid for key in candidates}}
        with self._lock:
            now_s = self._clock()
            # Whose start has begun with a call for another resource, the latest first.
            begun = sorted(
                (
                    (-start.began_s, key)
                    for key in candidates
                    if (start := self._starts.get(key)) is not None
                    and start.state == "starting"
                    and letter not in start.served
                    and now_s - start.began_s <= ROUND_S
                ),
            )
            if len(candidates) == 1 or begun:
                key = begun[0][1] if begun else candidates[0]
                return key, demands[key], view.containers[key]

            def rank(key: ContainerKey) -> tuple[object, ...]:
                start, booking = self._starts.get(key), self._ledger.booking(key)
                return (
                    key in self._held,  # its call is here already
                    booking is not None,  # first one that never started,
                    key.container in later.get(key.pod_uid, ()),  # an ordinary init container before others,
                    booking is not None and booking.retired,  # then the one that was let through last
                    -start.began_s if start is not None else 0.0,
                    key.container,
                )

            key = min(candidates, key=rank)
        demand = demands[key]
        for other in candidates:
            if other.pod_uid == key.pod_uid:
                demand = _larger(demand, demands[other])
        return key, demand, view.containers[key]

    def _demand(self, held: HeldDevices) -> Demand:
        return Demand(*(held.tokens.get(self._resource(letter), 0) for letter in (MEMORY, CORES, NUMBER)))

    def _resource(self, letter: str) -> str:
        return {MEMORY: self.names.memory, CORES: self.names.cores, NUMBER: self.names.number}[letter]

    def _read_checkpoint(self) -> CheckpointView:
        with self._checkpoint_lock:
            return self._checkpoint.read()

    def _early_uuid(self, key: ContainerKey, demand: Demand, held: HeldDevices) -> str | None:
        """The GPU that the container's env names already."""
        with self._lock:
            name = demand_of(MEMORY, demand.memory).share_name or demand.share_name or ""
            granted = self._ledger.booking(ContainerKey(_GRANT_UID, name))
            if granted is not None and granted.demand.memory == demand.memory:
                self._ledger.rekey(granted.key, key)
                return granted.uuid
            uuids = tuple(self._gpus)
        answered = held.response_env(self.names.memory, GPU_ENV) or held.response_env(
            self.names.number, GPU_ENV
        )
        if answered is not None:
            return answered
        if len(uuids) == 1:
            return uuids[0]
        raise AllocationError(
            f"cannot bind a container that asks for {self.names.number} only on a node with several GPUs "
            f"where binding is early: ask for {self.names.memory} too, or enable CDI",
            code="UNIMPLEMENTED",
            permanent=True,
        )

    # Where is room?

    def _room(self, key: ContainerKey, demand: Demand, only: str | None, begun_s: float) -> Booking:
        """Books room for the container, waiting for it inside this call if need be."""
        alive = self._containers.pod_alive(key.pod_uid)
        held = _Held()
        with self._lock:
            self._cgroups_seen = self._cgroups_seen or bool(alive)
            known = self._line.get(key)
            answer = self._place(key, demand, only)
            if isinstance(answer, Placement):
                return self._book(key, demand, answer)
            full_house = len(self._held) >= MAX_HELD_CALLS
            hold = not (answer.permanent or full_house or self.settings.hold_s <= 0)
            if hold:
                self._held[key] = held
            else:
                self._line.call_ended(key, self._clock())
        if known is None or known.refusal.code is not answer.code:
            self._event("waiting", answer.message, key, code=answer.status, permanent=answer.permanent)
            self._hooks.on_change()
        if not hold:
            if full_house and not answer.permanent:
                answer = replace(
                    answer, message=f"{answer.message} ({MAX_HELD_CALLS} containers wait already)"
                )
            raise answer.error()
        self._sweep_now.set()
        held.woken.wait(max(0.0, begun_s + self.settings.hold_s - self._clock()))
        with self._lock:
            self._held.pop(key, None)
            if held.gone:
                raise _pod_gone()
            if not held.placed:
                answer = self._place(key, demand, only)
                if isinstance(answer, Placement):
                    return self._book(key, demand, answer)
                self._line.call_ended(key, self._clock())
            booking = self._ledger.booking(key)
        if self._stop.is_set():
            raise AllocationError("the agent is stopping: the start is tried again", code="UNAVAILABLE")
        if booking is None or not held.placed:
            assert isinstance(answer, Refusal)
            raise answer.error()
        return booking

    def _place(self, key: ContainerKey, demand: Demand, only: str | None) -> Placement | Refusal:
        """The ledger's answer; a refused container is in line from then on. With the lock held."""
        now_s = self._clock()
        running = self._running_rivals(key, demand)
        answer = self._line.place(key, demand, self._ledger, now_s, running, only)
        if isinstance(answer, Refusal):
            self._line.join(key, demand, answer, now_s, running, only)
        return answer

    def _running_rivals(self, key: ContainerKey, demand: Demand) -> tuple[str, ...]:
        """Containers of the same pod that hold some of the same tokens and run."""
        rivals = {
            b.key.container
            for b in self._ledger.bookings()
            if b.key.pod_uid == key.pod_uid and b.key != key and not b.retired and b.demand.overlaps(demand)
        }
        if not rivals:
            return ()
        return tuple(sorted(rivals.intersection(self._containers.environments(key.pod_uid) or ())))

    def _book(self, key: ContainerKey, demand: Demand, placement: Placement) -> Booking:
        booking = self._ledger.bind(key, demand, placement.uuid)
        self._line.leave(key)
        return booking

    def _dispatch(self) -> None:
        """Gives room that may have become free to the calls that are held, the longest waiting first.
        With the lock held, after whatever may have made room."""
        while (found := self._line.next_start(self._ledger, self._clock())) is not None:
            waiter, placement = found
            self._book(waiter.key, waiter.demand, placement)
            held = self._held.pop(waiter.key, None)
            if held is not None:
                held.placed = True
                held.woken.set()

    # Let it through.

    def _let_through(self, key: ContainerKey, booking: Booking, letter: str) -> Start:
        with self._lock:
            gpu = self._gpus.get(booking.uuid or "")
            previous = self._starts.get(key)
        if gpu is None:
            raise AllocationError(
                f"cannot start on GPU {booking.uuid}: it has just vanished", code="UNAVAILABLE"
            )
        share = self._share(booking, gpu)
        if previous is not None and previous.share is not None and previous.share.gpu.uuid != gpu.uuid:
            self._isolation.release(previous.share)
        names = spec_names(booking.demand) if self.settings.binding == "late" else ()
        for ended in self._superseded(key, names):
            # Their limits count no longer, and the next may have files by the same name.
            if ended.share is not None:
                self._isolation.release(ended.share)
        try:
            edits = self._isolation.prepare(share)
        except IsolationError as e:
            raise AllocationError(
                f"cannot put the limits of this container in place on GPU {gpu.index} ({gpu.model}): {e}",
                code="INTERNAL",
            ) from e
        start = Start(self._clock(), int(self._wall_s() * 1000), {letter}, "starting", share, names)
        with self._lock:
            gone = self._ledger.booking(key) is None
            if not gone:
                self._starts[key] = start
        if gone:  # while the limits were put in place
            self._isolation.release(share)
            raise _pod_gone()
        if names:
            try:
                whole = self._hooks.gpu_edits(gpu).merged(edits)
                self._specs.write(share, booking.demand, whole, self._stop)
            except NodeError as e:
                raise AllocationError(str(e), code="UNAVAILABLE") from e
        with self._lock:
            if self._starts.get(key) is not start:
                self._specs.remove(start.files)
                raise _pod_gone()
            start.began_s = self._clock()
            self._told.pop(key, None)
            self._count("binds_total")
        return start

    def _superseded(self, key: ContainerKey, names: Collection[str]) -> list[Start]:
        """Starts of the pod's containers that ended and whose tokens `key` took over, forgotten from now
        on. Their specs go but for `names`, which `key` writes anew."""
        with self._lock:
            ended = [
                other
                for other in self._starts
                if other.pod_uid == key.pod_uid
                and other != key
                and ((booking := self._ledger.booking(other)) is None or booking.retired)
            ]
            starts = [self._starts.pop(other) for other in ended]
            kept = {name for start in self._starts.values() for name in start.files}.union(names)
        self._specs.remove(name for start in starts for name in start.files if name not in kept)
        return starts

    def _share(self, booking: Booking, gpu: Gpu) -> ShareToEnforce:
        name = booking.demand.share_name
        assert name is not None
        return ShareToEnforce(
            booking.key.pod_uid,
            booking.key.container,
            name,
            gpu,
            booking.memory_units * self._ledger.unit_mib,
            booking.cores,
            self._containers.pod_cgroup(booking.key.pod_uid),
        )

    @contextmanager
    def _alone(self, key: ContainerKey, *, only_if_free: bool = False) -> Iterator[bool]:
        """One start of a container at a time: its resources' calls, and the kubelet's second try while
        the first is still here. `only_if_free`: yields False instead of waiting (a start may be held for
        long, and what would end its waiting must not wait for it)."""
        with self._lock:
            entry = self._key_locks.get(key)
            busy = only_if_free and entry is not None
            if entry is None:
                entry = self._key_locks[key] = [threading.Lock(), 0]
            entry[1] += not busy
        if busy:
            yield False
            return
        try:
            with entry[0]:
                yield True
        finally:
            with self._lock:
                entry[1] -= 1
                if not entry[1]:
                    del self._key_locks[key]

    # --- what has been ---

    def restore(self) -> None:
        """At start: who is on which GPU, from the saved bookings, the checkpoint, and what running
        containers were given. Nothing is listed to the kubelet before this is done."""
        saved = {b.key: b for b in self._bookings.load()}
        try:
            view: CheckpointView | None = self._read_checkpoint()
        except KubeletError as e:
            # A node's first start has none yet; a broken one is not believed.
            log.info("no checkpoint at start, using the saved bookings: %s", e)
            view = None
        demands = (
            {key: self._demand(held) for key, held in view.containers.items()}
            if view is not None
            else {key: b.demand for key, b in saved.items()}
        )
        running: dict[str, Mapping[str, Mapping[str, str]] | None] = {}
        kept = 0
        with self._lock:
            for key in sorted(demands, key=lambda k: (saved[k].since_ms if k in saved else 0, k)):
                demand, uid = demands[key], key.pod_uid
                if uid == _GRANT_UID or not demand:
                    continue
                alive = self._containers.pod_alive(uid)
                self._cgroups_seen = self._cgroups_seen or bool(alive)
                if alive is False:
                    # The kubelet may keep its IDs yet, and admit the same pod again (reboot).
                    self._ledger.grant(demand)
                    continue
                if uid not in running:
                    running[uid] = self._containers.environments(uid)
                found = running[uid]
                environment = found.get(key.container) if found is not None else None
                shown = environment.get(GPU_ENV) if environment is not None else None
                booking = saved.get(key)
                noted = booking.gpu_uuid if booking is not None and booking.demand == demand else None
                # Our own notes and the kubelet's first: a container can show any environment it likes.
                uuid = noted or self._specs.gpu_of(key, demand)
                if uuid is None and environment is not None:  # it runs
                    uuid = self._answered_gpu(key, view) or shown
                if uuid is None:
                    self._ledger.grant(demand)  # it has not started, or nothing is known of its start
                    continue
                refusal = self._ledger.restore(key, demand, uuid)
                if refusal is not None:
                    log.warning(
                        "booking not restored pod=%s container=%s: %s", uid, key.container, refusal.message
                    )
                    continue
                kept += 1
                booked = self._ledger.booking(key)
                gpu = self._gpus.get(uuid or "")
                self._starts[key] = Start(
                    self._clock(),
                    booking.since_ms if booking is not None else int(self._wall_s() * 1000),
                    {MEMORY, CORES, NUMBER},
                    "running" if shown in (None, uuid) else "starting",  # what it got is looked at again
                    self._share(booked, gpu) if booked is not None and gpu is not None else None,
                    spec_names(demand),
                )
            shares = [start.share for start in self._starts.values() if start.share is not None]
        for share in shares:
            self._isolation.adopt(share)
        self._specs.remove_others(name for start in self._starts.values() for name in start.files)
        self._release_ended(saved.values(), {share.share for share in shares})
        self._save()
        log.info("ledger restored bookings=%d", kept)

    def _answered_gpu(self, key: ContainerKey, view: CheckpointView | None) -> str | None:
        """The GPU that our answer to its Allocate named, as the kubelet keeps it (early binding)."""
        held = view.containers.get(key) if view is not None else None
        return held.response_env(self.names.memory, GPU_ENV) if held is not None else None

    def _release_ended(self, saved: Iterable[SavedBooking], in_use: Collection[str]) -> None:
        """Has the limits of containers taken back that ended while no agent ran."""
        for booking in saved:
            name, gpu = booking.demand.share_name, self._gpus.get(booking.gpu_uuid or "")
            if name is not None and name not in in_use and gpu is not None:
                uid, container = booking.key.pod_uid, booking.key.container
                self._isolation.release(ShareToEnforce(uid, container, name, gpu, 0, None))

    # --- what becomes of them ---

    def sweep(self) -> None:
        """Learns who has gone and verifies who has started, until the agent stops."""
        while not self._stop.is_set():
            self.sweep_once()
            with self._lock:
                if self._held:
                    interval_s = SWEEP_HELD_S
                elif any(s.state == "starting" for s in self._starts.values()):
                    interval_s = SWEEP_STARTING_S
                else:
                    interval_s = SWEEP_IDLE_S
            self._sweep_now.wait(interval_s)
            self._sweep_now.clear()

    def wake(self) -> None:
        """At stop: lets every held call go, and the sweep end."""
        with self._lock:
            for held in self._held.values():
                held.woken.set()
            self._held.clear()
        self._sweep_now.set()

    def sweep_once(self) -> None:
        self._release_gone()
        self._settle()
        self._verify_starts()
        self._notice_exits()
        self._watch_line()

    def _release_gone(self) -> None:
        with self._lock:
            known = {uid for uid in self._ledger.pods() if uid != _GRANT_UID}
            known.update(waiter.key.pod_uid for waiter in self._line.waiters())
            known.update(key.pod_uid for key in self._told if key is not None)
        gone = [uid for uid in known if self._gone(uid)]
        for uid in gone:
            self._release_pod(uid)

    def _gone(self, uid: str) -> bool:
        alive = self._containers.pod_alive(uid)
        if alive:
            self._cgroups_seen = True
            return False
        if alive is False and self._cgroups_seen:
            return True
        # Nothing can be told from cgroups here: only the kubelet's word counts.
        try:
            return uid not in self._read_checkpoint().pod_uids()
        except KubeletError:
            return False

    def _release_pod(self, uid: str) -> None:
        with self._lock:
            starts = {key: s for key, s in self._starts.items() if key.pod_uid == uid}
            held = self._ledger.release_pod(uid)
            waited = self._line.leave_pod(uid)
            for key in starts:
                del self._starts[key]
            for key in [k for k in self._held if k.pod_uid == uid]:
                waiting = self._held.pop(key)
                waiting.gone = True
                waiting.woken.set()
            self._evicted.discard(uid)
            for key in [k for k in self._told if k is not None and k.pod_uid == uid]:
                del self._told[key]
            self._dispatch()
        self._specs.remove(name for start in starts.values() for name in start.files)
        for start in starts.values():
            if start.share is not None:
                self._isolation.release(start.share)
        if held:
            self._save()
            log.info("pod is gone, its share is free pod=%s", uid)
            self._event("released", "", ContainerKey(uid, ""))
        if held or waited:
            self._hooks.on_change()

    def _settle(self) -> None:
        """Forgets grants that the kubelet has given back."""
        with self._lock:
            quiet = self._clock() - self._last_grant_s > SETTLE_S and not self._guard.busy
            early = [b for b in self._ledger.bookings() if b.key.pod_uid == _GRANT_UID]
            if not quiet or not (self._ledger.granted() or early):
                return
        try:
            view = self._read_checkpoint()
        except KubeletError:
            return
        memory = cores = shares = 0
        for held in view.containers.values():
            demand = self._demand(held)
            memory, cores, shares = memory | demand.memory, cores | demand.cores, shares | demand.shares
        by_kubelet = Demand(memory, cores, shares)
        with self._lock:
            if self._guard.busy or self._clock() - self._last_grant_s <= SETTLE_S:
                return  # an Allocate came in between: the file may be older than it
            before = self._ledger.granted()
            self._ledger.settle(by_kubelet)
            for booking in early:
                if not booking.demand.overlaps(by_kubelet):
                    self._ledger.release(booking.key)
            changed = before != self._ledger.granted()
            self._dispatch()
        if changed:
            self._hooks.on_change()

    def _verify_starts(self) -> None:
        """What containers that were let through really got."""
        with self._lock:
            starting = [(k, s) for k, s in self._starts.items() if s.state == "starting"]
        seen: dict[str, Mapping[str, Mapping[str, str]] | None] = {}
        for key, start in starting:
            if key.pod_uid not in seen:
                seen[key.pod_uid] = self._containers.environments(key.pod_uid)
            environment = (seen[key.pod_uid] or {}).get(key.container)
            if environment is None:
                if self._clock() - start.began_s > VERIFY_S:
                    self._set_state(key, start, "running")  # it cannot be seen from here
                continue
            self._set_state(key, start, "running")
            self._verify(key, start, environment)

    def _set_state(self, key: ContainerKey, start: Start, state: str) -> None:
        with self._lock:
            if self._starts.get(key) is start:
                start.state = state

    def _verify(self, key: ContainerKey, start: Start, environment: Mapping[str, str]) -> None:
        if start.share is None:
            return
        expected = start.share.gpu.uuid
        got = environment.get(GPU_ENV)
        if got is None:
            self._count("starts_without_share_total")
            message = (
                "the container started without its share: the container runtime does not inject CDI "
                "devices; enable CDI in its configuration, or set sharing.binding: early"
            )
            log.warning("%s pod=%s container=%s", message, key.pod_uid, key.container)
            self._event("no_share", message, key, expected)
            return
        if got == expected and environment.get(POD_ENV, key.pod_uid) == key.pod_uid:
            return
        self._count("starts_on_wrong_gpu_total")
        message = (
            f"the container got GPU {got} instead of {expected}: the container runtime read a spec of "
            f"before; stopped, so that it starts again"
        )
        log.error("%s pod=%s container=%s", message, key.pod_uid, key.container)
        self._event("wrong_gpu", message, key, expected)
        if not self._containers.stop(key.pod_uid, key.container):
            log.error("cannot stop it pod=%s container=%s", key.pod_uid, key.container)

    def _notice_exits(self) -> None:
        """Takes the spec of a container that has ended away: whoever starts it again without asking
        finds none. Its room is kept until its pod is gone."""
        if self._clock() - self._exits_s < EXITS_EVERY_S:
            return
        self._exits_s = self._clock()
        with self._lock:
            running = [(k, s) for k, s in self._starts.items() if s.state == "running" and s.files]
        for uid in {key.pod_uid for key, _ in running}:
            there = self._containers.environments(uid)
            if there is None:
                continue
            for key, start in running:
                if key.pod_uid != uid or key.container in there:
                    continue
                with self._alone(key, only_if_free=True) as free:
                    with self._lock:
                        if not free or self._starts.get(key) is not start:
                            continue  # it starts again
                        start.state = "exited"
                        others = {n for k, s in self._starts.items() if k != key for n in s.files}
                    self._specs.remove(name for name in start.files if name not in others)

    def _watch_line(self) -> None:
        now_s = self._clock()
        evict: list[tuple[str, str]] = []
        with self._lock:
            forgotten = self._line.forget(now_s)
            for waiter in self._line.waiters():
                if waiter.running and waiter.in_call:
                    self._place_again(waiter.key, waiter.demand, waiter.only)
                waited_s = now_s - waiter.since_s
                uid = waiter.key.pod_uid
                if 0 < self.settings.wait_s <= waited_s and uid not in self._evicted:
                    self._evicted.add(uid)
                    evict.append((uid, f"waited {waited_s:.0f} s: {waiter.refusal.message}"))
            # Time alone may open what was kept for others.
            self._dispatch()
        for uid, reason in evict:
            log.info("evicting a pod that waited too long pod=%s reason=%s", uid, reason)
            self._event("evict", reason, ContainerKey(uid, ""))
            self._hooks.evict(uid, reason)
        if forgotten:
            self._hooks.on_change()

    def _place_again(self, key: ContainerKey, demand: Demand, only: str | None) -> None:
        """Looks again at a container that waits for another of its pod to end."""
        running = self._running_rivals(key, demand)
        waiter = self._line.get(key)
        if waiter is not None and running != waiter.running:
            self._line.join(key, demand, waiter.refusal, self._clock(), running, only)

    # --- telling others ---

    def bookings(self) -> tuple[tuple[Booking, Start | None], ...]:
        """Every container that has room, with its start."""
        with self._lock:
            return tuple(
                (b, replace(s) if (s := self._starts.get(b.key)) is not None else None)
                for b in self._ledger.bookings()
                if b.key.pod_uid != _GRANT_UID
            )

    def read(self, look: Callable[[Ledger, WaitingLine, float], Any]) -> Any:
        """What `look` makes of ledger and line, seen at one moment (third argument: monotonic now)."""
        with self._lock:
            return look(self._ledger, self._line, self._clock())

    @property
    def problem(self) -> str | None:
        """What keeps the books from being kept over a restart."""
        return self._bookings.problem

    def counters(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + 1

    def _refused(self, key: ContainerKey | None, error: AllocationError) -> None:
        self._count("refusals_total")
        self._count(f"refusals_{error.code.lower()}_total")
        # The kubelet comes again every few seconds for as long as the pod is there: told once, and again
        # when the reason is another one. Who is in the way changes all the time and is not another reason.
        said = str(error) if error.permanent or key is None else error.code
        with self._lock:
            repeated = self._told.get(key) == said
            self._told[key] = said
        log.log(
            logging.WARNING if error.permanent and not repeated else logging.DEBUG,
            "container may not start pod=%s container=%s code=%s: %s",
            key.pod_uid if key else None, key.container if key else None, error.code, error,
        )  # fmt: skip
        if not repeated:
            self._event("refused", str(error), key, code=error.code, permanent=error.permanent)

    def _event(
        self,
        kind: str,
        message: str,
        key: ContainerKey | None,
        gpu_uuid: str | None = None,
        code: str | None = None,
        permanent: bool = False,
    ) -> None:
        self._hooks.on_event(
            AllocEvent(
                kind,
                message,
                key.pod_uid if key else None,
                (key.container or None) if key else None,
                gpu_uuid,
                code,
                permanent,
            )
        )

    def _save(self) -> None:
        with self._save_lock:
            with self._lock:
                saved = [
                    SavedBooking(b.key, b.demand, b.uuid, s.since_ms if (s := self._starts.get(b.key)) else 0)
                    for b in self._ledger.bookings()
                    if not b.retired and b.key.pod_uid != _GRANT_UID
                ]
            self._bookings.save(saved)


def _larger(a: Demand, b: Demand) -> Demand:
    """Letter by letter the set with more tokens."""
    return Demand(
        *(
            max(x, y, key=int.bit_count)
            for x, y in ((a.memory, b.memory), (a.cores, b.cores), (a.shares, b.shares))
        )
    )


def _pod_gone() -> AllocationError:
    return AllocationError("the pod of this container does not exist any more", code="CANCELLED")


def _shown(letter: str, mask: int) -> str:
    """ "m000012 and 7 more"."""
    more = mask.bit_count() - 1
    return token_id(letter, lowest(mask)) + (f" and {more} more" if more else "")
