"""jetson-stats as a second source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


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
