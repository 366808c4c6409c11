"""`make bench`: every figure of the agent in one table, against its target.

    python -m tests.bench [--quick] [--only PART …] [--json FILE]

Parts: agent (whole process), kubelet, sharing, fleet, fleet-page, tegra, limiter. Figures of a shared
machine are noisy: medians and ratios are what to compare. A target that is missed is said, not failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "agent": "tests.bench.agent_bench",
    "kubelet": "tests.bench.kubelet_bench",
    "sharing": "tests.bench.sharing_core",
    "fleet": "tests.bench.fleet_bench",
    "fleet-page": "tests.bench.fleet_page",
    "tegra": "tests.bench.tegra_read",
    "limiter": "tests.bench.limiter_overhead",
}
QUICK = {"agent", "fleet-page"}  # parts that know --quick

Figures = dict[str, Any]
Find = Callable[[Figures], float | None]


def at(*path: str | int) -> Find:
    """The number at a path in the figures, None where a part did not run."""

    def find(figures: Figures) -> float | None:
        value: Any = figures
        for step in path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return None
        return float(value)

    return find


def by_units(key: str, quantile: str, units: int) -> Find:
    def find(figures: Figures) -> float | None:
        for row in figures.get("kubelet", {}).get("by_size", []):
            if row.get("units") == units:
                return at(key, quantile)(row)
        return None

    return find


def ratio(a: Find, b: Find) -> Find:
    def find(figures: Figures) -> float | None:
        x, y = a(figures), b(figures)
        return x / y if x is not None and y else None

    return find


# (what, how to find it, target, unit)
ROWS: list[tuple[str, Find, float | None, str]] = [
    ("RSS after 60 s idle, 1 GPU of 24 GiB at 1 MiB", at("agent", "one_24gib", "rss_mib"), 56, "MiB"),
    ("private memory, same", at("agent", "one_24gib", "private_mib"), 34, "MiB"),
    ("RSS at 2 x 80 GiB in 1 MiB units", at("agent", "two_80gib", "rss_mib"), 90, "MiB"),
    ("CPU idle, telemetry every 10 s", at("agent", "one_24gib", "cpu_pct"), 0.3, "% of a core"),
    ("wake-ups idle", at("agent", "one_24gib", "wakeups_per_s"), 25, "/s"),
    ("threads", at("agent", "one_24gib", "threads"), None, ""),
    ("start -> Register, median", at("agent", "start_to_register", "p50_ms"), 800, "ms"),
    ("kubelet.sock anew -> 3 x Register, p99", at("agent", "kubelet_socket_to_three_registrations", "p99_ms"), 300, "ms"),
    ("XID event -> Unhealthy list, p50", at("agent", "xid_to_unhealthy_list", "p50_ms"), None, "ms"),
    ("XID event -> Unhealthy list, p99", at("agent", "xid_to_unhealthy_list", "p99_ms"), 50, "ms"),
    ("Allocate while the broker is up, p99", at("agent", "allocate_while_broker", "up", "p99_ms"), None, "ms"),
    ("  while it floods commands, p99", at("agent", "allocate_while_broker", "flood", "p99_ms"), None, "ms"),
    ("  while it is frozen, p99", at("agent", "allocate_while_broker", "frozen", "p99_ms"), None, "ms"),
    ("  while it is gone, p99", at("agent", "allocate_while_broker", "gone", "p99_ms"), None, "ms"),
    ("Allocate of 64 units, p99 / bare grpcio's", at("kubelet", "ratio_p99"), 3, "x"),
    ("Allocate 8,000 of 163,840, p99", by_units("allocate_ms", "p99", 163_840), 25, "ms"),
    ("GetPreferredAllocation, 163,840 free, p99", by_units("prefer_ms", "p99", 163_840), 80, "ms"),
    ("health flip at 163,840 -> on the wire, p99", by_units("flip_to_wire_ms", "p99", 163_840), 15, "ms"),
    ("health flip at 24,000 -> on the wire, p99", by_units("flip_to_wire_ms", "p99", 24_000), 15, "ms"),
    ("PreStartContainer with binding, 2,560 IDs, p99", at("kubelet", "pre_start_ms", "p99"), 15, "ms"),
    ("ledger: place among 163,840 tokens, p50", at("rows", "place", "p50_ms"), 2, "ms"),
    ("ledger: unhealthy mask, p50", at("rows", "unhealthy_sick", "p50_ms"), 2, "ms"),
    ("bare grpcio plugin: RSS", at("agent", "bare_grpcio", "rss_mib"), None, "MiB"),
    ("bare grpcio plugin: wake-ups", at("agent", "bare_grpcio", "wakeups_per_s"), None, "/s"),
]  # fmt: skip


def run_part(name: str, quick: bool) -> Figures:
    """One part in a process of its own; its figures, or why there are none."""
    module = MODULES[name]
    if not (ROOT / (module.replace(".", "/") + ".py")).exists():
        return {}
    command = [sys.executable, "-m", module] + (["--quick"] if quick and name in QUICK else [])
    print(f"… {name}", file=sys.stderr, flush=True)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return {}
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert isinstance(found, dict)
    return found


def rows() -> list[tuple[str, Find, float | None, str]]:
    """The table's rows: this file's, and those that the parts name in a ROWS of their own."""
    out = list(ROWS)
    for module in MODULES.values():
        if (ROOT / (module.replace(".", "/") + ".py")).exists():
            out += [
                (what, at(*path), target, unit)
                for what, path, target, unit in getattr(importlib.import_module(module), "ROWS", [])
            ]
    return out


def table(figures: Figures) -> str:
    lines = [f"{'figure':62} {'measured':>12} {'target':>12}"]
    for what, find, target, unit in rows():
        value = find(figures)
        if value is None:
            continue
        shown = f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
        wanted = "" if target is None else f"<= {target:g}"
        missed = target is not None and value > target
        lines.append(f"{what:62} {shown:>12} {wanted:>12} {unit}{'   MISSED' if missed else ''}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    parser.add_argument("--only", nargs="+", choices=sorted(MODULES), metavar="PART")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure")
    args = parser.parse_args()
    figures: Figures = {}
    for name in args.only or MODULES:
        figures |= run_part(name, args.quick)
    cpu = next(
        (
            x.split(":")[1].strip()
            for x in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in x
        ),
        "",
    )
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores {cpu}, load {os.getloadavg()[0]:.1f}, "
          f"{time.strftime('%Y-%m-%d')}; fake NVML, stand-in kubelet, mosquitto")  # fmt: skip
    print(table(figures))
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
