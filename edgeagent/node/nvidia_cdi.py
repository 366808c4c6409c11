"""What a container must be given to use one NVIDIA GPU of this host.

Where NVIDIA's toolkit has generated a CDI spec, its edits for the GPU are taken as they are, as long
as everything it names exists (a driver upgrade leaves old paths behind). Elsewhere they are put
together from the device nodes and the driver's libraries: each library is mounted under its own name
and the names that link to it, in the directories that loaders search without a cache, so that no hook
has to run in the container. A Jetson's iGPU is jetson_runtime.py's business.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from edgeagent.gpus.model import Gpu, GpuKind, MigInstance
from edgeagent.hostroot import HostRoot
from edgeagent.node.cdi import VENDOR, ContainerEdits, ForeignSpec, Mount, read_spec
from edgeagent.node.jetson_runtime import jetson_runtime

log = logging.getLogger(__name__)

NVIDIA_KIND = "nvidia.com/gpu"

WSL_DEVICE = "/dev/dxg"
WSL_DIR = "/usr/lib/wsl"
WSL_LIBRARIES = f"{WSL_DIR}/lib"

# Compute, utility and video: what the driver installs beside the kernel module and a container needs.
_LIBRARY = re.compile(
    r"^(libcuda|libcudadebugger|libnvidia-ml|libnvidia-cfg|libnvidia-ptxjitcompiler|libnvidia-nvvm|"
    r"libnvidia-nvvm70|libnvidia-gpucomp|libnvidia-opencl|libnvidia-allocator|libnvidia-tileiras|"
    r"libnvidia-pkcs11|libnvidia-pkcs11-openssl3|libnvcuvid|libnvidia-encode|libnvidia-opticalflow)"
    r"\.so(?:\.[0-9.]+)?$"
)
_TRIPLETS = ("x86_64-linux-gnu", "aarch64-linux-gnu")
_LIBRARY_DIRS = (
    *(f"/usr/lib/{triplet}" for triplet in _TRIPLETS),
    *(f"/usr/lib/{triplet}/nvidia/current" for triplet in _TRIPLETS),
    "/usr/lib64",
    "/usr/lib64/nvidia",
    "/usr/lib",
    "/usr/lib/nvidia",
    "/run/opengl-driver/lib",
    *(f"/run/nvidia/driver/usr/lib/{triplet}" for triplet in _TRIPLETS),
    "/run/nvidia/driver/usr/lib64",
)
_SMI = ("/usr/bin/nvidia-smi", "/run/nvidia/driver/usr/bin/nvidia-smi", f"{WSL_LIBRARIES}/nvidia-smi")


@dataclass(frozen=True, slots=True)
class GpuAccess:
    """How a container gets at a GPU. `device`: the CDI device of NVIDIA's own spec, where that was
    used; `evidence`: where the edits are from; `problem`: what will not work, and what to do;
    `early_env`: what NVIDIA's runtime has to be told where it does the rest, if not the GPU's UUID."""

    edits: ContainerEdits
    evidence: str
    device: str | None = None
    problem: str | None = None
    early_env: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Known:
    stamp: tuple[object, ...]
    access: dict[str, GpuAccess] = field(default_factory=dict)


class NvidiaCdi:
    """Thread-safe; what was found out is kept until somebody's spec or the GPU changes."""

    def __init__(self, host: HostRoot, cdi_dirs: tuple[str, ...] = ("/var/run/cdi", "/etc/cdi")) -> None:
        """`cdi_dirs`: the runtime lets the first win."""
        self._host = host
        self._dirs = cdi_dirs
        self._lock = threading.Lock()
        self._known = _Known(())
        self._specs: tuple[ForeignSpec, ...] = ()

    def access(self, gpu: Gpu, mig: MigInstance | None = None, gpus_on_node: int = 1) -> GpuAccess:
        with self._lock:
            stamp = self._stamp()
            if stamp != self._known.stamp:
                self._known = _Known(stamp)
                self._specs = tuple(self._read_specs())
            key = repr((gpu.uuid, gpu.index, gpu.device_nodes, gpu.driver_version, mig, gpus_on_node))
            known = self._known.access.get(key)
            if known is None:
                known = self._known.access[key] = self._find(gpu, mig, gpus_on_node)
                log.log(
                    logging.WARNING if known.problem else logging.INFO,
                    "container access gpu=%s from=%s problem=%s", gpu.uuid, known.evidence, known.problem,
                )  # fmt: skip
            return known

    # --- NVIDIA's specs ---

    def _stamp(self) -> tuple[object, ...]:
        """Changes when a spec of somebody else does."""
        found: list[tuple[str, str, int, int]] = []
        for directory in self._dirs:
            try:
                with os.scandir(self._host.path(directory)) as entries:
                    for entry in entries:
                        if entry.name.startswith(f"{VENDOR}-") or not _is_spec(entry.name):
                            continue
                        stat = entry.stat()
                        found.append((directory, entry.name, stat.st_mtime_ns, stat.st_ino))
            except OSError:
                continue  # the directory is not there
        return (True, *sorted(found))

    def _read_specs(self) -> Iterator[ForeignSpec]:
        for directory in self._dirs:
            for name in self._host.listdir(directory):
                if name.startswith(f"{VENDOR}-") or not _is_spec(name):
                    continue
                spec = read_spec(self._host, f"{directory}/{name}")
                if spec is not None and spec.kind == NVIDIA_KIND:
                    yield spec

    def _find(self, gpu: Gpu, mig: MigInstance | None, gpus_on_node: int) -> GpuAccess:
        if gpu.source == "simulated":
            return GpuAccess(ContainerEdits(), "simulated GPU: nothing to give")
        if gpu.kind is GpuKind.INTEGRATED and gpu.source == "tegra":
            runtime = jetson_runtime(self._host, gpu, gpus_on_node=gpus_on_node, cdi_dirs=self._dirs)
            return GpuAccess(
                runtime.edits,
                f"Jetson, {runtime.mode}",
                runtime.cdi_device,
                runtime.problem,
                runtime.early_env,
            )
        lost: list[str] = []
        for spec in self._specs:
            name = _device_name(spec, gpu, mig, gpus_on_node)
            if name is None:
                continue
            edits = spec.common.merged(spec.devices[name])
            missing = self._missing(edits)
            if missing is None:
                return GpuAccess(edits, f"{spec.path}: {NVIDIA_KIND}={name}", f"{NVIDIA_KIND}={name}")
            lost.append(f"{spec.path} names {missing}, which does not exist")
        access = self._own(gpu, mig)
        if lost:
            evidence = f"{access.evidence} ({lost[0]}: `nvidia-ctk cdi generate` makes it anew)"
            return GpuAccess(access.edits, evidence, None, access.problem)
        return access

    def _missing(self, edits: ContainerEdits) -> str | None:
        """A path that the edits name and the host has not: one is enough to keep containers from
        starting."""
        paths = (
            *edits.device_nodes,
            *(mount.host_path for mount in edits.mounts),
            *(hook.path for hook in edits.hooks),
        )
        return next((p for p in paths if not self._host.exists(self._host.resolve(p))), None)

    # --- our own knowledge ---

    def _own(self, gpu: Gpu, mig: MigInstance | None) -> GpuAccess:
        nodes = (*gpu.device_nodes, *(mig.device_nodes if mig is not None else ()))
        wsl = WSL_DEVICE in nodes
        libraries = self._wsl_libraries() if wsl else self._driver_libraries(gpu.driver_version)
        mounts = [
            Mount(real, f"{directory}/{name}")
            for name, real in libraries.items()
            for directory in self._container_dirs()
        ]
        if wsl and self._host.exists(WSL_DIR):
            mounts.append(Mount(WSL_DIR, WSL_DIR))  # its libraries load the Windows driver's from there
        smi = next((path for path in _SMI if self._host.exists(path)), None)
        if smi is not None and libraries:
            mounts.append(Mount(self._host.resolve(smi), "/usr/bin/nvidia-smi"))
        # One paravirtual device shows every GPU: the one that is meant has to be named.
        env = {"CUDA_VISIBLE_DEVICES": gpu.uuid} if wsl else {}
        problem = None
        if not nodes:
            problem = "no device node of the GPU exists on this host: is the NVIDIA driver loaded?"
        elif not libraries:
            problem = (
                "the driver's libraries are in none of the usual directories: run `nvidia-ctk cdi generate "
                "--output=/var/run/cdi/nvidia.yaml`"
            )
        return GpuAccess(
            ContainerEdits(env=env, mounts=tuple(mounts), device_nodes=nodes),
            f"device nodes and {len(libraries)} driver libraries found on the host",
            None,
            problem,
        )

    def _driver_libraries(self, driver_version: str | None) -> dict[str, str]:
        """Name in the container -> host path of the real file, from the first directory that has
        libcuda (of the loaded driver's version, where that is known)."""
        for directory in _LIBRARY_DIRS:
            found = self._libraries_in(directory)
            cuda = found.get("libcuda.so.1")
            if cuda is not None and (driver_version is None or cuda.endswith(f".so.{driver_version}")):
                return found
        return {}

    def _libraries_in(self, directory: str) -> dict[str, str]:
        names: dict[str, str] = {}
        for name in self._host.listdir(directory):
            if not _LIBRARY.match(name):
                continue
            real = self._host.resolve(f"{directory}/{name}")
            if not self._host.exists(real):
                continue  # a link that an upgrade left behind
            names[name] = real
            names[posixpath.basename(real)] = real
        return names

    def _wsl_libraries(self) -> dict[str, str]:
        return {
            name: self._host.resolve(f"{WSL_LIBRARIES}/{name}")
            for name in self._host.listdir(WSL_LIBRARIES)
            if ".so" in name
        }

    def _container_dirs(self) -> tuple[str, ...]:
        """Where loaders look without a cache: Debian's multiarch directory, and everybody else's."""
        machine = "aarch64-linux-gnu" if os.uname().machine == "aarch64" else "x86_64-linux-gnu"
        return (f"/usr/lib/{machine}", "/usr/lib64")


