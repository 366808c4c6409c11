"""What the ledger promises, row by row (field cases S2, S3, S4 and their kind)."""

from __future__ import annotations

import pytest

from edgeagent.errors import AllocationError
from edgeagent.sharing.ledger import (
    ContainerKey,
    GpuCapacity,
    Ledger,
    Leftover,
    Placement,
    Refusal,
    RefusalCode,
    Wording,
)
from edgeagent.sharing.tokens import Amounts, Demand, full


def run(first: int, count: int) -> int:
    return full(count) << first


def key(name: str) -> ContainerKey:
    pod, _, container = name.partition("/")
    return ContainerKey(pod, container or "main")


class Node:
    """A ledger, and tokens handed out in order as a kubelet would that never gets any back."""

    def __init__(self, *units: int, unit_mib: int = 256, shares: int = 16, **rules: object) -> None:
        wording = Wording(pod_name=lambda uid: f"default/{uid}")
        self.ledger = Ledger(unit_mib=unit_mib, wording=wording, **rules)  # type: ignore[arg-type]  # test input
        self.gpus = {f"GPU-{i}": GpuCapacity(f"GPU-{i}", n, shares=shares) for i, n in enumerate(units)}
        self.next = Amounts()
        self.show()

    def show(self, **changes: GpuCapacity | None) -> None:
        for name, capacity in changes.items():
            uuid = name.replace("_", "-")
            if capacity is None:
                del self.gpus[uuid]
            else:
                self.gpus[uuid] = capacity
        self.ledger.set_capacities(self.gpus.values())

    def tokens(self, memory: int = 0, cores: int = 0, number: int = 0) -> Demand:
        at = self.next
        self.next = at.plus(Amounts(memory, cores, number))
        return Demand(run(at.memory, memory), run(at.cores, cores), run(at.shares, number))

    def start(self, name: str, demand: Demand) -> Placement | Refusal:
        answer = self.ledger.place(key(name), demand)
        if isinstance(answer, Placement):
            self.ledger.bind(key(name), demand, answer.uuid)
        return answer

    def started(self, name: str, memory: int = 0, cores: int = 0, number: int = 0) -> Placement:
        answer = self.start(name, self.tokens(memory, cores, number))
        assert isinstance(answer, Placement), answer
        return answer

    def refused(self, name: str, demand: Demand) -> Refusal:
        before = self.ledger.bookings(), self.ledger.held()
        answer = self.start(name, demand)
        assert isinstance(answer, Refusal), answer
        assert (self.ledger.bookings(), self.ledger.held()) == before, "a refusal changes nothing"
        return answer

    def free(self) -> list[int]:
        return [self.ledger.free_on(uuid).memory for uuid in self.gpus]


# --- S2: several cards ---


def test_s2a_goes_to_the_card_that_has_room():
    node = Node(32, 32)
    node.started("a", 22)
    node.started("b", 12)
    assert node.free() == [10, 20]
    assert node.started("c", 16).uuid == "GPU-1"


def test_s2b_larger_than_any_card_is_refused_at_once_and_for_ever():
    refusal = Node(32, 32).refused("a", Demand(memory=run(0, 40)))
    assert (refusal.code, refusal.status, refusal.permanent) == (RefusalCode.TOO_LARGE, "OUT_OF_RANGE", True)
    assert refusal.message == (
        "can never fit here: 10240 MiB asked of one GPU, and the largest of this node has 8192 MiB to give"
    )


def test_s2c_fragmented_room_waits_with_the_largest_block_and_who_is_in_the_way():
    node = Node(32, 32)
    node.started("a", 22)
    node.started("b", 22)
    assert node.free() == [10, 10]
    refusal = node.refused("c", node.tokens(16))
    assert (refusal.code, refusal.status, refusal.permanent) == (
        RefusalCode.NO_ROOM,
        "RESOURCE_EXHAUSTED",
        False,
    )
    assert refusal.message == (
        "waiting for room: no GPU has 4096 MiB free now; largest free block: 2560 MiB on GPU-0; "
        "in the way on GPU-0: default/a (5632 MiB)"
    )
    assert refusal.in_the_way == ("a", "b")


