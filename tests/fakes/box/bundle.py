"""The bundle that tests install from: made by tools/make-bundle.sh for this machine and this Python."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]
CACHE = CHECKOUT / ".cache/install-tests"
ARCH = os.uname().machine
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

_FILES = ("pyproject.toml", "setup.py", "install.sh", "tools/make-bundle.sh", "systemd/edgeagent.service")
_TREES = ("edgeagent", "configs")


def _source_hash() -> str:
    digest = hashlib.sha256(PYTHON.encode())
    files = [p for tree in _TREES for p in (CHECKOUT / tree).rglob("*")]
    for path in sorted([*files, *(CHECKOUT / name for name in _FILES)]):
        if path.is_file() and path.suffix not in (".pyc", ".so"):
            digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def bundle() -> Path:
    """A directory with `bundle` and `bundle.tar.gz`. Made once per source, kept below .cache."""
    made = CACHE / _source_hash()
    if made.exists():
        return made
    shutil.rmtree(CACHE, ignore_errors=True)
    work = CACHE / "work"
    done = subprocess.run(
        ["tools/make-bundle.sh", "-o", str(work), "-a", ARCH, "-p", PYTHON],
        cwd=CHECKOUT, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (packed,) = work.glob("*.tar.gz")
    with tarfile.open(packed) as tar:
        tar.extractall(work)
    packed.rename(work / "bundle.tar.gz")
    (unpacked,) = (d for d in work.iterdir() if d.is_dir())
    unpacked.rename(work / "bundle")
    work.rename(made)
    return made
