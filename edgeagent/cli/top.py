"""`edgeagent top`: a live view of GPUs, the containers on them, and what is wrong."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from edgeagent.cli.options import add_config_option, agent_client, load_config
from edgeagent.cli.status import demand, duration
from edgeagent.errors import AgentError, ControlError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

JsonObject = Mapping[str, Any]
FetchSnapshot = Callable[[], JsonObject]

BAR_CELLS = 16
_SEVERITY = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
_HEALTH = {"ok": "green", "degraded": "yellow", "sick": "bold red"}
_LEVEL = {"hard": "green", "cooperative": "cyan", "weighted": "cyan", "reactive": "yellow", "none": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_option(parser)
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument(
        "--json", action="store_true", help="print the snapshot as JSON, one a line; implies no colours"
    )
    parser.add_argument(
        "-n", "--interval", type=float, default=2.0, metavar="SECONDS", help="refresh interval (default 2)"
    )


def run(args: argparse.Namespace) -> int:
    """Exit status 1: the agent does not answer."""
    config, _ = load_config(args)
    return show(args, lambda: agent_client(config).call("snapshot"))


def show(args: argparse.Namespace, fetch_snapshot: FetchSnapshot) -> int:
    """The command on any source of snapshots (their JSON form)."""
    interval_s = max(0.2, args.interval)
    if args.json:
        while True:
            print(json.dumps(fetch_snapshot(), ensure_ascii=False), flush=True)
            if args.once:
                return 0
            time.sleep(interval_s)
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as e:
        raise ControlError(
            "top needs the package rich: pip install 'edgeagent[top]'; `edgeagent status` works without"
        ) from e
    console = Console()
    if args.once or not sys.stdout.isatty():
        # Wide enough for every column when the output goes to a file or a pipe.
        plain = Console(width=None if sys.stdout.isatty() else 160)
        plain.print(render(fetch_snapshot(), time.time()))
        return 0
    first = fetch_snapshot()  # without an agent: one clear sentence, no screen
    with Live(render(first, time.time()), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(_next(fetch_snapshot, console), refresh=True)


def _next(fetch_snapshot: FetchSnapshot, console: Console) -> RenderableType:
    from rich.text import Text

    try:
        return render(fetch_snapshot(), time.time())
    except AgentError as e:  # it restarts: keep the screen and try again
        return Text(f"{e}\ntrying again; Ctrl-C ends", style="bold red")


# -- pictures ----------------------------------------------------------------------------------------


def render(s: JsonObject, now_s: float) -> RenderableType:
    """A snapshot in its JSON form as one picture."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_head(s, now_s)]
    parts += _alerts(s, now_s)
    if s.get("gpus"):
        parts.append(_gpus(s))
    else:
        parts.append(Text("no GPU was found; `edgeagent detect` says what was looked at", style="yellow"))
    parts += [
        Text(f"waiting {duration(now_s - w['sinceMs'] / 1000)}: {_pod(w)}/{w['container']} "
             f"wants {demand(w)}: {w['reason']}", style="yellow")
        for w in s.get("waiting", [])
    ]  # fmt: skip
    return Group(*parts)


def _head(s: JsonObject, now_s: float) -> RenderableType:
    from rich.text import Text

    uplink = s.get("uplink", {})
    link = "uplink off"
    if uplink.get("enabled"):
        link = "uplink up" if uplink.get("connected") else f"uplink down, {uplink.get('queued', 0)} kept"
    text = Text.assemble(
        (f"{s['node']}", "bold"),
        f" · {s['site']} · ",
        (s["health"], _HEALTH.get(s["health"], "")),
        f" · {s['state']} · kubelet {'up' if s.get('kubeletConnected') else 'down'} · {link}",
        f" · up {duration(now_s - s['startedMs'] / 1000)}",
    )
    age_s = now_s - s["takenMs"] / 1000
    if age_s > 30:
        text.append(f" · {duration(age_s)} old", style="bold red")
    return text


def _alerts(s: JsonObject, now_s: float) -> list[RenderableType]:
    from rich.text import Text

    conditions = [*s.get("conditions", []), *(c for g in s.get("gpus", []) for c in g.get("conditions", []))]
    order = {"critical": 0, "warning": 1}
    lines: list[RenderableType] = []
    for c in sorted(conditions, key=lambda c: (order.get(c["severity"], 2), c["sinceMs"])):
        since = duration(now_s - c["sinceMs"] / 1000)
        hurt = f" [hurts {', '.join(c['podsHurt'])}]" if c.get("podsHurt") else ""
        style = _SEVERITY.get(c["severity"], "")
        lines.append(Text(f"! {c['type']} for {since}: {c['message']}{hurt}", style=style))
    known = {c["message"] for c in conditions}
    lines += [Text(f"! {r}", style="yellow") for r in s.get("reasons", []) if r not in known]
    return lines


