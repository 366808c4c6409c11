"""The line of waiting containers: order, reservations, and whom they do not hold up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgeagent.sharing.ledger import (
    ContainerKey,
    GpuCapacity,
    Ledger,
    Placement,
    Refusal,
    RefusalCode,
    Wording,
)
from edgeagent.sharing.tokens import Amounts, Demand, full
from edgeagent.sharing.waiting import WaitingLine


def key(pod: str) -> ContainerKey:
    return ContainerKey(pod, "main")


class Node:
    """A ledger, a line and a clock."""

    def __init__(self, *units: int) -> None:
        self.ledger = Ledger(wording=Wording(pod_name=lambda uid: f"default/{uid}"))
        self.gpus = {f"GPU-{i}": GpuCapacity(f"GPU-{i}", n) for i, n in enumerate(units)}
        self.ledger.set_capacities(self.gpus.values())
        self.line = WaitingLine(reserve_after_s=60, forget_after_s=120)
        self.now_s = 0.0
        self.next = Amounts()
        self.demands: dict[str, Demand] = {}

    def tokens(self, memory: int = 0, cores: int = 0, number: int = 0) -> Demand:
        at = self.next
        self.next = at.plus(Amounts(memory, cores, number))
        return Demand(full(memory) << at.memory, full(cores) << at.cores, full(number) << at.shares)

    def arrive(self, pod: str, memory: int = 0, cores: int = 0, number: int = 0) -> str | None:
        """The kubelet's call for a container: the GPU it starts on, or None when it waits."""
        demand = self.demands.setdefault(pod, self.tokens(memory, cores, number))
        answer = self.line.place(key(pod), demand, self.ledger, self.now_s)
        if isinstance(answer, Refusal):
            self.line.join(key(pod), demand, answer, self.now_s)
            return None
        self.ledger.bind(key(pod), demand, answer.uuid)
        self.line.leave(key(pod))
        return answer.uuid

    def leaves(self, pod: str) -> list[str]:
        """The pod ends; who starts then, in order."""
        self.ledger.release_pod(pod)
        return self.wake()

    def wake(self) -> list[str]:
        started = []
        while start := self.line.next_start(self.ledger, self.now_s):
            waiter, placement = start
            assert isinstance(placement, Placement)
            self.ledger.bind(waiter.key, waiter.demand, placement.uuid)
            self.line.leave(waiter.key)
            started.append(waiter.key.pod_uid)
        return started

    def refusal(self, pod: str) -> Refusal:
        answer = self.line.place(key(pod), self.demands[pod], self.ledger, self.now_s)
        assert isinstance(answer, Refusal)
        return answer


def test_the_longest_waiting_starts_first():
    node = Node(10)
    node.arrive("a", 10)
    for pod in ("b", "c", "d"):
        node.now_s += 1
        assert node.arrive(pod, 4) is None
    assert node.leaves("a") == ["b", "c"]
    assert [w.key.pod_uid for w in node.line.waiters()] == ["d"]
    assert node.leaves("b") == ["d"]


def test_a_small_one_passes_a_large_one_that_does_not_fit_yet():
    node = Node(10)
    node.arrive("a", 6)
    node.arrive("b", 4)
    node.arrive("large", 9)
    node.now_s = 10
    node.arrive("small", 3)
    assert node.leaves("b") == ["small"]


@pytest.mark.parametrize(("memory", "cores", "number"), [(8, 0, 0), (8, 50, 0), (0, 0, 1)])
def test_small_newcomers_cannot_starve_a_large_waiter(memory, cores, number):
    """Two small pods run at any time and a new one comes whenever one leaves: for ever, without the
    reservation."""
    node = Node(10)
    running = []
    for i in range(2):
        assert node.arrive(f"small{i}", 5, 50)
        running.append(f"small{i}")
    assert node.arrive("large", memory, cores, number) is None
    for i in range(2, 200):
        node.now_s += 10
        started = node.leaves(running.pop(0)) if running else []
        if "large" in started:
            break
        if node.arrive(f"small{i}", 5, 50):
            running.append(f"small{i}")
    else:
        pytest.fail("the large one never started")
    assert node.now_s <= 60 + 3 * 10


def test_room_is_kept_only_as_far_as_the_waiter_needs_it():
    node = Node(20)
    node.arrive("a", 10, 100)
    node.arrive("large", 12, 0)
    node.now_s = 60
    assert node.refusal("large").code is RefusalCode.NO_ROOM
    assert node.arrive("b", 1) is None  # of the 10 that are free large needs all
    refusal = node.refusal("b")
    assert refusal.code is RefusalCode.KEPT
    assert refusal.message == (
        "waiting: there is room for 1 MiB on GPU-0, but it is kept for a container that waits longer: "
        "default/large"
    )
    assert refusal.in_the_way == ("large",)
    assert not refusal.permanent
    assert node.leaves("a") == ["large", "b"]


def test_room_that_the_waiter_cannot_use_is_not_kept():
    """It waits for compute: memory beyond its need is free for others, and so is the other GPU."""
    node = Node(20, 4)
    node.arrive("a", 5, 80)
    node.arrive("large", 10, 50)
    node.now_s = 100
    assert node.arrive("b", 5) == "GPU-0"  # 15 were free, 10 stay kept
    assert node.arrive("c", 1) == "GPU-1"
    assert node.arrive("d", 1, 10) == "GPU-1"  # on GPU-0 the compute is kept
    assert node.arrive("e", 4) is None
    assert node.refusal("e").code is RefusalCode.KEPT


