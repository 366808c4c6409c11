"""The kubelet's device manager: endpoints, healthy and allocated IDs, the checkpoint.

Follows what was measured on Kubernetes 1.36, faults included; the names of the parts are the
kubelet's own where that helps to compare.
"""

from __future__ import annotations

import base64
import json
import os
import random
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from edgeagent.kubelet.protos import deviceplugin as dp
from tests.fakes.kubelet.cluster import Cluster
from tests.fakes.kubelet.model import Container, Pod
from tests.fakes.kubelet.runtime import MountPoint, RunOptions
from tests.fakes.kubelet.timing import Timing

CHECKPOINT = "kubelet_internal_checkpoint"

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", dp.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),  # the same path is another server after a plugin's restart
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
)


class DeviceError(Exception):
    """Something that the device manager or a plugin refused; the text is the kubelet's."""


class Interrupted(Exception):
    """A call was given up because the kubelet stops or the pod is being deleted."""


def rpc_error_text(error: grpc.RpcError) -> str:
    """As grpc-go prints it."""
    name = "".join(part.capitalize() for part in error.code().name.split("_"))
    name = {"Ok": "OK", "Cancelled": "Canceled"}.get(name, name)
    details = "context deadline exceeded" if name == "DeadlineExceeded" else error.details()
    return f"rpc error: code = {name} desc = {details}"


@dataclass
class Call:
    """One call to a plugin, recorded. Times are monotonic seconds; `end_s` None: still in flight."""

    method: str  # "GetPreferredAllocation" | "Allocate" | "PreStartContainer"
    resource: str
    pod: str
    container: str
    ids: tuple[str, ...]  # asked for; with GetPreferredAllocation: available
    must_include: tuple[str, ...] = ()
    size: int = 0
    begin_s: float = 0.0
    end_s: float | None = None
    error: str | None = None
    answer: Any = None


@dataclass(frozen=True)
class Update:
    """One list that arrived."""

    resource: str
    at_s: float
    healthy: int
    unhealthy: int


class Endpoint:
    """The kubelet's connection to one plugin."""

    def __init__(self, resource: str, path: Path) -> None:
        self.resource = resource
        self.path = path
        self.options: dp.DevicePluginOptions | None = None
        self.stop_s: float | None = None  # when its stream ended
        self.error: str | None = None  # how
        self.watcher: threading.Thread | None = None
        self._channel = grpc.insecure_channel(f"unix:{path}", options=_CHANNEL_OPTIONS)

        def call(method: str, request: Any, response: Any) -> Any:
            return self._channel.unary_unary(
                method,
                request_serializer=request.SerializeToString,
                response_deserializer=response.FromString,
            )

        self.get_options = call(dp.GET_OPTIONS, dp.Empty, dp.DevicePluginOptions)
        self.get_preferred_allocation = call(
            dp.GET_PREFERRED_ALLOCATION, dp.PreferredAllocationRequest, dp.PreferredAllocationResponse
        )
        self.allocate = call(dp.ALLOCATE, dp.AllocateRequest, dp.AllocateResponse)
        self.pre_start_container = call(
            dp.PRE_START_CONTAINER, dp.PreStartContainerRequest, dp.PreStartContainerResponse
        )
        self._list_and_watch = self._channel.unary_stream(
            dp.LIST_AND_WATCH,
            request_serializer=dp.Empty.SerializeToString,
            response_deserializer=dp.ListAndWatchResponse.FromString,
        )

    def lists(self) -> Iterable[dp.ListAndWatchResponse]:
        yield from self._list_and_watch(dp.Empty())

    def close(self) -> None:
        self._channel.close()


@dataclass
class Held:
    """What one container holds of one resource."""

    ids: set[str]
    response: bytes  # ContainerAllocateResponse


