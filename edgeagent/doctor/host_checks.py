"""The host around the agent: disk, cgroups, and how much of the host the agent sees."""

from __future__ import annotations

import os
from collections.abc import Iterator

from edgeagent.doctor.examination import Examination
from edgeagent.doctor.findings import Finding, fail, ok, skip, warn
from edgeagent.node.cgroups import in_cgroup_namespace

_LOW_MIB, _EMPTY_MIB = 200, 20
_KUBELET_EVICTS_BELOW = 0.05  # K3s's default: imagefs and nodefs 5 %


def disk(x: Examination) -> Iterator[Finding]:
    for path, what in (
        (x.config.state_dir, "state and outbox"),
        (x.config.run_dir, "sockets"),
        ("/var/lib/kubelet", "the kubelet"),
    ):
        try:
            fs = os.statvfs(x.host.path(path))
        except OSError:
            yield skip(f"{path} is not there")
            continue
        free_mib = fs.f_bavail * fs.f_frsize // 2**20
        share = fs.f_bavail / fs.f_blocks if fs.f_blocks else 1.0
        text = f"{path} ({what}): {free_mib} MiB free"
        if fs.f_flag & os.ST_RDONLY:
            yield fail(f"{path} ({what}) is mounted read-only", "a damaged file system? dmesg | tail")
        elif free_mib < _EMPTY_MIB:
            yield fail(text, "make room")
        elif path == "/var/lib/kubelet" and share < _KUBELET_EVICTS_BELOW:
            yield fail(f"{text}, {share:.0%}: below {_KUBELET_EVICTS_BELOW:.0%} K3s evicts pods", "make room")
        elif free_mib < _LOW_MIB:
            yield warn(text, "make room")
        else:
            yield ok(text)


def cgroups(x: Examination) -> Iterator[Finding]:
    root = x.config.kubelet.cgroup_root
    if x.host.exists(f"{root}/cgroup.controllers"):
        yield ok(f"cgroup v2 at {root}")
    elif x.host.listdir(root):
        yield warn(
            f"cgroup v1 at {root}: the driver's memory limits per pod (nvml-cgroup) need v2",
            "boot with systemd.unified_cgroup_hierarchy=1; everything else works",
        )
    else:
        yield fail(
            f"no cgroups at {root}: pods cannot be told from other processes",
            "mount them, or kubelet.cgroupRoot",
        )


def view(x: Examination) -> Iterator[Finding]:
    """Whether processes of pods are seen as such: needed for use per pod and for evidence."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        yield ok("on the host itself")
        return
    mount = x.host.root
    if str(mount) == "/":
        yield fail("in a pod, and hostRoot is /", "mount the host's / at /host and set hostRoot: /host")
        return
    if (x.host.read_text("/proc/1/comm") or "").strip() != (_comm_of_init() or ""):
        yield fail("in a pod without hostPID: processes cannot be told apart", "hostPID: true")
    elif in_cgroup_namespace(x.host):
        yield warn(
            "in a pod with a cgroup namespace of its own: whose process is whose may not be seen",
            "privileged: true has it share the host's",
        )
    else:
        yield ok(f"in a pod that sees the host's processes; host root {mount}")


def _comm_of_init() -> str | None:
    try:
        with open("/proc/1/comm", encoding="utf-8") as f:
            return f.read().strip()
    except OSError:
        return None
