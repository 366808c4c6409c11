"""Compiles the stand-in driver, the programs that drive it, and the limiter under test.

What was built stays in `build/` under its sources' hash, so that a test run compiles only what
changed. The limiter is built with a relative directory for its files: each test runs its programs in
a directory of its own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from edgeagent.isolation.limiter.build import COMPILE_FLAGS, LINK_FLAGS, SOURCE_DIR

HERE = Path(__file__).resolve().parent
WARNINGS = ("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", f"-I{SOURCE_DIR}")
SANITIZERS = {
    "plain": ("-O2", "-g"),
    "asan": ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "tsan": ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=thread"),
}  # fmt: skip
RUNTIMES = {"plain": None, "asan": "libasan.so", "tsan": "libtsan.so"}


@dataclass(frozen=True, slots=True)
class Tools:
    """Paths of one build. `runtime`: the sanitizer's library, which must be preloaded first."""

    directory: Path
    runtime: str | None

    @property
    def limiter(self) -> Path:
        return self.directory / "libedgeagent-limiter.so"

    @property
    def drive(self) -> Path:
        return self.directory / "drive"

    @property
    def drive_linked(self) -> Path:
        return self.directory / "drive-linked"

    @property
    def bystander(self) -> Path:
        return self.directory / "bystander"

    @property
    def limits_library(self) -> Path:
        return self.directory / "limits.so"


def compiler() -> str | None:
    """The system's C compiler; tests that need one skip where there is none."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@cache
def tools(variant: str = "plain") -> Tools:
    """Builds what is not built yet; raises CalledProcessError with the compiler's words on stderr."""
    cc = compiler()
    assert cc is not None
    digest = hashlib.sha256(repr((COMPILE_FLAGS, LINK_FLAGS)).encode())
    for source in sorted([Path(__file__), *HERE.glob("*.c"), *SOURCE_DIR.glob("*.[ch]")]):
        digest.update(source.read_bytes())
    home = HERE / "build" / f"{variant}-{digest.hexdigest()[:16]}"
    if not home.is_dir():
        home.parent.mkdir(exist_ok=True)
        for old in home.parent.glob(f"{variant}-*"):
            shutil.rmtree(old, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix="making-", dir=home.parent))
        try:
            _make(cc, scratch, SANITIZERS[variant])
            scratch.chmod(0o755)  # other users run these programs too
            try:
                scratch.rename(home)
            except OSError:
                assert home.is_dir()  # another test process was faster
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    name = RUNTIMES[variant]
    runtime = None
    if name is not None:
        said = subprocess.run([cc, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        runtime = said.stdout.strip()
        if not os.path.isabs(runtime):
            runtime = None
    return Tools(home, runtime)


def _make(cc: str, out: Path, flags: tuple[str, ...]) -> None:
    own = tuple(f for f in COMPILE_FLAGS if f != "-O2")
    limiter = sorted(map(str, SOURCE_DIR.glob("*.c")))
    driver = out / "libcuda.so.1"
    commands: list[list[str]] = [
        [*own, *flags, *(f for f in LINK_FLAGS if not (f == "-Wl,-z,defs" and "-O1" in flags)),
         '-DLIMITER_DIR="."', "-DLOCK_GIVE_UP_NS=1500000000LL", "-o", str(out / "libedgeagent-limiter.so"), *limiter, "-ldl"],
        [*WARNINGS, *flags, "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-Bsymbolic",
         "-Wl,-soname,libcuda.so.1", "-o", str(driver), str(HERE / "libcuda.c"), "-lpthread"],
        [*WARNINGS, *flags, "-o", str(out / "drive"), str(HERE / "drive.c"), "-ldl", "-lpthread"],
        [*WARNINGS, *flags, "-DLINKED", "-o", str(out / "drive-linked"), str(HERE / "drive.c"), str(driver),
         "-ldl", "-lpthread"],
        [*WARNINGS, *flags, "-fPIC", "-shared", "-Wl,-soname,libneighbour.so", "-o", str(out / "libneighbour.so"), str(HERE / "neighbour.c"),
         "-ldl"],
        [*WARNINGS, *flags, "-o", str(out / "bystander"), str(HERE / "bystander.c"),
         str(out / "libneighbour.so"), "-Wl,-rpath,$ORIGIN", "-ldl"],
        [*WARNINGS, *flags, "-fPIC", "-shared", "-o", str(out / "limits.so"), str(SOURCE_DIR / "limits.c")],
    ]  # fmt: skip
    for command in commands:
        subprocess.run([cc, *command], check=True)
