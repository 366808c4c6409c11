"""GPUs through NVIDIA's NVML: inventory, readings, events, memory limits per cgroup, topology.

What was found to matter with real drivers shapes this file:
- A lost GPU answers GPU_IS_LOST to everything, the event wait included, at once and every time. So a
  GPU known to be lost is not called again until `inventory` found it anew, it is left out of the event
  set, and a failing wait backs off.
- nvmlInit fixes the list of GPUs, and the mapped library cannot be exchanged. So a changed set of GPUs
  or a reloaded driver needs Shutdown and Init, which need that no call is in flight; and a library that
  no longer matches the kernel module needs a new process (`needs_reexec`).
- Nearly every reading is missing on some card, driver or operating system: each is optional.

Calls may hang inside the driver; guard.py bounds them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from edgeagent.errors import GpuError
from edgeagent.gpus import nvidia_host, tegra_files
from edgeagent.gpus.nvml import library as codes
from edgeagent.gpus.jetson import is_integrated_name
from edgeagent.gpus.model import (
    Gpu,
    GpuEvent,
    GpuEventKind,
    GpuFault,
    GpuKind,
    GpuLink,
    GpuProcess,
    GpuReading,
    Inventory,
    MigInstance,
    ProcessType,
    Topology,
)
from edgeagent.gpus.nvml.library import Library, NvmlError, address
from edgeagent.hostroot import HostRoot

log = logging.getLogger(__name__)

MIB = 1 << 20
EVENT_SLICE_S = 1.0  # nvmlEventSetWait cannot be interrupted: this bounds what `wake` and Init wait for
HANGING_S = 2.0  # a read takes milliseconds; longer, and `inventory` leaves the GPU alone
EVENT_BACKOFF_S = (0.5, 30.0)  # first and longest pause after a failing event wait
REINIT_BACKOFF_S = (5.0, 300.0)  # between two tries to find a missing GPU by Shutdown and Init

_NOT_AVAILABLE = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})  # NVML_VALUE_NOT_AVAILABLE
_NO_INSTANCE = 0xFFFFFFFF
_MEMORY_V2 = 0x02000028
_UNLIMITED = 0xFFFFFFFFFFFFFFFF  # NVML_DEVICE_MEMORY_LIMIT_MAX
_FIELD_RECOVERY_ACTION = 230
_MAX_NVLINKS = 36

_GPU_FAULTS = {
    codes.GPU_IS_LOST: GpuFault.LOST,
    codes.GPU_NOT_FOUND: GpuFault.LOST,
    codes.RESET_REQUIRED: GpuFault.RESET_REQUIRED,
}
_LIBRARY_FAULTS = {
    codes.UNINITIALIZED: GpuFault.FAILED,
    codes.DRIVER_NOT_LOADED: GpuFault.DRIVER_NOT_LOADED,
    codes.LIBRARY_NOT_FOUND: GpuFault.LIBRARY_MISSING,
    codes.LIB_RM_VERSION_MISMATCH: GpuFault.DRIVER_MISMATCH,
}

# Events asked for, of those that the GPU supports. Single-bit errors come as a storm event where the
# driver has one; one by one they are of no consequence and may come by the thousand.
_EVENTS: dict[int, tuple[GpuEventKind, str | None]] = {
    0x0002: (GpuEventKind.ECC_DOUBLE_BIT, None),
    0x0008: (GpuEventKind.XID, None),
    0x0100: (GpuEventKind.MIG_CONFIG, None),
    0x0200: (GpuEventKind.ECC_SINGLE_BIT, "storm of single-bit errors"),
    0x0800: (GpuEventKind.ECC_DOUBLE_BIT, "DRAM retirement failed"),
    0x2000: (GpuEventKind.ECC_DOUBLE_BIT, "fatal poison error"),
    0x4000: (GpuEventKind.UNAVAILABLE, "the driver says the GPU is unavailable"),
    0x8000: (GpuEventKind.RECOVERY_ACTION, None),
}
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
_TOPOLOGY = {0: "board", 10: "pix", 20: "pxb", 30: "phb", 40: "node", 50: "sys"}
_NEEDS_NODES = "the agent needs read and write access to /dev/nvidiactl and /dev/nvidia*"
_PROCESS_LISTS = (
    (ProcessType.COMPUTE, "nvmlDeviceGetComputeRunningProcesses"),
    (ProcessType.GRAPHICS, "nvmlDeviceGetGraphicsRunningProcesses"),
    (ProcessType.MPS, "nvmlDeviceGetMPSComputeRunningProcesses"),
)


@dataclass(slots=True)
class _Device:
    """A GPU's handle in the current session."""

    uuid: str
    handle: Any
    memory_total_bytes: int | None
    last_sample_us: int = 0
    busy_since_s: float | None = None  # a read is under way


@dataclass(slots=True)
class _EventSet:
    handle: Any
    registration: int
    uuids: dict[int, str]  # handle address -> UUID


class _SickError(Exception):
    """A call said that the GPU as a whole, or the library, is gone."""

    def __init__(self, error: NvmlError, fault: GpuFault, library: bool) -> None:
        self.error = error
        self.fault = fault
        self.library = library
        super().__init__(str(error))


