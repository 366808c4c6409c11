"""`edgeagent top`: what the picture says, and the command without a terminal."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from edgeagent.cli import top
from edgeagent.errors import ControlError
from edgeagent.snapshot import NodeSnapshot
from edgeagent.snapshot_json import to_json
from tests.fakes.fleet import snapshots


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    top.add_arguments(parser)
    return parser.parse_args(words)


def picture(s: NodeSnapshot) -> str:
    console = Console(width=160, record=True, color_system=None, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(top.render(to_json(s), s.taken_ms / 1000 + 5))
        return console.export_text()


def test_the_picture_names_gpus_pods_limits_and_alerts() -> None:
    text = picture(snapshots.snapshot())
    for words in (
        "box-1", "degraded", "OverTemperature", "RTX 4000 Ada", "vision/inference-7c9d8f-00001/main",
        "1235 / 4000", "17 % of 25", "mem cooperative", "not pods: Xorg", "wants 30000 MiB", "5000 / 20475",
    ):  # fmt: skip
        assert words in text, words
    assert text.index("OverTemperature") < text.index("RTX 4000 Ada"), "alerts are on top"
    assert text.count("check the fan") == 1, "a reason that is a condition is not said twice"


def test_a_container_over_its_limit_stands_out() -> None:
    s = snapshots.snapshot(containers=(snapshots.container(1, used_mib=5000.0, over_limit=True),))
    text = picture(s)
    assert "OVER LIMIT" in text
    assert "125 %" in text


def test_what_is_not_known_is_a_dash_and_no_error() -> None:
    bare = replace(snapshots.gpu_state(), reading=None, host_use=None, present=False)
    container = snapshots.container(
        1, memory_mib=None, cores_pct=None, used_mib=None, util_pct=None, pod=None, namespace=None
    )
    text = picture(snapshots.snapshot(gpus=(bare,), containers=(container,)))
    assert "- / 20475" in text
    assert "missing" in text
    assert "pod 0f8fad5b/main" in text


def test_a_node_without_gpus_says_where_to_look() -> None:
    assert "edgeagent detect" in picture(snapshots.snapshot(gpus=(), containers=(), waiting=()))


@pytest.mark.parametrize(
    ("value", "full", "cells", "words"),
    [
        (0.0, 100.0, 0, "0 %"),
        (50.0, 100.0, 8, "50 %"),
        (100.0, 100.0, 16, "100 %"),
        (250.0, 100.0, 16, "250 %"),
    ],
)
def test_bars(value: float, full: float, cells: int, words: str) -> None:
    text = top.bar(value, full).plain
    assert text.count("█") == cells
    assert text.count("█") + text.count("░") == top.BAR_CELLS
    assert words in text


def test_bar_of_nothing() -> None:
    assert top.bar(None, 100.0).plain == "-"
    assert top.bar(5.0, None).plain == "5"


def test_once_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    plain = to_json(snapshots.snapshot())
    assert top.show(arguments("--once"), lambda: plain) == 0
    assert "RTX 4000 Ada" in capsys.readouterr().out
    assert top.show(arguments("--once", "--json"), lambda: plain) == 0
    assert json.loads(capsys.readouterr().out) == plain


def test_without_an_agent_there_is_one_sentence() -> None:
    def fetch() -> Any:
        raise ControlError("no agent answers")

    with pytest.raises(ControlError, match="no agent answers"):
        top.show(arguments("--once"), fetch)
