"""`edgeagent check-config`: whether a configuration is good, and what it will do."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgeagent.cli.options import add_config_option, load_config
from edgeagent.config import Config, to_plain
from edgeagent.config.schema import FleetConfig, GpuRule, IsolationConfig, SharingConfig
from edgeagent.fleet.estimate import batch_seconds, deflates, keepalive_seconds, monthly
from edgeagent.hostroot import HostRoot
from edgeagent.kubelet.offers import Offers, plan_offers
from edgeagent.kubelet.plan import make_plan
from edgeagent.sharing.modes import GpuMode
from edgeagent.sharing.names import GPU, ResourceNames, resource_names, timeslice_name
from edgeagent.sharing.tokens import Amounts

_PODS_ASSUMED = 4
_MODES = {
    "shared": "shared between containers by memory and cores",
    "exclusive": "whole cards, one container each",
    "timeslice": "replicas without limits",
    "mig": "one device per MIG instance",
    "off": "not offered",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_option(parser)
    parser.add_argument("file", nargs="?", metavar="FILE", help="the same as --config FILE")
    parser.add_argument(
        "--keys", action="store_true", help="print every key with its value, and nothing else"
    )
    parser.add_argument("--no-detect", action="store_true", help="do not look at this host's GPUs")


def run(args: argparse.Namespace) -> int:
    """Exit status 78 with every problem (main does that), 0 with what the file will do."""
    if args.file is not None:
        args.config = args.file
    config, path = load_config(args)
    if args.keys:
        print("\n".join(f"{key} {value}" for key, value in sorted(_keys(to_plain(config), ""))))
        return 0
    print("\n".join(explain(config, path)))
    if not args.no_detect:
        print("\n".join(on_this_host(config)))
    return 0


def _keys(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _keys(inner, f"{path}.{key}" if path else key)
    else:
        yield path, "null" if value is None else str(value)


def explain(config: Config, path: Path | None) -> list[str]:
    """What the configuration means, whatever host it is for."""
    sharing = config.sharing
    names = resource_names(sharing.names, prefix=sharing.prefix, unit_mib=sharing.memory_unit_mib)
    lines = [f"{path or 'no file: the defaults'} is valid.", ""]
    lines += [f"node        {config.node.name or 'named as the host'}, site {config.node.site}"]
    lines += _sharing(sharing, names)
    lines += _isolation(config.isolation)
    lines += _fleet(config.fleet)
    metrics = f"http://{config.metrics.listen}/metrics" if config.metrics.enabled else "off"
    lines.append(f"metrics     {metrics}")
    return lines


def _sharing(sharing: SharingConfig, names: ResourceNames) -> list[str]:
    block = sharing.time_slicing
    sliced = block is not None and any(r.name == GPU for r in block.resources)
    others = "timeslice" if sliced and sharing.mode in ("shared", "exclusive") else sharing.mode
    parts = []
    if "shared" in {others, *(rule.mode for rule in sharing.gpus)}:
        unit = f"{names.unit_mib} MiB a unit"
        parts.append(f"{names.memory} ({unit}), {names.cores} (per cent of a GPU), {names.number} (shares)")
        parts += [f"{names.note} (edgeagent admission-policies)"] if names.note is not None else []
    parts += [_rule(rule) for rule in sharing.gpus]
    if block is not None:
        for r in block.resources:
            renamed = timeslice_name(r.name, renamed=block.rename_by_default)
            more = ", requests above 1 are refused" if block.fail_requests_greater_than_one else ""
            parts.append(f"{r.name}: {r.replicas} replicas of each, offered as {renamed}{more}")
    parts.append(f"{'other' if sharing.gpus else 'all'} GPUs: {others} ({_MODES[others]})")
    lines = [f"{'' if i else 'resources':12}{part}" for i, part in enumerate(parts)]
    wait = f"evicted after {sharing.wait_seconds:g} s" if sharing.wait_seconds else "never evicted"
    lines.append(
        f"placement   {sharing.placement}, binding {sharing.binding}; a container without room waits, {wait}"
    )
    return lines


def _rule(rule: GpuRule) -> str:
    m = rule.match
    which = (
        f"GPU {m.uuid}" if m.uuid else f"GPU {m.index}" if m.index is not None else f"GPUs like {m.model!r}"
    )
    what = [f"{rule.mode} ({_MODES[rule.mode]})"] if rule.mode else []
    what += [f"{rule.replicas} replicas"] if rule.replicas else []
    what += [f"{rule.reserve_mib} MiB reserved"] if rule.reserve_mib is not None else []
    what += [f"at most {rule.max_shares} shares"] if rule.max_shares else []
    return f"{which}: {', '.join(what) or 'as the others'}"


def _isolation(isolation: IsolationConfig) -> list[str]:
    def axis(wanted: str) -> str:
        if wanted == "auto":
            return "the strongest that works" + (", MPS included" if isolation.allow_mps else "")
        return wanted + (", else the strongest that works" if isolation.fallback else "")

    policy, poll_s = isolation.watchdog.policy, isolation.watchdog.poll_seconds
    return [
        f"isolation   memory: {axis(isolation.memory)}; compute: {axis(isolation.compute)}",
        f"            a container over its limit: {policy}, looked at every {poll_s:g} s",
    ]


def _fleet(fleet: FleetConfig) -> list[str]:
    if not fleet.enabled:
        return ["uplink      off"]
    cost = monthly(fleet, pods=_PODS_ASSUMED)
    batch = batch_seconds(fleet)
    how = f"a sample every {fleet.telemetry_seconds:g} s"
    how += f", sent every {batch:g} s" if batch is not None else ", sent at once"
    how += ", deflated" if deflates(fleet) else ""
    telemetry_mb = cost.telemetry_bytes / 1e6
    parts = f"telemetry {telemetry_mb:.0f}, the rest {cost.total_mb - telemetry_mb:.0f}"
    lines = [
        f"uplink      {', '.join(fleet.brokers)} (MQTT {fleet.protocol}, {fleet.link} link)",
        f"            {how}; keepalive {keepalive_seconds(fleet)} s",
        f"            about {cost.total_mb:.0f} MB a month with 1 GPU and {_PODS_ASSUMED} pods ({parts})",
    ]
    if fleet.monthly_mb is not None and cost.total_mb > fleet.monthly_mb:
        lines.append(f"            ! that is more than monthlyMb: {fleet.monthly_mb:g}")
    plain = [u for u in fleet.brokers if u.startswith(("mqtt:", "ws:"))]
    if plain:
        lines.append(f"            ! not encrypted: {', '.join(plain)}")
    lines.append(f"            commands from afar: {', '.join(fleet.commands.allow) or 'none'}")
    return lines


def on_this_host(config: Config) -> list[str]:
    """What it means for the GPUs that are here."""
    from edgeagent.gpus.detect import detect

    gpus, inventory = detect(config.gpus, HostRoot(config.host_root))
    gpus.close()
    lines = ["", "on this host"]
    if not inventory.gpus:
        return [*lines, f"  no GPU: {inventory.problem}"]
    offers = plan_offers(inventory.gpus, config.sharing)
    for o in offers.gpus:
        size = f"{o.usable_mib} MiB to share" if o.mode.value == "shared" else f"{o.gpu.memory_total_mib} MiB"
        lines.append(f"  GPU {o.gpu.index} {o.gpu.model}: {o.mode.value}, {size}")
    lines += [f"  {line}" for line in _counts(config.sharing, offers)]
    lines += [f"  ! {p}" for p in offers.problems]
    lines += [f"  {n}" for n in offers.notes]
    return lines


def _counts(sharing: SharingConfig, offers: Offers) -> Iterator[str]:
    """How many of each resource, and what cannot be offered, as the agent itself plans it."""
    names = resource_names(sharing.names, prefix=sharing.prefix, unit_mib=sharing.memory_unit_mib)
    plan = make_plan(offers, sharing, names, Amounts(), links={}, cluster_version=sharing.cluster_version)
    if plan.tokens:
        shared = offers.in_mode(GpuMode.SHARED)
        memory = sum(o.usable_mib // names.unit_mib for o in shared)
        shares = sum(o.max_shares for o in shared)
        yield f"{names.memory}: {memory}, {names.cores}: {100 * len(shared)}, {names.number}: {shares}"
    for name, named in plan.named.items():
        yield f"{name}: {sum(len(device.ids) for device in named.devices)}"
    for problem in dict.fromkeys(plan.problems.values()):
        yield f"! {problem}"
    for note in plan.notes:
        if note != names.note:
            yield f"! {note}"
