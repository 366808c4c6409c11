"""The monitor over a scripted back end: what raises, what clears, what is told and what is not touched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from edgeagent.config import HealthConfig
from edgeagent.errors import GpuError
from edgeagent.gpus.model import GpuEvent, GpuEventKind, GpuFault, GpuKind, GpuReading
from edgeagent.health.conditions import Books, ConditionType
from edgeagent.health.monitor import (
    BURST_MAX_S,
    LATE_S,
    HealthChange,
    HealthMonitor,
    HealthState,
    SeenEvent,
    Surroundings,
)
from edgeagent.health.remembered import RememberedGpus
from edgeagent.health.usage import GpuUsage
from edgeagent.health.xid import XidClass, load_catalogue
from edgeagent.sharing.health_tokens import Giving, GpuTokens, unhealthy_mask
from edgeagent.snapshot import HostUse
from tests.fakes.gpus import UUIDS, ScriptedBackend, make_gpu

CATALOGUE = load_catalogue()
POLL_S = 5.0
DEFAULTS = HealthConfig()


class Bench:
    """A monitor with a hand-moved clock and everything it told."""

    def __init__(self, gpus: int = 2, config: HealthConfig = DEFAULTS, **around: object) -> None:
        self.backend = ScriptedBackend(make_gpu(i) for i in range(gpus))
        self.now = 1000.0
        self.changes: list[HealthChange] = []
        self.events: list[SeenEvent] = []
        self.restarts: list[str] = []
        around.setdefault("restart_needed", self.restarts.append)
        self.monitor = HealthMonitor(
            self.backend,
            config,
            CATALOGUE,
            poll_seconds=POLL_S,
            surroundings=Surroundings(**around),  # type: ignore[arg-type]
            mono=lambda: self.now,
            unix=lambda: 1_700_000_000 + self.now,
        )
        self.monitor.on_change(lambda _, change: self.changes.append(change))
        self.monitor.on_event(self.events.append)
        self.monitor.poll_once()

    def poll(self, times: int = 1) -> HealthState:
        for _ in range(times):
            self.now += POLL_S
            self.monitor.poll_once()
        return self.monitor.state

    def xid(self, number: int, uuid: str | None = UUIDS[0], age_s: float = 0.0) -> None:
        self.monitor.handle_event(GpuEvent(GpuEventKind.XID, uuid, number), age_s)

    def conditions(self, uuid: str = UUIDS[0]) -> list[str]:
        return [c.type for c in self.monitor.state.gpus[uuid].conditions]


# -- XIDs: the catalogue, recovering and not -----------------------------------------------------------


def unhealthy_tokens(state: HealthState, units: int) -> int:
    """How many of the node's tokens are listed Unhealthy when each GPU has `units` and nobody holds any."""
    gpus = [GpuTokens(units, 0, Giving.NOTHING if g.sick else Giving.ALL) for g in state.gpus.values()]
    return unhealthy_mask(units * len(gpus), 0, gpus).bit_count()


SHARES = (1, 10, 24576)


@pytest.mark.parametrize("recovers", [True, False], ids=["recovers", "does not"])
@pytest.mark.parametrize("number", [x.number for x in CATALOGUE] + [4711])
def test_every_xid(number: int, recovers: bool) -> None:
    bench = Bench()
    bench.xid(number)
    xid_class = CATALOGUE[number].xid_class
    sick = xid_class in (XidClass.FATAL, XidClass.UNKNOWN)
    assert bench.monitor.state.sick == ({UUIDS[0]} if sick else set()), "the other GPU is never touched"
    for units in SHARES:
        assert unhealthy_tokens(bench.monitor.state, units) == (units if sick else 0)
    assert [e.xid.number for e in bench.events if e.xid] == [number]
    if not recovers:
        bench.backend.values[UUIDS[0]] = {"recovery_action": "reset"}
    bench.poll(12)  # 60 s: the hold
    still = bench.monitor.state.sick
    assert still == (set() if recovers else {UUIDS[0]}), bench.conditions()
    for units in SHARES:
        assert unhealthy_tokens(bench.monitor.state, units) == units * len(still)
    if sick and recovers:
        assert bench.changes[-1].recovered == {UUIDS[0]}


