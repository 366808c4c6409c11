"""One node for a close look: everything that is known of it, cleaned, as the page's JSON."""

from __future__ import annotations

from typing import Any

from edgeagent.dashboard import payload as p
from edgeagent.dashboard.node import (
    HEALTHS,
    MAX_CONTAINERS,
    MAX_GPUS,
    MAX_WAITING,
    Alert,
    CommandLog,
    Node,
)
from edgeagent.dashboard.payload import JsonObject, present

LEVELS = ("hard", "cooperative", "weighted", "reactive", "none")
MODES = ("shared", "exclusive", "timeslice", "mig", "off")


def detail(node: Node, now_ms: int) -> dict[str, Any]:
    """Everything but the hour of readings: see `series`."""
    status = _read(node.status_data)
    inventory = _read(node.inventory_data)
    allocation = _read(node.allocation_data)
    sample = _read(node.sample_data)
    alerts = node.live_alerts()
    return present(
        key=node.key,
        site=node.site,
        node=node.name,
        condition=node.condition,
        since=node.since_ms(),
        state=node.state,
        health=node.health,
        heardMs=node.heard_ms or None,
        sampleMs=node.sample_ms or None,
        headline=node.headline(),
        # A will's reason is that it is one: the page says that anyway.
        reasons=[] if status.get("will") is True else p.texts(status.get("reasons"), 32),
        agent=p.text(status.get("agent"), 60),
        configHash=p.text(status.get("configHash"), 80),
        startedMs=p.whole(status.get("startedMs")),
        kubelet=p.flag(status.get("kubelet")),
        binding=p.text(status.get("binding"), 20),
        link=p.text(status.get("link"), 20),
        telemetryS=p.number(status.get("telemetryS"), 0, 86_400),
        outbox=_outbox(p.mapping(status.get("outbox"))),
        desired=_desired(p.mapping(status.get("desired"))),
        commandsAllowed=list(node.commands_allowed),
        signed=node.signed_commands or None,
        host=_host(p.mapping(inventory.get("host"))),
        memoryUnitMiB=p.whole(inventory.get("memoryUnitMiB"), 1, 2**20),
        evidence=p.texts(inventory.get("evidence"), 32),
        gpus=_gpus(inventory, allocation, sample, alerts),
        waiting=[_waiting(w) for w in p.objects(allocation.get("waiting"), MAX_WAITING)],
        resources=[_resource(r) for r in p.objects(allocation.get("resources"), 32)],
        truncated=p.facts(allocation.get("truncated")),
        alerts=[_alert(a) for a in alerts],
        events=list(reversed(node.events or ())),
        commands=[_command(c) for c in reversed(node.commands or ())],
    )


