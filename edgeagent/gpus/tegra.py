"""A Jetson's own GPU: what it is and how it does, from sysfs, procfs and debugfs alone.

NVML (nearly empty on Orin, partial on Thor) and jetson-stats only fill in what these lack; both are
passed in. Nothing is started and nothing waits on a service in the steady state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgeagent.errors import GpuError
from edgeagent.gpus import tegra_files, tegra_sources
from edgeagent.gpus.jetson import UNKNOWN, JetsonFacts, detect, read_facts
from edgeagent.gpus.model import (
    Gpu,
    GpuEvent,
    GpuFault,
    GpuKind,
    GpuProcess,
    GpuReading,
    Inventory,
    ProcessType,
)
from edgeagent.gpus.sweep import Sweep, read_file
from edgeagent.hostroot import HostRoot

if TYPE_CHECKING:  # brings multiprocessing along: 4.5 MB
    from edgeagent.gpus.jtop import SecondSource

log = logging.getLogger(__name__)

REDISCOVER_S = 60.0

# Rails that carry the whole module, in order of preference; without one of them the rails add up.
_INPUT_RAILS = ("VIN", "VDD_IN", "POM_5V_IN")

# Faults that NVML reports for Thor's GPU, whose driver is nvidia.ko. On Orin and older NVML is a stub
# whose errors say nothing about the GPU.
_NVML_FAULTS = frozenset(
    {GpuFault.LOST, GpuFault.RESET_REQUIRED, GpuFault.DRIVER_MISMATCH, GpuFault.UNRESPONSIVE}
)

# What a CUDA container on a Jetson opens (NVIDIA's devices.csv of JetPack 4 to 7), as far as it exists.
# Left out on purpose: nvhost-sched-gpu and nvgpu/igpu0/sched, with which a container could raise its
# own GPU priority and take others' away.
_NODE_NAMES = frozenset(
    {
        "nvmap", "nvhost-ctrl", "nvhost-ctrl-gpu", "nvhost-gpu", "nvhost-as-gpu", "nvhost-ctxsw-gpu",
        "nvhost-dbg-gpu", "nvhost-prof-gpu", "nvhost-prof-ctx-gpu", "nvhost-prof-dev-gpu", "nvhost-tsg-gpu",
        "nvhost-power-gpu", "nvhost-vic", "nvhost-nvdec", "nvhost-nvenc", "nvhost-msenc", "nvhost-nvjpg",
        "nvhost-ofa", "nvhost-nvdla0", "nvhost-nvdla1", "nvhost-pva0", "host1x-fence", "nvsciipc",
        "tegra_dc_ctrl", "nvidia0", "nvidiactl", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools",
        "nvidia2",
    }
)  # fmt: skip
_NODE_DIRECTORIES = ("/dev/nvgpu/igpu0",)
_SCHEDULING_NODES = frozenset({"sched"})


class TegraBackend:
    """GpuBackend for the one iGPU of a Tegra board.

    `nvml_gpus`: the GPUs that NVML lists now (any of them, discrete cards too); `nvml_read`: NVML's
    reading of one. `second`: jetson-stats. All optional and never needed.
    """

    name = "tegra"

    def __init__(
        self,
        host: HostRoot,
        *,
        nvml_gpus: Callable[[], Sequence[Gpu]] | None = None,
        nvml_read: Callable[[str], GpuReading] | None = None,
        second: SecondSource | None = None,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[str, int], bytes] = read_file,
    ) -> None:
        self._host = host
        self._nvml_gpus = nvml_gpus
        self._nvml_read = nvml_read
        self._second = second
        self._clock = clock
        self._sweep = Sweep(what="board sensors", clock=clock, read=read)
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._facts = JetsonFacts()
        self._uuid: str | None = None
        self._nvml_uuid: str | None = None
        self._found_at_s: float | None = None
        self._waits_for_gpu = False
        self._overcurrent: int | None = None

    # -- GpuBackend -------------------------------------------------------------------------------

    def inventory(self) -> Inventory:
        nvml = self._ask_nvml()
        detection = detect(self._host, None if nvml is None else [g.model for g in nvml])
        evidence = detection.evidence
        if not detection.integrated_gpu:
            why = "not a Tegra board" if not detection.tegra else "no integrated GPU in use on this board"
            return Inventory((), evidence, why, GpuFault.NOT_FOUND)
        facts = read_facts(self._host)
        memory = self._memory_total_mib()
        if memory is None:
            return Inventory(
                (), evidence, "cannot read MemTotal from /proc/meminfo: no memory to share", GpuFault.FAILED
            )
        own = [nvml[i] for i in detection.integrated] if nvml else []
        others = [g for i, g in enumerate(nvml or ()) if i not in detection.integrated]
        gpu = self._gpu(facts, memory, own[0] if own else None, others)
        with self._lock:
            self._facts = facts
            self._uuid = gpu.uuid
            self._nvml_uuid = own[0].uuid if own else None
            self._rediscover()
        return Inventory((gpu,), (*evidence, f"{gpu.model}: {memory} MiB unified memory"))

    def read(self, uuid: str) -> GpuReading:
        with self._lock:
            if uuid != self._uuid:
                return GpuReading(
                    uuid, self._clock(), fault=GpuFault.NOT_FOUND, fault_detail="not this board"
                )
            self._rediscover_when_due()
            facts, nvml_uuid = self._facts, self._nvml_uuid
        values = self._sweep.run()
        if self._sweep.gave_up:
            return GpuReading(
                uuid,
                self._clock(),
                fault=GpuFault.UNRESPONSIVE,
                fault_detail=f"files hang: {', '.join(self._sweep.quarantined)}",
            )
        if not facts.uses_nvgpu:
            values = _without_empty_nvmap(values)
        nvml = self._read_nvml(nvml_uuid)
        if nvml is not None and nvml.fault in _NVML_FAULTS and not facts.uses_nvgpu:
            return GpuReading(uuid, self._clock(), fault=nvml.fault, fault_detail=nvml.fault_detail)
        return self._reading(uuid, values, facts, nvml if nvml and nvml.fault is None else None)

    def wait_event(self, timeout_s: float) -> GpuEvent | None:
        """The nvgpu driver has no event interface: its errors are in the kernel log."""
        self._event.wait(timeout_s)
        self._event.clear()
        return None

    def wake(self) -> None:
        self._event.set()

    def close(self) -> None:
        self._event.set()
        self._sweep.close()

    # -- inventory --------------------------------------------------------------------------------

    def _gpu(self, facts: JetsonFacts, memory_mib: int, nvml: Gpu | None, others: Sequence[Gpu]) -> Gpu:
        strings = facts.as_strings()
        if nvml is not None:
            strings["nvml_uuid"] = nvml.uuid
            strings["nvml_name"] = nvml.model
        if self._second is not None:
            # jetson-stats asks dpkg and EEPROMs for what files do not say.
            for key, value in self._second.facts().items():
                if strings.get(key, UNKNOWN) == UNKNOWN:
                    strings[key] = value
        trips = tegra_sources.find_trips(self._host)
        foreign = frozenset(f"/dev/nvidia{g.minor}" for g in others if g.minor is not None)
        return Gpu(
            uuid=facts.uuid,
            index=0,
            kind=GpuKind.INTEGRATED,
            source=self.name,
            model=facts.name,
            memory_total_mib=memory_mib,
            compute_capability=facts.compute_capability or (nvml.compute_capability if nvml else None),
            multiprocessors=facts.multiprocessors or (nvml.multiprocessors if nvml else None),
            pci_address=nvml.pci_address if nvml else None,
            device_nodes=tuple(n for n in device_nodes(self._host) if n not in foreign),
            driver_version=nvml.driver_version if nvml else None,
            cuda_version=nvml.cuda_version if nvml else None,
            temperature_slowdown_c=trips.slowdown_c,
            temperature_shutdown_c=trips.shutdown_c,
            facts=strings,
        )

    def _ask_nvml(self) -> Sequence[Gpu] | None:
        if self._nvml_gpus is None:
            return None
        try:
            return self._nvml_gpus()
        except GpuError as e:
            log.debug("NVML lists no GPU: %s", e)
            return None

    def _memory_total_mib(self) -> int | None:
        try:
            return int(tegra_files.meminfo(self._host.read_bytes("/proc/meminfo", 16384) or b"").total_mib)
        except ValueError:
            return None

    # -- reading ----------------------------------------------------------------------------------

    def _rediscover_when_due(self) -> None:
        now = self._clock()
        if (
            self._found_at_s is None
            or now - self._found_at_s >= REDISCOVER_S
            or (self._waits_for_gpu and tegra_sources.has_load_or_clock(self._host))
        ):
            self._rediscover()

    def _rediscover(self) -> None:
        sources = tegra_sources.find_sources(self._host)
        self._sweep.set_sources(sources)
        self._found_at_s = self._clock()
        waits = not any(s.key in ("load", "clock_sm") for s in sources)
        if waits != self._waits_for_gpu:
            log.info("the GPU's clock and load are %s", "not there yet" if waits else "there now")
        self._waits_for_gpu = waits

    def _read_nvml(self, nvml_uuid: str | None) -> GpuReading | None:
        if self._nvml_read is None or nvml_uuid is None:
            return None
        try:
            return self._nvml_read(nvml_uuid)
        except GpuError as e:
            log.debug("NVML does not read the integrated GPU: %s", e)
            return None

    def _reading(
        self, uuid: str, values: Mapping[str, Any], facts: JetsonFacts, nvml: GpuReading | None
    ) -> GpuReading:
        second = self._second.sample() if self._second is not None else None
        memory: tegra_files.MemInfo | None = values.get("meminfo")
        nvmap: tegra_files.NvMap | None = values.get("nvmap")
        processes = _processes(nvmap, None if facts.uses_nvgpu else nvml)
        temperatures = _group(values, "temp/")
        rails = _rails(values)
        mode = values.get("power_mode")
        power_mode = None if mode is None else facts.power_modes.get(mode, f"mode {mode}")
        overcurrent = _sum(_group(values, "oc/").values())
        fans = _group(values, "fan/")
        return GpuReading(
            uuid=uuid,
            taken_mono_s=self._clock(),
            memory_used_mib=_gpu_memory_mib(values, processes),
            memory_free_mib=memory.available_mib if memory else None,
            util_pct=_first(values.get("load"), nvml and nvml.util_pct, second and second.util_pct),
            memory_util_pct=nvml.memory_util_pct if nvml else None,
            encoder_util_pct=nvml.encoder_util_pct if nvml else None,
            decoder_util_pct=nvml.decoder_util_pct if nvml else None,
            temperature_c=_first(
                temperatures.get("gpu"),
                temperatures.get("tj"),
                nvml and nvml.temperature_c,
                second and second.temperature_c,
            ),
            temperatures_c=temperatures,
            power_w=_first(_module_power_w(rails), nvml and nvml.power_w),
            rails_w=rails,
            energy_mj=nvml.energy_mj if nvml else None,
            clock_sm_mhz=_first(values.get("clock_sm"), nvml and nvml.clock_sm_mhz),
            clock_memory_mhz=_first(values.get("clock_memory"), nvml and nvml.clock_memory_mhz),
            fan_pct=max(fans.values(), default=None),
            throttle_reasons=self._throttle_reasons(values, overcurrent, nvml),
            recovery_action=nvml.recovery_action if nvml else None,
            power_mode=power_mode or (second.power_mode if second else None),
            overcurrent_events=overcurrent,
            host_memory_available_mib=memory.available_mib if memory else None,
            host_swap_used_mib=memory.swap_used_mib if memory else None,
            processes=processes,
        )

    def _throttle_reasons(
        self, values: Mapping[str, Any], overcurrent: int | None, nvml: GpuReading | None
    ) -> frozenset[str] | None:
        """None where the board has neither alert nor counter."""
        alerts = _group(values, "throttle/")
        alarms = _group(values, "oc_alarm/")
        before, self._overcurrent = self._overcurrent, overcurrent
        from_nvml = nvml.throttle_reasons if nvml else None
        if not alerts and not alarms and overcurrent is None and from_nvml is None:
            return None
        reasons = set(from_nvml or ())
        for device, state in alerts.items():
            if state > 0:
                # The CPU's own alert leaves the GPU's clock alone but explains a slow pod as well.
                reasons.add("thermal_cpu" if device.startswith("cpu") else "thermal_sw")
        grew = overcurrent is not None and before is not None and overcurrent > before
        if grew or any(alarms.values()):
            reasons.add("oc")
        return frozenset(reasons)


def device_nodes(host: HostRoot) -> tuple[str, ...]:
    """The device nodes of the iGPU that exist on this host, sorted."""
    found = [f"/dev/{n}" for n in host.listdir("/dev") if n in _NODE_NAMES]
    for directory in _NODE_DIRECTORIES:
        found += [f"{directory}/{n}" for n in host.listdir(directory) if n not in _SCHEDULING_NODES]
    return tuple(sorted(found))


def _without_empty_nvmap(values: Mapping[str, Any]) -> dict[str, Any]:
    """Where nvidia.ko drives the GPU, nvmap's files are there and say 0 whatever is used."""
    kept = dict(values)
    memory: tegra_files.MemInfo | None = kept.get("meminfo")
    nvmap: tegra_files.NvMap | None = kept.get("nvmap")
    if memory is not None and not memory.nvmap_used_mib:
        kept["meminfo"] = replace(memory, nvmap_used_mib=None)
    if nvmap is not None and not any(c.used_mib for c in nvmap.clients):
        del kept["nvmap"]
    if not kept.get("nvmap_total"):
        kept.pop("nvmap_total", None)
    return kept


