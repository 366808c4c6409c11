"""Reading many small host files in one go when some of them fail, lie or never answer.

Sensor files of boards break one by one: an offline zone hangs in the kernel, another says EAGAIN for
ever, an I2C rail goes away. A sweep gives every file that answers, within a deadline; one that fails
`failures_allowed` times in a row is quarantined, tried again only every `retry_s`, and costs one log
line when it goes and one when it comes back.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)

# Threads lost to files that hang in the kernel; beyond this the sweep gives up rather than leak more.
MAX_STUCK = 4


@dataclass(frozen=True, slots=True)
class Source:
    """One value. `key` names it in the result; `parse` raises ValueError for contents that make no
    sense and returns None for a proper "not now" (an offline sensor)."""

    key: str
    path: str  # in this process's file system
    parse: Callable[[bytes], Any]
    max_bytes: int = 4096


def read_file(path: str, max_bytes: int) -> bytes:
    """Raises OSError. Non-blocking, so that a FIFO raises or reads empty; a sysfs file whose driver
    hangs still hangs."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        data = os.read(fd, max_bytes)
        # seq files (debugfs, /proc) come a page or less at a time.
        while 0 < len(data) < max_bytes and (more := os.read(fd, max_bytes - len(data))):
            data += more
        return data
    finally:
        os.close(fd)


@dataclass(slots=True)
class _State:
    """What is known about one source's file."""

    failures: int = 0
    retry_at_s: float | None = None  # set: quarantined
    stuck: bool = False  # a thread hangs in it right now


@dataclass(slots=True)
class _Job:
    sources: Sequence[Source]
    results: dict[str, Any] = field(default_factory=dict)
    position: int = 0
    abandoned: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class Sweep:
    """The files to read and how each has behaved. Thread-safe; sweeps do not overlap."""

    def __init__(
        self,
        *,
        what: str,
        file_deadline_s: float = 0.5,
        failures_allowed: int = 3,
        retry_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[str, int], bytes] = read_file,
    ) -> None:
        self._what = what
        self._file_deadline_s = file_deadline_s
        self._failures_allowed = failures_allowed
        self._retry_s = retry_s
        self._clock = clock
        self._read = read
        self._sources: tuple[Source, ...] = ()
        self._states: dict[str, _State] = {}  # by path
        self._sweeping = threading.Lock()
        self._lock = threading.Lock()  # states and jobs
        self._jobs: queue.SimpleQueue[_Job | None] | None = None
        self._worker: threading.Thread | None = None
        self._gave_up = False

    def set_sources(self, sources: Sequence[Source]) -> None:
        """Replaces what is read. A file that stays keeps its history."""
        with self._sweeping, self._lock:
            self._sources = tuple(sources)
            wanted = {s.path for s in sources}
            self._states = {p: st for p, st in self._states.items() if p in wanted or st.stuck}

    @property
    def quarantined(self) -> tuple[str, ...]:
        """Paths that are not read at every sweep because they failed."""
        with self._lock:
            return tuple(p for p, st in self._states.items() if st.retry_at_s is not None)

    @property
    def gave_up(self) -> bool:
        """So many files hang that none is read any more until one of them answers."""
        return self._gave_up

    def run(self) -> dict[str, Any]:
        """The values of all sources that answered, by key. A file that hangs for the first time costs
        one to two `file_deadline_s`, later ones nothing until its retry."""
        with self._sweeping:
            now = self._clock()
            with self._lock:
                left = [s for s in self._sources if self._due(s.path, now)]
            results: dict[str, Any] = {}
            while left:
                job = _Job(left)
                if not self._submit(job):
                    break
                left = self._await(job)
                results.update(job.results)
            return results

    def close(self) -> None:
        """Ends the reading thread. Idempotent; a later run starts a new one."""
        with self._sweeping:
            if self._jobs is not None:
                self._jobs.put(None)
            worker, self._worker, self._jobs = self._worker, None, None
        if worker is not None:
            worker.join(self._file_deadline_s)

    # -- the sweeping side ------------------------------------------------------------------------

    def _due(self, path: str, now: float) -> bool:
        state = self._states.setdefault(path, _State())
        return not state.stuck and (state.retry_at_s is None or now >= state.retry_at_s)

    def _submit(self, job: _Job) -> bool:
        if self._worker is None or not self._worker.is_alive() or self._jobs is None:
            with self._lock:
                stuck = [p for p, st in self._states.items() if st.stuck]
            if len(stuck) >= MAX_STUCK:
                if not self._gave_up:
                    self._gave_up = True
                    log.error("cannot read %s: %d files hang files=%s", self._what, len(stuck), stuck)
                return False
            if self._gave_up:
                self._gave_up = False
                log.info("reading %s again", self._what)
            self._jobs = queue.SimpleQueue()
            self._worker = threading.Thread(
                target=self._work, args=(self._jobs,), name=f"read {self._what}", daemon=True
            )
            self._worker.start()
        self._jobs.put(job)
        return True

    def _await(self, job: _Job) -> list[Source]:
        """Waits while the worker gets on; returns the sources after one that hangs."""
        seen = -1
        while not job.done.wait(self._file_deadline_s):
            with self._lock:
                if job.done.is_set():
                    break
                if job.position != seen:
                    seen = job.position
                    continue
                # No progress for a whole deadline: this worker is lost to that file.
                job.abandoned = True
                culprit = job.sources[job.position]
                self._states.setdefault(culprit.path, _State()).stuck = True
                self._quarantine(culprit.path, f"does not answer within {self._file_deadline_s} s")
                self._worker = self._jobs = None
                return list(job.sources[job.position + 1 :])
        return []

    # -- the reading thread -----------------------------------------------------------------------

    def _work(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        while (job := jobs.get()) is not None:
            for i, source in enumerate(job.sources):
                job.position = i
                value: Any = None
                problem: str | None = None
                try:
                    value = source.parse(self._read(source.path, source.max_bytes))
                except OSError as e:
                    problem = e.strerror or str(e)
                except ValueError as e:
                    problem = str(e)
                with self._lock:
                    if job.abandoned:
                        # It answered after all; whether it may be trusted again the retry shows.
                        self._states.setdefault(source.path, _State()).stuck = False
                        return
                    self._note(source.path, problem)
                    if problem is None and value is not None:
                        job.results[source.key] = value
            job.done.set()

    def _note(self, path: str, problem: str | None) -> None:
        state = self._states.setdefault(path, _State())
        if problem is None:
            if state.retry_at_s is not None:
                log.info("reads again path=%s", path)
            state.failures, state.retry_at_s = 0, None
            return
        state.failures += 1
        if state.failures >= self._failures_allowed or state.retry_at_s is not None:
            self._quarantine(path, problem)

    def _quarantine(self, path: str, problem: str) -> None:
        state = self._states.setdefault(path, _State())
        if state.retry_at_s is None:
            log.warning("cannot read path=%s: %s (tried again every %.0f s)", path, problem, self._retry_s)
        else:
            log.debug("still cannot read path=%s: %s", path, problem)
        state.retry_at_s = self._clock() + self._retry_s
