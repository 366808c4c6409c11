"""The limits file and the state file, damaged in every way that hypothesis finds."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeagent.isolation.limiter import files
from tests.fakes.cuda import Box, compiler, tools

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")

numbers = st.integers(-(2**80), 2**80) | st.integers(0, 200)
words = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=40)


class CLimits(ctypes.Structure):
    _fields_ = (
        ("memory_bytes", ctypes.c_uint64), ("overhead_bytes", ctypes.c_uint64), ("cores_pct", ctypes.c_uint32),
        ("unified", ctypes.c_bool),
    )  # fmt: skip


def parse(text: bytes) -> CLimits | str:
    """What the library's own parser makes of it: the limits, or what is wrong."""
    library = ctypes.CDLL(str(tools().limits_library))
    library.limits_parse.restype = ctypes.c_char_p
    limits = CLimits()
    wrong = library.limits_parse(text, ctypes.c_size_t(len(text)), ctypes.byref(limits))
    return limits if wrong is None else wrong.decode()


@settings(max_examples=150, deadline=None)
@given(numbers, numbers, numbers, st.booleans(), words, words)
def test_agent_and_library_agree_on_what_can_be_kept(
    memory: int, cores: int, overhead: int, unified: bool, share: str, gpu: str
) -> None:
    limits = files.Limits(memory, cores, overhead, unified, share, gpu)
    parsed = parse(limits.text().encode())
    if limits.problems():
        assert isinstance(parsed, str)
    else:
        assert isinstance(parsed, CLimits)
        assert (parsed.memory_bytes, parsed.cores_pct, parsed.overhead_bytes) == (memory, cores, overhead)
        assert parsed.unified == unified


GOOD = files.Limits(2000 * files.MIB, 30, 0, False, "m000001", "GPU-1").text().encode()


@pytest.mark.parametrize("length", range(len(GOOD)))
def test_no_part_of_a_file_is_a_file(length: int) -> None:
    assert isinstance(parse(GOOD[:length]), str)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4),
    st.binary(max_size=8),
)
def test_a_damaged_file_is_refused_or_means_what_it_says(changes: list[tuple[int, int]], tail: bytes) -> None:
    text = bytearray(GOOD)
    for place, value in changes:
        text[place] = value
    text += tail
    parsed = parse(bytes(text))
    if isinstance(parsed, CLimits):
        # Only values can have changed, and these can be read in the text.
        found = re.search(rb"^memory_bytes (\d+)$", bytes(text), re.MULTILINE)
        assert found is not None
        assert int(found.group(1)) == parsed.memory_bytes
        assert 1 <= parsed.cores_pct <= 100
        assert tail == b""


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_noise_is_refused(text: bytes) -> None:
    assert isinstance(parse(text), str)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 96), st.binary(min_size=1, max_size=12)), max_size=4),
    st.lists(st.tuples(st.integers(0, 2000), st.binary(min_size=1, max_size=64)), max_size=6),
)
def test_a_state_file_that_was_tampered_with_crashes_nobody(
    tmp_path: Path, header: list[tuple[int, bytes]], slots: list[tuple[int, bytes]]
) -> None:
    """The container can write it, so it may hold anything: answers stay answers."""
    box = Box(tmp_path, tools()).limit(1024, cores_pct=50)
    path = tmp_path / "state"
    data = bytearray(path.read_bytes())
    for place, noise in header:
        # A lock held by a living stranger is waited for, which has a test of its own.
        if place + len(noise) <= 16 or place >= 20:
            data[place : place + len(noise)] = noise
    for place, noise in slots:
        data[12288 + place : 12288 + place + len(noise)] = noise
    path.write_bytes(data[: files.STATE_BYTES])
    lines = box.run("dlsym", "init", "ctx", "alloc:2000", "kernel:10", "alloc:1", "info", stderr=None)
    assert {line.rc for line in lines} <= {0, 2, 201}
    assert lines[2].rc == 2
    state = files.parse_state(path.read_bytes())
    assert state is None or len(state.slots) <= files.STATE_SLOTS
