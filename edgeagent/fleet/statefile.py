"""Small JSON files in the state directory, replaced whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from edgeagent.errors import FleetError


def write(path: Path, value: Any) -> None:
    """Replaces the file, synced. FleetError when that cannot be done; the old one is then still there."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
            json.dump(value, f, ensure_ascii=True)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as e:
        raise FleetError(f"cannot write {path.name}: {e}") from e


def read(path: Path) -> Any:
    """The value, or None where there is none that can be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as e:
        raise FleetError(f"cannot remove {path.name}: {e}") from e
