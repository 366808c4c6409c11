"""Pods, kubelet, agent, GPUs and cordons act in any order on the real servers; the books always balance.

The scheduler here is the real one's blindness: it lets a pod onto the node when the node's sums allow.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edgeagent.errors import KubeletError
from edgeagent.sharing.ledger import Placement
from edgeagent.sharing.tokens import Amounts, read_ids
from tests.fakes.kubelet import FAST, ContainerSpec, Pod, StandInKubelet
from tests.fakes.kubelet_side import CORES, MEMORY, NUMBER, Side, pretend_gpu

SIZES = (64, 32)  # MiB of the two GPUs: small, so that they fill up
MIB = st.integers(1, 48)
PERCENT = st.sampled_from([None, None, 10, 30, 60, 100])


def limits(mib: int, cores: int | None, number: bool) -> dict[str, int]:
    made = {MEMORY: mib}
    if cores is not None:
        made[CORES] = cores
    if number:
        made[NUMBER] = 1
    return made


class Node(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.kubelet = StandInKubelet(seed=5, timing=FAST.but(readmit_s=0.5))
        self.kubelet.start()
        self.side = Side(self.kubelet, [pretend_gpu(i, mib) for i, mib in enumerate(SIZES)], hold_seconds=1.0)
        self.pods: list[Pod] = []
        self.names = (f"p{n}" for n in itertools.count())
        self.kubelet.wait_for(self.side.registered)

    def teardown(self) -> None:
        self.side.stop()
        self.kubelet.close()

    # --- what happens ---

    def schedule(self, pod: Pod) -> None:
        """Only the sums count, as for the real scheduler."""
        asked = Counter[str]()
        for other in self.pods:
            if not other.finished:
                asked.update(other.requests())
        asked.update(pod.requests())
        if all(asked[r] <= self.kubelet.allocatable.get(r, 0) for r in pod.requests()):
            self.pods.append(self.kubelet.run(pod))

    @rule(mib=MIB, cores=PERCENT, number=st.booleans())
    def pod(self, mib: int, cores: int | None, number: bool) -> None:
        self.schedule(Pod(next(self.names), [ContainerSpec("app", limits(mib, cores, number))]))

    @rule(first=MIB, cores=PERCENT, apps=st.lists(MIB, min_size=1, max_size=2), sidecar=st.booleans())
    def pod_of_several(self, first: int, cores: int | None, apps: list[int], sidecar: bool) -> None:
        init = ContainerSpec(
            "init", limits(first, cores, False), sidecar=sidecar, run_s=None if sidecar else 0.02
        )
        containers = [ContainerSpec(f"app{i}", limits(mib, None, False)) for i, mib in enumerate(apps)]
        self.schedule(Pod(next(self.names), containers, init=[init]))

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        pod = self.pods.pop(data.draw(st.integers(0, len(self.pods) - 1)))
        self.kubelet.delete(pod)

    @precondition(lambda self: self.pods)
    @rule(data=st.data(), code=st.sampled_from([0, 1]))
    def container_ends(self, data: st.DataObject, code: int) -> None:
        pod = data.draw(st.sampled_from(self.pods))
        app = pod.apps[0]
        if app.running:
            before = app.restarts, len(app.instances)
            self.kubelet.exit(pod, app.name, code)
            self.kubelet.wait_for(lambda: not app.running or (app.restarts, len(app.instances)) != before)

    @rule(index=st.integers(0, 1))
    def gpu_falls_ill_or_recovers(self, index: int) -> None:
        ill = self.side.gpus[index].uuid in self.side.sick
        self.side.make_sick(index, None if ill else "XID 79")

    @rule(index=st.integers(0, 1))
    def cordon_or_not(self, index: int) -> None:
        self.side.cordon(index, self.side.gpus[index].uuid not in self.side.cordoned)

    @rule()
    def agent_restarts(self) -> None:
        self.side.restart()

    @rule()
    def kubelet_restarts(self) -> None:
        self.kubelet.restart()

    # --- what must be so ---

    def settled(self) -> bool:
        """Nothing is under way: who can run runs, who cannot waits and is listed as waiting."""
        gate = self.side.side.gate
        gate.sweep_once()
        if not self.side.registered() or not self.kubelet.devices.sources_ready:
            return False
        healthy = {r.name: r.healthy for r in self.side.side.resources()}
        if {r: self.kubelet.allocatable.get(r) for r in healthy} != healthy:
            return False
        waiting = {(w.pod_uid, w.container) for w in self.side.side.waiting()}
        live = {pod.uid for pod in self.pods}
        if {uid for uid, _ in waiting} - live or gate.read(lambda ledger, line, now_s: ledger.pods()) - live:
            return False
        for pod in self.pods:
            if pod.phase == "Failed":
                raise AssertionError(self.kubelet.cluster.describe())
            if pod.running:
                continue
            if not any((pod.uid, name) in waiting for name, c in pod.containers.items() if not c.running):
                return False
        # Nobody waits who could start.
        return not gate.read(
            lambda ledger, line, now_s: any(
                isinstance(line.place(w.key, w.demand, ledger, now_s, w.running, w.only), Placement)
                for w in line.waiters()
            )
        )

    @invariant()
    def the_books_balance(self) -> None:
        until = time.monotonic() + 30
        while not self.settled():
            if time.monotonic() > until:
                raise AssertionError(f"{self.kubelet.cluster.describe()}\n{self.side.side.waiting()}")
            threading.Event().wait(0.02)
        used = {gpu.uuid: Amounts() for gpu in self.side.gpus}
        shown = {(c.pod_uid, c.container): c for c in self.side.side.containers()}
        for pod in self.pods:
            for name, container in pod.containers.items():
                if not container.running or not container.spec.limits:
                    continue
                env: dict[str, Any] = container.env
                share = shown[pod.uid, name]
                wanted = container.spec.amounts()
                # What it has, what it was promised and what it asked for are the same.
                assert env["EDGEAGENT_GPU_UUID"] == share.gpu_uuid
                assert int(env["EDGEAGENT_MEMORY_MIB"]) == share.memory_mib == wanted[MEMORY]
                assert share.cores_pct == wanted.get(CORES)
                used[share.gpu_uuid] = used[share.gpu_uuid].plus(
                    Amounts(wanted[MEMORY], wanted.get(CORES, 0), 0)
                )
        for gpu, mib in zip(self.side.gpus, SIZES, strict=True):
            room = self.side.side.room(gpu.uuid)
            assert used[gpu.uuid].memory <= mib
            assert used[gpu.uuid].cores <= 100
            assert used[gpu.uuid].memory <= room.promised_mib <= mib
        self.agrees_with_podresources()

    def agrees_with_podresources(self) -> None:
        try:
            listed = self.side.side.pod_resources.list()
        except KubeletError:
            return
        held = self.side.side.gate.read(lambda ledger, line, now_s: ledger.held())
        for container in listed or ():
            mask = read_ids("m", sorted(container.devices.get(MEMORY, ())))
            assert mask & ~held.memory == 0, "the kubelet holds tokens that the ledger does not know"


Node.TestCase.settings = settings(
    max_examples=6, stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck)
)
TestNode = Node.TestCase
