"""Which back end reads which GPU: over host trees and the fake NVML, with the trail that explains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeagent.config.schema import GpusConfig, NvmlConfig, SimulatedConfig
from edgeagent.errors import ConfigError
from edgeagent.gpus.detect import NodeGpus, detect
from edgeagent.gpus.model import GpuFault, GpuKind, GpuLink, Inventory
from edgeagent.hostroot import HostRoot
from tests.fakes.jetson import BOARDS, JetsonTree
from tests.fakes.nvml import FakeNvml
from tests.fakes.nvml import host as hosts

LONG_S = 30.0


class Node:
    """A host tree and, where `nvml` is used, a driver's library beside it."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.root = tmp_path / "host"
        self.root.mkdir()
        self.library = tmp_path / "nvml/libnvidia-ml.so.1"
        self._fake: FakeNvml | None = None
        self.made: list[NodeGpus] = []

    @property
    def nvml(self) -> FakeNvml:
        if self._fake is None:
            self._fake = FakeNvml(self.tmp_path / "nvml")
        return self._fake

    def jetson(self, board: str, **options: Any) -> JetsonTree:
        return JetsonTree(self.root, BOARDS[board], **options)

    def cards(self) -> None:
        hosts.nvidia_host(self.root, self.nvml)

    def detect(self, **options: Any) -> tuple[NodeGpus, Inventory]:
        options.setdefault("nvml", NvmlConfig(str(self.library)))
        gpus, found = detect(GpusConfig(**options), HostRoot(self.root))
        self.made.append(gpus)
        return gpus, found


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    for gpus in made.made:
        gpus.close()


def kinds(found: Inventory) -> list[tuple[str, str, int]]:
    return [(g.source, g.model, g.index) for g in found.gpus]


# ---- D4: Jetson seen as the wrong thing, or latched to the wrong source ---------------------------


def test_a_jetson_whose_nvml_lists_the_integrated_gpu_has_one_gpu(node: Node) -> None:
    """D4 a: NVML loads, lists "Orin (nvgpu)", and answers nothing; the load node appears later."""
    tree = node.jetson("orin-nano-jp6", gpu_appears=False)
    node.nvml.add("orin")
    gpus, found = node.detect()
    (gpu,) = found.gpus
    assert gpu.source == "tegra"
    assert gpu.kind is GpuKind.INTEGRATED
    assert gpu.memory_total_mib == BOARDS["orin-nano-jp6"].mem_total_kib // 1024
    assert gpus.read(gpu.uuid).util_pct is None
    tree.gpu_appears()
    assert gpus.read(gpu.uuid).util_pct == 43.7
    assert gpus.inventory().gpus[0].uuid == gpu.uuid


@pytest.mark.parametrize("nvml", [True, False], ids=["NVML lists it", "no NVML"])
@pytest.mark.parametrize("view", ["service", "container"])
@pytest.mark.parametrize("board", sorted(set(BOARDS) - {"agx-orin-dgpu"}))
def test_every_board_is_one_integrated_gpu(node: Node, board: str, view: str, nvml: bool) -> None:
    node.jetson(board, view=view)
    if nvml:
        node.nvml.add("thor" if board == "thor-jp7" else "orin")
    _, found = node.detect()
    assert [(g.source, g.kind) for g in found.gpus] == [("tegra", GpuKind.INTEGRATED)]
    assert found.gpus[0].memory_total_mib > 0
    assert found.problem is None


def test_thor_is_known_by_nvml_alone(node: Node) -> None:
    """No Tegra file in the container, only NVML's name says it."""
    node.nvml.add("thor")
    hosts.meminfo(node.root, 128_000_000)
    _, found = node.detect()
    assert [(g.source, g.memory_total_mib) for g in found.gpus] == [("tegra", 125000)]


def test_thors_processes_come_from_nvml(node: Node) -> None:
    node.jetson("thor-jp7")
    uuid = node.nvml.add("thor")
    node.nvml.processes(uuid, compute=[(77, 2048)])
    gpus, found = node.detect()
    reading = gpus.read(found.gpus[0].uuid)
    assert reading.processes is not None
    assert [(p.pid, p.used_mib) for p in reading.processes] == [(77, 2048)]


def test_events_of_the_integrated_gpu_carry_our_identity(node: Node) -> None:
    node.jetson("thor-jp7")
    uuid = node.nvml.add("thor", event_types=0x8)
    gpus, found = node.detect()
    assert found.gpus[0].uuid != uuid
    node.nvml.xid(uuid, 79)
    event = gpus.wait_event(LONG_S)
    assert event is not None
    assert (event.uuid, event.xid) == (found.gpus[0].uuid, 79)


