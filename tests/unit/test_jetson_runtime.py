"""What containers on a Jetson are given, decided from the files that are installed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.gpus.model import Gpu
from edgeagent.gpus.tegra import TegraBackend
from edgeagent.hostroot import HostRoot
from edgeagent.node import jetson_runtime as jr
from tests.fakes.jetson import BOARDS, JetsonTree

CSV = jr.CSV_DIR.lstrip("/")
LIB = "/usr/lib/aarch64-linux-gnu"


def board(tmp_path: Path, name: str, **changes: object) -> tuple[JetsonTree, HostRoot, Gpu]:
    tree = JetsonTree(tmp_path, replace(BOARDS[name], **changes))  # type: ignore[arg-type]
    host = HostRoot(tmp_path)
    (gpu,) = TegraBackend(host).inventory().gpus
    return tree, host, gpu


def everything_exists(tree: JetsonTree, runtime: jr.JetsonRuntime) -> bool:
    paths = (*runtime.edits.device_nodes, *(m.host_path for m in runtime.edits.mounts))
    return all(tree.path(p.lstrip("/")).exists() for p in paths)


def test_csv_lists_become_edits_when_there_is_no_spec(tmp_path: Path) -> None:
    tree, host, gpu = board(tmp_path, "orin-nano-jp6")
    found = jr.jetson_runtime(host, gpu)
    assert (found.mode, found.cdi_device, found.runtime_class, found.problem) == ("csv", None, "nvidia", None)
    assert found.edits.env == {"NVIDIA_VISIBLE_DEVICES": "void"}
    assert set(found.edits.device_nodes) == set(gpu.device_nodes)
    assert {m.container_path for m in found.edits.mounts} == {
        f"{LIB}/nvidia/libcuda.so.1.1", f"{LIB}/libcuda.so", "/usr/share/nvidia",
    }  # fmt: skip
    assert everything_exists(tree, found)
    assert found.early_env == {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "all"}
    assert any("ld.so.conf" in note for note in found.notes)


def test_with_nvidias_hook_links_are_links_and_the_cache_is_refreshed(tmp_path: Path) -> None:
    tree, host, gpu = board(tmp_path, "orin-nano-jp6")
    tree.put("usr/bin/nvidia-ctk", "")
    hooks = jr.jetson_runtime(host, gpu).edits.hooks
    assert [h.args for h in hooks] == [
        ("nvidia-ctk", "hook", "create-symlinks", "--link", f"nvidia/libcuda.so.1.1::{LIB}/libcuda.so"),
        ("nvidia-ctk", "hook", "update-ldcache", "--folder", LIB, "--folder", f"{LIB}/nvidia"),
    ]
    tree.put("usr/bin/nvidia-cdi-hook", "")
    assert jr.jetson_runtime(host, gpu).edits.hooks[0].args[:2] == ("nvidia-cdi-hook", "create-symlinks")


def test_the_scheduling_node_is_kept_from_containers(tmp_path: Path) -> None:
    for place in ("csv", "cdi"):
        changes = {} if place == "csv" else {"cdi_devices": ("0",)}
        tree, host, gpu = board(tmp_path / place, "orin-nano-jp6", **changes)
        if place == "cdi":
            text = tree.path("etc/cdi/nvidia.yaml").read_text()
            tree.put("etc/cdi/nvidia.yaml", text.replace("/dev/nvhost-gpu", "/dev/nvgpu/igpu0/sched"))
        found = jr.jetson_runtime(host, gpu)
        assert found.mode == place
        assert not [n for n in found.edits.device_nodes if "sched" in n]


def test_a_generated_spec_wins_and_names_a_device_that_exists(tmp_path: Path) -> None:
    tree, host, gpu = board(tmp_path, "orin-nx-jp6")
    tree.put("usr/bin/nvidia-cdi-hook", "")
    found = jr.jetson_runtime(host, gpu)
    assert (found.mode, found.cdi_device, found.problem, found.notes) == ("cdi", "nvidia.com/gpu=0", None, ())
    assert found.edits.device_nodes == ("/dev/nvmap", "/dev/nvhost-gpu")
    assert [m.container_path for m in found.edits.mounts] == [f"{LIB}/nvidia/libcuda.so.1.1"]
    assert found.edits.hooks[0].path == "/usr/bin/nvidia-cdi-hook"
    assert found.edits.env["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_a_spec_with_only_all(tmp_path: Path) -> None:
    _, host, gpu = board(tmp_path, "orin-nx-jp6", cdi_devices=("all",))
    assert jr.jetson_runtime(host, gpu).cdi_device == "nvidia.com/gpu=all"
    # Beside a card "all" would be both: the lists are used.
    beside = jr.jetson_runtime(host, gpu, gpus_on_node=2)
    assert (beside.mode, beside.cdi_device) == ("csv", None)
    assert beside.early_env["NVIDIA_VISIBLE_DEVICES"] == "0"


def test_a_stale_spec_loses_what_is_gone_and_says_so(tmp_path: Path) -> None:
    tree, host, gpu = board(tmp_path, "orin-nx-jp6")  # no nvidia-cdi-hook: the spec's hook is gone
    tree.remove("usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1.1")
    tree.remove("dev/nvmap")
    found = jr.jetson_runtime(host, gpu)
    assert (found.edits.device_nodes, found.edits.mounts, found.edits.hooks) == (("/dev/nvhost-gpu",), (), ())
    assert "2 of its paths do not exist" in found.notes[0]


def test_a_spec_for_the_discrete_card_is_not_the_igpu(tmp_path: Path) -> None:
    tree, host, gpu = board(tmp_path, "agx-orin-dgpu")
    spec = '{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{"name":"0","containerEdits":%s}]}'
    card = '{"deviceNodes":[{"path":"/dev/nvidia1"},{"path":"/dev/nvidiactl"}]}'
    tree.put("var/run/cdi/nvidia.json", spec % card)
    found = jr.jetson_runtime(host, gpu, gpus_on_node=2)
    assert (found.mode, found.cdi_device) == ("csv", None)
    assert "/dev/nvidia1" in tree.path(f"{CSV}/devices.csv").read_text()
    assert "/dev/nvidia1" not in found.edits.device_nodes


@pytest.mark.parametrize("text", ["", "{", "- 1", "kind: nvidia.com/gpu", "kind: [x]\ndevices: {}", "\x00"])
def test_a_broken_spec_is_no_spec(tmp_path: Path, text: str) -> None:
    tree, host, gpu = board(tmp_path, "orin-nano-jp6")
    tree.put("etc/cdi/nvidia.yaml", text)
    assert jr.jetson_runtime(host, gpu).mode == "csv"


def test_nothing_installed_is_said_in_words(tmp_path: Path) -> None:
    _, host, gpu = board(tmp_path, "orin-nano-jp6", csv=False)
    found = jr.jetson_runtime(host, gpu)
    assert (found.mode, found.runtime_class) == ("nodes", None)
    assert found.edits.device_nodes == gpu.device_nodes
    assert found.problem is not None
    assert "nvidia-ctk cdi generate" in found.problem


def test_no_nodes_at_all_is_a_problem(tmp_path: Path) -> None:
    _, host, gpu = board(tmp_path, "orin-nano-jp6", nodes=())
    problem = jr.jetson_runtime(host, gpu).problem
    assert problem is not None
    assert "no device node" in problem


def test_cdi_mode_of_the_runtime_is_given_the_name_that_exists(tmp_path: Path) -> None:
    tree, host, gpu = board(tmp_path, "orin-nx-jp6")
    tree.put("etc/nvidia-container-runtime/config.toml", '[nvidia-container-runtime]\nmode = "cdi"\n')
    assert jr.jetson_runtime(host, gpu).early_env["NVIDIA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", jr.RuntimeConfig()),
        ('mode = "csv"', jr.RuntimeConfig()),  # not in the section that counts
        ('[nvidia-container-runtime]\nlog-level = "info"\nmode = "csv" # why\n', jr.RuntimeConfig("csv")),
        ("[nvidia-container-runtime]\n# mode = 'csv'\nmode = 'auto'", jr.RuntimeConfig("auto")),
        (
            '[nvidia-container-runtime]\nmode="csv"\n[nvidia-container-runtime.modes.csv]\nmount-spec-path="/opt/csv"',
            jr.RuntimeConfig("csv", "/opt/csv"),
        ),
        ('[nvidia-container-runtime.modes.csv]\nmount-spec-path = "relative"', jr.RuntimeConfig()),
    ],
)
def test_runtime_config(text: str, expected: jr.RuntimeConfig) -> None:
    assert jr.parse_runtime_config(text) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dev, /dev/nvmap", jr.CsvEntry("dev", "/dev/nvmap")),
        ("lib,/usr/lib/x.so", jr.CsvEntry("lib", "/usr/lib/x.so")),
        ("  sym , /usr//lib/y.so  ", jr.CsvEntry("sym", "/usr/lib/y.so")),
        ("dir, /a/../etc/x", jr.CsvEntry("dir", "/etc/x")),
    ],
)
def test_csv_lines(line: str, expected: jr.CsvEntry) -> None:
    assert list(jr.parse_csv(f"# comment\n\n{line}\n")) == [expected]


@pytest.mark.parametrize(
    "line", ["dev", "dev, nvmap", "exe, /bin/sh", ", /dev/x", "lib, ", "dev;/dev/x", "\x00"]
)
def test_bad_csv_lines_are_told_by_number(line: str) -> None:
    assert list(jr.parse_csv(f"dev, /dev/a\n{line}\n"))[1:] == ["line 2: not 'dev|dir|lib|sym, /path'"]


def test_patterns_in_lists_are_resolved_on_the_host(tmp_path: Path) -> None:
    tree, host, gpu = board(tmp_path, "orin-nano-jp6")
    tree.put(f"{CSV}/drivers.csv", f"lib, {LIB}/nvidia/libnv*.so\nrubbish\nmore rubbish\n")
    tree.put(f"{LIB}/nvidia/libnvrm.so".lstrip("/"), "")
    tree.put(f"{LIB}/nvidia/libnvos.so".lstrip("/"), "")
    tree.put(f"{CSV}/cuda.csv", "dir, /usr/local/cuda\n")  # only for images that ask for it
    found = jr.jetson_runtime(host, gpu)
    assert [m.host_path for m in found.edits.mounts] == [
        f"{LIB}/nvidia/libnvos.so",
        f"{LIB}/nvidia/libnvrm.so",
    ]
    assert any("2 such lines" in n for n in found.notes)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=300))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    assert all(isinstance(e, (str, jr.CsvEntry)) for e in jr.parse_csv(text))
    assert jr.parse_runtime_config(text).csv_dir.startswith("/")
