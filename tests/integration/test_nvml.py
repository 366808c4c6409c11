"""The NVML back end over the fake library: identity, readings, events, loss and the way back."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgeagent.errors import GpuError
from edgeagent.gpus.guard import GuardedBackend
from edgeagent.gpus.model import GpuEvent, GpuEventKind, GpuFault, GpuKind, GpuLink, GpuProcess, ProcessType
from edgeagent.gpus.nvml import NvmlBackend
from edgeagent.hostroot import HostRoot
from tests.fakes.nvml import FakeNvml, Mig
from tests.fakes.nvml import host as hosts
from tests.fakes.nvml.driver import MIB, NO_PERMISSION, NOT_SUPPORTED, TOPOLOGY, UNKNOWN

LONG_S = 30.0
LOOKUPS = "lookup"
COMPUTE, GRAPHICS, MPS = ProcessType.COMPUTE, ProcessType.GRAPHICS, ProcessType.MPS


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A scenario, the host files that belong to it, and a back end over both."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.root = tmp_path / "host"
        self.fake = FakeNvml(tmp_path / "nvml")
        self.made: list[NvmlBackend] = []

    def host(self) -> None:
        """Writes the host files for what is plugged in now."""
        hosts.nvidia_host(self.root, self.fake)

    def backend(self, **options: object) -> NvmlBackend:
        if not (self.root / "proc").exists():
            self.host()
        options.setdefault("call_timeout_s", 2.0)
        made = NvmlBackend(HostRoot(self.root), str(self.fake.library_path), **options)  # type: ignore[arg-type]
        self.made.append(made)
        return made


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.fake.release()
    for backend in made.made:
        backend.close()


def touched(rig: Rig, gpu: str, since: int) -> list[str]:
    """Calls about a GPU since a mark, other than asking for its handle."""
    return [c.symbol for c in rig.fake.calls(since, gpu=gpu) if c.mark != LOOKUPS]


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


# ---- identity -----------------------------------------------------------------------------------


def test_a_card_is_described_in_full(rig: Rig) -> None:
    uuid = rig.fake.add("l4", bus=0x65)
    (gpu,) = rig.backend().inventory().gpus
    assert gpu.uuid == uuid
    assert gpu.model == "NVIDIA L4"
    assert gpu.kind is GpuKind.DISCRETE
    assert (gpu.memory_total_mib, gpu.memory_reserved_mib) == (23034, 490)
    assert gpu.compute_capability == (8, 9)
    assert gpu.multiprocessors == 58
    assert gpu.pci_address == "0000:65:00.0"
    assert gpu.minor == 0
    assert gpu.numa_node == 0
    assert gpu.driver_version == "550.90.07"
    assert gpu.cuda_version == "12.4"
    assert (gpu.temperature_slowdown_c, gpu.temperature_shutdown_c) == (90, 95)
    assert gpu.power_limit_w == 72
    assert gpu.facts["architecture"] == "ada-lovelace"
    assert gpu.mig_enabled is None
    assert gpu.display_active is False


@pytest.mark.parametrize(
    ("bus_id", "address"),
    [
        ("00000000:B3:00.0", "0000:b3:00.0"),
        ("0000000F:01:00.0", "000f:01:00.0"),
        ("00010000:0A:00.0", "10000:0a:00.0"),
        (None, None),
    ],
)
def test_pci_addresses_are_as_sysfs_writes_them(rig: Rig, bus_id: str | None, address: str | None) -> None:
    rig.fake.add("rtx-a2000", bus_id=bus_id)
    assert rig.backend().inventory().gpus[0].pci_address == address


@pytest.mark.parametrize(
    ("total", "reserved"),
    # S1: what NVML reports of real cards; 15079 is a T4 under driver 410.
    [(23034, 300), (15360, 300), (16376, 300), (1999, 0), (15079, 0), (81920, 770), (143771, 1200)],
)
def test_used_never_counts_what_the_driver_reserves(rig: Rig, total: int, reserved: int) -> None:
    uuid = rig.fake.add("t4", memory_total_mib=total, memory_reserved_mib=reserved, memory_used_mib=103)
    backend = rig.backend()
    (gpu,) = backend.inventory().gpus
    reading = backend.read(uuid)
    assert (gpu.memory_total_mib, gpu.memory_reserved_mib) == (total, reserved)
    assert reading.memory_used_mib == 103
    assert reading.memory_free_mib == total - reserved - 103


def test_totals_that_are_no_whole_mib_are_floored_and_reserves_ceiled(rig: Rig) -> None:
    rig.fake.add("t4", memory_total=8192 * MIB - 1, memory_reserved=100 * MIB + 1)
    (gpu,) = rig.backend().inventory().gpus
    assert (gpu.memory_total_mib, gpu.memory_reserved_mib) == (8191, 101)


def test_device_nodes_are_those_that_exist(rig: Rig) -> None:
    rig.fake.add("rtx-a2000")
    rig.host()
    (rig.root / "dev/nvidia-modeset").unlink()
    nodes = rig.backend().inventory().gpus[0].device_nodes
    assert nodes == ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


def test_the_node_is_named_by_the_minor_not_the_index(rig: Rig) -> None:
    """R7: six GPUs with three disabled, so index 0 is /dev/nvidia1."""
    rig.fake.add("rtx-a2000", minor=1)
    gpu = rig.backend().inventory().gpus[0]
    assert (gpu.index, gpu.minor) == (0, 1)
    assert gpu.device_nodes[0] == "/dev/nvidia1"


def test_a_minor_that_nvml_does_not_say_comes_from_the_kernel_module(rig: Rig) -> None:
    rig.fake.add("rtx-a2000")
    rig.host()
    rig.fake.error("nvmlDeviceGetMinorNumber", NOT_SUPPORTED)
    assert rig.backend().inventory().gpus[0].device_nodes[0] == "/dev/nvidia0"


def test_wsl(rig: Rig) -> None:
    """D1: NVML works, the minor number is not supported, there is no /dev/nvidia*."""
    uuid = rig.fake.add("rtx-3070", minor=None)
    hosts.wsl_host(rig.root)
    (gpu,) = rig.backend().inventory().gpus
    assert gpu.uuid == uuid
    assert gpu.memory_total_mib == 8192
    assert gpu.device_nodes == ("/dev/dxg",)
    assert rig.made[0].read(uuid).fault is None


def test_wsl_without_its_device_names_no_path(rig: Rig) -> None:
    rig.fake.add("rtx-3070", minor=None)
    hosts.wsl_host(rig.root)
    (rig.root / "dev/dxg").unlink()
    assert rig.backend().inventory().gpus[0].device_nodes == ()


@pytest.mark.parametrize(
    ("model", "name"), [("orin", "Orin (nvgpu)"), ("thor", "NVIDIA Thor"), ("gb10", "NVIDIA GB10")]
)
def test_integrated_gpus_share_the_hosts_memory(rig: Rig, model: str, name: str) -> None:
    """D4, R6: memory is not supported there; it is MemTotal, never 0."""
    uuid = rig.fake.add(model)
    rig.host()
    hosts.meminfo(rig.root, 7_802_880, available_kib=5_000_000, swap_used_kib=1024 * 300)
    backend = rig.backend()
    (gpu,) = backend.inventory().gpus
    assert (gpu.model, gpu.kind, gpu.memory_total_mib) == (name, GpuKind.INTEGRATED, 7620)
    reading = backend.read(uuid)
    assert reading.fault is None
    assert reading.host_memory_available_mib == pytest.approx(5_000_000 / 1024)
    assert reading.host_swap_used_mib == 300
    assert reading.memory_free_mib == reading.host_memory_available_mib


def test_processes_on_unified_memory_are_its_use(rig: Rig) -> None:
    uuid = rig.fake.add("thor")
    backend = rig.backend()
    backend.inventory()
    rig.fake.processes(uuid, compute=[(10, 1000), (11, 500)], graphics=[(10, 1200)])
    assert backend.read(uuid).memory_used_mib == 1700


def test_mixed_cards_keep_the_drivers_order(rig: Rig) -> None:
    """R7: A10, A10, T4, T4 in one node."""
    uuids = [rig.fake.add(m) for m in ("l4", "l4", "t4", "t4")]
    gpus = rig.backend().inventory().gpus
    assert [g.uuid for g in gpus] == uuids
    assert [g.index for g in gpus] == [0, 1, 2, 3]


# ---- MIG ----------------------------------------------------------------------------------------


def test_mig_instances_carry_their_profiles(rig: Rig) -> None:
    """R7: a card with seven 1g.5gb."""
    rig.fake.add("l4")
    uuid = rig.fake.add("a100-40")
    made = rig.fake.mig(uuid, *(Mig(gi=7 + n) for n in range(7)))
    gpu = rig.backend().inventory().gpus[1]
    assert gpu.mig_enabled is True
    assert [i.uuid for i in gpu.mig_instances] == made
    assert {i.profile for i in gpu.mig_instances} == {"1g.5gb"}
    assert [i.gpu_instance_id for i in gpu.mig_instances] == list(range(7, 14))
    assert gpu.mig_instances[0].memory_mib == 4864


@pytest.mark.parametrize(
    ("mig", "card", "profile"),
    [
        (Mig(name=None), "a100-40", "1g.5gb"),
        (Mig(name=None, memory_mib=9856, gi_slices=1, ci_slices=1), "a100-40", "1g.10gb"),
        (Mig(name=None, memory_mib=20096, gi_slices=3, ci_slices=3), "a100-40", "3g.20gb"),
        (Mig(name=None, memory_mib=20096, gi_slices=3, ci_slices=1), "a100-40", "1c.3g.20gb"),
        (Mig(name=None, memory_mib=40192, gi_slices=7, ci_slices=7), "a100-40", "7g.40gb"),
        (Mig(name=None, memory_mib=9728), "a100-80", "1g.10gb"),
        (Mig(profile="1g.5gb+me"), "a100-40", "1g.5gb+me"),
    ],
)
def test_a_profile_is_named_by_the_driver_or_computed(rig: Rig, mig: Mig, card: str, profile: str) -> None:
    uuid = rig.fake.add(card)
    rig.fake.mig(uuid, mig)
    assert rig.backend().inventory().gpus[0].mig_instances[0].profile == profile


def test_mig_capability_nodes(rig: Rig) -> None:
    uuid = rig.fake.add("a100-40")
    rig.fake.mig(uuid, Mig(gi=9, ci=1))
    rig.host()
    base = "/proc/driver/nvidia/capabilities/gpu0/mig/gi9"
    hosts.write(rig.root, f"{base}/access", "DeviceFileMinor: 84\nDeviceFileMode: 292\n")
    hosts.write(rig.root, f"{base}/ci1/access", "DeviceFileMinor: 86\n")
    hosts.write(rig.root, "/dev/nvidia-caps/nvidia-cap84")
    hosts.write(rig.root, "/dev/nvidia-caps/nvidia-cap86")
    (instance,) = rig.backend().inventory().gpus[0].mig_instances
    assert instance.device_nodes == ("/dev/nvidia-caps/nvidia-cap84", "/dev/nvidia-caps/nvidia-cap86")


def test_mig_on_and_off_under_a_running_agent(rig: Rig) -> None:
    uuid = rig.fake.add("a100-40")
    backend = rig.backend()
    assert backend.inventory().gpus[0].mig_enabled is False
    rig.fake.mig(uuid, Mig())
    rig.fake.event(uuid, 0x100)
    event = backend.wait_event(LONG_S)
    assert event is not None
    assert event.kind is GpuEventKind.MIG_CONFIG
    assert len(backend.inventory().gpus[0].mig_instances) == 1
    assert backend.read(uuid).util_pct is None  # not supported with MIG on
    rig.fake.mig_off(uuid)
    assert backend.inventory().gpus[0].mig_instances == ()


def test_a_process_on_two_instances_uses_both_parts(rig: Rig) -> None:
    uuid = rig.fake.add("a100-40")
    rig.fake.mig(uuid, Mig(gi=7), Mig(gi=8))
    rig.fake.processes(uuid, compute=[(50, 100)], gi=7, ci=0)
    rig.fake.processes(uuid, compute=[(50, 30)], gi=8, ci=0)
    backend = rig.backend()
    backend.inventory()
    assert backend.read(uuid).processes == (GpuProcess(50, frozenset({COMPUTE}), 130.0, None),)


# ---- readings -----------------------------------------------------------------------------------


def test_a_reading_in_full(rig: Rig) -> None:
    uuid = rig.fake.add(
        "a100-40", util_pct=57, memory_util_pct=20, temperature_c=61, power_w=212.5, clock_sm_mhz=1410,
        clock_memory_mhz=1215, encoder_util=3, decoder_util=4, throttle=0x4 | 0x40 | 0x8 | 0x100000,
        remapped_rows="1 2 1 1", ecc_uncorrectable=3, recovery_action=4, energy_mj=987654321,
    )  # fmt: skip
    backend = rig.backend()
    backend.inventory()
    r = backend.read(uuid)
    assert r.fault is None
    assert (r.util_pct, r.memory_util_pct, r.encoder_util_pct, r.decoder_util_pct) == (57, 20, 3, 4)
    assert (r.temperature_c, r.power_w, r.energy_mj) == (61, 212.5, 987654321)
    assert (r.clock_sm_mhz, r.clock_memory_mhz) == (1410, 1215)
    assert r.throttle_reasons == {"power_cap", "thermal_hw", "hw_slowdown", "0x100000"}
    assert (r.row_remap_failed, r.row_remap_pending, r.ecc_uncorrectable) == (True, True, 3)
    assert r.recovery_action == "drain_and_reset"
    assert r.fan_pct is None  # a passive card


def test_every_optional_reading_may_be_missing(rig: Rig) -> None:
    uuid = rig.fake.add("rtx-a2000")
    backend = rig.backend()
    backend.inventory()
    getters = {c.symbol for c in _calls_of_a_read(rig, backend, uuid)}
    assert len(getters) > 15
    for symbol in getters:
        rig.fake.clear_errors()
        rig.fake.error(symbol, NOT_SUPPORTED)
        assert backend.read(uuid).fault is None, symbol
    rig.fake.error("*", NOT_SUPPORTED, uuid)
    reading = backend.read(uuid)
    assert reading.fault is None
    values = [getattr(reading, f) for f in ("memory_used_mib", "util_pct", "temperature_c", "power_w")]
    assert values == [None] * 4
    assert reading.processes is None


@pytest.mark.parametrize("code", [4, 13, 21, 25, 26, 999])
def test_whatever_one_getter_answers_the_others_count(rig: Rig, code: int) -> None:
    uuid = rig.fake.add("rtx-a2000")
    backend = rig.backend()
    backend.inventory()
    for symbol in {c.symbol for c in _calls_of_a_read(rig, backend, uuid)}:
        rig.fake.clear_errors()
        rig.fake.error(symbol, code, uuid)
        assert backend.read(uuid).fault is None, symbol


def _calls_of_a_read(rig: Rig, backend: NvmlBackend, uuid: str) -> list:  # type: ignore[type-arg]
    mark = rig.fake.mark()
    backend.read(uuid)
    return rig.fake.calls(mark, gpu=uuid)


def test_unknown_to_everything_is_a_failed_gpu(rig: Rig) -> None:
    uuid = rig.fake.add("rtx-a2000")
    backend = rig.backend()
    backend.inventory()
    rig.fake.error("*", UNKNOWN, uuid)
    assert backend.read(uuid).fault is GpuFault.FAILED
    rig.fake.clear_errors()
    assert backend.read(uuid).fault is None


def test_an_old_driver_is_read_through_the_older_calls(rig: Rig) -> None:
    rig.fake = FakeNvml(rig.tmp_path / "old", driver_version="470.199.02", old_driver=True)
    uuid = rig.fake.add("t4", memory_used_mib=1000, throttle=0x4, temperature_c=55)
    rig.fake.processes(uuid, compute=[(7, 900)])
    backend = rig.backend()
    (gpu,) = backend.inventory().gpus
    reading = backend.read(uuid)
    assert gpu.memory_reserved_mib is None
    assert reading.memory_used_mib == 1250  # such a driver counts its reserve as used and does not tell it
    assert reading.temperature_c == 55
    assert reading.throttle_reasons == {"power_cap"}
    assert reading.processes is not None
    assert [(p.pid, p.used_mib) for p in reading.processes] == [(7, 900)]
    with pytest.raises(GpuError) as caught:
        backend.get_memory_limits(uuid, "/cg")
    assert caught.value.fault == "not_supported"


@pytest.mark.parametrize(
    ("reading", "field"),
    [
        ({"util_pct": 4294967295}, "util_pct"),
        ({"util_pct": 250}, "util_pct"),
        ({"power_mw": 4294967295}, "power_w"),
        ({"clock.1": 4294967295}, "clock_sm_mhz"),
        ({"fan": 4294967295}, "fan_pct"),
    ],
)
def test_values_that_are_none_are_not_shown_as_numbers(rig: Rig, reading: dict[str, int], field: str) -> None:
    uuid = rig.fake.add("rtx-a2000", **reading)
    backend = rig.backend()
    backend.inventory()
    assert getattr(backend.read(uuid), field) is None


# ---- processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        pytest.param(
            {"compute": [(4100, 1660)], "graphics": [(4100, 1660)]},
            [(4100, {COMPUTE, GRAPHICS}, 1660)],
            id="E2: in both lists, once",
        ),
        pytest.param(
            {"compute": [(1, 100)], "graphics": [(1, 120)], "mps": [(1, 90)]},
            [(1, {COMPUTE, GRAPHICS, MPS}, 120)],
            id="largest of the lists",
        ),
        pytest.param({"compute": [(1, None)]}, [(1, {COMPUTE}, None)], id="memory not available"),
        pytest.param(
            {"compute": [(1, None)], "graphics": [(1, 70)]}, [(1, {COMPUTE, GRAPHICS}, 70)], id="one knows"
        ),
        pytest.param(
            {"compute": [(1, 70)], "graphics": [(1, None)]}, [(1, {COMPUTE, GRAPHICS}, 70)], id="other knows"
        ),
        pytest.param(
            {"compute": [(1, 17592186044134.0)]}, [(1, {COMPUTE}, None)], id="E2: counter that wrapped"
        ),
        pytest.param({"mps": [(3, 64), (2, 32)]}, [(2, {MPS}, 32), (3, {MPS}, 64)], id="by PID"),
        pytest.param({}, [], id="idle is an empty list, not None"),
    ],
)
def test_processes(
    rig: Rig,
    lists: dict[str, list[tuple[int, float | None]]],
    expected: list[tuple[int, set[ProcessType], float]],
) -> None:
    uuid = rig.fake.add("rtx-a2000")
    backend = rig.backend()
    backend.inventory()
    rig.fake.processes(uuid, **lists)
    processes = backend.read(uuid).processes
    assert processes is not None
    assert [(p.pid, set(p.types), p.used_mib) for p in processes] == expected


def test_utilisation_per_process_comes_from_samples_since_the_last_poll(rig: Rig) -> None:
    uuid = rig.fake.add("rtx-a2000")
    rig.fake.processes(uuid, compute=[(1, 10), (2, 10)])
    backend = rig.backend()
    backend.inventory()

    def util() -> dict[int, float | None]:
        return {p.pid: p.sm_util_pct for p in backend.read(uuid).processes or ()}

    assert util() == {1: 0.0, 2: 0.0}  # idle: the driver answers "not found"
    rig.fake.samples(uuid, {1: 40})
    assert util() == {1: 40.0, 2: 0.0}
    assert util() == {1: 0.0, 2: 0.0}  # the sample was taken already
    rig.fake.samples(uuid, {1: 20, 2: 60})
    assert util() == {1: 20.0, 2: 60.0}
    rig.fake.error("nvmlDeviceGetProcessUtilization", NOT_SUPPORTED)
    assert util() == {1: None, 2: None}


# ---- events -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "data", "kind", "xid"),
    [
        (0x8, 79, GpuEventKind.XID, 79),
        (0x8, 999, GpuEventKind.XID, 999),
        (0x2, 0, GpuEventKind.ECC_DOUBLE_BIT, None),
        (0x2000, 0, GpuEventKind.ECC_DOUBLE_BIT, None),
        (0x4000, 0, GpuEventKind.UNAVAILABLE, None),
        (0x8000, 1, GpuEventKind.RECOVERY_ACTION, None),
    ],
)
def test_events_are_told(rig: Rig, event: int, data: int, kind: GpuEventKind, xid: int | None) -> None:
    rig.fake.add("l4")
    uuid = rig.fake.add("a100-40")
    backend = rig.backend()
    backend.inventory()
    rig.fake.event(uuid, event, data)
    told = backend.wait_event(LONG_S)
    assert told is not None
    assert (told.kind, told.uuid, told.xid) == (kind, uuid, xid)


def test_events_between_inventory_and_the_first_wait_are_kept_in_order(rig: Rig) -> None:
    uuid = rig.fake.add("l4")
    backend = rig.backend()
    backend.inventory()
    for number in (31, 79, 13):
        rig.fake.xid(uuid, number)
    assert [backend.wait_event(LONG_S).xid for _ in range(3)] == [31, 79, 13]  # type: ignore[union-attr]


def test_only_supported_events_are_registered(rig: Rig) -> None:
    """A mask with one bit too many registers nothing."""
    consumer = rig.fake.add("rtx-3070")
    without = rig.fake.add("rtx-3070", event_types=None)
    backend = rig.backend()
    backend.inventory()
    rig.fake.xid(without, 13)
    rig.fake.xid(consumer, 31)
    event = backend.wait_event(LONG_S)
    assert event is not None
    assert (event.uuid, event.xid) == (consumer, 31)


def test_an_event_of_a_mig_instance_names_it(rig: Rig) -> None:
    uuid = rig.fake.add("a100-40")
    rig.fake.mig(uuid, Mig(gi=9))
    backend = rig.backend()
    backend.inventory()
    rig.fake.event(uuid, 0x8, 43, gi=9, ci=0)
    event = backend.wait_event(LONG_S)
    assert event is not None
    assert event.detail == "MIG instance 9/0"


def test_wake_ends_a_wait(rig: Rig) -> None:
    rig.fake.add("l4")
    backend = rig.backend()
    backend.inventory()
    results: list[GpuEvent | None] = []
    waiter = in_thread(lambda: results.append(backend.wait_event(600)))
    backend.wake()
    waiter.join(LONG_S)
    assert results == [None]


def test_without_any_event_support_the_wait_is_quiet(rig: Rig) -> None:
    rig.fake.add("orin")
    backend = rig.backend()
    backend.inventory()
    mark = rig.fake.mark()
    assert backend.wait_event(0.3) is None
    assert rig.fake.calls(mark) == []


def test_a_failing_wait_backs_off(rig: Rig) -> None:
    """24,100 lists a second were seen in a peer whose event wait failed at once."""
    rig.fake.add("l4")
    backend = rig.backend()
    backend.inventory()
    rig.fake.error("nvmlEventSetWait_v2", UNKNOWN)
    mark = rig.fake.mark()
    first = backend.wait_event(LONG_S)
    assert first is not None  # once: poll now
    assert (first.kind, first.uuid) == (GpuEventKind.UNAVAILABLE, None)
    assert backend.wait_event(1.2) is None
    for _ in range(50):  # nor does a caller with short waits make it spin
        backend.wait_event(0.005)
    assert len(rig.fake.calls(mark, symbol="nvmlEventSetWait_v2")) <= 4
    rig.fake.clear_errors()
    rig.fake.xid(rig.fake.gpus[0].uuid, 79)
    event = backend.wait_event(LONG_S)
    assert event is not None
    assert event.xid == 79


# ---- D3: one GPU of two falls off the bus -------------------------------------------------------


def test_a_lost_gpu_is_not_touched_again(rig: Rig) -> None:
    healthy, lost = rig.fake.add("l4"), rig.fake.add("l4")
    backend = rig.backend()
    before = backend.inventory().gpus
    rig.fake.lose(lost)
    assert backend.read(lost).fault is GpuFault.LOST
    mark = rig.fake.mark()
    for _ in range(5):
        assert backend.read(lost).fault is GpuFault.LOST
        assert backend.read(healthy).fault is None
        backend.wait_event(0.01)
    assert touched(rig, lost, mark) == []
    assert backend.inventory().gpus == before[:1]  # index and node of the other one do not change
    assert touched(rig, lost, mark) == []


def test_events_of_the_others_arrive_while_one_is_lost(rig: Rig) -> None:
    healthy, lost = rig.fake.add("l4"), rig.fake.add("l4")
    backend = rig.backend()
    backend.inventory()
    rig.fake.lose(lost)
    event = backend.wait_event(LONG_S)
    assert event is not None  # the wait itself says that a GPU is gone, and which is found out
    assert (event.kind, event.uuid) == (GpuEventKind.UNAVAILABLE, lost)
    assert backend.read(lost).fault is GpuFault.LOST
    rig.fake.xid(healthy, 31)
    assert backend.wait_event(LONG_S) is not None
    mark = rig.fake.mark()
    rig.fake.xid(healthy, 43)
    event = backend.wait_event(LONG_S)
    assert event is not None
    assert (event.uuid, event.xid) == (healthy, 43)
    assert touched(rig, lost, mark) == []


def test_a_lost_gpu_that_answers_again_is_found_by_inventory(rig: Rig) -> None:
    """As after a reset: without Shutdown and Init, which would disturb the others."""
    healthy, lost = rig.fake.add("l4"), rig.fake.add("l4")
    clock = Clock()
    backend = rig.backend(clock=clock)
    before = backend.inventory().gpus
    rig.fake.lose(lost)
    backend.read(lost)
    backend.inventory()
    rig.fake.recover(lost)
    assert backend.read(lost).fault is GpuFault.LOST
    mark = rig.fake.mark()
    assert backend.inventory().gpus == before
    assert rig.fake.calls(mark, symbol="nvmlInitWithFlags") == []
    assert backend.read(lost).fault is None
    assert backend.read(healthy).fault is None
    rig.fake.xid(lost, 79)
    event = backend.wait_event(LONG_S)
    assert event is not None
    assert event.uuid == lost


def test_looking_for_a_lost_gpu_does_not_restart_the_library_each_time(rig: Rig) -> None:
    rig.fake.add("l4")
    lost = rig.fake.add("l4")
    clock = Clock()
    backend = rig.backend(clock=clock)
    backend.inventory()
    rig.fake.lose(lost)
    backend.read(lost)
    mark = rig.fake.mark()
    for _ in range(720):  # an hour of polls
        clock.now += 5
        backend.inventory()
    assert 2 <= len(rig.fake.calls(mark, symbol="nvmlInitWithFlags")) <= 20


def test_reset_required_is_its_own_fault(rig: Rig) -> None:
    uuid = rig.fake.add("l4")
    backend = rig.backend()
    backend.inventory()
    rig.fake.require_reset(uuid)
    assert backend.read(uuid).fault is GpuFault.RESET_REQUIRED
    found = backend.inventory()
    assert (found.gpus, found.fault) == ((), GpuFault.RESET_REQUIRED)
    rig.fake.recover(uuid)
    assert backend.inventory().problem is None
    assert backend.read(uuid).fault is None


def test_a_gpu_that_is_dead_at_the_start_does_not_hide_the_others(rig: Rig) -> None:
    dead, healthy = rig.fake.add("l4"), rig.fake.add("l4")
    rig.fake.lose(dead)
    found = rig.backend().inventory()
    assert [g.uuid for g in found.gpus] == [healthy]
    assert any("index 0" in line and "lost" in line for line in found.evidence)


# ---- D2: driver upgraded under a running agent --------------------------------------------------


def test_a_mismatch_names_both_versions_and_heals(rig: Rig) -> None:
    uuids = [rig.fake.add("l4"), rig.fake.add("l4")]
    backend = rig.backend()
    backend.inventory()
    rig.fake.driver_version = "550.107.02"
    rig.fake.all_calls(18)
    readings = [backend.read(u) for u in uuids]
    assert {r.fault for r in readings} == {GpuFault.DRIVER_MISMATCH}
    for text in (readings[0].fault_detail, readings[1].fault_detail, backend.inventory().problem):
        assert text is not None
        assert "550.107.02" in text
        assert "550.90.07" in text
    mark = rig.fake.mark()
    backend.read(uuids[0])
    assert rig.fake.calls(mark) == []  # nothing to be asked before the next inventory
    rig.fake.all_calls(None)
    assert [g.uuid for g in backend.inventory().gpus] == uuids
    assert [backend.read(u).fault for u in uuids] == [None, None]
    rig.fake.xid(uuids[1], 79)
    event = backend.wait_event(LONG_S)
    assert event is not None
    assert event.uuid == uuids[1]


def test_a_mismatch_at_the_start(rig: Rig) -> None:
    uuid = rig.fake.add("l4")
    rig.fake.driver_version = "550.107.02"
    rig.fake.all_calls(18)
    hosts.nvidia_host(rig.root, rig.fake, version="550.90.07")
    backend = rig.backend()
    found = backend.inventory()
    assert found.fault is GpuFault.DRIVER_MISMATCH
    assert found.problem is not None
    assert "reboot" in found.problem
    assert not backend.needs_reexec  # the module can still be loaded anew: this process may live on
    assert backend.read(uuid).fault is GpuFault.DRIVER_MISMATCH
    assert backend.wait_event(0.05) is None
    rig.fake.all_calls(None)
    assert [g.uuid for g in backend.inventory().gpus] == [uuid]


def test_a_module_reloaded_under_this_process_needs_a_new_process(rig: Rig) -> None:
    uuid = rig.fake.add("l4")
    backend = rig.backend()
    backend.inventory()
    assert not backend.needs_reexec
    hosts.kernel_module(rig.root, "550.107.02")
    rig.fake.all_calls(18)
    assert backend.read(uuid).fault is GpuFault.DRIVER_MISMATCH
    assert backend.needs_reexec
    assert "restarted" in (backend.inventory().problem or "")


def test_a_library_replaced_on_disk_needs_a_new_process(rig: Rig) -> None:
    uuid = rig.fake.add("l4")
    backend = rig.backend()
    backend.inventory()
    rig.fake.all_calls(18)
    assert backend.read(uuid).fault is GpuFault.DRIVER_MISMATCH
    assert not backend.needs_reexec
    fresh = rig.fake.library_path.with_suffix(".new")
    fresh.write_bytes(rig.fake.library_path.read_bytes())
    fresh.rename(rig.fake.library_path)
    assert backend.needs_reexec


def test_the_event_thread_learns_of_a_mismatch_first(rig: Rig) -> None:
    uuid = rig.fake.add("l4")
    backend = rig.backend()
    backend.inventory()
    rig.fake.all_calls(18)
    event = backend.wait_event(LONG_S)
    assert event is not None
    assert (event.kind, event.uuid) == (GpuEventKind.UNAVAILABLE, None)
    assert backend.read(uuid).fault is GpuFault.DRIVER_MISMATCH


# ---- reasons at the start -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "fault", "words"),
    [
        (9, GpuFault.DRIVER_NOT_LOADED, "modprobe"),
        (4, GpuFault.NO_PERMISSION, "/dev/nvidiactl"),
        (18, GpuFault.DRIVER_MISMATCH, "kernel module"),
        (12, GpuFault.LIBRARY_MISSING, "initialise"),
        (999, GpuFault.FAILED, "initialise"),
        (13, GpuFault.FAILED, "too old"),
    ],
)
def test_init_failures_have_their_own_reasons(rig: Rig, code: int, fault: GpuFault, words: str) -> None:
    uuid = rig.fake.add("l4")
    rig.fake.init_error(code)
    backend = rig.backend()
    found = backend.inventory()
    assert (found.gpus, found.fault) == ((), fault)
    assert words in (found.problem or "")
    assert backend.read(uuid).fault is fault
    rig.fake.init_error(None)
    assert backend.inventory().problem is None


def test_a_missing_library_says_what_to_do(rig: Rig) -> None:
    rig.fake.add("l4")
    rig.host()
    backend = NvmlBackend(HostRoot(rig.root), str(rig.tmp_path / "nowhere/libnvidia-ml.so.1"))
    found = backend.inventory()
    assert found.fault is GpuFault.LIBRARY_MISSING
    assert "gpus.nvml.libraryPath" in (found.problem or "")
    (rig.tmp_path / "nowhere").mkdir()
    rig.fake.library_path.rename(rig.tmp_path / "nowhere/libnvidia-ml.so.1")  # installed later
    rig.fake.root.joinpath("state").rename(rig.tmp_path / "nowhere/state")
    assert len(backend.inventory().gpus) == 1
    backend.close()


def test_a_file_that_is_no_library_is_said_so(rig: Rig) -> None:
    hosts.write(rig.tmp_path, "broken.so.1", "not an ELF file")
    found = NvmlBackend(HostRoot(rig.root), str(rig.tmp_path / "broken.so.1")).inventory()
    assert found.fault is GpuFault.LIBRARY_MISSING
    assert "broken.so.1" in (found.problem or "")
    assert "reinstall" in (found.problem or "")


def test_no_permission_for_the_devices(rig: Rig) -> None:
    rig.fake.add("l4")
    rig.fake.error("nvmlDeviceGetHandleByIndex_v2", NO_PERMISSION, rig.fake.gpus[0].uuid)
    found = rig.backend().inventory()
    assert found.fault is GpuFault.NO_PERMISSION
    assert "/dev/nvidia" in (found.problem or "")


def test_nvml_without_a_gpu(rig: Rig) -> None:
    found = rig.backend().inventory()
    assert (found.gpus, found.fault) == ((), GpuFault.NOT_FOUND)
    assert "lspci" in (found.problem or "")


def test_device_access_that_was_taken_away(rig: Rig) -> None:
    """X3: daemon-reload: 999 on everything in this container, the driver on the host is fine."""
    uuid = rig.fake.add("l4")
    backend = rig.backend()
    backend.inventory()
    rig.fake.all_calls(999)
    assert backend.read(uuid).fault is GpuFault.FAILED
    found = backend.inventory()
    assert found.fault is GpuFault.LOST_DEVICE_ACCESS
    assert backend.needs_reexec
    assert backend.read(uuid).fault is GpuFault.LOST_DEVICE_ACCESS
    rig.fake.all_calls(None)
    assert backend.inventory().problem is None
    assert not backend.needs_reexec


# ---- X1: hot plug -------------------------------------------------------------------------------


@pytest.mark.parametrize("enumerate_", ["init", "live"])
def test_cards_come_and_go(rig: Rig, enumerate_: str) -> None:
    rig.fake.enumerate = enumerate_
    first = rig.fake.add("l4")
    backend = rig.backend()
    backend.inventory()
    rig.fake.remove(first)
    rig.host()
    assert backend.read(first).fault in (GpuFault.LOST, GpuFault.NOT_FOUND)
    gone = backend.inventory()
    assert gone.gpus == ()
    assert gone.problem is not None
    mark = rig.fake.mark()
    assert backend.read(first).fault in (GpuFault.LOST, GpuFault.NOT_FOUND)
    assert rig.fake.calls(mark) == []
    second = rig.fake.add("t4")
    rig.fake.insert(first)
    rig.host()
    assert {g.uuid for g in backend.inventory().gpus} == {first, second}
    assert backend.read(first).fault is None
    assert backend.read(second).fault is None
    assert [c for c in rig.fake.calls() if c.mark == "stale"] == []


@pytest.mark.parametrize("enumerate_", ["init", "live"])
def test_renumbering_keeps_identities(rig: Rig, enumerate_: str) -> None:
    rig.fake.enumerate = enumerate_
    a, b = rig.fake.add("l4", temperature_c=41), rig.fake.add("l4", temperature_c=42)
    backend = rig.backend()
    backend.inventory()
    with rig.fake.batch():
        c = rig.fake.add("t4", temperature_c=43)
        rig.fake.order(c, b, a)
    rig.host()
    gpus = backend.inventory().gpus
    assert [(g.uuid, g.index) for g in gpus] == [(c, 0), (b, 1), (a, 2)]
    assert [backend.read(u).temperature_c for u in (a, b, c)] == [41, 42, 43]
    assert [call for call in rig.fake.calls() if call.mark == "stale"] == []
    rig.fake.xid(a, 79)
    event = backend.wait_event(LONG_S)
    assert event is not None
    assert event.uuid == a


def test_a_card_taken_out_for_good_does_not_restart_the_library_for_ever(rig: Rig) -> None:
    rig.fake.add("l4")
    gone = rig.fake.add("l4")
    clock = Clock()
    backend = rig.backend(clock=clock)
    backend.inventory()
    rig.fake.remove(gone)
    rig.host()
    backend.inventory()
    mark = rig.fake.mark()
    for _ in range(100):
        clock.now += 60
        assert len(backend.inventory().gpus) == 1
    assert rig.fake.calls(mark, symbol="nvmlInitWithFlags") == []


def test_a_driver_reloaded_under_the_agent(rig: Rig) -> None:
    """Calls say UNINITIALIZED, then the driver is away for a while, then it is back."""
    uuid = rig.fake.add("l4")
    backend = rig.backend()
    backend.inventory()
    rig.fake.all_calls(1)
    assert backend.read(uuid).fault is GpuFault.FAILED
    rig.fake.all_calls(9)
    hosts.kernel_module(rig.root, None)
    assert backend.inventory().fault is GpuFault.DRIVER_NOT_LOADED
    assert backend.read(uuid).fault is GpuFault.DRIVER_NOT_LOADED
    rig.fake.all_calls(None)
    rig.host()
    assert [g.uuid for g in backend.inventory().gpus] == [uuid]
    assert backend.read(uuid).fault is None


def test_reinitialising_waits_for_a_waiter(rig: Rig) -> None:
    """nvmlShutdown while another thread is inside the library is not defined."""
    uuid = rig.fake.add("l4")
    backend = rig.backend(call_timeout_s=LONG_S)
    backend.inventory()
    stop = threading.Event()
    seen: list[GpuEvent] = []

    def wait() -> None:
        while not stop.is_set():
            event = backend.wait_event(5.0)
            if event is not None:
                seen.append(event)
                stop.set()

    waiter = in_thread(wait)
    for n in range(3):
        rig.fake.add("t4", bus=0x80 + n)
        rig.host()
        assert len(backend.inventory().gpus) == 2 + n
    rig.fake.xid(uuid, 62)
    while waiter.is_alive():  # the waiter may be re-registering just then
        waiter.join(1.5)
        rig.fake.xid(uuid, 62)
    assert seen[0].xid == 62
    assert [c for c in rig.fake.calls() if c.mark == "stale"] == []


# ---- X2: calls that hang ------------------------------------------------------------------------


def test_a_hanging_gpu_stops_nobody_else(rig: Rig) -> None:
    healthy, hanging = rig.fake.add("l4"), rig.fake.add("l4")
    guard = GuardedBackend(rig.backend(call_timeout_s=0.2), 0.2)
    guard.inventory()
    rig.fake.hang("nvmlDeviceGetUtilizationRates", hanging)
    assert guard.read(hanging).fault is GpuFault.UNRESPONSIVE
    mark = rig.fake.mark()
    for _ in range(10):
        assert guard.read(hanging).fault is GpuFault.UNRESPONSIVE
        assert guard.read(healthy).temperature_c == 40
    assert touched(rig, hanging, mark) == []
    rig.fake.xid(healthy, 31)
    event = guard.wait_event(LONG_S)
    assert event is not None
    assert event.xid == 31
    rig.fake.release()
    while guard.read(hanging).fault is not None:
        threading.Event().wait(0.005)
    assert guard.read(hanging).temperature_c == 40
    guard.close()


def test_inventory_leaves_a_hanging_gpu_alone(rig: Rig) -> None:
    healthy, hanging = rig.fake.add("l4"), rig.fake.add("l4")
    clock = Clock()
    backend = rig.backend(call_timeout_s=0.1, clock=clock)
    known = backend.inventory().gpus
    rig.fake.hang("nvmlDeviceGetPowerUsage", hanging)
    reader = in_thread(lambda: backend.read(hanging))
    while not rig.fake.calls(symbol="nvmlDeviceGetPowerUsage", gpu=hanging):
        threading.Event().wait(0.005)
    clock.now += 60
    mark = rig.fake.mark()
    rig.fake.add("t4", bus=0x90)
    rig.host()  # a card was plugged in, but the library cannot be restarted now
    found = backend.inventory()
    assert found.gpus == known
    assert any("does not return" in line for line in found.evidence)
    assert touched(rig, hanging, mark) == []
    assert backend.read(healthy).fault is None
    rig.fake.release()
    reader.join(LONG_S)
    assert len(backend.inventory().gpus) == 3


def test_a_hanging_init_is_unresponsive_and_heals(rig: Rig) -> None:
    rig.fake.add("l4")
    rig.fake.hang("nvmlInitWithFlags")
    guard = GuardedBackend(rig.backend(), 0.2)
    assert guard.inventory().fault is GpuFault.UNRESPONSIVE
    rig.fake.release()
    while not guard.inventory().gpus:
        threading.Event().wait(0.005)
    guard.close()


ENDS = """
import sys, threading
from edgeagent.gpus.guard import GuardedBackend
from edgeagent.gpus.nvml import NvmlBackend
from edgeagent.hostroot import HostRoot

