"""What goes wrong in the field, against a real broker: nothing recorded is lost, status stays true.

The inputs are reports of other projects; each test names the kind, not the number.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import psutil
import pytest

from edgeagent.config.schema import CommandsConfig, OutboxConfig
from edgeagent.fleet.client import Broker, Connected, Link, LinkSettings
from edgeagent.fleet.outbox import Outbox
from tests.fakes.fleet.harness import Actions, FakeClock, RunningUplink, config, wait_until
from tests.fakes.fleet.snapshots import NODE, SITE, container, snapshot
from tests.fakes.mosquitto import FlakyProxy, Mosquitto, Observer, available

pytestmark = pytest.mark.skipif(available() is None, reason="mosquitto is not installed")

BASE = f"gpufleet/v1/{SITE}/{NODE}"
PROTOCOLS = pytest.mark.parametrize("protocol", ["5", "3.1.1"])


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    with Mosquitto(tmp_path / "broker") as b:
        yield b


def numbers(observer: Observer) -> list[int]:
    """The numbers of the events seen, duplicates by (box, seq) taken out."""
    unique = {(p["box"], p["seq"]): p["facts"]["n"] for s in observer.seen if "/evt/" in s.topic
              for p in [json.loads(s.data)] if "n" in p.get("facts", {})}  # fmt: skip
    return list(unique.values())


class Outage:
    """A broker that is away; `end()` brings it back when an observer listens."""

    def __init__(self, directory: Path, *, up_at_first: bool = False) -> None:
        self.broker = Mosquitto(directory / "broker").start()
        self.proxy = FlakyProxy(self.broker.port)
        self.proxy.refuse(not up_at_first)
        self.observer: Observer | None = None

    def begin(self) -> None:
        self.proxy.refuse(True)
        self.proxy.cut()

    def end(self) -> Observer:
        self.observer = Observer(self.broker.port)
        self.proxy.refuse(False)
        return self.observer

    def __enter__(self) -> Outage:
        return self

    def __exit__(self, *_: object) -> None:
        if self.observer is not None:
            self.observer.close()
        self.proxy.close()
        self.broker.kill()


def emit(up: RunningUplink, count: int, *, first: int = 0, pad: int = 0) -> None:
    for n in range(first, first + count):
        up.uplink.event(("alloc", "xid")[n % 2], "Numbered", "x" * pad, facts={"n": n})


# -- flow control, oversize, refusal -----------------------------------------------------------------


def test_never_more_unacknowledged_than_the_broker_allows(tmp_path: Path) -> None:
    """paho#492: after a reconnect everything queued was sent at once. mosquitto hangs up on a client
    that exceeds its ReceiveMaximum (here 5)."""
    with Mosquitto(tmp_path / "b", "max_inflight_messages 5") as broker, Observer(broker.port) as observer:
        with RunningUplink(config("mqtt://127.0.0.1:1", events_per_minute=1000), tmp_path) as up:
            emit(up, 300)
            wait_until(lambda: up.uplink.state().queued >= 300)
        with RunningUplink(config(broker.url), tmp_path) as up:
            observer.wait(lambda seen: len(set(numbers(observer))) == 300)
            assert up.uplink.state().reconnects == 0
        assert "receive maximum" not in broker.log().lower()


@pytest.mark.parametrize(
    ("protocol", "limit"),
    [("5", "max_packet_size 3000"), ("3.1.1", "max_packet_size 3000"), ("5", "message_size_limit 3000")],
)
def test_an_oversize_message_does_not_block_the_rest(tmp_path: Path, protocol: str, limit: str) -> None:
    """paho#893: it was sent again and again, every time ending the connection."""
    with Mosquitto(tmp_path / "b", limit) as broker, Observer(broker.port) as observer:
        fleet = config(broker.url, protocol=protocol, telemetry_seconds=3600.0)
        up = RunningUplink(fleet, tmp_path)
        up.snap = snapshot(containers=tuple(container(n) for n in range(2)))
        with up:
            observer.wait_payload("/status")
            up.snap = snapshot(containers=tuple(container(n) for n in range(40)))
            up.uplink.sample()  # a telemetry message of about 6 kB
            emit(up, 10)
            observer.wait(lambda seen: len(set(numbers(observer))) == 10, timeout_s=20)
            wait_until(lambda: up.uplink.state().dropped.get("quarantined"))
            refused = observer.wait_payload("/evt/agent", lambda p: p["type"] == "MessageRefused")
            assert "tele/m" in refused["message"]
            wait_until(lambda: up.uplink.state().queued == 0)


