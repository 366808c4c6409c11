"""Lines over time as one SVG, stacked panels with their own scale."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

WIDTH, PANEL, LEFT, RIGHT, TOP = 760, 110, 60, 20, 34
INK, GRID, LINE = "#333", "#ddd", "#2563a8"


@dataclass(frozen=True)
class Series:
    name: str
    points: list[tuple[float, float]]


def svg(title: str, series: list[Series], unit: str) -> str:
    height = TOP + PANEL * len(series) + 26
    last = max((x for s in series for x, _ in s.points), default=1.0) or 1.0
    out = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
            f'font-size="11" fill="{INK}">'
        ),
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for n, one in enumerate(series):
        out += _panel(one, TOP + n * PANEL, last)
    out.append(
        f'<text x="{WIDTH - RIGHT}" y="{height - 8}" text-anchor="end">{last:.1f} {escape(unit)}</text>'
    )
    out.append(f'<text x="{LEFT}" y="{height - 8}">0</text></svg>')
    return "\n".join(out) + "\n"


def _panel(one: Series, top: float, last: float) -> list[str]:
    high = max((y for _, y in one.points), default=1.0) * 1.1 or 1.0
    bottom, room = top + PANEL - 22, PANEL - 40

    def at(x: float, y: float) -> str:
        return f"{LEFT + x / last * (WIDTH - LEFT - RIGHT):.1f},{bottom - y / high * room:.1f}"

    path = " ".join(at(x, y) for x, y in one.points)
    return [
        f'<line x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}" stroke="{GRID}"/>',
        f'<line x1="{LEFT}" y1="{bottom - room}" x2="{WIDTH - RIGHT}" y2="{bottom - room}" stroke="{GRID}"/>',
        f'<text x="{LEFT - 6}" y="{bottom + 4}" text-anchor="end">0</text>',
        f'<text x="{LEFT - 6}" y="{bottom - room + 4}" text-anchor="end">{high:.0f}</text>',
        f'<text x="{LEFT}" y="{bottom - room - 5}">{escape(one.name)}</text>',
        f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.4"/>',
    ]
