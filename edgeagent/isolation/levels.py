"""How far a limit can be trusted, on two axes, and on what evidence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Axis(str, Enum):
    MEMORY = "memory"
    COMPUTE = "compute"


class Level(str, Enum):
    """From strongest to weakest. A level is claimed only after a probe passed, and per container
    only on evidence."""

    HARD = "hard"  # the driver or hardware refuses
    COOPERATIVE = "cooperative"  # a library in the container refuses; a hostile pod can get round it
    WEIGHTED = "weighted"  # a share under contention, not a cap
    REACTIVE = "reactive"  # seen and acted on afterwards
    NONE = "none"

    @property
    def strength(self) -> int:
        return _STRENGTH[self]


_STRENGTH = {Level.HARD: 4, Level.COOPERATIVE: 3, Level.WEIGHTED: 2, Level.REACTIVE: 1, Level.NONE: 0}


@dataclass(frozen=True, slots=True)
class AxisLevel:
    """A level on one axis: which mechanism gives it, and what was seen that supports it.
    `reason` says why it is not higher (machine word such as `not_preloaded`), or None."""

    level: Level
    mechanism: str = "none"  # "nvml-cgroup" | "limiter" | "mps" | "nvgpu-sched" | "watchdog" | …
    evidence: str = ""
    reason: str | None = None

    @property
    def enforced(self) -> bool:
        """What is over the limit is refused, as far as was seen; by a library or by the driver."""
        return self.level in (Level.HARD, Level.COOPERATIVE)


NO_LIMIT = AxisLevel(Level.NONE)


@dataclass(frozen=True, slots=True)
class Levels:
    memory: AxisLevel = NO_LIMIT
    compute: AxisLevel = NO_LIMIT
