"""Makes what is generated from edgeagent/kubelet/protos/*.proto: descriptors and type stubs.

    python tools/make_protos.py

Needs grpcio-tools. `<name>.binpb` is one serialized FileDescriptorProto; `<name>_pb2.pyi` is protoc's
stub, read by type checkers only (there is no `<name>_pb2.py`).
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

PROTOS = Path(__file__).parent.parent / "edgeagent" / "kubelet" / "protos"


def make(source: Path, target: Path) -> None:
    """Writes what is generated from `source` into the directory `target`."""
    binpb = target / f"{source.stem}.binpb"
    # Comments are left out of the descriptor (no --include_source_info): rewording one changes nothing.
    arguments = ["protoc", f"-I{source.parent}", f"-I{resources.files('grpc_tools') / '_proto'}"]
    arguments += [f"--descriptor_set_out={binpb}", f"--pyi_out={target}", source.name]
    if protoc.main(arguments) != 0:
        raise SystemExit(f"cannot compile {source}")
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(binpb.read_bytes()).file
    binpb.write_bytes(file.SerializeToString(deterministic=True))
    stub = target / f"{source.stem}_pb2.pyi"
    # protoc leaves the type arguments out, which strict type checkers refuse.
    stub.write_text(stub.read_text().replace(", _Mapping]", ", _Mapping[str, object]]"))


def main() -> int:
    for source in sorted(PROTOS.glob("*.proto")):
        make(source, PROTOS)
        print(f"{source.name} -> {source.stem}.binpb, {source.stem}_pb2.pyi")
    return 0


if __name__ == "__main__":
    sys.exit(main())