def test_a_card_in_a_jetson_is_gpu_1(node: Node) -> None:
    """As NVIDIA's toolkit numbers them, and each with its own back end."""
    node.jetson("agx-orin-jp72")
    card = node.nvml.add("rtx-a2000", minor=1)
    hosts.write(node.root, "/dev/nvidia1")
    gpus, found = node.detect()
    assert [(g.source, g.index) for g in found.gpus] == [("tegra", 0), ("nvml", 1)]
    assert [gpus.read(g.uuid).fault for g in found.gpus] == [None, None]
    node.nvml.lose(card)
    assert gpus.read(card).fault is GpuFault.LOST
    assert gpus.read(found.gpus[0].uuid).fault is None
    assert [g.uuid for g in gpus.inventory().gpus] == [found.gpus[0].uuid]


def test_both_listed_by_nvml_keep_its_numbers(node: Node) -> None:
    node.jetson("thor-jp7")
    node.nvml.add("thor")
    node.nvml.add("rtx-4000-ada", minor=1)
    _, found = node.detect()
    assert [(g.source, g.index) for g in found.gpus] == [("tegra", 0), ("nvml", 1)]


def test_an_igx_in_discrete_mode_offers_the_card_alone(node: Node) -> None:
    board = node.jetson("agx-orin-dgpu", gpu_appears=False)
    for trace in ("dev/nvgpu", "dev/nvhost-gpu", "dev/nvhost-ctrl-gpu"):
        board.remove(trace)
    node.nvml.add("rtx-4000-ada")
    _, found = node.detect()
    assert [g.source for g in found.gpus] == ["nvml"]


# ---- cards, WSL, GB10 ---------------------------------------------------------------------------


def test_cards_with_the_trail_that_led_to_them(node: Node) -> None:
    uuid = node.nvml.add("l4", bus=0x65)
    node.cards()
    _, found = node.detect()
    assert kinds(found) == [("nvml", "NVIDIA L4", 0)]
    trail = "\n".join(found.evidence)
    for fact in ("kernel module: 550.90.07", "0000:65:00.0", uuid, "not a Jetson", "decided: 1 by nvml"):
        assert fact in trail


def test_wsl_has_one_gpu_without_absent_nodes(node: Node) -> None:
    """D1."""
    uuid = node.nvml.add("rtx-3070", minor=None, bus_id="00000000:01:00.0")
    hosts.wsl_host(node.root)
    _, found = node.detect()
    (gpu,) = found.gpus
    assert (gpu.uuid, gpu.device_nodes) == (uuid, ("/dev/dxg",))
    assert any("WSL" in line for line in found.evidence)


def test_gb10_is_integrated_and_nvmls(node: Node) -> None:
    node.nvml.add("gb10")
    node.cards()
    _, found = node.detect()
    assert [(g.source, g.kind) for g in found.gpus] == [("nvml", GpuKind.INTEGRATED)]
    assert found.gpus[0].memory_total_mib == 15625


# ---- no GPU, each reason its own ----------------------------------------------------------------


def _nothing(node: Node) -> None:
    pass


def _card_without_driver(node: Node) -> None:
    hosts.write(node.root, "/sys/bus/pci/devices/0000:65:00.0/vendor", "0x10de\n")
    hosts.write(node.root, "/sys/bus/pci/devices/0000:65:00.0/class", "0x030000\n")


def _wsl_without_library(node: Node) -> None:
    hosts.wsl_host(node.root)


def _broken_library(node: Node) -> None:
    node.library.parent.mkdir()
    node.library.write_text("not a library")


def _init(code: int) -> Callable[[Node], None]:
    def prepare(node: Node) -> None:
        node.nvml.add("l4")
        node.cards()
        node.nvml.init_error(code)

    return prepare


def _mismatch(node: Node) -> None:
    node.nvml.add("l4")
    node.nvml.driver_version = "550.107.02"
    node.nvml.all_calls(18)
    hosts.nvidia_host(node.root, node.nvml, version="550.90.07")


def _jetson_without_memory(node: Node) -> None:
    node.jetson("orin-nx-jp6").remove("proc/meminfo")


@pytest.mark.parametrize(
    ("prepare", "fault", "words"),
    [
        pytest.param(_nothing, GpuFault.NOT_FOUND, ("no NVIDIA device", "not a Jetson"), id="nothing"),
        pytest.param(
            _card_without_driver, GpuFault.LIBRARY_MISSING, ("0000:65:00.0", "libraryPath"), id="no driver"
        ),
        pytest.param(_wsl_without_library, GpuFault.LIBRARY_MISSING, ("WSL",), id="WSL without library"),
        pytest.param(_broken_library, GpuFault.LIBRARY_MISSING, ("reinstall",), id="broken library"),
        pytest.param(_init(9), GpuFault.DRIVER_NOT_LOADED, ("modprobe",), id="driver not loaded"),
        pytest.param(_init(4), GpuFault.NO_PERMISSION, ("/dev/nvidiactl",), id="no permission"),
        pytest.param(
            _mismatch, GpuFault.DRIVER_MISMATCH, ("550.107.02", "550.90.07", "reboot"), id="mismatch"
        ),
        pytest.param(_init(999), GpuFault.FAILED, ("NVML 999",), id="unknown error"),
        pytest.param(_jetson_without_memory, GpuFault.FAILED, ("MemTotal",), id="Jetson without meminfo"),
    ],
)
def test_no_gpu_says_why_and_goes_on_looking(
    node: Node, prepare: Callable[[Node], None], fault: GpuFault, words: tuple[str, ...]
) -> None:
    prepare(node)
    gpus, found = node.detect()
    assert found.gpus == ()
    assert found.fault is fault
    for word in words:
        assert word in (found.problem or "")
    assert found.evidence
    assert gpus.inventory() == found
    assert gpus.wait_event(0.01) is None
    assert gpus.read("GPU-x").fault is not None