class DeviceManager:
    """`active`: UIDs of pods that count; `running`: whether (uid, container) runs already.

    `choose(resource, available, needed)` picks IDs where the kubelet picks at random.
    All state is guarded by the cluster's lock, which is never held during a call to a plugin.
    """

    def __init__(
        self,
        directory: Path,
        cluster: Cluster,
        timing: Timing,
        rng: random.Random,
        *,
        active: Callable[[], set[str]],
        running: Callable[[str, str], bool],
        changed: Callable[[], None],
        checkpoint_form: str = "numa",
        choose: Callable[[str, set[str], int], Iterable[str]] | None = None,
    ) -> None:
        self.directory = directory
        self.cluster = cluster
        self.timing = timing
        self.rng = rng
        self.choose = choose or self._random
        self.checkpoint_form = checkpoint_form
        self.endpoints: dict[str, Endpoint] = {}
        self.healthy: dict[str, set[str]] = {}
        self.unhealthy: dict[str, set[str]] = {}
        self.allocated: dict[str, set[str]] = {}
        self.pod_devices: dict[str, dict[str, dict[str, Held]]] = {}  # uid -> container -> resource
        self.listed_health: dict[str, dict[str, str]] = {}  # what a list last said of each ID ever listed
        self.calls: list[Call] = []
        self.updates: list[Update] = []
        self.sources_ready = True
        self.closed = False
        self._dead_since_s: dict[str, float] = {}  # resources without a living plugin
        self._numa: dict[str, dict[str, int]] = {}
        self._reuse: dict[str, dict[str, set[str]]] = {}
        self._active = active
        self._running = running
        self._changed = changed
        self._all_endpoints: list[Endpoint] = []

    # Life.

    def load(self) -> None:
        """Reads the checkpoint: who holds what; known resources start with nothing healthy."""
        try:
            data = json.loads((self.directory / CHECKPOINT).read_bytes())["Data"]
            entries = data["PodDeviceEntries"] or []
            resources = list(data["RegisteredDevices"] or {})
            for entry in entries:
                ids = entry["DeviceIDs"]
                flat = ids if isinstance(ids, list) else [i for part in ids.values() for i in part]
                held = Held(set(flat), base64.b64decode(entry["AllocResp"] or ""))
                containers = self.pod_devices.setdefault(entry["PodUID"], {})
                containers.setdefault(entry["ContainerName"], {})[entry["ResourceName"]] = held
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError):
            self.pod_devices.clear()  # a kubelet with a corrupt checkpoint starts without one
            return
        for resource in resources:
            self.healthy[resource], self.unhealthy[resource] = set(), set()
            self._dead_since_s[resource] = time.monotonic()
        self.allocated = self._held()

    def close(self) -> None:
        """Drops all connections; waits for the threads that read lists."""
        with self.cluster.lock:
            self.closed = True
            self.cluster.notify()
            endpoints = list(self._all_endpoints)
        for endpoint in endpoints:
            endpoint.close()
        for endpoint in endpoints:
            if endpoint.watcher is not None:
                endpoint.watcher.join()

    # Plugins.

    def register(self, resource: str, path: Path) -> None:
        """Dials back, asks for the options, begins to read lists. DeviceError where that fails."""
        endpoint = Endpoint(resource, path)
        try:
            future = endpoint.get_options.future(dp.Empty(), timeout=self.timing.dial_s, wait_for_ready=True)
            options = self._result(future, lambda: self.closed)
        except (DeviceError, Interrupted):
            endpoint.close()
            raise
        with self.cluster.lock:
            if self.closed:
                endpoint.close()
                raise Interrupted("the kubelet stops")
            endpoint.options = options
            self.endpoints[resource] = endpoint
            self._all_endpoints.append(endpoint)
            self._dead_since_s.pop(resource, None)
            endpoint.watcher = threading.Thread(
                target=self._watch, args=(endpoint,), name=f"kubelet-watch {resource}", daemon=True
            )
            endpoint.watcher.start()

    def _watch(self, endpoint: Endpoint) -> None:
        try:
            for message in endpoint.lists():
                self._listed(endpoint.resource, message)
            endpoint.error = "EOF"
        except grpc.RpcError as e:
            endpoint.error = rpc_error_text(e)
        except ValueError as e:  # the channel was closed under us
            endpoint.error = str(e)
        endpoint.close()
        with self.cluster.lock:
            endpoint.stop_s = time.monotonic()
            if endpoint in self._all_endpoints and not self.closed:
                self._all_endpoints.remove(endpoint)
            if self.endpoints.get(endpoint.resource) is endpoint and not self.closed:
                resource = endpoint.resource
                self._dead_since_s[resource] = endpoint.stop_s
                self.unhealthy.setdefault(resource, set()).update(self.healthy.get(resource, ()))
                if resource in self.healthy:
                    self.healthy[resource] = set()
                self._write_checkpoint()
                self._changed()

    def _listed(self, resource: str, message: dp.ListAndWatchResponse) -> None:
        healthy: set[str] = set()
        unhealthy: set[str] = set()
        numa: dict[str, int] = {}
        for device in message.devices:
            (healthy if device.health == dp.HEALTHY else unhealthy).add(device.ID)
            if device.HasField("topology") and device.topology.nodes:
                numa[device.ID] = device.topology.nodes[0].ID
        with self.cluster.lock:
            if self.closed:
                return
            self.healthy[resource], self.unhealthy[resource] = healthy, unhealthy
            self._numa[resource] = numa
            health = self.listed_health.setdefault(resource, {})
            health.update(dict.fromkeys(healthy, dp.HEALTHY))
            health.update(dict.fromkeys(unhealthy, dp.UNHEALTHY))
            self.updates.append(Update(resource, time.monotonic(), len(healthy), len(unhealthy)))
            self._write_checkpoint()
            self._changed()

    def is_device(self, resource: str) -> bool:
        return resource in self.healthy

    def capacity(self) -> tuple[dict[str, int], dict[str, int]]:
        """(capacity, allocatable); forgets resources whose plugin is dead for too long."""
        with self.cluster.lock:
            for resource in [r for r in self._dead_since_s if self._grace_left(r) <= 0]:
                del self._dead_since_s[resource]
                for known in (self.healthy, self.unhealthy, self.endpoints):
                    known.pop(resource, None)
                self._write_checkpoint()
            resources = [*self.healthy, *(r for r in self.unhealthy if r not in self.healthy)]
            allocatable = {r: len(self.healthy.get(r, ())) for r in resources}
            return {r: n + len(self.unhealthy.get(r, ())) for r, n in allocatable.items()}, allocatable

    def grace_left_s(self) -> float | None:
        """Until the next resource of a dead plugin is forgotten."""
        with self.cluster.lock:
            return min(map(self._grace_left, self._dead_since_s), default=None)

    def _grace_left(self, resource: str) -> float:
        return self._dead_since_s[resource] + self.timing.endpoint_grace_s - time.monotonic()

    # Who holds what.

    def _held(self) -> dict[str, set[str]]:
        held: dict[str, set[str]] = {}
        for containers in self.pod_devices.values():
            for resources in containers.values():
                for resource, one in resources.items():
                    held.setdefault(resource, set()).update(one.ids)
        return held

    def update_allocated(self) -> None:
        """Forgets pods that are no longer active, and then recomputes what is allocated.

        The recomputation loses the IDs of an Allocate that is in flight: they are handed out again.
        A real kubelet does that when podresources List comes at the wrong moment; so does this one.
        """
        with self.cluster.lock:
            if not self.sources_ready:
                return
            gone = set(self.pod_devices) - self._active()
            if gone:
                for uid in gone:
                    del self.pod_devices[uid]
                self.allocated = self._held()

    def held(self, uid: str, container: str) -> dict[str, Held]:
        with self.cluster.lock:
            return dict(self.pod_devices.get(uid, {}).get(container, {}))

    # Admission.

    def allocate(self, pod: Pod, container: Container, give_up: Callable[[], bool]) -> None:
        """All devices of one container. DeviceError: the pod is to be rejected."""
        for uid in [u for u in self._reuse if u != pod.uid]:
            del self._reuse[uid]
        reuse = self._reuse.setdefault(pod.uid, {})
        self._allocate_container(pod, container, reuse, give_up)
        for resource, held in self.held(pod.uid, container.name).items():
            ids = reuse.setdefault(resource, set())
            if container.role == "init":
                ids |= held.ids
            else:
                ids -= held.ids

    def _allocate_container(
        self, pod: Pod, container: Container, reuse: dict[str, set[str]], give_up: Callable[[], bool]
    ) -> None:
        amounts = [(r, n) for r, n in container.spec.amounts().items() if self.is_device(r)]
        self.rng.shuffle(amounts)
        wrote = False
        if amounts:
            self.update_allocated()
        for resource, amount in amounts:
            chosen = self._devices_to_allocate(pod, container, resource, amount, reuse, give_up)
            if not chosen:
                continue
            ids = sorted(chosen)
            self.rng.shuffle(ids)
            with self.cluster.lock:
                endpoint = self.endpoints.get(resource)
            try:
                if endpoint is None:
                    raise DeviceError(f"unknown Device Plugin {resource}")
                if endpoint.stop_s is not None:
                    raise DeviceError(f"endpoint {endpoint.path.name} has been stopped")
                request = dp.AllocateRequest(
                    container_requests=[dp.ContainerAllocateRequest(devices_ids=ids)]
                )
                call = Call("Allocate", resource, pod.name, container.name, tuple(ids))
                answer = self._call(call, endpoint.allocate, request, give_up)
                if not answer.container_responses:
                    raise DeviceError(f"no containers return in allocation response {answer}")
            except (DeviceError, Interrupted):
                with self.cluster.lock:
                    self.allocated = self._held()
                raise
            with self.cluster.lock:
                response = answer.container_responses[0].SerializeToString()
                containers = self.pod_devices.setdefault(pod.uid, {})
                containers.setdefault(container.name, {})[resource] = Held(set(chosen), response)
            wrote = True
        if wrote:
            with self.cluster.lock:
                self._write_checkpoint()

    def _devices_to_allocate(
        self,
        pod: Pod,
        container: Container,
        resource: str,
        required: int,
        reuse: dict[str, set[str]],
        give_up: Callable[[], bool],
    ) -> set[str]:
        with self.cluster.lock:
            mine = self.pod_devices.get(pod.uid, {}).get(container.name, {}).get(resource)
            needed = required
            if mine is not None:
                needed -= len(mine.ids)
                if needed != 0:
                    raise DeviceError(
                        f'pod "{pod.uid}" container "{container.name}" changed request for resource '
                        f'"{resource}" from {len(mine.ids)} to {required}'
                    )
            if not self.sources_ready and self._running(pod.uid, container.name):
                return set()
            if resource not in self.healthy:
                raise DeviceError(f"cannot allocate unregistered device {resource}")
            if not self.healthy[resource]:
                raise DeviceError(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
            if mine is not None and not mine.ids <= self.healthy[resource]:
                raise DeviceError(
                    f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
                )
            if needed == 0:
                return set()

            chosen: set[str] = set()

            def take(candidates: set[str], picker: Callable[[str, set[str], int], Iterable[str]]) -> bool:
                left = candidates - chosen
                missing = required - len(chosen)
                picked = set(left if len(left) <= missing else picker(resource, left, missing))
                self.allocated.setdefault(resource, set()).update(picked)
                chosen.update(picked)
                return len(chosen) == required

            if take(reuse.get(resource, set()), self._random):
                return chosen
            missing = required - len(chosen)
            available = self.healthy[resource] - self.allocated.get(resource, set())
            if len(available) < missing:
                raise DeviceError(
                    f"requested number of devices unavailable for {resource}. "
                    f"Requested: {missing}, Available: {len(available)}"
                )
            endpoint = self.endpoints.get(resource)
        preferred: set[str] = set()
        options = endpoint.options if endpoint is not None and endpoint.stop_s is None else None
        if endpoint and options and options.get_preferred_allocation_available and missing < len(available):
            preferred = self._preferred(
                endpoint, pod, container, resource, available | chosen, chosen, required, give_up
            )
        with self.cluster.lock:
            if not take(preferred & available, self._random) and not take(available, self.choose):
                raise DeviceError(
                    f"unexpectedly allocated less resources than required. "
                    f"Requested: {required}, Got: {len(chosen)}"
                )
            return chosen

    def _preferred(
        self,
        endpoint: Endpoint,
        pod: Pod,
        container: Container,
        resource: str,
        available: set[str],
        must_include: set[str],
        size: int,
        give_up: Callable[[], bool],
    ) -> set[str]:
        ids, must = sorted(available), sorted(must_include)
        self.rng.shuffle(ids)
        self.rng.shuffle(must)
        request = dp.PreferredAllocationRequest()
        request.container_requests.add(
            available_deviceIDs=ids, must_include_deviceIDs=must, allocation_size=size
        )
        call = Call(
            "GetPreferredAllocation", resource, pod.name, container.name, tuple(ids), tuple(must), size
        )
        try:
            answer = self._call(call, endpoint.get_preferred_allocation, request, give_up)
        except DeviceError as e:
            raise DeviceError(f"device plugin GetPreferredAllocation rpc failed with err: {e}") from e
        return set(answer.container_responses[0].deviceIDs) if answer.container_responses else set()

    def _random(self, resource: str, candidates: set[str], needed: int) -> Iterable[str]:
        return self.rng.sample(sorted(candidates), needed)

    # Container starts.

    def pre_start(self, pod: Pod, container: Container, give_up: Callable[[], bool]) -> None:
        """PreStartContainer of every resource in random order, where its plugin asked for it."""
        with self.cluster.lock:
            resources = [r for r, n in container.spec.amounts().items() if n and self._is_known(pod, r)]
            self.rng.shuffle(resources)
        for resource in resources:
            with self.cluster.lock:
                endpoint = self.endpoints.get(resource)
                held = self.held(pod.uid, container.name).get(resource)
            if endpoint is None or endpoint.stop_s is not None:
                raise DeviceError(f"endpoint not found in cache for a registered resource: {resource}")
            if endpoint.options is None or not endpoint.options.pre_start_required:
                continue
            if held is None:
                raise DeviceError(
                    f"no devices found allocated in local cache for pod {pod.uid}, "
                    f"container {container.name}, resource {resource}"
                )
            ids = sorted(held.ids)
            self.rng.shuffle(ids)
            call = Call("PreStartContainer", resource, pod.name, container.name, tuple(ids))
            request = dp.PreStartContainerRequest(devices_ids=ids)
            try:
                deadline_s = self.timing.pre_start_deadline_s
                self._call(call, endpoint.pre_start_container, request, give_up, deadline_s, pod.changed)
            except DeviceError as e:
                raise DeviceError(f"device plugin PreStartContainer rpc failed with err: {e}") from e

    def _is_known(self, pod: Pod, resource: str) -> bool:
        """Whether a resource is a plugin's: registered, or held by the pod."""
        held = self.pod_devices.get(pod.uid, {})
        return self.is_device(resource) or any(resource in r for r in held.values())

    def run_options(self, pod: Pod, container: Container) -> RunOptions:
        """What the container is made with; where resources disagree the first in random order wins."""
        options = RunOptions()
        resources = list(self.held(pod.uid, container.name).items())
        self.rng.shuffle(resources)
        for _, held in resources:
            response = dp.ContainerAllocateResponse.FromString(held.response)
            for key, value in response.envs.items():
                options.env.setdefault(key, value)
            for key, value in response.annotations.items():
                options.annotations.setdefault(key, value)
            for mount in response.mounts:
                options.mounts.setdefault(mount.container_path, MountPoint(mount.host_path, mount.read_only))
            for device in response.devices:
                options.devices.setdefault(device.container_path, (device.host_path, device.permissions))
            for cdi in response.cdi_devices:
                if cdi.name not in options.cdi_devices:
                    options.cdi_devices.append(cdi.name)
        return options

    # Calls.

    def _call(
        self,
        call: Call,
        method: Any,
        request: Any,
        give_up: Callable[[], bool],
        timeout_s: float | None = None,
        changed: threading.Condition | None = None,
    ) -> Any:
        """The answer; DeviceError with grpc-go's text; Interrupted (and the call cancelled) on `give_up`.

        `changed` is notified when `give_up` may have become true.
        """
        with self.cluster.lock:
            if give_up():
                raise Interrupted(call.method)
            call.begin_s = time.monotonic()
            self.calls.append(call)
            self.cluster.notify()
        try:
            call.answer = self._result(method.future(request, timeout=timeout_s), give_up, changed)
        except DeviceError as e:
            call.error = str(e)
            raise
        except Interrupted:
            call.error = "given up"
            raise
        except ValueError as e:  # the channel was closed in between
            call.error = f"rpc error: code = Canceled desc = {e}"
            raise DeviceError(call.error) from e
        finally:
            call.end_s = time.monotonic()
        return call.answer

    def _result(
        self, future: Any, give_up: Callable[[], bool], changed: threading.Condition | None = None
    ) -> Any:
        changed = changed or self.cluster.changed

        def done(_: object) -> None:
            with changed:
                changed.notify_all()

        future.add_done_callback(done)
        with changed:
            changed.wait_for(lambda: future.done() or give_up())
        if not future.done():
            future.cancel()
            raise Interrupted("given up")
        try:
            return future.result()
        except grpc.RpcError as e:
            raise DeviceError(rpc_error_text(e)) from e
        except grpc.FutureCancelledError as e:  # the channel was closed under the call
            raise DeviceError(
                "rpc error: code = Canceled desc = grpc: the client connection is closing"
            ) from e

    # The checkpoint.

    def _write_checkpoint(self) -> None:
        entries = []
        for uid, containers in self.pod_devices.items():
            for name, resources in containers.items():
                for resource, held in resources.items():
                    entries.append(
                        {
                            "PodUID": uid,
                            "ContainerName": name,
                            "ResourceName": resource,
                            "DeviceIDs": self._ids_form(resource, held.ids),
                            "AllocResp": base64.b64encode(held.response).decode(),
                        }
                    )
        registered = {r: sorted(ids) for r, ids in self.healthy.items()}
        data = {"PodDeviceEntries": entries or None, "RegisteredDevices": registered}
        body = json.dumps(data, separators=(",", ":"))
        text = f'{{"Data":{body},"Checksum":{zlib.crc32(body.encode())}}}'
        # As the kubelet does: a hidden temporary file beside it, then a rename.
        fd, temporary = tempfile.mkstemp(prefix=".", dir=self.directory)
        with os.fdopen(fd, "w") as f:
            f.write(text)
        os.replace(temporary, self.directory / CHECKPOINT)

    def _ids_form(self, resource: str, ids: set[str]) -> list[str] | dict[str, list[str]]:
        if self.checkpoint_form == "list":  # up to Kubernetes 1.19
            return sorted(ids)
        nodes = self._numa.get(resource, {})
        by_node: dict[str, list[str]] = {}
        for one in sorted(ids):
            by_node.setdefault(str(nodes.get(one, -1)), []).append(one)
        return by_node
