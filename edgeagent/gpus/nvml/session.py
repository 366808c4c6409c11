"""The library opened and closed: one session at a time, and why there is none.

nvmlInit fixes the list of GPUs and the mapped library cannot be exchanged, so a changed set of GPUs or a
reloaded driver needs Shutdown and Init, which need that no call is in flight; and a library that no
longer matches the kernel module needs a new process.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from edgeagent.errors import GpuError
from edgeagent.gpus import nvidia_host
from edgeagent.gpus.model import GpuFault
from edgeagent.gpus.nvml.library import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    LIB_RM_VERSION_MISMATCH,
    LIBRARY_FAULTS,
    NO_PERMISSION,
    UNKNOWN,
    GoneError,
    Library,
    NvmlError,
)
from edgeagent.hostroot import HostRoot

log = logging.getLogger(__name__)

NEEDS_NODES = "the agent needs read and write access to /dev/nvidiactl and /dev/nvidia*"


class CallGate:
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


class Session:
    """NVML as this process has it. `fault`: why it cannot be used now, if it cannot. `bound`: what the
    kernel module drove when it was opened."""

    def __init__(self, host: HostRoot, library: Library, call_timeout_s: float) -> None:
        self._host = host
        self.library = library
        self._call_timeout_s = call_timeout_s
        self.gate = CallGate()
        self.is_open = False
        self.fault: tuple[GpuFault, str] | None = None
        self.bound: frozenset[str] = frozenset()
        self._module_at_open: str | None = None

    @property
    def usable(self) -> bool:
        return self.is_open and self.fault is None

    def open(self, evidence: list[str]) -> None:
        """Raises GpuError with the reason and what to do."""
        self.library.load()
        module = nvidia_host.kernel_module_version(self._host)
        with self._alone():
            try:
                self.library.call("nvmlInit")
            except NvmlError as e:
                self.fault = self._explain_init(e, module)
                raise GpuError(self.fault[1], self.fault[0].value) from e
            self.is_open = True
            self.fault = None
            self.bound = nvidia_host.bound_gpus(self._host)
            self._module_at_open = module or self._module_at_open
        evidence.append(
            f"NVML {self.library.version() or '(version unknown)'} from {self.library.path}, "
            f"kernel module {module or 'version not shown'}"
        )

    def close(self, take_events: Callable[[], Any]) -> bool:
        """Shuts the library down; False: it was closed. `take_events` gives the handle of the event
        set, if there is one, to be freed before. Raises GpuError where a call in flight forbids it."""
        with self._alone():
            if not self.is_open:
                return False
            events = take_events()
            if events is not None:
                self.quietly("nvmlEventSetFree", events)
            self.quietly("nvmlShutdown")
            self.is_open = False
            return True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self.gate.alone(self._call_timeout_s) as alone:
            if not alone:
                raise GpuError(
                    "cannot initialise NVML again: an earlier call has not returned from the driver",
                    GpuFault.UNRESPONSIVE.value,
                )
            yield

    @contextlib.contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Between here and the end NVML is not shut down. Raises GpuError, also for GoneError."""
        if not self.gate.enter(self._call_timeout_s):
            raise GpuError(f"cannot {what}: NVML is being initialised", GpuFault.UNRESPONSIVE.value)
        try:
            if not self.usable:
                fault, why = self.fault or (GpuFault.FAILED, "NVML is closed")
                raise GpuError(f"cannot {what}: {why}", fault.value)
            yield
        except GoneError as e:
            if e.library:
                raise self.failed(e.error) from e
            raise GpuError(f"cannot {what}: {e.error}", e.fault.value) from e
        finally:
            self.gate.leave()

    def quietly(self, function: str, *args: Any) -> None:
        try:
            self.library.call(function, *args)
        except NvmlError as e:
            log.debug("%s", e)

    def failed(self, e: NvmlError) -> GpuError:
        """Remembers that nothing works until the library is opened again; returns what to raise."""
        fault = LIBRARY_FAULTS.get(e.code, GpuFault.FAILED)
        why = str(e)
        if fault is GpuFault.DRIVER_MISMATCH:
            why = self._explain_mismatch(nvidia_host.kernel_module_version(self._host))
        if self.fault is None:
            log.warning("NVML does not work any more fault=%s: %s", fault.value, why)
        self.fault = (fault, why)
        return GpuError(why, fault.value)

    def _explain_init(self, e: NvmlError, module: str | None) -> tuple[GpuFault, str]:
        if e.code == LIB_RM_VERSION_MISMATCH:
            return GpuFault.DRIVER_MISMATCH, self._explain_mismatch(module)
        if e.code == DRIVER_NOT_LOADED:
            return GpuFault.DRIVER_NOT_LOADED, (
                "the nvidia kernel module is not loaded: try modprobe nvidia; if that fails look at dkms "
                "status, Secure Boot and the kernel log"
            )
        if e.code == NO_PERMISSION:
            return GpuFault.NO_PERMISSION, f"NVML refuses access: {NEEDS_NODES}"
        if e.code == UNKNOWN and self._module_at_open is not None and self._module_at_open == module:
            # It worked in this process and the driver on the host is the same: systemd's daemon-reload
            # took the container's device access away. Only a new container gets it back.
            return GpuFault.LOST_DEVICE_ACCESS, (
                "this process lost access to the GPU device nodes although the driver works on the host: "
                "restart the agent (in a pod: delete the pod)"
            )
        if e.code == FUNCTION_NOT_FOUND:
            return GpuFault.FAILED, f"{self.library.path} is too old for this agent: {e}; upgrade the driver"
        return LIBRARY_FAULTS.get(e.code, GpuFault.FAILED), f"cannot initialise NVML: {e}"

    def _explain_mismatch(self, module: str | None) -> str:
        library = self.library.version() or "unknown"
        cure = (
            "the agent must be restarted"
            if self._outdated(module)
            else "reboot, or reload the nvidia modules"
        )
        kernel = module or "of another version"
        return f"the NVIDIA library is {library} but the loaded kernel module is {kernel}: {cure}"

    def _outdated(self, module: str | None) -> bool:
        reloaded = None not in (module, self._module_at_open) and module != self._module_at_open
        return reloaded or self.library.replaced

    @property
    def needs_reexec(self) -> bool:
        """Whether only a new process can recover: the driver changed and this process keeps the old
        library mapped, or it lost its device nodes. A container must be recreated (exit non-zero)."""
        fault = self.fault[0] if self.fault else None
        if fault is GpuFault.DRIVER_MISMATCH:
            return self._outdated(nvidia_host.kernel_module_version(self._host))
        return fault is GpuFault.LOST_DEVICE_ACCESS
