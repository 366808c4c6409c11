"""The kubelet's own record of who holds which devices: `kubelet_internal_checkpoint`.

Reading it has no side effects (podresources' List has). It names pod UID, container and IDs per
resource, from the end of the container's last Allocate until the allocation after the pod's end:
it says who holds what, not who is alive.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from edgeagent.errors import KubeletError
from edgeagent.hostroot import HostRoot
from edgeagent.kubelet.protos.deviceplugin import ContainerAllocateResponse
from edgeagent.sharing.ledger import ContainerKey
from edgeagent.sharing.tokens import read_ids

FILE_NAME = "kubelet_internal_checkpoint"
MAX_FILE_BYTES = 64 * 1024 * 1024

_ENTRIES = '"PodDeviceEntries":'


@dataclass(frozen=True, slots=True)
class HeldDevices:
    """What one container holds. `tokens`: resource -> bit mask, for resources whose IDs are tokens;
    `named`: resource -> IDs, for the others; `responses`: resource -> what Allocate had answered
    (base64)."""

    tokens: Mapping[str, int] = field(default_factory=dict)
    named: Mapping[str, frozenset[str]] = field(default_factory=dict)
    responses: Mapping[str, str] = field(default_factory=dict)

    def response_env(self, resource: str, variable: str) -> str | None:
        """The value that Allocate's answer for a resource gave a variable; None where it gave none."""
        try:
            data = base64.b64decode(self.responses.get(resource, ""), validate=True)
            answer = ContainerAllocateResponse.FromString(data)
        except (ValueError, DecodeError):
            return None
        value: str | None = answer.envs.get(variable)
        return value


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """The devices of the resources that were asked for, by container; `other_resources`: names of
    all the rest that somebody holds, with the UIDs of their pods."""

    containers: Mapping[ContainerKey, HeldDevices] = field(default_factory=dict)
    other_resources: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def pod_uids(self) -> frozenset[str]:
        return frozenset(key.pod_uid for key in self.containers)

    def holding_tokens(self, resource: str, mask: int) -> list[ContainerKey]:
        """The containers that hold exactly these tokens of the resource, in the file's order."""
        return [key for key, held in self.containers.items() if held.tokens.get(resource) == mask]

    def holding_named(self, resource: str, ids: frozenset[str]) -> list[ContainerKey]:
        return [key for key, held in self.containers.items() if held.named.get(resource) == ids]


class Checkpoint:
    """The file, parsed again only when it changed. Not thread-safe: its owner locks.

    `letters` maps the names of token resources to their letter, `named` says which others count.
    """

    def __init__(
        self,
        host: HostRoot,
        path: str,
        letters: Callable[[], Mapping[str, str]],
        named: Callable[[str], bool],
    ) -> None:
        self._host = host
        self._path = path
        self._letters = letters
        self._named = named
        self._stamp: tuple[object, ...] | None = None
        self._view = CheckpointView()

    def read(self) -> CheckpointView:
        """What the file says now. Raises KubeletError when it is absent, unreadable or not (yet)
        whole; the caller tries again."""
        letters = self._letters()
        stamp = (self._identity(), tuple(letters.items()))
        if stamp != self._stamp:
            self._view = parse(self._content(), letters, self._named)
            self._stamp = stamp
        return self._view

    def _identity(self) -> tuple[int, int, int]:
        try:
            stat = os.stat(self._host.path(self._path))
        except (OSError, ValueError) as e:
            raise KubeletError(
                f"cannot read the kubelet's checkpoint {self._path}: {getattr(e, 'strerror', None) or e}"
            ) from e
        return (stat.st_ino, stat.st_mtime_ns, stat.st_size)

    def _content(self) -> bytes:
        data = self._host.read_bytes(self._path, MAX_FILE_BYTES + 1)
        if data is None:
            raise KubeletError(f"cannot read the kubelet's checkpoint {self._path}")
        if len(data) > MAX_FILE_BYTES:
            raise KubeletError(
                f"cannot read the kubelet's checkpoint {self._path}: larger than {MAX_FILE_BYTES} bytes"
            )
        return data


def parse(data: bytes, letters: Mapping[str, str], named: Callable[[str], bool]) -> CheckpointView:
    """The content of a checkpoint file. Entries that make no sense are left out; a file that makes
    no sense as a whole raises KubeletError."""
    tokens: dict[ContainerKey, dict[str, int]] = {}
    others: dict[ContainerKey, dict[str, frozenset[str]]] = {}
    responses: dict[ContainerKey, dict[str, str]] = {}
    foreign: dict[str, set[str]] = {}
    for entry in _entries(data):
        if not isinstance(entry, dict):
            continue
        uid, container, resource = (entry.get(k) for k in ("PodUID", "ContainerName", "ResourceName"))
        ids = _ids(entry.get("DeviceIDs"))
        if not (isinstance(uid, str) and isinstance(container, str) and isinstance(resource, str)):
            continue
        if not (uid and container and resource and ids):
            continue
        key = ContainerKey(uid, container)
        letter = letters.get(resource)
        if letter is not None:
            # A container has one entry per resource; a second one is only ever added to the first.
            mask = read_ids(letter, ids)
            tokens.setdefault(key, {})[resource] = tokens.get(key, {}).get(resource, 0) | mask
        elif named(resource):
            before = others.setdefault(key, {}).get(resource, frozenset())
            others[key][resource] = before | frozenset(ids)
        else:
            foreign.setdefault(resource, set()).add(uid)
            continue
        response = entry.get("AllocResp")
        if isinstance(response, str) and response:
            responses.setdefault(key, {})[resource] = response
    return CheckpointView(
        containers={
            key: HeldDevices(tokens.get(key, {}), others.get(key, {}), responses.get(key, {}))
            for key in dict.fromkeys((*tokens, *others))
        },
        other_resources={name: frozenset(uids) for name, uids in foreign.items()},
    )


def _entries(data: bytes) -> list[Any]:
    try:
        text = data.decode("utf-8", "replace")
        # The file also lists every registered device; with many of them that is most of it, and
        # none of our business.
        found = text.find(_ENTRIES)
        if found >= 0 and text.find(_ENTRIES, found + 1) < 0 and not text.endswith(_ENTRIES):
            start = found + len(_ENTRIES)
            while start < len(text) and text[start].isspace():
                start += 1
            entries, _ = json.JSONDecoder().raw_decode(text, start)
        else:
            document = json.loads(text)
            content = document.get("Data") if isinstance(document, dict) else None
            if not isinstance(content, dict):
                raise KubeletError("cannot understand the kubelet's checkpoint: it has no Data")
            entries = content.get("PodDeviceEntries")
    except (ValueError, RecursionError) as e:
        raise KubeletError(f"cannot understand the kubelet's checkpoint: not whole JSON ({e})") from e
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise KubeletError("cannot understand the kubelet's checkpoint: PodDeviceEntries is not a list")
    return entries


def _ids(value: Any) -> list[str]:
    """IDs of the list form (up to Kubernetes 1.19) or of the map by NUMA node."""
    if isinstance(value, list):
        lists = [value]
    elif isinstance(value, dict):
        lists = [v for v in value.values() if isinstance(v, list)]
    else:
        return []
    return [name for ids in lists for name in ids if isinstance(name, str) and name]
