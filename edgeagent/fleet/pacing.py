"""How much may be sent: token buckets, the limit on events of a kind, the monthly byte budget.

Pure: times (seconds or unix milliseconds) are passed in.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

MONTH_MS = 30 * 86_400_000


class TokenBucket:
    """`rate_per_s` on the average, `burst` at once."""

    __slots__ = ("_at_s", "_burst", "_level", "_rate")

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._rate = rate_per_s
        self._burst = max(1.0, burst)
        self._level = self._burst
        self._at_s: float | None = None

    def _fill(self, now_s: float) -> None:
        if self._at_s is not None and now_s > self._at_s:
            self._level = min(self._burst, self._level + (now_s - self._at_s) * self._rate)
        self._at_s = now_s

    def take(self, now_s: float) -> bool:
        """Takes one token if there is one."""
        self._fill(now_s)
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True

    def wait_s(self, now_s: float) -> float:
        """How long until there is a token."""
        self._fill(now_s)
        return max(0.0, (1.0 - self._level) / self._rate)


class EventLimiter:
    """So many events a minute of each kind; the others are counted. Callable from any thread."""

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._buckets: dict[str, TokenBucket] = {}
        self._suppressed: dict[str, int] = {}
        self._lock = threading.Lock()

    def admit(self, kind: str, now_s: float) -> int | None:
        """None: not to be sent. Otherwise how many of the kind were not, since the last that was."""
        with self._lock:
            bucket = self._buckets.get(kind)
            if bucket is None:
                bucket = self._buckets[kind] = TokenBucket(self._per_minute / 60, self._per_minute)
            if bucket.take(now_s):
                return self._suppressed.pop(kind, 0)
            self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
            return None

    def leftovers(self, now_s: float) -> dict[str, int]:
        """Kinds whose suppressed count may be told now, without waiting for another event."""
        out: dict[str, int] = {}
        with self._lock:
            for kind in [k for k in self._suppressed if self._buckets[k].take(now_s)]:
                out[kind] = self._suppressed.pop(kind)
        return out

    @property
    def holding(self) -> bool:
        return bool(self._suppressed)


@dataclass(slots=True)
class ByteBudget:
    """A monthly budget, spread evenly with a tenth of it as slack. `monthly_bytes` None: no limit.

    Backlog is held back first, then telemetry; events and state always go. Kept across restarts
    through `dump` and `load`.
    """

    monthly_bytes: int | None
    used_bytes: int = 0
    began_ms: int | None = None

    def spend(self, n: int, now_ms: int) -> None:
        self._roll(now_ms)
        self.used_bytes += n

    def _roll(self, now_ms: int) -> None:
        # Also when the clock jumped back by more than a period: else it would stand still for long.
        if self.began_ms is None or not 0 <= now_ms - self.began_ms < MONTH_MS:
            self.began_ms = now_ms
            self.used_bytes = 0

    def _allowed(self, now_ms: int, slack: float) -> bool:
        if self.monthly_bytes is None:
            return True
        self._roll(now_ms)
        assert self.began_ms is not None
        share = (now_ms - self.began_ms) / MONTH_MS
        return self.used_bytes < self.monthly_bytes * min(1.0, share + slack)

    def telemetry_allowed(self, now_ms: int) -> bool:
        return self._allowed(now_ms, 0.10)

    def backlog_allowed(self, now_ms: int) -> bool:
        return self._allowed(now_ms, 0.05)

    def dump(self) -> str:
        return f"{self.began_ms or 0} {self.used_bytes}"

    def load(self, text: str | None) -> None:
        parts = (text or "").split()
        if len(parts) == 2 and all(p.isdigit() for p in parts) and int(parts[0]):
            self.began_ms, self.used_bytes = int(parts[0]), int(parts[1])
