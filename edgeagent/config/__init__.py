"""Configuration: one YAML file into frozen dataclasses, every problem reported at once with its line."""

from edgeagent.config.loader import load_file, load_text, parse_size_mib, to_plain
from edgeagent.config.schema import (
    Config,
    FleetConfig,
    GpuRule,
    GpusConfig,
    HealthConfig,
    IsolationConfig,
    KubeletConfig,
    KubernetesConfig,
    LogConfig,
    MetricsConfig,
    NodeConfig,
    SharingConfig,
)

__all__ = [
    "Config",
    "FleetConfig",
    "GpuRule",
    "GpusConfig",
    "HealthConfig",
    "IsolationConfig",
    "KubeletConfig",
    "KubernetesConfig",
    "LogConfig",
    "MetricsConfig",
    "NodeConfig",
    "SharingConfig",
    "load_file",
    "load_text",
    "parse_size_mib",
    "to_plain",
]
