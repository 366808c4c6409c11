"""The XID catalogue: data that is complete, and classes that operators can change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgeagent.errors import ConfigError
from edgeagent.health.conditions import FATAL, RULES, ConditionType
from edgeagent.health.xid import XidClass, load_catalogue

DOC = Path(__file__).parents[2] / "docs/health.md"
APP_XIDS = (13, 31, 43, 45, 68, 69, 94, 109)
DEGRADED_XIDS = (63, 92, 154, 160)
FATAL_XIDS = (46, 48, 61, 62, 64, 74, 79, 95, 110, 119, 120, 121, 136, 140, 143, 158, 161, 167, 171, 172)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [(APP_XIDS, XidClass.APP), (DEGRADED_XIDS, XidClass.DEGRADED), (FATAL_XIDS, XidClass.FATAL)],
    ids=["app", "degraded", "fatal"],
)
def test_classes(numbers: tuple[int, ...], expected: XidClass) -> None:
    catalogue = load_catalogue()
    assert {catalogue[n].xid_class for n in numbers} == {expected}


def test_every_entry_has_a_name_and_advice_and_only_apps_and_degraded_keep_shares() -> None:
    catalogue = load_catalogue()
    assert len(catalogue) > 100
    for xid in catalogue:
        assert xid.name
        assert xid.advice.endswith("."), xid
        assert xid.xid_class.makes_unhealthy == (xid.xid_class in (XidClass.FATAL, XidClass.UNKNOWN))


def test_a_number_nobody_knows_is_not_taken_for_harmless() -> None:
    assert load_catalogue()[99999].xid_class is XidClass.UNKNOWN


def test_operators_override_classes() -> None:
    catalogue = load_catalogue({"79": "app", "4711": "degraded"})
    assert catalogue[79].xid_class is XidClass.APP
    assert catalogue[4711].xid_class is XidClass.DEGRADED
    assert catalogue.with_overrides({})[79].xid_class is XidClass.FATAL


@pytest.mark.parametrize("text", ["{", "xids: 3", "advice: {}\nxids: [{number: 1, class: app}]", ""])
def test_a_damaged_catalogue_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "xids.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_catalogue(path=path)


def test_the_page_for_operators_agrees_with_the_code() -> None:
    text = DOC.read_text(encoding="utf-8")
    rows = {
        r[0]: r for r in re.findall(r"^\| (\w+) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    }
    for kind in ConditionType:
        _, _, takes_shares, evicts, _ = rows[kind.value]
        assert takes_shares.startswith("yes") == RULES[kind].makes_unhealthy, kind
        assert (evicts == "yes") == (kind in FATAL), kind
    classes = dict(re.findall(r"^\| (app|degraded|fatal) \| .*? \| (.*?) \|$", text, re.MULTILINE))
    catalogue = load_catalogue()
    for name, listed in classes.items():
        numbers: set[int] = set()
        for low, high in re.findall(r"(\d+)(?: to (\d+))?", listed):
            numbers |= set(range(int(low), int(high or low) + 1))
        assert numbers == {x.number for x in catalogue if x.xid_class.value == name}, name
