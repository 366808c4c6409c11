"""What the node says: pure functions from a NodeSnapshot to the payloads of the FLEET interface.

A *body* is the content of one message without its envelope; bodies of the same state compare equal,
so the publisher sends one only when it changed. `envelope` adds who, when and which; `encode` makes
bytes of at most 64 KiB. A value that the hardware does not give is absent: never null, 0 or NaN
(JSON has none). Bytes are integers named …Bytes or …MiB; times are unix milliseconds named ts,
since or …Ms.

Truncation, where a message would be larger than the cap: entries leave the longest list first, from
its end, and `truncated` counts how many left each list. Texts are cut to 500 characters always.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgeagent.errors import FleetError
from edgeagent.gpus.model import GpuReading
from edgeagent.isolation.levels import AxisLevel, Levels
from edgeagent.snapshot import Condition, ContainerShare, GpuState, NodeSnapshot, NodeState, WaitingContainer

VERSION = 1
MAX_PAYLOAD_BYTES = 64 * 1024
MAX_TEXT = 500
MAX_FACTS = 32
MAX_REASONS = 32

SYNCED, UNSYNCED, RESTORED = "synced", "unsynced", "restored"

Body = dict[str, Any]

# Lone surrogates (undecodable bytes of the host) cannot be written as UTF-8.
_REPLACEMENT = {chr(c): "\ufffd" for c in range(0xD800, 0xE000)}


@dataclass(frozen=True, slots=True)
class Stamp:
    """When something was seen. `mono_ms` counts since boot, suspend included; with `boot` it orders
    messages whatever the wall clock did. `clock`: "synced", "unsynced", or "restored" (the time was
    computed later, after the clock came right in the same boot). `session` changes with every start
    of the agent: a will of an earlier run can be told apart by it."""

    ts_ms: int
    mono_ms: int
    boot: str
    session: str
    clock: str


@dataclass(frozen=True, slots=True)
class OutboxFigures:
    """The outbox as status shows it. `dropped` counts per class since the file was made."""

    id: str
    queued: int = 0
    queued_bytes: int = 0
    oldest_age_s: int | None = None
    quarantined: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DesiredState:
    """What became of `cfg/desired`. `refused` names each part that was not applied, and why."""

    hash: str
    applied: bool
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UplinkFacts:
    """What status says about the uplink itself: how long until silence means trouble, and what the
    node lets operators do."""

    commands: Sequence[str] = ()
    signed_commands: bool = False
    keepalive_s: int | None = None
    will_delay_s: int | None = None
    status_every_s: int | None = None
    telemetry_s: float | None = None
    link: str | None = None


# -- values ---------------------------------------------------------------------------------------


def _text(value: str | None, limit: int = MAX_TEXT) -> str | None:
    """`value` without control characters and cut to `limit`; lone surrogates are replaced."""
    if value is None:
        return None
    if not value.isprintable():
        value = "".join(c if c.isprintable() else _REPLACEMENT.get(c, " ") for c in value)
    return value if len(value) <= limit else value[: limit - 1] + "…"


def _number(value: float | None, low: float, high: float, digits: int = 1) -> int | float | None:
    """`value` rounded, or None where it is none: NaN, infinite, or outside what can be true (drivers
    hand out -256 °C and 2**63-22 for "not available")."""
    if value is None or isinstance(value, bool) or not math.isfinite(value) or not low <= value <= high:
        return None
    rounded = round(float(value), digits)
    return int(rounded) if rounded == int(rounded) else rounded


def _mib(value: float | None) -> int | None:
    number = _number(value, 0, 2**40, 0)
    return None if number is None else int(number)


def _pct(value: float | None) -> int | float | None:
    # Sampled utilisation overshoots by a little: that is 100, not unknown.
    return _number(None if value is None else min(value, 100.0) if value <= 110 else value, 0, 100)


def _celsius(value: float | None) -> int | float | None:
    return _number(value, -60, 200)


def _present(**values: Any) -> Body:
    """The values that are known: None is left out, and so are empty lists and mappings."""
    return {k: v for k, v in values.items() if v is not None and v != {} and v != []}


def _facts(facts: Mapping[str, Any]) -> Body:
    out: Body = {}
    for key in sorted(facts)[:MAX_FACTS]:
        value = facts[key]
        if isinstance(value, (bool, int)):
            out[key] = value
        elif isinstance(value, float):
            if math.isfinite(value):
                out[key] = value
        elif isinstance(value, str):
            out[key] = _text(value, 200)
    return out


# -- envelope and bytes ---------------------------------------------------------------------------


def envelope(
    body: Body,
    stamp: Stamp,
    *,
    message_id: str,
    seq: int,
    outbox: str | None = None,
    historical: bool = False,
) -> Body:
    """The payload: envelope first. Messages that went through the outbox carry its id as `box`;
    consumers drop duplicates by (node, box, seq), or by `id`, which is built from them."""
    head: Body = {
        "v": VERSION, "id": message_id, "ts": stamp.ts_ms, "mono": stamp.mono_ms, "boot": stamp.boot,
        "sess": stamp.session, "seq": seq, "clk": stamp.clock,
    }  # fmt: skip
    if outbox is not None:
        head["box"] = outbox
    if historical:
        head["hist"] = True
    return {**head, **body}


def encode(payload: Body, max_bytes: int = MAX_PAYLOAD_BYTES) -> bytes:
    """JSON bytes of at most `max_bytes`, shortened as the module says where need be. FleetError when
    the rest is still too large or holds what JSON has not."""
    data = _dump(payload)
    if len(data) <= max_bytes:
        return data
    payload = json.loads(data)  # a copy that may be cut
    cut: dict[str, int] = {}
    while len(data) > max_bytes:
        lists = [entry for entry in _lists(payload, "") if entry[1]]
        if not lists:
            raise FleetError(f"cannot shorten a message of {len(data)} bytes to {max_bytes}")
        path, longest = max(lists, key=lambda entry: len(entry[1]))
        # One pass takes what is missing, judged by the mean size of an entry; the loop corrects it.
        entry_bytes = max(1, len(_dump(longest)) // len(longest))
        take = min(len(longest), max(1, (len(data) - max_bytes) // entry_bytes))
        del longest[len(longest) - take :]
        cut[path] = cut.get(path, 0) + take
        payload["truncated"] = cut
        data = _dump(payload)
    return data


def deflate(data: bytes) -> bytes:
    """zlib format (RFC 1950): what HTTP and browsers call "deflate"."""
    return zlib.compress(data, 9)


def inflate(data: bytes, max_bytes: int = 16 * MAX_PAYLOAD_BYTES) -> bytes:
    """Undoes `deflate`; FleetError for what is broken or grows beyond `max_bytes`."""
    try:
        unpacker = zlib.decompressobj()
        out = unpacker.decompress(data, max_bytes)
    except zlib.error as e:
        raise FleetError(f"cannot inflate a message: {e}") from e
    if not unpacker.eof:
        raise FleetError(f"cannot inflate a message: incomplete or larger than {max_bytes} bytes")
    return out


def _dump(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
    except ValueError as e:
        raise FleetError(f"cannot write a message as JSON: {e}") from e


def _lists(value: Any, path: str) -> Iterable[tuple[str, list[Any]]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key != "truncated":
                yield from _lists(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        yield path, value
        for item in value:
            yield from _lists(item, path)


# -- status and will ------------------------------------------------------------------------------


def status(
    snap: NodeSnapshot,
    *,
    uplink: UplinkFacts | None = None,
    outbox: OutboxFigures | None = None,
    desired: DesiredState | None = None,
    state: NodeState | None = None,
) -> Body:
    """`status`. `state` overrides the snapshot's (the `offline` of a clean stop)."""
    uplink = uplink or UplinkFacts()
    body = _present(
        node=snap.node,
        site=snap.site,
        state=(state or snap.state).value,
        health=snap.health.value,
        agent=snap.agent_version,
        configHash=snap.config_hash,
        startedMs=snap.started_ms,
        kubelet=snap.kubelet_connected,
        binding=snap.binding,
        totals=totals(snap),
        outbox=None if outbox is None else _outbox(outbox),
        desired=None if desired is None else _desired(desired),
        commands=sorted(uplink.commands),
        signedCommands=uplink.signed_commands or None,
        keepaliveS=uplink.keepalive_s,
        willDelayS=uplink.will_delay_s,
        statusEveryS=uplink.status_every_s,
        telemetryS=uplink.telemetry_s,
        link=uplink.link,
        counters={k: v for k, v in sorted(snap.counters.items()) if isinstance(v, int)},
    )
    body["reasons"] = [_text(r) for r in snap.reasons[:MAX_REASONS]]
    body["alerts"] = sorted(conditions(snap))
    return body


