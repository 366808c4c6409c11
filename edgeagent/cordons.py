"""GPUs that operators have taken out of use for new containers; survives restarts."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

from edgeagent.errors import NodeError

log = logging.getLogger(__name__)

FILE_NAME = "cordons.json"


class Cordons:
    """Thread-safe set of GPU UUIDs, kept in `state_dir`."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE_NAME
        self._lock = threading.Lock()
        self._uuids = self._load()

    def _load(self) -> frozenset[str]:
        try:
            value = json.loads(self._path.read_text())
        except FileNotFoundError:
            return frozenset()
        except (OSError, ValueError) as e:
            log.warning("cannot read %s, no GPU is cordoned: %s", self._path, e)
            return frozenset()
        return frozenset(u for u in value if isinstance(u, str)) if isinstance(value, list) else frozenset()

    @property
    def uuids(self) -> frozenset[str]:
        return self._uuids

    def set(self, uuid: str, cordoned: bool) -> bool:
        """Whether that changed anything. Raises NodeError, with nothing changed, when it cannot be kept."""
        with self._lock:
            wanted = self._uuids | {uuid} if cordoned else self._uuids - {uuid}
            if wanted == self._uuids:
                return False
            temporary = self._path.with_suffix(".tmp")
            try:
                with temporary.open("w") as f:
                    json.dump(sorted(wanted), f)
                    f.flush()
                    os.fsync(f.fileno())
                temporary.replace(self._path)
            except OSError as e:
                raise NodeError(f"cannot keep the cordon in {self._path}: {e.strerror}") from e
            self._uuids = wanted
            return True
