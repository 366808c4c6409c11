"""`edgeagent run`: the agent itself."""

from __future__ import annotations

import argparse
import os

from edgeagent import logs
from edgeagent.cli.options import add_config_option, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_option(parser)
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="overrides log.level"
    )
    parser.add_argument("--log-format", choices=("auto", "text", "json"), help="overrides log.format")


def run(args: argparse.Namespace) -> int:
    config, path = load_config(args)
    logs.set_up(args.log_level or config.log.level, args.log_format or config.log.format)
    # grpc's core writes its own lines about every closed stream otherwise.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from edgeagent.agent import Agent  # the heavy part, and bad configuration must be told first

    return Agent(config, path).run()
