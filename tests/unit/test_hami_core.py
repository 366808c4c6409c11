"""Operator-supplied HAMi-core: what the container is given, and what is believed afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeagent.errors import IsolationError
from edgeagent.gpus.model import Gpu, GpuKind
from edgeagent.hostroot import HostRoot
from edgeagent.isolation.backend import RunningContainer, ShareToEnforce
from edgeagent.isolation.hami_core import LIBRARY_IN_CONTAINER, HamiCoreBackend
from edgeagent.isolation.levels import Axis, Level

GPU = Gpu("GPU-1", 0, GpuKind.DISCRETE, "nvml", "L4", 23034)
ORIN = Gpu("tegra-1", 0, GpuKind.INTEGRATED, "tegra", "Orin NX", 15655)
SHARE = ShareToEnforce("uid", "app", "m000012", GPU, 2000, 30)
LIBRARY = "/opt/hami/libvgpu.so"
BOTH = frozenset(Axis)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "opt/hami").mkdir(parents=True)
    (tmp_path / "opt/hami/libvgpu.so").write_bytes(b"\x7fELF rest")
    return tmp_path


def backend(root: Path, library: str | None = LIBRARY) -> HamiCoreBackend:
    return HamiCoreBackend(library, HostRoot(root), "/var/lib/edgeagent")


@pytest.mark.parametrize(
    ("library", "content", "gpu", "problem"),
    [
        (None, None, GPU, "names no libvgpu.so"),
        (LIBRARY, None, GPU, "is not a shared library"),
        (LIBRARY, b"", GPU, "is not a shared library"),
        (LIBRARY, b"\x7fELF", ORIN, "crashes without NVML"),
    ],
    ids=["not configured", "missing", "empty", "Jetson"],
)
def test_probe_that_fails_says_why(
    tmp_path: Path, library: str | None, content: bytes | None, gpu: Gpu, problem: str
) -> None:
    if content is not None:
        (tmp_path / "opt/hami").mkdir(parents=True)
        (tmp_path / "opt/hami/libvgpu.so").write_bytes(content)
    result = backend(tmp_path, library).probe(gpu, Axis.MEMORY)
    assert result.level is Level.NONE
    assert problem in (result.problem or "")


def test_what_the_container_is_given(root: Path) -> None:
    edits = backend(root).prepare(SHARE, BOTH)
    assert edits.env == {
        "CUDA_DEVICE_MEMORY_LIMIT_0": "2000m",
        "CUDA_DEVICE_SM_LIMIT": "30",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/tmp/vgpu/GPU-1.cache",
    }
    mounts = {m.container_path: m for m in edits.mounts}
    assert mounts[LIBRARY_IN_CONTAINER].host_path == LIBRARY
    assert "ro" in mounts["/etc/ld.so.preload"].options
    preload = root / mounts["/etc/ld.so.preload"].host_path.lstrip("/")
    assert preload.read_text() == f"{LIBRARY_IN_CONTAINER}\n"
    cache = root / mounts["/tmp/vgpu"].host_path.lstrip("/")
    assert cache.stat().st_mode & 0o777 == 0o777, "any user of the container opens it"


def test_only_the_axes_it_is_in_charge_of(root: Path) -> None:
    env = backend(root).prepare(SHARE, frozenset({Axis.COMPUTE})).env
    assert "CUDA_DEVICE_MEMORY_LIMIT_0" not in env
    assert env["CUDA_DEVICE_SM_LIMIT"] == "30"


def test_release_removes_its_files_and_is_idempotent(root: Path) -> None:
    made = backend(root)
    made.prepare(SHARE, BOTH)
    made.release(SHARE)
    made.release(SHARE)
    assert list((root / "var/lib/edgeagent/hami-core").iterdir()) == []


def test_a_state_directory_that_cannot_be_written_stops_the_start(root: Path) -> None:
    (root / "var/lib").mkdir(parents=True)
    (root / "var/lib/edgeagent").write_text("a file")
    with pytest.raises(IsolationError, match="cannot write"):
        backend(root).prepare(SHARE, BOTH)


def process(root: Path, pid: int, *mapped: str) -> int:
    (root / f"proc/{pid}").mkdir(parents=True)
    lines = [f"7f0000000000-7f0000001000 r-xp 00000000 08:01 {n} {path}\n" for n, path in enumerate(mapped)]
    (root / f"proc/{pid}/maps").write_text("".join(lines))
    return pid


def test_it_must_be_mapped_in_every_process_that_uses_the_gpu(root: Path) -> None:
    good, bad = process(root, 10, "/usr/bin/app", LIBRARY_IN_CONTAINER), process(root, 11, "/usr/bin/app")
    made = backend(root)

    def level(pids: tuple[int, ...], gpu_pids: tuple[int, ...]) -> tuple[Level, str | None]:
        seen = made.evidence(SHARE, RunningContainer("c" * 64, "/x", pids, gpu_pids), Axis.MEMORY)
        return seen.level, seen.reason

    assert level((good,), (good,)) == (Level.COOPERATIVE, None)
    assert level((good, bad), (good, bad)) == (Level.NONE, "not_preloaded")
    assert level((good, bad), ()) == (Level.COOPERATIVE, None)
    assert level((bad,), ()) == (Level.NONE, "no_gpu_use_yet")
    assert level((12,), (12,)) == (Level.NONE, "not_preloaded"), (
        "a process that cannot be read proves nothing"
    )
