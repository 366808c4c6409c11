"""Node labels: GPU feature discovery's names, valid values, and nothing of others touched."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.health.labels import GFD_KEYS, GFD_MARK, label_patch, label_value, node_labels
from edgeagent.snapshot import GpuMode, Health, ResourceState
from tests.fakes.fleet import snapshots

VALID = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")


def test_labels_of_a_shared_node() -> None:
    labels = node_labels(snapshots.snapshot())
    expected = {
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.count": "2",
        "nvidia.com/gpu.product": "RTX-4000-Ada",
        "nvidia.com/gpu.memory": "20475",
        "nvidia.com/gpu.compute.major": "8",
        "nvidia.com/gpu.compute.minor": "9",
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.sharing-strategy": "none",
        "nvidia.com/mig.capable": "false",
        "nvidia.com/cuda.driver-version.full": "570.86.10",
        "nvidia.com/cuda.driver-version.major": "570",
        "edgeagent.io/health": "degraded",
        "edgeagent.io/mode": "shared",
        "edgeagent.io/memory-unit-mib": "1",
        "edgeagent.io/gpu.healthy": "2",
        "edgeagent.io/isolation.memory": "cooperative",
        "edgeagent.io/isolation.compute": "none",
    }
    assert {k: labels[k] for k in expected} == expected
    assert {k for k in labels if k.startswith("nvidia.com/")} <= GFD_KEYS


def test_time_slicing_is_labelled_as_feature_discovery_does() -> None:
    gpu = replace(snapshots.gpu_state(), mode=GpuMode.TIMESLICE)
    offered = ResourceState("nvidia.com/gpu", "timeslice", None, 4, 4, 0, True)
    labels = node_labels(snapshots.snapshot(gpus=(gpu,), resources=(offered,)))
    assert labels["nvidia.com/gpu.product"] == "RTX-4000-Ada-SHARED"
    assert (labels["nvidia.com/gpu.replicas"], labels["nvidia.com/gpu.sharing-strategy"]) == (
        "4",
        "time-slicing",
    )
    assert "edgeagent.io/memory-unit-mib" not in labels


def test_a_node_without_gpus_has_no_gpu_labels() -> None:
    labels = node_labels(snapshots.snapshot(gpus=(), health=Health.SICK))
    assert labels["edgeagent.io/health"] == "sick"
    assert not any(k.startswith("nvidia.com/") for k in labels)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVIDIA GeForce RTX 3070", "NVIDIA-GeForce-RTX-3070"),
        ("Orin (nvgpu)", "Orin-nvgpu"),
        ("ПК", ""),
        ("a" * 62 + "-b", "a" * 62),
    ],
)
def test_values(text: str, expected: str) -> None:
    assert label_value(text) == expected


@given(st.text(max_size=100))
@settings(max_examples=150)
def test_any_text_becomes_a_valid_value(text: str) -> None:
    value = label_value(text)
    assert VALID.fullmatch(value)
    assert len(value) <= 63


def test_only_differences_are_sent_and_stale_ones_removed() -> None:
    current = {"edgeagent.io/health": "ok", "edgeagent.io/old": "x", "nvidia.com/gpu.count": "2", "zone": "a"}
    wanted = {"edgeagent.io/health": "sick", "nvidia.com/gpu.count": "2"}
    assert label_patch(current, wanted) == {"edgeagent.io/health": "sick", "edgeagent.io/old": None}
    assert label_patch(wanted, wanted) == {}


def test_feature_discoverys_own_labels_are_left_alone() -> None:
    current = {GFD_MARK: "1790000000", "nvidia.com/gpu.count": "4", "nvidia.com/gpu.family": "ampere"}
    wanted = {"nvidia.com/gpu.count": "2", "edgeagent.io/health": "ok"}
    assert label_patch(current, wanted) == {"edgeagent.io/health": "ok"}
