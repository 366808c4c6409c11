"""The shipped broker configuration starts, and lets everybody do what he may and nothing more. The
shipped Telegraf and Grafana files name only what the messages have."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from edgeagent.config.schema import TlsConfig
from edgeagent.fleet import certs, messages
from edgeagent.fleet.topics import EVENT_KINDS
from tests.fakes.fleet.harness import Actions, RunningUplink, config
from tests.fakes.fleet.snapshots import NODE, SITE, T0_MS, snapshot
from tests.fakes.mosquitto import Mosquitto, Observer, available
from tests.fakes.mosquitto.broker import free_port

CONFIGS = Path(__file__).parents[2] / "configs"
BASE = f"gpufleet/v1/{SITE}/{NODE}"
NEEDS_BROKER = pytest.mark.skipif(
    any(not p for p in (available(), shutil.which("openssl"), shutil.which("mosquitto_passwd"))),
    reason="mosquitto, mosquitto_passwd and openssl are needed",
)


@dataclass(frozen=True)
class Fleet:
    broker: Mosquitto
    tls_port: int
    ws_port: int
    pki: Path


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The shipped files as they are, but for directory and ports."""
    directory = tmp_path_factory.mktemp("shipped")
    certs.make_broker(directory, ["localhost"])
    for name in (NODE, "box-2", "dash", "ops"):
        certs.make_device(directory, name)
    shutil.copy(CONFIGS / "mosquitto" / "acl", directory / "acl")
    (directory / "passwords").write_text("dash:look\nops:act\n")
    subprocess.run(["mosquitto_passwd", "-U", str(directory / "passwords")], check=True)
    tls_port, ws_port = free_port(), free_port()
    text = (CONFIGS / "mosquitto" / "edgeagent.conf").read_text()
    assert "listener 8883" in text
    assert "listener 9001" in text
    text = (
        text.replace("/etc/mosquitto/edgeagent/", f"{directory}/")
        .replace("listener 8883", f"listener {tls_port} 127.0.0.1")
        .replace("listener 9001", f"listener {ws_port} 127.0.0.1")
        .replace("per_listener_settings false", "")
    )
    text += f"\npersistence_location {directory}/\n"
    with Mosquitto(directory / "broker", text, anonymous=False) as broker:
        yield Fleet(broker, tls_port, ws_port, directory)


