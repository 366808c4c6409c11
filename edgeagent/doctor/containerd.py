"""NVIDIA's runtime in containerd: installed, known to containerd, and what K3s would need to know it.

K3s looks for the runtime when it starts, so one that was installed later needs a K3s restart, and one
in an unusual place needs a template. The rendered config.toml is K3s's own and never edited. Standard
library only: install.sh uses this before anything is installed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgeagent.hostroot import HostRoot
from edgeagent.node.container_runtime import CONTAINERD_CONFIG
from edgeagent.node.k3s import K3sFacts, parse_version

# Where K3s looks (facts: K3s's "advanced" page), and where else people have it.
K3S_SEARCHES = ("/usr/local/nvidia/toolkit", "/usr/bin")
_ELSEWHERE = ("/usr/local/bin", "/opt/nvidia/toolkit", "/run/current-system/sw/bin")
RUNTIME = "nvidia-container-runtime"

# First patch releases per minor version with `{{ template "base" . }}`.
_BASE_TEMPLATE_SINCE = {24: 17, 25: 13, 26: 8, 27: 5, 28: 1}
_RUNTIMES = {
    1: 'plugins."io.containerd.grpc.v1.cri".containerd.runtimes',
    2: "plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes",
}
_NVIDIA_ENTRY = re.compile(r"""^\s*\[.*\.containerd\.runtimes\.["']?nvidia["']?\]""", re.MULTILINE)
_SYSTEMD_CGROUP = re.compile(r"^\s*SystemdCgroup\s*=\s*true", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class NvidiaRuntime:
    """`binary`: where it is installed; `found_by_k3s`: K3s looks there; `rendered`: containerd's
    configuration names it (None: there is no configuration to look at)."""

    binary: str | None
    found_by_k3s: bool
    rendered: bool | None
    systemd_cgroup: bool = True


def nvidia_runtime(host: HostRoot, k3s: K3sFacts | None) -> NvidiaRuntime:
    places = (*K3S_SEARCHES, *_ELSEWHERE)
    binary = next((f"{p}/{RUNTIME}" for p in places if host.exists(f"{p}/{RUNTIME}")), None)
    found = binary is not None and binary.rpartition("/")[0] in K3S_SEARCHES
    path = k3s.containerd_config if k3s is not None else CONTAINERD_CONFIG
    text = host.read_text(path) if path is not None else None
    if text is None:
        return NvidiaRuntime(binary, found, None)
    return NvidiaRuntime(binary, found, bool(_NVIDIA_ENTRY.search(text)), bool(_SYSTEMD_CGROUP.search(text)))


def template(k3s: K3sFacts, runtime: NvidiaRuntime) -> str | None:
    """The containerd template that makes this K3s know the runtime, or None where it needs none (or
    its base template cannot be included: K3s too old)."""
    if runtime.binary is None or runtime.found_by_k3s or not has_base_template(k3s.version):
        return None
    table = f"{_RUNTIMES[2 if (k3s.containerd_major or 2) >= 2 else 1]}.nvidia"
    return (
        '{{ template "base" . }}\n'
        "\n"
        "# Written by edgeagent's install.sh --configure-k3s.\n"
        f"[{table}]\n"
        '  runtime_type = "io.containerd.runc.v2"\n'
        f"[{table}.options]\n"
        f'  BinaryName = "{runtime.binary}"\n'
        f"  SystemdCgroup = {'true' if runtime.systemd_cgroup else 'false'}\n"
    )


def has_base_template(version: str | None) -> bool:
    """Whether K3s of this version can include its own template in an operator's."""
    parsed = parse_version(version or "")
    if parsed is None:
        return True
    _, minor, patch = parsed
    return minor > max(_BASE_TEMPLATE_SINCE) or patch >= _BASE_TEMPLATE_SINCE.get(minor, 1 << 30)


def runtime_advice(runtime: NvidiaRuntime, k3s: K3sFacts | None) -> str | None:
    """What is missing for `runtimeClassName: nvidia` to work, with what to do; None: nothing."""
    restart = f"systemctl restart {'k3s-agent' if k3s is not None and k3s.role == 'agent' else 'k3s'}"
    if runtime.rendered:
        return None
    if runtime.binary is None:
        return f"{RUNTIME} is not installed: install nvidia-container-toolkit, then {restart}"
    if k3s is None:
        return (
            f"{runtime.binary} is installed, but containerd's configuration does not name it: "
            "nvidia-ctk runtime configure --runtime=containerd, then restart containerd"
        )
    if runtime.found_by_k3s:
        seen = "K3s has not seen it (it looks once, when it starts)"
        return f"{runtime.binary} is installed, but {seen}: {restart}"
    if not has_base_template(k3s.version):
        return f"{runtime.binary} is where K3s does not look, and K3s {k3s.version} is too old for a template"
    return f"{runtime.binary} is where K3s does not look: install.sh --configure-k3s, then {restart}"
