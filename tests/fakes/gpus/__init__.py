"""A scripted GpuBackend: what each GPU answers is set by the test, events are put in by hand."""

from __future__ import annotations

import queue
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from edgeagent.errors import GpuError
from edgeagent.gpus.model import Gpu, GpuEvent, GpuFault, GpuKind, GpuReading, Inventory

UUIDS = (
    "GPU-11111111-0000-4000-8000-000000000001",
    "GPU-22222222-0000-4000-8000-000000000002",
)


def make_gpu(index: int = 0, **changes: Any) -> Gpu:
    return replace(
        Gpu(
            uuid=UUIDS[index],
            index=index,
            kind=GpuKind.DISCRETE,
            source="nvml",
            model="NVIDIA L4",
            memory_total_mib=8192,
            memory_reserved_mib=192,
            pci_address=f"0000:{0x65 + index:02x}:00.0",
            temperature_slowdown_c=90.0,
            temperature_shutdown_c=95.0,
        ),
        **changes,
    )


def make_reading(uuid: str, **changes: Any) -> GpuReading:
    reading = GpuReading(
        uuid,
        0.0,
        memory_used_mib=100.0,
        temperature_c=40.0,
        throttle_reasons=frozenset({"idle"}),
        processes=(),
    )
    return replace(reading, **changes)


class ScriptedBackend:
    """`values[uuid]`: changes to the idle reading; `faults[uuid]`: the GPU is sick; `missing`: not listed;
    `inventory_fault`: the library as a whole fails, and hides all GPUs but `hides_not`. `reads` records which GPUs were read."""

    name = "scripted"

    def __init__(self, gpus: Iterable[Gpu]) -> None:
        self.gpus = list(gpus)
        self.values: dict[str, dict[str, Any]] = {}
        self.faults: dict[str, GpuFault] = {}
        self.missing: set[str] = set()
        self.inventory_fault: tuple[GpuFault, str] | None = None
        self.hides_not: set[str] = set()
        self.wait_error: GpuError | None = None
        self.reads: list[str] = []
        self.inventories = 0
        self.waits = 0
        self._events: queue.Queue[GpuEvent | None] = queue.Queue()

    def inventory(self) -> Inventory:
        self.inventories += 1
        if self.inventory_fault is not None:
            fault, why = self.inventory_fault
            return Inventory(tuple(g for g in self.gpus if g.uuid in self.hides_not), (why,), why, fault)
        found = tuple(g for g in self.gpus if g.uuid not in self.missing)
        return Inventory(found) if found else Inventory((), (), "no GPU is listed", GpuFault.NOT_FOUND)

    def read(self, uuid: str) -> GpuReading:
        self.reads.append(uuid)
        if uuid in self.faults:
            return GpuReading(uuid, 0.0, self.faults[uuid])
        return make_reading(uuid, **self.values.get(uuid, {}))

    def put(self, event: GpuEvent) -> None:
        self._events.put(event)

    def wait_event(self, timeout_s: float) -> GpuEvent | None:
        self.waits += 1
        if self.wait_error is not None:
            raise self.wait_error
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def wake(self) -> None:
        self._events.put(None)

    def close(self) -> None:
        pass
