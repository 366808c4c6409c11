"""Parsers of Tegra's files: values of all generations, and no surprise from any bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.gpus import tegra_files as parse


@pytest.mark.parametrize(
    ("parser", "data", "expected"),
    [
        (parse.load_pct, b"437\n", 43.7),
        (parse.load_pct, b"0\n", 0.0),
        (parse.load_pct, b"1003", 100.0),
        (parse.celsius, b"48562\n", 48.562),
        (parse.celsius, b"-5000\n", -5.0),
        (parse.celsius, b"-256000\n", None),
        (parse.celsius, b"-256\n", None),
        (parse.mhz, b"1300500000\n", 1300.5),
        (parse.pwm_pct, b"51", 20.0),
        (parse.pwm_pct, b"255", 100.0),
        (parse.integer, b"32760 ma\n", 32760),
        (parse.integer, b"-12\0", -12),
        (parse.milliwatt, b"2830", 2.83),
        (parse.microwatt, b"46250000", 46.25),
        (parse.bytes_mib, b"1048576", 1.0),
    ],
)
def test_values(parser: Callable[[bytes], Any], data: bytes, expected: Any) -> None:
    assert parser(data) == expected


@pytest.mark.parametrize(
    ("parser", "data"),
    [
        (parse.load_pct, b""),
        (parse.load_pct, b"-1"),
        (parse.load_pct, b"99999"),
        (parse.load_pct, b"nan"),
        (parse.celsius, b"\xff\xff"),
        (parse.celsius, b"900000"),
        (parse.celsius, b"4.5"),
        (parse.mhz, b"-5"),
        (parse.pwm_pct, b"256"),
        (parse.integer, b"1" * 40),
        (parse.integer, b"0x10"),
        (parse.nvmap, b""),
        (parse.nvmap, b"\n"),
        (parse.nvmap, b"\xff" * 40),
        (parse.meminfo, b""),
        (parse.meminfo, b"MemTotal: 0 kB"),
        (parse.meminfo, b"MemTotal: lots kB"),
    ],
)
def test_nonsense_is_refused(parser: Callable[[bytes], Any], data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parser(data)


def test_meminfo_keeps_swap_apart_and_absent_things_none() -> None:
    full = parse.meminfo(
        b"MemTotal: 7802880 kB\nMemAvailable: 3901440 kB\nSwapTotal: 2048 kB\nSwapFree: 1024 kB\n"
        b"NvMapMemUsed:  524288 kB\n"
    )
    assert full == parse.MemInfo(7620.0, 3810.0, 1.0, 512.0)
    assert parse.meminfo(b"MemTotal: 1024 kB\n") == parse.MemInfo(1.0, None, None, None)


NVMAP = b"""\
CLIENT                        PROCESS      PID        SIZE
user                          python3     4321    1048576K
user                   gst launch 1.0      977      20480K
user                          python3     4321       1024K
user                        worker 12       88          2M
                 7f12340000   4096K  flags
nvdla                        kernel        0        512K
user                          odd\xff\x01name     99          8192B
total                                              1060864K
"""


def test_nvmap_adds_up_clients_of_a_process_and_reads_names_with_spaces() -> None:
    read = parse.nvmap(NVMAP)
    assert [(c.pid, c.name, c.used_mib) for c in read.clients] == [
        (88, "worker 12", 2.0),
        (99, "odd\ufffdname", 8192 / 2**20),
        (977, "gst launch 1.0", 20.0),
        (4321, "python3", 1025.0),
    ]
    assert read.total_mib == 1036.0


def test_nvmap_without_clients_is_empty() -> None:
    assert parse.nvmap(b"CLIENT PROCESS PID SIZE\n") == parse.NvMap((), None)
    assert parse.nvmap(b"total 0K\n") == parse.NvMap((), 0.0)


PARSERS: tuple[Callable[[bytes], Any], ...] = (
    parse.integer, parse.count, parse.load_pct, parse.celsius, parse.mhz, parse.pwm_pct, parse.microwatt,
    parse.milliwatt, parse.bytes_mib, parse.meminfo, parse.nvmap,
)  # fmt: skip
FRAGMENTS = st.sampled_from(
    [
        b"MemTotal:",
        b" kB\n",
        b"user ",
        b"total ",
        b"K",
        b"G",
        b"-",
        b" 99999999999999",
        b"\0",
        b"-256000",
        b"\n",
    ]
)


def numbers(value: Any) -> list[float]:
    if isinstance(value, (int, float)):
        return [float(value)]
    if isinstance(value, parse.MemInfo):
        return [v for v in (value.total_mib, value.available_mib, value.swap_used_mib) if v is not None]
    if isinstance(value, parse.NvMap):
        return [c.used_mib for c in value.clients] + (
            [value.total_mib] if value.total_mib is not None else []
        )
    return []


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(st.binary(max_size=300), st.lists(st.one_of(FRAGMENTS, st.binary(max_size=8))).map(b"".join))
)
def test_any_bytes_give_finite_numbers_or_value_error(data: bytes) -> None:
    for parser in PARSERS:
        try:
            value = parser(data)
        except ValueError:
            continue
        assert all(math.isfinite(n) for n in numbers(value))
