"""The fleet as the broker tells it: pure state, fed with messages, asked for changes.

One thread owns it. Every change of a node gives it a new version; whoever shows the fleet asks for
what changed since the version he has. Nothing that a message contains can raise here: what cannot be
used is counted in `rejected` and changes nothing.
"""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from edgeagent.dashboard import payload as p
from edgeagent.dashboard.node import (
    CONDITIONS,
    GONE,
    KINDS,
    MAX_COMMANDS,
    RANKS,
    CommandLog,
    Node,
)
from edgeagent.errors import FleetError
from edgeagent.fleet import messages, topics

MAX_NODES = 20_000
MAX_SAMPLES = 400  # of one message
MAX_GONE = 2000
FORGET_S = 900  # a node that the broker no longer knows is forgotten after so long
LATE_MEANS_SOMETHING_S = 180  # nodes that lost their own link are back by then
UNANSWERED_S = 45

ROW_FIELDS = (
    "key", "condition", "rank", "since", "gpus", "gpusSick", "usableMiB", "promisedMiB", "usedMiB", "freeMiB",
    "largestFreeMiB", "containers", "waiting", "alerts", "podsHurt", "temperatureC", "utilPct", "headline",
    "model", "text",
)  # fmt: skip
"""What the grid gets of each node, in this order. "text", what the filter searches besides the name, is
left out where the reader has it already."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the operator says there should be: a number of nodes, or their names ("site/node")."""

    count: int
    names: frozenset[str] = frozenset()

    @property
    def sites(self) -> frozenset[str]:
        return frozenset(name.partition("/")[0] for name in self.names)


@dataclass(frozen=True, slots=True)
class Changes:
    """`rows` and `gone` since some version, as JSON text. `reset`: forget everything before."""

    version: int
    reset: bool
    rows: str
    gone: str
    count: int


