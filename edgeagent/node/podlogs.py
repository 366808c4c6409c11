"""Names of pods and containers from the kubelet's log directories: no API server, no CRI socket.

The kubelet makes `/var/log/pods/NAMESPACE_POD_UID/` for every pod and, once a container has started,
the link `/var/log/containers/POD_NAMESPACE_CONTAINER-ID.log`.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from edgeagent.hostroot import HostRoot

_POD_DIR = re.compile(r"^([a-z0-9.-]+)_([a-z0-9.-]+)_([0-9a-f-]{32,36})$")
_CONTAINER_LOG = re.compile(r"^([a-z0-9.-]+)_([a-z0-9.-]+)_([a-z0-9.-]+)-([0-9a-f]{64})\.log$")
_MISS_S = 1.0


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
    """Looks names up; directories are listed again only after a miss, at most once a second."""

    def __init__(
        self,
        host: HostRoot,
        pod_log_dir: str = "/var/log/pods",
        container_log_dir: str = "/var/log/containers",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._pod_dir = pod_log_dir
        self._container_dir = container_log_dir
        self._clock = clock
        self._lock = threading.Lock()
        self._pods: dict[str, PodName] = {}
        self._containers: dict[str, ContainerName] = {}
        self._pods_at: float | None = None
        self._containers_at: float | None = None

    def pod(self, pod_uid: str) -> PodName | None:
        with self._lock:
            if pod_uid not in self._pods and self._due(self._pods_at):
                self._pods_at = self._clock()
                self._pods = {
                    m.group(3): PodName(m.group(1), m.group(2))
                    for name in self._names(self._pod_dir)
                    if (m := _POD_DIR.match(name))
                }
            return self._pods.get(pod_uid)

    def container(self, container_id: str) -> ContainerName | None:
        """Name of a started container; None for the sandbox's pause container, which has no log."""
        with self._lock:
            if container_id not in self._containers and self._due(self._containers_at):
                self._containers_at = self._clock()
                self._containers = {
                    m.group(4): ContainerName(PodName(m.group(2), m.group(1)), m.group(3))
                    for name in self._names(self._container_dir)
                    if (m := _CONTAINER_LOG.match(name))
                }
            return self._containers.get(container_id)

    def _due(self, last: float | None) -> bool:
        return last is None or self._clock() - last >= _MISS_S

    def _names(self, directory: str) -> list[str]:
        try:
            return os.listdir(self._host.path(directory))
        except OSError:
            return []
