"""Memory limits that the NVIDIA driver keeps per cgroup (r615 and newer): the only hostile-proof
memory limit on plain cards.

The limit goes on the pod's cgroup before any of its containers starts, as the sum of its shares on
that GPU, and on the container's own cgroup as soon as that exists: there `cuMemGetInfo` shows it too.
Soft limits stay 0, so nothing has to be given back before a cgroup may go; the limit outlives the agent.
Needs cgroup v2 and root; not for GPUs in MIG mode. Managed memory is not charged (driver's hole).
Source: nvml.h 13.4 and NVIDIA's MPS v3 "Memory Partitioning" page. Not run on hardware by us.
"""

from __future__ import annotations

import logging
import os
import threading

from edgeagent.errors import GpuError, IsolationError
from edgeagent.gpus.model import CgroupMemoryLimiter, Gpu
from edgeagent.hostroot import HostRoot
from edgeagent.isolation.backend import ProbeResult, RunningContainer, ShareToEnforce
from edgeagent.isolation.levels import Axis, AxisLevel, Level
from edgeagent.node.cdi import ContainerEdits

log = logging.getLogger(__name__)

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
        self._known: set[str] = set()  # pod cgroups whose limit this process has set or seen

    # ---- probe -----------------------------------------------------------------------------------

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
            self._pass_controller_on(scratch)
            self._limiter.set_memory_limits(gpu.uuid, scratch, 0, PROBE_LIMIT_MIB)
            _, hard, _ = self._limiter.get_memory_limits(gpu.uuid, scratch)
            self._limiter.set_memory_limits(gpu.uuid, scratch, 0, None)
        except GpuError as e:
            hint = "needs driver r615 or newer: " if e.fault == "not_supported" else ""
            return ProbeResult(Level.NONE, "", f"{hint}{e}")
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

    def _pass_controller_on(self, cgroup: str) -> None:
        """Kernels with the dmem controller keep limits only where all parents pass it on. Runtimes see
        to that for what they make themselves; systemd does not know dmem."""
        parent = self._cgroup_root
        if "dmem" not in (self._host.read_text(f"{parent}/cgroup.controllers") or "").split():
            return  # the driver counts by itself
        for name in cgroup.removeprefix(f"{self._cgroup_root}/").split("/"):
            control = f"{parent}/cgroup.subtree_control"
            if "dmem" not in (self._host.read_text(control) or "").split():
                try:
                    self._host.path(control).write_text("+dmem")
                except OSError as e:
                    # The limit that is set next says what that means.
                    log.debug("cannot pass dmem on control=%s error=%s", control, e.strerror)
            parent = f"{parent}/{name}"

    # ---- before the start, and after the end -------------------------------------------------------

    def adopt(self, share: ShareToEnforce) -> None:
        if share.pod_cgroup is not None:
            with self._lock:
                self._pods.setdefault(_pod(share), {})[share.container] = share.memory_mib

    def prepare(self, share: ShareToEnforce, axes: frozenset[Axis]) -> ContainerEdits:
        if share.early:
            return ContainerEdits()  # the container is given nothing, and there is no pod yet to limit
        if share.pod_cgroup is None:
            raise IsolationError(f"cannot limit memory: the cgroup of pod {share.pod_uid} was not found")
        with self._lock:
            members = {**self._pods.get(_pod(share), {}), share.container: share.memory_mib}
            self._pass_controller_on(share.pod_cgroup)
            self._apply(share.gpu.uuid, share.pod_cgroup, sum(members.values()))
            self._pods[_pod(share)] = members
            self._known.add(share.pod_cgroup)
            self._leaves.pop(_container(share), None)
        return ContainerEdits()

    def _apply(self, uuid: str, cgroup: str, mib: int) -> None:
        try:
            self._limiter.set_memory_limits(uuid, cgroup, 0, mib)
            _, hard, _ = self._limiter.get_memory_limits(uuid, cgroup)
        except GpuError as e:
            raise IsolationError(f"cannot limit GPU memory of {cgroup}: {e}") from e
        if hard != mib:
            raise IsolationError(f"limit of {cgroup} reads back as {hard} MiB instead of {mib}")

    def release(self, share: ShareToEnforce) -> None:
        """Takes the container out of its pod's sum, and the limit off a cgroup that lives on (the
        container went to another GPU)."""
        with self._lock:
            leaf = self._leaves.pop(_container(share), None)
            members = self._pods.get(_pod(share), {})
            if share.pod_cgroup is None or members.pop(share.container, None) is None:
                return
            if not members:
                del self._pods[_pod(share)]
                self._known.discard(share.pod_cgroup)
            wanted: list[tuple[str, int | None]] = [] if leaf is None else [(leaf[0], None)]
            wanted.append((share.pod_cgroup, sum(members.values()) or None))
            problems = []
            for cgroup, hard in wanted:
                if not self._host.exists(cgroup):
                    continue  # the kernel dropped the limit with the cgroup
                try:
                    self._limiter.set_memory_limits(share.gpu.uuid, cgroup, 0, hard)
                except GpuError as e:
                    problems.append(f"cannot take back the limit of {cgroup}: {e}")
        if problems:
            raise IsolationError("; ".join(problems))

    # ---- evidence ----------------------------------------------------------------------------------

    def evidence(self, share: ShareToEnforce, running: RunningContainer, axis: Axis) -> AxisLevel:
        """Reads the limits back; one that somebody changed is set again, and not claimed this time.
        Puts the limit on the container's own cgroup once that is there."""
        if share.pod_cgroup is None:
            return AxisLevel(Level.NONE, self.name, reason="cgroup_not_found")
        with self._lock:
            members = self._pods.get(_pod(share), {})
            if share.container not in members:
                # It was started when another mechanism was in charge.
                return AxisLevel(Level.NONE, self.name, reason="not_set_at_start")
            pod_mib = sum(members.values())
            try:
                known = share.pod_cgroup in self._known
                changed = self._changed(share.gpu.uuid, share.pod_cgroup, pod_mib, quiet=not known)
                self._known.add(share.pod_cgroup)
            except (GpuError, IsolationError) as e:
                return AxisLevel(Level.NONE, self.name, evidence=str(e), reason="limit_not_readable")
            if changed is not None:
                return changed
            on_pod = f"{pod_mib} MiB read back on the pod"
            if running.cgroup is None:
                return AxisLevel(Level.HARD, self.name, on_pod)
            known = self._leaves.get(_container(share)) == (running.cgroup, share.memory_mib)
            try:
                changed = self._changed(share.gpu.uuid, running.cgroup, share.memory_mib, quiet=not known)
                _, _, used = self._limiter.get_memory_limits(share.gpu.uuid, running.cgroup)
            except (GpuError, IsolationError) as e:
                # The pod's limit holds for all of it; its containers are not kept apart.
                return AxisLevel(Level.HARD, self.name, f"{on_pod}; {e}", "pod_limit_only")
            self._leaves[_container(share)] = running.cgroup, share.memory_mib
        if changed is not None:
            return changed
        return AxisLevel(
            Level.HARD, self.name, f"{share.memory_mib} MiB read back on the container, {used >> 20} charged"
        )

    def _changed(self, uuid: str, cgroup: str, mib: int, quiet: bool = False) -> AxisLevel | None:
        """Sets a limit that is not what it should be. None: all is well, or it is the first time."""
        _, hard, _ = self._limiter.get_memory_limits(uuid, cgroup)
        if hard == mib:
            return None
        self._apply(uuid, cgroup, mib)
        if quiet:
            return None
        log.warning("somebody changed a limit, set again cgroup=%s read=%s wanted=%s", cgroup, hard, mib)
        return AxisLevel(
            Level.NONE, self.name, f"read {hard} MiB instead of {mib}; set again", "limit_changed"
        )

    def close(self) -> None:
        """Nothing to give back: limits of running containers stay in force without the agent."""


def _pod(share: ShareToEnforce) -> tuple[str, str]:
    return share.gpu.uuid, share.pod_cgroup or ""


def _container(share: ShareToEnforce) -> tuple[str, str]:
    return share.pod_uid, share.container
