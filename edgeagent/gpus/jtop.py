"""jetson-stats as a second source, behind a wall.

Off unless `gpus.jetsonStats` is true: jetson-stats is AGPL-3.0 and is then imported, into this process.
Its client has faults that must not become ours (all seen with 7.2.2):

- importing it forces multiprocessing's start method to "fork": it is put back;
- constructing a client starts a thread that runs nvcc, dpkg and others: that method is overridden;
- its Event is a named semaphore, for which Python may start a helper process: it gets a thread's;
- `start()` waits without end on a service that hangs: it runs in a thread that may be given up, and no
  second one is started while the first still waits;
- after the service dies or freezes, properties keep returning the last values: what is not refreshed
  (the board's uptime in the data does not move) counts as nothing after a few intervals;
- a new client after a restart of the service breaks on the old connection (BrokenPipe), which
  multiprocessing caches per thread and address: every client lives in threads of its own;
- whatever thread drops a client, and the interpreter at its exit, calls the service once more and waits
  on one that hangs: these farewells are cancelled.

The service's socket speaks pickle with a public key: whoever owns it can run code here. So it must
belong to root or to our own user.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import multiprocessing.managers
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from edgeagent.hostroot import HostRoot

log = logging.getLogger(__name__)

SOCKET = "/run/jtop.sock"

# What jetson-stats and the pickles of its service have been seen to raise, or well may.
_JTOP_ERRORS: tuple[type[BaseException], ...] = (
    OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
    AssertionError, ImportError, queue.Empty, pickle.PickleError, multiprocessing.ProcessError,
    multiprocessing.managers.RemoteError,
)  # fmt: skip

# jetson-stats' name of a hardware fact -> ours.
_FACTS = {
    "Jetpack": "jetpack",
    "L4T": "l4t",
    "Module": "module",
    "Model": "board",
    "P-Number": "part_number",
    "SoC": "soc",
    "699-level Part Number": "part_number_699",
    "Codename": "codename",
}


@dataclass(frozen=True, slots=True)
class SecondReading:
    """What jetson-stats said last, not older than a few of its intervals. None: it does not say."""

    util_pct: float | None = None
    temperature_c: float | None = None
    power_mode: str | None = None  # nvpmodel's name
    jetson_clocks: bool | None = None


class SecondSource(Protocol):
    """Neither method blocks or raises."""

    def facts(self) -> Mapping[str, str]:
        """Strings for Gpu.facts: jetpack, l4t, module, …; empty before it is connected."""

    def sample(self) -> SecondReading | None:
        """None while nothing fresh is there."""


class JetsonStats:
    """The client of a running jtop service. `run` is a service for the supervisor; the other methods
    answer at once from what it has. Never raises, never ends the process: the board is read without it
    as well."""

    def __init__(
        self,
        host: HostRoot,
        *,
        interval_s: float = 5.0,
        connect_timeout_s: float = 15.0,
        retry_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket = str(host.path(SOCKET))
        self._interval_s = interval_s
        self._connect_timeout_s = connect_timeout_s
        self._retry_s = retry_s
        self._clock = clock
        self._lock = threading.Lock()
        self._facts: dict[str, str] = {}
        self._sample: SecondReading | None = None
        self._uptime: float | None = None
        self._fresh_at_s = float("-inf")
        self._max_age_s = 4 * interval_s
        self._problem: str | None = None

    # -- SecondSource -----------------------------------------------------------------------------

    def facts(self) -> Mapping[str, str]:
        with self._lock:
            return dict(self._facts)

    def sample(self) -> SecondReading | None:
        with self._lock:
            return self._sample if self._clock() - self._fresh_at_s <= self._max_age_s else None

    @property
    def problem(self) -> str | None:
        """Why there is nothing, for status; None while it works."""
        return self._problem

    # -- the service ------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        module = self._import()
        if module is None:
            stop.wait()
            return
        errors = (*_JTOP_ERRORS, module.JtopException)
        attempt: _Attempt | None = None
        while not stop.is_set():
            if attempt is None or attempt.ended():
                attempt = _Attempt(module, self._socket, self._interval_s, self._received, errors)
                problem = attempt.connect(stop, self._connect_timeout_s)
                if problem is None:
                    self._connected(attempt)
                    problem = self._watch(attempt, stop)
                attempt.close()
                if not stop.is_set():
                    self._lost(problem)
            stop.wait(self._retry_s)

    def _watch(self, attempt: _Attempt, stop: threading.Event) -> str:
        """Until the client ends or nothing fresh has come for long."""
        while not stop.wait(min(1.0, self._interval_s)):
            if attempt.ended():
                return attempt.problem or "connection lost"
            with self._lock:
                age_s = self._clock() - self._fresh_at_s
            if age_s > self._max_age_s:
                return f"no fresh data for {age_s:.0f} s"
        return "stopped"

    def _connected(self, attempt: _Attempt) -> None:
        facts = attempt.facts()
        with self._lock:
            self._facts = facts
            # Another client may have set the service to a slower pace than we asked for.
            self._max_age_s = 4 * max(self._interval_s, attempt.service_interval_s)
            self._fresh_at_s = max(self._fresh_at_s, self._clock())
        self._problem = None
        log.info("connected to jetson-stats socket=%s", self._socket)

    def _lost(self, problem: str) -> None:
        with self._lock:
            self._sample = None
        text = " ".join(problem.split())[:300]
        if text != self._problem:
            self._problem = text
            log.warning("cannot use jetson-stats: %s (the board is read without it)", text)
        else:
            log.debug("still cannot use jetson-stats: %s", text)

    def _received(self, uptime: float, sample: SecondReading) -> None:
        """From jetson-stats' thread, at each of its updates, repeats of old data included."""
        with self._lock:
            if uptime != self._uptime:
                self._uptime = uptime
                self._fresh_at_s = self._clock()
                self._sample = sample

    def _import(self) -> ModuleType | None:
        method = multiprocessing.get_start_method(allow_none=True)
        try:
            module = importlib.import_module("jtop.jtop")
            service = importlib.import_module("jtop.service")
        except _JTOP_ERRORS as e:
            self._problem = f"cannot import jetson-stats: {e}"
            log.warning("%s (pip install 'edgeagent[jetson]')", self._problem)
            return None
        finally:
            multiprocessing.set_start_method(method, force=True)
        service.JTOP_PIPE = self._socket  # type: ignore[attr-defined]  # the library has no other way
        module.Event = threading.Event  # type: ignore[attr-defined]  # see above
        return module


