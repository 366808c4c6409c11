"""`edgeagent status`: what the text says about GPUs, shares and waiting containers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgeagent.cli.status import render
from edgeagent.snapshot import GpuMode, NodeSnapshot
from edgeagent.snapshot_json import to_json
from tests.fakes.fleet import snapshots


def text(s: NodeSnapshot) -> str:
    return "\n".join(render(to_json(s), s.taken_ms / 1000 + 5))


def row(s: NodeSnapshot) -> list[str]:
    """The cells of the first GPU."""
    return next(line.split("  ") for line in text(s).splitlines() if line.startswith("0 "))


def test_gpus_pods_limits_and_trouble_are_named() -> None:
    said = text(snapshots.snapshot())
    for words in (
        "box-1 (site plant-7)",
        "degraded",
        "OverTemperature",
        "inference-7c9d8f-00001",
        "4000 MiB",
    ):
        assert words in said, words


@pytest.mark.parametrize("mode", [GpuMode.EXCLUSIVE, GpuMode.TIMESLICE, GpuMode.MIG, GpuMode.OFF])
def test_a_gpu_that_is_not_shared_has_no_sums_and_no_levels(mode: GpuMode) -> None:
    """Nothing is limited there: 'cooperative' in its row would be untrue."""
    cells = [c.strip() for c in row(snapshots.snapshot(gpus=(replace(snapshots.gpu_state(), mode=mode),)))]
    cells = [c for c in cells if c]
    assert cells[2] == mode.value
    assert cells[-1] == "-"
    assert cells.count("-") == 4
    assert "cooperative/none" in " ".join(row(snapshots.snapshot()))


@pytest.mark.parametrize(
    ("memory_mib", "cores_pct", "said"),
    [
        (8000, 30, "(8000 MiB, 30 %)"),
        (8000, None, "(8000 MiB)"),
        (0, 30, "(30 %)"),
        (0, None, "(a whole GPU)"),
    ],
)
def test_what_a_waiting_container_asks_for(memory_mib: int, cores_pct: int | None, said: str) -> None:
    s = snapshots.snapshot()
    waiting = replace(s.waiting[0], memory_mib=memory_mib, cores_pct=cores_pct)
    assert said in text(replace(s, waiting=(waiting,)))
