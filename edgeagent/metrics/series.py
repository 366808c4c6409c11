"""A NodeSnapshot as Prometheus series: the agent's own, and the names that dashboards made for
dcgm-exporter and HAMi expect. docs/metrics.md lists every series; a test keeps the two in step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from edgeagent.gpus.model import GpuReading
from edgeagent.isolation.levels import Axis
from edgeagent.snapshot import ContainerShare, GpuState, Health, NodeSnapshot

MIB = 1 << 20
_CONTAINER = ("namespace", "pod", "container", "pod_uid", "gpu_uuid")
_COUNTER_KEY = re.compile(r"^([a-z][a-z0-9_]*?)(?:_total)?(?:\{(.*)\})?$")
_LABEL = re.compile(r'([a-z_][a-z0-9_]*)="([^"]*)"')


class Families:
    """Metric families in the order of their first sample; a value that is not known adds no sample."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def gauge(self, name: str, help_text: str, value: float | None, **labels: str) -> None:
        self._add(GaugeMetricFamily, name, help_text, value, labels)

    def counter(self, name: str, help_text: str, value: float | None, **labels: str) -> None:
        """`name` without _total."""
        self._add(CounterMetricFamily, name, help_text, value, labels)

    def _add(
        self,
        cls: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        help_text: str,
        value: float | None,
        labels: Mapping[str, str],
    ) -> None:
        if value is None or not math.isfinite(value):
            return
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = cls(name, help_text, labels=tuple(labels))
        assert isinstance(family, (GaugeMetricFamily, CounterMetricFamily))
        family.add_metric(tuple(labels.values()), value)

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._families.values())


# -- own series --------------------------------------------------------------------------------------


def own(s: NodeSnapshot) -> Iterable[Metric]:
    """The edgeagent_* series."""
    f = Families()
    f.gauge(
        "edgeagent_info", "The agent; always 1.", 1,
        version=s.agent_version, node=s.node, site=s.site, config_hash=s.config_hash, binding=s.binding,
    )  # fmt: skip
    f.gauge("edgeagent_start_time_seconds", "Unix time of the agent's start.", s.started_ms / 1000)
    _state(f, "edgeagent_node_health", "1 for the node's health as it is, 0 for the others.", s.health)
    f.gauge("edgeagent_kubelet_connected", "1 while the kubelet holds the device lists.", s.kubelet_connected)
    for g in s.gpus:
        _gpu(f, g)
    for c in s.containers:
        _container(f, c)
    f.gauge("edgeagent_waiting_containers", "Containers whose start is held for room.", len(s.waiting))
    for condition in (*s.conditions, *(c for g in s.gpus for c in g.conditions)):
        labels = {
            "type": condition.type,
            "severity": condition.severity,
            "gpu_uuid": condition.gpu_uuid or "",
        }
        f.gauge("edgeagent_condition", "A condition that is true now; always 1.", 1, **labels)
        f.gauge(
            "edgeagent_condition_start_time_seconds", "Unix time since which the condition is true.",
            condition.since_ms / 1000, **labels,
        )  # fmt: skip
    for r in s.resources:
        for state, value in (("offered", r.total), ("healthy", r.healthy), ("allocated", r.allocated)):
            f.gauge(
                "edgeagent_resource_units", "Units of an extended resource.", value,
                resource=r.name, state=state,
            )  # fmt: skip
        f.gauge(
            "edgeagent_resource_registered", "1 while the resource is registered with the kubelet.",
            r.registered, resource=r.name,
        )  # fmt: skip
    _uplink(f, s)
    for key, count in s.counters.items():
        m = _COUNTER_KEY.match(key)
        if m:
            labels = dict(_LABEL.findall(m.group(2) or ""))
            f.counter(f"edgeagent_{m.group(1)}", f"Count of {m.group(1).replace('_', ' ')}.", count, **labels)
    return f


def _state(f: Families, name: str, help_text: str, health: Health, **labels: str) -> None:
    for state in Health:
        f.gauge(name, help_text, state is health, **labels, state=state.value)


