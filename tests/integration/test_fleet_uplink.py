"""The uplink against a real broker: birth, will, offline, alerts, events, telemetry."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeagent.snapshot import NodeState
from tests.fakes.fleet.harness import Actions, FakeClock, RunningUplink, config, wait_until
from tests.fakes.fleet.snapshots import NODE, SITE, condition, gpu_state
from tests.fakes.mosquitto import FlakyProxy, Mosquitto, Observer, RefusingBroker, available

pytestmark = pytest.mark.skipif(available() is None, reason="mosquitto is not installed")

BASE = f"gpufleet/v1/{SITE}/{NODE}"
PROTOCOLS = pytest.mark.parametrize("protocol", ["5", "3.1.1"])


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    with Mosquitto(tmp_path / "broker") as b:
        yield b


@pytest.fixture
def observer(broker: Mosquitto) -> Iterator[Observer]:
    with Observer(broker.port) as o:
        yield o


@PROTOCOLS
def test_birth_says_everything_and_the_end_says_offline(
    broker: Mosquitto, observer: Observer, tmp_path: Path, protocol: str
) -> None:
    with RunningUplink(config(broker.url, protocol=protocol), tmp_path) as up:
        status = observer.wait_payload("/status")
        assert (status["state"], status["alerts"]) == ("ready", ["overtemperature-gpu-1a2b"])
        observer.wait_payload("/inv")
        observer.wait_payload("/alloc")
        observer.wait_payload("/alert/overtemperature-gpu-1a2b")
        observer.wait_payload("/tele/m")
        wait_until(lambda: up.uplink.state().queued == 0)
        assert up.stop() < 3
    last = observer.wait_payload("/status", lambda p: p["state"] == "offline")
    assert last["sess"] == status["sess"]
    with Observer(broker.port, f"{BASE}/#") as later:
        later.wait(lambda seen: {s.topic[len(BASE) + 1 :] for s in seen} >= {"status", "inv", "alloc"})
        assert later.last("/status")["state"] == "offline"
        assert all(s.retained for s in later.seen)


# -- M1: last will and birth ----------------------------------------------------------------------


def retained_status(broker: Mosquitto) -> dict[str, object]:
    """What somebody who comes now is told."""
    with Observer(broker.port, f"{BASE}/status") as o:
        o.wait(lambda seen: seen)
        return o.seen[-1].payload


@PROTOCOLS
def test_the_will_says_lost_when_the_agent_is_killed(
    broker: Mosquitto, tmp_path: Path, protocol: str
) -> None:
    """Cut through a proxy that then refuses: to the broker the same as SIGKILL."""
    with FlakyProxy(broker.port) as proxy, Observer(broker.port) as observer:
        with RunningUplink(config(proxy.url, protocol=protocol), tmp_path) as up:
            sess = observer.wait_payload("/status")["sess"]
            proxy.refuse(True)
            proxy.cut()
            will = observer.wait_payload("/status", lambda p: p["state"] == "lost")
            assert (will["will"], will["sess"]) == (True, sess)
            proxy.refuse(False)
            observer.clear()
            observer.wait_payload("/status", lambda p: p["state"] == "ready")
            assert retained_status(broker)["state"] == "ready"
            up.stop()
        assert retained_status(broker)["state"] == "offline"


def test_a_short_cut_does_not_flap(broker: Mosquitto, observer: Observer, tmp_path: Path) -> None:
    """With a will delay nobody hears of a blip (MQTT 5)."""
    with (
        FlakyProxy(broker.port) as proxy,
        RunningUplink(config(proxy.url, will_delay_seconds=3), tmp_path) as up,
    ):
        up.wait_connected()
        for n in range(3):
            proxy.cut()
            wait_until(lambda n=n: up.uplink.state().reconnects > n)
        # A cut may come before the birth of the connection that it cuts: not each of them is heard.
        observer.wait(lambda seen: sum(s.topic.endswith("/status") for s in seen) >= 2)
        time.sleep(3.5)  # longer than the will's delay
        assert {s.payload["state"] for s in observer.on("/status")} == {"ready"}


@PROTOCOLS
@pytest.mark.parametrize("persistence", [True, False])
def test_a_broker_that_forgot_is_told_again(tmp_path: Path, protocol: str, persistence: bool) -> None:
    extra = f"persistence {str(persistence).lower()}\npersistence_location {tmp_path}/\n"
    with (
        Mosquitto(tmp_path / "broker", extra) as broker,
        RunningUplink(config(broker.url, protocol=protocol), tmp_path) as up,
    ):
        up.wait_connected()
        broker.restart(hard=True)
        with Observer(broker.port, f"{BASE}/#") as o:
            o.wait(
                lambda seen: (
                    {s.topic[len(BASE) + 1 :] for s in seen}
                    >= {"status", "inv", "alloc", "alert/overtemperature-gpu-1a2b"}
                )
            )
            o.wait_payload("/status", lambda p: p["state"] == "ready")


@PROTOCOLS
@pytest.mark.parametrize("lie", ["lost", "offline", "", "{broken"])
def test_a_wrong_own_status_is_corrected(
    broker: Mosquitto, observer: Observer, tmp_path: Path, protocol: str, lie: str
) -> None:
    with RunningUplink(config(broker.url, protocol=protocol), tmp_path):
        true = observer.wait_payload("/status")
        false = {**true, "state": lie, "sess": "of-another-run", "id": "x"} if lie.isalpha() else lie
        observer.wait(lambda seen: any("/inv" in s.topic for s in seen))
        observer.clear()
        observer.publish(f"{BASE}/status", false, retain=True)
        observer.wait(
            lambda seen: [s for s in seen if s.topic.endswith("/status") and true["sess"].encode() in s.data]
        )
        assert retained_status(broker)["state"] == "ready"


@PROTOCOLS
def test_two_agents_of_one_name_are_told_apart(
    broker: Mosquitto, observer: Observer, tmp_path: Path, protocol: str
) -> None:
    fleet = config(broker.url, protocol=protocol, will_delay_seconds=0)
    with RunningUplink(fleet, tmp_path / "a") as a, RunningUplink(fleet, tmp_path / "b") as b:
        event = observer.wait_payload("/evt/agent", lambda p: p["type"] == "DuplicateClient", timeout_s=20)
        assert event["severity"] == "critical"
        problems = wait_until(
            lambda: [p for u in (a, b) if (p := u.uplink.state().problem) and "another" in p]
        )
        assert problems


# -- alerts, changes, ghosts ------------------------------------------------------------------------


def test_alerts_are_raised_and_cleared(broker: Mosquitto, observer: Observer, tmp_path: Path) -> None:
    with RunningUplink(config(broker.url), tmp_path) as up:
        observer.wait_payload("/alert/overtemperature-gpu-1a2b")
        lost = condition("Lost GPU-1", type="Lost", severity="critical", makes_unhealthy=True)
        up.change(conditions=(lost,), gpus=(gpu_state(0), gpu_state(1)))
        raised = observer.wait_payload("", lambda p: p.get("alert") == "Lost GPU-1")
        assert raised["makesUnhealthy"] is True
        observer.wait(lambda seen: any("overtemp" in s.topic and not s.data for s in seen))
        status = observer.wait_payload("/status", lambda p: p["alerts"] == ["Lost GPU-1"])
        assert status["state"] == "ready"
        up.change(conditions=())
        observer.wait_payload("/status", lambda p: p["alerts"] == [])
    with Observer(broker.port, f"{BASE}/#") as later:
        later.wait(lambda seen: any(s.topic.endswith("/status") for s in seen))
        assert not later.on("alert/overtemperature-gpu-1a2b")


@PROTOCOLS
def test_ghosts_of_earlier_alerts_are_cleared(
    broker: Mosquitto, observer: Observer, tmp_path: Path, protocol: str
) -> None:
    """Conditions of removed GPUs, renamed ids: retained by the broker, held by nobody."""
    observer.publish(f"{BASE}/alert/gone-gpu", '{"alert":"gone-gpu"}', retain=True)
    observer.clear()
    with RunningUplink(config(broker.url, protocol=protocol), tmp_path):
        observer.wait(lambda seen: any(s.topic.endswith("alert/gone-gpu") and not s.data for s in seen))
        observer.wait_payload("/alert/overtemperature-gpu-1a2b")


def test_a_renamed_node_clears_its_former_name(broker: Mosquitto, observer: Observer, tmp_path: Path) -> None:
    with RunningUplink(config(broker.url), tmp_path, node="old-name") as up:
        observer.wait_payload("old-name/status")
        observer.wait_payload("old-name/alloc")
        up.wait_connected()
    with RunningUplink(config(broker.url), tmp_path):
        for name in ("status", "inv", "alloc"):
            observer.wait(
                lambda seen, name=name: (
                    [s for s in seen if s.topic.endswith(f"old-name/{name}")][-1].data == b""
                )
            )
        observer.wait_payload(f"{NODE}/status")


def test_changes_go_out_and_nothing_else_does(broker: Mosquitto, observer: Observer, tmp_path: Path) -> None:
    with RunningUplink(config(broker.url, telemetry_seconds=0.2), tmp_path, clock=FakeClock(rate=5)) as up:
        observer.wait_payload("/alloc")
        observer.wait(lambda seen: sum(s.topic.endswith("/tele/m") for s in seen) >= 5)
        assert len(observer.on("/alloc")) == len(observer.on("/inv")) == len(observer.on("/status")) == 1
        up.change(containers=())
        alloc = observer.wait_payload("/alloc", lambda p: not p["gpus"][0]["containers"])
        assert alloc["waiting"][0]["permanent"] is True
        up.change(state=NodeState.DRAINING)
        observer.wait_payload("/status", lambda p: p["state"] == "draining")


# -- events -----------------------------------------------------------------------------------------


def test_events_beyond_the_limit_are_counted_not_sent(
    broker: Mosquitto, observer: Observer, tmp_path: Path
) -> None:
    clock = FakeClock()
    with RunningUplink(config(broker.url, events_per_minute=5), tmp_path, clock=clock) as up:
        up.wait_connected()
        for n in range(50):
            up.uplink.event("xid", "Xid", f"XID 13 number {n}", facts={"xid": 13})
        up.uplink.event("oom", "Oom", "another kind is not held up")
        observer.wait_payload("/evt/oom")
        observer.wait(lambda seen: sum(s.topic.endswith("/evt/xid") for s in seen) >= 5)
        clock.rate = 100  # the next token comes after 12 s
        told = observer.wait_payload("/evt/xid", lambda p: p.get("suppressed"))
        sent = [s for s in observer.on("/evt/xid") if "suppressed" not in s.payload]
        assert len(sent) + told["suppressed"] == 50


def test_a_full_hand_over_drops_and_counts(tmp_path: Path) -> None:
    """Whatever the uplink does, callers return at once and memory is bounded."""
    up = RunningUplink(config("mqtt://127.0.0.1:1", events_per_minute=1000), tmp_path)  # not started
    began = time.monotonic()
    for n in range(1100):
        up.uplink.event(("xid", "alloc")[n % 2], "T", "m")
    assert time.monotonic() - began < 1.0
    with up:
        dropped = wait_until(lambda: up.uplink.state().dropped)
        assert sum(dropped.values()) == 100
        assert up.uplink.state().queued >= 1000


# -- telemetry --------------------------------------------------------------------------------------


@pytest.mark.parametrize("deflate", [True, False])
def test_batches_on_metered_links(
    broker: Mosquitto, observer: Observer, tmp_path: Path, deflate: bool
) -> None:
    fleet = config(broker.url, link="metered", telemetry_seconds=10.0, batch_seconds=60.0, deflate=deflate)
    with RunningUplink(fleet, tmp_path, clock=FakeClock(rate=60)) as up:
        topic = "/tele/z" if deflate else "/tele/m"
        observer.wait(lambda seen: sum(s.topic.endswith(topic) for s in seen) >= 3)
        payload = observer.on(topic)[-1].payload
        assert len(payload["t"] if deflate else payload["samples"]) >= 4
        up.stop()
    assert {s.topic.rpartition("/")[2] for s in observer.seen if "/tele/" in s.topic} == {topic[-1]}


def test_a_byte_budget_holds_telemetry_back_but_not_events(
    broker: Mosquitto, observer: Observer, tmp_path: Path
) -> None:
    fleet = config(broker.url, monthly_mb=1.0, telemetry_seconds=1.0)
    with RunningUplink(fleet, tmp_path, clock=FakeClock(rate=200)) as up:
        wait_until(lambda: up.uplink.state().dropped.get("budget"), 20)
        up.uplink.event("xid", "Xid", "XID 79")
        observer.wait_payload("/evt/xid")


# -- time -------------------------------------------------------------------------------------------


def test_times_recorded_before_the_clock_was_right_are_put_right(tmp_path: Path) -> None:
    """AI-on-the-edge#3790: a reboot without a clock must not send 1970."""
    clock = FakeClock(synced=False)
    clock.wall_offset_ms = -int(56 * 365.25 * 86_400_000)
    broker = Mosquitto(tmp_path / "broker")
    with RunningUplink(config(broker.url, telemetry_seconds=0.2), tmp_path, clock=clock) as up:
        up.uplink.event("xid", "Xid", "while the clock was wrong")
        wait_until(lambda: up.uplink.state().queued >= 3)
        clock.wall_offset_ms, clock.synced = 0, True
        before_ms = clock.now().wall_ms
        with broker, Observer(broker.port) as observer:
            up.wait_connected()
            restored = observer.wait_payload("/evt/xid")
            assert restored["clk"] == "restored"
            assert 0 <= before_ms - restored["ts"] < 10_000
            old = observer.wait_payload("/tele/m", lambda p: p["clk"] == "restored")
            assert 0 <= before_ms - old["samples"][0]["ts"] < 10_000
            assert observer.wait_payload("/status")["clk"] == "synced"