guard = GuardedBackend(NvmlBackend(HostRoot(sys.argv[1]), sys.argv[2]), 0.2)
(gpu,) = guard.inventory().gpus
threading.Thread(target=lambda: guard.wait_event(600), daemon=True).start()
print("ready", flush=True)
sys.stdin.readline()
print(guard.read(gpu.uuid).fault.value)
guard.close()
"""


@pytest.mark.parametrize("symbol", ["nvmlDeviceGetUtilizationRates", "*"], ids=["a reading", "everything"])
def test_a_process_ends_while_calls_hang(rig: Rig, symbol: str) -> None:
    rig.fake.add("l4")
    rig.host()
    command = [sys.executable, "-c", ENDS, str(rig.root), str(rig.fake.library_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        rig.fake.hang(symbol)
        out, _ = child.communicate("go\n", timeout=LONG_S)
    assert out == "unresponsive\n"
    assert child.returncode == 0


# ---- memory limits per cgroup -------------------------------------------------------------------


@pytest.fixture
def cgroup(rig: Rig) -> str:
    (rig.root / "sys/fs/cgroup/pod1").mkdir(parents=True)
    return "/sys/fs/cgroup/pod1"


def test_limits_are_set_and_read_back(rig: Rig, cgroup: str) -> None:
    uuid = rig.fake.add("rtx-4000-ada")
    rig.fake.memory_limits_supported()
    backend = rig.backend()
    backend.inventory()
    assert backend.get_memory_limits(uuid, cgroup) == (0, None, 0)
    backend.set_memory_limits(uuid, cgroup, 500, 8000)
    here = str(rig.root / cgroup.lstrip("/"))
    rig.fake.cgroup_uses(uuid, here, 123)
    assert backend.get_memory_limits(uuid, cgroup) == (500, 8000, 123 * MIB)
    assert rig.fake.limits() == {(uuid, here): (500 * MIB, 8000 * MIB)}
    backend.set_memory_limits(uuid, cgroup, 0, None)
    assert backend.get_memory_limits(uuid, cgroup) == (0, None, 123 * MIB)


@pytest.mark.parametrize(
    ("prepare", "fault"),
    [
        (lambda rig, uuid: rig.fake.memory_limits_supported(False), "not_supported"),
        (lambda rig, uuid: rig.fake.error("nvmlDeviceGetMemoryLimits_v1", NO_PERMISSION), "no_permission"),
        (lambda rig, uuid: rig.fake.mig(uuid, Mig()), "not_supported"),
        (lambda rig, uuid: rig.fake.lose(uuid), "lost"),
        (lambda rig, uuid: (rig.root / "sys/fs/cgroup/pod1").rmdir(), "failed"),
    ],
)
def test_limits_that_cannot_be_had(
    rig: Rig, cgroup: str, prepare: Callable[[Rig, str], object], fault: str
) -> None:
    uuid = rig.fake.add("a100-40")
    rig.fake.memory_limits_supported()
    backend = rig.backend()
    backend.inventory()
    prepare(rig, uuid)
    with pytest.raises(GpuError) as caught:
        backend.get_memory_limits(uuid, cgroup)
    assert caught.value.fault == fault
    assert uuid in str(caught.value)


def test_limits_of_an_unknown_gpu(rig: Rig, cgroup: str) -> None:
    backend = rig.backend()
    backend.inventory()
    with pytest.raises(GpuError) as caught:
        backend.set_memory_limits("GPU-none", cgroup, 0, 1)
    assert caught.value.fault == "not_found"


# ---- topology -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", list(TOPOLOGY))
def test_pcie_paths(rig: Rig, level: str) -> None:
    a, b = rig.fake.add("l4"), rig.fake.add("l4")
    rig.fake.near(a, b, level)
    backend = rig.backend()
    backend.inventory()
    assert backend.topology() == {frozenset((a, b)): GpuLink(level)}


def test_nvlinks_beat_pcie(rig: Rig) -> None:
    a, b, c = (rig.fake.add("a100-40") for _ in range(3))
    with rig.fake.batch():
        for pair in ((a, b), (a, c), (b, c)):
            rig.fake.near(*pair, "pix")
        rig.fake.nvlink(a, b, 4)
    backend = rig.backend()
    backend.inventory()
    topology = backend.topology()
    assert topology[frozenset((a, b))] == GpuLink("nvlink", 4)
    assert topology[frozenset((a, c))] == GpuLink("pix")
    assert max(topology.values(), key=lambda link: link.closeness).kind == "nvlink"


def test_links_into_a_switch_join_all_that_have_them(rig: Rig) -> None:
    a, b, _ = (rig.fake.add("a100-40") for _ in range(3))
    rig.fake.nvlink(a, None, 12)
    rig.fake.nvlink(b, None, 6)
    backend = rig.backend()
    backend.inventory()
    assert backend.topology() == {frozenset((a, b)): GpuLink("nvlink", 6)}


def test_topology_leaves_a_lost_gpu_alone(rig: Rig) -> None:
    a, b = rig.fake.add("l4"), rig.fake.add("l4")
    rig.fake.near(a, b, "pix")
    backend = rig.backend()
    backend.inventory()
    rig.fake.lose(b)
    backend.read(b)
    mark = rig.fake.mark()
    assert backend.topology() == {}
    assert touched(rig, b, mark) == []


# ---- closing ------------------------------------------------------------------------------------


def test_close_releases_the_driver_and_inventory_takes_it_again(rig: Rig) -> None:
    uuid = rig.fake.add("l4")
    backend = rig.backend()
    backend.inventory()
    mark = rig.fake.mark()
    backend.close()
    backend.close()
    assert len(rig.fake.calls(mark, symbol="nvmlShutdown")) == 1
    assert backend.read(uuid).fault is not None
    with pytest.raises(GpuError):
        backend.topology()
    assert [g.uuid for g in backend.inventory().gpus] == [uuid]
    assert backend.read(uuid).fault is None


def test_compute_mode_is_set_read_back_and_not_everywhere_there(rig: Rig) -> None:
    uuid = rig.fake.add("rtx-a2000")
    odd = rig.fake.add("rtx-a2000", compute_mode=None)
    backend = rig.backend()
    backend.inventory()
    assert backend.get_compute_mode(uuid) == "default"
    backend.set_compute_mode(uuid, "exclusive_process")
    assert (backend.get_compute_mode(uuid), rig.fake.compute_mode(uuid)) == ("exclusive_process", 3)
    rig.fake.set_compute_mode(uuid, 0)
    assert backend.get_compute_mode(uuid) == "default"
    with pytest.raises(GpuError) as e:
        backend.set_compute_mode(odd, "exclusive_process")
    assert e.value.fault == "not_supported"
    rig.fake.error("nvmlDeviceSetComputeMode", NO_PERMISSION)
    with pytest.raises(GpuError, match="only root may"):
        backend.set_compute_mode(uuid, "default")
