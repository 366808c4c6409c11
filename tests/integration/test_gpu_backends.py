"""One contract, every GPU back end: what the rest of the agent relies on, whatever reads the GPUs."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgeagent.config.schema import GpusConfig, NvmlConfig, SimulatedConfig
from edgeagent.gpus.detect import NodeGpus
from edgeagent.gpus.guard import GuardedBackend
from edgeagent.gpus.model import GpuBackend, GpuEvent, GpuEventKind, GpuFault, GpuKind, GpuReading, Inventory
from edgeagent.gpus.nvml import NvmlBackend
from edgeagent.gpus.simulated import SimulatedBackend
from edgeagent.gpus.tegra import TegraBackend
from edgeagent.hostroot import HostRoot
from tests.fakes.jetson import BOARDS, JetsonTree
from tests.fakes.nvml import FakeNvml
from tests.fakes.nvml import host as hosts

LONG_S = 30.0
Nothing = Callable[[str], object]


@dataclass
class Rig:
    """A back end over a fake. What a kind of GPU cannot do is None, and its tests are skipped."""

    make: Callable[[], GpuBackend]
    host: HostRoot | None = None
    lose: Nothing | None = None
    recover: Nothing | None = None
    event: Nothing | None = None  # an XID 79 on a GPU
    hang: Nothing | None = None
    let_go: Callable[[], object] = lambda: None


def _nvml(tmp_path: Path, old_driver: bool = False, guarded: bool = False) -> Rig:
    fake = FakeNvml(tmp_path / "nvml", old_driver=old_driver)
    fake.add("l4")
    fake.add("rtx-a2000")
    host = HostRoot(hosts.nvidia_host(tmp_path / "host", fake))

    def make() -> GpuBackend:
        backend = NvmlBackend(host, str(fake.library_path), call_timeout_s=1.0)
        return GuardedBackend(backend, 0.3) if guarded else backend

    hang = (lambda gpu: fake.hang("nvmlDeviceGetUtilizationRates", gpu)) if guarded else None
    return Rig(make, host, fake.lose, fake.recover, lambda gpu: fake.xid(gpu, 79), hang, fake.release)


def _tegra(tmp_path: Path, board: str) -> Rig:
    host = HostRoot(JetsonTree(tmp_path / "host", BOARDS[board]).root)
    return Rig(lambda: TegraBackend(host), host)


def _simulated(profile: str, guarded: bool = False) -> Rig:
    made: list[SimulatedBackend] = []

    def make() -> GpuBackend:
        made.append(SimulatedBackend(SimulatedConfig(profile=profile)))
        return GuardedBackend(made[-1], 0.3) if guarded else made[-1]

    return Rig(
        make,
        None,
        lambda gpu: made[-1].inject("lost", gpu),
        lambda gpu: made[-1].clear(gpu),
        lambda gpu: made[-1].inject("xid", gpu, 79),
        (lambda gpu: made[-1].inject("unresponsive", gpu)) if guarded else None,
        lambda: [m.clear() for m in made],
    )


def _node(tmp_path: Path, jetson: str | None = None) -> Rig:
    """NVML cards through detection; with `jetson`, beside that board's own GPU."""
    fake = FakeNvml(tmp_path / "nvml")
    fake.add("l4")
    root = tmp_path / "host"
    if jetson is not None:
        JetsonTree(root, BOARDS[jetson])
        hosts.write(root, "/dev/nvidia0")
    else:
        hosts.nvidia_host(root, fake)
    config = GpusConfig(call_timeout_seconds=0.5, nvml=NvmlConfig(str(fake.library_path)))
    host = HostRoot(root)
    nvml_only = jetson is None
    return Rig(
        lambda: NodeGpus(config, host),
        host,
        fake.lose if nvml_only else None,
        fake.recover if nvml_only else None,
        (lambda gpu: fake.xid(gpu, 79)) if nvml_only else None,
        (lambda gpu: fake.hang("nvmlDeviceGetUtilizationRates", gpu)) if nvml_only else None,
        fake.release,
    )


RIGS: dict[str, Callable[[Path], Rig]] = {
    "nvml": _nvml,
    "nvml of an old driver": lambda p: _nvml(p, old_driver=True),
    "nvml guarded": lambda p: _nvml(p, guarded=True),
    "tegra orin": lambda p: _tegra(p, "orin-nx-jp6"),
    "tegra thor": lambda p: _tegra(p, "thor-jp7"),
    "simulated": lambda p: _simulated("2x-rtx-4000-ada"),
    "simulated orin": lambda p: _simulated("orin-nx-16g"),
    "simulated guarded": lambda p: _simulated("t4", guarded=True),
    "node": _node,
    "node with a card in a Jetson": lambda p: _node(p, "agx-orin-jp72"),
}


