"""The sweep over sensor files: one bad file costs its own value, one log line, and never the poll."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from edgeagent.gpus import tegra_files as parse
from edgeagent.gpus.sweep import MAX_STUCK, Source, Sweep, read_file


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class HangingFiles:
    """The operating system with files whose reads hang in the kernel until released: that needs a
    broken driver, so the read is where the fake sits."""

    def __init__(self) -> None:
        self.hangs: dict[str, threading.Event] = {}
        self.reads: list[str] = []

    def __call__(self, path: str, max_bytes: int) -> bytes:
        self.reads.append(path)
        if path in self.hangs:
            self.hangs[path].wait(30)
        return read_file(path, max_bytes)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def sources(tmp_path: Path, **files: str) -> list[Source]:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return [Source(name, str(tmp_path / name), parse.celsius) for name in files]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_values_of_all_good_files_and_none_for_an_offline_one(tmp_path: Path) -> None:
    sweep = Sweep(what="test")
    sweep.set_sources(sources(tmp_path, a="43000", b="-256000", c="21500\n"))
    assert sweep.run() == {"a": 43.0, "c": 21.5}
    sweep.close()


def make(tmp_path: Path, kind: str) -> int | None:
    """A broken file called `bad`; returns an open descriptor where one has to stay open."""
    bad = tmp_path / "bad"
    if kind == "fifo with writer":
        os.mkfifo(bad)
        return os.open(bad, os.O_RDWR)
    if kind == "fifo":
        os.mkfifo(bad)
    elif kind == "directory":
        bad.mkdir()
    elif kind == "loop":
        bad.symlink_to("bad")
    elif kind != "absent":
        bad.write_bytes({"empty": b"", "binary": b"\xff\x00\xfe", "truncated": b"-"}[kind])
    return None


@pytest.mark.parametrize(
    "kind", ["fifo", "fifo with writer", "directory", "loop", "absent", "empty", "binary", "truncated"]
)
def test_a_broken_file_costs_its_value_and_one_log_line(
    tmp_path: Path, kind: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    keep = make(tmp_path, kind)
    sweep = Sweep(what="test", clock=clock)
    sweep.set_sources([*sources(tmp_path, good="43000"), Source("bad", str(tmp_path / "bad"), parse.celsius)])
    try:
        for _ in range(200):
            clock.now += 5
            assert sweep.run() == {"good": 43.0}
        assert len(warnings(caplog)) == 1
        assert sweep.quarantined == (str(tmp_path / "bad"),)
    finally:
        sweep.close()
        if keep is not None:
            os.close(keep)


def test_a_file_is_left_alone_after_three_failures_and_comes_back(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    files = HangingFiles()
    sweep = Sweep(what="test", clock=clock, read=files)
    sweep.set_sources(sources(tmp_path, zone="junk"))
    for _ in range(10):
        sweep.run()
    assert len(files.reads) == 3
    clock.now += 61
    (tmp_path / "zone").write_text("43000")
    assert sweep.run() == {"zone": 43.0}
    assert sweep.run() == {"zone": 43.0}
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    sweep.close()


def test_two_failures_and_a_good_read_are_forgiven(tmp_path: Path, clock: Clock) -> None:
    sweep = Sweep(what="test", clock=clock)
    sweep.set_sources(sources(tmp_path, zone="junk"))
    for text in ("junk", "junk", "43000", "junk", "junk"):
        (tmp_path / "zone").write_text(text)
        sweep.run()
    assert sweep.quarantined == ()
    sweep.close()


def test_a_hanging_file_is_given_up_and_the_rest_is_read(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    files = HangingFiles()
    stuck = str(tmp_path / "stuck")
    files.hangs[stuck] = threading.Event()
    sweep = Sweep(what="test", clock=clock, read=files, file_deadline_s=0.05)
    sweep.set_sources(sources(tmp_path, first="1000", stuck="2000", last="3000"))
    good = {"first": 1.0, "last": 3.0}
    assert sweep.run() == good
    for _ in range(50):
        clock.now += 100  # due for a retry every time, but a thread still hangs in it
        assert sweep.run() == good
    assert files.reads.count(stuck) == 1
    assert len(warnings(caplog)) == 1

    files.hangs[stuck].set()
    for thread in [t for t in threading.enumerate() if t.name == "read test"]:
        thread.join(0.2)
    clock.now += 100
    assert sweep.run() == {**good, "stuck": 2.0}
    sweep.close()


def test_more_hanging_files_than_threads_to_lose_end_in_silence_not_in_a_leak(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    files = HangingFiles()
    release = threading.Event()
    names = {f"s{i}": "1000" for i in range(MAX_STUCK + 2)}
    all_sources = sources(tmp_path, **names)
    files.hangs = {s.path: release for s in all_sources}
    before = threading.active_count()
    sweep = Sweep(what="test", clock=clock, read=files, file_deadline_s=0.02)
    sweep.set_sources(all_sources)
    for _ in range(5):
        assert sweep.run() == {}
    assert sweep.gave_up
    assert threading.active_count() - before <= MAX_STUCK
    assert sum("files hang" in w for w in warnings(caplog)) == 1
    release.set()
    for thread in [t for t in threading.enumerate() if t.name == "read test"]:
        thread.join(1)
    clock.now += 100
    assert len(sweep.run()) == len(names)
    assert not sweep.gave_up
    sweep.close()


def test_changing_the_sources_keeps_the_history_of_those_that_stay(tmp_path: Path, clock: Clock) -> None:
    sweep = Sweep(what="test", clock=clock)
    bad = sources(tmp_path, bad="junk")
    sweep.set_sources(bad)
    for _ in range(3):
        sweep.run()
    sweep.set_sources([*bad, *sources(tmp_path, good="1000")])
    assert sweep.quarantined == (bad[0].path,)
    sweep.set_sources(sources(tmp_path, good="1000"))
    assert sweep.quarantined == ()
    sweep.close()


def test_close_ends_the_thread_and_run_starts_anew(tmp_path: Path) -> None:
    sweep = Sweep(what="close test")
    sweep.set_sources(sources(tmp_path, a="1000"))
    sweep.run()
    sweep.close()
    sweep.close()
    assert not [t for t in threading.enumerate() if t.name == "read close test"]
    assert sweep.run() == {"a": 1.0}
    sweep.close()


def test_read_file_reads_what_comes_in_pieces_and_stops_at_the_limit(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 10000)
    assert len(read_file(str(tmp_path / "f"), 4096)) == 4096
    assert len(read_file(str(tmp_path / "f"), 20000)) == 10000
    with pytest.raises(OSError, match=r".") as caught:
        read_file(str(tmp_path / "none"), 10)
    assert caught.value.errno == errno.ENOENT
