"""Prometheus series from a snapshot: names, units, labels, and the page that documents them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from edgeagent.health.monitor import counter_key
from edgeagent.metrics.server import render
from edgeagent.snapshot import Health, NodeSnapshot, UplinkState
from tests.fakes.fleet import snapshots

DOC = Path(__file__).parents[2] / "docs/metrics.md"
UNITS = ("bytes", "ratio", "celsius", "watts", "joules", "hertz", "seconds", "units", "messages")


def families(s: NodeSnapshot, dcgm: bool = False, hami: bool = False) -> dict[str, Metric]:
    text, content_type = render(s, dcgm, hami)
    assert content_type.startswith("text/plain")
    return {f.name: f for f in text_string_to_metric_families(text.decode())}


def value(found: dict[str, Metric], name: str, **labels: str) -> float:
    samples = [s for s in found[name].samples if all(s.labels.get(k) == v for k, v in labels.items())]
    assert len(samples) == 1, samples
    return float(samples[0].value)


def full() -> NodeSnapshot:
    """Everything that can be told is told."""
    reading = snapshots.reading(
        memory_util_pct=3.0, encoder_util_pct=1.0, decoder_util_pct=2.0, fan_pct=30.0, energy_mj=5000.0,
        clock_memory_mhz=7000.0, ecc_uncorrectable=0, overcurrent_events=2, rails_w={"VDD_CPU": 3.0},
        temperatures_c={"tj": 50.0},
    )  # fmt: skip
    gpu = snapshots.gpu_state(
        reading=reading, unattributed_mib=12.0, conditions=(snapshots.condition(facts={"xid": 79}),)
    )
    uplink = UplinkState(
        True, True, "mqtt://b", 1, last_puback_age_s=0.5, queued=3, queued_bytes=100, dropped={"telemetry": 4},
        reconnects=2,
    )  # fmt: skip
    counters = {
        "allocations_total": 12,
        counter_key("xid_events_total", gpu_uuid=snapshots.gpu_uuid(0), xid="79"): 2,
        "not a counter": 1,
    }
    return snapshots.snapshot(gpus=(gpu,), uplink=uplink, counters=counters)


def test_values_and_units() -> None:
    found = families(full())
    uuid = snapshots.gpu_uuid(0)
    pod = snapshots.container(1)
    labels = {"pod": pod.pod or "", "gpu_uuid": uuid}
    assert value(found, "edgeagent_gpu_memory_usable_bytes", gpu_uuid=uuid) == 20000 * 2**20
    assert value(found, "edgeagent_gpu_memory_used_bytes", gpu_uuid=uuid) == 5000.5 * 2**20
    assert value(found, "edgeagent_gpu_utilization_ratio", unit="gpu") == 0.43
    assert value(found, "edgeagent_gpu_clock_hertz", domain="sm") == 1.5e9
    assert value(found, "edgeagent_gpu_energy_joules", gpu_uuid=uuid) == 5.0
    assert value(found, "edgeagent_gpu_temperature_celsius", zone="tj") == 50.0
    assert value(found, "edgeagent_container_memory_limit_bytes", **labels) == 4000 * 2**20
    assert value(found, "edgeagent_container_cores_limit_ratio", **labels) == 0.25
    assert value(found, "edgeagent_condition", type="OverTemperature") == 1
    assert value(found, "edgeagent_allocations") == 12
    assert value(found, "edgeagent_xid_events", xid="79", gpu_uuid=uuid) == 2
    assert value(found, "edgeagent_uplink_dropped_messages", **{"class": "telemetry"}) == 4
    assert value(found, "edgeagent_node_health", state="degraded") == 1
    assert sum(s.value for s in found["edgeagent_node_health"].samples) == 1
    assert "process_resident_memory_bytes" in found


def test_names_carry_their_unit() -> None:
    for name, family in families(full()).items():
        if not name.startswith("edgeagent_") or family.type == "counter":
            continue
        values = {s.value for s in family.samples}
        assert name.endswith(UNITS) or name.endswith("_containers") or values <= {0.0, 1.0}, name


def test_what_is_not_known_has_no_sample() -> None:
    reading = snapshots.reading(power_w=None, temperature_c=math.nan, util_pct=None)
    found = families(snapshots.snapshot(gpus=(snapshots.gpu_state(reading=reading),), containers=()))
    assert "edgeagent_gpu_power_watts" not in found
    assert "edgeagent_gpu_temperature_celsius" not in found
    assert "edgeagent_gpu_utilization_ratio" not in found
    assert "edgeagent_gpu_memory_used_bytes" in found


def test_a_pod_that_is_gone_has_no_series_at_the_next_scrape() -> None:
    before = families(snapshots.snapshot(), hami=True)
    after = families(snapshots.snapshot(containers=(snapshots.container(2),)), hami=True)
    gone = snapshots.container(1).pod
    assert any(s.labels.get("pod") == gone for f in before.values() for s in f.samples)
    assert not any(s.labels.get("pod") == gone for f in after.values() for s in f.samples)


def test_compatibility_sets_are_off_by_default() -> None:
    assert not any(n.startswith(("DCGM", "hami")) for n in families(full()))


def test_dcgm_names_and_labels() -> None:
    found = families(full(), dcgm=True)
    names = {n for n in found if n.startswith("DCGM")}
    for short in (
        "GPU_TEMP", "POWER_USAGE", "SM_CLOCK", "MEM_CLOCK", "GPU_UTIL", "MEM_COPY_UTIL", "ENC_UTIL", "DEC_UTIL",
        "FB_USED", "FB_FREE", "XID_ERRORS", "TOTAL_ENERGY_CONSUMPTION",
    ):  # fmt: skip
        assert f"DCGM_FI_DEV_{short}" in names
        (sample,) = found[f"DCGM_FI_DEV_{short}"].samples
        assert {"gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname"} <= sample.labels.keys()
        assert "pod" not in sample.labels, "device values are never copied to pods"
    assert value(found, "DCGM_FI_DEV_FB_USED") == 5000.5
    assert value(found, "DCGM_FI_DEV_XID_ERRORS") == 79
    assert value(found, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION") == 5000


def test_hami_names_and_labels() -> None:
    found = families(full(), hami=True)
    pod = {"pod": snapshots.container(1).pod or ""}
    assert value(found, "hami_vgpu_memory_limit_bytes", **pod) == 4000 * 2**20
    (sample,) = [s for s in found["hami_vgpu_memory_used_bytes"].samples if s.labels["pod"] == pod["pod"]]
    assert set(sample.labels) == {"namespace", "pod", "container", "vdevice_index", "device_uuid"}
    (host,) = found["hami_host_gpu_utilization_ratio"].samples
    assert set(host.labels) == {"node", "device_index", "device_uuid", "device_type"}
    assert host.value == 43.0
    assert value(found, "hami_gpu_shared_count") == 2


@pytest.mark.parametrize("health", list(Health))
def test_labels_with_awkward_characters_are_escaped(health: Health) -> None:
    s = snapshots.snapshot(health=health, containers=(snapshots.container(1, pod='a"b\\c\nd'),))
    found = families(s)
    assert any(x.labels["pod"] == 'a"b\\c\nd' for x in found["edgeagent_container_over_limit"].samples)


def test_every_series_is_documented_and_every_documented_one_exists() -> None:
    found = families(full(), dcgm=True, hami=True)
    exposed = {
        f"{n}_total" if f.type == "counter" else n for n, f in found.items() if not n.startswith("process_")
    }
    documented = set(re.findall(r"^\| `([A-Za-z0-9_]+)`", DOC.read_text(encoding="utf-8"), re.MULTILINE))
    assert exposed - documented == set()
    counters = {n for n in documented if n.startswith("edgeagent_") and n.endswith("_total")}
    assert documented - exposed - counters == set()
