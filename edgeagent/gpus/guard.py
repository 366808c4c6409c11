"""Calls into a driver that may never return, bounded in time.

A call runs in a worker thread and its caller waits for at most `call_timeout_s`. Calls about one GPU
form a lane: while one is stuck there, further ones on it are answered at once, without a thread, and
other lanes go on. So at most one thread per GPU (and one for inventory) is ever stuck, and a call that
returns at last frees its lane. Workers are daemons: a process can end while one is stuck (a thread in
uninterruptible sleep inside the kernel holds back the process's end, whoever started it).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from edgeagent.errors import GpuError
from edgeagent.gpus.model import (
    CgroupMemoryLimiter,
    ComputeModes,
    GpuBackend,
    GpuEvent,
    GpuFault,
    GpuReading,
    Inventory,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

INVENTORY = "inventory"
CLOSE_S = 2.0  # of the time that a stop may take; a waiter for events leaves within a second


class HangingError(Exception):
    """The call, or an earlier one in its lane, has not returned. Stays in this module's callers."""

    def __init__(self, lane: str, since_s: float) -> None:
        self.since_s = since_s
        super().__init__(f"a driver call has not returned for {since_s:.0f} s")


class _Task(Generic[T]):
    """A call and, once `done`, what came of it."""

    def __init__(self, function: Callable[[], T], lane: str, started_s: float) -> None:
        self.function = function
        self.lane = lane
        self.started_s = started_s
        self.done = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as e:  # noqa: BLE001 - not handled here: raised again in the caller's thread
            self.error = e


class Lanes:
    """Runs calls in worker threads, one at a time per lane, at most `timeout_s` of the caller's time."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._changed = threading.Condition()
        self._running: dict[str, _Task[Any]] = {}  # lane -> the call under way
        self._hung: set[str] = set()
        self._idle: list[_Worker] = []
        self._closed = False

    def call(self, lane: str, function: Callable[[], T], timeout_s: float | None = None) -> T:
        """`function()`, or HangingError. Whatever it raises is raised here."""
        deadline = self._clock() + (self.timeout_s if timeout_s is None else timeout_s)
        with self._changed:
            while lane in self._running:
                if lane in self._hung or not self._changed.wait(max(0.0, deadline - self._clock())):
                    raise HangingError(lane, self._clock() - self._running[lane].started_s)
            task = _Task(function, lane, self._clock())
            self._running[lane] = task
            worker = self._idle.pop() if self._idle else _Worker(self)
        worker.take(task)
        if not task.done.wait(max(0.0, deadline - self._clock())):
            with self._changed:
                if not task.done.is_set():
                    self._hung.add(lane)
                    self._changed.notify_all()
                    raise HangingError(lane, self._clock() - task.started_s)
        if task.error is not None:
            raise task.error
        return task.result  # type: ignore[return-value]  # without an error it is the function's T

    def finished(self, worker: _Worker, task: _Task[Any]) -> bool:
        """Called by a worker; True: it shall wait for more work."""
        with self._changed:
            del self._running[task.lane]
            self._hung.discard(task.lane)
            task.done.set()
            self._changed.notify_all()
            if self._closed or self._idle:
                return False
            self._idle.append(worker)
            return True

    @property
    def stuck(self) -> int:
        with self._changed:
            return len(self._hung)

    def close(self) -> None:
        """Ends the idle worker; a stuck one ends when its call returns."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.end()


