"""Driver calls are bounded: one stuck GPU costs one thread, other GPUs go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from edgeagent.errors import GpuError
from edgeagent.gpus.guard import GuardedBackend, GuardedLimiter, HangingError, Lanes
from edgeagent.gpus.model import Gpu, GpuEvent, GpuFault, GpuKind, GpuReading, Inventory

SHORT_S = 0.05
LONG_S = 20.0


def workers() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name == "gpu-call"}


class StuckDriver:
    """A back end whose calls about the GPUs in `stuck` do not return until `release`."""

    name = "stuck"

    def __init__(self) -> None:
        self.stuck: set[str] = set()
        self.let_go = threading.Event()
        self.entered: list[str] = []
        self.closed = False

    def _touch(self, what: str) -> None:
        self.entered.append(what)
        if what in self.stuck:
            self.let_go.wait(LONG_S)

    def release(self) -> None:
        self.stuck.clear()
        self.let_go.set()

    def inventory(self) -> Inventory:
        self._touch("inventory")
        gpu = Gpu("GPU-a", 0, GpuKind.DISCRETE, "stuck", "Card", 8192)
        return Inventory((gpu,), ("looked",))

    def read(self, uuid: str) -> GpuReading:
        self._touch(uuid)
        return GpuReading(uuid, 1.0, util_pct=1.0)

    def wait_event(self, timeout_s: float) -> GpuEvent | None:
        return None

    def wake(self) -> None:
        pass

    def close(self) -> None:
        self._touch("close")
        self.closed = True

    def set_memory_limits(self, uuid: str, cgroup_dir: str, soft_mib: int, hard_mib: int | None) -> None:
        self._touch(f"set {uuid}")

    def get_memory_limits(self, uuid: str, cgroup_dir: str) -> tuple[int, int | None, int]:
        self._touch(f"get {uuid}")
        return 0, 100, 5


@pytest.fixture
def driver() -> Iterator[StuckDriver]:
    made = StuckDriver()
    yield made
    made.release()


def test_a_hanging_read_becomes_unresponsive_and_others_go_on(driver: StuckDriver) -> None:
    guard = GuardedBackend(driver, SHORT_S)
    driver.stuck.add("GPU-b")
    assert guard.read("GPU-b").fault is GpuFault.UNRESPONSIVE
    assert guard.read("GPU-a").util_pct == 1.0


def test_no_threads_pile_up_while_it_hangs(driver: StuckDriver) -> None:
    before = workers()
    guard = GuardedBackend(driver, SHORT_S)
    driver.stuck.add("GPU-b")
    for _ in range(20):
        assert guard.read("GPU-b").fault is GpuFault.UNRESPONSIVE
        assert guard.read("GPU-a").fault is None
    assert driver.entered.count("GPU-b") == 1
    assert len(workers() - before) <= 2  # the stuck one and the one that does all the rest


def test_a_healthy_back_end_needs_one_worker(driver: StuckDriver) -> None:
    before = workers()
    guard = GuardedBackend(driver, LONG_S)
    guard.inventory()
    for n in range(20):
        guard.read(f"GPU-{n}")
    assert len(workers() - before) == 1
    guard.close()
    assert not workers() - before


def test_it_recovers_when_the_call_returns(driver: StuckDriver) -> None:
    guard = GuardedBackend(driver, SHORT_S)
    driver.stuck.add("GPU-b")
    assert guard.read("GPU-b").fault is GpuFault.UNRESPONSIVE
    driver.release()
    lanes = guard._lanes
    with lanes._changed:
        assert lanes._changed.wait_for(lambda: "GPU-b" not in lanes._running, LONG_S)
    assert guard.read("GPU-b").fault is None


def test_the_detail_says_how_long(driver: StuckDriver) -> None:
    now = [100.0]
    guard = GuardedBackend(driver, SHORT_S, clock=lambda: now[0])
    driver.stuck.add("GPU-b")
    assert guard.read("GPU-b").fault is GpuFault.UNRESPONSIVE
    now[0] += 250
    reading = guard.read("GPU-b")
    assert reading.fault_detail == "a driver call has not returned for 250 s"
    assert reading.taken_mono_s == now[0]


def test_a_hanging_inventory_keeps_the_known_gpus(driver: StuckDriver) -> None:
    guard = GuardedBackend(driver, SHORT_S)
    known = guard.inventory()
    driver.stuck.add("inventory")
    again = guard.inventory()
    assert again.gpus == known.gpus
    assert again.problem is None
    assert "has not returned" in again.evidence[-1]


def test_a_first_inventory_that_hangs_has_a_reason(driver: StuckDriver) -> None:
    guard = GuardedBackend(driver, SHORT_S)
    driver.stuck.add("inventory")
    found = guard.inventory()
    assert found.gpus == ()
    assert found.fault is GpuFault.UNRESPONSIVE
    assert "reboot" in (found.problem or "")


def test_close_does_not_wait_for_a_stuck_call(driver: StuckDriver) -> None:
    guard = GuardedBackend(driver, SHORT_S)
    driver.stuck.add("GPU-b")
    guard.read("GPU-b")
    guard.close()
    assert not driver.closed  # shutting a library down with a call inside it is not defined
    guard.close()


def test_close_that_hangs_returns_too(driver: StuckDriver) -> None:
    guard = GuardedBackend(driver, SHORT_S)
    driver.stuck.add("close")
    guard.close()


def test_callers_of_one_lane_take_turns() -> None:
    lanes = Lanes(LONG_S)
    inside, most = [0], [0]
    lock = threading.Lock()

    def work() -> None:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        threading.Event().wait(0.002)
        with lock:
            inside[0] -= 1

    threads = [
        threading.Thread(target=lambda: [lanes.call("one", work) for _ in range(10)]) for _ in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LONG_S)
    assert most[0] == 1
    lanes.close()


def test_waiters_of_a_lane_that_hangs_are_all_let_go() -> None:
    lanes = Lanes(SHORT_S)
    let_go = threading.Event()
    errors: list[HangingError] = []

    def call() -> None:
        try:
            lanes.call("one", lambda: let_go.wait(LONG_S))
        except HangingError as e:
            errors.append(e)

    threads = [threading.Thread(target=call) for _ in range(5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LONG_S)
    assert len(errors) == 5
    assert lanes.stuck == 1
    let_go.set()
    lanes.close()


def test_what_a_call_raises_is_raised_to_its_caller() -> None:
    lanes = Lanes(LONG_S)

    def fail() -> None:
        raise GpuError("cannot", GpuFault.LOST.value)

    with pytest.raises(GpuError) as caught:
        lanes.call("one", fail)
    assert caught.value.fault == "lost"
    assert lanes.call("one", lambda: 7) == 7  # the lane and the worker live on
    lanes.close()


def test_limits_are_bounded_in_their_own_lane(driver: StuckDriver) -> None:
    guard = GuardedBackend(driver, SHORT_S)
    limiter = GuardedLimiter(guard, driver)
    driver.stuck.add("GPU-a")
    guard.read("GPU-a")
    limiter.set_memory_limits("GPU-a", "/cg", 0, 100)  # a hanging reading does not block it
    assert limiter.get_memory_limits("GPU-a", "/cg") == (0, 100, 5)
    driver.stuck.add("get GPU-a")
    with pytest.raises(GpuError) as caught:
        limiter.get_memory_limits("GPU-a", "/cg")
    assert caught.value.fault == "unresponsive"
