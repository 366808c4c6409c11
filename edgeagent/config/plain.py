"""YAML documents that are not our configuration (kubeconfig, shipped data), as plain Python values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from edgeagent.errors import ConfigError

MAX_FILE_BYTES = 4 << 20


def load_plain(path: str | Path) -> Any:
    """The document's value. Raises ConfigError when it cannot be read or is no YAML."""
    try:
        with open(path, "rb") as f:
            data = f.read(MAX_FILE_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}") from e
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"cannot read {path}: larger than {MAX_FILE_BYTES >> 20} MiB")
    # A safe loader either way; libyaml's where it was built in: ten times faster on files of this size.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(data, Loader=loader)  # noqa: S506
    except (yaml.YAMLError, RecursionError, ValueError) as e:
        raise ConfigError(f"cannot read {path}: not valid YAML") from e
