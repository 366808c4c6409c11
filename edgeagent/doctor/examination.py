"""What the checks look at: the configuration, the running agent's picture where there is one, the GPUs,
K3s, the API server. Each is asked for once, when the first check wants it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeagent.config import Config
from edgeagent.control import ControlClient
from edgeagent.doctor.containerd import NvidiaRuntime, nvidia_runtime
from edgeagent.errors import ControlError, NodeError
from edgeagent.hostroot import HostRoot
from edgeagent.node.apiserver import ApiServer, find_credentials, read_kubeconfig
from edgeagent.node.container_runtime import CdiSupport, cdi_support
from edgeagent.node.host import Host
from edgeagent.node.k3s import K3sFacts, find_k3s
from edgeagent.sharing.names import ResourceNames, resource_names

if TYPE_CHECKING:
    from edgeagent.gpus.detect import NodeGpus
    from edgeagent.gpus.model import Gpu, Inventory

JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SeenGpu:
    """A GPU, from the agent's picture or from a look of our own."""

    uuid: str
    index: int
    model: str
    source: str
    unified: bool
    memory_total_mib: int
    usable_mib: int
    mode: str
    device_nodes: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"GPU {self.index} ({self.model})"


@dataclass(frozen=True, slots=True)
class SeenGpus:
    gpus: tuple[SeenGpu, ...]
    problem: str | None
    fault: str | None
    evidence: tuple[str, ...]


class Examination:
    """One run of the doctor. `config_problems`: the file was no good and `config` is the defaults."""

    def __init__(
        self, config: Config, config_path: Path | None = None, config_problems: tuple[str, ...] = ()
    ) -> None:
        self.config = config
        self.config_path = config_path
        self.config_problems = config_problems
        self.host = HostRoot(config.host_root)
        self._own_gpus: tuple[NodeGpus, Inventory] | None = None

    def close(self) -> None:
        if self._own_gpus is not None:
            self._own_gpus[0].close()

    # --- the agent ---

    @cached_property
    def _asked(self) -> tuple[JsonObject | None, str | None]:
        try:
            client = ControlClient(self.host.path(self.config.run_dir), timeout_s=5.0)
            return client.call("snapshot"), None
        except ControlError as e:
            return None, str(e)

    @property
    def snapshot(self) -> JsonObject | None:
        """The running agent's picture, or None."""
        return self._asked[0]

    @property
    def agent_problem(self) -> str | None:
        return self._asked[1]

    # --- GPUs ---

    def look_at_gpus(self) -> tuple[NodeGpus, Inventory]:
        """The GPUs by our own eyes, whether the agent runs or not. Raises ConfigError (simulated GPUs)."""
        if self._own_gpus is None:
            from edgeagent.gpus.detect import detect

            self._own_gpus = detect(self.config.gpus, self.host)
        return self._own_gpus

    @cached_property
    def gpus(self) -> SeenGpus:
        s = self.snapshot
        if s is not None and (s.get("gpus") or s.get("evidence")):
            gpus = tuple(_from_snapshot(g) for g in s["gpus"])
            problem = None if gpus else next(iter(s.get("reasons", [])), "no GPU was found")
            return SeenGpus(gpus, problem, None, tuple(s.get("evidence", ())))
        from edgeagent.kubelet.offers import plan_offers

        _, inventory = self.look_at_gpus()
        offers = plan_offers(inventory.gpus, self.config.sharing)
        return SeenGpus(
            tuple(_from_offer(o.gpu, o.usable_mib, o.mode.value) for o in offers.gpus),
            inventory.problem,
            inventory.fault.value if inventory.fault is not None else None,
            inventory.evidence,
        )

    # --- the node ---

    @cached_property
    def facts(self) -> Host:
        return Host(self.host)

    @cached_property
    def k3s(self) -> K3sFacts | None:
        return find_k3s(self.host)

    @cached_property
    def k3s_service(self) -> str:
        return "k3s-agent" if self.k3s is not None and self.k3s.role == "agent" else "k3s"

    @cached_property
    def runtime(self) -> NvidiaRuntime:
        return nvidia_runtime(self.host, self.k3s)

    @cached_property
    def cdi(self) -> CdiSupport:
        return cdi_support(self.host, self.k3s)

    @property
    def binding(self) -> str:
        """ "late" or "early": the agent's, else what `auto` would choose."""
        if self.snapshot is not None:
            return str(self.snapshot["binding"])
        wanted = self.config.sharing.binding
        return wanted if wanted != "auto" else ("early" if self.cdi.enabled is False else "late")

    @cached_property
    def names(self) -> ResourceNames:
        sharing = self.config.sharing
        return resource_names(sharing.names, prefix=sharing.prefix, unit_mib=self.unit_mib)

    @property
    def unit_mib(self) -> int:
        """What is offered: it differs from the configuration while pods hold the old unit."""
        if self.snapshot is not None:
            return int(self.snapshot.get("memoryUnitMiB", self.config.sharing.memory_unit_mib))
        return self.config.sharing.memory_unit_mib

    # --- the API server ---

    @cached_property
    def node_name(self) -> str:
        return self.config.kubernetes.node_name or os.environ.get("NODE_NAME") or self.facts.hostname

    @cached_property
    def api(self) -> ApiServer | None:
        """As the administrator where we can be: the doctor looks at more than the agent may."""
        if not self.config.kubernetes.enabled:
            return None
        k3s, named = self.k3s, self.config.kubernetes.kubeconfig
        admin = k3s.admin_kubeconfig if k3s is not None and named is None else None
        if admin is not None:
            return ApiServer(lambda: read_kubeconfig(self.host, admin))
        return ApiServer(lambda: find_credentials(self.host, named))

    @cached_property
    def _cluster(self) -> tuple[str | None, str | None]:
        if self.api is None:
            return None, "kubernetes.enabled is false"
        try:
            return self.api.server_version() or None, None
        except NodeError as e:
            return None, str(e)

    @property
    def cluster_version(self) -> str | None:
        """Of the API server, else of K3s here, else as configured."""
        own = self.k3s.version if self.k3s is not None else None
        return self._cluster[0] or own or self.config.sharing.cluster_version

    @property
    def api_problem(self) -> str | None:
        """Why the API server cannot be asked; None: it answers."""
        return self._cluster[1]

    @cached_property
    def node(self) -> JsonObject | None:
        """The Node object, or None where it cannot be had (then api_problem says why)."""
        if self.api is None or self.api_problem is not None:
            return None
        with suppress(NodeError):
            return self.api.node(self.node_name)
        return None


def _from_snapshot(g: JsonObject) -> SeenGpu:
    gpu = g["gpu"]
    return SeenGpu(
        uuid=gpu["uuid"],
        index=gpu["index"],
        model=gpu["model"],
        source=gpu["source"],
        unified=gpu["kind"] == "integrated",
        memory_total_mib=gpu["memoryTotalMiB"],
        usable_mib=g["usableMiB"],
        mode=g["mode"],
        device_nodes=tuple(gpu.get("deviceNodes", ())),
    )


def _from_offer(gpu: Gpu, usable_mib: int, mode: str) -> SeenGpu:
    return SeenGpu(
        gpu.uuid,
        gpu.index,
        gpu.model,
        gpu.source,
        gpu.unified_memory,
        gpu.memory_total_mib,
        usable_mib,
        mode,
        gpu.device_nodes,
    )
