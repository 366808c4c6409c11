"""What puts pods on the node: a scheduler that sees only the node's sums, and a Deployment."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import TracebackType

from tests.fakes.kubelet.cluster import Cluster
from tests.fakes.kubelet.model import Pod


class _Controller:
    """A named thread that works whenever the cluster changes; `with` starts and ends it."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self._stop = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self):  # type: ignore[no-untyped-def]  # Self is 3.11+
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.cluster.lock:
            self._stop = True
            self.cluster.notify()
        self._thread.join()

    def _run(self) -> None:
        with self.cluster.lock:
            while not self._stop:
                self.cluster.changed.wait(self._work())

    def _work(self) -> float | None:
        """Called under the lock after every change; seconds until it is to be called again anyway."""
        raise NotImplementedError


class Scheduler(_Controller):
    """Binds pending pods for which the node's allocatable minus all requests suffices.

    It knows nothing of GPUs. `order`: "fifo" (what does not fit does not hold up others) or "random".
    """

    def __init__(self, cluster: Cluster, *, order: str = "fifo", seed: int = 0) -> None:
        super().__init__(cluster, "scheduler")
        self._order = order
        self._rng = random.Random(f"scheduler {seed}")

    def _work(self) -> float | None:
        waiting = [p for p in self.cluster.pods.values() if p.node_name is None]
        if self._order == "random":
            self._rng.shuffle(waiting)
        for pod in waiting:
            missing = self._missing(pod)
            if not missing:
                pod.reason = pod.message = None
                self.cluster.bind(pod)
                continue
            message = f"0/1 nodes are available: {', '.join(f'1 Insufficient {r}' for r in missing)}."
            if pod.message != message:
                pod.reason, pod.message = "Unschedulable", message
                self.cluster.event(pod, "Warning", "FailedScheduling", message, source="default-scheduler")
        return None

    def _missing(self, pod: Pod) -> list[str]:
        requested = self.cluster.requested()
        free = {r: n - requested.get(r, 0) for r, n in self.cluster.node.allocatable.items()}
        devices = {r: n for r, n in pod.requests().items() if "/" in r}
        return sorted(r for r, n in devices.items() if n > free.get(r, 0))


class Deployment(_Controller):
    """Keeps `replicas` pods of `template(name)` going; failed ones stay around and are replaced.

    As measured it does so without back-off: `burst` at once, then `per_second`. `most` ends a storm.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        template: Callable[[str], Pod],
        replicas: int = 1,
        *,
        per_second: float = 10.0,
        burst: int = 14,
        most: int = 1000,
    ) -> None:
        super().__init__(cluster, f"deployment {name}")
        self.name = name
        self.replicas = replicas
        self.pods: list[Pod] = []
        self._template = template
        self._per_second = per_second
        self._most = most
        self._burst = float(burst)
        self._tokens = float(burst)
        self._filled_s = time.monotonic()

    @property
    def living(self) -> list[Pod]:
        return [p for p in self.pods if not p.finished and not p.gone and not p.deleted]

    @property
    def failed(self) -> list[Pod]:
        return [p for p in self.pods if p.phase == "Failed"]

    def scale(self, replicas: int) -> None:
        with self.cluster.lock:
            self.replicas = replicas
            self.cluster.notify()

    def _work(self) -> float | None:
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_s) * self._per_second)
        self._filled_s = now
        for pod in self.living[self.replicas :][::-1]:
            self.cluster.delete(pod)
        while len(self.living) < self.replicas and len(self.pods) < self._most:
            if self._tokens < 1:
                return (1 - self._tokens) / self._per_second
            self._tokens -= 1
            pod = self._template(f"{self.name}-{len(self.pods):04d}")
            pod.owner = self.name
            self.pods.append(pod)
            self.cluster.create(pod)
        return None
