"""How far limits can be trusted on this node, by trying: every mechanism on every GPU and axis, and the
level of every container that runs now.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgeagent.doctor.examination import Examination, JsonObject
from edgeagent.doctor.findings import Finding, Outcome, fail, ok, skip, warn
from edgeagent.errors import IsolationError
from edgeagent.gpus.model import Gpu
from edgeagent.isolation.levels import Axis
from edgeagent.mechanisms import isolation_backends

_MEANING = {
    "hard": "the driver refuses what is over the limit",
    "cooperative": "a library in the container refuses it; a hostile program can get round that",
    "weighted": "a share under contention, not a cap",
    "reactive": "seen afterwards, and acted on as isolation.watchdog.policy says",
    "none": "nothing keeps the limit",
}
# Reasons of containers' levels: what they mean, and what helps.
REASONS = {
    "not_preloaded": (
        "the limiter's library is not loaded in it",
        "is the image's libc musl, or its program statically linked? Then only a driver's limit helps",
    ),
    "musl_image": (
        "its image uses musl, which the library does not support",
        "use an image with glibc (Debian, Ubuntu, UBI)",
    ),
    "empty_library": ("the library file is empty", "free disk space, then systemctl restart edgeagent"),
    "state_denied": ("it may not write the limiter's state file", "does a sandbox or SELinux forbid it?"),
    "opted_out": ("it switched the limiter off", "the admission policies forbid that: are they applied?"),
    "nested": ("it starts containers of its own", "limits do not reach into them"),
    "no_gpu_use_yet": ("it has not used its GPU yet", "look again when it has"),
    "limit_not_readable": ("its limit cannot be read back", "journalctl -u edgeagent"),
    "cgroup_not_found": (
        "its cgroup was not found",
        "in a pod the agent needs hostPID and the host's cgroups",
    ),
    "use_not_seen": ("its memory use is not seen", "in a pod the agent needs hostPID"),
    "not_running": ("it has no process", "look again when it runs"),
    "limit_changed": ("somebody changed its limit; it was set again", "who runs nvidia-smi on this node?"),
    "pod_limit_only": ("its pod is limited as a whole, the container alone could not be", None),
    "not_set_at_start": ("it was started before this mechanism was in charge", "restart the pod"),
    "evidence_failed": ("the proof could not be read", "journalctl -u edgeagent"),
    "several_clients": (
        "several of its processes use the GPU, and MPS limits each of them",
        "one process per container, or another mechanism",
    ),
    "not_mps_client": (
        "a process of it uses the GPU without MPS",
        "does it set CUDA_MPS_PIPE_DIRECTORY? The admission policies forbid that",
    ),
    "mps_daemon": ("its MPS daemon is of no use", "see the condition MpsDaemon"),
    "mps_daemon_restarted": ("its MPS daemon was started anew", "restart the pod"),
    "compute_mode_changed": (
        "the GPU was not in EXCLUSIVE_PROCESS; it was set again",
        "who runs nvidia-smi on this node?",
    ),
    "limit_in_environment": (
        "its percentage is only in its environment",
        "driver r615 has MPS protocol 3, which keeps it",
    ),
    "probe_failed": ("the configured mechanism did not work", "edgeagent doctor isolation"),
}


@dataclass(frozen=True, slots=True)
class Try:
    """What one mechanism showed for one GPU and axis."""

    gpu: Gpu
    axis: Axis
    mechanism: str
    level: str
    evidence: str
    problem: str | None


def tries(x: Examination) -> list[Try]:
    """Tries everything. Takes seconds where a mechanism starts a program; leaves nothing behind."""
    gpus, inventory = x.look_at_gpus()
    found = []
    backends = isolation_backends(x.config, x.host, gpus.limiter, gpus.compute_modes)
    try:
        for gpu in inventory.gpus:
            for axis in Axis:
                for backend in backends:
                    if axis not in backend.axes:
                        continue
                    try:
                        p = backend.probe(gpu, axis)
                        found.append(Try(gpu, axis, backend.name, p.level.value, p.evidence, p.problem))
                    except IsolationError as e:
                        found.append(Try(gpu, axis, backend.name, "none", "", str(e)))
    finally:
        for backend in backends:
            backend.close()
    return found


def isolation(x: Examination) -> Iterator[Finding]:
    """The check: the agent's choice where it runs, else the best that a try shows."""
    s = x.snapshot
    if s is None:
        yield from _untested_choice(x)
        return
    for g in s.get("gpus", []):
        if g["mode"] != "shared":
            continue
        for axis in Axis:
            level = g.get("levels", {}).get(axis.value, {"level": "none"})
            yield _level(f"GPU {g['gpu']['index']} {axis.value}", level, axis)
    for reason in s.get("reasons", []):
        if reason.startswith("isolation."):
            yield fail(reason, "edgeagent doctor isolation")
    yield from container_findings(s)


def _level(what: str, level: JsonObject, axis: Axis) -> Finding:
    word = level["level"]
    mechanism = level.get("mechanism", "none")
    text = f"{what} limits: {word}" + (f" through {mechanism}" if mechanism != "none" else "")
    detail = level.get("evidence") or _MEANING[word]
    if word in ("hard", "cooperative") or (word == "weighted" and axis is Axis.COMPUTE):
        return ok(f"{text} ({detail})")
    return warn(
        f"{text}: {_MEANING[word]}", "edgeagent doctor isolation shows what could be used and why not"
    )


def container_findings(s: JsonObject) -> Iterator[Finding]:
    """Containers whose limits are kept less well than their GPU could."""
    for c in s.get("containers", []):
        name = f"{c.get('namespace', '?')}/{c.get('pod', c['podUid'][:8])}/{c['container']}"
        for axis in Axis:
            level = c.get("levels", {}).get(axis.value, {})
            reason = level.get("reason")
            if reason is None or reason == "uncapped":
                continue
            meaning, fix = REASONS.get(reason, (reason, None))
            yield warn(f"{name} {axis.value}: {level.get('level', 'none')}, {meaning}", fix)


def _untested_choice(x: Examination) -> Iterator[Finding]:
    found = [t for t in tries(x) if t.level != "none"]
    if not x.look_at_gpus()[1].gpus:
        yield skip("no GPU")
        return
    for axis in Axis:
        usable = sorted({f"{t.mechanism} ({t.level})" for t in found if t.axis is axis})
        if usable:
            yield ok(f"{axis.value}: {', '.join(usable)} would work")
        else:
            yield warn(f"{axis.value}: no mechanism works here", "edgeagent doctor isolation says why")


def report(x: Examination) -> tuple[list[Try], list[Finding]]:
    """`doctor isolation`: all tries, and what the running agent says of its containers."""
    made = tries(x)
    s = x.snapshot
    findings = list(isolation(x)) if s is not None else [skip(x.agent_problem or "the agent does not run")]
    return made, findings


def outcome_of(made: Try) -> Outcome:
    return Outcome.PASS if made.level != "none" else Outcome.SKIP
