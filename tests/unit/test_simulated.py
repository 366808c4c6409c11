"""Simulated GPUs: repeatable values, faults that behave as a driver's, files that are read live."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from edgeagent.config.schema import SimulatedConfig
from edgeagent.errors import ConfigError
from edgeagent.gpus.model import GpuEventKind, GpuFault, GpuKind
from edgeagent.gpus.simulated import SimulatedBackend
from edgeagent.gpus.simulated_files import PROFILES, SimulatedProcess

SHIPPED = {"rtx-a2000", "l4", "t4", "2x-rtx-4000-ada", "orin-nx-16g", "agx-orin-64g"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(profile: str = "2x-rtx-4000-ada", **options: object) -> tuple[SimulatedBackend, Clock]:
    clock = Clock()
    processes = options.pop("processes", None)
    config = SimulatedConfig(profile=profile, **options)  # type: ignore[arg-type]
    return SimulatedBackend(config, clock, processes), clock  # type: ignore[arg-type]


def test_the_shipped_profiles() -> None:
    assert {p.stem for p in PROFILES.glob("*.yaml")} == SHIPPED


@pytest.mark.parametrize("profile", sorted(SHIPPED))
def test_every_profile_gives_plausible_readings_for_a_day(profile: str) -> None:
    backend, clock = made(profile)
    gpus = backend.inventory().gpus
    assert len(gpus) == (2 if profile.startswith("2x") else 1)
    for gpu in gpus:
        assert (gpu.kind is GpuKind.INTEGRATED) == ("orin" in profile)
        for hour in range(24):
            clock.now = hour * 3600 + 7.5
            r = backend.read(gpu.uuid)
            assert r.fault is None
            assert r.util_pct is not None
            assert 0 <= r.util_pct <= 100
            assert r.temperature_c is not None
            assert gpu.temperature_slowdown_c is not None
            assert 0 < r.temperature_c < gpu.temperature_slowdown_c
            assert r.memory_used_mib is not None
            assert 0 <= r.memory_used_mib <= gpu.memory_total_mib
            assert (r.host_memory_available_mib is not None) == gpu.unified_memory


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    def run(seed: int) -> list[object]:
        process = SimulatedProcess(pid=1, gpu="0", share_mib=4000)
        backend, clock = made(seed=seed, processes=lambda: [process])
        (gpu, _) = backend.inventory().gpus
        out: list[object] = [gpu.uuid]
        for t in range(0, 300, 10):
            clock.now = t
            out.append(backend.read(gpu.uuid))
        return out

    assert run(1) == run(1)
    assert run(1)[1:] != run(2)[1:]
    assert run(1)[0] != run(2)[0]


def test_values_move() -> None:
    backend, clock = made(processes=lambda: [SimulatedProcess(pid=1, gpu="0", share_mib=4000)])
    uuid = backend.inventory().gpus[0].uuid
    seen = set()
    for t in range(0, 120, 5):
        clock.now = t
        r = backend.read(uuid)
        seen.add((r.util_pct, r.temperature_c, r.power_w, r.memory_used_mib))
    assert len(seen) > 12


def test_processes_use_part_of_their_share_on_their_gpu() -> None:
    running: list[SimulatedProcess] = []
    backend, clock = made(processes=lambda: running)
    first, second = backend.inventory().gpus
    assert backend.read(first.uuid).processes == ()
    running.append(SimulatedProcess(pid=41, gpu="0", name="infer", share_mib=8000, cores_pct=30))
    running.append(SimulatedProcess(pid=42, gpu=second.uuid, share_mib=2000, used_mib=2500.0))
    for t in range(0, 600, 20):
        clock.now = t
        (process,) = backend.read(first.uuid).processes or ()
        assert (process.pid, process.name) == (41, "infer")
        assert process.used_mib is not None
        assert 0 < process.used_mib <= 8000
        assert process.sm_util_pct is not None
        assert 0 < process.sm_util_pct <= 30
    (over,) = backend.read(second.uuid).processes or ()
    assert over.used_mib == 2500


def test_what_processes_use_is_what_the_card_uses() -> None:
    running = [SimulatedProcess(pid=p, gpu="0", share_mib=1000 * p) for p in (1, 2, 3)]
    backend, _ = made(processes=lambda: running)
    reading = backend.read(backend.inventory().gpus[0].uuid)
    total = math.fsum(p.used_mib or 0 for p in reading.processes or ())
    assert reading.memory_used_mib == pytest.approx(total)


def test_a_lost_gpu_stays_lost_until_it_is_found_anew() -> None:
    backend, _ = made()
    first, second = backend.inventory().gpus
    backend.inject("lost", first.index)
    assert backend.read(first.uuid).fault is GpuFault.LOST
    assert backend.read(second.uuid).fault is None
    backend.clear()
    assert backend.read(first.uuid).fault is GpuFault.LOST
    assert backend.inventory().gpus == (first, second)
    assert backend.read(first.uuid).fault is None


def test_all_gpus_lost_has_a_problem() -> None:
    backend, _ = made("l4")
    backend.inject("reset_required")
    found = backend.inventory()
    assert (found.gpus, found.fault) == ((), GpuFault.RESET_REQUIRED)
    assert found.problem


@pytest.mark.parametrize("fault", ["driver_mismatch", "driver_not_loaded", "no_permission"])
def test_faults_of_the_library_concern_every_gpu(fault: str) -> None:
    backend, _ = made()
    gpus = backend.inventory().gpus
    backend.inject(fault)
    assert {backend.read(g.uuid).fault for g in gpus} == {GpuFault(fault)}
    assert backend.inventory().fault is GpuFault(fault)
    backend.clear()
    assert backend.inventory().gpus == gpus
    assert {backend.read(g.uuid).fault for g in gpus} == {None}


def test_hot_is_above_the_slowdown_threshold_and_throttles() -> None:
    backend, _ = made("l4")
    (gpu,) = backend.inventory().gpus
    backend.inject("hot", gpu.uuid)
    reading = backend.read(gpu.uuid)
    assert reading.temperature_c is not None
    assert gpu.temperature_slowdown_c is not None
    assert reading.temperature_c > gpu.temperature_slowdown_c
    assert reading.throttle_reasons is not None
    assert "thermal_hw" in reading.throttle_reasons


@pytest.mark.parametrize(
    ("fault", "field", "value"),
    [("ecc", "ecc_uncorrectable", 1), ("row_remap", "row_remap_failed", True)],
)
def test_memory_faults(fault: str, field: str, value: object) -> None:
    backend, _ = made("l4")
    uuid = backend.inventory().gpus[0].uuid
    assert getattr(backend.read(uuid), field) in (0, False)
    backend.inject(fault)
    assert getattr(backend.read(uuid), field) == value


def test_an_xid_is_one_event() -> None:
    backend, _ = made()
    uuid = backend.inventory().gpus[1].uuid
    backend.inject("xid", 1, xid=79)
    event = backend.wait_event(10)
    assert event is not None
    assert (event.kind, event.uuid, event.xid, event.source) == (GpuEventKind.XID, uuid, 79, "simulated")
    assert backend.wait_event(0) is None


def test_the_fault_file_is_read_live(tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    backend, _ = made(fault_file=str(path))
    first, second = backend.inventory().gpus
    path.write_text("faults:\n  - {gpu: 0, fault: lost}\n  - {gpu: 1, fault: xid, xid: 31}\n")
    assert backend.read(first.uuid).fault is GpuFault.LOST
    event = backend.wait_event(10)
    assert event is not None
    assert (event.uuid, event.xid) == (second.uuid, 31)
    assert backend.wait_event(0) is None
    path.write_text("faults: nonsense\n")  # half written, or wrong: as it was
    assert backend.read(first.uuid).fault is GpuFault.LOST
    path.unlink()
    backend.inventory()
    assert backend.read(first.uuid).fault is None


def test_a_fault_in_the_file_can_be_timed(tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text("faults: [{gpu: all, fault: lost, afterSeconds: 5, forSeconds: 10}]\n")
    backend, clock = made("l4", fault_file=str(path))
    uuid = backend.inventory().gpus[0].uuid
    seen = []
    for t in (0, 4, 6, 14, 16):
        clock.now = t
        backend.inventory()
        seen.append(backend.read(uuid).fault)
    assert seen == [None, None, GpuFault.LOST, GpuFault.LOST, None]


def test_the_process_file_is_read_live(tmp_path: Path) -> None:
    path = tmp_path / "processes.yaml"
    backend, _ = made(process_file=str(path))
    uuid = backend.inventory().gpus[0].uuid
    assert backend.read(uuid).processes == ()
    content = {"processes": [{"pid": 7, "gpu": "0", "shareMiB": 100, "usedMiB": 60, "name": "a"}]}
    path.write_text(json.dumps(content))
    assert [(p.pid, p.used_mib) for p in backend.read(uuid).processes or ()] == [(7, 60)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpus: []", "at least one"),
        ("gpus: [{model: X, memoryTotalMib: 5}]", "did you mean memoryTotalMiB"),
        ("gpus: [{model: X, kind: quantum}]", "quantum"),
    ],
)
def test_a_bad_profile_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        made(str(path))
    assert words in str(caught.value)
    assert f"{path}:1" in str(caught.value)


def test_an_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        made("h100")
    assert "rtx-a2000" in str(caught.value)
