"""One picture of the node: the same numbers for status, metrics, `top` and the fleet uplink.

The agent builds a NodeSnapshot; whoever shows or sends something reads it and nothing else. So a
pod's limit, its use, what is free and who is sick cannot differ between two places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from edgeagent.gpus.model import Gpu, GpuReading
from edgeagent.isolation.levels import Levels
from edgeagent.sharing.modes import GpuMode as GpuMode  # part of this vocabulary, decided there


class NodeState(str, Enum):
    READY = "ready"
    DRAINING = "draining"
    OFFLINE = "offline"
    LOST = "lost"


class Health(str, Enum):
    OK = "ok"
    DEGRADED = "degraded"
    SICK = "sick"


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of a GPU or of the node that is true now. `id` is stable for the same trouble
    ("xidfatal-gpu-1a2b"): the alert's topic and key. Times are unix milliseconds."""

    id: str
    type: str  # "Lost", "XidFatal", "OverTemperature", "KubeletDown", …
    severity: str  # "info" | "warning" | "critical"
    since_ms: int
    message: str  # one sentence for a person, with what to do
    gpu_uuid: str | None = None
    makes_unhealthy: bool = False  # shares of the GPU are withdrawn while it holds
    facts: Mapping[str, str | int | float] = field(default_factory=dict)
    pods_hurt: tuple[str, ...] = ()  # as ContainerShare.pod_label


@dataclass(frozen=True, slots=True)
class ContainerShare:
    """One container that holds a share, bound to a GPU.

    `memory_mib` is the limit; None: no memory limit (exclusive card). `cores_pct` None: compute
    uncapped. `used_mib`/`util_pct` None: not known. `namespace`/`pod` None: not learnt yet.
    """

    pod_uid: str
    container: str
    gpu_uuid: str
    mode: GpuMode
    namespace: str | None = None
    pod: str | None = None
    share: str | None = None  # CDI device name
    memory_mib: int | None = None
    cores_pct: int | None = None
    used_mib: float | None = None
    util_pct: float | None = None
    levels: Levels = Levels()
    since_ms: int | None = None
    running: bool | None = None
    over_limit: bool = False
    leftover_mib: int = 0  # ID ranges kept by the kubelet for the pod beyond this container's limit

    @property
    def pod_label(self) -> str:
        """'namespace/pod', or 'pod UID' as long as the name is not known."""
        return f"{self.namespace}/{self.pod}" if self.namespace and self.pod else f"pod {self.pod_uid}"


@dataclass(frozen=True, slots=True)
class WaitingContainer:
    """A container whose start is held until there is room."""

    pod_uid: str
    container: str
    reason: str
    since_ms: int
    memory_mib: int
    cores_pct: int | None = None
    namespace: str | None = None
    pod: str | None = None
    permanent: bool = False  # it can never fit on this node


@dataclass(frozen=True, slots=True)
class HostUse:
    """GPU memory used by processes that belong to no pod."""

    used_mib: float
    processes: tuple[tuple[int, str, float | None], ...] = ()  # (pid, name, MiB)


@dataclass(frozen=True, slots=True)
class GpuState:
    """A GPU with everything known about it now. `usable_mib` is what may be promised, `promised_mib`
    what is bound to containers, `free_mib` what a new container may get here (0 when sick,
    cordoned or not shared)."""

    gpu: Gpu
    mode: GpuMode
    health: Health
    usable_mib: int
    reserved_mib: int
    promised_mib: int
    free_mib: int
    promised_cores_pct: int
    free_cores_pct: int
    cordoned: bool = False
    present: bool = True
    reading: GpuReading | None = None
    levels: Levels = Levels()
    conditions: tuple[Condition, ...] = ()
    host_use: HostUse | None = None
    unattributed_mib: float | None = None
    withdrawn_mib: int = 0  # of usable_mib: not promised to anybody new, because the host uses it


@dataclass(frozen=True, slots=True)
class ResourceState:
    """One extended resource as offered to the kubelet. `problem` set: not offered, and why."""

    name: str  # "volcano.sh/vgpu-memory"
    kind: str  # "memory" | "cores" | "number" | "exclusive" | "timeslice" | "mig"
    unit_mib: int | None
    total: int
    healthy: int
    allocated: int
    registered: bool
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The box itself. Optional values are None where the host does not tell."""

    hostname: str
    machine: str  # "x86_64" | "aarch64"
    os: str | None = None
    kernel: str | None = None
    k3s_version: str | None = None
    kubelet_version: str | None = None
    boot_id: str | None = None
    memory_total_mib: int | None = None
    memory_available_mib: int | None = None
    load_1m: float | None = None
    cpu_count: int | None = None
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UplinkState:
    """The MQTT side as seen from here. `queued`/`queued_bytes`: the outbox."""

    enabled: bool
    connected: bool = False
    broker: str | None = None
    since_ms: int | None = None
    last_puback_age_s: float | None = None
    queued: int = 0
    queued_bytes: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    reconnects: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """The whole node at `taken_ms` (unix ms)."""

    node: str
    site: str
    agent_version: str
    config_hash: str
    started_ms: int
    taken_ms: int
    state: NodeState
    health: Health
    reasons: tuple[str, ...]  # one sentence each; empty when all is well
    gpus: tuple[GpuState, ...]
    containers: tuple[ContainerShare, ...]
    waiting: tuple[WaitingContainer, ...]
    resources: tuple[ResourceState, ...]
    host: HostFacts
    uplink: UplinkState
    conditions: tuple[Condition, ...] = ()  # of the node; those of GPUs are in gpus[].conditions
    binding: str = "late"  # "late" | "early"
    memory_unit_mib: int = 1
    kubelet_connected: bool = False
    evidence: tuple[str, ...] = ()  # of GPU detection
    counters: Mapping[str, int] = field(default_factory=dict)  # allocations_total, refusals_total, …

    def containers_on(self, gpu_uuid: str) -> tuple[ContainerShare, ...]:
        return tuple(c for c in self.containers if c.gpu_uuid == gpu_uuid)

    @property
    def largest_free_mib(self) -> int:
        return max((g.free_mib for g in self.gpus), default=0)
