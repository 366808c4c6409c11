"""What every test may use."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A temporary directory with a short path: unix socket paths end at 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="ea-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
