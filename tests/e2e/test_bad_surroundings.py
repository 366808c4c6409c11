"""The agent where something is missing, broken or wrong: it stays up, says why, and finds the way back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.agent import CHECKOUT, AgentProcess
from tests.fakes.kubelet import FAST, ContainerSpec, Pod, StandInKubelet
from tests.fakes.nvml import driver
from tests.fakes.nvml.driver import FakeNvml
from tests.fakes.nvml.host import nvidia_host

MEMORY = "volcano.sh/vgpu-memory"
QUICK = {"gpus": {"pollSeconds": 0.2}}


@pytest.fixture
def root(short_dir: Path) -> Path:
    path = short_dir / "r"
    path.mkdir()
    return path


@pytest.fixture
def nvml(short_dir: Path, root: Path) -> FakeNvml:
    fake = FakeNvml(short_dir / "nvml")
    fake.add("l4")
    nvidia_host(root, fake)
    return fake


def edgeagent(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "edgeagent", *args],
        cwd=CHECKOUT, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_without_a_gpu_it_stays_up_says_why_and_finds_one_that_comes(short_dir: Path, root: Path) -> None:
    """No library, no card: a reason in words. The driver is installed: offered without a restart."""
    nvml = FakeNvml(short_dir / "nvml")
    library = short_dir / "late" / "libnvidia-ml.so.1"
    config = {**QUICK, "gpus": {"pollSeconds": 0.2, "nvml": {"libraryPath": str(library)}}}
    with StandInKubelet(root, timing=FAST) as kubelet, AgentProcess(root, short_dir / "a", config) as agent:
        agent.wait_ready()
        snapshot = agent.wait_snapshot(lambda s: s["reasons"] and not s["gpus"])
        assert "GPU" in snapshot["reasons"][0]
        assert snapshot["evidence"]
        assert kubelet.registrations == []
        nvml.add("l4")
        nvidia_host(root, nvml)
        library.parent.mkdir()
        library.symlink_to(nvml.library_path)
        kubelet.wait_for(lambda: kubelet.allocatable.get(MEMORY), 15)
        assert agent.running


REFUSALS = {
    "driver not loaded": (driver.DRIVER_NOT_LOADED, "kernel module"),
    "no permission": (driver.NO_PERMISSION, "needs read and write access to /dev/nvidiactl"),
    "version mismatch": (driver.LIB_RM_VERSION_MISMATCH, "550"),
}


@pytest.mark.parametrize(("code", "words"), REFUSALS.values(), ids=REFUSALS.keys())
def test_each_way_nvml_refuses_has_its_own_reason(
    short_dir: Path, root: Path, nvml: FakeNvml, code: int, words: str
) -> None:
    nvml.init_error(code)
    with AgentProcess(root, short_dir / "a", QUICK, env=nvml.env()) as agent:
        agent.wait_ready()
        snapshot = agent.wait_snapshot(lambda s: s["reasons"])
        assert words in " ".join(snapshot["reasons"])
        assert snapshot["health"] == "sick"
        nvml.init_error(None)
        agent.wait_snapshot(lambda s: s["gpus"] and s["gpus"][0]["health"] != "sick")


def test_without_a_kubelet_it_waits_and_registers_when_it_comes(
    short_dir: Path, root: Path, nvml: FakeNvml
) -> None:
    with AgentProcess(root, short_dir / "a", QUICK, env=nvml.env()) as agent:
        agent.wait_ready()
        snapshot = agent.wait_snapshot(lambda s: s["gpus"])
        assert any("kubelet" in reason for reason in snapshot["reasons"])
        with StandInKubelet(root, timing=FAST) as kubelet:
            kubelet.wait_for(lambda: kubelet.allocatable.get(MEMORY), 15)


def test_without_a_broker_pods_start_and_the_messages_are_kept(
    short_dir: Path, root: Path, nvml: FakeNvml
) -> None:
    """The broker's port answers nobody: the kubelet side does not notice."""
    config = {**QUICK, "fleet": {"enabled": True, "brokers": ["mqtt://127.0.0.1:9"], "telemetrySeconds": 0.5}}
    with (
        StandInKubelet(root, timing=FAST) as kubelet,
        AgentProcess(root, short_dir / "a", config, env=nvml.env()) as agent,
    ):
        agent.wait_ready()
        kubelet.wait_for(lambda: kubelet.allocatable.get(MEMORY))
        pod = kubelet.run(Pod("a", [ContainerSpec("app", {MEMORY: 1000})]))
        kubelet.wait_for(lambda: pod.apps[0].running)
        snapshot = agent.wait_snapshot(lambda s: s["uplink"]["queued"] > 2)
        assert not snapshot["uplink"]["connected"]
        assert snapshot["uplink"]["problem"]


def test_the_second_agent_on_a_node_ends_with_a_clear_message(
    short_dir: Path, root: Path, nvml: FakeNvml
) -> None:
    with AgentProcess(root, short_dir / "a", QUICK, env=nvml.env()) as first:
        first.wait_ready()
        second = AgentProcess(root, short_dir / "b", QUICK, env=nvml.env()).start()
        assert second.wait_exit() == 1
        assert f"another agent is running (pid {first.pid}" in second.log()
        assert first.snapshot()["gpus"]


def test_bad_configuration_ends_with_78_and_every_problem(short_dir: Path) -> None:
    path = short_dir / "bad.yaml"
    path.write_text("sharing:\n  memoryUnitMiB: 0\n  mode: sharedd\n")
    for command in (("run", "-c", str(path)), ("status", "-c", str(path))):
        done = edgeagent(*command)
        assert done.returncode == 78
        assert f"{path}:2: sharing.memoryUnitMiB" in done.stderr
        assert f"{path}:3: sharing.mode" in done.stderr


def test_status_without_an_agent_says_what_to_do(short_dir: Path) -> None:
    path = short_dir / "agent.yaml"
    path.write_text(f"hostRoot: {short_dir}\n")
    done = edgeagent("status", "-c", str(path))
    assert done.returncode == 1
    assert "is it running? (systemctl status edgeagent)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_stop_ends_in_time_although_the_driver_hangs(short_dir: Path, root: Path, nvml: FakeNvml) -> None:
    """X2: an NVML call that never returns neither stops the kubelet side nor the stop."""
    config = {"gpus": {"pollSeconds": 0.2, "callTimeoutSeconds": 0.5}}
    with (
        StandInKubelet(root, timing=FAST) as kubelet,
        AgentProcess(root, short_dir / "a", config, env=nvml.env()) as agent,
    ):
        agent.wait_ready()
        kubelet.wait_for(lambda: kubelet.allocatable.get(MEMORY))
        nvml.hang("nvmlDeviceGetTemperature")
        nvml.hang("nvmlDeviceGetTemperatureV")
        agent.wait_snapshot(
            lambda s: any(c["type"] == "DriverUnresponsive" for g in s["gpus"] for c in g["conditions"])
        )
        kubelet.wait_for(lambda: kubelet.allocatable.get(MEMORY) == 0)
        agent.signal(signal.SIGTERM)
        assert agent.wait_exit(8.0) == 0
        nvml.release()


def test_the_demo_shows_its_story_and_ends_by_itself() -> None:
    done = edgeagent("demo", "--for", "20s", "--plain")
    assert done.returncode == 0, done.stderr
    for words in (
        "registers with the kubelet",
        "waiting for room: no GPU has 12500 MiB",
        "segmenter starts at once",
        "The fail-over: detector comes back on GPU",
        "it recovered",
        "mqtt gpufleet/v1/lab/demo-box/status: ready",
    ):
        assert words in done.stdout
