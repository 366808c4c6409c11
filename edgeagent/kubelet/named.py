"""Resources whose IDs name their device: whole cards, replicas of cards, MIG instances.

As with NVIDIA's plugin the ID is the UUID (`<uuid>::<n>` for a replica), so that other exporters
understand it, and the kubelet's choice is final: there is nothing to bind at the container's start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgeagent.errors import AllocationError
from edgeagent.gpus.model import Gpu, MigInstance
from edgeagent.kubelet.encode import named_payload
from edgeagent.kubelet.podresources import AllocateGuard
from edgeagent.kubelet.protos import deviceplugin as api
from edgeagent.kubelet.shares import add_answer, parse
from edgeagent.node.cdi import ContainerEdits
from edgeagent.sharing.modes import GpuMode
from edgeagent.sharing.replicas import (
    check_request_size,
    device_of,
    devices_of,
    preferred_replicas,
    replica_ids,
)
from edgeagent.sharing.topology import Links, preferred_cards


@dataclass(frozen=True, slots=True)
class NamedDevice:
    """A card or a MIG instance. `unusable`: why no container can start on it; `nothing_new`: why no
    new one should get it."""

    uuid: str
    gpu: Gpu
    mig: MigInstance | None = None
    replicas: int = 1
    unusable: str | None = None
    nothing_new: str | None = None

    @property
    def ids(self) -> tuple[str, ...]:
        return replica_ids(self.uuid, self.replicas)


@dataclass(frozen=True, slots=True)
class NamedPlan:
    """One such resource: its devices in the order they are listed."""

    resource: str
    mode: GpuMode
    devices: tuple[NamedDevice, ...]
    links: Links
    fail_above_one: bool = False


Answer = Callable[[Sequence[NamedDevice]], tuple[ContainerEdits, list[str]]]
"""What a container gets for these devices: edits and CDI devices."""


class NamedService:
    """Thread-safe. `held` says which IDs containers hold, as far as is known."""

    pre_start_required = False

    def __init__(
        self,
        plan: NamedPlan,
        answer: Answer,
        held: Callable[[str], frozenset[str]],
        guard: AllocateGuard,
        on_event: Callable[[str, str], None] = lambda code, message: None,
    ) -> None:
        self.resource = plan.resource
        self._answer = answer
        self._held = held
        self._guard = guard
        self._on_event = on_event
        self._lock = threading.Lock()
        self._plan = plan
        self._spare_holders = False

    @property
    def plan(self) -> NamedPlan:
        with self._lock:
            return self._plan

    def update(self, plan: NamedPlan, spare_holders: bool = False) -> None:
        """`spare_holders`: what containers hold is listed as Healthy for the moment."""
        with self._lock:
            self._plan = plan
            self._spare_holders = spare_holders

    def health(self) -> dict[str, bool]:
        """Every ID, and whether it is Healthy. What containers hold of a GPU that only takes nothing new
        stays so: an admitted pod with an Unhealthy ID would fail."""
        held = self._held(self.resource)
        return {
            name: (device.nothing_new is None or name in held)
            and (device.unusable is None or (self._spare_holders and name in held))
            for device in self.plan.devices
            for name in device.ids
        }

    def payload(self) -> bytes:
        numa = {name: d.gpu.numa_node for d in self.plan.devices for name in d.ids}
        return named_payload(self.health(), numa)

    def prefer(self, request: bytes) -> bytes:
        plan = self.plan
        order = {name: i for i, name in enumerate(n for d in plan.devices for n in d.ids)}
        response = api.PreferredAllocationResponse()
        for asked in parse(api.PreferredAllocationRequest, request).container_requests:
            # The kubelet's order is random.
            available = sorted(asked.available_deviceIDs, key=lambda name: order.get(name, len(order)))
            must = list(asked.must_include_deviceIDs)
            size = max(0, asked.allocation_size)
            if any(device.replicas > 1 for device in plan.devices):
                replicas = {device.uuid: device.replicas for device in plan.devices}
                chosen = preferred_replicas(available, must, size, replicas)
            else:
                chosen = preferred_cards(available, must, size, plan.links)
            response.container_responses.add(deviceIDs=chosen)
        data: bytes = response.SerializeToString()
        return data

    def allocate(self, request: bytes) -> bytes:
        plan = self.plan
        by_uuid = {device.uuid: device for device in plan.devices}
        offered = {name for device in plan.devices for name in device.ids}
        try:
            with self._guard.allocating():
                response = api.AllocateResponse()
                for asked in parse(api.AllocateRequest, request).container_requests:
                    ids = list(asked.devices_ids)
                    uuids = devices_of(ids, offered)
                    check_request_size(self.resource, ids, fail_above_one=plan.fail_above_one)
                    devices = [by_uuid[uuid] for uuid in uuids]
                    for device in devices:
                        if device.unusable is not None:
                            raise AllocationError(
                                f"cannot give {device.uuid} to a container: {device.unusable}",
                                code="UNAVAILABLE",
                            )
                    edits, names = self._answer(devices)
                    add_answer(response, edits, names)
                data: bytes = response.SerializeToString()
                return data
        except AllocationError as e:
            self._on_event(e.code, str(e))
            raise

    def pre_start(self, request: bytes) -> bytes:
        return b""  # not asked for in the options; a kubelet that calls it anyway is let through

    def holders(self, held: Mapping[str, frozenset[str]]) -> list[NamedDevice]:
        """The devices behind the IDs of this resource that a container holds, each once."""
        by_uuid = {device.uuid: device for device in self.plan.devices}
        uuids = dict.fromkeys(map(device_of, sorted(held.get(self.resource, ()))))
        return [by_uuid[uuid] for uuid in uuids if uuid in by_uuid]
