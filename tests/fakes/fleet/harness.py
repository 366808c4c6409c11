"""An uplink under test: the real one, with a snapshot that the test changes and a clock it may bend."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgeagent.config.schema import CommandsConfig, FleetConfig, OutboxConfig
from edgeagent.fleet.publisher import Uplink
from edgeagent.node.clock import Moment
from edgeagent.snapshot import NodeSnapshot
from tests.fakes.fleet.snapshots import NODE, SITE, snapshot


class FakeClock:
    """Runs `rate` times as fast as the real one; `synced` and `wall_offset_ms` may be set."""

    def __init__(self, *, rate: float = 1.0, synced: bool = True, boot_id: str = "boot-1") -> None:
        self.rate = rate
        self.synced = synced
        self.boot_id = boot_id
        self.wall_offset_ms = 0
        self._began = time.monotonic()
        self._wall_ms = time.time_ns() // 1_000_000

    def now(self) -> Moment:
        mono_ms = int((time.monotonic() - self._began) * 1000 * self.rate) + 60_000
        return Moment(self._wall_ms + mono_ms + self.wall_offset_ms, mono_ms, self.boot_id, self.synced)

    def keep(self) -> None:
        pass


def config(*brokers: str, **changes: Any) -> FleetConfig:
    """Quick where it matters to a test; otherwise the defaults."""
    values: dict[str, Any] = {
        "enabled": True,
        "brokers": brokers,
        "telemetry_seconds": 60.0,
        "will_delay_seconds": 1,
        "keepalive_seconds": 5,
        "outbox": OutboxConfig(replay_per_second=1000.0, replay_jitter_seconds=0.0),
        "commands": CommandsConfig(allow=("snapshot",), per_minute=60),
    }
    return replace(FleetConfig(), **{**values, **changes})


class Actions:
    """CommandActions that note what was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.is_ready = True
        self.hash = "c0ffee123456"
        self.present: Mapping[str, Any] = {"placement": "binpack"}
        self.block: threading.Event | None = None

    def _note(self, *call: Any) -> Mapping[str, Any]:
        self.calls.append(call)
        if self.block is not None:
            self.block.wait(10)
        return {"done": call[0]}

    def snapshot(self) -> Mapping[str, Any]:
        return self._note("snapshot")

    def set_log_level(self, level: str, dry_run: bool) -> Mapping[str, Any]:
        return self._note("set-log-level", level, dry_run)

    def cordon_gpu(self, uuid: str, dry_run: bool) -> Mapping[str, Any]:
        return self._note("cordon-gpu", uuid, dry_run)

    def uncordon_gpu(self, uuid: str, dry_run: bool) -> Mapping[str, Any]:
        return self._note("uncordon-gpu", uuid, dry_run)

    def drain_gpu(self, uuid: str, grace_s: float, dry_run: bool) -> Mapping[str, Any]:
        return self._note("drain-gpu", uuid, grace_s, dry_run)

    def config_hash(self) -> str:
        return self.hash

    def sharing(self) -> Mapping[str, Any]:
        return self.present

    def set_sharing(self, sharing: Mapping[str, Any], dry_run: bool) -> Mapping[str, Any]:
        if not dry_run:
            self.present = dict(sharing)
        return self._note("set-sharing", dict(sharing), dry_run)

    def ready(self) -> bool:
        return self.is_ready

    def restart_agent(self, dry_run: bool) -> Mapping[str, Any]:
        return self._note("restart-agent", dry_run)

    def collect_diagnostics(self, dry_run: bool) -> Mapping[str, Any]:
        return self._note("collect-diagnostics", dry_run)


class RunningUplink:
    """An uplink in its thread; `with` starts and stops it."""

    def __init__(self, fleet: FleetConfig, state_dir: Path, **more: Any) -> None:
        self.snap: NodeSnapshot = snapshot()
        self.clock: FakeClock = more.pop("clock", None) or FakeClock()
        self.stop_event = threading.Event()
        values = {"node": NODE, "site": SITE, "backoff_s": (0.02, 0.2), "rng": random.Random(1), **more}
        self.uplink = Uplink(
            fleet, state_dir=state_dir, clock=self.clock, snapshot=lambda: self.snap, **values
        )
        self._thread = threading.Thread(target=self._run, name="uplink", daemon=True)
        self.error: BaseException | None = None

    def _run(self) -> None:
        ticker = threading.Thread(target=self._tick, name="ticker", daemon=True)
        ticker.start()
        try:
            self.uplink.run(self.stop_event)
        except BaseException as e:
            self.error = e

    def _tick(self) -> None:
        """The uplink sleeps in real time: where the clock runs faster it is woken to look at it."""
        while not self.stop_event.wait(0.02):
            if self.clock.rate != 1.0:
                self.uplink.wake()

    def start(self) -> RunningUplink:
        self._thread.start()
        return self

    def change(self, **changes: Any) -> None:
        self.snap = replace(self.snap, **changes)
        self.uplink.changed()

    def stop(self, timeout_s: float = 10.0) -> float:
        """Stops it; how long that took in seconds."""
        began = time.monotonic()
        self.stop_event.set()
        self.uplink.wake()
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the uplink did not stop"
        if self.error is not None:
            raise self.error
        return time.monotonic() - began

    def wait_connected(self, on: bool = True, timeout_s: float = 10.0) -> None:
        wait_until(lambda: self.uplink.state().connected is on, timeout_s)

    def __enter__(self) -> RunningUplink:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.stop()


def wait_until(condition: Any, timeout_s: float = 10.0) -> Any:
    """Polls: for what has no event to wait for."""
    deadline = time.monotonic() + timeout_s
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s"
        time.sleep(0.01)
