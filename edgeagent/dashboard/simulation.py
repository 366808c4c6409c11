"""A fleet that is not there, played against a broker with the messages of the real agent.

For sizing brokers, dashboards and this page. Many nodes share a few connections, so wills are published
instead of left to the broker; everything else is made by fleet.messages from synthetic NodeSnapshots.
"""

from __future__ import annotations

import math
import random
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.reasoncodes import ReasonCode

from edgeagent import __version__
from edgeagent.errors import FleetError
from edgeagent.fleet import messages
from edgeagent.fleet.client import Broker
from edgeagent.fleet.topics import Topics
from edgeagent.gpus.model import Gpu, GpuKind, GpuReading
from edgeagent.isolation.levels import AxisLevel, Level, Levels
from edgeagent.snapshot import (
    Condition,
    ContainerShare,
    GpuMode,
    GpuState,
    Health,
    HostFacts,
    NodeSnapshot,
    NodeState,
    ResourceState,
    UplinkState,
    WaitingContainer,
)

IN_FLIGHT = 200  # of one connection
CONNECT_S = 15.0
STATUS_EVERY_S = 300

LIMITER = Levels(
    AxisLevel(Level.COOPERATIVE, "limiter", "canary: allocation beyond the limit was refused"),
    AxisLevel(Level.WEIGHTED, "limiter", "launches are paced", "no_hard_compute_limit"),
)
JETSON = Levels(
    AxisLevel(Level.REACTIVE, "watchdog", "nvmap readable", "limiter_not_loaded"),
    AxisLevel(Level.NONE, "none", "", "no_mechanism"),
)


@dataclass(frozen=True, slots=True)
class Model:
    """A kind of box: its GPUs and what it runs."""

    name: str
    gpus: int
    total_mib: int
    reserved_mib: int
    idle_w: float
    power_w: float
    kind: GpuKind = GpuKind.DISCRETE
    machine: str = "x86_64"
    slowdown_c: float = 90.0
    levels: Levels = LIMITER

    @property
    def usable_mib(self) -> int:
        return self.total_mib - self.reserved_mib


MODELS = (
    Model("NVIDIA RTX A2000 12GB", 1, 12282, 300, 9, 70),
    Model("NVIDIA L4", 1, 23034, 450, 16, 72, slowdown_c=85.0),
    Model("NVIDIA RTX 4000 Ada Generation", 2, 20475, 475, 11, 130),
    Model("Tesla T4", 1, 15360, 320, 12, 70, slowdown_c=93.0),
    Model("Orin NX 16GB", 1, 15656, 3131, 6, 25, GpuKind.INTEGRATED, "aarch64", 95.0, JETSON),
    Model("AGX Orin 64GB", 1, 62841, 12568, 12, 60, GpuKind.INTEGRATED, "aarch64", 95.0, JETSON),
)
WORK = (
    ("vision", "line-inspect", 3000), ("vision", "pallet-count", 2000), ("vision", "label-reader", 1500),
    ("speech", "announcer", 2500), ("analytics", "heatmap", 4000), ("training", "nightly-tune", 8000),
)  # fmt: skip