@pytest.mark.parametrize("memory", [run(24, 8) | run(32, 8), run(0, 64) & int("01" * 16, 2)])
def test_s2de_whatever_tokens_the_kubelet_chose_the_container_is_on_one_gpu(memory):
    """There are no IDs of a GPU: 8 low and 8 high tokens, or cores from elsewhere, are one demand."""
    node = Node(32, 32)
    demand = Demand(memory=memory, cores=run(150, 30))
    answer = node.start("a", demand)
    assert isinstance(answer, Placement)
    assert node.ledger.held_on(answer.uuid) == demand
    assert node.ledger.used_on(answer.uuid) == Amounts(16, 30, 0)


def test_s2_two_cannot_both_win_the_last_block():
    node = Node(32)
    a, b = node.tokens(20), node.tokens(20)
    first, second = node.ledger.place(key("a"), a), node.ledger.place(key("b"), b)
    assert isinstance(first, Placement)
    assert isinstance(second, Placement)
    node.ledger.bind(key("a"), a, first.uuid)
    with pytest.raises(AllocationError, match="largest free block") as late:
        node.ledger.bind(key("b"), b, second.uuid)
    assert late.value.code == "RESOURCE_EXHAUSTED"
    assert node.ledger.booking(key("b")) is None
    assert node.free() == [12]


# --- S3: several containers ---


def test_s3_each_container_has_its_own_limit_and_the_pod_its_total():
    node = Node(32)
    sidecar, init = node.tokens(2), node.tokens(6)
    app1 = Demand(memory=run(2, 3))
    app2 = Demand(memory=run(5, 3) | run(8, 1))
    node.start("p/sidecar", sidecar)
    assert node.start("p/init", init) == Placement("GPU-0", 6, None)
    assert node.ledger.pod_total("p").memory == 8
    assert node.ledger.retire(key("p/init"))
    assert not node.ledger.retire(key("p/init"))
    assert node.ledger.leftovers() == (Leftover("p", "GPU-0", init),)
    node.start("p/app1", app1)
    assert node.ledger.leftovers() == (Leftover("p", "GPU-0", Demand(memory=run(5, 3))),)
    node.start("p/app2", app2)
    limits = {b.key.container: b.memory_units for b in node.ledger.bookings() if not b.retired}
    assert limits == {"sidecar": 2, "app1": 3, "app2": 4}
    assert node.ledger.pod_total("p").memory == 9
    assert node.ledger.used_on("GPU-0").memory == 9
    assert node.ledger.leftovers() == ()
    for name, demand in (("sidecar", sidecar), ("app1", app1), ("app2", app2)):
        node.ledger.grant(demand)  # a replayed Allocate, and every container starting anew
        assert node.start(f"p/{name}", demand) == Placement("GPU-0", demand.amounts.memory, None)
    assert node.ledger.pod_total("p").memory == 9
    assert node.ledger.release_pod("p")
    assert node.free() == [32]
    assert not node.ledger.release_pod("p")


def test_s3_an_init_container_larger_than_the_apps_leaves_its_room_to_the_pod():
    node = Node(32)
    init = node.tokens(5)
    node.start("p/init", init)
    node.start("p/app", Demand(memory=run(1, 2)))
    left = Demand(memory=0b11001)
    assert node.ledger.leftovers() == (Leftover("p", "GPU-0", left),)
    assert node.ledger.booking(key("p/init")).retired
    assert node.ledger.pod_total("p").memory == 5
    assert node.free() == [27]
    refusal = node.refused("q", Demand(memory=0b11000))
    assert refusal.code is RefusalCode.HELD
    assert "default/p (m000003 and 1 more)" in refusal.message
    assert refusal.status == "ABORTED"
    assert not refusal.permanent


def test_s3_an_app_goes_where_the_leftover_of_its_pod_lies():
    node = Node(32, 32)
    node.start("p/init", node.tokens(20))
    node.ledger.retire(key("p/init"))
    node.started("q", 30)
    assert node.free() == [12, 2]
    # By itself binpack would fill GPU-1; there it would take new room, here none.
    assert node.start("p/app", Demand(memory=run(3, 2))) == Placement("GPU-0", 2, None)
    assert node.free() == [12, 2]


