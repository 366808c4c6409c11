"""What a container on a Jetson must be given to use the iGPU, from what is installed on the host.

Three ways exist, told apart by files: a CDI spec that NVIDIA's toolkit generated, the toolkit's csv
lists (what `mode = "csv"` of its runtime injects), or nothing but device nodes. A device ID is never
made up: the toolkit's csv mode takes `all` and `0` only, CDI only names that are in a spec.
"""

from __future__ import annotations

import glob
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from edgeagent.gpus.model import Gpu
from edgeagent.hostroot import HostRoot
from edgeagent.node.cdi import ContainerEdits, Hook, Mount, read_spec

RUNTIME_CONFIG = "/etc/nvidia-container-runtime/config.toml"
CSV_DIR = "/etc/nvidia-container-runtime/host-files-for-container.d"
CDI_DIRS = ("/var/run/cdi", "/etc/cdi")  # the runtime lets the first win
CDI_KIND = "nvidia.com/gpu"

_RUNTIMES = ("/usr/local/nvidia/toolkit/nvidia-container-runtime", "/usr/bin/nvidia-container-runtime")
_HOOKS = (
    ("/usr/bin/nvidia-cdi-hook", ("nvidia-cdi-hook",)),
    ("/usr/local/nvidia/toolkit/nvidia-cdi-hook", ("nvidia-cdi-hook",)),
    ("/usr/bin/nvidia-ctk", ("nvidia-ctk", "hook")),
    ("/usr/local/nvidia/toolkit/nvidia-ctk", ("nvidia-ctk", "hook")),
)
# Without these an image has no driver. Other lists (cuda.csv, tensorrt.csv of JetPack 4) are for images
# that ask for them in NVIDIA_REQUIRE_JETPACK, which is not known here.
_BASE_LISTS = ("l4t.csv", "devices.csv", "drivers.csv")
_CSV_TYPES = ("dev", "dir", "lib", "sym")
_MAX_ENTRIES = 4096
# With these a container could raise its own GPU priority; nothing in CUDA opens them.
_SCHEDULING = re.compile(r"^/dev/(nvhost-sched-gpu|nvgpu/[^/]+/sched)$")
_TEGRA_NODE = re.compile(r"^/dev/(nvmap|nvhost-|nvgpu/|host1x-fence)")
_NVIDIA_NODE = re.compile(r"^/dev/nvidia\d+$")
_NOWHERE = ContainerEdits(env={"NVIDIA_VISIBLE_DEVICES": "void"})


@dataclass(frozen=True, slots=True)
class CsvEntry:
    kind: str  # "dev" | "dir" | "lib" | "sym"
    path: str


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """What the toolkit's runtime is set to. `mode` None: its default, "auto"."""

    mode: str | None = None
    csv_dir: str = CSV_DIR


@dataclass(frozen=True, slots=True)
class JetsonRuntime:
    """What to give containers on this host.

    `edits`: everything, for late binding (with NVIDIA_VISIBLE_DEVICES=void, so that a runtime adds
    nothing of its own). `early_env`: for early binding, where NVIDIA's runtime does the rest; the pod
    then needs `runtime_class`. `cdi_device`: a device that is in a spec, or None. `notes`: what a
    person should know; `problem`: why CUDA will not work, with what to do.
    """

    mode: str  # "cdi" | "csv" | "nodes"
    edits: ContainerEdits
    early_env: Mapping[str, str]
    cdi_device: str | None = None
    runtime_class: str | None = None
    evidence: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(slots=True)
class _Findings:
    evidence: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def jetson_runtime(
    host: HostRoot,
    gpu: Gpu,
    *,
    gpus_on_node: int = 1,
    cdi_dirs: Sequence[str] = CDI_DIRS,
) -> JetsonRuntime:
    """Decides from the host's files. Reads some hundred of them: ask at start and when the inventory
    changes, not at every container start."""
    found = _Findings()
    config = read_runtime_config(host)
    runtime = next((p for p in _RUNTIMES if host.exists(p)), None)
    found.evidence.append(f"NVIDIA container runtime: {runtime or 'not installed'}")
    if config.mode is not None:
        found.evidence.append(f"{RUNTIME_CONFIG}: mode {config.mode}")

    device, cdi_edits = _from_cdi(host, gpu, gpus_on_node, cdi_dirs, found)
    entries = read_csv_entries(host, config.csv_dir, found.notes)
    found.evidence.append(f"{config.csv_dir}: {len(entries)} entries")
    csv_edits = _from_csv(host, gpu, gpus_on_node, entries, found) if device is None and entries else None

    if device is not None:
        mode, edits = "cdi", cdi_edits
    elif csv_edits is not None:
        mode, edits = "csv", csv_edits
    else:
        mode, edits = "nodes", ContainerEdits(device_nodes=_nodes(host, gpu.device_nodes, found))
    problem = None
    if not edits.device_nodes:
        problem = "no device node of the iGPU exists on this host: is the L4T driver loaded?"
    elif mode == "nodes":
        problem = (
            "containers get device nodes but no driver libraries: install nvidia-container-toolkit (with "
            "nvidia-l4t-init's csv lists) or run `nvidia-ctk cdi generate --mode=csv "
            "--output=/etc/cdi/nvidia.yaml`"
        )
    return JetsonRuntime(
        mode=mode,
        edits=edits.merged(_NOWHERE),
        early_env={
            "NVIDIA_VISIBLE_DEVICES": _visible(config, device, gpus_on_node),
            "NVIDIA_DRIVER_CAPABILITIES": "all",
        },
        cdi_device=f"{CDI_KIND}={device}" if device is not None else None,
        runtime_class="nvidia" if runtime is not None else None,
        evidence=tuple(found.evidence),
        notes=tuple(found.notes),
        problem=problem,
    )


