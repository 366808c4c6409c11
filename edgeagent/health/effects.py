"""What health does in the cluster: Events on pods and the node, node labels, evictions.

Everything is put into a queue and done by one service thread, so that an API server that is slow, far
or absent can never hold up health, the kubelet or the uplink.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid as uuids
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, Protocol

from edgeagent.config import HealthConfig, KubernetesConfig
from edgeagent.errors import NodeError
from edgeagent.health.conditions import FATAL
from edgeagent.health.labels import label_patch
from edgeagent.health.monitor import HealthChange, HealthState
from edgeagent.node.apiserver import ApiStatusError, PodRef
from edgeagent.snapshot import Condition

log = logging.getLogger(__name__)

COMPONENT = "edgeagent"
MAX_JOBS = 256
RETRY_S = (5.0, 300.0)
EVENT_MAX_AGE_S = 3600.0
REPEAT_S = 600.0  # the same Event again only after this
LABELS_RESYNC_S = 600.0

_FATAL = frozenset(kind.value for kind in FATAL)


class Cluster(Protocol):
    """The part of node.apiserver.ApiServer that is used here. Raises NodeError."""

    def node_labels(self, name: str) -> dict[str, str]: ...

    def patch_node_labels(self, name: str, labels: Mapping[str, str | None]) -> None: ...

    def create_event(self, namespace: str, event: Mapping[str, Any]) -> None: ...

    def evict_pod(self, pod: PodRef) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Job:
    """An Event to write (`pod` None: on the node) or, with `evict`, a pod to evict."""

    reason: str
    message: str
    warning: bool = True
    pod: PodRef | None = None
    evict: bool = False
    at_s: float = 0.0  # monotonic
    at_unix_s: float = 0.0
    not_before_s: float = 0.0
    tries: int = 0


class Effects:
    """`pods_on(uuid)` names the pods that hold a share of a GPU. The methods only queue; they can be
    called from any thread and never block."""

    def __init__(
        self,
        cluster: Cluster,
        node_name: str,
        kubernetes: KubernetesConfig,
        health: HealthConfig,
        pods_on: Callable[[str], tuple[PodRef, ...]],
        mono: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._node = node_name
        self._kubernetes = kubernetes
        self._health = health
        self._pods_on = pods_on
        self._mono = mono
        self._unix = unix
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._jobs: deque[_Job] = deque()
        self._told: dict[tuple[str, str, str], float] = {}
        self._doomed: dict[str, float] = {}  # GPU -> when its pods are evicted
        self._evicted: set[str] = set()
        self._wanted_labels: Mapping[str, str] | None = None
        self._labels_due_s = 0.0
        self.problem: str | None = None  # why the API server could not be told, last time
        self._label_failures = 0
        self._reachable: bool | None = None
        self.counters = {
            "kubernetes_events_total": 0,
            "kubernetes_evictions_total": 0,
            "kubernetes_dropped_total": 0,
        }

    # -- asked for ----------------------------------------------------------------------------------

    def configure(self, kubernetes: KubernetesConfig, health: HealthConfig) -> None:
        with self._lock:
            self._kubernetes, self._health = kubernetes, health

    def health_changed(self, state: HealthState, change: HealthChange) -> None:
        """A listener of HealthMonitor."""
        for c in change.raised:
            self._about(c, c.type, c.message, c.severity != "info")
        for c in change.cleared:
            self._about(c, f"{c.type}Cleared", f"No longer true: {c.message}", False)
        now = self._mono()
        with self._lock:
            for uuid, gpu in state.gpus.items():
                fatal = any(c.type in _FATAL and c.makes_unhealthy for c in gpu.conditions)
                if not fatal:
                    self._doomed.pop(uuid, None)
                elif self._health.on_fatal == "evict":
                    self._doomed.setdefault(uuid, now + self._health.grace_seconds)
        self._wake.set()

    def event(self, reason: str, message: str, pod: PodRef | None = None, warning: bool = True) -> None:
        """An Event on the node, or on a pod."""
        if self._kubernetes.events:
            self._add(_Job(reason, message, warning, pod))

    def evict(self, pod: PodRef, reason: str, message: str) -> None:
        """Ends a pod gracefully through the Eviction API, with an Event that says why."""
        with self._lock:
            if pod.uid in self._evicted:
                return
            self._evicted.add(pod.uid)
        self.event(reason, message, pod)
        self._add(_Job(reason, message, True, pod, evict=True))

    def set_labels(self, labels: Mapping[str, str]) -> None:
        """The labels the node should have; sent when they differ from what it has."""
        if not self._kubernetes.labels:
            return
        with self._lock:
            if labels != self._wanted_labels:
                self._wanted_labels = dict(labels)
                self._labels_due_s = 0.0
                self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    def _about(self, c: Condition, reason: str, message: str, warning: bool) -> None:
        self.event(reason, message, None, warning)
        if c.gpu_uuid is not None and c.makes_unhealthy:
            for pod in self._pods_on(c.gpu_uuid):
                self.event(reason, message, pod, warning)

    def _add(self, job: _Job) -> None:
        now = self._mono()
        with self._lock:
            if not job.evict:
                key = (job.pod.uid if job.pod else "", job.reason, job.message)
                if now - self._told.get(key, float("-inf")) < REPEAT_S:
                    return
                self._told = {k: t for k, t in self._told.items() if now - t < REPEAT_S}
                self._told[key] = now
            if len(self._jobs) >= MAX_JOBS:
                victim = next((j for j in self._jobs if not j.evict), self._jobs[0])
                self._jobs.remove(victim)
                self.counters["kubernetes_dropped_total"] += 1
            self._jobs.append(replace(job, at_s=now, at_unix_s=self._unix()))
        self._wake.set()

    # -- done ---------------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Does what was asked for, in order, until `stop`."""
        while not stop.is_set():
            self._wake.wait(self.work())
            self._wake.clear()

    def work(self) -> float | None:
        """Does everything that is due now; returns after how many seconds the next thing is due (None:
        nothing is waiting)."""
        self._evict_the_doomed()
        self._send_labels()
        now = self._mono()
        with self._lock:
            due = [j for j in self._jobs if j.not_before_s <= now]
        for job in due:
            self._do(job)
        with self._lock:
            times = [j.not_before_s for j in self._jobs]
            times += self._doomed.values()
            if self._wanted_labels is not None:
                times.append(self._labels_due_s)
        return max(0.05, min(times) - self._mono()) if times else None

    def _evict_the_doomed(self) -> None:
        now = self._mono()
        with self._lock:
            due = [uuid for uuid, at_s in self._doomed.items() if at_s <= now]
        for uuid in due:
            for pod in self._pods_on(uuid):
                self.evict(
                    pod, "GpuFailed", f"evicted because its GPU {uuid} failed and did not come back in time"
                )
            with self._lock:
                if uuid in self._doomed:
                    # Looked at again: pods may be bound to it later (none should be).
                    self._doomed[uuid] = now + RETRY_S[1]

    def _do(self, job: _Job) -> None:
        try:
            if job.evict and job.pod is not None:
                done = self._cluster.evict_pod(job.pod)
                log.info("pod evicted pod=%s/%s still_there=%s", job.pod.namespace, job.pod.name, done)
                self.counters["kubernetes_evictions_total"] += done
            else:
                self._cluster.create_event(job.pod.namespace if job.pod else "default", self._event_body(job))
                self.counters["kubernetes_events_total"] += 1
        except NodeError as e:
            self._failed(job, e)
            return
        self._reached()
        with self._lock:
            if job in self._jobs:
                self._jobs.remove(job)

    def _failed(self, job: _Job, e: NodeError) -> None:
        refused = isinstance(e, ApiStatusError) and e.status in (400, 403, 404, 422)
        too_old = not job.evict and self._mono() - job.at_s > EVENT_MAX_AGE_S
        self._unreachable(e)
        pause_s = min(RETRY_S[1], RETRY_S[0] * 2.0 ** min(job.tries, 10))
        again = replace(job, tries=job.tries + 1, not_before_s=self._mono() + pause_s)
        with self._lock:
            if job not in self._jobs:
                return
            self._jobs.remove(job)
            if refused or too_old:
                self.counters["kubernetes_dropped_total"] += 1
            else:
                self._jobs.append(again)

    def _send_labels(self) -> None:
        now = self._mono()
        with self._lock:
            wanted = self._wanted_labels
            if wanted is None or now < self._labels_due_s:
                return
        try:
            patch = label_patch(self._cluster.node_labels(self._node), wanted)
            if patch:
                self._cluster.patch_node_labels(self._node, patch)
                log.info("node labels changed labels=%s", ",".join(sorted(patch)))
            self._reached()
            self._label_failures = 0
            pause_s = LABELS_RESYNC_S
        except NodeError as e:
            self._unreachable(e)
            pause_s = min(RETRY_S[1], RETRY_S[0] * 2.0 ** min(self._label_failures, 10))
            self._label_failures += 1
        with self._lock:
            if wanted is self._wanted_labels:
                self._labels_due_s = now + pause_s

    def _event_body(self, job: _Job) -> dict[str, Any]:
        at = datetime.fromtimestamp(job.at_unix_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        if job.pod is not None:
            about: dict[str, str] = {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": job.pod.namespace,
                "name": job.pod.name,
                "uid": job.pod.uid,
            }
        else:
            # As the kubelet does: a node's Events carry its name as UID.
            about = {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": self._node}
        return {
            "metadata": {"name": f"{about['name'][:200]}.{uuids.uuid4().hex[:16]}"},
            "involvedObject": about,
            "reason": job.reason,
            "message": job.message[:1024],
            "type": "Warning" if job.warning else "Normal",
            "source": {"component": COMPONENT, "host": self._node},
            "reportingComponent": COMPONENT,
            "reportingInstance": self._node,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }

    def _reached(self) -> None:
        if self._reachable is False:
            log.info("the API server answers again")
        self._reachable = True
        self.problem = None

    def _unreachable(self, e: NodeError) -> None:
        first = self._reachable is not False
        log.log(logging.WARNING if first else logging.DEBUG, "cannot tell the cluster reason=%s", e)
        self._reachable = False
        self.problem = str(e)
