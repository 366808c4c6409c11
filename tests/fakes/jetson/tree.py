"""Writes a board's description as the file tree that L4T would show, and changes values while it is read."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tests.fakes.jetson.boards import Board

View = Literal["service", "container"]

_CSV_DIR = "etc/nvidia-container-runtime/host-files-for-container.d"
_LIB_DIR = "usr/lib/aarch64-linux-gnu"


class JetsonTree:
    """A board's tree under `root`. `view`: what a service on the host sees, or what a container with
    the host's /proc, /sys and /dev mounted does (no /etc, no /var, no debugfs, no /proc/device-tree)."""

    def __init__(self, root: Path, board: Board, view: View = "service", *, gpu_appears: bool = True) -> None:
        self.root = root
        self.board = board
        self.view: View = view
        self._write_board()
        if gpu_appears:
            self.gpu_appears()

    # -- live changes -----------------------------------------------------------------------------

    def gpu_appears(self) -> None:
        """The GPU driver has probed: its clock and load nodes are there."""
        b = self.board
        device = f"sys/devices/{b.gpu_device}"
        node = f"{device}/devfreq/{b.devfreq}"
        self.put(f"{node}/cur_freq", f"{b.clock_hz}\n")
        self.put(f"{node}/max_freq", f"{b.clock_hz * 2}\n")
        self.link(f"{node}/device", "../..")
        self.link(f"sys/class/devfreq/{b.devfreq}", os.path.relpath(f"/{node}", "/sys/class/devfreq"))
        self.put("sys/devices/platform/vic/devfreq/15340000.vic/cur_freq", "0\n")
        self.link("sys/class/devfreq/15340000.vic", "../../devices/platform/vic/devfreq/15340000.vic")
        if b.of_name is not None:
            self.put(f"{device}/of_node/name", f"{b.of_name}\0")
        if b.has_load:
            self.put(f"{device}/load", f"{b.load_per_mille}\n")
        if b.load_alias is not None:
            self.link(
                f"sys/devices/{b.load_alias}",
                os.path.relpath(f"/{device}", f"/sys/devices/{b.load_alias}/.."),
            )

    def set_load(self, per_mille: int) -> None:
        self.put(f"sys/devices/{self.board.gpu_device}/load", f"{per_mille}\n")

    def set_zone(self, kind: str, milli_c: int) -> None:
        self.put(f"{self.zone(kind)}/temp", f"{milli_c}\n")

    def set_alert(self, kind: str, state: int) -> None:
        number = list(self.board.alerts).index(kind)
        self.put(f"sys/class/thermal/cooling_device{number}/cur_state", f"{state}\n")

    def set_overcurrent(self, number: int, events: int) -> None:
        self.put(f"sys/class/hwmon/hwmon3/oc{number}_event_cnt", f"{events}\n")

    def set_power_mode(self, number: int) -> None:
        self.put("var/lib/nvpmodel/status", f"pmode:{number:04d} fmode:quiet\n")

    def set_memory(
        self, *, available_kib: int, nvmap_kib: int | None = None, swap_free_kib: int | None = None
    ) -> None:
        total, free = self.board.swap_kib
        free = free if swap_free_kib is None else swap_free_kib
        lines = [
            f"MemTotal:       {self.board.mem_total_kib:8d} kB",
            f"MemFree:        {available_kib // 2:8d} kB",
            f"MemAvailable:   {available_kib:8d} kB",
            f"SwapTotal:      {total:8d} kB",
            f"SwapFree:       {free:8d} kB",
            "HugePages_Total:       0",
        ]
        if nvmap_kib is not None:
            lines += [f"NvMapMemFree:   {0:8d} kB", f"NvMapMemUsed:   {nvmap_kib:8d} kB"]
        self.put("proc/meminfo", "\n".join(lines) + "\n")

    def set_clients(self, clients: tuple[tuple[str, int, int], ...], total_kib: int | None) -> None:
        """nvmap's clients: (name, PID, KiB). Real tables carry one line per open of /dev/nvmap."""
        if self.view == "container":
            return
        lines = [f"{'CLIENT':<18} {'PROCESS':>18} {'PID':>8} {'SIZE':>11}"]
        lines += [f"{'user':<18} {name:>18} {pid:>8} {kib:>10}K" for name, pid, kib in clients]
        if total_kib is not None:
            lines.append(f"{'total':<18} {'':>18} {'':>8} {total_kib:>10}K")
        self.put("sys/kernel/debug/nvmap/iovmm/clients", "\n".join(lines) + "\n")

    # -- places -----------------------------------------------------------------------------------

    def path(self, relative: str) -> Path:
        return self.root / relative

    def zone(self, kind: str) -> str:
        return f"sys/class/thermal/thermal_zone{list(self.board.zones_milli_c).index(kind)}"

    def put(self, relative: str, text: str | bytes) -> None:
        """Replaces a file's contents in place, as sysfs does (no new inode, no torn read)."""
        path = self.root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        data = text.encode() if isinstance(text, str) else text
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_bytes(data)
        os.replace(fresh, path)

    def link(self, relative: str, target: str) -> None:
        path = self.root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            path.unlink()
        path.symlink_to(target)

    def remove(self, relative: str) -> None:
        path = self.root / relative
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    # -- writing ----------------------------------------------------------------------------------

    def _write_board(self) -> None:
        b = self.board
        self.put("proc/sys/kernel/osrelease", f"{b.kernel}\n")
        self.put("sys/devices/soc0/family", "Tegra\n")
        tree = "sys/firmware/devicetree/base"
        self.put(f"{tree}/model", f"{b.model}\0")
        self.put(f"{tree}/compatible", "".join(f"{c}\0" for c in b.compatible))
        if b.serial is not None:
            self.put(f"{tree}/serial-number", f"{b.serial}\0")
        if b.dtsfilename is not None:
            self.put(f"{tree}/nvidia,dtsfilename", f"{b.dtsfilename}\0")
        available = b.mem_total_kib // 2 if b.mem_available_kib is None else b.mem_available_kib
        self.set_memory(available_kib=available, nvmap_kib=b.nvmap_total_kib if b.nvmap_in_meminfo else None)
        for number, (kind, value) in enumerate(b.zones_milli_c.items()):
            zone = f"sys/class/thermal/thermal_zone{number}"
            self.put(f"{zone}/type", f"{kind}\n")
            self.put(f"{zone}/temp", f"{value}\n")
            if kind.lower().startswith("gpu"):
                for trip, (what, at) in enumerate(
                    (("passive", 99000), ("critical", 104500), ("active", 51000))
                ):
                    self.put(f"{zone}/trip_point_{trip}_type", f"{what}\n")
                    self.put(f"{zone}/trip_point_{trip}_temp", f"{at}\n")
        for number, (kind, state) in enumerate(b.alerts.items()):
            device = f"sys/class/thermal/cooling_device{number}"
            self.put(f"{device}/type", f"{kind}\n")
            self.put(f"{device}/cur_state", f"{state}\n")
        self._write_hwmon()
        for node in b.nodes:
            self.put(f"dev/{node}", "")
        if self.view == "service":
            self._write_service_only()

    def _write_hwmon(self) -> None:
        b = self.board
        hwmon = "sys/class/hwmon"
        if b.rails_in == "iio":
            device = "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
            for n, (label, (millivolts, milliamps)) in enumerate(b.rails.items()):
                self.put(f"{device}/rail_name_{n}", f"{label}\n")
                self.put(f"{device}/in_voltage{n}_input", f"{millivolts}\n")
                self.put(f"{device}/in_current{n}_input", f"{milliamps}\n")
                self.put(f"{device}/in_power{n}_input", f"{millivolts * milliamps // 1000}\n")
        else:
            device = f"{hwmon}/hwmon1"
            self.put(f"{device}/name", "ina3221\n")
            for n, (label, (millivolts, milliamps)) in enumerate(b.rails.items(), 1):
                self.put(f"{device}/in{n}_label", f"{label}\n")
                self.put(f"{device}/in{n}_input", f"{millivolts}\n")
                self.put(f"{device}/curr{n}_input", f"{milliamps}\n")
                self.put(f"{device}/curr{n}_crit", "32760 ma\n")
                self.put(f"{device}/curr{n}_crit_alarm", "0\n")
            self.put(f"{device}/in7_label", "sum of shunt voltages\n")
            self.put(f"{device}/in7_input", "120\n")
        if b.vin_uw is not None:
            self.put(f"{hwmon}/hwmon2/name", "ina238\n")
            self.put(f"{hwmon}/hwmon2/power1_input", f"{b.vin_uw}\n")
        if b.overcurrent:
            self.put(f"{hwmon}/hwmon3/name", "soctherm_oc\n")
            for n, events in enumerate(b.overcurrent, 1):
                self.put(f"{hwmon}/hwmon3/oc{n}_event_cnt", f"{events}\n")
        if b.fan == "hwmon":
            self.put(f"{hwmon}/hwmon0/name", "pwmfan\n")
            self.put(f"{hwmon}/hwmon0/pwm1", f"{b.fan_pwm}\n")
        elif b.fan == "legacy":
            self.put("sys/devices/pwm-fan/cur_pwm", f"{b.fan_pwm}\n")
            self.put("sys/devices/pwm-fan/target_pwm", f"{b.fan_pwm}\n")

    def _write_service_only(self) -> None:
        b = self.board
        self.link("proc/device-tree", "/sys/firmware/devicetree/base")
        if b.l4t is not None:
            release, revision = b.l4t
            self.put(
                "etc/nv_tegra_release",
                f"# R{release} (release), REVISION: {revision}, GCID: 38968081, BOARD: generic, EABI: aarch64, "
                "DATE: Wed Jan  8 01:49:37 UTC 2025\n# KERNEL_VARIANT: oot\nTARGET_USERSPACE_LIB_DIR=nvidia\n"
                "INSTALL_TYPE=\n",
            )
        self.link("etc/nvpmodel.conf", "/etc/nvpmodel/nvpmodel_board.conf")
        modes = "".join(
            f"\n# mode\n< POWER_MODEL ID={i} NAME={n} >\nCPU_ONLINE CORE_0 1\n"
            for i, n in b.power_modes.items()
        )
        self.put(
            "etc/nvpmodel/nvpmodel_board.conf",
            f"< PARAM TYPE=FILE NAME=CPU_ONLINE >\n{modes}< PM_CONFIG DEFAULT=0 >\n",
        )
        self.set_power_mode(b.power_mode)
        self.set_clients(b.clients, b.nvmap_total_kib)
        if b.emc_hz is not None:
            self.put("sys/kernel/debug/bpmp/debug/clk/emc/rate", f"{b.emc_hz}\n")
        if b.csv:
            self._write_csv()
        if b.cdi_devices:
            self._write_cdi()

    def _write_csv(self) -> None:
        """NVIDIA's container runtime in csv mode, with the libraries that its lists name."""
        self.put("usr/bin/nvidia-container-runtime", "")
        self.put("etc/nvidia-container-runtime/config.toml", '[nvidia-container-runtime]\nmode = "auto"\n')
        devices = "".join(f"dev, /dev/{node}\n" for node in (*self.board.nodes, "nvhost-not-here"))
        self.put(f"{_CSV_DIR}/devices.csv", devices)
        self.put(f"{_LIB_DIR}/nvidia/libcuda.so.1.1", "ELF")
        self.link(f"{_LIB_DIR}/libcuda.so", "nvidia/libcuda.so.1.1")
        self.put("usr/share/nvidia/nvoptix.bin", "data")
        self.put(
            f"{_CSV_DIR}/drivers.csv",
            f"lib, /{_LIB_DIR}/nvidia/libcuda.so.1.1\nsym, /{_LIB_DIR}/libcuda.so\n"
            f"dir, /usr/share/nvidia\nlib, /{_LIB_DIR}/libnot-installed.so.1\n",
        )

    def _write_cdi(self) -> None:
        devices = "".join(
            f'- name: "{name}"\n  containerEdits:\n    deviceNodes:\n    - path: /dev/nvmap\n    - path: /dev/nvhost-gpu\n'
            for name in self.board.cdi_devices
        )
        self.put(
            "etc/cdi/nvidia.yaml",
            "---\ncdiVersion: 0.5.0\nkind: nvidia.com/gpu\n"
            f"containerEdits:\n  env:\n  - NVIDIA_VISIBLE_DEVICES=void\n  mounts:\n"
            f"  - hostPath: /{_LIB_DIR}/nvidia/libcuda.so.1.1\n    containerPath: /{_LIB_DIR}/nvidia/libcuda.so.1.1\n"
            "    options:\n    - ro\n    - bind\n"
            "  hooks:\n  - hookName: createContainer\n    path: /usr/bin/nvidia-cdi-hook\n    args:\n"
            f"    - nvidia-cdi-hook\n    - update-ldcache\n    - --folder\n    - /{_LIB_DIR}/nvidia\ndevices:\n{devices}",
        )


def without_identity(board: Board) -> Board:
    """The same board without a serial number in its device tree."""
    return replace(board, serial=None)
