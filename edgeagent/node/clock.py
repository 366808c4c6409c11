"""What time it is, and how far to trust it: wall clock, time since boot, boot id, synchronisation.

A box without a battery clock boots in 1970 or in its image's past and learns the time when its
network comes up, perhaps never. So every record keeps the time since boot beside the wall time:
once the clock is right, times of the same boot are computed back. The last good time is kept on
disk as a floor: the wall time reported never lies before it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgeagent.hostroot import HostRoot

log = logging.getLogger(__name__)

PERSIST_EVERY_MS = 600_000
UNKNOWN_BOOT = "unknown"

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
# systemd-timesyncd touches it; it helps where adjtimex is not to be had (seccomp).
_TIMESYNC_MARK = "/run/systemd/timesync/synchronized"
_STA_UNSYNC = 0x0040
_TIME_ERROR = 5


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time. `wall_ms`: unix ms, never before the floor. `mono_ms`: since boot, suspend
    included. `synced`: the kernel says that something keeps the wall clock right."""

    wall_ms: int
    mono_ms: int
    boot_id: str
    synced: bool


class Clock(Protocol):
    """Where the time comes from; tests pass their own."""

    def now(self) -> Moment: ...

    def keep(self) -> None:
        """Called now and then and at the end: remembers the last good time where there is a place."""


class SystemClock:
    """The host's clock. `floor_file` None: no floor is kept. Methods may be called from any thread."""

    def __init__(
        self,
        root: HostRoot | None = None,
        floor_file: Path | None = None,
        *,
        synced: Callable[[], bool | None] | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._root = root or HostRoot()
        self._floor_file = floor_file
        self._wall_ns = wall_ns
        self._kernel_synced = synced if synced is not None else _Adjtimex().synced
        # 48 bits tell the boots of one node apart, and every message carries them.
        boot_id = (self._root.read_text(_BOOT_ID) or "").strip().replace("-", "")
        self.boot_id = boot_id[:12] or UNKNOWN_BOOT
        self._floor_ms = self._read_floor()
        self._floor_mono_ms = _boottime_ms()
        self._kept_mono_ms = self._floor_mono_ms - PERSIST_EVERY_MS

    def now(self) -> Moment:
        mono_ms = _boottime_ms()
        wall_ms = self._wall_ns() // 1_000_000
        floor_ms = self._floor_ms + mono_ms - self._floor_mono_ms
        synced = self._is_synced()
        # A clock that something keeps right is believed even against the floor: the floor itself may
        # come from a time when it was wrong.
        return Moment(wall_ms if synced else max(wall_ms, floor_ms), mono_ms, self.boot_id, synced)

    def keep(self) -> None:
        """Writes the floor when the clock is synchronised, at most every ten minutes."""
        moment = self.now()
        if self._floor_file is None or not moment.synced:
            return
        if moment.mono_ms - self._kept_mono_ms < PERSIST_EVERY_MS:
            return
        self._kept_mono_ms = moment.mono_ms
        temporary = self._floor_file.with_suffix(".tmp")
        try:
            temporary.write_text(f"{moment.wall_ms}\n")
            os.replace(temporary, self._floor_file)
        except OSError as e:
            log.debug("cannot keep the last good time file=%s: %s", self._floor_file, e)

    def _is_synced(self) -> bool:
        kernel = self._kernel_synced()
        return True if kernel else self._root.exists(_TIMESYNC_MARK)

    def _read_floor(self) -> int:
        if self._floor_file is None:
            return 0
        try:
            return max(0, int(self._floor_file.read_text()))
        except (OSError, ValueError):
            return 0


def back_fill(then: Moment, now: Moment) -> int | None:
    """The wall time (unix ms) of `then`, recorded while the clock was not synchronised, as known
    `now`; None where that cannot be told: another boot, or still not synchronised."""
    if not now.synced or then.boot_id != now.boot_id or now.boot_id == UNKNOWN_BOOT:
        return None
    if then.mono_ms > now.mono_ms:
        return None
    return now.wall_ms - (now.mono_ms - then.mono_ms)


def _boottime_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class _Timex(ctypes.Structure):
    """struct timex of Linux, as <sys/timex.h> lays it out."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("constant", ctypes.c_long),
        ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long),
        ("time_s", ctypes.c_long),
        ("time_us", ctypes.c_long),
        ("tick", ctypes.c_long),
        ("ppsfreq", ctypes.c_long),
        ("jitter", ctypes.c_long),
        ("shift", ctypes.c_int),
        ("stabil", ctypes.c_long),
        ("jitcnt", ctypes.c_long),
        ("calcnt", ctypes.c_long),
        ("errcnt", ctypes.c_long),
        ("stbcnt", ctypes.c_long),
        ("tai", ctypes.c_int),
        ("room", ctypes.c_int * 64),  # 11 reserved ints, and to spare
    )


class _Adjtimex:
    """Asks the kernel (adjtimex, read only: needs no privilege)."""

    def __init__(self) -> None:
        self._call: Callable[..., int] | None
        try:
            self._call = ctypes.CDLL(None, use_errno=True).adjtimex
        except (OSError, AttributeError):
            self._call = None

    def synced(self) -> bool | None:
        """None: the kernel cannot be asked."""
        if self._call is None:
            return None
        timex = _Timex()
        state = self._call(ctypes.byref(timex))
        if state < 0:
            return None
        return state != _TIME_ERROR and not timex.status & _STA_UNSYNC
