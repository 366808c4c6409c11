"""The doctor beside a running agent, a kubelet, an API server and a broker: well, and with one thing broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgeagent.cli.main import main
from tests.fakes.agent import AgentProcess
from tests.fakes.jetson import BOARDS, JetsonTree
from tests.fakes.kubelet import ContainerSpec, Pod, StandInApiServer, StandInKubelet
from tests.fakes.mosquitto import Mosquitto
from tests.fakes.nvml import FakeNvml
from tests.fakes.nvml.host import nvidia_host

MEMORY, CORES = "volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores"


class Node:
    def __init__(self, directory: Path) -> None:
        root = directory / "r"
        self.nvml = FakeNvml(directory / "nvml")
        self.gpu = self.nvml.add("l4")
        nvidia_host(root, self.nvml)
        self.broker = Mosquitto(directory / "mq")
        self.kubelet = StandInKubelet(root)
        self.api = StandInApiServer(self.kubelet)
        self.api.write_kubeconfig(root / "etc/kubeconfig")
        config = {
            "gpus": {"pollSeconds": 0.3},
            "kubernetes": {"enabled": True, "kubeconfig": "/etc/kubeconfig", "nodeName": "edge-1"},
            "health": {"xidHoldSeconds": 0.5},
        }
        self.directory, self.root, self.config = directory, root, config

    def __enter__(self) -> Node:
        self.broker.__enter__()
        fleet = {"enabled": True, "brokers": [self.broker.url], "telemetrySeconds": 1}
        self.kubelet.start()
        self.api.__enter__()
        self.agent = AgentProcess(
            self.root, self.directory / "w", {**self.config, "fleet": fleet}, env=self.nvml.env()
        )
        self.agent.start().wait_ready()
        self.kubelet.wait_for(lambda: self.kubelet.allocatable.get(CORES))
        self.kubelet.wait_for(lambda: self.kubelet.allocatable.get(MEMORY))
        self.agent.wait_snapshot(lambda s: s["uplink"]["connected"])
        return self

    def __exit__(self, *exc: object) -> None:
        self.agent.__exit__(*exc)
        self.api.__exit__(None, None, None)
        self.kubelet.close()
        self.broker.__exit__(None, None, None)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """Unix sockets lie in it: their paths end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="d-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="d-") as name, Node(Path(name)) as n:
        yield n


Doctor = Callable[..., dict[str, dict[str, object]]]


