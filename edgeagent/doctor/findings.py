"""What a check says: how it went, what was seen, and the next step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Outcome(str, Enum):
    PASS = "pass"  # noqa: S105
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


_WORST = (Outcome.FAIL, Outcome.WARN, Outcome.PASS, Outcome.SKIP)


@dataclass(frozen=True, slots=True)
class Finding:
    """`what` is a sentence about what was seen; `fix` the next step, a command where there is one."""

    outcome: Outcome
    what: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """All that one check found. Its outcome is its worst finding's."""

    name: str
    findings: tuple[Finding, ...]

    @property
    def outcome(self) -> Outcome:
        return worst(f.outcome for f in self.findings)


def ok(what: str) -> Finding:
    return Finding(Outcome.PASS, what)


def warn(what: str, fix: str | None = None) -> Finding:
    return Finding(Outcome.WARN, what, fix)


def fail(what: str, fix: str | None = None) -> Finding:
    return Finding(Outcome.FAIL, what, fix)


def skip(why: str) -> Finding:
    return Finding(Outcome.SKIP, why)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Skipped when all are, or when there is none."""
    seen = set(outcomes)
    return next((o for o in _WORST if o in seen), Outcome.SKIP)