def _is_spec(name: str) -> bool:
    return name.endswith((".json", ".yaml", ".yml"))


def _device_name(spec: ForeignSpec, gpu: Gpu, mig: MigInstance | None, gpus_on_node: int) -> str | None:
    """The device of the spec that is this GPU (or MIG instance) and nothing else."""
    if mig is not None:
        return mig.uuid if mig.uuid in spec.devices else _with_nodes(spec.devices, mig.device_nodes)
    if gpu.uuid in spec.devices:
        return gpu.uuid
    own = tuple(n for n in gpu.device_nodes if re.fullmatch(r"/dev/nvidia\d+", n))
    if own:
        return _with_nodes(spec.devices, own)
    # WSL: one device for everything.
    if gpus_on_node == 1 and WSL_DEVICE in gpu.device_nodes and "all" in spec.devices:
        return "all"
    return None


def _with_nodes(devices: Mapping[str, ContainerEdits], nodes: tuple[str, ...]) -> str | None:
    """The device with all of `nodes` and no other GPU's: an index is not to be trusted, a device node
    says which GPU is meant."""
    if not nodes:
        return None
    for name, edits in devices.items():
        cards = {n for n in edits.device_nodes if re.fullmatch(r"/dev/nvidia\d+", n)}
        wanted = set(nodes)
        if wanted <= set(edits.device_nodes) and cards <= wanted | _parents(wanted, cards):
            return name
    return None


def _parents(wanted: set[str], cards: set[str]) -> set[str]:
    """A MIG instance's edits also name its parent's node."""
    return cards if len(cards) == 1 and not any(re.fullmatch(r"/dev/nvidia\d+", n) for n in wanted) else set()