def will(
    node: str, site: str, agent_version: str, config_hash: str, uplink: UplinkFacts | None = None
) -> Body:
    """The last will: what the broker says of us when we can no longer speak. Its `ts` is that of the
    connect: consumers take the time of arrival, and believe it only if `sess` is the one they know."""
    uplink = uplink or UplinkFacts()
    return _present(
        node=node,
        site=site,
        state=NodeState.LOST.value,
        reasons=["the broker lost contact with the node"],
        agent=agent_version,
        configHash=config_hash,
        will=True,
        keepaliveS=uplink.keepalive_s,
        willDelayS=uplink.will_delay_s,
    )


def totals(snap: NodeSnapshot) -> Body:
    """The node in a few numbers, so that a fleet overview needs nothing but `status`."""
    used = [
        g.reading.memory_used_mib for g in snap.gpus if g.reading and g.reading.memory_used_mib is not None
    ]
    return _present(
        gpus=len(snap.gpus),
        gpusSick=sum(g.health.value == "sick" for g in snap.gpus),
        memoryTotalMiB=sum(g.gpu.memory_total_mib for g in snap.gpus),
        memoryUsableMiB=sum(g.usable_mib for g in snap.gpus),
        memoryPromisedMiB=sum(g.promised_mib for g in snap.gpus),
        # A sum with a part missing would be a wrong number.
        memoryUsedMiB=_mib(sum(used)) if snap.gpus and len(used) == len(snap.gpus) else None,
        memoryFreeMiB=sum(g.free_mib for g in snap.gpus),
        largestFreeMiB=snap.largest_free_mib,
        containers=len(snap.containers),
        waiting=len(snap.waiting),
    )


