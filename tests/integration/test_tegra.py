"""The Tegra back end over every board's tree, seen as a service and from a container."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.gpus.model import Gpu, GpuFault, GpuKind, GpuProcess, GpuReading, ProcessType
from edgeagent.gpus.tegra import TegraBackend
from edgeagent.hostroot import HostRoot
from tests.fakes.jetson import BOARDS, Board, JetsonTree
from tests.fakes.jetson.tree import View

Make = Callable[..., tuple[JetsonTree, TegraBackend]]
COMPUTE = frozenset({ProcessType.COMPUTE})
PROCESSES = (
    GpuProcess(977, COMPUTE, 20.0, name="gst launch 1.0"),
    GpuProcess(4321, COMPUTE, 1024.0, name="python3"),
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A tree and a back end over it."""
    backends: list[TegraBackend] = []

    def _make(
        board: str | Board, view: View = "service", *, gpu_appears: bool = True, **options: Any
    ) -> tuple[JetsonTree, TegraBackend]:
        described = BOARDS[board] if isinstance(board, str) else board
        tree = JetsonTree(tmp_path / "host", described, view, gpu_appears=gpu_appears)
        backend = TegraBackend(HostRoot(tree.root), **options)
        backends.append(backend)
        return tree, backend

    yield _make
    for backend in backends:
        backend.close()


def only_gpu(backend: TegraBackend) -> Gpu:
    (gpu,) = backend.inventory().gpus
    return gpu


def nvml_gpu(model: str, uuid: str = "GPU-1", **more: Any) -> Gpu:
    return Gpu(uuid, 0, GpuKind.DISCRETE, "nvml", model, 0, **more)


# -- every tree × view ----------------------------------------------------------------------------

# board: (model, MemTotal MiB, cc, SMs, L4T, JetPack)
INVENTORY = {
    "nano-jp4": ("Jetson Nano Developer Kit", 3957, (5, 3), 1, "32.7.1", "4.6.1"),
    "xavier-nx-jp5": ("Jetson Xavier NX Developer Kit", 6835, (7, 2), 6, "35.4.1", "5.1.2"),
    "orin-nano-jp6": ("Jetson Orin Nano 8GB Developer Kit", 7620, (8, 7), 8, "36.4.3", "6.2"),
    "orin-nx-jp6": ("Jetson Orin NX 16GB", 15675, (8, 7), 8, "36.4.7", "6.2.1"),
    "agx-orin-jp72": ("Jetson AGX Orin 64GB", 62817, (8, 7), 16, "39.2.1", "7.2.1"),
    "thor-jp7": ("Jetson AGX Thor (T5000)", 125771, (11, 0), 20, "38.2.2", "7.0"),
    "agx-orin-dgpu": ("Jetson AGX Orin 32GB", 30536, (8, 7), 14, "36.4.4", "6.2.1"),
}
# board: (load %, SM MHz, GPU °C, module W, power mode)
READINGS = {
    "nano-jp4": (43.7, 76.8, 21.0, 2.827, "MAXN"),
    "xavier-nx-jp5": (43.7, 1109.25, 43.5, 4.398784, "MODE_20W_6CORE"),
    "orin-nano-jp6": (43.7, 305.0, 48.562, 4.75972, "MAXN_SUPER"),
    "orin-nx-jp6": (43.7, 305.0, 48.562, 4.75972, "15W"),
    "agx-orin-jp72": (43.7, 1300.5, 47.625, 11.125752, "MAXN"),
    "thor-jp7": (None, 1575.0, 51.0, 46.25, "120W"),
    "agx-orin-dgpu": (43.7, 305.0, 48.562, 11.125752, "15W"),
}
VIEWS = [pytest.param(b, v, id=f"{b}/{v}") for b in BOARDS for v in ("service", "container")]


