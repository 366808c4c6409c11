"""The parsers of foreign bytes. Each takes anything; what it may raise is part of its contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgeagent.config.documents import parse_document
from edgeagent.config.loader import load_text
from edgeagent.errors import AllocationError, ConfigError, KubeletError
from edgeagent.gpus import jetson, tegra_files
from edgeagent.isolation.limiter import files as limiter_files
from edgeagent.kubelet import checkpoint, preference
from edgeagent.kubelet.protos.deviceplugin import PreferredAllocationRequest
from edgeagent.node import cdi, cgroups, kmsg, processes
from edgeagent.sharing.tokens import CORES, MEMORY, NUMBER

LETTERS = {"volcano.sh/vgpu-memory": MEMORY, "volcano.sh/vgpu-cores": CORES, "volcano.sh/vgpu-number": NUMBER}


@dataclass(frozen=True)
class Target:
    """`seeds`: inputs that get far."""

    read: Callable[[bytes], object]
    may_raise: tuple[type[Exception], ...] = ()
    seeds: tuple[bytes, ...] = ()

    def feed(self, data: bytes) -> None:
        try:
            self.read(data)
        except self.may_raise:
            pass


def text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def read_preference(data: bytes) -> None:
    preference.answer(data, MEMORY, (1 << 64) - 1)


def read_checkpoint(data: bytes) -> None:
    view = checkpoint.parse(data, LETTERS, lambda name: name.startswith("nvidia.com/"))
    for held in view.containers.values():
        held.response_env("volcano.sh/vgpu-memory", "EDGEAGENT_GPU_UUID")


def read_kernel_log(data: bytes) -> None:
    parser = kmsg.LineParser()
    for line in data.split(b"\n"):
        list(parser.feed(kmsg.parse_record(line)[2]))
    kmsg.normalise_pci(text(data))


def read_device_tree(data: bytes) -> None:
    strings = jetson.parse_strings(data)
    jetson.find_chip(strings)
    jetson.find_part_number(strings)
    jetson.parse_l4t(text(data))
    jetson.parse_power_modes(text(data))
    jetson.parse_power_mode_id(text(data))


def read_sysfs(data: bytes) -> None:
    for parse in (tegra_files.integer, tegra_files.load_pct, tegra_files.celsius, tegra_files.mhz,
                  tegra_files.pwm_pct, tegra_files.microwatt, tegra_files.milliwatt, tegra_files.bytes_mib,
                  tegra_files.count):  # fmt: skip
        try:
            parse(data)
        except ValueError:
            pass


def _wish() -> bytes:
    request = PreferredAllocationRequest()
    request.container_requests.add(
        available_deviceIDs=["m000001", "m000002", "m000003"],
        must_include_deviceIDs=["m000001"],
        allocation_size=2,
    )
    return bytes(request.SerializeToString())


TARGETS: dict[str, Target] = {
    "preference": Target(read_preference, (AllocationError,), (_wish(),)),
    "checkpoint": Target(
        read_checkpoint,
        (KubeletError,),
        (
            (
                b'{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"volcano.sh/vgpu-memory",'
                b'"DeviceIDs":{"-1":["m000001"]},"AllocResp":"EAA="}],"RegisteredDevices":{}},"Checksum":1}'
            ),
        ),
    ),
    "kernel log": Target(
        read_kernel_log,
        (),
        (
            b"3,1,5000000,-;NVRM: Xid (PCI:0000:cb:00): 109, pid=17, name=pt_main, Ch 00000008",
            b"3,2,1,-;NVRM: The NVIDIA GPU 0000:b3:00.0\n3,3,1,-;NVRM: fallen off the bus",
            b"4,1,1,-;nvgpu: 17000000.gpu gr_handle:99 [ERR] text",
        ),
    ),
    "cgroup": Target(
        lambda data: cgroups.parse_proc_cgroup(text(data)),
        (),
        (
            b"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod6c1d8ae2_5b3f_4a6e_9f30_0d1e2f3a4b5c"
            b".slice/cri-containerd-" + b"ab" * 32 + b".scope\n",
        ),
    ),
    "stat": Target(lambda data: processes.parse_stat(text(data)), (), (b"1 (a) b) S 1 " + b"0 " * 40,)),
    "device tree": Target(read_device_tree, (), (b"nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0",)),
    "nvmap": Target(
        tegra_files.nvmap,
        (ValueError,),
        (b"CLIENT PROCESS PID SIZE\nuser python3 4100 1048576K\ntotal 1048576K\n",),
    ),
    "sysfs": Target(read_sysfs, (), (b"43000\n", b"-256000\n", b"0x1f", b"437")),
    "meminfo": Target(tegra_files.meminfo, (ValueError,), (b"MemTotal: 16000 kB\nMemAvailable: 8000 kB\n",)),
    "limiter state": Target(limiter_files.parse_state, (), (limiter_files.new_state(),)),
    "CDI document": Target(
        lambda data: (parse_document(text(data), "x.yaml"), cdi.annotations_of(text(data))),
        (ConfigError,),
        (b'{"cdiVersion":"0.5.0","kind":"edgeagent.io/share","annotations":{"edgeagent.io/gpu":"G"}}',),
    ),
    "configuration": Target(
        lambda data: load_text(text(data), "x.yaml"), (ConfigError,), (b"sharing: {mode: shared}\n",)
    ),
}
