"""Health over the fake NVML library and generated host trees: the field cases, end to end up to the
state that everything else reads."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgeagent.config import HealthConfig
from edgeagent.gpus.guard import GuardedBackend
from edgeagent.gpus.model import Gpu, GpuFault, GpuReading
from edgeagent.gpus.nvml import NvmlBackend
from edgeagent.health.conditions import Books, withdrawn_mib
from edgeagent.health.monitor import HealthChange, HealthMonitor, HealthState, SeenEvent, Surroundings
from edgeagent.health.usage import GpuUsage, attribute
from edgeagent.health.xid import load_catalogue
from edgeagent.hostroot import HostRoot
from edgeagent.node.kmsg import KernelLog
from edgeagent.node.processes import Processes
from tests.fakes.nvml import FakeNvml
from tests.fakes.nvml import host as hosts
from tests.fakes.nvml.driver import EVENT_DOUBLE_BIT_ECC, EVENT_RECOVERY_ACTION, LIB_RM_VERSION_MISMATCH

POD = "6c1d8ae2-5b3f-4a6e-9f30-0d1e2f3a4b5c"
C = "ab" * 32
POLL_S = 5.0


class Rig:
    """A monitor over a real back end; time moves by hand unless the services run."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "host"
        self.fake = FakeNvml(tmp_path / "nvml")
        self.now = 1000.0
        self.books: dict[str, Books] = {}
        self.changes: list[HealthChange] = []
        self.events: list[SeenEvent] = []
        self.restarts: list[str] = []
        self.changed = threading.Condition()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, config: HealthConfig | None = None, clock: Callable[[], float] | None = None) -> None:
        hosts.nvidia_host(self.root, self.fake)
        host = HostRoot(self.root)
        self.processes = Processes(host)
        inner = NvmlBackend(host, str(self.fake.library_path), call_timeout_s=2.0)
        self.backend = GuardedBackend(inner, call_timeout_s=0.3)
        self.monitor = HealthMonitor(
            self.backend,
            config or HealthConfig(),
            load_catalogue(),
            poll_seconds=POLL_S,
            surroundings=Surroundings(
                books=self.books.get,
                usage=self.usage,
                gpu_places=lambda: host.listdir("/proc/driver/nvidia/gpus"),
                restart_needed=self.restarts.append,
            ),
            mono=clock or (lambda: self.now),
        )
        self.monitor.on_change(self._on_change)
        self.monitor.on_event(self.events.append)
        self.monitor.poll_once()

    def usage(self, gpu: Gpu, reading: GpuReading) -> GpuUsage:
        return attribute(gpu, reading, self.processes.find_all(p.pid for p in reading.processes or ()))

    def _on_change(self, state: HealthState, change: HealthChange) -> None:
        with self.changed:
            self.changes.append(change)
            self.changed.notify_all()

    def run_services(self) -> None:
        for service in (self.monitor.poll, self.monitor.events):
            thread = threading.Thread(target=service, args=(self._stop,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 10)

    def close(self) -> None:
        self.fake.release()
        self._stop.set()
        self.monitor.wake()
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive()
        self.backend.close()

    def poll(self, times: int = 1) -> HealthState:
        for _ in range(times):
            self.now += POLL_S
            self.monitor.poll_once()
        return self.monitor.state

    def types(self, uuid: str) -> list[str]:
        return [c.type for c in self.monitor.state.gpus[uuid].conditions]

    def process(self, pid: int, name: str, cgroup: str) -> None:
        fields = "S 1 1 1 0 -1 0 1 0 0 0 5 6 0 0 20 0 8 0 777 1000 200"
        hosts.write(self.root, f"/proc/{pid}/stat", f"{pid} ({name}) {fields}")
        hosts.write(self.root, f"/proc/{pid}/cgroup", cgroup)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_an_xid_makes_its_gpu_sick_and_no_other(rig: Rig) -> None:
    first, second = rig.fake.add("l4"), rig.fake.add("l4")
    rig.start()
    rig.run_services()
    rig.fake.xid(second, 79)
    rig.wait_for(lambda: rig.monitor.state.sick == {second})
    rig.fake.xid(first, 13)
    rig.fake.event(first, EVENT_DOUBLE_BIT_ECC)
    rig.wait_for(lambda: rig.monitor.state.sick == {first, second})
    assert rig.types(first) == ["EccUncorrectable"]
    assert [e.event.xid for e in rig.events if e.xid] == [79, 13]


def test_one_gpu_of_two_falls_off_the_bus_and_comes_back(rig: Rig) -> None:
    """D3: no XID, everything about GPU1 answers 15; GPU0 is not disturbed, GPU1 not called."""
    first, second = rig.fake.add("l4", bus=0x65), rig.fake.add("l4", bus=0xB3)
    rig.start()
    before = rig.monitor.state.gpus[first].gpu
    rig.fake.lose(second)
    assert rig.poll().sick == {second}
    condition = rig.monitor.state.gpus[second].conditions[0]
    assert (condition.type, condition.facts["pci"], condition.gpu_uuid) == ("Lost", "0000:b3:00.0", second)
    rig.poll()
    mark = rig.fake.mark()
    rig.poll(3)
    touched = [c.symbol for c in rig.fake.calls(mark, gpu=second) if c.mark != "lookup"]
    assert touched == [], "only its handle is asked for, to see whether it is back"
    assert len([c for change in rig.changes for c in change.raised]) == 1
    rig.fake.recover(second)
    state = rig.poll(2)
    assert state.sick == set()
    assert state.gpus[first].gpu == before
    assert [change.recovered for change in rig.changes if change.recovered] == [{second}]


def test_a_driver_upgraded_under_the_agent(rig: Rig) -> None:
    """D2: both GPUs unhealthy within one poll with both versions, and healthy again by themselves."""
    uuids = {rig.fake.add("l4"), rig.fake.add("l4")}
    rig.start()
    rig.fake.all_calls(LIB_RM_VERSION_MISMATCH)
    hosts.kernel_module(rig.root, "550.90.07")
    state = rig.poll()
    assert state.sick == uuids
    for uuid in uuids:
        assert rig.types(uuid) == ["DriverMismatch"]
        assert "550.90.07" in state.gpus[uuid].conditions[0].message
    rig.poll(3)
    rig.fake.all_calls(None)
    assert rig.poll(2).sick == set()


def test_a_mismatch_that_is_there_at_the_start(rig: Rig) -> None:
    uuid = rig.fake.add("l4")
    rig.fake.all_calls(LIB_RM_VERSION_MISMATCH)
    rig.start()
    assert [c.type for c in rig.monitor.state.conditions] == ["DriverMismatch"]
    rig.fake.all_calls(None)
    state = rig.poll()
    assert (list(state.gpus), state.conditions) == ([uuid], ())


def test_a_call_that_hangs_hurts_only_its_gpu(rig: Rig) -> None:
    """X2."""
    first, second = rig.fake.add("l4"), rig.fake.add("l4")
    rig.start()
    rig.fake.hang("nvmlDeviceGetUtilizationRates", second)
    assert rig.poll().sick == {second}
    assert rig.types(second) == ["DriverUnresponsive"]
    assert rig.monitor.state.gpus[first].reading is not None
    assert rig.monitor.state.gpus[first].reading.fault is None
    started = time.monotonic()
    rig.poll(5)
    assert time.monotonic() - started < 2.0, "a GPU that hangs is waited for once, not at every poll"
    rig.fake.release()
    for _ in range(50):
        if not rig.poll().sick:
            break
    assert rig.types(second) == []


def test_a_card_comes_and_goes(rig: Rig) -> None:
    """X1: 1 -> 0 -> 1, same identity."""
    uuid = rig.fake.add("rtx-a2000")
    rig.start()
    rig.fake.remove(uuid)
    hosts.nvidia_host(rig.root, rig.fake)
    state = rig.poll(2)
    assert rig.types(uuid) == ["Lost"]
    assert not state.gpus[uuid].present
    rig.fake.insert(uuid)
    hosts.nvidia_host(rig.root, rig.fake)
    state = rig.poll(2)
    assert rig.types(uuid) == []
    assert list(state.gpus) == [uuid]


def test_a_card_is_added(rig: Rig) -> None:
    rig.fake.add("rtx-a2000")
    rig.start()
    added = rig.fake.add("l4")
    hosts.nvidia_host(rig.root, rig.fake)
    assert added in rig.poll().gpus


def test_our_own_device_access_is_lost(rig: Rig) -> None:
    """X3: after systemd's daemon-reload every call answers 999 in here while the driver is fine."""
    rig.fake.add("l4")
    rig.start()
    rig.fake.all_calls(999)
    rig.poll(4)
    assert len(rig.restarts) == 1
    assert [c.type for c in rig.monitor.state.all_conditions()] == ["LostDeviceAccess"]
    assert not [c for change in rig.changes for c in change.raised if c.gpu_uuid], "no GPU is blamed for it"


def test_a_reset_that_the_driver_asks_for(rig: Rig) -> None:
    uuid = rig.fake.add("l4")
    rig.start()
    rig.run_services()
    rig.fake.set(uuid, recovery_action=1)
    rig.fake.event(uuid, EVENT_RECOVERY_ACTION)
    rig.wait_for(lambda: rig.types(uuid) == ["RecoveryAction"])
    assert rig.monitor.state.gpus[uuid].conditions[0].facts["action"] == "reset"


def test_a_fatal_xid_recovers_after_its_hold_and_only_when_the_driver_is_content(rig: Rig) -> None:
    uuid = rig.fake.add("l4")
    rig.start(HealthConfig(xid_hold_seconds=60))
    rig.fake.set(uuid, recovery_action=1)
    rig.fake.xid(uuid, 95)
    event = rig.backend.wait_event(10)
    assert event is not None
    rig.monitor.handle_event(event)
    rig.poll(30)
    assert rig.types(uuid) == ["XidFatal", "RecoveryAction"]
    rig.fake.set(uuid, recovery_action=0)
    assert rig.poll(2).sick == set()


def test_heat(rig: Rig) -> None:
    uuid = rig.fake.add("l4")
    rig.start()
    rig.fake.set(uuid, temperature_c=92, throttle=0x40)
    assert rig.poll().sick == set()
    assert rig.poll().sick == {uuid}
    assert rig.types(uuid) == ["ThermalSlowdown", "OverTemperature"]
    rig.fake.set(uuid, temperature_c=None, throttle=0)
    rig.poll(5)
    assert rig.types(uuid) == ["OverTemperature"], "a sensor that is silent does not clear an alarm"
    rig.fake.set(uuid, temperature_c=60)
    assert rig.poll(2).sick == set()


def test_uncorrectable_errors(rig: Rig) -> None:
    uuid = rig.fake.add("l4", ecc_uncorrectable=3)
    rig.start(HealthConfig(xid_hold_seconds=30))
    assert rig.types(uuid) == []
    rig.fake.set(uuid, ecc_uncorrectable=5)
    rig.poll()
    assert rig.types(uuid) == ["EccUncorrectable"]
    rig.poll(5)
    assert rig.types(uuid) == ["EccUncorrectable"]
    rig.poll(1)
    assert rig.types(uuid) == []


def test_use_is_one_number_per_container(rig: Rig) -> None:
    """E2: a PID in two lists, one that vanished, and parts that sum up."""
    uuid = rig.fake.add("rtx-3070", memory_used_mib=2400)
    rig.start()
    rig.process(4100, "python3", f"0::/kubepods/burstable/pod{POD}/{C}")
    rig.process(900, "Xorg", "0::/user.slice/user-1000.slice/session-2.scope")
    rig.fake.processes(uuid, compute=[(4100, 1660), (4101, 200)], graphics=[(4100, 1660), (900, 450)])
    usage = rig.poll().gpus[uuid].usage
    assert usage is not None
    use = usage.of(POD)
    assert use is not None
    assert (use.used_mib, use.container_id, use.pids) == (1660.0, C, (4100,))
    assert usage.host is not None
    assert usage.host.processes == ((900, "Xorg", 450.0),)
    assert usage.unattributed_mib is not None
    total = use.used_mib + usage.host.used_mib + usage.unattributed_mib
    assert total == pytest.approx(2400, rel=0.01)


def test_the_host_grows_into_what_is_promised(rig: Rig) -> None:
    """E3."""
    uuid = rig.fake.add("rtx-3070", memory_used_mib=2660)
    usable = 8192 - 214
    rig.books[uuid] = Books(usable, 0)
    rig.start()
    for pid, name in ((10, "Xorg"), (11, "gnome-shell"), (12, "python")):
        rig.process(pid, name, "0::/user.slice/user-1000.slice")
    rig.fake.processes(uuid, graphics=[(10, 450), (11, 210)], compute=[(12, 2000)])
    usage = rig.poll().gpus[uuid].usage
    assert usage is not None
    assert usage.host is not None
    assert {name for _, name, _ in usage.host.processes} == {"Xorg", "gnome-shell", "python"}
    assert withdrawn_mib(rig.books[uuid], usage.beyond_promises_mib(())) == 2660
    rig.books[uuid] = Books(usable, 4096, holders=frozenset({POD}))
    rig.fake.set(uuid, memory_used_mib=6000)
    rig.fake.processes(uuid, compute=[(12, 6000)])
    rig.poll()
    (condition,) = rig.monitor.state.gpus[uuid].conditions
    assert condition.type == "HostOvercommit"
    assert condition.facts["hostUsedMiB"] == 6000
    assert condition.facts["overcommittedMiB"] == 4096 + 6000 - usable
    assert not rig.monitor.state.sick, "running pods' shares are not withdrawn"


def test_a_death_that_only_the_kernel_log_tells(rig: Rig, tmp_path: Path) -> None:
    """X5: three lines without an XID, mapped from memory while the driver answers nothing."""
    uuid = rig.fake.add("l4", bus=0xB3)
    rig.start()
    mark = rig.fake.mark()
    lines = (
        "NVRM: The NVIDIA GPU 0000:b3:00.0",
        "NVRM: (PCI ID: 10de:26b5) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    )
    hosts.write(rig.root, "/dev/kmsg", "".join(f"3,{i},1,-;{line}\n" for i, line in enumerate(lines)))
    log = KernelLog(
        HostRoot(rig.root), tmp_path, rig.monitor.gpu_at, rig.monitor.handle_event, clock=lambda: 1.0
    )
    stop = threading.Event()
    thread = threading.Thread(target=log.run, args=(stop,))
    thread.start()
    try:
        rig.wait_for(lambda: rig.monitor.state.sick == {uuid})
    finally:
        stop.set()
        log.wake()
        thread.join(5)
    assert rig.monitor.state.gpus[uuid].conditions[0].facts["source"] == "kernel_log"
    assert rig.fake.calls(mark) == [], "no call was needed"


def test_a_gpu_without_any_readings_is_no_sick_gpu(rig: Rig) -> None:
    uuid = rig.fake.add("rtx-3070")
    for reading in ("temperature_c", "power_w", "util_pct", "throttle", "process_lists", "fan_pct"):
        rig.fake.set(uuid, **{reading: None})
    rig.start()
    rig.poll(5)
    assert rig.types(uuid) == []
    reading = rig.monitor.state.gpus[uuid].reading
    assert reading is not None
    assert reading.fault is None
    assert reading.fault is not GpuFault.FAILED


@pytest.mark.bench
def test_event_latency(rig: Rig) -> None:
    """From the line in the fake driver's event log to the listeners' call; prints, asserts nothing."""
    uuid = rig.fake.add("l4")
    rig.start(clock=lambda: rig.now)
    rig.run_services()
    latencies_ms: list[float] = []
    for _ in range(200):
        rig.now += 61.0  # past the burst window
        seen = len(rig.events)
        started = time.perf_counter()
        rig.fake.xid(uuid, 79)
        while len(rig.events) == seen:
            time.sleep(0.0002)
        latencies_ms.append((time.perf_counter() - started) * 1000)
    q = statistics.quantiles(latencies_ms, n=100)
    print(f"\nevent to listener: p50 {q[49]:.1f} ms, p99 {q[98]:.1f} ms, max {max(latencies_ms):.1f} ms")
