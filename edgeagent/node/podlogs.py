"""Names of pods and containers from the kubelet's log directories: no API server, no CRI socket.

The kubelet makes `/var/log/pods/NAMESPACE_POD_UID/` for every pod and, once a container has started,
the link `/var/log/containers/POD_NAMESPACE_CONTAINER-ID.log`.
"""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass

from edgeagent.hostroot import HostRoot

_POD_DIR = re.compile(r"^([a-z0-9.-]+)_([a-z0-9.-]+)_([0-9a-f-]{32,36})$")
_CONTAINER_LOG = re.compile(r"^([a-z0-9.-]+)_([a-z0-9.-]+)_([a-z0-9.-]+)-([0-9a-f]{64})\.log$")
_MTIME_GRAIN_NS = 50_000_000  # two changes within a kernel tick can have the same time


@dataclass(frozen=True, slots=True)
class PodName:
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ContainerName:
    pod: PodName
    container: str


class PodLogs:
    """Looks names up; a directory is listed again after a miss when it has changed since."""

    def __init__(
        self,
        host: HostRoot,
        pod_log_dir: str = "/var/log/pods",
        container_log_dir: str = "/var/log/containers",
    ) -> None:
        self._host = host
        self._pod_dir = pod_log_dir
        self._container_dir = container_log_dir
        self._lock = threading.Lock()
        self._pods: dict[str, PodName] = {}
        self._containers: dict[str, ContainerName] = {}
        self._listed: dict[str, int] = {}  # directory -> its mtime when it was listed

    def pod(self, pod_uid: str) -> PodName | None:
        with self._lock:
            if pod_uid not in self._pods and self._changed(self._pod_dir):
                self._pods = {
                    m.group(3): PodName(m.group(1), m.group(2))
                    for name in self._names(self._pod_dir)
                    if (m := _POD_DIR.match(name))
                }
            return self._pods.get(pod_uid)

    def container(self, container_id: str) -> ContainerName | None:
        """Name of a started container; None for the sandbox's pause container, which has no log."""
        with self._lock:
            if container_id not in self._containers and self._changed(self._container_dir):
                self._containers = {
                    m.group(4): ContainerName(PodName(m.group(2), m.group(1)), m.group(3))
                    for name in self._names(self._container_dir)
                    if (m := _CONTAINER_LOG.match(name))
                }
            return self._containers.get(container_id)

    def _changed(self, directory: str) -> bool:
        try:
            mtime_ns = os.stat(self._host.path(directory)).st_mtime_ns
        except OSError:
            return False
        if self._listed.get(directory) == mtime_ns and time.time_ns() - mtime_ns > _MTIME_GRAIN_NS:
            return False
        self._listed[directory] = mtime_ns
        return True

    def _names(self, directory: str) -> list[str]:
        try:
            return os.listdir(self._host.path(directory))
        except OSError:
            return []
