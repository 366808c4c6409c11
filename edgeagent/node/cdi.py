"""CDI: what a container is given, and the spec files that say so to the container runtime.

Only files whose names begin with our own vendor are ever written or removed here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeagent.config.documents import parse_document
from edgeagent.errors import ConfigError, NodeError
from edgeagent.hostroot import HostRoot

# The first version with annotations; nothing of a later one is used, so that every runtime reads it.
CDI_VERSION = "0.6.0"
VENDOR = "edgeagent.io"
SHARE_CLASS = "share"
GPU_CLASS = "gpu"

MAX_SPEC_BYTES = 1024 * 1024

_DEVICE_NAME = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?$")
_KIND = re.compile(r"^[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]/[A-Za-z][A-Za-z0-9_-]*[A-Za-z0-9]$")


@dataclass(frozen=True, slots=True)
class Mount:
    """A bind mount: host path, path in the container, options ("ro", "nosuid", "nodev", "bind", …)."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ("ro", "nosuid", "nodev", "rbind", "rprivate")


@dataclass(frozen=True, slots=True)
class Hook:
    """An OCI hook as CDI names it."""

    hook_name: str  # "createContainer", "createRuntime", …
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ContainerEdits:
    """What a container gets. Paths are the host's."""

    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    device_nodes: tuple[str, ...] = ()
    hooks: tuple[Hook, ...] = ()

    def merged(self, other: ContainerEdits) -> ContainerEdits:
        """Both together; `other` wins where an env key or a container path is in both."""
        mounts = {m.container_path: m for m in (*self.mounts, *other.mounts)}
        return ContainerEdits(
            env={**self.env, **other.env},
            mounts=tuple(mounts.values()),
            device_nodes=tuple(dict.fromkeys((*self.device_nodes, *other.device_nodes))),
            hooks=tuple(dict.fromkeys((*self.hooks, *other.hooks))),
        )


def qualified_name(device_class: str, device: str) -> str:
    """`edgeagent.io/share=m000123`."""
    return f"{VENDOR}/{device_class}={device}"


def spec_text(
    device_class: str, devices: Mapping[str, ContainerEdits], annotations: Mapping[str, str] | None = None
) -> str:
    """The JSON of a spec with these devices. `annotations` describe the spec to whoever reads it."""
    kind = f"{VENDOR}/{device_class}"
    # containerd 2.2.7 panics on a kind whose vendor or class has one letter (measured).
    if not _KIND.fullmatch(kind):
        raise ValueError(f"{kind!r} is not a CDI kind")
    for name in devices:
        if not _DEVICE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a CDI device name")
    spec: dict[str, Any] = {"cdiVersion": CDI_VERSION, "kind": kind}
    if annotations:
        spec["annotations"] = {f"{VENDOR}/{key}": value for key, value in annotations.items()}
    spec["devices"] = [
        {"name": name, "containerEdits": edits_to_json(edits)} for name, edits in devices.items()
    ]
    return json.dumps(spec, indent=1, sort_keys=False) + "\n"


def edits_to_json(edits: ContainerEdits) -> dict[str, Any]:
    """The containerEdits object; keys that would be empty are left out, as the schema wants."""
    made: dict[str, Any] = {}
    if edits.env:
        made["env"] = [f"{key}={value}" for key, value in edits.env.items()]
    if edits.device_nodes:
        made["deviceNodes"] = [{"path": path} for path in edits.device_nodes]
    if edits.hooks:
        made["hooks"] = [
            {
                "hookName": hook.hook_name,
                "path": hook.path,
                **({"args": list(hook.args)} if hook.args else {}),
                **({"env": list(hook.env)} if hook.env else {}),
            }
            for hook in edits.hooks
        ]
    if edits.mounts:
        made["mounts"] = [
            {"hostPath": m.host_path, "containerPath": m.container_path, "options": list(m.options)}
            for m in edits.mounts
        ]
    return made


