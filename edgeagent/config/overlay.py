"""A configuration with some keys replaced: by the fleet's wishes, or by a sharing set from afar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edgeagent.config.loader import load_text, to_plain
from edgeagent.config.schema import Config


def overlaid(config: Config, keys: Mapping[str, Any], origin: str) -> Config:
    """`config` with `keys` (nested, YAML's names) on top. Raises ConfigError; `origin` names the source
    in its sentences."""
    if not keys:
        return config
    return load_text(json.dumps(_merged(to_plain(config), keys)), origin)  # JSON is YAML


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        before = out.get(key)
        nested = isinstance(before, dict) and isinstance(value, Mapping)
        out[key] = _merged(before, value) if nested and before is not None else value
    return out
