"""Where GPU and pods share the same RAM: how K3s is told not to promise it twice.

The kernel does not charge a Jetson's GPU memory to the pod's memory cgroup, so neither pod memory
limits nor the kubelet's own accounting know of it: without a setting, the node offers nearly all of its
RAM as pod memory and most of it again as vgpu-memory.
"""

from __future__ import annotations

from dataclasses import dataclass

SYSTEM_MIB = 1024  # K3s, its system pods' share outside requests, the desktop-less OS


@dataclass(frozen=True, slots=True)
class KubeletMemory:
    """How RAM of `total_mib` is to be divided: `gpu_mib` offered as vgpu-memory, `system_mib` for the
    host itself, `pods_mib` left as pods' ordinary memory. `k3s_argument` goes on K3s's command line
    (or into /etc/rancher/k3s/config.yaml as `kubelet-arg`)."""

    total_mib: int
    gpu_mib: int
    system_mib: int
    pods_mib: int

    @property
    def system_reserved_mib(self) -> int:
        return self.gpu_mib + self.system_mib

    @property
    def k3s_argument(self) -> str:
        return f"--kubelet-arg=system-reserved=memory={self.system_reserved_mib}Mi"

    def sentence(self, allocatable_mib: int | None = None) -> str:
        """For doctor and status. `allocatable_mib`: the node's allocatable memory, where known."""
        split = (
            f"of {self.total_mib} MiB RAM {self.gpu_mib} MiB are offered as vgpu-memory and "
            f"{self.pods_mib} MiB are left for pods' ordinary memory"
        )
        if allocatable_mib is None:
            return f"{split}: start K3s with {self.k3s_argument}"
        twice = self.promised_twice_mib(allocatable_mib)
        if twice <= 0:
            return f"{split}; the kubelet offers {allocatable_mib} MiB, so nothing is promised twice"
        return (
            f"{split}, but the kubelet offers {allocatable_mib} MiB: {twice} MiB are promised twice; "
            f"start K3s with {self.k3s_argument}, or raise sharing.unifiedReserveMiB"
        )

    def promised_twice_mib(self, allocatable_mib: int) -> int:
        """RAM that is on offer both as pod memory and as vgpu-memory."""
        return max(0, allocatable_mib + self.gpu_mib + self.system_mib - self.total_mib)


def kubelet_memory(total_mib: int, gpu_mib: int) -> KubeletMemory:
    """`gpu_mib`: what is offered as vgpu-memory (MemTotal − reserve). Of the rest at most half is the
    system's, so that pods are left with something on small boards."""
    rest = max(0, total_mib - gpu_mib)
    system = min(SYSTEM_MIB, rest // 2)
    return KubeletMemory(total_mib, min(gpu_mib, total_mib), system, rest - system)
