"""What happens to the node: pods, GPUs, links, kubelet, configuration and the agent itself, by a seed."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable

from edgeagent.errors import ControlError
from tests.fakes.kubelet import Pod
from tests.fakes.nvml import driver
from tests.fakes.whole import WholeNode, container
from tests.soak.invariants import Invariants

MAX_PODS = 9


class Churn:
    """`step` does one thing. Faults are mended by themselves after a while; `mend` mends all now."""

    def __init__(self, node: WholeNode, invariants: Invariants, seed: int) -> None:
        self.node = node
        self.invariants = invariants
        self.rng = random.Random(f"soak {seed}")
        self.done: Counter[str] = Counter()
        self.deaths_allowed = True
        self._number = 0
        self._mend_at: list[tuple[float, str, Callable[[], object]]] = []
        self._actions: list[tuple[int, str, Callable[[], object]]] = [
            (30, "pod created", self._create),
            (22, "pod deleted", self._delete),
            (8, "container exit", self._exit),
            (2, "GPU lost", self._lose),
            (2, "XID storm", self._xids),
            (1, "GPU hot", self._heat),
            (1, "driver call hangs", self._hang),
            (2, "link cut", self._cut),
            (1, "link refused", self._refuse),
            (1, "link stalled", self._stall),
            (1, "link half open", self._half_open),
            (1, "kubelet restart", self._kubelet),
            (2, "reload", self._reload),
            (1, "cordon", self._cordon),
            (1, "agent killed", self._kill),
            (1, "agent stopped", self._stop),
        ]

    def step(self) -> None:
        now_s = time.monotonic()
        for item in [m for m in self._mend_at if m[0] <= now_s]:
            self._mend_at.remove(item)
            self._undo(item[2])
        weights = [w for w, _, _ in self._actions]
        _, name, act = self.rng.choices(self._actions, weights)[0]
        if act() is not False:
            self.done[name] += 1
            self.invariants.note(name)

    def _undo(self, how: Callable[[], object]) -> None:
        self.invariants.fault()
        how()
        self.invariants.fault()

    def mend(self) -> None:
        for item in self._mend_at:
            self._undo(item[2])
        self._mend_at.clear()

    def _later(self, name: str, how: Callable[[], object], low_s: float = 1.0, high_s: float = 4.0) -> None:
        self.invariants.fault()
        self._mend_at.append((time.monotonic() + self.rng.uniform(low_s, high_s), name, how))

    def _under_way(self, name: str) -> bool:
        return any(n == name for _, n, _ in self._mend_at)

    # -- pods --

    def _create(self) -> bool:
        if len(self.node.kubelet.cluster.pods) >= MAX_PODS:
            return False
        rng = self.rng
        self._number += 1

        def size() -> int:
            return rng.choice((200, 700, 1500, 4000, 9000, 14000))

        def cores() -> int | None:
            return rng.choice((None, 10, 30, 60, 100) if rng.random() < 0.5 else (None, 10, 30))

        run_s = rng.choice((None, None, rng.uniform(0.5, 3.0)))
        number = rng.choice((None, None, 1))
        apps = [container("app", size(), cores(), number=number, run_s=run_s)]
        init = []
        if rng.random() < 0.25:
            apps.append(container("second", rng.choice((200, 700, 1500)), None))
        if rng.random() < 0.25:
            init.append(container("init", rng.choice((200, 1500, 4000)), run_s=rng.uniform(0, 0.3)))
        if rng.random() < 0.15:
            init.insert(0, container("side", 300, sidecar=True))
        if rng.random() < 0.1:
            apps.append(container("plain"))
        policy = "Always" if run_s is None else rng.choice(("Always", "Never", "OnFailure"))
        pod = Pod(f"p{self._number}", apps, init=init, restart_policy=policy)
        self.node.kubelet.cluster.create(pod)
        return True

    def _delete(self) -> bool:
        pods = [p for p in self.node.kubelet.cluster.pods.values() if not p.deleted]
        if not pods:
            return False
        finished = [p for p in pods if p.finished]
        self.node.kubelet.delete(self.rng.choice(finished or pods))
        return True

    def _exit(self) -> bool:
        running = [p for p in self.node.kubelet.cluster.pods.values() if p.running]
        if not running:
            return False
        pod = self.rng.choice(running)
        self.node.kubelet.exit(pod, self.rng.choice(pod.apps).name, self.rng.choice((0, 1, 139)))
        return True

    # -- GPUs --

    def _healthy_gpu(self) -> str | None:
        """At most one GPU is ill at a time: with all ill there is nothing to see."""
        return None if self._under_way("gpu") else self.rng.choice(self.node.gpus)

    def _lose(self) -> bool:
        uuid = self._healthy_gpu()
        if uuid is None:
            return False
        self.node.nvml.lose(uuid, self.rng.choice((driver.GPU_IS_LOST, driver.RESET_REQUIRED)))
        self._later("gpu", lambda: self.node.nvml.recover(uuid))
        return True

    def _xids(self) -> bool:
        uuid = self._healthy_gpu()
        if uuid is None:
            return False
        for _ in range(self.rng.choice((1, 40))):
            self.node.nvml.xid(uuid, self.rng.choice((13, 31, 43, 45, 48, 63, 79)))
        self._later("gpu", lambda: None, 1.0, 2.0)
        return True

    def _heat(self) -> bool:
        uuid = self._healthy_gpu()
        if uuid is None:
            return False
        self.node.nvml.set(uuid, temperature_c=97)
        self._later("gpu", lambda: self.node.nvml.set(uuid, temperature_c=50))
        return True

    def _hang(self) -> bool:
        uuid = self._healthy_gpu()
        if uuid is None:
            return False
        self.node.nvml.hang("nvmlDeviceGetUtilizationRates", uuid)
        self._later("gpu", self.node.nvml.release)
        return True

    def _cordon(self) -> bool:
        if self._under_way("cordon"):
            return False
        uuid = self.rng.choice(self.node.gpus)
        if not self._ask("cordon", gpu=uuid):
            return False
        self._later("cordon", lambda: self._until(lambda: self._ask("uncordon", gpu=uuid)))
        return True

    # -- links --

    def _cut(self) -> None:
        self.node.proxy.cut()

    def _refuse(self) -> bool:
        if self._under_way("link"):
            return False
        self.node.proxy.refuse(True)
        self.node.proxy.cut()
        self._mend_at.append((time.monotonic() + 2.0, "link", lambda: self.node.proxy.refuse(False)))
        return True

    def _stall(self) -> bool:
        if self._under_way("link"):
            return False
        self.node.proxy.stall(True)
        self._mend_at.append((time.monotonic() + 2.0, "link", lambda: self.node.proxy.stall(False)))
        return True

    def _half_open(self) -> None:
        self.node.proxy.half_open()

    # -- kubelet, configuration, the agent itself --

    def _kubelet(self) -> None:
        self.invariants.fault()
        self.node.kubelet.restart(refuse_s=self.rng.choice((0, 0.3)))
        self._registered()

    def _reload(self) -> bool:
        config = self.node.config
        config["gpus"]["pollSeconds"] = self.rng.choice((0.2, 0.3, 0.5))
        config.setdefault("sharing", {})["placement"] = self.rng.choice(("binpack", "spread"))
        self.node.agent.write_config(config)
        if self.rng.random() < 0.5:
            self.node.agent.signal(signal.SIGHUP)
            return True
        return self._ask("reload")

    def _kill(self) -> bool:
        if self.deaths_allowed:
            self.invariants.kill_comes()
        return self._restart_agent(self.node.agent.kill)

    def _stop(self) -> bool:
        return self._restart_agent(self.node.agent.stop)

    def _restart_agent(self, end: Callable[[], object]) -> bool:
        if not self.deaths_allowed:
            return False
        self.invariants.fault()
        end()
        self.node.agent.start().wait_ready()
        self.invariants.fault()
        self._registered()
        return True

    def _registered(self) -> None:
        self._until(lambda: self.node.agent.snapshot()["kubeletConnected"])
        self.invariants.fault()

    def _ask(self, verb: str, **args: str) -> bool:
        try:
            self.node.agent.call(verb, **args)
        except ControlError:
            return False
        return True

    def _until(self, condition: Callable[[], object], timeout_s: float = 15.0) -> None:
        """Keeps looking at the invariants meanwhile."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if condition():
                    return
            except ControlError:
                pass
            assert time.monotonic() < deadline, (
                f"not so after {timeout_s} s:\n{self.node.agent.log()[-3000:]}"
            )
            self.invariants.fault()
            self.invariants.look()

    # -- the end --

    def drain(self) -> None:
        """No fault left, no pod left."""
        self.mend()
        cluster = self.node.kubelet.cluster
        for pod in list(cluster.pods.values()):
            self.node.kubelet.delete(pod)
        cluster.wait_for(lambda: not cluster.pods, 30)
