"""Which pod and container a cgroup belongs to, and where a pod's cgroup is.

Covers cgroup v1 and v2, the systemd and cgroupfs drivers, kind/k3d nesting, static pods, and runtimes
that disagree with the kubelet about the driver. A path seen from inside a cgroup namespace names no
pod: the answer then is UNKNOWN with the reason, never a guess.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from edgeagent.hostroot import HostRoot

# Inode of the initial cgroup namespace: PROC_CGROUP_INIT_INO in include/linux/proc_ns.h.
INITIAL_CGROUP_NAMESPACE = 0xEFFFFFFB

_UID = r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"
# The outermost pod: kubepods, then whatever levels, then pod<uid> as the end of a segment.
_POD = re.compile(rf"(?:^|[/-])kubepods\b.*?[/-]pod(?P<uid>{_UID})(?=\.slice|[/:]|$)")
_CONTAINER = re.compile(r"(?:^|[^0-9a-f])([0-9a-f]{64})(?![0-9a-f])")
_KUBEPODS_DIR = re.compile(r"^(?:kubepods|(?:[a-z0-9]+-)*kubepods\.slice)$")

_QOS = ("", "besteffort", "burstable")
_V1_CONTROLLERS = ("systemd", "memory", "pids", "devices", "cpu,cpuacct", "cpu", "cpuset")
_MAX_CONTAINER_DEPTH = 8
_MAX_ROOT_DEPTH = 5
_ROOT_RESCAN_S = 30.0


class OwnerKind(str, Enum):
    POD = "pod"
    HOST = "host"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CgroupOwner:
    """Whom a cgroup belongs to. `pod_uid` is dashed (static pods: 32 hex digits), `container_id` 64 hex
    digits or None; `reason` says why an UNKNOWN is one."""

    kind: OwnerKind
    pod_uid: str | None = None
    container_id: str | None = None
    reason: str | None = None


HOST = CgroupOwner(OwnerKind.HOST)


def unknown(reason: str) -> CgroupOwner:
    return CgroupOwner(OwnerKind.UNKNOWN, reason=reason)


def parse_path(path: str) -> CgroupOwner:
    """The owner of one cgroup path as in /proc/PID/cgroup (the part after the second colon)."""
    pod = _POD.search(path)
    if pod is not None:
        container = _CONTAINER.search(path, pod.end())
        uid = pod.group("uid").replace("_", "-")
        return CgroupOwner(OwnerKind.POD, uid, container.group(1) if container else None)
    if path == "/.." or path.startswith("/../"):
        return unknown(
            "seen from inside a cgroup namespace; the agent needs the host's (hostPID, privileged)"
        )
    return HOST


def parse_proc_cgroup(text: str) -> CgroupOwner:
    """The owner of a process from the text of its /proc/PID/cgroup.

    Controllers that are not delegated stay at the root, so one line that names a pod is enough; lines
    that name different pods make it UNKNOWN.
    """
    owners: set[CgroupOwner] = set()
    lines = 0
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3 or not fields[2].startswith("/"):
            continue
        lines += 1
        owners.add(parse_path(fields[2]))
    if not lines:
        return unknown("no cgroup is listed")
    pods = {o.pod_uid for o in owners if o.kind is OwnerKind.POD}
    if len(pods) > 1:
        return unknown("its cgroup controllers name different pods")
    if pods:
        containers = {o.container_id for o in owners if o.container_id}
        return CgroupOwner(OwnerKind.POD, pods.pop(), containers.pop() if len(containers) == 1 else None)
    return next((o for o in owners if o.kind is OwnerKind.UNKNOWN), HOST)


def in_cgroup_namespace(host: HostRoot) -> bool:
    """True when this process sees cgroup paths relative to a namespace of its own."""
    try:
        link = os.readlink(host.path("/proc/self/ns/cgroup"))
    except OSError:
        return False
    return link != f"cgroup:[{INITIAL_CGROUP_NAMESPACE}]"


class PodCgroups:
    """Finds pods' cgroup directories below `cgroup_root` (a host path). Thread-safe.

    A pod's directory is found with at most a few stat calls: the places where kubepods trees hang are
    searched once and again at most every 30 s when a pod is missed.
    """

    def __init__(
        self,
        host: HostRoot,
        cgroup_root: str = "/sys/fs/cgroup",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._cgroup_root = cgroup_root.rstrip("/") or "/"
        self._clock = clock
        self._lock = threading.Lock()
        self._roots: tuple[str, ...] = ()
        self._scanned_at: float | None = None
        self._found: dict[str, str] = {}

    @property
    def is_v2(self) -> bool:
        return self._host.exists(f"{self._cgroup_root}/cgroup.controllers")

    def pod_dir(self, pod_uid: str) -> str | None:
        """Host path of the pod's cgroup directory, or None where there is none (any more)."""
        with self._lock:
            known = self._found.get(pod_uid)
            if known is not None:
                if self._is_dir(known):
                    return known
                del self._found[pod_uid]
            roots = self._known_roots(rescan=False)
            path = self._search(roots, pod_uid)
            if path is None and self._rescan_due():
                path = self._search(self._known_roots(rescan=True), pod_uid)
            if path is not None:
                self._found[pod_uid] = path
            return path

    def pod_alive(self, pod_uid: str) -> bool | None:
        """Whether the pod's cgroup still stands (it goes about a second after the pod's end). None:
        no kubepods tree can be seen, so nothing can be said."""
        if self.pod_dir(pod_uid) is not None:
            return True
        with self._lock:
            return False if self._known_roots(rescan=False) else None

    def containers(self, pod_uid: str) -> dict[str, tuple[int, ...]]:
        """PIDs of each container of the pod that has a cgroup, by container id (the sandbox's pause
        container included). Empty for an unknown pod; a container without processes has ()."""
        pod_dir = self.pod_dir(pod_uid)
        if pod_dir is None:
            return {}
        found: dict[str, tuple[int, ...]] = {}
        for name in self._host.listdir(pod_dir):
            m = _CONTAINER.search(name)
            path = f"{pod_dir}/{name}"
            if m is not None and self._is_dir(path):
                found[m.group(1)] = tuple(sorted(set(self._pids(path, 0))))
        return found

    def container_dir(self, pod_uid: str, container_id: str) -> str | None:
        """Host path of a container's cgroup directory."""
        pod_dir = self.pod_dir(pod_uid)
        if pod_dir is None:
            return None
        for name in self._host.listdir(pod_dir):
            if container_id in name and self._is_dir(f"{pod_dir}/{name}"):
                return f"{pod_dir}/{name}"
        return None

    # -- below: called with the lock held where they touch caches -----------------------------------

    def _pids(self, path: str, depth: int) -> Iterator[int]:
        for line in (self._host.read_text(f"{path}/cgroup.procs") or "").split():
            if line.isdigit() and line != "0":  # 0: a process outside our PID namespace
                yield int(line)
        if depth >= _MAX_CONTAINER_DEPTH:
            return
        for name in self._subdirs(path):
            yield from self._pids(f"{path}/{name}", depth + 1)

    def _search(self, roots: tuple[str, ...], pod_uid: str) -> str | None:
        for root in roots:
            for path in pod_dir_candidates(root, pod_uid):
                if self._is_dir(path):
                    return path
        return None

    def _rescan_due(self) -> bool:
        return self._scanned_at is None or self._clock() - self._scanned_at >= _ROOT_RESCAN_S

    def _known_roots(self, rescan: bool) -> tuple[str, ...]:
        if rescan or self._scanned_at is None or (not self._roots and self._rescan_due()):
            self._scanned_at = self._clock()
            self._roots = tuple(self._scan_roots())
        return self._roots

    def _scan_roots(self) -> Iterator[str]:
        """kubepods trees, nearest to the top first."""
        if self.is_v2:
            bases = [self._cgroup_root]
        else:
            bases = [f"{self._cgroup_root}/{c}" for c in _V1_CONTROLLERS]
            bases = [b for b in bases if self._is_dir(b)] or [self._cgroup_root]
        level = bases
        for _ in range(_MAX_ROOT_DEPTH):
            deeper: list[str] = []
            for parent in level:
                for name in self._subdirs(parent):
                    path = f"{parent}/{name}"
                    if _KUBEPODS_DIR.match(name):
                        yield path
                        if name == "kubepods":  # the doubled form: /kubepods/kubepods
                            deeper.append(path)
                    elif "pod" not in name:  # never into pods: what runs there is not ours to read
                        deeper.append(path)
            level = deeper

    def _subdirs(self, path: str) -> list[str]:
        try:
            with os.scandir(self._host.path(path)) as entries:
                return sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
        except OSError:
            return []

    def _is_dir(self, path: str) -> bool:
        return self._host.path(path).is_dir()


def pod_dir_candidates(kubepods_root: str, pod_uid: str) -> Iterator[str]:
    """Where the kubelet puts the pod below a kubepods root, for either driver and every QoS class."""
    name = kubepods_root.rpartition("/")[2]
    if name.endswith(".slice"):
        stem = name.removesuffix(".slice")
        uid = pod_uid.replace("-", "_")
        for qos in _QOS:
            level = f"{stem}-{qos}" if qos else stem
            parent = f"{kubepods_root}/{level}.slice" if qos else kubepods_root
            yield f"{parent}/{level}-pod{uid}.slice"
    else:
        for qos in _QOS:
            yield f"{kubepods_root}/{qos}/pod{pod_uid}" if qos else f"{kubepods_root}/pod{pod_uid}"
