"""A kubelet, a scheduler that knows sums only, pods, faults and restarts act on the pure core at random.

The model keeps its own account of what runs where. Whatever the order of events: no GPU is over-promised,
no container is on two GPUs, no token means two things, and nobody who could start keeps waiting.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgeagent.sharing.ledger import ContainerKey, GpuCapacity, Ledger, Placement, Refusal, RefusalCode
from edgeagent.sharing.tokens import Amounts, Demand, full, numbers
from edgeagent.sharing.waiting import WaitingLine

SOME = st.builds(
    Amounts, st.sampled_from([1, 2, 3, 4, 6, 9]), st.sampled_from([0, 0, 10, 40, 100]), st.integers(0, 1)
)
WHOLE = st.just(Amounts(0, 0, 1))
WANTS = st.sampled_from([SOME] * 9 + [WHOLE]).flatmap(lambda want: want)


@dataclass
class Container:
    key: ContainerKey
    demand: Demand
    kind: str  # "init" | "sidecar" | "app"
    state: str = "new"  # "new" | "waiting" | "running" | "down" | "ended"


@dataclass
class Pod:
    uid: str
    containers: list[Container]
    dead: bool = False

    def holds(self) -> Demand:
        total = Demand()
        for c in self.containers:
            total |= c.demand
        return total


@dataclass
class Kubelet:
    """Hands out tokens at random from those it believes free and Healthy."""

    random: Random
    pods: dict[str, Pod] = field(default_factory=dict)
    forgotten: Demand = field(default_factory=Demand)  # given out, and believed free (the double hand-out)

    def taken(self) -> Demand:
        total = Demand()
        for pod in self.pods.values():
            if not pod.dead:
                total |= pod.holds()
        return total - self.forgotten

    def pick(self, free: int, reusable: int, count: int) -> int | None:
        first = list(numbers(reusable))
        self.random.shuffle(first)
        rest = list(numbers(free & ~reusable))
        self.random.shuffle(rest)
        chosen = (first + rest)[:count]
        return sum(1 << n for n in chosen) if len(chosen) == count else None


class SharingMachine(RuleBasedStateMachine):
    @initialize(
        sizes=st.lists(st.integers(6, 20), min_size=1, max_size=3),
        policy=st.sampled_from(["binpack", "spread"]),
        seed=st.integers(0, 2**16),
    )
    def boot(self, sizes: list[int], policy: str, seed: int) -> None:
        self.random = Random(seed)
        self.policy = policy
        self.gpus = {f"GPU-{i}": GpuCapacity(f"GPU-{i}", size, shares=4) for i, size in enumerate(sizes)}
        self.absent: set[str] = set()
        self.kubelet = Kubelet(self.random)
        self.placed: dict[ContainerKey, tuple[Demand, str]] = {}  # persisted, in the order of binding
        self.on: dict[ContainerKey, Placement] = {}  # what really runs where
        self.serial = 0
        self.now_s = 0.0
        self.offered = Amounts()
        self.new_agent()

    def new_agent(self) -> None:
        self.ledger = Ledger(policy=self.policy)
        self.line = WaitingLine(reserve_after_s=60, forget_after_s=300)
        self.show_gpus()
        self.offered = self.ledger.offered

    def show_gpus(self) -> None:
        self.ledger.set_capacities(c for uuid, c in self.gpus.items() if uuid not in self.absent)

    def living(self) -> list[Pod]:
        return [p for p in self.kubelet.pods.values() if not p.dead]

    # --- pods ---

    @rule(
        init=st.one_of(st.none(), WANTS),
        sidecar=st.one_of(st.none(), WANTS),
        apps=st.lists(WANTS, min_size=1, max_size=3),
        at_once=st.booleans(),
    )
    def admit(
        self, init: Amounts | None, sidecar: Amounts | None, apps: list[Amounts], at_once: bool
    ) -> None:
        self.serial += 1
        uid = f"pod{self.serial}"
        wants = [(kind, want) for kind, want in (("sidecar", sidecar), ("init", init)) if want]
        wants += [("app", want) for want in apps]
        unhealthy = self.ledger.unhealthy()
        taken = self.kubelet.taken()
        containers: list[Container] = []
        reusable = own = Demand()
        for i, (kind, want) in enumerate(wants):
            masks = []
            for mine, bad, held, again, offered, count in zip(
                _masks(own),
                _masks(unhealthy),
                _masks(taken),
                _masks(reusable),
                self.offered,
                want,
                strict=True,
            ):
                free = full(offered) & ~bad & ~held & ~(mine & ~again)
                masks.append(self.kubelet.pick(free, again, count))
            if None in masks:
                return  # the scheduler would not have sent it
            demand = Demand(*masks)
            own |= demand
            if kind == "init":
                reusable = demand
            else:
                reusable -= demand
            containers.append(Container(ContainerKey(uid, f"{kind}{i}"), demand, kind))
        self.kubelet.pods[uid] = Pod(uid, containers)
        self.kubelet.forgotten -= own
        for container in containers:
            self.ledger.grant(container.demand)
        if at_once:
            self.kubelet_syncs()

    @precondition(lambda self: self.not_started())
    @rule()
    def kubelet_syncs(self) -> None:
        """The kubelet starts what can start: init containers one after the other, then the others."""
        for pod in self.living():
            for container in pod.containers:
                if container.state in ("new", "waiting", "down"):
                    self.start(container)
                if container.state == "running" and container.kind == "init":
                    self.stop(container, "ended")
                if container.state not in ("running", "ended") and container.kind != "app":
                    break  # what comes after it has to wait

    def not_started(self) -> list[Container]:
        waiting = ("new", "waiting", "down")
        return [c for pod in self.living() for c in pod.containers if c.state in waiting]

    def start(self, container: Container) -> None:
        key, demand = container.key, container.demand
        running = [k.container for k in self.on if k.pod_uid == key.pod_uid and k != key]
        answer = self.line.place(key, demand, self.ledger, self.now_s, running)
        if isinstance(answer, Placement):
            self.line.leave(key)
            self.run(container, answer)
        else:
            if answer.permanent:
                assert answer.code is RefusalCode.TOO_LARGE
                largest = max(
                    (c.memory_units for u, c in self.gpus.items() if u not in self.absent), default=0
                )
                assert demand.amounts.memory > largest
            self.line.join(key, demand, answer, self.now_s, running)
            container.state = "waiting"

    def run(self, container: Container, placement: Placement) -> None:
        self.ledger.bind(container.key, container.demand, placement.uuid)
        again = self.ledger.bind(container.key, container.demand, placement.uuid)
        assert again == self.ledger.booking(container.key)
        gpu = self.gpus[placement.uuid]
        assert not gpu.sick
        assert placement.uuid not in self.absent
        self.on[container.key] = placement
        self.placed.pop(container.key, None)
        self.placed[container.key] = (container.demand, placement.uuid)
        container.state = "running"

    def stop(self, container: Container, state: str) -> None:
        self.on.pop(container.key, None)
        container.state = state
        if state == "ended":
            self.ledger.retire(container.key)

    @precondition(lambda self: self.on)
    @rule(data=st.data())
    def container_restarts(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.on)), label="container")
        container = next(c for c in self.kubelet.pods[key.pod_uid].containers if c.key == key)
        before = self.on[key]
        self.stop(container, "down")
        self.start(container)
        gpu = self.gpus[before.uuid]
        if not gpu.sick and before.uuid not in self.absent:
            assert container.state == "running", "a restart has its own room"
            assert self.on[key].uuid == before.uuid

    @precondition(lambda self: len(self.on) > 1)
    @rule(data=st.data())
    def sandbox_dies(self, data: st.DataObject) -> None:
        pod = data.draw(st.sampled_from(self.living()), label="pod")
        for container in pod.containers:
            self.stop(container, "down")
            self.line.leave(container.key)

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def pod_ends(self, data: st.DataObject) -> None:
        """The kubelet has its IDs back at once; the agent learns of it later (`agent_sees_ends`)."""
        pod = data.draw(st.sampled_from(self.living()), label="pod")
        pod.dead = True
        self.kubelet.forgotten -= pod.holds()
        for container in pod.containers:
            self.on.pop(container.key, None)
            self.placed.pop(container.key, None)

    @precondition(lambda self: len(self.living()) < len(self.kubelet.pods))
    @rule()
    def agent_sees_ends(self) -> None:
        for uid in [uid for uid, pod in self.kubelet.pods.items() if pod.dead]:
            self.ledger.release_pod(uid)
            self.line.leave_pod(uid)
            del self.kubelet.pods[uid]
        self.ledger.settle(self.kubelet.taken())
        self.wake()

    @precondition(lambda self: len(self.on) > 1)
    @rule(data=st.data())
    def kubelet_forgets(self, data: st.DataObject) -> None:
        """The double hand-out: IDs of a living pod are given out again."""
        pod = data.draw(st.sampled_from(self.living()), label="pod")
        self.kubelet.forgotten |= pod.holds()

    # --- waiting ---

    @precondition(lambda self: self.line.waiters())
    @rule(seconds=st.sampled_from([1.0, 30.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        for waiter in self.line.waiters():
            if self.random.random() < 0.5:
                self.line.call_ended(waiter.key, self.now_s)
        self.line.forget(self.now_s)

    def wake(self) -> None:
        while start := self.line.next_start(self.ledger, self.now_s):
            waiter, placement = start
            pod = self.kubelet.pods[waiter.key.pod_uid]
            container = next(c for c in pod.containers if c.key == waiter.key)
            assert self.line.leave(waiter.key)
            if pod.dead:
                self.ledger.bind(waiter.key, waiter.demand, placement.uuid)
                continue
            # The kubelet would not have started it while an init container of the pod runs: nothing does.
            self.run(container, placement)
            if container.kind == "init":
                self.stop(container, "ended")
        for waiter in self.line.waiters():
            if waiter.in_call and not waiter.refusal.permanent:
                answer = self.line.place(waiter.key, waiter.demand, self.ledger, self.now_s, waiter.running)
                assert isinstance(answer, Refusal)

    # --- GPUs ---

    @rule(data=st.data(), change=st.sampled_from(["sick", "cordon", "vanish", "well", "well", "well"]))
    def gpu_changes(self, data: st.DataObject, change: str) -> None:
        uuid = data.draw(st.sampled_from(sorted(self.gpus)), label="gpu")
        gpu = self.gpus[uuid]
        self.absent.discard(uuid)
        if change == "vanish":
            self.absent.add(uuid)
        self.gpus[uuid] = GpuCapacity(
            uuid, gpu.memory_units, shares=4, accepting=change != "cordon", sick=change == "sick"
        )
        self.show_gpus()
        if change == "well":
            self.wake()

    @precondition(lambda self: self.on)
    @rule()
    def agent_restarts(self) -> None:
        for pod in self.living():
            for container in pod.containers:
                if container.state == "waiting":
                    container.state = "down"
        self.new_agent()
        for key, (demand, uuid) in self.placed.items():
            refusal = self.ledger.restore(key, demand, uuid)
            assert refusal is None
        for pod in self.living():
            self.ledger.grant(pod.holds())
            for container in pod.containers:
                if container.state == "ended":
                    self.ledger.retire(container.key)
        self.offered = self.ledger.offered

    # --- what must always hold ---

    @invariant()
    def nothing_is_over_promised(self) -> None:
        for uuid, gpu in self.gpus.items():
            here = [p for p in self.on.values() if p.uuid == uuid]
            demands = [
                c.demand.amounts
                for pod in self.living()
                for c in pod.containers
                if c.key in self.on and self.on[c.key].uuid == uuid
            ]
            assert sum(p.memory_units for p in here) <= gpu.memory_units
            assert sum(p.cores or 0 for p in here) <= gpu.cores
            assert sum(d.shares for d in demands) <= gpu.shares
            if any(p.whole for p in here):
                assert len(here) == 1
            used = self.ledger.used_on(uuid)
            if uuid not in self.absent:
                assert used.memory >= sum(p.memory_units for p in here)
                assert not any(used.minus(gpu.amounts))

    @invariant()
    def a_token_means_one_thing(self) -> None:
        seen = Demand()
        for pod in self.living():
            for container in pod.containers:
                if container.key in self.on:
                    assert not seen.overlaps(container.demand)
                    seen |= container.demand
        lying = Demand()
        for uuid in self.gpus:
            assert not lying.overlaps(self.ledger.held_on(uuid))
            lying |= self.ledger.held_on(uuid)

    @invariant()
    def ledger_knows_what_runs(self) -> None:
        for key, placement in self.on.items():
            booking = self.ledger.booking(key)
            assert booking is not None
            assert not booking.retired
            assert (booking.uuid, booking.cores) == (placement.uuid, placement.cores)
            assert not any((booking.demand - self.ledger.held_on(placement.uuid)).amounts)
        for leftover in self.ledger.leftovers():
            for booking in self.ledger.bookings():
                if not booking.retired:
                    assert not booking.demand.overlaps(leftover.tokens)

    @invariant()
    def the_sum_tells_the_truth(self) -> None:
        offered = self.ledger.offered
        assert not any(self.offered.minus(offered)), "tokens disappeared"
        self.offered = offered
        unhealthy, held = self.ledger.unhealthy(), self.ledger.held()
        on_sick = Demand()
        for uuid, gpu in self.gpus.items():
            if gpu.sick or uuid in self.absent:
                on_sick |= self.ledger.held_on(uuid)
        assert (unhealthy & held) == on_sick, "held tokens are Healthy unless their GPU is sick"
        healthy_free = [
            full(n).bit_count() - (u | h).bit_count()
            for n, u, h in zip(offered, _masks(unhealthy), _masks(held), strict=True)
        ]
        room = Amounts()
        for uuid in self.gpus:
            room = room.plus(self.ledger.free_on(uuid)) if uuid not in self.absent else room
        # Free Healthy tokens and those that are held but lie on no GPU yet are what may still come; they
        # are never more than there is room, unless too many are held already.
        assert all(f <= r for f, r in zip(healthy_free, room, strict=True))


def _masks(demand: Demand) -> tuple[int, int, int]:
    return demand.memory, demand.cores, demand.shares


SharingMachine.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSharingMachine = SharingMachine.TestCase
