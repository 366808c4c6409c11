"""Payloads: complete, valid, without values that are none, never above the cap."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.errors import FleetError
from edgeagent.fleet import messages
from edgeagent.fleet.messages import DesiredState, OutboxFigures, Stamp, UplinkFacts
from edgeagent.fleet.topics import EVENT_KINDS, Topics, check_topic, is_name, parse, slug
from edgeagent.gpus.model import GpuReading
from edgeagent.snapshot import NodeState
from tests.fakes.fleet import schemas
from tests.fakes.fleet.snapshots import (
    NODE,
    SITE,
    T0_MS,
    condition,
    container,
    gpu_state,
    gpu_uuid,
    one_gpu_four_pods,
    reading,
    snapshot,
)

TOPICS = Topics(SITE, NODE)
STAMP = Stamp(T0_MS, 123_456, "b0b0b0b0", "5e55", "synced")


def wire(body: messages.Body, **more: Any) -> bytes:
    return messages.encode(messages.envelope(body, STAMP, message_id="5e55-1", seq=1, **more))


def full_uplink() -> UplinkFacts:
    return UplinkFacts(("snapshot", "cordon-gpu"), True, 30, 60, 300, 10.0, "lan")


@pytest.mark.parametrize(
    ("topic", "body"),
    [
        (TOPICS.status, lambda s: messages.status(s)),
        (
            TOPICS.status,
            lambda s: messages.status(
                s,
                uplink=full_uplink(),
                outbox=OutboxFigures("0b0c", 3, 900, 12, 1, {"telemetry": 4, "event": 0}),
                desired=DesiredState("ab12", False, {"sharing.mode": "not among the keys that may change"}),
                state=NodeState.OFFLINE,
            ),
        ),
        (TOPICS.status, lambda s: messages.will(NODE, SITE, "0.1.0", "c0ffee", full_uplink())),
        (TOPICS.inventory, messages.inventory),
        (TOPICS.allocation, messages.allocation),
        (TOPICS.alert("overtemperature-gpu-1a2b"), lambda s: messages.alert(condition(), s)),
        (TOPICS.telemetry, lambda s: messages.telemetry([messages.sample(s, T0_MS)])),
        (TOPICS.response("ops"), lambda s: messages.response("c1", "snapshot", "rejected", code="expired")),
        *(
            (
                TOPICS.event(k),
                lambda s, k=k: messages.event(
                    k, "Xid", "XID 79", gpu_uuid=gpu_uuid(0), facts={"xid": 79, "nan": float("nan")},
                    suppressed=2,
                ),
            )
            for k in EVENT_KINDS
        ),
    ],
)  # fmt: skip
def test_every_message_satisfies_its_schema(topic: str, body: Any) -> None:
    payload = schemas.validate(topic, wire(body(snapshot()), outbox="0b0c", historical=True))
    assert payload["seq"] == 1
    assert payload["box"] == "0b0c"
    assert payload["clk"] == "synced"


def test_a_bare_node_satisfies_the_schemas() -> None:
    """No GPU, nothing known: still valid, lists present and empty."""
    bare = snapshot(gpus=(), containers=(), waiting=(), resources=(), reasons=(), counters={}, evidence=())
    assert schemas.validate(TOPICS.status, wire(messages.status(bare)))["alerts"] == []
    assert schemas.validate(TOPICS.inventory, wire(messages.inventory(bare)))["gpus"] == []
    assert schemas.validate(TOPICS.allocation, wire(messages.allocation(bare)))["gpus"] == []
    schemas.validate(TOPICS.telemetry, wire(messages.telemetry([messages.sample(bare, T0_MS)])))


# -- M2: values that are not numbers ------------------------------------------------------------

_WILD = st.one_of(
    st.none(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([-256.0, 9223372036854775794.0, 0.0, float("nan"), 100.4]),
)
_FLOAT_FIELDS = [f.name for f in fields(GpuReading) if f.type in ("float | None", "int | None")]


@settings(max_examples=20, deadline=None)
@given(
    st.fixed_dictionaries(dict.fromkeys(_FLOAT_FIELDS, _WILD)),
    st.dictionaries(st.text(max_size=8), _WILD, max_size=3),
    _WILD,
)
def test_no_reading_makes_a_message_unreadable(
    values: dict[str, Any], zones: dict[str, Any], use: Any
) -> None:
    snap = snapshot(
        gpus=(gpu_state(0, reading=reading(0, **values, temperatures_c=zones), unattributed_mib=use),),
        containers=(container(1, used_mib=use, util_pct=use),),
    )
    row = messages.sample(snap, T0_MS)
    schemas.validate(TOPICS.telemetry, wire(messages.telemetry([row])))
    schemas.validate(TOPICS.status, wire(messages.status(snap)))
    for name in ("temperatureC", "powerW", "utilPct"):
        assert row["gpus"][0].get(name, 0) is not None


@pytest.mark.parametrize(
    ("field", "value", "key"),
    [
        ("temperature_c", -256.0, "temperatureC"),
        ("temperature_c", float("nan"), "temperatureC"),
        ("temperature_c", 9223372036854775794.0, "temperatureC"),
        ("util_pct", None, "utilPct"),
        ("util_pct", 4294967295.0, "utilPct"),
        ("memory_used_mib", None, "memoryUsedMiB"),
        ("power_w", float("inf"), "powerW"),
        ("fan_pct", None, "fanPct"),
    ],
)
def test_what_the_hardware_lacks_is_absent_and_the_rest_is_there(field: str, value: Any, key: str) -> None:
    gpu = messages.sample(snapshot(gpus=(gpu_state(0, reading=reading(0, **{field: value})),)), T0_MS)[
        "gpus"
    ][0]
    assert key not in gpu
    assert len({"temperatureC", "utilPct", "memoryUsedMiB", "powerW"} & gpu.keys()) >= 3


def test_unknown_use_of_one_gpu_makes_no_wrong_sum() -> None:
    snap = snapshot(gpus=(gpu_state(0), gpu_state(1, reading=None)))
    assert "memoryUsedMiB" not in messages.totals(snap)


def test_unknown_per_pod_use_is_absent_never_the_cards() -> None:
    """dcgm-exporter#587: three pods on one card must not each show the card's value."""
    snap = snapshot(containers=tuple(container(n, used_mib=None, util_pct=None) for n in range(3)))
    for pod in messages.sample(snap, T0_MS)["gpus"][0]["pods"]:
        assert "usedMiB" not in pod
        assert "utilPct" not in pod


