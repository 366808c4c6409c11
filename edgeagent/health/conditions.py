"""From readings and events to conditions: pure, with hysteresis and since-times.

Every condition of a GPU has a Track. A reading gives one Sign per condition: bad, good, or unknown
(the hardware did not tell this time, which neither raises nor clears). `advance` turns the track and
the sign into the next track. Events raise at once and hold for a while. docs/health.md has the table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from edgeagent.config import HealthConfig
from edgeagent.gpus.model import Gpu, GpuEvent, GpuEventKind, GpuFault, GpuReading
from edgeagent.health.xid import Xid, XidClass
from edgeagent.snapshot import Condition

Facts = Mapping[str, str | int | float]


class ConditionType(str, Enum):
    LOST = "Lost"
    RESET_REQUIRED = "ResetRequired"
    DRIVER_MISMATCH = "DriverMismatch"
    DRIVER_NOT_LOADED = "DriverNotLoaded"
    DRIVER_UNRESPONSIVE = "DriverUnresponsive"
    NOT_READY = "NotReady"
    XID_FATAL = "XidFatal"
    XID_UNKNOWN = "XidUnknown"
    XID_DEGRADED = "XidDegraded"
    UNAVAILABLE = "Unavailable"
    RECOVERY_ACTION = "RecoveryAction"
    DRIVER_ERROR = "DriverError"
    ECC_UNCORRECTABLE = "EccUncorrectable"
    ROW_REMAP_FAILED = "RowRemapFailed"
    ROW_REMAP_PENDING = "RowRemapPending"
    THERMAL_SLOWDOWN = "ThermalSlowdown"
    OVER_TEMPERATURE = "OverTemperature"
    POWER_BRAKE = "PowerBrake"
    HOST_OVERCOMMIT = "HostOvercommit"
    MPS_DAEMON = "MpsDaemon"


@dataclass(frozen=True, slots=True)
class Rule:
    """How a condition behaves. `slow`: raised only after health.raisePolls bad polls."""

    severity: str
    makes_unhealthy: bool
    slow: bool = False


RULES: Mapping[ConditionType, Rule] = {
    ConditionType.LOST: Rule("critical", True),
    ConditionType.RESET_REQUIRED: Rule("critical", True),
    ConditionType.DRIVER_MISMATCH: Rule("critical", True),
    ConditionType.DRIVER_NOT_LOADED: Rule("critical", True),
    ConditionType.DRIVER_UNRESPONSIVE: Rule("critical", True),
    ConditionType.NOT_READY: Rule("critical", True),
    ConditionType.XID_FATAL: Rule("critical", True),
    ConditionType.XID_UNKNOWN: Rule("critical", True),
    ConditionType.XID_DEGRADED: Rule("warning", False),
    ConditionType.UNAVAILABLE: Rule("critical", True),
    ConditionType.RECOVERY_ACTION: Rule("critical", True),
    ConditionType.DRIVER_ERROR: Rule("warning", False),
    ConditionType.ECC_UNCORRECTABLE: Rule("critical", True),
    ConditionType.ROW_REMAP_FAILED: Rule("critical", True),
    ConditionType.ROW_REMAP_PENDING: Rule("warning", False),
    ConditionType.THERMAL_SLOWDOWN: Rule("warning", False, slow=True),
    ConditionType.OVER_TEMPERATURE: Rule("critical", True, slow=True),
    ConditionType.POWER_BRAKE: Rule("warning", False, slow=True),
    ConditionType.HOST_OVERCOMMIT: Rule("warning", False),
    # Its containers have lost the GPU and new ones cannot start: elsewhere they can. One that the agent
    # starts again within a poll hurts nobody new.
    ConditionType.MPS_DAEMON: Rule("critical", True, slow=True),
}

# Conditions whose effect on running pods is that of a dead GPU: what health.onFatal acts on.
FATAL = frozenset(
    {
        ConditionType.LOST,
        ConditionType.RESET_REQUIRED,
        ConditionType.XID_FATAL,
        ConditionType.UNAVAILABLE,
        ConditionType.RECOVERY_ACTION,
        ConditionType.ECC_UNCORRECTABLE,
        ConditionType.ROW_REMAP_FAILED,
    }
)

_FAULTS: Mapping[GpuFault, tuple[ConditionType, str]] = {
    GpuFault.LOST: (
        ConditionType.LOST,
        "fell off the bus; reboot the node, and if it comes again check seating, power and cooling",
    ),
    GpuFault.NOT_FOUND: (
        ConditionType.LOST,
        "is not there any more; if nobody removed it, reboot the node and check seating and power",
    ),
    GpuFault.RESET_REQUIRED: (
        ConditionType.RESET_REQUIRED,
        "needs a reset: stop what uses it, then nvidia-smi --gpu-reset, or reboot the node",
    ),
    GpuFault.DRIVER_MISMATCH: (
        ConditionType.DRIVER_MISMATCH,
        "cannot be read: driver library and kernel module differ, as after an upgrade; reboot the node",
    ),
    GpuFault.DRIVER_NOT_LOADED: (
        ConditionType.DRIVER_NOT_LOADED,
        "cannot be read: the NVIDIA kernel module is not loaded; see dmesg, then modprobe nvidia",
    ),
    GpuFault.LIBRARY_MISSING: (
        ConditionType.DRIVER_NOT_LOADED,
        "cannot be read: libnvidia-ml.so.1 is missing; install the driver or mount its libraries",
    ),
    GpuFault.UNRESPONSIVE: (
        ConditionType.DRIVER_UNRESPONSIVE,
        "does not answer: a driver call hangs; see dmesg, a reboot is most likely needed",
    ),
    GpuFault.NO_PERMISSION: (
        ConditionType.NOT_READY,
        "cannot be read: permission denied; run the agent as root with access to the device nodes",
    ),
    GpuFault.FAILED: (ConditionType.NOT_READY, "cannot be read; see the agent's log and dmesg"),
}
_EXPLAINED = frozenset(
    {ConditionType.DRIVER_MISMATCH, ConditionType.DRIVER_NOT_LOADED, ConditionType.NOT_READY}
)
FAULT_CONDITIONS = frozenset(kind for kind, _ in _FAULTS.values())

# Offline thermal zones read -256 °C: neither hot nor cool.
_PLAUSIBLE_C = (-60.0, 200.0)
_CLEAR_BELOW_C = 5.0
_GOOD_ACTIONS = (None, "none")
# "drain" is about peer-to-peer use, "recover_imex" about memory shared between nodes: the GPU is fine.
_MILD_ACTIONS = ("drain", "recover_imex")


@dataclass(frozen=True, slots=True)
class Sign:
    """What one poll says about one condition: `bad` True, False, or None (not known)."""

    bad: bool | None
    message: str = ""
    facts: Facts = field(default_factory=dict)
    makes_unhealthy: bool | None = None  # None: as the rule says


@dataclass(frozen=True, slots=True)
class Books:
    """What is promised on a GPU. `usable_mib` excludes the reserve; `reserve_mib` is what the operator
    keeps free for the host; `holders` are the UIDs of pods with a share here."""

    usable_mib: int
    promised_mib: int
    reserve_mib: int = 0
    holders: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Limits:
    """Thresholds and counts, from configuration."""

    raise_polls: int = 2
    recover_polls: int = 2
    xid_hold_s: float = 60.0
    temperature_c: float | None = None
    temperature_clear_c: float | None = None
    host_overcommit_mib: int = 256

    @classmethod
    def of(cls, config: HealthConfig) -> Limits:
        t = config.thresholds
        return cls(
            config.raise_polls,
            config.recover_polls,
            config.xid_hold_seconds,
            t.temperature_c,
            t.temperature_clear_c,
            t.host_overcommit_mib,
        )


@dataclass(frozen=True, slots=True)
class Track:
    """One condition of one GPU over time. `hold_until_s` is monotonic; `good` counts scheduled good
    polls in a row since the last bad sign."""

    condition: Condition | None = None
    bad: int = 0
    good: int = 0
    hold_until_s: float = -math.inf


def condition_id(kind: ConditionType | str, uuid: str | None) -> str:
    """Stable, and safe as an MQTT topic level: 'xidfatal-gpu-1a2b…'."""
    word = kind.value if isinstance(kind, ConditionType) else kind
    return re.sub(r"[^a-z0-9-]+", "-", (f"{word}-{uuid}" if uuid else word).lower())


def describe(gpu: Gpu) -> str:
    """'GPU 0 (NVIDIA L4, 0000:65:00.0)'."""
    place = f", {gpu.pci_address}" if gpu.pci_address else ""
    return f"GPU {gpu.index} ({gpu.model}{place})"


# -- signs from a reading ---------------------------------------------------------------------------


def signs_of(
    gpu: Gpu,
    reading: GpuReading,
    previous: GpuReading | None,
    limits: Limits,
    active: frozenset[ConditionType] = frozenset(),
    books: Books | None = None,
    beyond_mib: float | None = None,
    mps_problem: str | None = None,
) -> dict[ConditionType, Sign]:
    """A sign for every condition that readings can raise or clear.

    `previous` is the last reading without a fault. `beyond_mib` is what anything but promised pods
    uses (usage.beyond_promises_mib). `mps_problem`: why the MPS daemon that containers depend on is of
    no use; None: it is, or there is none.
    """
    signs = dict.fromkeys(RULES, Sign(None))
    if reading.fault is GpuFault.LOST_DEVICE_ACCESS:
        return signs  # the agent's own trouble: says nothing about the GPU
    if reading.fault is not None:
        kind, what = _FAULTS[reading.fault]
        facts: dict[str, str | int | float] = {"fault": reading.fault.value}
        if gpu.pci_address:
            facts["pci"] = gpu.pci_address
        message = f"{describe(gpu)} {what}"
        if reading.fault_detail:
            facts["detail"] = reading.fault_detail
            if kind in _EXPLAINED:
                # The back end knows more: both versions, the library's path, what to do.
                message = f"{describe(gpu)} cannot be read: {reading.fault_detail}"
        signs[kind] = Sign(True, message, facts)
        for other in FAULT_CONDITIONS - {kind}:
            signs[other] = Sign(False)  # it is another trouble now
        return signs

    good = Sign(False)
    for kind in FAULT_CONDITIONS:
        signs[kind] = good
    settled = reading.recovery_action in _GOOD_ACTIONS
    for kind in (ConditionType.XID_FATAL, ConditionType.XID_UNKNOWN, ConditionType.UNAVAILABLE):
        signs[kind] = good if settled else Sign(None)
    signs[ConditionType.XID_DEGRADED] = good
    signs[ConditionType.DRIVER_ERROR] = good
    signs[ConditionType.RECOVERY_ACTION] = _recovery_action(gpu, reading)
    signs[ConditionType.ECC_UNCORRECTABLE] = _ecc(gpu, reading, previous, settled)
    signs[ConditionType.ROW_REMAP_FAILED] = _flag(
        reading.row_remap_failed, f"{describe(gpu)} could not remap a bad memory row; replace it"
    )
    signs[ConditionType.ROW_REMAP_PENDING] = _flag(
        reading.row_remap_pending,
        f"{describe(gpu)} will remap a bad memory row at its next reset; plan one",
    )
    signs[ConditionType.OVER_TEMPERATURE] = _temperature(gpu, reading, limits, active)
    signs[ConditionType.THERMAL_SLOWDOWN] = _thermal(gpu, reading)
    signs[ConditionType.POWER_BRAKE] = _power(gpu, reading, previous)
    signs[ConditionType.HOST_OVERCOMMIT] = _overcommit(gpu, reading, limits, books, beyond_mib, active)
    signs[ConditionType.MPS_DAEMON] = Sign(
        mps_problem is not None,
        f"{describe(gpu)}: its MPS daemon is of no use to containers: {mps_problem}" if mps_problem else "",
    )
    return signs


def _flag(value: bool | None, message: str) -> Sign:
    return Sign(value, message if value else "")


def _recovery_action(gpu: Gpu, reading: GpuReading) -> Sign:
    action = reading.recovery_action
    if action in _GOOD_ACTIONS:
        return Sign(False)
    return Sign(
        True,
        f"{describe(gpu)}: the driver asks for {str(action).replace('_', ' ')} before it can be used again",
        {"action": str(action)},
        makes_unhealthy=action not in _MILD_ACTIONS,
    )


def _ecc(gpu: Gpu, reading: GpuReading, previous: GpuReading | None, settled: bool) -> Sign:
    """Bad when the count grew between two polls. What was there before the agent came is history."""
    now = reading.ecc_uncorrectable
    before = previous.ecc_uncorrectable if previous is not None else None
    if now is None:
        # No count on this GPU: an ECC event (if any) clears like an XID.
        return Sign(False) if settled else Sign(None)
    if before is not None and now > before:
        return Sign(
            True,
            f"{describe(gpu)} had {now - before} uncorrectable memory errors; its data cannot be trusted",
            {"newErrors": now - before, "errorsSinceDriverLoad": now},
        )
    return Sign(False) if settled else Sign(None)


def temperature_limits_c(gpu: Gpu, limits: Limits) -> tuple[float, float] | None:
    """(raise at, clear below): configuration, else the hardware's slowdown threshold, else a little
    under its shutdown threshold; None where there is none of the three."""
    at = limits.temperature_c
    if at is None:
        at = gpu.temperature_slowdown_c
    if at is None and gpu.temperature_shutdown_c is not None:
        at = gpu.temperature_shutdown_c - _CLEAR_BELOW_C
    if at is None:
        return None
    clear = limits.temperature_clear_c
    if clear is None or clear >= at:
        clear = at - _CLEAR_BELOW_C
    return at, clear


def _temperature(gpu: Gpu, reading: GpuReading, limits: Limits, active: frozenset[ConditionType]) -> Sign:
    thresholds = temperature_limits_c(gpu, limits)
    if thresholds is None:
        return Sign(None)
    now = reading.temperature_c
    if now is None or not math.isfinite(now) or not _PLAUSIBLE_C[0] <= now <= _PLAUSIBLE_C[1]:
        return Sign(None)
    at, clear = thresholds
    if now >= at:
        facts = {"temperatureC": round(now, 1), "thresholdC": at}
        return Sign(True, f"{describe(gpu)} is at {now:.0f} °C, its limit is {at:.0f} °C; cool it", facts)
    if now < clear:
        return Sign(False)
    # Between the two: stays what it is, and is no start of a new alarm.
    return Sign(None) if ConditionType.OVER_TEMPERATURE in active else Sign(False)


def _thermal(gpu: Gpu, reading: GpuReading) -> Sign:
    if reading.throttle_reasons is None:
        return Sign(None)
    found = sorted(r for r in reading.throttle_reasons if r.startswith("thermal"))
    if not found:
        return Sign(False)
    facts: dict[str, str | int | float] = {"reasons": ",".join(found)}
    if reading.temperature_c is not None and math.isfinite(reading.temperature_c):
        facts["temperatureC"] = round(reading.temperature_c, 1)
    return Sign(True, f"{describe(gpu)} slows itself down because of heat; check fan and filters", facts)


def _power(gpu: Gpu, reading: GpuReading, previous: GpuReading | None) -> Sign:
    reasons = reading.throttle_reasons
    more = None
    if reading.overcurrent_events is not None:
        before = previous.overcurrent_events if previous is not None else None
        more = 0 if before is None else max(0, reading.overcurrent_events - before)
    if reasons is None and more is None:
        return Sign(None)
    if reasons is not None and "power_brake" in reasons:
        return Sign(
            True,
            f"{describe(gpu)} is slowed down by its power supply (power brake); check the supply",
            {"reason": "power_brake"},
        )
    if more or (reasons is not None and "oc" in reasons):
        return Sign(
            True,
            f"{describe(gpu)} draws more current than its supply gives; change it or the power mode",
            {"reason": "overcurrent", "newEvents": more or 0},
        )
    return Sign(False)


def overcommit_mib(
    reading: GpuReading, books: Books, beyond_mib: float | None, unified: bool
) -> float | None:
    """MiB promised to pods that are not there for them because something else uses them; ≤ 0 when
    all is well, None when it cannot be known."""
    if unified:
        # The same RAM as everything else's: what is still available must cover what is promised.
        if reading.host_memory_available_mib is None or reading.processes is None:
            return None
        used = sum(p.used_mib or 0.0 for p in reading.processes)
        return max(0.0, books.promised_mib - used) - reading.host_memory_available_mib
    if beyond_mib is None:
        return None
    return books.promised_mib + beyond_mib - (books.usable_mib + books.reserve_mib)


def withdrawn_mib(books: Books, beyond_mib: float | None) -> int:
    """MiB of this GPU that must not be promised to anyone new, because non-pods use them: host use
    above the reserve, but never what is promised already."""
    if beyond_mib is None:
        return 0
    over = math.ceil(max(0.0, beyond_mib - books.reserve_mib))
    return min(over, max(0, books.usable_mib - books.promised_mib))


def _overcommit(
    gpu: Gpu,
    reading: GpuReading,
    limits: Limits,
    books: Books | None,
    beyond_mib: float | None,
    active: frozenset[ConditionType],
) -> Sign:
    if books is None:
        return Sign(None)
    over = overcommit_mib(reading, books, beyond_mib, gpu.unified_memory)
    if over is None:
        return Sign(None)
    # Raised above the threshold, cleared only when nothing is overcommitted any more.
    if over <= (0 if ConditionType.HOST_OVERCOMMIT in active else limits.host_overcommit_mib):
        return Sign(False)
    facts: dict[str, str | int | float] = {
        "overcommittedMiB": round(over),
        "promisedMiB": books.promised_mib,
        "usableMiB": books.usable_mib,
    }
    if beyond_mib is not None:
        facts["hostUsedMiB"] = round(beyond_mib)
    if reading.host_memory_available_mib is not None:
        facts["hostAvailableMiB"] = round(reading.host_memory_available_mib)
    return Sign(
        True,
        f"{describe(gpu)}: programs outside of pods use {over:.0f} MiB that are promised to pods; "
        "stop them or raise reserveMiB",
        facts,
    )


# -- tracks ------------------------------------------------------------------------------------------


def advance(
    track: Track,
    kind: ConditionType,
    sign: Sign,
    uuid: str,
    limits: Limits,
    now_s: float,
    now_ms: int,
    scheduled: bool = True,
) -> Track:
    """The track after one poll. `scheduled` False: a poll between the regular ones, whose good signs
    do not count towards recovery."""
    if sign.bad is None:
        return track
    rule = RULES[kind]
    if sign.bad:
        bad = track.bad + 1
        needed = limits.raise_polls if rule.slow else 1
        if track.condition is not None or bad < needed:
            return replace(track, bad=bad, good=0)
        condition = _condition(kind, sign, uuid, now_ms)
        hold = now_s + limits.xid_hold_s if kind is ConditionType.ECC_UNCORRECTABLE else track.hold_until_s
        return Track(condition, bad=bad, good=0, hold_until_s=hold)
    good = track.good + 1 if scheduled else track.good
    if track.condition is not None and (good < limits.recover_polls or now_s < track.hold_until_s):
        return replace(track, bad=0, good=good)
    return Track()


def raised_by_event(
    track: Track,
    kind: ConditionType,
    sign: Sign,
    uuid: str,
    limits: Limits,
    now_s: float,
    now_ms: int,
) -> Track:
    """The track after an event: raised at once, held for the XID hold (what the driver merely says to
    be unavailable is held by polls alone); the since-time of a condition that is there already stays."""
    condition = _condition(kind, sign, uuid, now_ms)
    if track.condition is not None:
        condition = replace(condition, since_ms=track.condition.since_ms)
    hold_s = 0.0 if kind is ConditionType.UNAVAILABLE else limits.xid_hold_s
    return Track(condition, bad=track.bad + 1, good=0, hold_until_s=now_s + hold_s)


def _condition(kind: ConditionType, sign: Sign, uuid: str, now_ms: int) -> Condition:
    rule = RULES[kind]
    unhealthy = rule.makes_unhealthy if sign.makes_unhealthy is None else sign.makes_unhealthy
    severity = rule.severity if unhealthy == rule.makes_unhealthy else "warning"
    return Condition(
        id=condition_id(kind, uuid),
        type=kind.value,
        severity=severity,
        since_ms=now_ms,
        message=sign.message,
        gpu_uuid=uuid,
        makes_unhealthy=unhealthy,
        facts=sign.facts,
    )


# -- events ------------------------------------------------------------------------------------------

_XID_CONDITIONS = {
    XidClass.FATAL: ConditionType.XID_FATAL,
    XidClass.UNKNOWN: ConditionType.XID_UNKNOWN,
    XidClass.DEGRADED: ConditionType.XID_DEGRADED,
}


def sign_of_event(gpu: Gpu, event: GpuEvent, xid: Xid | None) -> tuple[ConditionType, Sign] | None:
    """The condition an event raises, or None for one that raises none (application XIDs among them)."""
    if event.kind is GpuEventKind.XID and xid is not None:
        kind = _XID_CONDITIONS.get(xid.xid_class)
        if kind is None:
            return None
        facts: dict[str, str | int | float] = {"xid": xid.number, "name": xid.name, "source": event.source}
        if gpu.pci_address:
            facts["pci"] = gpu.pci_address
        if event.detail:
            facts["detail"] = event.detail
        return kind, Sign(True, f"{describe(gpu)}: XID {xid.number}, {xid.name}. {xid.advice}", facts)
    if event.kind is GpuEventKind.ECC_DOUBLE_BIT:
        message = f"{describe(gpu)} had an uncorrectable memory error; its data cannot be trusted"
        return ConditionType.ECC_UNCORRECTABLE, Sign(True, message, {"source": event.source})
    if event.kind is GpuEventKind.UNAVAILABLE:
        message = f"{describe(gpu)}: the driver says that it is unavailable, although it can be read"
        return ConditionType.UNAVAILABLE, Sign(True, message, {"source": event.source})
    if event.kind is GpuEventKind.DRIVER_ERROR:
        message = f"{describe(gpu)}: the driver logged an error: {event.detail or 'no text'}"
        return ConditionType.DRIVER_ERROR, Sign(True, message, {"source": event.source})
    return None