def _gpus(s: JsonObject) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim", expand=False)
    table.add_column("GPU / CONTAINER", no_wrap=True)
    table.add_column("MEMORY", no_wrap=True)
    table.add_column("MiB", justify="right", no_wrap=True)
    table.add_column("COMPUTE", no_wrap=True)
    table.add_column("°C", justify="right", no_wrap=True)
    table.add_column("W", justify="right", no_wrap=True)
    table.add_column("STATE", no_wrap=True)
    for g in s["gpus"]:
        gpu, r = g["gpu"], g.get("reading") or {}
        used, total = r.get("memoryUsedMiB"), gpu["memoryTotalMiB"]
        state = Text(g["health"], style=_HEALTH.get(g["health"], ""))
        state.append(f" {g['mode']}", style="dim")
        if g.get("cordoned"):
            state.append(" cordoned", style="yellow")
        if not g.get("present", True):
            state.append(" missing", style="bold red")
        table.add_row(
            Text(f"{gpu['index']} {gpu['model']}", style="bold"),
            bar(used, total),
            Text(f"{_number(used)} / {total}"),
            bar(r.get("utilPct"), 100.0, percent=True),
            _celsius(r.get("temperatureC"), gpu.get("temperatureSlowdownC")),
            Text(_number(r.get("powerW"))),
            state,
        )
        for c in (c for c in s.get("containers", []) if c["gpuUuid"] == gpu["uuid"]):
            table.add_row(*_container_row(c))
        host = g.get("hostUse") or {}
        if host.get("usedMiB"):
            names = ", ".join(dict.fromkeys(p["name"] for p in host.get("processes", [])))
            table.add_row(Text(f"  not pods: {names}"[:48], style="dim"), "", _number(host["usedMiB"]))
        if (g.get("unattributedMiB") or 0) >= 1:
            table.add_row(Text("  not attributed", style="dim"), "", _number(g["unattributedMiB"]))
        if g["mode"] == "shared":
            table.add_row(
                Text(f"  free for new pods: {g['freeMiB']} MiB, {g['freeCoresPct']} % cores", style="dim")
            )
    return table


def _container_row(c: JsonObject) -> tuple[RenderableType, ...]:
    from rich.text import Text

    limit, used = c.get("memoryMiB"), c.get("usedMiB")
    levels = c.get("levels", {})
    state = Text()
    for axis in ("memory", "compute"):
        level = levels.get(axis, {}).get("level", "none")
        state.append(f"{axis[:3]} {level} ", style=_LEVEL.get(level, ""))
    if c.get("overLimit"):
        state.append("OVER LIMIT", style="bold red")
    cores = f" of {c['coresPct']}" if c.get("coresPct") is not None else ""
    compute = bar(c.get("utilPct"), float(c.get("coresPct") or 100), percent=True)
    compute.append(cores, style="dim")
    return (
        Text(f"  {_pod(c)}/{c['container']}"),
        bar(used, limit),
        Text(f"{_number(used)} / {_number(limit)}"),
        compute,
        "",
        "",
        state,
    )


def bar(value: float | None, full: float | None, percent: bool = False) -> Any:
    """A bar of BAR_CELLS cells; over 100 % it is full and red. A value that is not known is a dash."""
    from rich.text import Text

    if value is None or not full:
        return Text("-" if value is None else _number(value), style="dim")
    share = value / full
    cells = min(BAR_CELLS, max(0, round(share * BAR_CELLS)))
    style = "red" if share > 1.0 else "yellow" if share > 0.9 else "green"
    text = Text.assemble(("█" * cells, style), ("░" * (BAR_CELLS - cells), "dim"))
    text.append(f" {value:.0f} %" if percent else f" {share * 100:.0f} %")
    return text


def _celsius(value: float | None, limit: float | None) -> Any:
    from rich.text import Text

    style = ""
    if value is not None and limit:
        style = "bold red" if value >= limit else "yellow" if value >= limit - 5 else ""
    return Text(_number(value), style=style)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _pod(c: JsonObject) -> str:
    return f"{c['namespace']}/{c['pod']}" if c.get("pod") else f"pod {c['podUid'][:8]}"
