"""Measures the uplink: outbox inserts, drain rate, memory with a long queue, bytes a day.

    python -m tests.bench.fleet_bench

Prints JSON. Bytes are measured at the IP layer: broker and node talk over the loopback interface of
a network namespace of their own, whose counters are read (they include 14 bytes of Ethernet header
a packet, which are taken off). Where no namespace may be made (no root) they are left out.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from edgeagent.config.schema import FleetConfig, OutboxConfig, TlsConfig
from edgeagent.fleet import certs, estimate
from edgeagent.fleet.outbox import MessageClass, Outbox
from tests.fakes.fleet.harness import FakeClock, RunningUplink, config, wait_until
from tests.fakes.fleet.snapshots import one_gpu_four_pods
from tests.fakes.mosquitto import Mosquitto, available

BODY = b'{"kind":"alloc","type":"Bench","severity":"info","message":"' + b"x" * 300 + b'"}'
ETHERNET_BYTES = 14


def put(box: Outbox, n: int, cls: MessageClass) -> None:
    box.put(
        cls, "gpufleet/v1/plant-7/box-1/evt/alloc", BODY, wall_ms=n, mono_ms=n, boot="b", session="s",
        clock="synced",
    )  # fmt: skip


def open_box(directory: Path) -> Outbox:
    return Outbox(directory, max_bytes=256 << 20, max_age_ms=1 << 50, now_mono_ms=0)


def inserts(directory: Path, cls: MessageClass, count: int) -> dict[str, float]:
    box = open_box(directory)
    times = []
    for n in range(count):
        began = time.perf_counter_ns()
        put(box, n, cls)
        times.append((time.perf_counter_ns() - began) / 1e6)
    box.close()
    times.sort()
    return {
        "p50_ms": round(statistics.median(times), 4),
        "p99_ms": round(times[int(count * 0.99)], 4),
        "max_ms": round(times[-1], 3),
    }


def queue_memory(directory: Path, count: int) -> dict[str, float]:
    """RSS that `count` queued messages cost, in a process of its own."""
    code = (
        "import sys, json, psutil; from pathlib import Path; from tests.bench import fleet_bench as b;"
        "p = psutil.Process(); d = Path(sys.argv[1]); box = b.open_box(d);"
        "b.put(box, 0, b.MessageClass.EVENT); before = p.memory_info().rss;\n"
        "for n in range(int(sys.argv[2])): b.put(box, n, b.MessageClass.EVENT)\n"
        "box.release(); box.mark_backlog(); box.take_backlog(16);"
        "print(json.dumps({'mib': (p.memory_info().rss - before) / 2**20, 'queued': box.queued}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory), str(count)], capture_output=True, text=True, check=True
    )
    return {k: round(v, 2) for k, v in json.loads(done.stdout).items()}


def drain(directory: Path, count: int) -> dict[str, float]:
    box = open_box(directory / "state" / "fleet")
    for n in range(count):
        put(box, n, MessageClass.EVENT)
    box.close()
    with Mosquitto(directory / "broker", log=False) as broker:
        fleet = config(
            broker.url, telemetry_seconds=3600.0,
            outbox=OutboxConfig(max_mib=256, replay_per_second=10000.0, replay_jitter_seconds=0.0),
        )  # fmt: skip
        process = psutil.Process()
        cpu = process.cpu_times()
        began = time.monotonic()
        with RunningUplink(fleet, directory / "state") as up:
            wait_until(lambda: up.uplink.state().connected, 20)
            wait_until(lambda: up.uplink.state().queued == 0, 300)
            took_s = time.monotonic() - began
        after = process.cpu_times()
    used_s = after.user + after.system - cpu.user - cpu.system
    return {
        "messages_per_s": round(count / took_s),
        "cpu_us_per_message": round(used_s / count * 1e6),
    }


def interface_bytes() -> tuple[int, int]:
    """(bytes, packets) that lo has sent: on loopback each packet is counted once there."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "lo":
            fields = [int(f) for f in rest.split()]
            return fields[8], fields[9]
    return 0, 0