def test_an_xid_is_told_before_anybody_polls() -> None:
    bench = Bench()
    reads = len(bench.backend.reads)
    bench.xid(79)
    assert bench.changes[-1].became_sick == {UUIDS[0]}
    assert bench.changes[-1].raised[0].message.endswith("power and cooling of the GPU.")
    assert bench.changes[-1].raised[0].facts["xid"] == 79
    assert len(bench.backend.reads) == reads


def test_operators_change_classes() -> None:
    bench = Bench(config=HealthConfig(xid_classes={"79": "app"}))
    bench.xid(79)
    assert not bench.monitor.state.sick
    bench.monitor.configure(HealthConfig(), CATALOGUE, POLL_S)
    bench.now += 10
    bench.xid(79)
    assert bench.monitor.state.sick


def test_a_burst_is_one_event_and_goes_on_holding() -> None:
    bench = Bench()
    for _ in range(30):
        bench.xid(119)
        bench.poll()
        bench.now -= POLL_S - 1  # one a second
    told = [e for e in bench.events if e.xid]
    assert len(told) == 1
    bench.poll(11)
    assert bench.monitor.state.sick, "held from the last of the burst"
    bench.poll(2)
    assert not bench.monitor.state.sick


def test_an_endless_burst_is_told_once_a_minute_with_its_count() -> None:
    bench = Bench()
    for _ in range(int(BURST_MAX_S) + 1):
        bench.xid(45)
        bench.now += 1
    assert [e.repeats for e in bench.events] == [0, 59]


def test_the_same_xid_from_driver_and_kernel_log_is_one() -> None:
    bench = Bench()
    bench.monitor.handle_event(GpuEvent(GpuEventKind.XID, UUIDS[0], 79, source="nvml"))
    bench.monitor.handle_event(GpuEvent(GpuEventKind.XID, UUIDS[0], 79, source="kernel_log"), 0.1)
    assert len(bench.events) == 1
    bench.xid(79, UUIDS[1])
    assert len(bench.events) == 2


def test_an_old_kernel_line_is_told_but_takes_nothing_away() -> None:
    bench = Bench()
    bench.xid(79, age_s=3600.0)
    assert len(bench.events) == 1
    assert bench.events[0].at_ms == round((1_700_000_000 + bench.now - 3600) * 1000)
    assert not bench.monitor.state.sick
    bench.xid(95, age_s=50.0)
    assert bench.monitor.state.sick
    bench.poll(2)
    assert not bench.monitor.state.sick, "it happened 60 s ago by now"


def test_an_xid_of_a_gpu_we_do_not_know_is_told_only() -> None:
    bench = Bench()
    bench.xid(79, None)
    bench.xid(79, "GPU-unknown")
    assert len(bench.events) == 2
    assert not bench.monitor.state.sick


# -- polls ---------------------------------------------------------------------------------------------


def test_a_lost_gpu_is_seen_in_one_poll_and_comes_back_within_two() -> None:
    """Field case D3: only the lost one, once, with its address; the other is not disturbed."""
    bench = Bench()
    bench.backend.faults[UUIDS[1]] = GpuFault.LOST
    state = bench.poll()
    assert state.sick == {UUIDS[1]}
    raised = [c for change in bench.changes for c in change.raised]
    assert [(c.type, c.gpu_uuid, c.facts["pci"]) for c in raised] == [("Lost", UUIDS[1], "0000:66:00.0")]
    bench.poll(5)
    assert [c for change in bench.changes for c in change.raised] == raised, "told once"
    del bench.backend.faults[UUIDS[1]]
    assert bench.poll(1).sick == {UUIDS[1]}
    assert bench.poll(1).sick == set()


def test_polls_that_stop_are_said_to_be_late_and_driver_calls_that_hang_are_not() -> None:
    bench = Bench(gpus=2)
    bench.now += 2 * POLL_S + 4 * 10.0 + LATE_S
    assert bench.monitor.late(call_timeout_s=10.0) is None
    bench.now += 1
    bench.xid(13)
    assert bench.monitor.late(call_timeout_s=10.0) == "GPUs were last read 81 s ago instead of every 5 s"
    bench.poll()
    assert bench.monitor.late(call_timeout_s=10.0) is None


