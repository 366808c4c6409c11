"""Use against limit: when it is told, what is done, and what is never done (field case E1)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.config.schema import WatchdogConfig
from edgeagent.errors import NodeError
from edgeagent.isolation.watchdog import Actions, OverLimit, Watchdog, WatchedUse
from edgeagent.node.cgroups import HOST, CgroupOwner, OwnerKind
from edgeagent.node.processes import ProcessInfo

POD = "aaaaaaaa-0000-4000-8000-000000000001"
OWNER = CgroupOwner(OwnerKind.POD, POD, "c1" * 32)
PROCESS = ProcessInfo(4100, "python3", 55, OWNER)
USE = WatchedUse(POD, "main", "GPU-1", 512, 1500.0, (PROCESS,))


class Bench:
    def __init__(
        self,
        policy: str = "report",
        terminate: Callable[[ProcessInfo], bool] | None = None,
        tolerance: int = 0,
    ) -> None:
        self.told: list[OverLimit] = []
        self.back: list[WatchedUse] = []
        self.evicted: list[OverLimit] = []
        self.killed: list[ProcessInfo] = []
        self.kill_error: NodeError | None = None
        self.watchdog = Watchdog(
            WatchdogConfig(policy=policy, tolerance_mib=tolerance),
            lambda: (),
            Actions(self.told.append, self.back.append, self.evicted.append, self.kill, terminate),
            unix=lambda: 1000.0,
        )

    def kill(self, process: ProcessInfo) -> bool:
        if self.kill_error is not None:
            raise self.kill_error
        self.killed.append(process)
        return True

    def look(self, *uses: WatchedUse, times: int = 1) -> None:
        for _ in range(times):
            self.watchdog.look(uses)


def test_over_in_two_looks_is_told_once_with_the_numbers() -> None:
    bench = Bench()
    bench.look(USE)
    assert (bench.told, bench.watchdog.over) == ([], {})
    bench.look(USE, times=5)
    (over,) = bench.told
    assert (over.use.used_mib, over.use.limit_mib, over.since_ms, over.action) == (
        1500.0,
        512,
        1000000,
        "reported",
    )
    assert list(bench.watchdog.over) == [USE.key]
    assert bench.watchdog.counters["over_limit_total"] == 1
    bench.look(replace(USE, used_mib=500.0))
    assert (bench.back, bench.watchdog.over) == ([replace(USE, used_mib=500.0)], {})


@pytest.mark.parametrize(
    ("pattern", "told"),
    [("ou", 0), ("ouou", 0), ("oo", 1), ("o?o", 1), ("oouoo", 2), ("oo?o", 1), ("u", 0)],
)
def test_looks_in_a_row(pattern: str, told: int) -> None:
    bench = Bench()
    for what in pattern:
        bench.look(replace(USE, used_mib={"o": 600.0, "u": 100.0, "?": None}[what]))
    assert len(bench.told) == told


def test_a_container_that_ends_while_over_is_cleared() -> None:
    bench = Bench()
    bench.look(USE, times=2)
    bench.look()
    assert bench.back == [USE]
    bench.look()
    assert len(bench.back) == 1


@pytest.mark.parametrize(
    ("tolerance", "used", "over"), [(0, 512.0, False), (0, 512.1, True), (100, 612.0, False)]
)
def test_tolerance(tolerance: int, used: float, over: bool) -> None:
    bench = Bench(tolerance=tolerance)
    bench.look(replace(USE, used_mib=used), times=2)
    assert bool(bench.told) is over


def test_report_is_the_default_and_does_nothing_else() -> None:
    bench = Bench(WatchdogConfig().policy)
    bench.look(USE, times=5)
    assert (bench.evicted, bench.killed) == ([], [])


def test_evict_asks_once() -> None:
    bench = Bench("evict")
    bench.look(USE, times=5)
    assert [o.use for o in bench.evicted] == [USE]
    assert bench.told[0].action == "evicting"
    assert bench.killed == []


def test_kill_ends_the_containers_processes_once_each() -> None:
    bench = Bench("kill")
    bench.look(USE, times=5)
    assert bench.killed == [PROCESS]
    again = replace(PROCESS, pid=4200, start_ticks=99)
    bench.look(replace(USE, processes=(PROCESS, again)))
    assert bench.killed == [PROCESS, again], "one that came since is dealt with too"
    assert bench.watchdog.counters["over_limit_killed_total"] == 2


@pytest.mark.parametrize(
    "owner",
    [
        HOST,
        CgroupOwner(OwnerKind.UNKNOWN),
        CgroupOwner(OwnerKind.POD, "bbbbbbbb-0000-4000-8000-000000000002"),
    ],
    ids=["host", "unknown", "another pod"],
)
def test_a_process_outside_the_pod_is_never_killed(owner: CgroupOwner) -> None:
    bench = Bench("kill")
    bench.look(replace(USE, processes=(replace(PROCESS, owner=owner),)), times=3)
    assert bench.killed == []
    assert bench.told[0].action.startswith("not killed")


@pytest.mark.parametrize(
    ("terminate", "action"),
    [(None, "not killed"), (lambda _: False, "not killed"), (lambda _: True, "killed")],
    ids=["cannot", "refused", "terminated in order"],
)
def test_an_mps_client_is_killed_only_after_its_work_was_ended_in_order(
    terminate: Callable[[ProcessInfo], bool] | None, action: str
) -> None:
    bench = Bench("kill", terminate)
    bench.look(replace(USE, mps_pids=frozenset({PROCESS.pid})), times=3)
    assert bench.killed == ([PROCESS] if action == "killed" else [])
    assert bench.told[0].action.startswith(action)


def test_a_kill_that_is_not_permitted_is_said() -> None:
    bench = Bench("kill")
    bench.kill_error = NodeError("cannot signal pid 4100")
    bench.look(USE, times=2)
    assert "cannot signal pid 4100" in bench.told[0].action


def test_the_service_measures_until_stopped() -> None:
    measured = threading.Event()

    def measure() -> tuple[WatchedUse, ...]:
        measured.set()
        return ()

    watchdog = Watchdog(WatchdogConfig(poll_seconds=0.2), measure, Actions())
    stop = threading.Event()
    thread = threading.Thread(target=watchdog.run, args=(stop,))
    thread.start()
    assert measured.wait(5)
    stop.set()
    thread.join(5)
    assert not thread.is_alive()


@given(st.lists(st.sampled_from(["over", "under", "unknown", "absent"]), max_size=30))
@settings(max_examples=150)
def test_every_telling_is_taken_back_at_most_once(history: list[str]) -> None:
    bench = Bench()
    for what in history:
        if what == "absent":
            bench.look()
        else:
            bench.look(replace(USE, used_mib={"over": 600.0, "under": 1.0, "unknown": None}[what]))
    open_now = len(bench.told) - len(bench.back)
    assert open_now == len(bench.watchdog.over)
    assert open_now in (0, 1)
