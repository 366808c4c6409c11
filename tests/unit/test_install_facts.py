"""What install.sh and doctor read off a host: K3s, NVIDIA's runtime, the unit, pods on a GPU (case I2)."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from edgeagent.doctor.containerd import has_base_template, nvidia_runtime, runtime_advice, template
from edgeagent.doctor.install_facts import facts, pods_on_gpu
from edgeagent.hostroot import HostRoot
from edgeagent.node.k3s import find_k3s
from tests.fakes.kubelet.hosttree import HostTree

CONTAINERD_1 = 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]\n'
CONTAINERD_2 = "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\n"
NVIDIA_1 = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes."nvidia"]\n'
NVIDIA_2 = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.'nvidia']\n"
EXPERIMENTAL = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.'nvidia-experimental']\n"
CDI_RUNTIME = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.'nvidia-cdi']\n"


def host(
    root: Path,
    *,
    version: str = "v1.30.4+k3s1",
    rendered: str | None = CONTAINERD_1,
    runtime: str | None = None,
    role: str = "server",
) -> HostRoot:
    """A K3s tree: its binary says `version`."""
    data = root / "var/lib/rancher/k3s"
    (data / "agent/etc/containerd").mkdir(parents=True)
    if role == "server":
        (data / "server").mkdir()
        (data / "server/token").touch()
    if rendered is not None:
        (data / "agent/etc/containerd/config.toml").write_text(rendered)
    k3s = root / "usr/local/bin/k3s"
    k3s.parent.mkdir(parents=True)
    k3s.write_text(f"#!/bin/sh\necho 'k3s version {version} (abc)'\n")
    k3s.chmod(0o755)
    if runtime is not None:
        binary = root / runtime.lstrip("/")
        binary.parent.mkdir(parents=True, exist_ok=True)
        binary.touch()
    return HostRoot(root)


USR, TOOLKIT, LOCAL = (
    f"{d}/nvidia-container-runtime" for d in ("/usr/bin", "/usr/local/nvidia/toolkit", "/usr/local/bin")
)


@pytest.mark.parametrize(
    ("rendered", "runtime", "advice"),
    [
        pytest.param(
            CONTAINERD_1, None, "is not installed: install nvidia-container-toolkit", id="no runtime"
        ),
        pytest.param(CONTAINERD_1, USR, "K3s has not seen it", id="(a) binary there, not rendered"),
        pytest.param(CONTAINERD_1, TOOLKIT, "K3s has not seen it", id="GPU operator's toolkit"),
        pytest.param(CONTAINERD_1, LOCAL, "install.sh --configure-k3s", id="where K3s does not look"),
        pytest.param(CONTAINERD_1 + NVIDIA_1, USR, None, id="(b) containerd 1 knows it"),
        pytest.param(CONTAINERD_2 + NVIDIA_2, USR, None, id="(c) containerd 2 knows it"),
        pytest.param(CONTAINERD_2 + EXPERIMENTAL, USR, "K3s has not seen it", id="another nvidia runtime"),
        pytest.param(CONTAINERD_2 + CDI_RUNTIME, USR, "K3s has not seen it", id="the CDI runtime only"),
    ],
)
def test_runtime_advice(tmp_path: Path, rendered: str, runtime: str | None, advice: str | None) -> None:
    h = host(tmp_path, rendered=rendered, runtime=runtime)
    k3s = find_k3s(h)
    said = runtime_advice(nvidia_runtime(h, k3s), k3s)
    if advice is None:
        assert said is None
    else:
        assert said is not None
        assert advice in said


@pytest.mark.parametrize(
    ("rendered", "version", "table"),
    [
        (CONTAINERD_1, "v1.30.4+k3s1", '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]'),
        (CONTAINERD_2, "v1.33.5+k3s1", "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]"),
    ],
    ids=["containerd 1", "containerd 2"],
)
def test_template(tmp_path: Path, rendered: str, version: str, table: str) -> None:
    """It begins with K3s's own template, so that nothing K3s adds is lost, and names this containerd's table."""
    h = host(tmp_path, rendered=rendered, version=version, runtime=LOCAL)
    k3s = find_k3s(h)
    assert k3s is not None
    text = template(k3s, nvidia_runtime(h, k3s))
    assert text is not None
    assert text.startswith('{{ template "base" . }}\n')
    assert table in text
    assert f'BinaryName = "{LOCAL}"' in text


@pytest.mark.parametrize("runtime", [None, USR], ids=["none", "K3s finds it"])
def test_no_template_where_none_is_needed(tmp_path: Path, runtime: str | None) -> None:
    h = host(tmp_path, runtime=runtime)
    k3s = find_k3s(h)
    assert k3s is not None
    assert template(k3s, nvidia_runtime(h, k3s)) is None


@pytest.mark.parametrize(
    ("version", "has"),
    [
        ("v1.23.17+k3s1", False),
        ("v1.24.16+k3s1", False),
        ("v1.24.17+k3s1", True),
        ("v1.27.4+k3s1", False),
        ("v1.28.0+k3s1", False),
        ("v1.28.1+k3s1", True),
        ("v1.36.2+k3s1", True),
        (None, True),
    ],
)
def test_base_template(version: str | None, has: bool) -> None:
    assert has_base_template(version) is has


@pytest.mark.parametrize(
    ("version", "unit", "policies"),
    [
        ("v1.29.9+k3s1", "1", ""),
        ("v1.30.0+k3s1", "1", "yes"),
        ("v1.35.4+k3s1", "1", "yes"),
        ("v1.36.0+k3s1", "64", "yes"),
        ("v1.37.1+k3s2", "64", "yes"),
    ],
)
def test_unit_and_policies_follow_the_version(tmp_path: Path, version: str, unit: str, policies: str) -> None:
    found = facts(host(tmp_path, version=version))
    assert (found["MEMORY_UNIT"], found["POLICIES"]) == (unit, policies)


def test_no_k3s(tmp_path: Path) -> None:
    found = facts(HostRoot(tmp_path))
    assert found["K3S_ROLE"] == ""
    assert found["CDI"] == "unknown"


@pytest.mark.parametrize("style", ["systemd-v2", "cgroupfs-v1"])
def test_pods_on_gpu(tmp_path: Path, style: str) -> None:
    """Pods with a GPU node open; a host process with one, and a pod without, are none."""
    tree = HostTree(tmp_path, style)
    on_gpu, other = "11111111-2222-3333-4444-555555555555", "99999999-2222-3333-4444-555555555555"
    for pid, cgroup, target in (
        (101, tree.leaf_cgroup(tree.pod_cgroup(on_gpu, "burstable"), "a" * 64), "/dev/nvidia0"),
        (102, tree.leaf_cgroup(tree.pod_cgroup(other, "besteffort"), "b" * 64), "/dev/null"),
        (103, "/system.slice/gdm.service", "/dev/nvidia0"),
    ):
        tree.make_process(pid, cgroup=cgroup, comm="app")
        fds = tmp_path / f"proc/{pid}/fd"
        fds.mkdir()
        os.symlink(target, fds / "3")
    assert pods_on_gpu(HostRoot(tmp_path)) == {on_gpu}


def test_shell_output_is_quoted(tmp_path: Path) -> None:
    """Whatever a host's files hold, the installer's shell reads values, never commands."""
    host(tmp_path, runtime=LOCAL)
    (tmp_path / "etc/rancher/k3s").mkdir(parents=True)
    (tmp_path / "etc/rancher/k3s/config.yaml").write_text("data-dir: /x';touch${IFS}/tmp/owned;'\n")
    done = subprocess.run(
        [sys.executable, "-m", "edgeagent.doctor.install_facts", str(tmp_path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for word in shlex.split(done.stdout):
        key, equals, _ = word.partition("=")
        assert equals
        assert key.isupper() or key.replace("_", "").replace("3", "").isupper()


def test_needs_the_standard_library_only(tmp_path: Path) -> None:
    """It runs before anything is installed: without site-packages."""
    code = "import sys; from edgeagent.doctor.install_facts import main; sys.exit(main([sys.argv[1]]))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(tmp_path)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
