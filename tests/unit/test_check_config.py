"""check-config says what a file will do, or all that is wrong with it; admission-policies prints manifests."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from edgeagent.cli.main import main

FILE = """
gpus: {source: simulated}
node: {name: box-17, site: plant-3}
sharing:
  memoryUnitMiB: 64
  gpus:
    - match: {index: 1}
      mode: exclusive
    - match: {model: "*A100*"}
      mode: mig
      reserveMiB: 500
isolation: {memory: nvml-cgroup, compute: auto, fallback: true, allowMps: true, watchdog: {policy: evict}}
fleet:
  enabled: true
  brokers: ["mqtt://a:1883", "mqtts://b:8883"]
  link: metered
  monthlyMb: 10
"""

SAID = [
    "is valid",
    "box-17, site plant-3",
    "volcano.sh/vgpu-memory-64mi (64 MiB a unit)",
    "GPU 1: exclusive (whole cards",
    "GPUs like '*A100*': mig (one device per MIG instance), 500 MiB reserved",
    "other GPUs: shared",
    "memory: nvml-cgroup, else the strongest that works; compute: the strongest that works, MPS included",
    "over its limit: evict",
    "mqtt://a:1883, mqtts://b:8883 (MQTT 5, metered link)",
    "MB a month with 1 GPU and 4 pods",
    "! that is more than monthlyMb: 10",
    "! not encrypted: mqtt://a:1883",
    "commands from afar: snapshot",
    "GPU 0 NVIDIA RTX 4000 Ada Generation: shared, 20055 MiB to share",
    "nvidia.com/gpu: 1",
]


@pytest.fixture
def write(tmp_path: Path) -> Path:
    return tmp_path / "agent.yaml"


def test_says_what_it_will_do(write: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write.write_text(FILE)
    assert main(["check-config", str(write)]) == 0
    out = capsys.readouterr().out
    assert [s for s in SAID if s not in out] == []


def test_option_and_argument_are_the_same(write: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write.write_text("gpus: {source: simulated}\n")
    main(["check-config", "-c", str(write), "--no-detect"])
    first = capsys.readouterr().out
    main(["check-config", str(write), "--no-detect"])
    assert capsys.readouterr().out == first
    assert "on this host" not in first


def test_all_problems_and_78(write: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write.write_text("nodes: {}\nsharing: {memoryUnitMiB: -1, placement: random}\nfleet: {enabled: true}\n")
    assert main(["check-config", str(write)]) == 78
    err = capsys.readouterr().err
    for problem in (
        "agent.yaml:1: nodes: unknown key",
        "memoryUnitMiB",
        "placement",
        "brokers: at least one",
    ):
        assert problem in err


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", str(tmp_path / "none.yaml")]) == 78
    assert "none.yaml" in capsys.readouterr().err


def test_too_fine_a_unit_is_said(write: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write.write_text("gpus: {source: simulated}\nsharing: {clusterVersion: v1.36.1}\n")
    assert main(["check-config", str(write)]) == 0
    assert "! 40110 IDs of 1 MiB" in capsys.readouterr().out


def test_time_slicing_block(write: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write.write_text(
        "gpus: {source: simulated}\nsharing: {timeSlicing: {renameByDefault: true, "
        "failRequestsGreaterThanOne: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
    )
    main(["check-config", str(write)])
    out = capsys.readouterr().out
    assert "4 replicas of each, offered as nvidia.com/gpu.shared, requests above 1 are refused" in out
    assert "all GPUs: timeslice (replicas without limits)" in out
    assert "  nvidia.com/gpu.shared: 8\n" in out
    assert "volcano.sh" not in out  # no GPU is left to share


@pytest.mark.parametrize(
    ("sharing", "said"),
    [
        (
            "names: hami, gpus: [{match: {index: 0}, mode: exclusive}]",
            "! nvidia.com/gpu cannot mean a share (names: hami) and a GPU in mode exclusive on one node",
        ),
        ("memoryUnitMiB: 30000", "! cannot offer units of 30000 MiB: no GPU has that much usable memory"),
    ],
    ids=["one name for two things", "a unit larger than every GPU"],
)
def test_what_cannot_be_offered_here_is_said(
    write: Path, capsys: pytest.CaptureFixture[str], sharing: str, said: str
) -> None:
    """As the agent itself would decide it, without a number for what is not offered."""
    write.write_text(f"gpus: {{source: simulated}}\nsharing: {{{sharing}}}\n")
    assert main(["check-config", str(write)]) == 0
    out = capsys.readouterr().out
    assert said in out
    assert "nvidia.com/gpu: 1\n" not in out
    assert ": 0" not in out


def test_keys(write: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What install.sh compares between two versions: one key a line, with its value."""
    write.write_text("node: {site: x}\n")
    assert main(["check-config", str(write), "--keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "node.site x" in lines
    assert "sharing.memoryUnitMiB 1" in lines
    assert lines == sorted(lines)


def policies(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[list[str], str]:
    assert main(["admission-policies", *argv]) == 0
    text = capsys.readouterr().out
    return [d["kind"] + "/" + d["metadata"]["name"] for d in yaml.safe_load_all(text) if d], text


VALIDATING = [f"ValidatingAdmissionPolicy{b}/edgeagent-shares" for b in ("", "Binding")]
MUTATING = [f"MutatingAdmissionPolicy{b}/edgeagent-memory-units" for b in ("", "Binding")]
RUNTIME = [f"MutatingAdmissionPolicy{b}/edgeagent-runtime-class" for b in ("", "Binding")]


@pytest.mark.parametrize(
    ("argv", "kinds"),
    [
        ([], VALIDATING),
        (["--unit", "64"], VALIDATING + MUTATING),
        (["--unit", "64", "--kubernetes", "v1.36.0+k3s1"], VALIDATING + MUTATING),
        (["--unit", "64", "--kubernetes", "v1.35.9+k3s1"], VALIDATING),
        (["--unit", "64", "--kubernetes", "v1.29.1"], []),
        (["--runtime-class"], VALIDATING + RUNTIME),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_policies(capsys: pytest.CaptureFixture[str], argv: list[str], kinds: list[str]) -> None:
    assert policies(capsys, *argv)[0] == kinds


def test_policies_say_what_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = policies(capsys, "--unit", "64", "--kubernetes", "v1.29.1")
    assert "Rewriting MiB into units of 64 MiB needs Kubernetes 1.36: left out for v1.29.1." in text


def test_policies_follow_the_configuration(write: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write.write_text("sharing: {names: hami, memoryUnitMiB: 32}\n")
    assert "nvidia.com~1gpumem-32mi" in policies(capsys, "-c", str(write))[1]
    assert (
        "gpu.example.com/vgpu-cores" in policies(capsys, "-c", str(write), "--prefix", "gpu.example.com")[1]
    )
