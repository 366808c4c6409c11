"""Every isolation mechanism that this build knows, made from the configuration: for the agent, which
uses them, and for doctor, which tries them."""

from __future__ import annotations

import os

from edgeagent.config import Config
from edgeagent.gpus.model import CgroupMemoryLimiter, ComputeModes
from edgeagent.hostroot import HostRoot
from edgeagent.isolation.backend import IsolationBackend
from edgeagent.isolation.hami_core import HamiCoreBackend
from edgeagent.isolation.limiter_backend import LimiterBackend
from edgeagent.isolation.mps import MpsBackend
from edgeagent.isolation.nvgpu_sched import NvgpuSchedBackend
from edgeagent.isolation.nvml_cgroup import NvmlCgroupBackend


def isolation_backends(
    config: Config,
    host: HostRoot,
    limiter: CgroupMemoryLimiter | None,
    compute_modes: ComputeModes | None = None,
) -> list[IsolationBackend]:
    """`limiter`: the driver's memory limits per cgroup, `compute_modes`: its compute modes, where NVML
    has them."""
    isolation = config.isolation
    backends: list[IsolationBackend] = [
        LimiterBackend(config.isolation.limiter, host, config.run_dir),
        NvgpuSchedBackend(host),
        HamiCoreBackend(config.isolation.hami_core.library, host, config.state_dir),
        MpsBackend(
            isolation.mps,
            host,
            compute_modes,
            opted_in=isolation.allow_mps or "mps" in (isolation.memory, isolation.compute),
            # A daemon in a pod would end with it, and take the GPU from every container.
            manage=isolation.mps.manage_daemon and "KUBERNETES_SERVICE_HOST" not in os.environ,
        ),
    ]
    if limiter is not None:
        backends.append(NvmlCgroupBackend(limiter, host, config.kubelet.cgroup_root))
    return backends