def _outbox(figures: OutboxFigures) -> Body:
    return _present(
        id=figures.id,
        queued=figures.queued,
        queuedBytes=figures.queued_bytes,
        oldestAgeS=figures.oldest_age_s,
        quarantined=figures.quarantined,
        dropped={k: v for k, v in sorted(figures.dropped.items()) if v},
    )


def _desired(desired: DesiredState) -> Body:
    return _present(
        hash=desired.hash,
        applied=desired.applied,
        refused=[{"key": k, "reason": _text(v, 200)} for k, v in sorted(desired.refused.items())],
    )


# -- inventory ------------------------------------------------------------------------------------


def inventory(snap: NodeSnapshot) -> Body:
    """`inv`: what is there. Nothing in it moves while nobody changes hardware, driver or settings."""
    host = snap.host
    body = _present(
        node=snap.node,
        site=snap.site,
        agent=snap.agent_version,
        configHash=snap.config_hash,
        host=_present(
            hostname=_text(host.hostname, 253),
            machine=host.machine,
            os=_text(host.os, 200),
            kernel=_text(host.kernel, 200),
            k3sVersion=_text(host.k3s_version, 100),
            kubeletVersion=_text(host.kubelet_version, 100),
            memoryTotalMiB=_mib(host.memory_total_mib),
            cpuCount=host.cpu_count,
            facts=_facts(host.facts),
        ),
        binding=snap.binding,
        memoryUnitMiB=snap.memory_unit_mib,
        evidence=[_text(e, 300) for e in snap.evidence[:32]],
    )
    body["gpus"] = [_gpu(g) for g in snap.gpus]
    return body


def _gpu(state: GpuState) -> Body:
    gpu = state.gpu
    capability = gpu.compute_capability
    return _present(
        uuid=gpu.uuid,
        index=gpu.index,
        kind=gpu.kind.value,
        source=gpu.source,
        model=_text(gpu.model, 200),
        memoryTotalMiB=_mib(gpu.memory_total_mib),
        memoryReservedMiB=_mib(gpu.memory_reserved_mib),
        usableMiB=_mib(state.usable_mib),
        mode=state.mode.value,
        present=state.present,
        levels=levels(state.levels, evidence=True),
        computeCapability=None if capability is None else f"{capability[0]}.{capability[1]}",
        multiprocessors=gpu.multiprocessors,
        pciAddress=gpu.pci_address,
        numaNode=gpu.numa_node,
        driverVersion=_text(gpu.driver_version, 100),
        cudaVersion=_text(gpu.cuda_version, 100),
        vbiosVersion=_text(gpu.vbios_version, 100),
        migEnabled=gpu.mig_enabled,
        migInstances=[
            _present(uuid=m.uuid, profile=m.profile, memoryMiB=_mib(m.memory_mib)) for m in gpu.mig_instances
        ],
        temperatureSlowdownC=_celsius(gpu.temperature_slowdown_c),
        temperatureShutdownC=_celsius(gpu.temperature_shutdown_c),
        powerLimitW=_number(gpu.power_limit_w, 0, 100_000),
        facts=_facts(gpu.facts),
    )


