"""The stand-in kubelet: real gRPC on real unix sockets under a root, pods without a cluster.

with StandInKubelet() as k:
    k.wait_for(lambda: k.allocatable.get("volcano.sh/vgpu-memory"))
    pod = k.run(Pod("a", [ContainerSpec("app", {"volcano.sh/vgpu-memory": "8k"})]))
    k.wait_for(lambda: pod.running)
    pod.containers["app"].env
"""

from __future__ import annotations

import random
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

import grpc

from edgeagent.kubelet.protos import deviceplugin as dp
from tests.fakes.kubelet import podresources
from tests.fakes.kubelet.cluster import Cluster
from tests.fakes.kubelet.devices import Call, DeviceError, DeviceManager, Interrupted, Update
from tests.fakes.kubelet.model import Pod
from tests.fakes.kubelet.runtime import Runtime
from tests.fakes.kubelet.sockets import UnixServer
from tests.fakes.kubelet.timing import FAST, Timing
from tests.fakes.kubelet.worker import PodWorker

DEVICE_PLUGINS = "var/lib/kubelet/device-plugins"
POD_RESOURCES = "var/lib/kubelet/pod-resources"

_RESOURCE = re.compile(r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")


class StandInKubelet:
    """One node. `root` (default: a directory of its own, removed at the end) is the agent's hostRoot;
    keep it short, unix socket paths end at 107 bytes.

    `seed` decides every random order; `choose(resource, available, needed)` replaces the random
    choice of IDs; `cgroups` and `cdi` are the runtime's (see there); `checkpoint_form` is "numa", or
    "list" as up to Kubernetes 1.19.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        seed: int = 0,
        timing: Timing = FAST,
        node_name: str = "edge-1",
        version: str = "v1.36.2",
        cgroups: str = "systemd-v2",
        cdi: bool = True,
        checkpoint_form: str = "numa",
        choose: Callable[[str, set[str], int], Iterable[str]] | None = None,
    ) -> None:
        self._own_root = root is None
        self.root = Path(tempfile.mkdtemp(prefix="node-")) if root is None else root
        self.timing = timing
        self.rng = random.Random(f"kubelet {seed}")
        self.cluster = Cluster(node_name, version=version, seed=seed)
        self.runtime = Runtime(self.root, self.cluster, cgroups=cgroups, cdi=cdi, seed=seed)
        self.directory = self.root / DEVICE_PLUGINS
        self.directory.mkdir(parents=True, exist_ok=True)
        self.registrations: list[dp.RegisterRequest] = []
        self.register_errors: list[str] = []
        self.fail_register: str | None = None  # set: Register is answered with this error
        self.stopping = threading.Event()
        self.stopping.set()
        self._checkpoint_form = checkpoint_form
        self._choose = choose
        self._calls: list[Call] = []
        self._updates: list[Update] = []
        self._servers: list[UnixServer] = []
        self._threads: list[threading.Thread] = []
        self._workers: list[PodWorker] = []
        self._taken_up: set[str] = set()  # UIDs of pods that this run of the kubelet has seen
        self._admitted: set[str] = set()  # those of them that it admitted
        self._admitting: Pod | None = None
        self.devices = self._new_devices()

    def __enter__(self) -> StandInKubelet:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Life.

    @property
    def up(self) -> bool:
        return not self.stopping.is_set()

    def start(self, *, refuse_s: float = 0.0) -> None:
        """Deletes every socket in the directory, reads the checkpoint, serves.

        `refuse_s`: kubelet.sock is there but refuses connections for so long.
        """
        assert not self.up, "the kubelet runs already"
        for path in self.directory.iterdir():
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink(missing_ok=True)
        self.stopping.clear()
        self.devices = self._new_devices()
        with self.cluster.lock:
            self.devices.load()
            restarted = any(p.admitted for p in self.cluster.bound())
            self.devices.sources_ready = not restarted
            self._taken_up.clear()
            self._admitted.clear()
            self._publish()
        registration = grpc.method_handlers_generic_handler(
            dp.REGISTRATION_SERVICE,
            {
                "Register": grpc.unary_unary_rpc_method_handler(
                    self._register,
                    request_deserializer=dp.RegisterRequest.FromString,
                    response_serializer=dp.Empty.SerializeToString,
                )
            },
        )
        lister = podresources.handler(self.devices, self.active_pods)
        pod_resources = self.root / POD_RESOURCES / "kubelet.sock"
        self._servers = [
            UnixServer(pod_resources, lister, name="kubelet-podresources"),
            UnixServer(
                self.directory / "kubelet.sock", registration, name="kubelet-registration", refuse_s=refuse_s
            ),
        ]
        self._spawn("kubelet-sync", lambda: self._sync(restarted))
        if self.timing.node_status_s > 0:
            self._spawn("kubelet-node-status", self._status_loop)

    def stop(self) -> None:
        """The kubelet ends: files, sockets and containers stay."""
        if not self.up:
            return
        with self.cluster.lock:
            self.stopping.set()
            for pod in self.cluster.bound():
                self.cluster.notify(pod)
            self.cluster.notify()
        self.devices.close()
        for server in self._servers:
            server.stop()
        self._servers = []
        threads = [*self._threads, *(w.thread for w in self._workers)]
        for thread in threads:
            thread.join()
        self._threads, self._workers = [], []

    def restart(self, *, refuse_s: float = 0.0) -> None:
        """Down and up again; containers run on."""
        self.stop()
        self.start(refuse_s=refuse_s)

    def reboot(self) -> None:
        """The node goes down and comes up: no container runs, /var/run is empty, the checkpoint is there."""
        self.stop()
        self.runtime.reboot()
        for pod in self.cluster.bound():
            for container in pod.init:
                if container.role == "init" and not pod.finished:  # these run again with the pod
                    container.state, container.reason = "waiting", "ContainerCreating"
        self.start()

    def close(self) -> None:
        self.stop()
        self.runtime.close()
        if self._own_root:
            shutil.rmtree(self.root, ignore_errors=True)

    # What tests ask and do.

    @property
    def allocatable(self) -> dict[str, int]:
        """As the API shows it (late by `timing.node_status_s`)."""
        return self.cluster.node.allocatable

    @property
    def capacity(self) -> dict[str, int]:
        return self.cluster.node.capacity

    @property
    def calls(self) -> list[Call]:
        """Every call to a plugin, over all restarts."""
        return [*self._calls, *self.devices.calls]

    @property
    def updates(self) -> list[Update]:
        """Every list received, over all restarts."""
        return [*self._updates, *self.devices.updates]

    def run(self, pod: Pod) -> Pod:
        """Puts a pod on the node without a scheduler."""
        return self.cluster.create(pod, bind=True)

    def delete(self, pod: Pod) -> None:
        self.cluster.delete(pod)

    def exit(self, pod: Pod, container: str, code: int = 0) -> None:
        """A container of a pod ends."""
        for instance in self.runtime.running(pod, container):
            self.runtime.exit(instance, code)

    def wait_for(self, predicate: Callable[[], object], timeout_s: float = 10.0) -> None:
        """See Cluster.wait_for."""
        self.cluster.wait_for(predicate, timeout_s)

    def ids(self, pod: Pod, container: str) -> dict[str, set[str]]:
        """Which IDs a container holds, by resource."""
        return {r: set(h.ids) for r, h in self.devices.held(pod.uid, container).items()}

    def resource_health(self, pod: Pod) -> dict[str, dict[str, dict[str, str]]]:
        """allocatedResourcesStatus (from 1.36 on by default): container -> resource -> ID -> health.

        IDs that have left the list, or whose plugin died, keep what was last said of them.
        """
        with self.cluster.lock:
            shown: dict[str, dict[str, dict[str, str]]] = {}
            for name in pod.containers:
                for resource, held in self.devices.held(pod.uid, name).items():
                    known = self.devices.listed_health.get(resource, {})
                    health = {one: known.get(one, "Unknown") for one in sorted(held.ids)}
                    shown.setdefault(name, {})[resource] = health
            return shown

    def active_pods(self) -> list[Pod]:
        """Pods that count for the device manager: taken up, not finished, not rejected."""
        with self.cluster.lock:
            return [p for p in self.cluster.bound() if self._counts(p)]

    def _counts(self, pod: Pod) -> bool:
        if pod.rejected or pod.finished or pod.stopped:
            return False
        if pod.deleted and not self.runtime.running(pod):
            return False
        return pod.uid in self._admitted or pod is self._admitting

    # Registration.

    def _register(self, request: dp.RegisterRequest, context: grpc.ServicerContext) -> dp.Empty:
        problem = self.fail_register
        if problem is None and request.version != dp.VERSION:
            problem = (
                f'requested API version "{request.version}" is not supported by kubelet. '
                f'Supported version is ["{dp.VERSION}"]'
            )
        if problem is None and not _RESOURCE.match(request.resource_name):
            problem = f'the ResourceName "{request.resource_name}" is invalid'
        if problem is None:
            try:
                self.devices.register(request.resource_name, self.directory / request.endpoint)
            except (DeviceError, Interrupted) as e:
                problem = f"failed to dial device plugin: {e}"
        with self.cluster.lock:
            if problem is None:
                self.registrations.append(request)
            else:
                self.register_errors.append(problem)
            self.cluster.notify()
        if problem is not None:
            context.abort(grpc.StatusCode.UNKNOWN, problem)
        return dp.Empty()

    # The sync loop: one thread admits all pods, one after the other.

    def _sync(self, restarted: bool) -> None:
        if restarted and self.stopping.wait(self.timing.readmit_s):
            return
        first = True
        while True:
            with self.cluster.lock:
                while not self.stopping.is_set() and not (batch := self._new_pods()):
                    if first:
                        break
                    left = self.devices.grace_left_s()
                    self.cluster.changed.wait(None if left is None else max(left, 0.0) + 0.001)
                    if left is not None:
                        self._publish()
                if self.stopping.is_set():
                    return
                self._taken_up.update(p.uid for p in batch)
                self._workers = [w for w in self._workers if w.thread.is_alive()]
            # Admission order is not creation order.
            self.rng.shuffle(batch)
            for pod in batch:
                try:
                    self._admit(pod)
                except Interrupted:
                    return
            if first:
                first = False
                with self.cluster.lock:
                    self.devices.sources_ready = True

    def _new_pods(self) -> list[Pod]:
        return [p for p in self.cluster.bound() if p.uid not in self._taken_up]

    def _admit(self, pod: Pod) -> None:
        with self.cluster.lock:
            finished = pod.finished or pod.rejected
            if pod.deleted and not self.runtime.running(pod) and not self.runtime.pod_cgroup(pod):
                self.cluster.remove(pod)
                return
            self._admitting = pod
        try:
            for container in (*pod.init, *pod.apps):
                if finished or pod.deleted or (container.state == "terminated"):
                    continue
                self.devices.allocate(pod, container, self.stopping.is_set)
        except DeviceError as e:
            self._reject(pod, f"Allocate failed due to {e}, which is unexpected")
        finally:
            with self.cluster.lock:
                self._admitting = None
        with self.cluster.lock:
            if self.stopping.is_set():
                raise Interrupted("the kubelet stops")
            if not pod.rejected:
                pod.admitted = True
                self._admitted.add(pod.uid)
            worker = PodWorker(self, pod)
            self._workers.append(worker)
            worker.thread.start()
            self.cluster.notify()

    def _reject(self, pod: Pod, why: str) -> None:
        with self.cluster.lock:
            pod.phase, pod.reason, pod.message = (
                "Failed",
                "UnexpectedAdmissionError",
                f"Pod was rejected: {why}",
            )
            pod.rejected = pod.stopped = True
            for container in pod.containers.values():
                container.state, container.reason = "terminated", "ContainerStatusUnknown"
            self.cluster.event(pod, "Warning", "UnexpectedAdmissionError", why, source="kubelet")

    # The node's sums.

    def _new_devices(self) -> DeviceManager:
        if hasattr(self, "devices"):
            self._calls, self._updates = self.calls, self.updates
        return DeviceManager(
            self.directory,
            self.cluster,
            self.timing,
            self.rng,
            active=lambda: {p.uid for p in self.active_pods()},
            running=self._runs,
            changed=self._devices_changed,
            checkpoint_form=self._checkpoint_form,
            choose=self._choose,
        )

    def _runs(self, uid: str, container: str) -> bool:
        return any(i.pod.uid == uid and i.container == container for i in self.runtime.instances.values())

    def _devices_changed(self) -> None:
        if self.timing.node_status_s <= 0:
            self._publish()
        self.cluster.notify()

    def _publish(self) -> None:
        with self.cluster.lock:
            node = self.cluster.node
            sums = self.devices.capacity()
            if (node.capacity, node.allocatable) != sums:
                node.capacity, node.allocatable = sums
                self.cluster.notify()

    def _status_loop(self) -> None:
        while not self.stopping.wait(self.timing.node_status_s):
            self._publish()

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