def test_a_gpu_that_is_not_listed_is_not_read_and_keeps_its_identity() -> None:
    """Field case X1: 1 -> 0 -> 1."""
    bench = Bench(gpus=1)
    bench.backend.faults[UUIDS[0]] = GpuFault.NOT_FOUND
    bench.backend.missing.add(UUIDS[0])
    bench.poll()  # sees the fault; from now on the inventory is asked
    bench.poll()
    reads = len(bench.backend.reads)
    state = bench.poll(3)
    assert len(bench.backend.reads) == reads
    assert (state.gpus[UUIDS[0]].present, bench.conditions()) == (False, ["Lost"])
    bench.backend.missing.clear()
    bench.backend.faults.clear()
    state = bench.poll(2)
    assert (state.gpus[UUIDS[0]].present, bench.conditions()) == (True, [])


def test_a_gpu_that_is_plugged_in_is_found() -> None:
    places = ["0000:65:00.0"]
    bench = Bench(gpus=1, gpu_places=lambda: list(places))
    bench.backend.gpus.append(make_gpu(1))
    inventories = bench.backend.inventories
    bench.poll(3)
    assert bench.backend.inventories == inventories, "no fresh look while nothing hints at it"
    places.append("0000:66:00.0")
    assert list(bench.poll().gpus) == list(UUIDS)
    assert bench.changes[-1].inventory


def test_a_driver_upgrade_under_the_agent() -> None:
    """Field case D2: all GPUs unhealthy but known, the reason told, and back by itself."""
    bench = Bench()
    detail = "the NVIDIA library is 550.107.02 but the loaded kernel module is 550.90.07: reboot"
    bench.backend.inventory_fault = (GpuFault.DRIVER_MISMATCH, detail)
    bench.backend.faults = dict.fromkeys(UUIDS, GpuFault.DRIVER_MISMATCH)
    state = bench.poll(2)
    assert state.sick == set(UUIDS)
    assert {c.type for c in state.all_conditions()} == {"DriverMismatch"}
    assert not state.conditions, "said once a GPU, not again for the node"
    bench.backend.inventory_fault = None
    bench.backend.faults = {}
    assert bench.poll(2).sick == set()


def test_a_node_that_starts_without_a_driver_says_so_and_recovers() -> None:
    backend = ScriptedBackend([make_gpu()])
    backend.inventory_fault = (GpuFault.DRIVER_NOT_LOADED, "the nvidia kernel module is not loaded")
    monitor = HealthMonitor(backend, HealthConfig(), CATALOGUE)
    state = monitor.poll_once()
    assert [(c.type, c.message) for c in state.conditions] == [
        ("DriverNotLoaded", "the nvidia kernel module is not loaded")
    ]
    backend.inventory_fault = None
    state = monitor.poll_once()
    assert not state.conditions
    assert list(state.gpus) == [UUIDS[0]]


def test_a_card_whose_driver_differs_beside_a_jetsons_gpu_says_so() -> None:
    bench = Bench()
    bench.backend.inventory_fault = (GpuFault.DRIVER_MISMATCH, "library 550.107.02, module 550.90.07")
    bench.backend.faults[UUIDS[1]] = GpuFault.DRIVER_MISMATCH
    bench.backend.hides_not = {UUIDS[0]}
    state = bench.poll(3)
    assert state.sick == {UUIDS[1]}
    assert (bench.conditions(UUIDS[0]), bench.conditions(UUIDS[1])) == ([], ["DriverMismatch"])
    assert not state.conditions
    bench.backend.inventory_fault = None
    bench.backend.faults = {}
    assert bench.poll(2).all_conditions() == ()


