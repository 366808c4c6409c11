"""Detection of Jetson boards: tables, evidence, identity; nothing required, nothing crashes."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.gpus import jetson
from edgeagent.hostroot import HostRoot
from tests.fakes.jetson import BOARDS, JetsonTree
from tests.fakes.jetson.tree import without_identity


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64", "36.4.3"),
        ("# R28 (release), REVISION: 1.0, GCID: 9379712, BOARD: t186ref", "28.1.0"),
        ("# R32 (release), REVISION: 7.6, GCID: 38171779", "32.7.6"),
        ("# R38 (release), REVISION: 2, GCID: 1", "38.2.0"),
        ("# R99 (release), REVISION: 9.9", "99.9.9"),
        ("# KERNEL_VARIANT: oot", None),
        ("# R36 (release)", None),
        ("", None),
        ("\x00\x01\xff", None),
    ],
)
def test_l4t_release(text: str, expected: str | None) -> None:
    assert jetson.parse_l4t(text) == expected


@pytest.mark.parametrize(
    ("name", "integrated"),
    [
        ("Orin (nvgpu)", True),
        ("NVIDIA Thor", True),
        ("NVIDIA GeForce RTX 3070", False),
        ("NVIDIA GB10", False),
        ("Tesla T4", False),
        ("", False),
    ],
)
def test_integrated_names(name: str, integrated: bool) -> None:
    assert jetson.is_integrated_name(name) is integrated


@pytest.mark.parametrize(
    ("entry", "gpu"),
    [
        *[(n, True) for n in ("57000000.gpu", "17000000.gp10b", "17000000.gv11b", "17000000.ga10b")],
        *[(n, True) for n in ("17000000.gpu", "gpu", "gb10b", "gpu.0", "gpu-gpc-0", "gpu-nvd-0")],
        *[(n, False) for n in ("15340000.vic", "154c0000.nvenc", "bwmgr", "gpufreq", "31b10000.emc", "")],
    ],
)
def test_devfreq_names(entry: str, gpu: bool) -> None:
    assert jetson.is_gpu_devfreq(entry) is gpu


@pytest.mark.parametrize(
    ("compatible", "chip", "part"),
    [
        pytest.param(
            b"nvidia,p3737-0000+p3701-0005\0nvidia,p3701-0005\0nvidia,tegra234\0nvidia,tegra23x\0",
            "tegra234", "p3701-0005", id="AGX Orin",
        ),
        pytest.param(b"nvidia,p2597-0000+p3310-1000\0nvidia,tegra186\0", "tegra186", "p3310-1000", id="TX2"),
        pytest.param(
            b"nvidia,p3737-0000+p3701-0005nvidia,p3701-0005nvidia,tegra234nvidia,tegra23x",
            "tegra234", "p3701-0005", id="run together",
        ),
        pytest.param(b"nvidia,p9999-0000+p9998-0001\0nvidia,tegra299\0", "tegra299", "p9998-0001", id="new"),
        pytest.param(b"nvidia,p3663-a01+p9000\0nvidia,tegra234\0", "tegra234", None, id="automotive"),
        pytest.param(b"nvidia,p9999-0000\0nvidia,tegra26x\0", "tegra26x", None, id="carrier only"),
        pytest.param(b"raspberrypi,4-model-b\0brcm,bcm2711\0", None, None, id="not NVIDIA"),
        pytest.param(b"\xff\xfe\0\0\x01", None, None, id="binary"),
    ],
)  # fmt: skip
def test_chip_and_module_from_compatible(compatible: bytes, chip: str | None, part: str | None) -> None:
    strings = jetson.parse_strings(compatible)
    assert (jetson.find_chip(strings), jetson.find_part_number(strings)) == (chip, part)


def test_every_known_module_and_release_is_well_formed() -> None:
    assert all(len(p) == 10 and m.multiprocessors > 0 for p, m in jetson.MODULES.items())
    assert all(len(r.split(".")) == 3 for r in jetson.JETPACKS)


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ("< POWER_MODEL ID=0 NAME=MAXN >\n< POWER_MODEL ID=1 NAME=5W >", {0: "MAXN", 1: "5W"}),
        ("# < POWER_MODEL ID=7 NAME=NO >\n<POWER_MODEL ID=2 NAME=MAXN_SUPER>", {2: "MAXN_SUPER"}),
        ("< POWER_MODEL ID=0 NAME=A >\n< POWER_MODEL ID=0 NAME=B >", {0: "A"}),
        ("< PM_CONFIG DEFAULT=2 >", {}),
    ],
)
def test_power_modes(conf: str, expected: dict[int, str]) -> None:
    assert jetson.parse_power_modes(conf) == expected


@pytest.mark.parametrize(
    ("status", "expected"),
    [("pmode:0002 fmode:quiet", 2), ("pmode:0000", 0), ("fmode:cool", None), ("", None)],
)
def test_power_mode_id(status: str, expected: int | None) -> None:
    assert jetson.parse_power_mode_id(status) == expected


# -- evidence -------------------------------------------------------------------------------------


def put(root: Path, relative: str, data: bytes) -> None:
    (root / relative).parent.mkdir(parents=True, exist_ok=True)
    (root / relative).write_bytes(data)


@pytest.mark.parametrize(
    ("files", "names", "expected"),
    [
        pytest.param({}, None, (False, False), id="nothing"),
        pytest.param({}, [], (False, False), id="NVML without devices"),
        pytest.param({}, ["NVIDIA L4"], (False, False), id="x86 with a card"),
        pytest.param({}, ["Orin (nvgpu)"], (True, True), id="NVML's name alone"),
        pytest.param({}, ["NVIDIA L4", "NVIDIA Thor"], (True, True), id="Thor beside a card"),
        pytest.param({"etc/nv_tegra_release": b"nonsense"}, None, (True, True), id="release file alone"),
        pytest.param({"sys/devices/soc0/family": b"Tegra\n"}, None, (True, True), id="soc0 alone"),
        pytest.param({"sys/devices/soc0/family": b"jep106:0070\n"}, None, (False, False), id="other soc0"),
        pytest.param(
            {"sys/firmware/devicetree/base/compatible": b"nvidia,p1-2\0nvidia,tegra264\0"},
            None, (True, True), id="compatible alone",
        ),
        pytest.param(
            {"proc/device-tree/compatible": b"nvidia,tegra234\0"}, None, (True, True), id="procfs device tree"
        ),
        pytest.param(
            {"sys/firmware/devicetree/base/compatible": b"nvidia,grace\0"}, None, (False, False), id="Grace"
        ),
        pytest.param({"proc/sys/kernel/osrelease": b"5.10.120-tegra\n"}, None, (True, True), id="kernel alone"),
        pytest.param(
            {"sys/devices/soc0/family": b"Tegra\n"}, ["NVIDIA RTX A6000"], (True, False), id="IGX in dGPU mode"
        ),
        pytest.param(
            {"sys/devices/soc0/family": b"Tegra\n", "dev/nvgpu/igpu0/ctrl": b""},
            ["NVIDIA RTX A6000"], (True, True), id="Jetson with a card, JetPack 5",
        ),
        pytest.param({"sys/devices/soc0/family": b"Tegra\n"}, [], (True, True), id="NVML lists nothing"),
    ],
)  # fmt: skip
def test_detect(
    tmp_path: Path, files: dict[str, bytes], names: list[str] | None, expected: tuple[bool, bool]
) -> None:
    for relative, data in files.items():
        put(tmp_path, relative, data)
    found = jetson.detect(HostRoot(tmp_path), names)
    assert (found.tegra, found.integrated_gpu) == expected
    assert found.evidence


def test_detect_says_which_nvml_devices_are_the_igpu(tmp_path: Path) -> None:
    found = jetson.detect(HostRoot(tmp_path), ["Orin (nvgpu)", "NVIDIA RTX A2000"])
    assert found.integrated == (0,)


@pytest.mark.parametrize(
    "files", [{"dev/dxg": b""}, {"proc/sys/kernel/osrelease": b"5.15-microsoft-standard-WSL2"}]
)
def test_wsl_is_not_tegra(tmp_path: Path, files: dict[str, bytes]) -> None:
    for relative, data in files.items():
        put(tmp_path, relative, data)
    found = jetson.detect(HostRoot(tmp_path), ["NVIDIA GeForce RTX 3070"])
    assert (found.wsl, found.tegra, found.integrated_gpu) == (True, False, False)


# -- identity -------------------------------------------------------------------------------------


def test_uuid_comes_from_the_serial_number_and_survives_reflashing(tmp_path: Path) -> None:
    before = JetsonTree(tmp_path / "a", BOARDS["orin-nano-jp6"])
    after = JetsonTree(tmp_path / "b", BOARDS["orin-nano-jp6"], "container")
    other = JetsonTree(tmp_path / "c", BOARDS["orin-nano-jp6"])
    other.put("sys/firmware/devicetree/base/serial-number", "1421199999999\0")
    first, second, third = (jetson.read_facts(HostRoot(t.root)).uuid for t in (before, after, other))
    assert first == second != third
    assert uuid.UUID(first.removeprefix("tegra-"))


@pytest.mark.parametrize("serial", [None, "", "0000000000000", "\0", "  ", "\x01\x02", "x" * 200])
def test_uuid_without_a_usable_serial_is_that_of_the_module(tmp_path: Path, serial: str | None) -> None:
    tree = JetsonTree(tmp_path, without_identity(BOARDS["orin-nano-jp6"]))
    expected = jetson.read_facts(HostRoot(tmp_path)).uuid
    if serial is not None:
        tree.put("sys/firmware/devicetree/base/serial-number", serial)
    assert jetson.read_facts(HostRoot(tmp_path)).uuid == expected


def test_name_falls_back_from_module_to_board_to_chip() -> None:
    facts = jetson.JetsonFacts
    assert facts(module="Jetson Nano", board="NVIDIA X").name == "Jetson Nano"
    assert facts(board="NVIDIA Jetson Y").name == "Jetson Y"
    assert facts(codename="Orin").name == "Tegra Orin"
    assert facts().name == "Tegra (unknown module)"


# -- whatever the files hold ----------------------------------------------------------------------

FILES = (
    "etc/nv_tegra_release", "sys/devices/soc0/family", "proc/sys/kernel/osrelease", "etc/nvpmodel.conf",
    "sys/firmware/devicetree/base/compatible", "sys/firmware/devicetree/base/model",
    "sys/firmware/devicetree/base/serial-number", "sys/firmware/devicetree/base/nvidia,dtsfilename",
)  # fmt: skip
contents = st.one_of(
    st.binary(max_size=200),
    st.sampled_from([b"nvidia,tegra234\0", b"# R36 (release), REVISION: 4.3, x", b"Tegra\n", b"p3767-0005"]),
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(FILES), contents, max_size=len(FILES)))
def test_any_contents_give_facts(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    root = tmp_path_factory.mktemp("fuzz")
    for relative, data in files.items():
        put(root, relative, data)
    found = jetson.detect(HostRoot(root), ["Orin (nvgpu)"])
    facts = jetson.read_facts(HostRoot(root))
    assert found.tegra
    assert facts.name
    assert facts.uuid.startswith("tegra-")
    texts = (*found.evidence, *facts.as_strings().values(), facts.name)
    assert all(t.isprintable() and len(t) < 2000 for t in texts)