def edits_from_json(value: Any) -> ContainerEdits:
    """The containerEdits object of somebody's spec; what cannot be understood is left out."""
    if not isinstance(value, dict):
        return ContainerEdits()
    env: dict[str, str] = {}
    for item in _strings(value.get("env")):
        key, equals, text = item.partition("=")
        if equals:
            env[key] = text
    nodes = [node.get("hostPath") or node.get("path") for node in _dicts(value.get("deviceNodes"))]
    mounts = [
        Mount(m["hostPath"], m["containerPath"], tuple(_strings(m.get("options"))) or ("ro", "bind"))
        for m in _dicts(value.get("mounts"))
        if isinstance(m.get("hostPath"), str) and isinstance(m.get("containerPath"), str)
    ]
    hooks = [
        Hook(h["hookName"], h["path"], tuple(_strings(h.get("args"))), tuple(_strings(h.get("env"))))
        for h in _dicts(value.get("hooks"))
        if isinstance(h.get("hookName"), str) and isinstance(h.get("path"), str)
    ]
    return ContainerEdits(env, tuple(mounts), tuple(n for n in nodes if isinstance(n, str)), tuple(hooks))


@dataclass(frozen=True, slots=True)
class ForeignSpec:
    """A spec that somebody else wrote: the edits of each device, and those that go with every device."""

    path: str
    kind: str
    devices: Mapping[str, ContainerEdits]
    common: ContainerEdits


def read_spec(host: HostRoot, path: str) -> ForeignSpec | None:
    """The spec in a file (JSON or YAML), or None where it cannot be read as one."""
    text = host.read_text(path, MAX_SPEC_BYTES)
    if text is None:
        return None
    try:
        document = json.loads(text) if path.endswith(".json") else parse_document(text, path)
    except (ValueError, RecursionError, ConfigError):
        return None
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        return None
    return ForeignSpec(
        path,
        document["kind"],
        {
            str(device["name"]): edits_from_json(device.get("containerEdits"))
            for device in _dicts(document.get("devices"))
            if device.get("name") is not None
        },
        edits_from_json(document.get("containerEdits")),
    )


class SpecDir:
    """Our specs in the runtime's directory for generated ones (`/var/run/cdi`). Thread-safe as far as
    different names are written by different threads."""

    def __init__(self, host: HostRoot, cdi_dir: str) -> None:
        self._host = host
        self._dir = cdi_dir

    def _path(self, device_class: str, name: str) -> Path:
        if not _DEVICE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a CDI device name")
        return self._host.path(f"{self._dir}/{VENDOR}-{device_class}-{name}.json")

    def write(self, device_class: str, name: str, text: str) -> None:
        """Puts the spec in place at once and on disk. Raises NodeError.

        The temporary file is in the same directory and does not end in .json: a runtime notices the
        rename within a directory only (measured), and must not read half a file.
        """
        path = self._path(device_class, name)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                data = text.encode()
                while data:
                    data = data[os.write(fd, data) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(temporary, path)
        except OSError as e:
            try:
                os.unlink(temporary)
            except OSError:
                pass  # it was never made, or the directory is gone
            raise NodeError(f"cannot write the CDI spec {self._dir}/{path.name}: {e.strerror or e}") from e

    def read(self, device_class: str, name: str) -> str | None:
        """The text of one of our specs; None where there is none."""
        path = self._path(device_class, name)
        return self._host.read_text(f"{self._dir}/{path.name}", MAX_SPEC_BYTES)

    def remove(self, device_class: str, name: str) -> None:
        """Removes the spec where there is one. Raises NodeError when it cannot be removed."""
        path = self._path(device_class, name)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as e:
            raise NodeError(f"cannot remove the CDI spec {self._dir}/{path.name}: {e.strerror or e}") from e

    def names(self, device_class: str) -> list[str]:
        """Of our specs of this class that are there."""
        prefix = f"{VENDOR}-{device_class}-"
        return [
            name.removeprefix(prefix).removesuffix(".json")
            for name in self._host.listdir(self._dir)
            if name.startswith(prefix) and name.endswith(".json")
        ]

    def remove_leftovers(self) -> None:
        """Removes temporary files of ours that a crash left behind."""
        for name in self._host.listdir(self._dir):
            if name.startswith(f"{VENDOR}-") and name.endswith(".tmp"):
                try:
                    os.unlink(self._host.path(f"{self._dir}/{name}"))
                except OSError:
                    pass  # harmless: the runtime does not read it


def annotations_of(text: str) -> dict[str, str]:
    """The annotations that spec_text put in, without their prefix; empty where the text is no spec."""
    try:
        found = json.loads(text).get("annotations")
    except (ValueError, AttributeError, RecursionError):
        return {}
    prefix = f"{VENDOR}/"
    return (
        {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix) and isinstance(v, str)}
        if isinstance(found, dict)
        else {}
    )


def _strings(value: Any) -> list[str]:
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []
