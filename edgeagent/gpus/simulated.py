"""GPUs that are not there: for the demo, for trying a configuration, for a fleet on one machine.

Every value is a function of the seed and the clock, so a run can be repeated. Faults come from
`inject` or from a file, and behave as a driver's do: a lost GPU stays lost until `inventory` finds it
anew, an unresponsive one blocks its caller (guard.py bounds that).
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import time
import uuid as uuids
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Generic, TypeVar

from edgeagent.config.schema import SimulatedConfig
from edgeagent.errors import ConfigError
from edgeagent.gpus.model import (
    Gpu,
    GpuEvent,
    GpuEventKind,
    GpuFault,
    GpuKind,
    GpuLink,
    GpuProcess,
    GpuReading,
    Inventory,
    ProcessType,
    Topology,
)
from edgeagent.gpus.simulated_files import (
    Fault,
    ProfileGpu,
    SimulatedProcess,
    load_faults,
    load_processes,
    load_profile,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

FILE_SLICE_S = 0.25  # how often a waiter looks at the fault file
_NAMESPACE = uuids.UUID("2f0f8b5a-6f53-5d0b-9f0e-7c6f0a1d4e21")

_GPU_GONE = {"lost": GpuFault.LOST, "reset_required": GpuFault.RESET_REQUIRED}
_LIBRARY = {
    "driver_mismatch": (
        GpuFault.DRIVER_MISMATCH,
        "the NVIDIA library is 550.107.02 but the loaded kernel module is 550.90.07 (simulated)",
    ),
    "driver_not_loaded": (GpuFault.DRIVER_NOT_LOADED, "the nvidia kernel module is not loaded (simulated)"),
    "no_permission": (GpuFault.NO_PERMISSION, "NVML refuses access (simulated)"),
}


class _File(Generic[T]):
    """A file that is parsed again when it changes; missing: nothing in it; broken: as it was."""

    def __init__(self, path: str | None, parse: Callable[[str], tuple[T, ...]]) -> None:
        self.path = path
        self._parse = parse
        self._stamp: tuple[int, int, int] | None = None
        self._content: tuple[T, ...] = ()

    def read(self) -> tuple[T, ...]:
        if self.path is None:
            return ()
        try:
            now = os.stat(self.path)
        except OSError:
            self._stamp, self._content = None, ()
            return ()
        stamp = (now.st_ino, now.st_mtime_ns, now.st_size)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._content = self._parse(self.path)
            except ConfigError as e:
                log.warning("kept what was read before: %s", e)
        return self._content


@dataclass(frozen=True, slots=True)
class _Active:
    """A fault and since when it was asked for."""

    fault: Fault
    since_s: float


class SimulatedBackend:
    """GpuBackend of a profile. `processes` gives what runs on the GPUs now (the demo's pods); without
    it the process file does."""

    name = "simulated"

    def __init__(
        self,
        config: SimulatedConfig,
        clock: Callable[[], float] = time.monotonic,
        processes: Callable[[], Sequence[SimulatedProcess]] | None = None,
    ) -> None:
        profile = load_profile(config.profile)
        self._profile = profile
        self._config = config
        self._clock = clock
        self._start_s = clock()
        self._processes = processes
        self._fault_file = _File(config.fault_file, load_faults)
        self._process_file = _File(config.process_file, load_processes)
        self._kinds: list[ProfileGpu] = [kind for kind in profile.gpus for _ in range(kind.count)]
        self._gpus = tuple(self._gpu(index, kind) for index, kind in enumerate(self._kinds))
        self._changed = threading.Condition()
        self._injected: list[_Active] = []
        self._from_file: dict[Fault, float] = {}  # entry of the file -> when it was first seen
        self._fired: set[tuple[Fault, float]] = set()  # XIDs already sent
        self._gone: dict[str, GpuFault] = {}  # until found anew
        self._events: deque[GpuEvent] = deque()
        self._woken = False
        self._closed = False

    def _gpu(self, index: int, kind: ProfileGpu) -> Gpu:
        seed = f"{self._config.seed}/{self._config.profile}/{index}"
        capability = kind.compute_capability.split(".") if kind.compute_capability else None
        integrated = kind.kind == "integrated"
        return Gpu(
            uuid=f"{'tegra' if integrated else 'GPU'}-{uuids.uuid5(_NAMESPACE, seed)}",
            index=index,
            kind=GpuKind.INTEGRATED if integrated else GpuKind.DISCRETE,
            source=self.name,
            model=kind.model,
            memory_total_mib=kind.memory_total_mib,
            memory_reserved_mib=kind.memory_reserved_mib,
            compute_capability=(int(capability[0]), int(capability[1])) if capability else None,
            multiprocessors=kind.multiprocessors,
            pci_address=None if integrated else f"0000:{1 + index:02x}:00.0",
            minor=None if integrated else index,
            driver_version=self._profile.driver_version,
            temperature_slowdown_c=kind.temperature_slowdown_c,
            temperature_shutdown_c=kind.temperature_shutdown_c,
            power_limit_w=kind.power_limit_w,
            facts={**({"architecture": kind.architecture} if kind.architecture else {}), **kind.facts},
        )

    # ---- faults ---------------------------------------------------------------------------------

    def inject(self, fault: str, gpu: str | int = "all", xid: int | None = None) -> None:
        """A fault from now on, until `clear`; "xid" happens once."""
        with self._changed:
            self._injected.append(_Active(Fault(gpu=str(gpu), fault=fault, xid=xid), self._clock()))
            self._fire()
            self._changed.notify_all()

    def clear(self, gpu: str | int | None = None) -> None:
        """Takes back what was injected (on one GPU, or all of it)."""
        with self._changed:
            self._injected = [a for a in self._injected if gpu is not None and a.fault.gpu != str(gpu)]
            self._changed.notify_all()

    def _active(self) -> list[_Active]:
        """Faults that hold now. Called with the lock held."""
        now = self._clock()
        entries = self._fault_file.read()
        self._from_file = {f: self._from_file.get(f, now) for f in entries}
        asked = [*self._injected, *(_Active(f, since) for f, since in self._from_file.items())]
        active = []
        for entry in asked:
            begins = entry.since_s + entry.fault.after_seconds
            ends = math.inf if entry.fault.for_seconds is None else begins + entry.fault.for_seconds
            if begins <= now < ends:
                active.append(entry)
        return active

    def _fire(self) -> None:
        """Queues the XIDs that are due. Called with the lock held."""
        active = self._active()
        for entry in active:
            key = (entry.fault, entry.since_s)
            if entry.fault.fault == "xid" and key not in self._fired:
                self._fired.add(key)
                for gpu in self._gpus:
                    if self._concerns(entry.fault, gpu):
                        self._events.append(
                            GpuEvent(GpuEventKind.XID, gpu.uuid, xid=entry.fault.xid, source=self.name)
                        )
        self._fired &= {(e.fault, e.since_s) for e in active}

    @staticmethod
    def _concerns(fault: Fault, gpu: Gpu) -> bool:
        return fault.gpu in ("all", gpu.uuid, str(gpu.index))

    def _faults_of(self, gpu: Gpu) -> set[str]:
        return {e.fault.fault for e in self._active() if self._concerns(e.fault, gpu)}

    def _library_fault(self) -> tuple[GpuFault, str] | None:
        return next((_LIBRARY[e.fault.fault] for e in self._active() if e.fault.fault in _LIBRARY), None)

    # ---- GpuBackend -----------------------------------------------------------------------------

    def inventory(self) -> Inventory:
        evidence = [f"simulated profile {self._config.profile}, seed {self._config.seed}"]
        with self._changed:
            library = self._library_fault()
            if library is not None:
                return Inventory((), (*evidence, library[1]), library[1], library[0])
            found = []
            for gpu in self._gpus:
                gone = next((f for f in self._faults_of(gpu) if f in _GPU_GONE), None)
                if gone is None:
                    self._gone.pop(gpu.uuid, None)
                    found.append(gpu)
                    evidence.append(f"GPU {gpu.uuid}: {gpu.model}, {gpu.memory_total_mib} MiB")
                else:
                    self._gone[gpu.uuid] = _GPU_GONE[gone]
                    evidence.append(f"GPU {gpu.uuid} left out: {gone} (simulated)")
        if not found:
            return Inventory(
                (), tuple(evidence), "no GPU answers (simulated)", next(iter(self._gone.values()))
            )
        return Inventory(tuple(found), tuple(evidence))

    def read(self, uuid: str) -> GpuReading:
        gpu = next((g for g in self._gpus if g.uuid == uuid), None)
        if gpu is None:
            return self._sick(uuid, GpuFault.NOT_FOUND, "no such simulated GPU")
        with self._changed:
            while "unresponsive" in self._faults_of(gpu) and not self._closed:
                self._changed.wait(FILE_SLICE_S)
            library = self._library_fault()
            if library is not None:
                return self._sick(uuid, *library)
            faults = self._faults_of(gpu)
            gone = next((f for f in faults if f in _GPU_GONE), None)
            if gone is not None:
                self._gone[uuid] = _GPU_GONE[gone]
            if uuid in self._gone:
                return self._sick(uuid, self._gone[uuid], "simulated")
        return self._read(gpu, self._kinds[gpu.index], faults)

    def _sick(self, uuid: str, fault: GpuFault, detail: str) -> GpuReading:
        return GpuReading(uuid, self._clock(), fault=fault, fault_detail=detail)

    def wait_event(self, timeout_s: float) -> GpuEvent | None:
        deadline = time.monotonic() + timeout_s  # a wait is real time, whatever clock the values follow
        with self._changed:
            while True:
                self._fire()
                if self._events:
                    return self._events.popleft()
                left = deadline - time.monotonic()
                if self._woken or left <= 0:
                    self._woken = False
                    return None
                self._changed.wait(left if self._fault_file.path is None else min(left, FILE_SLICE_S))

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = self._woken = True
            self._changed.notify_all()

    def topology(self) -> Topology:
        return {
            frozenset((a.uuid, b.uuid)): GpuLink(self._profile.link) for a, b in combinations(self._gpus, 2)
        }

    # ---- values ---------------------------------------------------------------------------------

    def _read(self, gpu: Gpu, kind: ProfileGpu, faults: set[str]) -> GpuReading:
        t = self._clock() - self._start_s
        processes = self._running(gpu, t)
        util = self._util(gpu, t, processes)
        # Heat lags behind load: the mean over the last minute.
        load = sum(self._util(gpu, t - back, processes) for back in range(0, 60, 10)) / 600
        temperature = kind.temperature_idle_c + load * (kind.temperature_busy_c - kind.temperature_idle_c)
        reasons = {"idle"} if util < 1 else set()
        if "hot" in faults:
            temperature = kind.temperature_slowdown_c + 3 + self._wave(gpu, "hot", t, 20) * 2
            reasons |= {"thermal_hw", "hw_slowdown"}
        if "throttle" in faults:
            reasons.add("thermal_sw")
        if "power_brake" in faults:
            reasons |= {"power_brake", "hw_slowdown"}
        slowed = 0.4 if reasons - {"idle"} else 1.0
        power = kind.power_idle_w + (kind.power_limit_w - kind.power_idle_w) * util / 100 * slowed
        used = sum(p.used_mib or 0.0 for p in processes)
        reserved = kind.memory_reserved_mib or 0
        room = max(0.0, kind.memory_total_mib - reserved - used)
        # On unified memory the rest of the system takes its part of the same RAM.
        available = max(0.0, room - 0.15 * kind.memory_total_mib)
        unified = gpu.unified_memory
        return GpuReading(
            gpu.uuid,
            self._clock(),
            memory_used_mib=used,
            memory_free_mib=available if unified else room,
            util_pct=round(util, 1),
            memory_util_pct=None if unified else round(util * 0.6, 1),
            temperature_c=round(temperature, 1),
            power_w=round(power, 1),
            energy_mj=round(t * power * 1000),
            clock_sm_mhz=round(kind.clock_sm_max_mhz * (0.3 + 0.7 * min(1.0, util / 30)) * slowed),
            clock_memory_mhz=kind.clock_memory_mhz,
            fan_pct=round(30 + 60 * load) if kind.fan else None,
            throttle_reasons=frozenset(reasons),
            ecc_uncorrectable=(1 if "ecc" in faults else 0) if kind.ecc or "ecc" in faults else None,
            row_remap_failed="row_remap" in faults if kind.ecc or "row_remap" in faults else None,
            row_remap_pending=False if kind.ecc else None,
            power_mode=kind.power_mode,
            host_memory_available_mib=available if unified else None,
            host_swap_used_mib=0.0 if unified else None,
            processes=processes,
        )

    def _running(self, gpu: Gpu, t: float) -> tuple[GpuProcess, ...]:
        given = self._processes() if self._processes is not None else self._process_file.read()
        found = {}
        for p in given:
            if p.gpu not in (gpu.uuid, str(gpu.index)):
                continue
            part = 0.55 + 0.35 * self._wave(gpu, f"memory {p.pid}", t, 180)
            used = p.used_mib if p.used_mib is not None else round(p.share_mib * part, 1)
            util = p.cores_pct * (0.5 + 0.5 * self._wave(gpu, f"util {p.pid}", t, 45))
            found[p.pid] = GpuProcess(p.pid, frozenset({ProcessType.COMPUTE}), used, round(util, 1), p.name)
        return tuple(found[pid] for pid in sorted(found))

    def _util(self, gpu: Gpu, t: float, processes: tuple[GpuProcess, ...]) -> float:
        ripple = 3 * self._wave(gpu, "util", t, 30)
        return min(100.0, ripple + sum(p.sm_util_pct or 0.0 for p in processes))

    def _wave(self, gpu: Gpu, what: str, t: float, period_s: float) -> float:
        """0 to 1, smooth in `t`, its own for every seed, GPU and quantity."""
        digest = hashlib.sha256(f"{self._config.seed}/{gpu.index}/{what}".encode()).digest()
        phases = [b / 255 * 2 * math.pi for b in digest[:3]]
        w = 2 * math.pi / period_s
        total = sum(math.sin(w * t * k + p) / k for k, p in zip((1.0, 1.7, 3.1), phases, strict=True))
        return max(0.0, min(1.0, 0.5 + total / 3.8))
