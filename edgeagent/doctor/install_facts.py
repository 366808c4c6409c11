"""What install.sh must know of this host, as shell assignments: `python -m edgeagent.doctor.install_facts`.

Standard library only: it runs with the system's Python, out of the checkout or straight out of the
wheel, before anything is installed.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence

from edgeagent.doctor.containerd import nvidia_runtime, runtime_advice, template
from edgeagent.hostroot import HostRoot
from edgeagent.node.cgroups import OwnerKind, parse_proc_cgroup
from edgeagent.node.container_runtime import cdi_support
from edgeagent.node.k3s import find_k3s, parse_version

# sharing/units.py explains both.
FINE_UNIT_MIB = 1
COARSE_UNIT_MIB = 64
COARSE_FROM_MINOR = 36
VALIDATING_FROM_MINOR = 30

_GPU_NODE = re.compile(r"^/dev/(nvidia(\d+|ctl|-uvm)|nvmap|nvhost-gpu|nvgpu/.*)$")


def facts(host: HostRoot) -> dict[str, str]:
    k3s = find_k3s(host)
    parsed = parse_version(k3s.version or "") if k3s is not None else None
    minor = parsed[1] if parsed is not None else None
    runtime = nvidia_runtime(host, k3s)
    cdi = cdi_support(host, k3s)
    coarse = minor is not None and minor >= COARSE_FROM_MINOR
    return {
        "K3S_ROLE": k3s.role if k3s is not None else "",
        "K3S_VERSION": (k3s.version or "") if k3s is not None else "",
        "K3S_MINOR": str(minor or ""),
        "K3S_MANIFESTS": f"{k3s.data_dir}/server/manifests" if k3s is not None else "",
        "K3S_TEMPLATE": (k3s.containerd_template or "") if k3s is not None else "",
        "MEMORY_UNIT": str(COARSE_UNIT_MIB if coarse else FINE_UNIT_MIB),
        "POLICIES": "yes" if minor is None or minor >= VALIDATING_FROM_MINOR else "",
        "CDI": {True: "yes", False: "no", None: "unknown"}[cdi.enabled],
        "CDI_REASON": cdi.reason,
        "RUNTIME_ADVICE": runtime_advice(runtime, k3s) or "",
        "TEMPLATE_TEXT": (template(k3s, runtime) or "") if k3s is not None else "",
        "PODS_ON_GPU": " ".join(sorted(pods_on_gpu(host))),
    }


def pods_on_gpu(host: HostRoot) -> set[str]:
    """UIDs of pods with a process that has a GPU's device node open."""
    pods = set()
    for name in host.listdir("/proc"):
        if not name.isdigit():
            continue
        owner = parse_proc_cgroup(host.read_text(f"/proc/{name}/cgroup") or "")
        if owner.kind is not OwnerKind.POD or owner.pod_uid is None or owner.pod_uid in pods:
            continue
        for fd in host.listdir(f"/proc/{name}/fd"):
            try:
                target = os.readlink(host.path(f"/proc/{name}/fd/{fd}"))
            except OSError:
                continue  # closed, or the process has ended
            if _GPU_NODE.match(target):
                pods.add(owner.pod_uid)
                break
    return pods


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    for key, value in facts(HostRoot(args[0] if args else "/")).items():
        print(f"{key}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
