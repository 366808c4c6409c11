"""Field case X5: GPU trouble that only the kernel log tells, each event once over restarts."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.gpus.model import GpuEvent, GpuEventKind
from edgeagent.hostroot import HostRoot
from edgeagent.node.kmsg import KernelLog, LineParser, OomKill, normalise_pci, oom_kill, parse_record

UUID = "GPU-5c1a0000-0000-4000-8000-0000000000b3"
THREE_LINES = (
    "NVRM: The NVIDIA GPU 0000:b3:00.0",
    "NVRM: (PCI ID: 10de:26b5) installed in this system has",
    "NVRM: fallen off the bus and is not responding to commands.",
)

XIDS = {
    "no pid known": (
        "NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp Exception",
        ("0000:cb:00.0", 13, None),
    ),
    "with pid": (
        "NVRM: Xid (PCI:0000:cb:00): 109, pid=1797828, name=pt_main_thread, Ch 00000008, errorString CTX",
        ("0000:cb:00.0", 109, 1797828),
    ),
    "burst line": (
        "NVRM: Xid (PCI:0000:61:00): 45, pid=77, name=x, Ch 0000000a",
        ("0000:61:00.0", 45, 77),
    ),
    "old form, no pid": (
        "NVRM: Xid (PCI:0000:01:00): 31, Ch 00000003, engmask 00000101, intr 10000000",
        ("0000:01:00.0", 31, None),
    ),
    "older form, no PCI word": ("NVRM: Xid (0000:01:00): 8, Channel 00000001", ("0000:01:00.0", 8, None)),
    "off the bus": (
        "NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus.",
        ("0000:65:00.0", 79, None),
    ),
    "off the bus with pid": (
        "NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        ("0000:65:00.0", 79, None),
    ),
    "GSP": (
        "NVRM: Xid (PCI:0000:65:00): 119, pid=3, name=a b, Timeout after 45s of waiting for RPC response",
        ("0000:65:00.0", 119, 3),
    ),
    "MIG": ("NVRM: Xid (PCI:0000:65:00 GPU-I:05): 94, pid=3, name=a, Contained", ("0000:65:00.0", 94, 3)),
    "after journald's words": (
        "Jan 08 10:00:00 box kernel: NVRM: Xid (PCI:0000:65:00): 48, An uncorrectable double bit error",
        ("0000:65:00.0", 48, None),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), XIDS.values(), ids=XIDS)
def test_xid_lines(line: str, expected: tuple[str, int, int | None]) -> None:
    (found,) = LineParser().feed(line)
    assert (found.device, found.xid, found.pid) == expected
    assert found.kind is GpuEventKind.XID


def test_the_three_line_form_in_one_record_and_in_three() -> None:
    (found,) = LineParser().feed("\n".join(THREE_LINES))
    assert (found.device, found.xid) == ("0000:b3:00.0", 79)
    parser = LineParser()
    results = [list(parser.feed(line)) for line in (THREE_LINES[0], "usb 1-1: new device", *THREE_LINES[1:])]
    assert [len(r) for r in results] == [0, 0, 0, 1]
    assert results[3][0].device == "0000:b3:00.0"


def test_fallen_off_without_a_gpu_before_it_is_nothing() -> None:
    assert list(LineParser().feed(THREE_LINES[2])) == []
    parser = LineParser()
    list(parser.feed(THREE_LINES[0]))
    list(parser.feed("\n".join(f"NVRM: something else {i}" for i in range(20))))
    assert list(parser.feed(THREE_LINES[2])) == []


def test_nvgpu_errors_name_the_device() -> None:
    line = (
        "nvgpu: 17000000.gpu gk20a_gr_handle_fecs_error:5281 [ERR]  fecs watchdog triggered for channel 511"
    )
    (found,) = LineParser().feed(line)
    assert (found.kind, found.device) == (GpuEventKind.DRIVER_ERROR, "17000000.gpu")
    assert found.detail is not None
    assert "fecs watchdog" in found.detail
    assert list(LineParser().feed("nvgpu: 17000000.gpu gk20a_init:12 [INFO]  hello")) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PCI:0000:CB:00", "0000:cb:00.0"),
        ("00000000:cb:00.1", "0000:cb:00.1"),
        ("cb:00", "0000:cb:00.0"),
        ("0001:cb:1f.7", "0001:cb:1f.7"),
        ("17000000.gpu", None),
        ("", None),
        ("a:b:c:d", None),
    ],
)
def test_pci_addresses(text: str, expected: str | None) -> None:
    assert normalise_pci(text) == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"4,812,98765432,-;NVRM: x\n SUBSYSTEM=pci\n", (812, 98.765432, "NVRM: x")),
        (b"4,812,98765432,c,caller=T12;NVRM: a\\x0ab\n", (812, 98.765432, "NVRM: a\nb")),
        (b"[   12.500000] NVRM: x\n", (None, 12.5, "NVRM: x")),
        (b"<4>[12.5] NVRM: x", (None, 12.5, "NVRM: x")),
        (b"NVRM: x", (None, None, "NVRM: x")),
    ],
    ids=["record", "escaped newline", "dmesg", "dmesg with level", "bare"],
)
def test_records(raw: bytes, expected: tuple[int | None, float | None, str]) -> None:
    assert parse_record(raw) == expected


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_any_bytes_are_taken(raw: bytes) -> None:
    _, _, message = parse_record(b"4,1,1,-;NVRM: Xid (PCI:" + raw)
    list(LineParser().feed(message))
    list(LineParser().feed(parse_record(raw)[2]))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            (
                "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/kubepods.slice/p,"
                "task_memcg=/kubepods.slice/p/cri-containerd-c.scope,task=python3,pid=4100,uid=0"
            ),
            OomKill("/kubepods.slice/p/cri-containerd-c.scope", "python3", 4100),
        ),
        (
            (
                "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
                "task_memcg=/kubepods/podx/y,task=a,pid=1,b,pid=77,uid=1000"
            ),
            OomKill("/kubepods/podx/y", "a,pid=1,b", 77),
        ),
        ("Out of memory: Killed process 4100 (python3) total-vm:1kB", None),
        ("app: oom-kill:constraint=,task_memcg=/kubepods/podx/y,task=a,pid=1,uid=0", None),
    ],
    ids=["limit of the pod", "whole node, commas in a name", "the longer line", "somebody else's words"],
)
def test_oom_kills(line: str, expected: OomKill | None) -> None:
    assert oom_kill(line) == expected


# -- the service ---------------------------------------------------------------------------------------


class Reader:
    """A KernelLog on a file (or FIFO), run in a thread until the wanted number of events came."""

    def __init__(self, tmp_path: Path, boot: str = "boot-1", now_s: float = 100.0) -> None:
        self.root = tmp_path
        (tmp_path / "proc/sys/kernel/random").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/sys/kernel/random/boot_id").write_text(f"{boot}\n")
        (tmp_path / "dev").mkdir(exist_ok=True)
        self.path = tmp_path / "dev/kmsg"
        self.told: list[tuple[GpuEvent, float]] = []
        self._came = threading.Condition()
        self.log = KernelLog(
            HostRoot(tmp_path),
            tmp_path / "state",
            {"0000:65:00.0": UUID}.get,
            self._on_event,
            clock=lambda: now_s,
        )

    def _on_event(self, event: GpuEvent, age_s: float) -> None:
        with self._came:
            self.told.append((event, age_s))
            self._came.notify_all()

    def read(self, count: int, settle_s: float = 0.0) -> list[tuple[GpuEvent, float]]:
        stop = threading.Event()
        thread = threading.Thread(target=self.log.run, args=(stop,))
        thread.start()
        with self._came:
            assert self._came.wait_for(lambda: len(self.told) >= count, 5)
        thread.join(settle_s)  # longer: would one more come?
        stop.set()
        self.log.wake()
        thread.join(5)
        assert not thread.is_alive()
        return self.told


def xid_line(number: int, sequence: int, seconds: float = 90.0, pci: str = "0000:65:00") -> str:
    return f"3,{sequence},{int(seconds * 1e6)},-;NVRM: Xid (PCI:{pci}): {number}, pid=1, name=x, y\n"


def test_events_carry_uuid_and_age(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.path.write_text(
        "6,1,1,-;usb 1-1: new device\n" + xid_line(79, 5) + xid_line(31, 6, 99.5, "0000:99:00")
    )
    told = reader.read(2)
    assert [(e.uuid, e.xid, e.source, age) for e, age in told] == [
        (UUID, 79, "kernel_log", 10.0),
        (None, 31, "kernel_log", 0.5),
    ]
    assert "0000:99:00.0" in (told[1][0].detail or "")


def test_a_program_that_writes_into_the_kernel_log_takes_no_gpu_away(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.path.write_text("12" + xid_line(79, 5)[1:] + xid_line(31, 6))
    assert [e.xid for e, _ in reader.read(1)] == [31]


def test_the_uuid_that_the_driver_itself_printed_is_used(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.path.write_text(
        f"3,1,1,-;NVRM: GPU at PCI:0000:b3:00: {UUID}\n" + xid_line(79, 2, 1.0, "0000:b3:00")
    )
    assert reader.read(1)[0][0].uuid == UUID


def test_a_restart_tells_nothing_twice_and_a_reboot_starts_afresh(tmp_path: Path) -> None:
    first = Reader(tmp_path)
    first.path.write_text(xid_line(79, 5) + xid_line(31, 6))
    first.read(2)
    with first.path.open("a") as f:
        f.write(xid_line(95, 7))
    second = Reader(tmp_path)
    assert [e.xid for e, _ in second.read(1)] == [95]
    third = Reader(tmp_path, boot="boot-2")
    assert [e.xid for e, _ in third.read(3)] == [79, 31, 95]


def test_a_damaged_position_file_is_no_obstacle(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    (tmp_path / "state").mkdir()
    (tmp_path / "state/kernel-log.json").write_text('{"boot": "boot-1"')
    reader.path.write_text(xid_line(79, 5))
    assert len(Reader(tmp_path).read(1)) == 1


def test_lines_written_later_are_seen(tmp_path: Path) -> None:
    """A FIFO stands in for the device: records come one by one, and reading blocks in between."""
    reader = Reader(tmp_path)
    os.mkfifo(reader.path)
    writer = os.open(reader.path, os.O_RDWR)
    try:
        threading.Timer(0.05, os.write, (writer, xid_line(79, 5).encode())).start()
        assert [e.xid for e, _ in reader.read(1)] == [79]
    finally:
        os.close(writer)


@pytest.mark.parametrize("what", ["missing", "directory"])
def test_without_a_kernel_log_the_service_idles(tmp_path: Path, what: str) -> None:
    reader = Reader(tmp_path)
    if what == "directory":
        reader.path.mkdir()
    assert reader.read(0, settle_s=0.05) == []
    assert reader.log.problem
