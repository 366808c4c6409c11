"""The YAML files of simulated GPUs: what a node looks like, what is wrong with it, what runs on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgeagent.config.loader import load_as, read_file
from edgeagent.config.schema import key
from edgeagent.errors import ConfigError

PROFILES = Path(__file__).parent / "profiles"

FAULTS = (
    "lost", "reset_required", "driver_mismatch", "driver_not_loaded", "no_permission",
    "unresponsive", "hot", "throttle", "power_brake", "ecc", "row_remap", "xid",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProfileGpu:
    """One kind of GPU in a profile; `count` of them."""

    model: str = key("Simulated GPU")
    count: int = key(1, low=1, high=64)
    kind: str = key("discrete", choices=("discrete", "integrated"))
    memory_total_mib: int = key(8192, low=1, yaml="memoryTotalMiB")
    memory_reserved_mib: int | None = key(None, low=0, yaml="memoryReservedMiB")
    compute_capability: str | None = key(None, pattern=r"^\d+\.\d+$", form="a version like 8.6")
    architecture: str | None = key(None)
    multiprocessors: int | None = key(None, low=1)
    power_idle_w: float = key(8.0, low=0, yaml="powerIdleW")
    power_limit_w: float = key(75.0, low=1, yaml="powerLimitW")
    power_mode: str | None = key(None)
    temperature_idle_c: float = key(36.0, low=-40, high=150, yaml="temperatureIdleC")
    temperature_busy_c: float = key(74.0, low=-40, high=150, yaml="temperatureBusyC")
    temperature_slowdown_c: float = key(90.0, low=0, high=150, yaml="temperatureSlowdownC")
    temperature_shutdown_c: float = key(95.0, low=0, high=150, yaml="temperatureShutdownC")
    clock_sm_max_mhz: float = key(1800.0, low=1, yaml="clockSmMaxMHz")
    clock_memory_mhz: float = key(5000.0, low=1, yaml="clockMemoryMHz")
    fan: bool = key(False)
    ecc: bool = key(False)
    facts: dict[str, str] = key(factory=dict)


@dataclass(frozen=True, slots=True)
class Profile:
    gpus: tuple[ProfileGpu, ...] = key(())
    link: str = key("sys", choices=("sys", "node", "phb", "pxb", "pix"), doc="Between any two of the GPUs.")
    driver_version: str = key("simulated")

    def check(self) -> list[str]:
        return [] if self.gpus else ["gpus: at least one is needed"]


@dataclass(frozen=True, slots=True)
class Fault:
    """`gpu`: a UUID, an index, or `all`. Seconds count from when the entry is first seen."""

    gpu: str = key("all")
    fault: str = key("lost", choices=FAULTS)
    xid: int | None = key(None, low=0)
    after_seconds: float = key(0.0, low=0)
    for_seconds: float | None = key(None, low=0, doc="Default: while the entry is in the file.")

    def check(self) -> list[str]:
        if (self.fault == "xid") != (self.xid is not None):
            return ["fault: xid and xid: NUMBER go together"]
        return []


@dataclass(frozen=True, slots=True)
class Faults:
    faults: tuple[Fault, ...] = key(())


@dataclass(frozen=True, slots=True)
class SimulatedProcess:
    """A process on a simulated GPU (`gpu`: UUID or index). It uses a moving part of its share, or
    `used_mib` exactly."""

    pid: int = key(1, low=1)
    gpu: str = key("0")
    name: str = key("python3")
    share_mib: int = key(0, low=0, yaml="shareMiB")
    cores_pct: float = key(100.0, low=0, high=100)
    used_mib: float | None = key(None, low=0, yaml="usedMiB")


@dataclass(frozen=True, slots=True)
class Processes:
    processes: tuple[SimulatedProcess, ...] = key(())


def load_profile(name: str) -> Profile:
    """A shipped profile by its name, or a file. Raises ConfigError."""
    path = Path(name)
    if "/" not in name and not name.endswith((".yaml", ".yml")):
        path = PROFILES / f"{name}.yaml"
        if not path.exists():
            known = ", ".join(sorted(p.stem for p in PROFILES.glob("*.yaml")))
            raise ConfigError(f"gpus.simulated.profile: no profile {name!r} (there are: {known})")
    return load_as(Profile, read_file(path), str(path))


def load_faults(path: str) -> tuple[Fault, ...]:
    return load_as(Faults, read_file(path), path).faults


def load_processes(path: str) -> tuple[SimulatedProcess, ...]:
    return load_as(Processes, read_file(path), path).processes
