"""Processes, host facts, K3s facts and pod names from generated host trees."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edgeagent.hostroot import HostRoot
from edgeagent.node.cgroups import OwnerKind
from edgeagent.node.host import Host, parse_cpu_list
from edgeagent.node.k3s import containerd_major, find_k3s, parse_version
from edgeagent.node.podlogs import PodLogs
from edgeagent.node.processes import Processes, kill_if_same, parse_stat

UID = "6c1d8ae2-5b3f-4a6e-9f30-0d1e2f3a4b5c"
C = "ab" * 32


def write(root: Path, path: str, text: str) -> Path:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def stat_line(pid: int, name: str, start: int) -> str:
    return (
        f"{pid} ({name}) S 1 1 1 0 -1 4194560 1 0 0 0 5 6 0 0 20 0 8 0 {start} 1000 200 18446744073709551615"
    )


def make_process(root: Path, pid: int, name: str, cgroup: str, start: int = 777) -> None:
    write(root, f"/proc/{pid}/stat", stat_line(pid, name, start))
    write(root, f"/proc/{pid}/cgroup", cgroup)


# -- processes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (stat_line(7, "python3", 55), ("python3", 55)),
        (stat_line(7, "a) R (b", 55), ("a) R (b", 55)),
        (stat_line(7, "", 55), ("", 55)),
        ("7 (x) S 1", None),
        ("", None),
        ("garbage", None),
    ],
    ids=["plain", "parentheses in the name", "no name", "short", "empty", "garbage"],
)
def test_stat(text: str, expected: tuple[str, int] | None) -> None:
    assert parse_stat(text) == expected


def test_a_process_is_joined_to_its_pod(tmp_path: Path) -> None:
    make_process(tmp_path, 4100, "python3", f"0::/kubepods/burstable/pod{UID}/{C}")
    make_process(tmp_path, 900, "Xorg", "0::/user.slice/user-1000.slice/session-2.scope")
    processes = Processes(HostRoot(tmp_path))
    found = processes.find_all([4100, 4101, 900, 4100])
    assert set(found) == {4100, 900}, "a vanished process is skipped, the rest stays"
    assert (found[4100].owner.pod_uid, found[4100].owner.container_id) == (UID, C)
    assert (found[900].owner.kind, found[900].name) == (OwnerKind.HOST, "Xorg")


def test_a_process_that_goes_between_two_reads_is_skipped(tmp_path: Path) -> None:
    write(tmp_path, "/proc/5/stat", stat_line(5, "x", 1))
    assert Processes(HostRoot(tmp_path)).find(5) is None


def test_from_inside_a_cgroup_namespace_nothing_is_attributed(tmp_path: Path) -> None:
    make_process(tmp_path, 7, "x", f"0::/kubepods/burstable/pod{UID}/{C}")
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    os.symlink("cgroup:[4026532000]", tmp_path / "proc/self/ns/cgroup")
    processes = Processes(HostRoot(tmp_path))
    assert processes.cannot_attribute
    found = processes.find(7)
    assert found is not None
    assert (found.owner.kind, found.owner.pod_uid) == (OwnerKind.UNKNOWN, None)


def test_this_process_is_found_on_the_real_host() -> None:
    found = Processes(HostRoot("/")).find(os.getpid())
    assert found is not None
    assert found.start_ticks > 0


def test_only_the_very_process_is_signalled() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        processes = Processes(HostRoot("/"))
        info = processes.find(child.pid)
        assert info is not None
        other_start = replace(info, start_ticks=info.start_ticks + 1)
        other_pod = replace(info, owner=replace(info.owner, kind=OwnerKind.POD, pod_uid=UID))
        assert not processes.kill(other_start)
        assert not processes.kill(other_pod)
        assert not kill_if_same(info, lambda _: None)
        assert child.poll() is None
        assert processes.kill(info, signal.SIGTERM)
        assert child.wait(10) == -signal.SIGTERM
        assert not processes.kill(info)
    finally:
        child.kill()
        child.wait()


# -- host --------------------------------------------------------------------------------------------


def test_host_facts(tmp_path: Path) -> None:
    write(tmp_path, "/proc/sys/kernel/hostname", "box-7\n")
    write(tmp_path, "/proc/sys/kernel/osrelease", "5.15.148-tegra\n")
    write(tmp_path, "/proc/sys/kernel/random/boot_id", "b-1\n")
    write(
        tmp_path, "/proc/meminfo", "MemTotal:       16384000 kB\nMemFree: 1 kB\nMemAvailable:    8192000 kB\n"
    )
    write(tmp_path, "/proc/loadavg", "0.42 0.30 0.20 1/234 5678\n")
    write(tmp_path, "/usr/lib/os-release", 'NAME=Ubuntu\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\n')
    (tmp_path / "etc").mkdir()
    os.symlink("../usr/lib/os-release", tmp_path / "etc/os-release")
    write(tmp_path, "/sys/devices/system/cpu/online", "0-7\n")
    write(tmp_path, "/proc/device-tree/model", "NVIDIA Jetson AGX Orin Developer Kit\0")
    host = Host(HostRoot(tmp_path))
    assert (host.hostname, host.kernel, host.boot_id) == ("box-7", "5.15.148-tegra", "b-1")
    assert (host.os, host.cpu_count) == ("Ubuntu 22.04.5 LTS", 8)
    assert host.hardware == "NVIDIA Jetson AGX Orin Developer Kit"
    assert host.memory_mib() == (16000, 8000)
    assert host.load_1m() == 0.42


def test_an_empty_host_has_no_facts_and_no_errors(tmp_path: Path) -> None:
    host = Host(HostRoot(tmp_path))
    assert host.hostname
    assert (host.os, host.kernel, host.boot_id, host.hardware) == (None, None, None, None)
    assert (host.memory_mib(), host.load_1m()) == ((None, None), None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3", 4), ("0", 1), ("0-1,4-5,7", 5), ("", None), ("x", None), ("0-", None), ("0-99999999", None)],
)
def test_cpu_lists(text: str, expected: int | None) -> None:
    assert parse_cpu_list(text) == expected


# -- K3s ---------------------------------------------------------------------------------------------


def make_k3s(root: Path, role: str, version: str = "v1.33.5+k3s1", config: str = "version = 3\n") -> None:
    data = "/var/lib/rancher/k3s"
    write(root, f"{data}/agent/kubelet.kubeconfig", "")
    write(root, f"{data}/agent/etc/containerd/config.toml", config)
    if role == "server":
        write(root, f"{data}/server/token", "x")
        write(root, "/etc/rancher/k3s/k3s.yaml", "")
    binary = write(root, "/usr/local/bin/k3s", f"#!/bin/sh\necho 'k3s version {version} (abc)'\n")
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("role", ["server", "agent"])
def test_k3s_facts(tmp_path: Path, role: str) -> None:
    make_k3s(tmp_path, role)
    facts = find_k3s(HostRoot(tmp_path))
    assert facts is not None
    assert (facts.role, facts.version, facts.containerd_major) == (role, "v1.33.5+k3s1", 2)
    assert facts.containerd_template is not None
    assert facts.containerd_template.endswith("/config-v3.toml.tmpl")
    assert facts.kubeconfig == "/var/lib/rancher/k3s/agent/kubelet.kubeconfig"
    assert (facts.admin_kubeconfig is not None) == (role == "server")


def test_a_data_directory_of_ones_own(tmp_path: Path) -> None:
    write(tmp_path, "/etc/rancher/k3s/config.yaml", 'write-kubeconfig-mode: "0644"\ndata-dir: "/data/k3s"\n')
    write(tmp_path, "/data/k3s/agent/kubelet.kubeconfig", "")
    facts = find_k3s(HostRoot(tmp_path))
    assert facts is not None
    assert (facts.data_dir, facts.role, facts.version) == ("/data/k3s", "agent", None)


def test_no_k3s(tmp_path: Path) -> None:
    assert find_k3s(HostRoot(tmp_path)) is None


@pytest.mark.parametrize(
    ("config", "version", "expected"),
    [
        ("version = 3\n", None, 2),
        ("# File generated\nversion = 2\n", None, 1),
        ("# from an operator's old template\nversion = 2\n", "v1.33.0", 2),
        ("version = 2\n", "v1.30.4+k3s1", 1),
        (None, "v1.31.6+k3s1", 2),
        (None, "v1.31.5+k3s1", 1),
        (None, "v1.32.1+k3s1", 1),
        (None, "v1.32.2+k3s1", 2),
        (None, "v1.36.0+k3s1", 2),
        (None, None, None),
        ("", "nonsense", None),
    ],
)
def test_containerd_version(config: str | None, version: str | None, expected: int | None) -> None:
    assert containerd_major(config, version) == expected


def test_versions() -> None:
    assert parse_version("k3s version v1.33.5+k3s1 (abc)") == (1, 33, 5)
    assert parse_version("1.33.5") is None


# -- pod names ---------------------------------------------------------------------------------------


def test_names_come_from_the_kubelets_log_directories(tmp_path: Path) -> None:
    (tmp_path / f"var/log/pods/shop_cam-0_{UID}").mkdir(parents=True)
    (tmp_path / "var/log/containers").mkdir(parents=True)
    (tmp_path / f"var/log/containers/cam-0_shop_my-infer-{C}.log").touch()
    logs = PodLogs(HostRoot(tmp_path))
    assert str(logs.pod(UID)) == "shop/cam-0"
    found = logs.container(C)
    assert found is not None
    assert (str(found.pod), found.container) == ("shop/cam-0", "my-infer")
    static = "36b6f7e8d9c0a1b2c3d4e5f60718293a"
    (tmp_path / f"var/log/pods/kube-system_static-box_{static}").mkdir()
    assert str(logs.pod(static)) == "kube-system/static-box", "a pod that has just arrived is found at once"
    assert logs.container("cd" * 32) is None
