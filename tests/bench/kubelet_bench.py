"""How fast the kubelet side answers: run as a program, prints one JSON object.

Everything goes over real unix sockets: a client in this process, the servers in a child, so that the
two do not share an interpreter. Times are milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc

from edgeagent.kubelet.protos import deviceplugin as dp

MEMORY = "volcano.sh/vgpu-memory"
SIZES = (1_000, 24_000, 82_000, 163_840)
CGROUP = "sys/fs/cgroup/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{}.slice"
POD = "8f3c2c0e-0000-0000-0000-{:012d}"


def quantiles(times_s: list[float]) -> dict[str, float]:
    ordered = sorted(times_s)
    return {
        "p50": round(statistics.median(ordered) * 1e3, 3),
        "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3, 3),
        "n": len(ordered),
    }


class Child:
    """A process that serves the kubelet side over two GPUs under a root, or a bare grpcio server."""

    def __init__(self, root: Path, mode: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", mode, "--root", str(root), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.tell_ready()

    def tell_ready(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, text: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self.tell_ready()

    def rss_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(10)


def channel(path: Path) -> grpc.Channel:
    return grpc.insecure_channel(
        f"unix:{path}",
        options=(("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)),
    )


def calls(method: Any, request: bytes, count: int) -> list[float]:
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        method(request)
        times.append(time.perf_counter() - begun)
    return times


class Kubelet:
    """Accepts Register, so that the child serves; counts how long re-registering takes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.registered: list[float] = []
        self.server: grpc.Server | None = None

    def start(self) -> None:
        from concurrent.futures import ThreadPoolExecutor

        def register(request: bytes, context: Any) -> bytes:
            self.registered.append(time.perf_counter())
            return b""

        self.server = grpc.server(ThreadPoolExecutor(2))
        handlers = {"Register": grpc.unary_unary_rpc_method_handler(register)}
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(dp.REGISTRATION_SERVICE, handlers),)
        )
        self.server.add_insecure_port(f"unix:{self.directory}/kubelet.sock")
        self.server.start()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop(None).wait()