def levels(value: Levels, *, evidence: bool = False) -> Body:
    """Both axes: level, mechanism, and the reason why it is not higher."""

    def axis(a: AxisLevel) -> Body:
        return _present(
            level=a.level.value,
            mechanism=a.mechanism,
            enforced=a.enforced,
            reason=_text(a.reason, 200),
            evidence=_text(a.evidence, 300) or None if evidence else None,
        )

    return {"memory": axis(value.memory), "compute": axis(value.compute)}


# -- allocation -----------------------------------------------------------------------------------


def allocation(snap: NodeSnapshot) -> Body:
    """`alloc`: who holds what on which GPU and who waits, whole. Use is not in it (it moves all the
    time: `tele/m` has it); whether a container is over its limit is."""
    return {
        "gpus": [_gpu_shares(g, snap.containers_on(g.gpu.uuid)) for g in snap.gpus],
        "waiting": [_waiting(w) for w in sorted(snap.waiting, key=lambda w: w.since_ms)],
        "largestFreeMiB": snap.largest_free_mib,
        "resources": [
            _present(
                name=r.name,
                kind=r.kind,
                unitMiB=r.unit_mib,
                total=r.total,
                healthy=r.healthy,
                allocated=r.allocated,
                registered=r.registered,
                problem=_text(r.problem),
            )
            for r in snap.resources
        ],
    }


def _gpu_shares(state: GpuState, containers: Sequence[ContainerShare]) -> Body:
    return {
        "uuid": state.gpu.uuid,
        "index": state.gpu.index,
        "mode": state.mode.value,
        "health": state.health.value,
        "cordoned": state.cordoned,
        "present": state.present,
        "usableMiB": state.usable_mib,
        "reservedMiB": state.reserved_mib,
        "promisedMiB": state.promised_mib,
        "freeMiB": state.free_mib,
        "promisedCoresPct": state.promised_cores_pct,
        "freeCoresPct": state.free_cores_pct,
        # Largest first: what a cut message loses are the smallest shares.
        "containers": [
            _container(c)
            for c in sorted(containers, key=lambda c: (-(c.memory_mib or 0), c.pod_uid, c.container))
        ],
    }


def _container(c: ContainerShare) -> Body:
    return _present(
        podUid=c.pod_uid,
        namespace=c.namespace,
        pod=c.pod,
        container=c.container,
        mode=c.mode.value,
        memoryMiB=_mib(c.memory_mib),
        coresPct=c.cores_pct,
        levels=levels(c.levels),
        since=c.since_ms,
        running=c.running,
        overLimit=c.over_limit or None,
        leftoverMiB=c.leftover_mib or None,
    )


def _waiting(w: WaitingContainer) -> Body:
    return _present(
        podUid=w.pod_uid,
        namespace=w.namespace,
        pod=w.pod,
        container=w.container,
        reason=_text(w.reason),
        since=w.since_ms,
        memoryMiB=_mib(w.memory_mib),
        coresPct=w.cores_pct,
        permanent=w.permanent or None,
    )


# -- alerts ---------------------------------------------------------------------------------------


def conditions(snap: NodeSnapshot) -> dict[str, Condition]:
    """Every condition that holds now, of GPUs and of the node, by id."""
    return {c.id: c for c in (*snap.conditions, *(c for g in snap.gpus for c in g.conditions))}


