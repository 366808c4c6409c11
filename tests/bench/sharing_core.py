"""What the sharing core costs at 163,840 tokens (two cards of 80 GiB in 1 MiB units): one JSON line of
medians and 99th percentiles in milliseconds.

    python -m tests.bench.sharing_core
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from random import Random
from typing import Any

from edgeagent.sharing.ledger import ContainerKey, GpuCapacity, Ledger, Placement
from edgeagent.sharing.tokens import Demand, full, highest_n, ids_of, numbers, parse_ids, preferred
from edgeagent.sharing.waiting import WaitingLine

UNITS = 81_920
SHARE = 8_000
PODS = 16


def measured(call: Callable[[], Any], rounds: int = 200) -> dict[str, float]:
    times_ms = []
    for _ in range(rounds):
        before = time.perf_counter()
        call()
        times_ms.append((time.perf_counter() - before) * 1e3)
    times_ms.sort()
    return {"p50_ms": round(times_ms[rounds // 2], 3), "p99_ms": round(times_ms[rounds * 99 // 100], 3)}


def scattered(random: Random, free: int, count: int) -> int:
    """As the kubelet fills at random."""
    bits = bytearray(b"0") * free.bit_length()
    for number in random.sample(list(numbers(free)), count):
        bits[~number] = 0x31
    return int(bits, 2)


def main() -> dict[str, Any]:
    random = Random(1)
    ledger = Ledger(policy="spread")
    gpus = [GpuCapacity(f"GPU-{i}", UNITS) for i in range(2)]
    ledger.set_capacities(gpus)
    free = full(2 * UNITS)
    demands = []
    for i in range(PODS + 1):
        mask = scattered(random, free, SHARE)
        free &= ~mask
        demands.append(Demand(mask, full(5) << 5 * i))
    for i, demand in enumerate(demands[:PODS]):
        placed = ledger.place(ContainerKey(f"pod{i}", "main"), demand)
        assert isinstance(placed, Placement)
        ledger.bind(ContainerKey(f"pod{i}", "main"), demand, placed.uuid)
    new, newcomer = demands[PODS], ContainerKey("new", "main")
    placed = ledger.place(newcomer, new)
    assert isinstance(placed, Placement)
    ids = ids_of("m", new.memory)
    random.shuffle(ids)
    too_large = Demand(highest_n(free, 20_000))
    line = WaitingLine(reserve_after_s=0)
    for i in range(10):
        key = ContainerKey(f"waiter{i}", "main")
        refusal = ledger.place(key, too_large)
        assert not isinstance(refusal, Placement)
        line.join(key, too_large, refusal, 0.0)

    def start_and_end() -> None:
        ledger.bind(newcomer, new, placed.uuid)
        ledger.release_pod("new")

    def sick() -> Demand:
        ledger.set_capacities([GpuCapacity("GPU-0", UNITS, sick=True), gpus[1]])
        return ledger.unhealthy()

    def well() -> Demand:
        ledger.set_capacities(gpus)
        return ledger.unhealthy(ledger.unhealthy())

    rows = {
        "parse_ids": measured(lambda: parse_ids("m", ids, 2 * UNITS)),
        "ids_of": measured(lambda: ids_of("m", new.memory)),
        "preferred": measured(lambda: preferred(free, 0, SHARE)),
        "place": measured(lambda: ledger.place(newcomer, new)),
        "refuse": measured(lambda: ledger.place(newcomer, too_large)),
        "bind_and_release": measured(start_and_end),
        "unhealthy_sick": measured(sick),
        "unhealthy_well_twice": measured(well),
        "next_start_10_waiters": measured(lambda: line.next_start(ledger, 100.0)),
    }
    result = {"tokens": 2 * UNITS, "share": SHARE, "pods": PODS, "rows": rows}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
