"""The outbox: nothing leaves but by an acknowledgement, an age or a count; every loss is counted."""

from __future__ import annotations

import itertools
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from edgeagent.fleet.outbox import FILE_NAME, MessageClass, Outbox, Row

BOOT = "boot-a"
DAY_MS = 86_400_000


def make(directory: Path, *, max_bytes: int = 1 << 20, mono_ms: int = 0, **more: Any) -> Outbox:
    return Outbox(directory, max_bytes=max_bytes, max_age_ms=7 * DAY_MS, now_mono_ms=mono_ms, **more)


def put(box: Outbox, cls: MessageClass = MessageClass.EVENT, n: int = 0, size: int = 20, **more: Any) -> None:
    values = {
        "wall_ms": 1_000_000 + n * 10_000,
        "mono_ms": n * 10_000,
        "boot": BOOT,
        "session": "s",
        "clock": "synced",
    }
    box.put(cls, f"t/{cls.label}", b'{"n":%d,"pad":"%s"}' % (n, b"x" * size), **{**values, **more})


def drain(box: Outbox) -> list[Row]:
    out: list[Row] = []
    while rows := box.take_live(16) or box.take_backlog(16):
        out += rows
        box.done([r.id for r in rows])
    return out


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "state"


def test_rows_come_in_order_and_leave_when_done(directory: Path) -> None:
    box = make(directory)
    for n in range(40):
        put(box, n=n)
    assert box.queued == 40
    rows = drain(box)
    assert [r.seq for r in rows] == list(range(1, 41))
    assert {r.box for r in rows} == {box.id}
    assert (box.queued, box.queued_bytes) == (0, 0)


def test_what_is_not_acknowledged_is_taken_again(directory: Path) -> None:
    box = make(directory)
    put(box)
    (first,) = box.take_live(5)
    assert box.take_live(5) == []
    box.release([first.id])
    assert box.take_live(5) == [first]


def test_rows_survive_a_kill_and_no_seq_is_used_twice(directory: Path) -> None:
    """Without close(): as after kill −9."""
    seen: set[tuple[str, int]] = set()
    for _ in range(3):
        box = make(directory)
        assert box.queued == len(seen)
        put(box)
        put(box, MessageClass.CRITICAL)
        rows = box.take_live(100)
        new = {(r.box, r.seq) for r in rows}
        assert seen < new
        seen = new


def test_a_memory_row_keeps_its_identity_when_it_goes_to_disk(directory: Path) -> None:
    box = make(directory)
    put(box, MessageClass.TELEMETRY, durable=False)
    (row,) = box.take_live(1)
    assert row.id < 0
    box.release()
    box.spill()
    (again,) = box.take_live(1)
    assert again.id > 0
    assert (again.box, again.seq, again.body) == (row.box, row.seq, row.body)
    assert box.queued == 1


def test_live_first_then_backlog_critical_before_all(directory: Path) -> None:
    box = make(directory)
    put(box, MessageClass.TELEMETRY, 1)
    put(box, MessageClass.EVENT, 2)
    put(box, MessageClass.CRITICAL, 3)
    box.mark_backlog()
    put(box, MessageClass.EVENT, 4)
    live = box.take_live(10)
    assert [r.mono_ms for r in live] == [30_000, 40_000]
    assert [box.is_backlog(r) for r in live] == [True, False]
    assert box.backlog == 3
    assert [r.cls for r in box.take_backlog(10)] == [MessageClass.EVENT, MessageClass.TELEMETRY]


# -- bounds -------------------------------------------------------------------------------------


def test_the_bound_holds_and_every_loss_is_counted_by_class(directory: Path) -> None:
    box = make(directory, max_bytes=100_000)
    put(box, MessageClass.CRITICAL, 0)
    put(box, MessageClass.EVENT, 0)
    for n in range(1500):
        put(box, MessageClass.TELEMETRY, n, size=200)
        assert box.queued_bytes <= 100_000
    rows = drain(box)
    lost = box.dropped
    telemetry = [r for r in rows if r.cls is MessageClass.TELEMETRY]
    assert len(telemetry) + lost["thinned"] + lost.get("telemetry", 0) == 1500
    assert {r.cls for r in rows} == set(MessageClass), "events stay while there is telemetry to give up"
    assert telemetry[-1].mono_ms == 1499 * 10_000, "the newest is kept, not the oldest (paho#856)"


def test_telemetry_is_thinned_to_five_minutes_before_it_is_dropped(directory: Path) -> None:
    box = make(directory, max_bytes=100_000)
    for n in range(400):
        put(box, MessageClass.TELEMETRY, n, size=100)
    old = [r for r in drain(box) if r.mono_ms < 300_000 * 3]
    assert [r.mono_ms for r in old] == [0, 300_000, 600_000]
    assert "telemetry" not in box.dropped


def test_events_are_given_up_before_xids(directory: Path) -> None:
    box = make(directory, max_bytes=20_000)
    for n in range(100):
        put(box, MessageClass.CRITICAL, n, size=50)
        put(box, MessageClass.EVENT, n, size=50)
    classes = [r.cls for r in drain(box)]
    assert classes.count(MessageClass.EVENT) < classes.count(MessageClass.CRITICAL)
    assert box.dropped["event"] == 100 - classes.count(MessageClass.EVENT)


