"""Every isolation mechanism that this build knows, made from the configuration: for the agent, which
uses them, and for doctor, which tries them."""

from __future__ import annotations

from edgeagent.config import Config
from edgeagent.gpus.model import CgroupMemoryLimiter
from edgeagent.hostroot import HostRoot
from edgeagent.isolation.backend import IsolationBackend
from edgeagent.isolation.hami_core import HamiCoreBackend
from edgeagent.isolation.limiter_backend import LimiterBackend
from edgeagent.isolation.nvgpu_sched import NvgpuSchedBackend
from edgeagent.isolation.nvml_cgroup import NvmlCgroupBackend


def isolation_backends(
    config: Config, host: HostRoot, limiter: CgroupMemoryLimiter | None
) -> list[IsolationBackend]:
    """`limiter`: the driver's memory limits per cgroup, where NVML has them."""
    backends: list[IsolationBackend] = [
        LimiterBackend(config.isolation.limiter, host, config.run_dir),
        NvgpuSchedBackend(host),
        HamiCoreBackend(config.isolation.hami_core.library, host, config.state_dir),
    ]
    if limiter is not None:
        backends.append(NvmlCgroupBackend(limiter, host, config.kubelet.cgroup_root))
    return backends
