"""ListAndWatch messages as raw bytes: how a resource's devices look on the wire.

A token (`m000123`) has a fixed length, so its entry in the message has one too, and a list of
163,840 of them is cut out of two runs of equal blocks instead of being built from as many strings.
(How large a list may get is sharing/units.py's business.)
"""

from __future__ import annotations

from collections.abc import Mapping

from edgeagent.kubelet.protos.deviceplugin import HEALTHY, UNHEALTHY
from edgeagent.kubelet.protos.deviceplugin import ListAndWatchResponse as _ListAndWatchResponse
from edgeagent.sharing.tokens import DIGITS, MAX_TOKENS, ranges

_BLOCK = 1000  # tokens that share all digits but the last three
_LAST_DIGITS = tuple(bytes(48 + i // unit % 10 for i in range(_BLOCK)) for unit in (100, 10, 1))
_ID_HEADER = 4  # tag and length of the device, tag and length of its ID


def _device(token: bytes, health: str) -> bytes:
    text = health.encode()
    body = b"\x0a" + bytes([len(token)]) + token + b"\x12" + bytes([len(text)]) + text
    return b"\x0a" + bytes([len(body)]) + body


HEALTHY_STRIDE = len(_device(b"m000000", HEALTHY))
UNHEALTHY_STRIDE = len(_device(b"m000000", UNHEALTHY))


class TokenEntries:
    """The encoded entries of the first `count` tokens of one letter.

    The healthy ones are kept (20 bytes each); the unhealthy ones are made when they are needed.
    Not changed after construction, so it may be used from several threads.
    """

    __slots__ = ("_healthy", "count", "letter")

    def __init__(self, letter: str, count: int) -> None:
        if len(letter) != 1 or not 0 <= count <= MAX_TOKENS:
            raise ValueError(f"cannot encode {count} tokens of {letter!r}")
        self.letter = letter
        self.count = count
        self._healthy = _entries(letter, 0, count, HEALTHY)

    def payload(self, unhealthy: int = 0) -> bytes:
        """A ListAndWatchResponse that lists every token once, in order; those whose bit is set in
        `unhealthy` as Unhealthy."""
        unhealthy &= (1 << self.count) - 1
        if not unhealthy:
            return self._healthy
        lowest = (unhealthy & -unhealthy).bit_length() - 1
        healthy = memoryview(self._healthy)
        sick = memoryview(_entries(self.letter, lowest, unhealthy.bit_length(), UNHEALTHY))
        parts: list[memoryview] = []
        done = 0
        for start, end in ranges(unhealthy):
            parts.append(healthy[done * HEALTHY_STRIDE : start * HEALTHY_STRIDE])
            parts.append(sick[(start - lowest) * UNHEALTHY_STRIDE : (end - lowest) * UNHEALTHY_STRIDE])
            done = end
        parts.append(healthy[done * HEALTHY_STRIDE :])
        return b"".join(parts)


def _entries(letter: str, start: int, end: int, health: str) -> bytes:
    """The entries of tokens `start` to `end` - 1."""
    if end - start < _BLOCK:  # few: one by one costs less than whole blocks
        return b"".join(_device(b"%s%06d" % (letter.encode(), i), health) for i in range(start, end))
    first = _device(letter.encode() + b"0" * DIGITS, health)
    stride = len(first)
    block = bytearray(first * _BLOCK)
    digit = _ID_HEADER + 1  # where the first digit of an entry is
    for place, column in enumerate(_LAST_DIGITS):
        block[digit + 3 + place :: stride] = column
    blocks: list[bytes | memoryview] = []
    for thousand in range(start // _BLOCK, (end - 1) // _BLOCK + 1):
        for place, figure in enumerate(b"%03d" % thousand):
            block[digit + place :: stride] = bytes([figure]) * _BLOCK
        low = max(start - thousand * _BLOCK, 0)
        high = min(end - thousand * _BLOCK, _BLOCK)
        blocks.append(bytes(block[low * stride : high * stride]))
    return b"".join(blocks)


def named_payload(health: Mapping[str, bool], numa: Mapping[str, int | None] | None = None) -> bytes:
    """A ListAndWatchResponse of IDs that name their GPU: ID -> healthy, and the NUMA node where known."""
    message = _ListAndWatchResponse()
    for name, healthy in health.items():
        device = message.devices.add(ID=name, health=HEALTHY if healthy else UNHEALTHY)
        node = (numa or {}).get(name)
        if node is not None and node >= 0:
            device.topology.nodes.add(ID=node)
    data: bytes = message.SerializeToString()
    return data
