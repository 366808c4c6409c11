"""The fleet uplink: one service that says over MQTT what the node is, and keeps what it could not say.

The agent calls `changed`, `event` and `sample` from any thread; these only note and wake. Everything
else happens in the uplink's own thread: rendering the snapshot, the outbox, the window of messages
that the broker has not acknowledged. The connection lives in a second thread (client.Link).

What is sent, in this order: retained state (status, inv, alloc, alerts), live messages from the
outbox, then the backlog of an outage at its own pace. After every connect all retained state is sent
anew. Liveness is the age of the last PUBACK, not what the client library believes.
"""

from __future__ import annotations

import json
import logging
import random
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgeagent.config.schema import FleetConfig
from edgeagent.errors import FleetError
from edgeagent.fleet import estimate, homeassistant, messages
from edgeagent.fleet.client import (
    Acked,
    Broker,
    Connected,
    Disconnected,
    Link,
    LinkSettings,
    Received,
    Subscribed,
    Subscription,
)
from edgeagent.fleet.commands import ANSWER_EXPIRY_S, CommandActions, CommandDesk
from edgeagent.fleet.desired import Apply, DesiredConfig
from edgeagent.fleet.messages import Body, OutboxFigures, Stamp, UplinkFacts
from edgeagent.fleet.outbox import MessageClass, Outbox, Row
from edgeagent.fleet.pacing import ByteBudget, EventLimiter, TokenBucket
from edgeagent.fleet.retained import RetainedState
from edgeagent.fleet.topics import Topics
from edgeagent.node.clock import Clock, Moment, back_fill
from edgeagent.snapshot import NodeSnapshot, NodeState, UplinkState

log = logging.getLogger(__name__)

STATUS_GAP_S = 0.5
DEBOUNCE_S = 2.0
CORRECT_GAP_S = 10.0
MAINTAIN_EVERY_S = 300.0
RESTART_AFTER_S = (1.0, 60.0)
MAX_HANDOVER = 1000
DONE_LOT = 32
FETCH_LOT = 64
BUDGET_LOOK_S = 30.0
MAX_BATCH = 360
ENVELOPE_ROOM = 1024
BACKLOG_IS_ROWS = 50  # after an outage shorter than BACKLOG_IS_S, fewer rows are sent as if live
BACKLOG_IS_S = 60.0
POISON_STRIKES = 3
LEARN_ABOVE_BYTES = 2048
REFUSAL_STRIKES = 6
RIVALS_ARE_A_FIGHT = 2
RIVAL_WINDOW_S = 600.0
GOODBYE_S = 1.5
CLOSE_S = 1.0
CRITICAL_KINDS = frozenset({"xid", "oom"})
COLUMNS_TYPE = "application/vnd.edgeagent.columns+json+deflate"


