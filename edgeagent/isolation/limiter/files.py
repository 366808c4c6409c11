"""The files that the agent mounts into a container beside the library: limits and state.

Both formats are the library's (`limits.c`, `limiter.h`); this module writes and reads them on the
agent's side. The state file is the container's to write, so nothing in it is believed without a
check: a damaged one reads as None.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CONTAINER_DIR = "/usr/local/lib/edgeagent/limiter"  # LIMITER_DIR of limiter.h
LIBRARY_NAME = "libedgeagent-limiter.so"

MIB = 1024 * 1024
MAX_MEMORY_BYTES = 1 << 50

STATE_MAGIC = 0x314D494C45474445
STATE_VERSION = 1
STATE_SLOTS = 4096
_HEADER = struct.Struct("<QIIIIQQQQQqqQQ")
_SLOT = struct.Struct("<IIQQQQ24x")
_SLOTS_AT = 12288
STATE_BYTES = _SLOTS_AT + STATE_SLOTS * _SLOT.size


@dataclass(frozen=True, slots=True)
class Limits:
    """What a limits file says. `cores_pct` 100: compute is not limited. `unified`: the GPU shares the
    host's RAM, so host allocations count. `share` and `gpu` are for people."""

    memory_bytes: int
    cores_pct: int
    overhead_bytes: int
    unified: bool
    share: str
    gpu: str

    def problems(self) -> list[str]:
        """Why the library would refuse this file; empty when it would not."""
        found = []
        if not 1 <= self.memory_bytes <= MAX_MEMORY_BYTES:
            found.append(f"memory_bytes {self.memory_bytes} is not between 1 and 2^50")
        if not 1 <= self.cores_pct <= 100:
            found.append(f"cores_pct {self.cores_pct} is not between 1 and 100")
        if not 0 <= self.overhead_bytes <= MAX_MEMORY_BYTES:
            found.append(f"overhead_bytes {self.overhead_bytes} is not between 0 and 2^50")
        for name, text in (("share", self.share), ("gpu", self.gpu)):
            if not text or len(text) > 256 or not text.isascii() or not text.isprintable():
                found.append(f"{name} {text!r} is not 1 to 256 printable characters")
        return found

    def text(self) -> str:
        return (
            "edgeagent-limits 1\n"
            f"memory_bytes {self.memory_bytes}\n"
            f"cores_pct {self.cores_pct}\n"
            f"overhead_bytes {self.overhead_bytes}\n"
            f"unified {int(self.unified)}\n"
            f"share {self.share}\n"
            f"gpu {self.gpu}\n"
            "end\n"
        )


@dataclass(frozen=True, slots=True)
class Slot:
    """One process of the container as the library knows it. `pid` is the process's own view."""

    pid: int
    pid_ns: int
    started_ticks: int
    bytes: int
    peak_bytes: int
    refused: int


@dataclass(frozen=True, slots=True)
class State:
    """A state file. `busy_ns` is GPU time used since the start, counted only while cores are limited."""

    total_bytes: int
    peak_bytes: int
    refused: int
    last_refused_bytes: int
    reclaimed: int
    busy_ns: int
    slots: Sequence[Slot]


def new_state() -> bytes:
    """The header of a fresh state file; zeros follow up to STATE_BYTES."""
    return _HEADER.pack(STATE_MAGIC, STATE_VERSION, STATE_SLOTS, *([0] * 11))


def write_state(path: Path) -> None:
    """Writes a fresh state file that every user of the container may write, its room reserved: a
    sparse one on a full file system would kill the first process that touches it. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, STATE_BYTES)
        os.write(fd, new_state())
        os.fchmod(fd, 0o666)  # whatever the umask
    finally:
        os.close(fd)


def parse_state(data: bytes) -> State | None:
    """None: not a state file of this version."""
    if len(data) != STATE_BYTES:
        return None
    (magic, version, count, _lock, high, total, peak, refused, last, reclaimed, _credit, _at, busy, _head) = (
        _HEADER.unpack_from(data)
    )
    if magic != STATE_MAGIC or version != STATE_VERSION or count != STATE_SLOTS:
        return None
    slots = []
    for index in range(min(high, STATE_SLOTS)):
        slot = Slot(*_SLOT.unpack_from(data, _SLOTS_AT + index * _SLOT.size))
        if slot.pid != 0:
            slots.append(slot)
    return State(total, peak, refused, last, reclaimed, busy, tuple(slots))
