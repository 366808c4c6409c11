"""The container runtime: what containers are made with, and what the host shows of them.

`Instance` is one start of one container; what it ended up with is what tests look at.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.kubelet import inotify
from tests.fakes.kubelet.cdi import CdiCache, Edits, RuntimePanic, UnresolvableDevices
from tests.fakes.kubelet.cluster import Cluster
from tests.fakes.kubelet.hosttree import HostTree
from tests.fakes.kubelet.model import Container, Pod

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _base_env(pod: Pod) -> dict[str, str]:
    return {"PATH": _PATH, "HOSTNAME": pod.name}


class CreateError(Exception):
    """A container cannot be made; `reason` is the one that its waiting state shows."""

    def __init__(self, message: str, reason: str = "CreateContainerError") -> None:
        self.reason = reason
        super().__init__(message)


@dataclass(frozen=True)
class MountPoint:
    host_path: str
    read_only: bool = False
    options: tuple[str, ...] = ()


@dataclass
class RunOptions:
    """What the kubelet adds to a container for its devices."""

    env: dict[str, str] = field(default_factory=dict)
    mounts: dict[str, MountPoint] = field(default_factory=dict)  # by container path
    devices: dict[str, tuple[str, str]] = field(default_factory=dict)  # container path -> host path, "rwm"
    annotations: dict[str, str] = field(default_factory=dict)
    cdi_devices: list[str] = field(default_factory=list)


@dataclass
class Instance:
    """One start of a container. Ends at `exit_code` not None.

    `env` is without PATH and HOSTNAME, which the process of every container has too.
    """

    id: str
    pod: Pod
    container: str
    cgroup: str  # as /proc/<pid>/cgroup shows it
    pids: list[int]
    env: dict[str, str]
    devices: dict[str, tuple[str, str]]  # container path -> host path, permissions
    mounts: dict[str, MountPoint]
    annotations: dict[str, str]
    cdi_devices: list[str]
    hooks: list[dict[str, object]]
    ends_at_s: float | None = None
    exit_code: int | None = None

    @property
    def pid(self) -> int:
        """Its first process."""
        return self.pids[0]


class Runtime:
    """A containerd with the kubelet's cgroups, under `root`. `cdi` False: as 1.x, CDI names are ignored.

    `stale_reads`: so many of the next starts get what a changed CDI device was before (seen on 1 of
    45 starts of a loaded containerd). Takes the cluster's lock itself.
    """

    def __init__(self, root: Path, cluster: Cluster, *, cgroups: str = "systemd-v2", cdi: bool = True,
                 seed: int = 0) -> None:  # fmt: skip
        self.root = root
        self.cluster = cluster
        self.host = HostTree(root, cgroups)
        self.cdi = cdi
        self.cdi_cache = CdiCache([root / "etc/cdi", root / "var/run/cdi"])
        self.stale_reads = 0
        self.instances: dict[str, Instance] = {}  # running ones, by ID
        self._sandboxes: dict[str, tuple[str, Instance]] = {}  # pod UID -> pod cgroup, pause container
        self._rng = random.Random(f"runtime {seed}")
        self._kills = _KillWatch(self)

    def close(self) -> None:
        self._kills.close()
        with self.cluster.lock:
            self.cdi_cache.close()

    # Pods.

    def create_pod(self, pod: Pod) -> None:
        """The pod's cgroup, its pause container and its log directory. Idempotent."""
        with self.cluster.lock:
            self.host.log_directory(*pod.key, pod.uid).mkdir(parents=True, exist_ok=True)
            if pod.uid in self._sandboxes:
                return
            cgroup = self.host.pod_cgroup(pod.uid, pod.qos)
            self.host.make_cgroup(cgroup)
            pause = self._new_instance(pod, "", cgroup, RunOptions(), comm="pause")
            self._sandboxes[pod.uid] = (cgroup, pause)

    def pod_cgroup(self, pod: Pod) -> str | None:
        """The pod's cgroup as /proc shows it, while it stands."""
        with self.cluster.lock:
            sandbox = self._sandboxes.get(pod.uid)
            return sandbox[0] if sandbox else None

    def stop_pod(self, pod: Pod) -> None:
        """Ends all containers of a pod; the pod's cgroup stays."""
        with self.cluster.lock:
            for instance in self.running(pod):
                self.exit(instance, 137)
            if pod.uid in self._sandboxes:
                self._end(self._sandboxes[pod.uid][1], 0)

    def remove_pod(self, pod: Pod) -> None:
        """Removes the pod's cgroup."""
        with self.cluster.lock:
            self.stop_pod(pod)
            sandbox = self._sandboxes.pop(pod.uid, None)
            if sandbox is not None:
                self.host.remove_cgroup(sandbox[0])
            self.cluster.notify()

    def remove_logs(self, pod: Pod) -> None:
        self.host.remove_logs(*pod.key, pod.uid)

    def reboot(self) -> None:
        """All containers and cgroups are gone, and so is what lies in /var/run."""
        with self.cluster.lock:
            for uid in list(self._sandboxes):
                cgroup, pause = self._sandboxes.pop(uid)
                for instance in list(self.instances.values()):
                    if instance.pod.uid == uid:
                        self._end(instance, 255)
                self._end(pause, 0)
                self.host.remove_cgroup(cgroup)
            shutil.rmtree(self.root / "var/run", ignore_errors=True)
            self.host.boot()
            self.cluster.notify()

    # Containers.

    def running(self, pod: Pod, container: str | None = None) -> list[Instance]:
        with self.cluster.lock:
            return [
                i
                for i in self.instances.values()
                if i.pod is pod and i.container and container in (None, i.container)
            ]

    def start(self, pod: Pod, container: Container, options: RunOptions) -> Instance:
        """Makes and starts a container. CreateError where containerd or runc would fail."""
        spec = container.spec
        with self.cluster.lock:
            env = {**spec.image_env, **options.env, **spec.env}  # the pod's own env wins over the plugin's
            mounts, devices = dict(options.mounts), dict(options.devices)
            for path, (host_path, _) in devices.items():
                if not self._on_host(host_path).exists():
                    raise CreateError(
                        f'failed to generate spec: device "{path}": lstat {host_path}: no such file or directory'
                    )
            for mount in mounts.values():
                if not self._on_host(mount.host_path).exists():
                    self._on_host(mount.host_path).mkdir(parents=True)
            hooks: list[dict[str, object]] = []
            if self.cdi and options.cdi_devices:
                for edits in self._cdi_edits(options.cdi_devices):
                    self._apply(edits, env, mounts, devices, hooks)
            annotations = {**options.annotations}
            shown = RunOptions(env, mounts, devices, annotations, list(options.cdi_devices))
            cgroup = self._sandboxes[pod.uid][0]
            instance = self._new_instance(pod, spec.name, cgroup, shown, comm=spec.name)
            instance.hooks.extend(hooks)
            if spec.run_s is not None:
                instance.ends_at_s = time.monotonic() + spec.run_s
            self.host.make_log(*pod.key, pod.uid, spec.name, instance.id, container.restarts)
            container.instances.append(instance)
            self.cluster.notify(pod)
            return instance

    def exit(self, instance: Instance, code: int = 0) -> None:
        """The container's first process ends, and so all of it."""
        with self.cluster.lock:
            self._end(instance, code)
            self.cluster.notify(instance.pod)

    def spawn(self, instance: Instance, comm: str, *, env: Mapping[str, str] | None = None,
              maps: Iterable[str] = ()) -> int:  # fmt: skip
        """One more process in a container; its number."""
        with self.cluster.lock:
            pid = self.host.new_pid()
            self.host.make_process(
                pid, cgroup=instance.cgroup, comm=comm, maps=maps, devices=instance.devices,
                env={**_base_env(instance.pod), **instance.env, **(env or {})},
                pid_in_container=len(instance.pids) + 1,
            )  # fmt: skip
            instance.pids.append(pid)
            self.host.set_procs(instance.cgroup, instance.pids)
            return pid

    def map_library(self, instance: Instance, path: str) -> None:
        """The container's processes load a library."""
        for pid in instance.pids:
            self.host.map_file(pid, path)

    # How it is done.

    def _on_host(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _cdi_edits(self, names: list[str]) -> list[Edits]:
        """Edits in the order in which they are applied: a spec's own before its first device's."""
        stale = self.stale_reads > 0
        self.stale_reads -= stale
        try:
            resolved = self.cdi_cache.resolve(names, stale=stale)
        except UnresolvableDevices as e:
            raise CreateError(
                f"failed to create containerd container: CDI device injection failed: {e}"
            ) from e
        except RuntimePanic as e:
            raise CreateError(
                "rpc error: code = Unavailable desc = connection error: containerd.sock: connection refused"
                f" (panic: slice bounds out of range: {e})"
            ) from e
        edits: list[Edits] = []
        specs: list[int] = []
        for one in resolved:
            if id(one.spec) not in specs:
                specs.append(id(one.spec))
                edits.append(one.spec.edits)
            edits.append(one.edits)
        return edits

    def _apply(
        self,
        edits: Edits,
        env: dict[str, str],
        mounts: dict[str, MountPoint],
        devices: dict[str, tuple[str, str]],
        hooks: list[dict[str, object]],
    ) -> None:
        for entry in edits.env:
            name, _, value = entry.partition("=")
            env[name] = value
        for node in edits.device_nodes:
            host_path = node.get("hostPath") or node["path"]
            described = node.get("type") and (node.get("major") or node["type"] == "p")
            if not described and not self._on_host(host_path).exists():
                raise CreateError(
                    "failed to create containerd container: CDI device injection failed: failed to stat CDI "
                    f'host device "{host_path}": no such file or directory'
                )
            devices[node["path"]] = (host_path, node.get("permissions") or "rwm")
        for mount in edits.mounts:
            if not self._on_host(mount["hostPath"]).exists():
                raise CreateError(
                    f'failed to create shim task: error mounting "{mount["hostPath"]}" to rootfs at '
                    f'"{mount["containerPath"]}": no such file or directory',
                    reason="RunContainerError",
                )
            options = tuple(mount.get("options") or ())
            mounts[mount["containerPath"]] = MountPoint(mount["hostPath"], "ro" in options, options)
        hooks.extend(edits.hooks)

    def _new_instance(self, pod: Pod, name: str, cgroup: str, given: RunOptions, comm: str) -> Instance:
        container_id = f"{self._rng.getrandbits(256):064x}"
        leaf = self.host.leaf_cgroup(cgroup, container_id)
        pid = self.host.new_pid()
        self.host.make_cgroup(leaf)
        env = {**_base_env(pod), **given.env} if name else {"PATH": _PATH}
        self.host.make_process(pid, cgroup=leaf, comm=comm, env=env, devices=given.devices)
        self.host.set_procs(leaf, [pid])
        instance = Instance(
            container_id, pod, name, leaf, [pid], given.env, given.devices, given.mounts, given.annotations,
            given.cdi_devices, [],
        )  # fmt: skip
        self.instances[container_id] = instance
        if name:
            self._kills.add(instance)
        return instance

    def _end(self, instance: Instance, code: int) -> None:
        if self.instances.pop(instance.id, None) is None:
            return
        instance.exit_code = code
        for pid in instance.pids:
            self.host.remove_process(pid)
        self.host.remove_cgroup(instance.cgroup)


class _KillWatch:
    """Writing "1" to a container's cgroup.kill ends it, as the kernel does (cgroup v2)."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._watched: dict[int, Instance] = {}
        self._thread: threading.Thread | None = None
        if not runtime.host.v2:
            return
        try:
            self._inotify = inotify.Inotify()
        except OSError:
            return  # cgroup.kill then has no effect
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="runtime-kill", daemon=True)
        self._thread.start()

    def add(self, instance: Instance) -> None:
        if self._thread is not None:
            path = self._runtime.host.directories(instance.cgroup)[0] / "cgroup.kill"
            self._watched[self._inotify.watch(path, inotify.MODIFY)] = instance

    def close(self) -> None:
        if self._thread is not None:
            os.write(self._wake_write, b"x")
            self._thread.join()
            self._thread = None
            self._inotify.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._inotify.fd, self._wake_read], [], [])
            if self._wake_read in ready:
                return
            with self._runtime.cluster.lock:
                for number, mask, _ in self._inotify.read():
                    if mask & inotify.IGNORED:
                        self._watched.pop(number, None)
                    elif number in self._watched:
                        self._runtime.exit(self._watched[number], 137)
