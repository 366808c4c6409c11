"""`edgeagent status`: what the running agent offers, who uses it, who waits, who is sick and why."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from edgeagent.cli.options import add_config_option, agent_client, load_config

JsonObject = Mapping[str, Any]
AXES = ("memory", "compute")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_option(parser)
    parser.add_argument("--json", action="store_true", help="the whole snapshot as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit status 0: all well; 2: the agent runs and something is wrong (the reasons are printed)."""
    config, _ = load_config(args)
    snapshot = agent_client(config).call("snapshot")
    if args.json:
        print(json.dumps(snapshot, indent=2, ensure_ascii=False))
    else:
        print("\n".join(render(snapshot, time.time())))
    return 0 if not snapshot.get("reasons") else 2


def render(s: JsonObject, now_s: float) -> list[str]:
    """The text view of a snapshot (JSON form), as lines."""
    up = duration(now_s - s["startedMs"] / 1000)
    agent = f"edgeagent {s['agentVersion']}, up {up}, config {s['configHash'][:12]}"
    lines = [f"{s['node']} (site {s['site']}): {s['state']}, health {s['health']}; {agent}"]
    lines += [f"  ! {reason}" for reason in s.get("reasons", [])]
    kubelet = "connected" if s.get("kubeletConnected") else "not connected"
    sharing = f"kubelet {kubelet}, binding {s['binding']}, memory unit {s['memoryUnitMiB']} MiB"
    lines.append(f"{sharing}; {_uplink(s['uplink'])}")
    if note := s["host"].get("facts", {}).get("unifiedMemory"):
        lines.append(f"RAM is shared with the GPU: {note}")
    lines.append("")
    rows = [
        [
            "GPU",
            "MODEL",
            "MODE",
            "HEALTH",
            "USABLE",
            "PROMISED",
            "FREE",
            "CORES",
            "USED",
            "UTIL",
            "TEMP",
            "ISOLATION",
        ]
    ]
    for g in s.get("gpus", []):
        gpu, reading = g["gpu"], g.get("reading") or {}
        health = g["health"] + (", cordoned" if g.get("cordoned") else "")
        levels = "/".join(g.get("levels", {}).get(axis, {}).get("level", "none") for axis in AXES)
        shares = [_mib(g["promisedMiB"]), _mib(g["freeMiB"]), f"{g['promisedCoresPct']} %"]
        if g["mode"] != "shared":
            shares, levels = ["-"] * len(shares), "-"
        rows.append(
            [
                str(gpu["index"]), gpu["model"], g["mode"], health, _mib(g["usableMiB"]), *shares,
                _mib(reading.get("memoryUsedMiB")), _unit(reading.get("utilPct"), " %"),
                _unit(reading.get("temperatureC"), " °C"), levels,
            ]
        )  # fmt: skip
    lines += table(rows)
    for g in s.get("gpus", []):
        for c in g.get("conditions", []):
            since = duration(now_s - c["sinceMs"] / 1000)
            hurt = f"; pods hurt: {', '.join(c['podsHurt'])}" if c.get("podsHurt") else ""
            lines.append(f"  ! GPU {g['gpu']['index']} {c['type']} for {since}: {c['message']}{hurt}")
        if g.get("withdrawnMiB"):
            names = ", ".join(dict.fromkeys(p["name"] for p in (g.get("hostUse") or {}).get("processes", [])))
            lines.append(
                f"  GPU {g['gpu']['index']}: {_mib(g['withdrawnMiB'])} are not promised to new pods: "
                f"programs outside of pods use them{f' ({names})' if names else ''}"
            )
    if s.get("containers"):
        lines.append("")
        rows = [["POD", "CONTAINER", "GPU", "LIMIT", "USED", "CORES", "MEMORY LEVEL", "COMPUTE LEVEL"]]
        index = {g["gpu"]["uuid"]: str(g["gpu"]["index"]) for g in s.get("gpus", [])}
        for c in s["containers"]:
            levels = c.get("levels", {})
            rows.append(
                [
                    _pod(c), c["container"], index.get(c["gpuUuid"], c["gpuUuid"]), _mib(c.get("memoryMiB")),
                    _mib(c.get("usedMiB")) + (" OVER" if c.get("overLimit") else ""),
                    _unit(c.get("coresPct"), " %"),
                    _level(levels.get("memory")), _level(levels.get("compute")),
                ]
            )  # fmt: skip
        lines += table(rows)
    for w in s.get("waiting", []):
        since = duration(now_s - w["sinceMs"] / 1000)
        lines.append(f"waiting {since}: {_pod(w)}/{w['container']} ({demand(w)}): {w['reason']}")
    lines.append("")
    rows = [["RESOURCE", "OFFERED", "HEALTHY", "ALLOCATED", "STATE"]]
    for r in s.get("resources", []):
        state = r.get("problem") or ("registered" if r["registered"] else "not registered")
        rows.append([r["name"], str(r["total"]), str(r["healthy"]), str(r["allocated"]), state])
    lines += table(rows) if len(rows) > 1 else ["no resources are offered"]
    if not s.get("gpus"):
        lines += ["", "what detection looked at:"] + [f"  {e}" for e in s.get("evidence", [])]
    return lines


def _uplink(u: JsonObject) -> str:
    if not u.get("enabled"):
        return "uplink off"
    if u.get("connected"):
        return f"uplink connected to {u.get('broker')}"
    return f"uplink down ({u.get('problem') or 'connecting'}), {u.get('queued', 0)} messages kept"


def _pod(c: JsonObject) -> str:
    return f"{c['namespace']}/{c['pod']}" if c.get("pod") else f"pod {c['podUid']}"


def _mib(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} MiB"


def _unit(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


def _level(level: JsonObject | None) -> str:
    if not level:
        return "none"
    return f"{level['level']} ({level['reason']})" if level.get("reason") else str(level["level"])


def demand(waiting: JsonObject) -> str:
    """What a waiting container asks for: '8000 MiB, 30 %'."""
    cores = waiting.get("coresPct")
    parts = [f"{waiting['memoryMiB']} MiB"] if waiting["memoryMiB"] else []
    parts += [f"{cores} %"] if cores else []
    return ", ".join(parts) or "a whole GPU"


def duration(seconds: float) -> str:
    """3 -> '3 s', 90 -> '1 min', 7300 -> '2 h', 200000 -> '2 d'."""
    seconds = max(0, int(seconds))
    for limit, divisor, unit in ((60, 1, "s"), (3600, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds // divisor} {unit}"
    return f"{seconds // 86400} d"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns, two blanks between."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
