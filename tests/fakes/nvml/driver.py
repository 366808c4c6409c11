"""The scenario that the fake NVML library plays: written here, read again by the library at each call.

A directory holds a copy of the library (so that several scenarios in one process do not share state),
`state` (replaced by rename), `events` (appended), `limits` (appended by the library) and `log/calls`
(one line a call: symbol, GPU, "lookup" or "stale"). Load it by path (`library_path`), or give a child
process `env()`: nvidia-ml-py then finds it through LD_LIBRARY_PATH.

Readings are keys of the state; see READINGS. None or absent: the library answers NOT_SUPPORTED.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid as uuids
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.nvml import build

MIB = 1 << 20

OK = 0
UNINITIALIZED = 1
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
UNKNOWN = 999

EVENT_SINGLE_BIT_ECC = 0x1
EVENT_DOUBLE_BIT_ECC = 0x2
EVENT_XID = 0x8
EVENT_CLOCK = 0x10
EVENT_UNAVAILABLE = 0x4000
EVENT_RECOVERY_ACTION = 0x8000
ALL_EVENTS = 0xFF9F
CONSUMER_EVENTS = EVENT_XID | EVENT_CLOCK | 0x4

TOPOLOGY = {"board": 0, "pix": 10, "pxb": 20, "phb": 30, "node": 40, "sys": 50}

# Python names of readings -> (key of the state, factor). Anything else is passed through as a raw key,
# with "_N" for ".N" ("threshold_1", "clock_0", "ecc_1_0", "field_230").
READINGS: dict[str, tuple[str, float]] = {
    "memory_total_mib": ("memory_total", MIB),
    "memory_reserved_mib": ("memory_reserved", MIB),
    "memory_used_mib": ("memory_used", MIB),
    "power_w": ("power_mw", 1000),
    "power_limit_w": ("power_limit_mw", 1000),
    "temperature_c": ("temperature", 1),
    "slowdown_c": ("threshold.1", 1),
    "shutdown_c": ("threshold.0", 1),
    "clock_sm_mhz": ("clock.1", 1),
    "clock_memory_mhz": ("clock.2", 1),
    "util_pct": ("util", 1),
    "memory_util_pct": ("memory_util", 1),
    "fan_pct": ("fan", 1),
    "ecc_uncorrectable": ("ecc.1.0", 1),
    "recovery_action": ("field.230", 1),
}

# What a card of a kind answers when idle. Consumer cards: no ECC, no MIG, no row remapping.
_IDLE: dict[str, Any] = {
    "memory_used_mib": 0, "util_pct": 0, "memory_util_pct": 0, "encoder_util": 0, "decoder_util": 0,
    "util_period_us": 1000000, "temperature_c": 40, "slowdown_c": 90, "shutdown_c": 95, "power_w": 15,
    "energy_mj": 1000, "clock_sm_mhz": 210, "clock_memory_mhz": 405, "fan_pct": 30, "pstate": 8,
    "throttle": 1, "process_lists": 1, "process_utilization": 1, "display_active": 0, "compute_mode": 0,
    "persistence_mode": 1, "vbios": "94.02.5c.00.01", "event_types": CONSUMER_EVENTS,
}  # fmt: skip
_SERVER: dict[str, Any] = {
    "event_types": ALL_EVENTS, "ecc_mode": 1, "ecc_mode_pending": 1, "ecc_uncorrectable": 0,
    "ecc.0.0": 0, "remapped_rows": "0 0 0 0", "recovery_action": 0, "retired_pages_pending": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "rtx-a2000": {
        "name": "NVIDIA RTX A2000 12GB", "memory_total_mib": 12282, "memory_reserved_mib": 280,
        "compute_capability": "8.6", "architecture": 7, "cuda_cores": 3328, "power_limit_w": 70,
    },
    "rtx-4000-ada": {
        "name": "NVIDIA RTX 4000 Ada Generation", "memory_total_mib": 20475, "memory_reserved_mib": 420,
        "compute_capability": "8.9", "architecture": 8, "cuda_cores": 6144, "power_limit_w": 130,
    },
    "rtx-3070": {
        "name": "NVIDIA GeForce RTX 3070", "memory_total_mib": 8192, "memory_reserved_mib": 214,
        "compute_capability": "8.6", "architecture": 7, "cuda_cores": 5888, "power_limit_w": 220,
    },
    "l4": {
        "name": "NVIDIA L4", "memory_total_mib": 23034, "memory_reserved_mib": 490, "fan_pct": None,
        "compute_capability": "8.9", "architecture": 8, "cuda_cores": 7424, "power_limit_w": 72, **_SERVER,
    },
    "t4": {
        "name": "Tesla T4", "memory_total_mib": 15360, "memory_reserved_mib": 250, "fan_pct": None,
        "compute_capability": "7.5", "architecture": 6, "cuda_cores": 2560, "power_limit_w": 70, **_SERVER,
    },
    "a100-40": {
        "name": "NVIDIA A100-SXM4-40GB", "memory_total_mib": 40960, "memory_reserved_mib": 570, "fan_pct": None,
        "compute_capability": "8.0", "architecture": 7, "cuda_cores": 6912, "power_limit_w": 400,
        "mig_mode": 0, "mig_mode_pending": 0, "max_mig": 7, **_SERVER,
    },
    "a100-80": {
        "name": "NVIDIA A100 80GB PCIe", "memory_total_mib": 81920, "memory_reserved_mib": 770, "fan_pct": None,
        "compute_capability": "8.0", "architecture": 7, "cuda_cores": 6912, "power_limit_w": 300,
        "mig_mode": 0, "mig_mode_pending": 0, "max_mig": 7, **_SERVER,
    },
    "24gib": {
        "name": "NVIDIA GeForce RTX 3090", "memory_total_mib": 24576, "memory_reserved_mib": 300,
        "compute_capability": "8.6", "architecture": 7, "cuda_cores": 10496, "power_limit_w": 350,
    },
}  # fmt: skip
# JetPack 6 on Orin: a name and a UUID, nearly everything else NOT_SUPPORTED.
_ORIN: dict[str, Any] = {"name": "Orin (nvgpu)", "compute_capability": "8.7", "integrated": 1}
_THOR: dict[str, Any] = {
    "name": "NVIDIA Thor", "compute_capability": "11.0", "architecture": 10, "cuda_cores": 2560,
    "bus_id": "00000000:01:00.0", "minor": 0, "util_pct": 0, "temperature_c": 45, "process_lists": 1,
    "integrated": 1, "fan_pct": None,
}  # fmt: skip
_GB10: dict[str, Any] = {
    "name": "NVIDIA GB10", "compute_capability": "12.1", "architecture": 10, "cuda_cores": 6144,
    "bus_id": "0000000f:01:00.0", "minor": 0, "util_pct": 0, "temperature_c": 45, "power_w": 10,
    "process_lists": 1, "integrated": 1, "event_types": CONSUMER_EVENTS,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One call the library got. `gpu` is "-" for calls without a GPU, "?" for a handle it never gave."""

    symbol: str
    gpu: str
    mark: str = ""  # "lookup": asks for a handle; "stale": with a handle of an earlier nvmlInit


