"""The shipped training example: its script writes a checkpoint on SIGTERM and goes on from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

MANIFEST = Path(__file__).parents[2] / "k3s-manifests/examples/training-checkpoint.yaml"


def documents() -> dict[str, Any]:
    return {d["kind"]: d for d in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))}


def start(script: Path, directory: Path) -> tuple[subprocess.Popen[str], int]:
    """The running script and the step it started at."""
    process = subprocess.Popen(
        [sys.executable, "-u", str(script)],
        env={**os.environ, "CHECKPOINT_DIR": str(directory)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith("starting at step "), first
    return process, int(first.split()[-1])


def test_a_sigterm_leaves_a_checkpoint_and_the_next_pod_goes_on_from_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(documents()["ConfigMap"]["data"]["train.py"])
    first, began = start(script, tmp_path)
    try:
        assert began == 0
        first.send_signal(signal.SIGTERM)
        out, _ = first.communicate(timeout=20)
        assert first.returncode == 143
        reached = json.loads((tmp_path / "state.json").read_text())["step"]
        assert f"checkpoint at step {reached}" in out
    finally:
        first.kill()
    second, resumed = start(script, tmp_path)
    second.kill()
    second.communicate(timeout=20)
    assert resumed == reached


def test_an_eviction_is_no_failure_of_the_job_and_leaves_time() -> None:
    job = documents()["Job"]["spec"]
    assert job["podFailurePolicy"]["rules"][0] == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] >= 60
    limits = pod["containers"][0]["resources"]["limits"]
    assert set(limits) == {"volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores"}
    claim = documents()["PersistentVolumeClaim"]["metadata"]["name"]
    assert any(v.get("persistentVolumeClaim", {}).get("claimName") == claim for v in pod["volumes"])
