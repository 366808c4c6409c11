"""What differs between two configurations, and which of it needs a restart."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from edgeagent.config.loader import camel, to_plain
from edgeagent.config.schema import Config

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Changes:
    """YAML paths of keys that differ: those that take effect on reload, and those that do not."""

    reloadable: tuple[str, ...]
    restart: tuple[str, ...]


def changes(old: Config, new: Config) -> Changes:
    reloadable: list[str] = []
    restart: list[str] = []
    _walk(old, new, "", reloadable, restart)
    return Changes(tuple(reloadable), tuple(restart))


def _walk(old: Any, new: Any, path: str, reloadable: list[str], restart: list[str]) -> None:
    for f in fields(old):
        name = f.metadata.get("yaml") or camel(f.name)
        here = f"{path}.{name}" if path else name
        before, after = getattr(old, f.name), getattr(new, f.name)
        if before == after:
            continue
        if is_dataclass(before) and is_dataclass(after):
            _walk(before, after, here, reloadable, restart)
        else:
            (reloadable if f.metadata.get("reload") else restart).append(here)


def with_reloadable(old: T, new: T) -> T:
    """`old` with every reloadable key taken from `new`: the configuration that is then in force."""
    taken: dict[str, Any] = {}
    for f in fields(old):  # type: ignore[arg-type]  # T is one of the schema's dataclasses
        before, after = getattr(old, f.name), getattr(new, f.name)
        if is_dataclass(before) and is_dataclass(after):
            taken[f.name] = with_reloadable(before, after)
        elif f.metadata.get("reload"):
            taken[f.name] = after
    return replace(old, **taken)  # type: ignore[type-var]


def config_hash(config: Config) -> str:
    """SHA-256 over the effective configuration: equal files and equal meanings hash the same."""
    text = json.dumps(to_plain(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