def alert(condition: Condition, snap: NodeSnapshot) -> Body:
    """`alert/{id}` while the condition holds; an empty payload clears it."""
    gpu = next((g.gpu for g in snap.gpus if g.gpu.uuid == condition.gpu_uuid), None)
    return _present(
        alert=condition.id,
        type=condition.type,
        severity=condition.severity,
        since=condition.since_ms,
        message=_text(condition.message),
        gpu=condition.gpu_uuid,
        gpuIndex=None if gpu is None else gpu.index,
        gpuModel=None if gpu is None else _text(gpu.model, 200),
        makesUnhealthy=condition.makes_unhealthy,
        podsHurt=list(condition.pods_hurt[:200]),
        facts=_facts(condition.facts),
    )


# -- telemetry ------------------------------------------------------------------------------------


def sample(snap: NodeSnapshot, ts_ms: int) -> Body:
    """One row of `tele/m`: what every GPU and every pod on it used at `ts_ms`."""
    return {
        "ts": ts_ms,
        "gpus": [_reading(g, snap.containers_on(g.gpu.uuid)) for g in snap.gpus],
        **_present(
            host=_present(
                memoryAvailableMiB=_mib(snap.host.memory_available_mib),
                load1=_number(snap.host.load_1m, 0, 1e6, 2),
            )
        ),
    }


def _reading(state: GpuState, containers: Sequence[ContainerShare]) -> Body:
    r = state.reading or GpuReading(state.gpu.uuid, 0.0)
    return _present(
        uuid=state.gpu.uuid,
        index=state.gpu.index,
        health=state.health.value,
        fault=None if r.fault is None else r.fault.value,
        memoryUsedMiB=_mib(r.memory_used_mib),
        memoryFreeMiB=_mib(r.memory_free_mib),
        promisedMiB=_mib(state.promised_mib),
        utilPct=_pct(r.util_pct),
        memoryUtilPct=_pct(r.memory_util_pct),
        encoderUtilPct=_pct(r.encoder_util_pct),
        decoderUtilPct=_pct(r.decoder_util_pct),
        temperatureC=_celsius(r.temperature_c),
        temperaturesC=_present(**{k: _celsius(v) for k, v in sorted(r.temperatures_c.items())[:MAX_FACTS]}),
        powerW=_number(r.power_w, 0, 100_000),
        railsW=_present(**{k: _number(v, 0, 100_000) for k, v in sorted(r.rails_w.items())[:MAX_FACTS]}),
        energyMj=_number(r.energy_mj, 0, 2**53, 0),
        clockSmMhz=_number(r.clock_sm_mhz, 0, 100_000, 0),
        clockMemoryMhz=_number(r.clock_memory_mhz, 0, 100_000, 0),
        fanPct=_pct(r.fan_pct),
        throttle=None if r.throttle_reasons is None else sorted(r.throttle_reasons - {"idle"}),
        eccUncorrectable=_number(r.ecc_uncorrectable, 0, 2**53, 0),
        powerMode=_text(r.power_mode, 64),
        hostUsedMiB=None if state.host_use is None else _mib(state.host_use.used_mib),
        unattributedMiB=_mib(state.unattributed_mib),
        pods=[
            _present(
                namespace=c.namespace,
                pod=c.pod,
                container=c.container,
                podUid=c.pod_uid if c.pod is None else None,  # the name says it better
                usedMiB=_mib(c.used_mib),
                utilPct=_pct(c.util_pct),
                limitMiB=_mib(c.memory_mib),
                coresPct=c.cores_pct,
            )
            for c in containers
        ],
    )


def telemetry(samples: Sequence[Body]) -> Body:
    """`tele/m`: rows, oldest first."""
    return {"samples": list(samples)}


def to_columns(samples: Sequence[Body]) -> Body:
    """`tele/z` before deflating: the same samples by column, which deflate packs to a third.

    `t`: each sample's ts as an offset in ms from `t0`. `gpus[]`/`gpus[].pods[]`: what never changes
    as it is; what changed in the batch in `cols`, one value a sample, null where it was absent.
    """
    t0 = samples[0]["ts"] if samples else 0
    gpus: dict[str, list[Body | None]] = {}
    for n, row in enumerate(samples):
        for gpu in row["gpus"]:
            gpus.setdefault(gpu["uuid"], [None] * len(samples))[n] = gpu
    out_gpus: list[Body] = []
    for rows in gpus.values():
        pods: dict[tuple[Any, ...], list[Body | None]] = {}
        for n, gpu_row in enumerate(rows):
            for pod in (gpu_row or {}).get("pods", ()):
                pods.setdefault(_pod_key(pod), [None] * len(samples))[n] = pod
        out_gpus.append(
            {**_columns(rows, skip="pods"), **_present(pods=[_columns(p, skip="") for p in pods.values()])}
        )
    hosts = [row.get("host") for row in samples]
    return _present(
        t0=t0,
        t=[row["ts"] - t0 for row in samples],
        gpus=out_gpus,
        host=_columns(hosts, skip="") if any(hosts) else None,
    )