@pytest.mark.parametrize(("board", "view"), VIEWS)
def test_inventory_of_every_board(make: Make, board: str, view: View) -> None:
    tree, backend = make(board, view)
    gpu = only_gpu(backend)
    model, memory, cc, sms, l4t, jetpack = INVENTORY[board]
    assert (gpu.model, gpu.memory_total_mib, gpu.compute_capability, gpu.multiprocessors) == (
        model,
        memory,
        cc,
        sms,
    )
    seen = (gpu.facts["l4t"], gpu.facts["jetpack"])
    assert seen == ((l4t, jetpack) if view == "service" else ("unknown", "unknown"))
    assert (gpu.kind, gpu.source, gpu.unified_memory, gpu.index) == (GpuKind.INTEGRATED, "tegra", True, 0)
    assert (gpu.temperature_slowdown_c, gpu.temperature_shutdown_c) == (99.0, 104.5)
    assert gpu.device_nodes
    assert all(tree.path(n.lstrip("/")).exists() for n in gpu.device_nodes)
    assert not [n for n in gpu.device_nodes if "sched" in n or n == "/dev/nvidia1"]


@pytest.mark.parametrize(("board", "view"), VIEWS)
def test_reading_of_every_board(make: Make, board: str, view: View) -> None:
    tree, backend = make(board, view)
    reading = backend.read(only_gpu(backend).uuid)
    load, clock, temperature, watts, mode = READINGS[board]
    assert reading.fault is None
    assert (reading.util_pct, reading.clock_sm_mhz, reading.temperature_c) == (load, clock, temperature)
    assert reading.power_w == pytest.approx(watts)
    assert reading.fan_pct == 20.0
    assert reading.power_mode == (mode if view == "service" else None)
    assert (
        reading.host_memory_available_mib == reading.memory_free_mib == tree.board.mem_total_kib // 2 / 1024
    )
    assert reading.host_swap_used_mib == 0
    assert reading.throttle_reasons == frozenset()
    counts = tree.board.overcurrent
    assert reading.overcurrent_events == (sum(counts) if counts else None)
    assert not [zone for zone in reading.temperatures_c if "pmic" in zone or "fan" in zone or zone == "cv0"]
    nvgpu = board != "thor-jp7"
    assert reading.processes == (PROCESSES if nvgpu and view == "service" else None)
    # Without debugfs only kernels that count NvMapMemUsed tell.
    known = nvgpu and (view == "service" or tree.board.nvmap_in_meminfo)
    assert reading.memory_used_mib == (1036.0 if known else None)


def test_not_a_tegra_board(tmp_path: Path) -> None:
    backend = TegraBackend(HostRoot(tmp_path), nvml_gpus=lambda: [nvml_gpu("NVIDIA L4")])
    found = backend.inventory()
    assert (found.gpus, found.fault) == ((), GpuFault.NOT_FOUND)
    assert found.problem == "not a Tegra board"


def test_no_memory_total_is_a_problem_said_in_words(make: Make) -> None:
    tree, backend = make("orin-nano-jp6")
    tree.put("proc/meminfo", "")
    found = backend.inventory()
    assert found.gpus == ()
    assert found.problem is not None
    assert "MemTotal" in found.problem


def test_reading_something_else_is_not_found(make: Make) -> None:
    _, backend = make("orin-nano-jp6")
    assert backend.read("GPU-1").fault is GpuFault.NOT_FOUND


# -- D4: seen as the wrong thing, or latched to the wrong source -----------------------------------


def test_d4a_orin_with_nvml_whose_gpu_node_comes_late(make: Make) -> None:
    """NVML knows the name and nothing else; load becomes a number without a restart."""
    clock = Clock()
    orin = nvml_gpu("Orin (nvgpu)", "4f1b2d3c-0000-1111-2222-333344445555")
    tree, backend = make(
        "orin-nano-jp6",
        gpu_appears=False,
        clock=clock,
        nvml_gpus=lambda: [orin],
        nvml_read=lambda uuid: GpuReading(uuid, 0.0, processes=()),
    )
    gpu = only_gpu(backend)
    assert (gpu.memory_total_mib, gpu.facts["jetpack"]) == (7620, "6.2")
    assert gpu.facts["board"] == "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super"
    assert backend.read(gpu.uuid).util_pct is None
    clock.now += 5
    tree.gpu_appears()
    assert backend.read(gpu.uuid).util_pct == 43.7
    assert only_gpu(backend).uuid == gpu.uuid


