"""CDI specs: what is written, what is left alone, what is read of others'."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from edgeagent.errors import NodeError
from edgeagent.hostroot import HostRoot
from edgeagent.node.cdi import (
    ContainerEdits,
    Hook,
    Mount,
    SpecDir,
    annotations_of,
    edits_from_json,
    edits_to_json,
    qualified_name,
    read_spec,
    spec_text,
)

EDITS = ContainerEdits(
    env={"A": "1", "B": "x=y"},
    mounts=(Mount("/usr/lib/libcuda.so.550", "/usr/lib64/libcuda.so.1"),),
    device_nodes=("/dev/nvidia0", "/dev/nvidiactl"),
    hooks=(Hook("createContainer", "/usr/bin/nvidia-cdi-hook", ("nvidia-cdi-hook", "x"), ("D=1",)),),
)


@pytest.fixture
def directory(tmp_path: Path) -> SpecDir:
    return SpecDir(HostRoot(tmp_path), "/var/run/cdi")


def test_a_spec_says_only_what_version_0_6_knows() -> None:
    spec = json.loads(spec_text("share", {"m000001": EDITS}, {"pod-uid": "u"}))
    assert spec == {
        "cdiVersion": "0.6.0",
        "kind": "edgeagent.io/share",
        "annotations": {"edgeagent.io/pod-uid": "u"},
        "devices": [
            {
                "name": "m000001",
                "containerEdits": {
                    "env": ["A=1", "B=x=y"],
                    "deviceNodes": [{"path": "/dev/nvidia0"}, {"path": "/dev/nvidiactl"}],
                    "hooks": [
                        {
                            "hookName": "createContainer",
                            "path": "/usr/bin/nvidia-cdi-hook",
                            "args": ["nvidia-cdi-hook", "x"],
                            "env": ["D=1"],
                        }
                    ],
                    "mounts": [
                        {
                            "hostPath": "/usr/lib/libcuda.so.550",
                            "containerPath": "/usr/lib64/libcuda.so.1",
                            "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
                        }
                    ],
                },
            }
        ],
    }
    assert qualified_name("share", "m000001") == "edgeagent.io/share=m000001"


@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "../x", "a\n"])
def test_a_name_that_is_no_cdi_device_is_refused(name: str, directory: SpecDir) -> None:
    with pytest.raises(ValueError, match="not a CDI device name"):
        spec_text("share", {name: EDITS})
    with pytest.raises(ValueError, match="not a CDI device name"):
        directory.write("share", name, "{}")


def test_a_kind_that_panics_containerd_is_never_written() -> None:
    with pytest.raises(ValueError, match="not a CDI kind"):
        spec_text("s", {"m000001": EDITS})


def test_edits_survive_writing_and_reading() -> None:
    assert edits_from_json(edits_to_json(EDITS)) == EDITS
    assert edits_to_json(ContainerEdits()) == {}


def test_writing_is_by_rename_within_the_directory_and_leaves_nothing(
    tmp_path: Path, directory: SpecDir
) -> None:
    seen: list[str] = []
    directory.write("share", "m000001", "old")
    path = tmp_path / "var/run/cdi/edgeagent.io-share-m000001.json"
    before = path.stat().st_ino
    directory.write("share", "m000001", "new")
    seen = [p.name for p in path.parent.iterdir()]
    assert seen == ["edgeagent.io-share-m000001.json"]
    assert path.read_text() == "new"
    assert path.stat().st_ino != before
    assert oct(path.stat().st_mode & 0o777) == "0o644"


def test_specs_of_others_are_left_alone(tmp_path: Path, directory: SpecDir) -> None:
    others = tmp_path / "var/run/cdi"
    others.mkdir(parents=True)
    names = ["nvidia.yaml", "edgeagent.json", "edgeagent.io-share-x.tmp.json", "share-m000001.json"]
    for name in names:
        (others / name).write_text("{}")
    directory.write("share", "m000001", "{}")
    (others / "edgeagent.io-share-m000002.77.tmp").write_text("half")
    directory.remove_leftovers()
    directory.remove("share", "m000001")
    directory.remove("share", "m000001")
    assert sorted(p.name for p in others.iterdir()) == sorted(names)


def test_which_of_ours_are_there(directory: SpecDir) -> None:
    assert directory.names("share") == []
    for name in ("m000002", "m000001"):
        directory.write("share", name, "{}")
    directory.write("gpu", "GPU-1", "{}")
    assert directory.names("share") == ["m000001", "m000002"]
    assert directory.names("gpu") == ["GPU-1"]
    assert directory.read("share", "m000003") is None


def test_a_directory_that_cannot_be_written_is_a_node_error(tmp_path: Path, directory: SpecDir) -> None:
    (tmp_path / "var").mkdir()
    (tmp_path / "var/run").write_text("a file")
    with pytest.raises(NodeError, match="cannot write the CDI spec /var/run/cdi/edgeagent"):
        directory.write("share", "m000001", "{}")
    assert re.match("", directory.read("share", "m000001") or "")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"annotations": 5}', "[" * 100_000])
def test_annotations_of_anything(text: str) -> None:
    assert annotations_of(text) == {}
    assert annotations_of(spec_text("share", {"m000001": EDITS}, {"gpu": "G"})) == {"gpu": "G"}


NVIDIA = """
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: 0
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
    - {path: /dev/dri/card1, hostPath: /dev/dri/card9}
- name: all
  containerEdits: null
- containerEdits: {}
containerEdits:
  env: [NVIDIA_VISIBLE_DEVICES=void, BROKEN, 5]
  hooks:
  - {hookName: createContainer, path: /usr/bin/nvidia-cdi-hook, args: [a, b]}
  - {hookName: createContainer}
  mounts:
  - {hostPath: /a, containerPath: /b, options: [ro, nosuid, nodev, bind]}
  - {hostPath: /a}
"""


def test_nvidias_yaml_is_read_and_what_makes_no_sense_left_out(tmp_path: Path) -> None:
    (tmp_path / "n.yaml").write_text(NVIDIA)
    spec = read_spec(HostRoot(tmp_path), "/n.yaml")
    assert spec is not None
    assert spec.kind == "nvidia.com/gpu"
    assert set(spec.devices) == {"0", "all"}
    assert spec.devices["0"].device_nodes == ("/dev/nvidia0", "/dev/dri/card9")
    assert spec.devices["all"] == ContainerEdits()
    assert spec.common.env == {"NVIDIA_VISIBLE_DEVICES": "void"}
    assert [h.args for h in spec.common.hooks] == [("a", "b")]
    assert spec.common.mounts == (Mount("/a", "/b", ("ro", "nosuid", "nodev", "bind")),)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("n.yaml", "a: [1"), ("n.yaml", "- 1"), ("n.yaml", "kind: 5"), ("n.json", "{"), ("n.json", "[" * 99_999),
        ("n.yaml", "!!python/object:os.system {}"), ("n.yaml", ""),
    ],
)  # fmt: skip
def test_a_file_that_is_no_spec_is_none(tmp_path: Path, name: str, content: Any) -> None:
    (tmp_path / name).write_text(content)
    assert read_spec(HostRoot(tmp_path), f"/{name}") is None
    assert read_spec(HostRoot(tmp_path), "/absent.yaml") is None
