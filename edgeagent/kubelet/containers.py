"""What runs on the node, as far as the gate needs it: is a pod alive, is one of its containers, and
what was that container really given."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from edgeagent.errors import NodeError
from edgeagent.hostroot import HostRoot
from edgeagent.node.cgroups import PodCgroups
from edgeagent.node.podlogs import PodLogs
from edgeagent.node.processes import Processes

log = logging.getLogger(__name__)

SHARE_ENV = "EDGEAGENT_SHARE"
CONTAINER_ENV = "EDGEAGENT_CONTAINER"
GPU_ENV = "EDGEAGENT_GPU_UUID"

_MAX_ENVIRON_BYTES = 256 * 1024


class Containers(Protocol):
    """None always means: cannot be told. Methods are quick and called from several threads."""

    def pod_alive(self, pod_uid: str) -> bool | None: ...

    def pod_name(self, pod_uid: str) -> tuple[str, str] | None:
        """(namespace, name)."""

    def pod_cgroup(self, pod_uid: str) -> str | None: ...

    def environments(self, pod_uid: str) -> Mapping[str, Mapping[str, str]] | None:
        """The environment with which each running container of the pod was started, by name."""

    def stop(self, pod_uid: str, container: str) -> bool:
        """Kills the container's processes; whether there were any."""


class HostContainers:
    """Containers of this host, from cgroups, /proc and the kubelet's log directories.

    A container's name is what its environment says (the share's own env), else what its log is called.
    """

    def __init__(self, host: HostRoot, cgroups: PodCgroups, logs: PodLogs, processes: Processes) -> None:
        self._host = host
        self._cgroups = cgroups
        self._logs = logs
        self._processes = processes

    def pod_alive(self, pod_uid: str) -> bool | None:
        return self._cgroups.pod_alive(pod_uid)

    def pod_name(self, pod_uid: str) -> tuple[str, str] | None:
        name = self._logs.pod(pod_uid)
        return (name.namespace, name.name) if name is not None else None

    def pod_cgroup(self, pod_uid: str) -> str | None:
        return self._cgroups.pod_dir(pod_uid)

    def environments(self, pod_uid: str) -> Mapping[str, Mapping[str, str]] | None:
        if self._cgroups.pod_dir(pod_uid) is None:
            return None if self._cgroups.pod_alive(pod_uid) is None else {}
        found: dict[str, Mapping[str, str]] = {}
        for container_id, pids in self._cgroups.containers(pod_uid).items():
            environment = next((e for pid in pids if (e := self._environ(pid)) is not None), None)
            if environment is None:
                continue
            name = environment.get(CONTAINER_ENV)
            if name is None:
                log_name = self._logs.container(container_id)
                name = log_name.container if log_name is not None else None
            if name is not None:
                found[name] = environment
        return found

    def stop(self, pod_uid: str, container: str) -> bool:
        stopped = False
        for container_id, pids in self._cgroups.containers(pod_uid).items():
            environment = next((e for pid in pids if (e := self._environ(pid)) is not None), {})
            log_name = self._logs.container(container_id)
            if container in (environment.get(CONTAINER_ENV), log_name.container if log_name else None):
                stopped = self._kill(pod_uid, container_id, pids) or stopped
        return stopped

    def _kill(self, pod_uid: str, container_id: str, pids: tuple[int, ...]) -> bool:
        directory = self._cgroups.container_dir(pod_uid, container_id)
        if directory is not None and self._host.exists(f"{directory}/cgroup.kill"):
            try:
                # All of it at once, and no PID can have become somebody else's.
                with self._host.path(f"{directory}/cgroup.kill").open("w") as file:
                    file.write("1")
                return True
            except OSError as e:
                log.info("cgroup.kill refused, signalling instead cgroup=%s error=%s", directory, e.strerror)
        stopped = False
        for pid in pids:
            process = self._processes.find(pid)
            if process is None or process.owner.pod_uid != pod_uid:
                continue
            try:
                stopped = self._processes.kill(process) or stopped
            except NodeError as e:
                log.warning("cannot stop container pod=%s container=%s: %s", pod_uid, container_id, e)
        return stopped

    def _environ(self, pid: int) -> dict[str, str] | None:
        data = self._host.read_bytes(f"/proc/{pid}/environ", _MAX_ENVIRON_BYTES)
        if not data:
            return None
        pairs = (item.partition("=") for item in data.decode("utf-8", "replace").split("\0"))
        return {key: value for key, equals, value in pairs if equals}
