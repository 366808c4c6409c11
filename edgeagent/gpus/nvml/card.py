"""One NVIDIA GPU: what it is, and one poll of it. Every reading is optional: each is missing on some
card, driver or operating system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from edgeagent.gpus import nvidia_host, tegra_files
from edgeagent.gpus.jetson import is_integrated_name
from edgeagent.gpus.model import (
    Gpu,
    GpuFault,
    GpuKind,
    GpuProcess,
    GpuReading,
    MigInstance,
    ProcessType,
)
from edgeagent.gpus.nvml.library import (
    NOT_FOUND,
    UNSUPPORTED,
    GoneError,
    Library,
    NvmlError,
    raise_if_gone,
)
from edgeagent.hostroot import HostRoot

SOURCE = "nvml"
MIB = 1 << 20

_MEMORY_V2 = 0x02000028
_FIELD_RECOVERY_ACTION = 230

_THROTTLE = {
    0x001: "idle", 0x002: "app_clocks", 0x004: "power_cap", 0x008: "hw_slowdown", 0x010: "sync_boost",
    0x020: "thermal_sw", 0x040: "thermal_hw", 0x080: "power_brake", 0x100: "display_clocks",
    0x200: "board_limit", 0x400: "reliability",
}  # fmt: skip
_RECOVERY_ACTIONS = {
    0: "none", 1: "reset", 2: "reboot", 3: "drain", 4: "drain_and_reset", 5: "recover_imex",
    6: "bus_reset", 7: "system_reboot",
}  # fmt: skip
_ARCHITECTURES = {
    2: "kepler", 3: "maxwell", 4: "pascal", 5: "volta", 6: "turing", 7: "ampere", 8: "ada-lovelace",
    9: "hopper", 10: "blackwell", 13: "rubin",
}  # fmt: skip
_PROCESS_LISTS = (
    (ProcessType.COMPUTE, "nvmlDeviceGetComputeRunningProcesses"),
    (ProcessType.GRAPHICS, "nvmlDeviceGetGraphicsRunningProcesses"),
    (ProcessType.MPS, "nvmlDeviceGetMPSComputeRunningProcesses"),
)


class Card:
    """A GPU in the current session. Its methods raise GoneError when GPU or library are gone."""

    def __init__(self, library: Library, host: HostRoot, handle: Any) -> None:
        self._library = library
        self._host = host
        self.handle = handle
        self.uuid = str(library.must("nvmlDeviceGetUUID", handle))
        self.gpu = Gpu(self.uuid, -1, GpuKind.DISCRETE, SOURCE, "", 0)  # until `identify`
        self.last_sample_us = 0
        self.busy_since_s: float | None = None  # a read is under way

    def _get(self, function: str, *args: Any) -> Any:
        return self._library.optional(function, self.handle, *args)

    def _number(self, function: str, *args: Any) -> float | None:
        return self._library.number(function, self.handle, *args)

    # ---- identity -------------------------------------------------------------------------------

    def identify(self, index: int, driver_version: str | None, cuda_version: str | None) -> Gpu:
        name = str(self._get("nvmlDeviceGetName") or "NVIDIA GPU")
        pci = self._pci_address()
        memory = self._memory()
        integrated = is_integrated_name(name) or "GB10" in name or memory is None
        if memory is None:
            host = self._host_memory()
            total_mib, reserved_mib = int(host.total_mib) if host else 0, None
        else:
            total_mib = memory[0] // MIB
            reserved_mib = None if memory[1] is None else -(-memory[1] // MIB)
        minor = self._get("nvmlDeviceGetMinorNumber")
        if minor is None and pci is not None:
            minor = nvidia_host.minor_number(self._host, pci)
        capability = self._get("nvmlDeviceGetCudaComputeCapability")
        capability = (int(capability[0]), int(capability[1])) if capability else None
        architecture = _ARCHITECTURES.get(self._get("nvmlDeviceGetArchitecture"))
        display = self._get("nvmlDeviceGetDisplayActive")
        mig = self._get("nvmlDeviceGetMigMode")
        mig_enabled = None if mig is None else mig[0] == 1
        self.gpu = Gpu(
            uuid=self.uuid,
            index=index,
            kind=GpuKind.INTEGRATED if integrated else GpuKind.DISCRETE,
            source=SOURCE,
            model=name,
            memory_total_mib=total_mib,
            memory_reserved_mib=reserved_mib,
            compute_capability=capability,
            multiprocessors=_multiprocessors(self._number("nvmlDeviceGetNumGpuCores"), capability),
            pci_address=pci,
            numa_node=None if pci is None else nvidia_host.numa_node(self._host, pci),
            minor=minor,
            device_nodes=nvidia_host.device_nodes(self._host, minor),
            driver_version=driver_version,
            cuda_version=cuda_version,
            vbios_version=self._get("nvmlDeviceGetVbiosVersion"),
            mig_enabled=mig_enabled,
            mig_instances=self._mig_instances(minor, total_mib) if mig_enabled else (),
            temperature_slowdown_c=self._number("nvmlDeviceGetTemperatureThreshold", 1),
            temperature_shutdown_c=self._number("nvmlDeviceGetTemperatureThreshold", 0),
            power_limit_w=_thousandth(self._number("nvmlDeviceGetEnforcedPowerLimit")),
            display_active=None if display is None else bool(display),
            facts={"architecture": architecture} if architecture else {},
        )
        return self.gpu

    def _pci_address(self) -> str | None:
        info = self._get("nvmlDeviceGetPciInfo")
        return None if info is None else pci_address(str(info.busId))

    def _memory(self) -> tuple[int, int | None, int, int] | None:
        """Total, reserved, used without reserved, free; in bytes."""
        v2 = self._get("nvmlDeviceGetMemoryInfo", _MEMORY_V2)
        if v2 is not None and v2.total:
            return int(v2.total), int(v2.reserved), int(v2.used), int(v2.free)
        v1 = self._get("nvmlDeviceGetMemoryInfo")  # counts reserved as used and does not tell it
        if v1 is not None and v1.total:
            return int(v1.total), None, int(v1.used), int(v1.free)
        return None

    def _host_memory(self) -> tegra_files.MemInfo | None:
        try:
            return tegra_files.meminfo(self._host.read_bytes("/proc/meminfo", 16384) or b"")
        except ValueError:
            return None

    def _mig_instances(self, minor: int | None, total_mib: int) -> tuple[MigInstance, ...]:
        found = []
        for i in range(self._get("nvmlDeviceGetMaxMigDeviceCount") or 0):
            child = self._get("nvmlDeviceGetMigDeviceHandleByIndex", i)
            if child is None:  # indices have gaps
                continue
            ask = self._library.optional
            uuid = ask("nvmlDeviceGetUUID", child)
            gi = ask("nvmlDeviceGetGpuInstanceId", child)
            ci = ask("nvmlDeviceGetComputeInstanceId", child)
            if uuid is None or gi is None or ci is None:
                continue
            attributes = ask("nvmlDeviceGetAttributes_v2", child)
            found.append(
                MigInstance(
                    uuid=uuid,
                    profile=mig_profile(ask("nvmlDeviceGetName", child), attributes, total_mib),
                    gpu_instance_id=gi,
                    compute_instance_id=ci,
                    memory_mib=None if attributes is None else int(attributes.memorySizeMB),
                    device_nodes=nvidia_host.mig_nodes(self._host, minor, gi, ci),
                )
            )
        return tuple(found)

    # ---- readings -------------------------------------------------------------------------------

    def read(self, clock: Callable[[], float]) -> GpuReading:
        try:
            util, doubt = self._library.call("nvmlDeviceGetUtilizationRates", self.handle), None
        except NvmlError as e:
            util, doubt = None, e
            raise_if_gone(e)
        memory = None if self.gpu.unified_memory else self._memory()
        rows = self._get("nvmlDeviceGetRemappedRows")
        encoder = self._get("nvmlDeviceGetEncoderUtilization")
        decoder = self._get("nvmlDeviceGetDecoderUtilization")
        reading = GpuReading(
            self.uuid,
            0.0,
            memory_used_mib=None if memory is None else memory[2] / MIB,
            memory_free_mib=None if memory is None else memory[3] / MIB,
            util_pct=_percent(util.gpu if util else None),
            memory_util_pct=_percent(util.memory if util else None),
            encoder_util_pct=_percent(encoder[0] if encoder else None),
            decoder_util_pct=_percent(decoder[0] if decoder else None),
            temperature_c=self.temperature(),
            power_w=_thousandth(self._number("nvmlDeviceGetPowerUsage")),
            energy_mj=self._number("nvmlDeviceGetTotalEnergyConsumption"),
            clock_sm_mhz=self._number("nvmlDeviceGetClockInfo", 1),
            clock_memory_mhz=self._number("nvmlDeviceGetClockInfo", 2),
            fan_pct=self._number("nvmlDeviceGetFanSpeed"),
            throttle_reasons=self._throttle_reasons(),
            ecc_uncorrectable=self._get("nvmlDeviceGetTotalEccErrors", 1, 0),  # uncorrected, volatile
            row_remap_failed=None if rows is None else bool(rows[3]),
            row_remap_pending=None if rows is None else bool(rows[2]),
            recovery_action=self._recovery_action(),
            processes=self._processes(),
        )
        answers = (memory, reading.temperature_c, reading.power_w, reading.processes)
        if doubt is not None and doubt.code not in UNSUPPORTED and all(a is None for a in answers):
            # UNKNOWN to everything is not a healthy GPU without sensors.
            raise GoneError(doubt, GpuFault.FAILED, library=False)
        if self.gpu.unified_memory:
            reading = self._with_host_memory(reading)
        return replace(reading, taken_mono_s=clock())

    def _with_host_memory(self, reading: GpuReading) -> GpuReading:
        host = self._host_memory()
        used = [p.used_mib for p in reading.processes or () if p.used_mib is not None]
        return replace(
            reading,
            memory_used_mib=None if reading.processes is None else sum(used),
            memory_free_mib=host.available_mib if host else None,
            host_memory_available_mib=host.available_mib if host else None,
            host_swap_used_mib=host.swap_used_mib if host else None,
        )

    def temperature(self) -> float | None:
        value = self._number("nvmlDeviceGetTemperatureV", 0)
        return self._number("nvmlDeviceGetTemperature", 0) if value is None else value

    def _throttle_reasons(self) -> frozenset[str] | None:
        mask = self._get("nvmlDeviceGetCurrentClocksEventReasons")
        if mask is None:
            mask = self._get("nvmlDeviceGetCurrentClocksThrottleReasons")
        if mask is None:
            return None
        known = {name for bit, name in _THROTTLE.items() if mask & bit}
        unknown = mask & ~sum(_THROTTLE)
        return frozenset(known | ({f"0x{unknown:x}"} if unknown else set()))

    def _recovery_action(self) -> str | None:
        values = self._get("nvmlDeviceGetFieldValues", [_FIELD_RECOVERY_ACTION])
        if values is None or values[0].nvmlReturn != 0:
            return None
        number = values[0].value.uiVal if values[0].valueType == 1 else values[0].value.ullVal
        return _RECOVERY_ACTIONS.get(number, f"action_{number}")

    # ---- processes ------------------------------------------------------------------------------

    def _processes(self) -> tuple[GpuProcess, ...] | None:
        """Once per PID: the driver lists one process under several types with the same memory."""
        types: dict[int, set[ProcessType]] = {}
        used_mib: dict[int, float | None] = {}
        listed = False
        for kind, function in _PROCESS_LISTS:
            entries = self._get(f"{function}_v3")
            if entries is None:
                entries = self._get(f"{function}_v2")
            if entries is None:
                continue
            listed = True
            # On a MIG card a process has one entry for each instance it runs on: those add up.
            parts: dict[tuple[int, int], float] = {}
            for entry in entries:
                types.setdefault(entry.pid, set()).add(kind)
                used_mib.setdefault(entry.pid, None)
                mib = self._plausible_mib(entry.usedGpuMemory)
                if mib is not None:
                    key = (entry.pid, entry.gpuInstanceId)
                    parts[key] = max(parts.get(key, 0.0), mib)
            for pid in {pid for pid, _ in parts}:
                mib = sum(part for (owner, _), part in parts.items() if owner == pid)
                used_mib[pid] = max(used_mib[pid] or 0.0, mib)
        if not listed:
            return None
        util = self._process_util()
        return tuple(
            GpuProcess(
                pid, frozenset(types[pid]), used_mib[pid], None if util is None else util.get(pid, 0.0)
            )
            for pid in sorted(types)
        )

    def _plausible_mib(self, used_bytes: int | None) -> float | None:
        """None for "not available" and for counters that wrapped."""
        if used_bytes is None or used_bytes > self.gpu.memory_total_mib * MIB:
            return None
        return used_bytes / MIB

    def _process_util(self) -> dict[int, float] | None:
        """Mean SM utilisation per PID over the samples since the last poll; {} when idle."""
        since_us = self.last_sample_us
        try:
            samples = self._library.call("nvmlDeviceGetProcessUtilization", self.handle, since_us)
        except NvmlError as e:
            if e.code in (0, NOT_FOUND):  # 0: pynvml raises it when there is nothing to copy
                return {}
            raise_if_gone(e)
            return None
        per_pid: dict[int, list[int]] = {}
        for sample in samples:
            if sample.timeStamp > since_us and sample.smUtil <= 100:
                per_pid.setdefault(sample.pid, []).append(sample.smUtil)
        self.last_sample_us = max([since_us, *(s.timeStamp for s in samples)])
        return {pid: sum(values) / len(values) for pid, values in per_pid.items()}


def pci_address(bus_id: str) -> str | None:
    """NVML's "00000000:65:00.0" as sysfs writes it: "0000:65:00.0"."""
    domain, _, rest = bus_id.partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest.lower()}"
    except ValueError:
        return None