def test_d4b_thor_container_with_nothing_but_a_device_tree(make: Make, tmp_path: Path) -> None:
    tree, backend = make("thor-jp7", "container")
    tree.remove("sys/devices/soc0/family")
    tree.remove("proc/sys")
    gpu = only_gpu(backend)
    assert (gpu.facts["soc"], gpu.facts["jetpack"], gpu.memory_total_mib) == ("tegra264", "unknown", 125771)


def test_d4c_a_release_in_no_table(make: Make) -> None:
    _, backend = make(replace(BOARDS["orin-nano-jp6"], l4t=(36, "97.1")))
    gpu = only_gpu(backend)
    assert (gpu.facts["l4t"], gpu.facts["jetpack"]) == ("36.97.1", "unknown")


def test_d4d_a_model_without_the_vendor_and_no_nvml(make: Make) -> None:
    def no_library() -> list[Gpu]:
        from edgeagent.errors import GpuError

        raise GpuError("cannot load libnvidia-ml.so.1", "library_missing")

    board = replace(BOARDS["agx-orin-jp72"], model="Jetson AGX Orin", compatible=("nvidia,tegra234",))
    _, backend = make(board, nvml_gpus=no_library)
    gpu = only_gpu(backend)
    assert (gpu.model, gpu.multiprocessors, gpu.compute_capability) == ("Jetson AGX Orin", None, (8, 7))


# -- NVML beside it -------------------------------------------------------------------------------


def test_thor_takes_load_and_processes_from_nvml(make: Make) -> None:
    thor = nvml_gpu(
        "NVIDIA Thor", "GPU-t", driver_version="580.00", cuda_version="13.0", pci_address="0000:01:00.0"
    )
    trainer = GpuProcess(42, COMPUTE, 3000.0, name="train")
    _, backend = make(
        "thor-jp7",
        nvml_gpus=lambda: [thor],
        nvml_read=lambda uuid: GpuReading(uuid, 0.0, util_pct=71.0, processes=(trainer,)),
    )
    gpu = only_gpu(backend)
    assert (gpu.driver_version, gpu.cuda_version, gpu.pci_address) == ("580.00", "13.0", "0000:01:00.0")
    assert gpu.facts["nvml_uuid"] == "GPU-t"
    reading = backend.read(gpu.uuid)
    assert (reading.util_pct, reading.processes, reading.memory_used_mib) == (71.0, (trainer,), 3000.0)


def test_thor_lost_to_nvml_is_lost_and_orin_is_not(make: Make) -> None:
    def lost(uuid: str) -> GpuReading:
        return GpuReading(uuid, 0.0, fault=GpuFault.LOST, fault_detail="fell off")

    _, thor = make("thor-jp7", nvml_gpus=lambda: [nvml_gpu("NVIDIA Thor")], nvml_read=lost)
    assert thor.read(only_gpu(thor).uuid).fault is GpuFault.LOST
    _, orin = make("orin-nano-jp6", nvml_gpus=lambda: [nvml_gpu("Orin (nvgpu)")], nvml_read=lost)
    assert orin.read(only_gpu(orin).uuid).fault is None


def test_a_discrete_card_beside_the_igpu_keeps_its_nodes_to_itself(make: Make) -> None:
    card = nvml_gpu("NVIDIA RTX A2000 12GB", minor=0)
    tree, backend = make("agx-orin-dgpu", nvml_gpus=lambda: [card])
    assert "/dev/nvidia0" in {f"/{p.relative_to(tree.root)}" for p in tree.path("dev").iterdir()}
    assert "/dev/nvidia0" not in only_gpu(backend).device_nodes


# -- values that change, files that break ----------------------------------------------------------


