"""Trouble in the kernel log: NVRM Xid lines, "fallen off the bus", nvgpu errors, and processes that the
kernel ended for lack of memory; each told once.

Reads /dev/kmsg (needs CAP_SYSLOG; where it is refused the rest of the agent works without) or, for
tests and captured logs, a plain file of lines. How far it got is kept in the state directory with the
boot id, so that a restart tells nothing twice.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import select
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeagent.gpus.model import GpuEvent, GpuEventKind
from edgeagent.hostroot import HostRoot

log = logging.getLogger(__name__)

FELL_OFF_THE_BUS = 79
STATE_NAME = "kernel-log.json"
_RECORD_BYTES = 16 * 1024
_LOOKAHEAD_LINES = 8
_FILE_POLL_S = 0.2
_KEYS = (b"NVRM", b"nvgpu", b"oom-kill:", b"NVIDIA GPU", b"fallen off the bus", b"installed in this system")

_PREFIX = re.compile(rb"^(\d+),(\d+),(\d+),[^;]*;")
_DMESG_TIME = re.compile(r"^(?:<\d+>)?\[\s*(\d+\.\d+)\]\s*")
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")
_XID = re.compile(
    r"NVRM: (?:GPU )?Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)[^)]*\): (?P<xid>\d{1,4})\b"
    r"(?:,?\s*pid='?(?P<pid>[^,']*)'?)?(?:,\s*name=(?P<name>[^,]*))?(?:[,:]?\s*(?P<text>.*))?$"
)
_GPU_AT = re.compile(r"NVRM: GPU at PCI:(?P<pci>[0-9a-fA-F:.]+): (?P<uuid>GPU-[0-9a-fA-F-]{36})")
_THE_GPU = re.compile(r"The NVIDIA GPU (?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d)")
_FALLEN = re.compile(r"fallen off the bus")
_FALLEN_ONE_LINE = re.compile(r"NVRM: GPU (?P<pci>[0-9a-fA-F:.]+): GPU has fallen off the bus")
_NVGPU = re.compile(r"nvgpu: (?P<device>\S+)\s+(?P<where>\S+?:\d+)\s+\[ERR\]\s+(?P<text>.*)$")
_OOM_KILL = re.compile(
    r"^oom-kill:.*?\btask_memcg=(?P<cgroup>[^,]*),task=(?P<name>.*),pid=(?P<pid>\d{1,9})\b"
)


def normalise_pci(address: str) -> str | None:
    """'PCI:0000:CB:00', '00000000:cb:00.0' and 'cb:00' -> '0000:cb:00.0'; None for anything else."""
    text = address.strip().lower().removeprefix("pci:")
    head, _, function = text.partition(".")
    parts = head.split(":")
    if len(parts) == 2:
        parts.insert(0, "0")
    try:
        domain, bus, device = (int(p, 16) for p in parts)
        func = int(function or "0", 16)
    except ValueError:
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}.{func:x}"


@dataclass(frozen=True, slots=True)
class KernelFinding:
    """One finding. `device` is a normalised PCI address, or the platform device's name on Tegra."""

    kind: GpuEventKind
    device: str
    xid: int | None = None
    pid: int | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class OomKill:
    """A process that the kernel ended for lack of memory. `cgroup` is a path as in /proc/PID/cgroup."""

    cgroup: str
    name: str
    pid: int


def oom_kill(message: str) -> OomKill | None:
    """The kernel's one-line summary of an OOM kill (since Linux 5.0)."""
    m = _OOM_KILL.search(message)
    return OomKill(m["cgroup"], m["name"][:64], int(m["pid"])) if m else None


class LineParser:
    """Kernel messages to findings. Keeps what the three-line "fallen off the bus" form spans."""

    def __init__(self) -> None:
        self._pending: str | None = None
        self._pending_lines = 0
        self.uuids: dict[str, str] = {}  # PCI address -> UUID as the driver itself printed it

    def feed(self, message: str) -> Iterator[KernelFinding]:
        """`message` is one record's text; it may hold several lines."""
        for line in message.splitlines():
            found = self._line(line)
            if found is not None:
                yield found

    def _line(self, line: str) -> KernelFinding | None:
        if (m := _XID.search(line)) and (pci := normalise_pci(m["pci"])):
            pid = (m["pid"] or "").strip()
            return KernelFinding(
                GpuEventKind.XID,
                pci,
                xid=int(m["xid"]),
                pid=int(pid) if pid.isdecimal() and pid.isascii() else None,
                detail=_detail(m["name"], m["text"]),
            )
        if (m := _GPU_AT.search(line)) and (pci := normalise_pci(m["pci"])):
            self.uuids[pci] = m["uuid"]
            return None
        if (m := _FALLEN_ONE_LINE.search(line)) and (pci := normalise_pci(m["pci"])):
            return KernelFinding(GpuEventKind.XID, pci, xid=FELL_OFF_THE_BUS, detail="fallen off the bus")
        if m := _THE_GPU.search(line):
            self._pending, self._pending_lines = normalise_pci(m["pci"]), 0
        if self._pending is not None:
            self._pending_lines += 1
            if _FALLEN.search(line):
                pci, self._pending = self._pending, None
                return KernelFinding(GpuEventKind.XID, pci, xid=FELL_OFF_THE_BUS, detail="fallen off the bus")
            if self._pending_lines > _LOOKAHEAD_LINES:
                self._pending = None
        if m := _NVGPU.search(line):
            text = f"{m['where']}: {m['text'].strip()}"
            return KernelFinding(GpuEventKind.DRIVER_ERROR, m["device"], detail=text[:300])
        return None


def _detail(name: str | None, text: str | None) -> str | None:
    name = (name or "").strip()
    parts = [f"process {name}" if name and "<unknown>" not in name else "", (text or "").strip()]
    return ", ".join(p for p in parts if p)[:300] or None


