"""The kubelet's checkpoint, in every form and state in which it is found."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.errors import KubeletError
from edgeagent.hostroot import HostRoot
from edgeagent.kubelet.checkpoint import Checkpoint, CheckpointView, parse
from edgeagent.kubelet.protos.deviceplugin import ContainerAllocateResponse
from edgeagent.sharing.ledger import ContainerKey
from edgeagent.sharing.tokens import full

MEMORY, CORES, GPU = "volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores", "nvidia.com/gpu"
LETTERS = {MEMORY: "m", CORES: "c"}
A = ContainerKey("uid-a", "app")


def entry(
    ids: Any, resource: str = MEMORY, uid: str = "uid-a", container: str = "app", response: Any = ""
) -> dict[str, Any]:
    return {
        "PodUID": uid,
        "ContainerName": container,
        "ResourceName": resource,
        "DeviceIDs": ids,
        "AllocResp": response,
    }


def text(*entries: Any, registered: Any = None) -> bytes:
    data = {"PodDeviceEntries": list(entries), "RegisteredDevices": registered or {}}
    return json.dumps({"Data": data, "Checksum": 12345}).encode()


def view(data: bytes) -> CheckpointView:
    return parse(data, LETTERS, lambda name: name == GPU)


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(["m000000", "m000002"], id="list, up to 1.19"),
        pytest.param({"-1": ["m000002", "m000000"]}, id="no NUMA"),
        pytest.param({"0": ["m000000"], "1": ["m000002"]}, id="NUMA nodes"),
        pytest.param({"0": ["m000000", 7, None], "1": ["m000002", "x"], "2": "junk"}, id="junk among them"),
    ],
)
def test_ids_in_every_form(ids: Any) -> None:
    assert view(text(entry(ids))).containers[A].tokens == {MEMORY: 0b101}


def test_what_a_container_holds_of_each_resource() -> None:
    found = view(
        text(
            entry({"-1": ["m000001"]}),
            entry({"-1": ["c000000", "c000001"]}, CORES),
            entry({"-1": ["GPU-1"]}, GPU),
            entry({"-1": ["eth0"]}, "example.com/nic", uid="uid-b"),
            entry({"-1": ["m000009"]}, uid="uid-b", container="other"),
        )
    )
    held = found.containers[A]
    assert held.tokens == {MEMORY: 0b10, CORES: 0b11}
    assert held.named == {GPU: frozenset({"GPU-1"})}
    assert found.other_resources == {"example.com/nic": frozenset({"uid-b"})}
    assert found.pod_uids() == {"uid-a", "uid-b"}
    assert found.holding_tokens(MEMORY, 1 << 9) == [ContainerKey("uid-b", "other")]
    assert found.holding_tokens(MEMORY, 1) == []
    assert found.holding_named(GPU, frozenset({"GPU-1"})) == [A]


def test_what_allocate_had_answered() -> None:
    answer = ContainerAllocateResponse(envs={"X": "GPU-1"}).SerializeToString()
    held = view(text(entry(["m000001"], response=base64.b64encode(answer).decode()))).containers[A]
    assert held.response_env(MEMORY, "X") == "GPU-1"
    assert held.response_env(MEMORY, "Y") is None
    assert held.response_env(CORES, "X") is None


@pytest.mark.parametrize("response", ["%%%", "AAAA", 7, None])
def test_an_answer_that_cannot_be_read_is_none(response: Any) -> None:
    held = view(text(entry(["m000001"], response=response))).containers[A]
    assert held.response_env(MEMORY, "X") is None


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(5, id="no object"),
        pytest.param({}, id="empty"),
        pytest.param(entry([]), id="no ids"),
        pytest.param(entry(["m000001"], uid=""), id="no uid"),
        pytest.param(entry(["m000001"]) | {"PodUID": 5}, id="uid no text"),
        pytest.param(entry(None), id="ids null"),
    ],
)
def test_an_entry_that_makes_no_sense_costs_only_itself(bad: Any) -> None:
    found = view(text(bad, entry(["m000003"], uid="uid-b")))
    assert dict(found.containers) == {
        ContainerKey("uid-b", "app"): found.containers[ContainerKey("uid-b", "app")]
    }


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[]", id="list"),
        pytest.param(b'{"Data": 5}', id="no data"),
        pytest.param(b'{"Data": {"PodDeviceEntries": {}}}', id="entries no list"),
        pytest.param(b'{"PodDeviceEntries":', id="cut after the name"),
        pytest.param(text(entry(["m000001"]))[:60], id="cut in an entry"),
        pytest.param(b"\xff\xfe\x00", id="not text"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b'{"Data":{"PodDeviceEntries":' + b"[" * 100_000, id="deep inside"),
    ],
)
def test_a_file_that_makes_no_sense_is_an_error(data: bytes) -> None:
    with pytest.raises(KubeletError, match="checkpoint"):
        view(data)


@pytest.mark.parametrize(
    "data", [b'{"Data":{}}', b'{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}}}']
)
def test_a_node_without_pods(data: bytes) -> None:
    assert view(data) == CheckpointView()


def test_a_name_in_an_entry_that_looks_like_the_key() -> None:
    odd = entry(["m000001"], container='"PodDeviceEntries":')
    data = json.dumps({"Data": {"PodDeviceEntries": [odd]}}).encode()
    assert len(view(data).containers) == 1


@settings(max_examples=40)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
                        st.sampled_from(["Data", "PodDeviceEntries", "PodUID", "ContainerName", "ResourceName",
                                         "DeviceIDs", "AllocResp", "-1"]), inner, max_size=6), max_leaves=25))  # fmt: skip
def test_any_json_is_a_view_or_an_error(document: Any) -> None:
    try:
        view(json.dumps(document).encode())
        view(json.dumps({"Data": {"PodDeviceEntries": document}}).encode())
    except KubeletError:
        pass


@settings(max_examples=50)
@given(st.binary(max_size=80), st.integers(0, 200))
def test_a_spoilt_file_is_a_view_or_an_error(junk: bytes, at: int) -> None:
    data = text(entry(["m000001", "m000002"]))
    try:
        view(data[:at] + junk + data[at:])
    except KubeletError:
        pass


def test_160000_ids() -> None:
    ids = [f"m{n:06d}" for n in range(160_000)]
    found = view(text(entry({"-1": ids}), registered={MEMORY: ids}))
    assert found.containers[A].tokens[MEMORY] == full(160_000)


def test_the_file_is_read_again_only_when_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "c"
    letters = dict(LETTERS)
    checkpoint = Checkpoint(HostRoot(tmp_path), "/c", lambda: letters, lambda name: False)
    with pytest.raises(KubeletError, match="No such file"):
        checkpoint.read()
    path.write_bytes(text(entry(["m000001"])))
    first = checkpoint.read()
    assert checkpoint.read() is first
    other = tmp_path / "d"
    other.write_bytes(text(entry(["m000002"])))
    os.replace(other, path)
    assert checkpoint.read().containers[A].tokens[MEMORY] == 0b100
    letters[GPU] = "g"
    assert checkpoint.read() is not first
    path.write_bytes(b"{")
    with pytest.raises(KubeletError):
        checkpoint.read()
    path.write_bytes(text(entry(["m000003"])))
    assert checkpoint.read().containers[A].tokens[MEMORY] == 0b1000