def test_mebibytes_are_integers() -> None:
    assert messages.sample(snapshot(), T0_MS)["gpus"][0]["memoryUsedMiB"] == 5000
    assert json.dumps(messages.totals(snapshot())["memoryUsedMiB"]).isdigit()


@pytest.mark.parametrize("text", ["\ud800 half", "a\x00b\nc", "x" * 5000, "<script>", "\u202e"])
def test_hostile_text_becomes_plain_text(text: str) -> None:
    payload = schemas.validate(TOPICS.event("agent"), wire(messages.event("agent", "Test", text)))
    assert len(payload["message"]) <= 500
    assert all(c.isprintable() for c in payload["message"])


# -- size ---------------------------------------------------------------------------------------


def test_a_message_above_the_cap_is_shortened_and_says_by_how_much() -> None:
    crowd = snapshot(containers=tuple(container(n, memory_mib=n) for n in range(1000)))
    data = wire(messages.allocation(crowd))
    payload = schemas.validate(TOPICS.allocation, data)
    kept = payload["gpus"][0]["containers"]
    assert len(data) > 0.9 * messages.MAX_PAYLOAD_BYTES
    assert payload["truncated"] == {"gpus.containers": 1000 - len(kept)}
    assert kept[0]["memoryMiB"] == 999, "the largest shares stay"
    assert payload["waiting"], "short lists stay whole"


def test_what_cannot_be_shortened_is_refused() -> None:
    with pytest.raises(FleetError, match="cannot shorten"):
        messages.encode({"result": "x" * 70_000})
    with pytest.raises(FleetError, match="as JSON"):
        messages.encode({"x": float("nan")})


# -- columns ------------------------------------------------------------------------------------