def _processes(nvmap: tegra_files.NvMap | None, nvml: GpuReading | None) -> tuple[GpuProcess, ...] | None:
    """nvmap's on nvgpu boards, else (Thor) NVML's."""
    if nvmap is None:
        return nvml.processes if nvml is not None else None
    compute = frozenset({ProcessType.COMPUTE})  # nvmap does not say which kind
    return tuple(GpuProcess(c.pid, compute, used_mib=c.used_mib, name=c.name) for c in nvmap.clients)


def _gpu_memory_mib(values: Mapping[str, Any], processes: tuple[GpuProcess, ...] | None) -> float | None:
    """RAM that the GPU's driver holds: the kernel's own count where there is one (a sum over
    processes counts shared buffers more than once)."""
    memory: tegra_files.MemInfo | None = values.get("meminfo")
    nvmap: tegra_files.NvMap | None = values.get("nvmap")
    counts = [
        memory.nvmap_used_mib if memory else None,
        values.get("nvmap_total"),
        nvmap.total_mib if nvmap else None,
    ]
    for counted in counts:
        if counted is not None:
            return float(counted)
    if processes is None:
        return None
    used = [p.used_mib for p in processes if p.used_mib is not None]
    return sum(used) if used or not processes else None


def _rails(values: Mapping[str, Any]) -> dict[str, float]:
    rails: dict[str, float] = _group(values, "rail_w/")
    milliamps = _group(values, "rail_ma/")
    for rail, millivolts in _group(values, "rail_mv/").items():
        if rail in milliamps:
            # A rail that is off measures a few mA below zero.
            rails.setdefault(rail, millivolts * max(0, milliamps[rail]) / 1e6)
    return rails


def _module_power_w(rails: Mapping[str, float]) -> float | None:
    """What the whole module draws, as tegrastats and jtop show it: the input rail, else the sum."""
    for rail in _INPUT_RAILS:
        if rail in rails:
            return rails[rail]
    return sum(rails.values()) if rails else None


def _group(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key[len(prefix) :]: value for key, value in values.items() if key.startswith(prefix)}


def _sum(counts: Any) -> int | None:
    numbers = list(counts)
    return sum(numbers) if numbers else None


def _first(*candidates: Any) -> float | None:
    return next((float(c) for c in candidates if c is not None), None)
