"""Every configuration key, its type, default and bounds.

YAML keys are the camelCase of the field names; the unit is part of the name (`pollSeconds`,
`reserveMiB`, `keepaliveSeconds`). `key(...)` carries bounds and choices; loader.py enforces them.
Checks that involve several keys are in `check` methods and return sentences.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_NAME = re.compile(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
_DNS_PREFIX = re.compile(r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")

MODES = ("shared", "exclusive", "timeslice", "mig", "off")
MEMORY_ISOLATION = ("auto", "none", "nvml-cgroup", "mps", "limiter", "hami-core", "watchdog")
COMPUTE_ISOLATION = ("auto", "none", "mps", "limiter", "nvgpu-sched", "hami-core")


def key(
    default: Any = None,
    *,
    factory: Any = None,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    pattern: str | None = None,
    form: str | None = None,
    yaml: str | None = None,
    doc: str = "",
    reload: bool = False,
) -> Any:
    """A configuration key. `low`/`high` are inclusive; `form`: what matches `pattern`, in words; `reload`:
    may change without a restart."""
    metadata = {
        "low": low, "high": high, "choices": choices, "pattern": pattern, "form": form, "yaml": yaml,
        "doc": doc, "reload": reload,
    }  # fmt: skip
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Who this box is in the fleet."""

    name: str | None = key(None, doc="Fleet name of this node, [a-z0-9-]; default: the host name.")
    site: str = key("default", doc="Site the node belongs to, [a-z0-9-].")

    def check(self) -> list[str]:
        problems = []
        for what, value in (("name", self.name), ("site", self.site)):
            if value is not None and not _NAME.match(value):
                problems.append(
                    f"{what}: {value!r} must be 1 to 63 of [a-z0-9-], not starting or ending in '-'"
                )
        return problems


@dataclass(frozen=True, slots=True)
class LogConfig:
    level: str = key(
        "info", choices=("debug", "info", "warning", "error"), reload=True, doc="Least level logged."
    )
    format: str = key(
        "auto", choices=("auto", "text", "json"), doc="auto: journald priorities under systemd."
    )


@dataclass(frozen=True, slots=True)
class SimulatedConfig:
    profile: str = key("2x-rtx-4000-ada", doc="Name of a shipped profile, or a path to a YAML profile.")
    seed: int = key(1, low=0, doc="Seed of the moving values.")
    fault_file: str | None = key(None, doc="YAML file of injected faults, read again when it changes.")
    process_file: str | None = key(
        None, doc="YAML file of processes on the GPUs, read again when it changes (the demo writes it)."
    )


@dataclass(frozen=True, slots=True)
class NvmlConfig:
    library_path: str | None = key(None, doc="libnvidia-ml.so.1 to load; default: the loader's search path.")


@dataclass(frozen=True, slots=True)
class GpusConfig:
    """Which GPUs there are and how they are read."""

    source: str = key(
        "auto", choices=("auto", "nvml", "tegra", "simulated"), doc="auto: decided from evidence."
    )
    poll_seconds: float = key(5.0, low=0.1, high=300, reload=True, doc="Interval between readings.")
    call_timeout_seconds: float = key(
        10.0, low=0.5, high=300, doc="A driver call longer than this: unresponsive."
    )
    jetson_stats: bool = key(False, doc="Use jetson-stats (AGPL-3.0, extra [jetson]) as a second source.")
    simulated: SimulatedConfig = key(factory=SimulatedConfig)
    nvml: NvmlConfig = key(factory=NvmlConfig)


@dataclass(frozen=True, slots=True)
class GpuMatch:
    """Which GPUs a rule is for: exactly one of the three."""

    uuid: str | None = key(None, doc="The GPU's UUID.")
    index: int | None = key(None, low=0, doc="The driver's index (can change when cards are added).")
    model: str | None = key(None, doc="Shell pattern on the model name, for example '*A2000*'.")

    def check(self) -> list[str]:
        given = [v for v in (self.uuid, self.index, self.model) if v is not None]
        return [] if len(given) == 1 else ["exactly one of uuid, index, model is needed"]


@dataclass(frozen=True, slots=True)
class GpuRule:
    """What to do with the GPUs that match; the first matching rule counts."""

    match: GpuMatch = key(factory=GpuMatch)
    mode: str | None = key(None, choices=MODES, doc="How these GPUs are offered.")
    replicas: int | None = key(None, low=2, high=1024, doc="mode timeslice: replicas per GPU.")
    reserve_mib: int | None = key(None, low=0, yaml="reserveMiB", doc="MiB never promised on these GPUs.")
    max_shares: int | None = key(None, low=1, high=1024, doc="Shares (vgpu-number) on each of these GPUs.")


