"""What one full reading of a Jetson costs: CPU time of the whole process per read, every board.

Prints JSON. `ms_per_read` is the median of several runs of process CPU time (user and system, all
threads), `ms_with_discovery` that of a reading that looks for sensor files anew (once a minute).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from edgeagent.gpus.tegra import REDISCOVER_S, TegraBackend
from edgeagent.hostroot import HostRoot
from tests.fakes.jetson import BOARDS, Board, JetsonTree

RUNS = 5
READS = 100


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def measure(board: Board) -> dict[str, float | int]:
    with tempfile.TemporaryDirectory() as root:
        clock = _Clock()
        backend = TegraBackend(HostRoot(JetsonTree(Path(root), board).root), clock=clock)
        started = time.process_time()
        (gpu,) = backend.inventory().gpus
        inventory_ms = (time.process_time() - started) * 1e3
        backend.read(gpu.uuid)
        steady = [_cpu_ms(backend, gpu.uuid, clock, 0.0) for _ in range(RUNS)]
        discovering = [_cpu_ms(backend, gpu.uuid, clock, REDISCOVER_S) for _ in range(RUNS)]
        values = len(backend.read(gpu.uuid).temperatures_c) + len(backend.read(gpu.uuid).rails_w)
        backend.close()
    return {
        "ms_per_read": round(statistics.median(steady), 3),
        "ms_with_discovery": round(statistics.median(discovering), 3),
        "ms_inventory": round(inventory_ms, 3),
        "zones_and_rails": values,
    }


def _cpu_ms(backend: TegraBackend, uuid: str, clock: _Clock, step_s: float) -> float:
    started = time.process_time()
    for _ in range(READS):
        clock.now += step_s
        backend.read(uuid)
    return (time.process_time() - started) / READS * 1e3


def main() -> None:
    boards = {name: measure(board) for name, board in BOARDS.items()}
    worst = max(m["ms_per_read"] for m in boards.values())
    result = {
        "python": sys.version.split()[0],
        "target_ms": 5.0,
        "worst_ms_per_read": worst,
        "boards": boards,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