class _CallGate:
    """Counts calls in flight: the library may be shut down only when there are none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False

    def enter(self, timeout_s: float) -> bool:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._shut, timeout_s):
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self, timeout_s: float) -> Iterator[bool]:
        """True: nobody is inside, and nobody gets in meanwhile."""
        with self._changed:
            self._shut = True
            empty = self._changed.wait_for(lambda: self._inside == 0, timeout_s)
            if not empty:
                self._shut = False
                self._changed.notify_all()
        try:
            yield empty
        finally:
            with self._changed:
                self._shut = False
                self._changed.notify_all()


class NvmlBackend:
    """GpuBackend and CgroupMemoryLimiter over libnvidia-ml.

    Integrated GPUs that NVML lists (Orin, Thor, GB10) are in the inventory too; on a Jetson the Tegra
    back end offers them instead (detect.py). `call_timeout_s`: how long re-initialising waits for
    calls in flight. `close` releases the driver (a GPU reset needs that); `inventory` opens it again.
    """

    name = "nvml"

    def __init__(
        self,
        host: HostRoot,
        library_path: str | None = None,
        call_timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._library = Library(host, library_path)
        self._call = self._library.call
        self._call_timeout_s = call_timeout_s
        self._clock = clock
        self._gate = _CallGate()
        self._inventory_lock = threading.Lock()
        self._wait_lock = threading.Lock()
        self._lock = threading.Lock()  # over the fields below
        self._open = False
        self._gpus: dict[str, Gpu] = {}  # every GPU seen since the start, as last seen
        self._devices: dict[str, _Device] = {}  # handles of this session
        self._sick: dict[str, tuple[GpuFault, str]] = {}  # not to be called until found anew
        self._library_fault: tuple[GpuFault, str] | None = None
        self._bound: frozenset[str] = frozenset()  # what the kernel module drove when it was opened
        self._module_at_open: str | None = None
        self._reinit_at_s = 0.0
        self._reinit_pause_s = REINIT_BACKOFF_S[0]
        self._registration = 0  # counts changes of which GPUs are listened to
        self._signal = threading.Event()
        self._woken = False
        self._event_set: _EventSet | None = None
        self._wait_failures = 0
        self._wait_again_at_s = 0.0

    # ---- inventory ------------------------------------------------------------------------------

    def inventory(self) -> Inventory:
        with self._inventory_lock:
            evidence: list[str] = []
            try:
                gpus, refusals = self._look(evidence)
                if self._reinit_due(gpus) and self._may_close(evidence):
                    gpus, refusals = self._look(evidence)
            except GpuError as e:
                return Inventory((), (*evidence, str(e)), str(e), GpuFault(e.fault))
            self._listen_now()
        problem, fault = (None, None) if gpus else _why_none(refusals)
        return Inventory(gpus, tuple(evidence), problem, fault)

    def _look(self, evidence: list[str]) -> tuple[tuple[Gpu, ...], list[NvmlError]]:
        if self._library_fault is not None:
            self._close_session()
        if self._open:
            try:
                return self._enumerate(evidence)
            except GpuError as e:
                log.debug("NVML is initialised again: %s", e)
                self._close_session()
        self._open_session(evidence)
        return self._enumerate(evidence)

    def _may_close(self, evidence: list[str]) -> bool:
        """Closes the session for a fresh look, unless a hanging call forbids it."""
        try:
            self._close_session()
        except GpuError as e:
            evidence.append(str(e))
            return False
        evidence.append("a GPU is missing or new: NVML initialised again")
        return True

    def _open_session(self, evidence: list[str]) -> None:
        self._library.load()
        module = nvidia_host.kernel_module_version(self._host)
        with self._gate.alone(self._call_timeout_s) as alone:
            if not alone:
                raise GpuError(self._stuck(), GpuFault.UNRESPONSIVE.value)
            try:
                self._call("nvmlInit")
            except NvmlError as e:
                fault, why = self._explain_init(e, module)
                with self._lock:
                    self._library_fault = (fault, why)
                raise GpuError(why, fault.value) from e
            with self._lock:
                self._open = True
                self._library_fault = None
                self._devices = {}
            self._bound = nvidia_host.bound_gpus(self._host)
            self._module_at_open = module or self._module_at_open
        evidence.append(
            f"NVML {self._library.version() or '(version unknown)'} from {self._library.path}, "
            f"kernel module {module or 'version not shown'}"
        )

    def _close_session(self) -> None:
        """Raises GpuError where a call in flight forbids it."""
        with self._gate.alone(self._call_timeout_s) as alone:
            if not alone:
                raise GpuError(self._stuck(), GpuFault.UNRESPONSIVE.value)
            if not self._open:
                return
            if self._event_set is not None:
                self._quietly("nvmlEventSetFree", self._event_set.handle)
                self._event_set = None
            self._quietly("nvmlShutdown")
            with self._lock:
                self._open = False
                self._devices = {}
                self._registration += 1

    @staticmethod
    def _stuck() -> str:
        return "cannot initialise NVML again: an earlier call has not returned from the driver"

    def _quietly(self, function: str, *args: Any) -> None:
        try:
            self._call(function, *args)
        except NvmlError as e:
            log.debug("%s", e)

    def _explain_init(self, e: NvmlError, module: str | None) -> tuple[GpuFault, str]:
        if e.code == codes.LIB_RM_VERSION_MISMATCH:
            return GpuFault.DRIVER_MISMATCH, self._explain_mismatch(module)
        if e.code == codes.DRIVER_NOT_LOADED:
            return GpuFault.DRIVER_NOT_LOADED, (
                "the nvidia kernel module is not loaded: try modprobe nvidia; if that fails look at dkms "
                "status, Secure Boot and the kernel log"
            )
        if e.code == codes.NO_PERMISSION:
            return GpuFault.NO_PERMISSION, f"NVML refuses access: {_NEEDS_NODES}"
        if e.code == codes.UNKNOWN and self._module_at_open is not None and self._module_at_open == module:
            # It worked in this process and the driver on the host is the same: systemd's daemon-reload
            # took the container's device access away. Only a new container gets it back.
            return GpuFault.LOST_DEVICE_ACCESS, (
                "this process lost access to the GPU device nodes although the driver works on the host: "
                "restart the agent (in a pod: delete the pod)"
            )
        if e.code == codes.FUNCTION_NOT_FOUND:
            return GpuFault.FAILED, f"{self._library.path} is too old for this agent: {e}; upgrade the driver"
        return _LIBRARY_FAULTS.get(e.code, GpuFault.FAILED), f"cannot initialise NVML: {e}"

    def _explain_mismatch(self, module: str | None) -> str:
        library = self._library.version() or "unknown"
        cure = (
            "the agent must be restarted"
            if self._outdated(module)
            else "reboot, or reload the nvidia modules"
        )
        kernel = module or "of another version"
        return f"the NVIDIA library is {library} but the loaded kernel module is {kernel}: {cure}"

    def _outdated(self, module: str | None) -> bool:
        reloaded = None not in (module, self._module_at_open) and module != self._module_at_open
        return reloaded or self._library.replaced

    @property
    def needs_reexec(self) -> bool:
        """Whether only a new process can recover: the driver changed and this process keeps the old
        library mapped, or it lost its device nodes. A container must be recreated (exit non-zero)."""
        with self._lock:
            fault = self._library_fault[0] if self._library_fault else None
        if fault is GpuFault.LOST_DEVICE_ACCESS:
            return True
        module = nvidia_host.kernel_module_version(self._host)
        return fault is GpuFault.DRIVER_MISMATCH and self._outdated(module)

    def _reinit_due(self, found: tuple[Gpu, ...]) -> bool:
        """Whether Shutdown and Init could find more: the kernel drives other GPUs than at the last
        Init, or one that was known is missing though the kernel still has it (or shows nothing)."""
        now = self._clock()
        bound = nvidia_host.bound_gpus(self._host)
        if bound != self._bound:
            self._reinit_pause_s = REINIT_BACKOFF_S[0]
            return True
        missing = [g for uuid, g in self._gpus.items() if uuid not in {f.uuid for f in found}]
        if not any(not bound or g.pci_address in bound for g in missing):
            self._reinit_pause_s = REINIT_BACKOFF_S[0]
            return False
        if now < self._reinit_at_s:
            return False
        self._reinit_at_s = now + self._reinit_pause_s
        self._reinit_pause_s = min(2 * self._reinit_pause_s, REINIT_BACKOFF_S[1])
        return True

    def _enumerate(self, evidence: list[str]) -> tuple[tuple[Gpu, ...], list[NvmlError]]:
        """Every GPU that answers now, and what the others said; known ones of those become sick."""
        found: list[Gpu] = []
        devices: dict[str, _Device] = {}
        refusals: list[NvmlError] = []
        with self._calling("list the GPUs"):
            driver = self._optional("nvmlSystemGetDriverVersion")
            cuda = self._optional("nvmlSystemGetCudaDriverVersion_v2")
            cuda_version = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None
            try:
                count = self._call("nvmlDeviceGetCount")
            except NvmlError as e:
                raise self._library_failed(e) from e
            for index in range(count):
                try:
                    handle = self._call("nvmlDeviceGetHandleByIndex", index)
                    busy = self._hanging(handle)
                    if busy is not None:
                        found.append(replace(self._gpus[busy.uuid], index=index))
                        devices[busy.uuid] = busy
                        evidence.append(f"GPU {busy.uuid} at index {index}: a call on it does not return")
                        continue
                    gpu = self._identify(handle, index, driver, cuda_version)
                except (NvmlError, _SickError) as e:
                    error = e.error if isinstance(e, _SickError) else e
                    if error.code in _LIBRARY_FAULTS:
                        raise self._library_failed(error) from e
                    refusals.append(error)
                    evidence.append(f"GPU at index {index} left out: {error}")
                    continue
                total = None if gpu.unified_memory else gpu.memory_total_mib * MIB
                devices[gpu.uuid] = _Device(gpu.uuid, handle, total)
                found.append(gpu)
                evidence.append(f"GPU {gpu.uuid} at index {index}: {gpu.model}, {gpu.memory_total_mib} MiB")
        self._settle(found, devices, refusals)
        return tuple(found), refusals

    def _hanging(self, handle: Any) -> _Device | None:
        """The known GPU of this handle if a call on it is under way for suspiciously long."""
        with self._lock:
            for device in self._devices.values():
                since_s = device.busy_since_s
                if since_s is not None and address(device.handle) == address(handle):
                    return device if self._clock() - since_s > HANGING_S else None
        return None

    def _settle(self, found: list[Gpu], devices: dict[str, _Device], refusals: list[NvmlError]) -> None:
        lost = next((e for e in refusals if e.code in _GPU_FAULTS), None)
        with self._lock:
            before = {uuid: address(d.handle) for uuid, d in self._devices.items() if uuid not in self._sick}
            for uuid, device in devices.items():
                if uuid in self._devices:
                    device.last_sample_us = self._devices[uuid].last_sample_us
                if self._sick.pop(uuid, None) is not None:
                    log.info("GPU answers again uuid=%s", uuid)
            self._devices = devices
            self._gpus.update({gpu.uuid: gpu for gpu in found})
            for uuid in self._gpus.keys() - devices.keys() - self._sick.keys():
                fault = _GPU_FAULTS[lost.code] if lost else GpuFault.NOT_FOUND
                self._sick[uuid] = (fault, str(lost) if lost else "the driver no longer lists it")
                log.warning("GPU is gone uuid=%s fault=%s", uuid, fault.value)
            if before != {uuid: address(d.handle) for uuid, d in devices.items()}:
                self._registration += 1
                self._signal.set()

    def _identify(self, handle: Any, index: int, driver: str | None, cuda: str | None) -> Gpu:
        uuid = str(self._must("nvmlDeviceGetUUID", handle))
        name = str(self._optional("nvmlDeviceGetName", handle) or "NVIDIA GPU")
        pci = self._pci_address(handle)
        memory = self._memory(handle)
        integrated = is_integrated_name(name) or "GB10" in name or memory is None
        if memory is None:
            total_mib, reserved_mib = self._host_memory_total_mib(), None
        else:
            total_mib = memory[0] // MIB
            reserved_mib = None if memory[1] is None else -(-memory[1] // MIB)
        minor = self._optional("nvmlDeviceGetMinorNumber", handle)
        if minor is None and pci is not None:
            minor = nvidia_host.minor_number(self._host, pci)
        capability = self._optional("nvmlDeviceGetCudaComputeCapability", handle)
        capability = (int(capability[0]), int(capability[1])) if capability else None
        architecture = _ARCHITECTURES.get(self._optional("nvmlDeviceGetArchitecture", handle))
        display = self._optional("nvmlDeviceGetDisplayActive", handle)
        limit_mw = self._number("nvmlDeviceGetEnforcedPowerLimit", handle)
        mig = self._optional("nvmlDeviceGetMigMode", handle)
        mig_enabled = None if mig is None else mig[0] == 1
        return Gpu(
            uuid=uuid,
            index=index,
            kind=GpuKind.INTEGRATED if integrated else GpuKind.DISCRETE,
            source=self.name,
            model=name,
            memory_total_mib=total_mib,
            memory_reserved_mib=reserved_mib,
            compute_capability=capability,
            multiprocessors=_multiprocessors(self._number("nvmlDeviceGetNumGpuCores", handle), capability),
            pci_address=pci,
            numa_node=None if pci is None else nvidia_host.numa_node(self._host, pci),
            minor=minor,
            device_nodes=nvidia_host.device_nodes(self._host, minor),
            driver_version=driver,
            cuda_version=cuda,
            vbios_version=self._optional("nvmlDeviceGetVbiosVersion", handle),
            mig_enabled=mig_enabled,
            mig_instances=self._mig_instances(handle, minor, total_mib) if mig_enabled else (),
            temperature_slowdown_c=self._number("nvmlDeviceGetTemperatureThreshold", handle, 1),
            temperature_shutdown_c=self._number("nvmlDeviceGetTemperatureThreshold", handle, 0),
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
            display_active=None if display is None else bool(display),
            facts={"architecture": architecture} if architecture else {},
        )

    def _pci_address(self, handle: Any) -> str | None:
        info = self._optional("nvmlDeviceGetPciInfo", handle)
        if info is None:
            return None
        bus_id = str(info.busId)  # "00000000:65:00.0"
        domain, _, rest = bus_id.partition(":")
        try:
            return f"{int(domain, 16):04x}:{rest.lower()}"
        except ValueError:
            return None

    def _memory(self, handle: Any) -> tuple[int, int | None, int, int] | None:
        """Total, reserved, used without reserved, free; in bytes."""
        v2 = self._optional("nvmlDeviceGetMemoryInfo", handle, _MEMORY_V2)
        if v2 is not None and v2.total:
            return int(v2.total), int(v2.reserved), int(v2.used), int(v2.free)
        v1 = self._optional("nvmlDeviceGetMemoryInfo", handle)  # counts reserved as used
        if v1 is not None and v1.total:
            return int(v1.total), None, int(v1.used), int(v1.free)
        return None

    def _host_memory(self) -> tegra_files.MemInfo | None:
        try:
            return tegra_files.meminfo(self._host.read_bytes("/proc/meminfo", 16384) or b"")
        except ValueError:
            return None

    def _host_memory_total_mib(self) -> int:
        memory = self._host_memory()
        return int(memory.total_mib) if memory else 0

    def _mig_instances(self, handle: Any, minor: int | None, total_mib: int) -> tuple[MigInstance, ...]:
        found = []
        for i in range(self._optional("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            child = self._optional("nvmlDeviceGetMigDeviceHandleByIndex", handle, i)
            if child is None:  # indices have gaps
                continue
            uuid = self._optional("nvmlDeviceGetUUID", child)
            gi = self._optional("nvmlDeviceGetGpuInstanceId", child)
            ci = self._optional("nvmlDeviceGetComputeInstanceId", child)
            if uuid is None or gi is None or ci is None:
                continue
            attributes = self._optional("nvmlDeviceGetAttributes_v2", child)
            found.append(
                MigInstance(
                    uuid=uuid,
                    profile=mig_profile(self._optional("nvmlDeviceGetName", child), attributes, total_mib),
                    gpu_instance_id=gi,
                    compute_instance_id=ci,
                    memory_mib=None if attributes is None else int(attributes.memorySizeMB),
                    device_nodes=nvidia_host.mig_nodes(self._host, minor, gi, ci),
                )
            )
        return tuple(found)

    # ---- calls ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        """Between here and the end NVML is not shut down. Raises GpuError instead of _SickError."""
        if not self._gate.enter(self._call_timeout_s):
            raise GpuError(f"cannot {what}: NVML is being initialised", GpuFault.UNRESPONSIVE.value)
        try:
            if not self._open or self._library_fault is not None:
                fault, why = self._library_fault or (GpuFault.FAILED, "NVML is closed")
                raise GpuError(f"cannot {what}: {why}", fault.value)
            yield
        except _SickError as e:
            if e.library:
                raise self._library_failed(e.error) from e
            raise GpuError(f"cannot {what}: {e.error}", e.fault.value) from e
        finally:
            self._gate.leave()

    def _must(self, function: str, *args: Any) -> Any:
        """A call that has to succeed. Raises _SickError."""
        try:
            return self._call(function, *args)
        except NvmlError as e:
            library = e.code in _LIBRARY_FAULTS
            fault = _LIBRARY_FAULTS.get(e.code) or _GPU_FAULTS.get(e.code) or GpuFault.FAILED
            raise _SickError(e, fault, library) from e

    def _optional(self, function: str, *args: Any) -> Any:
        """A call whose answer may be missing (None). Raises _SickError where GPU or library is gone."""
        try:
            return self._call(function, *args)
        except NvmlError as e:
            self._raise_if_gone(e)
            if e.code not in codes.UNSUPPORTED:
                log.debug("no reading: %s", e)
            return None

    @staticmethod
    def _raise_if_gone(e: NvmlError) -> None:
        if e.code in _LIBRARY_FAULTS:
            raise _SickError(e, _LIBRARY_FAULTS[e.code], library=True) from e
        if e.code in _GPU_FAULTS:
            raise _SickError(e, _GPU_FAULTS[e.code], library=False) from e

    def _number(self, function: str, *args: Any) -> float | None:
        value = self._optional(function, *args)
        return None if value is None or value in _NOT_AVAILABLE else value

    def _library_failed(self, e: NvmlError) -> GpuError:
        """Remembers that nothing works until the library is opened again."""
        fault = _LIBRARY_FAULTS.get(e.code, GpuFault.FAILED)
        why = str(e)
        if fault is GpuFault.DRIVER_MISMATCH:
            why = self._explain_mismatch(nvidia_host.kernel_module_version(self._host))
        with self._lock:
            if self._library_fault is None:
                log.warning("NVML does not work any more fault=%s: %s", fault.value, why)
            self._library_fault = (fault, why)
            self._registration += 1
        return GpuError(why, fault.value)

    def _gpu_failed(self, uuid: str, fault: GpuFault, why: str) -> None:
        """Remembers that a GPU is not to be called until it was found anew."""
        with self._lock:
            if uuid in self._sick:
                return
            self._sick[uuid] = (fault, why)
            self._registration += 1
            self._signal.set()
        log.warning("GPU does not answer uuid=%s fault=%s: %s", uuid, fault.value, why)

    # ---- readings -------------------------------------------------------------------------------

    def read(self, uuid: str) -> GpuReading:
        if not self._gate.enter(self._call_timeout_s):
            return self._sick_reading(uuid, GpuFault.UNRESPONSIVE, "NVML is being initialised")
        try:
            with self._lock:
                fault = self._library_fault or self._sick.get(uuid)
                device = self._devices.get(uuid)
                gpu = self._gpus.get(uuid)
            if fault is not None:
                return self._sick_reading(uuid, *fault)
            if device is None or gpu is None:
                return self._sick_reading(uuid, GpuFault.NOT_FOUND, "no such GPU in the last inventory")
            device.busy_since_s = self._clock()
            try:
                return self._read(device, gpu)
            except _SickError as e:
                if e.library:
                    error = self._library_failed(e.error)
                    return self._sick_reading(uuid, GpuFault(error.fault), str(error))
                if e.error.code in _GPU_FAULTS:
                    self._gpu_failed(uuid, e.fault, str(e.error))
                return self._sick_reading(uuid, e.fault, str(e.error))
            finally:
                device.busy_since_s = None
        finally:
            self._gate.leave()

    def _sick_reading(self, uuid: str, fault: GpuFault, detail: str) -> GpuReading:
        return GpuReading(uuid, self._clock(), fault=fault, fault_detail=detail)

    def _read(self, device: _Device, gpu: Gpu) -> GpuReading:
        handle = device.handle
        try:
            util, doubt = self._call("nvmlDeviceGetUtilizationRates", handle), None
        except NvmlError as e:
            util, doubt = None, e
            self._raise_if_gone(e)
        memory = None if gpu.unified_memory else self._memory(handle)
        ecc = self._optional("nvmlDeviceGetTotalEccErrors", handle, 1, 0)
        rows = self._optional("nvmlDeviceGetRemappedRows", handle)
        throttle = self._throttle(handle)
        power_mw = self._number("nvmlDeviceGetPowerUsage", handle)
        encoder = self._optional("nvmlDeviceGetEncoderUtilization", handle)
        decoder = self._optional("nvmlDeviceGetDecoderUtilization", handle)
        reading = GpuReading(
            device.uuid,
            0.0,
            memory_used_mib=None if memory is None else memory[2] / MIB,
            memory_free_mib=None if memory is None else memory[3] / MIB,
            util_pct=_percent(util.gpu if util else None),
            memory_util_pct=_percent(util.memory if util else None),
            encoder_util_pct=_percent(encoder[0] if encoder else None),
            decoder_util_pct=_percent(decoder[0] if decoder else None),
            temperature_c=self._temperature(handle),
            power_w=None if power_mw is None else power_mw / 1000,
            energy_mj=self._number("nvmlDeviceGetTotalEnergyConsumption", handle),
            clock_sm_mhz=self._number("nvmlDeviceGetClockInfo", handle, 1),
            clock_memory_mhz=self._number("nvmlDeviceGetClockInfo", handle, 2),
            fan_pct=self._number("nvmlDeviceGetFanSpeed", handle),
            throttle_reasons=throttle,
            ecc_uncorrectable=ecc,
            row_remap_failed=None if rows is None else bool(rows[3]),
            row_remap_pending=None if rows is None else bool(rows[2]),
            recovery_action=self._recovery_action(handle),
            processes=self._processes(device),
        )
        answers = (memory, reading.temperature_c, power_mw, reading.processes)
        if doubt is not None and doubt.code not in codes.UNSUPPORTED and all(a is None for a in answers):
            # UNKNOWN to everything is not a healthy GPU without sensors.
            raise _SickError(doubt, GpuFault.FAILED, library=False)
        if gpu.unified_memory:
            reading = self._with_host_memory(reading)
        return replace(reading, taken_mono_s=self._clock())

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

    def _temperature(self, handle: Any) -> float | None:
        value = self._number("nvmlDeviceGetTemperatureV", handle, 0)
        return self._number("nvmlDeviceGetTemperature", handle, 0) if value is None else value

    def _throttle(self, handle: Any) -> frozenset[str] | None:
        mask = self._optional("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if mask is None:
            mask = self._optional("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if mask is None:
            return None
        known = {name for bit, name in _THROTTLE.items() if mask & bit}
        unknown = mask & ~sum(_THROTTLE)
        return frozenset(known | ({f"0x{unknown:x}"} if unknown else set()))

    def _recovery_action(self, handle: Any) -> str | None:
        values = self._optional("nvmlDeviceGetFieldValues", handle, [_FIELD_RECOVERY_ACTION])
        if values is None or values[0].nvmlReturn != 0:
            return None
        number = values[0].value.uiVal if values[0].valueType == 1 else values[0].value.ullVal
        return _RECOVERY_ACTIONS.get(number, f"action_{number}")

    def _processes(self, device: _Device) -> tuple[GpuProcess, ...] | None:
        """Once per PID: the driver lists one process under several types with the same memory."""
        types: dict[int, set[ProcessType]] = {}
        used_mib: dict[int, float | None] = {}
        listed = False
        for kind, function in _PROCESS_LISTS:
            entries = self._optional(f"{function}_v3", device.handle)
            if entries is None:
                entries = self._optional(f"{function}_v2", device.handle)
            if entries is None:
                continue
            listed = True
            # On a MIG card a process has one entry for each instance it runs on: those add up.
            parts: dict[tuple[int, int], float] = {}
            for entry in entries:
                types.setdefault(entry.pid, set()).add(kind)
                used_mib.setdefault(entry.pid, None)
                mib = self._plausible_mib(entry.usedGpuMemory, device)
                if mib is not None:
                    key = (entry.pid, entry.gpuInstanceId)
                    parts[key] = max(parts.get(key, 0.0), mib)
            for pid in {pid for pid, _ in parts}:
                mib = sum(part for (owner, _), part in parts.items() if owner == pid)
                used_mib[pid] = max(used_mib[pid] or 0.0, mib)
        if not listed:
            return None
        util = self._process_util(device)
        return tuple(
            GpuProcess(
                pid, frozenset(types[pid]), used_mib[pid], None if util is None else util.get(pid, 0.0)
            )
            for pid in sorted(types)
        )

    @staticmethod
    def _plausible_mib(used: int | None, device: _Device) -> float | None:
        """None for "not available" and for counters that wrapped."""
        if used is None or used in _NOT_AVAILABLE:
            return None
        limit = device.memory_total_bytes if device.memory_total_bytes is not None else 1 << 50
        return used / MIB if used <= limit else None

    def _process_util(self, device: _Device) -> dict[int, float] | None:
        """Mean SM utilisation per PID over the samples since the last poll; {} when idle."""
        try:
            samples = self._call("nvmlDeviceGetProcessUtilization", device.handle, device.last_sample_us)
        except NvmlError as e:
            if e.code in (0, codes.NOT_FOUND):  # 0: pynvml raises it when there is nothing to copy
                return {}
            self._raise_if_gone(e)
            return None
        per_pid: dict[int, list[int]] = {}
        for sample in samples:
            if sample.timeStamp > device.last_sample_us and sample.smUtil <= 100:
                per_pid.setdefault(sample.pid, []).append(sample.smUtil)
        device.last_sample_us = max([device.last_sample_us, *(s.timeStamp for s in samples)])
        return {pid: sum(values) / len(values) for pid, values in per_pid.items()}

    # ---- events ---------------------------------------------------------------------------------

    def wait_event(self, timeout_s: float) -> GpuEvent | None:
        deadline = self._clock() + timeout_s
        with self._wait_lock:
            while True:
                self._signal.clear()
                if self._woken:
                    self._woken = False
                    return None
                left = deadline - self._clock()
                if left <= 0:
                    return None
                event, pause_s = self._wait_slice(min(left, EVENT_SLICE_S))
                if event is not None:
                    return event
                if pause_s > 0:
                    self._signal.wait(min(pause_s, max(0.0, deadline - self._clock())))

    def wake(self) -> None:
        self._woken = True
        self._signal.set()

    def _wait_slice(self, slice_s: float) -> tuple[GpuEvent | None, float]:
        """One bounded wait: (event, how long to pause before the next)."""
        if not self._gate.enter(slice_s):
            return None, 0.0
        try:
            with self._lock:
                usable = self._open and self._library_fault is None
            if not usable:
                return None, EVENT_BACKOFF_S[1]
            self._register_if_changed()
            events = self._event_set
            if events is None or not events.uuids:
                return None, EVENT_BACKOFF_S[1]  # a change of what is listened to ends the pause
            pause_s = self._wait_again_at_s - self._clock()
            if pause_s > 0:
                return None, pause_s
            try:
                data = self._call("nvmlEventSetWait_v2", events.handle, max(1, int(slice_s * 1000)))
            except NvmlError as e:
                return self._wait_failed(e)
            self._wait_failures = 0
            return self._event(data, events), 0.0
        finally:
            self._gate.leave()

    def _wait_failed(self, e: NvmlError) -> tuple[GpuEvent | None, float]:
        if e.code == codes.TIMEOUT:
            self._wait_failures = 0
            return None, 0.0
        if e.code in _LIBRARY_FAULTS:
            self._library_failed(e)
            return GpuEvent(GpuEventKind.UNAVAILABLE, None, detail=str(e)), 0.0
        self._wait_failures += 1
        first, longest = EVENT_BACKOFF_S
        pause_s = min(longest, first * 2 ** min(self._wait_failures - 1, 16))
        self._wait_again_at_s = self._clock() + pause_s
        log.log(
            logging.WARNING if self._wait_failures == 1 else logging.DEBUG,
            "waiting for GPU events fails, next try in %.1f s: %s", pause_s, e,
        )  # fmt: skip
        if e.code in _GPU_FAULTS:
            # Says that some GPU is gone, not which: ask those that are listened to, once.
            uuid = self._find_lost()
            if uuid is not None:
                self._wait_again_at_s = 0.0
                self._register_if_changed()  # without it, at once: the others' events go on
                return GpuEvent(GpuEventKind.UNAVAILABLE, uuid, detail=str(e)), 0.0
        if self._wait_failures == 1:
            return GpuEvent(GpuEventKind.UNAVAILABLE, None, detail=str(e)), 0.0
        return None, pause_s

    def _find_lost(self) -> str | None:
        with self._lock:
            devices = [d for uuid, d in self._devices.items() if uuid not in self._sick]
        for device in devices:
            try:
                self._temperature(device.handle)  # asks the hardware; UUIDs are cached by the library
            except _SickError as e:
                if not e.library:
                    self._gpu_failed(device.uuid, e.fault, str(e.error))
                    return device.uuid
        return None

    def _listen_now(self) -> None:
        """Registers before the first wait, so that no event between `inventory` and it is missed. A
        waiter that is inside already does it itself, after at most one slice."""
        if not self._wait_lock.acquire(blocking=False):
            return
        try:
            if self._gate.enter(0.0):
                try:
                    self._register_if_changed()
                finally:
                    self._gate.leave()
        finally:
            self._wait_lock.release()

    def _register_if_changed(self) -> None:
        with self._lock:
            registration = self._registration
        if self._event_set is None or self._event_set.registration != registration:
            self._register(registration)

    def _register(self, registration: int) -> None:
        """A new event set with every GPU that answers and supports events."""
        if self._event_set is not None:
            self._quietly("nvmlEventSetFree", self._event_set.handle)
            self._event_set = None
        with self._lock:
            devices = [d for uuid, d in self._devices.items() if uuid not in self._sick]
        try:
            handle = self._call("nvmlEventSetCreate")
        except NvmlError as e:
            log.debug("no GPU events: %s", e)
            return
        uuids: dict[int, str] = {}
        for device in devices:
            try:
                supported = self._call("nvmlDeviceGetSupportedEventTypes", device.handle)
                if wanted := supported & sum(_EVENTS):
                    self._call("nvmlDeviceRegisterEvents", device.handle, wanted, handle)
                    uuids[address(device.handle)] = device.uuid
            except NvmlError as e:
                if e.code in _GPU_FAULTS:
                    self._gpu_failed(device.uuid, _GPU_FAULTS[e.code], str(e))
                log.debug("no events of GPU uuid=%s: %s", device.uuid, e)
        self._event_set = _EventSet(handle, registration, uuids)

    def _event(self, data: Any, events: _EventSet) -> GpuEvent | None:
        known = _EVENTS.get(int(data.eventType))
        if known is None:
            return None
        kind, detail = known
        if data.gpuInstanceId != _NO_INSTANCE:
            where = f"MIG instance {data.gpuInstanceId}/{data.computeInstanceId}"
            detail = f"{detail}, {where}" if detail else where
        xid = int(data.eventData) if kind is GpuEventKind.XID else None
        return GpuEvent(kind, events.uuids.get(address(data.device)), xid=xid, detail=detail)

    # ---- memory limits per cgroup (driver r615 and later) ---------------------------------------

    def set_memory_limits(self, uuid: str, cgroup_dir: str, soft_mib: int, hard_mib: int | None) -> None:
        hard = _UNLIMITED if hard_mib is None else hard_mib * MIB
        with self._limits(uuid, "set") as device:
            limits = self._limits_structure("c_nvmlSetMemoryLimits_v1_t", cgroup_dir)
            limits.softLimit, limits.hardLimit = soft_mib * MIB, hard
            self._call("nvmlDeviceSetMemoryLimits_v1", device.handle, limits)

    def get_memory_limits(self, uuid: str, cgroup_dir: str) -> tuple[int, int | None, int]:
        with self._limits(uuid, "get") as device:
            limits = self._limits_structure("c_nvmlGetMemoryLimits_v1_t", cgroup_dir)
            self._call("nvmlDeviceGetMemoryLimits_v1", device.handle, limits)
            hard = None if limits.hardLimit == _UNLIMITED else int(limits.hardLimit) // MIB
            return int(limits.softLimit) // MIB, hard, int(limits.currentUsed)

    def _limits_structure(self, name: str, cgroup_dir: str) -> Any:
        path = str(self._host.path(cgroup_dir)).encode()
        limits = self._library.structure(name, nameSpace=path)
        if limits is None:
            raise NvmlError(name, codes.FUNCTION_NOT_FOUND, "this nvidia-ml-py is older than 13.615")
        return limits

    @contextlib.contextmanager
    def _limits(self, uuid: str, verb: str) -> Iterator[_Device]:
        what = f"{verb} memory limits of a cgroup on {uuid}"
        with self._calling(what):
            with self._lock:
                sick = self._sick.get(uuid)
                device = self._devices.get(uuid)
            if sick is not None or device is None:
                fault, why = sick or (GpuFault.NOT_FOUND, "no such GPU")
                raise GpuError(f"cannot {what}: {why}", fault.value)
            try:
                yield device
            except NvmlError as e:
                if e.code in codes.UNSUPPORTED:
                    raise GpuError(f"cannot {what}: this driver has none", "not_supported") from e
                if e.code == codes.NO_PERMISSION:
                    raise GpuError(f"cannot {what}: {e}; only root may", GpuFault.NO_PERMISSION.value) from e
                if e.code in _GPU_FAULTS:
                    self._gpu_failed(uuid, _GPU_FAULTS[e.code], str(e))
                fault = _GPU_FAULTS.get(e.code) or _LIBRARY_FAULTS.get(e.code) or GpuFault.FAILED
                raise GpuError(f"cannot {what}: {e}", fault.value) from e

    # ---- topology -------------------------------------------------------------------------------

    def topology(self) -> Topology:
        """How the GPUs of the last inventory are joined. Raises GpuError."""
        links: dict[frozenset[str], GpuLink] = {}
        with self._calling("read the topology"):
            with self._lock:
                devices = [d for uuid, d in self._devices.items() if uuid not in self._sick]
                by_pci = {self._gpus[d.uuid].pci_address: d.uuid for d in devices}
            peers = {d.uuid: self._nvlink_peers(d.handle, by_pci) for d in devices}
            for a, b in combinations(devices, 2):
                direct = peers[a.uuid].get(b.uuid, 0)
                # Links that end in no GPU end in a switch, which joins all that have such links.
                switched = min(peers[a.uuid].get(None, 0), peers[b.uuid].get(None, 0))
                kind = _TOPOLOGY.get(
                    self._optional("nvmlDeviceGetTopologyCommonAncestor", a.handle, b.handle)
                )
                if direct or switched:
                    links[frozenset((a.uuid, b.uuid))] = GpuLink("nvlink", direct or switched)
                elif kind is not None:
                    links[frozenset((a.uuid, b.uuid))] = GpuLink(kind)
        return links

    def _nvlink_peers(self, handle: Any, by_pci: dict[str | None, str]) -> dict[str | None, int]:
        """Active links per peer; None: ends in something that is no GPU of ours."""
        peers: dict[str | None, int] = {}
        for link in range(_MAX_NVLINKS):
            active = self._optional("nvmlDeviceGetNvLinkState", handle, link)
            if active is None:
                break
            if not active:
                continue
            info = self._optional("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            if info is None:
                continue
            domain, _, rest = str(info.busId).lower().partition(":")
            peer = by_pci.get(f"{domain[-4:]}:{rest}")
            peers[peer] = peers.get(peer, 0) + 1
        return peers

    def close(self) -> None:
        self.wake()
        with self._inventory_lock:
            try:
                self._close_session()
            except GpuError as e:
                log.debug("NVML left open: %s", e)


def _why_none(refusals: list[NvmlError]) -> tuple[str, GpuFault]:
    """Why no GPU can be offered although NVML works."""
    if not refusals:
        return "NVML works but lists no GPU: look at lspci and the kernel log", GpuFault.NOT_FOUND
    first = refusals[0]
    if first.code == codes.NO_PERMISSION:
        return f"no GPU may be opened: {_NEEDS_NODES}", GpuFault.NO_PERMISSION
    return f"no GPU answers: {first}", _GPU_FAULTS.get(first.code, GpuFault.FAILED)


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
    prefix = "" if ci == gi else f"{ci}c."
    return f"{prefix}{gi}g.{gigabytes}gb"


def _multiprocessors(cores: float | None, capability: tuple[int, int] | None) -> int | None:
    """NVML counts CUDA cores; how many are in one multiprocessor is the generation's."""
    if not cores or capability is None:
        return None
    per_sm = 64 if capability[0] == 7 or capability in ((6, 0), (8, 0)) else 128
    return int(cores) // per_sm


def _percent(value: int | None) -> float | None:
    return float(value) if value is not None and 0 <= value <= 100 else None
