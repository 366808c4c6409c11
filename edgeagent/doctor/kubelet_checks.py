"""Between the agent and the kubelet: sockets, registration, what the node offers, how memory is counted."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from edgeagent.doctor.examination import Examination
from edgeagent.doctor.findings import Finding, fail, ok, skip, warn
from edgeagent.errors import NodeError
from edgeagent.node.apiserver import ApiStatusError
from edgeagent.node.unified_memory import kubelet_memory
from edgeagent.sharing import units

_JOURNAL = "journalctl -u edgeagent -n 50"
_POLICY_FILE = "server/manifests/edgeagent-admission.yaml"


def agent(x: Examination) -> Iterator[Finding]:
    for problem in x.config_problems:
        yield fail(problem, "edgeagent check-config says when it is right; then systemctl restart edgeagent")
    s = x.snapshot
    if s is None:
        yield fail(x.agent_problem or "the agent does not answer", f"systemctl start edgeagent; {_JOURNAL}")
        return
    yield ok(f"edgeagent {s['agentVersion']} runs as node {s['node']} of site {s['site']}")
    if x.config_path is None:
        yield ok("no configuration file: defaults")


def kubelet_sockets(x: Examination) -> Iterator[Finding]:
    plugin_dir = x.config.kubelet.device_plugin_dir
    if not x.host.exists(plugin_dir):
        yield fail(
            f"{plugin_dir} is not there: no kubelet has run on this host",
            f"systemctl start {x.k3s_service}; where it is elsewhere: kubelet.devicePluginDir",
        )
        return
    if not os.access(x.host.path(plugin_dir), os.R_OK | os.W_OK | os.X_OK):
        yield fail(f"{plugin_dir} cannot be written", "run this, and the agent, as root")
    for path, what in (
        (f"{plugin_dir}/kubelet.sock", "device plugins"),
        (x.config.kubelet.pod_resources_socket, "podresources"),
    ):
        problem = _socket_problem(x.host.path(path))
        if problem is None:
            yield ok(f"{path} answers ({what})")
        else:
            yield fail(f"{path} {problem}", f"systemctl status {x.k3s_service}")


def _socket_problem(path: Path) -> str | None:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return "is not there"
    if not stat.S_ISSOCK(mode):
        return "is no socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except PermissionError:
            return "may not be used: run this as root"
        except OSError as e:
            return f"does not answer: {e.strerror or e}"
    return None


def registration(x: Examination) -> Iterator[Finding]:
    s = x.snapshot
    if s is None:
        yield skip("the agent does not run")
        return
    resources = s.get("resources", [])
    if not resources:
        why = next(iter(s.get("reasons", [])), "nothing to offer yet")
        yield fail(f"no resource is offered: {why}")
    for r in resources:
        if r.get("problem"):
            yield fail(r["problem"])
        elif not r["registered"]:
            yield fail(
                f"{r['name']} is not registered with the kubelet",
                f"is K3s running? systemctl status {x.k3s_service}",
            )
        elif r["healthy"] == 0:
            yield fail(
                f"{r['name']}: none of {r['total']} is healthy", "edgeagent status says who is sick and why"
            )
        else:
            yield ok(f"{r['name']}: {r['healthy']} of {r['total']} healthy, {r['allocated']} in use")


def allocatable(x: Examination) -> Iterator[Finding]:
    s, node = x.snapshot, x.node
    if s is None:
        yield skip("the agent does not run")
        return
    if node is None:
        problem = x.api_problem or f"there is no node {x.node_name} (kubernetes.nodeName sets the name)"
        yield (skip if x.api is None else warn)(f"cannot ask the API server: {problem}")
        return
    shown = (node.get("status") or {}).get("allocatable") or {}
    for r in s.get("resources", []):
        if r.get("problem") or not r["registered"]:
            continue
        count = quantity(shown.get(r["name"], "0"))
        if count == r["healthy"]:
            yield ok(f"node {x.node_name}: {r['name']} {count}")
        elif count == 0:
            yield fail(
                f"node {x.node_name} does not show {r['name']} (the agent offers {r['healthy']})",
                "it takes up to 10 s; if it stays so: systemctl restart edgeagent",
            )
        else:
            yield warn(
                f"node {x.node_name} shows {r['name']} {count}, the agent offers {r['healthy']}",
                "look again in 10 s",
            )
    offered = {r["name"] for r in s.get("resources", [])}
    for name, value in shown.items():
        if name not in offered and name.startswith(("nvidia.com/", "volcano.sh/vgpu")) and quantity(value):
            yield warn(
                f"node {x.node_name} also shows {name}, which this agent does not offer",
                "two device plugins for one GPU promise it twice: remove the other",
            )


def quantity(text: str) -> int:
    """A device count as the API writes it: "100", "24k"."""
    factor = {"k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20}
    for suffix, times in factor.items():
        if text.endswith(suffix) and text[: -len(suffix)].isdigit():
            return int(text[: -len(suffix)]) * times
    return int(text) if text.isdigit() else 0


def memory_unit(x: Examination) -> Iterator[Finding]:
    shared = [g for g in x.gpus.gpus if g.mode == "shared"]
    if not shared:
        yield skip("no GPU in mode shared")
        return
    version, unit = x.cluster_version, x.unit_mib
    if version is None:
        yield warn(
            "the cluster's version is not known, so the memory unit cannot be judged",
            "set sharing.clusterVersion",
        )
    sized = units.memory_units([g.usable_mib for g in shared], unit, version)
    if sized.problem:
        yield fail(sized.problem)
    elif sized.warning:
        yield warn(sized.warning)
    else:
        yield ok(f"{sized.count} units of {unit} MiB suit Kubernetes {version or 'of unknown version'}")
    if x.names.rewritten:
        yield from _policy(x)


def _policy(x: Examination) -> Iterator[Finding]:
    """Whether authors' MiB are rewritten into the node's units."""
    from edgeagent.admission import REWRITE_NAME

    fix = "edgeagent admission-policies | kubectl apply -f -"
    wanted = f"{x.names.memory_in_mib} is offered as {x.names.memory}"
    if x.api is None or x.api_problem is not None:
        there = x.k3s is not None and x.host.exists(f"{x.k3s.data_dir}/{_POLICY_FILE}")
        yield ok(f"{wanted}; {_POLICY_FILE} is there") if there else skip(f"{wanted}: {x.api_problem}")
        return
    path = f"/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies/{REWRITE_NAME}"
    try:
        text = str(x.api.request("GET", path).get("spec"))
    except ApiStatusError as e:
        if e.status == 404:
            yield fail(f"{wanted}, and nothing rewrites it: pods that ask for MiB stay Pending", fix)
        else:
            yield skip(f"{wanted}: the policy cannot be looked at: {e}")
        return
    except NodeError as e:
        yield skip(f"{wanted}: {e}")
        return
    if x.names.memory.replace("/", "~1") in text:
        yield ok(f"{wanted}; the admission policy {REWRITE_NAME} rewrites it")
    else:
        yield fail(f"{wanted}, but the policy {REWRITE_NAME} rewrites it into another unit", fix)


def node_memory(x: Examination) -> Iterator[Finding]:
    """RAM that GPU and pods share must not be promised twice."""
    unified = next((g for g in x.gpus.gpus if g.unified and g.mode == "shared"), None)
    if unified is None:
        yield skip("no GPU shares its memory with the host")
        return
    plan = kubelet_memory(unified.memory_total_mib, unified.usable_mib)
    mib = memory_mib((x.node or {}).get("status", {}).get("allocatable", {}).get("memory"))
    sentence = plan.sentence(mib)
    if mib is None:
        yield warn(f"the node's allocatable memory is not known; {sentence}")
    elif plan.promised_twice_mib(mib) > 0:
        what, _, fix = sentence.rpartition("; ")
        yield warn(what, fix)
    else:
        yield ok(sentence)


def memory_mib(text: str | None) -> int | None:
    """'16126340Ki' -> 15748."""
    factors = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 10**3, "M": 10**6, "G": 10**9, "": 1}
    if not text:
        return None
    digits = text.rstrip("KMGki")
    factor = factors.get(text[len(digits) :])
    return int(digits) * factor // 2**20 if digits.isdigit() and factor is not None else None
