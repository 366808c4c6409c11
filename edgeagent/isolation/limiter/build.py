"""Builds the limiter's library: `python -m edgeagent.isolation.limiter.build`.

With `ziglang` from PyPI for x86_64 and aarch64 against glibc 2.17, so that one library serves images
from 2014 on. Without it with the system's C compiler, for this machine only and needing this
machine's glibc. With neither nothing is built, which is no error: everything else works, and the
limiter's probe says `not_built`. Standard library only: setup.py loads this file by its path.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent
ARCHES = ("x86_64", "aarch64")
OLDEST_GLIBC = "2.17"

COMPILE_FLAGS = (
    "-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden",
    "-fno-math-errno", "-fstack-protector-strong",
)  # fmt: skip
# -Bsymbolic: whoever else exports cuMemAlloc_v2, our table means ours. -z nodelete: it cannot go away.
LINK_FLAGS = (
    "-shared", "-Wl,-Bsymbolic", "-Wl,-z,now", "-Wl,-z,relro", "-Wl,-z,nodelete", "-Wl,-z,defs",
    "-Wl,-soname,libedgeagent-limiter.so",
)  # fmt: skip


class BuildError(Exception):
    """The compiler is there and did not build the library; its text is what the compiler said."""


def native_arch() -> str:
    """This machine's architecture as the library's name has it."""
    machine = platform.machine()
    return {"arm64": "aarch64", "AMD64": "x86_64"}.get(machine, machine)


def library_name(arch: str) -> str:
    return f"libedgeagent-limiter-{arch}.so"


def find_compiler(arch: str, prefer: str = "auto") -> tuple[str, ...] | None:
    """The command that compiles C for `arch`, or None. `prefer`: auto, zig or cc."""
    if prefer in ("auto", "zig") and arch in ARCHES and find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "cc", "-target", f"{arch}-linux-gnu.{OLDEST_GLIBC}")
    if prefer in ("auto", "cc") and arch == native_arch() and arch in ARCHES and sys.platform == "linux":
        for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
            path = shutil.which(name) if name else None
            if path is not None:
                return (path,)
    return None


def build(
    out: Path,
    arch: str,
    compiler: Sequence[str],
    *,
    extra: Sequence[str] = (),
    strip: bool = True,
) -> Path:
    """Builds the library for `arch` into the directory `out`; returns its path. Raises BuildError."""
    out.mkdir(parents=True, exist_ok=True)
    target = out / library_name(arch)
    sources = sorted(str(p) for p in SOURCE_DIR.glob("*.c"))
    with tempfile.TemporaryDirectory(prefix="edgeagent-build-", dir=out) as scratch:
        made = Path(scratch) / target.name
        command = [
            *compiler, *COMPILE_FLAGS, *LINK_FLAGS, *(("-s",) if strip else ()), *extra,
            "-o", str(made), *sources, "-ldl",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
        if done.returncode != 0:
            raise BuildError(f"{' '.join(command)}\n{done.stderr}")
        made.chmod(0o755)
        made.replace(target)
    return target


def _environment() -> dict[str, str]:
    # zig needs a cache directory, and pip's build environments may have no HOME.
    env = dict(os.environ)
    if "HOME" not in env and "ZIG_GLOBAL_CACHE_DIR" not in env:
        env["ZIG_GLOBAL_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), f"edgeagent-zig-{os.getuid()}")
    return env


def build_all(out: Path, prefer: str = "auto") -> tuple[dict[str, Path], list[str]]:
    """Builds what can be built; returns the libraries by architecture, and a sentence for each that
    is missing. Never raises for a missing or failing compiler."""
    built: dict[str, Path] = {}
    missing: list[str] = []
    for arch in ARCHES:
        compiler = find_compiler(arch, prefer)
        if compiler is None:
            missing.append(f"{arch}: neither ziglang nor a system compiler for it")
            continue
        try:
            built[arch] = build(out, arch, compiler)
        except (BuildError, OSError) as e:
            missing.append(f"{arch}: {e}")
    return built, missing


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m edgeagent.isolation.limiter.build", description=__doc__)
    parser.add_argument("--out", type=Path, default=SOURCE_DIR, help="default: beside the sources")
    parser.add_argument("--compiler", choices=("auto", "zig", "cc"), default="auto")
    args = parser.parse_args(argv)
    built, missing = build_all(args.out, args.compiler)
    for path in built.values():
        print(path)
    for sentence in missing:
        print(f"not built: {sentence}", file=sys.stderr)
    return 0 if built else 1


if __name__ == "__main__":
    raise SystemExit(main())
