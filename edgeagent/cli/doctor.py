"""`edgeagent doctor`: everything from driver to broker; `doctor isolation`: how far limits hold;
`doctor ready`: waits until the node shows the resources (install.sh asks it)."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable
from typing import Any

from edgeagent import __version__
from edgeagent.cli.options import add_config_option, config_path, load_config
from edgeagent.cli.status import table
from edgeagent.config import Config
from edgeagent.doctor.checks import CHECKS, examine, wait_ready
from edgeagent.doctor.examination import Examination
from edgeagent.doctor.findings import Finding, Outcome, Result, worst
from edgeagent.errors import ConfigError

_MARKS = {Outcome.PASS: "ok  ", Outcome.WARN: "warn", Outcome.FAIL: "FAIL", Outcome.SKIP: "-   "}
_EXIT = {Outcome.FAIL: 1, Outcome.WARN: 2, Outcome.PASS: 0, Outcome.SKIP: 0}
_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_option(parser)
    parser.add_argument(
        "topic", nargs="?", choices=("all", "isolation", "ready"), default="all",
        help="isolation: try every mechanism; ready: say whether the node shows its resources",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    parser.add_argument(
        "--check", action="append", choices=tuple(CHECKS), metavar="NAME", help=f"only: {', '.join(CHECKS)}"
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="ready: how long to wait for it (default 0)",
    )


def run(args: argparse.Namespace) -> int:
    """Exit status 0: all well; 2: warnings; 1: something does not work."""
    if args.topic == "ready":
        well, sentence = wait_ready(lambda: _examination(args), args.wait)
        print(sentence)
        return 0 if well else 1
    x = _examination(args)
    try:
        return _isolation(x, args.json) if args.topic == "isolation" else _all(x, args)
    finally:
        x.close()


def _examination(args: argparse.Namespace) -> Examination:
    try:
        config, path = load_config(args)
    except ConfigError as e:
        # The doctor goes on with defaults: a bad file is what it is asked about.
        return Examination(Config(), config_path(args), tuple(e.problems))
    return Examination(config, path)


def _all(x: Examination, args: argparse.Namespace) -> int:
    results: list[Result] = []
    for result in examine(x, args.check or CHECKS):
        results.append(result)
        if not args.json:
            print("\n".join(_lines(result.name, result.findings)), flush=True)
    outcome = worst(r.outcome for r in results)
    if args.json:
        print(json.dumps(_document(x, outcome, results), indent=2, ensure_ascii=False))
    else:
        count = {o: sum(f.outcome is o for r in results for f in r.findings) for o in Outcome}
        print(f"\n{count[Outcome.FAIL]} failed, {count[Outcome.WARN]} warnings, {count[Outcome.PASS]} well")
    return _EXIT[outcome]


def _lines(name: str, findings: Iterable[Finding]) -> list[str]:
    lines = []
    for f in findings:
        head = f"{_MARKS[f.outcome]} {name:18}"
        lines += textwrap.wrap(
            f.what, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
        )
        if f.fix is not None:
            indent = " " * len(head) + "-> "
            lines += textwrap.wrap(
                f.fix,
                _WIDTH,
                initial_indent=indent,
                subsequent_indent=" " * len(indent),
                break_on_hyphens=False,
            )
        name = ""
    return lines


def _document(x: Examination, outcome: Outcome, results: Iterable[Result]) -> dict[str, Any]:
    return {
        "agentVersion": __version__,
        "node": x.node_name,
        "outcome": outcome.value,
        "checks": [
            {"name": r.name, "outcome": r.outcome.value, "findings": [_plain(f) for f in r.findings]}
            for r in results
        ],
    }


def _plain(f: Finding) -> dict[str, str]:
    return {"outcome": f.outcome.value, "what": f.what, **({"fix": f.fix} if f.fix else {})}


def _isolation(x: Examination, as_json: bool) -> int:
    from edgeagent.doctor.isolation import report

    made, findings = report(x)
    outcome = worst(f.outcome for f in findings)
    if as_json:
        plain = [
            {
                "gpuUuid": t.gpu.uuid, "axis": t.axis.value, "mechanism": t.mechanism, "level": t.level,
                **({"evidence": t.evidence} if t.evidence else {}),
                **({"problem": t.problem} if t.problem else {}),
            }
            for t in made
        ]  # fmt: skip
        document = {"agentVersion": __version__, "node": x.node_name, "outcome": outcome.value}
        print(json.dumps({**document, "tries": plain, "findings": [_plain(f) for f in findings]}, indent=2))
        return _EXIT[outcome]
    rows = [["GPU", "AXIS", "MECHANISM", "LEVEL", "SEEN, OR WHAT IS MISSING"]]
    for t in made:
        rows.append([str(t.gpu.index), t.axis.value, t.mechanism, t.level, t.problem or t.evidence])
    print("\n".join(table(rows)) if made else "no GPU to try anything on")
    print()
    print("\n".join(_lines("isolation", findings)))
    return _EXIT[outcome]
