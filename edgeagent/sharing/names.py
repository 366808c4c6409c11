"""The names of the resources that a node offers, and where two meanings of one name would collide."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

VOLCANO_PREFIX = "volcano.sh"
NVIDIA_PREFIX = "nvidia.com"
GPU = f"{NVIDIA_PREFIX}/gpu"
GPU_SHARED = f"{GPU}.shared"


@dataclass(frozen=True, slots=True)
class ResourceNames:
    """Full names of the shared mode's resources. `memory` carries the unit unless it is 1 MiB;
    `memory_in_mib` is the name in which pod authors write MiB (the same where the unit is 1)."""

    scheme: str  # "volcano" | "hami" | "custom"
    memory: str
    cores: str
    number: str
    memory_in_mib: str
    unit_mib: int

    @property
    def rewritten(self) -> bool:
        """True where authors' MiB need the admission policy that rewrites them into units."""
        return self.memory != self.memory_in_mib

    @property
    def note(self) -> str | None:
        """What people should know about the unit in the name."""
        if not self.rewritten:
            return None
        return (
            f"{self.memory_in_mib} is offered as {self.memory} (units of {self.unit_mib} MiB): manifests "
            f"that write {self.memory_in_mib} need the admission policy that rewrites it"
        )


def resource_names(scheme: str, *, prefix: str | None = None, unit_mib: int = 1) -> ResourceNames:
    """`scheme`: "volcano", "hami" or "custom" (then `prefix` is used). ValueError for anything else."""
    if scheme == "hami":
        memory, cores, number = (f"{NVIDIA_PREFIX}/{n}" for n in ("gpumem", "gpucores", "gpu"))
    elif scheme == "volcano" or (scheme == "custom" and prefix):
        base = VOLCANO_PREFIX if scheme == "volcano" else prefix
        memory, cores, number = (f"{base}/{n}" for n in ("vgpu-memory", "vgpu-cores", "vgpu-number"))
    else:
        raise ValueError(f"no resource names for scheme {scheme!r} with prefix {prefix!r}")
    offered = memory if unit_mib == 1 else f"{memory}-{unit_mib}mi"
    return ResourceNames(scheme, offered, cores, number, memory, unit_mib)


def timeslice_name(base: str, *, renamed: bool) -> str:
    """A replicated resource's name: as it is, or "….shared" (NVIDIA's renameByDefault)."""
    return f"{base}.shared" if renamed else base


def mig_name(profile: str) -> str:
    """nvidia.com/mig-1g.5gb for 1g.5gb; a '+', which resource names cannot carry, becomes a dot, as in
    NVIDIA's plugin (nvidia.com/mig-1g.5gb.me)."""
    return f"{NVIDIA_PREFIX}/mig-{profile.replace('+', '.')}"


def collisions(
    names: ResourceNames | None, exclusive: Collection[str], timeslice: Collection[str]
) -> list[str]:
    """One sentence for each name that would mean two things on this node.

    `names`: those of the shared mode, None where no GPU is shared; `exclusive` and `timeslice`: the
    resource names that GPUs in those modes are offered under.
    """
    problems = []
    for mode, used in (("exclusive", set(exclusive)), ("timeslice", set(timeslice))):
        if names is not None and names.number in used:
            remedy = (
                "set timeSlicing.renameByDefault: true, or use names: volcano"
                if mode == "timeslice"
                else "use names: volcano, or put these GPUs on different nodes"
            )
            problems.append(
                f"{names.number} cannot mean a share (names: {names.scheme}) and a GPU in mode {mode} on one "
                f"node: {remedy}"
            )
    for name in sorted(set(exclusive) & set(timeslice)):
        problems.append(
            f"{name} cannot mean a whole GPU (mode exclusive) and a replica (mode timeslice) on one node: "
            f"set timeSlicing.renameByDefault: true"
        )
    return problems