def mig_profile(name: str | None, attributes: Any, total_mib: int) -> str:
    """`1g.5gb` as the driver names it ("… MIG 1g.5gb"), else computed as NVIDIA's tools do."""
    if name and " MIG " in name:
        return name.rsplit(" MIG ", 1)[1].strip()
    if attributes is None:
        return "unknown"
    gi, ci = attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount
    # The card's size rounded up to GB, times the instance's part of it rounded up to an eighth.
    eighths = -(-8 * int(attributes.memorySizeMB) // total_mib) if total_mib else 0
    gigabytes = round(eighths / 8 * -(-total_mib // 1024))
    return f"{'' if ci == gi else f'{ci}c.'}{gi}g.{gigabytes}gb"


def _multiprocessors(cores: float | None, capability: tuple[int, int] | None) -> int | None:
    """NVML counts CUDA cores; how many are in one multiprocessor is the generation's."""
    if not cores or capability is None:
        return None
    per_multiprocessor = 64 if capability[0] == 7 or capability in ((6, 0), (8, 0)) else 128
    return int(cores) // per_multiprocessor


def _percent(value: int | None) -> float | None:
    return float(value) if value is not None and 0 <= value <= 100 else None


def _thousandth(value: float | None) -> float | None:
    return None if value is None else value / 1000
