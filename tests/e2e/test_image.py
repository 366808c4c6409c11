"""The container image: built from the bundle on a base made here, and run as the manifests run it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.box.bundle import ARCH, CACHE, CHECKOUT, PYTHON, bundle

BASE, IMAGE = "localhost/edgeagent-test-base", "localhost/edgeagent-test"
DEBIAN, DEBIAN_PYTHON = "bookworm", "3.11"


def _missing() -> str | None:
    for tool in ("buildah", "mmdebstrap"):
        if shutil.which(tool) is None:
            return f"needs {tool} (apt-get install buildah mmdebstrap)"
    if PYTHON != DEBIAN_PYTHON:
        return f"the base has Python {DEBIAN_PYTHON}, the tests' bundle {PYTHON}"
    return None if os.geteuid() == 0 else "needs root, or subordinate user ids"


REASON = _missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


STORE = [
    "--root", str(CACHE.parent / "images"), "--runroot", "/run/edgeagent-test-images", "--storage-driver", "overlay",
]  # fmt: skip


def buildah(*argv: str) -> str:
    done = subprocess.run(["buildah", *STORE, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    base = CACHE.parent / f"{DEBIAN}-python.tar"
    if not base.exists():
        base.parent.mkdir(exist_ok=True)
        subprocess.run(
            ["mmdebstrap", "--variant=minbase", "--include=python3,python3-venv", DEBIAN, str(base)], check=True,
            capture_output=True,
        )  # fmt: skip
    scratch = buildah("from", "scratch").strip()
    buildah("add", scratch, str(base), "/")
    buildah("commit", "--rm", scratch, BASE)
    context = tmp_path_factory.mktemp("image")
    (context / "dist").mkdir()
    shutil.copy(bundle() / "bundle.tar.gz", context / f"dist/edgeagent-0.1.0-{ARCH}.tar.gz")
    for name in ("Containerfile", ".containerignore"):
        shutil.copy(CHECKOUT / name, context)
    buildah("build", "--isolation", "chroot", "--build-arg", f"BASE={BASE}", "-t", IMAGE, str(context))
    yield IMAGE
    buildah("rmi", "--all", "--force")
    shutil.rmtree(CACHE.parent / "images", ignore_errors=True)


def run(image: str, *argv: str, mounts: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    container = buildah("from", image).strip()
    try:
        volumes = [f for m in mounts for f in ("-v", m)]
        return subprocess.run(
            ["buildah", *STORE, "run", "--isolation", "chroot", *volumes, container, "--", *argv],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        buildah("rm", container)


def test_image_runs(image: str, tmp_path: Path) -> None:
    """As its unprivileged user it checks a configuration and finds simulated GPUs."""
    config = tmp_path / "agent.yaml"
    config.write_text("gpus: {source: simulated}\n")
    tmp_path.chmod(0o755)
    done = run(
        image,
        "edgeagent",
        "check-config",
        "/etc/edgeagent/agent.yaml",
        mounts=(f"{tmp_path}:/etc/edgeagent:ro",),
    )
    assert done.returncode == 0, done.stderr
    assert "/etc/edgeagent/agent.yaml is valid" in done.stdout
    assert "RTX 4000" in done.stdout
    assert run(image, "id", "-u").stdout.strip() == "65534"


def test_image_is_slim(image: str) -> None:
    """No pip, no wheels, no compiler output of the build stage; what it adds to its base is the program."""
    listed = run(
        image, "sh", "-c", "ls / /opt/edgeagent/venv/bin /opt; ls /dist 2>&1; du -sm /opt/edgeagent"
    ).stdout
    assert "dist\n" not in listed.splitlines()[0]
    assert "pip" not in listed
    assert int(listed.splitlines()[-1].split()[0]) <= 75
    inspected = json.loads(buildah("inspect", "--type", "image", image))
    assert inspected["OCIv1"]["config"]["Entrypoint"] == ["edgeagent"]