@dataclass(frozen=True, slots=True)
class TimeSlicingResource:
    """One entry of NVIDIA's `sharing.timeSlicing.resources`."""

    name: str = key("nvidia.com/gpu", doc="Resource to replicate: nvidia.com/gpu or nvidia.com/mig-….")
    replicas: int = key(2, low=2, high=1024)
    devices: Any = key(None, doc="Accepted as NVIDIA's plugin does; only 'all' has an effect there.")
    rename: str | None = key(None, doc="Accepted; ignored with a warning, as NVIDIA's plugin does.")


@dataclass(frozen=True, slots=True)
class TimeSlicing:
    """NVIDIA's plugin config block, accepted as it is."""

    rename_by_default: bool = key(False, doc="Offer nvidia.com/gpu.shared instead of nvidia.com/gpu.")
    fail_requests_greater_than_one: bool = key(False)
    resources: tuple[TimeSlicingResource, ...] = key(())


@dataclass(frozen=True, slots=True)
class SharingConfig:
    """How GPUs become resources."""

    names: str = key("volcano", choices=("volcano", "hami", "custom"), doc="Resource names offered.")
    prefix: str | None = key(None, doc="names: custom: the prefix, for example 'gpu.example.com'.")
    memory_unit_mib: int = key(1, low=1, high=65536, yaml="memoryUnitMiB", doc="MiB per unit of vgpu-memory.")
    max_shares_per_gpu: int = key(16, low=1, high=1024, doc="vgpu-number per GPU.")
    min_share_mib: int = key(
        0, low=0, yaml="minShareMiB", doc="Smaller demands are refused (a CUDA context needs room)."
    )
    reserve_mib: int = key(0, low=0, yaml="reserveMiB", doc="MiB of each discrete GPU never promised.")
    unified_reserve_mib: int | None = key(
        None,
        low=0,
        yaml="unifiedReserveMiB",
        doc="Same for unified memory; default max(1536, 20 % of MemTotal).",
    )
    mode: str = key("shared", choices=MODES, doc="Mode of GPUs that no rule matches.")
    gpus: tuple[GpuRule, ...] = key((), doc="Rules per GPU; the first that matches counts.")
    placement: str = key("binpack", choices=("binpack", "spread"), reload=True)
    binding: str = key(
        "auto", choices=("auto", "late", "early"), doc="late: GPU chosen at container start, through CDI."
    )
    hold_seconds: float = key(
        25.0, low=0, high=28, doc="A start without room is held this long inside the call (kubelet gives 30)."
    )
    reserve_after_seconds: float = key(
        60.0, low=0, doc="After this wait, room that frees up is kept for the longest waiting."
    )
    wait_seconds: float = key(0.0, low=0, doc="Evict a container that waited this long (clusters); 0: never.")
    time_slicing: TimeSlicing | None = key(None, doc="NVIDIA's sharing.timeSlicing block as it is.")
    visible_devices: str = key(
        "auto",
        choices=("auto", "uuid", "index", "all"),
        doc="binding early: what NVIDIA_VISIBLE_DEVICES names.",
    )
    cluster_version: str | None = key(
        None,
        pattern=r"^v?1\.\d+",
        form="a version like v1.36.2",
        doc="Kubernetes version where the API server cannot be asked.",
    )

    def check(self) -> list[str]:
        problems = []
        if self.names == "custom" and not self.prefix:
            problems.append("prefix: needed with names: custom")
        if self.prefix is not None and (len(self.prefix) > 253 or not _DNS_PREFIX.match(self.prefix)):
            problems.append(f"prefix: {self.prefix!r} is not a DNS name")
        if self.prefix in ("kubernetes.io", "k8s.io") or (self.prefix or "").endswith(
            (".kubernetes.io", ".k8s.io")
        ):
            problems.append(f"prefix: {self.prefix!r} is reserved by Kubernetes")
        elif self.prefix is not None and self.names != "custom":
            problems.append(f"prefix: needs names: custom (names is {self.names})")
        if self.mode == "timeslice" and not any(r.replicas for r in self.gpus) and self.time_slicing is None:
            problems.append("mode: timeslice needs replicas in a gpus rule or a timeSlicing block")
        block = self.time_slicing.resources if self.time_slicing is not None else ()
        if all(r.name != "nvidia.com/gpu" for r in block):
            problems += [
                f"gpus[{i}]: mode: timeslice needs replicas, here or in a timeSlicing block"
                for i, rule in enumerate(self.gpus)
                if rule.mode == "timeslice" and rule.replicas is None
            ]
        return problems


@dataclass(frozen=True, slots=True)
class LimiterConfig:
    overhead_mib: int = key(
        256,
        low=0,
        high=4096,
        yaml="overheadMiB",
        doc="Charged per process for what cannot be seen: CUDA context, modules, cuBLAS.",
    )
    # Not below /usr, which is read-only on some systems and to the service everywhere.
    library_dir: str = key("/var/lib/edgeagent/lib", doc="Host directory the built library is copied to.")