def test_s3_leftover_moves_with_the_app_when_its_gpu_is_sick():
    node = Node(32, 32)
    init = node.tokens(6)
    node.start("p/init", init)
    node.show(GPU_0=GpuCapacity("GPU-0", 32, sick=True))
    app = Demand(memory=run(0, 4))
    assert node.start("p/app", app) == Placement("GPU-1", 4, None)
    assert node.ledger.held_on("GPU-0") == Demand(memory=run(4, 2))
    assert node.ledger.held_on("GPU-1") == app
    assert node.ledger.pod_total("p").memory == 6


def test_s3_the_pods_own_leftover_makes_way_for_its_own_container():
    node = Node(6, 6)
    init = node.tokens(6)
    node.start("p/init", init)
    node.ledger.retire(key("p/init"))
    node.started("q", 5)
    # 3 of the init container's tokens and 1 new one: 7 units would lie on GPU-0, but 3 of them are idle.
    app = Demand(memory=run(3, 3) | run(20, 1))
    assert node.start("p/app", app) == Placement("GPU-0", 4, None)
    assert node.ledger.used_on("GPU-0").memory == 6
    assert node.ledger.leftovers() == (
        Leftover("p", None, Demand(memory=run(2, 1))),
        Leftover("p", "GPU-0", Demand(memory=run(0, 2))),
    )
    assert node.ledger.pod_total("p").memory == 7
    assert node.refused("r", Demand(memory=run(2, 1))).code is RefusalCode.HELD


def test_s3_what_ends_by_the_start_makes_way_too():
    """The init container is not known to have ended, but its tokens are given to the app."""
    node = Node(6)
    node.start("p/init", node.tokens(6))
    app = Demand(memory=run(3, 3) | run(20, 1))
    assert node.start("p/app", app) == Placement("GPU-0", 4, None)
    assert node.ledger.booking(key("p/init")).retired
    assert node.ledger.used_on("GPU-0").memory == 6


def test_s3_leftover_that_makes_way_is_the_last_resort():
    node = Node(6, 32)
    node.start("p/init", node.tokens(6))
    node.ledger.retire(key("p/init"))
    app = Demand(memory=run(3, 3) | run(20, 1))
    assert node.start("p/app", app) == Placement("GPU-1", 4, None)


def test_s3_the_sandbox_starts_anew_and_the_init_container_takes_its_tokens_back():
    node = Node(8)
    init = node.tokens(6)
    apps = [Demand(memory=run(0, 3)), Demand(memory=run(3, 4))]
    node.start("p/init", init)
    node.start("p/app1", apps[0])
    node.start("p/app2", apps[1])
    assert node.start("p/init", init) == Placement("GPU-0", 6, None)
    assert node.ledger.booking(key("p/app1")).retired
    assert node.ledger.pod_total("p").memory == 7
    assert node.start("p/app1", apps[0]) == Placement("GPU-0", 3, None)
    assert node.start("p/app2", apps[1]) == Placement("GPU-0", 4, None)
    assert node.ledger.pod_total("p").memory == 7


def test_s3_tokens_of_a_running_container_of_the_same_pod_are_not_taken_over():
    """The double hand-out within one pod."""
    node = Node(32, 32)
    app1 = node.tokens(4)
    node.start("p/app1", app1)
    answer = node.ledger.place(key("p/app2"), Demand(memory=run(2, 4)), running=["app1"])
    assert isinstance(answer, Refusal)
    assert (answer.code, answer.status) == (RefusalCode.STILL_RUNNING, "ABORTED")
    assert "container app1 of the same pod" in answer.message
    assert isinstance(node.ledger.place(key("p/app1"), app1, running=["app1"]), Placement)


# --- S4: which of the numbers are there ---


@pytest.mark.parametrize(
    ("amounts", "expected"),
    [
        (Amounts(10, 0, 0), Placement("GPU-0", 10, None)),
        (Amounts(10, 30, 0), Placement("GPU-0", 10, 30)),
        (Amounts(1, 100, 0), Placement("GPU-0", 1, 100)),
        (Amounts(10, 30, 1), Placement("GPU-0", 10, 30)),
        (Amounts(0, 0, 1), Placement("GPU-0", 32, None, whole=True)),
        (Amounts(0, 30, 0), RefusalCode.CORES_WITHOUT_MEMORY),
        (Amounts(0, 30, 1), RefusalCode.CORES_WITHOUT_MEMORY),
        (Amounts(10, 0, 2), RefusalCode.NUMBER_ABOVE_ONE),
        (Amounts(0, 0, 3), RefusalCode.NUMBER_ABOVE_ONE),
        (Amounts(10, 101, 0), RefusalCode.TOO_LARGE),
        (Amounts(0, 0, 0), RefusalCode.EMPTY),
    ],
    ids=lambda v: v.value if isinstance(v, RefusalCode) else None,
)
def test_s4_one_rule_for_each_combination(amounts, expected):
    node = Node(32)
    answer = node.start("a", node.tokens(*amounts))
    if isinstance(expected, RefusalCode):
        assert isinstance(answer, Refusal)
        assert answer.code is expected
        assert answer.permanent
    else:
        assert answer == expected
        booking = node.ledger.booking(key("a"))
        assert (booking.memory_units, booking.cores, booking.whole) == (
            expected.memory_units,
            expected.cores,
            expected.whole,
        )


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [
        ((10,), (22,), True),
        ((10,), (23,), False),
        ((10,), (22, 100), True),
        ((10, 30), (22, 70), True),
        ((10, 30), (1, 71), False),
        ((1, 100), (1, 1), False),
        ((1, 100), (31,), True),
        ((0, 0, 1), (1,), False),
        ((0, 0, 1), (0, 0, 1), False),
        ((1,), (0, 0, 1), False),
    ],
)
def test_s4_the_second_pod_is_admitted_as_reported_free(first, second, fits):
    node = Node(32)
    node.started("a", *first)
    free = node.ledger.free_on("GPU-0")
    assert fits == isinstance(node.start("b", node.tokens(*second)), Placement)
    if any(second[:2]):
        wanted = Amounts(*second)
        assert fits == (not any(wanted.minus(free)))


def test_s4_sentences_name_what_to_do():
    node = Node(32)
    assert node.refused("a", node.tokens(0, 30)).message == (
        "cannot give volcano.sh/vgpu-cores: 30 without memory: add volcano.sh/vgpu-memory to the container"
    )
    assert "at most 1" in node.refused("a", node.tokens(4, 0, 2)).message


def test_s4_an_uncapped_container_goes_where_compute_is_left_when_it_can():
    node = Node(32, 32)
    node.started("a", 20, 100)
    assert node.started("b", 4).uuid == "GPU-1"


def test_x8_a_share_below_the_minimum_is_refused():
    node = Node(32, unit_mib=64, min_share_mib=346)
    refusal = node.refused("a", node.tokens(5))
    assert (refusal.code, refusal.permanent) == (RefusalCode.BELOW_MINIMUM, True)
    assert "320 MiB: the least share on this node is 346 MiB" in refusal.message
    node.started("b", 6)
    node.ledger.release_pod("b")
    node.started("c", 0, 0, 1)  # a whole GPU is not a small share


# --- a number alone: a whole GPU ---


def test_a_whole_gpu_waits_until_one_is_empty_and_then_nobody_else_comes():
    node = Node(32, 16)
    node.started("a", 4)
    node.started("b", 20)
    whole = node.tokens(0, 0, 1)
    refusal = node.refused("w", whole)
    assert refusal.code is RefusalCode.NO_ROOM
    assert refusal.message.startswith("waiting for room: no GPU is empty now; largest free block: 3072 MiB")
    node.ledger.release_pod("a")
    assert node.start("w", whole) == Placement("GPU-1", 16, None, whole=True)
    assert node.free() == [12, 0]
    blocked = node.refused("c", node.tokens(14))
    assert "default/b (5120 MiB)" in blocked.message
    node.ledger.release_pod("b")
    node.started("d", 32)
    refusal = node.refused("e", node.tokens(10))
    assert refusal.message.startswith("waiting for room: no GPU has 2560 MiB free now; no memory is free; ")
    assert refusal.in_the_way == ("d", "w")
    assert node.start("w", whole) == Placement("GPU-1", 16, None, whole=True)


