"""Where a Tegra board keeps its readings: finds the files of all generations and names each value.

Keys of the sources found, as Sweep returns them:
`meminfo`, `load`, `clock_sm`, `clock_memory`, `nvmap`, `nvmap_total`, `power_mode`,
`temp/<zone>` (°C), `rail_w/<rail>` (W) or `rail_mv/<rail>` and `rail_ma/<rail>`, `fan/<n>` (%),
`throttle/<cooling device>` (state, 0: not throttling), `oc/<n>` (events since boot),
`oc_alarm/<n>` (1: a rail is over its critical current).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from edgeagent.gpus import tegra_files as parse
from edgeagent.gpus.jetson import DEVFREQ, NVPMODEL_STATUS, is_gpu_devfreq, parse_power_mode_id
from edgeagent.gpus.sweep import Source
from edgeagent.hostroot import HostRoot

THERMAL = "/sys/class/thermal"
HWMON = "/sys/class/hwmon"
NVMAP = "/sys/kernel/debug/nvmap"

# Where the GPU's load is when no devfreq node leads to it: JetPack 4, 5 and 6, in this order.
_LOAD_FILES = (
    "/sys/devices/gpu.0/load",
    "/sys/devices/platform/gpu.0/load",
    "/sys/devices/platform/bus@0/17000000.gpu/load",
    "/sys/devices/platform/17000000.gpu/load",
    "/sys/devices/platform/17000000.ga10b/load",
    "/sys/devices/17000000.gv11b/load",
    "/sys/devices/17000000.gp10b/load",
    "/sys/devices/57000000.gpu/load",
)
_EMC_FILES = ("/sys/kernel/debug/bpmp/debug/clk/emc/rate", "/sys/kernel/debug/clk/emc/clk_rate")
_LEGACY_FANS = ("/sys/devices/pwm-fan/cur_pwm", "/sys/devices/pwm-fan/target_pwm")
_THROTTLE = re.compile(r"(throttle-alert|hot-surface-alert|-balanced|bthrot)")
# PMIC-Die is a constant 100 °C, thermal-fan-est an estimate for the fan.
_NO_TEMPERATURE = re.compile(r"^(pmic|thermal-fan|iwlwifi|nvme)", re.IGNORECASE)
_ZONE_SUFFIX = re.compile(r"[-_](thermal|therm)$", re.IGNORECASE)
_NO_RAIL = re.compile(r"^(NC|sum of shunt voltages|)$", re.IGNORECASE)
_IN_LABEL = re.compile(r"^in([1-9])_label$")
_RAIL_NAME = re.compile(r"^rail_name_(\d)$")
_OC_COUNT = re.compile(r"^oc(\d)_event_cnt$")
_PWM = re.compile(r"^pwm\d$")


@dataclass(frozen=True, slots=True)
class Trips:
    """Trip points of the GPU's thermal zone in °C."""

    slowdown_c: float | None = None
    shutdown_c: float | None = None


def find_sources(host: HostRoot) -> tuple[Source, ...]:
    """All files that this board has now. Cheap enough to be repeated every minute: nodes come late
    (the GPU's devfreq node 20 s after boot) and go."""
    found: dict[str, Source] = {}
    for key, path, parser, max_bytes in _candidates(host):
        if key not in found:
            found[key] = Source(key, str(host.path(path)), parser, max_bytes)
    return tuple(found.values())


def has_load_or_clock(host: HostRoot) -> bool:
    """Whether the GPU's clock or load has appeared."""
    return any(is_gpu_devfreq(n) for n in host.listdir(DEVFREQ)) or any(map(host.exists, _LOAD_FILES))


def find_trips(host: HostRoot) -> Trips:
    """The GPU zone's (else the junction's) passive and critical trip points."""
    zones = dict(_zones(host))
    zone = zones.get("gpu") or zones.get("tj")
    if zone is None:
        return Trips()
    passive: list[float] = []
    critical: list[float] = []
    for entry in host.listdir(zone):
        if not re.fullmatch(r"trip_point_\d+_type", entry):
            continue
        kind = (host.read_text(f"{zone}/{entry}", 64) or "").strip()
        try:
            value = parse.celsius(host.read_bytes(f"{zone}/{entry[:-5]}_temp", 64) or b"")
        except ValueError:
            continue
        if value is not None and value > 0 and kind in ("passive", "hot"):
            passive.append(value)
        elif value is not None and value > 0 and kind == "critical":
            critical.append(value)
    return Trips(min(passive, default=None), min(critical, default=None))


_Candidate = tuple[str, str, Callable[[bytes], Any], int]


def _candidates(host: HostRoot) -> Iterator[_Candidate]:
    yield "meminfo", "/proc/meminfo", parse.meminfo, 16384
    yield from _gpu(host)
    for name, zone in _zones(host):
        yield f"temp/{name}", f"{zone}/temp", parse.celsius, 64
    for device in host.listdir(THERMAL):
        if device.startswith("cooling_device"):
            kind = _label(host, f"{THERMAL}/{device}/type")
            if _THROTTLE.search(kind):
                yield f"throttle/{kind}", f"{THERMAL}/{device}/cur_state", parse.count, 64
    for device in host.listdir(HWMON):
        yield from _hwmon(host, f"{HWMON}/{device}")
    yield from _iio_rails(host)
    for path in _LEGACY_FANS:
        if host.exists(path):
            yield "fan/0", path, parse.pwm_pct, 64
    if host.exists(NVPMODEL_STATUS):
        yield "power_mode", NVPMODEL_STATUS, _power_mode, 4096