@pytest.fixture
def doctor(node: Node, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs it; the checks by name."""

    def run(*names: str) -> dict[str, dict[str, object]]:
        checks = [a for n in names for a in ("--check", n)]
        main(["doctor", "-c", str(node.agent.config_path), "--json", *checks])
        return {c["name"]: c for c in json.loads(capsys.readouterr().out)["checks"]}

    return run


def said(check: dict[str, object], outcome: str) -> list[str]:
    findings = check["findings"]
    assert isinstance(findings, list)
    return [f"{f['what']} -> {f.get('fix', '')}" for f in findings if f["outcome"] == outcome]


def test_well(doctor: Doctor) -> None:
    """Everything between driver and broker is found well."""
    checks = doctor()
    for name in ("agent", "driver", "kubelet-sockets", "registration", "allocatable", "broker", "disk"):
        assert checks[name]["outcome"] == "pass", checks[name]
    assert not [c for c in checks.values() if c["outcome"] == "fail"], checks


def test_ready(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "ready", "-c", str(node.agent.config_path)]) == 0
    assert f"{CORES}: 100 of 100 healthy" in capsys.readouterr().out


def test_fine_units_on_a_cluster_of_today(doctor: Doctor) -> None:
    """The stand-in says v1.36.2: 1 MiB units hurt there."""
    assert any("set memoryUnitMiB to 64" in s for s in said(doctor("memory-unit")["memory-unit"], "warn"))


def test_sick_gpu(node: Node, doctor: Doctor) -> None:
    node.nvml.lose(node.gpu)
    node.agent.wait_snapshot(lambda s: s["gpus"][0]["conditions"])
    try:
        checks = doctor("driver", "registration")
        assert any("Lost" in s for s in said(checks["driver"], "fail"))
        assert any("none of" in s and "edgeagent status" in s for s in said(checks["registration"], "fail"))
    finally:
        node.nvml.recover(node.gpu)
        node.agent.wait_snapshot(lambda s: not s["gpus"][0]["conditions"])


def test_second_device_plugin_for_the_same_gpu(node: Node, doctor: Doctor) -> None:
    node.kubelet.wait_for(lambda: node.kubelet.allocatable.get(MEMORY))
    with node.kubelet.cluster.lock:
        node.kubelet.cluster.node.allocatable = {**node.kubelet.allocatable, "nvidia.com/gpu": 1}
    assert any("remove the other" in s for s in said(doctor("allocatable")["allocatable"], "warn"))


def test_api_server_that_refuses(node: Node, doctor: Doctor) -> None:
    node.api.behaviour.refuse = 503
    try:
        assert said(doctor("allocatable")["allocatable"], "warn")
    finally:
        node.api.behaviour.refuse = None


def test_container_without_proof(node: Node, doctor: Doctor) -> None:
    """`isolation` names the container and why its limit is not proved; `doctor isolation` lists all tries."""
    pod = node.kubelet.run(Pod("p", [ContainerSpec("app", {MEMORY: "2000", CORES: 30})]))
    node.kubelet.wait_for(lambda: pod.running)
    node.agent.wait_snapshot(lambda s: [c for c in s["containers"] if c.get("running")])
    found = doctor("isolation")["isolation"]
    assert found["outcome"] in ("pass", "warn")
    done = subprocess.run(
        [sys.executable, "-m", "edgeagent", "doctor", "isolation", "-c", str(node.agent.config_path), "--json"],
        env={**os.environ, **node.nvml.env()}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 2), done.stderr
    document = json.loads(done.stdout)
    tried = {(t["mechanism"], t["axis"]) for t in document["tries"]}
    assert {("limiter", "memory"), ("nvml-cgroup", "memory"), ("nvgpu-sched", "compute")} <= tried
    assert all(t.get("evidence") or t.get("problem") for t in document["tries"])
    node.kubelet.delete(pod)
    node.kubelet.wait_for(lambda: pod.gone)


def test_kubelet_stopped(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each part that is down is named with what to start."""
    with Node(short_dir) as n:
        path = str(n.agent.config_path)
        n.kubelet.stop()
        n.broker.stop()
        n.agent.wait_snapshot(lambda s: not s["kubeletConnected"] and not s["uplink"]["connected"])
        assert main(["doctor", "-c", path]) == 1
        out = capsys.readouterr().out
        assert "kubelet.sock" in out
        assert "systemctl status k3s" in out
        assert "does the broker listen on port" in out
        n.agent.stop()
        assert main(["doctor", "ready", "-c", path, "--wait", "1"]) == 1
        assert "systemctl start edgeagent" in capsys.readouterr().out


def test_ready_waits(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends as soon as the node shows the resources."""
    root = short_dir / "r"
    with StandInKubelet(root) as kubelet:
        agent = AgentProcess(root, short_dir / "w", {"gpus": {"source": "simulated"}})
        starter = threading.Timer(0.5, agent.start)
        starter.start()
        try:
            assert main(["doctor", "ready", "-c", str(agent.config_path), "--wait", "30"]) == 0
        finally:
            starter.join()
            agent.stop()
        assert kubelet.registrations
    assert CORES in capsys.readouterr().out


def test_jetson_memory_promised_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On unified memory the doctor says what K3s must be told."""
    tree = JetsonTree(tmp_path / "r", BOARDS["orin-nano-jp6"])
    path = tmp_path / "agent.yaml"
    path.write_text(f"hostRoot: {tree.root}\nkubernetes: {{enabled: false}}\n")
    main(["doctor", "-c", str(path), "--check", "driver", "--check", "node-memory"])
    out = capsys.readouterr().out
    assert "--kubelet-arg=system-reserved=memory=" in out
