"""What the limiter costs a program, and how well it keeps a percentage, on the stand-in driver.

`main()` prints one JSON object: nanoseconds per allocation pair and per launch with and without the
library, alternately in one run (the least disturbed round of each), and the busy percentage reached for each asked percentage
and kernel length. Nothing of it ran on a GPU: it is the library's own cost, to which the driver's adds.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.fakes.cuda import Box, compiler, tools

ROUNDS = 7
CALLS = 200_000
PERCENTAGES = (10, 30, 50, 80)
KERNELS_US = (200, 2000, 30000)
SPIN_MS = 1000
TRIES = 3

ROWS = [
    ("limiter: added to an allocation and its freeing", ("limiter", "alloc_pair_overhead_ns"), 200, "ns"),
    ("limiter: added to a launch, compute uncapped", ("limiter", "launch_overhead_ns"), 100, "ns"),
    ("limiter: duty cycle, furthest from what was asked", ("duty_cycle_worst_points",), 3, "points"),
]


def overhead(box: Box) -> dict[str, float]:
    """The least of ROUNDS of a process without and one with the library, in turn: other work on the
    machine only adds."""
    seen: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for preload in (False, True):
            box.limit(1024)
            seen[preload].append(
                box.run("dlsym", "init", "ctx", f"bench:{CALLS}", preload=preload)[-1].values
            )
    (pair, launch), (pair_with, launch_with) = (
        tuple(min(column) for column in zip(*seen[preload], strict=True)) for preload in (False, True)
    )
    return {
        "alloc_pair_ns_without": round(pair, 1),
        "alloc_pair_ns_with": round(pair_with, 1),
        "alloc_pair_overhead_ns": round(pair_with - pair, 1),
        "launch_ns_without": round(launch, 1),
        "launch_ns_with": round(launch_with, 1),
        "launch_overhead_ns": round(launch_with - launch, 1),
    }


def accuracy(box: Box) -> list[dict[str, float]]:
    """Busy percentage of the time-line for each asked percentage and kernel length, one process. The
    highest of TRIES: a machine with other work launches late and reaches less, never more."""
    rows = []
    for asked in PERCENTAGES:
        for us in KERNELS_US:
            reached = 0.0
            for _ in range(TRIES):
                box.limit(1024, cores_pct=asked)
                line = box.run("dlsym", "init", "ctx", "stream", f"spin:{us}:{SPIN_MS}")[-1]
                reached = max(reached, line.values[0])
            rows.append({"asked_pct": asked, "kernel_us": us, "reached_pct": reached})
    return rows


def main() -> int:
    if compiler() is None:
        print(json.dumps({"skipped": "no C compiler"}))
        return 0
    with tempfile.TemporaryDirectory(prefix="limiter-bench-") as directory:
        box = Box(Path(directory), tools())
        figures = overhead(box)
        reached = accuracy(box)
    worst = max(abs(row["reached_pct"] - row["asked_pct"]) for row in reached)
    print(
        json.dumps(
            {"limiter": figures, "duty_cycle": reached, "duty_cycle_worst_points": round(worst, 2)}, indent=2
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