@dataclass(slots=True)
class SimulatedNode:
    """One box. `ill` and `lost` are what the player changes; the rest follows from the seed."""

    number: int
    topics: Topics
    model: Model
    pods: tuple[tuple[str, str, int, int, int], ...]  # namespace, pod, GPU, MiB, cores
    waits: bool
    waits_since_ms: int
    rng: random.Random
    session: str
    boot: str
    started_ms: int
    ill_since_ms: int | None = None
    lost: bool = False
    seq: int = 0

    def uuid(self, gpu: int) -> str:
        return f"GPU-{self.number:08x}-51f1-4000-8000-{gpu:012x}"

    def snapshot(self, now_ms: int) -> NodeSnapshot:
        gpus = tuple(self._gpu(n, now_ms) for n in range(self.model.gpus))
        sick = any(g.health is Health.SICK for g in gpus)
        conditions = [c for g in gpus for c in g.conditions]
        largest = max(g.free_mib for g in gpus)
        waiting = self.waits or sick
        return NodeSnapshot(
            node=self.topics.node,
            site=self.topics.site,
            agent_version=__version__,
            config_hash="51f1a7e0c0de",
            started_ms=self.started_ms,
            taken_ms=now_ms,
            state=NodeState.READY,
            health=Health.SICK if sick else Health.OK,
            reasons=tuple(c.message for c in conditions),
            gpus=gpus,
            containers=tuple(self._container(n, now_ms) for n in range(len(self.pods))),
            waiting=(self._waiting(largest),) if waiting else (),
            resources=(
                ResourceState(
                    "volcano.sh/vgpu-memory",
                    "memory",
                    1,
                    sum(g.usable_mib for g in gpus),
                    sum(g.usable_mib for g in gpus),
                    sum(g.promised_mib for g in gpus),
                    True,
                ),
            ),
            host=HostFacts(
                hostname=self.topics.node,
                machine=self.model.machine,
                os="Debian GNU/Linux 12" if self.model.machine == "x86_64" else "Ubuntu 22.04 (L4T 36.4)",
                kernel="6.1.0",
                k3s_version="v1.33.4+k3s1",
                memory_total_mib=32000,
                memory_available_mib=14000 + self.rng.randrange(4000),
                load_1m=round(1 + self.rng.random(), 2),
                cpu_count=8,
            ),
            uplink=UplinkState(True, True),
            kubelet_connected=True,
        )

    def _gpu(self, n: int, now_ms: int) -> GpuState:
        m = self.model
        mine = [p for p in self.pods if p[2] == n]
        promised = sum(p[3] for p in mine)
        sick = self.ill_since_ms is not None and n == 0
        util, used = self._load(n, now_ms)
        condition = Condition(
            id=f"xidfatal-{self.uuid(0)[4:12]}",
            type="XidFatal",
            severity="critical",
            since_ms=self.ill_since_ms or now_ms,
            message=f"GPU {n} reported XID 79: the GPU has fallen off the bus. Reboot the node; if it "
            "comes again, reseat or replace the card.",
            gpu_uuid=self.uuid(n),
            makes_unhealthy=True,
            facts={"xid": 79},
            pods_hurt=tuple(f"{p[0]}/{p[1]}" for p in mine),
        )
        reading = GpuReading(
            uuid=self.uuid(n),
            taken_mono_s=now_ms / 1000,
            memory_used_mib=used,
            memory_free_mib=m.usable_mib - used,
            util_pct=util,
            temperature_c=round(34 + util * 0.42 + self.rng.random() * 2, 1),
            power_w=round(m.idle_w + (m.power_w - m.idle_w) * util / 100, 1),
            clock_sm_mhz=900.0 + 9 * util,
            throttle_reasons=frozenset(),
        )
        return GpuState(
            gpu=Gpu(
                uuid=self.uuid(n),
                index=n,
                kind=m.kind,
                source="simulated",
                model=m.name,
                memory_total_mib=m.total_mib,
                memory_reserved_mib=m.reserved_mib,
                driver_version="570.86.10" if m.kind is GpuKind.DISCRETE else "36.4.3",
                temperature_slowdown_c=m.slowdown_c,
                power_limit_w=m.power_w,
            ),
            mode=GpuMode.SHARED,
            health=Health.SICK if sick else Health.OK,
            usable_mib=m.usable_mib,
            reserved_mib=m.reserved_mib,
            promised_mib=promised,
            free_mib=0 if sick else m.usable_mib - promised,
            promised_cores_pct=sum(p[4] for p in mine),
            free_cores_pct=0 if sick else max(0, 100 - sum(p[4] for p in mine)),
            reading=reading,
            levels=m.levels,
            conditions=(condition,) if sick else (),
        )

    def _load(self, gpu: int, now_ms: int) -> tuple[float, float]:
        """Utilisation and memory used: a slow wave with some noise."""
        mine = [n for n, p in enumerate(self.pods) if p[2] == gpu]
        if not mine:
            return 0.0, 40.0
        wave = 0.5 + 0.4 * math.sin(now_ms / 600_000 + self.number * 0.7 + gpu)
        util = min(100.0, max(0.0, 100 * wave * min(1.0, 0.25 * len(mine)) + self.rng.gauss(0, 3)))
        return round(util, 1), 40.0 + sum(self._used(n, now_ms) for n in mine)

    def _used(self, pod: int, now_ms: int) -> float:
        share = 0.6 + 0.3 * math.sin(now_ms / 900_000 + pod + self.number)
        return round(self.pods[pod][3] * min(0.98, share), 0)

    def _container(self, n: int, now_ms: int) -> ContainerShare:
        namespace, pod, gpu, mib, cores = self.pods[n]
        return ContainerShare(
            pod_uid=f"{self.number:08x}-0000-4000-8000-{n:012x}",
            container="main",
            gpu_uuid=self.uuid(gpu),
            mode=GpuMode.SHARED,
            namespace=namespace,
            pod=pod,
            memory_mib=mib,
            cores_pct=cores,
            used_mib=self._used(n, now_ms),
            util_pct=round(cores * 0.7, 1),
            levels=self.model.levels,
            since_ms=self.started_ms,
            running=True,
        )

    def _waiting(self, largest_mib: int) -> WaitingContainer:
        return WaitingContainer(
            pod_uid=f"{self.number:08x}-0000-4000-8000-0000000000ff",
            container="main",
            reason=f"needs 9000 MiB; the largest free block is {largest_mib} MiB",
            since_ms=self.ill_since_ms or self.waits_since_ms,
            memory_mib=9000,
            cores_pct=30,
            namespace="training",
            pod=f"nightly-tune-{self.number % 97}",
        )

    # -- messages -------------------------------------------------------------------------------

    def _encode(self, body: messages.Body, now_ms: int, *, boxed: bool = False) -> bytes:
        self.seq += 1
        box = f"sim{self.number:06d}" if boxed else None
        stamp = messages.Stamp(now_ms, now_ms - self.started_ms, self.boot, self.session, messages.SYNCED)
        ident = f"{box or self.session}-{self.seq}"
        return messages.encode(messages.envelope(body, stamp, message_id=ident, seq=self.seq, outbox=box))

    def status(self, now_ms: int) -> tuple[str, bytes, bool]:
        uplink = messages.UplinkFacts(
            commands=("snapshot",), keepalive_s=30, will_delay_s=60, status_every_s=STATUS_EVERY_S,
            telemetry_s=10.0, link="lan",
        )  # fmt: skip
        body = messages.status(self.snapshot(now_ms), uplink=uplink)
        return self.topics.status, self._encode(body, now_ms), True

    def retained(self, now_ms: int) -> Iterator[tuple[str, bytes, bool]]:
        """Status, inventory, allocation and alerts, as at a connect."""
        snap = self.snapshot(now_ms)
        yield self.status(now_ms)
        yield self.topics.inventory, self._encode(messages.inventory(snap), now_ms), True
        yield self.topics.allocation, self._encode(messages.allocation(snap), now_ms), True
        for ident, condition in messages.conditions(snap).items():
            yield self.topics.alert(ident), self._encode(messages.alert(condition, snap), now_ms), True

    def cleared_alert(self) -> tuple[str, bytes, bool]:
        return self.topics.alert(f"xidfatal-{self.uuid(0)[4:12]}"), b"", True

    def telemetry(self, now_ms: int) -> tuple[str, bytes, bool]:
        body = messages.telemetry([messages.sample(self.snapshot(now_ms), now_ms)])
        return self.topics.telemetry, self._encode(body, now_ms, boxed=True), False

    def past(self, now_ms: int, minutes: int) -> tuple[str, bytes, bool]:
        """One sample a minute up to now, in one message, as on a metered link."""
        times = [now_ms - 60_000 * n for n in range(minutes, 0, -1)]
        body = messages.telemetry([messages.sample(self.snapshot(t), t) for t in times])
        return self.topics.telemetry, self._encode(body, now_ms, boxed=True), False

    def xid_event(self, now_ms: int) -> tuple[str, bytes, bool]:
        body = messages.event(
            "xid", "XidFatal", "XID 79: the GPU has fallen off the bus", severity="critical",
            gpu_uuid=self.uuid(0), facts={"xid": 79},
        )  # fmt: skip
        return self.topics.event("xid"), self._encode(body, now_ms, boxed=True), False

    def will(self, now_ms: int) -> tuple[str, bytes, bool]:
        body = messages.will(self.topics.node, self.topics.site, __version__, "51f1a7e0c0de")
        return self.topics.status, self._encode(body, now_ms), True

    def gone(self) -> Iterator[tuple[str, bytes, bool]]:
        """Empties what it retained."""
        for topic in (self.topics.status, self.topics.inventory, self.topics.allocation):
            yield topic, b"", True
        yield self.cleared_alert()


