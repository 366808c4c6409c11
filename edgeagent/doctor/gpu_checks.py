"""From the driver to the containers: GPUs, device nodes, the container runtime, CDI."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from edgeagent.doctor.containerd import K3S_SEARCHES, runtime_advice
from edgeagent.doctor.examination import Examination
from edgeagent.doctor.findings import Finding, fail, ok, skip, warn
from edgeagent.errors import ConfigError, NodeError
from edgeagent.gpus.model import GpuFault
from edgeagent.node.apiserver import ApiStatusError
from edgeagent.node.cdi import VENDOR, ForeignSpec, read_spec
from edgeagent.node.container_runtime import CONTAINERD_CONFIG
from edgeagent.node.nvidia_cdi import NvidiaCdi

_FIXES = {
    GpuFault.DRIVER_NOT_LOADED: "load it: modprobe nvidia; if that fails: dmesg | grep -i nvrm",
    GpuFault.DRIVER_MISMATCH: "the driver was upgraded: reboot, or unload and load the nvidia modules",
    GpuFault.LIBRARY_MISSING: "install NVIDIA's driver (its user-space part has libnvidia-ml.so.1)",
    GpuFault.NO_PERMISSION: "run this as root",
    GpuFault.LOST: "reboot; if it comes back, look at power and the slot: dmesg | grep -i xid",
    GpuFault.RESET_REQUIRED: "nvidia-smi --gpu-reset, with no pod on it, or reboot",
    GpuFault.UNRESPONSIVE: "the driver hangs: dmesg | grep -i nvrm; a reboot is likely to be needed",
    GpuFault.LOST_DEVICE_ACCESS: "start the agent's pod again: systemd was reloaded under it",
}
_LOOK = "edgeagent detect shows what was looked at"
_ONE_LETTER = re.compile(r"^([^/]|[^/]+/.)$|^./")
_REGENERATE = "nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml"


def driver(x: Examination) -> Iterator[Finding]:
    try:
        seen = x.gpus
    except ConfigError as e:
        yield fail(str(e), "correct gpus.simulated in the configuration")
        return
    if not seen.gpus:
        fault = GpuFault(seen.fault) if seen.fault else None
        yield fail(seen.problem or "no GPU was found", _FIXES.get(fault, _LOOK) if fault else _LOOK)
        return
    for gpu in seen.gpus:
        memory = f"{gpu.memory_total_mib} MiB, {gpu.usable_mib} MiB to share, mode {gpu.mode}"
        yield ok(f"{gpu.label}: {memory} (read through {gpu.source})")
    for g in (x.snapshot or {}).get("gpus", []):
        for c in g.get("conditions", []):
            say = fail if c.get("makesUnhealthy") else warn
            yield say(
                f"GPU {g['gpu']['index']} {c['type']}: {c['message']}", "docs/health.md names the remedies"
            )


def device_nodes(x: Examination) -> Iterator[Finding]:
    if not x.gpus.gpus:
        yield skip("no GPU")
        return
    nvidia = NvidiaCdi(x.host, (x.config.kubelet.cdi_dir, x.config.kubelet.cdi_static_dir))
    known = {}
    if x.snapshot is None:
        known = {g.uuid: g for g in x.look_at_gpus()[1].gpus}
    for gpu in x.gpus.gpus:
        if gpu.source == "simulated":
            yield skip(f"{gpu.label} is simulated")
            continue
        missing = [n for n in gpu.device_nodes if not x.host.exists(n)]
        if missing:
            yield fail(f"{gpu.label}: {', '.join(missing)} is missing", "nvidia-modprobe -c 0 -u makes them")
        elif not gpu.device_nodes:
            yield fail(
                f"{gpu.label} has no device node", "is the driver's kernel module loaded? lsmod | grep nv"
            )
        elif gpu.uuid in known:
            access = nvidia.access(known[gpu.uuid], gpus_on_node=len(x.gpus.gpus))
            if access.problem is not None:
                yield fail(f"{gpu.label}: {access.problem}")
            else:
                yield ok(f"{gpu.label}: {', '.join(gpu.device_nodes)}; containers get {access.evidence}")
        else:
            yield ok(f"{gpu.label}: {', '.join(gpu.device_nodes)}")
        if (
            gpu.source == "nvml"
            and "/dev/nvidiactl" in gpu.device_nodes
            and not x.host.exists("/dev/nvidia-uvm")
        ):
            yield fail("/dev/nvidia-uvm is missing: CUDA cannot start", "nvidia-modprobe -u -c 0")


def container_runtime(x: Examination) -> Iterator[Finding]:
    k3s = x.k3s
    if k3s is None:
        yield warn("K3s was not found on this host", "if this is not a K3s node, all is as it should be")
    else:
        yield ok(f"K3s {k3s.version or 'of unknown version'} ({k3s.role}), data in {k3s.data_dir}")
    if x.cdi.enabled:
        yield ok(f"CDI: {x.cdi.reason}; pods need no runtime class")
        return
    say = warn if x.config.sharing.binding != "late" else fail
    if x.cdi.enabled is None:
        yield skip(f"CDI: {x.cdi.reason}")
        return
    yield say(
        f"CDI: {x.cdi.reason}; the GPU of a container is then chosen early and pods need "
        "runtimeClassName: nvidia",
        "upgrade K3s to v1.31.6, v1.32.2 or newer (containerd 2)",
    )
    advice = runtime_advice(x.runtime, k3s)
    if advice is not None:
        what, _, fix = advice.rpartition(": ")
        yield fail(what, fix)
    yield from _runtime_class(x)


def _runtime_class(x: Examination) -> Iterator[Finding]:
    if x.api is None or x.api_problem is not None:
        yield skip(f"RuntimeClass nvidia: {x.api_problem}")
        return
    try:
        x.api.request("GET", "/apis/node.k8s.io/v1/runtimeclasses/nvidia")
        yield ok("RuntimeClass nvidia is there")
    except ApiStatusError as e:
        if e.status == 404:
            yield fail(
                "there is no RuntimeClass nvidia: pods with runtimeClassName: nvidia are refused",
                "kubectl apply -f k3s-manifests/base/runtime-class.yaml",
            )
        else:
            yield skip(f"RuntimeClass nvidia: {e}")
    except NodeError as e:
        yield skip(f"RuntimeClass nvidia: {e}")


def containerd_config(x: Examination) -> Iterator[Finding]:
    k3s = x.k3s
    if k3s is None:
        yield skip("not a K3s node")
        return
    if k3s.containerd_config is None:
        yield warn(
            f"K3s has not rendered a containerd configuration in {k3s.data_dir}",
            f"start K3s once: systemctl start {x.k3s_service}",
        )
        return
    runtime = x.runtime
    if runtime.rendered:
        yield ok(f"{k3s.containerd_config} names NVIDIA's runtime")
    elif runtime.binary is not None:
        where = "" if runtime.found_by_k3s else f" (K3s looks in {' and '.join(K3S_SEARCHES)})"
        yield (ok if x.cdi.enabled else warn)(
            f"{runtime.binary} is installed and {k3s.containerd_config} does not name it{where}"
            + ("; with CDI that does not matter" if x.cdi.enabled else "")
        )
    else:
        yield ok(f"{k3s.containerd_config} is there, without NVIDIA's runtime, which is not installed")
    directory = k3s.containerd_config.rpartition("/")[0]
    old, new = f"{directory}/config.toml.tmpl", f"{directory}/config-v3.toml.tmpl"
    major = k3s.containerd_major
    if major is not None and major < 2 and x.host.exists(new):
        yield warn(f"{new} has no effect: containerd 1 is here", f"rename it to {old}")
    template = k3s.containerd_template
    if template is not None and x.host.exists(template):
        text = x.host.read_text(template) or ""
        if 'template "base"' not in text:
            yield warn(
                f"{template} does not include K3s's own template: what K3s adds later is missing",
                'begin it with {{ template "base" . }}',
            )
    other = x.host.read_text(CONTAINERD_CONFIG) or ""
    if "nvidia" in other:
        yield warn(
            f"{CONTAINERD_CONFIG} names nvidia, but K3s has a containerd of its own and never reads it",
            "what is meant for K3s belongs in a template: docs/troubleshooting.md",
        )


def cdi_directories(x: Examination) -> Iterator[Finding]:
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    ours = others = 0
    for directory in (x.config.kubelet.cdi_dir, x.config.kubelet.cdi_static_dir):
        for name in x.host.listdir(directory):
            if not name.endswith((".json", ".yaml", ".yml")):
                continue
            path = f"{directory}/{name}"
            ours, others = (ours + 1, others) if name.startswith(f"{VENDOR}-") else (ours, others + 1)
            yield from _spec(x, path, names, directory)
    for (kind_device, _), paths in names.items():
        if len(paths) > 1:
            yield warn(
                f"{' and '.join(paths)} both define {kind_device}: the runtime takes neither", "remove one"
            )
    if x.host.exists(x.config.kubelet.cdi_dir) or x.binding != "late":
        yield ok(f"{x.config.kubelet.cdi_dir}: {ours} specs of the agent, {others} of others")
    else:
        yield ok(f"{x.config.kubelet.cdi_dir} is not there yet; the agent makes it")


def _spec(
    x: Examination, path: str, names: dict[tuple[str, str], list[str]], directory: str
) -> Iterator[Finding]:
    spec = read_spec(x.host, path)
    if spec is None:
        yield warn(f"{path} is no CDI spec: containerd logs it again and again", "remove it, or make it anew")
        return
    if _ONE_LETTER.match(spec.kind):
        # Measured: containerd 2.2.7 panics on it, and with it every container start on the node.
        yield fail(
            f"{path} has the kind {spec.kind!r}: a vendor or class of one letter makes containerd 2 panic",
            f"remove {path}",
        )
    for device in spec.devices:
        names[f"{spec.kind}={device}", directory].append(path)
    lost = _lost(x, spec) if not path.rpartition("/")[2].startswith(f"{VENDOR}-") else None
    if lost is not None:
        yield warn(
            f"{path} names {lost}, which does not exist: containers with its devices cannot start",
            f"was the driver upgraded? {_REGENERATE}",
        )


def _lost(x: Examination, spec: ForeignSpec) -> str | None:
    for edits in (spec.common, *spec.devices.values()):
        paths = (*edits.device_nodes, *(m.host_path for m in edits.mounts), *(h.path for h in edits.hooks))
        for path in paths:
            if not x.host.exists(x.host.resolve(path)):
                return path
    return None