def test_the_rest_of_a_gpu_that_one_container_has_for_itself_is_out_of_the_sum():
    node = Node(32, 16)
    node.started("w", 0, 0, 1)
    assert node.ledger.unhealthy().amounts == Amounts(16, 100, 15)
    node.show(GPU_0=GpuCapacity("GPU-0", 32, sick=True))
    assert "on GPU-1: default/w (the whole GPU)" in node.refused("a", node.tokens(1)).message
    node.show(GPU_0=GpuCapacity("GPU-0", 32))
    node.ledger.release_pod("w")
    assert not node.ledger.unhealthy()


def test_a_whole_gpu_of_an_init_container_passes_to_the_pods_containers():
    node = Node(32)
    whole = node.tokens(0, 0, 1)
    node.start("p/init", whole)
    app = node.tokens(8)
    assert "this pod itself (the whole GPU)" in node.refused("p/app", app).message
    node.ledger.retire(key("p/init"))
    assert node.start("p/app", app) == Placement("GPU-0", 8, None)
    node.ledger.release_pod("p")
    node.start("p/init", whole)
    assert node.start("p/app", whole | app) == Placement("GPU-0", 8, None)


def test_a_whole_gpu_passes_to_a_container_with_the_same_share():
    node = Node(32)
    whole = node.tokens(0, 0, 1)
    node.start("p/init", whole)
    assert node.start("p/app", whole) == Placement("GPU-0", 32, None, whole=True)
    assert node.ledger.booking(key("p/init")).retired


def test_a_whole_gpu_once_given_up_has_to_be_empty_again():
    node = Node(32)
    whole = node.tokens(0, 0, 1)
    node.start("p/init", whole)
    node.ledger.retire(key("p/init"))
    node.started("q", 4)
    assert node.refused("p/init", whole).in_the_way == ("q",)
    node.ledger.release_pod("q")
    assert node.start("p/init", whole) == Placement("GPU-0", 32, None, whole=True)


def test_a_whole_gpu_is_kept_over_a_restart_on_a_cordoned_gpu():
    node = Node(32, 32)
    whole = node.tokens(0, 0, 1)
    node.start("w", whole)
    node.show(GPU_0=GpuCapacity("GPU-0", 32, accepting=False))
    assert node.start("w", whole) == Placement("GPU-0", 32, None, whole=True)


def test_leftover_beside_a_whole_gpu_container_cannot_be_used():
    node = Node(32)
    node.start("p/init", node.tokens(8))
    node.ledger.retire(key("p/init"))
    node.started("p/app1", 0, 0, 1)
    assert node.refused("p/app2", Demand(memory=run(0, 4))).code is RefusalCode.NO_ROOM


# --- who holds the IDs ---


def test_ids_of_another_living_pod_wait_until_it_is_gone():
    node = Node(32)
    dying = node.tokens(8)
    node.start("a", dying)
    node.ledger.grant(dying)  # the kubelet gave them out again before a's cgroup was gone
    refusal = node.refused("b", dying)
    assert (refusal.code, refusal.permanent, refusal.in_the_way) == (RefusalCode.HELD, False, ("a",))
    node.ledger.release_pod("a")
    assert node.ledger.held() == dying
    assert isinstance(node.start("b", dying), Placement)


def test_grants_are_kept_until_the_checkpoint_no_longer_has_them():
    node = Node(32)
    a, b = node.tokens(4), node.tokens(4, 10, 1)
    node.ledger.grant(a)
    node.ledger.grant(b)
    node.ledger.grant(b)
    assert node.ledger.granted() == a | b
    node.start("b", b)
    assert node.ledger.granted() == a
    node.ledger.settle(b)
    assert node.ledger.granted() == Demand()
    assert node.ledger.held() == b


def test_bind_is_idempotent():
    node = Node(32)
    demand = node.tokens(8, 20, 1)
    first = node.ledger.bind(key("a"), demand, "GPU-0")
    assert node.ledger.bind(key("a"), demand, "GPU-0") == first
    assert node.ledger.bookings() == (first,)
    assert node.ledger.used_on("GPU-0") == Amounts(8, 20, 1)


