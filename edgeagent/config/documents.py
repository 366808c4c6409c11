"""YAML and JSON documents of others (CDI specs), read as plain values."""

from __future__ import annotations

from typing import Any

import yaml

from edgeagent.errors import ConfigError

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_document(text: str, name: str) -> Any:
    """The one document in `text` (JSON is YAML too). Raises ConfigError where it is none."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader, in C where PyYAML has it)
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise ConfigError(f"{name}: not valid YAML: {str(e).splitlines()[0]}") from e
