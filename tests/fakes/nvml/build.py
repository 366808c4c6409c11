"""Builds the fake libnvidia-ml.so.1 with cc (or zig where there is none), once per source text."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nvml.c")
CACHE = Path(__file__).parents[3] / ".cache" / "fake-nvml"
NAME = "libnvidia-ml.so.1"


def compiler() -> list[str]:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return [name]
    return [sys.executable, "-m", "ziglang", "cc"]


def looked_up_symbols() -> set[str]:
    """Every export that the installed nvidia-ml-py asks the library for."""
    import pynvml

    text = Path(pynvml.__file__).read_text(encoding="utf-8")
    return set(re.findall(r'_nvmlGetFunctionPointer\(["\'](nvml\w+)', text))


def implemented_symbols() -> set[str]:
    source = SOURCE.read_text(encoding="utf-8")
    names = set(re.findall(r"\bnvml[A-Z]\w+", source))
    for base in re.findall(r"^PROCESSES\((\w+),", source, re.M):
        names |= {base + "_v2", base + "_v3"}
    return names


def library(old_driver: bool = False) -> Path:
    """Path of the built library. `old_driver`: one of the r470 kind, without the newer symbols."""
    stubs = "".join(f"STUB({name})\n" for name in sorted(looked_up_symbols() - implemented_symbols()))
    flags = ["-DOLD_DRIVER"] if old_driver else []
    key = hashlib.sha256((SOURCE.read_text() + stubs + str(flags)).encode()).hexdigest()[:16]
    built = CACHE / key / NAME
    if built.exists():
        return built
    work = CACHE / f"{key}.{os.getpid()}"
    work.mkdir(parents=True, exist_ok=True)
    (work / "stubs.h").write_text(stubs)
    command = compiler()
    command += ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Wno-format-truncation", "-fPIC", "-shared"]
    command += ["-fvisibility=hidden", *flags, f"-I{work}", str(SOURCE), "-o", str(work / NAME)]
    subprocess.run([*command, "-lpthread", "-ldl"], check=True)
    try:
        work.rename(CACHE / key)
    except OSError:  # another test process was faster
        shutil.rmtree(work)
    return built
