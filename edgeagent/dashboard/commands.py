"""What the page may ask of a node, and the command message that asks it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeagent.dashboard.node import CommandLog, Node
from edgeagent.errors import FleetError
from edgeagent.fleet.commands import MAX_COMMAND_BYTES, VERBS, sign
from edgeagent.fleet.topics import is_name

LIFETIME_MS = 60_000


def build(
    node: Node,
    verb: object,
    args: object,
    dry_run: object,
    *,
    requester: str,
    now_ms: int,
    keys: Path | None = None,
) -> tuple[CommandLog, bytes]:
    """The command as it is noted and as it is sent. FleetError says why it cannot be. `keys` is a
    directory with {node}.key for nodes that want signed commands."""
    if not isinstance(verb, str) or verb not in VERBS or not is_name(verb):
        raise FleetError(f"there is no command {str(verb)[:40]!r}")
    if verb not in node.commands_allowed:
        raise FleetError(f"{node.key} does not allow {verb} (fleet.commands.allow in its configuration)")
    if not isinstance(args, dict) or not isinstance(dry_run, bool):
        raise FleetError("args must be an object, dryRun true or false")
    command: dict[str, Any] = {
        "id": f"page-{secrets.token_hex(8)}",
        "verb": verb,
        "args": args,
        "node": node.name,
        "iat": now_ms,
        "exp": now_ms + LIFETIME_MS,
        "dryRun": dry_run,
        "replyTo": requester,  # where MQTT 5's response topic is not used
    }
    if node.session and not node.will:
        # A node that restarted since refuses it: what was meant for the one seen here.
        command["sess"] = node.session
    if node.signed_commands:
        command["sig"] = sign(command, _key(keys, node.name))
    data = _dump(command)
    if len(data) > MAX_COMMAND_BYTES:
        raise FleetError(f"the command is larger than {MAX_COMMAND_BYTES} bytes")
    shown = _dump(args).decode() if args else ""
    return CommandLog(command["id"], verb, shown[:500], dry_run, now_ms), data


def _dump(value: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as e:
        raise FleetError("args cannot be sent as JSON") from e


def _key(keys: Path | None, name: str) -> bytes:
    if keys is None:
        raise FleetError(f"{name} wants signed commands: start the page with --command-keys DIR")
    try:
        key = (keys / f"{name}.key").read_bytes().strip()
    except OSError as e:
        raise FleetError(f"cannot read the key of {name}: {e.strerror}") from e
    if not key:
        raise FleetError(f"the key of {name} is empty")
    return key
