"""`edgeagent collect-diagnostics`: a redacted bundle for support."""

from __future__ import annotations

import argparse
from pathlib import Path

from edgeagent.cli.options import add_config_option, agent_client, load_config
from edgeagent.diagnostics import collect
from edgeagent.errors import ControlError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_option(parser)
    parser.add_argument(
        "-o", "--output", metavar="DIRECTORY", help="where to write it (default: here)", default="."
    )


def run(args: argparse.Namespace) -> int:
    config, _ = load_config(args)
    try:
        snapshot = agent_client(config).call("snapshot")
    except ControlError as e:
        print(f"without the running agent's snapshot: {e}")
        snapshot = None
    print(collect(Path(args.output), config, snapshot))
    return 0