@pytest.fixture(params=list(RIGS))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig = RIGS[request.param](tmp_path)
    made: list[GpuBackend] = []
    plain = rig.make

    def make() -> GpuBackend:
        made.append(plain())
        return made[-1]

    rig.make = make
    yield rig
    rig.let_go()
    for backend in made:
        backend.close()


def needs(what: Nothing | None) -> Nothing:
    if what is None:
        pytest.skip("this kind of GPU has no such thing")
    return what


def first_gpu(backend: GpuBackend) -> str:
    return backend.inventory().gpus[0].uuid


# ---- inventory ----------------------------------------------------------------------------------


def test_the_inventory_is_complete_and_explained(rig: Rig) -> None:
    found = rig.make().inventory()
    assert found.gpus
    assert found.problem is None
    assert found.fault is None
    assert found.evidence
    assert len({g.uuid for g in found.gpus}) == len(found.gpus)
    assert len({g.index for g in found.gpus}) == len(found.gpus)
    for gpu in found.gpus:
        assert gpu.memory_total_mib > 0
        assert gpu.model
        assert gpu.source in ("nvml", "tegra", "simulated")
        assert gpu.unified_memory == (gpu.kind is GpuKind.INTEGRATED)
        assert gpu.memory_reserved_mib is None or gpu.memory_reserved_mib < gpu.memory_total_mib
        assert gpu.pci_address is None or gpu.pci_address == gpu.pci_address.lower()


def test_identities_outlive_the_process(rig: Rig) -> None:
    """K2: IDs after a reboot equal those before."""
    before = rig.make().inventory().gpus
    assert [g.uuid for g in rig.make().inventory().gpus] == [g.uuid for g in before]


def test_looking_again_changes_nothing(rig: Rig) -> None:
    backend = rig.make()
    assert backend.inventory().gpus == backend.inventory().gpus


def test_device_nodes_exist_on_the_host(rig: Rig) -> None:
    """D1: a path that is absent fails every container."""
    for gpu in rig.make().inventory().gpus:
        for node in gpu.device_nodes:
            assert rig.host is not None
            assert rig.host.exists(node)


def test_everything_is_frozen(rig: Rig) -> None:
    backend = rig.make()
    found = backend.inventory()
    for value, name in ((found, "gpus"), (found.gpus[0], "uuid"), (backend.read(found.gpus[0].uuid), "uuid")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)


# ---- readings -----------------------------------------------------------------------------------


