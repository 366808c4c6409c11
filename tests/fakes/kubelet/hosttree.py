"""The node's /proc, cgroups and pod log directories under a root, as a container runtime makes them.

Fake process numbers lie above the largest that Linux gives out, so nobody can signal a real process
by mistake.
"""

from __future__ import annotations

import itertools
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

STYLES = ("systemd-v2", "cgroupfs-v2", "systemd-v1", "cgroupfs-v1", "kind-v2")
_V1_CONTROLLERS = ("memory", "cpu,cpuacct", "devices", "pids")
_FIRST_PID = 5_000_001  # the kernel's own limit is 4,194,304


class HostTree:
    """Writes what the kernel would show. `style`: which cgroup driver and version, see STYLES."""

    def __init__(self, root: Path, style: str = "systemd-v2") -> None:
        if style not in STYLES:
            raise ValueError(f"style must be one of {STYLES}, not {style!r}")
        self.root = root
        self.style = style
        self.v2 = style.endswith("-v2")
        self._pids = itertools.count(_FIRST_PID)
        cgroup = root / "sys/fs/cgroup"
        cgroup.mkdir(parents=True, exist_ok=True)
        if self.v2:
            (cgroup / "cgroup.controllers").write_text("cpuset cpu io memory hugetlb pids rdma misc\n")
            (cgroup / "cgroup.procs").touch()
        (root / "proc").mkdir(exist_ok=True)
        self.boot()

    def boot(self) -> None:
        """A new boot ID."""
        boot_id = self.root / "proc/sys/kernel/random/boot_id"
        boot_id.parent.mkdir(parents=True, exist_ok=True)
        boot_id.write_text(f"{uuid.uuid4()}\n")

    # Cgroups. A "cgroup" is a path as /proc/<pid>/cgroup shows it.

    def pod_cgroup(self, uid: str, qos: str) -> str:
        systemd_uid = uid.replace("-", "_")
        if self.style.startswith("systemd"):
            if qos == "guaranteed":
                return f"/kubepods.slice/kubepods-pod{systemd_uid}.slice"
            return f"/kubepods.slice/kubepods-{qos}.slice/kubepods-{qos}-pod{systemd_uid}.slice"
        if self.style.startswith("kind"):
            base = "/kubelet.slice/kubelet-kubepods.slice"
            if qos == "guaranteed":
                return f"{base}/kubelet-kubepods-pod{systemd_uid}.slice"
            return f"{base}/kubelet-kubepods-{qos}.slice/kubelet-kubepods-{qos}-pod{systemd_uid}.slice"
        return f"/kubepods/pod{uid}" if qos == "guaranteed" else f"/kubepods/{qos}/pod{uid}"

    def leaf_cgroup(self, pod_cgroup: str, container_id: str) -> str:
        cgroupfs = self.style.startswith("cgroupfs")
        return f"{pod_cgroup}/{container_id if cgroupfs else f'cri-containerd-{container_id}.scope'}"

    def directories(self, cgroup: str) -> list[Path]:
        """Where a cgroup lies: once, or once a controller (v1)."""
        top = self.root / "sys/fs/cgroup"
        below = cgroup.lstrip("/")
        return [top / below] if self.v2 else [top / c / below for c in (*_V1_CONTROLLERS, "systemd")]

    def make_cgroup(self, cgroup: str) -> None:
        for directory in self.directories(cgroup):
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "cgroup.procs").touch()
            if self.v2:
                (directory / "cgroup.kill").touch()
                (directory / "cgroup.events").write_text("populated 1\nfrozen 0\n")

    def set_procs(self, cgroup: str, pids: Iterable[int]) -> None:
        text = "".join(f"{pid}\n" for pid in pids)
        for directory in self.directories(cgroup):
            (directory / "cgroup.procs").write_text(text)

    def remove_cgroup(self, cgroup: str) -> None:
        for directory in self.directories(cgroup):
            shutil.rmtree(directory, ignore_errors=True)

    # Processes.

    def new_pid(self) -> int:
        return next(self._pids)

    def make_process(
        self,
        pid: int,
        *,
        cgroup: str,
        comm: str,
        command: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        maps: Iterable[str] = (),
        devices: Iterable[str] = (),
        pid_in_container: int = 1,
    ) -> None:
        """/proc/<pid>: `maps` are the files mapped, `devices` the nodes seen under /dev."""
        proc = self.root / "proc" / str(pid)
        proc.mkdir()
        if self.v2:
            lines = [f"0::{cgroup}"]
        else:
            lines = [f"{n}:{c}:{cgroup}" for n, c in enumerate((*_V1_CONTROLLERS, "name=systemd"), 1)][::-1]
        (proc / "cgroup").write_text("\n".join(lines) + "\n")
        (proc / "environ").write_bytes(b"".join(f"{k}={v}".encode() + b"\0" for k, v in (env or {}).items()))
        (proc / "comm").write_text(comm[:15] + "\n")
        (proc / "cmdline").write_bytes(b"".join(a.encode() + b"\0" for a in command or (comm,)))
        started = 100_000 + pid % 100_000
        after_comm = f"S 1 {pid} {pid} 0 -1 4194560 100 0 0 0 10 5 0 0 20 0 1 0 {started} 10485760 2560"
        (proc / "stat").write_text(f"{pid} ({comm[:15]}) {after_comm} " + " ".join(["0"] * 28) + "\n")
        (proc / "status").write_text(
            f"Name:\t{comm[:15]}\nState:\tS (sleeping)\nTgid:\t{pid}\nPid:\t{pid}\nPPid:\t1\n"
            f"Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nNSpid:\t{pid}\t{pid_in_container}\n"
            "VmRSS:\t   10240 kB\nThreads:\t1\n"
        )
        (proc / "maps").write_text("")
        for path in ("/usr/bin/app", *maps):
            self.map_file(pid, path)
        for device in devices:
            node = proc / "root" / device.lstrip("/")
            node.parent.mkdir(parents=True, exist_ok=True)
            node.touch()

    def map_file(self, pid: int, path: str) -> None:
        """The process maps one more file (a library was loaded)."""
        maps = self.root / "proc" / str(pid) / "maps"
        n = maps.read_text().count("\n")
        start = 0x7F0000000000 + n * 0x10000
        with maps.open("a") as f:
            f.write(
                f"{start:012x}-{start + 0x1000:012x} r-xp 00000000 08:01 {1000 + n}{path.rjust(len(path) + 20)}\n"
            )

    def remove_process(self, pid: int) -> None:
        shutil.rmtree(self.root / "proc" / str(pid), ignore_errors=True)

    # Logs.

    def log_directory(self, namespace: str, name: str, uid: str) -> Path:
        return self.root / "var/log/pods" / f"{namespace}_{name}_{uid}"

    def make_log(
        self, namespace: str, name: str, uid: str, container: str, container_id: str, restarts: int
    ) -> None:
        """The log of one start, and the link under /var/log/containers that names it."""
        log = self.log_directory(namespace, name, uid) / container / f"{restarts}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        links = self.root / "var/log/containers"
        links.mkdir(parents=True, exist_ok=True)
        link = links / f"{name}_{namespace}_{container}-{container_id}.log"
        link.symlink_to(Path("/") / log.relative_to(self.root))

    def remove_logs(self, namespace: str, name: str, uid: str) -> None:
        shutil.rmtree(self.log_directory(namespace, name, uid), ignore_errors=True)
        for link in (self.root / "var/log/containers").glob(f"{name}_{namespace}_*.log"):
            try:
                if uid in str(link.readlink()):
                    link.unlink()
            except FileNotFoundError:
                pass  # another pod's thread was faster
