"""Whether the container runtime of this host injects CDI devices, from its own configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgeagent.hostroot import HostRoot
from edgeagent.node.k3s import K3sFacts, containerd_major

CONTAINERD_CONFIG = "/etc/containerd/config.toml"
_ENABLE_CDI = re.compile(r"^\s*enable_cdi\s*=\s*(true|false)\s*(#.*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CdiSupport:
    """`enabled` None: nothing was found that tells. `reason` says what was seen."""

    enabled: bool | None
    reason: str


def cdi_support(host: HostRoot, k3s: K3sFacts | None) -> CdiSupport:
    """containerd 2 injects CDI devices unless told not to, 1.x only when told to (1.7) or never."""
    path = k3s.containerd_config if k3s is not None else CONTAINERD_CONFIG
    text = host.read_text(path) if path is not None else None
    major = k3s.containerd_major if k3s is not None else containerd_major(text, None)
    switch = _ENABLE_CDI.search(text or "")
    if switch is not None:
        return CdiSupport(switch.group(1) == "true", f"{path} says enable_cdi = {switch.group(1)}")
    if major is None:
        return CdiSupport(None, "no containerd configuration was found")
    if major >= 2:
        return CdiSupport(True, f"containerd {major} injects CDI devices by default")
    return CdiSupport(False, f"containerd {major} does not inject CDI devices unless enable_cdi = true")
