"""Bookings on disk, so that an agent that starts again knows which GPU each running container is on."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeagent.hostroot import HostRoot
from edgeagent.sharing.ledger import ContainerKey
from edgeagent.sharing.tokens import MAX_TOKENS, Demand, full, ranges

log = logging.getLogger(__name__)

FORMAT = 1
MAX_FILE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SavedBooking:
    """One container's booking. `since_ms`: unix time of its last start."""

    key: ContainerKey
    demand: Demand
    gpu_uuid: str | None
    since_ms: int


class BookingFile:
    """`bookings.json` in the state directory. Written whole, by rename; a file of another boot or one
    that cannot be understood counts as empty (the containers it names do not run any more, or are
    found by what they were given)."""

    def __init__(self, state_dir: Path, host: HostRoot) -> None:
        self._path = state_dir / "bookings.json"
        text = host.read_text("/proc/sys/kernel/random/boot_id", 128)
        self._boot_id = (text or "").strip()
        self.problem: str | None = None  # why they cannot be saved now

    def load(self) -> list[SavedBooking]:
        try:
            with self._path.open("rb") as file:
                document = json.loads(file.read(MAX_FILE_BYTES))
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError) as e:
            log.warning("cannot read saved bookings file=%s error=%s", self._path, e)
            return []
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            log.warning("saved bookings are in a form of another version file=%s", self._path)
            return []
        if document.get("bootId") != self._boot_id:
            return []
        entries = document.get("bookings")
        found = [_load(entry) for entry in entries] if isinstance(entries, list) else []
        return [booking for booking in found if booking is not None]

    def save(self, bookings: Iterable[SavedBooking]) -> None:
        """A failure is logged once; the agent goes on without (a restart then asks the containers)."""
        document = {
            "format": FORMAT,
            "bootId": self._boot_id,
            "bookings": [_dump(b) for b in bookings],
        }
        temporary = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            temporary.write_text(json.dumps(document), encoding="utf-8")
            os.replace(temporary, self._path)
        except OSError as e:
            log.log(
                logging.DEBUG if self.problem else logging.WARNING,
                "cannot save bookings file=%s error=%s", self._path, e.strerror or e,
            )  # fmt: skip
            self.problem = (
                f"cannot write to the state directory {self._path.parent}: {e.strerror or e}; running "
                "containers keep their shares, a restart of the agent must find them in the kubelet's files"
            )
            return
        if self.problem is not None:
            log.info("bookings are saved again file=%s", self._path)
        self.problem = None


def _dump(booking: SavedBooking) -> dict[str, Any]:
    return {
        "podUid": booking.key.pod_uid,
        "container": booking.key.container,
        "gpu": booking.gpu_uuid,
        "sinceMs": booking.since_ms,
        "memory": list(ranges(booking.demand.memory)),
        "cores": list(ranges(booking.demand.cores)),
        "shares": list(ranges(booking.demand.shares)),
    }


def _load(entry: Any) -> SavedBooking | None:
    if not isinstance(entry, Mapping):
        return None
    uid, container, gpu = entry.get("podUid"), entry.get("container"), entry.get("gpu")
    since = entry.get("sinceMs")
    if not (isinstance(uid, str) and uid and isinstance(container, str) and container):
        return None
    demand = Demand(*(_mask(entry.get(name)) for name in ("memory", "cores", "shares")))
    if not demand:
        return None
    return SavedBooking(
        ContainerKey(uid, container),
        demand,
        gpu if isinstance(gpu, str) and gpu else None,
        since if isinstance(since, int) else 0,
    )


def _mask(value: Any) -> int:
    mask = 0
    for run in value if isinstance(value, list) else []:
        if isinstance(run, list) and len(run) == 2 and all(type(n) is int for n in run):
            start, stop = run
            if 0 <= start < stop <= MAX_TOKENS:
                mask |= full(stop - start) << start
    return mask