@PROTOCOLS
def test_state_is_shortened_to_what_the_broker_takes(tmp_path: Path, protocol: str) -> None:
    """In MQTT 3.1.1 that is learnt from the connections it ends."""
    with Mosquitto(tmp_path / "b", "max_packet_size 4000") as broker, Observer(broker.port) as observer:
        up = RunningUplink(config(broker.url, protocol=protocol), tmp_path)
        up.snap = snapshot(containers=tuple(container(n) for n in range(60)))
        with up:
            alloc = observer.wait_payload("/alloc")
            assert alloc["truncated"]["gpus.containers"] > 40


def test_what_the_acl_denies_is_set_aside_and_said(tmp_path: Path) -> None:
    """A PUBACK 0x87 counts as published for paho."""
    acl = tmp_path / "acl"
    acl.write_text("topic readwrite gpufleet/#\ntopic deny gpufleet/v1/+/+/evt/alloc\n")
    with (
        Mosquitto(tmp_path / "b", f"acl_file {acl}") as broker,
        Observer(broker.port) as observer,
        RunningUplink(config(broker.url), tmp_path) as up,
    ):
        emit(up, 4)
        event = observer.wait_payload("/evt/agent", lambda p: p["type"] == "MessageRefused")
        assert "Not authorized" in event["message"]
        observer.wait(lambda seen: {1, 3} <= set(numbers(observer)))
        wait_until(lambda: up.uplink.state().queued == 0)
        assert up.uplink.state().dropped["quarantined"] == 2


# -- dead threads, half-open links, names ---------------------------------------------------------


