"""Use against limit, on every platform: what is seen after the fact, told, and if asked acted upon.

A container over its limit in two looks in a row is over. Then the policy is applied: `report` tells,
`evict` has the API server end the pod gracefully, `kill` kills the container's GPU processes. Only
processes that are in that very pod now, with the same start time, are ever signalled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from edgeagent.config.schema import WatchdogConfig
from edgeagent.errors import NodeError
from edgeagent.node.cgroups import OwnerKind
from edgeagent.node.processes import ProcessInfo

log = logging.getLogger(__name__)

LOOKS = 2

Key = tuple[str, str, str]  # pod UID, container, GPU UUID


@dataclass(frozen=True, slots=True)
class WatchedUse:
    """One container's use of one GPU against its limit. `used_mib` None: cannot be seen now, which
    neither raises nor clears. `processes` are those of the container on that GPU; `mps_pids` those of
    them that are clients of an MPS daemon."""

    pod_uid: str
    container: str
    gpu_uuid: str
    limit_mib: int
    used_mib: float | None
    processes: tuple[ProcessInfo, ...] = ()
    mps_pids: frozenset[int] = frozenset()

    @property
    def key(self) -> Key:
        return self.pod_uid, self.container, self.gpu_uuid


@dataclass(frozen=True, slots=True)
class OverLimit:
    """A container that is over its limit. `action`: what the watchdog did about it."""

    use: WatchedUse
    since_ms: int
    action: str  # "reported" | "evicting" | "killed" | "not killed: …"


@dataclass(frozen=True, slots=True)
class _Seen:
    looks: int = 0
    since_ms: int = 0
    told: bool = False
    signalled: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Actions:
    """What the watchdog can do, passed in by the agent. `kill(process)` must check the identity again
    (Processes.kill). `terminate_client(process)` has MPS end a client's work in order, before the
    process may be killed; None: cannot."""

    told: Callable[[OverLimit], None] = lambda _: None
    back: Callable[[WatchedUse], None] = lambda _: None
    evict: Callable[[OverLimit], None] | None = None
    kill: Callable[[ProcessInfo], bool] | None = None
    terminate_client: Callable[[ProcessInfo], bool] | None = None


class Watchdog:
    """`measure` gives the use of every container that has a limit; empty when there is none, and must
    then cost nothing."""

    def __init__(
        self,
        config: WatchdogConfig,
        measure: Callable[[], Sequence[WatchedUse]],
        actions: Actions,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._measure = measure
        self._actions = actions
        self._unix = unix
        self._seen: dict[Key, _Seen] = {}
        self._over: Mapping[Key, OverLimit] = {}
        self.counters = {"over_limit_total": 0, "over_limit_killed_total": 0, "over_limit_evicted_total": 0}

    @property
    def over(self) -> Mapping[Key, OverLimit]:
        """Who is over its limit now."""
        return self._over

    def configure(self, config: WatchdogConfig) -> None:
        self._config = config

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(self._config.poll_seconds):
            self.look(self._measure())

    def look(self, uses: Sequence[WatchedUse]) -> None:
        """Takes one measurement of all containers."""
        seen: dict[Key, _Seen] = {}
        over: dict[Key, OverLimit] = {}
        for use in uses:
            before = self._seen.get(use.key, _Seen())
            now = count(before, use, self._config.tolerance_mib, round(self._unix() * 1000))
            if now.looks >= LOOKS:
                now, over[use.key] = self._act(use, now)
            elif before.told:
                log.info(
                    "container is within its limit again pod=%s container=%s", use.pod_uid, use.container
                )
                self._actions.back(use)
            seen[use.key] = now
        for key, ended in self._over.items():
            if key not in seen:
                self._actions.back(ended.use)
        self._seen, self._over = seen, over

    def _act(self, use: WatchedUse, seen: _Seen) -> tuple[_Seen, OverLimit]:
        policy = self._config.policy
        known = self._over.get(use.key)
        result = OverLimit(use, seen.since_ms, known.action if known else "reported")
        new = [p for p in use.processes if (p.pid, p.start_ticks) not in seen.signalled]
        if policy == "kill" and new:
            # Again for processes that came since: a container that restarts into the same excess.
            result = replace(result, action=self._kill(use, new))
            seen = replace(seen, signalled=seen.signalled | {(p.pid, p.start_ticks) for p in new})
        elif policy == "evict" and not seen.told and self._actions.evict is not None:
            result = replace(result, action="evicting")
            self.counters["over_limit_evicted_total"] += 1
            self._actions.evict(result)
        if not seen.told:
            self.counters["over_limit_total"] += 1
            log.warning(
                "container is over its limit pod=%s container=%s gpu=%s used_mib=%.0f limit_mib=%s action=%s",
                use.pod_uid, use.container, use.gpu_uuid, use.used_mib or 0, use.limit_mib, result.action,
            )  # fmt: skip
            self._actions.told(result)
        return replace(seen, told=True), result

    def _kill(self, use: WatchedUse, processes: Sequence[ProcessInfo]) -> str:
        killed, problems = 0, []
        for process in processes:
            owner = process.owner
            if owner.kind is not OwnerKind.POD or owner.pod_uid != use.pod_uid:
                problems.append(f"pid {process.pid} is not in the pod")
                continue
            # A client killed with work in flight can wedge the daemon for everybody.
            if process.pid in use.mps_pids and not self._terminated(process):
                problems.append(f"pid {process.pid} is an MPS client that could not be terminated in order")
                continue
            if self._actions.kill is None:
                problems.append("killing is not possible here")
                continue
            try:
                killed += bool(self._actions.kill(process))
            except NodeError as e:
                problems.append(str(e))
        self.counters["over_limit_killed_total"] += killed
        if problems:
            return f"not killed: {'; '.join(problems)}"
        return "killed"

    def _terminated(self, process: ProcessInfo) -> bool:
        terminate = self._actions.terminate_client
        return terminate is not None and terminate(process)


def count(before: _Seen, use: WatchedUse, tolerance_mib: int, now_ms: int) -> _Seen:
    """How often in a row the container was seen over its limit, after this look."""
    if use.used_mib is None:
        return before
    if use.used_mib <= use.limit_mib + tolerance_mib:
        return _Seen()
    return replace(before, looks=before.looks + 1, since_ms=before.since_ms or now_ms)