class _Attempt:
    """One client of jetson-stats, from connecting to its end."""

    def __init__(
        self,
        module: ModuleType,
        socket: str,
        interval_s: float,
        received: Callable[[float, SecondReading], None],
        errors: tuple[type[BaseException], ...],
    ) -> None:
        self._module = module
        self._socket = socket
        self._interval_s = interval_s
        self._received = received
        self._errors = errors
        self._client: Any = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._start, name="jtop-connect", daemon=True)
        self.problem: str | None = None
        self.service_interval_s = interval_s

    def connect(self, stop: threading.Event, timeout_s: float) -> str | None:
        """None when connected; else what is wrong, in a sentence."""
        try:
            owner = os.stat(self._socket).st_uid
        except OSError as e:
            self._done.set()
            return f"{self._socket}: {e.strerror}: is jtop.service running?"
        if owner not in (0, os.geteuid()):
            self._done.set()
            return f"{self._socket} belongs to user {owner}, not to root"
        self._thread.start()
        deadline = time.monotonic() + timeout_s
        while not self._done.wait(0.1):
            if stop.is_set():
                return "stopped"
            if time.monotonic() > deadline:
                return f"the service does not answer within {timeout_s:.0f} s"
        return self.problem

    def ended(self) -> bool:
        """Neither the connecting thread nor jetson-stats' own runs any more: another may be started."""
        if self._thread.is_alive():
            return False
        client = self._client
        return client is None or not client.is_alive()

    def close(self) -> None:
        """Asks the client to end. Its thread may take until the service answers."""
        if self._client is not None:
            self._client._running = False

    def facts(self) -> dict[str, str]:
        try:
            hardware = dict(self._client.board["hardware"])
        except self._errors:
            return {}
        facts: dict[str, str] = {}
        for theirs, ours in _FACTS.items():
            text = hardware.get(theirs)
            if isinstance(text, str) and (text := "".join(c for c in text if c.isprintable()).strip()):
                facts[ours] = text[:120]
        if "soc" in facts:
            facts["soc"] = facts["soc"].rsplit(",", 1)[-1]
        return facts

    def _start(self) -> None:
        try:
            client = self._new_client()
            client.attach(self._observe)
            client.start()
            self.service_interval_s = float(client.interval)
            self._client = client
            self._observe(client)
        except self._errors as e:
            self.problem = str(e) or type(e).__name__
        finally:
            self._done.set()

    def _new_client(self) -> Any:
        base: Any = self._module.jtop

        class Client(base):  # type: ignore[misc]  # the library publishes no types
            def _load_jetson_libraries(self) -> None:
                """Versions of CUDA, OpenCV and others, found by running programs: not wanted."""

            def __setattr__(self, name: str, value: Any) -> None:
                if isinstance(value, multiprocessing.managers.BaseProxy):
                    farewell = getattr(value, "_close", None)
                    if farewell is not None:
                        farewell.cancel()
                super().__setattr__(name, value)

        return Client(interval=self._interval_s)

    def _observe(self, client: Any) -> None:
        """In jetson-stats' thread, which an exception would end."""
        try:
            self._received(client.uptime.total_seconds(), _sample(client, self._errors))
        except self._errors as e:
            log.debug("jetson-stats sends what cannot be read: %s", e)


def _sample(client: Any, errors: tuple[type[BaseException], ...]) -> SecondReading:
    def get(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except errors:
            return None

    gpus = get(lambda: list(client.gpu.values())) or []
    util = get(lambda: float(gpus[0]["status"]["load"]))
    zones = get(lambda: dict(client.temperature)) or {}
    celsius = next(
        (
            float(zone["temp"])
            for name, zone in zones.items()
            if str(name).lower().startswith("gpu")
            and isinstance(zone, dict)
            and isinstance(zone.get("temp"), (int, float))
            and -60 <= zone["temp"] <= 250
        ),
        None,
    )
    mode = get(lambda: client.nvpmodel.name)
    clocks = get(lambda: None if client.jetson_clocks is None else bool(client.jetson_clocks))
    return SecondReading(
        util_pct=util if util is not None and 0 <= util <= 100 else None,
        temperature_c=celsius,
        power_mode=mode[:64] if isinstance(mode, str) and mode.isprintable() and mode else None,
        jetson_clocks=clocks,
    )