def test_a_card_that_was_never_seen_is_missed_beside_a_jetsons_gpu() -> None:
    """It is no GPU yet: the node says what keeps it away."""
    backend = ScriptedBackend([make_gpu(0), make_gpu(1)])
    backend.inventory_fault = (GpuFault.DRIVER_NOT_LOADED, "the nvidia kernel module is not loaded")
    backend.hides_not = {UUIDS[0]}
    monitor = HealthMonitor(backend, HealthConfig(), CATALOGUE)
    state = monitor.poll_once()
    assert (list(state.gpus), state.sick) == ([UUIDS[0]], set())
    assert [c.type for c in state.conditions] == ["DriverNotLoaded"]
    backend.inventory_fault = None
    state = monitor.poll_once()
    assert (list(state.gpus), state.conditions) == (list(UUIDS), ())


def test_losing_our_own_device_access_asks_for_a_restart_once_and_blames_no_gpu() -> None:
    """Field case X3."""
    bench = Bench()
    bench.backend.inventory_fault = (GpuFault.LOST_DEVICE_ACCESS, "this process lost access")
    bench.backend.faults = dict.fromkeys(UUIDS, GpuFault.LOST_DEVICE_ACCESS)
    state = bench.poll(3)
    assert len(bench.restarts) == 1
    assert not state.sick
    assert [c.type for c in state.conditions] == ["LostDeviceAccess"]


def test_a_hanging_driver_is_a_condition_and_the_gpu_comes_back() -> None:
    bench = Bench()
    bench.backend.faults[UUIDS[0]] = GpuFault.UNRESPONSIVE
    bench.poll()
    assert bench.conditions() == ["DriverUnresponsive"]
    del bench.backend.faults[UUIDS[0]]
    bench.poll(2)
    assert bench.conditions() == []


@pytest.mark.parametrize(
    ("fault", "condition"),
    [("unresponsive", "DriverUnresponsive"), ("lost", "Lost"), ("not_supported", "NotReady")],
)
def test_a_back_end_that_raises_is_believed(fault: str, condition: str) -> None:
    bench = Bench()

    def read(uuid: str) -> GpuReading:
        raise GpuError("no", fault)

    bench.backend.read = read  # type: ignore[method-assign]
    bench.poll()
    assert bench.conditions() == [condition]


def test_another_fault_takes_the_place_of_the_first() -> None:
    bench = Bench()
    bench.backend.faults[UUIDS[0]] = GpuFault.UNRESPONSIVE
    bench.poll()
    bench.backend.faults[UUIDS[0]] = GpuFault.LOST
    bench.poll(2)
    assert bench.conditions() == ["Lost"]


def test_an_unavailable_gpu_is_what_its_reading_says() -> None:
    bench = Bench()
    bench.backend.faults[UUIDS[0]] = GpuFault.LOST
    bench.monitor.handle_event(GpuEvent(GpuEventKind.UNAVAILABLE, UUIDS[0]))
    bench.poll()
    assert bench.conditions() == ["Lost"]
    bench.monitor.handle_event(GpuEvent(GpuEventKind.UNAVAILABLE, UUIDS[1]))
    bench.poll()
    assert bench.conditions(UUIDS[1]) == ["Unavailable"]
    bench.poll(2)
    assert bench.conditions(UUIDS[1]) == []


def test_a_failing_wait_that_names_no_gpu_blames_none() -> None:
    bench = Bench()
    bench.monitor.handle_event(GpuEvent(GpuEventKind.UNAVAILABLE, None))
    assert not bench.poll().sick


def test_who_is_hurt_is_in_the_condition_and_follows_the_pods() -> None:
    pods = ["default/a"]
    bench = Bench(pods_on=lambda uuid: tuple(pods) if uuid == UUIDS[0] else ())
    bench.xid(79)
    assert bench.changes[-1].raised[0].pods_hurt == ("default/a",)
    pods.append("default/b")
    bench.poll()
    assert bench.changes[-1].updated[0].pods_hurt == ("default/a", "default/b")
    told = len(bench.changes)
    bench.poll()
    assert len(bench.changes) == told, "nothing new, nothing told"