@dataclass(frozen=True)
class Mig:
    """A MIG device to create: as `nvidia-smi mig -cgi … -C` makes them."""

    profile: str = "1g.5gb"
    gi: int = 7
    ci: int = 0
    memory_mib: int = 4864
    gi_slices: int = 1
    ci_slices: int = 1
    multiprocessors: int = 14
    name: str | None = ""  # "": as the driver names it; None: not supported


@dataclass
class _Gpu:
    uuid: str
    readings: dict[str, Any]
    parent: str | None = None
    ids: tuple[int, int] = (0, 0)
    present: bool = True


@dataclass
class FakeNvml:
    """A scenario in `root`. Every method takes effect at the library's next call."""

    root: Path
    driver_version: str = "550.90.07"
    cuda_version: int = 12040
    enumerate: str = "init"  # "init": GPUs as they were at nvmlInit, as drivers do; "live": as they are
    old_driver: bool = False
    record_calls: bool = True
    sys: dict[str, Any] = field(default_factory=dict)
    gpus: list[_Gpu] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root = Path(self.root)
        (self.root / "log").mkdir(parents=True, exist_ok=True)
        shutil.copy(build.library(self.old_driver), self.library_path)
        (self.root / "events").touch()
        if self.record_calls:
            (self.root / "log" / "calls").touch()
        self._faults: dict[tuple[str, str], int] = {}
        self._hangs: set[tuple[str, str]] = set()
        self._processes: dict[tuple[str, str, int], list[tuple[int, int, int, int]]] = {}
        self._samples: dict[str, list[tuple[int, int, int]]] = {}
        self._links: list[tuple[str, int, int, str]] = []
        self._near: list[tuple[str, str, int]] = []
        self._used: dict[tuple[str, str], int] = {}
        self._last_sample_us = 0
        self._quiet = 0
        self._write()

    # ---- how it is loaded ----
    @property
    def library_path(self) -> Path:
        return self.root / build.NAME

    def env(self) -> dict[str, str]:
        """Environment in which unmodified nvidia-ml-py finds this library by its name."""
        rest = os.environ.get("LD_LIBRARY_PATH")
        return {"LD_LIBRARY_PATH": str(self.root) + (f":{rest}" if rest else "")}

    # ---- writing ----
    @contextlib.contextmanager
    def batch(self) -> Iterator[FakeNvml]:
        """Several changes that the library sees at once."""
        self._quiet += 1
        try:
            yield self
        finally:
            self._quiet -= 1
            self._write()

    def _write(self) -> None:
        if self._quiet:
            return
        out: list[str] = []
        system = {
            "driver_version": self.driver_version,
            "nvml_version": f"{self.cuda_version // 1000}.{self.driver_version}",
            "cuda_version": self.cuda_version,
            "enumerate": self.enumerate,
            **self.sys,
        }
        out += [f"sys {key} {value}" for key, value in system.items() if value is not None]
        for gpu in self.gpus:
            if not gpu.present:
                continue
            parent = gpu.parent
            out.append(f"mig {parent} {gpu.uuid} {gpu.ids[0]} {gpu.ids[1]}" if parent else f"gpu {gpu.uuid}")
            out += [f"set {gpu.uuid} {k} {v}" for k, v in gpu.readings.items() if v is not None]
        out += [f"err {symbol} {gpu} {code}" for (symbol, gpu), code in self._faults.items()]
        out += [f"hang {symbol} {gpu}" for symbol, gpu in sorted(self._hangs)]
        for (gpu_uuid, kind, _), entries in self._processes.items():
            out += [f"proc {gpu_uuid} {kind} {p} {used} {gi} {ci}" for p, used, gi, ci in entries]
        for gpu_uuid, samples in self._samples.items():
            out += [f"sample {gpu_uuid} {p} {ts} {sm} 0 0 0" for p, ts, sm in samples]
        out += [f"link {u} {n} {active} {remote}" for u, n, active, remote in self._links]
        out += [f"near {a} {b} {level}" for a, b, level in self._near]
        out += [f"used {u} {mib * MIB} {cgroup}" for (u, cgroup), mib in self._used.items()]
        fresh = self.root / f".state.{os.getpid()}"
        fresh.write_text("\n".join(out) + "\n", encoding="utf-8")
        fresh.rename(self.root / "state")

    # ---- GPUs ----
    def add(
        self, model: str = "rtx-a2000", uuid: str | None = None, bus: int | None = None, **readings: Any
    ) -> str:
        """Plugs in a card of a known model (MODELS, "orin", "thor", "gb10"); returns its UUID."""
        n = len([g for g in self.gpus if g.parent is None])
        number = 0x65 + n if bus is None else bus
        if uuid is None:
            plain = str(uuids.UUID(int=0xED6E0000000040008000000000000000 + number))
            uuid = plain if model == "orin" else f"GPU-{plain}"
        if model == "orin":
            base = dict(_ORIN)
        elif model in ("thor", "gb10"):
            base = dict(_THOR if model == "thor" else _GB10)
        else:
            base = {**_IDLE, **MODELS[model], "bus_id": f"00000000:{number:02X}:00.0", "minor": n}
        gpu = _Gpu(uuid, {})
        self.gpus.append(gpu)
        self._apply(gpu, {**base, **readings})
        self._write()
        return uuid

    @staticmethod
    def _apply(gpu: _Gpu, readings: dict[str, Any]) -> None:
        for name, value in readings.items():
            key, factor = READINGS.get(name, (name, 1))
            if name not in READINGS and name.split("_")[0] in ("threshold", "clock", "ecc", "field"):
                key = name if name.startswith("ecc_mode") else name.replace("_", ".")
            scaled = int(value * factor) if isinstance(value, (int, float)) else value
            gpu.readings[key] = scaled

    def gpu(self, uuid: str) -> _Gpu:
        return next(g for g in self.gpus if g.uuid == uuid)

    def set(self, uuid: str, **readings: Any) -> None:
        """Changes readings; None makes one NOT_SUPPORTED."""
        self._apply(self.gpu(uuid), readings)
        self._write()

    def remove(self, uuid: str) -> None:
        """Unplugs the card: its handles answer GPU_IS_LOST, a new nvmlInit no longer lists it."""
        self.gpu(uuid).present = False
        self._write()

    def insert(self, uuid: str) -> None:
        self.gpu(uuid).present = True
        self._write()

    def order(self, *uuids_in_order: str) -> None:
        """Renumbers: index and minor follow this order from the next nvmlInit on."""
        self.gpus.sort(key=lambda g: uuids_in_order.index(g.parent or g.uuid))
        cards = [g for g in self.gpus if g.parent is None]
        for n, gpu in enumerate(cards):
            if "minor" in gpu.readings:
                gpu.readings["minor"] = n
        self._write()

    def mig(self, uuid: str, *devices: Mig) -> list[str]:
        """MIG on, with these devices; without any, MIG on and empty. Returns their UUIDs."""
        gpu = self.gpu(uuid)
        self.gpus = [g for g in self.gpus if g.parent != uuid]
        self._apply(
            gpu, {"mig_mode": 1, "mig_mode_pending": 1, "util_pct": None, "process_utilization": None}
        )
        made = []
        for n, mig in enumerate(devices):
            child = f"MIG-{uuids.uuid5(uuids.NAMESPACE_OID, f'{uuid}/{mig.gi}/{mig.ci}/{n}')}"
            name = f"{gpu.readings['name']} MIG {mig.profile}" if mig.name == "" else mig.name
            readings = {
                "name": name,
                "memory_total": mig.memory_mib * MIB,
                "memory_used": 0,
                "attributes": f"{mig.multiprocessors} {mig.gi_slices} {mig.ci_slices} {mig.memory_mib}",
                "process_lists": 1,
            }
            self.gpus.append(_Gpu(child, readings, uuid, (mig.gi, mig.ci)))
            made.append(child)
        self._write()
        return made

    def mig_off(self, uuid: str) -> None:
        self.gpus = [g for g in self.gpus if g.parent != uuid]
        restored = {"mig_mode": 0, "mig_mode_pending": 0, "util_pct": 0, "process_utilization": 1}
        self._apply(self.gpu(uuid), restored)
        self._write()

    # ---- processes ----
    def processes(
        self,
        uuid: str,
        compute: Sequence[tuple[int, float | None]] = (),
        graphics: Sequence[tuple[int, float | None]] = (),
        mps: Sequence[tuple[int, float | None]] = (),
        gi: int = 0xFFFFFFFF,
        ci: int = 0xFFFFFFFF,
    ) -> None:
        """Replaces the three lists of a GPU (of one MIG instance): (pid, MiB); None: not available."""
        for kind, entries in (("compute", compute), ("graphics", graphics), ("mps", mps)):
            self._processes[uuid, kind, gi] = [
                (pid, -1 if used is None else int(used * MIB), gi, ci) for pid, used in entries
            ]
        self._write()

    def samples(self, uuid: str, sm_pct_by_pid: dict[int, int]) -> None:
        """New utilisation samples, stamped now."""
        self._last_sample_us = max(self._last_sample_us + 1, int(time.time() * 1e6))
        self._samples[uuid] = [(pid, self._last_sample_us, sm) for pid, sm in sm_pct_by_pid.items()]
        self._write()

    def process_name(self, pid: int, name: str) -> None:
        self.sys[f"process.{pid}"] = name
        self._write()

    # ---- faults ----
    def error(self, symbol: str, code: int, gpu: str = "*") -> None:
        """`symbol` ("*": every) answers `code` on `gpu` (default: everywhere)."""
        self._faults[symbol, gpu] = code
        self._write()

    def clear_errors(self) -> None:
        self._faults.clear()
        self._write()

    def lose(self, uuid: str, code: int = GPU_IS_LOST) -> None:
        """The card falls off the bus: `code` from its getters, its lookup, and from the event wait."""
        self.set(uuid, lost=code)

    def require_reset(self, uuid: str) -> None:
        self.lose(uuid, RESET_REQUIRED)

    def recover(self, uuid: str) -> None:
        self.set(uuid, lost=None)

    def all_calls(self, code: int | None) -> None:
        """Every call answers `code`, as after a driver upgrade; None: as before."""
        self.sys["all"] = code
        self._write()

    def init_error(self, code: int | None) -> None:
        """nvmlInit answers `code`; None: as before. Handles that exist go on working."""
        self.sys["init"] = code
        self._write()

    def hang(self, symbol: str, gpu: str = "*") -> None:
        """Calls of `symbol` do not return until `release`."""
        self._hangs.add((symbol, gpu))
        self._write()

    def release(self) -> None:
        self._hangs.clear()
        self._write()

    # ---- events ----
    def event(
        self, uuid: str, event_type: int, data: int = 0, gi: int = 0xFFFFFFFF, ci: int = 0xFFFFFFFF
    ) -> None:
        with open(self.root / "events", "a", encoding="utf-8") as f:
            f.write(f"{uuid} {event_type} {data} {gi} {ci}\n")

    def xid(self, uuid: str, number: int) -> None:
        self.event(uuid, EVENT_XID, number)

    # ---- topology ----
    def near(self, a: str, b: str, level: str) -> None:
        """Common PCI ancestor of two cards: a key of TOPOLOGY."""
        self._near.append((a, b, TOPOLOGY[level]))
        self._write()

    def nvlink(self, a: str, b: str | None, links: int) -> None:
        """`links` active NVLinks from `a` to `b` (None: to a switch), both directions."""
        for here, there in ((a, b), (b, a)):
            if here is None:
                continue
            first = sum(1 for entry in self._links if entry[0] == here)
            remote = self.gpu(there).readings["bus_id"] if there else "00000000:C1:00.0"
            self._links += [(here, first + i, 1, remote) for i in range(links)]
        self._write()

    # ---- compute mode ----
    def compute_mode(self, uuid: str) -> int:
        """0 default, 3 exclusive process, as last set."""
        try:
            lines = (self.root / "modes").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            lines = []
        own = [int(line.split()[1]) for line in lines if line.split()[0] == uuid]
        return own[-1] if own else int(self.gpu(uuid).readings["compute_mode"])

    def set_compute_mode(self, uuid: str, mode: int) -> None:
        """Somebody runs nvidia-smi -c."""
        with open(self.root / "modes", "a", encoding="utf-8") as f:
            f.write(f"{uuid} {mode}\n")

    # ---- memory limits per cgroup ----
    def memory_limits_supported(self, supported: bool = True) -> None:
        self.sys["memory_limits"] = int(supported)
        self._write()

    def limits(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(GPU, cgroup directory) -> (soft, hard) in bytes, as last set."""
        try:
            lines = (self.root / "limits").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return {}
        out = {}
        for line in lines:
            gpu, soft, hard, cgroup = line.split(" ", 3)
            out[gpu, cgroup] = (int(soft), int(hard))
        return out

    def cgroup_uses(self, uuid: str, cgroup: str, mib: int) -> None:
        self._used[uuid, cgroup] = mib
        self._write()

    # ---- what was called ----
    def mark(self) -> int:
        """A position in the call log, for `calls(since=…)`."""
        return (self.root / "log" / "calls").stat().st_size

    def calls(self, since: int = 0, symbol: str | None = None, gpu: str | None = None) -> list[Call]:
        with open(self.root / "log" / "calls", encoding="utf-8") as f:
            f.seek(since)
            found = [Call(*line.split()) for line in f if line.endswith("\n")]
        return [c for c in found if symbol in (None, c.symbol) and gpu in (None, c.gpu)]
