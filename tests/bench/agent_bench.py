"""The whole agent, measured as a process: memory, CPU, wake-ups, and how fast it reacts.

Everything is switched on: device plugin, health, uplink (a real mosquitto), metrics, kernel log. GPUs
are the fake NVML library's; the kubelet is the stand-in in this process. Run as a program: prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import paho.mqtt.client as paho

from edgeagent.kubelet.protos import deviceplugin as dp
from tests.fakes.agent import CHECKOUT, AgentProcess
from tests.fakes.kubelet import FAST, StandInKubelet
from tests.fakes.mosquitto import Mosquitto
from tests.fakes.nvml.driver import FakeNvml
from tests.fakes.nvml.host import nvidia_host

MEMORY = "volcano.sh/vgpu-memory"
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """What the kernel says of a process now."""

    at_s: float
    cpu_s: float
    switches: int  # voluntary: wake-ups
    rss_mib: float
    private_mib: float
    threads: int
    fds: int


def usage(pid: int) -> Usage:
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    switches = threads = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        text = (task / "status").read_text()
        switches += int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0])
        threads += 1
    smaps = Path(f"/proc/{pid}/smaps_rollup").read_text()
    private_kib = sum(
        int(line.split()[1])
        for line in smaps.splitlines()
        if line.startswith(("Private_Clean", "Private_Dirty"))
    )
    rss_kib = int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])
    return Usage(
        time.monotonic(), (int(stat[11]) + int(stat[12])) / TICKS, switches, rss_kib / 1024,
        private_kib / 1024, threads, len(list(Path(f"/proc/{pid}/fd").iterdir())),
    )  # fmt: skip


def over(before: Usage, after: Usage) -> dict[str, float]:
    seconds = after.at_s - before.at_s
    return {
        "cpu_pct": round(100 * (after.cpu_s - before.cpu_s) / seconds, 3),
        "wakeups_per_s": round((after.switches - before.switches) / seconds, 1),
        "rss_mib": round(after.rss_mib, 1),
        "private_mib": round(after.private_mib, 1),
        "threads": after.threads,
        "fds": after.fds,
    }


def quantiles(times_s: list[float]) -> dict[str, float]:
    ordered = sorted(times_s)
    return {
        "p50_ms": round(statistics.median(ordered) * 1e3, 1),
        "p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3, 1),
        "n": len(ordered),
    }


class Rig:
    """A node with one agent on it."""

    def __init__(self, work: Path, cards: list[str], broker: Mosquitto, poll_s: float | None = None) -> None:
        self.root = work / "r"
        self.root.mkdir(parents=True)
        self.nvml = FakeNvml(work / "nvml", record_calls=False)
        self.uuids = [self.nvml.add(card) for card in cards]
        nvidia_host(self.root, self.nvml)
        config: dict[str, Any] = {
            "fleet": {"enabled": True, "brokers": [broker.url]},
            "metrics": {"enabled": True, "listen": "127.0.0.1:0"},
            "health": {"xidHoldSeconds": 0, "recoverPolls": 1},
            "kubernetes": {"enabled": False},
        }
        if poll_s is not None:
            config["gpus"] = {"pollSeconds": poll_s}
        self.agent = AgentProcess(self.root, work / "a", config, env=self.nvml.env())
        self.kubelet = StandInKubelet(self.root, timing=FAST)

    def registered(self) -> bool:
        return bool(self.kubelet.allocatable.get(MEMORY))


def wait(predicate: Callable[[], object], timeout_s: float = 30.0) -> float:
    """When it became true (monotonic), looked at every half millisecond."""
    until = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > until:
            raise TimeoutError("the bench waited in vain")
        time.sleep(0.0005)
    return time.monotonic()


def idle(cards: list[str], broker: Mosquitto, settle_s: float, seconds: float) -> dict[str, Any]:
    """Memory and CPU of an agent that nobody asks anything, after `settle_s`, over `seconds`."""
    with tempfile.TemporaryDirectory(prefix="eb-") as name:
        rig = Rig(Path(name), cards, broker)
        with rig.kubelet:
            began = time.monotonic()
            with rig.agent as agent:
                registered = wait(lambda: rig.kubelet.registrations)
                wait(rig.registered)
                threading.Event().wait(settle_s)
                before = usage(agent.pid)
                threading.Event().wait(seconds)
                figures = over(before, usage(agent.pid))
                shares = sum(r["total"] for r in agent.snapshot()["resources"] if r["kind"] == "memory")
        return {"shares": shares, "start_to_register_ms": round((registered - began) * 1e3), **figures}


def starts(broker: Mosquitto, rounds: int) -> dict[str, Any]:
    """Process start to Register, warm file cache."""
    times = []
    with tempfile.TemporaryDirectory(prefix="eb-") as name:
        rig = Rig(Path(name), ["24gib"], broker)
        with rig.kubelet:
            for _ in range(rounds):
                count = len(rig.kubelet.registrations)
                began = time.monotonic()
                with rig.agent:
                    times.append(wait(lambda count=count: len(rig.kubelet.registrations) > count) - began)
                    wait(rig.registered)
    return quantiles(times)


# The listener has a process of its own: the stand-in kubelet takes every list apart in Python here.
_LISTENER = """
import sys, time, grpc
channel = grpc.insecure_channel("unix:" + sys.argv[1], options=(("grpc.max_receive_message_length", -1),))
for _ in channel.unary_stream(sys.argv[2])(b""):
    print(time.monotonic(), flush=True)