def test_host_use_is_compared_with_what_is_promised() -> None:
    use = HostUse(6000.0, ((1, "Xorg", 450.0),))
    bench = Bench(
        gpus=1,
        books=lambda _: Books(8000, 4096),
        usage=lambda gpu, reading: GpuUsage(gpu.uuid, 6000.0, (), use, 0.0),
    )
    bench.poll()
    assert bench.conditions() == ["HostOvercommit"]
    assert not bench.monitor.state.sick
    assert bench.monitor.state.gpus[UUIDS[0]].usage is not None


def test_kernel_log_devices_are_found_from_memory() -> None:
    bench = Bench()
    inventories, reads = bench.backend.inventories, len(bench.backend.reads)
    assert bench.monitor.gpu_at("0000:66:00.0") == UUIDS[1]
    assert bench.monitor.gpu_at("0000:99:00.0") is None
    assert bench.monitor.gpu_at("17000000.gpu") is None
    bench.backend.gpus = [make_gpu(kind=GpuKind.INTEGRATED, pci_address=None)]
    assert (bench.backend.inventories, len(bench.backend.reads)) == (inventories, reads)
    bench.monitor.rescan()
    bench.poll()
    assert bench.monitor.gpu_at("17000000.gpu") == UUIDS[0]


# -- GPUs of the last run ------------------------------------------------------------------------------


def remembering(tmp_path: Path, backend: ScriptedBackend, now_s: float = 1_700_000_000.0) -> HealthMonitor:
    return HealthMonitor(
        backend, DEFAULTS, CATALOGUE, remembered=RememberedGpus(tmp_path / "gpus.json"), unix=lambda: now_s
    )


def test_a_gpu_that_does_not_come_up_after_a_reboot_is_missed(tmp_path: Path) -> None:
    backend = ScriptedBackend([make_gpu(0), make_gpu(1)])
    remembering(tmp_path, backend).poll_once()
    backend.missing.add(UUIDS[1])
    monitor = remembering(tmp_path, backend)
    assert monitor.gpu_at("0000:66:00.0") == UUIDS[1], "kernel log lines find it before anything else ran"
    state = monitor.poll_once()
    assert list(state.gpus) == list(UUIDS)
    assert (state.sick, state.gpus[UUIDS[1]].present) == ({UUIDS[1]}, False)
    assert state.gpus[UUIDS[1]].gpu.memory_total_mib == 8192
    backend.missing.clear()
    assert monitor.poll_once().gpus[UUIDS[1]].present


def test_a_driver_that_is_broken_at_the_start_does_not_lose_the_gpus(tmp_path: Path) -> None:
    backend = ScriptedBackend([make_gpu(0)])
    remembering(tmp_path, backend).poll_once()
    backend.inventory_fault = (GpuFault.DRIVER_MISMATCH, "library and module differ")
    state = remembering(tmp_path, backend).poll_once()
    assert [c.type for c in state.all_conditions()] == ["DriverMismatch"]
    assert state.sick == {UUIDS[0]}


def test_a_card_that_was_exchanged_is_forgotten(tmp_path: Path) -> None:
    backend = ScriptedBackend([make_gpu(0)])
    remembering(tmp_path, backend).poll_once()
    other = ScriptedBackend([make_gpu(1, pci_address="0000:65:00.0")])
    state = remembering(tmp_path, other).poll_once()
    assert (list(state.gpus), state.sick) == ([UUIDS[1]], set())


@pytest.mark.parametrize(
    ("spoil", "known"),
    [
        (lambda path: None, 1),
        (lambda path: path.unlink(), 0),
        (lambda path: path.write_text("{"), 0),
        (lambda path: path.write_text('{"seenMs": 1700000000000, "gpus": [{"uuid": 3}]}'), 0),
        (lambda path: path.write_text('{"seenMs": 1, "gpus": []}'), 0),
    ],
    ids=["kept", "deleted", "damaged", "no GPU", "old"],
)
def test_the_file_is_no_obstacle(tmp_path: Path, spoil: Callable[[Path], object], known: int) -> None:
    backend = ScriptedBackend([make_gpu(0)])
    remembering(tmp_path, backend).poll_once()
    spoil(tmp_path / "gpus.json")
    assert len(remembering(tmp_path, backend).state.gpus) == known


