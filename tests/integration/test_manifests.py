"""The shipped manifests: valid for Kubernetes, and every example runs on a node as its comment says."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from edgeagent.cli.admission_policies import manifest
from edgeagent.config import load_text
from edgeagent.sharing.names import resource_names
from tests.fakes.admission import Policy
from tests.fakes.agent import AgentProcess
from tests.fakes.kubelet import ContainerSpec, Pod, StandInKubelet
from tests.fakes.nvml import FakeNvml, Mig
from tests.fakes.nvml.host import nvidia_host

MANIFESTS = Path(__file__).resolve().parents[2] / "k3s-manifests"
EXAMPLES = sorted((MANIFESTS / "examples").glob("*.yaml"))
OVERLAYS = ["base", "overlays/x86", "overlays/jetson", "overlays/mps"]
KUBERNETES = "1.36"


def documents(text: str) -> list[dict[str, Any]]:
    return [d for d in yaml.safe_load_all(text) if d is not None]


def problem_of(document: dict[str, Any]) -> str | None:
    """Against Kubernetes's own schema; unknown fields are errors."""
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as e:
        return f"{document['kind']} {document['metadata']['name']}: {e.message}"
    return None


# --- what is valid ---


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_is_valid(path: Path) -> None:
    found = documents(path.read_text())
    assert found
    assert [p for p in map(problem_of, found) if p] == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_builds_and_is_valid(overlay: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, for its kustomize")
    done = subprocess.run(
        ["kubectl", "kustomize", str(MANIFESTS / overlay)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = documents(done.stdout)
    assert [p for p in map(problem_of, found) if p] == []
    kinds = [d["kind"] for d in found]
    for kind in (
        "DaemonSet",
        "ServiceAccount",
        "ClusterRole",
        "RuntimeClass",
        "NetworkPolicy",
        "PriorityClass",
    ):
        assert kind in kinds
    (daemon_set,) = (d for d in found if d["kind"] == "DaemonSet")
    pod = daemon_set["spec"]["template"]["spec"]
    assert pod["hostPID"] is True
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    (config_map,) = (d for d in found if d["kind"] == "ConfigMap")
    assert {"name": "config", "configMap": {"name": config_map["metadata"]["name"]}} in pod["volumes"]
    config = load_text(config_map["data"]["agent.yaml"], "agent.yaml")
    written = {m["mountPath"] for m in pod["containers"][0]["volumeMounts"] if not m.get("readOnly")}
    for path in (config.state_dir, config.run_dir, config.kubelet.cdi_dir, config.kubelet.device_plugin_dir):
        assert f"{config.host_root}{path}" in written, "what the agent writes is mounted writable"


def test_own_node_component_is_valid() -> None:
    found = documents((MANIFESTS / "components/own-node/policy.yaml").read_text())
    assert [p for p in map(problem_of, found) if p] == []


ADMISSION = {
    "volcano-1mi": manifest(resource_names("volcano")),
    "volcano-64mi": manifest(resource_names("volcano", unit_mib=64)),
    "volcano-1mi-runtime-class": manifest(resource_names("volcano"), runtime_class=True),
    "hami-1mi": manifest(resource_names("hami")),
    "hami-64mi": manifest(resource_names("hami", unit_mib=64)),
}


@pytest.mark.parametrize("name", ADMISSION)
def test_admission_files_are_generated(name: str) -> None:
    """They are what the command prints (run it again, with its options in the file's name, if not)."""
    path = MANIFESTS / f"admission/{name}.yaml"
    assert path.read_text() == ADMISSION[name]
    assert [p for p in map(problem_of, documents(path.read_text())) if p] == []


def test_every_admission_file_is_known() -> None:
    assert {p.stem for p in (MANIFESTS / "admission").glob("*.yaml")} == set(ADMISSION)


# --- what runs ---


def pod_template(document: dict[str, Any]) -> dict[str, Any] | None:
    spec = document.get("spec", {})
    if document["kind"] == "Pod":
        return dict(spec)
    return spec["template"]["spec"] if "template" in spec else None


def agent_config(text: str) -> dict[str, Any]:
    """The configuration in the comment that begins with "On the node (agent.yaml)"."""
    m = re.search(r"^# On the node \(agent\.yaml\).*:\n((?:#  .*\n)+)", text, re.MULTILINE)
    return yaml.safe_load(re.sub(r"^# ?", "", m.group(1), flags=re.MULTILINE)) if m else {}


class Node:
    """A node with two cards (or one with MIG), a kubelet and the real agent."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._open = ExitStack()
        work = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="ex-")))
        sharing = config.get("sharing", {})
        self.nvml = FakeNvml(work / "nvml")
        if sharing.get("mode") == "mig":
            self.nvml.mig(self.nvml.add("a100-40"), Mig(gi=7), Mig(gi=8))
        else:
            self.nvml.add("l4")
            self.nvml.add("l4")
        nvidia_host(work / "r", self.nvml)
        self.kubelet = self._open.enter_context(
            StandInKubelet(work / "r", cdi=sharing.get("binding") != "early")
        )
        config = {"gpus": {"pollSeconds": 0.5}, **config}
        self.agent = self._open.enter_context(AgentProcess(work / "r", work / "w", config, self.nvml.env()))
        self.agent.wait_ready()
        self.agent.wait_snapshot(lambda s: s["kubeletConnected"])

    def close(self) -> None:
        self._open.close()


@pytest.fixture(scope="module")
def node_with() -> Iterator[Callable[[dict[str, Any]], Node]]:
    """One node for each configuration."""
    nodes: dict[str, Node] = {}

    def get(config: dict[str, Any]) -> Node:
        key = repr(config)
        if key not in nodes:
            nodes[key] = Node(config)
        return nodes[key]

    yield get
    for node in nodes.values():
        node.close()


def container_spec(c: dict[str, Any]) -> ContainerSpec:
    limits = {k: str(v) for k, v in c.get("resources", {}).get("limits", {}).items()}
    once = "fetch" in c["name"]
    return ContainerSpec(
        c["name"], limits, sidecar=c.get("restartPolicy") == "Always", run_s=0.01 if once else None
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path: Path, node_with: Callable[[dict[str, Any]], Node]) -> None:
    """Its pods start on a node that is configured as its comment says, with the GPU they asked for."""
    text = path.read_text()
    node = node_with(agent_config(text))
    k = node.kubelet
    templates = [t for t in map(pod_template, documents(text)) if t is not None and "containers" in t]
    assert templates
    for i, template in enumerate(templates):
        pod = Pod(
            f"{path.stem}-{i}",
            [container_spec(c) for c in template["containers"]],
            init=[container_spec(c) for c in template.get("initContainers", [])],
        )
        asked = {r: n for r, n in pod.requests().items() if "/" in r}
        # The scheduler's part: the pod comes when the node shows the resources.
        k.wait_for(lambda asked=asked: all(k.allocatable.get(r, 0) >= n for r, n in asked.items()))
        k.run(pod)
        k.wait_for(lambda pod=pod: pod.running)
        for container in pod.containers.values():
            if not any("/" in r for r in container.spec.limits):
                assert not any("nvidia" in n for n in container.device_nodes)
                continue
            if template.get("runtimeClassName") == "nvidia":
                assert container.env["NVIDIA_VISIBLE_DEVICES"] in [g.uuid for g in node.nvml.gpus]
            else:
                assert any(n.startswith("/dev/nvidia") for n in container.device_nodes)
            _limits_kept(node, pod, container.name, container.spec.amounts())
        k.delete(pod)
        k.wait_for(lambda pod=pod: pod.gone)


def _limits_kept(node: Node, pod: Pod, container: str, asked: dict[str, int]) -> None:
    def share(s: dict[str, Any]) -> dict[str, Any] | None:
        return next(
            (c for c in s["containers"] if (c["podUid"], c["container"]) == (pod.uid, container)), None
        )

    memory = next((r for r in asked if re.search(r"/(vgpu-memory|gpumem)", r)), None)
    seen = share(node.agent.wait_snapshot(share))
    assert seen is not None
    if memory is not None:
        unit = int(m.group(1)) if (m := re.search(r"-(\d+)mi$", memory)) else 1
        assert seen["memoryMiB"] == asked[memory] * unit
        cores = next((n for r, n in asked.items() if r.endswith("cores")), None)
        assert seen.get("coresPct") == cores


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_passes_admission(path: Path) -> None:
    """The shipped policies let the shipped examples through."""
    text = path.read_text()
    sharing = agent_config(text).get("sharing", {})
    names = resource_names(
        sharing.get("names", "volcano"),
        prefix=sharing.get("prefix"),
        unit_mib=sharing.get("memoryUnitMiB", 1),
    )
    (policy, _) = documents(manifest(names))[:2]
    checks = Policy(policy)
    for document in documents(text):
        if pod_template(document) is not None and document["kind"] != "PersistentVolumeClaim":
            assert checks.refusals(document) == []


def test_examples_show_every_resource_and_mode() -> None:
    text = "\n".join(p.read_text() for p in EXAMPLES)
    names = [
        resource_names("volcano"),
        resource_names("hami"),
        resource_names("custom", prefix="gpu.example.com"),
    ]
    wanted = {n for r in names for n in (r.memory, r.cores)} | {names[0].number, names[1].number}
    wanted |= {
        "volcano.sh/vgpu-memory-64mi",
        "nvidia.com/gpu:",
        "nvidia.com/gpu.shared",
        "nvidia.com/mig-1g.5gb",
    }
    assert [w for w in sorted(wanted) if w not in text] == []
