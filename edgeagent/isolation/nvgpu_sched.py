"""Compute weights on Jetson Orin and older: time slices per process through nvgpu's scheduling device.

A longer time slice gives a process more of the GPU while others want it too: a weight under
contention, not a cap. The control lock keeps clients from changing their own; the device can be open
only once, so holding it also keeps containers (into which NVIDIA's csv mounts this node) out.
Source: uapi/linux/nvgpu.h, API version 1. Not run on a Jetson by us.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import struct
import threading
from collections.abc import Callable

from edgeagent.errors import IsolationError
from edgeagent.gpus.model import Gpu
from edgeagent.hostroot import HostRoot
from edgeagent.isolation.backend import ProbeResult, RunningContainer, ShareToEnforce
from edgeagent.isolation.levels import Axis, AxisLevel, Level
from edgeagent.node.cdi import ContainerEdits

NODES = ("/dev/nvgpu/igpu0/sched", "/dev/nvhost-sched-gpu")
API_VERSION = 1
TIMESLICE_MIN_US, TIMESLICE_MAX_US = 1000, 50000
MAX_BITMAP_BYTES = 4096

_MAGIC = ord("S")
_BY_PID = struct.Struct("=QI4xQ")  # pid, size, buffer
_PARAMS = struct.Struct("=IIIII4xQ")  # tsgid, timeslice, interleave, graphics, compute, pid
_TIMESLICE = struct.Struct("=II")  # tsgid, timeslice µs
_VERSION = struct.Struct("=I")


def _request(direction: int, number: int, size: int) -> int:
    """_IOC of <asm-generic/ioctl.h>; direction 1 write, 2 read, 3 both."""
    return direction << 30 | size << 16 | _MAGIC << 8 | number


GET_TSGS_BY_PID = _request(3, 3, _BY_PID.size)
TSG_GET_PARAMS = _request(3, 4, _PARAMS.size)
TSG_SET_TIMESLICE = _request(1, 5, _TIMESLICE.size)
LOCK_CONTROL = _request(0, 7, 0)
UNLOCK_CONTROL = _request(0, 8, 0)
GET_API_VERSION = _request(2, 9, _VERSION.size)

Ioctl = Callable[[int, int, bytearray], None]


def _ioctl(fd: int, request: int, buffer: bytearray) -> None:
    """The one place that enters the kernel. Raises OSError."""
    if buffer:
        fcntl.ioctl(fd, request, buffer, True)
    else:
        fcntl.ioctl(fd, request)


def timeslice_us(cores_pct: int) -> int:
    """The slice for a share: proportional to its per cent, within what the driver takes."""
    return max(TIMESLICE_MIN_US, min(TIMESLICE_MAX_US, TIMESLICE_MAX_US * cores_pct // 100))


class NvgpuSchedBackend:
    name = "nvgpu-sched"
    axes = frozenset({Axis.COMPUTE})

    def __init__(self, host: HostRoot, ioctl: Ioctl = _ioctl) -> None:
        self._host = host
        self._ioctl = ioctl
        self._fd: int | None = None
        self._lock = threading.Lock()

    def probe(self, gpu: Gpu, axis: Axis) -> ProbeResult:
        if gpu.source != "tegra":
            return ProbeResult(Level.NONE, "", "only Jetson's nvgpu driver has this")
        with self._lock:
            try:
                node = self._open()
                buffer = bytearray(_VERSION.size)
                self._ioctl(self._descriptor(), GET_API_VERSION, buffer)
                (version,) = _VERSION.unpack(buffer)
                if version != API_VERSION:
                    return ProbeResult(Level.NONE, "", f"{node}: API version {version}, only 1 is known")
                self._ioctl(self._descriptor(), LOCK_CONTROL, bytearray())
            except (OSError, IsolationError) as e:
                self._close()
                return ProbeResult(Level.NONE, "", str(e))
        return ProbeResult(Level.WEIGHTED, f"{node}: API version 1, control locked")

    def _open(self) -> str:
        for node in NODES:
            if not self._host.exists(node):
                continue
            if self._fd is None:
                try:
                    self._fd = os.open(self._host.path(node), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
                except OSError as e:
                    hint = "; another process holds it" if e.errno == errno.EBUSY else ""
                    raise IsolationError(f"cannot open {node}: {e.strerror}{hint}") from e
            return node
        raise IsolationError(f"no scheduling device ({' or '.join(NODES)})")

    def _descriptor(self) -> int:
        if self._fd is None:
            raise IsolationError("the scheduling device is not open")
        return self._fd

    def prepare(self, share: ShareToEnforce, axes: frozenset[Axis]) -> ContainerEdits:
        """Nothing before the start: time slices belong to processes with GPU work."""
        return ContainerEdits()

    def evidence(self, share: ShareToEnforce, running: RunningContainer, axis: Axis) -> AxisLevel:
        """Sets the slices of the container's processes where they differ, and reads them back."""
        if share.cores_pct is None:
            return AxisLevel(Level.NONE, self.name, reason="uncapped")
        wanted = timeslice_us(share.cores_pct)
        groups = 0
        with self._lock:
            try:
                for pid in running.pids:
                    for tsg in self._tsgs_of(pid):
                        groups += 1
                        if self._timeslice(tsg) != wanted:
                            self._ioctl(
                                self._descriptor(), TSG_SET_TIMESLICE, bytearray(_TIMESLICE.pack(tsg, wanted))
                            )
                            if self._timeslice(tsg) != wanted:
                                return AxisLevel(
                                    Level.NONE,
                                    self.name,
                                    f"TSG {tsg} does not keep {wanted} µs",
                                    "limit_changed",
                                )
            except (OSError, IsolationError) as e:
                return AxisLevel(Level.NONE, self.name, f"cannot set time slices: {e}", "limit_not_readable")
        if not groups:
            return AxisLevel(Level.NONE, self.name, reason="no_gpu_use_yet")
        return AxisLevel(Level.WEIGHTED, self.name, f"{groups} TSGs read back {wanted} µs")

    def _tsgs_of(self, pid: int) -> list[int]:
        """As _tsgs; none for a process that has ended."""
        try:
            return self._tsgs(pid)
        except OSError:
            if self._host.exists(f"/proc/{pid}"):
                raise
            return []

    def _tsgs(self, pid: int) -> list[int]:
        """Time-slice groups of a process (host PID)."""
        size = 64
        while size <= MAX_BITMAP_BYTES:
            bitmap = array.array("Q", bytes(size))
            request = bytearray(_BY_PID.pack(pid, size, bitmap.buffer_info()[0]))
            try:
                self._ioctl(self._descriptor(), GET_TSGS_BY_PID, request)
            except OSError as e:
                if e.errno != errno.ENOSPC:
                    raise
                _, needed, _ = _BY_PID.unpack(request)
                size = max(size * 2, (needed + 7) // 8 * 8)
                continue
            return [
                word * 64 + bit for word, value in enumerate(bitmap) for bit in range(64) if value >> bit & 1
            ]
        raise IsolationError("the driver asks for an impossible bitmap size")

    def _timeslice(self, tsg: int) -> int:
        buffer = bytearray(_PARAMS.pack(tsg, 0, 0, 0, 0, 0))
        self._ioctl(self._descriptor(), TSG_GET_PARAMS, buffer)
        return int(_PARAMS.unpack(buffer)[1])

    def release(self, share: ShareToEnforce) -> None:
        """Nothing: groups go with their processes."""

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            try:
                self._ioctl(self._fd, UNLOCK_CONTROL, bytearray())
            except OSError:
                pass  # closing gives the lock back anyway
            os.close(self._fd)
            self._fd = None
