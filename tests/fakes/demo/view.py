"""How the demo looks: a live picture in a terminal, or plain lines."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from edgeagent.errors import ControlError

if TYPE_CHECKING:
    from tests.fakes.demo.play import Demo

REFRESH_S = 0.2
BAR = 10


class View:
    """Shows a Demo. `refresh` is called often and does its work now and then."""

    def __init__(self, demo: Demo) -> None:
        self.demo = demo
        self._drawn_s = 0.0
        self._started_s = time.monotonic()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def said(self, text: str) -> None: ...

    def refresh(self) -> None:
        if time.monotonic() - self._drawn_s >= REFRESH_S:
            self._drawn_s = time.monotonic()
            self.demo.processes_follow()
            self.draw()

    def draw(self) -> None: ...

    def snapshot(self) -> dict[str, Any] | None:
        try:
            return self.demo.agent.snapshot()
        except ControlError:
            return None


class PlainView(View):
    """One line an event, with the time since the start; what the broker hears is among them."""

    def __init__(self, demo: Demo) -> None:
        super().__init__(demo)
        self._heard = 0

    def said(self, text: str) -> None:
        print(f"{time.monotonic() - self._started_s:6.1f} s  {text}", flush=True)

    def draw(self) -> None:
        ear = self.demo.ear
        fresh, self._heard = ear.count - self._heard, ear.count
        for _, topic, text in list(ear.messages)[-fresh:] if fresh else []:
            if not topic.endswith("/tele/m"):
                print(
                    f"{time.monotonic() - self._started_s:6.1f} s    mqtt {topic}: {text[:150]}", flush=True
                )


def live_view(demo: Demo) -> View:
    """The live picture; plain lines where rich is not installed."""
    try:
        import rich  # noqa: F401
    except ImportError:
        print("(install rich for the live view)")
        return PlainView(demo)
    return LiveView(demo)


class LiveView(View):
    def __init__(self, demo: Demo) -> None:
        super().__init__(demo)
        from rich.live import Live

        self._live = Live(auto_refresh=False, screen=True)
        self._last: dict[str, Any] | None = None

    def __enter__(self) -> View:
        self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.__exit__(None, None, None)
        for line in self.demo.story:  # what happened stays on the screen
            print(line)

    def draw(self) -> None:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        s = self._last = self.snapshot() or self._last
        seconds = time.monotonic() - self._started_s
        title = Text.assemble(
            ("edgeagent demo", "bold"),
            f"  simulated GPUs, stand-in kubelet, {self.demo.broker_name}  {seconds:.0f} s",
        )
        story = Text("\n".join(self.demo.story[-7:]) or "starting …")
        parts: list[Any] = [title, Panel(story, title="what happens", border_style="cyan")]
        if s is not None:
            parts += [self._gpus(s), self._shares(s)]
        parts.append(self._messages())
        self._live.update(Group(*parts), refresh=True)

    def _gpus(self, s: dict[str, Any]) -> Any:
        from rich.box import SIMPLE
        from rich.table import Table
        from rich.text import Text

        table = Table(title="GPUs", expand=True, box=SIMPLE, padding=(0, 1, 0, 0))  # fits 80 columns
        for column in ("GPU", "health", "promised MiB", "free", "cores", "used", "°C", "W"):
            table.add_column(column, no_wrap=True)
        for g in s["gpus"]:
            reading = g.get("reading", {})
            sick = g["health"] == "sick"
            full = round(BAR * g["promisedMiB"] / max(1, g["usableMiB"]))
            bar = Text("█" * full, "red" if sick else "green") + Text("░" * (BAR - full), "dim")
            table.add_row(
                f"{g['gpu']['index']} {g['gpu']['model'].removeprefix('NVIDIA ').removesuffix(' Generation')}",
                Text(g["health"], "bold red" if sick else "green"),
                bar + Text(f" {g['promisedMiB']}/{g['usableMiB']}"),
                f"{g['freeMiB']}",
                f"{g['promisedCoresPct']} %",
                _value(reading.get("memoryUsedMiB")),
                _value(reading.get("temperatureC")),
                _value(reading.get("powerW")),
            )
        return table

    def _shares(self, s: dict[str, Any]) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(title="shares", expand=True)
        for column in ("pod", "GPU", "limit", "used", "cores", "state"):
            table.add_column(column)
        index = {g["gpu"]["uuid"]: g["gpu"]["index"] for g in s["gpus"]}
        for c in s["containers"]:
            table.add_row(
                c.get("pod", c["podUid"]), str(index.get(c["gpuUuid"], "?")), f"{c.get('memoryMiB')} MiB",
                _value(c.get("usedMiB"), " MiB"), _value(c.get("coresPct"), " %"),
                Text("running" if c.get("running") else "starting", "green"),
            )  # fmt: skip
        for w in s["waiting"]:
            table.add_row(
                w.get("pod", w["podUid"]), "-", f"{w['memoryMiB']} MiB", "-", _value(w.get("coresPct"), " %"),
                Text(f"waits: {w['reason']}", "yellow"),
            )  # fmt: skip
        return table

    def _messages(self) -> Any:
        from rich.panel import Panel
        from rich.text import Text

        lines = Text(overflow="ellipsis", no_wrap=True)
        for at, topic, text in list(self.demo.ear.messages)[-7:]:
            lines.append(time.strftime("%H:%M:%S ", time.localtime(at)), "dim")
            lines.append(topic.removeprefix("gpufleet/v1/") + " ", "cyan")
            lines.append(text[:160] + "\n")
        return Panel(lines, title=f"MQTT ({self.demo.ear.count} messages)", border_style="magenta")


def _value(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.0f}{unit}"
