"""Which mechanism keeps which limit on which GPU, and how far each container's limits can be trusted.

A mechanism is chosen per GPU and axis from probes: `auto` takes the strongest that probes well; a
mechanism named in the configuration that fails its probe is a problem for the status, not a silent
fallback (unless `fallback: true`). Per container, a level is claimed only on evidence seen now.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgeagent.errors import IsolationError
from edgeagent.gpus.model import Gpu
from edgeagent.isolation.backend import (
    AdoptsShares,
    IsolationBackend,
    ProbeResult,
    RunningContainer,
    ShareToEnforce,
)
from edgeagent.isolation.levels import NO_LIMIT, Axis, AxisLevel, Level, Levels
from edgeagent.node.cdi import ContainerEdits

log = logging.getLogger(__name__)

PROBE_WAIT_S = 8.0
LOSS_POLLS = 2  # evidence missing this often in a row lowers the level

# Order among mechanisms of equal level: the earlier is preferred.
_PREFERENCE = ("nvml-cgroup", "mps", "limiter", "hami-core", "nvgpu-sched")
# Chosen by `auto` only when allowed (a client's fault hits its neighbours) or supplied (hami-core).
_OPT_IN = frozenset({"mps", "hami-core"})

# Reasons why there is nothing to be seen, which is not the loss of what was seen.
_NOTHING_TO_SEE = frozenset({"no_gpu_use_yet", "use_not_seen", "not_running"})

LevelListener = Callable[[ShareToEnforce, Axis, AxisLevel, AxisLevel], None]


@dataclass(frozen=True, slots=True)
class Choice:
    """The mechanism for one axis of one GPU. `backend` None: nothing is enforced on that axis.
    `problem`: why the configured mechanism could not be used, for the status."""

    backend: IsolationBackend | None
    level: AxisLevel
    problem: str | None = None


@dataclass(slots=True)
class _Seen:
    level: AxisLevel
    missing: int = 0


def choose(
    axis: Axis,
    wanted: str,
    probes: Sequence[tuple[IsolationBackend, ProbeResult]],
    *,
    fallback: bool,
    allow_mps: bool,
    watchdog: bool,
) -> Choice:
    """Pure: picks from the probes of one GPU. `watchdog`: use is watched (memory axis only)."""
    reactive = axis is Axis.MEMORY and watchdog
    floor = AxisLevel(Level.REACTIVE, "watchdog", "use is compared with the limit") if reactive else NO_LIMIT
    if wanted == "none":
        return Choice(None, NO_LIMIT)
    if wanted == "watchdog":
        return Choice(None, floor)
    named = next(((b, p) for b, p in probes if b.name == wanted), None)
    problem = None
    if wanted != "auto":
        if named is not None and named[1].level is not Level.NONE:
            return Choice(named[0], AxisLevel(named[1].level, wanted, named[1].evidence))
        why = named[1].problem if named else "it does not work on this axis"
        problem = f"isolation.{axis.value}: {wanted} cannot be used: {why}"
        if not fallback:
            return Choice(
                None, AxisLevel(floor.level, floor.mechanism, floor.evidence, "probe_failed"), problem
            )
    usable = [
        (b, p)
        for b, p in probes
        if p.level is not Level.NONE and (b.name not in _OPT_IN or (b.name == "mps" and allow_mps))
    ]
    if not usable:
        return Choice(None, floor, problem)
    backend, probe = min(usable, key=lambda bp: (-bp[1].level.strength, _PREFERENCE.index(bp[0].name)))
    return Choice(backend, AxisLevel(probe.level, backend.name, probe.evidence), problem)


class IsolationManager:
    """Thread-safe. Probing and evidence are for the polling thread, `prepare` for gRPC handlers."""

    def __init__(
        self,
        backends: Sequence[IsolationBackend],
        *,
        memory: str,
        compute: str,
        fallback: bool,
        allow_mps: bool,
        on_level_lost: LevelListener | None = None,
    ) -> None:
        self._backends = tuple(backends)
        self._wanted = {Axis.MEMORY: memory, Axis.COMPUTE: compute}
        self._fallback = fallback
        self._allow_mps = allow_mps
        self._on_level_lost = on_level_lost
        self._lock = threading.Lock()
        self._choices: dict[str, dict[Axis, Choice]] = {}
        self._probing: dict[str, threading.Event] = {}
        self._seen: dict[tuple[str, str, Axis], _Seen] = {}

    def expect(self, gpu_uuid: str) -> None:
        """`probe` will be called for this GPU soon: no container is prepared on it before."""
        with self._lock:
            self._probing.setdefault(gpu_uuid, threading.Event())

    def probe(self, gpu: Gpu, *, watchdog: bool) -> Levels:
        """Probes every mechanism on `gpu` and chooses. `watchdog`: the driver lists memory per process."""
        choices: dict[Axis, Choice] = {}
        for axis in Axis:
            wanted = self._wanted[axis]
            probes = []
            if wanted not in ("none", "watchdog"):
                for backend in self._backends:
                    if axis not in backend.axes or not self._worth_probing(backend, wanted):
                        continue
                    probes.append((backend, self._try(backend, gpu, axis)))
            choice = choose(
                axis, wanted, probes, fallback=self._fallback, allow_mps=self._allow_mps, watchdog=watchdog
            )
            for backend, result in probes:
                log.debug(
                    "isolation probe gpu=%s axis=%s mechanism=%s level=%s evidence=%s",
                    gpu.uuid, axis.value, backend.name, result.level.value, result.evidence or result.problem,
                )  # fmt: skip
            choices[axis] = choice
        with self._lock:
            before = self._choices.get(gpu.uuid, {})
            self._choices[gpu.uuid] = choices
            self._probing.setdefault(gpu.uuid, threading.Event()).set()
        for axis, choice in choices.items():
            if choice.problem and (axis not in before or before[axis].problem != choice.problem):
                log.error("%s gpu=%s", choice.problem, gpu.uuid)
        levels = self.levels(gpu.uuid)
        log.log(
            logging.DEBUG if before and before == choices else logging.INFO,
            "isolation chosen gpu=%s memory=%s (%s) compute=%s (%s)",
            gpu.uuid, levels.memory.level.value, levels.memory.mechanism, levels.compute.level.value,
            levels.compute.mechanism,
        )  # fmt: skip
        return levels

    @staticmethod
    def _try(backend: IsolationBackend, gpu: Gpu, axis: Axis) -> ProbeResult:
        try:
            return backend.probe(gpu, axis)
        except IsolationError as e:
            return ProbeResult(Level.NONE, "", str(e))

    def _worth_probing(self, backend: IsolationBackend, wanted: str) -> bool:
        if wanted == backend.name:
            return True
        by_auto = backend.name not in _OPT_IN or (backend.name == "mps" and self._allow_mps)
        return by_auto and (wanted == "auto" or self._fallback)

    def levels(self, gpu_uuid: str) -> Levels:
        """What the probes of a GPU support; NONE before it was probed."""
        with self._lock:
            choices = self._choices.get(gpu_uuid, {})
        return Levels(
            memory=choices[Axis.MEMORY].level if Axis.MEMORY in choices else NO_LIMIT,
            compute=choices[Axis.COMPUTE].level if Axis.COMPUTE in choices else NO_LIMIT,
        )

    def failed(self) -> frozenset[str]:
        """GPUs on which a configured mechanism could not be used when it was tried."""
        with self._lock:
            return frozenset(
                uuid for uuid, choices in self._choices.items() if any(c.problem for c in choices.values())
            )

    def problems(self) -> tuple[str, ...]:
        """Sentences for the status: configured mechanisms that cannot be used."""
        with self._lock:
            found = [c.problem for choices in self._choices.values() for c in choices.values() if c.problem]
        return tuple(dict.fromkeys(found))

    def adopt(self, share: ShareToEnforce) -> None:
        """A container that was started before this agent was, and has its limits."""
        for backend in self._backends:
            if isinstance(backend, AdoptsShares):
                backend.adopt(share)

    def prepare(self, share: ShareToEnforce) -> ContainerEdits:
        """Everything that must be in place before the container starts. Raises IsolationError; waits
        a few seconds for a probe that is still under way."""
        with self._lock:
            probing = self._probing.get(share.gpu.uuid)
        if probing is not None and not probing.wait(PROBE_WAIT_S):
            raise IsolationError("isolation of this GPU is still being probed; the start is tried again")
        self._forget(share)  # what was seen of an earlier start says nothing about this one
        edits = ContainerEdits()
        prepared: list[IsolationBackend] = []
        for backend, axes in self._in_charge(share):
            try:
                edits = edits.merged(backend.prepare(share, axes))
            except IsolationError:
                for other in prepared:
                    self._release(other, share)
                raise
            prepared.append(backend)
        return edits

    def _in_charge(self, share: ShareToEnforce) -> list[tuple[IsolationBackend, frozenset[Axis]]]:
        with self._lock:
            choices = dict(self._choices.get(share.gpu.uuid, {}))
        if share.cores_pct is None and not share.early:
            choices.pop(Axis.COMPUTE, None)
        found: dict[str, tuple[IsolationBackend, set[Axis]]] = {}
        for axis, choice in choices.items():
            if choice.backend is not None:
                found.setdefault(choice.backend.name, (choice.backend, set()))[1].add(axis)
        return [(backend, frozenset(axes)) for backend, axes in found.values()]

    def observe(self, share: ShareToEnforce, running: RunningContainer) -> Levels:
        """The container's levels on the evidence of this poll. A level that was seen is lowered when
        the evidence is missing LOSS_POLLS times in a row; the listener is told once."""
        levels = {axis: self._observe_axis(share, running, axis) for axis in Axis}
        return Levels(memory=levels[Axis.MEMORY], compute=levels[Axis.COMPUTE])

    def _observe_axis(self, share: ShareToEnforce, running: RunningContainer, axis: Axis) -> AxisLevel:
        if axis is Axis.COMPUTE and share.cores_pct is None:
            return AxisLevel(Level.NONE, reason="uncapped")
        with self._lock:
            choice = self._choices.get(share.gpu.uuid, {}).get(axis)
        if choice is None:
            return NO_LIMIT
        if choice.backend is None:
            return self._watched(choice.level, running)
        now = self._evidence(choice.backend, share, running, axis)
        key = (share.pod_uid, share.container, axis)
        with self._lock:
            seen = self._seen.get(key)
            quiet = not running.pids or now.reason in _NOTHING_TO_SEE
            if seen is None or quiet or now.level.strength >= seen.level.level.strength:
                self._seen[key] = _Seen(now)
                return now
            seen.missing += 1
            if seen.missing < LOSS_POLLS:
                return seen.level
            before, self._seen[key] = seen.level, _Seen(now)
        log.warning(
            "isolation level lost pod=%s container=%s axis=%s from=%s to=%s reason=%s",
            share.pod_uid, share.container, axis.value, before.level.value, now.level.value, now.reason,
        )  # fmt: skip
        if self._on_level_lost is not None:
            self._on_level_lost(share, axis, before, now)
        return now

    @staticmethod
    def _evidence(
        backend: IsolationBackend, share: ShareToEnforce, running: RunningContainer, axis: Axis
    ) -> AxisLevel:
        try:
            now = backend.evidence(share, running, axis)
        except IsolationError as e:
            now = AxisLevel(Level.NONE, backend.name, str(e), "evidence_failed")
        if now.level is Level.NONE and axis is Axis.MEMORY and running.used_mib is not None:
            # The mechanism is not seen, but use is: it can still be acted on.
            now = AxisLevel(Level.REACTIVE, "watchdog", now.evidence, now.reason)
        return now

    @staticmethod
    def _watched(level: AxisLevel, running: RunningContainer) -> AxisLevel:
        if level.level is Level.REACTIVE and running.used_mib is None:
            return AxisLevel(Level.NONE, level.mechanism, reason="use_not_seen")
        return level

    def release(self, share: ShareToEnforce) -> None:
        """After the container's end. A mechanism that cannot clean up is logged, and does not keep
        the others from it. All are told: the choice may have been another one at its start."""
        for backend in self._backends:
            self._release(backend, share)
        self._forget(share)

    @staticmethod
    def _release(backend: IsolationBackend, share: ShareToEnforce) -> None:
        try:
            backend.release(share)
        except IsolationError as e:
            log.warning("isolation not taken back mechanism=%s error=%s", backend.name, e)

    def _forget(self, share: ShareToEnforce) -> None:
        with self._lock:
            for axis in Axis:
                self._seen.pop((share.pod_uid, share.container, axis), None)

    def close(self) -> None:
        for backend in self._backends:
            backend.close()