class _Worker:
    """A thread that runs one task after the other."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._work = threading.Semaphore(0)
        self._task: _Task[Any] | None = None
        self._thread = threading.Thread(target=self._run, name="gpu-call", daemon=True)
        self._thread.start()

    def take(self, task: _Task[Any]) -> None:
        self._task = task
        self._work.release()

    def end(self) -> None:
        self._work.release()
        self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            self._work.acquire()
            task, self._task = self._task, None
            if task is None:
                return
            task.run()
            if not self._lanes.finished(self, task):
                return


class GuardedBackend:
    """A GpuBackend whose calls return in time. `wait_event` is passed through: it is bounded by its
    own timeout, and whoever waits for events has a thread of its own that may get stuck."""

    def __init__(
        self, inner: GpuBackend, call_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self._clock = clock
        self._lanes = Lanes(call_timeout_s, clock)
        self._last = Inventory(())
        self._stuck: set[str] = set()

    def inventory(self) -> Inventory:
        """While it hangs: the GPUs of the last one that returned; their readings say which answer."""
        try:
            self._last = self._lanes.call(INVENTORY, self.inner.inventory)
        except HangingError as e:
            self._note(INVENTORY, f"cannot look for GPUs: {e}")
            why = f"{self.name}: {e}; look for hung tasks in the kernel log, a reboot may be needed"
            known, evidence = self._last.gpus, (*self._last.evidence, why)
            if known:
                return Inventory(known, evidence)
            return Inventory((), evidence, why, GpuFault.UNRESPONSIVE)
        self._note(INVENTORY, None)
        return self._last

    def read(self, uuid: str) -> GpuReading:
        try:
            reading = self._lanes.call(uuid, lambda: self.inner.read(uuid))
        except HangingError as e:
            self._note(uuid, str(e))
            return GpuReading(uuid, self._clock(), fault=GpuFault.UNRESPONSIVE, fault_detail=str(e))
        self._note(uuid, None)
        return reading

    def _note(self, what: str, problem: str | None) -> None:
        """Logs changes only."""
        if problem is None:
            if what in self._stuck:
                self._stuck.discard(what)
                log.info("driver calls return again lane=%s", what)
        elif what not in self._stuck:
            self._stuck.add(what)
            log.warning("driver does not answer lane=%s: %s", what, problem)

    def wait_event(self, timeout_s: float) -> GpuEvent | None:
        return self.inner.wait_event(timeout_s)

    def wake(self) -> None:
        self.inner.wake()

    def call(self, lane: str, function: Callable[[], T]) -> T:
        """Any other call of the back end, bounded too. Raises GpuError (fault "unresponsive")."""
        try:
            return self._lanes.call(lane, function)
        except HangingError as e:
            raise GpuError(f"{self.name}: {e}", GpuFault.UNRESPONSIVE.value) from e

    def close(self) -> None:
        """Releases the library unless a call hangs in it; returns in time either way."""
        self.inner.wake()
        try:
            if not self._lanes.stuck:
                self._lanes.call("close", self.inner.close, min(CLOSE_S, self._lanes.timeout_s))
        except HangingError as e:
            log.warning("%s left open: %s", self.name, e)
        self._lanes.close()


class GuardedLimiter:
    """A CgroupMemoryLimiter whose calls return in time, in lanes apart from the readings'."""

    def __init__(self, guard: GuardedBackend, limiter: CgroupMemoryLimiter) -> None:
        self._guard = guard
        self._limiter = limiter

    def set_memory_limits(self, uuid: str, cgroup_dir: str, soft_mib: int, hard_mib: int | None) -> None:
        self._guard.call(
            f"limits {uuid}", lambda: self._limiter.set_memory_limits(uuid, cgroup_dir, soft_mib, hard_mib)
        )

    def get_memory_limits(self, uuid: str, cgroup_dir: str) -> tuple[int, int | None, int]:
        return self._guard.call(f"limits {uuid}", lambda: self._limiter.get_memory_limits(uuid, cgroup_dir))


class GuardedComputeModes:
    """ComputeModes whose calls return in time, in lanes apart from the readings'."""

    def __init__(self, guard: GuardedBackend, modes: ComputeModes) -> None:
        self._guard = guard
        self._modes = modes

    def get_compute_mode(self, uuid: str) -> str:
        return self._guard.call(f"limits {uuid}", lambda: self._modes.get_compute_mode(uuid))

    def set_compute_mode(self, uuid: str, mode: str) -> None:
        self._guard.call(f"limits {uuid}", lambda: self._modes.set_compute_mode(uuid, mode))
