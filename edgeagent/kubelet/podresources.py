"""podresources: the kubelet's other view of who holds which devices, with pod names.

Only a cross-check. A List while an Allocate is in flight can make the kubelet hand the same IDs out
twice (facts about Kubernetes 1.36 in the decision records), so calls go through a guard that the
Allocate handlers hold, and the agent never lists on its own account while one may be coming.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from edgeagent.errors import KubeletError
from edgeagent.kubelet.protos import podresources as api

_TIMEOUT_S = 2.0
_MAX_BYTES = 64 * 1024 * 1024


class AllocateGuard:
    """Keeps our Lists and our Allocates apart. Allocates never wait for more than a List's timeout."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allocating = 0
        self._listing = False

    @contextmanager
    def allocating(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._listing, _TIMEOUT_S)
            self._allocating += 1
        try:
            yield
        finally:
            with self._changed:
                self._allocating -= 1

    @property
    def busy(self) -> bool:
        """Whether an Allocate is in flight."""
        with self._changed:
            return self._allocating > 0

    @contextmanager
    def listing(self) -> Iterator[bool]:
        """Yields False, and nothing may be listed, while an Allocate is in flight."""
        with self._changed:
            free = not self._allocating and not self._listing
            self._listing = self._listing or free
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._listing = False
                    self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class PodDevices:
    """What podresources says of one container."""

    namespace: str
    pod: str
    container: str
    devices: Mapping[str, frozenset[str]]  # resource -> IDs


class PodResources:
    """The client. Every call has a connection of its own (they are rare)."""

    def __init__(self, socket: Path, guard: AllocateGuard) -> None:
        self._socket = socket
        self._guard = guard

    def list(self) -> tuple[PodDevices, ...] | None:
        """Every container that the kubelet counts; None while an Allocate is in flight. Raises
        KubeletError."""
        with self._guard.listing() as free:
            if not free:
                return None
            answer = self._call(api.LIST, api.ListPodResourcesRequest(), api.ListPodResourcesResponse)
        return tuple(
            _container(pod, container) for pod in answer.pod_resources for container in pod.containers
        )

    def get(self, namespace: str, pod: str) -> tuple[PodDevices, ...] | None:
        """One pod's containers; None while an Allocate is in flight. Raises KubeletError."""
        with self._guard.listing() as free:
            if not free:
                return None
            request = api.GetPodResourcesRequest(pod_namespace=namespace, pod_name=pod)
            answer = self._call(api.GET, request, api.GetPodResourcesResponse)
        found = answer.pod_resources
        return tuple(_container(found, container) for container in found.containers)

    def _call(self, method: str, request: Any, response_class: Any) -> Any:
        channel = grpc.insecure_channel(
            f"unix:{self._socket}",
            options=(
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_receive_message_length", _MAX_BYTES),
            ),
        )
        try:
            call = channel.unary_unary(method)
            return response_class.FromString(call(request.SerializeToString(), timeout=_TIMEOUT_S))
        except grpc.RpcError as e:
            raise KubeletError(f"cannot ask podresources: {e.code().name}: {e.details()}") from e
        finally:
            channel.close()


def _container(pod: api.PodResources, container: api.ContainerResources) -> PodDevices:
    devices: dict[str, frozenset[str]] = {}
    for entry in container.devices:  # one entry per ID, or grouped
        before = devices.get(entry.resource_name, frozenset())
        devices[entry.resource_name] = before | frozenset(entry.device_ids)
    return PodDevices(pod.namespace, pod.name, container.name, devices)
