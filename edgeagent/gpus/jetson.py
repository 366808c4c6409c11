"""Is this a Jetson, and which one: decided from evidence, in tables.

Pure functions over a HostRoot. No single file is needed: a service sees the L4T release file, a
container often only sysfs, an automotive board only its device tree. What is not known is "unknown",
never a reason to find no GPU.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edgeagent.hostroot import HostRoot

UNKNOWN = "unknown"

L4T_RELEASE = "/etc/nv_tegra_release"
SOC_FAMILY = "/sys/devices/soc0/family"
OS_RELEASE = "/proc/sys/kernel/osrelease"
# /proc/device-tree is an absolute link into /sys/firmware, which container runtimes mask: sysfs first.
DEVICE_TREES = ("/sys/firmware/devicetree/base", "/proc/device-tree")
NVPMODEL_CONF = "/etc/nvpmodel.conf"
NVPMODEL_STATUS = "/var/lib/nvpmodel/status"
DEVFREQ = "/sys/class/devfreq"

_NAMESPACE = uuid.UUID("6f1a2d0e-5a0c-5b6e-9a57-0f6d2c1d9b11")  # of the UUIDs made here; never changes


@dataclass(frozen=True, slots=True)
class Soc:
    codename: str
    compute_capability: tuple[int, int]


# Chip, as the device tree's `compatible` names it. Compute capabilities: NVIDIA's CUDA GPU list.
SOCS: Mapping[str, Soc] = {
    "tegra264": Soc("Thor", (11, 0)),
    "tegra26x": Soc("Thor", (11, 0)),
    "tegra234": Soc("Orin", (8, 7)),
    "tegra23x": Soc("Orin", (8, 7)),
    "tegra239": Soc("Orin", (8, 8)),
    "tegra194": Soc("Xavier", (7, 2)),
    "tegra186": Soc("TX2", (6, 2)),
    "tegra210": Soc("TX1/Nano", (5, 3)),
    "tegra124": Soc("TK1", (3, 2)),
}


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    multiprocessors: int


# Part number of the module (not of the carrier board), as in NVIDIA's device trees.
MODULES: Mapping[str, Module] = {
    "p3834-0008": Module("Jetson AGX Thor (T5000)", 20),
    "p3767-0000": Module("Jetson Orin NX 16GB", 8),
    "p3767-0001": Module("Jetson Orin NX 8GB", 8),
    "p3767-0003": Module("Jetson Orin Nano 8GB", 8),
    "p3767-0004": Module("Jetson Orin Nano 4GB", 4),
    "p3767-0005": Module("Jetson Orin Nano 8GB Developer Kit", 8),
    "p3701-0000": Module("Jetson AGX Orin", 16),
    "p3701-0002": Module("IGX Orin", 16),
    "p3701-0004": Module("Jetson AGX Orin 32GB", 14),
    "p3701-0005": Module("Jetson AGX Orin 64GB", 16),
    "p3701-0008": Module("Jetson AGX Orin Industrial", 16),
    "p3668-0000": Module("Jetson Xavier NX Developer Kit", 6),
    "p3668-0001": Module("Jetson Xavier NX 8GB", 6),
    "p3668-0003": Module("Jetson Xavier NX 16GB", 6),
    "p2888-0001": Module("Jetson AGX Xavier 16GB", 8),
    "p2888-0003": Module("Jetson AGX Xavier 32GB", 8),
    "p2888-0004": Module("Jetson AGX Xavier 32GB", 8),
    "p2888-0005": Module("Jetson AGX Xavier 64GB", 8),
    "p2888-0006": Module("Jetson AGX Xavier 8GB", 6),
    "p2888-0008": Module("Jetson AGX Xavier Industrial", 8),
    "p3636-0001": Module("Jetson TX2 NX", 2),
    "p3489-0000": Module("Jetson TX2i", 2),
    "p3489-0888": Module("Jetson TX2 4GB", 2),
    "p3310-1000": Module("Jetson TX2", 2),
    "p3448-0000": Module("Jetson Nano Developer Kit", 1),
    "p3448-0002": Module("Jetson Nano", 1),
    "p3448-0003": Module("Jetson Nano 2GB", 1),
    "p2180-1000": Module("Jetson TX1", 2),
}

# L4T release -> JetPack, from NVIDIA's JetPack archive. A release that is not here is "unknown".
JETPACKS: Mapping[str, str] = {
    "39.2.2": "7.2.2", "39.2.1": "7.2.1", "39.2.0": "7.2", "38.4.0": "7.1", "38.2.2": "7.0",
    "38.2.1": "7.0", "38.2.0": "7.0", "36.5.0": "6.2.2", "36.4.7": "6.2.1", "36.4.4": "6.2.1",
    "36.4.3": "6.2", "36.4.0": "6.1", "36.3.0": "6.0", "36.2.0": "6.0 DP", "35.6.4": "5.1.6",
    "35.6.2": "5.1.5", "35.6.1": "5.1.5", "35.6.0": "5.1.4", "35.5.0": "5.1.3", "35.4.1": "5.1.2",
    "35.3.1": "5.1.1", "35.2.1": "5.1", "35.1.0": "5.0.2", "34.1.1": "5.0.1 DP", "34.1.0": "5.0 DP",
    "32.7.6": "4.6.6", "32.7.5": "4.6.5", "32.7.4": "4.6.4", "32.7.3": "4.6.3", "32.7.2": "4.6.2",
    "32.7.1": "4.6.1", "32.6.1": "4.6", "32.5.2": "4.5.1", "32.5.1": "4.5.1", "32.5.0": "4.5",
    "32.4.4": "4.4.1", "32.4.3": "4.4", "32.3.1": "4.3", "32.2.3": "4.2.3", "32.2.1": "4.2.2",
    "32.2.0": "4.2.1", "32.1.0": "4.2", "31.1.0": "4.1.1", "28.4.0": "3.3.3", "28.2.0": "3.2",
    "28.1.0": "3.1",
}  # fmt: skip

_L4T = re.compile(r"\bR(\d{1,4})\b[^,\n]*,\s*REVISION:\s*(\d{1,4}(?:\.\d{1,4}){0,2})")
_PART = re.compile(r"p(\d{4})-(\d{4})(?!\d)")
_CHIP = re.compile(r"tegra\d\d[0-9x]")
_POWER_MODEL = re.compile(r"^[ \t]*<[ \t]*POWER_MODEL[ \t]+ID=(\d{1,4})[ \t]+NAME=([^\s>]+)", re.MULTILINE)
_POWER_MODE_ID = re.compile(r"\bpmode:\s*(\d{1,9})")
# Orin's NVML calls the iGPU "Orin (nvgpu)", Thor's "NVIDIA Thor". No discrete card has such a name.
_INTEGRATED_NAME = re.compile(r"\(nvgpu\)|\bThor\b", re.IGNORECASE)
# devfreq names of GPU clock domains: 57000000.gpu, 17000000.gv11b, 17000000.gpu, gpu-gpc-0 (Thor).
_DEVFREQ_GPU = re.compile(
    r"^(?:[0-9a-f]+\.)?(?:gpu|gm20b|gp10b|gv11b|ga10b|gb10b)(?:\.\d+)?$|^gpu-(?:gpc|nvd)-\d+$"
)


@dataclass(frozen=True, slots=True)
class JetsonFacts:
    """What is known about the board. Strings are "unknown", numbers None, where nothing says."""

    soc: str = UNKNOWN  # "tegra234"
    codename: str = UNKNOWN  # "Orin"
    part_number: str = UNKNOWN  # "p3767-0005"
    module: str = UNKNOWN  # "Jetson Orin Nano 8GB"
    board: str = UNKNOWN  # the device tree's model
    l4t: str = UNKNOWN  # "36.4.3"
    jetpack: str = UNKNOWN  # "6.2"
    kernel: str = UNKNOWN
    serial: str | None = None
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    power_modes: Mapping[int, str] = field(default_factory=dict)  # nvpmodel ID -> name

    @property
    def name(self) -> str:
        """What people call it: the module, else the board, else the chip."""
        if self.module != UNKNOWN:
            return self.module
        if self.board != UNKNOWN:
            return self.board.removeprefix("NVIDIA ")
        return f"Tegra {self.codename}" if self.codename != UNKNOWN else "Tegra (unknown module)"

    @property
    def uses_nvgpu(self) -> bool:
        """Up to Orin the nvgpu driver runs the GPU and NVML is a stub; Thor has nvidia.ko, and so may
        chips that are not known here."""
        return self.codename not in (UNKNOWN, "Thor")

    @property
    def uuid(self) -> str:
        """The iGPU's identity. From the board's serial number it outlives reboots and reflashes;
        without one it is the same for every board of the kind (a node has one iGPU, so it is still
        unambiguous on the node). NVML's own UUID is not used: JetPack 5 has none, so that an upgrade
        would change it."""
        seed = f"serial:{self.serial}" if self.serial else f"module:{self.soc}:{self.part_number}"
        return f"tegra-{uuid.uuid5(_NAMESPACE, seed)}"

    def as_strings(self) -> dict[str, str]:
        """For Gpu.facts: status, labels and the fleet page."""
        facts = {
            "soc": self.soc, "architecture": self.codename, "part_number": self.part_number,
            "module": self.module, "board": self.board, "l4t": self.l4t, "jetpack": self.jetpack,
        }  # fmt: skip
        if self.power_modes:
            facts["power_modes"] = ",".join(self.power_modes[i] for i in sorted(self.power_modes))
        return facts


@dataclass(frozen=True, slots=True)
class Detection:
    """`tegra`: this host is a Tegra board. `integrated_gpu`: its iGPU is to be offered (a board whose
    driver is a discrete card's has none). `integrated`: positions in the NVML names given that are
    that same iGPU seen through NVML. `evidence`: what was looked at and what it showed, in order."""

    tegra: bool
    wsl: bool
    integrated_gpu: bool
    integrated: tuple[int, ...]
    evidence: tuple[str, ...]


def detect(host: HostRoot, nvml_names: Sequence[str] | None = None) -> Detection:
    """`nvml_names`: device names in NVML's order, empty when it lists none, None when there is no
    NVML (or it does not start)."""
    evidence: list[str] = []
    tegra = False

    release = host.read_text(L4T_RELEASE, 4096)
    l4t = parse_l4t(release) if release is not None else None
    if release is not None:
        evidence.append(f"{L4T_RELEASE}: {f'L4T {l4t}' if l4t else 'release not understood'}")
        tegra = True
    family = _line(host.read_text(SOC_FAMILY, 4096))
    if family is not None:
        evidence.append(f"{SOC_FAMILY}: {_shown(family)}")
        tegra = tegra or family.lower().startswith("tegra")
    compatible = device_tree_strings(host, "compatible")
    if compatible:
        evidence.append(f"device tree compatible: {_shown(' '.join(compatible))}")
        tegra = tegra or any(c.startswith("nvidia,tegra") for c in compatible)
    kernel = _line(host.read_text(OS_RELEASE, 4096)) or ""
    wsl = "microsoft" in kernel.lower() or host.exists("/dev/dxg")
    if kernel.endswith("-tegra"):
        evidence.append(f"kernel: {_shown(kernel)}")
        tegra = True
    if wsl:
        evidence.append("WSL: " + ("/dev/dxg" if host.exists("/dev/dxg") else _shown(kernel)))

    integrated = tuple(i for i, n in enumerate(nvml_names or ()) if is_integrated_name(n))
    if nvml_names is None:
        evidence.append("NVML: none")
    else:
        evidence.append(f"NVML: {', '.join(_shown(n) for n in nvml_names) or 'no devices'}")
    tegra = tegra or bool(integrated)

    integrated_gpu = tegra and not wsl
    if integrated_gpu and nvml_names and not integrated:
        # Only discrete cards: on IGX in dGPU mode the iGPU is off, on a Jetson with a card it is not.
        traces = igpu_traces(host)
        integrated_gpu = bool(traces)
        evidence.append(f"iGPU beside discrete cards: {', '.join(traces) or 'no trace of it, not offered'}")
    return Detection(tegra, wsl, integrated_gpu, integrated, tuple(evidence))


def read_facts(host: HostRoot) -> JetsonFacts:
    """Everything the host tells about the board; missing files leave their facts unknown."""
    compatible = device_tree_strings(host, "compatible")
    # JetPack 4 names the module only in the file its device tree was built from.
    hints = (*compatible, *device_tree_strings(host, "nvidia,dtsfilename"))
    chip = find_chip(hints)
    part = find_part_number(hints)
    module = MODULES.get(part) if part else None
    soc = SOCS.get(chip) if chip else None
    l4t = parse_l4t(host.read_text(L4T_RELEASE, 4096) or "")
    board = next(iter(device_tree_strings(host, "model")), None)
    return JetsonFacts(
        soc=chip or UNKNOWN,
        codename=soc.codename if soc else UNKNOWN,
        part_number=part or UNKNOWN,
        module=module.name if module else UNKNOWN,
        board=_shown(board) if board else UNKNOWN,
        l4t=l4t or UNKNOWN,
        jetpack=JETPACKS.get(l4t, UNKNOWN) if l4t else UNKNOWN,
        kernel=_line(host.read_text(OS_RELEASE, 4096)) or UNKNOWN,
        serial=_serial(host),
        compute_capability=soc.compute_capability if soc else None,
        multiprocessors=module.multiprocessors if module else None,
        power_modes=parse_power_modes(host.read_text(host.resolve(NVPMODEL_CONF)) or ""),
    )


def is_integrated_name(nvml_name: str) -> bool:
    """Whether an NVML device name is that of a Tegra's own GPU."""
    return _INTEGRATED_NAME.search(nvml_name) is not None


def is_gpu_devfreq(name: str) -> bool:
    """Whether an entry of /sys/class/devfreq is a GPU's clock (others: vic, nvdec, nvenc, emc, …)."""
    return _DEVFREQ_GPU.match(name) is not None


def igpu_traces(host: HostRoot) -> tuple[str, ...]:
    """Paths that only a live iGPU has."""
    found = [f"{DEVFREQ}/{n}" for n in host.listdir(DEVFREQ) if is_gpu_devfreq(n)]
    found += [p for p in ("/dev/nvgpu/igpu0", "/dev/nvhost-gpu", "/dev/nvhost-ctrl-gpu") if host.exists(p)]
    return tuple(found)


def device_tree_strings(host: HostRoot, node: str) -> tuple[str, ...]:
    """A device-tree property's strings (NUL-separated in the file)."""
    for tree in DEVICE_TREES:
        data = host.read_bytes(f"{tree}/{node}", 16384)
        if data:
            return parse_strings(data)
    return ()


# -- parsers --------------------------------------------------------------------------------------


def parse_strings(data: bytes) -> tuple[str, ...]:
    """NUL-separated strings without control characters; what is not text is dropped."""
    parts = (_clean(part.decode("utf-8", "replace")) for part in data.split(b"\0"))
    return tuple(p for p in parts if p)


def parse_l4t(text: str) -> str | None:
    """`# R36 (release), REVISION: 4.3, …` -> "36.4.3"."""
    m = _L4T.search(text)
    if not m:
        return None
    revision = m.group(2)
    return f"{m.group(1)}.{revision if '.' in revision else revision + '.0'}"


def find_chip(strings: Sequence[str]) -> str | None:
    """`nvidia,tegra234` -> "tegra234"; a chip in our table wins over a family name such as tegra23x."""
    found = [m for s in strings for m in _CHIP.findall(s)]
    return next((c for c in found if c in SOCS), found[0] if found else None)


def find_part_number(strings: Sequence[str]) -> str | None:
    """The module's part number among those of module and carrier board; None if no module is known
    and the order does not tell (a carrier's number must not name the module)."""
    found = [f"p{a}-{b}" for s in strings for a, b in _PART.findall(s)]
    known = next((p for p in found if p in MODULES), None)
    if known:
        return known
    # `nvidia,p3737-0000+p3701-0005 nvidia,p3701-0005`: what stands alone or after '+' is the module.
    after_plus = [f"p{a}-{b}" for s in strings for a, b in re.findall(r"\+p(\d{4})-(\d{4})(?!\d)", s)]
    return after_plus[0] if after_plus else None


def parse_power_modes(conf: str) -> dict[int, str]:
    """nvpmodel.conf -> {ID: name}; the first definition of an ID counts."""
    modes: dict[int, str] = {}
    for number, name in _POWER_MODEL.findall(conf):
        modes.setdefault(int(number), name)
    return modes


def parse_power_mode_id(status: str) -> int | None:
    """`pmode:0002 fmode:quiet` -> 2."""
    m = _POWER_MODE_ID.search(status)
    return int(m.group(1)) if m else None


def _serial(host: HostRoot) -> str | None:
    serial = next(iter(device_tree_strings(host, "serial-number")), None)
    if serial is None:
        # JetPack 4 without the property: the chip's fuse ID.
        serial = _line(host.read_text("/sys/module/tegra_fuse/parameters/tegra_chip_uid", 256))
    # Boards that were never given a number carry zeros or spaces: no identity.
    if serial is None or not re.fullmatch(r"[\w.:-]{4,64}", serial) or not serial.strip("0.:-_"):
        return None
    return serial


def _line(text: str | None) -> str | None:
    """The first line without NULs and control characters, or None when that is empty."""
    if text is None:
        return None
    return _clean(text.split("\n", 1)[0]) or None


def _clean(text: str) -> str:
    return "".join(c for c in text if c.isprintable() and c != "\ufffd").strip()


def _shown(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "…"