def test_a_reservation_is_not_taken_from_the_waiters_before_it():
    node = Node(10)
    node.arrive("a", 5)
    node.arrive("b", 3)
    node.arrive("first", 6)
    node.now_s = 1
    node.arrive("second", 10)
    node.now_s = 100
    assert node.leaves("a") == ["first"]
    assert node.line.kept_for_others(key("second"), node.ledger, node.now_s) == {}
    assert set(node.line.kept_for_others(key("new"), node.ledger, node.now_s)) == {"GPU-0"}


def test_each_long_waiter_has_a_gpu_of_its_own_kept():
    node = Node(10, 10)
    node.arrive("a", 6)
    node.arrive("b", 7)
    node.arrive("first", 9)
    node.now_s = 1
    node.arrive("second", 8)
    node.now_s = 100
    node.wake()
    assert [(w.key.pod_uid, w.kept_uuid) for w in node.line.waiters()] == [
        ("first", "GPU-0"),
        ("second", "GPU-1"),
    ]
    assert node.arrive("small", 1) is None


def test_a_reservation_moves_only_where_less_is_missing():
    node = Node(10, 10)
    node.arrive("a", 8)
    node.arrive("b", 8)
    node.arrive("c", 2)  # fills GPU-0
    node.arrive("large", 9)
    node.now_s = 100
    node.wake()
    assert node.line.get(key("large")).kept_uuid == "GPU-1"
    node.leaves("c")
    assert node.line.get(key("large")).kept_uuid == "GPU-1"  # equally much is missing: stay
    assert node.arrive("d", 2) == "GPU-0"
    node.leaves("a")
    assert node.line.get(key("large")).kept_uuid == "GPU-0"


def test_a_reservation_ends_with_its_gpu():
    node = Node(10, 4)
    node.arrive("a", 6)
    node.arrive("large", 9)
    node.now_s = 100
    assert node.arrive("b", 4) == "GPU-1"
    assert node.arrive("c", 1) is None
    node.gpus["GPU-0"] = replace(node.gpus["GPU-0"], accepting=False, reason="cordoned")
    node.ledger.set_capacities(node.gpus.values())
    node.wake()
    assert node.line.get(key("large")).kept_uuid is None
    assert node.refusal("large").code is RefusalCode.GPU_UNAVAILABLE


def test_nothing_is_kept_for_those_whose_ids_are_the_obstacle():
    node = Node(10)
    held = node.tokens(4)
    node.ledger.bind(key("a"), held, "GPU-0")
    node.demands["b"] = held
    assert node.arrive("b") is None
    node.now_s = 100
    assert node.refusal("b").code is RefusalCode.HELD
    assert node.arrive("c", 6) == "GPU-0"
    assert node.leaves("a") == ["b"]


def test_nothing_is_kept_for_those_who_can_never_start():
    node = Node(10)
    assert node.arrive("huge", 11) is None
    node.now_s = 1000
    assert node.arrive("a", 10) == "GPU-0"
    assert node.leaves("a") == []
    assert node.line.get(key("huge")).refusal.permanent


def test_a_restart_in_its_own_room_is_never_held_up():
    node = Node(10)
    node.arrive("a", 6)
    node.arrive("large", 9)
    node.now_s = 100
    assert node.arrive("a") == "GPU-0"


def test_between_calls_a_waiter_keeps_its_place_but_does_not_start():
    node = Node(10)
    node.arrive("a", 10)
    node.arrive("first", 8)
    node.now_s = 5
    node.arrive("second", 8)
    node.line.call_ended(key("first"), 25)
    node.now_s = 30
    assert node.leaves("a") == ["second"]
    assert node.arrive("first") is None
    waiter = node.line.get(key("first"))
    assert (waiter.since_s, waiter.seen_s, waiter.in_call) == (0, 30, True)
    node.line.call_ended(key("first"), 50)
    node.now_s = 65
    assert node.leaves("second") == []
    assert node.arrive("third", 8) is None  # kept for first, which is about to come again
    assert node.arrive("first") == "GPU-0"


def test_who_does_not_come_back_is_forgotten():
    node = Node(10)
    node.arrive("a", 10)
    node.arrive("b", 5)
    node.arrive("c", 5)
    node.line.call_ended(key("b"), 25)
    node.line.call_ended(key("nobody"), 25)
    assert node.line.forget(145) == ()
    assert node.line.forget(146) == (key("b"),)
    assert [w.key.pod_uid for w in node.line.waiters()] == ["c"]


def test_a_pod_that_is_gone_leaves_the_line():
    node = Node(10)
    node.arrive("a", 10)
    node.arrive("b", 5)
    assert node.line.leave_pod("b")
    assert not node.line.leave_pod("b")
    assert not node.line.leave(key("b"))
    assert node.leaves("a") == []


def test_tokens_that_a_running_container_of_the_pod_uses_stay_its_own_while_waiting():
    node = Node(10)
    demand = node.tokens(4)
    node.ledger.bind(ContainerKey("p", "one"), demand, "GPU-0")
    answer = node.line.place(ContainerKey("p", "two"), demand, node.ledger, 0, running=["one"])
    assert isinstance(answer, Refusal)
    node.line.join(ContainerKey("p", "two"), demand, answer, 0, running=["one"])
    assert node.wake() == []
