"""The main job: GPUs of the fake NVML, shared by pods through real sockets, told over real MQTT."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.agent import AgentProcess
from tests.fakes.kubelet import FAST, ContainerSpec, Pod, Scheduler, StandInKubelet
from tests.fakes.mosquitto import Mosquitto, Observer
from tests.fakes.nvml.driver import FakeNvml
from tests.fakes.nvml.host import nvidia_host

MEMORY, CORES = "volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores"
STATUS = "gpufleet/v1/lab/edge-1/status"


@dataclass
class Box:
    """One node with everything on it."""

    root: Path
    nvml: FakeNvml
    kubelet: StandInKubelet
    broker: Mosquitto
    observer: Observer
    agent: AgentProcess

    def pod(self, name: str, mib: int, cores: int | None = None) -> Pod:
        limits: dict[str, str | int] = {MEMORY: mib}
        if cores is not None:
            limits[CORES] = cores
        spec = ContainerSpec("app", limits, image_env={"NVIDIA_VISIBLE_DEVICES": "all"})
        return self.kubelet.cluster.create(Pod(name, [spec]))

    def running(self, pod: Pod, timeout_s: float = 10.0) -> dict[str, str]:
        """The container's environment once it runs."""
        self.kubelet.wait_for(lambda: pod.apps[0].running, timeout_s)
        return pod.apps[0].env

    def gpu_state(self, uuid: str) -> dict[str, Any]:
        return next(g for g in self.agent.snapshot()["gpus"] if g["gpu"]["uuid"] == uuid)


@pytest.fixture
def box(short_dir: Path) -> Iterator[Box]:
    root = short_dir / "r"
    root.mkdir()
    nvml = FakeNvml(short_dir / "nvml")
    nvml.add("rtx-4000-ada")
    nvml.add("rtx-4000-ada")
    nvidia_host(root, nvml)
    with Mosquitto(short_dir / "mq") as broker, Observer(broker.port) as observer:
        config = {
            "gpus": {"pollSeconds": 0.5},
            "health": {"xidHoldSeconds": 0.5},
            "isolation": {"watchdog": {"pollSeconds": 0.5}},
            "fleet": {"enabled": True, "brokers": [broker.url], "telemetrySeconds": 1, "willDelaySeconds": 0},
        }
        agent = AgentProcess(root, short_dir / "a", config, env=nvml.env())
        with StandInKubelet(root, timing=FAST) as kubelet, Scheduler(kubelet.cluster), agent:
            agent.wait_ready()
            kubelet.wait_for(lambda: kubelet.allocatable.get(MEMORY))
            yield Box(root, nvml, kubelet, broker, observer, agent)


def test_three_pods_share_two_gpus_and_the_fleet_hears_of_it(box: Box) -> None:
    """Two pods on one GPU, the third on the other; status and MQTT say the same as the containers got."""
    first, second, third = box.pod("a", 8000, 30), box.pod("b", 8000, 30), box.pod("c", 16000, 60)
    envs = [box.running(pod) for pod in (first, second, third)]
    assert envs[0]["EDGEAGENT_GPU_UUID"] == envs[1]["EDGEAGENT_GPU_UUID"] != envs[2]["EDGEAGENT_GPU_UUID"]
    assert [e["EDGEAGENT_MEMORY_MIB"] for e in envs] == ["8000", "8000", "16000"]
    assert [e["NVIDIA_VISIBLE_DEVICES"] for e in envs] == ["void"] * 3
    for pod in (first, second, third):
        nodes = pod.apps[0].device_nodes
        assert "/dev/nvidiactl" in nodes
        assert len([n for n in nodes if n in ("/dev/nvidia0", "/dev/nvidia1")]) == 1
    alloc = box.observer.wait_payload(
        "edge-1/alloc", lambda m: sum(len(g.get("containers", [])) for g in m["gpus"]) == 3
    )
    told = {c["pod"]: (g["uuid"], c["memoryMiB"]) for g in alloc["gpus"] for c in g["containers"]}
    assert told == {
        "a": (envs[0]["EDGEAGENT_GPU_UUID"], 8000),
        "b": (envs[1]["EDGEAGENT_GPU_UUID"], 8000),
        "c": (envs[2]["EDGEAGENT_GPU_UUID"], 16000),
    }
    snapshot = box.agent.snapshot()
    assert {g["promisedMiB"] for g in snapshot["gpus"]} == {16000}
    telemetry = box.observer.wait_payload("/tele/m")
    assert len(telemetry["samples"][0]["gpus"]) == 2