@dataclass(frozen=True, slots=True)
class _Note:
    """What a caller handed over."""

    kind: str
    body: Body
    moment: Moment


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A message the broker has not acknowledged: a row of the outbox, or a version of a topic."""

    topic: str
    size: int
    sent_s: float
    row: Row | None = None
    version: int = 0


@dataclass(slots=True)
class _Connection:
    """What is known of the present connection."""

    epoch: int
    broker: str
    since_ms: int
    window: int
    max_packet_bytes: int | None
    acks: int = 0
    in_flight: dict[int, _InFlight] = field(default_factory=dict)


class Uplink:
    """`run(stop)` is the service, `wake` its wake function; the rest may be called from any thread
    and returns at once."""

    def __init__(
        self,
        config: FleetConfig,
        *,
        node: str,
        site: str,
        state_dir: Path,
        clock: Clock,
        snapshot: Callable[[], NodeSnapshot],
        actions: CommandActions | None = None,
        apply_desired: Apply | None = None,
        rng: random.Random | None = None,
        backoff_s: tuple[float, float] = (1.0, 60.0),
        ack_timeout_s: float = 30.0,
    ) -> None:
        """Raises FleetError where the configuration cannot work. `backoff_s` (least, most) and
        `ack_timeout_s` are for tests."""
        self._config = config
        self._clock = clock
        self._snapshot = snapshot
        self._state_dir = state_dir / "fleet"
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._actions = actions
        self._apply_desired = apply_desired
        self.topics = Topics(site, node)
        self.session = secrets.token_hex(6)
        self._settings = _link_settings(config, node, backoff_s, ack_timeout_s)
        self._telemetry_s = config.telemetry_seconds
        self._batch_s = estimate.batch_seconds(config)
        self._deflates = estimate.deflates(config)
        self._allow = () if actions is None else tuple(config.commands.allow)
        self._facts = UplinkFacts(
            commands=self._allow,
            signed_commands=actions is not None and config.commands.hmac_key_file is not None,
            keepalive_s=self._settings.keepalive_s,
            will_delay_s=self._settings.will_delay_s if self._settings.is_v5 else 0,
            status_every_s=estimate.status_seconds(config),
            telemetry_s=self._telemetry_s,
            link=config.link,
        )
        # Hand-over from other threads.
        self._wake = threading.Event()
        self._notes: deque[_Note] = deque()
        self._notes_lost: Counter[str] = Counter()
        self._limiter = EventLimiter(config.events_per_minute)
        self._changed = threading.Event()
        self._sample_now = threading.Event()
        # The uplink thread's own.
        self._outbox: Outbox | None = None
        self._link: Link | None = None
        self._desk: CommandDesk | None = None
        self._desired: DesiredConfig | None = None
        self._connection: _Connection | None = None
        self._retained = RetainedState()
        self._fetched: deque[Row] = deque()
        self._fetched_backlog: deque[Row] = deque()
        self._done: list[int] = []
        self._token = 0
        self._message_number = 0
        self._config_hash = ""
        self._agent_version = ""
        self._status_key: Body | None = None
        self._batch: list[tuple[Moment, Body]] = []
        self._budget = ByteBudget(None if config.monthly_mb is None else int(config.monthly_mb * 1e6))
        self._backlog: TokenBucket | None = None
        self._backlog_from_s = 0.0
        self._paused_until_s = 0.0
        self._corrected_s = 0.0
        self._began_ms = 0
        self._largest_bytes = messages.MAX_PAYLOAD_BYTES
        self._former_filters: list[str] = []
        self._incoming = TokenBucket(20.0, 32)
        self._problem: str | None = None
        self._duplicate: str | None = None
        self._disconnected_s = 0.0
        self._last_ack_s: float | None = None
        self._connects = 0
        self._solo = False
        self._suspects: dict[str, int] = {}  # identity of a message -> disconnects right after it
        self._rivals: deque[float] = deque(maxlen=8)
        self._stopping = False
        self._links_died = 0
        self._due: dict[str, float] = {}
        self._public = UplinkState(enabled=True)

    # -- for everybody ----------------------------------------------------------------------------

    def wake(self) -> None:
        self._wake.set()

    def changed(self) -> None:
        """Something of status, alloc, inv or the alerts may have changed."""
        self._changed.set()
        self._wake.set()

    def sample(self) -> None:
        """Takes a telemetry sample now, besides the regular ones."""
        self._sample_now.set()
        self._wake.set()

    def set_telemetry_seconds(self, seconds: float) -> None:
        """A changed interval counts from now on."""
        if seconds == self._telemetry_s:
            return
        self._telemetry_s = seconds
        self._facts = replace(self._facts, telemetry_s=seconds)
        self._sample_now.set()
        self._wake.set()

    def set_commands_allowed(self, verbs: Collection[str]) -> None:
        """Changed `fleet.commands.allow`."""
        if self._actions is None:
            return
        self._allow = tuple(verbs)
        self._facts = replace(self._facts, commands=self._allow)
        if self._desk is not None:
            self._desk.allow = frozenset(verbs)
        self.changed()

    def event(
        self,
        kind: str,
        type_: str,
        message: str,
        *,
        severity: str = "info",
        gpu_uuid: str | None = None,
        namespace: str | None = None,
        pod: str | None = None,
        container: str | None = None,
        facts: Mapping[str, str | int | float] | None = None,
    ) -> None:
        """Records an event of one of topics.EVENT_KINDS. So many a minute of each kind go out, the
        others are counted in the next one."""
        self.topics.event(kind)  # raises FleetError for a kind that is none
        moment = self._clock.now()
        suppressed = self._limiter.admit(kind, moment.mono_ms / 1000)
        if suppressed is None:
            return
        body = messages.event(
            kind, type_, message, severity=severity, gpu_uuid=gpu_uuid, namespace=namespace, pod=pod,
            container=container, facts=facts, suppressed=suppressed,
        )  # fmt: skip
        if len(self._notes) >= MAX_HANDOVER:
            self._notes_lost[_class_of(kind).label] += 1
            return
        self._notes.append(_Note(kind, body, moment))
        self._wake.set()

    def state(self) -> UplinkState:
        public = self._public
        if public.connected and self._last_ack_s is not None:
            age_s = self._clock.now().mono_ms / 1000 - self._last_ack_s
            return replace(public, last_puback_age_s=round(max(0.0, age_s), 1))
        return public

    # -- the service ------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """The uplink guards itself: a fault of its own must not take the device plugin with it. It
        is logged, and everything but the outbox begins anew."""
        pause_s = RESTART_AFTER_S[0]
        while True:
            began_s = time.monotonic()
            try:
                # Also when the stop came first: what was handed over before is to be kept.
                self._serve(stop)
                return
            except Exception as e:  # the uplink's guard: see above
                log.exception("uplink failed; it starts again in %.0f s", pause_s)
                self._problem = f"the uplink failed: {type(e).__name__}: {e}"
                self._publish_state()
                self._abandon()
                if stop.wait(pause_s):
                    self._close()
                    return
                quick = time.monotonic() - began_s < 2 * RESTART_AFTER_S[1]
                pause_s = min(2 * pause_s, RESTART_AFTER_S[1]) if quick else RESTART_AFTER_S[0]

    def _serve(self, stop: threading.Event) -> None:
        self._begin()
        while not stop.is_set():
            now = self._clock.now()
            self._turn(now)
            self._wake.wait(self._sleep_s(now))
            self._wake.clear()
        self._goodbye()

    def _begin(self) -> None:
        now = self._clock.now()
        self._began_ms = now.wall_ms
        if self._outbox is None:
            self._outbox = Outbox(
                self._state_dir,
                max_bytes=self._config.outbox.max_mib << 20,
                max_age_ms=int(self._config.outbox.max_days * 86_400_000),
                now_mono_ms=now.mono_ms,
            )
        self._budget.load(self._outbox.get_meta("budget"))
        self._clear_former_name()
        if self._apply_desired is not None and self._desired is None:
            self._desired = DesiredConfig(self._state_dir, self._apply_desired)
            self._desired.resume()
        if self._actions is not None and self._desk is None:
            key = self._config.commands.hmac_key_file
            self._desk = CommandDesk(
                topics=self.topics,
                session=self.session,
                actions=self._actions,
                allow=self._allow,
                per_minute=self._config.commands.per_minute,
                state_dir=self._state_dir,
                hmac_key_file=None if key is None else Path(key),
                wake=self.wake,
            )
            self._desk.resume()
        now_s = now.mono_ms / 1000
        self._disconnected_s = now_s
        self._due = {
            "status": now_s,
            "sample": now_s,
            "maintain": now_s + MAINTAIN_EVERY_S,
            "batch": now_s + (self._batch_s or 0.0),
        }
        snap = self._snapshot()
        self._refresh(snap, now)
        self._retained.want(self.topics.allocation, messages.allocation(snap))
        self._retained.want(self.topics.inventory, messages.inventory(snap))
        self._start_link()

    def _start_link(self) -> None:
        self._link = Link(
            self._settings,
            will=self._will,
            subscriptions=self._subscriptions,
            stale_filters=self._stale_filters,
            wake=self.wake,
            rng=self._rng,
        )
        self._link.start()

    def _turn(self, now: Moment) -> None:
        self._watch_link(now)
        self._take_link_events(now)
        self._take_messages(now)
        self._take_notes(now)
        self._do_what_is_due(now)
        self._take_answers(now)
        self._pump(now)
        self._publish_state()

    def _sleep_s(self, now: Moment) -> float:
        """Until something is due. Whatever comes from outside wakes us."""
        now_s = now.mono_ms / 1000
        wait_s = min(self._due.values()) - now_s
        if self._limiter.holding:
            wait_s = min(wait_s, 5.0)
        if self._link is not None and self._link.messages:
            wait_s = min(wait_s, self._incoming.wait_s(now_s))
        connection = self._connection
        if connection is not None and now_s < self._paused_until_s:
            wait_s = min(wait_s, self._paused_until_s - now_s)
        elif (
            connection is not None and self._backlog is not None and len(connection.in_flight) < self._window
        ):
            waits = [self._backlog_from_s - now_s, self._backlog.wait_s(now_s)]
            if not self._budget.backlog_allowed(now.wall_ms):
                waits.append(BUDGET_LOOK_S)
            wait_s = min(wait_s, max(waits))
        return max(0.01, min(wait_s, 60.0))

    # -- the link ---------------------------------------------------------------------------------

    def _watch_link(self, now: Moment) -> None:
        link = self._link
        if link is None or link.alive:
            return
        self._links_died += 1
        log.warning("mqtt thread died, starting a new one error=%r", link.error)
        self._agent_event("UplinkRestarted", f"the MQTT thread died ({link.error!r}) and was started again")
        self._lost_connection(Disconnected("the MQTT thread died", was_connected=True), now)
        link.close(0.1)
        self._start_link()

    def _take_link_events(self, now: Moment) -> None:
        link = self._link
        done = self._done
        while link is not None and link.inbox:
            event = link.inbox.popleft()
            match event:
                case Acked():
                    self._acknowledged(event, now, done)
                case Connected():
                    self._made_connection(event, now)
                case Disconnected():
                    self._flush_done()
                    self._lost_connection(event, now)
                case Subscribed(refused) if refused:
                    self._problem = f"the broker refuses subscriptions to {', '.join(refused)}"
                    log.warning("%s", self._problem)
        # A delete costs a transaction; what a crash leaves undeleted is sent twice and can be told.
        busy = self._connection is not None and self._connection.in_flight
        if len(done) >= DONE_LOT or (done and not busy):
            self._flush_done()
        elif done:
            self._due.setdefault("done", now.mono_ms / 1000 + 0.2)

    def _flush_done(self) -> None:
        if self._done and self._outbox is not None:
            self._outbox.done(self._done)
        self._done.clear()
        self._due.pop("done", None)

    def _made_connection(self, event: Connected, now: Moment) -> None:
        now_s = now.mono_ms / 1000
        self._connects += 1
        self._connection = _Connection(
            event.epoch, event.broker.url, now.wall_ms, event.window, event.max_packet_bytes
        )
        self._problem = None
        # It lives; PUBACKs carry on from here.
        self._last_ack_s = now_s
        log.info(
            "connected broker=%s session_present=%s window=%d queued=%d",
            event.broker.url, event.session_present, event.window, self._box.queued,
        )  # fmt: skip
        self._retained.connected()
        self._refresh(self._snapshot(), now, status=True)
        self._box.release()
        self._forget_fetched()
        outage_s = now_s - self._disconnected_s
        if self._box.queued and (outage_s >= BACKLOG_IS_S or self._box.queued > BACKLOG_IS_ROWS):
            self._box.spill()
            self._box.mark_backlog()
            rate = self._config.outbox.replay_per_second
            self._backlog = TokenBucket(rate, max(1.0, rate / 4))
            # A site whose broker was down must not answer with every node's backlog at once.
            self._backlog_from_s = now_s + self._rng.uniform(0, self._config.outbox.replay_jitter_seconds)
        self._box.set_meta("base", self.topics.base)
        self._box.set_meta("filters", json.dumps([s.topic for s in self._subscriptions()]))

    def _lost_connection(self, event: Disconnected, now: Moment) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._disconnected_s = now.mono_ms / 1000
            log.info("disconnected broker=%s: %s", connection.broker, event.reason)
            self._judge_disconnect(connection, event, now)
        elif self._problem != event.reason:
            log.log(
                logging.WARNING if self._problem is None else logging.DEBUG,
                "cannot connect: %s",
                event.reason,
            )
        self._problem = event.reason
        if event.certificate_time and not now.synced:
            self._problem += (
                "; this node's clock is not synchronised, so certificate dates cannot be judged: "
                "it is tried again when the time is known"
            )
        self._retained.disconnected()
        self._forget_fetched()
        if self._outbox is not None:
            self._outbox.release()
            self._outbox.spill()

    def _judge_disconnect(self, connection: _Connection, event: Disconnected, now: Moment) -> None:
        if event.taken_over:
            self._rival(f"another client connects as {self._settings.client_id!r}", now)
            return
        if not event.by_peer or not connection.in_flight:
            return
        # The broker hung up with messages unacknowledged: one of them may be the reason. Next time
        # they go one by one, and only what is alone in flight is blamed, and only if the link had
        # proved to work before.
        alone = next(iter(connection.in_flight.values())) if len(connection.in_flight) == 1 else None
        if alone is not None and connection.acks and (self._solo or event.blames_packet):
            name = _name(alone)
            self._suspects[name] = self._suspects.get(name, 0) + 1
            if self._suspects[name] >= (1 if event.blames_packet else POISON_STRIKES):
                self._suspects.pop(name)
                if alone.row is None and alone.size > LEARN_ABOVE_BYTES:
                    # MQTT 3.1.1 brokers do not tell how large a packet may be: state can be shortened.
                    self._largest_bytes = alone.size // 2
                else:
                    self._set_aside(alone, f"the broker hung up on it: {event.reason}", now, poison=True)
        self._solo = True

    def _rival(self, what: str, now: Moment) -> None:
        """A sign of somebody else with our name. Brokers need not say that a client was taken over,
        so his status counts too. One sign may be an accident; more are a fight, which waiting calms."""
        now_s = now.mono_ms / 1000
        self._rivals.append(now_s)
        if len([t for t in self._rivals if now_s - t < RIVAL_WINDOW_S]) < RIVALS_ARE_A_FIGHT:
            return
        if self._link is not None:
            self._link.slow_down()
        if self._duplicate is None:
            log.warning("%s", what)
            self._agent_event("DuplicateClient", f"{what}: two agents share a name", severity="critical")
        self._duplicate = what

    def _acknowledged(self, event: Acked, now: Moment, done: list[int]) -> None:
        connection = self._connection
        sent = None if connection is None else connection.in_flight.pop(event.token, None)
        if connection is None or sent is None:
            return
        connection.acks += 1
        self._last_ack_s = now.mono_ms / 1000
        if event.refused is not None and event.temporary and self._try_again(sent, event.refused):
            return
        if self._suspects:
            self._suspects.pop(_name(sent), None)
        if event.refused is not None:
            self._set_aside(sent, event.refused, now)
        elif sent.row is not None:
            done.append(sent.row.id)
            # A row that made it, alone, ends the suspicion against all.
            self._solo = False
        else:
            self._retained.acknowledge(sent.topic, sent.version)
            if self._solo and self._retained.next_due() is None and not self._box.queued:
                self._solo = False

    def _try_again(self, sent: _InFlight, reason: str) -> bool:
        """A refusal that may pass (quota, an error of the broker): everything waits a little, longer
        each time. False when it did not pass."""
        name = _name(sent)
        strikes = self._suspects[name] = self._suspects.get(name, 0) + 1
        if strikes >= REFUSAL_STRIKES:
            return False
        log.debug("broker refused for now topic=%s reason=%s strikes=%d", sent.topic, reason, strikes)
        assert self._last_ack_s is not None
        self._paused_until_s = self._last_ack_s + strikes**2
        if sent.row is not None:
            self._box.release([sent.row.id])
        else:
            self._retained.retry(sent.topic)
        return True

    def _set_aside(self, sent: _InFlight, reason: str, now: Moment, *, poison: bool = False) -> None:
        if sent.row is not None:
            self._box.quarantine(sent.row.id, reason, now.wall_ms)
        else:
            self._retained.refuse(sent.topic, sent.version, poison=poison)
        if not sent.topic.startswith(self.topics.event("agent")):
            self._agent_event(
                "MessageRefused", f"the broker refused {sent.topic} ({reason})", severity="warning"
            )

    # -- what comes in ------------------------------------------------------------------------------

    def _subscriptions(self) -> list[Subscription]:
        # On a LAN our own status comes back: that also shows a will that the broker sent late. On a
        # metered MQTT 5 link only what others write there does.
        out = [Subscription(self.topics.status, own=self._config.link == "lan")]
        out.append(Subscription(self.topics.alerts))
        if self._actions is not None:
            out.append(Subscription(self.topics.commands))
        if self._apply_desired is not None:
            out.append(Subscription(self.topics.desired))
        return out

    def _stale_filters(self) -> list[str]:
        """Filters that an earlier run left in the broker's session."""
        return self._former_filters

    def _take_messages(self, now: Moment) -> None:
        link = self._link
        while link is not None and link.messages and self._incoming.take(now.mono_ms / 1000):
            message = link.messages.popleft()
            if message.topic == self.topics.status:
                self._heard_own_status(message, now)
            elif message.topic == self.topics.desired:
                if self._desired is not None and self._desired.receive(message.payload):
                    self._refresh(self._snapshot(), now, status=True)
            elif message.topic.startswith(self.topics.base + "/alert/"):
                self._heard_own_alert(message)
            elif self._desk is not None and self.topics.verb(message.topic) is not None:
                self._desk.receive(message, now)
            link.acknowledge(message)
        if link is not None:
            link.flush()

    def _heard_own_status(self, message: Received, now: Moment) -> None:
        try:
            value = json.loads(message.payload) if message.payload else {}
        except (ValueError, RecursionError):
            value = {}
        if not isinstance(value, dict):
            value = {}
        state, session, ts_ms = value.get("state"), value.get("sess"), value.get("ts")
        alive = state in (NodeState.READY.value, NodeState.DRAINING.value)
        if alive and session == self.session:
            return
        if alive and isinstance(ts_ms, int) and ts_ms > self._began_ms and self._connects > 1:
            # Not what an earlier run of ours left: it was said while we ran.
            self._rival(f"another agent reports as {self.topics.site}/{self.topics.node}", now)
        if message.retained:
            return  # what was there before our birth; that is on its way
        # At once, but not more often than every few seconds: two agents of one name would race.
        self._due["correct"] = max(now.mono_ms / 1000, self._corrected_s + CORRECT_GAP_S)

    def _heard_own_alert(self, message: Received) -> None:
        if message.retained and message.payload and message.topic not in self._retained:
            log.info("clearing an alert that no longer holds topic=%s", message.topic)
            self._retained.want(message.topic, None)

    def _clear_former_name(self) -> None:
        """A renamed node empties what it left under its former name, as far as the ACL lets it."""
        former = self._box.get_meta("base")
        filters = self._box.get_meta("filters")
        wanted = {s.topic for s in self._subscriptions()}
        try:
            self._former_filters = [f for f in json.loads(filters or "[]") if f not in wanted]
        except (ValueError, TypeError):
            self._former_filters = []
        if former and former != self.topics.base:
            log.info("this node was %s before: clearing its retained topics", former)
            for name in ("status", "inv", "alloc"):
                self._retained.want(f"{former}/{name}", None)

    # -- what is recorded ---------------------------------------------------------------------------

    def _take_notes(self, now: Moment) -> None:
        while self._notes_lost:
            label, n = self._notes_lost.popitem()
            self._box.count_loss(label, n)
        for kind, n in self._limiter.leftovers(now.mono_ms / 1000).items():
            body = messages.event(kind, "Suppressed", f"{n} further events of this kind", suppressed=n)
            self._record(_class_of(kind), self.topics.event(kind), body, now)
        while self._notes:
            note = self._notes.popleft()
            self._record(_class_of(note.kind), self.topics.event(note.kind), note.body, note.moment)
        while self._box.incidents:
            text = self._box.incidents.pop(0)
            self._record(
                MessageClass.EVENT,
                self.topics.event("agent"),
                messages.event("agent", "OutboxTrouble", text, severity="warning"),
                now,
            )

    def _agent_event(self, type_: str, message: str, *, severity: str = "warning") -> None:
        self.event("agent", type_, message, severity=severity)

    def _record(
        self, cls: MessageClass, topic: str, body: Body, moment: Moment, *, durable: bool = True
    ) -> None:
        try:
            data = messages.encode(body, messages.MAX_PAYLOAD_BYTES - ENVELOPE_ROOM)
        except FleetError as e:
            log.warning("message dropped topic=%s: %s", topic, e)
            self._box.count_loss("oversize")
            return
        self._box.put(
            cls,
            topic,
            data,
            wall_ms=moment.wall_ms,
            mono_ms=moment.mono_ms,
            boot=moment.boot_id,
            session=self.session,
            clock=messages.SYNCED if moment.synced else messages.UNSYNCED,
            durable=durable,
        )

    def _record_batch(self) -> None:
        rows, self._batch = self._batch, []
        if not rows:
            return
        moment = rows[-1][0]
        # In memory only while the link takes it away at once: it spares the flash.
        durable = self._connection is None
        samples = [body for _, body in rows]
        topic = self.topics.telemetry_deflated if self._deflates else self.topics.telemetry
        body = messages.to_columns(samples) if self._deflates else messages.telemetry(samples)
        if len(samples) > 1 and len(json.dumps(body)) > messages.MAX_PAYLOAD_BYTES - ENVELOPE_ROOM:
            half = len(rows) // 2
            for part in (rows[:half], rows[half:]):
                self._batch = part
                self._record_batch()
            return
        self._record(MessageClass.TELEMETRY, topic, body, moment, durable=durable)

    # -- what is due --------------------------------------------------------------------------------

    def _do_what_is_due(self, now: Moment) -> None:
        now_s = now.mono_ms / 1000
        snap: NodeSnapshot | None = None
        sampling = self._sample_now.is_set() or now_s >= self._due["sample"]
        if self._changed.is_set() and now_s >= self._due.get("changed", 0.0):
            self._changed.clear()
            self._due["changed"] = now_s + STATUS_GAP_S
            self._due.setdefault("full", now_s + DEBOUNCE_S)
            snap = self._snapshot()
            self._refresh(snap, now)
        elif not self._changed.is_set():
            self._due.pop("changed", None)
        if sampling:
            self._sample_now.clear()
            self._due["sample"] = min(
                _next(self._due["sample"], self._telemetry_s, now_s), now_s + self._telemetry_s
            )
            snap = snap or self._snapshot()
            self._refresh(snap, now)
            self._take_sample(snap, now)
            self._due.setdefault("full", now_s)
        if now_s >= self._due.get("full", now_s + 1):
            del self._due["full"]
            snap = snap or self._snapshot()
            self._retained.want(self.topics.allocation, messages.allocation(snap))
            self._retained.want(self.topics.inventory, messages.inventory(snap))
        if now_s >= self._due.get("done", now_s + 1):
            self._flush_done()
        if now_s >= self._due["batch"] and self._batch_s is not None:
            self._due["batch"] = _next(self._due["batch"], self._batch_s, now_s)
            self._record_batch()
        if self._batch_s is None:
            self._due["batch"] = now_s + 3600.0
        if now_s >= self._due["status"]:
            self._refresh(snap or self._snapshot(), now, status=True)
        if now_s >= self._due.get("correct", now_s + 1):
            del self._due["correct"]
            self._corrected_s = now_s
            log.info("own status was wrong at the broker: corrected")
            self._refresh(snap or self._snapshot(), now, status=True)
        if now_s >= self._due["maintain"]:
            self._due["maintain"] = now_s + MAINTAIN_EVERY_S
            self._box.maintain(wall_ms=now.wall_ms, mono_ms=now.mono_ms, boot=now.boot_id, synced=now.synced)
            self._box.set_meta("budget", self._budget.dump())
            self._clock.keep()
            if self._rivals and now_s - self._rivals[-1] > RIVAL_WINDOW_S:
                self._rivals.clear()
                self._duplicate = None

    def _take_sample(self, snap: NodeSnapshot, now: Moment) -> None:
        if not self._budget.telemetry_allowed(now.wall_ms):
            self._box.count_loss("budget")
            return
        if self._batch and self._batch[-1][0].synced != now.synced:
            self._record_batch()  # its times are put right, or not, as a whole
        self._batch.append((now, messages.sample(snap, now.wall_ms)))
        if self._batch_s is None or len(self._batch) >= MAX_BATCH:
            self._record_batch()

    def _refresh(self, snap: NodeSnapshot, now: Moment, *, status: bool = False) -> None:
        """Status and alerts as they are now; `status`: it is sent even if nothing changed."""
        self._config_hash, self._agent_version = snap.config_hash, snap.agent_version
        body = messages.status(
            snap,
            uplink=self._facts,
            outbox=self._figures(now),
            desired=None if self._desired is None else self._desired.state,
        )
        if self._stopping:
            body["state"] = NodeState.OFFLINE.value
        if self._duplicate is not None:
            body["reasons"] = [*body["reasons"], self._duplicate]
        if self._box.problem is not None:
            body["reasons"] = [*body["reasons"], self._box.problem]
        key = _lasting(body)
        if status or key != self._status_key:
            self._status_key = key
            self._retained.want(self.topics.status, body, again=True)
            self._due["status"] = now.mono_ms / 1000 + estimate.status_seconds(self._config)
        wanted = {
            self.topics.alert(ident): messages.alert(condition, snap)
            for ident, condition in messages.conditions(snap).items()
        }
        for topic in self._retained.topics():
            if topic.startswith(self.topics.base + "/alert/") and topic not in wanted:
                self._retained.want(topic, None)
        for topic, alert in wanted.items():
            self._retained.want(topic, alert)
        if self._config.home_assistant:
            former = json.loads(self._box.get_meta("homeassistant") or "[]")
            found = homeassistant.discovery(snap, self.topics, former)
            if self._retained.want(homeassistant.topic(self.topics), found):
                self._box.set_meta("homeassistant", json.dumps(sorted(found["cmps"])))

    def _figures(self, now: Moment) -> OutboxFigures:
        box = self._box
        oldest = box.oldest() if box.queued else None
        age_s = None
        if oldest is not None and oldest.boot == now.boot_id:
            age_s = max(0, (now.mono_ms - oldest.mono_ms) // 1000)
        return OutboxFigures(box.id, box.queued, box.queued_bytes, age_s, box.quarantined, box.dropped)

    def _take_answers(self, now: Moment) -> None:
        if self._desk is None:
            return
        for answer in self._desk.answers():
            topic = self.topics.response(answer.requester)
            body = dict(answer.body)
            if answer.correlation is not None:
                # Kept beside the body until it is sent: see _envelope.
                body["_correlation"] = answer.correlation.hex()[:256]
            self._record(MessageClass.EVENT, topic, body, now)
        while self._desk.incidents:
            self._agent_event("CommandIgnored", self._desk.incidents.popleft())

    # -- what goes out ------------------------------------------------------------------------------

    @property
    def _box(self) -> Outbox:
        assert self._outbox is not None, "the uplink runs"
        return self._outbox

    def _pump(self, now: Moment) -> None:
        """Fills the window."""
        connection, link = self._connection, self._link
        if connection is None or link is None or now.mono_ms / 1000 < self._paused_until_s:
            return
        window = self._window
        sent = False
        while len(connection.in_flight) < window:
            topic = self._retained.next_due()
            if topic is not None:
                sent = self._send_state(connection, link, topic, now) or sent
                continue
            row = self._next_row(window - len(connection.in_flight), now)
            if row is None:
                break
            sent = self._send_row(connection, link, row, now) or sent
        if sent:
            link.flush()

    @property
    def _window(self) -> int:
        """How many messages may be unacknowledged: one while a message is suspected of ending
        connections."""
        if self._connection is None:
            return 0
        return 1 if self._solo else self._connection.window

    def _next_row(self, room: int, now: Moment) -> Row | None:
        if not self._fetched:
            self._fetched.extend(self._box.take_live(room))
        if self._fetched:
            return self._fetched.popleft()
        now_s = now.mono_ms / 1000
        if self._backlog is None or now_s < self._backlog_from_s:
            return None
        if not self._budget.backlog_allowed(now.wall_ms) or not self._backlog.take(now_s):
            return None
        if not self._fetched_backlog:
            self._fetched_backlog.extend(self._box.take_backlog(FETCH_LOT))
        if self._fetched_backlog:
            return self._fetched_backlog.popleft()
        self._flush_done()
        if self._box.backlog == 0:
            log.info("backlog delivered")
            self._backlog = None
        return None

    def _forget_fetched(self) -> None:
        self._fetched.clear()
        self._fetched_backlog.clear()

    def _send_state(self, connection: _Connection, link: Link, topic: str, now: Moment) -> bool:
        body = self._retained.body(topic)
        version = self._retained.sent(topic)
        payload = b""
        if body is not None:
            self._message_number += 1
            wrapped = body
            if topic.startswith(self.topics.base):
                wrapped = messages.envelope(
                    body,
                    self._stamp(now),
                    message_id=f"{self.session}-{self._message_number}",
                    seq=self._message_number,
                )
            try:
                payload = messages.encode(wrapped, min(self._largest_bytes, _room(connection, topic)))
            except FleetError as e:
                self._retained.refuse(topic, version)
                self._agent_event("MessageTooLarge", f"{topic}: {e}")
                return False
        self._hand_over(
            connection, link, _InFlight(topic, len(payload), now.mono_ms / 1000, None, version), payload, now,
            retain=True,
        )  # fmt: skip
        return True

    def _send_row(self, connection: _Connection, link: Link, row: Row, now: Moment) -> bool:
        try:
            payload, correlation = self._envelope(row, now)
        except FleetError as e:
            self._box.quarantine(row.id, str(e), now.wall_ms)
            return False
        if len(payload) > _room(connection, row.topic):
            reason = f"{len(payload)} bytes are more than the broker's maximum packet size"
            self._set_aside(_InFlight(row.topic, len(payload), 0.0, row), reason, now)
            return False
        answer = row.topic.startswith(self.topics.base + "/res/")
        self._hand_over(
            connection, link, _InFlight(row.topic, len(payload), now.mono_ms / 1000, row), payload, now,
            content_type=COLUMNS_TYPE if row.topic == self.topics.telemetry_deflated else None,
            expiry_s=ANSWER_EXPIRY_S if answer else None, correlation=correlation,
        )  # fmt: skip
        return True

    def _hand_over(
        self,
        connection: _Connection,
        link: Link,
        item: _InFlight,
        payload: bytes,
        now: Moment,
        *,
        retain: bool = False,
        content_type: str | None = "application/json",
        expiry_s: int | None = None,
        correlation: bytes | None = None,
    ) -> None:
        self._token += 1
        connection.in_flight[self._token] = item
        # The content type costs 18 bytes a message: said only where it is not what everybody expects.
        link.publish(
            connection.epoch, self._token, item.topic, payload, retain=retain, expiry_s=expiry_s,
            content_type=None if content_type == "application/json" else content_type,
            correlation=correlation,
        )  # fmt: skip
        if self._budget.monthly_bytes is not None:
            self._budget.spend(estimate.message_bytes(len(payload), len(item.topic)), now.wall_ms)

    def _envelope(self, row: Row, now: Moment) -> tuple[bytes, bytes | None]:
        """Bytes to send for a stored row: the envelope, with the time put right where that is known
        by now, in front of the body."""
        clock, ts_ms, body = row.clock, row.wall_ms, row.body
        if clock == messages.UNSYNCED:
            known = back_fill(Moment(row.wall_ms, row.mono_ms, row.boot, False), now)
            if known is not None:
                clock, ts_ms = messages.RESTORED, known
                body = messages.shift_times(body, known - row.wall_ms)
        correlation = None
        if row.topic.startswith(self.topics.base + "/res/"):
            value = json.loads(body)
            correlation = bytes.fromhex(value.pop("_correlation", "")) or None
            body = messages.encode(value)
        head = messages.envelope(
            {},
            Stamp(ts_ms, row.mono_ms, row.boot, row.session, clock),
            message_id=f"{row.box}-{row.seq}",
            seq=row.seq,
            outbox=row.box,
            historical=self._is_historical(row, now),
        )
        payload = messages.encode(head)[:-1] + b"," + body[1:]
        if row.topic == self.topics.telemetry_deflated:
            payload = messages.deflate(payload)
        return payload, correlation

    def _is_historical(self, row: Row, now: Moment) -> bool:
        """Recorded while the link was down, or by an earlier run."""
        if self._box.is_backlog(row) or row.session != self.session:
            return True
        return row.boot != now.boot_id or now.mono_ms - row.mono_ms > BACKLOG_IS_S * 1000

    def _stamp(self, now: Moment) -> Stamp:
        clock = messages.SYNCED if now.synced else messages.UNSYNCED
        return Stamp(now.wall_ms, now.mono_ms, now.boot_id, self.session, clock)

    def _will(self) -> tuple[str, bytes]:
        """Called in the link's thread for every connection."""
        body = messages.will(
            self.topics.node, self.topics.site, self._agent_version, self._config_hash, self._facts
        )
        stamp = self._stamp(self._clock.now())
        payload = messages.envelope(body, stamp, message_id=f"{self.session}-will", seq=0)
        return self.topics.status, messages.encode(payload)

    # -- the end ------------------------------------------------------------------------------------

    def _goodbye(self) -> None:
        """Says `offline`, then DISCONNECT: else the retained status would lie, or the will would.
        Bounded: a frozen broker costs GOODBYE_S + CLOSE_S."""
        now = self._clock.now()
        self._stopping = True
        self._take_notes(now)
        self._record_batch()
        if self._desk is not None:
            self._take_answers(now)
        if self._connection is not None:
            self._solo = False
            self._refresh(self._snapshot(), now, status=True)
            deadline_s = time.monotonic() + GOODBYE_S
            while time.monotonic() < deadline_s and self._connection is not None:
                now = self._clock.now()
                self._take_link_events(now)
                # Only what is live: the backlog stays where it is safe.
                self._backlog = None
                self._pump(now)
                if self._retained.confirmed(self.topics.status) and not self._connection_busy():
                    break
                self._wake.wait(0.05)
                self._wake.clear()
        self._close()

    def _connection_busy(self) -> bool:
        return self._connection is not None and bool(self._connection.in_flight)

    def _close(self) -> None:
        link, self._link = self._link, None
        if self._desk is not None:
            self._desk.stop()
            self._desk = None
        if link is not None and not link.close(CLOSE_S):
            log.warning("mqtt thread did not end in time; it is left")
        if link is not None and self._connection is not None:
            done = [
                sent.row.id
                for event in link.inbox
                if isinstance(event, Acked) and event.refused is None
                for sent in [self._connection.in_flight.get(event.token)]
                if sent is not None and sent.row is not None
            ]
            self._done += done
        self._flush_done()
        self._connection = None
        if self._outbox is not None:
            self._outbox.set_meta("budget", self._budget.dump())
            self._outbox.close()
            self._outbox = None
        self._clock.keep()
        self._publish_state()

    def _abandon(self) -> None:
        """After a fault of our own: what can be kept is kept, the rest begins anew."""
        link, self._link = self._link, None
        self._connection = None
        if link is not None:
            link.drop()
            link.close(0.5)
        self._retained.disconnected()
        self._forget_fetched()
        if self._outbox is not None:
            self._flush_done()
            self._outbox.release()

    def _publish_state(self) -> None:
        connection, box = self._connection, self._outbox
        previous = self._public
        self._public = UplinkState(
            enabled=True,
            connected=connection is not None,
            broker=None if connection is None else connection.broker,
            since_ms=None if connection is None else connection.since_ms,
            last_puback_age_s=None,
            queued=previous.queued if box is None else box.queued,
            queued_bytes=previous.queued_bytes if box is None else box.queued_bytes,
            dropped=previous.dropped if box is None else box.dropped,
            reconnects=max(0, self._connects - 1),
            problem=self._duplicate or self._problem or (None if box is None else box.problem),
        )


def _link_settings(
    config: FleetConfig, node: str, backoff_s: tuple[float, float], ack_timeout_s: float
) -> LinkSettings:
    def path(text: str | None) -> Path | None:
        return None if text is None else Path(text)

    return LinkSettings(
        brokers=tuple(Broker.parse(url) for url in config.brokers),
        client_id=config.client_id or node,
        protocol=config.protocol,
        username=config.username,
        password_file=path(config.password_file),
        ca_file=path(config.tls.ca_file),
        cert_file=path(config.tls.cert_file),
        key_file=path(config.tls.key_file),
        proxy=config.proxy,
        keepalive_s=estimate.keepalive_seconds(config),
        will_delay_s=config.will_delay_seconds,
        session_expiry_s=config.session_expiry_seconds,
        backoff_min_s=backoff_s[0],
        backoff_max_s=backoff_s[1],
        ack_timeout_s=ack_timeout_s,
    )


def _class_of(kind: str) -> MessageClass:
    return MessageClass.CRITICAL if kind in CRITICAL_KINDS else MessageClass.EVENT


def _name(sent: _InFlight) -> str:
    return sent.topic if sent.row is None else f"{sent.row.box}-{sent.row.seq}"


def _room(connection: _Connection, topic: str) -> int:
    """How large a payload on `topic` may be: MQTT's own headers count in the packet size."""
    if connection.max_packet_bytes is None:
        return messages.MAX_PAYLOAD_BYTES
    return max(0, min(messages.MAX_PAYLOAD_BYTES, connection.max_packet_bytes - len(topic) - 128))


def _lasting(body: Body) -> Body:
    """What of status is worth sending it anew at once: not figures that move all the time."""
    key = {k: v for k, v in body.items() if k not in ("outbox", "counters")}
    if "totals" in key:
        key["totals"] = {k: v for k, v in key["totals"].items() if k != "memoryUsedMiB"}
    return key


def _next(due_s: float, every_s: float, now_s: float) -> float:
    """The next time on the grid of `due_s`, without catching up on what was missed."""
    due_s += every_s
    return due_s if due_s > now_s else now_s + every_s
