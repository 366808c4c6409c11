"""`edgeagent run`: the agent itself."""

from __future__ import annotations

import argparse
import ctypes
import os

from edgeagent import logs
from edgeagent.cli.options import add_config_option, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_option(parser)
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="overrides log.level"
    )
    parser.add_argument("--log-format", choices=("auto", "text", "json"), help="overrides log.format")


# mallopt(3): glibc gives every thread an arena of its own and keeps what was freed. For twenty mostly
# idle threads one arena will do: 2.7 MiB less (docs/footprint.md).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_ARENA_MAX = -1, -2, -8


def _keep_memory_small() -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # not glibc
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_TRIM_THRESHOLD, 64 * 1024)
    mallopt(_M_TOP_PAD, 16 * 1024)


def run(args: argparse.Namespace) -> int:
    _keep_memory_small()
    config, path = load_config(args)
    logs.set_up(args.log_level or config.log.level, args.log_format or config.log.format)
    # grpc's core writes its own lines about every closed stream otherwise.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from edgeagent.agent import Agent  # the heavy part, and bad configuration must be told first

    return Agent(config, path).run()