class FleetStore:
    def __init__(self, *, max_nodes: int = MAX_NODES, expected: Expected | None = None) -> None:
        self.nodes: dict[str, Node] = {}
        self.version = 0
        self.identity = secrets.token_hex(4)  # versions of another run mean nothing
        self.received = 0
        self.rejected = 0
        self.over_limit = 0  # messages of nodes beyond max_nodes
        self.duplicates = 0
        self.samples = 0
        self.loading = False
        self.loaded_ms: int | None = None
        self.load_took_ms: int | None = None
        self._expected = expected
        self._max_nodes = max_nodes
        self._load_began_ms = 0
        self._epoch = 0
        self.found_by_site = 0  # nodes that came only when their site was asked for by itself
        self._late = 0
        self._broker_dropped: tuple[int, int] | None = None  # at the load, now
        self._changed: OrderedDict[str, int] = OrderedDict()  # key -> version, oldest first
        self._gone: OrderedDict[str, int] = OrderedDict()
        self._gone_floor = 0

    # -- what comes in --------------------------------------------------------------------------

    def apply(self, topic: str, data: bytes, retained: bool, now_ms: int) -> str | None:
        """Takes one message; the key of the node that it changed."""
        self.received += 1
        if topic.startswith("$SYS/"):
            self._take_broker_figure(data)
            return None
        levels = topic.split("/")
        node = self.nodes.get("/".join(levels[2:4]))
        # Most topics are of nodes that are known: then these levels were looked at before.
        known = node is not None and topic.startswith(topics.ROOT)
        if not known and topics.parse(topic) is None:
            self.rejected += 1
            return None
        kind = levels[4] if len(levels) > 4 else ""
        take = self._TAKE.get(kind)
        if take is None or len(levels) != (5 if kind in ("status", "inv", "alloc") else 6):
            return None
        if node is None:
            # An alert of a node without status is what a renamed node left behind.
            if not data or kind not in ("status", "inv", "alloc", "tele"):
                return None
            if len(self.nodes) >= self._max_nodes:
                self.over_limit += 1
                return None
            node = Node(levels[2], levels[3])
        key = node.key
        before = (node.condition, node.hostname, node.models, node.pods)
        try:
            changed = take(self, node, levels[-1], data, retained, now_ms)
        except FleetError:
            self.rejected += 1
            return None
        if node.state is None and not changed:
            return None
        if key not in self.nodes and changed and (data or kind != "status"):
            self._welcome(node, kind, retained, now_ms)
        if key in self.nodes and changed:
            self._judge(node, retained, now_ms)
            self._touch(node, text=before[1:] != (node.hostname, node.models, node.pods))
        return key if changed else None

    def _welcome(self, node: Node, kind: str, retained: bool, now_ms: int) -> None:
        self.nodes[node.key] = node
        self._gone.pop(node.key, None)
        node.epoch = self._epoch
        node.text_version = self.version + 1
        if kind == "status" and not retained and self.loaded_ms is not None and not node.will:
            # Its status is retained and it was there before: then it must have been in the load.
            old = now_ms - self.loaded_ms > LATE_MEANS_SOMETHING_S * 1000
            started_ms = p.whole(p.parse(node.status_data or b"{}").get("startedMs"))
            if old and started_ms is not None and started_ms < self._load_began_ms - 60_000:
                self._late += 1

    def _take_status(self, node: Node, _: str, data: bytes, retained: bool, now_ms: int) -> bool:
        if not data:  # a node that was renamed empties its topics
            self._forget(node.key)
            return False
        changed = node.take_status(p.parse(data), data, retained=retained, now_ms=now_ms)
        if changed:
            node.epoch = self._epoch
        return changed

    def _take_inventory(self, node: Node, _: str, data: bytes, retained: bool, now_ms: int) -> bool:
        return bool(data) and node.take_inventory(p.parse(data), data, retained=retained, now_ms=now_ms)

    def _take_allocation(self, node: Node, _: str, data: bytes, retained: bool, now_ms: int) -> bool:
        return bool(data) and node.take_allocation(p.parse(data), data, retained=retained, now_ms=now_ms)

    def _take_alert(self, node: Node, ident: str, data: bytes, _: bool, now_ms: int) -> bool:
        return topics.is_name(ident) and node.take_alert(ident, p.parse(data) if data else None, now_ms)

    def _take_telemetry(self, node: Node, form: str, data: bytes, retained: bool, now_ms: int) -> bool:
        if retained or form not in ("m", "z"):
            return False  # nobody retains samples but one who wants to deceive
        body = p.parse(data) if form == "m" else p.parse(messages.inflate(data), p.MAX_INFLATED_BYTES)
        if self._is_duplicate(node, body):
            return False
        samples = p.objects(body.get("samples"), MAX_SAMPLES) if form == "m" else _rows(body)
        self.samples += len(samples)
        return node.take_samples(body, samples, now_ms)

    def _take_event(self, node: Node, kind: str, data: bytes, retained: bool, now_ms: int) -> bool:
        if retained or kind not in KINDS:
            return False
        body = p.parse(data)
        return not self._is_duplicate(node, body) and node.take_event(body, kind, now_ms)

    def _take_answer(self, node: Node, _: str, data: bytes, retained: bool, now_ms: int) -> bool:
        return not retained and node.take_answer(p.parse(data), now_ms)

    _TAKE: ClassVar[dict[str, Callable[[FleetStore, Node, str, bytes, bool, int], bool]]] = {
        "status": _take_status, "inv": _take_inventory, "alloc": _take_allocation, "alert": _take_alert,
        "tele": _take_telemetry, "evt": _take_event, "res": _take_answer,
    }  # fmt: skip

    def _is_duplicate(self, node: Node, body: p.JsonObject) -> bool:
        duplicate = node.is_duplicate(body)
        self.duplicates += duplicate
        return duplicate

    def _take_broker_figure(self, data: bytes) -> None:
        """mosquitto's $SYS/broker/publish/messages/dropped."""
        if not data.isdigit() or len(data) > 18:
            return
        dropped = int(data)
        first = dropped if self._broker_dropped is None else self._broker_dropped[0]
        self._broker_dropped = (first, dropped)

    # -- the retained load ------------------------------------------------------------------------

    def begin_load(self, now_ms: int) -> None:
        """A new connection: everything retained comes again."""
        self._epoch += 1
        self.loading, self.loaded_ms = True, None
        self._load_began_ms = now_ms
        self.found_by_site = self._late = 0
        self._broker_dropped = None

    def end_load(self, now_ms: int) -> None:
        self.loading, self.loaded_ms = False, now_ms
        self.load_took_ms = now_ms - self._load_began_ms
        self.sweep(now_ms, hearing=True)

    def link_lost(self) -> None:
        self.loading, self.loaded_ms = False, None

    def shortfalls(self) -> list[str]:
        """What says that the broker did not hand out all it retains, one sentence each."""
        out = []
        hint = "raise max_queued_messages above the number of retained messages (docs/fleet.md)"
        if self._expected is not None and not self.loading:
            missing = sorted(self._expected.names - self.nodes.keys())
            short = len(missing) or self._expected.count - len(self.nodes)
            if short > 0:
                names = f": {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}" if missing else ""
                out.append(f"{short} of {self._expected.count} expected nodes are not at the broker{names}")
        if self.found_by_site:
            out.append(
                f"the broker truncates what it retains: {self.found_by_site} nodes came only when their "
                f"site was asked for by itself; {hint}"
            )
        if self._broker_dropped is not None and self._broker_dropped[1] > self._broker_dropped[0]:
            n = self._broker_dropped[1] - self._broker_dropped[0]
            out.append(f"the broker says that it dropped {n} messages since this page connected; {hint}")
        if self._late >= 3:
            out.append(
                f"{self._late} nodes were missing in what the broker retains and spoke up later: it "
                f"truncates; {hint}"
            )
        if self.over_limit:
            out.append(f"this page keeps {self._max_nodes} nodes; messages of others are ignored")
        return out

    def incomplete(self) -> list[str]:
        """Nodes of which the broker gave no status, inventory or allocation."""
        return [
            n.key
            for n in self.nodes.values()
            if n.status_data is None or n.inventory_data is None or n.allocation_data is None
        ]

    # -- time ---------------------------------------------------------------------------------------

    def sweep(self, now_ms: int, *, hearing: bool) -> None:
        """What changes by itself: nodes fall silent, are forgotten; commands stay unanswered."""
        forget = []
        for node in self.nodes.values():
            if (
                not self._confirmed(node)
                and self.loaded_ms is not None
                and (now_ms - self.loaded_ms > FORGET_S * 1000)
            ):
                forget.append(node.key)
                continue
            changed = self._judge(node, False, now_ms, hearing=hearing)
            for command in node.commands or ():
                if (
                    not command.over
                    and now_ms - max(command.sent_ms, command.changed_ms) > UNANSWERED_S * 1000
                ):
                    command.state, command.changed_ms, changed = "unanswered", now_ms, True
            if changed:
                self._touch(node)
        for key in forget:
            self._forget(key)

    def _confirmed(self, node: Node) -> bool:
        """Whether the broker still holds its status, as far as is known."""
        return node.epoch == self._epoch or self.loaded_ms is None

    def _judge(self, node: Node, retained: bool, now_ms: int, *, hearing: bool | None = None) -> bool:
        hearing = self.loaded_ms is not None if hearing is None else hearing
        # Before its status has come, and while everything is being loaded, nothing is wrong yet.
        if node.state is None and self.loading:
            return False
        known = node.row is not None or node.condition_since_ms is not None or node.version > 0
        if not node.judge(now_ms, hearing=hearing, confirmed=self._confirmed(node)):
            return False
        node.condition_since_ms = None if retained or not known else now_ms
        return True

    # -- commands -----------------------------------------------------------------------------------

    def sent_command(self, key: str, command: CommandLog) -> None:
        node = self.nodes[key]
        if node.commands is None:
            node.commands = deque(maxlen=MAX_COMMANDS)
        node.commands.append(command)
        self._touch(node)

    def refused_command(self, key: str, ident: str, reason: str, now_ms: int) -> None:
        """The broker would not take it."""
        node = self.nodes.get(key)
        for command in (node.commands or ()) if node is not None else ():
            if node is not None and command.id == ident and not command.over:
                command.state, command.message, command.changed_ms = "refused", reason, now_ms
                self._touch(node)

    # -- what goes out ------------------------------------------------------------------------------

    def changes(self, since: int) -> Changes:
        """Rows that changed after version `since` (0: all)."""
        reset = since == 0 or since > self.version or since < self._gone_floor
        if reset:
            rows = [self._row(n, with_text=True) for n in self.nodes.values()]
            return Changes(self.version, True, f"[{','.join(rows)}]", "[]", len(rows))
        rows = []
        for key in reversed(self._changed):
            if self._changed[key] <= since:
                break
            node = self.nodes[key]
            rows.append(self._row(node, with_text=node.text_version > since))
        gone = []
        for key in reversed(self._gone):
            if self._gone[key] <= since:
                break
            gone.append(key)
        return Changes(self.version, False, f"[{','.join(rows)}]", json.dumps(gone), len(rows) + len(gone))

    def _row(self, node: Node, *, with_text: bool) -> str:
        if node.row is None:
            t = node.totals
            models = list(dict.fromkeys(node.models))
            used = node.used_mib if node.condition not in GONE else None
            node.row = json.dumps(
                [
                    node.key, node.condition, RANKS[node.condition], node.since_ms(), t.gpus, t.sick,
                    t.usable_mib, t.promised_mib, used, t.free_mib, t.largest_free_mib, t.containers,
                    t.waiting, len(node.live_alerts()), len(node.pods_hurt()), node.temperature_c,
                    None if node.util_pct is None else round(node.util_pct), node.headline()[:180],
                    ", ".join(models[:2]) + (" …" if len(models) > 2 else ""),
                ],
                ensure_ascii=False, separators=(",", ":"),
            )[:-1]  # fmt: skip
        if not with_text:
            return node.row + "]"
        searched = " ".join(filter(None, (node.hostname, *dict.fromkeys(node.models), node.pods))).lower()
        return f"{node.row},{json.dumps(searched, ensure_ascii=False)}]"

    def bar(self) -> dict[str, Any]:
        """The fleet in a few numbers. What is free on a node that is gone is free for nobody."""
        counts = dict.fromkeys(CONDITIONS, 0)
        gpus = sick = usable = promised = used = used_of = free = waiting = alerts = hurt = 0
        largest, where = 0, None
        for node in self.nodes.values():
            counts[node.condition] += 1
            t = node.totals
            gpus += t.gpus
            if node.condition in GONE:
                continue
            sick += t.sick
            usable += t.usable_mib
            promised += t.promised_mib
            free += t.free_mib
            waiting += t.waiting
            if node.used_mib is not None:
                used += node.used_mib
                used_of += t.usable_mib
            if t.largest_free_mib > largest:
                largest, where = t.largest_free_mib, node.key
            if node.alerts:
                alerts += len(node.live_alerts())
                hurt += len(node.pods_hurt())
        return {
            "nodes": len(self.nodes), "conditions": counts, "gpus": gpus, "gpusSick": sick,
            "usableMiB": usable, "promisedMiB": promised, "usedMiB": used, "usedOfMiB": used_of,
            "freeMiB": free,
            "largestFreeMiB": largest, "largestFreeAt": where, "waiting": waiting, "alerts": alerts,
            "podsHurt": hurt,
        }  # fmt: skip

    def sites(self) -> list[str]:
        return sorted({n.site for n in self.nodes.values()})

    # -- versions -----------------------------------------------------------------------------------

    def _touch(self, node: Node, *, text: bool = False) -> None:
        self.version += 1
        node.version = self.version
        node.row = None
        if text:
            node.text_version = self.version
        self._changed[node.key] = self.version
        self._changed.move_to_end(node.key)

    def _forget(self, key: str) -> None:
        if self.nodes.pop(key, None) is None:
            return
        self.version += 1
        self._changed.pop(key, None)
        self._gone[key] = self.version
        self._gone.move_to_end(key)
        while len(self._gone) > MAX_GONE:
            self._gone_floor = self._gone.popitem(last=False)[1]


def _rows(body: p.JsonObject) -> list[p.JsonObject]:
    """The samples of a column batch, if it is one and not larger than it may be."""
    times = body.get("t")
    if not isinstance(times, list) or len(times) > MAX_SAMPLES:
        raise FleetError("cannot use a column batch of so many samples")
    if not all(isinstance(t, int) for t in [*times, body.get("t0")]):
        raise FleetError("cannot use a column batch with odd times")
    return list(messages.from_columns({**body, "gpus": p.objects(body.get("gpus"), 32)}))
