"""The limiter's duty cycle, on the stand-in driver's time-line: what share of the time the GPU works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.cuda import Box, compiler, finish, go_on, read_until, tools

pytestmark = [pytest.mark.alone, pytest.mark.skipif(compiler() is None, reason="needs a C compiler")]

POINTS = 3.0  # how far the reached percentage may be from the asked one
TRIES = 3  # a machine with other work may not get to launch in time: never more, perhaps less


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path, tools())


def spin_together(box: Box, cores_pct: int, spins: list[str]) -> float:
    """Runs one process per spin, all at once; the GPU's busy percentage over that time."""
    box.limit(1024, cores_pct=cores_pct)
    (box.directory / "timeline").unlink(missing_ok=True)
    timeline = str(box.directory / "timeline")
    processes = [
        box.start("dlsym", "init", "ctx", "stream", "wait", spin, FAKE_CUDA_TIMELINE=timeline)
        for spin in spins
    ]
    for process in processes:
        read_until(process, "ready")
    for process in processes:
        go_on(process)
    done = [finish(process)[-1] for process in processes]
    assert {line.rc for line in done} == {0}
    # Each sees the whole GPU's work during its own time.
    return max(line.values[0] for line in done)


@pytest.mark.parametrize(
    ("cores_pct", "spins"),
    [
        (30, ["spin:200:900"]),
        (50, ["spin:2000:900"]),
        (30, ["spin:30000:2000"]),
        (90, ["spin:2000:900"]),
        (5, ["spin:500:1500"]),
        (30, ["spin:2000:1500"] * 3),
        (50, ["spin:200:1500", "spin:2000:1500", "spin:30000:1500"]),
    ],
    ids=["200us", "2ms", "30ms", "almost all", "little", "three processes", "three unlike processes"],
)
def test_the_container_gets_its_percentage(box: Box, cores_pct: int, spins: list[str]) -> None:
    reached = 0.0
    for _ in range(TRIES):
        reached = spin_together(box, cores_pct, spins)
        assert reached <= cores_pct + POINTS
        if reached >= cores_pct - POINTS:
            break
    assert reached >= cores_pct - POINTS


def test_graphs_are_counted_as_what_they_take(box: Box) -> None:
    commands = "init ctx stream capture:0 kernel:2000:5 endcapture inst:0 spingraph:10000:1500:1"
    for _ in range(TRIES):
        lines = box.limit(1024, cores_pct=30).run("dlsym", *commands.split())
        assert lines[-1].values[0] <= 30 + POINTS
        if lines[-1].values[0] >= 30 - POINTS:
            return
    raise AssertionError(lines)


def test_nothing_is_limited_without_a_percentage(box: Box) -> None:
    assert spin_together(box, 100, ["spin:2000:400"]) > 60  # limited only by who launches
    assert box.state().busy_ns == 0


def test_every_way_to_launch_is_counted(box: Box) -> None:
    """10 ms by each of five ways."""
    commands = [
        "kernel:10000", "kernelex:10000", "cooperative:10000", "kernelptsz:10000",
        "capture:0", "kernel:10000", "endcapture", "inst:0", "glaunch:1", "sync", "ctxsync",
    ]  # fmt: skip
    lines = box.limit(1024, cores_pct=80).run("dlsym", "init", "ctx", "stream", *commands)
    assert {line.rc for line in lines} == {0}
    # A lane begins before its kernel does: longer where this process is kept from launching it.
    assert 49e6 <= box.state().busy_ns <= 100e6


def test_a_short_process_pays_when_it_waits_for_its_result(box: Box) -> None:
    """Work of processes that launch once and end is not free for the container."""
    box.limit(1024, cores_pct=50)
    for _ in range(3):
        box.run("dlsym", "init", "ctx", "stream", "kernel:5000", "sync")
    assert 14.9e6 <= box.state().busy_ns <= 60e6


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "thread-local", "relaxed"])
def test_nothing_is_done_inside_a_capture(box: Box, mode: int) -> None:
    """A captured stream gets only the program's own nodes, and launches beside it do not break it."""
    commands = [
        "stream", "keepstream", f"capture:{mode}", "kernel:100:3", "nullstream", "kernel:3000:20",
        "usestream:0", "kernel:100:2", "endcapture", "nodes:1",
    ]  # fmt: skip
    lines = box.limit(1024, cores_pct=30).run("dlsym", "init", "ctx", *commands)
    assert [line.rc for line in lines] == [0] * len(lines)
    assert lines[-1].values == (5.0,)


def test_a_capture_is_not_broken_by_accounts_of_memory(box: Box) -> None:
    """Pools are asked what they reserve while another stream is being captured."""
    commands = [
        "pool:1", "stream", "keepstream", "capture:0", "nullstream", "frompool:0:10", "freeasync:2",
        "frompool:0:2000", "usestream:1", "kernel:100:1", "endcapture",
    ]  # fmt: skip
    lines = box.limit(1024).run("dlsym", "init", "ctx", *commands)
    assert [(line.name, line.rc) for line in lines if line.rc] == [("frompool", 2)]


def test_a_gpu_that_never_ends_delays_but_does_not_block(box: Box) -> None:
    """A kernel may wait for one that this thread has yet to launch: the wait for it gives up."""
    box.limit(1024, cores_pct=50)
    process = box.start("dlsym", "init", "ctx", "stream", "kernel:60000000", "kernel:1", "wait")
    lines = read_until(process, "ready")
    assert [line.rc for line in lines] == [0] * 6
    process.kill()
    process.communicate()