def test_release_gives_back_what_no_other_container_of_the_pod_holds():
    node = Node(32)
    node.start("p/a", Demand(memory=run(0, 4)))
    node.start("p/b", Demand(memory=run(2, 4)))
    assert node.ledger.release(key("p/b"))
    assert node.ledger.held() == Demand(memory=run(0, 4))
    assert node.ledger.release(key("p/a"))
    assert not node.ledger.release(key("p/a"))
    assert node.ledger.pods() == frozenset()
    assert not node.ledger.held()


def test_a_container_whose_ids_changed_gives_the_old_ones_back():
    """A pod admitted anew after a reboot can get other IDs."""
    node = Node(32)
    node.start("a", Demand(memory=run(0, 4)))
    node.start("a", Demand(memory=run(10, 4)))
    assert node.ledger.held() == Demand(memory=run(10, 4))
    assert node.free() == [28]


def test_a_container_whose_ids_changed_still_has_its_own_room():
    node = Node(6)
    node.start("a", Demand(memory=run(0, 4)))
    node.start("b", Demand(memory=run(4, 2)))
    assert node.start("a", Demand(memory=run(10, 4))) == Placement("GPU-0", 4, None)
    assert node.ledger.held() == Demand(memory=run(10, 4) | run(4, 2))
    assert node.ledger.leftovers() == ()


def test_a_start_that_did_not_come_about_is_undone():
    node = Node(32, 32)
    demand = node.tokens(20)
    node.start("a", demand)
    node.ledger.undo(key("a"), None)
    assert node.ledger.bookings() == ()
    node.start("a", demand)
    before = node.ledger.booking(key("a"))
    node.show(GPU_0=GpuCapacity("GPU-0", 32, sick=True))
    assert node.start("a", demand) == Placement("GPU-1", 20, None, previous_uuid="GPU-0")
    node.ledger.undo(key("a"), before)
    assert node.ledger.booking(key("a")) == before
    assert node.ledger.used_on("GPU-1").memory == 0


def test_undoing_never_takes_room_that_somebody_has_by_now():
    node = Node(32, 32)
    demand = node.tokens(20)
    node.start("a", demand)
    before = node.ledger.booking(key("a"))
    node.show(GPU_0=GpuCapacity("GPU-0", 32, sick=True))
    node.start("a", demand)
    node.show(GPU_0=GpuCapacity("GPU-0", 32))
    assert node.started("b", 30).uuid == "GPU-0"
    node.ledger.undo(key("a"), before)
    assert node.ledger.booking(key("a")).uuid == "GPU-1"
    assert node.free() == [2, 12]


# --- restarts, sick GPUs, cordons ---


def test_a_restart_has_its_own_room_even_on_a_full_gpu():
    node = Node(32, 32)
    demand = node.tokens(32, 100)
    node.start("a", demand)
    node.started("b", 32, 100)
    assert node.start("a", demand) == Placement("GPU-0", 32, 100)


def test_a_restart_fails_over_when_the_gpu_is_sick_and_stays_there():
    node = Node(32, 32)
    demand = node.tokens(8, 20)
    node.start("a", demand)
    node.show(GPU_0=GpuCapacity("GPU-0", 32, sick=True, reason="XID 79"))
    assert node.start("a", demand) == Placement("GPU-1", 8, 20, previous_uuid="GPU-0")
    assert node.ledger.held_on("GPU-0") == Demand()
    node.show(GPU_0=GpuCapacity("GPU-0", 32))
    assert node.start("a", demand) == Placement("GPU-1", 8, 20)


def test_a_restart_waits_when_only_the_sick_gpu_could_hold_it():
    node = Node(32, 16)
    demand = node.tokens(20)
    node.start("a", demand)
    node.show(GPU_0=GpuCapacity("GPU-0", 32, sick=True, reason="XID 79: fallen off the bus"))
    refusal = node.refused("a", demand)
    assert (refusal.code, refusal.status, refusal.permanent) == (
        RefusalCode.GPU_UNAVAILABLE,
        "UNAVAILABLE",
        False,
    )
    assert "5120 MiB would fit only GPU-0 (XID 79: fallen off the bus)" in refusal.message
    with pytest.raises(AllocationError):
        node.ledger.bind(key("a"), demand, "GPU-0")
    node.show(GPU_0=GpuCapacity("GPU-0", 32))
    assert node.start("a", demand) == Placement("GPU-0", 20, None)


