"""Limits through an operator-supplied HAMi-core (`libvgpu.so`): its documented environment and files.

We neither build nor ship it (its tree has no licence). Cooperative at best; see facts in
docs/isolation.md for what it does not cover (graphs, pools, musl, static binaries).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from edgeagent.errors import IsolationError
from edgeagent.gpus.model import Gpu
from edgeagent.hostroot import HostRoot
from edgeagent.isolation.backend import ProbeResult, RunningContainer, ShareToEnforce
from edgeagent.isolation.levels import Axis, AxisLevel, Level
from edgeagent.node.cdi import ContainerEdits, Mount

MAPS_MAX_BYTES = 8 << 20
LIBRARY_IN_CONTAINER = "/usr/local/vgpu/libvgpu.so"
CACHE_IN_CONTAINER = "/tmp/vgpu"  # noqa: S108 - where HAMi-core's documentation puts it


class HamiCoreBackend:
    """`library` is the host path of libvgpu.so; `state_dir` a host directory for caches."""

    name = "hami-core"
    axes = frozenset({Axis.MEMORY, Axis.COMPUTE})

    def __init__(self, library: str | None, host: HostRoot, state_dir: str) -> None:
        self._library = library
        self._host = host
        self._state_dir = f"{state_dir.rstrip('/')}/hami-core"

    def probe(self, gpu: Gpu, axis: Axis) -> ProbeResult:
        if self._library is None:
            return ProbeResult(Level.NONE, "", "isolation.hamiCore.library names no libvgpu.so")
        head = self._host.read_bytes(self._library, 4)
        if head != b"\x7fELF":
            return ProbeResult(Level.NONE, "", f"{self._library} is not a shared library on this host")
        if gpu.source != "nvml":
            return ProbeResult(Level.NONE, "", "HAMi-core crashes without NVML (Jetson); use the limiter")
        return ProbeResult(Level.COOPERATIVE, f"{self._library} is there; proved per container")

    def prepare(self, share: ShareToEnforce, axes: frozenset[Axis]) -> ContainerEdits:
        if self._library is None:
            raise IsolationError("isolation.hamiCore.library names no libvgpu.so")
        directory = f"{self._state_dir}/{share.share}"
        preload = f"{directory}/ld.so.preload"
        cache = f"{directory}/vgpu"
        try:
            path = Path(self._host.path(cache))
            path.mkdir(parents=True, exist_ok=True)
            os.chmod(path, 0o777)  # noqa: S103 - any user of the container opens the cache (HAMi #1090)
            self._host.path(preload).write_text(LIBRARY_IN_CONTAINER + "\n")
        except OSError as e:
            raise IsolationError(f"cannot write {directory}: {e.strerror}") from e
        env = {"CUDA_DEVICE_MEMORY_SHARED_CACHE": f"{CACHE_IN_CONTAINER}/{share.gpu.uuid}.cache"}
        if Axis.MEMORY in axes:
            env["CUDA_DEVICE_MEMORY_LIMIT_0"] = f"{share.memory_mib}m"
        if Axis.COMPUTE in axes and share.cores_pct is not None:
            env["CUDA_DEVICE_SM_LIMIT"] = str(share.cores_pct)
        mounts = (
            Mount(self._library, LIBRARY_IN_CONTAINER),
            Mount(preload, "/etc/ld.so.preload"),
            Mount(cache, CACHE_IN_CONTAINER, ("rw", "nosuid", "nodev", "rbind", "rprivate")),
        )
        return ContainerEdits(env=env, mounts=mounts)

    def evidence(self, share: ShareToEnforce, running: RunningContainer, axis: Axis) -> AxisLevel:
        """The library must be mapped in every process of the container that uses the GPU; while none
        does, in any."""
        mapped = [pid for pid in running.gpu_pids or running.pids if self._mapped(pid)]
        if running.gpu_pids:
            missing = [pid for pid in running.gpu_pids if pid not in mapped]
            if missing:
                return AxisLevel(
                    Level.NONE, self.name, f"not mapped in process {missing[0]}", "not_preloaded"
                )
            return AxisLevel(Level.COOPERATIVE, self.name, f"mapped in {len(mapped)} GPU processes")
        if mapped:
            return AxisLevel(Level.COOPERATIVE, self.name, "mapped; no process uses the GPU yet")
        return AxisLevel(Level.NONE, self.name, reason="no_gpu_use_yet")

    def _mapped(self, pid: int) -> bool:
        return LIBRARY_IN_CONTAINER in (self._host.read_text(f"/proc/{pid}/maps", MAPS_MAX_BYTES) or "")

    def release(self, share: ShareToEnforce) -> None:
        # rmtree does not follow links: the container could write below this directory.
        directory = self._host.path(f"{self._state_dir}/{share.share}")
        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None: ...