def parse_record(raw: bytes) -> tuple[int | None, float | None, str]:
    """(sequence, uptime in seconds, message) of one record of /dev/kmsg or one line of a plain log."""
    m = _PREFIX.match(raw)
    if m is None:
        text = raw.decode("utf-8", "replace").rstrip("\n")
        stamp = _DMESG_TIME.match(text)
        if stamp is None:
            return None, None, text
        return None, float(stamp.group(1)), text[stamp.end() :]
    body = raw[m.end() :].split(b"\n", 1)[0].decode("utf-8", "replace")
    message = _ESCAPE.sub(lambda e: chr(int(e.group(1), 16)), body)
    return int(m.group(2)), int(m.group(3)) / 1e6, message


def from_kernel(raw: bytes) -> bool:
    """Whether the kernel itself wrote a record: programs that write to /dev/kmsg get another facility,
    and must not be able to take a GPU away. Lines of plain logs carry none."""
    m = _PREFIX.match(raw)
    return m is None or int(m.group(1)) >> 3 == 0


class KernelLog:
    """The service that reads the kernel log. `resolve` maps a PCI address (or Tegra device name) to a
    UUID and answers None for what it does not know; it must not call the driver, which may hang just
    then. `on_event(event, age_s)` and `on_oom_kill` must be quick."""

    def __init__(
        self,
        host: HostRoot,
        state_dir: str | Path,
        resolve: Callable[[str], str | None],
        on_event: Callable[[GpuEvent, float], None],
        on_oom_kill: Callable[[OomKill], None] = lambda _: None,
        path: str = "/dev/kmsg",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = host.path(path)
        self._state_path = Path(state_dir) / STATE_NAME
        self._boot_id = (host.read_text("/proc/sys/kernel/random/boot_id") or "unknown").strip()
        self._resolve = resolve
        self._on_event = on_event
        self._on_oom_kill = on_oom_kill
        self._clock = clock
        self._parser = LineParser()
        self._told = self._load()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.problem: str | None = None

    def run(self, stop: threading.Event) -> None:
        """Reads until `stop`. Where the log cannot be read, says so once and does nothing."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as e:
            self.problem = f"cannot read {self._path}: {e.strerror}"
            log.info("kernel log is not read reason=%s", self.problem)
            stop.wait()
            return
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                self._follow_file(fd, stop)
            else:
                self._follow_device(fd, stop)
        finally:
            os.close(fd)
            os.close(self._wake_r)

    def wake(self) -> None:
        """Makes `run` look at its stop event."""
        try:
            os.write(self._wake_w, b"x")
        except OSError:
            pass  # full: it is awake already

    def _follow_device(self, fd: int, stop: threading.Event) -> None:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.register(self._wake_r, select.POLLIN)
        while not stop.is_set():
            try:
                raw = os.read(fd, _RECORD_BYTES)
            except BlockingIOError:
                if any(ready == self._wake_r for ready, _ in poller.poll()):
                    os.read(self._wake_r, 64)
                continue
            except OSError as e:
                if e.errno == errno.EPIPE:  # records were overwritten before we read them: go on
                    continue
                self.problem = f"cannot read {self._path}: {e.strerror}"
                log.warning("kernel log is no longer read reason=%s", self.problem)
                stop.wait()
                return
            if not raw:  # a FIFO without a writer, not a kernel log
                stop.wait(_FILE_POLL_S)
                continue
            self._record(raw, None)

    def _follow_file(self, fd: int, stop: threading.Event) -> None:
        """A plain file: the line number takes the sequence's place."""
        number, rest = 0, b""
        while not stop.is_set():
            chunk = os.read(fd, 65536)
            if not chunk:
                stop.wait(_FILE_POLL_S)
                continue
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._record(line, number)
                number += 1

    def _record(self, raw: bytes, line_number: int | None) -> None:
        if not any(k in raw for k in _KEYS) or not from_kernel(raw):
            return
        sequence, uptime_s, message = parse_record(raw)
        if sequence is None:
            sequence = line_number if line_number is not None else self._told + 1
        findings = list(self._parser.feed(message))
        killed = oom_kill(message)
        if (not findings and killed is None) or sequence <= self._told:
            return
        age_s = max(0.0, self._clock() - uptime_s) if uptime_s is not None else 0.0
        for found in findings:
            self._on_event(self._event(found), age_s)
        if killed is not None:
            self._on_oom_kill(killed)
        # After telling: losing an event would be worse than telling it again after a crash.
        self._told = sequence
        self._save()

    def _event(self, found: KernelFinding) -> GpuEvent:
        uuid = self._resolve(found.device) or self._parser.uuids.get(found.device)
        parts = [found.detail, f"pid {found.pid}" if found.pid else None]
        if uuid is None:
            parts.append(f"GPU at {found.device}")
        detail = ", ".join(p for p in parts if p) or None
        return GpuEvent(found.kind, uuid, found.xid, detail, "kernel_log")

    def _load(self) -> int:
        try:
            state = json.loads(self._state_path.read_bytes())
            if state["boot"] == self._boot_id:
                return int(state["sequence"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # none yet, or another boot's, or damaged: everything is new
        return -1

    def _save(self) -> None:
        temporary = self._state_path.with_suffix(".tmp")
        try:
            self._state_path.parent.mkdir(parents=True, exist_ok=True)
            # No fsync: after a power cut the boot id differs and the numbers mean nothing.
            temporary.write_text(json.dumps({"boot": self._boot_id, "sequence": self._told}))
            os.replace(temporary, self._state_path)
        except OSError as e:
            log.debug("cannot keep the kernel log's position path=%s error=%s", self._state_path, e)