def test_a_vanished_gpu_counts_as_sick():
    node = Node(32, 32)
    demand = node.tokens(8)
    node.start("a", demand)
    node.show(GPU_0=None)
    assert node.ledger.unhealthy().memory & demand.memory == demand.memory
    assert node.ledger.unhealthy().amounts == Amounts(32, 100, 16)
    assert node.ledger.offered == Amounts(64, 200, 32)
    assert node.start("a", demand) == Placement("GPU-1", 8, None, previous_uuid="GPU-0")
    assert not node.ledger.unhealthy().memory & demand.memory


def test_no_gpu_at_all_waits():
    node = Node()
    refusal = node.refused("a", Demand(memory=1))
    assert (refusal.code, refusal.permanent) == (RefusalCode.GPU_UNAVAILABLE, False)
    with pytest.raises(AllocationError, match="none that could give"):
        node.ledger.bind(key("a"), Demand(memory=1), "GPU-9")


def test_a_cordoned_gpu_keeps_its_containers_and_gives_no_new_room():
    node = Node(32, 32)
    a = node.tokens(8)
    node.start("a", a)
    node.show(GPU_0=GpuCapacity("GPU-0", 32, accepting=False, reason="cordoned"))
    assert node.started("b", 8).uuid == "GPU-1"
    assert node.start("a", a) == Placement("GPU-0", 8, None)
    refusal = node.refused("c", node.tokens(30))
    assert "not available: GPU-0 (cordoned)" in refusal.message
    assert node.free() == [0, 24]
    unhealthy = node.ledger.unhealthy()
    assert unhealthy.amounts == Amounts(24, 100, 16)
    assert not unhealthy.overlaps(a)


def test_a_gpu_that_shrank_gives_nothing_new_but_its_containers_may_restart():
    node = Node(32, 8)
    a = node.tokens(20)
    node.start("a", a)
    node.show(GPU_0=GpuCapacity("GPU-0", 16))
    assert node.start("a", a) == Placement("GPU-0", 20, None)
    assert node.free() == [0, 8]
    assert node.refused("b", node.tokens(12)).code is RefusalCode.NO_ROOM
    assert not node.ledger.unhealthy().overlaps(a)
    assert node.ledger.unhealthy().memory.bit_count() == 40 - 20 - 8


# --- restored after the agent's start ---


def test_restored_bookings_hold_what_they_held():
    node = Node(32, 32)
    a, b = node.tokens(32, 50, 1), node.tokens(10)
    ledger = node.ledger
    assert ledger.restore(key("a"), a, "GPU-1") is None
    assert ledger.restore(key("b"), b, "GPU-7") is None
    assert node.free() == [32, 0]
    assert ledger.unhealthy().memory == b.memory  # on a GPU that is gone
    assert node.start("a", a) == Placement("GPU-1", 32, 50)
    assert node.start("b", b) == Placement("GPU-0", 10, None, previous_uuid="GPU-7")


def test_restoring_before_the_gpus_are_known_offers_what_is_held():
    ledger = Ledger()
    ledger.restore(key("a"), Demand(memory=run(90, 10)), "GPU-0")
    ledger.restore(key("w"), Demand(shares=1), "GPU-1")
    assert ledger.offered == Amounts(100, 0, 1)
    ledger.set_capacities([GpuCapacity("GPU-0", 64), GpuCapacity("GPU-1", 32)])
    assert ledger.offered == Amounts(100, 200, 32)
    assert ledger.booking(key("w")).memory_units == 32
    assert not ledger.unhealthy().memory & run(90, 10)


def test_restoring_the_same_ids_for_two_pods_believes_the_first():
    node = Node(32)
    demand = node.tokens(4)
    assert node.ledger.restore(key("a"), demand, "GPU-0") is None
    refusal = node.ledger.restore(key("b"), demand, "GPU-0")
    assert refusal is not None
    assert refusal.code is RefusalCode.HELD
    assert node.ledger.pods() == {"a"}
    empty = node.ledger.restore(key("c"), Demand(), "GPU-0")
    assert empty is not None
    assert empty.code is RefusalCode.EMPTY