def _gpu(host: HostRoot) -> Iterator[_Candidate]:
    nodes = [f"{DEVFREQ}/{n}" for n in host.listdir(DEVFREQ) if _is_gpu_node(host, n)]
    for path in (*(f"{n}/device/load" for n in nodes), *_LOAD_FILES):
        if host.exists(path):
            yield "load", path, parse.load_pct, 64
    for node in nodes:
        if host.exists(f"{node}/cur_freq"):
            yield "clock_sm", f"{node}/cur_freq", parse.mhz, 64
    for path in _EMC_FILES:
        if host.exists(path):
            yield "clock_memory", path, parse.mhz, 64
    for path in (f"{NVMAP}/iovmm/clients", f"{NVMAP}/iovmm/maps"):
        if host.exists(path):
            yield "nvmap", path, parse.nvmap, 1 << 20
    if host.exists(f"{NVMAP}/stats/total_memory"):
        yield "nvmap_total", f"{NVMAP}/stats/total_memory", parse.bytes_mib, 64


def _is_gpu_node(host: HostRoot, name: str) -> bool:
    if is_gpu_devfreq(name):
        return True
    of_name = _label(host, f"{DEVFREQ}/{name}/device/of_node/name")
    return bool(of_name) and is_gpu_devfreq(of_name)


def _zones(host: HostRoot) -> Iterator[tuple[str, str]]:
    """(name, directory) of the thermal zones that are temperatures of this board. `GPU-therm`,
    `gpu-thermal` and `gpu_thermal` are all called "gpu"."""
    seen: set[str] = set()
    zones = [d for d in host.listdir(THERMAL) if re.fullmatch(r"thermal_zone\d+", d)]
    for zone in sorted(zones, key=lambda d: int(d[12:])):
        kind = _label(host, f"{THERMAL}/{zone}/type")
        if not kind or _NO_TEMPERATURE.match(kind):
            continue
        base = name = _ZONE_SUFFIX.sub("", kind).lower()
        number = 2
        while name in seen:
            name, number = f"{base}{number}", number + 1
        seen.add(name)
        yield name, f"{THERMAL}/{zone}"


def _hwmon(host: HostRoot, device: str) -> Iterator[_Candidate]:
    chip = _label(host, f"{device}/name")
    files = host.listdir(device)
    if chip.startswith("ina3221"):
        for file in files:
            if m := _IN_LABEL.match(file):
                rail, n = _label(host, f"{device}/{file}"), m.group(1)
                if n == "7" or _NO_RAIL.match(rail):
                    continue
                yield f"rail_mv/{rail}", f"{device}/in{n}_input", parse.count, 64
                yield f"rail_ma/{rail}", f"{device}/curr{n}_input", parse.integer, 64
                if f"curr{n}_crit_alarm" in files:
                    yield f"oc_alarm/{rail}", f"{device}/curr{n}_crit_alarm", parse.count, 64
    elif chip.startswith("ina238") and "power1_input" in files:
        # Thor's carrier board: the whole system's input.
        yield "rail_w/VIN", f"{device}/power1_input", parse.microwatt, 64
    elif chip == "soctherm_oc":
        for file in files:
            if m := _OC_COUNT.match(file):
                yield f"oc/{m.group(1)}", f"{device}/{file}", parse.count, 64
    for file in files:
        if _PWM.match(file):
            yield f"fan/{device.rsplit('/', 1)[1]}.{file}", f"{device}/{file}", parse.pwm_pct, 64


def _iio_rails(host: HostRoot) -> Iterator[_Candidate]:
    """JetPack 4: the INA3221 is an IIO device with rails named POM_5V_IN and the like."""
    for devices in ("/sys/bus/iio/devices", "/sys/bus/i2c/drivers/ina3221x"):
        for entry in host.listdir(devices):
            directory = f"{devices}/{entry}"
            inner = [d for d in host.listdir(directory) if d.startswith("iio:device")]
            for device in [f"{directory}/{d}" for d in inner] or [directory]:
                for file in host.listdir(device):
                    if m := _RAIL_NAME.match(file):
                        rail = _label(host, f"{device}/{file}")
                        if not _NO_RAIL.match(rail):
                            path = f"{device}/in_power{m.group(1)}_input"
                            yield f"rail_w/{rail}", path, parse.milliwatt, 64


def _power_mode(data: bytes) -> int:
    mode = parse_power_mode_id(data.decode("utf-8", "replace"))
    if mode is None:
        raise ValueError("no pmode" if data else "empty")
    return mode


def _label(host: HostRoot, path: str) -> str:
    """A short name in a file, printable and without the separators that metrics and topics use."""
    text = (host.read_text(path, 128) or "").split("\n", 1)[0].strip("\0 \t\r")
    return "".join(c for c in text if c.isprintable() and c not in "/#+\ufffd")[:64].strip()
