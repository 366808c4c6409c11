"""One node as its messages tell it: what the grid shows of it, and what is kept for a closer look.

Whole payloads are kept as the bytes they came in (a parsed one is five times as large) and read again
when somebody opens the node; only what the grid, the filters and the sums need is taken out at once.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from edgeagent.dashboard import payload as p
from edgeagent.dashboard.payload import JsonObject
from edgeagent.dashboard.series import FIELDS, Hour

MAX_GPUS = 32
MAX_CONTAINERS = 256  # of one GPU
MAX_WAITING = 256
MAX_ALERTS = 64
MAX_EVENTS = 100
MAX_COMMANDS = 20
MAX_PODS_HURT = 200
MAX_SEARCH = 1000
MAX_HEADLINE = 180
DUPLICATE_WINDOW = 1024
FUTURE_MS = 120_000  # a clock that is said to be synced and is further ahead than this is not
STATUS_EVERY_S = 300  # what a node that does not say it is taken to do

STATES = ("ready", "draining", "offline", "lost")
HEALTHS = ("ok", "degraded", "sick")
SEVERITIES = ("info", "warning", "critical")
KINDS = ("xid", "thermal", "oom", "overlimit", "alloc", "agent")

# Every node has one condition: the first of these that is true. The rank orders the grid.
CONDITIONS = ("lost", "sick", "silent", "degraded", "waiting", "draining", "offline", "ready")
RANKS = {name: len(CONDITIONS) - n for n, name in enumerate(CONDITIONS)}
GONE = frozenset({"lost", "silent", "offline"})  # what is free there nobody can have


@dataclass(frozen=True, slots=True)
class Stamp:
    """A message's envelope, as far as it can be used. `ts_ms` None: its clock cannot be trusted."""

    ts_ms: int | None
    session: str
    seq: int
    historical: bool

    @classmethod
    def of(cls, body: JsonObject, now_ms: int) -> Stamp:
        ts_ms = p.whole(body.get("ts"))
        if ts_ms is not None and (body.get("clk") == "unsynced" or ts_ms > now_ms + FUTURE_MS):
            ts_ms = None
        return cls(ts_ms, p.text(body.get("sess"), 64) or "", p.whole(body.get("seq")) or 0,
                   body.get("hist") is True)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Alert:
    id: str
    type: str
    severity: str
    since_ms: int | None
    message: str
    gpu: str | None
    gpu_index: int | None
    gpu_model: str | None
    makes_unhealthy: bool
    pods_hurt: tuple[str, ...]
    session: str
    seq: int


@dataclass(slots=True)
class CommandLog:
    """A command sent from this page and what came back. `state`: sent, then what the node says, or
    refused (by the broker), or unanswered."""

    id: str
    verb: str
    args: str
    dry_run: bool
    sent_ms: int
    state: str = "sent"
    code: str | None = None
    message: str | None = None
    result: str | None = None
    changed_ms: int = 0

    @property
    def over(self) -> bool:
        return self.state not in ("sent", "accepted", "running")


@dataclass(frozen=True, slots=True)
class Totals:
    """The node's GPUs in sums. `used_mib` None: not all of it is known."""

    gpus: int = 0
    sick: int = 0
    usable_mib: int = 0
    promised_mib: int = 0
    used_mib: int | None = None
    free_mib: int = 0
    largest_free_mib: int = 0
    containers: int = 0
    waiting: int = 0


class Duplicates:
    """Which of the last sequence numbers of one outbox have come."""

    __slots__ = ("_highest", "_mask", "box")

    def __init__(self, box: str) -> None:
        self.box = box
        self._highest = -1
        self._mask = 0

    def is_new(self, seq: int) -> bool:
        """Also for those too old to tell: a backlog comes long after its time."""
        ahead = seq - self._highest
        if ahead > 0:
            self._mask = ((self._mask << min(ahead, DUPLICATE_WINDOW)) | 1) & ((1 << DUPLICATE_WINDOW) - 1)
            self._highest = seq
            return True
        if -ahead >= DUPLICATE_WINDOW:
            return True
        bit = 1 << -ahead
        if self._mask & bit:
            return False
        self._mask |= bit
        return True


