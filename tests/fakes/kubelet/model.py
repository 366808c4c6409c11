"""Pods, containers, events and the node, as an API server knows them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.fakes.kubelet import quantity

if TYPE_CHECKING:
    from tests.fakes.kubelet.runtime import Instance

_created = itertools.count()


@dataclass(frozen=True)
class ContainerSpec:
    """What the author of a pod writes. `limits` are Kubernetes quantities ("8k", 100, "512Mi")."""

    name: str
    limits: Mapping[str, str | int] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    image_env: Mapping[str, str] = field(default_factory=dict)  # what the image sets (CUDA images do)
    sidecar: bool = False  # of an init container: restartPolicy: Always
    run_s: float | None = None  # exits by itself with code 0 after this; None: runs until told otherwise

    def amounts(self) -> dict[str, int]:
        return {resource: quantity.parse(amount) for resource, amount in self.limits.items()}


class Container:
    """A container's state. What it was given (env, devices, mounts) is read from its latest start."""

    def __init__(self, spec: ContainerSpec, role: str) -> None:
        self.spec = spec
        self.name = spec.name
        self.role = role  # "init" | "sidecar" | "app"
        self.state = "waiting"  # "waiting" | "running" | "terminated"
        self.reason: str | None = "PodInitializing" if role == "app" else "ContainerCreating"
        self.message: str | None = None
        self.exit_code: int | None = None
        self.restarts = 0
        self.failed_starts = 0  # in a row
        self.start_at_s = 0.0  # monotonic: when the next try is due
        self.instances: list[Instance] = []  # every start, oldest first

    def __repr__(self) -> str:
        text = f"{self.name}={self.state}"
        return text if not self.reason else f"{text}({self.reason}: {self.message})"

    @property
    def instance(self) -> Instance:
        """The latest start; AssertionError when it never started."""
        assert self.instances, f"container {self.name} never started: {self!r}"
        return self.instances[-1]

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def env(self) -> dict[str, str]:
        return self.instance.env

    @property
    def device_nodes(self) -> list[str]:
        """Paths in the container."""
        return list(self.instance.devices)

    @property
    def mounts(self) -> dict[str, str]:
        """Container path -> host path."""
        return {path: mount.host_path for path, mount in self.instance.mounts.items()}

    @property
    def cdi_devices(self) -> list[str]:
        return self.instance.cdi_devices

    @property
    def annotations(self) -> dict[str, str]:
        return self.instance.annotations


class Pod:
    """A pod: its spec and its status. `init` holds ordinary init containers and sidecars, in order."""

    def __init__(
        self,
        name: str,
        containers: Sequence[ContainerSpec],
        *,
        init: Sequence[ContainerSpec] = (),
        namespace: str = "default",
        restart_policy: str = "Always",
        labels: Mapping[str, str] | None = None,
        owner: str | None = None,
        uid: str | None = None,
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.uid = uid or ""  # the cluster gives one at creation
        self.restart_policy = restart_policy
        self.labels = dict(labels or {})
        self.annotations: dict[str, str] = {}
        self.owner = owner
        self.number = next(_created)
        self.init = [Container(c, "sidecar" if c.sidecar else "init") for c in init]
        self.apps = [Container(c, "app") for c in containers]
        self.node_name: str | None = None
        self.phase = "Pending"
        self.reason: str | None = None
        self.message: str | None = None
        self.deleted = False  # somebody asked for its deletion
        self.gone = False  # it is no longer in the API
        self.changed: threading.Condition | None = None  # the cluster gives one at creation
        self.admitted = False
        self.stopped = False  # the kubelet has ended all its containers for good
        self.rejected = False

    def __repr__(self) -> str:
        text = f"{self.name}[{self.phase}"
        text += f" {self.reason}: {self.message}" if self.reason else ""
        return f"{text}] {[*self.init, *self.apps]}"

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name

    @property
    def containers(self) -> dict[str, Container]:
        return {c.name: c for c in (*self.init, *self.apps)}

    @property
    def finished(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def running(self) -> bool:
        return self.phase == "Running" and all(c.running for c in self.apps)

    @property
    def waiting(self) -> str | None:
        """The reason and sentence why the first waiting container waits, as `describe` shows them."""
        for c in (*self.init, *self.apps):
            if c.state == "waiting" and c.message:
                return f"{c.reason}: {c.message}"
        return None

    @property
    def qos(self) -> str:
        """guaranteed, burstable or besteffort: from CPU and memory alone."""
        specs = [c.spec for c in (*self.init, *self.apps)]
        if all("cpu" in s.limits and "memory" in s.limits for s in specs):
            return "guaranteed"
        return "burstable" if any("cpu" in s.limits or "memory" in s.limits for s in specs) else "besteffort"

    def requests(self) -> dict[str, int]:
        """What the scheduler books: apps and sidecars together, or an init container's peak."""
        sidecars: dict[str, int] = {}
        peak: dict[str, int] = {}
        for c in self.init:
            for resource, amount in c.spec.amounts().items():
                before = sidecars.get(resource, 0)
                if c.role == "sidecar":
                    sidecars[resource] = before + amount
                peak[resource] = max(peak.get(resource, 0), before + amount)
        total = dict(sidecars)
        for c in self.apps:
            for resource, amount in c.spec.amounts().items():
                total[resource] = total.get(resource, 0) + amount
        return {r: max(total.get(r, 0), peak.get(r, 0)) for r in {**peak, **total}}


@dataclass
class Event:
    """What `kubectl get events` shows; the same thing again only counts up."""

    kind: str  # "Pod" | "Node"
    namespace: str
    name: str
    uid: str
    type: str  # "Normal" | "Warning"
    reason: str
    message: str
    source: str
    count: int = 1


@dataclass
class Node:
    """The node in the API. Sums are of devices only and may lag behind the kubelet."""

    name: str
    capacity: dict[str, int] = field(default_factory=dict)
    allocatable: dict[str, int] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    conditions: dict[str, dict[str, str]] = field(default_factory=dict)