def test_a_clock_that_stays_wrong_is_said(broker: Mosquitto, observer: Observer, tmp_path: Path) -> None:
    with RunningUplink(config(broker.url), tmp_path, clock=FakeClock(synced=False)) as up:
        up.uplink.event("xid", "Xid", "x")
        assert observer.wait_payload("/evt/xid")["clk"] == "unsynced"
        assert observer.wait_payload("/status")["clk"] == "unsynced"


# -- stop -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["frozen", "stalled", "absent", "blackhole"])
def test_the_end_is_quick_whatever_the_broker_does(broker: Mosquitto, tmp_path: Path, trouble: str) -> None:
    with FlakyProxy(broker.port) as proxy:
        url = {
            "absent": "mqtt://127.0.0.1:1",
            "blackhole": "mqtt://192.0.2.1:1883",  # TEST-NET: packets vanish, or there is no route
        }.get(trouble, proxy.url)
        up = RunningUplink(config(url), tmp_path).start()
        if trouble in ("frozen", "stalled"):
            up.wait_connected()
        if trouble == "frozen":
            broker.freeze()
        if trouble == "stalled":
            proxy.stall(True)
        up.uplink.event("xid", "Xid", "the last thing")
        took = up.stop()
        assert took < 3.0
        if trouble == "frozen":
            broker.thaw()
    with Observer(broker.port) as observer, RunningUplink(config(broker.url), tmp_path):
        observer.wait_payload("/evt/xid", lambda p: p["message"] == "the last thing")


