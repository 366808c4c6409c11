"""Where the host's file system is: every path that touches the host is resolved here.

With `hostRoot: /host` (agent in a pod) or a generated tree (tests), `/proc/1/cgroup` means
`/host/proc/1/cgroup`. Nothing else in the agent joins paths to a root by hand.
"""

from __future__ import annotations

import os
from pathlib import Path

MAX_TEXT_BYTES = 256 * 1024
MAX_LINKS = 40  # as the kernel follows


class HostRoot:
    """A host tree. `root` is an absolute directory; paths given to the methods are the host's own."""

    __slots__ = ("root",)

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = Path(root).absolute()

    def __repr__(self) -> str:
        return f"HostRoot({str(self.root)!r})"

    def path(self, host_path: str) -> Path:
        """Where `host_path` (absolute, as the host names it) lies in this process's file system."""
        return self.root / host_path.lstrip("/")

    def resolve(self, host_path: str) -> str:
        """`host_path` with symbolic links followed inside this tree: an absolute link (as
        /etc/nvpmodel.conf on Jetson) means the host's root, not this process's. A loop, or what does
        not exist, is returned as far as it could be followed."""
        done: list[str] = []
        left = [p for p in reversed(host_path.split("/")) if p not in ("", ".")]
        links = 0
        while left:
            part = left.pop()
            if part == "..":
                del done[-1:]
                continue
            try:
                target = os.readlink(self.root.joinpath(*done, part))
            except (OSError, ValueError):
                done.append(part)
                continue
            links += 1
            if links > MAX_LINKS:
                return "/" + "/".join([*done, part, *reversed(left)])
            if target.startswith("/"):
                done.clear()
            left.extend(p for p in reversed(target.split("/")) if p not in ("", "."))
        return "/" + "/".join(done)

    def exists(self, host_path: str) -> bool:
        return os.path.exists(self.path(host_path))

    def read_bytes(self, host_path: str, max_bytes: int = MAX_TEXT_BYTES) -> bytes | None:
        """The first `max_bytes` of a file, or None where it is absent, unreadable, or would block.

        Opened non-blocking: a FIFO or a stuck sysfs attribute answers None and cannot stall a poll.
        """
        try:
            fd = os.open(self.path(host_path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            return None
        try:
            chunks: list[bytes] = []
            left = max_bytes
            while left > 0:
                chunk = os.read(fd, min(left, 65536))
                if not chunk:
                    break
                chunks.append(chunk)
                left -= len(chunk)
            return b"".join(chunks)
        except OSError:
            return None
        finally:
            os.close(fd)

    def read_text(self, host_path: str, max_bytes: int = MAX_TEXT_BYTES) -> str | None:
        """As read_bytes, decoded as UTF-8 with replacement; a trailing NUL or newline is kept."""
        data = self.read_bytes(host_path, max_bytes)
        return None if data is None else data.decode("utf-8", "replace")

    def listdir(self, host_path: str) -> list[str]:
        """Sorted names in a directory; empty where it is absent or unreadable."""
        try:
            return sorted(os.listdir(self.path(host_path)))
        except OSError:
            return []
