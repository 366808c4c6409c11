"""The link to the cluster's API server: made when it can be had, never needed.

K3s may start after the agent, or never; until credentials are found, what health wants to tell the
cluster is only kept as the latest state. The HTTP library is imported when there is something to talk to.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from edgeagent.config import Config
from edgeagent.errors import NodeError
from edgeagent.health.effects import Effects
from edgeagent.health.monitor import HealthChange, HealthState
from edgeagent.hostroot import HostRoot
from edgeagent.node.apiserver import ApiServer, PodRef, find_credentials
from edgeagent.node.k3s import find_k3s

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 30.0


class ClusterLink:
    """`run` is a service; everything else returns at once. `seen(version)`: the API server answered."""

    def __init__(
        self,
        config: Config,
        host: HostRoot,
        node_name: str,
        pods_on: Callable[[str], tuple[PodRef, ...]],
        seen: Callable[[str], None],
    ) -> None:
        self._config = config
        self._host = host
        self._seen = seen
        self._api = ApiServer(lambda: find_credentials(host, config.kubernetes.kubeconfig))
        self._effects = Effects(self._api, node_name, config.kubernetes, config.health, pods_on)
        self._not_yet: str | None = None
        self.k3s_version: str | None = None

    @property
    def counters(self) -> dict[str, int]:
        return self._effects.counters

    @property
    def problem(self) -> str | None:
        """Why the API server cannot be reached now."""
        return self._not_yet or self._effects.problem

    def configure(self, config: Config) -> None:
        self._effects.configure(config.kubernetes, config.health)

    def health_changed(self, state: HealthState, change: HealthChange) -> None:
        self._effects.health_changed(state, change)

    def pod_event(self, reason: str, message: str, pod: PodRef) -> None:
        self._effects.event(reason, message, pod)

    def evict(self, pod: PodRef, reason: str, message: str) -> None:
        self._effects.evict(pod, reason, message)

    def set_labels(self, labels: dict[str, str]) -> None:
        self._effects.set_labels(labels)

    def wake(self) -> None:
        self._effects.wake()

    def run(self, stop: threading.Event) -> None:
        k3s = find_k3s(self._host)
        if k3s is not None:
            self.k3s_version = k3s.version
        told = False
        while not stop.is_set():
            try:
                find_credentials(self._host, self._config.kubernetes.kubeconfig)
                self._seen(self._api.server_version())
                self._not_yet = None
                break
            except NodeError as e:
                self._not_yet = str(e)
                log.log(logging.DEBUG if told else logging.INFO, "no API server yet: %s", e)
                told = True
            stop.wait(LOOK_AGAIN_S)
        try:
            self._effects.run(stop)
        finally:
            self._api.close()
