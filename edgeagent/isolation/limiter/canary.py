"""Tries the limiter's library against this host's driver, as a process of its own.

    LD_PRELOAD=LIBRARY python -I -S canary.py DIRECTORY [LIBCUDA]

LIBRARY is a copy that looks for its files in DIRECTORY, which is empty. The canary first sees
everything refused, then puts a limit of 64 MiB there and does what a program does: asks how much
memory there is, and takes too much by each way to the driver. Prints one JSON object: `stage` is how
far it came (`library`, `files`, `driver`, `context`, `done`), `wrong` what came out otherwise than it
must, `why` what kept it from going on. It takes a GPU context for a moment. Standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
from typing import Any

MIB = 1024 * 1024
LIMIT_MIB = 64
LIMITS = (
    f"edgeagent-limits 1\nmemory_bytes {LIMIT_MIB * MIB}\ncores_pct 100\noverhead_bytes 0\nunified 0\n"
    "share canary\ngpu any\nend\n"
)
STATE_BYTES = 12288 + 4096 * 64
STATE_HEADER = struct.pack("<QII", 0x314D494C45474445, 1, 4096)


class Canary:
    def __init__(self) -> None:
        self.report: dict[str, Any] = {"stage": "library", "wrong": [], "why": None, "driver": None}
        self.libc = ctypes.CDLL(None, use_errno=True)

    def check(self, what: str, got: object, wanted: object) -> None:
        if got != wanted:
            self.report["wrong"].append(f"{what}: {got} instead of {wanted}")

    def put_files(self, directory: str) -> None:
        with open(os.path.join(directory, "limits"), "w") as f:
            f.write(LIMITS)
        with open(os.path.join(directory, "state"), "wb") as f:
            f.write(STATE_HEADER)
            f.truncate(STATE_BYTES)

    def closed_without_files(self) -> None:
        """Before the files are there every allocation must be refused, driver or not."""
        pointer = ctypes.c_uint64()
        refused = self.libc.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(MIB))
        self.check("allocation without a limits file", refused, 2)

    def try_driver(self, cuda: ctypes.CDLL) -> str | None:
        pointer, size, total = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_size_t()
        context = ctypes.c_void_p()
        rc = cuda.cuInit(0)
        if rc != 0:
            return f"cuInit answered {rc}"
        self.report["stage"] = "context"
        self.check("cuDeviceTotalMem", cuda.cuDeviceTotalMem_v2(ctypes.byref(total), 0), 0)
        self.check("total memory", total.value // MIB, LIMIT_MIB)
        rc = cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
        if rc != 0:
            return f"cuCtxCreate answered {rc}"
        rc = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(MIB))
        if rc != 0:
            return f"an allocation of 1 MiB was answered {rc}: the GPU may be full"
        too_much = ctypes.c_size_t(LIMIT_MIB * MIB)
        other = ctypes.c_uint64()
        self.check("over the limit, dlsym", cuda.cuMemAlloc_v2(ctypes.byref(other), too_much), 2)
        # Within the libc handle's scope come the program, what is preloaded, and what is linked.
        self.check("over the limit, linked", self.libc.cuMemAlloc_v2(ctypes.byref(other), too_much), 2)
        self.check_proc_address(cuda, too_much)
        if hasattr(cuda, "cuMemAllocAsync"):
            rc = cuda.cuMemAllocAsync(ctypes.byref(other), too_much, None)
            self.check("over the limit, pool", rc, 2)
        self.check("cuMemGetInfo", cuda.cuMemGetInfo_v2(ctypes.byref(size), ctypes.byref(total)), 0)
        self.check("total memory, cuMemGetInfo", total.value // MIB, LIMIT_MIB)
        self.check("free memory, cuMemGetInfo", size.value // MIB, LIMIT_MIB - 1)
        self.check("freeing", cuda.cuMemFree_v2(pointer), 0)
        cuda.cuCtxDestroy_v2(context)
        self.report["stage"] = "done"
        return None

    def check_proc_address(self, cuda: ctypes.CDLL, too_much: ctypes.c_size_t) -> None:
        function, status, pointer = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint64()
        if hasattr(cuda, "cuGetProcAddress_v2"):
            rc = cuda.cuGetProcAddress_v2(
                b"cuMemAlloc", ctypes.byref(function), 12000, ctypes.c_uint64(0), ctypes.byref(status)
            )
        elif hasattr(cuda, "cuGetProcAddress"):
            rc = cuda.cuGetProcAddress(b"cuMemAlloc", ctypes.byref(function), 11030, ctypes.c_uint64(0))
        else:
            return
        if rc != 0 or not function.value:
            self.check("cuGetProcAddress", rc or "no function", 0)
            return
        allocate = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)(function.value)
        got = allocate(ctypes.addressof(pointer), too_much.value)
        self.check("over the limit, cuGetProcAddress", got, 2)

    def run(self, directory: str, driver: str) -> None:
        report = self.report
        if not hasattr(self.libc, "cuMemAlloc_v2"):
            report["wrong"].append("the library was not preloaded")
            return
        # Its complaint is for programs; here it is what we want to see, quietly.
        stderr, quiet = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)
        self.closed_without_files()
        os.dup2(stderr, 2)
        self.put_files(directory)
        report["stage"] = "files"
        try:
            cuda = ctypes.CDLL(driver)
        except OSError:
            report["why"] = f"no {driver} on this host"
            return
        report["stage"] = "driver"
        report["driver"] = driver
        report["why"] = self.try_driver(cuda)


def main() -> None:
    # A driver takes memory, and the agent's own control group has little: better this process than it.
    with open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")
    canary = Canary()
    canary.run(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "libcuda.so.1")
    print(json.dumps(canary.report))


if __name__ == "__main__":
    main()
