"""GPUs of the last run, kept in a file: one that is dead after a reboot is missed, not forgotten.

Without it a GPU that does not come up would simply not be there: no alert, its resources silently
smaller, its kernel log lines without a UUID. Forgotten are GPUs whose slot holds another card, that
were not seen for a week, or when the file is deleted. Simulated GPUs are not kept.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from edgeagent.gpus.model import Gpu, GpuKind

log = logging.getLogger(__name__)

FILE_NAME = "gpus.json"
FORGET_MS = 7 * 86_400_000
RENEW_MS = 86_400_000  # how old the file may get while nothing changes
_PLAIN = (
    "uuid", "index", "source", "model", "memory_total_mib", "memory_reserved_mib", "pci_address",
    "numa_node", "minor", "driver_version", "temperature_slowdown_c", "temperature_shutdown_c",
)  # fmt: skip


class RememberedGpus:
    """The file at `path`. A damaged or absent one remembers nothing; failing to write it is no failure."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saved: tuple[frozenset[str], int] | None = None

    def load(self, now_ms: int) -> tuple[Gpu, ...]:
        try:
            document = json.loads(self._path.read_bytes())
            seen_ms = int(document["seenMs"])
            gpus = tuple(_from_plain(item) for item in document["gpus"])
        except (OSError, ValueError, KeyError, TypeError):
            return ()
        # A clock that was set back does not make anything old.
        return gpus if now_ms - seen_ms < FORGET_MS else ()

    def save(self, gpus: Iterable[Gpu], now_ms: int) -> None:
        """Writes when the set of GPUs changed, or the file is a day old."""
        kept = [g for g in gpus if g.source != "simulated"]
        key = frozenset(f"{g.uuid} {g.pci_address} {g.index}" for g in kept)
        if self._saved is not None and self._saved[0] == key and now_ms - self._saved[1] < RENEW_MS:
            return
        self._saved = (key, now_ms)
        document = {"seenMs": now_ms, "gpus": [_to_plain(g) for g in kept]}
        temporary = self._path.with_suffix(".tmp")
        try:
            with open(temporary, "w", encoding="utf-8") as f:
                json.dump(document, f, indent=1)
                f.flush()
                os.fsync(f.fileno())  # the next boot after a power cut is when it is needed
            os.replace(temporary, self._path)
        except OSError as e:
            log.warning("cannot remember GPUs path=%s error=%s", self._path, e)


def _to_plain(gpu: Gpu) -> dict[str, Any]:
    plain: dict[str, Any] = {name: getattr(gpu, name) for name in _PLAIN}
    plain["kind"] = gpu.kind.value
    plain["compute_capability"] = list(gpu.compute_capability) if gpu.compute_capability else None
    return {name: value for name, value in plain.items() if value is not None}


def _from_plain(item: dict[str, Any]) -> Gpu:
    """Raises KeyError, TypeError or ValueError for what is no GPU."""
    values = {name: item[name] for name in _PLAIN if name in item}
    capability = item.get("compute_capability")
    if not isinstance(values["uuid"], str) or not isinstance(values["memory_total_mib"], int):
        raise TypeError("not a GPU")
    return Gpu(
        **values,
        kind=GpuKind(item["kind"]),
        compute_capability=(int(capability[0]), int(capability[1])) if capability else None,
    )
