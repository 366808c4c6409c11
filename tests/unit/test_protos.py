"""The kubelet's protocols: checked-in descriptors match their sources and load on every protobuf runtime."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf import descriptor_pb2

from edgeagent.kubelet.protos import deviceplugin, pluginregistration, podresources
from tools import make_protos

MODULES = (deviceplugin, podresources, pluginregistration)
SOURCES = sorted(make_protos.PROTOS.glob("*.proto"))

ROUND_TRIP = """
import google.protobuf
assert google.protobuf.__version__.startswith("{major}."), google.protobuf.__version__
from edgeagent.kubelet.protos import deviceplugin as dp, podresources, pluginregistration
answer = dp.AllocateResponse()
one = answer.container_responses.add(envs={{"K": "v"}})
one.cdi_devices.add(name="a.b/c=d")
assert dp.AllocateResponse.FromString(answer.SerializeToString()) == answer
assert podresources.ListPodResourcesResponse().SerializeToString() == b""
assert pluginregistration.PluginInfo(type="DevicePlugin").type == "DevicePlugin"
print("ok")
"""


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_descriptors_are_those_of_the_proto_files(source: Path, tmp_path: Path) -> None:
    make_protos.make(source, tmp_path)
    made = (tmp_path / f"{source.stem}.binpb").read_bytes()
    kept = (make_protos.PROTOS / f"{source.stem}.binpb").read_bytes()
    parse = descriptor_pb2.FileDescriptorProto.FromString
    assert parse(kept) == parse(made), "run `make protos`"


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__.rpartition(".")[2])
def test_facade_has_every_message_and_method(module: ModuleType) -> None:
    """What type checkers see (protoc's stub) is what is there at run time."""
    stem = module.__name__.rpartition(".")[2]
    file = descriptor_pb2.FileDescriptorProto.FromString((make_protos.PROTOS / f"{stem}.binpb").read_bytes())
    stub = (make_protos.PROTOS / f"{stem}_pb2.pyi").read_text()
    for message in file.message_type:
        assert getattr(module, message.name).DESCRIPTOR.full_name == f"{file.package}.{message.name}"
        assert f"class {message.name}(" in stub
        for field in message.field:
            assert f"{field.name.upper()}_FIELD_NUMBER" in stub
    methods = {f"/{file.package}.{s.name}/{m.name}" for s in file.service for m in s.method}
    named = {v for k, v in vars(module).items() if k.isupper() and str(v).startswith("/")}
    assert named == methods


def test_a_list_can_be_sent_as_bytes_made_elsewhere() -> None:
    """The wire form that the encoded lists rely on: field 1 of a list is a device, 1 its ID, 2 its health."""
    raw = b"\x0a\x12" + b"\x0a\x07m000001" + b"\x12\x07Healthy"
    message = deviceplugin.ListAndWatchResponse(
        devices=[deviceplugin.Device(ID="m000001", health=deviceplugin.HEALTHY)]
    )
    assert message.SerializeToString() == raw
    assert deviceplugin.ListAndWatchResponse.FromString(raw) == message


@pytest.mark.slow
@pytest.mark.parametrize("major", [5, 6])
def test_loads_on_other_runtimes(major: int, tmp_path: Path) -> None:
    """The descriptors are not bound to the protobuf version of this environment."""
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:"]
    pip += ["--disable-pip-version-check", "--retries=0", "--timeout=5", f"--target={target}"]
    got = subprocess.run([*pip, f"protobuf>={major},<{major + 1}"], capture_output=True, text=True)
    if got.returncode != 0:
        pytest.skip(f"protobuf {major} cannot be installed here: {got.stderr.strip().splitlines()[-1:]}")
    run = subprocess.run(
        [sys.executable, "-c", ROUND_TRIP.format(major=major)],
        env={"PYTHONPATH": f"{target}:{make_protos.PROTOS.parent.parent.parent}"},
        capture_output=True,
        text=True,
    )
    assert run.stdout == "ok\n", run.stderr