def _gpu(f: Families, g: GpuState) -> None:
    gpu, uuid = g.gpu, g.gpu.uuid
    f.gauge(
        "edgeagent_gpu_info", "A GPU; always 1.", 1, gpu_uuid=uuid, index=str(gpu.index), model=gpu.model,
        kind=gpu.kind.value, mode=g.mode.value, pci_address=gpu.pci_address or "",
        driver_version=gpu.driver_version or "",
        compute_capability="{}.{}".format(*gpu.compute_capability) if gpu.compute_capability else "",
    )  # fmt: skip
    _state(f, "edgeagent_gpu_health", "1 for the GPU's health as it is.", g.health, gpu_uuid=uuid)
    f.gauge("edgeagent_gpu_present", "0 when the GPU was here and is not now.", g.present, gpu_uuid=uuid)
    f.gauge("edgeagent_gpu_cordoned", "1 while the GPU is cordoned.", g.cordoned, gpu_uuid=uuid)
    for name, help_text, mib in (
        ("total", "Memory of the GPU.", gpu.memory_total_mib),
        ("usable", "Memory that may be promised to pods.", g.usable_mib),
        ("reserved", "Memory never promised: the driver's and the operator's reserve.", g.reserved_mib),
        ("promised", "Memory bound to containers.", g.promised_mib),
        ("free", "Memory a new container may get here.", g.free_mib),
        ("withdrawn", "Usable memory that nobody new gets, because the host uses it.", g.withdrawn_mib),
        ("host_used", "Memory used by processes of no pod.", g.host_use.used_mib if g.host_use else None),
        ("unattributed", "Used memory that belongs to no known process.", g.unattributed_mib),
    ):
        f.gauge(f"edgeagent_gpu_memory_{name}_bytes", help_text, _bytes(mib), gpu_uuid=uuid)
    f.gauge(
        "edgeagent_gpu_cores_promised_ratio", "Compute bound to containers, 0 to 1.",
        g.promised_cores_pct / 100, gpu_uuid=uuid,
    )  # fmt: skip
    for axis in Axis:
        level = getattr(g.levels, axis.value)
        f.gauge(
            "edgeagent_gpu_isolation_info", "How far limits on this GPU can be trusted; always 1.", 1,
            gpu_uuid=uuid, axis=axis.value, level=level.level.value, mechanism=level.mechanism,
        )  # fmt: skip
    if g.reading is not None and g.reading.fault is None:
        _reading(f, g.reading, uuid)


def _reading(f: Families, r: GpuReading, uuid: str) -> None:
    f.gauge(
        "edgeagent_gpu_memory_used_bytes", "Memory in use, without the driver's reserve.",
        _bytes(r.memory_used_mib), gpu_uuid=uuid,
    )  # fmt: skip
    for unit, pct in (
        ("gpu", r.util_pct),
        ("memory", r.memory_util_pct),
        ("encoder", r.encoder_util_pct),
        ("decoder", r.decoder_util_pct),
    ):
        f.gauge(
            "edgeagent_gpu_utilization_ratio", "Share of time a unit was busy, 0 to 1.", _ratio(pct),
            gpu_uuid=uuid, unit=unit,
        )  # fmt: skip
    for zone, celsius in (("gpu", r.temperature_c), *sorted(r.temperatures_c.items())):
        f.gauge("edgeagent_gpu_temperature_celsius", "Temperature.", celsius, gpu_uuid=uuid, zone=zone)
    for rail, watts in (("total", r.power_w), *sorted(r.rails_w.items())):
        f.gauge("edgeagent_gpu_power_watts", "Power drawn.", watts, gpu_uuid=uuid, rail=rail)
    f.counter(
        "edgeagent_gpu_energy_joules", "Energy used since the driver was loaded.",
        None if r.energy_mj is None else r.energy_mj / 1000, gpu_uuid=uuid,
    )  # fmt: skip
    for domain, mhz in (("sm", r.clock_sm_mhz), ("memory", r.clock_memory_mhz)):
        f.gauge(
            "edgeagent_gpu_clock_hertz", "Clock.", None if mhz is None else mhz * 1e6,
            gpu_uuid=uuid, domain=domain,
        )  # fmt: skip
    f.gauge("edgeagent_gpu_fan_ratio", "Fan speed, 0 to 1.", _ratio(r.fan_pct), gpu_uuid=uuid)
    for reason in sorted(r.throttle_reasons or ()):
        f.gauge(
            "edgeagent_gpu_throttled", "1 for each reason why clocks are held down now.", 1,
            gpu_uuid=uuid, reason=reason,
        )  # fmt: skip
    f.counter(
        "edgeagent_gpu_ecc_uncorrectable_errors", "Uncorrectable memory errors since the driver was loaded.",
        r.ecc_uncorrectable, gpu_uuid=uuid,
    )  # fmt: skip
    f.counter(
        "edgeagent_gpu_overcurrent_events", "Over-current events since boot.", r.overcurrent_events,
        gpu_uuid=uuid,
    )  # fmt: skip