def make_fleet(nodes: int, *, sites: int, trouble: float, seed: int, now_ms: int) -> list[SimulatedNode]:
    """`trouble`: the part of the nodes that is ill, and again as many with a waiting container."""
    fleet = []
    for number in range(nodes):
        rng = random.Random(f"{seed}-{number}")  # noqa: S311 - no secret
        model = MODELS[rng.randrange(len(MODELS))]
        pods: list[tuple[str, str, int, int, int]] = []
        free = [model.usable_mib] * model.gpus
        for n in range(rng.randrange(6)):
            namespace, name, mib = WORK[rng.randrange(len(WORK))]
            gpu = rng.randrange(model.gpus)
            if free[gpu] >= mib + 500:
                free[gpu] -= mib
                pods.append((namespace, f"{name}-{rng.randrange(16**5):05x}", gpu, mib, 10 + 5 * (n % 3)))
        started_ms = now_ms - rng.randrange(3600, 30 * 86400) * 1000
        ill = rng.random() < trouble
        fleet.append(SimulatedNode(
            number=number,
            topics=Topics(f"plant-{number % sites + 1}", f"box-{number:05d}"),
            model=model,
            pods=tuple(pods),
            waits=rng.random() < trouble,
            waits_since_ms=now_ms - rng.randrange(60, 5400) * 1000,
            rng=rng,
            session=f"{rng.randrange(16**12):012x}",
            boot=f"{rng.randrange(16**12):012x}",
            started_ms=started_ms,
            ill_since_ms=now_ms - rng.randrange(60, 7200) * 1000 if ill else None,
            lost=rng.random() < trouble / 2,
        ))  # fmt: skip
    return fleet


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    broker: Broker
    username: str | None = None
    password: str | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    protocol: str = "5"


