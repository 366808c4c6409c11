"""GetPreferredAllocation for tokens, read and answered on the wire.

The request may name every free token of the node (163,840 of them are 1.5 MB), so its tokens are cut
out of the bytes by their fixed length, and what the agent would like is looked up in them: the
answer seldom needs the whole list as numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from edgeagent.errors import AllocationError
from edgeagent.kubelet.protos.deviceplugin import (
    ContainerPreferredAllocationRequest,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
)
from edgeagent.sharing.tokens import ID_BYTES, ids_of, numbers, preferred, read_ids

_STRIDE = ID_BYTES + 2
_FIELD_1 = 0x0A  # tag of field 1 when it is a string or a message


def answer(raw: bytes, letter: str, free: int) -> bytes:
    """The PreferredAllocationResponse to the request in `raw`. `free`: the tokens that nobody is known
    to hold; others are named only when those do not suffice. Raises AllocationError."""
    response = PreferredAllocationResponse()
    try:
        whole = _single(raw, letter)
        if whole is not None:
            asked, available = whole
            chosen = _choose(asked, available, letter, free)
            response.container_responses.add(deviceIDs=ids_of(letter, chosen))
        else:
            for asked in PreferredAllocationRequest.FromString(raw).container_requests:
                ids = asked.available_deviceIDs
                digits = [i[1:].encode() for i in ids if len(i) == ID_BYTES and i[0] == letter]
                chosen = _choose(asked, [d for d in digits if d.isdigit()], letter, free)
                response.container_responses.add(deviceIDs=ids_of(letter, chosen))
    except DecodeError as e:
        raise AllocationError(
            "cannot prefer devices: the request is no message of the device plugin interface v1beta1",
            code="INVALID_ARGUMENT",
            permanent=True,
        ) from e
    data: bytes = response.SerializeToString()
    return data


def _choose(
    asked: ContainerPreferredAllocationRequest, available: Sequence[bytes], letter: str, free: int
) -> int:
    must = read_ids(letter, list(asked.must_include_deviceIDs))
    size = asked.allocation_size
    wish = preferred(free | must, must, size)
    wanted = {b"%06d" % n for n in numbers(wish & ~must)}
    if wish.bit_count() == size and len(wanted.intersection(available)) == len(wanted):
        return wish
    # The kubelet's idea of what is free differs from ours: its own is the truth.
    offered = read_ids(letter, [letter + digits.decode() for digits in available]) | must
    if (offered & free | must).bit_count() >= size:
        return preferred(offered & free | must, must, size)
    return preferred(offered, must, size)


def _single(raw: bytes, letter: str) -> tuple[ContainerPreferredAllocationRequest, list[bytes]] | None:
    """The one container of a request in the layout of the kubelet's encoder: its available tokens as
    digits, and the rest of it as a message. None when the request looks different."""
    start = _only_field_1(raw)
    if start is None:
        return None
    header = bytes((_FIELD_1, ID_BYTES)) + letter.encode()
    count = (len(raw) - start) // _STRIDE
    for offset in range(_STRIDE):  # how many entries in a row have the right byte in this place
        column = raw[start + offset : start + count * _STRIDE : _STRIDE]
        count -= len(column.lstrip(header[offset : offset + 1] or b"0123456789"))
    end = start + count * _STRIDE
    tail = ContainerPreferredAllocationRequest.FromString(raw[end:])
    if not count or tail.available_deviceIDs:
        return None
    return tail, raw[start:end].split(header)[1:]


def _only_field_1(raw: bytes) -> int | None:
    """Where the content of field 1 starts when `raw` holds that field once and nothing else."""
    if not raw or raw[0] != _FIELD_1:
        return None
    length = shift = 0
    for position, byte in enumerate(raw[1:6], 2):
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            return position if position + length == len(raw) else None
        shift += 7
    return None
