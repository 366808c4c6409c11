"""nvgpu-sched: the ABI numbers, and weights that are set, read back and lost honestly."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeagent.gpus.model import Gpu, GpuKind
from edgeagent.hostroot import HostRoot
from edgeagent.isolation import nvgpu_sched as sched
from edgeagent.isolation.backend import RunningContainer, ShareToEnforce
from edgeagent.isolation.levels import Axis, Level
from tests.fakes.nvgpu import FakeSchedDevice

ORIN = Gpu("tegra-1", 0, GpuKind.INTEGRATED, "tegra", "Orin NX", 15655)


def share(cores: int | None = 30) -> ShareToEnforce:
    return ShareToEnforce("uid", "app", "m000000", ORIN, 2000, cores)


def running(*pids: int) -> RunningContainer:
    return RunningContainer("c" * 64, "/sys/fs/cgroup/x", pids)


@pytest.fixture
def device() -> FakeSchedDevice:
    return FakeSchedDevice()


@pytest.fixture
def backend(tmp_path: Path, device: FakeSchedDevice) -> sched.NvgpuSchedBackend:
    (tmp_path / "dev/nvgpu/igpu0").mkdir(parents=True)
    (tmp_path / "dev/nvgpu/igpu0/sched").touch()
    return sched.NvgpuSchedBackend(HostRoot(tmp_path), device.ioctl)


def test_ioctl_numbers_are_those_of_the_kernel_header() -> None:
    """_IOWR('S', 3, 24 bytes) and the like, worked out by hand from <asm-generic/ioctl.h>."""
    assert sched.GET_TSGS_BY_PID == 0xC0185303
    assert sched.TSG_GET_PARAMS == 0xC0205304
    assert sched.TSG_SET_TIMESLICE == 0x40085305
    assert sched.LOCK_CONTROL == 0x5307
    assert sched.GET_API_VERSION == 0x80045309


@pytest.mark.parametrize(
    ("cores", "expected"), [(1, 1000), (2, 1000), (10, 5000), (30, 15000), (50, 25000), (100, 50000)]
)
def test_timeslice_is_proportional_within_bounds(cores: int, expected: int) -> None:
    assert sched.timeslice_us(cores) == expected


def test_probe_locks_control(backend: sched.NvgpuSchedBackend, device: FakeSchedDevice) -> None:
    assert backend.probe(ORIN, Axis.COMPUTE).level is Level.WEIGHTED
    assert device.locked
    backend.close()
    assert not device.locked


@pytest.mark.parametrize(
    ("change", "problem"),
    [({"version": 2}, "API version 2"), ({"busy": True}, "busy")],
    ids=["other API version", "somebody else has control"],
)
def test_probe_that_fails_says_why(
    backend: sched.NvgpuSchedBackend, device: FakeSchedDevice, change: dict[str, object], problem: str
) -> None:
    for name, value in change.items():
        setattr(device, name, value)
    result = backend.probe(ORIN, Axis.COMPUTE)
    assert result.level is Level.NONE
    assert problem in (result.problem or "")


def test_probe_without_the_device(tmp_path: Path, device: FakeSchedDevice) -> None:
    result = sched.NvgpuSchedBackend(HostRoot(tmp_path), device.ioctl).probe(ORIN, Axis.COMPUTE)
    assert result.level is Level.NONE
    assert "/dev/nvgpu/igpu0/sched" in (result.problem or "")


def test_slices_are_set_for_every_group_and_read_back(
    backend: sched.NvgpuSchedBackend, device: FakeSchedDevice
) -> None:
    device.groups = {10: [3, 70], 11: [200]}
    device.bitmap_bytes = 128  # larger than the first try: the driver says how large
    backend.probe(ORIN, Axis.COMPUTE)
    level = backend.evidence(share(30), running(10, 11), Axis.COMPUTE)
    assert level.level is Level.WEIGHTED
    assert device.timeslices == {3: 15000, 70: 15000, 200: 15000}


def test_a_group_that_appears_later_is_caught_at_the_next_poll(
    backend: sched.NvgpuSchedBackend, device: FakeSchedDevice
) -> None:
    backend.probe(ORIN, Axis.COMPUTE)
    assert backend.evidence(share(), running(10), Axis.COMPUTE).reason == "no_gpu_use_yet"
    device.groups = {10: [5]}
    assert backend.evidence(share(), running(10), Axis.COMPUTE).level is Level.WEIGHTED
    assert device.timeslices == {5: 15000}


def test_a_slice_that_does_not_stick_is_not_claimed(
    backend: sched.NvgpuSchedBackend, device: FakeSchedDevice
) -> None:
    device.groups, device.stubborn = {10: [5]}, True
    backend.probe(ORIN, Axis.COMPUTE)
    level = backend.evidence(share(), running(10), Axis.COMPUTE)
    assert (level.level, level.reason) == (Level.NONE, "limit_changed")


def test_without_the_device_open_nothing_is_claimed(backend: sched.NvgpuSchedBackend) -> None:
    level = backend.evidence(share(), running(10), Axis.COMPUTE)
    assert (level.level, level.reason) == (Level.NONE, "limit_not_readable")


def test_a_process_that_ends_meanwhile_does_not_hide_the_others(
    backend: sched.NvgpuSchedBackend, device: FakeSchedDevice, tmp_path: Path
) -> None:
    device.groups, device.unknown = {11: [5]}, {10}
    backend.probe(ORIN, Axis.COMPUTE)
    assert backend.evidence(share(), running(10, 11), Axis.COMPUTE).level is Level.WEIGHTED
    (tmp_path / "proc/10").mkdir(parents=True)  # it is there, and the driver refuses to tell
    level = backend.evidence(share(), running(10, 11), Axis.COMPUTE)
    assert (level.level, level.reason) == (Level.NONE, "limit_not_readable")
