"""One pod on the node: starts its containers in order, restarts them, ends them. A thread of its own."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from tests.fakes.kubelet.devices import DeviceError, Interrupted
from tests.fakes.kubelet.model import Container, Pod
from tests.fakes.kubelet.runtime import CreateError
from tests.fakes.kubelet.timing import at

if TYPE_CHECKING:
    from tests.fakes.kubelet.kubelet import StandInKubelet

_SOURCE = "kubelet"


class PodWorker:
    """Runs until the pod is finished or gone, or the kubelet stops (containers then run on)."""

    def __init__(self, kubelet: StandInKubelet, pod: Pod) -> None:
        self._k = kubelet
        self._cluster = kubelet.cluster
        self._runtime = kubelet.runtime
        self.pod = pod
        self.thread = threading.Thread(target=self._run, name=f"kubelet-pod {pod.name}", daemon=True)

    def _stopping(self) -> bool:
        return self._k.stopping.is_set()

    def _interrupted(self) -> bool:
        return self._stopping() or self.pod.deleted

    def _run(self) -> None:
        pod, changed = self.pod, self.pod.changed
        assert changed is not None
        with self._cluster.lock:
            if not self._interrupted() and not pod.finished:
                self._runtime.create_pod(pod)
        while True:
            with self._cluster.lock:
                while True:
                    if self._stopping():
                        return
                    if not pod.finished:
                        self._note_exits()
                    if pod.deleted or pod.finished or self._finish():
                        break
                    candidates = self._to_start()
                    now = time.monotonic()
                    container = next((c for c in candidates if c.start_at_s <= now), None)
                    if container is not None:
                        break
                    changed.wait(self._until_next(candidates, now))
            if pod.deleted or pod.finished:
                break
            assert container is not None
            self._start(container)
        if pod.deleted:
            self._terminate()
        else:
            self._after_the_end()

    def _until_next(self, candidates: list[Container], now: float) -> float | None:
        """Seconds until a container is due to start or to end by itself; None: only a change wakes us."""
        times = [c.start_at_s for c in candidates]
        times += [i.ends_at_s for i in self._runtime.running(self.pod) if i.ends_at_s is not None]
        return max(0.0, min(times) - now) if times else None

    # What is to be done. Called under the lock.

    def _to_start(self) -> list[Container]:
        """Containers that should run and do not, in order, up to the first that others wait for."""
        found: list[Container] = []
        for c in self.pod.init:
            if c.role == "sidecar":
                if not c.running:
                    found.append(c)
                if not c.instances:
                    return found
            elif not self._done(c):
                return found if c.running else [*found, c]
        return [*found, *(c for c in self.pod.apps if not c.running and not self._done(c))]

    def _done(self, c: Container) -> bool:
        return c.state == "terminated"

    def _note_exits(self) -> None:
        now = time.monotonic()
        for instance in self._runtime.running(self.pod):
            if instance.ends_at_s is not None and instance.ends_at_s <= now:
                self._runtime.exit(instance, 0)
        for c in self.pod.containers.values():
            if c.running and c.instance.exit_code is not None:
                self._exited(c, c.instance.exit_code)
        running = [c for c in self.pod.apps if c.running]
        ready = all(c.running if c.role == "sidecar" else self._done(c) for c in self.pod.init)
        if running and ready and self.pod.phase == "Pending":
            self.pod.phase = "Running"
            self._cluster.notify()

    def _exited(self, c: Container, code: int) -> None:
        policy = self.pod.restart_policy
        again = c.role == "sidecar" or policy == "Always" or (policy == "OnFailure" and code != 0)
        if c.role == "init":
            again = code != 0 and policy != "Never"
        c.exit_code = code
        if again:
            wait = at(self._k.timing.restart_backoff_s, c.restarts)
            c.restarts += 1
            c.failed_starts = 0
            c.start_at_s = time.monotonic() + wait
            c.state, c.reason, c.message = "waiting", "ContainerCreating", None
            if wait > 0:
                c.reason = "CrashLoopBackOff"
                c.message = f"back-off {wait:g}s restarting failed container={c.name} pod={self.pod.name}"
        else:
            c.state, c.reason, c.message = "terminated", "Completed" if code == 0 else "Error", None
        self._cluster.notify()

    def _finish(self) -> bool:
        """Sets the pod's last phase when nothing of it is to run again."""
        pod = self.pod
        failed_init = any(c.role == "init" and self._done(c) and c.exit_code for c in pod.init)
        if not failed_init and not all(self._done(c) for c in pod.apps):
            return False
        failed = failed_init or any(c.exit_code for c in pod.apps)
        self._runtime.stop_pod(pod)
        for c in pod.containers.values():
            if c.running:  # sidecars
                c.state, c.reason, c.exit_code = "terminated", "Completed", c.instance.exit_code
        pod.phase = "Failed" if failed else "Succeeded"
        pod.stopped = True
        self._cluster.notify()
        return True

    # Doing it. Called without the lock.

    def _start(self, c: Container) -> None:
        pod = self.pod
        try:
            self._k.devices.pre_start(pod, c, self._interrupted)
            options = self._k.devices.run_options(pod, c)
            with self._cluster.lock:
                if self._interrupted():
                    return
                self._runtime.start(pod, c, options)
                c.state, c.reason, c.message, c.exit_code = "running", None, None, None
                c.failed_starts = 0
                self._cluster.event(pod, "Normal", "Started", f"Started container {c.name}", source=_SOURCE)
        except Interrupted:
            return
        except DeviceError as e:
            self._failed(c, "CreateContainerConfigError", str(e))
        except CreateError as e:
            self._failed(c, e.reason, str(e))

    def _failed(self, c: Container, reason: str, message: str) -> None:
        with self._cluster.lock:
            c.reason, c.message = reason, message
            c.start_at_s = time.monotonic() + at(self._k.timing.start_retry_s, c.failed_starts)
            c.failed_starts += 1
            self._cluster.event(self.pod, "Warning", "Failed", f"Error: {message}", source=_SOURCE)

    def _terminate(self) -> None:
        """The pod is being deleted: its containers, then its cgroup, then the object in the API."""
        if self._runtime.running(self.pod) and self._k.stopping.wait(self._k.timing.termination_s):
            return
        self._runtime.stop_pod(self.pod)
        with self._cluster.lock:
            self.pod.stopped = True
        self._runtime.remove_pod(self.pod)
        self._runtime.remove_logs(self.pod)
        self._cluster.remove(self.pod)

    def _after_the_end(self) -> None:
        """A finished pod: its cgroup goes a moment later, its object when somebody deletes it."""
        pod, changed = self.pod, self.pod.changed
        assert changed is not None
        self._k.stopping.wait(self._k.timing.cgroup_gone_s)
        self._runtime.remove_pod(pod)
        with self._cluster.lock:
            changed.wait_for(self._interrupted)
        if pod.deleted:
            self._runtime.remove_logs(pod)
            self._cluster.remove(pod)