def test_a_driver_installed_later_is_found(node: Node) -> None:
    gpus, found = node.detect()
    assert found.fault is GpuFault.NOT_FOUND
    uuid = node.nvml.add("l4")
    node.cards()
    assert [g.uuid for g in gpus.inventory().gpus] == [uuid]
    assert gpus.read(uuid).fault is None


def test_a_jetson_goes_on_while_its_cards_driver_is_broken(node: Node) -> None:
    node.jetson("agx-orin-jp72")
    card = node.nvml.add("rtx-a2000")
    hosts.write(node.root, "/dev/nvidia0")
    gpus, before = node.detect()
    node.nvml.all_calls(18)
    assert gpus.read(card).fault is GpuFault.DRIVER_MISMATCH
    after = gpus.inventory()
    assert [g.uuid for g in after.gpus] == [before.gpus[0].uuid]
    assert any("kernel module" in line for line in after.evidence)
    assert gpus.read(card).fault is GpuFault.DRIVER_MISMATCH
    assert gpus.read(before.gpus[0].uuid).fault is None


# ---- forced sources -----------------------------------------------------------------------------


def test_source_nvml_offers_what_nvml_lists(node: Node) -> None:
    node.jetson("orin-nx-jp6")
    node.nvml.add("orin")
    _, found = node.detect(source="nvml")
    assert [(g.source, g.kind) for g in found.gpus] == [("nvml", GpuKind.INTEGRATED)]
    assert found.gpus[0].memory_total_mib == BOARDS["orin-nx-jp6"].mem_total_kib // 1024


def test_source_nvml_without_a_library_says_which_key(node: Node) -> None:
    _, found = node.detect(source="nvml")
    assert found.fault is GpuFault.LIBRARY_MISSING
    assert "gpus.nvml.libraryPath" in (found.problem or "")


def test_source_tegra_does_not_load_nvml(node: Node) -> None:
    node.jetson("orin-nx-jp6")
    node.nvml.add("rtx-a2000")
    gpus, found = node.detect(source="tegra")
    assert [g.source for g in found.gpus] == ["tegra"]
    assert node.nvml.calls() == []
    assert gpus.limiter is None
    assert gpus.topology() == {}


def test_source_tegra_elsewhere_says_so(node: Node) -> None:
    _, found = node.detect(source="tegra")
    assert found.fault is GpuFault.NOT_FOUND
    assert "not a Tegra board" in (found.problem or "")


def test_simulated_only_when_asked_for(node: Node) -> None:
    gpus, found = node.detect(source="simulated", simulated=SimulatedConfig(profile="2x-rtx-4000-ada"))
    assert [g.source for g in found.gpus] == ["simulated"] * 2
    assert gpus.simulator is not None
    assert set(gpus.topology().values()) == {GpuLink("phb")}
    gpus.simulator.inject("lost", 1)
    assert gpus.read(found.gpus[1].uuid).fault is GpuFault.LOST
    assert not gpus.needs_reexec


def test_an_unknown_profile_is_a_config_error(node: Node) -> None:
    with pytest.raises(ConfigError):
        node.detect(source="simulated", simulated=SimulatedConfig(profile="h100"))


# ---- what goes through to NVML ------------------------------------------------------------------


def test_limits_topology_and_restart_go_through(node: Node) -> None:
    a, b = node.nvml.add("rtx-4000-ada"), node.nvml.add("rtx-4000-ada")
    node.nvml.memory_limits_supported()
    node.nvml.near(a, b, "pix")
    node.cards()
    (node.root / "cg").mkdir()
    gpus, _ = node.detect()
    assert gpus.limiter is not None
    gpus.limiter.set_memory_limits(a, "/cg", 0, 4000)
    assert gpus.limiter.get_memory_limits(a, "/cg") == (0, 4000, 0)
    assert gpus.topology() == {frozenset((a, b)): GpuLink("pix")}
    assert not gpus.needs_reexec
    hosts.kernel_module(node.root, "560.35.03")
    node.nvml.all_calls(18)
    gpus.read(a)
    assert gpus.needs_reexec
    assert gpus.topology() == {}