def _container(f: Families, c: ContainerShare) -> None:
    labels = _container_labels(c)
    f.gauge("edgeagent_container_memory_limit_bytes", "GPU memory limit.", _bytes(c.memory_mib), **labels)
    f.gauge(
        "edgeagent_container_memory_used_bytes", "GPU memory in use, as the host sees it.",
        _bytes(c.used_mib), **labels,
    )  # fmt: skip
    f.gauge(
        "edgeagent_container_cores_limit_ratio", "Compute limit, 0 to 1; absent: uncapped.",
        _ratio(c.cores_pct), **labels,
    )  # fmt: skip
    f.gauge(
        "edgeagent_container_utilization_ratio", "Share of time the container kept the GPU busy, 0 to 1.",
        _ratio(c.util_pct), **labels,
    )  # fmt: skip
    f.gauge(
        "edgeagent_container_over_limit", "1 while it uses more memory than its limit.", c.over_limit,
        **labels,
    )  # fmt: skip
    for axis in Axis:
        level = getattr(c.levels, axis.value)
        f.gauge(
            "edgeagent_container_isolation_info", "How far this limit can be trusted; always 1.", 1, **labels,
            axis=axis.value, level=level.level.value, mechanism=level.mechanism, reason=level.reason or "",
        )  # fmt: skip
        limited = c.memory_mib is not None if axis is Axis.MEMORY else c.cores_pct is not None
        f.gauge(
            "edgeagent_container_limit_enforced",
            "1 while it is proved that what is over the limit is refused.",
            level.enforced if limited else None, **labels, axis=axis.value,
        )  # fmt: skip


def _container_labels(c: ContainerShare) -> dict[str, str]:
    values = (c.namespace or "", c.pod or "", c.container, c.pod_uid, c.gpu_uuid)
    return dict(zip(_CONTAINER, values, strict=True))


def _uplink(f: Families, s: NodeSnapshot) -> None:
    u = s.uplink
    if not u.enabled:
        return
    f.gauge("edgeagent_uplink_connected", "1 while the broker is connected.", u.connected)
    f.gauge("edgeagent_uplink_queued_messages", "Messages kept for the broker.", u.queued)
    f.gauge("edgeagent_uplink_queued_bytes", "Bytes kept for the broker.", u.queued_bytes)
    f.gauge(
        "edgeagent_uplink_last_puback_age_seconds", "Time since the broker last confirmed a message.",
        u.last_puback_age_s,
    )  # fmt: skip
    f.counter("edgeagent_uplink_reconnects", "Connections made after the first.", u.reconnects)
    for name, count in sorted(u.dropped.items()):
        f.counter(
            "edgeagent_uplink_dropped_messages", "Messages given up because the outbox was full.", count,
            **{"class": name},
        )  # fmt: skip


# -- dcgm-exporter's names ----------------------------------------------------------------------------