def _visible(config: RuntimeConfig, device: str | None, gpus_on_node: int) -> str:
    if config.mode == "cdi" and device is not None:
        return device
    # With a discrete card beside it "all" would hand out both; the toolkit counts the iGPU first.
    return "all" if gpus_on_node == 1 else "0"


# -- NVIDIA's runtime configuration ---------------------------------------------------------------


def read_runtime_config(host: HostRoot) -> RuntimeConfig:
    return parse_runtime_config(host.read_text(RUNTIME_CONFIG) or "")


def parse_runtime_config(text: str) -> RuntimeConfig:
    """The two keys that matter here, out of TOML (which Python reads only from 3.11 on)."""
    section = ""
    values: dict[str, str] = {}
    for line in text.splitlines():
        line = line.strip()
        if m := re.match(r"^\[\s*([\w.\"'-]+)\s*\]", line):
            section = re.sub(r"[\"']", "", m.group(1))
        elif m := re.match(r"^([\w-]+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)')", line):
            value = m.group(2) if m.group(2) is not None else m.group(3)
            values.setdefault(f"{section}.{m.group(1)}", value)
    csv_dir = values.get("nvidia-container-runtime.modes.csv.mount-spec-path", CSV_DIR)
    return RuntimeConfig(
        mode=values.get("nvidia-container-runtime.mode") or None,
        csv_dir=csv_dir if csv_dir.startswith("/") else CSV_DIR,
    )


# -- CDI specs that are there ---------------------------------------------------------------------


def _from_cdi(
    host: HostRoot, gpu: Gpu, gpus_on_node: int, cdi_dirs: Sequence[str], found: _Findings
) -> tuple[str | None, ContainerEdits]:
    """The device of the iGPU in a spec that the toolkit generated, with all its edits."""
    for directory in cdi_dirs:
        for name in host.listdir(directory):
            path = f"{directory}/{name}"
            if not name.endswith((".yaml", ".yml", ".json")) or (spec := read_spec(host, path)) is None:
                continue
            if spec.kind != CDI_KIND:
                continue
            found.evidence.append(f"{path}: {CDI_KIND} {', '.join(sorted(spec.devices)) or 'no devices'}")
            # "all" is the iGPU where nothing else is; beside a card it would be both.
            for device in ("0", "igpu0", "all") if gpus_on_node == 1 else ("0", "igpu0"):
                if device not in spec.devices:
                    continue
                edits = spec.common.merged(spec.devices[device])
                if _is_igpu(edits.device_nodes, gpu, gpus_on_node):
                    return device, _existing(host, edits, path, found)
                found.notes.append(f"{path}: {CDI_KIND}={device} has no device node of the iGPU")
    return None, ContainerEdits()


def _is_igpu(nodes: Iterable[str], gpu: Gpu, gpus_on_node: int) -> bool:
    """A spec generated for a discrete card calls that one 0 too."""
    nodes = set(nodes)
    if not nodes & set(gpu.device_nodes):
        return False
    cards = {n for n in nodes if _NVIDIA_NODE.match(n)}
    return gpus_on_node == 1 or (
        cards <= set(gpu.device_nodes) and (bool(cards) or any(map(_TEGRA_NODE.match, nodes)))
    )


def _existing(host: HostRoot, edits: ContainerEdits, path: str, found: _Findings) -> ContainerEdits:
    """Without what is not on this host (any more): one missing path would keep every container from
    starting."""
    mounts = tuple(m for m in edits.mounts if _there(host, m.host_path))
    hooks = tuple(h for h in edits.hooks if _there(host, h.path))
    lost = len(edits.mounts) - len(mounts) + len(edits.hooks) - len(hooks)
    if lost:
        found.notes.append(
            f"{path}: {lost} of its paths do not exist; was the driver upgraded? "
            "`nvidia-ctk cdi generate` makes it anew"
        )
    return ContainerEdits(edits.env, mounts, _nodes(host, edits.device_nodes, found), hooks)