@pytest.mark.parametrize("method", ["loop_misc", "loop_read", "publish"])
def test_a_dead_client_thread_is_replaced(
    broker: Mosquitto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """paho#704: an exception ends the thread while is_connected() stays true."""
    with Observer(broker.port) as observer, RunningUplink(config(broker.url), tmp_path) as up:
        observer.wait_payload("/tele/m")
        original = getattr(paho.Client, method)
        raised = []

        def once(self: Any, *args: Any, **more: Any) -> Any:
            # Only in the uplink's thread: the observer uses paho too.
            if not raised and self._client_id == NODE.encode():
                raised.append(True)
                raise RuntimeError("injected")
            return original(self, *args, **more)

        monkeypatch.setattr(paho.Client, method, once)
        emit(up, 6)
        event = observer.wait_payload("/evt/agent", lambda p: p["type"] == "UplinkRestarted")
        assert "injected" in event["message"]
        observer.wait(lambda seen: set(range(6)) <= set(numbers(observer)))
        assert observer.last("/status")["state"] == "ready"


def test_a_fault_of_the_uplink_itself_does_not_end_it(broker: Mosquitto, tmp_path: Path) -> None:
    with Observer(broker.port) as observer:
        up = RunningUplink(config(broker.url), tmp_path)
        good, faults = up.snap, []

        def sometimes() -> Any:
            if len(faults) < 1:
                faults.append(1)
                raise ZeroDivisionError("injected")
            return good

        up.uplink._snapshot = sometimes
        with up:
            up.uplink.event("xid", "Xid", "while it was down", facts={"n": 1})
            observer.wait(lambda seen: numbers(observer) == [1])
            observer.wait_payload("/status")


@PROTOCOLS
@pytest.mark.parametrize("kind", ["stall", "half_open"])
def test_a_link_that_is_half_open_is_found_and_replaced(
    broker: Mosquitto, tmp_path: Path, protocol: str, kind: str
) -> None:
    """Liveness is the age of the last PUBACK. Rows leave on PUBACK only (telegraf#14750)."""
    with FlakyProxy(broker.port) as proxy, Observer(broker.port) as observer:
        fleet = config(proxy.url, protocol=protocol)
        with RunningUplink(fleet, tmp_path, ack_timeout_s=0.7) as up:
            observer.wait_payload("/tele/m")
            wait_until(lambda: up.uplink.state().queued == 0)
            if kind == "stall":
                proxy.stall(True)
            else:
                proxy.half_open()
            emit(up, 5)
            wait_until(lambda: up.uplink.state().reconnects > 0 or not up.uplink.state().connected)
            if kind == "stall":
                wait_until(lambda: up.uplink.state().queued == 5)  # sent long ago, and kept
            proxy.stall(False)
            observer.wait(lambda seen: set(range(5)) <= set(numbers(observer)))
            wait_until(lambda: up.uplink.state().queued == 0)


def test_a_silent_half_open_link_is_found_by_keepalive(broker: Mosquitto, tmp_path: Path) -> None:
    """Nothing to send: the ping finds it, within twice the keepalive."""
    ended = []
    with FlakyProxy(broker.port) as proxy:
        link = Link(
            LinkSettings((Broker.parse(proxy.url),), "c1", keepalive_s=1, backoff_min_s=5.0),
            will=lambda: ("a/will", b"{}"), subscriptions=list, wake=lambda: None,
        )  # fmt: skip
        link.start()
        wait_until(lambda: link.inbox and isinstance(link.inbox[0], Connected))
        proxy.half_open()
        ended = wait_until(lambda: list(link.inbox)[1:])
        link.close(2.0)
    assert not ended[0].by_peer


def test_it_retries_for_ever_and_names_are_resolved_anew(
    broker: Mosquitto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """greengrass#1714: booted without network, never recovered."""
    original, lookups = socket.getaddrinfo, []

    def resolver(host: Any, *args: Any, **more: Any) -> Any:
        if host == "broker.example":
            lookups.append(host)
            if len(lookups) < 6:
                raise socket.gaierror(-3, "Temporary failure in name resolution")
            return original("127.0.0.1", *args, **more)
        return original(host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    with RunningUplink(config(f"mqtt://broker.example:{broker.port}"), tmp_path) as up:
        emit(up, 1)
        assert "resolve" in wait_until(lambda: up.uplink.state().problem)
        up.wait_connected()
        assert len(lookups) >= 6


def test_a_host_name_that_is_none_does_not_kill_the_thread(tmp_path: Path) -> None:
    """`a..b` raises UnicodeError, which is no OSError."""
    with RunningUplink(config("mqtt://a..b:1883"), tmp_path) as up:
        assert wait_until(lambda: up.uplink.state().problem)
        assert up.uplink._links_died == 0


def test_filters_of_an_earlier_run_are_unsubscribed(broker: Mosquitto, tmp_path: Path) -> None:
    """telegraf#9703: an old session keeps its filters."""
    fleet = config(broker.url)
    with RunningUplink(fleet, tmp_path, actions=Actions()) as up:
        up.wait_connected()
    with RunningUplink(fleet, tmp_path) as up:  # no commands any more
        up.wait_connected()
        wait_until(lambda: f"{BASE}/cmd/+" in broker.log().partition("UNSUBSCRIBE")[2])


# -- outages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["from the start", "in between"])
def test_thirty_minutes_without_a_broker(tmp_path: Path, when: str) -> None:
    """Clock 200 times as fast. Status is only the newest, events are kept, telemetry carries its own
    time, memory does not grow."""
    clock = FakeClock(rate=400)
    with Outage(tmp_path, up_at_first=when == "in between") as outage:
        fleet = config(outage.proxy.url, telemetry_seconds=30.0, events_per_minute=1000)
        with RunningUplink(fleet, tmp_path, clock=clock) as up:
            thirty_minutes(outage, up, clock, when)


def thirty_minutes(outage: Outage, up: RunningUplink, clock: FakeClock, when: str) -> None:
    if when == "in between":
        up.wait_connected()
        wait_until(lambda: up.uplink.state().queued == 0)
        outage.begin()
        up.wait_connected(False)
    began = clock.now()
    rss_before = psutil.Process().memory_info().rss
    for n in range(200):
        emit(up, 1, first=n)
        up.change(config_hash=f"hash-{n}")
        while clock.now().mono_ms < began.mono_ms + 9_000 * (n + 1):
            time.sleep(0.005)
    grown = psutil.Process().memory_info().rss - rss_before
    assert clock.now().mono_ms - began.mono_ms >= 1_800_000
    assert grown < 8 << 20
    observer = outage.end()
    observer.wait(lambda seen: set(numbers(observer)) == set(range(200)))
    wait_until(lambda: up.uplink.state().queued == 0)
    statuses = [s.payload for s in observer.on("/status") if not s.retained]
    assert statuses[0]["configHash"] == "hash-199", "only the newest status"
    samples = [s.payload for s in observer.on("/tele/m") if s.payload.get("hist")]
    times = sorted(p["samples"][0]["ts"] for p in samples)
    assert len(times) >= 40
    assert times[-1] - times[0] > 1_500_000, "each sample has its own time"
    assert all(p.payload.get("hist") for p in observer.on("/evt/alloc")[:50])


def test_after_an_outage_live_comes_first_and_the_backlog_is_paced(tmp_path: Path) -> None:
    outbox = OutboxConfig(replay_per_second=20.0, replay_jitter_seconds=0.0)
    with (
        Outage(tmp_path) as outage,
        RunningUplink(
            config(outage.proxy.url, events_per_minute=1000, telemetry_seconds=3600.0, outbox=outbox),
            tmp_path,
        ) as up,
    ):
        for n in range(80):
            up.uplink.event("alloc", "Numbered", "", facts={"n": n})
        wait_until(lambda: up.uplink.state().queued >= 80)
        observer = outage.end()
        up.wait_connected()
        up.uplink.event("oom", "Numbered", "live", facts={"n": 1000})
        observer.wait(lambda seen: 1000 in numbers(observer))
        assert len(numbers(observer)) < 60, "live did not wait for the backlog"
        observer.wait(lambda seen: len(numbers(observer)) == 81)
        order = [p["seq"] for s in observer.on("/evt/alloc") for p in [s.payload]]
        assert order == sorted(order)


def test_a_bounded_outbox_keeps_the_newest_and_says_what_it_dropped(tmp_path: Path) -> None:
    outbox = OutboxConfig(max_mib=1, replay_jitter_seconds=0.0, replay_per_second=10000.0)
    with (
        Outage(tmp_path) as outage,
        RunningUplink(config(outage.proxy.url, events_per_minute=1000, outbox=outbox), tmp_path) as up,
    ):
        for batch in range(4):
            for n in range(900):
                up.uplink.event(("alloc", "thermal", "overlimit", "oom")[batch], "Numbered", "x" * 400,
                                facts={"n": batch * 900 + n})  # fmt: skip
            wait_until(lambda: not up.uplink._notes)
        observer = outage.end()
        observer.wait(lambda seen: 3599 in numbers(observer), timeout_s=30)
        wait_until(lambda: up.uplink.state().queued == 0)
        dropped = up.uplink.state().dropped["event"]
        observer.wait(lambda seen: len(numbers(observer)) == 3600 - dropped)
        assert set(range(2700, 3600)) <= set(numbers(observer)), "the critical class is whole"
        status = observer.wait_payload("/status")
        assert status["outbox"]["dropped"]["event"] == dropped


@pytest.mark.parametrize("damage", [b"", b"garbage" * 1000])
def test_a_corrupt_outbox_is_said_and_replaced(broker: Mosquitto, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet" / "outbox.db").write_bytes(damage)
    with Observer(broker.port) as observer, RunningUplink(config(broker.url), tmp_path) as up:
        if damage:
            event = observer.wait_payload("/evt/agent", lambda p: p["type"] == "OutboxTrouble")
            assert "kept as outbox-corrupt-001.db" in event["message"]
        emit(up, 1)
        observer.wait(lambda seen: numbers(observer) == [0])


# -- commands and configuration through the broker ---------------------------------------------------


def command(**fields: Any) -> dict[str, Any]:
    exp = time.time_ns() // 1_000_000 + 3_600_000
    return {"id": "c1", "verb": "snapshot", "node": NODE, "exp": exp, **fields}


@PROTOCOLS
def test_a_command_round_trip(broker: Mosquitto, tmp_path: Path, protocol: str) -> None:
    fleet = config(broker.url, protocol=protocol)
    with Observer(broker.port) as ops, RunningUplink(fleet, tmp_path, actions=Actions()):
        status = ops.wait_payload("/status")
        assert status["commands"] == ["snapshot"]
        more: dict[str, Any] = {}
        if protocol == "5":
            more = {"response_topic": f"{BASE}/res/ops-7", "correlation": b"\x00\xff"}
        ops.publish(f"{BASE}/cmd/snapshot", command(replyTo="ops-7"), **more)
        done = ops.wait_payload("/res/ops-7", lambda p: p["state"] == "succeeded")
        assert done["result"] == {"done": "snapshot"}
        if protocol == "5":
            assert {s.correlation for s in ops.on("/res/ops-7")} == {b"\x00\xff"}


def test_commands_sent_while_offline_arrive_if_they_did_not_expire(broker: Mosquitto, tmp_path: Path) -> None:
    actions = Actions()
    with RunningUplink(config(broker.url), tmp_path, actions=actions) as up:
        up.wait_connected()
    with Observer(broker.port) as ops:
        ops.publish(f"{BASE}/cmd/snapshot", command(id="stale"), expiry_s=1)
        ops.publish(f"{BASE}/cmd/snapshot", command(id="fresh"), expiry_s=60)
        ops.publish(f"{BASE}/cmd/snapshot", command(id="retained"), retain=True)
        time.sleep(2.2)  # mosquitto counts whole seconds
        with RunningUplink(config(broker.url), tmp_path, actions=actions):
            ops.wait_payload("/res/ops", lambda p: (p["cmd"], p["state"]) == ("fresh", "succeeded"))
            ignored = ops.wait_payload("/evt/agent", lambda p: p["type"] == "CommandIgnored")
            assert "retained" in ignored["message"]
    assert len(actions.calls) <= 2, "the retained one may have come live once, while queued; never again"


@pytest.mark.parametrize("qos", [0, 1])
def test_a_flood_of_commands_changes_nothing(broker: Mosquitto, tmp_path: Path, qos: int) -> None:
    actions = Actions()
    fleet = config(broker.url, commands=CommandsConfig(allow=("snapshot",), per_minute=6))
    with (
        Observer(broker.port) as observer,
        Observer(broker.port, "nothing") as flood,
        RunningUplink(fleet, tmp_path, actions=actions) as up,
    ):
        observer.wait_payload("/status")
        for n in range(2000):
            flood._client.publish(f"{BASE}/cmd/snapshot", json.dumps(command(id=f"c{n}")), qos=qos)
        emit(up, 5)
        observer.wait(lambda seen: set(range(5)) <= set(numbers(observer)))
        up.change(config_hash="after-the-flood")
        observer.wait_payload("/status", lambda p: p["configHash"] == "after-the-flood")
        assert len(actions.calls) <= 6
        assert len(observer.on("/res/ops")) < 60


def test_desired_configuration_is_applied_and_answered_in_status(broker: Mosquitto, tmp_path: Path) -> None:
    applied: list[Any] = []

    def apply(value: Any) -> dict[str, str]:
        applied.append(value)
        return {}

    with Observer(broker.port) as ops:
        ops.publish(f"{BASE}/cfg/desired", {"log": {"level": "debug"}, "stateDir": "/"}, retain=True)
        with RunningUplink(config(broker.url), tmp_path, apply_desired=apply):
            status = ops.wait_payload("/status", lambda p: "desired" in p)
            assert status["desired"]["applied"] is False
            assert [r["key"] for r in status["desired"]["refused"]] == ["stateDir"]
        broker.stop()
        with RunningUplink(config(broker.url), tmp_path, apply_desired=apply):
            wait_until(lambda: len(applied) == 2)  # kept on disk while the broker is away
        assert applied == [{"log": {"level": "debug"}}] * 2


# -- the campaign -----------------------------------------------------------------------------------


class Box:
    """The driver process, started again where it was killed."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url, self.directory, self.log = url, directory, directory / "recorded"
        self.first = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> None:
        # Numbers of a killed run that were never noted are skipped: whether they arrive is open.
        self.first += 100_000
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.fleet.driver", self.url, str(self.directory / "state"),
             str(self.log), str(self.first), *arguments],
            env=environment,
        )  # fmt: skip

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(15)

    def limit_file_size(self, size: int | None) -> None:
        """A full disk: no file may grow beyond `size`."""
        assert self.process is not None
        limit = resource.RLIM_INFINITY if size is None else size
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    def recorded(self) -> set[int]:
        return {int(line) for line in self.log.read_text().split()} if self.log.exists() else set()


def test_a_frozen_agent_is_lost_and_back_when_it_thaws(broker: Mosquitto, tmp_path: Path) -> None:
    """SIGSTOP: the broker waits 1.5 keepalives (1 s here) and the will's delay."""
    box = Box(broker.url, tmp_path)
    with Observer(broker.port) as observer:
        box.start("1")
        first = observer.wait_payload("/status")
        assert box.process is not None
        box.process.send_signal(signal.SIGSTOP)
        observer.wait_payload("/status", lambda p: p["state"] == "lost")
        observer.clear()
        box.process.send_signal(signal.SIGCONT)
        again = observer.wait_payload("/status", lambda p: p["state"] == "ready")
        assert again["sess"] == first["sess"]
        assert box.stop() == 0
        observer.wait_payload("/status", lambda p: p["state"] == "offline")


def test_fault_campaign(tmp_path: Path) -> None:
    """Broker killed, frozen, link cut and stalled, agent killed, disk full, one after the other while
    events are recorded: none is lost, duplicates can be told, status is true after every step."""
    with (
        Mosquitto(tmp_path / "broker", log=False) as broker,
        FlakyProxy(broker.port) as proxy,
        # QoS 0: it answers nothing, so a killed broker's last bytes are not lost in a reset.
        Observer(broker.port, qos=0) as observer,
    ):
        box = Box(proxy.url, tmp_path)
        box.start()

        def status_is(state: str, after: int = 0) -> None:
            """Within two keepalives (5 s each here), and said after so many status messages."""

            def newest(seen: list[Any]) -> bool:
                found = [s for s in seen if s.topic.endswith("/status")]
                return len(found) > after and json.loads(found[-1].data)["state"] == state

            observer.wait(newest, timeout_s=10)

        def broker_restart() -> None:
            before = observer.subscriptions
            proxy.refuse(True)
            broker.restart(hard=True)
            observer.wait_subscribed_again(before)  # else what arrives now is missed by the observer
            proxy.refuse(False)

        def freeze() -> None:
            broker.freeze()
            time.sleep(0.8)
            broker.thaw()

        def stall() -> None:
            proxy.stall(True)
            time.sleep(2.5)  # longer than the driver's limit on the age of a PUBACK
            proxy.stall(False)

        def agent_killed() -> None:
            box.kill()
            box.start()

        def disk_full() -> None:
            proxy.refuse(True)
            proxy.cut()
            box.limit_file_size(4096)
            time.sleep(0.8)
            box.limit_file_size(None)
            time.sleep(0.2)
            proxy.refuse(False)

        status_is("ready")
        steps = [proxy.cut, broker_restart, freeze, agent_killed, stall, proxy.half_open, agent_killed,
                 disk_full, broker_restart, proxy.cut, agent_killed]  # fmt: skip
        for step in steps:
            before = len(observer.on("/status"))
            step()
            # A frozen broker that comes back in time is no change; everything else is a new birth.
            status_is("ready", 0 if step is freeze else before)
        assert box.stop() == 0
        status_is("offline")
        box.start()  # delivers what the last run could not
        recorded = box.recorded()
        observer.wait(lambda seen: recorded <= set(numbers(observer)), timeout_s=15)
        assert box.stop() == 0

        deliveries = Counter(
            (p["box"], p["seq"]) for s in observer.seen if "/evt/" in s.topic for p in [s.payload]
        )
        by_number = Counter(numbers(observer))
        assert len(recorded) > 200
        assert not recorded - set(by_number), "events lost"
        assert by_number.most_common(1)[0][1] == 1, "a duplicate that (box, seq) does not show"
        duplicates = sum(deliveries.values()) - len(deliveries)
        assert duplicates < len(deliveries), "duplicates are the exception"
        # What is left is what the last run recorded while it stopped.
        left = Outbox(tmp_path / "state" / "fleet", max_bytes=1 << 20, max_age_ms=1 << 40, now_mono_ms=0)
        assert left.queued < 20
        left.close()
