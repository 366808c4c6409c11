"""The host files that belong to a FakeNvml scenario: /proc/driver/nvidia, /dev nodes, meminfo, WSL."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.fakes.nvml.driver import FakeNvml


def write(root: Path, rel: str, text: str = "") -> None:
    path = root / rel.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def pci_address(bus_id: str) -> str:
    """NVML's "00000000:65:00.0" as sysfs writes it."""
    domain, rest = bus_id.split(":", 1)
    return f"{int(domain, 16):04x}:{rest.lower()}"


def kernel_module(root: Path, version: str | None) -> None:
    """The loaded nvidia.ko's version; None: not loaded."""
    if version is None:
        shutil.rmtree(root / "proc/driver/nvidia", ignore_errors=True)
        return
    text = (
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Fri May 31 09:35:42 UTC 2024\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    write(root, "/proc/driver/nvidia/version", text)


def nvidia_host(
    root: Path, fake: FakeNvml, version: str | None = None, mem_total_kib: int = 16_000_000
) -> Path:
    """Host tree for every card the scenario has now (called again: follows its changes)."""
    kernel_module(root, version or fake.driver_version)
    shutil.rmtree(root / "proc/driver/nvidia/gpus", ignore_errors=True)
    shutil.rmtree(root / "sys/bus/pci/devices", ignore_errors=True)
    (root / "proc/driver/nvidia/gpus").mkdir(parents=True)
    for node in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"):
        write(root, f"/dev/{node}")
    for old in (root / "dev").glob("nvidia[0-9]*"):
        old.unlink()
    for gpu in fake.gpus:
        bus_id, minor = gpu.readings.get("bus_id"), gpu.readings.get("minor")
        if gpu.parent is not None or not gpu.present or bus_id is None:
            continue
        address = pci_address(bus_id)
        information = (
            f"Model: \t\t {gpu.readings['name']}\nGPU UUID: \t {gpu.uuid}\nDevice Minor: \t {minor}\n"
        )
        write(root, f"/proc/driver/nvidia/gpus/{address}/information", information)
        write(root, f"/sys/bus/pci/devices/{address}/vendor", "0x10de\n")
        write(root, f"/sys/bus/pci/devices/{address}/class", "0x030200\n")
        write(root, f"/sys/bus/pci/devices/{address}/numa_node", "0\n")
        if minor is not None:
            write(root, f"/dev/nvidia{minor}")
    meminfo(root, mem_total_kib)
    return root


def meminfo(root: Path, total_kib: int, available_kib: int | None = None, swap_used_kib: int = 0) -> None:
    available = total_kib // 2 if available_kib is None else available_kib
    write(
        root,
        "/proc/meminfo",
        f"MemTotal:       {total_kib} kB\nMemFree:        {available // 2} kB\n"
        f"MemAvailable:   {available} kB\nSwapTotal:      4000000 kB\nSwapFree:       {4000000 - swap_used_kib} kB\n",
    )


def wsl_host(root: Path) -> Path:
    """WSL2: NVML works, there is /dev/dxg and no /dev/nvidia*, no /proc/driver/nvidia."""
    write(root, "/proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2\n")
    write(root, "/dev/dxg")
    meminfo(root, 16_000_000)
    return root
