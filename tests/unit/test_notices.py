"""What is told when something happens on the node: to the fleet, under which kind and how gravely."""

from __future__ import annotations

from typing import Any

import pytest

from edgeagent.health.monitor import HealthChange
from edgeagent.notices import Notices
from edgeagent.snapshot import Condition


class Uplink:
    """Keeps the events it is given."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str, dict[str, Any]]] = []

    def event(self, kind: str, type_: str, message: str, *, severity: str, **rest: Any) -> None:
        self.events.append((kind, type_, severity, rest))


def condition(kind: str) -> Condition:
    return Condition(
        f"{kind.lower()}-gpu-1", kind, "critical", 1_700_000_000_000, "it is so", gpu_uuid="GPU-1",
        facts={"temperatureC": 96.0},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "told_as"),
    [
        ("OverTemperature", "thermal"),
        ("ThermalSlowdown", "thermal"),
        ("PowerBrake", "thermal"),
        ("Lost", "agent"),
    ],
)
def test_what_began_and_what_ended_is_an_event_each(kind: str, told_as: str) -> None:
    notices, uplink = Notices(lambda _: None, lambda _: None), Uplink()
    notices.conditions(HealthChange(raised=(condition(kind),)))
    notices.uplink = uplink  # type: ignore[assignment]  # what is used of it
    notices.conditions(HealthChange(raised=(condition(kind),)))
    notices.conditions(HealthChange(updated=(condition(kind),)))
    notices.conditions(HealthChange(cleared=(condition(kind),)))
    assert [e[:3] for e in uplink.events] == [
        (told_as, "condition_raised", "critical"), (told_as, "condition_cleared", "info"),
    ]  # fmt: skip
    assert uplink.events[0][3] == {
        "gpu_uuid": "GPU-1",
        "facts": {"temperatureC": 96.0, "condition": kind, "since": 1_700_000_000_000},
    }
