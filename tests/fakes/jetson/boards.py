"""The boards: what tells them apart, one description each.

Built from public knowledge of where L4T keeps its values (node names, device-tree strings, rail and
zone names); the numbers are ours. Not dumps of real boards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_ORIN_NODES = (
    "nvmap", "nvhost-ctrl-gpu", "nvhost-gpu", "nvhost-as-gpu", "nvhost-ctxsw-gpu", "nvhost-dbg-gpu",
    "nvhost-prof-gpu", "nvhost-sched-gpu", "nvhost-tsg-gpu", "nvhost-power-gpu", "nvgpu/igpu0/as",
    "nvgpu/igpu0/channel", "nvgpu/igpu0/ctrl", "nvgpu/igpu0/sched", "nvgpu/igpu0/tsg", "host1x-fence",
    "nvsciipc", "nvidia0", "nvidiactl", "nvidia-modeset",
)  # fmt: skip
_OLD_NODES = (
    "nvmap", "nvhost-ctrl", "nvhost-ctrl-gpu", "nvhost-gpu", "nvhost-as-gpu", "nvhost-dbg-gpu",
    "nvhost-prof-gpu", "nvhost-sched-gpu", "nvhost-tsg-gpu", "nvhost-vic",
)  # fmt: skip
_ORIN_ZONES = {
    "cpu-thermal": 48468, "gpu-thermal": 48562, "cv0-thermal": -256000, "soc0-thermal": 47000,
    "tj-thermal": 49156,
}  # fmt: skip
_ORIN_ALERTS = {"gpu-throttle-alert": 0, "cpu-throttle-alert": 0, "hot-surface-alert": 0, "pwm-fan": 2}
_ORIN_RAILS = {"VDD_IN": (4984, 955), "VDD_CPU_GPU_CV": (4984, 103), "VDD_SOC": (4984, 287)}


@dataclass(frozen=True)
class Board:
    """One board as it stands after boot."""

    name: str
    model: str
    compatible: tuple[str, ...]
    l4t: tuple[int, str] | None  # (36, "4.3")
    kernel: str
    mem_total_kib: int
    devfreq: str  # entry of /sys/class/devfreq
    gpu_device: str  # directory below /sys/devices that holds `load`
    zones_milli_c: dict[str, int]
    rails: dict[str, tuple[int, int]]  # label -> (mV, mA)
    serial: str | None = "1421122334455"
    dtsfilename: str | None = None
    of_name: str | None = None  # name of the GPU's device-tree node
    has_load: bool = True
    load_alias: str | None = None  # a further path of `load`, below /sys/devices
    load_per_mille: int = 437
    clock_hz: int = 305_000_000
    emc_hz: int | None = None
    rails_in: str = "hwmon"  # or "iio"
    vin_uw: int | None = None  # Thor: INA238
    fan: str = "hwmon"  # or "legacy", "none"
    fan_pwm: int = 51
    alerts: dict[str, int] = field(default_factory=dict)  # cooling devices
    overcurrent: tuple[int, ...] = ()
    mem_available_kib: int | None = None
    nvmap_in_meminfo: bool = True
    swap_kib: tuple[int, int] = (3_901_440, 3_901_440)  # total, free
    clients: tuple[tuple[str, int, int], ...] = (
        ("python3", 4321, 1_048_576),
        ("gst launch 1.0", 977, 20_480),
    )
    nvmap_total_kib: int | None = 1_060_864  # shared buffers once
    power_modes: dict[int, str] = field(default_factory=lambda: {0: "15W", 1: "7W"})
    power_mode: int = 0
    nodes: tuple[str, ...] = _ORIN_NODES
    csv: bool = True  # NVIDIA's csv files are installed
    cdi_devices: tuple[str, ...] = ()  # names in /etc/cdi/nvidia.yaml


NANO_JP4 = Board(
    name="nano-jp4",
    model="NVIDIA Jetson Nano Developer Kit",
    compatible=("nvidia,p3449-0000-b00+p3448-0000-b00", "nvidia,jetson-nano", "nvidia,tegra210"),
    dtsfilename="/dvs/kernel/kernel-dts/tegra210-p3448-0000-p3449-0000-b00.dts",
    l4t=(32, "7.1"),
    kernel="4.9.253-tegra",
    mem_total_kib=4_051_968,
    devfreq="57000000.gpu",
    gpu_device="57000000.gpu",
    load_alias="gpu.0",
    clock_hz=76_800_000,
    zones_milli_c={
        "AO-therm": 27000, "CPU-therm": 21500, "GPU-therm": 21000, "PLL-therm": 20500, "PMIC-Die": 100000,
        "thermal-fan-est": 21200,
    },
    rails={"POM_5V_IN": (4800, 589), "POM_5V_GPU": (4800, 9), "POM_5V_CPU": (4800, 128)},
    rails_in="iio",
    fan="legacy",
    alerts={"gpu-balanced": 0, "pwm-fan": 1},
    power_modes={0: "MAXN", 1: "5W"},
    nodes=_OLD_NODES,
)  # fmt: skip

XAVIER_NX_JP5 = Board(
    name="xavier-nx-jp5",
    model="NVIDIA Jetson Xavier NX Developer Kit",
    compatible=("nvidia,p3449-0000+p3668-0000", "nvidia,p3509-0000+p3668-0000", "nvidia,tegra194"),
    l4t=(35, "4.1"),
    kernel="5.10.120-tegra",
    mem_total_kib=7_000_000,
    devfreq="17000000.gv11b",
    gpu_device="17000000.gv11b",
    load_alias="platform/gpu.0",
    clock_hz=1_109_250_000,
    zones_milli_c={
        "CPU-therm": 44000,
        "GPU-therm": 43500,
        "AUX-therm": 43000,
        "AO-therm": 43500,
        "PMIC-Die": 50000,
    },
    rails={"VDD_IN": (4976, 884), "VDD_CPU_GPU_CV": (4976, 110), "VDD_SOC": (4976, 310)},
    alerts={"gpu-balanced": 0},
    power_modes={0: "MODE_15W_2CORE", 2: "MODE_15W_6CORE", 8: "MODE_20W_6CORE"},
    power_mode=8,
    nodes=_OLD_NODES,
)

ORIN_NANO_JP6 = Board(
    name="orin-nano-jp6",
    model="NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
    compatible=("nvidia,p3768-0000+p3767-0005-super", "nvidia,p3767-0005", "nvidia,tegra234"),
    l4t=(36, "4.3"),
    kernel="5.15.148-tegra",
    mem_total_kib=7_802_880,
    devfreq="17000000.gpu",
    of_name="gpu",
    gpu_device="platform/bus@0/17000000.gpu",
    emc_hz=2_133_000_000,
    zones_milli_c=_ORIN_ZONES,
    rails=_ORIN_RAILS,
    alerts=_ORIN_ALERTS,
    overcurrent=(0, 15, 37),
    power_modes={0: "15W", 1: "25W", 2: "MAXN_SUPER", 3: "7W"},
    power_mode=2,
)

ORIN_NX_JP6 = Board(
    name="orin-nx-jp6",
    model="NVIDIA Jetson Orin NX Engineering Reference Developer Kit",
    compatible=("nvidia,p3768-0000+p3767-0000", "nvidia,p3767-0000", "nvidia,tegra234"),
    l4t=(36, "4.7"),
    kernel="5.15.148-tegra",
    mem_total_kib=16_051_200,
    devfreq="17000000.gpu",
    of_name="gpu",
    gpu_device="platform/bus@0/17000000.gpu",
    zones_milli_c=_ORIN_ZONES,
    rails=_ORIN_RAILS,
    alerts=_ORIN_ALERTS,
    overcurrent=(0, 0, 0),
    cdi_devices=("0", "all"),
)

AGX_ORIN_JP72 = Board(
    name="agx-orin-jp72",
    model="NVIDIA Jetson AGX Orin Developer Kit",
    compatible=("nvidia,p3737-0000+p3701-0005", "nvidia,p3701-0005", "nvidia,tegra234", "nvidia,tegra23x"),
    l4t=(39, "2.1"),
    kernel="6.8.12-1021-tegra",
    mem_total_kib=64_324_608,
    devfreq="17000000.gpu",
    of_name="gpu",
    gpu_device="platform/bus@0/17000000.gpu",
    clock_hz=1_300_500_000,
    zones_milli_c={**_ORIN_ZONES, "gpu-thermal": 47625},
    rails={"VDD_GPU_SOC": (5032, 1021), "VDD_CPU_CV": (5032, 410), "VIN_SYS_5V0": (5032, 780), "NC": (0, 0)},
    alerts=_ORIN_ALERTS,
    overcurrent=(0, 0, 0),
    nvmap_in_meminfo=False,
    power_modes={0: "MAXN", 1: "MODE_15W", 2: "MODE_30W", 3: "MODE_50W"},
)

THOR_JP7 = Board(
    name="thor-jp7",
    model="NVIDIA Jetson AGX Thor Developer Kit",
    compatible=("nvidia,p4071-0000+p3834-0008", "nvidia,tegra264"),
    l4t=(38, "2.2"),
    kernel="6.8.12-tegra",
    mem_total_kib=128_790_092,
    devfreq="gpu-gpc-0",
    gpu_device="pci0000:00/0000:01:00.0",
    has_load=False,
    clock_hz=1_575_000_000,
    zones_milli_c={"gpu-thermal": -256000, "tj-thermal": 51000, "soc012-thermal": 48000},
    rails={"VDD_GPU": (12000, 1200), "VDD_CPU_SOC_MSS": (12000, 900)},
    vin_uw=46_250_000,
    alerts={"gpu-throttle-alert": 0, "soc012-throttle-alert": 0, "devfreq-gpu-gpc-0": 18},
    overcurrent=(1, 0, 813),
    nvmap_in_meminfo=False,
    clients=(),
    nvmap_total_kib=0,
    power_modes={0: "MAXN", 1: "120W", 2: "90W"},
    power_mode=1,
    nodes=(
        "nvidia0",
        "nvidia2",
        "nvidiactl",
        "nvidia-modeset",
        "nvidia-uvm",
        "nvidia-uvm-tools",
        "nvmap",
    ),
)

AGX_ORIN_DGPU = Board(
    name="agx-orin-dgpu",
    model="Jetson AGX Orin",
    compatible=("nvidia,p3737-0000+p3701-0004", "nvidia,p3701-0004", "nvidia,tegra234", "nvidia,tegra23x"),
    l4t=(36, "4.4"),
    kernel="5.15.148-tegra",
    mem_total_kib=31_268_864,
    devfreq="17000000.gpu",
    of_name="gpu",
    gpu_device="platform/bus@0/17000000.gpu",
    zones_milli_c=_ORIN_ZONES,
    rails={"VDD_GPU_SOC": (5032, 1021), "VDD_CPU_CV": (5032, 410), "VIN_SYS_5V0": (5032, 780)},
    alerts=_ORIN_ALERTS,
    overcurrent=(0, 0, 0),
    nodes=(*_ORIN_NODES, "nvidia1", "nvidia-uvm"),
)

BOARDS = {
    b.name: b
    for b in (NANO_JP4, XAVIER_NX_JP5, ORIN_NANO_JP6, ORIN_NX_JP6, AGX_ORIN_JP72, THOR_JP7, AGX_ORIN_DGPU)
}
