"""How long things take: as measured on a real kubelet, or compressed for tests."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Timing:
    """Defaults are a real node's. In the tuples the last value repeats."""

    pre_start_deadline_s: float = 30.0
    start_retry_s: tuple[float, ...] = (0.8, 12.0)  # after a failed try to start a container
    restart_backoff_s: tuple[float, ...] = (0.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0)  # after an exit
    cgroup_gone_s: float = 0.95  # pod finished -> its cgroup removed
    termination_s: float = 0.5  # pod deleted -> its containers killed
    node_status_s: float = 10.0  # interval at which the node's sums reach the API; 0: at once
    endpoint_grace_s: float = 305.0  # plugin dead -> its resource's capacity 0
    readmit_s: float = 1.0  # kubelet start -> it takes up the pods it had
    dial_s: float = 10.0  # Register: how long the kubelet tries to dial back

    def but(self, **changes: object) -> Timing:
        return replace(self, **changes)  # type: ignore[arg-type]


REAL = Timing()

# For tests. The 30 s deadline of PreStartContainer stays: a plugin holds the call knowing it.
FAST = Timing(
    start_retry_s=(0.05, 0.2),
    restart_backoff_s=(0.0, 0.05),
    cgroup_gone_s=0.05,
    termination_s=0.0,
    node_status_s=0.0,
    endpoint_grace_s=60.0,
    readmit_s=0.3,
)


def at(steps: tuple[float, ...], index: int) -> float:
    return steps[min(index, len(steps) - 1)]