def test_what_is_too_old_goes_and_is_counted(directory: Path) -> None:
    box = make(directory)
    put(box, n=0)
    put(box, n=0, boot="boot-b", wall_ms=5)
    put(box, n=0, boot="boot-b", wall_ms=5, clock="unsynced")
    now = 8 * DAY_MS
    put(box, n=0, mono_ms=now)
    box.maintain(wall_ms=now, mono_ms=now, boot=BOOT, synced=False)
    assert box.queued == 3, "other boots are not judged by a clock that is not right"
    box.maintain(wall_ms=now, mono_ms=now, boot=BOOT, synced=True)
    assert box.queued == 2, "nor by one that was not right when it was recorded"
    assert box.dropped == {"event": 2}


def test_losses_are_remembered(directory: Path) -> None:
    box = make(directory)
    box.count_loss("event", 3)
    box.close()
    assert make(directory).dropped == {"event": 3}


# -- trouble ------------------------------------------------------------------------------------


def test_a_poison_message_is_set_aside_and_the_rest_goes_on(directory: Path) -> None:
    box = make(directory)
    put(box, n=1)
    put(box, n=2)
    (poison,) = box.take_live(1)
    box.quarantine(poison.id, "not authorized", 0)
    assert [r.mono_ms for r in drain(box)] == [20_000]
    assert box.quarantined == 1
    assert box.dropped == {"quarantined": 1}
    box.close()
    assert make(directory).quarantined == 1


@pytest.mark.parametrize("damage", ["garbage", "truncated", "page", "version"])
def test_a_corrupt_file_is_kept_aside_and_a_new_one_started(directory: Path, damage: str) -> None:
    box = make(directory)
    for n in range(200):
        put(box, n=n, size=500)
    box.close()
    path = directory / FILE_NAME
    data = bytearray(path.read_bytes())
    if damage == "garbage":
        data[:] = os.urandom(len(data))
    elif damage == "truncated":
        del data[len(data) // 2 :]
    elif damage == "page":
        data[8192 : 8192 + 4096] = b"\xff" * 4096
    else:
        data[60:64] = b"\0\0\0\x63"
    path.write_bytes(data)
    again = make(directory)
    assert again.id != box.id
    assert "corrupt" in again.incidents[0]
    put(again)
    assert len(drain(again)) == 1
    assert len(list(directory.glob("outbox-corrupt-*.db"))) == 1
    again.close()


def test_only_two_corrupt_files_are_kept(directory: Path) -> None:
    for _ in range(4):
        directory.mkdir(exist_ok=True)
        (directory / FILE_NAME).write_bytes(b"x" * 8192)
        make(directory).close()
    assert sorted(p.name for p in directory.glob("outbox-corrupt-*.db")) == [
        "outbox-corrupt-003.db",
        "outbox-corrupt-004.db",
    ]


def test_a_full_disk_is_survived_in_memory_and_left_again(directory: Path) -> None:
    box = make(directory, fill_pages=40)
    for n in range(400):
        put(box, n=n, size=300)
    assert box.problem is not None
    assert "full" in box.problem
    assert len(box.incidents) == 1, "a repeating failure is one incident"
    rows = drain(box)
    assert len({(r.box, r.seq) for r in rows}) == len(rows) == 400 - box.dropped.get("event", 0)
    put(box, n=500)
    assert box.problem is None, "there is room again"


def test_what_the_full_disk_would_not_delete_is_not_sent_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = make(directory)
    put(box, n=1)
    put(box, n=2)
    rows = box.take_live(2)
    blocker = sqlite3.connect(directory / FILE_NAME, timeout=0)
    blocker.execute("BEGIN IMMEDIATE")
    box.done([rows[0].id])  # fails: the file is locked by another
    assert box.problem is not None
    box.release()
    assert [r.id for r in box.take_live(5)] == [rows[1].id]
    blocker.rollback()
    blocker.close()
    box.done([rows[1].id])
    assert box.queued == 0


def test_no_place_at_all_still_works_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    box = make(tmp_path / "file" / "state")
    assert box.problem is not None
    for n in range(3):
        put(box, n=n)
    assert len(drain(box)) == 3
    for n in range(2000):
        put(box, MessageClass.TELEMETRY if n % 2 else MessageClass.CRITICAL, n, size=100)
    assert box.queued <= 512
    assert box.dropped["telemetry"] == 1000 - sum(r.cls is MessageClass.TELEMETRY for r in drain(box))


def test_the_disk_is_tried_again(tmp_path: Path) -> None:
    blocked = tmp_path / "state"
    blocked.write_text("")
    box = make(blocked)
    put(box, n=0)
    blocked.unlink()
    put(box, n=1)
    assert box.problem is not None, "not at once"
    put(box, n=4)
    assert box.problem is None
    assert box.queued == 3
    box.close()
    assert make(blocked).queued == 3


def test_close_writes_what_is_in_memory(directory: Path) -> None:
    box = make(directory)
    put(box, MessageClass.TELEMETRY, durable=False)
    box.take_live(1)
    box.close()
    box.close()
    assert make(directory).queued == 1


def test_meta_is_kept(directory: Path) -> None:
    box = make(directory)
    box.set_meta("filters", "a,b")
    box.close()
    again = make(directory)
    assert again.get_meta("filters") == "a,b"
    assert again.get_meta("nothing") is None


def test_the_file_returns_room(directory: Path) -> None:
    box = make(directory, max_bytes=2 << 20)
    for n in range(800):
        put(box, n=n, size=1000)
    drain(box)
    for n in itertools.repeat(1, 4):
        box.maintain(wall_ms=n, mono_ms=n, boot=BOOT, synced=True)
    box.close()
    assert (directory / FILE_NAME).stat().st_size < 150_000
