"""`edgeagent cordon GPU` and `edgeagent uncordon GPU`: whether a GPU is given to new containers."""

from __future__ import annotations

import argparse

from edgeagent.cli.options import add_config_option, load_config
from edgeagent.control import ControlClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_option(parser)
    parser.add_argument("gpu", metavar="GPU", help="UUID or index, as `edgeagent status` shows it")


def run(args: argparse.Namespace) -> int:
    config, _ = load_config(args)
    print(ControlClient(config.run_dir).call(args.command, gpu=args.gpu))
    return 0