"""


class RawList:
    """One more ListAndWatch stream, as bytes: when each list arrived (CLOCK_MONOTONIC is the host's)."""

    def __init__(self, socket: Path) -> None:
        self.arrived: list[float] = []
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LISTENER, str(socket), dp.LIST_AND_WATCH],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.arrived.append(float(line))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def reactions(broker: Mosquitto, rounds: int) -> dict[str, Any]:
    """XID in the driver to Unhealthy list in the kubelet; kubelet.sock anew to Register."""
    xid, again = [], []
    with tempfile.TemporaryDirectory(prefix="eb-") as name:
        rig = Rig(Path(name), ["24gib", "24gib"], broker, poll_s=0.5)
        with rig.kubelet, rig.agent as agent:
            wait(rig.registered)
            agent.wait_ready()
            all_units = rig.kubelet.allocatable[MEMORY]
            lists = RawList(rig.kubelet.directory / f"edgeagent-{MEMORY.replace('/', '_')}.sock")
            wait(lambda: lists.arrived)
            for _ in range(rounds):
                count = len(lists.arrived)
                began = time.monotonic()
                rig.nvml.xid(rig.uuids[1], 79)
                wait(lambda count=count: len(lists.arrived) > count)
                xid.append(lists.arrived[count] - began)
                wait(lambda: rig.kubelet.allocatable.get(MEMORY) == all_units // 2)
                wait(lambda: rig.kubelet.allocatable.get(MEMORY) == all_units)
            lists.close()
            for _ in range(rounds):
                count = len(rig.kubelet.registrations)
                rig.kubelet.stop()
                began = time.monotonic()
                rig.kubelet.start()
                again.append(wait(lambda count=count: len(rig.kubelet.registrations) >= count + 3) - began)
                wait(rig.registered)
    return {
        "xid_to_unhealthy_list": quantiles(xid),
        "kubelet_socket_to_three_registrations": quantiles(again),
    }


def calls_beside_the_uplink(rounds: int) -> dict[str, Any]:
    """Allocate of 64 units while the broker is up, frozen, gone, and flooding the node with commands."""
    out: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="eb-") as name,
        Mosquitto(Path(name) / "mq", log=False) as broker,
    ):
        rig = Rig(Path(name) / "x", ["24gib"], broker)
        with rig.kubelet, rig.agent as agent:
            wait(rig.registered)
            agent.wait_snapshot(lambda s: s["uplink"]["connected"])
            socket = rig.kubelet.directory / f"edgeagent-{MEMORY.replace('/', '_')}.sock"
            with grpc.insecure_channel(f"unix:{socket}") as channel:
                allocate = channel.unary_unary(dp.ALLOCATE)
                ids = [f"m{n:06d}" for n in range(64)]
                request = dp.AllocateRequest(
                    container_requests=[dp.ContainerAllocateRequest(devices_ids=ids)]
                ).SerializeToString()

                def measure(state: str) -> None:
                    times = []
                    for _ in range(rounds):
                        began = time.monotonic()
                        allocate(request)
                        times.append(time.monotonic() - began)
                    out[state] = quantiles(times)

                measure("up")
                flood = threading.Event()
                flooder = threading.Thread(target=_flood, args=(broker.port, flood), daemon=True)
                flooder.start()
                measure("flood")
                flood.set()
                flooder.join()
                broker.freeze()
                measure("frozen")
                broker.thaw()
                broker.kill()
                measure("gone")
    return out


def _flood(port: int, stop: threading.Event) -> None:
    """Commands for the node as fast as they go out, until told to stop."""
    client = paho.Client(paho.CallbackAPIVersion.VERSION2)
    client.connect("127.0.0.1", port)
    client.loop_start()
    while not stop.is_set():
        for n in range(50):
            client.publish(
                "gpufleet/v1/lab/edge-1/cmd/snapshot", json.dumps({"id": f"f{n}", "verb": "snapshot"})
            )
        stop.wait(0.02)
    client.loop_stop()


def bare(settle_s: float, seconds: float) -> dict[str, Any]:
    """The least grpcio device plugin, in the same run: what the library alone costs."""
    with (
        tempfile.TemporaryDirectory(prefix="eb-") as name,
        StandInKubelet(Path(name), timing=FAST) as kubelet,
    ):
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.kubelet.bare_plugin", "--dir", str(kubelet.directory), "--count", "24000"],
            cwd=CHECKOUT, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            registered = wait(lambda: kubelet.registrations)
            threading.Event().wait(settle_s)
            before = usage(process.pid)
            threading.Event().wait(seconds)
            figures = over(before, usage(process.pid))
        finally:
            process.terminate()
            process.wait(10)
    return {"start_to_register_ms": round((registered - began) * 1e3), **figures}


def main(settle_s: float = 60.0, seconds: float = 60.0, rounds: int = 40) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="eb-mq-") as name, Mosquitto(Path(name), log=False) as broker:
        return {
            "agent": {
                "bare_grpcio": bare(5.0, min(seconds, 20.0)),
                "one_24gib": idle(["24gib"], broker, settle_s, seconds),
                "two_80gib": idle(["a100-80", "a100-80"], broker, settle_s, seconds),
                "start_to_register": starts(broker, max(5, rounds // 4)),
                **reactions(broker, rounds),
                "allocate_while_broker": calls_beside_the_uplink(rounds * 10),
            }
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 s instead of 60, fewer rounds")
    quick = parser.parse_args().quick
    print(json.dumps(main(8.0, 10.0, 10) if quick else main(), indent=2))
