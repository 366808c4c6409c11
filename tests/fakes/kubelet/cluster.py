"""What the API server holds: pods, events and one node, and the lock and condition of everything.

Every change notifies `changed`, so whoever waits for a state waits for an event, never for a time.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable

from tests.fakes.kubelet.model import Event, Node, Pod


class Cluster:
    """One node's view of a cluster. `lock` guards it and all that the kubelet keeps."""

    def __init__(self, node_name: str = "edge-1", *, version: str = "v1.36.2", seed: int = 0) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.version = version
        self.node = Node(node_name)
        self.pods: dict[tuple[str, str], Pod] = {}  # replaced, never changed: reading needs no lock
        self.events: list[Event] = []
        self._changes = 0
        self._rng = random.Random(f"uids {seed}")

    def notify(self, pod: Pod | None = None) -> None:
        """Something changed. Who looks after a pod wakes only when that pod is named."""
        with self.lock:
            self._changes += 1
            self.changed.notify_all()
            if pod is not None and pod.changed is not None:
                pod.changed.notify_all()

    def new_uid(self) -> str:
        return str(uuid.UUID(int=self._rng.getrandbits(128), version=4))

    # Pods.

    def create(self, pod: Pod, *, bind: bool = False) -> Pod:
        """Adds a pod; `bind` puts it on the node without asking a scheduler."""
        with self.lock:
            if pod.key in self.pods:
                raise ValueError(f"pod {pod.namespace}/{pod.name} exists")
            names = [c.name for c in (*pod.init, *pod.apps)]
            if len(set(names)) != len(names):
                raise ValueError(f"container names of {pod.name} are not unique")
            pod.uid = pod.uid or self.new_uid()
            pod.changed = threading.Condition(self.lock)
            self.pods = {**self.pods, pod.key: pod}
            if bind:
                pod.node_name = self.node.name
            self.notify()
        return pod

    def bind(self, pod: Pod) -> None:
        with self.lock:
            pod.node_name = self.node.name
            self.event(pod, "Normal", "Scheduled", f"Successfully assigned {pod.name} to {self.node.name}",
                       source="default-scheduler")  # fmt: skip

    def delete(self, pod: Pod) -> None:
        """Asks for a pod's deletion. One that no kubelet has taken up is gone at once."""
        with self.lock:
            pod.deleted = True
            if pod.node_name is None:
                self.remove(pod)
            self.notify(pod)

    def remove(self, pod: Pod) -> None:
        with self.lock:
            pod.gone = True
            if self.pods.get(pod.key) is pod:
                self.pods = {key: p for key, p in self.pods.items() if p is not pod}
            self.notify(pod)

    def bound(self) -> list[Pod]:
        with self.lock:
            return [p for p in self.pods.values() if p.node_name == self.node.name]

    def requested(self) -> dict[str, int]:
        """What the pods on the node ask for, finished ones not counted."""
        total: dict[str, int] = {}
        for pod in self.bound():
            if not pod.finished:
                for resource, amount in pod.requests().items():
                    total[resource] = total.get(resource, 0) + amount
        return total

    # Events.

    def event(self, about: Pod | Node, type_: str, reason: str, message: str, *, source: str) -> None:
        with self.lock:
            pod = about if isinstance(about, Pod) else None
            new = Event(
                "Pod" if pod else "Node", pod.namespace if pod else "default", about.name,
                pod.uid if pod else about.name, type_, reason, message, source,
            )  # fmt: skip
            for old in self.events:
                if (old.kind, old.uid, old.reason, old.message) == (new.kind, new.uid, reason, message):
                    old.count += 1
                    break
            else:
                self.events.append(new)
            self.notify()

    def events_of(self, pod: Pod, reason: str | None = None) -> list[Event]:
        with self.lock:
            return [e for e in self.events if e.uid == pod.uid and reason in (None, e.reason)]

    # Waiting.

    def wait_for(self, predicate: Callable[[], object], timeout_s: float = 10.0) -> None:
        """Returns when `predicate` is true; TimeoutError with the state otherwise.

        Changes here wake it. It also looks every 50 ms, for predicates about things outside. The
        lock is not held meanwhile, so a predicate may ask the kubelet through its sockets.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self.lock:
                seen = self._changes
            if predicate():
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"not true after {timeout_s} s; {self.describe()}")
            with self.lock:
                if self._changes == seen:
                    self.changed.wait(min(left, 0.05))

    def describe(self) -> str:
        with self.lock:
            lines = [f"node allocatable {self.node.allocatable}"]
            lines += [repr(p) for p in self.pods.values()]
            return "\n  ".join(lines)
