"""`edgeagent detect`: which GPUs are here, what was looked at, and why it was decided so."""

from __future__ import annotations

import argparse
import json
from typing import Any

from edgeagent.cli.options import add_config_option, load_config
from edgeagent.cli.status import table
from edgeagent.gpus.model import Gpu


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_option(parser)
    parser.add_argument("--json", action="store_true", help="the inventory as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit status 1: no GPU can be offered (the reason is printed)."""
    from edgeagent.gpus.detect import detect
    from edgeagent.hostroot import HostRoot
    from edgeagent.snapshot_json import to_json

    config, _ = load_config(args)
    backend, inventory = detect(config.gpus, HostRoot(config.host_root))
    try:
        if args.json:
            print(json.dumps(to_json(inventory), indent=2, ensure_ascii=False))
        else:
            print("looked at:")
            print("\n".join(f"  {e}" for e in inventory.evidence))
            print("\n".join(_describe(inventory.gpus)) if inventory.gpus else f"no GPU: {inventory.problem}")
    finally:
        backend.close()
    return 0 if inventory.gpus else 1


def _describe(gpus: tuple[Gpu, ...]) -> list[str]:
    rows: list[list[Any]] = [["INDEX", "UUID", "MODEL", "KIND", "MEMORY", "SOURCE", "PCI", "DRIVER"]]
    for g in gpus:
        memory = f"{g.memory_total_mib} MiB"
        where = [g.source, g.pci_address or "-", g.driver_version or "-"]
        rows.append([str(g.index), g.uuid, g.model, g.kind.value, memory, *where])
    return table(rows)