def test_home_assistant_discovery_is_opt_in(broker: Mosquitto, tmp_path: Path) -> None:
    with Observer(broker.port, ["homeassistant/#", "gpufleet/#"]) as observer:
        with RunningUplink(config(broker.url), tmp_path / "a") as up:
            observer.wait_payload("/tele/m")
            up.stop()
        assert not [s for s in observer.seen if s.topic.startswith("homeassistant")]
        with RunningUplink(config(broker.url, home_assistant=True), tmp_path / "b") as up:
            topic = f"homeassistant/device/{SITE}-{NODE}/config"
            observer.wait(lambda seen: any(s.topic == topic for s in seen))
            first = json.loads(observer.on(topic)[0].data)["cmps"]
            assert len(first) == 1 + 2 * 4
            up.change(gpus=up.snap.gpus[:1])
            observer.wait(lambda seen: len([s for s in seen if s.topic == topic]) == 2)
            second = json.loads(observer.on(topic)[1].data)["cmps"]
            assert first.keys() == second.keys()
            assert sum(c == {"p": "sensor"} for c in second.values()) == 4, "removed by name"


def test_reloaded_settings_count_at_once(broker: Mosquitto, observer: Observer, tmp_path: Path) -> None:
    with RunningUplink(config(broker.url, telemetry_seconds=3600.0), tmp_path, actions=Actions()) as up:
        observer.wait_payload("/tele/m")
        up.uplink.set_telemetry_seconds(0.2)
        observer.wait(lambda seen: sum(s.topic.endswith("/tele/m") for s in seen) >= 4)
        up.uplink.set_commands_allowed(("snapshot", "cordon-gpu"))
        status = observer.wait_payload("/status", lambda p: "cordon-gpu" in p["commands"])
        assert status["telemetryS"] == 0.2


def test_a_refusal_that_may_pass_is_tried_again(tmp_path: Path) -> None:
    """Quota exceeded is not the message's fault. A broker that refuses twice, made of sockets:
    mosquitto never does."""
    with RefusingBroker(refusals=2) as broker, RunningUplink(config(broker.url), tmp_path) as up:
        up.uplink.event("xid", "Xid", "wanted in the end")
        wait_until(lambda: broker.refused == 2 and up.uplink.state().queued == 0, 20)
        assert "quarantined" not in up.uplink.state().dropped
