"""One hour of one GPU's readings, in arrays: about 20 bytes a point."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence

SPAN_S = 3600
MIN_GAP_S = 4  # what comes faster is thinned
MAX_POINTS = SPAN_S // MIN_GAP_S + 100
FIELDS = ("utilPct", "temperatureC", "powerW", "memoryUsedMiB")
_SLACK = 64  # points beyond the hour before they are cut: cutting moves the whole array


class Hour:
    """Points in order of time. `rewrites` counts points that came late (a backlog after an outage), so
    that whoever has a copy knows to fetch it anew."""

    __slots__ = ("_times_s", "_values", "rewrites")

    def __init__(self) -> None:
        self._times_s = array("I")  # unix seconds
        self._values = tuple(array("f") for _ in FIELDS)
        self.rewrites = 0

    def __len__(self) -> int:
        return len(self._times_s)

    @property
    def newest_s(self) -> int:
        return self._times_s[-1] if self._times_s else 0

    def add(self, time_s: int, values: Sequence[float | None]) -> bool:
        """False: not kept, because it is there already, too close to its neighbour, or too old."""
        times = self._times_s
        if not 0 < time_s < 2**32:
            return False
        numbers = [math.nan if v is None else v for v in values]
        if not times or time_s > times[-1]:
            if times and time_s - times[-1] < MIN_GAP_S:
                return False
            times.append(time_s)
            for column, value in zip(self._values, numbers, strict=True):
                column.append(value)
            if len(times) > MAX_POINTS or times[0] < time_s - SPAN_S:
                self._cut(time_s)
            return True
        at = bisect_left(times, time_s)
        close = times[at] - time_s < MIN_GAP_S or (at > 0 and time_s - times[at - 1] < MIN_GAP_S)
        if close or time_s < times[-1] - SPAN_S:
            return False
        times.insert(at, time_s)
        for column, value in zip(self._values, numbers, strict=True):
            column.insert(at, value)
        self.rewrites += 1
        if len(times) > MAX_POINTS:
            self._cut(times[-1])
        return True

    def _cut(self, newest_s: int) -> None:
        old = bisect_left(self._times_s, newest_s - SPAN_S)
        over = len(self._times_s) - MAX_POINTS
        n = max(old if old >= _SLACK else 0, over)
        if n > 0:
            del self._times_s[:n]
            for column in self._values:
                del column[:n]

    def since(self, time_s: int, now_s: int) -> dict[str, list[float | None]]:
        """Points after `time_s` that are within the hour before `now_s`: "t" in unix seconds, and one
        list for each of FIELDS."""
        at = bisect_left(self._times_s, max(time_s + 1, now_s - SPAN_S))
        out: dict[str, list[float | None]] = {"t": list(self._times_s[at:])}
        for name, column in zip(FIELDS, self._values, strict=True):
            out[name] = [None if math.isnan(v) else round(v, 1) for v in column[at:]]
        return out
