"""What the page is made of: no markup from strings, nothing from elsewhere, contrast that can be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgeagent.dashboard import server
from edgeagent.dashboard.node import CONDITIONS, RANKS
from edgeagent.fleet.commands import VERBS

STATIC = Path(server.__file__).parent / "static"
SCRIPTS = sorted(STATIC.glob("*.js"))
CSS = (STATIC / "style.css").read_text()
HTML = (STATIC / "index.html").read_text()


def test_every_file_is_served_and_every_served_file_is_there() -> None:
    assert sorted(p.name for p in STATIC.iterdir()) == sorted(server.STATIC)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_make_no_markup_from_strings(script: Path) -> None:
    text = script.read_text()
    unwanted = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|setAttribute\(\"on"
    assert re.findall(unwanted, text) == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert all(m.startswith("./") for m in re.findall(r'from "([^"]+)"', text))


def test_the_document_has_nothing_inline_and_nothing_from_elsewhere() -> None:
    assert re.findall(r"<script(?![^>]*\bsrc=)", HTML) == []
    assert re.findall(r"\son\w+=|\sstyle=|<style", HTML) == []
    assert all(url.startswith("/static/") for url in re.findall(r'(?:src|href)="(?!#)([^"]+)"', HTML))
    assert re.findall(r"url\(|@import", CSS) == []


def test_the_page_knows_every_condition_and_every_command() -> None:
    names = re.search(r"CONDITIONS = \{(.*?)\}", (STATIC / "format.js").read_text(), re.DOTALL)
    assert names is not None
    assert tuple(re.findall(r"(\w+):", names[1])) == CONDITIONS, "and in the same order"
    assert list(RANKS) == list(CONDITIONS)
    for condition in CONDITIONS:
        assert f".is-{condition}" in CSS
    commands = (STATIC / "commands.js").read_text()
    assert set(re.findall(r'^  "?([a-z-]+)"?: \{', commands, re.MULTILINE)) == set(VERBS)


# -- contrast ----------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    colour = colour.lstrip("#")
    if len(colour) == 3:
        colour = "".join(c * 2 for c in colour)
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def themes() -> dict[str, dict[str, str]]:
    light, dark = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)[:2]
    return {
        name: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})", text))
        for name, text in (("light", light), ("dark", dark))
    }


TEXT = ("text", "muted", "accent", *CONDITIONS)


@pytest.mark.parametrize("theme", themes().values(), ids=themes().keys())
@pytest.mark.parametrize("ground", ["bg", "surface"])
@pytest.mark.parametrize("colour", TEXT)
def test_text_can_be_read_on_every_ground(theme: dict[str, str], ground: str, colour: str) -> None:
    """WCAG 2 level AA: 4.5 to 1."""
    assert contrast(theme[colour], theme[ground]) >= 4.5


@pytest.mark.parametrize("theme", themes().values(), ids=themes().keys())
def test_shapes_can_be_seen(theme: dict[str, str]) -> None:
    """WCAG 2: 3 to 1 for what is not text."""
    for n in range(8):
        assert contrast(theme[f"pod-{n}"], theme["surface"]) >= 3, n
    assert contrast(theme["line-strong"], theme["surface"]) >= 1.5
    for notice in ("bad-bg", "warn-bg", "sunken"):
        assert contrast(theme["text"], theme[notice]) >= 7