def numbers(reading: GpuReading) -> dict[str, float]:
    flat = {f.name: getattr(reading, f.name) for f in dataclasses.fields(reading)}
    flat |= {f"zone {k}": v for k, v in reading.temperatures_c.items()}
    flat |= {f"rail {k}": v for k, v in reading.rails_w.items()}
    return {k: v for k, v in flat.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def test_readings_are_sane(rig: Rig) -> None:
    backend = rig.make()
    for gpu in backend.inventory().gpus:
        before = time.monotonic()
        reading = backend.read(gpu.uuid)
        assert reading.uuid == gpu.uuid
        assert reading.fault is None
        assert before <= reading.taken_mono_s <= time.monotonic()
        for name, value in numbers(reading).items():
            assert math.isfinite(value), name
            if name.endswith("_pct"):
                assert 0 <= value <= 100, name
            if name.endswith("_mib"):
                assert 0 <= value <= 2 * gpu.memory_total_mib, name
        for process in reading.processes or ():
            assert process.types


def test_pids_are_listed_once(rig: Rig) -> None:
    backend = rig.make()
    for gpu in backend.inventory().gpus:
        pids = [p.pid for p in backend.read(gpu.uuid).processes or ()]
        assert len(pids) == len(set(pids))


def test_an_unknown_gpu_is_a_fault_not_an_error(rig: Rig) -> None:
    backend = rig.make()
    assert backend.read("GPU-before-inventory").fault is not None
    backend.inventory()
    assert backend.read("GPU-never-seen").fault is GpuFault.NOT_FOUND


def test_reads_from_many_threads(rig: Rig) -> None:
    backend = rig.make()
    gpus = backend.inventory().gpus
    readings: list[GpuReading] = []
    threads = [
        threading.Thread(target=lambda: readings.extend(backend.read(g.uuid) for g in gpus for _ in range(5)))
        for _ in range(4)
    ]
    for t in threads:
        t.start()
    backend.inventory()
    for t in threads:
        t.join(LONG_S)
    assert len(readings) == 20 * len(gpus)
    assert {r.fault for r in readings} == {None}


# ---- loss ---------------------------------------------------------------------------------------


def test_a_lost_gpu_is_lost_until_inventory_finds_it(rig: Rig) -> None:
    lose = needs(rig.lose)
    backend = rig.make()
    before = backend.inventory()
    lost = before.gpus[-1].uuid
    lose(lost)
    assert backend.read(lost).fault is GpuFault.LOST
    for gpu in before.gpus[:-1]:
        assert backend.read(gpu.uuid).fault is None
    assert backend.inventory().gpus == before.gpus[:-1]
    assert backend.read(lost).fault is GpuFault.LOST
    needs(rig.recover)(lost)
    assert backend.read(lost).fault is GpuFault.LOST
    assert backend.inventory().gpus == before.gpus
    assert backend.read(lost).fault is None


def test_values_of_a_sick_gpu_are_none(rig: Rig) -> None:
    lose = needs(rig.lose)
    backend = rig.make()
    uuid = first_gpu(backend)
    lose(uuid)
    reading = backend.read(uuid)
    assert reading.fault is not None
    assert reading.fault_detail
    assert set(numbers(reading)) == {"taken_mono_s"}
    assert reading.processes is None


def test_when_all_are_lost_the_inventory_says_so(rig: Rig) -> None:
    lose = needs(rig.lose)
    backend = rig.make()
    for gpu in backend.inventory().gpus:
        lose(gpu.uuid)
    found = backend.inventory()
    assert (found.gpus, found.fault) == ((), GpuFault.LOST)
    assert found.problem
    assert "Error" not in found.problem.split("(")[0]


def test_a_hanging_gpu_is_unresponsive_in_time(rig: Rig) -> None:
    """X2: and it recovers when the call returns."""
    hang = needs(rig.hang)
    backend = rig.make()
    gpus = backend.inventory().gpus
    hang(gpus[0].uuid)
    assert backend.read(gpus[0].uuid).fault is GpuFault.UNRESPONSIVE
    for gpu in gpus[1:]:
        assert backend.read(gpu.uuid).fault is None
    rig.let_go()
    while backend.read(gpus[0].uuid).fault is not None:
        threading.Event().wait(0.005)


# ---- events -------------------------------------------------------------------------------------


def test_events_arrive(rig: Rig) -> None:
    send = needs(rig.event)
    backend = rig.make()
    uuid = first_gpu(backend)
    got: list[GpuEvent | None] = []
    waiter = threading.Thread(target=lambda: got.append(backend.wait_event(LONG_S)))
    waiter.start()
    send(uuid)
    waiter.join(LONG_S)
    assert got[0] is not None
    assert (got[0].kind, got[0].uuid, got[0].xid) == (GpuEventKind.XID, uuid, 79)


def test_a_wait_without_events_sleeps_out_its_time(rig: Rig) -> None:
    """Never spins: waiting costs next to no CPU."""
    backend = rig.make()
    backend.inventory()
    start, cpu = time.monotonic(), time.thread_time()
    assert backend.wait_event(0.4) is None
    waited = time.monotonic() - start
    assert waited >= 0.35
    assert time.thread_time() - cpu < waited / 4


def test_a_wait_before_any_inventory_is_quiet(rig: Rig) -> None:
    backend = rig.make()
    start, cpu = time.monotonic(), time.thread_time()
    assert backend.wait_event(0.2) is None
    assert time.thread_time() - cpu < (time.monotonic() - start) / 2


def test_wake_ends_a_wait(rig: Rig) -> None:
    backend = rig.make()
    backend.inventory()
    waiter = threading.Thread(target=lambda: backend.wait_event(600), daemon=True)
    waiter.start()
    while waiter.is_alive():  # a wake before the wait began counts, or the next one does
        backend.wake()
        waiter.join(2.5)


# ---- closing ------------------------------------------------------------------------------------


def test_close_is_idempotent_and_harmless(rig: Rig) -> None:
    backend = rig.make()
    uuid = first_gpu(backend)
    backend.close()
    backend.close()
    assert isinstance(backend.read(uuid), GpuReading)
    assert isinstance(backend.inventory(), Inventory)
    backend.wake()


def test_closing_ends_a_wait(rig: Rig) -> None:
    backend = rig.make()
    backend.inventory()
    waiter = threading.Thread(target=lambda: backend.wait_event(600), daemon=True)
    waiter.start()
    while waiter.is_alive():
        backend.close()
        backend.wake()
        waiter.join(2.5)