@dataclass(slots=True)
class Figures:
    sent: int = 0
    acknowledged: int = 0
    refused: int = 0
    samples: int = 0
    late: int = 0  # samples that could not be sent in their second


class _Connection:
    """One client; publishes no more than IN_FLIGHT unacknowledged messages."""

    def __init__(self, settings: BrokerSettings, number: int, figures: Figures) -> None:
        self._figures = figures
        self._room = threading.Semaphore(IN_FLIGHT)
        self._up = threading.Event()
        self._problem = "no answer"
        version = MQTTProtocolVersion.MQTTv5 if settings.protocol == "5" else MQTTProtocolVersion.MQTTv311
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id=f"edgeagent-sim-{random.getrandbits(32):08x}-{number}",
            protocol=version, transport="websockets" if settings.broker.websocket_path else "tcp",
        )  # fmt: skip
        if settings.broker.websocket_path:
            self._client.ws_set_options(path=settings.broker.websocket_path)
        if settings.username is not None:
            self._client.username_pw_set(settings.username, settings.password)
        if settings.broker.tls:
            context = ssl.create_default_context(cafile=settings.ca_file and str(settings.ca_file))
            if settings.cert_file is not None:
                context.load_cert_chain(settings.cert_file, settings.key_file)
            self._client.tls_set_context(context)
        self._client.max_inflight_messages_set(0)
        self._client.suppress_exceptions = True
        self._client.on_connect = self._on_connect
        self._client.on_publish = self._on_publish
        try:
            self._client.connect(settings.broker.host, settings.broker.port, 60)
        except (OSError, ValueError) as e:
            raise FleetError(f"cannot reach {settings.broker.url}: {e}") from e
        self._client.loop_start()
        if not self._up.wait(CONNECT_S):
            self.close()
            raise FleetError(f"cannot connect to {settings.broker.url}: {self._problem}")

    def _on_connect(self, _: Any, __: Any, flags: Any, code: ReasonCode, more: Any) -> None:
        if code.is_failure:
            self._problem = str(code)
        else:
            self._up.set()

    def _on_publish(self, _: Any, __: Any, mid: int, code: ReasonCode, more: Any) -> None:
        self._figures.acknowledged += 1
        self._figures.refused += code.is_failure
        self._room.release()

    def publish(self, message: tuple[str, bytes, bool], stop: threading.Event) -> None:
        while not self._room.acquire(timeout=0.2):
            if stop.is_set():
                return
        topic, data, retain = message
        self._client.publish(topic, data, qos=1, retain=retain)
        self._figures.sent += 1

    def drain(self, timeout_s: float) -> None:
        """Until everything is acknowledged."""
        deadline_s = time.monotonic() + timeout_s
        for _ in range(IN_FLIGHT):
            if not self._room.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
                return
        self._room.release(IN_FLIGHT)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


