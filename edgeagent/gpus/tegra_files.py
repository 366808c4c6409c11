"""What the files of a Tegra board mean: pure parsers from bytes to values.

Each raises ValueError for contents that make no sense (the caller quarantines such a file) and returns
None for a proper "not now", such as an offline sensor.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_OFFLINE_MILLI_C = -256_000  # the BPMP's answer for a sensor in a power-gated partition
_KIB_PER = {"": 1.0, "B": 1 / 1024, "K": 1.0, "M": 1024.0, "G": 1024.0 * 1024}
_INT = re.compile(rb"-?\d{1,18}")
# `user      python3 worker    1234    56789K`; names may hold spaces and digits, so bound from the end.
_NVMAP_CLIENT = re.compile(r"^(\S+)\s+(\S.*?)\s+(\d{1,10})\s+(\d{1,15})([KMGB]?)$")
_NVMAP_TOTAL = re.compile(r"^total\s+(\d{1,15})([KMGB]?)$")


@dataclass(frozen=True, slots=True)
class MemInfo:
    """/proc/meminfo in MiB. `nvmap_used_mib` only on kernels that count it."""

    total_mib: float
    available_mib: float | None
    swap_used_mib: float | None
    nvmap_used_mib: float | None


@dataclass(frozen=True, slots=True)
class NvMapClient:
    pid: int  # host PID namespace
    name: str
    used_mib: float


@dataclass(frozen=True, slots=True)
class NvMap:
    """nvmap's clients with GPU memory, one per PID. Buffers that several processes share are counted
    with each, so their sum may exceed `total_mib`, the kernel's own total."""

    clients: tuple[NvMapClient, ...]
    total_mib: float | None


def integer(data: bytes) -> int:
    """The whole file is one integer (NULs and white space around it do not matter); units behind it,
    as in `32760 ma`, are ignored."""
    fields = data.replace(b"\0", b" ").split(None, 1)
    if not fields or not _INT.fullmatch(fields[0]):
        raise ValueError(f"not a number: {data[:32]!r}" if data.strip() else "empty")
    return int(fields[0])


def count(data: bytes) -> int:
    value = integer(data)
    if value < 0:
        raise ValueError(f"negative: {value}")
    return value


def load_pct(data: bytes) -> float:
    """The GPU's load in per mille: 437 -> 43.7 %."""
    per_mille = count(data)
    if per_mille > 2000:
        raise ValueError(f"load of {per_mille} per mille")
    return min(per_mille, 1000) / 10


def celsius(data: bytes) -> float | None:
    """Thousandths of a degree; None for the offline value."""
    milli = integer(data)
    if milli in (_OFFLINE_MILLI_C, -256):
        return None
    if not -60_000 <= milli <= 250_000:
        raise ValueError(f"temperature of {milli / 1000} °C")
    return milli / 1000


def mhz(data: bytes) -> float:
    """From Hz."""
    return count(data) / 1e6


def pwm_pct(data: bytes) -> float:
    """A fan's duty cycle: 0 to 255."""
    value = count(data)
    if value > 255:
        raise ValueError(f"PWM value of {value}")
    return value * 100 / 255


def microwatt(data: bytes) -> float:
    """-> W."""
    return count(data) / 1e6


def milliwatt(data: bytes) -> float:
    """-> W."""
    return count(data) / 1e3


def bytes_mib(data: bytes) -> float:
    return count(data) / 2**20


def meminfo(data: bytes) -> MemInfo:
    """Needs MemTotal; everything else may be missing."""
    kib: dict[str, int] = {}
    for line in data.decode("utf-8", "replace").splitlines():
        name, colon, rest = line.partition(":")
        fields = rest.split()
        if colon and fields and fields[0].isascii() and fields[0].isdigit() and len(fields[0]) <= 15:
            kib.setdefault(name.strip(), int(fields[0]))
    if not kib.get("MemTotal"):
        raise ValueError("no MemTotal")
    swap_total, swap_free = kib.get("SwapTotal"), kib.get("SwapFree")
    swap_used = None if swap_total is None or swap_free is None else max(0, swap_total - swap_free) / 1024
    available, nvmap = kib.get("MemAvailable"), kib.get("NvMapMemUsed")
    return MemInfo(
        total_mib=kib["MemTotal"] / 1024,
        available_mib=None if available is None else available / 1024,
        swap_used_mib=swap_used,
        nvmap_used_mib=None if nvmap is None else nvmap / 1024,
    )


def nvmap(data: bytes) -> NvMap:
    """debugfs nvmap/iovmm/clients (or the client lines of /maps). Several clients of one process are
    added up. Only lines that start in the first column are clients; indented ones are their buffers.
    Without header, client or total it is not such a table: that must not read as "no process"."""
    used: dict[int, float] = {}
    names: dict[int, str] = {}
    total: float | None = None
    is_table = False
    for line in data.decode("utf-8", "replace").splitlines():
        if not line or line[0].isspace():
            continue
        line = line.rstrip()
        if line.startswith("CLIENT"):
            is_table = True
        elif m := _NVMAP_TOTAL.match(line):
            total = _mib(m.group(1), m.group(2))
        elif m := _NVMAP_CLIENT.match(line):
            pid = int(m.group(3))
            used[pid] = used.get(pid, 0.0) + _mib(m.group(4), m.group(5))
            names.setdefault(pid, "".join(c for c in m.group(2) if c.isprintable())[:64])
    if not is_table and not used and total is None:
        raise ValueError("no table of nvmap clients" if data else "empty")
    clients = tuple(NvMapClient(pid, names[pid], used[pid]) for pid in sorted(used) if 0 < pid < 2**22 + 1)
    return NvMap(clients, total)


def _mib(number: str, unit: str) -> float:
    value = int(number) * _KIB_PER[unit] / 1024
    if not math.isfinite(value):
        raise ValueError(f"size of {number}{unit}")
    return value
