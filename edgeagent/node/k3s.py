"""What K3s runs here, read from its files: role, versions, containerd's configuration, credentials."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from edgeagent.hostroot import HostRoot

DEFAULT_DATA_DIR = "/var/lib/rancher/k3s"
_BINARIES = ("/usr/local/bin/k3s", "/usr/bin/k3s", "/opt/bin/k3s")
_CONFIGS = ("/etc/rancher/k3s/config.yaml",)
_VERSION = re.compile(r"\bv(\d+)\.(\d+)\.(\d+)(?:[-+][0-9A-Za-z.+-]*)?")
_DATA_DIR = re.compile(r"""^\s*["']?data-dir["']?\s*:\s*["']?([^"'\s#]+)""", re.MULTILINE)
_CONFIG_VERSION = re.compile(r"^\s*version\s*=\s*(\d+)\s*$", re.MULTILINE)
_VERSION_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class K3sFacts:
    """`role`: "server" or "agent". Paths are the host's and exist, except `containerd_template`, which
    is where an operator's template has to be for this containerd."""

    role: str
    data_dir: str
    binary: str | None = None
    version: str | None = None  # "v1.33.5+k3s1"
    containerd_config: str | None = None
    containerd_major: int | None = None
    containerd_template: str | None = None
    containerd_socket: str | None = None
    admin_kubeconfig: str | None = None
    kubelet_kubeconfig: str | None = None

    @property
    def kubeconfig(self) -> str | None:
        """The node's own identity where there is one (it may label this node, write Events and evict
        this node's pods, and no more), else the administrator's."""
        return self.kubelet_kubeconfig or self.admin_kubeconfig


def find_k3s(host: HostRoot, ask_version: bool = True) -> K3sFacts | None:
    """K3s on this host, or None. `ask_version` runs `k3s --version` once (about 0.1 s)."""
    data_dir = _data_dir(host)
    is_server = host.exists(f"{data_dir}/server/tls") or host.exists(f"{data_dir}/server/token")
    if not is_server and not host.exists(f"{data_dir}/agent"):
        return None
    binary = next((b for b in _BINARIES if host.exists(b)), None)
    version = _version(host, binary) if binary and ask_version else None
    config = f"{data_dir}/agent/etc/containerd/config.toml"
    text = host.read_text(config)
    major = containerd_major(text, version)
    template = None
    if major is not None:
        name = "config-v3.toml.tmpl" if major >= 2 else "config.toml.tmpl"
        template = f"{data_dir}/agent/etc/containerd/{name}"
    return K3sFacts(
        role="server" if is_server else "agent",
        data_dir=data_dir,
        binary=binary,
        version=version,
        containerd_config=config if text is not None else None,
        containerd_major=major,
        containerd_template=template,
        containerd_socket=_existing(host, "/run/k3s/containerd/containerd.sock"),
        admin_kubeconfig=_existing(host, "/etc/rancher/k3s/k3s.yaml"),
        kubelet_kubeconfig=_existing(host, f"{data_dir}/agent/kubelet.kubeconfig"),
    )


def containerd_major(config_text: str | None, k3s_version: str | None) -> int | None:
    """containerd's major version: from the K3s version (2.0 since v1.31.6 and v1.32.2), else from its
    rendered configuration. Version 2 of that can also be containerd 2's, from an operator's old template."""
    rendered = _CONFIG_VERSION.search(config_text or "")
    if rendered is not None and int(rendered.group(1)) >= 3:
        return 2
    parsed = parse_version(k3s_version or "")
    if parsed is not None:
        return 2 if parsed >= (1, 32, 2) or (1, 31, 6) <= parsed < (1, 32, 0) else 1
    return 1 if rendered is not None else None


def parse_version(text: str) -> tuple[int, int, int] | None:
    """(1, 33, 5) from the first 'v1.33.5+k3s1' in the text."""
    m = _VERSION.search(text)
    return (int(m.group(1)), int(m.group(2)), int(m.group(3))) if m else None


def _data_dir(host: HostRoot) -> str:
    for path in _CONFIGS:
        m = _DATA_DIR.search(host.read_text(path) or "")
        if m and m.group(1).startswith("/"):
            return m.group(1).rstrip("/") or "/"
    return DEFAULT_DATA_DIR


def _version(host: HostRoot, binary: str) -> str | None:
    """K3s is one static binary: it runs through the host root as well as on the host."""
    try:
        done = subprocess.run(
            [str(host.path(host.resolve(binary))), "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    m = _VERSION.search(done.stdout)
    return m.group(0) if m else None


def _existing(host: HostRoot, path: str) -> str | None:
    return path if host.exists(path) else None