class Player:
    """Plays `fleet` over `connections`. `rate`: samples a second over all nodes."""

    def __init__(
        self, fleet: list[SimulatedNode], settings: BrokerSettings, *, rate: float, connections: int = 4
    ) -> None:
        self.fleet = fleet
        self.figures = Figures()
        self._rate = rate
        self._rng = random.Random(7)  # noqa: S311
        self._connections = [_Connection(settings, n, self.figures) for n in range(connections)]

    def _send(self, node: SimulatedNode, message: tuple[str, bytes, bool], stop: threading.Event) -> None:
        self._connections[node.number % len(self._connections)].publish(message, stop)

    def birth(self, stop: threading.Event) -> None:
        """Everything retained, once."""
        for node in self.fleet:
            if stop.is_set():
                return
            for message in node.retained(_now_ms()):
                self._send(node, message, stop)
            if node.lost:
                self._send(node, node.will(_now_ms()), stop)
        for connection in self._connections:
            connection.drain(60)

    def past(self, stop: threading.Event, minutes: int) -> None:
        """What a page that has been open for so long would have seen."""
        for node in self.fleet:
            if not stop.is_set():
                self._send(node, node.past(_now_ms(), minutes), stop)

    def play(self, stop: threading.Event, for_s: float | None, *, changes: bool = True) -> None:
        """Samples in turn, status every STATUS_EVERY_S, and (`changes`) now and then a node that falls
        ill, recovers, is lost or comes back."""
        began_s = time.monotonic()
        alive = [n for n in self.fleet if not n.lost]
        turn, status_turn, next_change_s = 0, 0.0, 5.0
        statuses_a_second = len(self.fleet) / STATUS_EVERY_S
        while not stop.is_set():
            now_s = time.monotonic() - began_s
            if for_s is not None and now_s >= for_s:
                return
            due = int(now_s * self._rate)
            if due - turn > self._rate:
                self.figures.late += int(due - turn - self._rate)
                turn = int(due - self._rate)
            while turn < due and alive:
                node = alive[turn % len(alive)]
                self._send(node, node.telemetry(_now_ms()), stop)
                self.figures.samples += 1
                turn += 1
            while status_turn < now_s * statuses_a_second and alive:
                node = alive[int(status_turn) % len(alive)]
                self._send(node, node.status(_now_ms()), stop)
                status_turn += 1
            if changes and now_s >= next_change_s:
                next_change_s = now_s + self._rng.uniform(3, 12)
                self._change(stop)
                alive = [n for n in self.fleet if not n.lost]
            stop.wait(0.05)

    def _change(self, stop: threading.Event) -> None:
        node = self.fleet[self._rng.randrange(len(self.fleet))]
        now_ms = _now_ms()
        if node.lost:
            node.lost = False
        elif node.ill_since_ms is not None:
            node.ill_since_ms = None
            self._send(node, node.cleared_alert(), stop)
        elif self._rng.random() < 0.3:
            node.lost = True
            self._send(node, node.will(now_ms), stop)
            return
        else:
            node.ill_since_ms = now_ms
            self._send(node, node.xid_event(now_ms), stop)
        for message in node.retained(now_ms):
            self._send(node, message, stop)

    def clear(self, stop: threading.Event) -> None:
        """Takes everything retained away again."""
        for node in self.fleet:
            for message in node.gone():
                self._send(node, message, stop)
        for connection in self._connections:
            connection.drain(60)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def with_password(settings: BrokerSettings, password_file: Path | None) -> BrokerSettings:
    if password_file is None:
        return settings
    try:
        return replace(settings, password=password_file.read_text().rstrip("\r\n"))
    except (OSError, UnicodeDecodeError) as e:
        raise FleetError(f"cannot read the password file {password_file}: {e}") from e


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
