"""A redacted bundle for support: what the agent knows and how the node is set up, without secrets."""

from __future__ import annotations

import io
import json
import re
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeagent import __version__
from edgeagent.config import Config, to_plain
from edgeagent.errors import NodeError
from edgeagent.hostroot import HostRoot

KEEP = 5
_SECRET_KEY = re.compile(r"(password|secret|token|hmac|key)(file)?$", re.IGNORECASE)
_SECRET_TEXT = re.compile(
    r"(-----BEGIN [A-Z ]+-----.*?-----END [A-Z ]+-----)"
    r"|((?:password|passwd|secret|token)\s*[=:]\s*)\S+"
    r"|(://[^/\s:@]+:)[^@\s]+(?=@)",
    re.IGNORECASE | re.DOTALL,
)

# Host files that say how the node is set up; none of them holds a secret by design.
FILES = (
    "/proc/version",
    "/proc/cmdline",
    "/proc/meminfo",
    "/proc/driver/nvidia/version",
    "/etc/os-release",
    "/etc/nv_tegra_release",
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/etc/nvidia-container-runtime/config.toml",
)
LISTINGS = (
    "/var/lib/kubelet/device-plugins",
    "/var/run/cdi",
    "/etc/cdi",
    "/dev",
    "/proc/driver/nvidia/gpus",
)


def redact(text: str) -> str:
    """The text without keys, passwords and tokens."""

    def hide(m: re.Match[str]) -> str:
        if m.group(1):
            return "[removed: key material]"
        return f"{m.group(2) or m.group(3)}[removed]"

    return _SECRET_TEXT.sub(hide, text)


def redact_plain(value: Any, key: str = "") -> Any:
    """Plain data without the values of keys that name secrets (paths of secret files stay)."""
    if isinstance(value, Mapping):
        return {k: redact_plain(v, str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [redact_plain(v, key) for v in value]
    if isinstance(value, str):
        named = _SECRET_KEY.search(key)
        return "[removed]" if named and not key.lower().endswith("file") else redact(value)
    return value


def collect(directory: Path, config: Config, snapshot: Mapping[str, Any] | None) -> Path:
    """Writes `edgeagent-diagnostics-TIME.tar.gz` (mode 0600) and returns its path; the oldest beyond
    KEEP go. Raises NodeError."""
    host = HostRoot(config.host_root)
    texts = {
        "about.json": json.dumps({"agent": __version__, "at": int(time.time())}),
        "config.json": json.dumps(redact_plain(to_plain(config)), indent=2),
        "snapshot.json": json.dumps(redact_plain(snapshot), indent=2) if snapshot is not None else "{}",
    }
    for path in FILES:
        text = host.read_text(path)
        if text is not None:
            texts[f"files{path}"] = redact(text)
    texts["listings.json"] = json.dumps({path: host.listdir(path) for path in LISTINGS}, indent=2)
    name = time.strftime("edgeagent-diagnostics-%Y%m%dT%H%M%SZ.tar.gz", time.gmtime())
    target = directory / name
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = target.with_suffix(".tmp")
        temporary.touch(mode=0o600)
        with tarfile.open(temporary, "w:gz") as bundle:
            for member, text in texts.items():
                data = text.encode("utf-8", "replace")
                info = tarfile.TarInfo(member)
                info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
                bundle.addfile(info, io.BytesIO(data))
        temporary.replace(target)
        for old in sorted(directory.glob("edgeagent-diagnostics-*.tar.gz"))[:-KEEP]:
            old.unlink(missing_ok=True)
    except OSError as e:
        raise NodeError(f"cannot write the diagnostics bundle to {directory}: {e.strerror}") from e
    return target
