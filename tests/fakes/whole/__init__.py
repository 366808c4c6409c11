"""A whole node: the real agent among fake GPUs, a stand-in kubelet with its scheduler, and a real broker.

Nothing here imports pytest: the soak run uses it too.
"""

from __future__ import annotations

import copy
import json
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.fakes.agent import AgentProcess
from tests.fakes.kubelet import FAST, ContainerSpec, Pod, Scheduler, StandInApiServer, StandInKubelet
from tests.fakes.mosquitto import FlakyProxy, Mosquitto, Observer
from tests.fakes.nvml.driver import FakeNvml
from tests.fakes.nvml.host import nvidia_host

MEMORY, CORES, NUMBER = "volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores", "volcano.sh/vgpu-number"
IMAGE_ENV = {"NVIDIA_VISIBLE_DEVICES": "all"}  # as CUDA images have it

# What a box has in the field, with shorter intervals.
QUICK: dict[str, Any] = {
    "gpus": {"pollSeconds": 0.3, "callTimeoutSeconds": 0.5},
    "health": {"xidHoldSeconds": 0.5},
    "isolation": {"watchdog": {"pollSeconds": 0.3}, "limiter": {"overheadMiB": 0}},
}


class WholeNode:
    """Enter it to start everything: with `cards`, those GPUs on the fake NVML; without, the caller has
    made `root` (a Jetson, say). `broker`: mosquitto behind a proxy that can fail, with an observer at
    the broker itself. `api`: an API server behind another one, with credentials the agent finds. `env`:
    more of the agent's environment."""

    def __init__(
        self,
        directory: Path,
        *cards: str,
        config: Mapping[str, Any] | None = None,
        broker: bool = False,
        api: bool = False,
        schedule: bool = True,
        kubelet: Mapping[str, Any] | None = None,
        broker_config: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.root = directory / "r"
        self.root.mkdir(exist_ok=True)
        self.nvml = FakeNvml(directory / "nvml")
        self.gpus = [self.nvml.add(card) for card in cards]
        if cards:
            nvidia_host(self.root, self.nvml)
        self.config = merged(QUICK, config or {})
        self._with_broker, self._with_api, self._schedule = broker, api, schedule
        self._kubelet_options = {"timing": FAST, **(kubelet or {})}
        self._broker_config = broker_config
        self._env = dict(env or {})
        self._open = ExitStack()

    def __enter__(self) -> WholeNode:
        with ExitStack() as stack:
            if self._with_broker:
                self.broker = stack.enter_context(Mosquitto(self.directory / "mq", self._broker_config))
                self.proxy = stack.enter_context(FlakyProxy(self.broker.port))
                self.observer = stack.enter_context(Observer(self.broker.port))
                fleet = {
                    "enabled": True, "brokers": [self.proxy.url], "telemetrySeconds": 1, "willDelaySeconds": 0,
                    "keepaliveSeconds": 5, "eventsPerMinute": 1000,
                    "outbox": {"replayPerSecond": 500, "replayJitterSeconds": 0},
                }  # fmt: skip
                self.config = merged({"fleet": fleet}, self.config)
            self.kubelet = stack.enter_context(StandInKubelet(self.root, **self._kubelet_options))
            if self._with_api:
                self.api = stack.enter_context(StandInApiServer(self.kubelet))
                kubeconfig = "etc/kubeconfig"
                self.api.write_kubeconfig(self.root / kubeconfig)
                self.api_proxy = stack.enter_context(FlakyProxy(int(self.api.url.rpartition(":")[2])))
                written = (self.root / kubeconfig).read_text()
                through = self.api_proxy.url.replace("mqtt:", "http:")
                (self.root / kubeconfig).write_text(written.replace(self.api.url, through))
                api = {"enabled": True, "kubeconfig": f"/{kubeconfig}", "nodeName": "edge-1"}
                self.config = merged(self.config, {"kubernetes": api})
            if self._schedule:
                stack.enter_context(Scheduler(self.kubelet.cluster))
            env = {**self.nvml.env(), **self._env}
            self.agent = AgentProcess(self.root, self.directory / "a", self.config, env=env)
            stack.callback(self.nvml.release)
            stack.enter_context(self.agent)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    # -- pods --

    def ready(self, resource: str = MEMORY) -> WholeNode:
        """Returns when the kubelet has the agent's devices."""
        self.agent.wait_ready()
        self.kubelet.wait_for(lambda: self.kubelet.allocatable.get(resource), 15)
        return self

    def pod(self, name: str, *containers: ContainerSpec, init: tuple[ContainerSpec, ...] = ()) -> Pod:
        return self.kubelet.cluster.create(Pod(name, containers, init=init))

    def share(self, name: str, mib: int | None, cores: int | None = None) -> Pod:
        """A pod of one container, whose image asks for every GPU."""
        return self.pod(name, container("app", mib, cores))

    def env(self, pod: Pod, name: str | None = None, timeout_s: float = 10.0) -> dict[str, str]:
        """The environment of a container of the pod, once it runs."""
        one = pod.apps[0] if name is None else pod.containers[name]
        self.kubelet.wait_for(lambda: one.running, timeout_s)
        return one.env

    def gpu_of(self, pod: Pod) -> str:
        return self.env(pod)["EDGEAGENT_GPU_UUID"]

    def gone(self, pod: Pod) -> None:
        """Deletes it and returns when its share is free."""
        self.kubelet.delete(pod)
        self.kubelet.wait_for(lambda: pod.gone)
        self.agent.wait_snapshot(lambda s: all(c["podUid"] != pod.uid for c in s["containers"]))

    # -- what the agent says --

    def gpu(self, uuid: str, snapshot: dict[str, Any] | None = None) -> dict[str, Any]:
        return next(g for g in (snapshot or self.agent.snapshot())["gpus"] if g["gpu"]["uuid"] == uuid)

    def wait_condition(self, kind: str, uuid: str | None = None, timeout_s: float = 15.0) -> dict[str, Any]:
        """The condition of this type (of this GPU) once it is raised."""
        found = self.agent.wait_snapshot(lambda s: _conditions(s, kind, uuid), timeout_s)
        return _conditions(found, kind, uuid)[0]

    def wait_cleared(self, kind: str, timeout_s: float = 15.0) -> None:
        self.agent.wait_snapshot(lambda s: not _conditions(s, kind, None), timeout_s)

    def assert_clean_log(self) -> None:
        assert_clean_log(self.agent.log())

    def events(self, channel: str) -> list[dict[str, Any]]:
        """What the broker was told on evt/{channel}."""
        return [json.loads(s.data) for s in self.observer.on(f"/evt/{channel}")]


def container(
    name: str,
    mib: int | None = None,
    cores: int | None = None,
    *,
    number: int | None = None,
    sidecar: bool = False,
    run_s: float | None = None,
    env: Mapping[str, str] | None = None,
) -> ContainerSpec:
    amounts = {MEMORY: mib, CORES: cores, NUMBER: number}
    limits: dict[str, str | int] = {r: n for r, n in amounts.items() if n is not None}
    return ContainerSpec(name, limits, env=env or {}, image_env=IMAGE_ENV, sidecar=sidecar, run_s=run_s)


def assert_clean_log(text: str) -> None:
    """No exception that nobody caught, no service that ended by itself."""
    for word in ("Traceback", "call failed resource", "ended by itself", "Exception in thread"):
        assert word not in text, text[max(0, text.index(word) - 500) : text.index(word) + 3000]


def process_size(pid: int) -> dict[str, int]:
    """Open files, threads and resident KiB of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(fields["Threads"]),
        "rss_kib": int(fields["VmRSS"].split()[0]),
    }


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `base` with `over` on top."""
    out = copy.deepcopy(dict(base))
    for key, value in over.items():
        mine = out.get(key)
        out[key] = merged(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return out


def closed_port() -> int:
    """A loopback port where nobody listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _conditions(snapshot: dict[str, Any], kind: str, uuid: str | None) -> list[dict[str, Any]]:
    found = [*snapshot["conditions"], *(c for g in snapshot["gpus"] for c in g["conditions"])]
    return [c for c in found if c["type"] == kind and uuid in (None, c.get("gpuUuid"))]


Check = Callable[[WholeNode], None]