class Who:
    """A client with a certificate; `may_publish` asks the broker."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._acks: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._connected = threading.Event()
        self.client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id=f"test-{name}", protocol=MQTTProtocolVersion.MQTTv5
        )
        context = ssl.create_default_context(cafile=str(fleet.pki / "ca.crt"))
        context.load_cert_chain(str(fleet.pki / f"{name}.crt"), str(fleet.pki / f"{name}.key"))
        self.client.tls_set_context(context)
        self.client.on_publish = self._on_publish
        self.client.on_connect = lambda *_: self._connected.set()
        self.client.connect("localhost", fleet.tls_port)
        self.client.loop_start()
        assert self._connected.wait(10)

    def _on_publish(self, _client: Any, _data: Any, mid: int, code: Any, _properties: Any) -> None:
        with self._changed:
            self._acks[mid] = code
            self._changed.notify_all()

    def may_publish(self, topic: str) -> bool:
        mid = self.client.publish(topic, "{}", qos=1).mid
        with self._changed:
            assert self._changed.wait_for(lambda: mid in self._acks, 10)
            return not self._acks[mid].is_failure

    def __enter__(self) -> Who:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.disconnect()
        self.client.loop_stop()


OWN = ["status", "inv", "alloc", "alert/x", "tele/m", "tele/z", "res/ops", *(f"evt/{k}" for k in EVENT_KINDS)]


@NEEDS_BROKER
@pytest.mark.parametrize(
    ("who", "allowed", "denied"),
    [
        (
            NODE,
            [f"{BASE}/{t}" for t in OWN],
            [f"{BASE}/cmd/snapshot", f"{BASE}/cfg/desired", f"gpufleet/v1/{SITE}/box-2/status",
             f"gpufleet/v1/{SITE}/box-2/cmd/snapshot", "elsewhere"],
        ),
        ("dash", [], [f"{BASE}/status", f"{BASE}/cmd/snapshot", f"{BASE}/cfg/desired"]),
        ("ops", [f"{BASE}/cmd/snapshot", f"{BASE}/cfg/desired"], [f"{BASE}/status", f"{BASE}/evt/xid"]),
    ],
    ids=["device", "dash", "ops"],
)  # fmt: skip
def test_who_may_write_what(fleet: Fleet, who: str, allowed: list[str], denied: list[str]) -> None:
    with Who(fleet, who) as client:
        assert [t for t in allowed if not client.may_publish(t)] == []
        assert [t for t in denied if client.may_publish(t)] == []


@NEEDS_BROKER
def test_a_node_and_its_operators_work_with_it(fleet: Fleet, tmp_path: Path) -> None:
    tls = TlsConfig(str(fleet.pki / "ca.crt"), str(fleet.pki / f"{NODE}.crt"), str(fleet.pki / f"{NODE}.key"))
    settings = config(f"mqtts://localhost:{fleet.tls_port}", tls=tls)

    def as_user(name: str) -> Any:
        def set_up(client: paho.Client) -> None:
            context = ssl.create_default_context(cafile=str(fleet.pki / "ca.crt"))
            context.check_hostname = False  # the observer connects to 127.0.0.1
            context.load_cert_chain(str(fleet.pki / f"{name}.crt"), str(fleet.pki / f"{name}.key"))
            client.tls_set_context(context)

        return set_up

    with (
        Observer(fleet.tls_port, tls=as_user("ops")) as ops,
        RunningUplink(settings, tmp_path, actions=Actions()) as up,
    ):
        ops.wait_payload("/status", lambda p: p["state"] == "ready")
        ops.publish(
            f"{BASE}/cmd/snapshot",
            {"id": "c1", "verb": "snapshot", "node": NODE, "exp": up.clock.now().wall_ms + 60_000},
        )
        ops.wait_payload("/res/ops", lambda p: p["state"] == "succeeded")
        assert up.uplink.state().dropped == {}
        assert up.uplink.state().problem is None


# -- files that no test can run here: they must at least name what there is -----------------------


def paths_of(value: Any, path: str = "") -> set[str]:
    if isinstance(value, dict):
        return set().union({path}, *(paths_of(v, f"{path}/{k}" if path else k) for k, v in value.items()))
    if isinstance(value, list):
        return set().union({path}, *(paths_of(v, f"{path}/*") for v in value))
    return {path}


def test_telegraf_selects_what_the_messages_have() -> None:
    text = (CONFIGS / "telegraf" / "edgeagent.conf").read_text()
    sample = messages.telemetry([messages.sample(snapshot(), T0_MS)])
    there = paths_of(sample) | paths_of(
        messages.status(snapshot(), outbox=messages.OutboxFigures("x"), uplink=messages.UplinkFacts())
    )
    for selection in re.findall(r'metric_selection = "/(\S+)"', text):
        assert selection in there
    for path in re.findall(r"(?:number|count)\(([a-zA-Z/*]+)", text):
        assert path in there or path.rstrip("/*") in there, path
    for topic in re.findall(r'topics = \["gpufleet/v1/\+/\+/([^"]+)"', text):
        assert topic in ("tele/m", "status")


def test_grafana_asks_for_what_telegraf_writes() -> None:
    dashboard = json.loads((CONFIGS / "grafana" / "dashboards" / "fleet.json").read_text())
    telegraf = (CONFIGS / "telegraf" / "edgeagent.conf").read_text()
    names = re.findall(r"edgeagent_(node|gpu|pod)_(\w+)", json.dumps(dashboard))
    assert names
    gpu = messages.sample(snapshot(), T0_MS)["gpus"][0]
    known = {
        "node": set(re.findall(r"^\s+(\w+) = \"(?:number|count)", telegraf, re.MULTILINE)),
        "gpu": set(gpu),
        "pod": set(gpu["pods"][0]),
    }
    assert [n for n in names if n[1] not in known[n[0]]] == []
    ids = [p["id"] for p in dashboard["panels"]]
    assert len(ids) == len(set(ids))
