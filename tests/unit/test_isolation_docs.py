"""docs/isolation.md and doctor explain every reason that a level can have."""

from __future__ import annotations

import re
from pathlib import Path

from edgeagent.doctor.isolation import REASONS
from edgeagent.isolation.manager import _PREFERENCE

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs/isolation.md").read_text(encoding="utf-8")
# Words that stand where reasons do: `reason="…"`, `_none("…", …)`, and the last argument of an AxisLevel.
_REASON = re.compile(r'reason="([a-z_]+)"|_none\(\s*"([a-z_]+)"|, "([a-z]+(?:_[a-z]+)+)"\s*\)')
NOT_SAID = {"uncapped"}  # there is no limit to prove


def given_in_code() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "edgeagent/isolation").glob("*.py"):
        if path.name == "mps_control.py":
            continue  # it speaks to the daemon and judges nothing
        for groups in _REASON.findall(path.read_text(encoding="utf-8")):
            found |= {g for g in groups if g}
    return found - NOT_SAID


def test_every_reason_is_explained_by_doctor_and_documentation() -> None:
    documented = set(
        re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\| `[a-z_`, ]+ \|", DOC, re.MULTILINE)))
    )
    given = given_in_code()
    assert {"limit_changed", "several_clients", "cgroup_not_found", "probe_failed"} <= given
    assert given - documented == set()
    assert given - set(REASONS) == set()


def test_every_mechanism_is_in_the_table() -> None:
    for name in _PREFERENCE:
        assert re.search(rf"^\| \[?`{name}`", DOC, re.MULTILINE), name
