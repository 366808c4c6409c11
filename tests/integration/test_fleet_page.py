"""The page server against a real broker, over HTTP: loading, streaming, access, commands, shortfalls."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeagent.dashboard import simulation
from edgeagent.dashboard.server import MAX_STREAMS
from edgeagent.dashboard.store import ROW_FIELDS, Expected
from edgeagent.fleet.client import Broker
from tests.fakes.mosquitto import FlakyProxy, Mosquitto, Observer, available
from tests.fakes.mosquitto.broker import free_port
from tests.fakes.page import SECRET, PageServer

pytestmark = pytest.mark.skipif(available() is None, reason="mosquitto is not installed")
CHECKOUT = Path(__file__).resolve().parents[2]


def fleet(nodes: int, sites: int = 3) -> list[simulation.SimulatedNode]:
    return simulation.make_fleet(nodes, sites=sites, trouble=0.0, seed=1, now_ms=int(time.time() * 1000))


def publish(observer: Observer, *messages: tuple[str, bytes, bool]) -> None:
    for topic, data, retain in messages:
        observer.publish(topic, data, retain=retain)


def born(observer: Observer, nodes: list[simulation.SimulatedNode]) -> list[simulation.SimulatedNode]:
    for node in nodes:
        publish(observer, *node.retained(now_ms()))
    return nodes


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def key(node: simulation.SimulatedNode) -> str:
    return f"{node.topics.site}/{node.topics.node}"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    with Mosquitto(tmp_path / "mq") as b:
        yield b


@pytest.fixture
def observer(broker: Mosquitto) -> Iterator[Observer]:
    with Observer(broker.port, "nothing") as o:
        yield o


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_what_is_retained_and_what_is_said_later_is_on_the_page(
    broker: Mosquitto, observer: Observer, protocol: str
) -> None:
    nodes = born(observer, fleet(5))
    with PageServer(broker.url, protocol=protocol) as server:
        server.wait_loaded(5)
        node = nodes[2]
        publish(observer, node.telemetry(now_ms()), node.xid_event(now_ms()))
        known = server.page.store.nodes[key(node)]
        server.wait(lambda _: known.temperature_c is not None and known.events)
        publish(observer, node.will(now_ms()))
        server.wait(lambda _: known.condition == "lost")
        assert server.page.store.rejected == 0
        assert server.page.store.incomplete() == []


def test_the_stream_begins_with_everything_and_goes_on_with_changes(
    broker: Mosquitto, observer: Observer
) -> None:
    nodes = born(observer, fleet(4))
    with PageServer(broker.url) as server:
        server.wait_loaded(4)
        with server.events() as events:
            _, hello, _ = next(events)
            assert hello["fields"] == list(ROW_FIELDS)
            rows, ident = next((value, ident) for name, value, ident in events if name == "rows")
            assert (rows["reset"], len(rows["rows"])) == (True, 4)
            publish(observer, nodes[1].telemetry(now_ms()))
            changed = next(value for name, value, _ in events if name == "rows")
            assert [r[0] for r in changed["rows"]] == [key(nodes[1])]
        publish(observer, nodes[3].telemetry(now_ms()))
        server.wait(lambda store: store.nodes[key(nodes[3])].sample_ms)
        with server.events(**{"last-event-id": ident or ""}) as events:
            again = next(value for name, value, _ in events if name == "rows")
            assert (again["reset"], {r[0] for r in again["rows"]}) == (False, {key(nodes[1]), key(nodes[3])})


def test_an_opened_node_streams_its_detail_and_its_telemetry(broker: Mosquitto, observer: Observer) -> None:
    """In a large fleet telemetry is followed only for nodes that somebody looks at."""
    nodes = born(observer, fleet(3))
    with PageServer(broker.url, telemetry="opened") as server, server.events() as events:
        server.wait_loaded(3)
        client = next(events)[1]["client"]
        status, _, _ = server.request("POST", "/api/watch", {"client": client, "node": key(nodes[0])})
        assert status == 200
        detail = next(value for name, value, _ in events if name == "node")
        assert (detail["key"], detail["series"]) == (key(nodes[0]), {})
        uuid = nodes[0].uuid(0)
        for _ in range(100):  # until the subscription stands
            publish(observer, nodes[0].telemetry(now_ms()), nodes[1].telemetry(now_ms()))
            if server.page.store.nodes[key(nodes[0])].sample_ms:
                break
        detail = next(value for name, value, _ in events if name == "node" and value["series"])
        assert detail["series"][uuid]["temperatureC"][0] == detail["gpus"][0]["reading"]["temperatureC"]
        assert server.page.store.nodes[key(nodes[1])].sample_ms == 0
        assert server.request("POST", "/api/watch", {"client": client, "node": None})[0] == 200
        assert server.request("POST", "/api/watch", {"client": "nobody", "node": None})[0] == 404


# -- the link ---------------------------------------------------------------------------------------


def test_a_broken_link_is_shown_and_heals(broker: Mosquitto, observer: Observer) -> None:
    born(observer, fleet(3))
    with FlakyProxy(broker.port) as proxy, PageServer(proxy.url) as server, server.events() as events:
        server.wait_loaded(3)
        assert server.request("GET", "/healthz", secret=None)[0] == 200
        proxy.refuse(True)
        proxy.cut()
        down = next(v for name, v, _ in events if name == "link" and not v["connected"])
        assert down["problem"]
        assert server.request("GET", "/healthz", secret=None)[0] == 503
        proxy.refuse(False)
        next(v for name, v, _ in events if name == "link" and v["connected"] and not v["loading"])
        assert {n.condition for n in server.page.store.nodes.values()} == {"ready"}


def test_a_broker_that_truncates_is_found_out_and_worked_around(tmp_path: Path) -> None:
    """Over WebSockets mosquitto cuts off at its queue limit without a word: asked site by site the rest comes."""
    port = free_port()
    extra = f"max_queued_messages 100\nsys_interval 1\nlistener {port} 127.0.0.1\nprotocol websockets\n"
    with Mosquitto(tmp_path / "mq", extra) as broker:
        player = simulation.Player(
            nodes := fleet(300, sites=6),
            simulation.BrokerSettings(Broker.parse(broker.url)),
            rate=1,
            connections=1,
        )
        player.birth(threading.Event())
        player.close()
        expected = Expected(301, frozenset({*map(key, nodes), "plant-1/box-301"}))
        with PageServer(f"ws://127.0.0.1:{port}/mqtt", expected=expected) as server:
            server.wait(lambda store: store.found_by_site and not store.incomplete(), 30)
            said = " ".join(server.page.store.shortfalls())
            assert "the broker truncates what it retains" in said
            assert len(server.page.store.nodes) == 300, "asked by site, every node came"
            assert "1 of 301 expected nodes are not at the broker: plant-1/box-301" in said
            server.wait(lambda store: "the broker says that it dropped" in " ".join(store.shortfalls()))


def test_a_fleet_that_comes_whole_raises_no_suspicion(broker: Mosquitto, observer: Observer) -> None:
    born(observer, fleet(80))
    with PageServer(broker.url, expected=Expected(80)) as server:
        server.wait_loaded(80)
        assert server.page.store.shortfalls() == []


# -- access -----------------------------------------------------------------------------------------


@pytest.fixture
def server(broker: Mosquitto) -> Iterator[PageServer]:
    with PageServer(broker.url) as s:
        yield s


def test_nothing_is_told_to_who_is_not_logged_in(server: PageServer) -> None:
    for path in ("/events", "/api/session"):
        assert server.request("GET", path, secret=None)[0] == 401
        assert server.request("GET", path, secret="wrong")[0] == 401
    for path in ("/api/watch", "/api/command", "/api/logout"):
        assert server.request("POST", path, {}, secret=None, origin=server.url)[0] == 401
    status, headers, body = server.request("GET", "/", secret=None)
    assert (status, b"Fleet" in body) == (200, True)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for name in ("app.js", "style.css", "grid.js"):
        assert server.request("GET", f"/static/{name}", secret=None)[0] == 200
    for name in ("../server.py", "%2e%2e/server.py", "nothing.js"):
        assert server.request("GET", f"/static/{name}", secret=None)[0] == 404


def test_a_browser_logs_in_and_out(server: PageServer) -> None:
    login = {"origin": server.url}
    status, headers, _ = server.request("POST", "/api/login", {"secret": SECRET}, secret=None, **login)
    cookie = headers["set-cookie"]
    assert status == 200
    assert all(flag in cookie.lower() for flag in ("httponly", "samesite=strict", "path=/"))
    session = cookie.partition(";")[0]
    assert server.request("GET", "/api/session", secret=None, cookie=session)[0] == 200
    assert server.request("POST", "/api/logout", {}, secret=None, cookie=session, **login)[0] == 200
    assert server.request("GET", "/api/session", secret=None, cookie=session)[0] == 401


def test_guessing_is_slowed_down(server: PageServer) -> None:
    tries = [
        server.request("POST", "/api/login", {"secret": f"guess {n}"}, secret=None, origin=server.url)[0]
        for n in range(7)
    ]
    assert tries == [403] * 5 + [429] * 2


REFUSED: dict[str, tuple[dict[str, Any], int]] = {
    "another host name": ({"host": "evil.example.com"}, 421),
    "another origin": ({"origin": "http://evil.example.com"}, 403),
    "a form": ({"content_type": "application/x-www-form-urlencoded"}, 415),
    "a cookie without an origin": ({"secret": None, "cookie": "edgeagent_fleet=x"}, 403),
}


@pytest.mark.parametrize(("changes", "status"), REFUSED.values(), ids=REFUSED.keys())
def test_requests_from_elsewhere_are_refused(
    server: PageServer, changes: dict[str, Any], status: int
) -> None:
    """DNS rebinding and cross-site requests."""
    assert server.request("POST", "/api/command", {"node": "a/b"}, **changes)[0] == status


def test_odd_requests_hurt_nobody(server: PageServer) -> None:
    assert server.request("POST", "/api/command", b"x" * 20_000)[0] == 413
    for body in (b"", b"[", b"[1]", b'{"client": 7, "node": {}}', b"[" * 10_000, b'"\xff"'):
        assert server.request("POST", "/api/watch", body)[0] == 404
        assert server.request("POST", "/api/command", body)[0] == 404
    assert server.request("PUT", "/api/watch", {})[0] == 405
    with server.events("/events?since=" + "9" * 400) as events:
        assert next(events)[0] == "hello"
    assert server.request("GET", "/healthz")[0] in (200, 503)


def test_there_are_not_endlessly_many_streams(server: PageServer) -> None:
    open_streams = []
    try:
        for _ in range(MAX_STREAMS):
            stream = server.events()
            next(stream.__enter__())
            open_streams.append(stream)
        assert server.request("GET", "/events")[0] == 503
    finally:
        for stream in open_streams:
            stream.__exit__(None, None, None)


# -- commands ---------------------------------------------------------------------------------------


def test_a_command_goes_out_and_its_answer_comes_back(broker: Mosquitto, observer: Observer) -> None:
    node = born(observer, fleet(1))[0]
    with PageServer(broker.url) as server, Observer(broker.port, f"{node.topics.base}/cmd/#") as ear:
        server.wait_loaded(1)
        status, _, body = server.request(
            "POST", "/api/command", {"node": key(node), "verb": "snapshot", "args": {}}
        )
        assert status == 200
        command = ear.wait_payload("/cmd/snapshot")
        assert command["id"] == json.loads(body)["id"]
        answer = {"v": 1, "id": "a", "ts": now_ms(), "mono": 1, "boot": "b", "sess": node.session, "seq": 1,
                  "clk": "synced", "cmd": command["id"], "verb": "snapshot", "state": "succeeded"}  # fmt: skip
        observer.publish(f"{node.topics.base}/res/{command['replyTo']}", answer)
        commands = server.page.store.nodes[key(node)].commands
        server.wait(lambda _: commands and commands[0].state == "succeeded")


def test_a_command_nobody_listens_to_or_that_is_not_allowed(broker: Mosquitto, observer: Observer) -> None:
    node = born(observer, fleet(1))[0]
    with PageServer(broker.url) as server:
        server.wait_loaded(1)
        body = {"node": key(node), "verb": "snapshot"}
        assert server.request("POST", "/api/command", body)[0] == 200
        commands = server.page.store.nodes[key(node)].commands
        server.wait(lambda _: commands and commands[0].state == "refused")
        assert "does not listen" in (commands[0].message or "")  # type: ignore[index]
        status, _, answer = server.request("POST", "/api/command", {**body, "verb": "restart-agent"})
        assert (status, "does not allow" in json.loads(answer)["error"]) == (400, True)


def test_a_read_only_page_sends_nothing(broker: Mosquitto, observer: Observer) -> None:
    node = born(observer, fleet(1))[0]
    with PageServer(broker.url, read_only=True) as server:
        server.wait_loaded(1)
        assert server.request("POST", "/api/command", {"node": key(node), "verb": "snapshot"})[0] == 403


# -- the command line --------------------------------------------------------------------------------


def edgeagent(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "edgeagent", *arguments]


def test_the_command_serves_and_ends_on_sigterm(broker: Mosquitto) -> None:
    port = free_port()
    process = subprocess.Popen(
        edgeagent("fleet", "--broker", broker.url, "--listen", f"127.0.0.1:{port}"),
        cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        token = line.rstrip().partition("#token=")[2]
        assert len(token) > 20, "without a token file a new one is made and told"
        deadline = time.monotonic() + 10
        while True:
            try:
                request = urllib.request.Request(
                    f"http://127.0.0.1:{port}/api/session", headers={"authorization": f"Bearer {token}"}
                )
                with urllib.request.urlopen(request, timeout=5) as answer:
                    assert answer.status == 200
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert token not in process.stderr.read()  # type: ignore[union-attr]


BAD_ARGUMENTS = {
    "in the clear for others": (["--listen", "0.0.0.0:8080"], "cannot serve 0.0.0.0 in the clear"),
    "no port": (["--listen", "localhost"], "HOST:PORT is needed"),
    "a short token": (["--token-file", "SHORT"], "shorter than 12"),
    "no token file": (["--token-file", "/nonexistent"], "cannot read the token file"),
    "half of TLS": (["--tls-cert", "x.pem"], "belong together"),
    "a broker that is none": (["--broker", "http://x"], "cannot use broker URL"),
    "no list": (["--expect", "/nonexistent"], "cannot read the list"),
}


@pytest.mark.parametrize(("arguments", "says"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_what_cannot_work_is_said_at_once(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from edgeagent.cli.main import main

    (tmp_path / "short").write_text("secret\n")
    arguments = [str(tmp_path / "short") if a == "SHORT" else a for a in arguments]
    assert main(["fleet", "--broker", "mqtt://127.0.0.1:1", *arguments]) == 1
    assert says in capsys.readouterr().err


def test_a_simulated_fleet_is_played_and_cleared(broker: Mosquitto) -> None:
    with Observer(broker.port) as ear:
        done = subprocess.run(
            edgeagent("fleet-tools", "simulate", "--broker", broker.url, "--nodes", "12", "--rate", "20",
                      "--trouble", "0.3", "--for", "1.5", "--sites", "2", "--past", "3"),
            cwd=CHECKOUT, capture_output=True, text=True, timeout=40, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "refused=0" in done.stdout
        assert len({s.topic for s in ear.on("/status")}) == 12
        for seen in [s for s in ear.seen if s.data]:
            assert seen.payload  # checked against its schema
    with Observer(broker.port) as later:
        later.publish("gpufleet/end", b"x")
        later.wait(lambda seen: seen)
        assert [s.topic for s in later.seen] == ["gpufleet/end"], "nothing is left at the broker"


def test_certificates_for_a_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from edgeagent.cli.main import main

    command = [
        "fleet-tools",
        "gen-certs",
        str(tmp_path / "pki"),
        "--broker",
        "localhost",
        "--device",
        "box-1",
    ]
    assert main(command) == 0
    names = sorted(p.name for p in (tmp_path / "pki").iterdir())
    assert names == ["box-1.crt", "box-1.key", "broker.crt", "broker.key", "ca.crt", "ca.key"]
    assert str(tmp_path / "pki/box-1.crt") in capsys.readouterr().out
