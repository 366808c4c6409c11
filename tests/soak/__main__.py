"""`make soak`: the whole agent under churn; a table on stdout, table and plot in bench-results/.

    python -m tests.soak [--minutes N] [--seed N]

Ends with 1 when an invariant was broken.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from tests.soak.run import markdown, plot, soak

RESULTS = Path(__file__).resolve().parents[2] / "bench-results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="ea-"))
    try:
        report = soak(directory, asked.minutes * 60, asked.seed)
        text = markdown(report)
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "soak.md").write_text(text)
        (RESULTS / "soak.svg").write_text(plot(report))
        (RESULTS / "soak.json").write_text(json.dumps({"figures": report.figures, "samples": report.samples}))
        if report.broken:
            shutil.copy(directory / "a/agent.log", RESULTS / "soak-agent.log")
        print(text)
        return 1 if report.broken else 0
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