def measured_day(directory: Path, fleet: FleetConfig, clock_s: float, rate: float) -> dict[str, Any]:
    """Bytes that `clock_s` seconds of an uplink cost (clock `rate` times as fast), as a day's."""
    clock = FakeClock(rate=rate)
    up = RunningUplink(fleet, directory / "state", clock=clock)
    n = 0

    def moving() -> Any:
        nonlocal n
        n += 1
        return one_gpu_four_pods(n)

    up.uplink._snapshot = moving
    with up:
        up.wait_connected(timeout_s=20)
        wait_until(lambda: up.uplink.state().queued == 0)
        began, (bytes_0, packets_0) = clock.now(), interface_bytes()
        while clock.now().mono_ms - began.mono_ms < clock_s * 1000:
            time.sleep(0.02)
        (bytes_1, packets_1), ended = interface_bytes(), clock.now()
    day = 86_400_000 / (ended.mono_ms - began.mono_ms)
    ip_bytes = bytes_1 - bytes_0 - ETHERNET_BYTES * (packets_1 - packets_0)
    return {"bytes_per_day": round(ip_bytes * day), "packets_per_day": round((packets_1 - packets_0) * day)}


def bytes_per_day(which: str, directory: Path) -> dict[str, Any]:
    """In a namespace of its own (see main): `which` is "lan" or "metered"."""
    pki = directory / "pki"
    certs.make_broker(pki, ["localhost"])
    certs.make_device(pki, "box-1")
    port = 8883
    extra = (
        f"listener {port} 127.0.0.1\ncafile {pki}/ca.crt\ncertfile {pki}/broker.crt\n"
        f"keyfile {pki}/broker.key\nrequire_certificate true\n"
    )
    tls = TlsConfig(str(pki / "ca.crt"), str(pki / "box-1.crt"), str(pki / "box-1.key"))
    # The defaults, but for who and where. Keepalive runs in real time: with these rates it is silent,
    # as it is with the real ones (something goes out more often than it).
    fleet = replace(FleetConfig(), enabled=True, link=which, brokers=(f"mqtts://localhost:{port}",), tls=tls)
    with Mosquitto(directory / "broker", extra, log=False):
        measured = measured_day(
            directory, fleet, 7200 if which == "metered" else 1800, 240 if which == "metered" else 60
        )
    # What did not happen in the measurement is taken out of the estimate too.
    month = estimate.monthly(fleet)
    status_only = month.state_bytes - estimate.DAYS * estimate.ALLOC_CHANGES_PER_DAY * estimate.message_bytes(
        estimate.alloc_body_bytes(1, 4)
    )
    expected = (month.telemetry_bytes + status_only) / estimate.DAYS
    return {
        **measured,
        "estimate_bytes_per_day": round(expected),
        "ratio": round(measured["bytes_per_day"] / expected, 3),
        "month_mb_measured": round(measured["bytes_per_day"] * 30 / 1e6, 1),
        "month_mb_estimate_in_all": round(month.total_mb, 1),
    }


def own_namespace() -> bool:
    """Moves this process into a fresh network namespace with loopback up."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x40000000) != 0:
        return False
    ip = shutil.which("ip")
    if ip is not None:
        return subprocess.run([ip, "link", "set", "lo", "up"], check=False).returncode == 0
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = struct.pack("16sh14x", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
        try:
            fcntl.ioctl(s, 0x8914, request)  # SIOCSIFFLAGS
        except OSError:
            return False
    return True


def in_namespace(which: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.fleet_bench", "--bytes", which], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        return {"skipped": (done.stderr.strip().splitlines() or ["failed"])[-1][:200]}
    value = json.loads(done.stdout)
    assert isinstance(value, dict)
    return value


def main() -> None:
    if sys.argv[1:2] == ["--bytes"]:
        if not own_namespace():
            sys.exit("no network namespace may be made")
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(bytes_per_day(sys.argv[2], Path(name))))
        return
    result: dict[str, Any] = {"threads_before": threading.active_count(), "cpus": os.cpu_count()}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        result["insert_event"] = inserts(directory / "a", MessageClass.EVENT, 5000)
        result["insert_critical_synced"] = inserts(directory / "b", MessageClass.CRITICAL, 500)
        result["queued_100k_rss"] = queue_memory(directory / "c", 100_000)
        if available() is not None:
            result["drain"] = drain(directory / "d", 10_000)
            for which in ("lan", "metered"):
                result[f"bytes_{which}"] = in_namespace(which)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