def test_values_change_under_the_running_agent(make: Make) -> None:
    tree, backend = make("orin-nano-jp6")
    uuid = only_gpu(backend).uuid
    backend.read(uuid)
    tree.set_load(1000)
    tree.set_zone("gpu-thermal", 97500)
    tree.set_alert("gpu-throttle-alert", 1)
    tree.set_alert("cpu-throttle-alert", 2)
    tree.set_overcurrent(3, 40)
    tree.set_power_mode(3)
    tree.set_memory(available_kib=1024 * 1024, nvmap_kib=4096 * 1024, swap_free_kib=3_901_440 - 2048)
    tree.set_clients((("python3", 4321, 2048), ("python3", 4321, 1024)), 3072)
    reading = backend.read(uuid)
    assert (reading.util_pct, reading.temperature_c, reading.power_mode) == (100.0, 97.5, "7W")
    assert reading.throttle_reasons == {"thermal_sw", "thermal_cpu", "oc"}
    assert reading.overcurrent_events == 55
    assert (reading.memory_used_mib, reading.memory_free_mib, reading.host_swap_used_mib) == (
        4096.0,
        1024.0,
        2.0,
    )
    assert reading.processes == (GpuProcess(4321, COMPUTE, 3.0, name="python3"),)
    assert backend.read(uuid).throttle_reasons == {"thermal_sw", "thermal_cpu"}  # no new event since


def test_a_power_mode_in_no_table_is_named_by_its_number(make: Make) -> None:
    tree, backend = make("orin-nano-jp6")
    tree.set_power_mode(12)
    assert backend.read(only_gpu(backend).uuid).power_mode == "mode 12"