@dataclass(frozen=True, slots=True)
class MpsConfig:
    manage_daemon: bool = key(True, doc="Start nvidia-cuda-mps-control where none runs.")
    pipe_root: str = key("/run/edgeagent/mps", doc="Host directory for pipe and log directories.")


@dataclass(frozen=True, slots=True)
class HamiCoreConfig:
    library: str | None = key(None, doc="Host path of an operator-supplied libvgpu.so.")


@dataclass(frozen=True, slots=True)
class WatchdogConfig:
    policy: str = key(
        "report",
        choices=("report", "evict", "kill"),
        reload=True,
        doc="What happens to a pod over its limit.",
    )
    poll_seconds: float = key(2.0, low=0.2, high=60)
    tolerance_mib: int = key(0, low=0, yaml="toleranceMiB", doc="Use above the limit that is not reported.")


@dataclass(frozen=True, slots=True)
class IsolationConfig:
    """How shares are made real. `isolation: auto` is short for both axes."""

    memory: str = key("auto", choices=MEMORY_ISOLATION)
    compute: str = key("auto", choices=COMPUTE_ISOLATION)
    fallback: bool = key(False, doc="A named mechanism that fails its probe: use what auto would.")
    allow_mps: bool = key(False, doc="auto may choose MPS (a client's fault hits its neighbours).")
    limiter: LimiterConfig = key(factory=LimiterConfig)
    mps: MpsConfig = key(factory=MpsConfig)
    hami_core: HamiCoreConfig = key(factory=HamiCoreConfig)
    watchdog: WatchdogConfig = key(factory=WatchdogConfig)

    shorthand = "memory,compute"  # a scalar sets these


