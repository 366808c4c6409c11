"""The uplink against a real broker: birth, will, offline, alerts, events, telemetry."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeagent.snapshot import NodeState
from tests.fakes.fleet.harness import FakeClock, RunningUplink, config, wait_until
from tests.fakes.fleet.snapshots import NODE, SITE, condition, gpu_state, snapshot
from tests.fakes.mosquitto import FlakyProxy, Mosquitto, Observer, available

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