def from_columns(body: Mapping[str, Any]) -> list[Body]:
    """Undoes `to_columns`: the rows of `tele/m`. FleetError for what is no such body."""
    try:
        offsets = list(body["t"])
        out: list[Body] = []
        for n, offset in enumerate(offsets):
            gpus = []
            for gpu in body.get("gpus", ()):
                row = _row(gpu, n, len(offsets))
                if row is not None:
                    pods = [p for p in (_row(pod, n, len(offsets)) for pod in gpu.get("pods", ())) if p]
                    gpus.append({**row, **_present(pods=pods)})
            host = _row(body["host"], n, len(offsets)) if "host" in body else None
            out.append({"ts": body["t0"] + offset, "gpus": gpus, **_present(host=host)})
        return out
    except (KeyError, TypeError, IndexError, AttributeError) as e:
        raise FleetError(f"cannot read a column batch: {type(e).__name__} {e}") from e


def _pod_key(pod: Body) -> tuple[Any, ...]:
    return (pod.get("namespace"), pod.get("pod"), pod.get("podUid"), pod.get("container"))


def _columns(rows: Sequence[Body | None], skip: str) -> Body:
    """One entry by column. `in`: 0/1 per sample, only where the entry was not in all of them."""
    there = [row is not None for row in rows]
    keys = dict.fromkeys(k for row in rows if row for k in row if k != skip)
    fixed: Body = {}
    cols: Body = {}
    for key in keys:
        values = [row.get(key) if row else None for row in rows]
        seen = [v for v, t in zip(values, there, strict=True) if t]
        if all(v == seen[0] for v in seen):
            fixed[key] = seen[0]
        else:
            cols[key] = values
    return {**fixed, **_present(cols=cols), **({} if all(there) else {"in": [int(t) for t in there]})}


def _row(entry: Mapping[str, Any], n: int, count: int) -> Body | None:
    if "in" in entry and not entry["in"][n]:
        return None
    row = {k: v for k, v in entry.items() if k not in ("cols", "in", "pods")}
    for key, values in entry.get("cols", {}).items():
        if len(values) != count:
            raise IndexError(key)
        if values[n] is not None:
            row[key] = values[n]
    return row


# -- events and answers ---------------------------------------------------------------------------


def event(
    kind: str,
    type_: str,
    message: str,
    *,
    severity: str = "info",
    gpu_uuid: str | None = None,
    namespace: str | None = None,
    pod: str | None = None,
    container: str | None = None,
    facts: Mapping[str, str | int | float] | None = None,
    suppressed: int = 0,
) -> Body:
    """`evt/{kind}`: one thing that happened. `suppressed`: how many of this kind were not sent since
    the last one that was."""
    return _present(
        kind=kind,
        type=type_,
        severity=severity,
        message=_text(message) or "",
        gpu=gpu_uuid,
        namespace=namespace,
        pod=pod,
        container=container,
        facts=_facts(facts or {}),
        suppressed=suppressed or None,
    )


def response(
    command_id: str,
    verb: str,
    state: str,
    *,
    code: str | None = None,
    message: str | None = None,
    result: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    replayed: bool = False,
) -> Body:
    """`res/{requester}`: `state` is accepted, running, succeeded, failed or rejected; the last two
    carry a `code`."""
    return _present(
        cmd=command_id,
        verb=verb,
        state=state,
        code=code,
        message=_text(message),
        result=None if result is None else dict(result),
        dryRun=dry_run or None,
        replayed=replayed or None,
    )


def shift_times(body: bytes, delta_ms: int) -> bytes:
    """A stored body with the times of its samples moved: they were taken by a clock that was wrong
    by `delta_ms`."""
    value = json.loads(body)
    for row in value.get("samples", ()):
        row["ts"] += delta_ms
    if "t0" in value:
        value["t0"] += delta_ms
    return _dump(value)
