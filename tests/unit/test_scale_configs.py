"""Files for engines that no test can run here: they must at least name what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from edgeagent.fleet import messages
from tests.fakes.fleet.snapshots import T0_MS, snapshot

CONFIGS = Path(__file__).parents[2] / "configs"
DASHBOARDS = sorted((CONFIGS / "grafana" / "dashboards").glob("*.json"))
RULES = yaml.safe_load((CONFIGS / "victoriametrics" / "alerts.yml").read_text())


def known() -> dict[str, set[str]]:
    """Metric names by kind: what configs/telegraf/ makes of our messages."""
    telegraf = (CONFIGS / "telegraf" / "edgeagent.conf").read_text()
    gpu = messages.sample(snapshot(), T0_MS)["gpus"][0]
    return {
        "node": set(re.findall(r"^\s+(\w+) = \"(?:number|count)", telegraf, re.MULTILINE)),
        "gpu": set(gpu),
        "pod": set(gpu["pods"][0]),
    }


def unknown_names(text: str) -> list[tuple[str, str]]:
    names = re.findall(r"edgeagent_(node|gpu|pod)_(\w+)", text)
    assert names
    there = known()
    return [n for n in names if n[1] not in there[n[0]]]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda p: p.stem)
def test_dashboards_ask_for_what_is_there_and_fit_their_grid(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    assert unknown_names(json.dumps(dashboard)) == []
    panels: list[dict[str, Any]] = dashboard["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert not taken & cells, f"{panel['title']} lies on another panel"
        taken |= cells
    variables = {v["name"] for v in dashboard["templating"]["list"]}
    assert set(re.findall(r'=~\\"\$(\w+)\\"', json.dumps(dashboard))) <= variables


def test_dashboards_have_names_of_their_own_and_links_that_lead_somewhere() -> None:
    boards = {json.loads(p.read_text())["uid"]: p.read_text() for p in DASHBOARDS}
    assert set(boards) == {"edgeagent-fleet", "edgeagent-node", "edgeagent-pod"}
    for text in boards.values():
        assert set(re.findall(r"/d/([\w-]+)", text)) <= set(boards)


def test_alert_rules_ask_for_what_is_there() -> None:
    rules = [rule for group in RULES["groups"] for rule in group["rules"]]
    assert len({r["alert"] for r in rules}) == len(rules)
    for rule in rules:
        assert unknown_names(rule["expr"]) == [], rule["alert"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_both_brokers_give_the_same_rights() -> None:
    mosquitto = (CONFIGS / "mosquitto" / "acl").read_text()
    emqx = (CONFIGS / "emqx" / "acl.conf").read_text()

    def topics(text: str, user: str) -> set[str]:
        return set(re.findall(rf"gpufleet/v1/\+/{re.escape(user)}/([\w+/]+)", text))

    assert topics(mosquitto, "%u") == topics(emqx, "${username}")
    for line in re.findall(r"^topic write (\S+)", mosquitto, re.MULTILINE):
        assert f'"{line}"' in emqx
    assert emqx.rstrip().endswith("{deny, all}.")
    size = re.search(r"max_packet_size = (\d+)KB", (CONFIGS / "emqx" / "emqx.conf").read_text())
    assert size is not None
    assert int(size[1]) * 1024 > messages.MAX_PAYLOAD_BYTES
