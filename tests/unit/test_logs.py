"""How loud the log is."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from edgeagent import logs


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    loggers = [logging.getLogger(), logging.getLogger("grpc")]
    levels = [one.level for one in loggers]
    yield
    for one, level in zip(loggers, levels, strict=True):
        one.setLevel(level)


@pytest.mark.parametrize(
    ("level", "ours", "grpcs"),
    [("debug", "DEBUG", "INFO"), ("info", "INFO", "INFO"), ("error", "ERROR", "ERROR")],
)
def test_debug_shows_our_details_and_not_those_of_grpc(level: str, ours: str, grpcs: str) -> None:
    logs.set_level(level)
    assert logging.getLevelName(logging.getLogger("edgeagent.agent").getEffectiveLevel()) == ours
    assert logging.getLevelName(logging.getLogger("grpc._cython.cygrpc").getEffectiveLevel()) == grpcs
