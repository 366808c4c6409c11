"""What a mechanism that makes shares real looks like to the rest of the agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from edgeagent.gpus.model import Gpu
from edgeagent.isolation.levels import Axis, AxisLevel, Level
from edgeagent.node.cdi import ContainerEdits


@dataclass(frozen=True, slots=True)
class ShareToEnforce:
    """One container's share. `memory_mib` is the limit in MiB; `cores_pct` None: compute uncapped.
    `pod_cgroup` is the pod's cgroup directory on the host (`/sys/fs/cgroup/kubepods.slice/…`), or
    None where it was not found. Where binding is early a share is prepared twice: in Allocate, when
    neither pod nor cores are known yet (`pod_uid` ""), for what the container is given; and when it
    starts, for the limits."""

    pod_uid: str
    container: str
    share: str  # CDI device name, unique on the node while the container lives
    gpu: Gpu
    memory_mib: int
    cores_pct: int | None
    pod_cgroup: str | None = None

    @property
    def early(self) -> bool:
        """It is not known yet for which container this is."""
        return not self.pod_uid


@dataclass(frozen=True, slots=True)
class RunningContainer:
    """What is seen of a container after its start: its cgroup leaf and processes (host PIDs)."""

    container_id: str | None
    cgroup: str | None
    pids: tuple[int, ...]
    gpu_pids: tuple[int, ...] = ()  # those the driver lists on the share's GPU
    used_mib: float | None = None  # 0.0: the driver lists none of its processes; None: it lists nothing
    mps_pids: frozenset[int] = frozenset()  # of gpu_pids: clients of an MPS daemon


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a start-up probe of a mechanism on one GPU showed. `level` NONE: it cannot be used,
    `problem` says why and what would help."""

    level: Level
    evidence: str
    problem: str | None = None


class IsolationBackend(Protocol):
    """One mechanism. Only IsolationError leaves it; no method may block longer than a second.
    Methods are called from several threads."""

    name: str
    axes: frozenset[Axis]

    def probe(self, gpu: Gpu, axis: Axis) -> ProbeResult:
        """Whether the mechanism works for this GPU on this axis, from a real try."""

    def prepare(self, share: ShareToEnforce, axes: frozenset[Axis]) -> ContainerEdits:
        """Before the container starts: files, cgroup calls, and what the container must be given.
        Called again for the same share at every start and retry: idempotent. `axes`: those this
        mechanism is in charge of. Raises IsolationError: the container must not start."""

    def evidence(self, share: ShareToEnforce, running: RunningContainer, axis: Axis) -> AxisLevel:
        """What supports the claim for this container now; a lower level with a reason otherwise."""

    def release(self, share: ShareToEnforce) -> None:
        """After the container's end: takes back files and limits. Idempotent, and called also for
        shares that this mechanism never prepared."""

    def close(self) -> None: ...


@runtime_checkable
class AdoptsShares(Protocol):
    """A mechanism that must know of shares whose containers were started before this agent was."""

    def adopt(self, share: ShareToEnforce) -> None:
        """The share is in force already. Called before anything is prepared or released."""
