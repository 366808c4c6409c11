"""Options that several commands share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from edgeagent.config import Config, load_file
from edgeagent.control import ControlClient
from edgeagent.hostroot import HostRoot

DEFAULT_CONFIG = "/etc/edgeagent/agent.yaml"
ENV_CONFIG = "EDGEAGENT_CONFIG"


def add_config_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c",
        "--config",
        metavar="FILE",
        help=f"configuration (default: ${ENV_CONFIG}, else {DEFAULT_CONFIG})",
    )


def load_config(args: argparse.Namespace) -> tuple[Config, Path | None]:
    """The configuration named on the command line, else by the environment, else the default file,
    else built-in defaults. Raises ConfigError."""
    path = config_path(args)
    return (Config(), None) if path is None else (load_file(path), path)


def config_path(args: argparse.Namespace) -> Path | None:
    """The file that counts, or None where there is none and nobody named one."""
    named = getattr(args, "config", None) or os.environ.get(ENV_CONFIG)
    if named:
        return Path(named)
    return Path(DEFAULT_CONFIG) if Path(DEFAULT_CONFIG).exists() else None


def agent_client(config: Config) -> ControlClient:
    """The local socket of the agent that runs with this configuration."""
    return ControlClient(HostRoot(config.host_root).path(config.run_dir))
