"""What the node's labels say about its GPUs: GPU feature discovery's names where it has one, so that
nodeSelectors and dashboards made for it work, and edgeagent.io/* for the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping

from edgeagent.gpus.model import Gpu
from edgeagent.isolation.levels import Axis, Level
from edgeagent.snapshot import GpuMode, NodeSnapshot

PREFIX = "edgeagent.io/"
# Where GPU feature discovery itself runs, its labels are its own.
GFD_MARK = "nvidia.com/gfd.timestamp"
GFD_KEYS = frozenset(
    f"nvidia.com/{name}"
    for name in (
        "gpu.present", "gpu.count", "gpu.product", "gpu.memory", "gpu.family", "gpu.machine",
        "gpu.compute.major", "gpu.compute.minor", "gpu.replicas", "gpu.sharing-strategy", "mig.capable",
        "cuda.driver-version.full", "cuda.driver-version.major", "cuda.driver-version.minor",
        "cuda.driver-version.revision",
    )
)  # fmt: skip


def label_value(text: str) -> str:
    """The text as a label value: at most 63 of [A-Za-z0-9._-], beginning and ending alphanumeric."""
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:63]
    return clean.strip("-._")


def node_labels(s: NodeSnapshot) -> dict[str, str]:
    """Every label the node should have from us."""
    labels = {f"{PREFIX}health": s.health.value, f"{PREFIX}binding": s.binding}
    present = [g for g in s.gpus if g.present]
    labels[f"{PREFIX}gpu.healthy"] = str(sum(g.health.value != "sick" for g in present))
    if any(g.mode is GpuMode.SHARED for g in present):
        labels[f"{PREFIX}memory-unit-mib"] = str(s.memory_unit_mib)
    modes = sorted({g.mode.value for g in present})
    if modes:
        labels[f"{PREFIX}mode"] = ".".join(modes)
    kinds = sorted({g.gpu.kind.value for g in present})
    if kinds:
        labels[f"{PREFIX}gpu.kind"] = ".".join(kinds)
    for axis in Axis:
        shared = [getattr(g.levels, axis.value) for g in present if g.mode is GpuMode.SHARED]
        if shared:
            weakest = min((level.level for level in shared), key=lambda level: level.strength)
            labels[f"{PREFIX}isolation.{axis.value}"] = Level(weakest).value
    labels |= _gfd(s)
    return {key: value for key, value in labels.items() if value}


def _gfd(s: NodeSnapshot) -> dict[str, str]:
    present = [g for g in s.gpus if g.present]
    if not present:
        return {}
    first = present[0]
    gpu: Gpu = first.gpu
    replicas = 1
    strategy = "none"
    if first.mode is GpuMode.TIMESLICE:
        strategy = "time-slicing"
        offered = next((r.total for r in s.resources if r.kind == "timeslice"), 0)
        timesliced = sum(g.mode is GpuMode.TIMESLICE for g in present)
        replicas = max(1, offered // timesliced)
    labels = {
        "gpu.present": "true",
        "gpu.count": str(len(present)),
        "gpu.product": label_value(gpu.model + ("-SHARED" if strategy == "time-slicing" else "")),
        "gpu.memory": str(gpu.memory_total_mib),
        "gpu.family": label_value(gpu.facts.get("architecture", "")),
        "gpu.machine": label_value(s.host.facts.get("hardware", "")),
        "gpu.replicas": str(replicas),
        "gpu.sharing-strategy": strategy,
        "mig.capable": str(any(g.gpu.mig_enabled is not None for g in present)).lower(),
    }
    if gpu.compute_capability is not None:
        labels["gpu.compute.major"], labels["gpu.compute.minor"] = map(str, gpu.compute_capability)
    if gpu.driver_version:
        labels["cuda.driver-version.full"] = label_value(gpu.driver_version)
        for name, part in zip(("major", "minor", "revision"), gpu.driver_version.split("."), strict=False):
            labels[f"cuda.driver-version.{name}"] = label_value(part)
    return {f"nvidia.com/{name}": value for name, value in labels.items()}


def label_patch(current: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str | None]:
    """The merge patch from the node's labels to ours: only differences; None removes what we no longer
    want. Labels of GPU feature discovery are left alone where it runs."""
    foreign = GFD_KEYS if GFD_MARK in current else frozenset()
    ours = {key for key in current if key.startswith(PREFIX) or key in GFD_KEYS}
    patch: dict[str, str | None] = {k: v for k, v in wanted.items() if current.get(k) != v}
    patch |= dict.fromkeys(ours - wanted.keys())
    return {key: value for key, value in patch.items() if key not in foreign}