@dataclass(slots=True)
class Node:
    """State of one node. `version` is the store's when it last changed, `text_version` when its search
    text did. The `take_…` methods return False where the message told nothing new."""

    site: str
    name: str
    version: int = 0
    text_version: int = 0
    epoch: int = 0  # of the retained load that confirmed it last
    status_data: bytes | None = None
    inventory_data: bytes | None = None
    allocation_data: bytes | None = None
    sample_data: bytes | None = None  # the newest sample of telemetry
    sample_ms: int = 0
    state: str | None = None
    health: str | None = None
    reason: str | None = None
    session: str = ""
    status_seq: int = -1
    will: bool = False
    alerts_listed: frozenset[str] | None = None
    commands_allowed: tuple[str, ...] = ()
    signed_commands: bool = False
    status_every_s: int = STATUS_EVERY_S
    status_totals: Totals | None = None
    allocation_totals: Totals | None = None
    waiting_since_ms: int | None = None
    models: tuple[str, ...] = ()
    hostname: str = ""
    pods: str = ""
    heard_ms: int = 0
    temperature_c: float | None = None
    util_pct: float | None = None
    used_mib: int | None = None
    alerts: dict[str, Alert] = field(default_factory=dict)
    events: deque[dict[str, Any]] | None = None
    commands: deque[CommandLog] | None = None
    hours: dict[str, Hour] = field(default_factory=dict)
    condition: str = "ready"
    condition_since_ms: int | None = None
    row: str | None = None  # the encoded row of the grid, until something changes
    _duplicates: Duplicates | None = None

    @property
    def key(self) -> str:
        return f"{self.site}/{self.name}"

    # -- retained topics ------------------------------------------------------------------------

    def take_status(self, body: JsonObject, data: bytes, *, retained: bool, now_ms: int) -> bool:
        state = p.one_of(body.get("state"), STATES)
        if state is None:
            return False
        stamp = Stamp.of(body, now_ms)
        will = body.get("will") is True
        if will:
            if self.session and stamp.session != self.session:
                return False  # of an earlier run: the broker was late
            self.state, self.will = state, True
            self.reason = next(iter(p.texts(body.get("reasons"), 1, MAX_HEADLINE)), None)
            self.session = stamp.session
            if self.status_data is None:
                self.status_data = data
            return True
        if stamp.session == self.session and stamp.seq < self.status_seq and not retained:
            return False  # an older one, delivered again
        self._heard(stamp, retained, now_ms)
        self.state, self.will = state, False
        self.health = p.one_of(body.get("health"), HEALTHS)
        self.reason = next(iter(p.texts(body.get("reasons"), 1, MAX_HEADLINE)), None)
        self.session, self.status_seq = stamp.session, stamp.seq
        listed = body.get("alerts")
        self.alerts_listed = (
            frozenset(p.texts(listed, MAX_ALERTS * 2, 200)) if isinstance(listed, list) else None
        )
        self.commands_allowed = tuple(p.texts(body.get("commands"), 16, 63))
        self.signed_commands = body.get("signedCommands") is True
        self.status_every_s = p.whole(body.get("statusEveryS"), 5, 86_400) or STATUS_EVERY_S
        totals = p.mapping(body.get("totals"))
        self.status_totals = Totals(
            gpus=p.whole(totals.get("gpus"), 0, 4096) or 0,
            sick=p.whole(totals.get("gpusSick"), 0, 4096) or 0,
            usable_mib=p.mib(totals.get("memoryUsableMiB")) or 0,
            promised_mib=p.mib(totals.get("memoryPromisedMiB")) or 0,
            used_mib=p.mib(totals.get("memoryUsedMiB")),
            free_mib=p.mib(totals.get("memoryFreeMiB")) or 0,
            largest_free_mib=p.mib(totals.get("largestFreeMiB")) or 0,
            containers=p.whole(totals.get("containers"), 0, 10**6) or 0,
            waiting=p.whole(totals.get("waiting"), 0, 10**6) or 0,
        ) if totals else None  # fmt: skip
        if self.status_totals is not None and (stamp.ts_ms or now_ms) >= self.sample_ms:
            self.used_mib = self.status_totals.used_mib
        self.status_data = data
        return True

    def take_inventory(self, body: JsonObject, data: bytes, *, retained: bool, now_ms: int) -> bool:
        if not isinstance(body.get("gpus"), list):
            return False
        self._heard(Stamp.of(body, now_ms), retained, now_ms)
        if data == self.inventory_data:
            return False
        self.inventory_data = data
        gpus = p.objects(body.get("gpus"), MAX_GPUS)
        self.models = tuple(p.text(g.get("model"), 80) or "GPU" for g in gpus)
        self.hostname = p.text(p.mapping(body.get("host")).get("hostname"), 100) or ""
        return True

    def take_allocation(self, body: JsonObject, data: bytes, *, retained: bool, now_ms: int) -> bool:
        if not isinstance(body.get("gpus"), list):
            return False
        self._heard(Stamp.of(body, now_ms), retained, now_ms)
        if data == self.allocation_data:
            return False
        self.allocation_data = data
        gpus = p.objects(body.get("gpus"), MAX_GPUS)
        waiting = p.objects(body.get("waiting"), MAX_WAITING)
        containers = [c for g in gpus for c in p.objects(g.get("containers"), MAX_CONTAINERS)]
        self.waiting_since_ms = min((s for w in waiting if (s := p.whole(w.get("since")))), default=None)
        self.pods = " ".join(dict.fromkeys(_pod_names(containers + waiting)))[:MAX_SEARCH]
        self.allocation_totals = Totals(
            gpus=len(gpus),
            sick=sum(g.get("health") == "sick" for g in gpus),
            usable_mib=sum(p.mib(g.get("usableMiB")) or 0 for g in gpus),
            promised_mib=sum(p.mib(g.get("promisedMiB")) or 0 for g in gpus),
            free_mib=sum(p.mib(g.get("freeMiB")) or 0 for g in gpus),
            largest_free_mib=p.mib(body.get("largestFreeMiB")) or 0,
            containers=len(containers),
            waiting=len(waiting),
        )
        return True

    def take_alert(self, ident: str, body: JsonObject | None, now_ms: int) -> bool:
        """`body` None: cleared."""
        if body is None:
            return self.alerts.pop(ident, None) is not None
        if ident not in self.alerts and len(self.alerts) >= MAX_ALERTS:
            return False
        stamp = Stamp.of(body, now_ms)
        self.alerts[ident] = Alert(
            id=p.text(body.get("alert"), 200) or ident,
            type=p.text(body.get("type"), 60) or "Alert",
            severity=p.one_of(body.get("severity"), SEVERITIES) or "warning",
            since_ms=p.whole(body.get("since")),
            message=p.text(body.get("message")) or "",
            gpu=p.text(body.get("gpu"), 100),
            gpu_index=p.whole(body.get("gpuIndex"), 0, 4096),
            gpu_model=p.text(body.get("gpuModel"), 80),
            makes_unhealthy=body.get("makesUnhealthy") is True,
            pods_hurt=tuple(p.texts(body.get("podsHurt"), MAX_PODS_HURT, 320)),
            session=stamp.session,
            seq=stamp.seq,
        )
        return True

    # -- what streams ---------------------------------------------------------------------------

    def is_duplicate(self, body: JsonObject) -> bool:
        """Whether a message that went through the node's outbox came before."""
        box, seq = p.text(body.get("box"), 64), p.whole(body.get("seq"))
        if box is None or seq is None:
            return False
        if self._duplicates is None or self._duplicates.box != box:
            self._duplicates = Duplicates(box)
        return not self._duplicates.is_new(seq)

    def take_samples(self, body: JsonObject, samples: list[JsonObject], now_ms: int) -> bool:
        stamp = Stamp.of(body, now_ms)
        if not stamp.historical:
            self._heard(stamp, False, now_ms)
        times = [p.whole(s.get("ts")) for s in samples]
        last = max((t for t in times if t is not None), default=None)
        if last is None:
            return False
        # Times of a clock that is wrong are right relative to each other: the last one is now.
        shift = now_ms - last if body.get("clk") == "unsynced" or last > now_ms + FUTURE_MS else 0
        for ts_ms, sample in zip(times, samples, strict=True):
            if ts_ms is None:
                continue
            at_ms = ts_ms + shift
            gpus = p.objects(sample.get("gpus"), MAX_GPUS)
            for gpu in gpus:
                self._take_reading(gpu, at_ms // 1000)
            if at_ms > self.sample_ms:
                self.sample_ms = at_ms
                self.sample_data = json.dumps(sample, separators=(",", ":")).encode()
                self._sum_up(gpus)
        return True

    def _take_reading(self, gpu: JsonObject, time_s: int) -> None:
        uuid = p.text(gpu.get("uuid"), 100)
        if uuid is None:
            return
        hour = self.hours.get(uuid)
        if hour is None:
            if len(self.hours) >= MAX_GPUS:
                return
            hour = self.hours[uuid] = Hour()
        hour.add(time_s, [p.number(gpu.get(name), -60, MAX_VALUE) for name in FIELDS])

    def _sum_up(self, gpus: list[JsonObject]) -> None:
        temperatures = [t for g in gpus if (t := p.number(g.get("temperatureC"), -60, 200)) is not None]
        utils = [u for g in gpus if (u := p.number(g.get("utilPct"), 0, 100)) is not None]
        used = [u for g in gpus if (u := p.mib(g.get("memoryUsedMiB"))) is not None]
        self.temperature_c = max(temperatures, default=None)
        self.util_pct = sum(utils) / len(utils) if utils else None
        self.used_mib = sum(used) if gpus and len(used) == len(gpus) else None

    def take_event(self, body: JsonObject, kind: str, now_ms: int) -> bool:
        stamp = Stamp.of(body, now_ms)
        ident = p.text(body.get("id"), 100)
        if self.events is None:
            self.events = deque(maxlen=MAX_EVENTS)
        if ident is not None and any(e.get("id") == ident for e in self.events):
            return False
        event = p.present(
            id=ident,
            atMs=stamp.ts_ms or now_ms,
            kind=kind,
            type=p.text(body.get("type"), 60),
            severity=p.one_of(body.get("severity"), SEVERITIES) or "info",
            message=p.text(body.get("message")) or "",
            gpu=p.text(body.get("gpu"), 100),
            pod=_pod_name(body),
            suppressed=p.whole(body.get("suppressed"), 1, 10**9),
            late=stamp.historical or None,
        )
        self.events.append(event)
        if stamp.historical:
            self.events = deque(sorted(self.events, key=lambda e: int(e["atMs"])), maxlen=MAX_EVENTS)
        return True

    def take_answer(self, body: JsonObject, now_ms: int) -> bool:
        ident = p.text(body.get("cmd"), 64)
        command = next((c for c in self.commands or () if c.id == ident), None)
        state = p.one_of(body.get("state"), ("accepted", "running", "succeeded", "failed", "rejected"))
        if command is None or state is None or (command.over and command.state != "unanswered"):
            return False
        command.state, command.changed_ms = state, now_ms
        command.code = p.text(body.get("code"), 60)
        command.message = p.text(body.get("message"))
        result = body.get("result")
        if isinstance(result, dict):
            command.result = _pretty(result)
        return True

    def _heard(self, stamp: Stamp, retained: bool, now_ms: int) -> None:
        """A retained message is as old as its stamp says; a live one is of now."""
        at_ms = now_ms if not retained else min(now_ms, stamp.ts_ms if stamp.ts_ms is not None else now_ms)
        self.heard_ms = max(self.heard_ms, at_ms)

    # -- what it adds up to -----------------------------------------------------------------------

    @property
    def totals(self) -> Totals:
        """The newer of what status and alloc say: they are sent together on every change."""
        return self.status_totals or self.allocation_totals or Totals()

    def live_alerts(self) -> list[Alert]:
        """Worst first. A retained alert that the node's status does not list is a ghost, unless it was
        said after that status."""
        rank = {"critical": 0, "warning": 1, "info": 2}
        alive = [
            a
            for ident, a in self.alerts.items()
            if self.alerts_listed is None
            or a.id in self.alerts_listed
            or ident in self.alerts_listed
            or (a.session == self.session and a.seq > self.status_seq)
        ]
        return sorted(alive, key=lambda a: (rank[a.severity], a.since_ms or 0, a.id))

    def judge(self, now_ms: int, *, hearing: bool, confirmed: bool) -> bool:
        """Sets `condition`; True when it changed. `hearing`: the page's own link has been up long
        enough for silence to mean something. `confirmed`: the broker still holds its status."""
        before = self.condition
        limit_ms = self.silence_limit_ms
        state = self.state
        if state == "lost":
            now = "lost"
        elif state == "offline":
            now = "offline"
        elif (hearing and now_ms - self.heard_ms > limit_ms) or not confirmed or state is None:
            now = "silent"
        elif self.health == "sick" or any(a.severity == "critical" for a in self.live_alerts()):
            now = "sick"
        elif self.health == "degraded":
            now = "degraded"
        elif self.totals.waiting:
            now = "waiting"
        elif state == "draining":
            now = "draining"
        else:
            now = "ready"
        self.condition = now
        return now != before

    @property
    def silence_limit_ms(self) -> int:
        return int(self.status_every_s * 2.5 * 1000) + 60_000

    def since_ms(self) -> int | None:
        """Since when its condition holds, as far as that is known."""
        match self.condition:
            case "sick" | "degraded":
                known = [a.since_ms for a in self.live_alerts() if a.since_ms and a.severity != "info"]
                return min(known, default=self.condition_since_ms)
            case "waiting":
                return self.waiting_since_ms or self.condition_since_ms
            case "silent":
                return self.heard_ms or None
        return self.condition_since_ms

    def headline(self) -> str:
        """The one sentence of the grid: why it is not simply ready."""
        alerts = self.live_alerts()
        match self.condition:
            case "lost":
                return self.reason or "the broker lost contact with the node"
            case "silent":
                return (
                    "no status for too long" if self.state is not None else "its status is not at the broker"
                )
            case "sick" | "degraded":
                return (alerts[0].message if alerts else "") or self.reason or ""
            case "waiting":
                return f"{self.totals.waiting} waiting for room"
        return (alerts[0].message if alerts else "") or self.reason or ""

    def pods_hurt(self) -> list[str]:
        return list(dict.fromkeys(pod for a in self.live_alerts() for pod in a.pods_hurt))


MAX_VALUE = 2.0**40


def _pod_name(item: JsonObject) -> str | None:
    pod, namespace = p.text(item.get("pod"), 253), p.text(item.get("namespace"), 63)
    if pod is None:
        return None
    return f"{namespace}/{pod}" if namespace else pod


def _pod_names(items: Iterable[JsonObject]) -> Iterable[str]:
    return (name for item in items if (name := _pod_name(item)) is not None)


def _pretty(value: JsonObject) -> str:
    try:
        out = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return "(not readable)"
    lines = [p.text(line, 400) or "" for line in out[:60_000].split("\n")[:1500]]
    return "\n".join(lines)
