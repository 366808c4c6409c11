"""The fleet's state from messages: what the grid says of a node, and that nothing a stranger sends matters."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.dashboard import detail
from edgeagent.dashboard.node import CommandLog, Duplicates
from edgeagent.dashboard.store import ROW_FIELDS, Expected, FleetStore
from edgeagent.fleet import messages
from edgeagent.fleet.topics import Topics
from edgeagent.snapshot import Health, NodeSnapshot, NodeState
from tests.fakes.fleet.snapshots import NODE, SITE, condition, container, gpu_state, gpu_uuid, snapshot

NOW = 1_790_000_100_000
MINUTE = 60_000
KEY = f"{SITE}/{NODE}"
TOPICS = Topics(SITE, NODE)
WELL = snapshot(
    health=Health.OK, reasons=(), waiting=(), conditions=(), gpus=(gpu_state(0), gpu_state(1, promised_mib=0))
)
ILL = snapshot(
    health=Health.SICK,
    reasons=("GPU 0 fell off the bus",),
    waiting=(),
    gpus=(
        gpu_state(
            0,
            health=Health.SICK,
            free_mib=0,
            conditions=(
                condition(
                    "lost-gpu-1a2b", type="Lost", severity="critical", message="GPU 0 fell off the bus"
                ),
            ),
        ),
    ),
)


class Teller:
    """Says what the agent of one node says, to a store."""

    def __init__(self, store: FleetStore | None = None, topics: Topics = TOPICS) -> None:
        self.store = store or FleetStore()
        self.topics = topics
        self.session = "s1"
        self.seq = 0
        self.now = NOW
        self.store.begin_load(self.now)
        self.store.end_load(self.now)

    def bytes(self, body: dict[str, Any], **head: Any) -> bytes:
        self.seq += 1
        stamp = messages.Stamp(
            head.pop("ts", self.now),
            1000,
            "boot",
            head.pop("session", self.session),
            head.pop("clock", "synced"),
        )
        ident = head.pop("ident", f"{self.session}-{self.seq}")
        return messages.encode(
            messages.envelope(body, stamp, message_id=ident, seq=head.pop("seq", self.seq), **head)
        )

    def say(self, topic: str, data: bytes, retained: bool = False) -> str | None:
        return self.store.apply(topic, data, retained, self.now)

    def status(self, snap: NodeSnapshot, *, retained: bool = False, **head: Any) -> str | None:
        uplink = messages.UplinkFacts(commands=("snapshot", "cordon-gpu"), status_every_s=300)
        return self.say(
            self.topics.status, self.bytes(messages.status(snap, uplink=uplink), **head), retained
        )

    def everything(self, snap: NodeSnapshot, *, retained: bool = False) -> None:
        self.status(snap, retained=retained)
        self.say(self.topics.inventory, self.bytes(messages.inventory(snap)), retained)
        self.say(self.topics.allocation, self.bytes(messages.allocation(snap)), retained)
        for ident, c in messages.conditions(snap).items():
            self.say(self.topics.alert(ident), self.bytes(messages.alert(c, snap)), retained)

    def will(self, *, session: str | None = None, retained: bool = False) -> str | None:
        body = messages.will(self.topics.node, self.topics.site, "0.1.0", "hash")
        return self.say(self.topics.status, self.bytes(body, session=session or self.session), retained)

    def sample(self, snap: NodeSnapshot, *, ago_ms: int = 0, **head: Any) -> str | None:
        rows = [messages.sample(snap, self.now - ago_ms)]
        return self.say(self.topics.telemetry, self.bytes(messages.telemetry(rows), **head))

    def event(self, text: str, **head: Any) -> str | None:
        body = messages.event("xid", "XidFatal", text, severity="critical", gpu_uuid=gpu_uuid(0))
        return self.say(self.topics.event("xid"), self.bytes(body, **head))

    @property
    def row(self) -> dict[str, Any]:
        rows = [dict(zip(ROW_FIELDS, r, strict=True)) for r in json.loads(self.store.changes(0).rows)]
        return next(r for r in rows if r["key"] == f"{self.topics.site}/{self.topics.node}")

    @property
    def detail(self) -> dict[str, Any]:
        return detail.detail(self.store.nodes[f"{self.topics.site}/{self.topics.node}"], self.now)


@pytest.fixture
def node() -> Teller:
    return Teller()


# -- the condition of a node -----------------------------------------------------------------------


def test_a_well_node_is_ready_and_its_figures_are_those_of_the_node(node: Teller) -> None:
    node.everything(WELL)
    row = node.row
    assert (row["condition"], row["headline"], row["gpus"], row["gpusSick"]) == ("ready", "", 2, 0)
    assert (row["usableMiB"], row["promisedMiB"], row["freeMiB"]) == (40000, 8000, 32000)
    assert row["usedMiB"] == 10001  # two GPUs of 5,000.5
    assert "rtx 4000 ada" in row["text"]
    assert "vision/inference-7c9d8f-00001" in row["text"]


CASES = {
    "sick": (ILL, "sick", "GPU 0 fell off the bus"),
    "degraded": (
        replace(WELL, health=Health.DEGRADED, reasons=("GPU 0 is hot",)),
        "degraded",
        "GPU 0 is hot",
    ),
    "waiting": (
        replace(snapshot(), health=Health.OK, reasons=(), gpus=WELL.gpus),
        "waiting",
        "1 waiting for room",
    ),
    "draining": (replace(WELL, state=NodeState.DRAINING), "draining", ""),
    "offline": (replace(WELL, state=NodeState.OFFLINE), "offline", ""),
}


@pytest.mark.parametrize(("snap", "expected", "headline"), CASES.values(), ids=CASES.keys())
def test_the_condition_says_what_is_most_urgent(
    node: Teller, snap: NodeSnapshot, expected: str, headline: str
) -> None:
    node.everything(snap)
    assert (node.row["condition"], node.row["headline"]) == (expected, headline)


def test_a_node_falls_ill_and_recovers(node: Teller) -> None:
    node.everything(WELL)
    node.now += MINUTE
    node.everything(ILL)
    row = node.row
    assert (row["condition"], row["alerts"], row["podsHurt"], row["gpusSick"]) == ("sick", 1, 1, 1)
    assert row["since"] == condition().since_ms  # of the alert, not of its coming here
    node.now += MINUTE
    node.status(WELL)
    node.say(TOPICS.alert("lost-gpu-1a2b"), b"")
    assert (node.row["condition"], node.row["alerts"], node.row["since"]) == ("ready", 0, node.now)


def test_a_lost_node_keeps_what_it_said_last_and_comes_back(node: Teller) -> None:
    node.everything(WELL)
    node.now += MINUTE
    node.will()
    row = node.row
    assert (row["condition"], row["since"], row["promisedMiB"]) == ("lost", node.now, 8000)
    assert node.store.bar()["freeMiB"] == 0, "what is free on a lost node is free for nobody"
    node.now += MINUTE
    node.session = "s2"
    node.status(WELL)
    assert node.row["condition"] == "ready"


def test_the_will_of_an_earlier_run_is_not_believed(node: Teller) -> None:
    node.session = "s2"
    node.everything(WELL)
    assert node.will(session="s1") is None
    assert node.row["condition"] == "ready"


def test_an_older_status_delivered_again_is_not_believed(node: Teller) -> None:
    node.status(WELL, seq=7)
    node.status(ILL, seq=8)
    assert node.status(WELL, seq=7) is None
    assert node.row["condition"] == "sick"


def test_a_node_that_says_nothing_for_too_long_is_silent(node: Teller) -> None:
    node.everything(WELL)
    limit_ms = node.store.nodes[KEY].silence_limit_ms
    node.store.sweep(NOW + limit_ms, hearing=True)
    assert node.row["condition"] == "ready"
    node.store.sweep(NOW + limit_ms + 1, hearing=True)
    assert (node.row["condition"], node.row["since"]) == ("silent", NOW)


def test_silence_means_nothing_while_the_page_itself_hears_nothing(node: Teller) -> None:
    node.everything(WELL)
    node.store.link_lost()
    node.store.sweep(NOW + 10**8, hearing=False)
    assert node.row["condition"] == "ready"


def test_a_retained_status_is_as_old_as_its_stamp(node: Teller) -> None:
    """A broker that was restarted hands out what a dead node said last week."""
    node.status(WELL, retained=True, ts=NOW - 7 * 86_400_000)
    node.store.sweep(NOW, hearing=True)
    assert node.row["condition"] == "silent"


def test_a_node_that_the_broker_forgot_is_forgotten_after_a_while(node: Teller) -> None:
    node.everything(WELL)
    version = node.store.version
    node.store.begin_load(NOW)
    node.store.end_load(NOW)
    assert (node.row["condition"], node.row["headline"]) == ("silent", "no status for too long")
    node.store.sweep(NOW + 20 * MINUTE, hearing=True)
    changes = node.store.changes(version)
    assert (json.loads(changes.gone), node.store.nodes) == ([KEY], {})


def test_a_renamed_node_goes(node: Teller) -> None:
    node.everything(ILL)
    for topic in (TOPICS.status, TOPICS.inventory, TOPICS.allocation):
        node.say(topic, b"")
    assert node.store.nodes == {}
    # What it left behind does not bring it back.
    node.say(TOPICS.alert("lost-gpu-1a2b"), node.bytes(messages.alert(condition(), ILL)), retained=True)
    assert node.store.nodes == {}


# -- alerts ----------------------------------------------------------------------------------------


def test_an_alert_that_the_status_does_not_list_is_a_ghost(node: Teller) -> None:
    ghost = node.bytes(messages.alert(condition("ghost-of-a-gpu"), ILL), session="s0")
    node.status(WELL, retained=True)
    node.say(TOPICS.alert("ghost-of-a-gpu"), ghost, retained=True)
    assert node.row["alerts"] == 0
    assert "alerts" not in node.detail


def test_an_alert_that_came_after_the_status_is_none(node: Teller) -> None:
    node.status(WELL)
    node.say(TOPICS.alert("new-one"), node.bytes(messages.alert(condition("new-one"), ILL)))
    assert [a["id"] for a in node.detail["alerts"]] == ["new-one"]


# -- streams ---------------------------------------------------------------------------------------


def test_samples_make_an_hour_and_the_use_of_each_pod(node: Teller) -> None:
    node.everything(WELL)
    for n in range(10):
        node.now = NOW + n * 10_000
        node.sample(WELL, outbox="b", seq=n)
    hour = detail.series(node.store.nodes[KEY], 0, node.now)[gpu_uuid(0)]
    assert [t - NOW // 1000 for t in hour["t"]] == list(range(0, 100, 10))
    assert hour["temperatureC"][-1] == 61
    gpu = node.detail["gpus"][0]
    assert [c["usedMiB"] for c in gpu["containers"]] == [1235, 1236]
    assert (node.row["temperatureC"], node.row["utilPct"]) == (61, 43)


def test_what_comes_twice_counts_once(node: Teller) -> None:
    node.everything(WELL)
    for seq in (1, 2, 2, 1, 3):
        node.event(f"event {seq}", outbox="b", seq=seq, ident=f"b-{seq}")
    assert [e["message"] for e in node.detail["events"]] == ["event 3", "event 2", "event 1"]
    assert node.store.duplicates == 2
    node.event("event 1", outbox="another", seq=1, ident="another-1")
    assert len(node.detail["events"]) == 4


def test_a_backlog_is_put_where_it_belongs_and_is_no_sign_of_life(node: Teller) -> None:
    node.everything(WELL)
    node.sample(WELL, outbox="b", seq=5)
    heard = node.store.nodes[KEY].heard_ms
    node.now += 10 * MINUTE
    hot = replace(
        WELL, gpus=(gpu_state(0, reading=replace(gpu_state(0).reading, temperature_c=88.0)), gpu_state(1))
    )  # type: ignore[type-var]
    node.sample(hot, ago_ms=20 * MINUTE, outbox="b", seq=2, historical=True)
    node.event("long ago", outbox="b", seq=3, historical=True, ts=NOW - 5 * MINUTE)
    assert node.store.nodes[KEY].heard_ms == heard
    assert detail.series(node.store.nodes[KEY], 0, node.now)[gpu_uuid(0)]["temperatureC"] == [88, 61]
    assert node.row["temperatureC"] == 61
    assert node.detail["events"][0]["late"] is True


def test_a_clock_that_is_wrong_is_replaced_by_the_time_of_arrival(node: Teller) -> None:
    node.everything(WELL)
    rows = [messages.sample(WELL, t) for t in (5_000, 15_000)]  # 1970
    node.say(TOPICS.telemetry, node.bytes(messages.telemetry(rows), clock="unsynced"))
    hour = detail.series(node.store.nodes[KEY], 0, NOW)[gpu_uuid(0)]
    assert hour["t"] == [NOW // 1000 - 10, NOW // 1000]


def test_columns_are_the_same_as_rows(node: Teller) -> None:
    other = Teller()
    rows = [messages.sample(WELL, NOW - 1000 * n) for n in (60, 50, 40)]
    for teller, topic, body in (
        (node, TOPICS.telemetry, messages.telemetry(rows)),
        (other, TOPICS.telemetry_deflated, messages.to_columns(rows)),
    ):
        teller.everything(WELL)
        data = teller.bytes(body)
        teller.say(topic, messages.deflate(data) if topic.endswith("z") else data)
    assert detail.series(node.store.nodes[KEY], 0, NOW) == detail.series(other.store.nodes[KEY], 0, NOW)
    assert node.detail["gpus"] == other.detail["gpus"]


def test_retained_telemetry_and_events_are_not_taken(node: Teller) -> None:
    node.everything(WELL)
    data = node.bytes(messages.telemetry([messages.sample(WELL, NOW)]))
    assert node.say(TOPICS.telemetry, data, retained=True) is None
    assert node.row["temperatureC"] is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=80))
def test_duplicates_are_found_in_any_order(seqs: list[int]) -> None:
    seen: set[int] = set()
    window = Duplicates("b")
    for seq in seqs:
        assert window.is_new(seq) is (seq not in seen)
        seen.add(seq)


# -- the load --------------------------------------------------------------------------------------


def test_what_the_operator_expects_is_compared() -> None:
    node = Teller(FleetStore(expected=Expected(2, frozenset({KEY, "plant-7/box-2"}))))
    node.everything(WELL)
    (text,) = node.store.shortfalls()
    assert text.startswith("1 of 2 expected nodes are not at the broker: plant-7/box-2")


def test_the_brokers_own_count_of_dropped_messages_is_told(node: Teller) -> None:
    topic = "$SYS/broker/publish/messages/dropped"
    node.say(topic, b"17", retained=True)
    assert node.store.shortfalls() == []
    node.say(topic, b"9017")
    assert "dropped 9000 messages" in node.store.shortfalls()[0]


def test_nodes_that_must_have_been_in_the_load_and_were_not_are_told(node: Teller) -> None:
    node.now += 4 * MINUTE
    for n in range(3):
        node.topics = Topics(SITE, f"late-{n}")
        node.status(replace(WELL, started_ms=NOW - 86_400_000))
    assert "3 nodes were missing" in node.store.shortfalls()[0]


def test_no_more_nodes_than_the_limit() -> None:
    store = FleetStore(max_nodes=2)
    for n in range(3):
        Teller(store, Topics(SITE, f"n-{n}")).status(WELL)
    assert len(store.nodes) == 2
    assert "keeps 2 nodes" in store.shortfalls()[-1]


# -- changes ---------------------------------------------------------------------------------------


def test_a_reader_gets_what_changed_and_the_search_text_only_when_it_did() -> None:
    store = FleetStore()
    tellers = [Teller(store, Topics(SITE, f"n-{n}")) for n in range(4)]
    for teller in tellers:
        teller.everything(WELL)
    first = store.changes(0)
    assert first.reset
    assert [len(r) for r in json.loads(first.rows)] == [len(ROW_FIELDS)] * 4
    tellers[2].sample(WELL)
    second = store.changes(first.version)
    assert [(r[0], len(r)) for r in json.loads(second.rows)] == [(f"{SITE}/n-2", len(ROW_FIELDS) - 1)]
    renamed = replace(WELL, containers=(container(1, pod="renamed"),))
    tellers[2].say(tellers[2].topics.allocation, tellers[2].bytes(messages.allocation(renamed)))
    assert "renamed" in json.loads(store.changes(second.version).rows)[0][-1]
    tellers[1].say(tellers[1].topics.status, b"")
    assert json.loads(store.changes(first.version).gone) == [f"{SITE}/n-1"]
    assert store.changes(store.version).count == 0
    assert store.changes(store.version + 5).reset, "a version of the future is of another run"


def test_an_answer_reaches_its_command_and_silence_ends_it(node: Teller) -> None:
    node.everything(WELL)
    for ident in ("c1", "c2"):
        node.store.sent_command(KEY, CommandLog(ident, "snapshot", "", False, node.now))
    answer = TOPICS.response("page-1")
    for state in ("accepted", "succeeded"):
        body = messages.response("c1", "snapshot", state, result={"x": 1} if state == "succeeded" else None)
        node.say(answer, node.bytes(body))
    node.store.refused_command(KEY, "c1", "too late", NOW)
    node.store.sweep(NOW + MINUTE, hearing=True)
    c2, c1 = node.detail["commands"]
    assert (c1["state"], json.loads(c1["result"]), c2["state"]) == ("succeeded", {"x": 1}, "unanswered")


# -- hostile payloads --------------------------------------------------------------------------------

MEGABYTE = "A" * 2**20
HOSTILE = {
    "no JSON": b"hello",
    "no object": b"[1, 2]",
    "bad UTF-8": b'{"state": "\xff\xfe"}',
    "a megabyte": json.dumps({"state": "ready", "agent": MEGABYTE}).encode(),
    "NaN": b'{"state": NaN}',
    "a number of 5000 digits": b'{"state": "ready", "ts": ' + b"9" * 5000 + b"}",
    "deep": b"[" * 60_000,
    "deep objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "state of a wrong type": b'{"state": ["ready"]}',
    "an unknown state": b'{"state": "<script>"}',
    "empty object": b"{}",
}


@pytest.mark.parametrize(
    "kind", ["status", "inv", "alloc", "alert/x", "tele/m", "tele/z", "evt/xid", "res/page-1"]
)
def test_hostile_payloads_leave_the_node_as_it_was(node: Teller, kind: str) -> None:
    node.everything(ILL)
    before = {k: v for k, v in node.row.items() if k not in ("text", "since", "alerts")}
    for name, data in HOSTILE.items():
        node.say(f"{TOPICS.base}/{kind}", data)
        shown = json.dumps(node.detail)
        assert len(shown) < 100_000, name
        assert MEGABYTE[:1000] not in shown, name
        if kind != "alert/x" or not data.startswith(b"{"):
            assert {k: node.row[k] for k in before} == before, name


TOPICS_OF_STRANGERS = ["", "/", "a", "gpufleet/v1/UP/x/status", "gpufleet/v1/a/b", "gpufleet/v1/a/b/status/extra",
                       "gpufleet/v1/../b/status", "gpufleet/v1/a/b/cmd/snapshot", "$SYS/broker/uptime",
                       "gpufleet/v1/a/" + "b" * 64 + "/status", "gpufleet/v1/a/b/" + "c/" * 20]  # fmt: skip


@pytest.mark.parametrize("topic", TOPICS_OF_STRANGERS)
def test_topics_that_are_none_of_ours_make_no_node(node: Teller, topic: str) -> None:
    node.say(topic, node.bytes(messages.status(WELL)))
    assert node.store.nodes == {}


def test_text_that_turns_or_breaks_lines_is_blanked(node: Teller) -> None:
    snap = replace(WELL, containers=(container(1, pod="a\u202eb\nc\x00d", namespace="<b>ns</b>"),))
    body = messages.allocation(snap)
    body["gpus"][0]["containers"][0]["pod"] = "a\u202eb\nc\x00d"
    node.everything(WELL)
    node.say(TOPICS.allocation, node.bytes(body))
    shown = node.detail["gpus"][0]["containers"][0]
    assert (shown["pod"], shown["namespace"]) == ("a b c d", "<b>ns</b>")  # the page writes text, not markup


def test_lists_are_cut(node: Teller) -> None:
    one = messages.allocation(WELL)["gpus"][0]["containers"][0]
    small = {"podUid": "u", "container": "c"}
    many = {
        "gpus": [{"uuid": f"G{n}", "containers": [small] * 300} for n in range(3)],
        "waiting": [small] * 500,
    }
    node.everything(WELL)
    node.say(TOPICS.allocation, node.bytes(many))
    assert len(one) > len(small)
    gpu = next(g for g in node.detail["gpus"] if g["uuid"] == "G0")
    assert (len(gpu["containers"]), gpu["more"], len(node.detail["waiting"])) == (256, 44, 256)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KINDS = {
    "status": messages.status(
        ILL, uplink=messages.UplinkFacts(("snapshot",)), outbox=messages.OutboxFigures("b")
    ),
    "inv": messages.inventory(ILL),
    "alloc": messages.allocation(snapshot()),
    "alert/a": messages.alert(condition(), ILL),
    "tele/m": messages.telemetry([messages.sample(ILL, NOW)]),
    "tele/z": messages.to_columns([messages.sample(ILL, NOW), messages.sample(ILL, NOW + 1000)]),
    "evt/xid": messages.event("xid", "XidFatal", "text"),
    "res/page-1": messages.response("c1", "snapshot", "succeeded", result={"a": 1}),
}


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for k, v in items for p in paths(v, (*path, k)))]


def replaced(value: Any, path: tuple[Any, ...], junk: Any) -> Any:
    if not path:
        return junk
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], junk)
    return copy


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from(list(KINDS)))
def test_any_part_of_any_message_may_be_anything(data: st.DataObject, kind: str) -> None:
    """Whatever stands anywhere in a message: nothing raises, and what goes to the page is bounded JSON."""
    node = Teller()
    node.everything(ILL)
    node.store.sent_command(KEY, CommandLog("c1", "snapshot", "", False, NOW))
    stamp = messages.Stamp(NOW, 1, "b", "s1", "synced")
    body: Any = messages.envelope(KINDS[kind], stamp, message_id="m-1", seq=99, outbox="b")
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(paths(body)))
        body = replaced(body, path, data.draw(json_values))
    raw = json.dumps(body).encode()
    node.say(f"{TOPICS.base}/{kind}", messages.deflate(raw) if kind == "tele/z" else raw)
    node.store.sweep(NOW + 3600_000, hearing=True)
    json.loads(node.store.changes(0).rows)
    json.dumps(node.store.bar(), allow_nan=False)
    known = node.store.nodes[KEY]
    shown = json.dumps([detail.detail(known, NOW), detail.series(known, 0, NOW)], allow_nan=False)
    assert len(shown) < 200_000
