"""The checks in their order, from the driver to the broker, and how they are run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from edgeagent.doctor import gpu_checks, host_checks, kubelet_checks, uplink_checks
from edgeagent.doctor.examination import Examination
from edgeagent.doctor.findings import Finding, Outcome, Result, fail
from edgeagent.doctor.isolation import isolation
from edgeagent.errors import AgentError

Check = Callable[[Examination], Iterable[Finding]]

CHECKS: Mapping[str, Check] = {
    "agent": kubelet_checks.agent,
    "driver": gpu_checks.driver,
    "device-nodes": gpu_checks.device_nodes,
    "container-runtime": gpu_checks.container_runtime,
    "containerd-config": gpu_checks.containerd_config,
    "cdi": gpu_checks.cdi_directories,
    "kubelet-sockets": kubelet_checks.kubelet_sockets,
    "registration": kubelet_checks.registration,
    "allocatable": kubelet_checks.allocatable,
    "memory-unit": kubelet_checks.memory_unit,
    "node-memory": kubelet_checks.node_memory,
    "isolation": isolation,
    "clock": uplink_checks.clock,
    "broker": uplink_checks.broker,
    "certificates": uplink_checks.certificates,
    "disk": host_checks.disk,
    "cgroups": host_checks.cgroups,
    "host-view": host_checks.view,
}
READY = ("agent", "driver", "kubelet-sockets", "registration", "allocatable")
LOOK_AGAIN_S = 1.0
NO_GPU_AFTER_S = 10.0  # an agent that has looked for so long and found none will not find one now


def examine(x: Examination, names: Iterable[str] = CHECKS) -> Iterator[Result]:
    """Each result as soon as it is there. What a check could not do is a finding, not the end."""
    for name in names:
        try:
            findings = tuple(CHECKS[name](x))
        except AgentError as e:
            findings = (fail(str(e)),)
        yield Result(name, findings)


def wait_ready(make: Callable[[], Examination], wait_s: float) -> tuple[bool, str]:
    """Waits until the node shows what the agent offers. (True, what is shown), or (False, one
    sentence: what is missing and how to fix it)."""
    deadline_s = time.monotonic() + wait_s
    pause = threading.Event()
    while True:
        x = make()
        try:
            results = list(examine(x, READY))
            bad = next((f for r in results for f in r.findings if f.outcome is Outcome.FAIL), None)
            if bad is None:
                return True, "; ".join(
                    f.what for r in results if r.name == "registration" for f in r.findings
                )
            hopeless = _hopeless(x)
        finally:
            x.close()
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or hopeless:
            return False, bad.what + (f" - {bad.fix}" if bad.fix else "")
        pause.wait(min(LOOK_AGAIN_S, left_s))


def _hopeless(x: Examination) -> bool:
    s = x.snapshot
    if s is None:
        return False
    looked_s = (s["takenMs"] - s["startedMs"]) / 1000
    return not x.gpus.gpus and looked_s > NO_GPU_AFTER_S