def test_an_offline_gpu_zone_falls_back_to_the_junction_and_is_no_failure(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    tree, backend = make("orin-nano-jp6")
    uuid = only_gpu(backend).uuid
    tree.set_zone("gpu-thermal", -256000)
    for _ in range(5):
        reading = backend.read(uuid)
    assert reading.temperature_c == 49.156
    assert "gpu" not in reading.temperatures_c
    tree.set_zone("tj-thermal", -256000)
    assert backend.read(uuid).temperature_c is None
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


BROKEN = {
    "temp": (lambda t: f"{t.zone('gpu-thermal')}/temp", "temperature_c", 49.156),
    "load": (lambda t: f"sys/devices/{t.board.gpu_device}/load", "util_pct", None),
    "clock": (
        lambda t: f"sys/devices/{t.board.gpu_device}/devfreq/17000000.gpu/cur_freq",
        "clock_sm_mhz",
        None,
    ),
    "rail": (lambda t: "sys/class/hwmon/hwmon1/in1_input", "power_w", pytest.approx(1.943760)),
    "fan": (lambda t: "sys/class/hwmon/hwmon0/pwm1", "fan_pct", None),
    "power mode": (lambda t: "var/lib/nvpmodel/status", "power_mode", None),
    "meminfo": (lambda t: "proc/meminfo", "host_memory_available_mib", None),
    "nvmap": (lambda t: "sys/kernel/debug/nvmap/iovmm/clients", "processes", None),
}
WAYS = ("empty", "binary", "directory", "loop", "fifo", "fifo with writer", "gone")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", BROKEN)
def test_one_broken_file_costs_one_value(
    make: Make, caplog: pytest.LogCaptureFixture, what: str, way: str
) -> None:
    tree, backend = make("orin-nano-jp6")
    uuid = only_gpu(backend).uuid
    before = backend.read(uuid)
    place, value, expected = BROKEN[what]
    path = tree.path(place(tree))
    path.unlink()
    keep = None
    if way.startswith("fifo"):
        os.mkfifo(path)
        keep = os.open(path, os.O_RDWR) if way == "fifo with writer" else None
    elif way == "directory":
        path.mkdir()
    elif way == "loop":
        path.symlink_to(path.name)
    elif way != "gone":
        path.write_bytes(b"" if way == "empty" else b"\xff\x00\x80junk")
    try:
        for _ in range(6):
            after = backend.read(uuid)
    finally:
        if keep is not None:
            os.close(keep)
    assert getattr(after, value) == expected
    assert after.fault is None
    same = {"clock_memory_mhz", "overcurrent_events", "throttle_reasons"}
    assert all(getattr(after, n) == getattr(before, n) for n in same)
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


def test_a_hanging_zone_does_not_stall_the_poll(make: Make) -> None:
    from edgeagent.gpus.sweep import read_file

    release = threading.Event()

    def read(path: str, max_bytes: int) -> bytes:
        if "thermal_zone2" in path:
            release.wait(30)
        return read_file(path, max_bytes)

    _, backend = make("orin-nano-jp6", read=read)
    uuid = only_gpu(backend).uuid
    try:
        reading = backend.read(uuid)
        assert (reading.temperature_c, reading.util_pct, reading.fan_pct) == (48.562, 43.7, 20.0)
        started = time.monotonic()
        backend.read(uuid)
        assert time.monotonic() - started < 20  # it is not even tried again
    finally:
        release.set()


def test_a_board_that_loses_everything_but_memory_still_reads(make: Make) -> None:
    tree, backend = make("orin-nano-jp6")
    uuid = only_gpu(backend).uuid
    tree.remove("sys")
    reading = backend.read(uuid)
    assert (reading.fault, reading.util_pct, reading.temperature_c, reading.power_w) == (
        None,
        None,
        None,
        None,
    )
    assert reading.host_memory_available_mib == 3810.0


def test_sources_that_come_later_are_found_within_a_minute(make: Make) -> None:
    clock = Clock()
    tree, backend = make("orin-nano-jp6", clock=clock)
    tree.remove("sys/class/hwmon/hwmon0")
    uuid = only_gpu(backend).uuid
    assert backend.read(uuid).fan_pct is None
    tree.put("sys/class/hwmon/hwmon9/name", "pwmfan\n")
    tree.put("sys/class/hwmon/hwmon9/pwm1", "255\n")
    clock.now += 61
    assert backend.read(uuid).fan_pct == 100.0


# -- the protocol's small print --------------------------------------------------------------------


def test_wait_event_sleeps_and_wakes(make: Make) -> None:
    _, backend = make("orin-nano-jp6")
    woken = threading.Event()

    def wait() -> None:
        assert backend.wait_event(30) is None
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    backend.wake()
    thread.join(10)
    assert woken.is_set()
    assert backend.wait_event(0.001) is None


def test_no_subprocess_and_no_thread_that_grows(make: Make) -> None:
    _, backend = make("agx-orin-jp72")
    uuid = only_gpu(backend).uuid
    backend.read(uuid)
    threads = threading.active_count()
    children = os.times().children_system + os.times().children_user
    for _ in range(50):
        backend.read(uuid)
    assert threading.active_count() == threads
    assert os.times().children_system + os.times().children_user == children
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


# -- whatever the files hold ----------------------------------------------------------------------


def numbers(reading: GpuReading) -> Iterator[float]:
    for value in (getattr(reading, name) for name in reading.__dataclass_fields__):
        if isinstance(value, (int, float)):
            yield float(value)
        elif isinstance(value, dict):
            yield from value.values()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_contents_of_any_file_cost_values_only(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    board = BOARDS[data.draw(st.sampled_from(sorted(BOARDS)))]
    tree = JetsonTree(tmp_path_factory.mktemp("fuzz"), board)
    files = sorted(
        p for p in tree.root.rglob("*") if p.is_file() and not p.is_symlink() and p.name != "meminfo"
    )
    junk = st.one_of(st.binary(max_size=40), st.integers().map(lambda n: b"%d" % n), st.just(b"-256000\n"))
    for path in data.draw(st.lists(st.sampled_from(files), max_size=12, unique=True)):
        path.write_bytes(data.draw(junk))
    backend = TegraBackend(HostRoot(tree.root))
    try:
        gpu = only_gpu(backend)
        for _ in range(4):
            reading = backend.read(gpu.uuid)
            assert reading.fault is None
            assert all(math.isfinite(n) for n in numbers(reading))
            texts = [
                *reading.temperatures_c,
                *reading.rails_w,
                *(p.name or "" for p in reading.processes or ()),
            ]
            assert all(t.isprintable() for t in (*texts, gpu.model, *gpu.facts.values()))
            json.dumps(dict(reading.temperatures_c), allow_nan=False)
    finally:
        backend.close()
