"""What the host shows of NVIDIA's driver without asking NVML: files that cannot hang or be lost."""

from __future__ import annotations

import re

from edgeagent.hostroot import HostRoot

PROC_DRIVER = "/proc/driver/nvidia"
PCI_DEVICES = "/sys/bus/pci/devices"
WSL_DEVICE = "/dev/dxg"
OS_RELEASE = "/proc/sys/kernel/osrelease"

# Nodes that every CUDA container opens beside /dev/nvidiaN.
_SHARED_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
_NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA controller, 3D controller

# "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri …", and the open module's
# "… Open Kernel Module for x86_64  595.45  Release Build …".
_MODULE = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+\.\d+(?:\.\d+)*)")


def kernel_module_version(host: HostRoot) -> str | None:
    """Version of the loaded nvidia.ko; None where none is loaded (or it is nvgpu, or WSL)."""
    found = _MODULE.search(host.read_text(f"{PROC_DRIVER}/version", 4096) or "")
    return found.group(1) if found else None


def bound_gpus(host: HostRoot) -> frozenset[str]:
    """PCI addresses of the GPUs that nvidia.ko drives; empty where that is not to be seen."""
    return frozenset(name.lower() for name in host.listdir(f"{PROC_DRIVER}/gpus"))


def pci_gpus(host: HostRoot) -> tuple[str, ...]:
    """PCI addresses of NVIDIA display controllers, with or without a driver."""
    found = []
    for address in host.listdir(PCI_DEVICES):
        if (host.read_text(f"{PCI_DEVICES}/{address}/vendor", 64) or "").strip() != _NVIDIA_VENDOR:
            continue
        if (host.read_text(f"{PCI_DEVICES}/{address}/class", 64) or "").startswith(_DISPLAY_CLASSES):
            found.append(address.lower())
    return tuple(found)


def is_wsl(host: HostRoot) -> bool:
    """WSL2 with GPU support: one paravirtual device instead of /dev/nvidia*."""
    return host.exists(WSL_DEVICE) or "microsoft" in (host.read_text(OS_RELEASE, 4096) or "").lower()


def minor_number(host: HostRoot, pci_address: str) -> int | None:
    """N of /dev/nvidiaN as the kernel module names it, for where NVML does not say."""
    text = host.read_text(f"{PROC_DRIVER}/gpus/{pci_address}/information", 4096) or ""
    found = re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE)
    return int(found.group(1)) if found else None


def device_nodes(host: HostRoot, minor: int | None) -> tuple[str, ...]:
    """Device nodes a container needs for the GPU, of those that exist on this host."""
    names = list(_SHARED_NODES) if minor is None else [f"nvidia{minor}", *_SHARED_NODES]
    nodes = [f"/dev/{name}" for name in names]
    # Shared nodes alone open no GPU: without the GPU's own there is nothing to name.
    if minor is None or not host.exists(nodes[0]):
        nodes = [WSL_DEVICE]
    return tuple(node for node in nodes if host.exists(node))


def mig_nodes(host: HostRoot, minor: int | None, gpu_instance: int, compute_instance: int) -> tuple[str, ...]:
    """Capability nodes that open one MIG instance."""
    base = f"{PROC_DRIVER}/capabilities/gpu{minor}/mig/gi{gpu_instance}"
    nodes = []
    for access in (f"{base}/access", f"{base}/ci{compute_instance}/access"):
        found = re.search(r"^DeviceFileMinor:\s*(\d+)", host.read_text(access, 4096) or "", re.MULTILINE)
        if found and host.exists(f"/dev/nvidia-caps/nvidia-cap{found.group(1)}"):
            nodes.append(f"/dev/nvidia-caps/nvidia-cap{found.group(1)}")
    return tuple(nodes)


def numa_node(host: HostRoot, pci_address: str) -> int | None:
    """None where the machine has no NUMA (the kernel says -1) or sysfs is not to be seen."""
    text = (host.read_text(f"{PCI_DEVICES}/{pci_address}/numa_node", 64) or "").strip()
    return int(text) if text.isascii() and text.isdigit() else None
