"""Which pod and container a process belongs to, its name, and whether a PID is still the same process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from edgeagent.errors import NodeError
from edgeagent.hostroot import HostRoot
from edgeagent.node.cgroups import CgroupOwner, in_cgroup_namespace, parse_proc_cgroup, unknown

_MAX_CGROUP_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One process of the host. `start_ticks` (field 22 of /proc/PID/stat) with the PID is its identity
    until the next reboot."""

    pid: int
    name: str
    start_ticks: int
    owner: CgroupOwner


class Processes:
    """Reads /proc under the host root. A process that vanishes while it is read is None, no error."""

    def __init__(self, host: HostRoot) -> None:
        self._host = host
        self._namespaced: bool | None = None

    @property
    def cannot_attribute(self) -> str | None:
        """Why no process can be attributed to a pod from here; None when it can."""
        if self._namespaced is None:
            self._namespaced = in_cgroup_namespace(self._host)
        if self._namespaced:
            return (
                "the agent is in a cgroup namespace of its own; run it as a host service or a privileged pod"
            )
        return None

    def find(self, pid: int) -> ProcessInfo | None:
        stat = self._host.read_text(f"/proc/{pid}/stat", 4096)
        identity = parse_stat(stat) if stat else None
        if identity is None:
            return None
        text = self._host.read_text(f"/proc/{pid}/cgroup", _MAX_CGROUP_BYTES)
        if text is None or (not text and not self._host.exists(f"/proc/{pid}")):
            return None
        name, start_ticks = identity
        reason = self.cannot_attribute
        owner = unknown(reason) if reason else parse_proc_cgroup(text)
        return ProcessInfo(pid, name, start_ticks, owner)

    def find_all(self, pids: Iterable[int]) -> dict[int, ProcessInfo]:
        """As find, for those that are still there."""
        return {pid: info for pid in set(pids) if (info := self.find(pid)) is not None}

    def kill(self, expected: ProcessInfo, signal_number: int = signal.SIGKILL) -> bool:
        """Signals the process if it still is what it was: same start time, same pod and container.

        The pidfd is opened first and the identity checked after, so a PID that was given to another
        process in between is never signalled. False: it is gone or is another one now.
        Raises NodeError where signalling is not permitted or the kernel has no pidfds.
        """
        return kill_if_same(expected, self.find, signal_number)


def parse_stat(text: str) -> tuple[str, int] | None:
    """(name, start time in ticks) from /proc/PID/stat; the name may hold blanks and parentheses."""
    before, found, after = text.rpartition(")")
    _, opened, name = before.partition("(")
    fields = after.split()
    # After the name come fields 3, 4, …: starttime is field 22.
    if not found or not opened or len(fields) < 20 or not fields[19].isdigit():
        return None
    return name, int(fields[19])


def kill_if_same(
    expected: ProcessInfo, find: Callable[[int], ProcessInfo | None], signal_number: int = signal.SIGKILL
) -> bool:
    """See Processes.kill; `find` looks a PID up afresh."""
    try:
        fd = os.pidfd_open(expected.pid)
    except ProcessLookupError:
        return False
    except OSError as e:
        raise NodeError(f"cannot open pid {expected.pid} for signalling: {e.strerror}") from e
    try:
        if find(expected.pid) != expected:
            return False
        signal.pidfd_send_signal(fd, signal_number)
    except ProcessLookupError:
        return False
    except OSError as e:
        raise NodeError(f"cannot signal pid {expected.pid} ({expected.name}): {e.strerror}") from e
    finally:
        os.close(fd)
    return True
