"""`edgeagent demo`: the whole thing on simulated GPUs, live in the terminal.

The demo plays with the stand-in kubelet of the tests, so it needs a checkout: `make demo`.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

from edgeagent.errors import ControlError

CHECKOUT = Path(__file__).resolve().parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--for", dest="for_s", type=_seconds, metavar="20s", help="end by itself after this time"
    )
    parser.add_argument("--plain", action="store_true", help="lines instead of the live view")


def _seconds(text: str) -> float:
    m = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min)?", text)
    if m is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 20s or 2m")
    return float(m.group(1)) * (60 if m.group(2) in ("m", "min") else 1)


def run(args: argparse.Namespace) -> int:
    if not (CHECKOUT / "tests/fakes/demo").is_dir():
        raise ControlError("the demo needs a checkout of the repository: git clone it, then `make demo`")
    sys.path.insert(0, str(CHECKOUT))
    demo = importlib.import_module("tests.fakes.demo")
    return int(demo.play(args.for_s, plain=args.plain))
