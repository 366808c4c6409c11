"""A sharing configuration on trial: it stays only if the agent becomes ready with it.

The note on disk outlives the restart that the change may need. Two readers: the uplink, which
confirms or reverts within a minute, and the agent's start, which reverts by itself after starts
that never got so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgeagent.errors import FleetError
from edgeagent.fleet import statefile

FILE_NAME = "sharing-trial.json"
MAX_STARTS = 3
READY_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What is on trial and who waits for the outcome. `previous` is what to go back to; its form is
    the agent's business."""

    command_id: str
    requester: str
    previous: Mapping[str, Any]
    starts: int = 0


def begin(state_dir: Path, trial: Trial) -> None:
    """Before the change is made. FleetError: it must not be made."""
    statefile.write(state_dir / FILE_NAME, {**asdict(trial), "previous": dict(trial.previous)})


def pending(state_dir: Path) -> Trial | None:
    value = statefile.read(state_dir / FILE_NAME)
    if not isinstance(value, dict):
        return None
    try:
        return Trial(
            str(value["command_id"]), str(value["requester"]), dict(value["previous"]), int(value["starts"])
        )
    except (KeyError, TypeError, ValueError):
        return None


def end(state_dir: Path) -> None:
    """Confirmed or reverted."""
    statefile.remove(state_dir / FILE_NAME)


def count_start(state_dir: Path) -> Trial | None:
    """Called at the agent's start, before the configuration is used. A trial that must be reverted
    at once, because several starts with it did not get far; None: go on."""
    trial = pending(state_dir)
    if trial is None:
        return None
    if trial.starts >= MAX_STARTS:
        return trial
    try:
        begin(state_dir, Trial(trial.command_id, trial.requester, trial.previous, trial.starts + 1))
    except FleetError:
        return trial  # what cannot be counted is not tried for ever
    return None
