"""How containerd finds CDI devices: spec files in two directories, cached, refreshed by inotify.

Its habits, kept because plugins trip over them: the cache is read again only when a file is renamed
away, removed or written (a file renamed in from another directory is not noticed), a device defined
twice at the same priority is dropped, a broken file disturbs only itself, and a vendor or class of
one letter takes the whole runtime down.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.fakes.kubelet import inotify

_VERSIONS = ("0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
_PART = re.compile(r"^[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]$")
_DEVICE = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?$")
_WATCHED = inotify.MOVED_FROM | inotify.MOVE_SELF | inotify.DELETE | inotify.DELETE_SELF | inotify.MODIFY


class RuntimePanic(Exception):
    """What such a spec does to containerd 2.2.7."""


class UnresolvableDevices(Exception):
    def __init__(self, names: list[str]) -> None:
        self.names = names
        super().__init__(f"unresolvable CDI devices {', '.join(names)}")


@dataclass
class Edits:
    """containerEdits, as written in the spec file."""

    env: list[str] = field(default_factory=list)
    device_nodes: list[dict[str, Any]] = field(default_factory=list)
    mounts: list[dict[str, Any]] = field(default_factory=list)
    hooks: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Edits:
        edits = cls(
            list(data.get("env") or []),
            list(data.get("deviceNodes") or []),
            list(data.get("mounts") or []),
            list(data.get("hooks") or []),
        )
        for env in edits.env:
            if "=" not in env.lstrip("="):
                raise ValueError(f"invalid environment variable {env!r}")
        for node in edits.device_nodes:
            if not node.get("path"):
                raise ValueError("invalid (empty) device path")
        for mount in edits.mounts:
            if not mount.get("hostPath") or not mount.get("containerPath"):
                raise ValueError("invalid mount, empty host or container path")
        for hook in edits.hooks:
            if not hook.get("hookName") or not hook.get("path"):
                raise ValueError("invalid hook, empty name or path")
        return edits

    @property
    def empty(self) -> bool:
        return not (self.env or self.device_nodes or self.mounts or self.hooks)


@dataclass
class Spec:
    """One spec file."""

    path: Path
    priority: int
    kind: str
    edits: Edits
    devices: dict[str, Edits]

    @classmethod
    def read(cls, path: Path, priority: int) -> Spec:
        """ValueError and its kin where the file is not a valid spec; RuntimePanic as said above."""
        text = path.read_text()
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        if not isinstance(data, dict):
            raise ValueError("not an object")
        if data.get("cdiVersion") not in _VERSIONS:
            raise ValueError(f"invalid version {data.get('cdiVersion')!r}")
        kind = data.get("kind", "")
        vendor, _, class_ = str(kind).partition("/")
        for part in (vendor, class_):
            if len(part) == 1 and part.isalpha():
                raise RuntimePanic(f"kind {kind!r} in {path.name}")
            if not _PART.match(part):
                raise ValueError(f"invalid kind {kind!r}")
        devices: dict[str, Edits] = {}
        for device in data.get("devices") or []:
            name = device.get("name", "")
            if not _DEVICE.match(name) or name in devices:
                raise ValueError(f"invalid or repeated device {name!r}")
            devices[name] = Edits.parse(device.get("containerEdits") or {})
            if devices[name].empty:
                raise ValueError(f"invalid device {name!r}, empty device edits")
        if not devices:
            raise ValueError("invalid spec, no devices")
        return cls(path, priority, kind, Edits.parse(data.get("containerEdits") or {}), devices)


@dataclass
class Resolved:
    """One device: its spec and its own edits."""

    spec: Spec
    edits: Edits


class CdiCache:
    """`directories` from low to high priority (/etc/cdi, /var/run/cdi). Not thread-safe."""

    def __init__(self, directories: list[Path]) -> None:
        self.directories = directories
        self.devices: dict[str, Resolved] = {}
        self.previous: dict[str, Resolved | None] = {}  # what a device was before its last change
        self.errors: dict[Path, str] = {}
        self.panic: str | None = None
        self._watches: dict[Path, int] = {}
        self._deleted: set[Path] = set()  # files removed since the last scan
        try:
            self._inotify: inotify.Inotify | None = inotify.Inotify()
        except OSError:
            self._inotify = None  # then every look reads the directories anew
        self._scan()

    def close(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    def resolve(self, names: list[str], *, stale: bool = False) -> list[Resolved]:
        """The devices of these names. `stale`: as they were before their latest change, where they changed.

        Raises UnresolvableDevices and RuntimePanic.
        """
        if self._changed():
            self._scan()
        if self.panic is not None:
            raise RuntimePanic(self.panic)
        known = self.devices
        if stale:
            known = {n: r for n, r in {**self.devices, **self.previous}.items() if r is not None}
        missing = [n for n in names if n not in known]
        if missing:
            raise UnresolvableDevices(missing)
        return [known[n] for n in names]

    def _changed(self) -> bool:
        if self._inotify is None:
            return True
        changed = False
        gone = {inotify.IGNORED, inotify.DELETE_SELF, inotify.MOVE_SELF}
        for number, mask, name in self._inotify.read():
            if any(mask & g for g in gone):
                self._watches = {d: n for d, n in self._watches.items() if n != number}
                changed = True
            elif mask & inotify.MODIFY:
                changed = changed or name.endswith((".json", ".yaml"))
            else:
                changed = True
                directories = [d for d, n in self._watches.items() if n == number]
                self._deleted.update(d / name for d in directories if mask & inotify.DELETE)
        for directory in self.directories:
            if directory not in self._watches:
                try:
                    self._watches[directory] = self._inotify.watch(directory, _WATCHED)
                    changed = True
                except OSError:
                    pass  # absent: looked for again at the next container
        return changed

    def _scan(self) -> None:
        self.errors, self.panic = {}, None
        found: dict[str, list[Resolved]] = {}
        for priority, directory in enumerate(self.directories):
            paths = sorted(directory.iterdir()) if directory.is_dir() else []
            for path in paths:
                if path.suffix not in (".json", ".yaml"):
                    continue
                try:
                    spec = Spec.read(path, priority)
                except RuntimePanic as e:
                    self.panic = str(e)
                    continue
                except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as e:
                    self.errors[path] = str(e)
                    continue
                for name, edits in spec.devices.items():
                    found.setdefault(f"{spec.kind}={name}", []).append(Resolved(spec, edits))
        devices: dict[str, Resolved] = {}
        for name, candidates in found.items():
            top = max(c.spec.priority for c in candidates)
            best = [c for c in candidates if c.spec.priority == top]
            if len(best) == 1:
                devices[name] = best[0]
            else:
                self.errors[best[0].spec.path] = f"conflicting device {name!r}"
        for name in {*self.devices, *devices}:
            old, new = self.devices.get(name), devices.get(name)
            if old is None:
                if name in self.previous:
                    self.previous[name] = None
            elif new is None or (new.edits, new.spec.edits) != (old.edits, old.spec.edits):
                # Removed and written anew: in between the cache had seen that it was gone.
                rewritten = new is not None and old.spec.path in self._deleted
                self.previous[name] = None if rewritten else old
        self._deleted.clear()
        self.devices = devices