def wait_until(predicate: Any, timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > until:
            raise TimeoutError("the bench waited in vain")
        time.sleep(0.001)


def measure(units: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kb") as name:
        root = Path(name)
        directory = root / "var/lib/kubelet/device-plugins"
        directory.mkdir(parents=True)
        kubelet = Kubelet(directory)
        kubelet.start()
        child = Child(root, "side", "--units", str(units))
        sock = directory / f"edgeagent-{MEMORY.replace('/', '_')}.sock"
        wait_until(lambda: len(kubelet.registered) >= 3)
        result: dict[str, Any] = {"units": units}
        with channel(sock) as ch:
            stream = ch.unary_stream(dp.LIST_AND_WATCH)(b"")
            lists = iter(stream)
            payload = next(lists)
            result["list_bytes"] = len(payload)
            ids = [f"m{n:06d}" for n in range(units)]
            random.Random(1).shuffle(ids)
            size = min(8000, units // 4)

            prefer = dp.PreferredAllocationRequest()
            prefer.container_requests.add(available_deviceIDs=ids, allocation_size=size)
            raw = prefer.SerializeToString()
            result["prefer_ms"] = quantiles(calls(ch.unary_unary(dp.GET_PREFERRED_ALLOCATION), raw, rounds))

            request = dp.AllocateRequest(
                container_requests=[dp.ContainerAllocateRequest(devices_ids=ids[:size])]
            )
            result["allocate_size"] = size
            result["allocate_ms"] = quantiles(
                calls(ch.unary_unary(dp.ALLOCATE), request.SerializeToString(), rounds)
            )

            published, received = [], []
            for turn in range(rounds):
                told, done = map(float, child.say("sick" if turn % 2 == 0 else "well").split())
                next(lists)
                # perf_counter is the machine's monotonic clock: the same in both processes.
                received.append(time.perf_counter() - told)
                published.append(done - told)
            result["flip_to_wire_ms"] = quantiles(published)
            result["flip_to_received_ms"] = quantiles(received)
            stream.cancel()
        result["rss_mib"] = round(child.rss_mib(), 1)

        again = []
        for _ in range(max(5, rounds // 4)):
            kubelet.stop()
            time.sleep(0.05)
            kubelet.registered.clear()
            kubelet.start()
            begun = time.perf_counter()
            wait_until(lambda: len(kubelet.registered) >= 3)
            again.append(kubelet.registered[-1] - begun)
        result["reregister_all_ms"] = quantiles(again)
        child.close()
        kubelet.stop()
        return result


def measure_starts(rounds: int) -> dict[str, Any]:
    """PreStartContainer with binding: 2,560 IDs in the checkpoint, the CDI spec written and synced."""
    with tempfile.TemporaryDirectory(prefix="kb") as name:
        root = Path(name)
        directory = root / "var/lib/kubelet/device-plugins"
        directory.mkdir(parents=True)
        # /var/run is in memory on every host that matters.
        run = Path(tempfile.mkdtemp(prefix="kb", dir="/dev/shm"))
        (root / "var/run").symlink_to(run)
        kubelet = Kubelet(directory)
        kubelet.start()
        child = Child(root, "side", "--units", "2560")
        wait_until(lambda: len(kubelet.registered) >= 3)
        entries: list[dict[str, Any]] = []
        per_pod = 2560 // 20
        for pod in range(20):
            uid = POD.format(pod)
            (
                root
                / f"sys/fs/cgroup/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{uid.replace('-', '_')}.slice"
            ).mkdir(parents=True)
            entries.append(
                {
                    "PodUID": uid,
                    "ContainerName": "app",
                    "ResourceName": MEMORY,
                    "DeviceIDs": {"-1": [f"m{n:06d}" for n in range(pod * per_pod, (pod + 1) * per_pod)]},
                    "AllocResp": "",
                }
            )
        path = directory / "kubelet_internal_checkpoint"
        times = []
        with channel(directory / f"edgeagent-{MEMORY.replace('/', '_')}.sock") as ch:
            method = ch.unary_unary(dp.PRE_START_CONTAINER)
            for turn in range(rounds):
                # Written anew for every start, as the kubelet does for every allocation.
                text = json.dumps(
                    {"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": turn}
                )
                temporary = path.with_suffix(".tmp")
                temporary.write_text(text)
                os.replace(temporary, path)
                ids = entries[turn % 20]["DeviceIDs"]["-1"]
                request = dp.PreStartContainerRequest(devices_ids=ids).SerializeToString()
                begun = time.perf_counter()
                method(request)
                times.append(time.perf_counter() - begun)
        child.close()
        kubelet.stop()
        shutil.rmtree(run)
        return {"pre_start_ms": quantiles(times), "first_starts_ms": quantiles(times[:20])}


def measure_bare(rounds: int) -> dict[str, Any]:
    """A grpcio server that answers an Allocate of 64 IDs with nothing: what cannot be beaten."""
    with tempfile.TemporaryDirectory(prefix="kb") as name:
        root = Path(name)
        child = Child(root, "bare")
        request = dp.AllocateRequest(
            container_requests=[dp.ContainerAllocateRequest(devices_ids=[f"m{n:06d}" for n in range(64)])]
        )
        with channel(root / "bare.sock") as ch:
            bare = quantiles(calls(ch.unary_unary(dp.ALLOCATE), request.SerializeToString(), rounds))
        child.close()
        directory = root / "var/lib/kubelet/device-plugins"
        directory.mkdir(parents=True)
        kubelet = Kubelet(directory)
        kubelet.start()
        child = Child(root, "side", "--units", "2560")
        wait_until(lambda: len(kubelet.registered) >= 3)
        with channel(directory / f"edgeagent-{MEMORY.replace('/', '_')}.sock") as ch:
            ours = quantiles(calls(ch.unary_unary(dp.ALLOCATE), request.SerializeToString(), rounds))
        child.close()
        kubelet.stop()
        return {"bare_ms": bare, "allocate_64_ms": ours, "ratio_p99": round(ours["p99"] / bare["p99"], 2)}


# --- the child ---


def serve(mode: str, root: Path, units: int) -> None:
    import threading

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if mode == "bare":
        from concurrent.futures import ThreadPoolExecutor

        server = grpc.server(ThreadPoolExecutor(4))
        handlers = {"Allocate": grpc.unary_unary_rpc_method_handler(lambda request, context: b"")}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(dp.DEVICE_PLUGIN_SERVICE, handlers),)
        )
        server.add_insecure_port(f"unix:{root}/bare.sock")
        server.start()
        print("ready", flush=True)
        stop.wait()
        server.stop(None).wait()
        return
    from edgeagent.config.schema import Config
    from edgeagent.gpus.model import Gpu, GpuKind
    from edgeagent.hostroot import HostRoot
    from edgeagent.isolation.manager import IsolationManager
    from edgeagent.kubelet.containers import HostContainers
    from edgeagent.kubelet.plugin import KubeletSide
    from edgeagent.node.cgroups import PodCgroups
    from edgeagent.node.podlogs import PodLogs
    from edgeagent.node.processes import Processes
    from edgeagent.supervisor import Supervisor

    supervisor = Supervisor()
    host = HostRoot(root)
    gpus = [Gpu(f"GPU-{i:08x}", i, GpuKind.DISCRETE, "simulated", "Pretend", units // 2) for i in range(2)]
    side = KubeletSide(
        Config(host_root=str(root)),
        host,
        containers=HostContainers(host, PodCgroups(host), PodLogs(host), Processes(host)),
        isolation=IsolationManager([], memory="none", compute="none", fallback=False, allow_mps=False),
        stop=supervisor.stop,
    )
    side.set_gpus(gpus)
    for name, service, wake in side.services():
        supervisor.add(name, service, wake)

    def listen() -> None:
        for line in sys.stdin:
            begun = time.perf_counter()
            side.set_gpus(gpus, sick={gpus[1].uuid: "XID 79"} if line.strip() == "sick" else {})
            print(begun, time.perf_counter(), flush=True)

    threading.Thread(target=listen, daemon=True).start()
    print("ready", flush=True)
    stop.wait()
    supervisor.shutdown()
    os._exit(0)  # the reading thread sits in stdin


def main(rounds: int = 100, sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    return {
        "kubelet": {
            **measure_bare(rounds * 5),
            **measure_starts(rounds * 2),
            "by_size": [
                measure(units, rounds if units <= 24_000 else max(30, rounds // 2)) for units in sizes
            ],
        }
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", choices=("side", "bare"))
    parser.add_argument("--root", type=Path)
    parser.add_argument("--units", type=int, default=2560)
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.root, arguments.units)
    else:
        print(json.dumps(main(arguments.rounds), indent=2))
