"""A Jetson with NVML beside it, through detection: one GPU where there is one, two where there are two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgeagent.config.schema import GpusConfig, NvmlConfig
from edgeagent.gpus.detect import NodeGpus
from edgeagent.gpus.model import GpuFault, GpuKind
from edgeagent.hostroot import HostRoot
from edgeagent.node.jetson_runtime import jetson_runtime
from tests.fakes.jetson import BOARDS, JetsonTree
from tests.fakes.jetson.tree import View
from tests.fakes.nvml import FakeNvml
from tests.fakes.nvml.driver import DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH
from tests.fakes.nvml.host import nvidia_host

Start = Callable[..., tuple[JetsonTree, FakeNvml, NodeGpus]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A board's tree, an NVML scenario and the node's GPUs over both."""
    opened: list[NodeGpus] = []

    def _start(
        board: str, *models: str, view: View = "service", gpu_appears: bool = True
    ) -> tuple[JetsonTree, FakeNvml, NodeGpus]:
        tree = JetsonTree(tmp_path / "host", BOARDS[board], view, gpu_appears=gpu_appears)
        fake = FakeNvml(tmp_path / "nvml")
        for model in models:
            fake.add(model)
        config = GpusConfig(nvml=NvmlConfig(library_path=str(fake.library_path)))
        opened.append(NodeGpus(config, HostRoot(tree.root)))
        return tree, fake, opened[-1]

    yield _start
    for gpus in opened:
        gpus.close()


@pytest.mark.parametrize("view", ["service", "container"])
def test_d4a_orin_whose_nvml_knows_only_its_name(start: Start, view: View) -> None:
    tree, _, node = start("orin-nano-jp6", "orin", view=view, gpu_appears=False)
    (gpu,) = node.inventory().gpus
    assert (gpu.source, gpu.kind, gpu.memory_total_mib) == ("tegra", GpuKind.INTEGRATED, 7620)
    assert gpu.facts["nvml_name"] == "Orin (nvgpu)"
    before = node.read(gpu.uuid)
    assert (before.fault, before.util_pct) == (None, None)
    tree.gpu_appears()
    assert node.read(gpu.uuid).util_pct == 43.7
    assert [g.uuid for g in node.inventory().gpus] == [gpu.uuid]


@pytest.mark.parametrize("models", [(), ("orin",)], ids=["NVML lists nothing", "NVML lists it"])
def test_the_gpu_is_the_same_with_and_without_nvml(start: Start, models: tuple[str, ...]) -> None:
    _, fake, node = start("orin-nx-jp6", *models)
    fake.init_error(DRIVER_NOT_LOADED)
    (without,) = node.inventory().gpus
    fake.init_error(None)
    (with_nvml,) = node.inventory().gpus
    assert without.uuid == with_nvml.uuid


@pytest.mark.parametrize("models", [("orin", "rtx-a2000"), ("rtx-a2000",)], ids=["JetPack 6", "JetPack 5"])
def test_a_jetson_with_a_card_has_two_gpus(start: Start, models: tuple[str, ...]) -> None:
    tree, fake, node = start("agx-orin-dgpu", *models)
    fake.set(fake.gpus[-1].uuid, minor=1, util_pct=77)
    integrated, card = node.inventory().gpus
    assert (integrated.source, integrated.index, integrated.model) == ("tegra", 0, "Jetson AGX Orin 32GB")
    assert (card.source, card.index, card.kind) == ("nvml", 1, GpuKind.DISCRETE)
    assert not set(integrated.device_nodes) & {"/dev/nvidia1"}
    assert (node.read(integrated.uuid).util_pct, node.read(card.uuid).util_pct) == (43.7, 77)
    given = jetson_runtime(HostRoot(tree.root), integrated, gpus_on_node=2)
    assert given.early_env["NVIDIA_VISIBLE_DEVICES"] == "0"
    assert "/dev/nvidia1" not in given.edits.device_nodes


def test_a_card_whose_driver_differs_is_said_beside_the_integrated_gpu(start: Start) -> None:
    tree, fake, node = start("agx-orin-dgpu", "orin", "rtx-a2000")
    nvidia_host(tree.root, fake)
    fake.set(fake.gpus[-1].uuid, minor=1)
    integrated, card = node.inventory().gpus
    fake.init_error(LIB_RM_VERSION_MISMATCH)
    fake.all_calls(LIB_RM_VERSION_MISMATCH)
    assert node.read(card.uuid).fault is GpuFault.DRIVER_MISMATCH
    found = node.inventory()
    assert (found.gpus[0].uuid, found.fault) == (integrated.uuid, GpuFault.DRIVER_MISMATCH)
    assert "550" in str(found.problem)
    assert node.read(integrated.uuid).fault is None


def test_thors_own_gpu_on_the_bus_is_no_card(start: Start) -> None:
    tree, fake, node = start("thor-jp7")
    for name, text in (("vendor", "0x10de\n"), ("class", "0x030000\n")):
        tree.put(f"sys/bus/pci/devices/0000:01:00.0/{name}", text)
    fake.init_error(DRIVER_NOT_LOADED)
    found = node.inventory()
    assert (len(found.gpus), found.problem, found.fault) == (1, None, None)


@pytest.mark.parametrize("view", ["service", "container"])
def test_thor_reads_load_and_memory_of_processes_from_nvml(start: Start, view: View) -> None:
    _, fake, node = start("thor-jp7", "thor", view=view)
    uuid = fake.gpus[0].uuid
    fake.set(uuid, util_pct=64)
    fake.processes(uuid, compute=[(100, 2048.0), (200, 512.0)], graphics=[(100, 2048.0)])
    (gpu,) = node.inventory().gpus
    assert (gpu.source, gpu.memory_total_mib, gpu.compute_capability) == ("tegra", 125771, (11, 0))
    reading = node.read(gpu.uuid)
    assert (reading.util_pct, reading.clock_sm_mhz, reading.power_w) == (64, 1575.0, 46.25)
    assert reading.memory_used_mib == 2560.0
    assert {p.pid: p.used_mib for p in reading.processes or ()} == {100: 2048.0, 200: 512.0}


def test_d4b_thor_container_without_nvml(start: Start) -> None:
    tree, fake, node = start("thor-jp7", view="container")
    fake.init_error(DRIVER_NOT_LOADED)
    tree.remove("sys/devices/soc0/family")
    (gpu,) = node.inventory().gpus
    assert gpu.memory_total_mib == 125771
    assert node.read(gpu.uuid).host_memory_available_mib == pytest.approx(62885.787)


def test_igx_in_dgpu_mode_offers_the_card_alone(start: Start) -> None:
    tree, _, node = start("agx-orin-dgpu", "rtx-a2000", gpu_appears=False)
    for gone in ("dev/nvgpu", "dev/nvhost-gpu", "dev/nvhost-ctrl-gpu"):
        tree.remove(gone)
    (card,) = node.inventory().gpus
    assert card.source == "nvml"
