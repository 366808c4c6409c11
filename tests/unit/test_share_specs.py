"""When a share's spec is written, and when the runtime is given a moment to notice."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from edgeagent.gpus.model import Gpu, GpuKind
from edgeagent.hostroot import HostRoot
from edgeagent.isolation.backend import ShareToEnforce
from edgeagent.kubelet.share_specs import FORGOTTEN_S, PAUSE_S, ShareSpecs, spec_names
from edgeagent.node.cdi import ContainerEdits, SpecDir
from edgeagent.sharing.tokens import Demand

GPU = Gpu("GPU-1", 0, GpuKind.DISCRETE, "simulated", "Pretend", 8192)
OTHER = replace(GPU, uuid="GPU-2")
SHARE = ShareToEnforce("uid-1", "app", "m000004", GPU, 2000, 30)
MEMORY = Demand(memory=0b110000)


class Waits(threading.Event):
    """Remembers for how long it was waited on, and returns at once."""

    def __init__(self) -> None:
        super().__init__()
        self.paused: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.paused.append(timeout)
        return False


@pytest.fixture
def waits() -> Waits:
    return Waits()


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make(tmp_path: Path) -> tuple[ShareSpecs, Clock, Path]:
    clock = Clock()
    return ShareSpecs(SpecDir(HostRoot(tmp_path), "/run/cdi"), clock), clock, tmp_path / "run/cdi"


def env_in(path: Path) -> dict[str, str]:
    (device,) = json.loads(path.read_text())["devices"]
    return dict(item.split("=", 1) for item in device["containerEdits"]["env"])


@pytest.mark.parametrize(
    ("demand", "names"),
    [
        (MEMORY, ("m000004",)),
        (Demand(0b110000, 0b1, 0b1000), ("m000004", "n000003")),
        (Demand(shares=0b1000), ("n000003",)),
        (Demand(), ()),
    ],
)
def test_every_device_that_an_allocate_named_gets_a_spec(demand: Demand, names: tuple[str, ...]) -> None:
    assert spec_names(demand) == names


def test_what_is_written(tmp_path: Path, waits: Waits) -> None:
    specs, _, directory = make(tmp_path)
    edits = ContainerEdits({"NVIDIA_VISIBLE_DEVICES": "all", "LD_PRELOAD": "/x.so"}, (), ("/dev/nvidia0",))
    specs.write(SHARE, Demand(0b110000, 0b1, 0b1000), edits, waits)
    assert env_in(directory / "edgeagent.io-share-m000004.json") == {
        "NVIDIA_VISIBLE_DEVICES": "void",
        "LD_PRELOAD": "/x.so",
        "EDGEAGENT_SHARE": "m000004",
        "EDGEAGENT_POD_UID": "uid-1",
        "EDGEAGENT_CONTAINER": "app",
        "EDGEAGENT_GPU_UUID": "GPU-1",
        "EDGEAGENT_MEMORY_MIB": "2000",
        "EDGEAGENT_CORES_PCT": "30",
    }
    assert env_in(directory / "edgeagent.io-share-n000003.json") == {"EDGEAGENT_SHARE": "m000004"}
    assert waits.paused == []


def test_only_a_changed_spec_is_waited_for(tmp_path: Path, waits: Waits) -> None:
    specs, _, directory = make(tmp_path)
    specs.write(SHARE, MEMORY, ContainerEdits(), waits)
    before = (directory / "edgeagent.io-share-m000004.json").stat().st_ino
    specs.write(SHARE, MEMORY, ContainerEdits(), waits)
    assert (directory / "edgeagent.io-share-m000004.json").stat().st_ino == before
    assert waits.paused == []
    specs.write(replace(SHARE, gpu=OTHER), MEMORY, ContainerEdits(), waits)
    assert waits.paused == [PAUSE_S]


@pytest.mark.parametrize(
    ("later_s", "again", "pauses"),
    [
        pytest.param(0.1, OTHER, 1, id="another at once: the runtime may not have noticed the end"),
        pytest.param(0.1, GPU, 0, id="the same again"),
        pytest.param(FORGOTTEN_S, OTHER, 0, id="another, later"),
    ],
)
def test_a_spec_that_was_removed(
    tmp_path: Path, waits: Waits, later_s: float, again: Gpu, pauses: int
) -> None:
    specs, clock, directory = make(tmp_path)
    specs.write(SHARE, MEMORY, ContainerEdits(), waits)
    specs.remove(["m000004", "m000099"])
    assert list(directory.iterdir()) == []
    clock.now_s += later_s
    specs.write(replace(SHARE, gpu=again), MEMORY, ContainerEdits(), waits)
    assert len(waits.paused) == pauses


def test_what_a_run_before_has_left_goes(tmp_path: Path, waits: Waits) -> None:
    specs, _, directory = make(tmp_path)
    specs.write(SHARE, MEMORY, ContainerEdits(), waits)
    specs.write(replace(SHARE, share="m000009"), Demand(memory=1 << 9), ContainerEdits(), waits)
    (directory / "nvidia.yaml").touch()
    specs.remove_others(["m000009"])
    assert sorted(p.name for p in directory.iterdir()) == ["edgeagent.io-share-m000009.json", "nvidia.yaml"]