# -- csv lists ------------------------------------------------------------------------------------


def parse_csv(text: str) -> Iterator[CsvEntry | str]:
    """The entries of one list; a line that is none comes as the sentence that says so."""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        kind, comma, path = (part.strip() for part in line.partition(","))
        path = path.split(",")[0].strip()
        if not comma or kind not in _CSV_TYPES or not path.startswith("/") or not path.isprintable():
            yield f"line {number}: not 'dev|dir|lib|sym, /path'"
            continue
        yield CsvEntry(kind, posixpath.normpath(path).replace("//", "/", 1))


def read_csv_entries(host: HostRoot, directory: str, notes: list[str]) -> tuple[CsvEntry, ...]:
    """All entries of the base lists, once each."""
    entries: dict[CsvEntry, None] = {}
    for name in (n for n in host.listdir(directory) if n in _BASE_LISTS):
        bad = 0
        for entry in parse_csv(host.read_text(f"{directory}/{name}") or ""):
            if isinstance(entry, str):
                bad += 1
                if bad == 1:
                    notes.append(f"{directory}/{name}: {entry}")
            elif len(entries) < _MAX_ENTRIES:
                entries[entry] = None
        if bad > 1:
            notes.append(f"{directory}/{name}: {bad} such lines")
    return tuple(entries)


def _from_csv(
    host: HostRoot, gpu: Gpu, gpus_on_node: int, entries: Sequence[CsvEntry], found: _Findings
) -> ContainerEdits:
    """What the toolkit's csv mode would inject, as edits of our own. Entries that are not on this host
    are left out, as the toolkit does: the lists name the parts of every board."""
    nodes: list[str] = []
    mounts: dict[str, Mount] = {}
    links: list[tuple[str, str]] = []  # (target as the link says it, link)
    for kind, path in _expanded(host, entries):
        if kind == "dev":
            # The lists name the nodes of a discrete card as well.
            if gpus_on_node == 1 or path in gpu.device_nodes or not _NVIDIA_NODE.match(path):
                nodes.append(path)
        elif kind == "sym" and (target := _link_target(host, path)) is not None:
            links.append((target, path))
        else:
            options = ("ro", "nosuid", "nodev", "rbind" if kind == "dir" else "bind", "rprivate")
            mounts[path] = Mount(path, path, options)
    folders = sorted({posixpath.dirname(p) for p in (*mounts, *(p for _, p in links)) if ".so" in p})
    hook = next(((path, args) for path, args in _HOOKS if host.exists(path)), None)
    hooks: list[Hook] = []
    if hook is not None:
        path, args = hook
        if links:
            pairs = (part for target, link in links for part in ("--link", f"{target}::{link}"))
            hooks.append(Hook("createContainer", path, (*args, "create-symlinks", *pairs)))
        if folders:
            pairs = (part for folder in folders for part in ("--folder", folder))
            hooks.append(Hook("createContainer", path, (*args, "update-ldcache", *pairs)))
    else:
        # A bind mount on the link's place gives the same file under the same name.
        for _, link in links:
            mounts.setdefault(link, Mount(link, link, ("ro", "nosuid", "nodev", "bind", "rprivate")))
        if folders:
            found.notes.append(
                "no nvidia-cdi-hook or nvidia-ctk: the image itself must list "
                f"{', '.join(folders[:3])} in its ld.so.conf (L4T images do)"
            )
    # A list made for one board may lack nodes that this one has.
    own = (*nodes, *(n for n in gpu.device_nodes if n not in nodes))
    return ContainerEdits({}, tuple(mounts.values()), _nodes(host, own, found), tuple(hooks))


def _expanded(host: HostRoot, entries: Iterable[CsvEntry]) -> Iterator[tuple[str, str]]:
    """(kind, path) of what is on this host, patterns resolved."""
    prefix = str(host.root).rstrip("/")
    for entry in entries:
        if glob.has_magic(entry.path):
            for match in sorted(glob.glob(prefix + entry.path))[:_MAX_ENTRIES]:
                yield entry.kind, match[len(prefix) :]
        elif _there(host, entry.path):
            yield entry.kind, entry.path


def _link_target(host: HostRoot, path: str) -> str | None:
    try:
        return str(host.path(path).readlink())
    except OSError:
        return None  # not a link on this host: it is mounted as a file


# -- common ---------------------------------------------------------------------------------------


def _there(host: HostRoot, path: str) -> bool:
    return host.exists(host.resolve(path))


def _nodes(host: HostRoot, nodes: Iterable[str], found: _Findings) -> tuple[str, ...]:
    """Those that exist, without those that would let a container touch others' scheduling."""
    wanted = dict.fromkeys(nodes)
    kept = tuple(n for n in wanted if host.exists(n) and not _SCHEDULING.match(n))
    if any(map(_SCHEDULING.match, wanted)):
        found.evidence.append("the GPU's scheduling node is kept from containers")
    return kept
