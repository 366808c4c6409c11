"""Noticing what happens in the kubelet's device plugin directory, without spinning.

inotify where it works; a stat a second where it does not (some overlay and network mounts).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import logging
import os
import select
import struct
import threading
from pathlib import Path

log = logging.getLogger(__name__)

POLL_S = 1.0  # without inotify
SAFETY_POLL_S = 10.0  # with it: an event can be lost

# linux/inotify.h
_IN_CREATE, _IN_DELETE, _IN_MOVED_TO, _IN_MOVED_FROM = 0x100, 0x200, 0x80, 0x40
_IN_DELETE_SELF, _IN_MOVE_SELF, _IN_UNMOUNT = 0x400, 0x800, 0x2000
_IN_IGNORED, _IN_Q_OVERFLOW, _IN_ONLYDIR = 0x8000, 0x4000, 0x01000000
_MASK = (
    _IN_CREATE | _IN_DELETE | _IN_MOVED_TO | _IN_MOVED_FROM | _IN_DELETE_SELF | _IN_MOVE_SELF | _IN_ONLYDIR
)
_GONE = _IN_DELETE_SELF | _IN_MOVE_SELF | _IN_UNMOUNT | _IN_IGNORED
_HEADER = struct.Struct("iIII")


class DirectoryWatch:
    """Waits for names to appear in or vanish from one directory, which itself may come and go.

    `wait` belongs to one thread; `wake` may be called from any.
    """

    def __init__(self, directory: Path, use_inotify: bool = True) -> None:
        self._directory = directory
        self._lock = threading.Lock()  # a wake must not write to a descriptor that has become another's
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._libc = ctypes.CDLL(None, use_errno=True) if use_inotify else None
        self._inotify_fd = -1
        self._watched: tuple[int, int] | None = None  # (device, inode) of the directory
        if self._libc is not None:
            self._inotify_fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if self._inotify_fd < 0:
                log.warning("inotify is not to be had, polling instead: %s", os.strerror(ctypes.get_errno()))

    @property
    def active(self) -> bool:
        """Whether changes of the directory as it is now are noticed at once."""
        return self._watched is not None

    def wait(self, timeout_s: float | None = None) -> frozenset[str]:
        """Blocks until something changed, `wake` was called or the time is up (by default the poll
        interval that suits); returns the names that appeared."""
        self._arm()
        if timeout_s is None:
            timeout_s = SAFETY_POLL_S if self.active else POLL_S
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if self._inotify_fd >= 0:
            poll.register(self._inotify_fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(max(0, timeout_s) * 1000)}
        if self._wake_fd in ready:
            try:
                os.eventfd_read(self._wake_fd)
            except BlockingIOError:
                pass  # somebody else's wake was read with ours
        return self._appeared() if self._inotify_fd in ready else frozenset()

    def wake(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:  # else closed: nobody waits any more
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """After the last `wait`."""
        with self._lock:
            for fd in (self._wake_fd, self._inotify_fd):
                if fd >= 0:
                    os.close(fd)
            self._wake_fd = self._inotify_fd = -1

    def arm(self) -> None:
        """Starts noticing now, so that nothing is missed between a look at the directory and `wait`."""
        self._arm()

    def _arm(self) -> None:
        if self._libc is None or self._inotify_fd < 0:
            return
        try:
            stat = os.stat(self._directory)
        except OSError:
            self._watched = None
            return
        if self._watched == (stat.st_dev, stat.st_ino):
            return
        wd = self._libc.inotify_add_watch(self._inotify_fd, os.fsencode(self._directory), _MASK)
        if wd >= 0:
            self._watched = (stat.st_dev, stat.st_ino)
            return
        self._watched = None
        code = ctypes.get_errno()
        if code not in (errno.ENOENT, errno.ENOTDIR):
            log.warning("cannot watch %s, polling instead: %s", self._directory, os.strerror(code))
            os.close(self._inotify_fd)
            self._inotify_fd = -1

    def _appeared(self) -> frozenset[str]:
        names: set[str] = set()
        while True:
            try:
                data = os.read(self._inotify_fd, 65536)
            except BlockingIOError:
                return frozenset(names)
            offset = 0
            while offset < len(data):
                _, mask, _, length = _HEADER.unpack_from(data, offset)
                name = data[offset + _HEADER.size : offset + _HEADER.size + length].rstrip(b"\0")
                offset += _HEADER.size + length
                if mask & (_GONE | _IN_Q_OVERFLOW):
                    self._watched = None  # armed anew by the next wait
                if mask & (_IN_CREATE | _IN_MOVED_TO):
                    names.add(os.fsdecode(name))
