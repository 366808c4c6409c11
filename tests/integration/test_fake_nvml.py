"""The fake library itself: it must look to unmodified nvidia-ml-py like a driver's."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from tests.fakes.nvml import FakeNvml
from tests.fakes.nvml.build import looked_up_symbols
from tests.fakes.nvml.driver import ALL_EVENTS

STRUCTURES = (
    "c_nvmlMemory_t", "c_nvmlMemory_v2_t", "c_nvmlUtilization_t", "nvmlPciInfo_t", "c_nvmlProcessInfo_v2_t",
    "c_nvmlProcessInfo_v3_t", "c_nvmlProcessUtilizationSample_t", "c_nvmlEventData_t",
    "c_nvmlTemperature_v1_t", "c_nvmlDeviceAttributes", "c_nvmlFieldValue_t", "c_nvmlSetMemoryLimits_v1_t",
    "c_nvmlGetMemoryLimits_v1_t",
)  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_have_the_size_that_nvidia_ml_py_gives_them(tmp_path: Path, name: str) -> None:
    library = ctypes.CDLL(str(FakeNvml(tmp_path).library_path))
    assert library.fake_nvml_sizeof(name.encode()) == ctypes.sizeof(getattr(pynvml, name))


def test_every_symbol_that_nvidia_ml_py_looks_up_is_exported(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(FakeNvml(tmp_path).library_path))
    names = looked_up_symbols()
    assert len(names) > 300
    assert [n for n in sorted(names) if not hasattr(library, n)] == []


def test_an_old_driver_lacks_the_newer_symbols(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(FakeNvml(tmp_path, old_driver=True).library_path))
    for name in (
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetTemperatureV",
    ):
        assert not hasattr(library, name)
    assert hasattr(library, "nvmlDeviceGetComputeRunningProcesses_v2")


SCRIPT = """
import sys, threading
import pynvml as n

n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
print(n.nvmlDeviceGetCount(), n.nvmlDeviceGetName(h), n.nvmlSystemGetDriverVersion())
events = n.nvmlEventSetCreate()
n.nvmlDeviceRegisterEvents(h, n.nvmlDeviceGetSupportedEventTypes(h), events)
print("ready", flush=True)
for line in sys.stdin:
    what = line.strip()
    try:
        if what == "temperature":
            print(n.nvmlDeviceGetTemperatureV(h, 0), flush=True)
        if what == "event":
            data = n.nvmlEventSetWait_v2(events, 60000)
            print(hex(data.eventType), data.eventData, flush=True)
        if what == "power":
            print(n.nvmlDeviceGetPowerUsage(h), flush=True)
    except n.NVMLError as e:
        print(type(e).__name__, e.value, flush=True)
"""


def test_unmodified_nvidia_ml_py_finds_it_by_name_and_sees_changes_live(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path)
    gpu = fake.add("l4", temperature_c=41)
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **fake.env()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdin is not None
        assert child.stdout is not None

        def ask(what: str) -> str:
            print(what, file=child.stdin, flush=True)
            return child.stdout.readline().strip()

        assert child.stdout.readline().strip() == "1 NVIDIA L4 550.90.07"
        assert child.stdout.readline().strip() == "ready"
        assert ask("temperature") == "41"
        fake.set(gpu, temperature_c=88)
        assert ask("temperature") == "88"
        fake.xid(gpu, 79)
        assert ask("event") == "0x8 79"
        fake.set(gpu, temperature_c=None)
        assert ask("temperature") == "NVMLError_NotSupported 3"
        fake.error("nvmlDeviceGetPowerUsage", 999, gpu)
        assert ask("power") == "NVMLError_Unknown 999"
        fake.lose(gpu)
        assert ask("event") == "NVMLError_GpuIsLost 15"
        fake.all_calls(18)
        assert ask("temperature") == "NVMLError_LibRmVersionMismatch 18"
        child.stdin.close()
    assert child.returncode == 0


def test_events_from_before_the_event_set_are_not_delivered(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path)
    gpu = fake.add("l4")
    fake.xid(gpu, 31)
    library = ctypes.CDLL(str(fake.library_path))
    assert library.nvmlInit_v2() == 0
    handle, events = ctypes.c_void_p(), ctypes.c_void_p()
    data = pynvml.c_nvmlEventData_t()
    assert library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) == 0
    assert library.nvmlEventSetCreate(ctypes.byref(events)) == 0
    assert library.nvmlDeviceRegisterEvents(handle, ctypes.c_ulonglong(ALL_EVENTS), events) == 0
    assert library.nvmlEventSetWait_v2(events, ctypes.byref(data), 0) == 10
    fake.xid(gpu, 79)
    assert library.nvmlEventSetWait_v2(events, ctypes.byref(data), 0) == 0
    assert data.eventData == 79


def test_a_handle_of_an_earlier_session_is_stale(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path)
    gpu = fake.add("l4")
    library = ctypes.CDLL(str(fake.library_path))
    handle, minor = ctypes.c_void_p(), ctypes.c_uint()
    assert library.nvmlInit_v2() == 0
    assert library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) == 0
    assert library.nvmlDeviceGetMinorNumber(handle, ctypes.byref(minor)) == 0
    assert library.nvmlShutdown() == 0
    assert library.nvmlInit_v2() == 0
    assert library.nvmlDeviceGetMinorNumber(handle, ctypes.byref(minor)) == 1
    assert fake.calls(gpu=gpu)[-1].mark == "stale"
