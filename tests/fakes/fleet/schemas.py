"""Validates messages against the shipped JSON Schemas, made strict: a property no schema names is a
mistake of ours, although consumers must accept it (v1 grows by addition)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from referencing import Registry, Resource

from edgeagent.fleet import messages, topics

SCHEMA_DIR = Path(__file__).parents[3] / "configs" / "fleet" / "schemas"


def _strict(schema: Any, root: bool = True) -> Any:
    if isinstance(schema, list):
        return [_strict(s, False) for s in schema]
    if not isinstance(schema, dict):
        return schema
    out = {k: _strict(v, False) if k != "$defs" else v for k, v in schema.items()}
    if "properties" in schema and isinstance(schema["properties"], dict):
        out.setdefault("unevaluatedProperties", False)
    return out


@cache
def _registry() -> Registry[Any]:
    common = json.loads((SCHEMA_DIR / "common.json").read_text())
    for name in ("axis", "levels"):
        common["$defs"][name] = _strict(common["$defs"][name])
    return Registry().with_resource("common.json", Resource.from_contents(common))


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((SCHEMA_DIR / f"{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(_strict(schema), registry=_registry())


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def loads(data: bytes) -> dict[str, Any]:
    """Parses as strictly as the strictest consumer: NaN and Infinity are no JSON."""
    value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    assert isinstance(value, dict)
    return value


def schema_of(topic: str) -> str:
    parsed = topics.parse(topic)
    assert parsed is not None, topic
    return {
        "status": "status", "inv": "inv", "alloc": "alloc", "alert": "alert", "evt": "evt", "res": "res",
        "cmd": "cmd", "tele": f"tele-{parsed.tail[-1]}",
    }[parsed.tail[0]]  # fmt: skip


def validate(topic: str, data: bytes) -> dict[str, Any]:
    """The payload, after it proved right for its topic: name, size, JSON, schema."""
    topics.check_topic(topic)
    assert len(data) <= messages.MAX_PAYLOAD_BYTES
    name = schema_of(topic)
    payload = loads(messages.inflate(data) if name == "tele-z" else data)
    check(name, payload)
    return payload


def check(name: str, payload: Mapping[str, Any]) -> None:
    problems = [f"{e.json_path}: {e.message}" for e in validator(name).iter_errors(payload)]
    assert not problems, "\n".join(problems[:10])
