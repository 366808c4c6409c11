"""Home Assistant discovery: one retained device message per node, opt-in, for small sites.

Home Assistant reads the values from `tele/m` and `status` by templates; nothing else is sent for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from edgeagent.fleet.messages import Body
from edgeagent.fleet.topics import Topics, slug
from edgeagent.snapshot import GpuState, NodeSnapshot

_SENSORS: tuple[tuple[str, str, str, str | None], ...] = (
    ("temperatureC", "temperature", "°C", "temperature"),
    ("utilPct", "utilisation", "%", None),
    ("memoryUsedMiB", "memory used", "MiB", "data_size"),
    ("powerW", "power", "W", "power"),
)


def topic(topics: Topics) -> str:
    return f"homeassistant/device/{topics.site}-{topics.node}/config"


def discovery(snap: NodeSnapshot, topics: Topics, former: Iterable[str] = ()) -> Body:
    """The device with its components. `former`: keys of an earlier message; those of GPUs that are
    gone are named without content, which is how Home Assistant removes them."""
    components: dict[str, Any] = {
        "health": {
            "p": "binary_sensor",
            "name": "GPU trouble",
            "unique_id": f"{topics.site}_{topics.node}_trouble",
            "device_class": "problem",
            "state_topic": topics.status,
            "value_template": "{{ 'ON' if value_json.health | default('sick') != 'ok' else 'OFF' }}",
        }
    }
    for gpu in snap.gpus:
        components.update(_gpu(gpu, topics))
    for key in former:
        components.setdefault(key, {"p": "sensor"})
    return {
        "dev": {
            "ids": [f"edgeagent_{topics.site}_{topics.node}"],
            "name": snap.node,
            "mf": "edgeagent",
            "mdl": ", ".join(sorted({g.gpu.model for g in snap.gpus})) or "no GPU",
            "sw": snap.agent_version,
        },
        "o": {"name": "edgeagent", "sw": snap.agent_version},
        "avty_t": topics.status,
        "avty_tpl": "{{ 'online' if value_json.state in ('ready', 'draining') else 'offline' }}",
        "cmps": components,
    }


def _gpu(state: GpuState, topics: Topics) -> dict[str, Any]:
    uuid = state.gpu.uuid
    out: dict[str, Any] = {}
    for field, name, unit, device_class in _SENSORS:
        key = slug(f"{uuid.lower()}-{name}".replace(" ", "-"))
        out[key] = {
            "p": "sensor",
            "name": f"GPU {state.gpu.index} {name}",
            "unique_id": f"{topics.site}_{topics.node}_{key}",
            "state_topic": topics.telemetry,
            "unit_of_measurement": unit,
            "state_class": "measurement",
            # uuid is made of hex digits and dashes: it cannot end the string.
            "value_template": "{{ (value_json.samples[-1].gpus | selectattr('uuid','eq','"
            + "".join(c for c in uuid if c.isalnum() or c in "-_/:.")
            + f"') | first | default({{}})).{field} | default(None) }}}}",
            **({} if device_class is None else {"device_class": device_class}),
        }
    return out