def dcgm(s: NodeSnapshot) -> Iterable[Metric]:
    """DCGM_FI_DEV_* with dcgm-exporter's labels, per device only. Both spellings of the host name are
    there, because dcgm-exporter renamed it and dashboards know either."""
    f = Families()
    for g in s.gpus:
        r, gpu = g.reading, g.gpu
        if r is None or r.fault is not None:
            continue
        labels = {
            "gpu": str(gpu.index),
            "UUID": gpu.uuid,
            "pci_bus_id": (gpu.pci_address or "").upper(),
            "device": f"nvidia{gpu.minor if gpu.minor is not None else gpu.index}",
            "modelName": gpu.model,
            "Hostname": s.host.hostname,
            "hostname": s.host.hostname,
        }
        used = r.memory_used_mib
        free = r.memory_free_mib
        if free is None and used is not None:
            free = max(0.0, gpu.memory_total_mib - (gpu.memory_reserved_mib or 0) - used)
        xids = [c.facts["xid"] for c in g.conditions if "xid" in c.facts]
        for name, help_text, value in (
            ("GPU_TEMP", "GPU temperature (in C).", r.temperature_c),
            ("POWER_USAGE", "Power draw (in W).", r.power_w),
            ("SM_CLOCK", "SM clock frequency (in MHz).", r.clock_sm_mhz),
            ("MEM_CLOCK", "Memory clock frequency (in MHz).", r.clock_memory_mhz),
            ("GPU_UTIL", "GPU utilization (in %).", r.util_pct),
            ("MEM_COPY_UTIL", "Memory utilization (in %).", r.memory_util_pct),
            ("ENC_UTIL", "Encoder utilization (in %).", r.encoder_util_pct),
            ("DEC_UTIL", "Decoder utilization (in %).", r.decoder_util_pct),
            ("FB_USED", "Framebuffer memory used (in MiB).", used),
            ("FB_FREE", "Framebuffer memory free (in MiB).", free),
            ("XID_ERRORS", "XID of a condition that is true now, else 0.", float(xids[-1]) if xids else 0),
            ("TOTAL_ENERGY_CONSUMPTION", "Total energy consumption (in mJ).", r.energy_mj),
        ):
            f.gauge(f"DCGM_FI_DEV_{name}", help_text, value, **labels)
    return f


# -- HAMi's names -------------------------------------------------------------------------------------


def hami(s: NodeSnapshot) -> Iterable[Metric]:
    """hami_* as HAMi's monitor and scheduler name them since 2026 (ratios there are 0 to 100)."""
    f = Families()
    for g in s.gpus:
        gpu = g.gpu
        device = {
            "node": s.node,
            "device_index": str(gpu.index),
            "device_uuid": gpu.uuid,
            "device_type": gpu.model,
        }
        if g.reading is not None and g.reading.fault is None:
            f.gauge(
                "hami_host_gpu_memory_used_bytes", "GPU memory in use on the host.",
                _bytes(g.reading.memory_used_mib), **device,
            )  # fmt: skip
            f.gauge(
                "hami_host_gpu_utilization_ratio", "GPU utilization on the host, 0 to 100.",
                g.reading.util_pct, **device,
            )  # fmt: skip
        f.gauge("hami_gpu_memory_limit_bytes", "GPU memory to give.", _bytes(g.usable_mib), **device)
        f.gauge("hami_gpu_memory_allocated_bytes", "GPU memory given.", _bytes(g.promised_mib), **device)
        f.gauge(
            "hami_gpu_core_allocated_ratio", "GPU compute given, 0 to 100.", g.promised_cores_pct, **device
        )
        shares = s.containers_on(gpu.uuid)
        f.gauge("hami_gpu_shared_count", "Containers that share the GPU.", len(shares), **device)
        for c in shares:
            labels = {
                "namespace": c.namespace or "",
                "pod": c.pod or "",
                "container": c.container,
                "vdevice_index": "0",  # a container's memory comes from one GPU
                "device_uuid": gpu.uuid,
            }
            f.gauge("hami_vgpu_memory_used_bytes", "GPU memory in use.", _bytes(c.used_mib), **labels)
            f.gauge("hami_vgpu_memory_limit_bytes", "GPU memory limit.", _bytes(c.memory_mib), **labels)
            f.gauge(
                "hami_vgpu_memory_allocated_bytes", "GPU memory given to the container.",
                _bytes(c.memory_mib), **labels,
            )  # fmt: skip
            f.gauge(
                "hami_container_device_utilization_ratio", "GPU utilization of the container, 0 to 100.",
                c.util_pct, **labels,
            )  # fmt: skip
    return f


def _bytes(mib: float | None) -> float | None:
    return None if mib is None else mib * MIB


def _ratio(pct: float | None) -> float | None:
    return None if pct is None else pct / 100
