"""Linux inotify, as far as the runtime needs it: which names in which directories changed how."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

MODIFY = 0x002
CLOSE_WRITE = 0x008
MOVED_FROM = 0x040
DELETE = 0x200
DELETE_SELF = 0x400
MOVE_SELF = 0x800
IGNORED = 0x8000
_NONBLOCK = os.O_NONBLOCK
_CLOEXEC = os.O_CLOEXEC
_HEADER = struct.Struct("iIII")


class Inotify:
    """Raises OSError where the kernel offers none."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.inotify_init1(_NONBLOCK | _CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "cannot use inotify")

    def watch(self, path: Path, mask: int) -> int:
        """A watch's number; OSError where the path is absent."""
        number: int = self._libc.inotify_add_watch(self.fd, os.fsencode(path), mask)
        if number < 0:
            raise OSError(ctypes.get_errno(), f"cannot watch {path}")
        return number

    def unwatch(self, number: int) -> None:
        self._libc.inotify_rm_watch(self.fd, number)

    def read(self) -> list[tuple[int, int, str]]:
        """What happened since the last call: (watch, mask, name); never blocks."""
        events: list[tuple[int, int, str]] = []
        while True:
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                return events
            offset = 0
            while offset < len(data):
                number, mask, _, length = _HEADER.unpack_from(data, offset)
                offset += _HEADER.size
                name = data[offset : offset + length].rstrip(b"\0").decode(errors="replace")
                offset += length
                events.append((number, mask, name))

    def close(self) -> None:
        os.close(self.fd)
