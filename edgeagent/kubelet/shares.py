"""The shared mode's resources as the kubelet sees them: memory, cores and number, in tokens."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from edgeagent.errors import AllocationError
from edgeagent.kubelet import preference
from edgeagent.kubelet.gate import Gate
from edgeagent.kubelet.podresources import AllocateGuard
from edgeagent.kubelet.protos import deviceplugin as api
from edgeagent.node.cdi import ContainerEdits
from edgeagent.sharing.tokens import parse_ids


class ShareService:
    """One of the three resources: hands the kubelet's calls to the gate."""

    pre_start_required = True

    def __init__(self, resource: str, letter: str, gate: Gate, guard: AllocateGuard) -> None:
        self.resource = resource
        self.letter = letter
        self._gate = gate
        self._guard = guard

    def prefer(self, request: bytes) -> bytes:
        return preference.answer(request, self.letter, self._gate.free_tokens(self.letter))

    def allocate(self, request: bytes) -> bytes:
        with self._guard.allocating():
            asked = parse(api.AllocateRequest, request)
            # All of it is judged before any of it is granted.
            masks = [self._mask(container.devices_ids) for container in asked.container_requests]
            response = api.AllocateResponse()
            for mask in masks:
                device, edits = self._gate.grant(self.letter, mask)
                add_answer(response, edits, [device] if device else [])
            data: bytes = response.SerializeToString()
            return data

    def pre_start(self, request: bytes) -> bytes:
        asked = parse(api.PreStartContainerRequest, request)
        self._gate.pre_start(self.letter, self._mask(asked.devices_ids))
        return b""  # PreStartContainerResponse is empty

    def _mask(self, ids: Any) -> int:
        return parse_ids(self.letter, list(ids), self._gate.offered(self.letter))


def parse(message_class: Any, raw: bytes) -> Any:
    """The message in `raw`. Raises AllocationError where it is none."""
    try:
        return message_class.FromString(raw)
    except DecodeError as e:
        raise AllocationError(
            "cannot read the request: it is no message of the device plugin interface v1beta1",
            code="INVALID_ARGUMENT",
            permanent=True,
        ) from e


def add_answer(response: Any, edits: ContainerEdits, cdi_devices: list[str]) -> None:
    """Adds one container's answer to an AllocateResponse."""
    answer = response.container_responses.add()
    for key, value in edits.env.items():
        answer.envs[key] = value
    for mount in edits.mounts:
        answer.mounts.add(
            container_path=mount.container_path, host_path=mount.host_path, read_only="ro" in mount.options
        )
    for node in edits.device_nodes:
        answer.devices.add(container_path=node, host_path=node, permissions="rw")
    for name in cdi_devices:
        answer.cdi_devices.add(name=name)
