"""The documentation: links lead somewhere, commands exist, and what is shown is run or says why not."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgeagent.cli.main import COMMANDS, build_parser

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = sorted([*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").rglob("*.md")])
SHELL = ("sh", "bash", "shell", "console")

_FENCE = re.compile(r"^( *)(`{3,})(\w*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
_NOT_RUN = re.compile(r"<!-- not run: \S.* -->\s*$")


@dataclass(frozen=True)
class Block:
    """A block of commands. `reason`: why it is not run, as the comment before it says."""

    page: Path
    line: int
    text: str
    reason: str | None

    @property
    def id(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for m in _FENCE.finditer(text):
            if m.group(3) not in SHELL:
                continue
            before = text[: m.start()].rstrip()
            mark = _NOT_RUN.search(before)
            yield Block(page, text.count("\n", 0, m.start()) + 1, m.group(4), mark.group(0) if mark else None)


def prose(text: str) -> str:
    """Without code, whose brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """As GitHub makes them from headings."""
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", _FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"[`*_]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(CHECKOUT)))
def test_links(page: Path) -> None:
    """Relative links name files that are there, and headings that are in them."""
    broken = []
    for found in _LINK.finditer(prose(page.read_text())):
        link = found.group(1) or found.group(2)
        if re.match(r"^[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target.read_text())
        ):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("block", [b for b in blocks() if b.reason is None], ids=lambda b: b.id)
def test_commands_that_are_run(block: Block) -> None:
    """A block of commands without a mark works as it stands, in a checkout. (Mark one that cannot with
    `<!-- not run: why -->` in the line before it.)"""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-eu", "-c", block.text],
        cwd=CHECKOUT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """Every `edgeagent …` line of every block, up to a pipe or a comment."""
    for block in blocks():
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.strip().removeprefix("$ ").removeprefix("sudo "), comments=True)
            stop = next((i for i, w in enumerate(words) if w in ("|", "&&", ";") or w[0] in "<>"), None)
            words = words[:stop]
            if words[:1] == ["edgeagent"] and len(words) > 1:
                yield f"{block.id} {' '.join(words)}", words[1:]


SHOWN = dict(shown_commands())


@pytest.mark.parametrize("argv", SHOWN.values(), ids=SHOWN.keys())
def test_shown_commands_exist(argv: list[str]) -> None:
    """Subcommands and options are those that the command has."""
    chosen = next((a for a in argv if not a.startswith("-")), None)
    if chosen is None:
        return
    assert chosen in COMMANDS
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            build_parser(chosen).parse_args(argv)
    except (SystemExit, argparse.ArgumentError) as e:
        assert getattr(e, "code", 1) == 0, said.getvalue()
    except ModuleNotFoundError as e:
        pytest.skip(f"{e.name} is not there yet")


def test_shown_installer_options_exist() -> None:
    script = (CHECKOUT / "install.sh").read_text()
    for block in blocks():
        for option in re.findall(r"install\.sh[^\n|]*", block.text):
            for flag in re.findall(r"--[a-z0-9-]+", option):
                assert f"{flag})" in script or f"{flag} |" in script, f"{block.id}: {flag}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
            assert target in targets, f"{page.name}: make {target}"
