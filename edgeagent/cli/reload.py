"""`edgeagent reload`: makes the running agent read its configuration again (as SIGHUP does)."""

from __future__ import annotations

import argparse

from edgeagent.cli.options import add_config_option, agent_client, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_option(parser)


def run(args: argparse.Namespace) -> int:
    """Exit status 2: something needs a restart to take effect."""
    config, _ = load_config(args)
    result = agent_client(config).call("reload")
    for key in result["changed"]:
        print(f"changed: {key}")
    for key in result["restartNeeded"]:
        print(f"needs a restart (systemctl restart edgeagent): {key}")
    if not result["changed"] and not result["restartNeeded"]:
        print("nothing changed")
    return 2 if result["restartNeeded"] else 0