def test_a_pod_that_fits_nowhere_now_waits_with_the_reason_and_starts_when_one_leaves(box: Box) -> None:
    holders = [box.pod("a", 15000), box.pod("b", 15000)]
    for pod in holders:
        box.running(pod)
    waiting = box.pod("c", 9000)
    snapshot = box.agent.wait_snapshot(lambda s: s.get("waiting"))
    assert snapshot["waiting"][0]["pod"] == "c"
    assert "largest free block: 5055 MiB" in snapshot["waiting"][0]["reason"]
    assert waiting.phase == "Pending"
    box.kubelet.delete(holders[0])
    box.running(waiting)
    box.kubelet.wait_for(lambda: waiting.phase == "Running")
    assert not box.agent.wait_snapshot(lambda s: not s.get("waiting"))["waiting"]


def test_a_gpu_falls_ill_its_pod_restarts_on_the_other_and_the_gpu_recovers(box: Box) -> None:
    """Lost GPU: shares withdrawn, alert raised, restart elsewhere; found again: alert cleared."""
    pod = box.pod("a", 8000, 30)
    sick = box.running(pod)["EDGEAGENT_GPU_UUID"]
    all_memory = box.kubelet.allocatable[MEMORY]
    box.nvml.lose(sick)
    box.kubelet.wait_for(lambda: box.kubelet.allocatable[MEMORY] == all_memory // 2)
    box.observer.wait_payload(f"alert/lost-{sick.lower()}", lambda m: m["podsHurt"] == ["default/a"])
    box.kubelet.exit(pod, "app", 139)
    box.kubelet.wait_for(lambda: pod.apps[0].running and pod.apps[0].env["EDGEAGENT_GPU_UUID"] != sick)
    assert pod.apps[0].restarts == 1
    box.nvml.recover(sick)
    box.kubelet.wait_for(lambda: box.kubelet.allocatable[MEMORY] == all_memory)
    box.agent.wait_snapshot(lambda s: s["health"] == "ok" or not any(g["conditions"] for g in s["gpus"]))


def test_sigterm_says_offline_and_leaves_no_socket(box: Box) -> None:
    """Clean stop within 5 s: `offline` retained, exit status 0, sockets gone; the kubelet holds nothing."""
    assert box.agent.stop(timeout_s=5.0) == 0
    last = box.observer.wait(lambda seen: [s for s in seen if s.topic == STATUS and b'"offline"' in s.data])
    assert json.loads(last[-1].data)["state"] == "offline"
    names = sorted(p.name for p in (box.root / "var/lib/kubelet/device-plugins").iterdir())
    assert [n for n in names if n.startswith("edgeagent")] == []
    assert list((box.root / "run/edgeagent").glob("*.sock")) == []


def test_kill_leaves_lost_and_the_next_start_remembers_who_is_where(box: Box) -> None:
    """SIGKILL: the will says lost; after the start the same container is on the same GPU, same limits."""
    pod = box.pod("a", 8000, 30)
    uuid = box.running(pod)["EDGEAGENT_GPU_UUID"]
    box.agent.signal(signal.SIGKILL)
    box.agent.wait_exit()
    box.observer.wait(lambda seen: [s for s in seen if s.topic == STATUS and b'"lost"' in s.data])
    box.agent.start().wait_ready()
    snapshot = box.agent.wait_snapshot(lambda s: s["kubeletConnected"])
    (container,) = snapshot["containers"]
    assert (container["pod"], container["gpuUuid"], container["memoryMiB"]) == ("a", uuid, 8000)
    assert box.gpu_state(uuid)["promisedMiB"] == 8000
    other = box.pod("b", 15000)
    assert box.running(other)["EDGEAGENT_GPU_UUID"] != uuid


def test_cordoned_gpu_gets_no_new_container_and_that_survives_a_restart(box: Box) -> None:
    kept = box.pod("a", 1000)
    uuid = box.running(kept)["EDGEAGENT_GPU_UUID"]
    assert "cordoned" in box.agent.call("cordon", gpu=uuid)
    box.agent.stop()
    box.agent.start().wait_ready()
    box.agent.wait_snapshot(lambda s: s["kubeletConnected"])
    assert box.running(box.pod("b", 1000))["EDGEAGENT_GPU_UUID"] != uuid
    assert kept.apps[0].running
    assert "in use again" in box.agent.call("uncordon", gpu=uuid)


def test_reload_changes_what_can_change_and_names_the_rest(box: Box) -> None:
    text = box.agent.config_path.read_text()
    box.agent.config_path.write_text(
        text + "log: {level: debug}\nsharing: {memoryUnitMiB: 64, placement: spread}\n"
    )
    assert box.agent.call("reload") == {
        "changed": ["log.level", "sharing.placement"],
        "restartNeeded": ["sharing.memoryUnitMiB"],
    }
    first, second = box.running(box.pod("a", 1000)), box.running(box.pod("b", 1000))
    assert first["EDGEAGENT_GPU_UUID"] != second["EDGEAGENT_GPU_UUID"]
    box.agent.config_path.write_text("sharing: {placement: nonsense}")
    box.agent.signal(signal.SIGHUP)
    box.agent.wait_snapshot(lambda s: "placement" in box.agent.log() and "must be one of" in box.agent.log())
    assert box.agent.snapshot()["kubeletConnected"]
