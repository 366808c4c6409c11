"""The namespaces of a stand-in machine, and what was changed on it.

The root is this machine's, copied on write: `upper` holds what the box changed. /run, the kubelet's
directory and /dev are the box's own; it has no network unless asked for, and process numbers of its
own, so that ending it ends all that was started in it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STANDIN_SYSTEMCTL = Path(__file__).with_name("systemctl.py")

# Done as root of the new namespaces, before anything runs in the box. $B: the box's directory.
_MOUNTS = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs $B/dev
mkdir $B/dev/shm $B/dev/pts
for node in null zero full random urandom tty; do
    touch $B/dev/$node
    mount --bind /dev/$node $B/dev/$node
done
mount -t overlay overlay -o lowerdir=/,upperdir=$B/upper,workdir=$B/work $B/root
mount --bind $B/dev $B/root/dev
mount --bind $B/dev $B/root/dev
mount --move $B/dev $B/root/dev
mount -t proc proc $B/root/proc
mount --rbind /sys $B/root/sys
mount -t tmpfs tmpfs $B/root/tmp
mount --bind $B/run $B/root/run
mkdir -p $B/root/var/lib/kubelet $B/root/mnt
mount --bind $B/kubelet $B/root/var/lib/kubelet
mount --bind $SHARE $B/root/mnt
for directory in $READ_ONLY; do
    mount --bind $B/root/$directory $B/root/$directory
    mount -o remount,ro,bind $B/root/$directory
done
echo ready
exec sleep 600
"""


def unsupported() -> str | None:
    """Why this machine cannot have such boxes, or None."""
    if os.geteuid() != 0:
        return "needs root: mount namespaces and overlays"
    for tool in ("unshare", "nsenter", "mount", "chroot"):
        if shutil.which(tool) is None:
            return f"needs {tool}"
    tried = subprocess.run(["unshare", "-m", "-n", "-p", "-f", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "namespaces cannot be made here"


@dataclass(frozen=True)
class Changes:
    """Files that the box has and this machine has not (or has otherwise): path -> (mode, content)."""

    files: Mapping[str, tuple[int, str]]

    def paths(self, below: str = "/") -> list[str]:
        return sorted(p for p in self.files if p.startswith(below))


class Box:
    """`share` appears as /mnt; `kubelet` as /var/lib/kubelet. `read_only`: directories of the box."""

    def __init__(
        self,
        directory: Path,
        share: Path,
        *,
        kubelet: Path | None = None,
        network: bool = False,
        read_only: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self.upper = directory / "upper"
        self.run_dir = directory / "run"
        for name in ("upper", "work", "root", "run", "dev", "kubelet"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        self.kubelet_dir = kubelet or directory / "kubelet"
        self._share = share
        self._network = network
        self._read_only = read_only
        self._holder: subprocess.Popen[str] | None = None
        self._init_pid = 0
        self.env: dict[str, str] = {}
        (self.run_dir / "systemd/system").mkdir(parents=True, exist_ok=True)
        # Not the virtual environment's link: the checkout may lie below /tmp, which the box has its own of.
        python = os.path.realpath(sys.executable)
        self.write("/usr/local/sbin/systemctl", f"#!{python}\n{STANDIN_SYSTEMCTL.read_text()}", 0o755)

    # -- before it starts --

    def write(self, path: str, text: str, mode: int = 0o644) -> Path:
        """A file of the box, made before it starts."""
        assert self._holder is None, "the box runs: use sh()"
        target = self.upper / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)
        return target

    def k3s(
        self,
        version: str = "v1.33.5+k3s1",
        *,
        role: str = "server",
        containerd: str = "version = 3\n",
        data: str = "",
    ) -> None:
        """K3s's files, as an installation of this version leaves them."""
        data_dir = data or "/var/lib/rancher/k3s"
        self.write(
            "/usr/local/bin/k3s",
            f'#!/bin/sh\necho "$@" >>/run/k3s-calls\necho "k3s version {version} (x)"\n',
            0o755,
        )
        if role == "server":
            self.write(f"{data_dir}/server/token", "secret\n", 0o600)
            (self.upper / data_dir.lstrip("/") / "server/manifests").mkdir(exist_ok=True)
        self.write(f"{data_dir}/agent/etc/containerd/config.toml", containerd)

    # -- life --

    def __enter__(self) -> Box:
        env = {
            "PATH": os.environ["PATH"],
            "B": str(self.directory),
            "SHARE": str(self._share),
            "READ_ONLY": " ".join(p.lstrip("/") for p in self._read_only),
        }
        script = _MOUNTS.replace("$B/kubelet ", f"{self.kubelet_dir} ")
        flags = ["-m", "-p", "-f", "--kill-child", *([] if self._network else ["-n"])]
        self._holder = subprocess.Popen(
            ["unshare", *flags, "sh", "-c", script],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        said = self._holder.stdout.readline()
        if said.strip() != "ready":
            rest = said + self._holder.stdout.read()
            raise AssertionError(f"the box did not start: {rest}")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        self._init_pid = int(children.split()[0])
        return self

    def __exit__(self, *exc: object) -> None:
        if self._holder is not None:
            os.kill(self._init_pid, signal.SIGKILL)  # the first process of its namespace: all end with it
            self._holder.wait(10)
            assert self._holder.stdout is not None
            self._holder.stdout.close()
            self._holder = None

    # -- use --

    def _enter(self, argv: Sequence[str]) -> list[str]:
        namespaces = ["-m", "-p", *([] if self._network else ["-n"])]
        return [
            "nsenter", "-t", str(self._init_pid), *namespaces,
            "chroot", str(self.directory / "root"), "env", "-i", *(f"{k}={v}" for k, v in self._env().items()), *argv,
        ]  # fmt: skip

    def _env(self) -> dict[str, str]:
        python = str(Path(os.path.realpath(sys.executable)).parent)
        path = f"/usr/local/sbin:/usr/local/bin:{python}:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", **self.env}

    def run(self, *argv: str, timeout_s: float = 110.0) -> subprocess.CompletedProcess[str]:
        """Runs a command in the box; standard output and error come together."""
        return subprocess.run(
            self._enter(argv), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip

    def start(self, *argv: str) -> subprocess.Popen[str]:
        """As run, but does not wait; the process is a session of its own."""
        return subprocess.Popen(
            self._enter(argv),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def sh(self, script: str) -> str:
        """A shell script in the box; its output. AssertionError when it fails."""
        done = self.run("sh", "-c", script)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def read(self, path: str) -> str:
        return self.sh(f"cat {path}")

    def exists(self, path: str) -> bool:
        return self.run("test", "-e", path).returncode == 0

    @property
    def systemctl_calls(self) -> list[str]:
        log = self.run_dir / "standin-systemd/calls"
        return log.read_text().splitlines() if log.exists() else []

    def changes(
        self, *, times: bool = False, skip: Iterable[str] = ("/tmp", "/var/tmp", "/root/.cache")
    ) -> Changes:
        """What differs from this machine; with `times` the modification times count as well."""
        found: dict[str, tuple[int, str]] = {}
        for path in sorted(self.upper.rglob("*")):
            name = "/" + str(path.relative_to(self.upper))
            if name.startswith(tuple(skip)):
                continue
            stat = path.lstat()
            if path.is_symlink():
                content = f"-> {path.readlink()}"
            elif path.is_file():
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            elif path.is_dir():
                continue
            else:
                content = "removed" if stat.st_rdev == 0 else "node"
            found[name] = (stat.st_mode & 0o7777, f"{content} {stat.st_mtime_ns}" if times else content)
        return Changes(found)
