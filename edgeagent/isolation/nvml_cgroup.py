"""Memory limits that the NVIDIA driver keeps per cgroup (r615 and newer): the only hostile-proof
memory limit on plain cards.

The limit goes on the pod's cgroup before any of its containers starts, as the sum of its shares on
that GPU, and on the container's own cgroup as soon as that exists: there `cuMemGetInfo` shows it too.
Needs cgroup v2 and root; not for GPUs in MIG mode. Managed memory is not charged (driver's hole).
Source: nvml.h 13.4 and NVIDIA's MPS v3 "Memory Partitioning" page. Not run on hardware by us.
"""

from __future__ import annotations

import os
import threading

from edgeagent.errors import GpuError, IsolationError
from edgeagent.gpus.model import CgroupMemoryLimiter, Gpu
from edgeagent.hostroot import HostRoot
from edgeagent.isolation.backend import ProbeResult, RunningContainer, ShareToEnforce
from edgeagent.isolation.levels import Axis, AxisLevel, Level
from edgeagent.node.cdi import ContainerEdits

PROBE_CGROUP = "edgeagent-probe"
PROBE_LIMIT_MIB = 512


class NvmlCgroupBackend:
    """`limiter` is the NVML back end; `cgroup_root` the host's cgroup mount."""

    name = "nvml-cgroup"
    axes = frozenset({Axis.MEMORY})

    def __init__(self, limiter: CgroupMemoryLimiter, host: HostRoot, cgroup_root: str) -> None:
        self._limiter = limiter
        self._host = host
        self._cgroup_root = cgroup_root.rstrip("/")
        self._lock = threading.Lock()
        # (GPU uuid, pod cgroup) -> container -> MiB: the pod's limit is their sum.
        self._pods: dict[tuple[str, str], dict[str, int]] = {}
        self._leaves: dict[tuple[str, str], tuple[str, int]] = {}  # (pod uid, container) -> (cgroup, MiB)

    def probe(self, gpu: Gpu, axis: Axis) -> ProbeResult:
        """Sets a limit on a scratch cgroup and reads it back."""
        if gpu.source != "nvml":
            return ProbeResult(Level.NONE, "", "only GPUs of the NVIDIA kernel driver (NVML) have this")
        if gpu.mig_enabled:
            return ProbeResult(Level.NONE, "", "not available while the GPU is in MIG mode")
        if not self._host.exists(f"{self._cgroup_root}/cgroup.controllers"):
            return ProbeResult(Level.NONE, "", f"needs cgroup v2 mounted at {self._cgroup_root}")
        scratch = f"{self._cgroup_root}/{PROBE_CGROUP}"
        try:
            os.makedirs(self._host.path(scratch), exist_ok=True)
        except OSError as e:
            return ProbeResult(Level.NONE, "", f"cannot make a scratch cgroup {scratch}: {e.strerror}")
        try:
            self._limiter.set_memory_limits(gpu.uuid, scratch, 0, PROBE_LIMIT_MIB)
            _, hard, _ = self._limiter.get_memory_limits(gpu.uuid, scratch)
            self._limiter.set_memory_limits(gpu.uuid, scratch, 0, None)
        except GpuError as e:
            return ProbeResult(Level.NONE, "", f"driver r615 or newer is needed: {e}")
        finally:
            self._remove(scratch)
        if hard != PROBE_LIMIT_MIB:
            return ProbeResult(
                Level.NONE, "", f"set {PROBE_LIMIT_MIB} MiB on a scratch cgroup, read back {hard}"
            )
        return ProbeResult(Level.HARD, f"set and read back {hard} MiB on scratch cgroup {PROBE_CGROUP}")

    def _remove(self, cgroup: str) -> None:
        try:
            os.rmdir(self._host.path(cgroup))
        except OSError:
            pass  # not empty or gone: it carries no limit any more

    def prepare(self, share: ShareToEnforce, axes: frozenset[Axis]) -> ContainerEdits:
        if share.pod_cgroup is None:
            raise IsolationError(f"cannot limit memory: the cgroup of pod {share.pod_uid} was not found")
        with self._lock:
            members = self._pods.setdefault((share.gpu.uuid, share.pod_cgroup), {})
            members[share.container] = share.memory_mib
            self._apply(share.gpu.uuid, share.pod_cgroup, sum(members.values()))
        return ContainerEdits()

    def _apply(self, uuid: str, cgroup: str, mib: int) -> None:
        try:
            self._limiter.set_memory_limits(uuid, cgroup, 0, mib)
            _, hard, _ = self._limiter.get_memory_limits(uuid, cgroup)
        except GpuError as e:
            raise IsolationError(f"cannot limit GPU memory of {cgroup}: {e}") from e
        if hard != mib:
            raise IsolationError(f"limit of {cgroup} reads back as {hard} MiB instead of {mib}")

    def evidence(self, share: ShareToEnforce, running: RunningContainer, axis: Axis) -> AxisLevel:
        """Puts the limit on the container's own cgroup once that is there, and reads it back."""
        target = running.cgroup or share.pod_cgroup
        if target is None:
            return AxisLevel(Level.NONE, self.name, reason="cgroup_not_found")
        key = (share.pod_uid, share.container)
        with self._lock:
            try:
                if running.cgroup is not None and self._leaves.get(key) != (running.cgroup, share.memory_mib):
                    self._apply(share.gpu.uuid, running.cgroup, share.memory_mib)
                    self._leaves[key] = (running.cgroup, share.memory_mib)
                _, hard, used = self._limiter.get_memory_limits(share.gpu.uuid, target)
            except (GpuError, IsolationError) as e:
                return AxisLevel(Level.NONE, self.name, evidence=str(e), reason="limit_not_readable")
        wanted = share.memory_mib if target == running.cgroup else self._pod_sum(share)
        if hard != wanted:
            self._leaves.pop(key, None)  # somebody changed it: set it again at the next poll
            return AxisLevel(Level.NONE, self.name, f"limit reads {hard} MiB, not {wanted}", "limit_changed")
        return AxisLevel(Level.HARD, self.name, f"limit {hard} MiB read back, {used >> 20} MiB charged")

    def _pod_sum(self, share: ShareToEnforce) -> int:
        return sum(self._pods.get((share.gpu.uuid, share.pod_cgroup or ""), {}).values())

    def release(self, share: ShareToEnforce) -> None:
        """Takes the container out of its pod's sum; soft limits are zeroed before cgroups go
        (the driver demands it on the dmem back end)."""
        with self._lock:
            leaf = self._leaves.pop((share.pod_uid, share.container), None)
            cgroups: list[tuple[str, int | None]] = [] if leaf is None else [(leaf[0], None)]
            if share.pod_cgroup is not None:
                key = (share.gpu.uuid, share.pod_cgroup)
                members = self._pods.get(key, {})
                members.pop(share.container, None)
                if not members:
                    self._pods.pop(key, None)
                cgroups.append((share.pod_cgroup, sum(members.values()) or None))
            for cgroup, hard in cgroups:
                if not self._host.exists(cgroup):
                    continue  # the kernel dropped the limit with the cgroup
                try:
                    self._limiter.set_memory_limits(share.gpu.uuid, cgroup, 0, hard)
                except GpuError as e:
                    raise IsolationError(f"cannot take back the limit of {cgroup}: {e}") from e

    def close(self) -> None:
        """Nothing to give back: limits of running containers stay in force without the agent."""