def test_a_container_on_an_unknown_gpu_counts_on_all_until_it_is_bound_again():
    node = Node(32, 32)
    demand = node.tokens(20)
    node.ledger.restore(key("a/x"), demand, None)
    assert node.free() == [12, 12]
    assert node.refused("b", node.tokens(16)).code is RefusalCode.NO_ROOM
    assert node.refused("w", node.tokens(0, 0, 1)).code is RefusalCode.NO_ROOM
    assert node.start("a/x", demand) == Placement("GPU-0", 20, None, previous_uuid=None)
    assert node.free() == [12, 32]


def test_a_taken_over_container_on_an_unknown_gpu_counts_no_more():
    node = Node(32, 32)
    node.ledger.restore(key("a/init"), node.tokens(20), None)
    assert node.start("a/app", Demand(memory=run(0, 30))) == Placement("GPU-0", 30, None)
    assert node.free() == [2, 32]


# --- early binding ---


def test_a_booking_made_at_allocate_gets_its_key_and_its_cores_later():
    node = Node(32, 32)
    memory = node.tokens(8)
    early = ContainerKey("", "m000000")
    assert node.start("/m000000", memory) == Placement("GPU-0", 8, None)
    node.ledger.rekey(early, key("p/main"))
    assert node.ledger.booking(early) is None
    both = memory | node.tokens(0, 50)
    node.show(GPU_0=GpuCapacity("GPU-0", 8))
    assert node.ledger.place(key("p/main"), both, only="GPU-0") == Placement("GPU-0", 8, 50)
    node.ledger.bind(key("p/main"), both, "GPU-0")
    assert node.ledger.used_on("GPU-0") == Amounts(8, 50, 0)
    node.ledger.rekey(key("p/main"), key("p/main"))
    assert node.ledger.pods() == {"p"}
    with pytest.raises(KeyError):
        node.ledger.rekey(early, key("p/main"))


def test_only_one_gpu_will_do_once_its_uuid_is_in_the_containers_env():
    node = Node(32, 32)
    node.started("a", 30)
    answer = node.ledger.place(key("b"), node.tokens(8), only="GPU-0")
    assert isinstance(answer, Refusal)
    assert answer.code is RefusalCode.NO_ROOM
    gone = node.ledger.place(key("b"), node.tokens(8), only="GPU-9")
    assert isinstance(gone, Refusal)
    assert gone.code is RefusalCode.GPU_UNAVAILABLE


# --- sentences ---


def test_long_lists_are_cut_and_uuids_shortened():
    uuid = "GPU-8f6d3c1a-0d52-4c09-9fd6-0123456789ab"
    ledger = Ledger(wording=Wording(pod_name=lambda uid: f"ns/{uid}"))
    ledger.set_capacities([GpuCapacity(uuid, 1000)])
    for i in range(10):
        demand = Demand(memory=run(i * 100, 100 - i))
        ledger.bind(key(f"p{i}"), demand, uuid)
    answer = ledger.place(key("q"), Demand(memory=run(1000, 500)))
    assert isinstance(answer, Refusal)
    assert "on GPU-8f6d3c1a; " in answer.message
    assert "ns/p0 (100 MiB), ns/p1 (99 MiB), ns/p2 (98 MiB) and 7 more" in answer.message
    assert len(answer.in_the_way) == 10
    error = answer.error()
    assert (error.code, error.permanent, str(error)) == ("RESOURCE_EXHAUSTED", False, answer.message)


def test_what_is_missing_decides_who_is_in_the_way():
    node = Node(32)
    node.started("memory", 8)
    node.started("cores", 1, 80)
    refusal = node.refused("c", node.tokens(2, 50))
    assert refusal.in_the_way == ("cores",)
    assert refusal.message == (
        "waiting for room: no GPU has 512 MiB and 50 % of compute free now; largest free block: 5888 MiB and "
        "20 % of compute on GPU-0; in the way on GPU-0: default/cores (256 MiB and 80 % of compute)"
    )


def test_no_share_left_is_said_in_its_own_words():
    node = Node(32, shares=1)
    node.started("a", 1, 0, 1)
    node.started("b", 1)
    refusal = node.refused("c", node.tokens(1, 0, 1))
    assert "GPU-0 has the memory, but no volcano.sh/vgpu-number left; in the way on GPU-0: default/a" in (
        refusal.message
    )
    assert refusal.in_the_way == ("a",)
