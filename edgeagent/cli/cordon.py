"""`edgeagent cordon GPU` and `edgeagent uncordon GPU`: whether a GPU is given to new containers."""

from __future__ import annotations

import argparse

from edgeagent.cli.options import add_config_option, agent_client, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_option(parser)
    parser.add_argument("gpu", metavar="GPU", help="UUID or index, as `edgeagent status` shows it")


def run(args: argparse.Namespace) -> int:
    config, _ = load_config(args)
    print(agent_client(config).call(args.command, gpu=args.gpu))
    return 0
