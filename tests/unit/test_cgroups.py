"""Field case I3: which pod a cgroup path belongs to, for every shape seen in the field."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.hostroot import HostRoot
from edgeagent.node.cgroups import (
    INITIAL_CGROUP_NAMESPACE,
    OwnerKind,
    PodCgroups,
    in_cgroup_namespace,
    parse_path,
    parse_proc_cgroup,
    pod_dir_candidates,
)

UID = "6c1d8ae2-5b3f-4a6e-9f30-0d1e2f3a4b5c"
UID_ = UID.replace("-", "_")
OTHER = "11111111-2222-3333-4444-555555555555"
STATIC = "36b6f7e8d9c0a1b2c3d4e5f60718293a"
C = "ab" * 32
D = "cd" * 32
K3D = f"/docker/{D}/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-"
BE = "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod"

PODS = {
    "v2 systemd besteffort": (f"0::{BE}{UID_}.slice/cri-containerd-{C}.scope", UID, C),
    "v2 systemd burstable": (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice/cri-containerd-{C}.scope",
        UID,
        C,
    ),
    "guaranteed, v1, a line per controller": (
        "\n".join(
            f"{i}:{c}:/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{C}.scope"
            for i, c in enumerate(("hugetlb", "memory", "cpu,cpuacct", "name=systemd"), 1)
        ),
        UID,
        C,
    ),
    "v1 cgroupfs burstable": (f"11:blkio:/kubepods/burstable/pod{UID}/{C}", UID, C),
    "v2 cgroupfs besteffort": (f"0::/kubepods/besteffort/pod{UID}/{C}", UID, C),
    "v2 cgroupfs guaranteed": (f"0::/kubepods/pod{UID}/{C}", UID, C),
    "runtime not on systemd": (
        f"1:name=systemd:/system.slice/containerd.service/kubepods-burstable-pod{UID_}.slice:cri-containerd:{C}",
        UID,
        C,
    ),
    "the same without the service": (
        f"0::/kubepods-besteffort-pod{UID_}.slice:cri-containerd:{C}", UID, C,
    ),
    "static pod, systemd": (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC}.slice/cri-containerd-{C}.scope",
        STATIC,
        C,
    ),
    "static pod, cgroupfs": (f"0::/kubepods/burstable/pod{STATIC}/{C}", STATIC, C),
    "kind and k3d": (
        f"0::{K3D}besteffort.slice/kubelet-kubepods-besteffort-pod{UID_}.slice/cri-containerd-{C}.scope",
        UID,
        C,
    ),
    "docker scope": (f"0::{BE}{UID_}.slice/docker-{C}.scope", UID, C),
    "crio scope": (f"0::{BE}{UID_}.slice/crio-{C}.scope", UID, C),
    "crio scope with child": (f"0::{BE}{UID_}.slice/crio-{C}.scope/container", UID, C),
    "doubled": (f"0::/kubepods/kubepods/besteffort/pod{UID}/{C}", UID, C),
    "no container yet": (f"0::{BE}{UID_}.slice", UID, None),
    "pod in a pod is the outer one's": (
        f"0::{BE}{UID_}.slice/cri-containerd-{C}.scope/kubepods/pod{OTHER}/{D}", UID, C,
    ),
    "docker in a pod": (f"0::/kubepods/pod{UID}/{C}/docker/{D}", UID, C),
    "undelegated controllers at the root": (f"3:misc:/\n2:cpu:/kubepods/pod{UID}/{C}\n0::/", UID, C),
    "below a custom cgroup root": (f"0::/custom/kubepods/burstable/pod{UID}/{C}", UID, C),
}  # fmt: skip

HOSTS = {
    "K3s itself": "0::/system.slice/k3s.service",
    "K3s's shims": f"0::/system.slice/k3s.service/{C}",
    "user": "0::/user.slice/user-1000.slice/session-2.scope",
    "init": "0::/init.scope",
    "root": "0::/",
    "buildkit": "0::/docker/buildkit/abcdef",
    "docker container": f"0::/docker/{C}",
    "kubepods itself": "0::/kubepods.slice/kubepods-burstable.slice",
    "a service that is called pod": f"0::/system.slice/pod{UID}.service",
    "uid too long": f"0::/kubepods/pod{UID}0/{C}",
    "uid in capitals": f"0::/kubepods/pod{UID.upper()}/{C}",
}

UNKNOWN = {
    "namespaced scope": f"0::/../cri-containerd-{C}.scope",
    "namespaced parent": "0::/..",
    "namespaced cousin": "0::/../../../system.slice/k3s.service",
    "empty": "",
    "garbage": "hello\n\n::\n",
    "two pods": f"2:cpu:/kubepods/pod{UID}/{C}\n1:memory:/kubepods/pod{OTHER}/{D}",
}


@pytest.mark.parametrize(("text", "uid", "container"), PODS.values(), ids=PODS)
def test_pod_paths_name_pod_and_container(text: str, uid: str, container: str | None) -> None:
    owner = parse_proc_cgroup(text)
    assert (owner.kind, owner.pod_uid, owner.container_id) == (OwnerKind.POD, uid, container)


@pytest.mark.parametrize("text", HOSTS.values(), ids=HOSTS)
def test_host_paths_are_no_pod(text: str) -> None:
    assert parse_proc_cgroup(text).kind is OwnerKind.HOST


@pytest.mark.parametrize("text", UNKNOWN.values(), ids=UNKNOWN)
def test_what_cannot_be_known_says_why(text: str) -> None:
    owner = parse_proc_cgroup(text)
    assert owner.kind is OwnerKind.UNKNOWN
    assert owner.reason
    assert owner.pod_uid is None


def test_controllers_that_disagree_on_the_container_still_name_the_pod() -> None:
    owner = parse_proc_cgroup(f"2:cpu:/kubepods/pod{UID}/{C}\n1:memory:/kubepods/pod{UID}/{D}")
    assert (owner.pod_uid, owner.container_id) == (UID, None)


@given(st.text(max_size=400))
@settings(max_examples=150)
def test_any_text_gives_an_answer(text: str) -> None:
    owner = parse_proc_cgroup(text)
    assert (owner.kind is OwnerKind.POD) == (owner.pod_uid is not None)


@given(
    st.from_regex(r"(/[a-z0-9.-]{1,12}){0,3}", fullmatch=True),
    st.sampled_from(["", "besteffort", "burstable"]),
    st.uuids(),
    st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    st.booleans(),
)
@settings(max_examples=100)
def test_every_path_the_kubelet_makes_is_read_back(
    prefix: str, qos: str, uid: object, container: str, systemd: bool
) -> None:
    root = f"{prefix}/kubepods.slice" if systemd else f"{prefix}/kubepods"
    path = list(pod_dir_candidates(root, str(uid)))[["", "besteffort", "burstable"].index(qos)]
    owner = parse_path(f"{path}/" + (f"cri-containerd-{container}.scope" if systemd else container))
    assert (owner.pod_uid, owner.container_id) == (str(uid), container)


# -- directories -------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_cgroup(root: Path, path: str, pids: tuple[int, ...] = ()) -> None:
    directory = root / path.lstrip("/")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "cgroup.procs").write_text("".join(f"{p}\n" for p in pids))


SYSTEMD = f"kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UID_}.slice"
DIRS = {
    "v2 systemd": (True, SYSTEMD, f"cri-containerd-{C}.scope"),
    "v2 systemd guaranteed": (True, f"kubepods.slice/kubepods-pod{UID_}.slice", f"cri-containerd-{C}.scope"),
    "v2 cgroupfs": (True, f"kubepods/burstable/pod{UID}", C),
    "v2 cgroupfs guaranteed": (True, f"kubepods/pod{UID}", C),
    "v1 systemd": (False, f"systemd/{SYSTEMD}", f"cri-containerd-{C}.scope"),
    "v1 cgroupfs, memory only": (False, f"memory/kubepods/besteffort/pod{UID}", C),
    "k3d": (
        True,
        f"{K3D[1:]}burstable.slice/kubelet-kubepods-burstable-pod{UID_}.slice",
        f"cri-containerd-{C}.scope",
    ),
    "doubled": (True, f"kubepods/kubepods/besteffort/pod{UID}", C),
}  # fmt: skip


@pytest.mark.parametrize(("v2", "pod", "container"), DIRS.values(), ids=DIRS)
def test_a_pods_directory_and_pids_are_found(tmp_path: Path, v2: bool, pod: str, container: str) -> None:
    base = tmp_path / "sys/fs/cgroup"
    make_cgroup(base, pod)
    make_cgroup(base, f"{pod}/{container}", (41, 42))
    make_cgroup(base, f"{pod}/{container}/nested", (43, 0))
    if v2:
        (base / "cgroup.controllers").write_text("cpu memory\n")
    cgroups = PodCgroups(HostRoot(tmp_path))
    assert cgroups.pod_dir(UID) == f"/sys/fs/cgroup/{pod}"
    assert cgroups.pod_alive(UID) is True
    assert cgroups.containers(UID) == {C: (41, 42, 43)}
    assert cgroups.container_dir(UID, C) == f"/sys/fs/cgroup/{pod}/{container}"
    assert cgroups.pod_alive(OTHER) is False
    assert cgroups.containers(OTHER) == {}


def test_a_pod_that_ends_is_not_alive(tmp_path: Path) -> None:
    base = tmp_path / "sys/fs/cgroup"
    make_cgroup(base, f"kubepods/pod{UID}")
    cgroups = PodCgroups(HostRoot(tmp_path))
    assert cgroups.pod_alive(UID) is True
    (base / f"kubepods/pod{UID}/cgroup.procs").unlink()
    (base / f"kubepods/pod{UID}").rmdir()
    assert cgroups.pod_alive(UID) is False


def test_without_any_kubepods_tree_nothing_is_claimed(tmp_path: Path) -> None:
    assert PodCgroups(HostRoot(tmp_path)).pod_alive(UID) is None


def test_a_new_kubepods_tree_is_found_within_half_a_minute(tmp_path: Path) -> None:
    clock = Clock()
    base = tmp_path / "sys/fs/cgroup"
    make_cgroup(base, "kubepods")
    cgroups = PodCgroups(HostRoot(tmp_path), clock=clock)
    assert cgroups.pod_alive(UID) is False
    make_cgroup(base, SYSTEMD)
    assert cgroups.pod_alive(UID) is False, "a miss does not search the whole tree each time"
    clock.now += 31
    assert cgroups.pod_alive(UID) is True


@pytest.mark.parametrize(
    ("link", "namespaced"),
    [(f"cgroup:[{INITIAL_CGROUP_NAMESPACE}]", False), ("cgroup:[4026532999]", True), (None, False)],
    ids=["initial", "own", "no such file"],
)
def test_a_cgroup_namespace_is_recognised(tmp_path: Path, link: str | None, namespaced: bool) -> None:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    if link is not None:
        os.symlink(link, tmp_path / "proc/self/ns/cgroup")
    assert in_cgroup_namespace(HostRoot(tmp_path)) is namespaced