def series(node: Node, since_s: int, now_ms: int) -> dict[str, Any]:
    """The last hour of every GPU after `since_s`."""
    return {uuid: hour.since(since_s, now_ms // 1000) for uuid, hour in node.hours.items()}


def rewrites(node: Node) -> int:
    """Changes when old points came in: a copy of the series is stale then."""
    return sum(hour.rewrites for hour in node.hours.values())


def _read(data: bytes | None) -> JsonObject:
    return p.EMPTY if data is None else p.parse(data, p.MAX_INFLATED_BYTES)


def _by_uuid(gpus: list[JsonObject]) -> dict[str, JsonObject]:
    return {uuid: g for g in gpus if (uuid := p.text(g.get("uuid"), 100)) is not None}


def _gpus(
    inventory: JsonObject, allocation: JsonObject, sample: JsonObject, alerts: list[Alert]
) -> list[dict[str, Any]]:
    facts = _by_uuid(p.objects(inventory.get("gpus"), MAX_GPUS))
    shares = _by_uuid(p.objects(allocation.get("gpus"), MAX_GPUS))
    readings = _by_uuid(p.objects(sample.get("gpus"), MAX_GPUS))
    out = []
    for uuid in list(dict.fromkeys([*facts, *shares]))[:MAX_GPUS]:
        fact, share, reading = (table.get(uuid, p.EMPTY) for table in (facts, shares, readings))
        limit = p.whole(share.get("usableMiB")) or p.whole(fact.get("usableMiB"))
        use = _pod_use(p.objects(reading.get("pods"), MAX_CONTAINERS))
        containers = p.objects(share.get("containers"), MAX_CONTAINERS)
        listed = share.get("containers")
        out.append(present(
            uuid=uuid,
            index=p.whole(share.get("index"), 0, 4096) if share else p.whole(fact.get("index"), 0, 4096),
            model=p.text(fact.get("model"), 80),
            kind=p.text(fact.get("kind"), 20),
            source=p.text(fact.get("source"), 20),
            mode=p.one_of(share.get("mode") or fact.get("mode"), MODES),
            health=p.one_of(share.get("health") or reading.get("health"), HEALTHS),
            fault=p.text(reading.get("fault"), 60),
            cordoned=p.flag(share.get("cordoned")),
            present=p.flag(share.get("present") if share else fact.get("present")),
            memoryTotalMiB=p.mib(fact.get("memoryTotalMiB")),
            usableMiB=limit,
            reservedMiB=p.mib(share.get("reservedMiB")),
            promisedMiB=p.mib(share.get("promisedMiB")),
            freeMiB=p.mib(share.get("freeMiB")),
            promisedCoresPct=p.whole(share.get("promisedCoresPct"), 0, 10_000),
            freeCoresPct=p.whole(share.get("freeCoresPct"), 0, 10_000),
            levels=_levels(fact.get("levels")),
            driver=p.text(fact.get("driverVersion"), 60),
            cuda=p.text(fact.get("cudaVersion"), 60),
            pci=p.text(fact.get("pciAddress"), 60),
            capability=p.text(fact.get("computeCapability"), 20),
            slowdownC=p.number(fact.get("temperatureSlowdownC"), -60, 200),
            shutdownC=p.number(fact.get("temperatureShutdownC"), -60, 200),
            powerLimitW=p.number(fact.get("powerLimitW"), 0, 100_000),
            migInstances=[
                present(profile=p.text(m.get("profile"), 40), memoryMiB=p.mib(m.get("memoryMiB")))
                for m in p.objects(fact.get("migInstances"), 16)
            ],
            facts=p.facts(fact.get("facts")),
            reading=_reading(reading) if reading else None,
            containers=[_container(c, use) for c in containers],
            more=max(0, len(listed) - len(containers)) or None if isinstance(listed, list) else None,
            alerts=[a.id for a in alerts if a.gpu == uuid],
        ))  # fmt: skip
    return sorted(out, key=lambda g: (g.get("index", 4096), g["uuid"]))


def _reading(r: JsonObject) -> dict[str, Any]:
    return present(
        memoryUsedMiB=p.mib(r.get("memoryUsedMiB")),
        utilPct=p.number(r.get("utilPct"), 0, 100),
        memoryUtilPct=p.number(r.get("memoryUtilPct"), 0, 100),
        temperatureC=p.number(r.get("temperatureC"), -60, 200),
        powerW=p.number(r.get("powerW"), 0, 100_000),
        clockSmMhz=p.number(r.get("clockSmMhz"), 0, 100_000),
        fanPct=p.number(r.get("fanPct"), 0, 100),
        powerMode=p.text(r.get("powerMode"), 64),
        throttle=p.texts(r.get("throttle"), 16, 40),
        hostUsedMiB=p.mib(r.get("hostUsedMiB")),
        unattributedMiB=p.mib(r.get("unattributedMiB")),
    )


Key = tuple[str | None, str | None, str | None]


def _pod_use(pods: list[JsonObject]) -> dict[Key, JsonObject]:
    return {_key(pod): pod for pod in pods}


def _key(item: JsonObject) -> Key:
    pod = p.text(item.get("pod"), 253)
    owner = pod if pod is not None else p.text(item.get("podUid"), 64)
    return (
        p.text(item.get("namespace"), 63) if pod is not None else None,
        owner,
        p.text(item.get("container"), 63),
    )


def _container(c: JsonObject, use: dict[Key, JsonObject]) -> dict[str, Any]:
    used = use.get(_key(c), p.EMPTY)
    return present(
        namespace=p.text(c.get("namespace"), 63),
        pod=p.text(c.get("pod"), 253),
        podUid=p.text(c.get("podUid"), 64),
        container=p.text(c.get("container"), 63) or "?",
        mode=p.one_of(c.get("mode"), MODES),
        memoryMiB=p.mib(c.get("memoryMiB")),
        coresPct=p.whole(c.get("coresPct"), 0, 10_000),
        usedMiB=p.mib(used.get("usedMiB")),
        utilPct=p.number(used.get("utilPct"), 0, 100),
        levels=_levels(c.get("levels")),
        since=p.whole(c.get("since")),
        running=p.flag(c.get("running")),
        overLimit=p.flag(c.get("overLimit")),
        leftoverMiB=p.mib(c.get("leftoverMiB")),
    )


def _waiting(w: JsonObject) -> dict[str, Any]:
    return present(
        namespace=p.text(w.get("namespace"), 63),
        pod=p.text(w.get("pod"), 253),
        podUid=p.text(w.get("podUid"), 64),
        container=p.text(w.get("container"), 63) or "?",
        reason=p.text(w.get("reason")),
        since=p.whole(w.get("since")),
        memoryMiB=p.mib(w.get("memoryMiB")),
        coresPct=p.whole(w.get("coresPct"), 0, 10_000),
        permanent=p.flag(w.get("permanent")),
    )


def _levels(value: object) -> dict[str, Any]:
    def axis(name: str) -> dict[str, Any]:
        a = p.mapping(p.mapping(value).get(name))
        return present(
            level=p.one_of(a.get("level"), LEVELS),
            mechanism=p.text(a.get("mechanism"), 40),
            reason=p.text(a.get("reason"), 200),
            evidence=p.text(a.get("evidence"), 300),
        )

    return present(memory=axis("memory"), compute=axis("compute"))


def _resource(r: JsonObject) -> dict[str, Any]:
    return present(
        name=p.text(r.get("name"), 100),
        unitMiB=p.whole(r.get("unitMiB"), 1, 2**20),
        total=p.whole(r.get("total")),
        healthy=p.whole(r.get("healthy")),
        allocated=p.whole(r.get("allocated")),
        registered=p.flag(r.get("registered")),
        problem=p.text(r.get("problem")),
    )


def _host(h: JsonObject) -> dict[str, Any]:
    return present(
        hostname=p.text(h.get("hostname"), 100),
        machine=p.text(h.get("machine"), 40),
        os=p.text(h.get("os"), 100),
        kernel=p.text(h.get("kernel"), 100),
        k3sVersion=p.text(h.get("k3sVersion"), 60),
        kubeletVersion=p.text(h.get("kubeletVersion"), 60),
        memoryTotalMiB=p.mib(h.get("memoryTotalMiB")),
        cpuCount=p.whole(h.get("cpuCount"), 1, 65_536),
        facts=p.facts(h.get("facts")),
    )


def _outbox(o: JsonObject) -> dict[str, Any]:
    return present(
        queued=p.whole(o.get("queued")),
        queuedBytes=p.whole(o.get("queuedBytes")),
        oldestAgeS=p.whole(o.get("oldestAgeS")),
        quarantined=p.whole(o.get("quarantined")),
        dropped=p.facts(o.get("dropped")),
    )


def _desired(d: JsonObject) -> dict[str, Any]:
    return present(
        hash=p.text(d.get("hash"), 80),
        applied=p.flag(d.get("applied")),
        refused=[
            present(key=p.text(r.get("key"), 100), reason=p.text(r.get("reason"), 200))
            for r in p.objects(d.get("refused"), 32)
        ],
    )


def _alert(a: Alert) -> dict[str, Any]:
    return present(
        id=a.id, type=a.type, severity=a.severity, since=a.since_ms, message=a.message, gpu=a.gpu,
        gpuIndex=a.gpu_index, gpuModel=a.gpu_model, makesUnhealthy=a.makes_unhealthy,
        podsHurt=list(a.pods_hurt),
    )  # fmt: skip


def _command(c: CommandLog) -> dict[str, Any]:
    return present(
        id=c.id, verb=c.verb, args=c.args, dryRun=c.dry_run or None, sentMs=c.sent_ms, state=c.state,
        code=c.code, message=c.message, result=c.result, changedMs=c.changed_ms or None, over=c.over,
    )  # fmt: skip
