"""The wall around pynvml: loads libnvidia-ml.so.1, calls it, and turns its errors into ours.

pynvml keeps one library for the whole process, so there is one `Library` in use at a time.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path
from typing import Any

import pynvml

from edgeagent.errors import GpuError
from edgeagent.gpus.model import GpuFault
from edgeagent.hostroot import HostRoot

log = logging.getLogger(__name__)

SONAME = "libnvidia-ml.so.1"

# Where drivers put the library beside the loader's search path: WSL, Debian, GPU operator, GKE, Jetson.
DIRECTORIES = (
    "/usr/lib/wsl/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu/nvidia",
    "/usr/lib64",
    "/run/nvidia/driver/usr/lib64",
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "/usr/local/nvidia/lib64",
)

# nvmlReturn_t, as far as they are told apart here.
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
NO_DATA = 21
ARGUMENT_VERSION_MISMATCH = 25
DEPRECATED = 26
GPU_NOT_FOUND = 28
UNKNOWN = 999

# "This GPU, driver or state has no such reading", said in the ways that drivers say it.
UNSUPPORTED = frozenset(
    {NOT_SUPPORTED, FUNCTION_NOT_FOUND, NOT_FOUND, NO_DATA, ARGUMENT_VERSION_MISMATCH, DEPRECATED}
)

GPU_FAULTS = {
    GPU_IS_LOST: GpuFault.LOST,
    GPU_NOT_FOUND: GpuFault.LOST,
    RESET_REQUIRED: GpuFault.RESET_REQUIRED,
}
LIBRARY_FAULTS = {
    UNINITIALIZED: GpuFault.FAILED,
    DRIVER_NOT_LOADED: GpuFault.DRIVER_NOT_LOADED,
    LIBRARY_NOT_FOUND: GpuFault.LIBRARY_MISSING,
    LIB_RM_VERSION_MISMATCH: GpuFault.DRIVER_MISMATCH,
}

_NOT_AVAILABLE = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})  # NVML_VALUE_NOT_AVAILABLE


class NvmlError(Exception):
    """A call answered something else than success. Stays inside the NVML back end."""

    def __init__(self, function: str, code: int, text: str) -> None:
        self.function = function
        self.code = code
        super().__init__(f"{function}: {text} (NVML {code})")


class GoneError(Exception):
    """A call said that the GPU as a whole (or, with `library`, the library) is not there any more."""

    def __init__(self, error: NvmlError, fault: GpuFault, library: bool) -> None:
        self.error = error
        self.fault = fault
        self.library = library
        super().__init__(str(error))


def raise_if_gone(e: NvmlError) -> None:
    """Raises GoneError for the answers that say more than "not this reading"."""
    if e.code in LIBRARY_FAULTS:
        raise GoneError(e, LIBRARY_FAULTS[e.code], library=True) from e
    if e.code in GPU_FAULTS:
        raise GoneError(e, GPU_FAULTS[e.code], library=False) from e


class Library:
    """libnvidia-ml as one process sees it. `library_path` given: that file and no other."""

    def __init__(self, host: HostRoot, library_path: str | None = None) -> None:
        self._host = host
        self._wanted = library_path
        self._loaded: ctypes.CDLL | None = None
        self._file: tuple[str, int, int] | None = None  # path, device, inode when it was loaded
        self.path: str | None = None

    def load(self) -> None:
        """Loads it unless it is. Raises GpuError saying what is missing and what to do."""
        if self._loaded is None:
            self._loaded, self.path = self._find()
            self._file = _mapped_file(self.path)
        if pynvml.nvmlLib is not self._loaded:
            # pynvml's own loader knows only the bare name; function pointers belong to a library.
            pynvml.nvmlLib = self._loaded
            pynvml._nvmlGetFunctionPointer_cache.clear()

    def _find(self) -> tuple[ctypes.CDLL, str]:
        if self._wanted is not None:
            candidates = [self._wanted]
        else:
            found = [f"{directory}/{SONAME}" for directory in DIRECTORIES]
            candidates = [SONAME, *found]
            if self._host.root != Path("/"):
                # In a pod whose runtime injected no library: the host's own.
                candidates += [str(self._host.path(self._host.resolve(path))) for path in found]
        refusals = []
        for candidate in candidates:
            try:
                return ctypes.CDLL(candidate), candidate
            except OSError as e:
                if "No such file" not in str(e):
                    refusals.append(str(e))
        if refusals:
            denied = "Permission denied" in refusals[0]
            raise GpuError(
                f"cannot load NVIDIA's management library: {refusals[0]}; "
                + ("make the file readable for the agent" if denied else "reinstall the driver's libraries"),
                (GpuFault.NO_PERMISSION if denied else GpuFault.LIBRARY_MISSING).value,
            )
        raise GpuError(
            f"cannot load {self._wanted}: no such file; correct gpus.nvml.libraryPath"
            if self._wanted is not None
            else f"cannot find {SONAME}: install the NVIDIA driver (its libnvidia-ml), run the pod with the "
            "nvidia runtime class, or set gpus.nvml.libraryPath",
            GpuFault.LIBRARY_MISSING.value,
        )

    @property
    def replaced(self) -> bool:
        """Whether the file that is mapped into this process is not the one a new process would load:
        the driver was upgraded. The old one stays mapped whatever is called."""
        if self._file is None:
            return False
        path, device, inode = self._file
        for name in (path, os.path.join(os.path.dirname(path), SONAME)):
            try:
                now = os.stat(name)
            except OSError:
                if name == path:
                    return True
                continue
            if (now.st_dev, now.st_ino) != (device, inode):
                return True
        return False

    def version(self) -> str | None:
        """The driver version the library belongs to ("550.107.02"). Needs no initialisation."""
        try:
            text = str(self.call("nvmlSystemGetNVMLVersion"))
        except NvmlError:
            text = ""
        major, _, rest = text.partition(".")
        if rest and len(major) <= 2:  # "12.550.107.02": the first number is CUDA's
            return rest
        name = os.path.basename(self._file[0]) if self._file else ""
        tail = name.removeprefix("libnvidia-ml.so.")
        return text or (tail if tail != name and "." in tail else None)

    def call(self, function: str, *args: Any) -> Any:
        """Calls pynvml's `function`. Raises NvmlError; one that this pynvml lacks answers as a driver
        that lacks it."""
        known = getattr(pynvml, function, None)
        if known is None:
            raise NvmlError(function, FUNCTION_NOT_FOUND, "not in this nvidia-ml-py")
        try:
            return known(*args)
        except pynvml.NVMLError as e:
            raise NvmlError(function, e.value, str(e)) from e
        except UnicodeDecodeError as e:
            raise NvmlError(function, UNKNOWN, "the driver answered with bytes that are no text") from e

    def must(self, function: str, *args: Any) -> Any:
        """A call that has to succeed. Raises GoneError."""
        try:
            return self.call(function, *args)
        except NvmlError as e:
            raise_if_gone(e)
            raise GoneError(e, GpuFault.FAILED, library=False) from e

    def optional(self, function: str, *args: Any) -> Any:
        """A call whose answer may be missing (None). Raises GoneError where GPU or library is gone."""
        try:
            return self.call(function, *args)
        except NvmlError as e:
            raise_if_gone(e)
            if e.code not in UNSUPPORTED:
                log.debug("no reading: %s", e)
            return None

    def number(self, function: str, *args: Any) -> float | None:
        """As optional; None for "value not available" too."""
        value = self.optional(function, *args)
        return None if value is None or value in _NOT_AVAILABLE else value

    @staticmethod
    def structure(name: str, **fields: Any) -> Any:
        """One of pynvml's ctypes structures, filled; None where this pynvml has none of that name."""
        kind = getattr(pynvml, name, None)
        if kind is None:
            return None
        made = kind()
        for key, value in fields.items():
            setattr(made, key, value)
        return made


def address(handle: Any) -> int:
    """A handle as a number: what tells two handles apart."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _mapped_file(loaded_as: str) -> tuple[str, int, int] | None:
    """The file behind a library just loaded, through this process's own memory map (no host path:
    it is about this process, in its own mount namespace)."""
    try:
        if "/" in loaded_as:
            path = os.path.realpath(loaded_as)
        else:
            with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
                path = next(line.split(None, 5)[5].strip() for line in maps if f"/{SONAME[:-2]}" in line)
        now = os.stat(path)
    except (OSError, StopIteration, IndexError):
        return None
    return path, now.st_dev, now.st_ino
