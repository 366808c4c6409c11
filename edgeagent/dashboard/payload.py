"""Reading what strangers sent: every value is checked for its type and cut to a size, or it is absent.

Whoever may write to the broker may write anything. Nothing here raises but `parse`; a value of the
wrong type, beyond its bounds, NaN or infinite is None, as if it had not been sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from edgeagent.errors import FleetError
from edgeagent.fleet.messages import MAX_PAYLOAD_BYTES, MAX_TEXT

MAX_INFLATED_BYTES = 16 * MAX_PAYLOAD_BYTES
MAX_MIB = 2**40
MAX_TIME_MS = 2**53
MAX_FACTS = 32

JsonObject = Mapping[str, Any]
EMPTY: JsonObject = {}


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


# `json.loads` with an argument would make one for every message.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def parse(data: bytes, max_bytes: int = MAX_PAYLOAD_BYTES) -> JsonObject:
    """The JSON object in `data`. FleetError for what is larger than `max_bytes`, no UTF-8, no JSON (NaN
    is none), nested too deep, or no object."""
    if len(data) > max_bytes:
        raise FleetError(f"cannot use a message of {len(data)} bytes: more than {max_bytes}")
    try:
        value = _DECODER.decode(data.decode("utf-8"))
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError is a ValueError; so are huge integers
        raise FleetError(f"cannot read a message: {type(e).__name__}") from e
    if not isinstance(value, dict):
        raise FleetError(f"cannot use a message that is no object but {type(value).__name__}")
    return value


def text(value: object, limit: int = MAX_TEXT) -> str | None:
    """A non-empty text on one line: control characters, lone surrogates and the invisible ones that
    turn the direction of writing are blanks."""
    if not isinstance(value, str) or not value:
        return None
    value = value[: limit + 1]
    if not value.isprintable():
        value = "".join(c if c.isprintable() else " " for c in value)
    return value if len(value) <= limit else value[: limit - 1] + "…"


def number(value: object, low: float = 0.0, high: float = MAX_TIME_MS) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if low <= value <= high else None


def whole(value: object, low: int = 0, high: int = MAX_TIME_MS) -> int | None:
    found = number(value, low, high)
    return None if found is None else int(found)


def mib(value: object) -> int | None:
    return whole(value, 0, MAX_MIB)


def flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def one_of(value: object, allowed: Collection[str]) -> str | None:
    return value if isinstance(value, str) and value in allowed else None


def mapping(value: object) -> JsonObject:
    return value if isinstance(value, dict) else EMPTY


def objects(value: object, limit: int) -> list[JsonObject]:
    """The first `limit` entries of a list that are objects."""
    return [v for v in value[:limit] if isinstance(v, dict)] if isinstance(value, list) else []


def texts(value: object, limit: int, length: int = MAX_TEXT) -> list[str]:
    if not isinstance(value, list):
        return []
    return [t for v in value[:limit] if (t := text(v, length)) is not None]


def facts(value: object) -> dict[str, str | float | bool]:
    out: dict[str, str | float | bool] = {}
    for key, item in list(mapping(value).items())[:MAX_FACTS]:
        name = text(key, 64)
        known = item if isinstance(item, bool) else number(item, -(2**53)) or text(item, 200)
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            known = number(item, -(2**53))
        if name is not None and known is not None:
            out[name] = known
    return out


def present(**values: Any) -> dict[str, Any]:
    """What is known: None and empty lists and mappings are left out."""
    return {k: v for k, v in values.items() if v is not None and v != [] and v != {}}
