"""What the host's files say of NVIDIA's driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeagent.gpus import nvidia_host
from edgeagent.hostroot import HostRoot


def put(root: Path, path: str, text: str = "") -> None:
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024\n",
            "550.90.07",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.45  Release Build  (root@x)\n",
            "595.45",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.00  Release Build\nGCC version: 13\n",
            "580.00",
        ),
        ("NVRM version: NVIDIA UNIX aarch64 Kernel Module  470.57.02\n", "470.57.02"),
        ("", None),
        ("nonsense", None),
    ],
)
def test_kernel_module_version(tmp_path: Path, text: str, version: str | None) -> None:
    put(tmp_path, "/proc/driver/nvidia/version", text)
    assert nvidia_host.kernel_module_version(HostRoot(tmp_path)) == version


def test_nothing_is_there(tmp_path: Path) -> None:
    host = HostRoot(tmp_path)
    assert nvidia_host.kernel_module_version(host) is None
    assert nvidia_host.bound_gpus(host) == frozenset()
    assert nvidia_host.pci_gpus(host) == ()
    assert not nvidia_host.is_wsl(host)
    assert nvidia_host.device_nodes(host, 0) == ()
    assert nvidia_host.minor_number(host, "0000:65:00.0") is None
    assert nvidia_host.numa_node(host, "0000:65:00.0") is None
    assert nvidia_host.mig_nodes(host, 0, 1, 0) == ()


def test_pci_gpus_are_nvidias_display_controllers(tmp_path: Path) -> None:
    for address, vendor, kind in (
        ("0000:65:00.0", "0x10de", "0x030200"),
        ("0000:65:00.1", "0x10de", "0x040300"),  # the card's sound device
        ("0000:00:02.0", "0x8086", "0x030000"),
        ("0000:B3:00.0", "0x10de", "0x030000"),
    ):
        put(tmp_path, f"/sys/bus/pci/devices/{address}/vendor", vendor + "\n")
        put(tmp_path, f"/sys/bus/pci/devices/{address}/class", kind + "\n")
    assert nvidia_host.pci_gpus(HostRoot(tmp_path)) == ("0000:65:00.0", "0000:b3:00.0")


@pytest.mark.parametrize(
    ("osrelease", "dxg", "wsl"),
    [
        ("5.15.153.1-microsoft-standard-WSL2", True, True),
        ("5.15.153.1-microsoft-standard-WSL2", False, True),
        ("4.4.0-19041-Microsoft", False, True),
        ("6.1.0-21-amd64", False, False),
        ("5.15.148-tegra", False, False),
    ],
)
def test_wsl(tmp_path: Path, osrelease: str, dxg: bool, wsl: bool) -> None:
    put(tmp_path, "/proc/sys/kernel/osrelease", osrelease + "\n")
    if dxg:
        put(tmp_path, "/dev/dxg")
    assert nvidia_host.is_wsl(HostRoot(tmp_path)) is wsl


@pytest.mark.parametrize(
    ("there", "minor", "nodes"),
    [
        (("nvidia0", "nvidiactl", "nvidia-uvm"), 0, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")),
        (("nvidia0", "nvidiactl"), 1, ()),
        (("nvidiactl", "dxg"), None, ("/dev/dxg",)),
        (("dxg",), 0, ("/dev/dxg",)),
        (("nvidiactl",), None, ()),
    ],
)
def test_device_nodes(
    tmp_path: Path, there: tuple[str, ...], minor: int | None, nodes: tuple[str, ...]
) -> None:
    for name in there:
        put(tmp_path, f"/dev/{name}")
    assert nvidia_host.device_nodes(HostRoot(tmp_path), minor) == nodes


@pytest.mark.parametrize(("text", "node"), [("0\n", 0), ("1\n", 1), ("-1\n", None), ("", None)])
def test_numa_node(tmp_path: Path, text: str, node: int | None) -> None:
    put(tmp_path, "/sys/bus/pci/devices/0000:65:00.0/numa_node", text)
    assert nvidia_host.numa_node(HostRoot(tmp_path), "0000:65:00.0") == node