def test_after_a_week_a_missing_gpu_is_forgotten(tmp_path: Path) -> None:
    backend = ScriptedBackend([make_gpu(0)])
    remembering(tmp_path, backend).poll_once()
    assert remembering(tmp_path, backend, 1_700_000_000.0 + 8 * 86400).state.gpus == {}


def test_simulated_gpus_are_not_remembered(tmp_path: Path) -> None:
    backend = ScriptedBackend([make_gpu(0, source="simulated")])
    remembering(tmp_path, backend).poll_once()
    assert remembering(tmp_path, backend).state.gpus == {}


def test_events_are_counted_by_gpu_and_number() -> None:
    bench = Bench()
    bench.xid(79)
    bench.xid(13)
    bench.xid(13)
    assert bench.monitor.counters == {
        f'xid_events_total{{gpu_uuid="{UUIDS[0]}",xid="79"}}': 1,
        f'xid_events_total{{gpu_uuid="{UUIDS[0]}",xid="13"}}': 1,
    }


# -- services ------------------------------------------------------------------------------------------


def run_service(service: Callable[[threading.Event], None]) -> tuple[threading.Thread, threading.Event]:
    stop = threading.Event()
    thread = threading.Thread(target=service, args=(stop,))
    thread.start()
    return thread, stop


def test_the_services_stop_when_woken() -> None:
    backend = ScriptedBackend([make_gpu()])
    monitor = HealthMonitor(backend, HealthConfig(), CATALOGUE, poll_seconds=300)
    for service in (monitor.poll, monitor.events):
        thread, stop = run_service(service)
        stop.set()
        monitor.wake()
        thread.join(5)
        assert not thread.is_alive()


def test_an_event_is_told_while_a_poll_hangs() -> None:
    backend = ScriptedBackend([make_gpu()])
    release, inside = threading.Event(), threading.Event()
    plain_read = backend.read
    monitor = HealthMonitor(backend, HealthConfig(), CATALOGUE, poll_seconds=300)
    monitor.poll_once()

    def hanging_read(uuid: str) -> object:
        inside.set()
        release.wait(20)
        return plain_read(uuid)

    backend.read = hanging_read  # type: ignore[assignment,method-assign]
    told = threading.Event()
    monitor.on_change(lambda _, change: told.set() if change.became_sick else None)
    poller, stop_poll = run_service(monitor.poll)
    waiter, stop_wait = run_service(monitor.events)
    try:
        monitor.poll_now()
        assert inside.wait(5)
        backend.put(GpuEvent(GpuEventKind.XID, UUIDS[0], 79))
        assert told.wait(5)
    finally:
        stop_poll.set()
        stop_wait.set()
        release.set()
        monitor.wake()
        poller.join(5)
        waiter.join(5)


def test_a_wait_that_fails_is_not_repeated_at_once() -> None:
    backend = ScriptedBackend([make_gpu()])
    backend.wait_error = GpuError("no events here")
    monitor = HealthMonitor(backend, HealthConfig(), CATALOGUE, poll_seconds=300)
    thread, stop = run_service(monitor.events)
    thread.join(0.3)
    stop.set()
    thread.join(5)
    assert not thread.is_alive()
    assert backend.waits == 1


def test_a_fatal_event_makes_the_poll_look_at_once() -> None:
    backend = ScriptedBackend([make_gpu()])
    monitor = HealthMonitor(backend, HealthConfig(), CATALOGUE, poll_seconds=300)
    monitor.poll_once()
    seen = threading.Event()
    monitor.on_change(
        lambda _, change: seen.set() if any(c.type == "RecoveryAction" for c in change.raised) else None
    )
    backend.values[UUIDS[0]] = {"recovery_action": "reset"}
    thread, stop = run_service(monitor.poll)
    try:
        monitor.handle_event(GpuEvent(GpuEventKind.RECOVERY_ACTION, UUIDS[0]))
        assert seen.wait(5)
    finally:
        stop.set()
        monitor.wake()
        thread.join(5)
    assert monitor.state.gpus[UUIDS[0]].conditions[0].type == ConditionType.RECOVERY_ACTION.value
