"""`edgeagent`: finds the subcommand's file and runs it. Only the chosen command's code is imported."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from edgeagent import __version__
from edgeagent.errors import AgentError, ConfigError

# name -> (module in edgeagent.cli, one-line help). Order is the order of `--help`.
COMMANDS = {
    "run": ("run", "run the agent"),
    "check-config": ("check_config", "check a configuration file and say what it will do"),
    "detect": ("detect", "say which GPUs are here, and why"),
    "status": ("status", "ask the running agent what it offers, who uses it and who is sick"),
    "top": ("top", "live view of GPUs, shares and alerts"),
    "cordon": ("cordon", "give no new shares of a GPU"),
    "uncordon": ("cordon", "give shares of a GPU again"),
    "reload": ("reload", "make the running agent read its configuration again"),
    "doctor": ("doctor", "check everything from driver to broker"),
    "collect-diagnostics": ("diagnostics", "write a redacted bundle for support"),
    "admission-policies": (
        "admission_policies",
        "print the admission policies that match this configuration",
    ),
    "fleet": ("fleet", "serve the fleet page"),
    "fleet-tools": ("fleet_tools", "certificates and simulated fleets for the broker side"),
    "demo": ("demo", "show everything on simulated GPUs"),
}

EX_USAGE = 64
EX_CONFIG = 78


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser. Only `chosen`'s arguments are filled in: importing one command costs enough."""
    parser = argparse.ArgumentParser(
        prog="edgeagent", description="Shares the GPUs of this node between pods, with limits that hold."
    )
    parser.add_argument("--version", action="version", version=f"edgeagent {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, help_text) in COMMANDS.items():
        sub = commands.add_parser(
            name, help=help_text, description=help_text[0].upper() + help_text[1:] + "."
        )
        if name == chosen:
            importlib.import_module(f"edgeagent.cli.{module}").add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status (78: bad configuration, 1: could not do it)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    chosen = next((a for a in argv if not a.startswith("-")), None)
    args = build_parser(chosen if chosen in COMMANDS else None).parse_args(argv)
    module = importlib.import_module(f"edgeagent.cli.{COMMANDS[args.command][0]}")
    try:
        return int(module.run(args))
    except ConfigError as e:
        for problem in e.problems:
            print(problem, file=sys.stderr)
        return EX_CONFIG
    except AgentError as e:
        print(f"edgeagent {args.command}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `edgeagent status | head`: the reader is gone, which is its right.
        sys.stderr.close()
        return 0
