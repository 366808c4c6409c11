"""Turns the checked-in descriptors (`*.binpb`, made by `make protos`) into message classes.

Generated Python code is bound to the protobuf version that made it; a descriptor is not, so this
works with the runtimes 5, 6 and 7. The pool is our own: another library in the process may have
loaded its copy of the same protocols into the default one.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pool, message_factory

_pool = descriptor_pool.DescriptorPool()


def message_classes(protocol: str) -> dict[str, Any]:
    """The top-level message classes of `<protocol>.proto` by name."""
    data = resources.files(__package__).joinpath(f"{protocol}.binpb").read_bytes()
    _pool.AddSerializedFile(data)
    file = _pool.FindFileByName(f"{protocol}.proto")
    return {
        name: message_factory.GetMessageClass(descriptor)
        for name, descriptor in file.message_types_by_name.items()
    }
