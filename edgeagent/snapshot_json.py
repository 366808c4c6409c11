"""The JSON form of a NodeSnapshot: what `edgeagent status --json` and `top --json` print. Stable.

Keys are the camelCase of the field names (`usable_mib` -> `usableMiB`); values that are not known are
absent; enumerations are their words; sets are sorted lists; the compute capability is "8.9"; a host
process is {"pid", "name", "usedMiB"}. Fields may be added, never renamed. Described in docs/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from edgeagent.gpus.model import Gpu
from edgeagent.isolation.levels import AxisLevel
from edgeagent.snapshot import HostUse

_DECIMALS = 3


def to_json(snapshot: Any) -> dict[str, Any]:
    """A NodeSnapshot, or any other of our frozen dataclasses, as plain dicts, lists, strings, numbers
    and booleans; no NaN, no None."""
    plain = plain_value(snapshot)
    assert isinstance(plain, dict)
    return plain


def plain_value(value: Any) -> Any:
    """The plain form of one value; None for what JSON cannot say (NaN, infinity)."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return round(value, _DECIMALS) if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, Mapping):
        return _object((str(k), v) for k, v in value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return _object((key, getattr(value, name)) for name, key in _keys(type(value))) | _special(value)
    if isinstance(value, Set):
        return sorted(plain_value(v) for v in value)
    return [plain_value(v) for v in value]


def _object(items: Any) -> dict[str, Any]:
    plain = ((key, plain_value(value)) for key, value in items)
    return {key: value for key, value in plain if value is not None}


def _special(value: Any) -> dict[str, Any]:
    """Fields whose Python shape is a tuple with positions."""
    if isinstance(value, HostUse):
        return {
            "processes": [
                _object((("pid", pid), ("name", name), ("usedMiB", mib)))
                for pid, name, mib in value.processes
            ]
        }
    if isinstance(value, Gpu) and value.compute_capability is not None:
        return {"computeCapability": "{}.{}".format(*value.compute_capability)}
    if isinstance(value, AxisLevel):
        return {"enforced": value.enforced}
    return {}


@cache
def _keys(cls: type) -> tuple[tuple[str, str], ...]:
    return tuple((f.name, camel(f.name)) for f in fields(cls))


def camel(name: str) -> str:
    """`memory_used_mib` -> `memoryUsedMiB`, `gpu_uuid` -> `gpuUuid`."""
    head, *rest = name.split("_")
    return head + "".join("MiB" if part == "mib" else part.capitalize() for part in rest)