@dataclass(frozen=True, slots=True)
class KubeletConfig:
    """Where the kubelet is. Paths are the host's."""

    device_plugin_dir: str = key("/var/lib/kubelet/device-plugins")
    pod_resources_socket: str = key("/var/lib/kubelet/pod-resources/kubelet.sock")
    checkpoint_file: str | None = key(None, doc="Default: kubelet_internal_checkpoint in devicePluginDir.")
    pod_log_dir: str = key("/var/log/pods")
    cdi_dir: str = key("/var/run/cdi")
    cdi_static_dir: str = key("/etc/cdi")
    cgroup_root: str = key("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ThresholdsConfig:
    """Thresholds of conditions; None: the hardware's own."""

    temperature_c: float | None = key(None, low=30, high=150, reload=True)
    temperature_clear_c: float | None = key(None, low=30, high=150, reload=True)
    host_overcommit_mib: int = key(256, low=0, yaml="hostOvercommitMiB", reload=True)


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """When a GPU counts as sick, and what happens to its pods."""

    recover_polls: int = key(
        2, low=1, high=100, reload=True, doc="Good polls in a row before a GPU is healthy again."
    )
    raise_polls: int = key(
        2, low=1, high=100, reload=True, doc="Bad polls before thermal and power conditions."
    )
    xid_classes: dict[str, str] = key(
        factory=dict, reload=True, doc="XID number -> app | degraded | fatal | unknown."
    )
    xid_hold_seconds: float = key(60.0, low=0, reload=True, doc="A fatal XID holds at least this long.")
    kernel_log: bool = key(True, doc="Read /dev/kmsg where permitted.")
    on_fatal: str = key("none", choices=("none", "evict"), reload=True)
    grace_seconds: float = key(30.0, low=0, high=3600, reload=True)
    thresholds: ThresholdsConfig = key(factory=ThresholdsConfig)

    def check(self) -> list[str]:
        problems = []
        for number, cls in self.xid_classes.items():
            if not str(number).isdigit():
                problems.append(f"xidClasses.{number}: not an XID number")
            if cls not in ("app", "degraded", "fatal", "unknown"):
                problems.append(f"xidClasses.{number}: {cls!r} must be app, degraded, fatal or unknown")
        return problems


@dataclass(frozen=True, slots=True)
class KubernetesConfig:
    """API server access: optional; without it everything else works."""

    enabled: bool = key(True)
    kubeconfig: str | None = key(None, doc="Default: service account in a pod, else K3s's own kubeconfig.")
    node_name: str | None = key(None, doc="Default: $NODE_NAME, else the host name.")
    labels: bool = key(True, doc="Label the node with what is there.")
    events: bool = key(True, doc="Write Events on pods and the node.")


@dataclass(frozen=True, slots=True)
class TlsConfig:
    ca_file: str | None = key(None)
    cert_file: str | None = key(None)
    key_file: str | None = key(None)

    def check(self) -> list[str]:
        if (self.cert_file is None) != (self.key_file is None):
            return ["certFile and keyFile go together"]
        return []


@dataclass(frozen=True, slots=True)
class OutboxConfig:
    max_mib: int = key(64, low=1, high=4096, yaml="maxMiB")
    max_days: float = key(7.0, low=0.01, high=365)
    replay_per_second: float = key(
        5.0, low=0.1, high=10000, doc="Backlog messages per second after an outage."
    )
    replay_jitter_seconds: float = key(
        60.0, low=0, high=3600, doc="Backlog starts at a random time up to this."
    )


@dataclass(frozen=True, slots=True)
class CommandsConfig:
    allow: tuple[str, ...] = key(("snapshot",), reload=True, doc="Verbs that operators may send.")
    per_minute: int = key(6, low=1, high=600)
    hmac_key_file: str | None = key(None, doc="Commands must carry an HMAC-SHA256 signature with this key.")


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The MQTT uplink (FLEET interface)."""

    enabled: bool = key(False)
    brokers: tuple[str, ...] = key((), doc="mqtt://, mqtts://, ws://, wss:// URLs, tried in order.")
    protocol: str = key("5", choices=("5", "3.1.1"))
    link: str = key("lan", choices=("lan", "metered"), doc="metered: batches, long keepalive, byte budget.")
    client_id: str | None = key(None, doc="Default: the node name. Must be unique and stable.")
    username: str | None = key(None)
    password_file: str | None = key(None)
    tls: TlsConfig = key(factory=TlsConfig)
    proxy: str | None = key(None, doc="http://, socks5:// URL (needs PySocks).")
    keepalive_seconds: int | None = key(None, low=5, high=3600, doc="Default: 30 on lan, 120 on metered.")
    will_delay_seconds: int = key(60, low=0, high=86400)
    session_expiry_seconds: int = key(3600, low=60, high=604800)
    telemetry_seconds: float = key(10.0, low=0.5, high=3600, reload=True, doc="Interval between samples.")
    batch_seconds: float | None = key(None, low=1, high=3600, doc="Default: off on lan, 60 on metered.")
    deflate: bool | None = key(
        None, doc="Telemetry by column and deflated, on tele/z. Default: on metered links."
    )
    monthly_mb: float | None = key(None, low=1, doc="Byte budget of a metered link.")
    events_per_minute: int = key(10, low=1, high=1000)
    home_assistant: bool = key(False, doc="Publish Home Assistant discovery.")
    outbox: OutboxConfig = key(factory=OutboxConfig)
    commands: CommandsConfig = key(factory=CommandsConfig)

    def check(self) -> list[str]:
        problems = []
        if self.enabled and not self.brokers:
            problems.append("brokers: at least one is needed when enabled")
        for url in self.brokers:
            if not re.match(r"^(mqtt|mqtts|ws|wss)://[^/\s:@]+(:\d{1,5})?(/\S*)?$", url):
                problems.append(f"brokers: {url!r} is not mqtt://HOST[:PORT], mqtts://, ws:// or wss://")
        if self.session_expiry_seconds <= self.will_delay_seconds:
            problems.append("sessionExpirySeconds must be longer than willDelaySeconds")
        return problems


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    enabled: bool = key(True)
    listen: str = key(
        ":9435",
        pattern=r"^(\[[0-9a-fA-F:]+\]|[^:\s]*):\d{1,5}$",
        form="ADDRESS:PORT, for example 127.0.0.1:9435 or :9435",
        doc="ADDRESS:PORT.",
    )
    dcgm: bool = key(False, reload=True, doc="Also DCGM_FI_DEV_* as dcgm-exporter names them.")
    hami: bool = key(False, reload=True, doc="Also hami_vgpu_* as HAMi names them.")


@dataclass(frozen=True, slots=True)
class Config:
    """The whole file."""

    host_root: str = key(
        "/", pattern=r"^/", form="an absolute path", doc="Where the host's file system is mounted."
    )
    state_dir: str = key(
        "/var/lib/edgeagent",
        pattern=r"^/",
        form="an absolute path",
        doc="Survives restarts: outbox, cordons, caches.",
    )
    run_dir: str = key("/run/edgeagent", pattern=r"^/", form="an absolute path", doc="Local socket and lock.")
    node: NodeConfig = key(factory=NodeConfig)
    log: LogConfig = key(factory=LogConfig)
    gpus: GpusConfig = key(factory=GpusConfig)
    sharing: SharingConfig = key(factory=SharingConfig)
    isolation: IsolationConfig = key(factory=IsolationConfig)
    kubelet: KubeletConfig = key(factory=KubeletConfig)
    health: HealthConfig = key(factory=HealthConfig)
    kubernetes: KubernetesConfig = key(factory=KubernetesConfig)
    fleet: FleetConfig = key(factory=FleetConfig)
    metrics: MetricsConfig = key(factory=MetricsConfig)
