"""Desired configuration: the allowed subset is applied, kept, and reported by hash; the rest is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from edgeagent.config.loader import camel
from edgeagent.config.schema import Config
from edgeagent.fleet import desired
from edgeagent.fleet.desired import ALLOWED, DesiredConfig, split


class Node:
    def __init__(self, state_dir: Path) -> None:
        self.applied: list[Mapping[str, Any]] = []
        self.refuse: dict[str, str] = {}
        self.desired = DesiredConfig(state_dir, self._apply)

    def _apply(self, value: Mapping[str, Any]) -> Mapping[str, str]:
        self.applied.append(value)
        return self.refuse


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def say(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_the_allowed_subset_is_applied_and_the_rest_named(node: Node) -> None:
    changed = node.desired.receive(
        say(
            {
                "log": {"level": "debug"},
                "fleet": {"telemetrySeconds": 30, "commands": {"allow": ["restart-agent"]}},
                "sharing": {"placement": "spread", "mode": "off"},
            }
        )
    )
    assert changed
    assert node.applied == [
        {"log": {"level": "debug"}, "fleet": {"telemetrySeconds": 30}, "sharing": {"placement": "spread"}}
    ]
    state = node.desired.state
    assert state is not None
    assert not state.applied
    assert set(state.refused) == {"fleet.commands.allow", "sharing.mode"}


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"log": {"level": "shout"}}, "log.level"),
        ({"gpus": {"pollSeconds": -1}}, "gpus.pollSeconds"),
        ({"gpus": {"pollSeconds": "often"}}, "gpus.pollSeconds"),
        ({"health": {"xidClasses": {"79": "nonsense"}}}, "health.xidClasses"),
        ({"log": "debug"}, "log"),
        ({"fleet": {"brokers": ["mqtt://evil"]}}, "fleet.brokers"),
        ({"stateDir": "/"}, "stateDir"),
        ({"a": {"b": {"c": {"d": {"e": {"f": {"g": 1}}}}}}}, "a.b.c.d.e.f"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_impossible_values_are_refused_by_name(value: Any, key: str) -> None:
    accepted, refused = split(value)
    assert accepted == {}
    assert list(refused) == [key]


def test_what_the_agent_refuses_is_named_too(node: Node) -> None:
    node.refuse = {"log.level": "not now"}
    node.desired.receive(say({"log": {"level": "debug"}}))
    assert node.desired.state is not None
    assert node.desired.state.refused == {"log.level": "not now"}


def test_the_retained_message_of_every_connect_is_applied_once(node: Node) -> None:
    assert node.desired.receive(say({"log": {"level": "debug"}}))
    assert not node.desired.receive(say({"log": {"level": "debug"}}))
    assert len(node.applied) == 1


def test_it_holds_while_the_broker_is_away(tmp_path: Path) -> None:
    Node(tmp_path).desired.receive(say({"log": {"level": "debug"}}))
    again = Node(tmp_path)
    again.desired.resume()
    assert again.applied == [{"log": {"level": "debug"}}]
    assert not again.desired.receive(say({"log": {"level": "debug"}})), "the broker says what is known"


def test_an_empty_message_takes_it_back(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.desired.receive(say({"log": {"level": "debug"}}))
    assert node.desired.receive(b"")
    assert node.applied[-1] == {}
    assert node.desired.state is None
    again = Node(tmp_path)
    again.desired.resume()
    assert again.applied == []


@pytest.mark.parametrize("payload", [b"{", b"[]", b"null", b"\xff", b"[" * 50_000, b"x" * 20_000])
def test_garbage_changes_nothing_and_is_reported(node: Node, payload: bytes) -> None:
    assert node.desired.receive(payload)
    assert node.applied == []
    assert node.desired.state is not None
    assert not node.desired.state.applied


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_broken_file_is_no_wish(tmp_path: Path, text: str) -> None:
    (tmp_path / desired.FILE_NAME).write_text(text)
    node = Node(tmp_path)
    node.desired.resume()
    assert node.applied == []


def test_only_keys_that_reload_may_be_set_and_none_that_guard() -> None:
    """Each allowed key exists, is marked `reload`, and is not about who may do what."""
    from dataclasses import fields, is_dataclass
    from typing import get_type_hints

    def walk(cls: type, path: str) -> dict[str, bool]:
        out: dict[str, bool] = {}
        hints = get_type_hints(cls)
        for f in fields(cls):
            name = path + (f.metadata.get("yaml") or camel(f.name))
            if is_dataclass(hints[f.name]):
                out.update(walk(hints[f.name], name + "."))
            else:
                out[name] = bool(f.metadata.get("reload"))
        return out

    known = walk(Config, "")
    assert {k for k in ALLOWED if not known.get(k)} == set()
    assert not [k for k in ALLOWED if "commands" in k or "broker" in k or "tls" in k.lower()]
