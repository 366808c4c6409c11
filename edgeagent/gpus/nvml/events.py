"""Waiting for the driver's events, without ever spinning.

A lost GPU makes the wait of all fail at once, every time. So a failing wait finds out which one it is,
goes on without it, and otherwise backs off.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edgeagent.gpus.model import GpuEvent, GpuEventKind, GpuFault
from edgeagent.gpus.nvml.card import Card
from edgeagent.gpus.nvml.library import (
    GPU_FAULTS,
    LIBRARY_FAULTS,
    TIMEOUT,
    GoneError,
    NvmlError,
    address,
)
from edgeagent.gpus.nvml.session import Session

log = logging.getLogger(__name__)

SLICE_S = 1.0  # nvmlEventSetWait cannot be interrupted: this bounds what `wake` and Init wait for
BACKOFF_S = (0.5, 30.0)  # first and longest pause after a failing wait

_NO_INSTANCE = 0xFFFFFFFF

# Events asked for, of those that the GPU supports. Single-bit errors come as a storm event where the
# driver has one; one by one they are of no consequence and may come by the thousand.
_EVENTS: dict[int, tuple[GpuEventKind, str | None]] = {
    0x0002: (GpuEventKind.ECC_DOUBLE_BIT, None),
    0x0008: (GpuEventKind.XID, None),
    0x0100: (GpuEventKind.MIG_CONFIG, None),
    0x0200: (GpuEventKind.ECC_SINGLE_BIT, "storm of single-bit errors"),
    0x0800: (GpuEventKind.ECC_DOUBLE_BIT, "DRAM retirement failed"),
    0x2000: (GpuEventKind.ECC_DOUBLE_BIT, "fatal poison error"),
    0x4000: (GpuEventKind.UNAVAILABLE, "the driver says the GPU is unavailable"),
    0x8000: (GpuEventKind.RECOVERY_ACTION, None),
}


class Cards(Protocol):
    """Whom to listen to."""

    def listening(self) -> tuple[int, Sequence[Card]]:
        """A number that grows with every change, and the cards that answer."""

    def card_failed(self, uuid: str, fault: GpuFault, why: str) -> None: ...


@dataclass(slots=True)
class _EventSet:
    handle: Any
    change: int
    uuids: dict[int, str]  # handle address -> UUID


class EventWaiter:
    """One thread waits; others change what it listens to and wake it."""

    def __init__(self, session: Session, cards: Cards, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._call = session.library.call
        self._cards = cards
        self._clock = clock
        self._lock = threading.Lock()  # held by the thread that waits
        self._signal = threading.Event()
        self._woken = False
        self._set: _EventSet | None = None
        self._failures = 0
        self._again_at_s = 0.0

    def wait(self, timeout_s: float) -> GpuEvent | None:
        deadline = self._clock() + timeout_s
        with self._lock:
            while True:
                self._signal.clear()
                if self._woken:
                    self._woken = False
                    return None
                left = deadline - self._clock()
                if left <= 0:
                    return None
                event, pause_s = self._wait_slice(min(left, SLICE_S))
                if event is not None:
                    return event
                if pause_s > 0:
                    self._signal.wait(min(pause_s, max(0.0, deadline - self._clock())))

    def wake(self) -> None:
        """Ends a wait."""
        self._woken = True
        self._signal.set()

    def changed(self) -> None:
        """Ends a pause: there is something else to listen to."""
        self._signal.set()

    def listen_now(self) -> None:
        """Registers before the first wait, so that no event after `inventory` is missed. A waiter that
        is inside already does it itself, after at most one slice."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._session.gate.enter(0.0):
                try:
                    if self._session.usable:
                        self._register_if_changed()
                finally:
                    self._session.gate.leave()
        finally:
            self._lock.release()

    def take_set(self) -> Any:
        """The event set's handle, for whoever closes the session (and then owns it)."""
        handle, self._set = self._set.handle if self._set else None, None
        return handle

    def _wait_slice(self, slice_s: float) -> tuple[GpuEvent | None, float]:
        """One bounded wait: (event, how long to pause before the next)."""
        if not self._session.gate.enter(slice_s):
            return None, 0.0
        try:
            if not self._session.usable:
                return None, BACKOFF_S[1]
            self._register_if_changed()
            events = self._set
            if events is None or not events.uuids:
                return None, BACKOFF_S[1]
            pause_s = self._again_at_s - self._clock()
            if pause_s > 0:
                return None, pause_s
            try:
                data = self._call("nvmlEventSetWait_v2", events.handle, max(1, int(slice_s * 1000)))
            except NvmlError as e:
                return self._failed(e)
            self._failures = 0
            return _event(data, events), 0.0
        finally:
            self._session.gate.leave()

    def _failed(self, e: NvmlError) -> tuple[GpuEvent | None, float]:
        """The first failure of a row is told, so that the GPUs are polled at once."""
        if e.code == TIMEOUT:
            self._failures = 0
            return None, 0.0
        told = GpuEvent(GpuEventKind.UNAVAILABLE, None, detail=str(e))
        if e.code in LIBRARY_FAULTS:
            self._session.failed(e)
            return told, 0.0
        self._failures += 1
        pause_s = min(BACKOFF_S[1], BACKOFF_S[0] * 2 ** min(self._failures - 1, 16))
        self._again_at_s = self._clock() + pause_s
        level = logging.WARNING if self._failures == 1 else logging.DEBUG
        log.log(level, "waiting for GPU events fails, next try in %.1f s: %s", pause_s, e)
        if e.code in GPU_FAULTS:
            uuid = self._find_lost()
            if uuid is not None:
                self._again_at_s = 0.0
                self._register_if_changed()  # without it, at once: the others' events go on
                return GpuEvent(GpuEventKind.UNAVAILABLE, uuid, detail=str(e)), 0.0
        return (told, 0.0) if self._failures == 1 else (None, pause_s)

    def _find_lost(self) -> str | None:
        """The wait says that some GPU is gone, not which."""
        for card in self._cards.listening()[1]:
            try:
                card.temperature()  # asks the hardware; UUIDs are cached by the library
            except GoneError as e:
                if not e.library:
                    self._cards.card_failed(card.uuid, e.fault, str(e.error))
                    return card.uuid
        return None

    def _register_if_changed(self) -> None:
        change, cards = self._cards.listening()
        if self._set is not None and self._set.change == change:
            return
        if self._set is not None:
            self._session.quietly("nvmlEventSetFree", self.take_set())
        try:
            handle = self._call("nvmlEventSetCreate")
        except NvmlError as e:
            log.debug("no GPU events: %s", e)
            return
        uuids: dict[int, str] = {}
        for card in cards:
            try:
                # One bit too many registers nothing.
                wanted = self._call("nvmlDeviceGetSupportedEventTypes", card.handle) & sum(_EVENTS)
                if wanted:
                    self._call("nvmlDeviceRegisterEvents", card.handle, wanted, handle)
                    uuids[address(card.handle)] = card.uuid
            except NvmlError as e:
                if e.code in GPU_FAULTS:
                    self._cards.card_failed(card.uuid, GPU_FAULTS[e.code], str(e))
                log.debug("no events of GPU uuid=%s: %s", card.uuid, e)
        self._set = _EventSet(handle, change, uuids)


def _event(data: Any, events: _EventSet) -> GpuEvent | None:
    known = _EVENTS.get(int(data.eventType))
    if known is None:
        return None
    kind, detail = known
    if data.gpuInstanceId != _NO_INSTANCE:
        where = f"MIG instance {data.gpuInstanceId}/{data.computeInstanceId}"
        detail = f"{detail}, {where}" if detail else where
    xid = int(data.eventData) if kind is GpuEventKind.XID else None
    return GpuEvent(kind, events.uuids.get(address(data.device)), xid=xid, detail=detail)
