"""Which GPUs this node has, through which back end, and why: decided afresh at every inventory.

Nothing is latched: a driver that is installed, a module that is loaded or a device node that appears
later is found at the next look. A Jetson's own GPU is read by the Tegra back end even where NVML lists
it too (there NVML answers little); discrete cards beside it are NVML's. Simulated GPUs are never
chosen by themselves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from edgeagent.config.schema import GpusConfig
from edgeagent.errors import GpuError
from edgeagent.gpus import jetson, nvidia_host
from edgeagent.gpus.guard import GuardedBackend, GuardedComputeModes, GuardedLimiter
from edgeagent.gpus.model import (
    CgroupMemoryLimiter,
    ComputeModes,
    Gpu,
    GpuBackend,
    GpuEvent,
    GpuFault,
    GpuReading,
    Inventory,
    Topology,
)
from edgeagent.hostroot import HostRoot

if TYPE_CHECKING:  # imported only where they are used: each costs memory
    from edgeagent.gpus.jtop import SecondSource
    from edgeagent.gpus.nvml import NvmlBackend
    from edgeagent.gpus.simulated import SimulatedBackend
    from edgeagent.gpus.simulated_files import SimulatedProcess

log = logging.getLogger(__name__)

# Thor's integrated GPU is on the PCI bus, always here; NVIDIA's container toolkit knows it by that too.
_THOR_INTEGRATED_PCI = "0000:01:00.0"


def detect(
    config: GpusConfig,
    host: HostRoot,
    *,
    processes: Callable[[], Sequence[SimulatedProcess]] | None = None,
    second: SecondSource | None = None,
) -> tuple[NodeGpus, Inventory]:
    """The node's GPUs and the first look at them. Raises ConfigError for a simulated profile that does
    not exist; everything else that is wrong is in the inventory. `processes`: what runs on simulated
    GPUs; `second`: jetson-stats."""
    gpus = NodeGpus(config, host, processes=processes, second=second)
    return gpus, gpus.inventory()


class NodeGpus:
    """All GPUs of the node as one GpuBackend; no call takes longer than `callTimeoutSeconds`."""

    name = "node"

    def __init__(
        self,
        config: GpusConfig,
        host: HostRoot,
        *,
        processes: Callable[[], Sequence[SimulatedProcess]] | None = None,
        second: SecondSource | None = None,
    ) -> None:
        self._config = config
        self._host = host
        self._lock = threading.Lock()  # one inventory at a time
        self._idle = threading.Event()  # what waits for events while there is nothing to wait on
        self._nvml: GuardedBackend | None = None
        self._nvml_backend: NvmlBackend | None = None
        self._tegra: GuardedBackend | None = None
        self._simulated: GuardedBackend | None = None
        self._owners: dict[str, GuardedBackend] = {}  # UUID -> who reads it
        self._aliases: dict[str, str] = {}  # NVML's UUID of the integrated GPU -> ours
        self._nvml_gpus: tuple[Gpu, ...] | None = None  # None: NVML does not work
        self._second = second
        self.limiter: CgroupMemoryLimiter | None = None
        self.compute_modes: ComputeModes | None = None
        self.simulator: SimulatedBackend | None = None  # for the demo's faults
        if config.source == "simulated":
            from edgeagent.gpus.simulated import SimulatedBackend

            self.simulator = SimulatedBackend(config.simulated, processes=processes)
            self._simulated = self._guard(self.simulator)
        elif config.source != "tegra":
            self._open_nvml()

    def _guard(self, backend: GpuBackend) -> GuardedBackend:
        return GuardedBackend(backend, self._config.call_timeout_seconds)

    def _open_nvml(self) -> None:
        from edgeagent.gpus.nvml import NvmlBackend

        timeout_s = self._config.call_timeout_seconds
        backend = NvmlBackend(self._host, self._config.nvml.library_path, timeout_s)
        self._nvml_backend = backend
        self._nvml = self._guard(backend)
        self.limiter = GuardedLimiter(self._nvml, backend)
        self.compute_modes = GuardedComputeModes(self._nvml, backend)

    def _open_tegra(self) -> GuardedBackend:
        if self._tegra is None:
            from edgeagent.gpus.tegra import TegraBackend

            nvml = self._nvml
            backend = TegraBackend(
                self._host,
                nvml_gpus=self._listed_by_nvml,
                nvml_read=nvml.read if nvml is not None else None,
                second=self._second,
            )
            self._tegra = self._guard(backend)
        return self._tegra

    def _listed_by_nvml(self) -> tuple[Gpu, ...]:
        if self._nvml_gpus is None:
            raise GpuError("NVML does not work", GpuFault.FAILED.value)
        return self._nvml_gpus

    # ---- inventory ------------------------------------------------------------------------------

    def inventory(self) -> Inventory:
        with self._lock:
            if self._simulated is not None:
                found = self._simulated.inventory()
                self._own(self._simulated, found.gpus)
                return found
            evidence = list(self._host_evidence())
            nvml = self._look_nvml(evidence)
            tegra = self._look_tegra(evidence)
            return self._join(nvml, tegra, evidence)

    def _host_evidence(self) -> Sequence[str]:
        module = nvidia_host.kernel_module_version(self._host)
        cards = nvidia_host.pci_gpus(self._host)
        lines = [
            f"nvidia kernel module: {module or 'none'}",
            f"NVIDIA GPUs on the PCI bus: {', '.join(cards) or 'none'}",
        ]
        if nvidia_host.is_wsl(self._host):
            there = self._host.exists(nvidia_host.WSL_DEVICE)
            lines.append(f"WSL: {nvidia_host.WSL_DEVICE} {'exists' if there else 'is missing'}")
        return lines

    def _look_nvml(self, evidence: list[str]) -> Inventory | None:
        if self._nvml is None:
            return None
        found = self._nvml.inventory()
        evidence += found.evidence
        works = bool(found.gpus) or found.fault is GpuFault.NOT_FOUND
        self._nvml_gpus = found.gpus if works else None
        return found

    def _look_tegra(self, evidence: list[str]) -> Inventory | None:
        if self._config.source == "nvml":
            return None
        names = None if self._nvml_gpus is None else [g.model for g in self._nvml_gpus]
        if self._config.source == "auto" and not jetson.detect(self._host, names).tegra:
            evidence.append("not a Jetson")
            return None
        found = self._open_tegra().inventory()
        evidence += found.evidence
        return found

    def _join(self, nvml: Inventory | None, tegra: Inventory | None, evidence: list[str]) -> Inventory:
        own = tegra.gpus if tegra is not None else ()
        others = nvml.gpus if nvml is not None else ()
        self._aliases = {}
        if own:
            integrated = [g for g in others if jetson.is_integrated_name(g.model)]
            self._aliases = {g.uuid: own[0].uuid for g in integrated}
            others = tuple(g for g in others if g.uuid not in self._aliases)
            if not integrated:
                # As NVIDIA's container toolkit numbers them: the integrated GPU is 0.
                others = tuple(replace(g, index=g.index + len(own)) for g in others)
            if self._tegra is not None:
                self._own(self._tegra, own)
        if self._nvml is not None:
            self._own(self._nvml, others)
        gpus = (*own, *others)
        sources = [g.source for g in gpus]
        evidence.append(f"decided: {', '.join(f'{sources.count(s)} by {s}' for s in dict.fromkeys(sources))}")
        if gpus:
            problem, fault = self._why_no_card(nvml)
            return Inventory(gpus, tuple(evidence), problem, fault)
        problem, fault = self._why_none(nvml, tegra)
        evidence[-1] = f"decided: no GPU ({fault.value})"
        return Inventory((), tuple(evidence), problem, fault)

    def _why_no_card(self, nvml: Inventory | None) -> tuple[str | None, GpuFault | None]:
        """What is wrong with a card beside a Jetson's own GPU, where it is there and NVML fails."""
        cards = [c for c in nvidia_host.pci_gpus(self._host) if c != _THOR_INTEGRATED_PCI]
        if nvml is None or nvml.fault in (None, GpuFault.NOT_FOUND) or not cards:
            return None, None
        return nvml.problem, nvml.fault

    def _why_none(self, nvml: Inventory | None, tegra: Inventory | None) -> tuple[str, GpuFault]:
        """The one reason that helps most."""
        if tegra is not None and tegra.problem and tegra.fault is not GpuFault.NOT_FOUND:
            return tegra.problem, tegra.fault or GpuFault.FAILED
        if nvml is None:
            problem = tegra.problem if tegra is not None and tegra.problem else "no GPU found"
            return problem, GpuFault.NOT_FOUND
        problem, fault = nvml.problem or "no GPU found", nvml.fault or GpuFault.FAILED
        if fault is not GpuFault.LIBRARY_MISSING or self._config.source == "nvml":
            return problem, fault
        cards = nvidia_host.pci_gpus(self._host)
        if cards:
            return f"there is an NVIDIA GPU at {cards[0]} but {problem}", fault
        if nvidia_host.is_wsl(self._host):
            return f"WSL shows a GPU but {problem}; it is in /usr/lib/wsl/lib", fault
        if "no such file" in problem or "cannot find" in problem:
            return (
                "no GPU on this node: no NVIDIA device on the PCI bus, no NVIDIA library, not a Jetson",
                GpuFault.NOT_FOUND,
            )
        return problem, fault

    def _own(self, backend: GuardedBackend, gpus: tuple[Gpu, ...]) -> None:
        """Earlier owners stay: their back end knows why the GPU does not answer."""
        self._owners = {**self._owners, **{g.uuid: backend for g in gpus}}

    # ---- the rest of GpuBackend -----------------------------------------------------------------

    def read(self, uuid: str) -> GpuReading:
        owner = self._owners.get(uuid) or self._simulated or self._nvml or self._open_tegra()
        return owner.read(uuid)

    def wait_event(self, timeout_s: float) -> GpuEvent | None:
        source = self._simulated or self._nvml  # Tegra's driver has no events
        if source is None:
            self._idle.wait(timeout_s)
            self._idle.clear()
            return None
        event = source.wait_event(timeout_s)
        if event is None or event.uuid is None:
            return event
        return replace(event, uuid=self._aliases.get(event.uuid, event.uuid))

    def wake(self) -> None:
        self._idle.set()
        for part in (self._nvml, self._tegra, self._simulated):
            if part is not None:
                part.wake()

    def close(self) -> None:
        self._idle.set()
        for part in (self._tegra, self._nvml, self._simulated):
            if part is not None:
                part.close()

    # ---- beyond GpuBackend ----------------------------------------------------------------------

    def topology(self) -> Topology:
        """How GPUs are joined; what cannot be read is left out."""
        if self.simulator is not None:
            return self.simulator.topology()
        if self._nvml is None or self._nvml_backend is None:
            return {}
        try:
            return self._nvml.call("topology", self._nvml_backend.topology)
        except GpuError as e:
            log.debug("no topology: %s", e)
            return {}

    @property
    def needs_reexec(self) -> bool:
        """Only a new process (in a pod: a new container) can read the GPUs again: the driver was
        replaced under this one, or its device nodes were taken away."""
        return self._nvml_backend is not None and self._nvml_backend.needs_reexec
