"""A stand-in for nvgpu's scheduling device: answers the ioctls of API version 1 from Python state."""

from __future__ import annotations

import ctypes
import errno
from dataclasses import dataclass, field

from edgeagent.isolation import nvgpu_sched as sched


@dataclass
class FakeSchedDevice:
    """`groups`: PID -> its TSG ids. Timeslices start at the driver's default of 1300 µs."""

    version: int = 1
    groups: dict[int, list[int]] = field(default_factory=dict)
    timeslices: dict[int, int] = field(default_factory=dict)
    locked: bool = False
    busy: bool = False
    stubborn: bool = False  # takes new time slices and does not keep them
    bitmap_bytes: int = 64
    unknown: set[int] = field(default_factory=set)  # PIDs that the driver does not find

    def ioctl(self, fd: int, request: int, buffer: bytearray) -> None:
        if request == sched.GET_API_VERSION:
            buffer[:] = sched._VERSION.pack(self.version)
        elif request == sched.LOCK_CONTROL:
            if self.busy:
                raise OSError(errno.EBUSY, "Device or resource busy")
            self.locked = True
        elif request == sched.UNLOCK_CONTROL:
            self.locked = False
        elif request == sched.GET_TSGS_BY_PID:
            self._by_pid(buffer)
        elif request == sched.TSG_GET_PARAMS:
            tsg = sched._PARAMS.unpack(buffer)[0]
            buffer[:] = sched._PARAMS.pack(tsg, self.timeslices.get(tsg, 1300), 0, 0, 0, 0)
        elif request == sched.TSG_SET_TIMESLICE:
            tsg, timeslice = sched._TIMESLICE.unpack(buffer)
            if not sched.TIMESLICE_MIN_US <= timeslice <= sched.TIMESLICE_MAX_US:
                raise OSError(errno.EINVAL, "Invalid argument")
            if not self.stubborn:
                self.timeslices[tsg] = timeslice
        else:
            raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")

    def _by_pid(self, buffer: bytearray) -> None:
        pid, size, address = sched._BY_PID.unpack(buffer)
        if pid in self.unknown:
            raise OSError(errno.EINVAL, "Invalid argument")
        buffer[:] = sched._BY_PID.pack(pid, self.bitmap_bytes, address)
        if size < self.bitmap_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        bitmap = (ctypes.c_uint64 * (self.bitmap_bytes // 8)).from_address(address)
        for tsg in self.groups.get(pid, []):
            bitmap[tsg // 64] |= 1 << tsg % 64
