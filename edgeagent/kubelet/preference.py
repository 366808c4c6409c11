"""GetPreferredAllocation for tokens, read and answered on the wire.

The request may name every free token of the node (163,840 of them are 1.5 MB). Its framing is checked by
slices of fixed length, and only the part of the tokens that the agent would like is looked up in it.
"""

from __future__ import annotations

import re
from collections.abc import Collection

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
_TEN_THOUSANDS = 4  # a wish that spans more of them is looked up token by token


def answer(raw: bytes, letter: str, free: int) -> bytes:
    """The PreferredAllocationResponse to the request in `raw`. `free`: the tokens that nobody is known
    to hold; others are named only when those do not suffice. Raises AllocationError."""
    response = PreferredAllocationResponse()
    try:
        plain = _plain(raw, letter)
        if plain is not None:
            asked, start, end = plain
            must = read_ids(letter, list(asked.must_include_deviceIDs))
            chosen = _wish(raw[start:end], letter, free, must, asked.allocation_size)
            response.container_responses.add(deviceIDs=ids_of(letter, chosen))
        else:
            for asked in PreferredAllocationRequest.FromString(raw).container_requests:
                available = read_ids(letter, list(asked.available_deviceIDs))
                must = read_ids(letter, list(asked.must_include_deviceIDs))
                chosen = _choose(available, free, must, asked.allocation_size)
                response.container_responses.add(deviceIDs=ids_of(letter, chosen))
    except DecodeError as e:
        raise AllocationError(
            "cannot prefer devices: the request is no message of the device plugin interface v1beta1",
            code="INVALID_ARGUMENT",
            permanent=True,
        ) from e
    data: bytes = response.SerializeToString()
    return data


def _wish(entries: bytes, letter: str, free: int, must: int, size: int) -> int:
    """What the agent would like, if all of it is in `entries`; else the best of what is."""
    wish = preferred(free | must, must, size)
    wanted = {b"%06d" % n for n in numbers(wish & ~must)}
    if wish.bit_count() == size and wanted <= _found(entries, letter, wanted):
        return wish
    # The kubelet's idea of what is free differs from ours: its own is the truth.
    header = bytes((_FIELD_1, ID_BYTES)) + letter.encode()
    available = read_ids(
        letter, [letter + digits.decode(errors="replace") for digits in entries.split(header)[1:]]
    )
    return _choose(available, free, must, size)


def _found(entries: bytes, letter: str, wanted: Collection[bytes]) -> set[bytes]:
    """The tokens in `entries`, at least those that could be in `wanted`."""
    prefixes = {digits[:2] for digits in wanted}
    if len(prefixes) > _TEN_THOUSANDS:
        return set(entries.split(bytes((_FIELD_1, ID_BYTES)) + letter.encode()))
    pattern = b"%s((?:%s)[0-9]{4})" % (letter.encode(), b"|".join(sorted(prefixes)))
    return set(re.findall(pattern, entries))


def _choose(available: int, free: int, must: int, size: int) -> int:
    if (available & free | must).bit_count() >= size:
        return preferred(available & free | must, must, size)
    return preferred(available | must, must, size)


def _plain(raw: bytes, letter: str) -> tuple[ContainerPreferredAllocationRequest, int, int] | None:
    """The one container of a request in the layout of the kubelet's encoder: the message without its
    available tokens, and where those lie. None when the request looks different."""
    start = _only_field_1(raw)
    if start is None:
        return None
    header = bytes((_FIELD_1, ID_BYTES)) + letter.encode()
    count = (len(raw) - start) // _STRIDE
    for offset, byte in enumerate(header):  # how many entries in a row have the right byte in this place
        column = raw[start + offset : start + count * _STRIDE : _STRIDE]
        count -= len(column.lstrip(bytes((byte,))))
    end = start + count * _STRIDE
    rest = ContainerPreferredAllocationRequest.FromString(raw[end:])
    return (rest, start, end) if count and not rest.available_deviceIDs else None


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