def test_columns_give_back_the_rows() -> None:
    rows = [messages.sample(one_gpu_four_pods(n), T0_MS + 10_000 * n) for n in range(6)]
    data = messages.deflate(wire(messages.to_columns(rows)))
    payload = schemas.validate(TOPICS.telemetry_deflated, data)
    assert messages.from_columns(payload) == rows
    assert len(data) < 1100, "a batch of six samples, 1 GPU and 4 pods"


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 3)), _WILD, _WILD), min_size=1, max_size=5)
)
def test_columns_give_back_rows_whose_gpus_and_pods_come_and_go(steps: list[Any]) -> None:
    rows = [
        messages.sample(
            snapshot(
                gpus=tuple(
                    gpu_state(g, reading=reading(g, temperature_c=t, util_pct=u)) for g in range(gpus)
                ),
                containers=tuple(container(p, gpu=p % 2) for p in sorted(pods)),
            ),
            T0_MS + n,
        )
        for n, (gpus, pods, t, u) in enumerate(steps)
    ]
    packed = json.loads(wire(messages.to_columns(rows)))
    schemas.check("tele-z", packed)

    def key(row: Any) -> Any:
        return {
            **row,
            "gpus": sorted(
                ({**g, "pods": sorted(g.get("pods", []), key=lambda p: p["pod"])} for g in row["gpus"]),
                key=lambda g: g["uuid"],
            ),
        }

    assert [key(r) for r in messages.from_columns(packed)] == [key(r) for r in rows]


@pytest.mark.parametrize("body", [{}, {"t": 3, "t0": 0}, {"t0": 0, "t": [0], "gpus": [{"cols": {"a": []}}]}])
def test_broken_columns_are_refused(body: Any) -> None:
    with pytest.raises(FleetError):
        messages.from_columns(body)


def test_inflate_is_bounded() -> None:
    with pytest.raises(FleetError, match="larger"):
        messages.inflate(messages.deflate(b"x" * 10_000_000))
    with pytest.raises(FleetError):
        messages.inflate(b"not deflated")


# -- topics -------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.text(max_size=100))
def test_any_condition_id_becomes_a_valid_level(text: str) -> None:
    assert is_name(slug(text))
    assert slug(slug(text)) == slug(text)
    check_topic(TOPICS.alert(text))


def test_different_ids_never_share_a_topic() -> None:
    assert slug("Lost GPU-1") != slug("lost gpu-1") != slug("lost-gpu-1")


@pytest.mark.parametrize(
    "topic",
    [
        "a/b/c/d/e/f/g/h/i",
        "gpufleet/v1/+/x/status",
        "gpufleet/v1//x",
        "gpufleet/V1/x",
        "a/#",
        "x" * 300,
        "a/ü",
    ],
)
def test_bad_topics_are_refused(topic: str) -> None:
    with pytest.raises(FleetError):
        check_topic(topic)


@pytest.mark.parametrize("name", ["", "A", "a b", "a/b", "-a", "a" * 64, "+", "#"])
def test_bad_node_names_are_refused(name: str) -> None:
    with pytest.raises(FleetError):
        Topics(SITE, name)


def test_only_own_responses_are_own() -> None:
    assert TOPICS.is_own_response(f"gpufleet/v1/{SITE}/{NODE}/res/ops-1")
    for topic in (f"gpufleet/v1/{SITE}/box-2/res/x", f"{TOPICS.base}/status", f"{TOPICS.base}/res/a/b", "x"):
        assert not TOPICS.is_own_response(topic)


def test_parse_takes_a_topic_apart() -> None:
    parsed = parse(TOPICS.alert("x-1"))
    assert parsed is not None
    assert (parsed.site, parsed.node, parsed.tail) == (SITE, NODE, ("alert", "x-1"))
    assert parse("gpufleet/v1/x") is None
    assert parse("homeassistant/sensor/a/b/config") is None


def test_bodies_of_the_same_state_compare_equal_whatever_the_use() -> None:
    """Else every reading would send `alloc` and `inv` anew."""
    a, b = one_gpu_four_pods(1), replace(one_gpu_four_pods(2), taken_ms=T0_MS + 9)
    assert messages.allocation(a) == messages.allocation(b)
    assert messages.inventory(a) == messages.inventory(b)


def test_the_asyncapi_document_names_every_schema_and_only_those() -> None:
    text = (schemas.SCHEMA_DIR.parent / "asyncapi.yaml").read_text()
    document = yaml.safe_load(text)
    named = set(re.findall(r"schemas/([a-z-]+)\.json", text))
    assert named == {p.stem for p in schemas.SCHEMA_DIR.glob("*.json")} - {"common"}
    for operation in document["operations"].values():
        assert operation["channel"]["$ref"].rpartition("/")[2] in document["channels"]
    kinds = document["channels"]["event"]["parameters"]["kind"]["enum"]
    assert tuple(kinds) == EVENT_KINDS
