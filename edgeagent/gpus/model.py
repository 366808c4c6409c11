"""The vocabulary of GPUs: what one is, what a reading of one holds, what can happen to it.

Everything is frozen. An optional value that the hardware or driver does not give is None, never 0.
MiB is 2**20 bytes, temperatures are degrees Celsius, power is watts, percentages are 0 to 100.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class GpuKind(str, Enum):
    DISCRETE = "discrete"
    INTEGRATED = "integrated"  # shares the host's RAM: Jetson, GB10


class GpuFault(str, Enum):
    """Why a whole GPU, or the library that reads it, does not answer."""

    LOST = "lost"  # fallen off the bus (NVML 15)
    RESET_REQUIRED = "reset_required"  # NVML 16
    DRIVER_MISMATCH = "driver_mismatch"  # NVML 18: library and kernel module differ
    DRIVER_NOT_LOADED = "driver_not_loaded"  # NVML 9
    LIBRARY_MISSING = "library_missing"  # NVML 12, or no libnvidia-ml.so.1
    NO_PERMISSION = "no_permission"  # NVML 4
    UNRESPONSIVE = "unresponsive"  # a call did not return within its deadline
    NOT_FOUND = "not_found"  # known before, not there now
    LOST_DEVICE_ACCESS = "lost_device_access"  # this container lost its device nodes (daemon-reload)
    FAILED = "failed"  # anything else


@dataclass(frozen=True, slots=True)
class MigInstance:
    """One MIG GPU instance with its compute instance, as NVML lists it."""

    uuid: str
    profile: str  # "1g.5gb": as in nvidia.com/mig-1g.5gb
    gpu_instance_id: int
    compute_instance_id: int
    memory_mib: int | None = None
    device_nodes: tuple[str, ...] = ()  # capability nodes (/dev/nvidia-caps/…) beside the GPU's own


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's identity and what does not change while it is plugged in.

    `uuid` is the identity everywhere; `index` is only where the driver lists it at the moment.
    `memory_reserved_mib` is what the driver keeps for itself (None: not reported).
    `device_nodes` are host paths that exist on this host (empty under WSL).
    `facts` are further strings for people: l4t, jetpack, module, soc, architecture, …
    """

    uuid: str
    index: int
    kind: GpuKind
    source: str  # "nvml" | "tegra" | "simulated"
    model: str
    memory_total_mib: int
    memory_reserved_mib: int | None = None
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    pci_address: str | None = None  # "0000:65:00.0", lower case
    numa_node: int | None = None
    minor: int | None = None
    device_nodes: tuple[str, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    vbios_version: str | None = None
    mig_enabled: bool | None = None  # None: no MIG on this GPU
    mig_instances: tuple[MigInstance, ...] = ()
    temperature_slowdown_c: float | None = None
    temperature_shutdown_c: float | None = None
    power_limit_w: float | None = None
    display_active: bool | None = None
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def unified_memory(self) -> bool:
        return self.kind is GpuKind.INTEGRATED


class ProcessType(str, Enum):
    COMPUTE = "compute"
    GRAPHICS = "graphics"
    MPS = "mps"


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One process on one GPU: listed once per PID even if it is in several of the driver's lists
    (largest memory wins). `pid` is in the host's PID namespace."""

    pid: int
    types: frozenset[ProcessType]
    used_mib: float | None = None
    sm_util_pct: float | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What one poll saw. `taken_mono_s` is time.monotonic() when the poll ended.

    `fault` is set when the GPU as a whole did not answer; then the other values are None.
    `memory_used_mib` excludes what the driver reserves, so that it compares with limits.
    `throttle_reasons`: "thermal_hw", "thermal_sw", "power_brake", "power_cap", "oc", "idle", ….
    """

    uuid: str
    taken_mono_s: float
    fault: GpuFault | None = None
    fault_detail: str | None = None
    memory_used_mib: float | None = None
    memory_free_mib: float | None = None
    util_pct: float | None = None
    memory_util_pct: float | None = None
    encoder_util_pct: float | None = None
    decoder_util_pct: float | None = None
    temperature_c: float | None = None
    temperatures_c: Mapping[str, float] = field(default_factory=dict)  # further zones by name
    power_w: float | None = None
    rails_w: Mapping[str, float] = field(default_factory=dict)  # Jetson power rails by name
    energy_mj: float | None = None
    clock_sm_mhz: float | None = None
    clock_memory_mhz: float | None = None
    fan_pct: float | None = None
    throttle_reasons: frozenset[str] | None = None
    ecc_uncorrectable: int | None = None  # since driver load
    row_remap_failed: bool | None = None
    row_remap_pending: bool | None = None
    recovery_action: str | None = None  # "none" | "reset" | "reboot" | "drain" | …
    power_mode: str | None = None  # nvpmodel name on Jetson
    overcurrent_events: int | None = None
    host_memory_available_mib: float | None = None  # unified memory only
    host_swap_used_mib: float | None = None  # unified memory only
    processes: tuple[GpuProcess, ...] | None = None  # None: the driver does not list them


class GpuEventKind(str, Enum):
    XID = "xid"
    ECC_DOUBLE_BIT = "ecc_double_bit"
    ECC_SINGLE_BIT = "ecc_single_bit"
    RECOVERY_ACTION = "recovery_action"
    UNAVAILABLE = "unavailable"
    CLOCK = "clock"
    MIG_CONFIG = "mig_config"  # MIG instances were made or removed: look for GPUs afresh
    DRIVER_ERROR = "driver_error"  # a driver's error line in the kernel log that carries no XID


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """Something the driver told us. `uuid` None: the event names no GPU we know."""

    kind: GpuEventKind
    uuid: str | None
    xid: int | None = None
    detail: str | None = None
    source: str = "nvml"  # "nvml" | "kernel_log" | "simulated"


@dataclass(frozen=True, slots=True)
class GpuLink:
    """How two GPUs of the node are joined, closest first: "nvlink" (with the number of links),
    "board", "pix" (one PCIe switch), "pxb" (several), "phb" (host bridge), "node" (NUMA node), "sys"."""

    kind: str
    nvlinks: int = 0

    @property
    def closeness(self) -> int:
        """Higher is closer; any NVLink beats any PCIe path."""
        order = ("sys", "node", "phb", "pxb", "pix", "board")
        return 10 * self.nvlinks if self.kind == "nvlink" else order.index(self.kind)


Topology = Mapping[frozenset[str], GpuLink]
"""Pairs of UUIDs; a pair of which nothing is known is absent."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The GPUs found, and why. `evidence` says in order what was looked at and what it showed;
    `problem` is one sentence when no GPU can be offered (with `fault` as its machine form), or when a
    card beside a Jetson's own GPU cannot be."""

    gpus: tuple[Gpu, ...]
    evidence: tuple[str, ...] = ()
    problem: str | None = None
    fault: GpuFault | None = None


class GpuBackend(Protocol):
    """How one kind of GPU is found and read. Calls may be slow or hang: the callers run them where
    that hurts nobody. Only GpuError leaves a back end; `read` of a sick GPU does not raise, it
    returns a reading with `fault`. Methods may be called from different threads."""

    name: str

    def inventory(self) -> Inventory:
        """Looks for GPUs afresh (re-initialising the library where that is needed)."""

    def read(self, uuid: str) -> GpuReading:
        """One poll of one GPU from the last inventory. A GPU known to be lost is not touched again
        until `inventory` found it anew."""

    def wait_event(self, timeout_s: float) -> GpuEvent | None:
        """Blocks up to `timeout_s` for the next event; None when none came. Never spins: where
        waiting fails or is not supported, it sleeps out the timeout on an event that `wake` sets."""

    def wake(self) -> None:
        """Makes a `wait_event` in another thread return soon."""

    def close(self) -> None:
        """Releases the library. Idempotent."""


class CgroupMemoryLimiter(Protocol):
    """Driver-enforced memory limits per cgroup (NVML r615+): implemented by the NVML back end.
    Raises GpuError; `fault` "not_supported" where the driver lacks it."""

    def set_memory_limits(self, uuid: str, cgroup_dir: str, soft_mib: int, hard_mib: int | None) -> None:
        """`cgroup_dir` is the cgroup's directory as the host names it; `hard_mib` None: no limit."""

    def get_memory_limits(self, uuid: str, cgroup_dir: str) -> tuple[int, int | None, int]:
        """(soft MiB, hard MiB or None for no limit, bytes in use now)."""


class ComputeModes(Protocol):
    """Who may use a GPU for compute at the same time: "default" (everybody), "exclusive_process" (one
    process: with MPS its server), "exclusive_thread", "prohibited". Implemented by the NVML back end.
    Raises GpuError; `fault` "not_supported" where the GPU has no such modes. Setting needs root and is
    lost at the next reboot."""

    def get_compute_mode(self, uuid: str) -> str: ...

    def set_compute_mode(self, uuid: str, mode: str) -> None: ...
