"""Facts of the box itself, from /proc, /sys and /etc under the host root."""

from __future__ import annotations

import os
import re

from edgeagent.hostroot import HostRoot

_MEMINFO = re.compile(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", re.MULTILINE)
_OS_RELEASE = re.compile(r'^PRETTY_NAME="?([^"\n]*)"?$', re.MULTILINE)
_MAX_CPUS = 4096


class Host:
    """Reads the host. What does not change while it is up is read once."""

    def __init__(self, host: HostRoot) -> None:
        self._host = host
        self.hostname = self._line("/proc/sys/kernel/hostname") or os.uname().nodename
        self.machine = os.uname().machine
        self.kernel = self._line("/proc/sys/kernel/osrelease")
        self.boot_id = self._line("/proc/sys/kernel/random/boot_id")
        self.os = self._os_name()
        self.cpu_count = parse_cpu_list(self._line("/sys/devices/system/cpu/online") or "") or os.cpu_count()
        self.hardware = self._hardware()

    def memory_mib(self) -> tuple[int | None, int | None]:
        """(total, available) MiB of the host's RAM."""
        found = dict(_MEMINFO.findall(self._host.read_text("/proc/meminfo") or ""))
        total, available = (found.get(k) for k in ("MemTotal", "MemAvailable"))
        return (int(total) // 1024 if total else None, int(available) // 1024 if available else None)

    def load_1m(self) -> float | None:
        fields = (self._line("/proc/loadavg") or "").split()
        try:
            return float(fields[0])
        except (IndexError, ValueError):
            return None

    def _line(self, path: str) -> str | None:
        text = self._host.read_text(path, 4096)
        return (text.strip(" \t\n\0") or None) if text else None

    def _os_name(self) -> str | None:
        for path in ("/etc/os-release", "/usr/lib/os-release"):
            m = _OS_RELEASE.search(self._host.read_text(self._host.resolve(path)) or "")
            if m:
                return m.group(1)
        return None

    def _hardware(self) -> str | None:
        """Name of the machine: the device tree's model, else what the firmware says."""
        model = self._line("/proc/device-tree/model") or self._line("/sys/firmware/devicetree/base/model")
        if model:
            return model
        vendor = self._line("/sys/class/dmi/id/sys_vendor")
        product = self._line("/sys/class/dmi/id/product_name")
        return " ".join(p for p in (vendor, product) if p) or None


def parse_cpu_list(text: str) -> int | None:
    """'0-3,6' -> 5; None for anything else."""
    count = 0
    for part in text.strip().split(","):
        low, dash, high = part.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            return None
        count += (int(high) if dash else int(low)) - int(low) + 1
    return count if 0 < count <= _MAX_CPUS else None
