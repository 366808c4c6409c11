"""`cfg/desired`: what operators want a node's configuration to be, as far as the node lets them.

Only keys that can change without a restart, and that cannot give an operator of the broker more
than he has (who may send which command, where the uplink goes), are taken. Each other key is refused
by name. What was accepted is kept on disk, so that it holds while the broker is away.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgeagent.config import load_text
from edgeagent.errors import ConfigError, FleetError
from edgeagent.fleet import statefile
from edgeagent.fleet.messages import DesiredState

log = logging.getLogger(__name__)

FILE_NAME = "desired.json"
MAX_BYTES = 16 * 1024
ALLOWED = (
    "log.level",
    "gpus.pollSeconds",
    "sharing.placement",
    "health.recoverPolls",
    "health.raisePolls",
    "health.xidClasses",
    "health.xidHoldSeconds",
    "health.thresholds.temperatureC",
    "health.thresholds.temperatureClearC",
    "health.thresholds.hostOvercommitMiB",
    "fleet.telemetrySeconds",
    "metrics.dcgm",
    "metrics.hami",
)

Apply = Callable[[Mapping[str, Any]], Mapping[str, str]]


class DesiredConfig:
    """`apply` takes the accepted keys as a nested mapping in YAML's names (empty: back to the local
    file), and returns what it refused, key by key."""

    def __init__(self, state_dir: Path, apply: Apply) -> None:
        self._file = state_dir / FILE_NAME
        self._apply = apply
        self.state: DesiredState | None = None

    def resume(self) -> None:
        """At the start: applies what is kept."""
        kept = statefile.read(self._file)
        if isinstance(kept, dict) and kept:
            self._take(json.dumps(kept, sort_keys=True).encode(), kept)

    def receive(self, payload: bytes) -> bool:
        """A message on the topic; an empty one takes all wishes back. True when `state` changed."""
        if not payload:
            if self.state is None:
                return False
            self._apply({})
            self._keep({})
            self.state = None
            log.info("desired configuration taken back")
            return True
        problem = None
        value: Any = None
        if len(payload) > MAX_BYTES:
            problem = f"larger than {MAX_BYTES} bytes"
        else:
            try:
                value = json.loads(payload)
            except (ValueError, RecursionError):
                problem = "not JSON"
            if problem is None and not isinstance(value, dict):
                problem = "must be an object"
        if problem is not None:
            before, self.state = self.state, DesiredState(_hash(payload), False, {"(all)": problem})
            return self.state != before
        before = self.state
        self._take(payload, value)
        return self.state != before

    def _take(self, payload: bytes, value: dict[str, Any]) -> None:
        digest = _hash(json.dumps(value, sort_keys=True).encode())
        if self.state is not None and self.state.hash == digest:
            return
        accepted, refused = split(value)
        refused.update(self._apply(accepted))
        self.state = DesiredState(digest, not refused, refused)
        self._keep(value)
        log.info("desired configuration hash=%s refused=%s", digest, ",".join(sorted(refused)) or "none")

    def _keep(self, value: Mapping[str, Any]) -> None:
        try:
            if value:
                statefile.write(self._file, value)
            else:
                statefile.remove(self._file)
        except FleetError as e:
            log.warning("desired configuration is not kept: %s", e)


def split(value: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(what may be applied, nested; what may not, key -> reason)."""
    accepted: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for path, leaf in _leaves(value, ()):
        dotted = ".".join(path)
        if dotted not in ALLOWED:
            refused[dotted] = "not among the keys that may be set from the fleet"
            continue
        nested: Any = leaf
        for part in reversed(path):
            nested = {part: nested}
        try:
            load_text(json.dumps(nested), "desired")  # JSON is YAML
        except ConfigError as e:
            refused[dotted] = e.problems[0].partition(": ")[2] or e.problems[0]
            continue
        _merge(accepted, nested)
    return accepted, refused


def _leaves(value: Mapping[str, Any], path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    out: list[tuple[tuple[str, ...], Any]] = []
    for key, item in value.items():
        here = (*path, str(key)[:60])
        inner = isinstance(item, Mapping) and ".".join(here) not in ALLOWED and len(here) < 6
        if inner and item:
            out += _leaves(item, here)
        else:
            out.append((here, item))
    return out


def _merge(into: dict[str, Any], value: Mapping[str, Any]) -> None:
    for key, item in value.items():
        if isinstance(item, dict) and isinstance(into.get(key), dict):
            _merge(into[key], item)
        else:
            into[key] = item


def _hash(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()[:12]
