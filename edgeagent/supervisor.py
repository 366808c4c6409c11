"""Named threads with an owner and a join: the one place where the agent starts threads of its own.

A service is a function that takes the stop event and runs until it is set. A service that raises,
or returns while nobody asked to stop, ends the process: systemd restarts a clean process, nobody
restarts half of one. (The uplink guards itself inside its own service: STYLE.md, Threads.)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

Service = Callable[[threading.Event], None]


@dataclass(slots=True)
class _Running:
    name: str
    thread: threading.Thread
    wake: Callable[[], None] | None
    error: BaseException | None = field(default=None)


class Supervisor:
    """Starts services, notices the first that ends, stops all of them."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._ended = threading.Event()
        self._services: list[_Running] = []
        self.failed: str | None = None
        self._nudged = False

    def add(self, name: str, service: Service, wake: Callable[[], None] | None = None) -> None:
        """Starts `service(stop)` in a thread called `name`. `wake` is called once at stop, for
        services that wait on something else than the event (a socket, NVML)."""
        running = _Running(name, threading.Thread(), wake)
        running.thread = threading.Thread(target=self._run, args=(running, service), name=name, daemon=True)
        self._services.append(running)
        running.thread.start()

    def _run(self, running: _Running, service: Service) -> None:
        try:
            service(self.stop)
        except Exception as e:  # the supervisor's wall: whatever it was, it ends the process
            running.error = e
            log.critical("service %s failed", running.name, exc_info=e)
        if not self.stop.is_set():
            if running.error is None:
                log.critical("service %s ended although nobody stopped it", running.name)
            self.failed = self.failed or running.name
        self._ended.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until stop is asked for or a service ended early. True when it should all end."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.stop.is_set() and self.failed is None:
            if self._nudged:
                self._nudged = False
                return False
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            # Bounded, so that signal handlers run on interpreters that do not interrupt waits.
            self._ended.wait(1.0 if left is None else min(left, 1.0))
            if self.failed is None:
                self._ended.clear()
        return True

    def nudge(self) -> None:
        """Makes `wait` return False soon; safe to call from a signal handler."""
        self._nudged = True
        self._ended.set()

    def request_stop(self) -> None:
        """Safe to call from a signal handler and from any thread."""
        self.stop.set()
        self._ended.set()

    def shutdown(self, timeout_s: float = 4.0) -> list[str]:
        """Stops every service; returns the names of those that did not end within `timeout_s`."""
        self.request_stop()
        for running in self._services:
            if running.wake is not None:
                try:
                    running.wake()
                except Exception:
                    log.exception("cannot wake service %s", running.name)
        deadline = time.monotonic() + timeout_s
        late: list[str] = []
        for running in self._services:
            running.thread.join(max(0.0, deadline - time.monotonic()))
            if running.thread.is_alive():
                late.append(running.name)
        for name in late:
            log.warning("service %s did not stop within %.1f s", name, timeout_s)
        return late
