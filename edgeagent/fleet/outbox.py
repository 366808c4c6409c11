"""What is recorded and not yet delivered: a bounded SQLite file that survives kill −9 and power cuts.

A row leaves on a successful PUBACK only. Its identity (outbox id, seq) is given once and never used
again, also after a crash: consumers drop duplicates by it. Rows are bounded in bytes and age; what
goes first is telemetry (thinned to one message in five minutes before any is dropped whole), then
events, XID and OOM last; every loss is counted by class. A message that the broker will not have is
set aside (quarantine), so that it cannot block the rest.

Telemetry recorded while the link is up stays in memory until it is acknowledged or the link fails:
that spares the flash of edge boxes two writes per sample. The price: kill −9 loses what is in
flight at that moment. Events are on disk before they are sent.

Not thread-safe: one thread owns an Outbox (the figures may be read from any).
"""

# ruff: noqa: S608 - statements are put together from our own column names and integers only
from __future__ import annotations

import logging
import os
import secrets
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

log = logging.getLogger(__name__)

FILE_NAME = "outbox.db"
SCHEMA_VERSION = 1
ROW_OVERHEAD_BYTES = 160  # what SQLite and the columns beside the body take, roughly
THIN_MS = 300_000
SEQ_BLOCK = 1000
MEMORY_MAX_ROWS = 512
MEMORY_MAX_BYTES = 1 << 20
QUARANTINE_MAX_ROWS = 100
KEPT_CORRUPT_FILES = 2
REOPEN_AFTER_MS = 30_000

_SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE rows(
  id INTEGER PRIMARY KEY, box TEXT NOT NULL, seq INTEGER NOT NULL, class INTEGER NOT NULL,
  topic TEXT NOT NULL, body BLOB NOT NULL, wall INTEGER NOT NULL, mono INTEGER NOT NULL,
  boot TEXT NOT NULL, sess TEXT NOT NULL, clk TEXT NOT NULL);
CREATE INDEX rows_class ON rows(class, id);
CREATE TABLE quarantine(id INTEGER PRIMARY KEY, topic TEXT NOT NULL, body BLOB NOT NULL,
  reason TEXT NOT NULL, wall INTEGER NOT NULL);
CREATE TABLE dropped(class TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID;
"""
_COLUMNS = "id, box, seq, class, topic, body, wall, mono, boot, sess, clk"


class MessageClass(IntEnum):
    """In the order in which they are given up."""

    TELEMETRY = 0
    EVENT = 1
    CRITICAL = 2

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Row:
    """One stored message. `body` is its JSON without the envelope. `id` is where it lies here;
    (`box`, `seq`) is what it is called outside. `clock`: "synced" or "unsynced" when recorded."""

    id: int
    box: str
    seq: int
    cls: MessageClass
    topic: str
    body: bytes
    wall_ms: int
    mono_ms: int
    boot: str
    session: str
    clock: str

    @property
    def stored_bytes(self) -> int:
        return len(self.body) + len(self.topic) + ROW_OVERHEAD_BYTES


class Outbox:
    """The rows, on disk where that works and in memory where it does not. No method raises for what
    the disk does: trouble is in `problem` (a sentence, None when all is well) and `incidents`."""

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        max_age_ms: int,
        now_mono_ms: int,
        fill_pages: int | None = None,
    ) -> None:
        """`fill_pages`: SQLite's max_page_count, for tests of a full disk; by default it follows
        from `max_bytes`."""
        self._directory = directory
        self._max_bytes = max_bytes
        self._max_age_ms = max_age_ms
        self._fill_pages = fill_pages
        self._db: sqlite3.Connection | None = None
        self._memory: dict[int, Row] = {}  # by id: negative ids, so that they never meet a disk row
        self._memory_bytes = 0
        self._leased: set[int] = set()
        self._undeleted: set[int] = set()  # acknowledged, but the disk would not delete them
        self._count = dict.fromkeys(MessageClass, 0)
        self._bytes = 0
        self._backlog_to = 0
        self._dry = False  # the last look found no live row that was not leased
        self._last_id = 0
        self._next_memory_id = -1
        self._seq = 0
        self._seq_reserved = 0
        self._retry_mono_ms = 0
        self._seen_mono_ms = now_mono_ms
        self._thinned_to = 0
        self._losses: Counter[str] = Counter()
        self._losses_unsaved: Counter[str] = Counter()
        self._quarantined = 0
        self.id = _new_id()
        self.problem: str | None = None
        self.incidents: list[str] = []  # sentences for an event each; the publisher takes them
        self._open()

    # -- figures ----------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        return sum(self._count.values()) + len(self._memory)

    @property
    def queued_bytes(self) -> int:
        return self._bytes + self._memory_bytes

    @property
    def dropped(self) -> dict[str, int]:
        """By class, since the file was made. `thinned` are telemetry messages left out when the
        record of a long outage was made coarser."""
        return dict(self._losses)

    @property
    def quarantined(self) -> int:
        return self._quarantined

    @property
    def backlog(self) -> int:
        """Rows left from before `mark_backlog`."""
        if self._db is None or self._backlog_to == 0:
            return 0
        try:
            count = "SELECT count(*) FROM rows WHERE id <= ?"
            (n,) = self._db.execute(count, (self._backlog_to,)).fetchone()
        except sqlite3.Error as e:
            self._failed(e)
            return 0
        return int(n)

    def oldest(self) -> Row | None:
        """The row that waits longest."""
        rows = self._select("ORDER BY id LIMIT 1", ())
        candidates = rows + sorted(self._memory.values(), key=lambda r: r.mono_ms)[:1]
        return candidates[0] if candidates else None

    # -- recording --------------------------------------------------------------------------------

    def put(
        self,
        cls: MessageClass,
        topic: str,
        body: bytes,
        *,
        wall_ms: int,
        mono_ms: int,
        boot: str,
        session: str,
        clock: str,
        durable: bool = True,
    ) -> None:
        """Records a message. `durable` False: it may stay in memory until it is acknowledged."""
        self._seen_mono_ms = mono_ms
        if self._db is None and mono_ms >= self._retry_mono_ms:
            self._open()
        row = Row(0, self.id, self._take_seq(), cls, topic, body, wall_ms, mono_ms, boot, session, clock)
        in_memory = not durable and len(self._memory) < MEMORY_MAX_ROWS // 4
        if in_memory or not self._store([row]):
            self._remember(row)

    def count_loss(self, label: str, n: int = 1) -> None:
        """Counts messages that were lost before they came here."""
        self._losses[label] += n
        self._losses_unsaved[label] += n

    def spill(self) -> None:
        """Writes to disk what is only in memory: the link failed, or the agent ends."""
        rows = [row for row in self._memory.values() if row.id not in self._leased]
        if rows and self._store(rows):
            for row in rows:
                self._forget(row.id)

    # -- sending ----------------------------------------------------------------------------------

    def mark_backlog(self) -> None:
        """What is stored now is backlog: `take_live` leaves it (but for critical rows) to
        `take_backlog`."""
        self._backlog_to = self._last_id
        self._dry = False

    def is_backlog(self, row: Row) -> bool:
        return 0 < row.id <= self._backlog_to

    def take_live(self, limit: int) -> list[Row]:
        """Up to `limit` rows to send now: critical ones first, then those newer than the backlog,
        oldest first. They stay leased until `done`, `release` or `quarantine`."""
        if limit <= 0:
            return []
        rows = [r for r in self._memory.values() if r.id not in self._leased]
        rows.sort(key=lambda r: (r.cls is not MessageClass.CRITICAL, r.mono_ms, r.seq))
        if self._db is not None and not self._dry:
            if self._count[MessageClass.CRITICAL]:
                where = (
                    f"WHERE class = {MessageClass.CRITICAL:d} AND {self._not_leased()} ORDER BY id LIMIT ?"
                )
                rows = self._select(where, (limit,)) + rows
            if len(rows) < limit:
                rows += self._select(
                    f"WHERE id > ? AND class < {MessageClass.CRITICAL:d} AND {self._not_leased()}"
                    " ORDER BY id LIMIT ?",
                    (self._backlog_to, limit - len(rows)),
                )
            self._dry = len(rows) < limit
        return self._lease(rows[:limit])

    def take_backlog(self, limit: int) -> list[Row]:
        """Up to `limit` rows from before `mark_backlog`: events before telemetry, oldest first."""
        if limit <= 0 or self._backlog_to == 0 or self._db is None:
            return []
        rows: list[Row] = []
        for cls in (MessageClass.EVENT, MessageClass.TELEMETRY):
            if len(rows) < limit and self._count[cls]:
                rows += self._select(
                    f"WHERE class = ? AND id <= ? AND {self._not_leased()} ORDER BY id LIMIT ?",
                    (int(cls), self._backlog_to, limit - len(rows)),
                )
        return self._lease(rows)

    def done(self, ids: Collection[int]) -> None:
        """The broker has them: they leave."""
        self._leased.difference_update(ids)
        for ident in [i for i in ids if i < 0]:
            self._forget(ident)
        disk = {i for i in ids if i > 0} | self._undeleted
        if disk and not self._delete(disk):
            self._undeleted |= disk
        elif disk:
            self._undeleted.clear()

    def release(self, ids: Collection[int] | None = None) -> None:
        """They were not delivered (None: none of the leased ones): they will be taken again."""
        self._dry = False
        if ids is None:
            self._leased.clear()
        else:
            self._leased.difference_update(ids)

    def quarantine(self, ident: int, reason: str, wall_ms: int) -> None:
        """Sets a row aside that can never be delivered."""
        row = self._memory.get(ident) or next(iter(self._select("WHERE id = ?", (ident,))), None)
        if row is None:
            return
        self._quarantined += 1
        self.count_loss("quarantined")
        log.warning("message set aside topic=%s seq=%s reason=%s", row.topic, row.seq, reason)
        if self._db is not None:
            try:
                with self._db:
                    self._db.execute(
                        "INSERT INTO quarantine(topic, body, reason, wall) VALUES (?, ?, ?, ?)",
                        (row.topic, row.body[:65536], reason[:200], wall_ms),
                    )
                    self._db.execute(
                        "DELETE FROM quarantine WHERE id <= (SELECT max(id) FROM quarantine) - ?",
                        (QUARANTINE_MAX_ROWS,),
                    )
            except sqlite3.Error as e:
                self._failed(e)
        self.done([ident])

    # -- upkeep -----------------------------------------------------------------------------------

    def maintain(self, *, wall_ms: int, mono_ms: int, boot: str, synced: bool) -> None:
        """Now and then: drops what is too old, returns room to the file system, saves counters, and
        tries the disk again where it failed."""
        self._seen_mono_ms = mono_ms
        if self._db is None and mono_ms >= self._retry_mono_ms:
            self._open()
        if self._db is None:
            return
        self.spill_old(mono_ms)
        try:
            # Wall times of another boot are only compared where both are known to be right.
            old = self._db.execute(
                "SELECT id, class FROM rows WHERE (boot = ? AND mono < ?)"
                " OR (boot <> ? AND ? AND clk = 'synced' AND wall < ?)",
                (boot, mono_ms - self._max_age_ms, boot, synced, wall_ms - self._max_age_ms),
            ).fetchall()
        except sqlite3.Error as e:
            self._failed(e)
            return
        old = [(i, c) for i, c in old if i not in self._leased]
        if old and self._delete({i for i, _ in old}):
            for cls, n in Counter(MessageClass(c).label for _, c in old).items():
                self.count_loss(cls, n)
        self._save_losses()
        try:
            # execute() would step it once, which frees a single page.
            self._db.executescript("PRAGMA incremental_vacuum(1000);")
        except sqlite3.Error as e:
            self._failed(e)

    def spill_old(self, mono_ms: int, age_ms: int = 15_000) -> None:
        """Writes rows that have been in memory for long: their acknowledgement does not come."""
        old = [r for r in self._memory.values() if r.id not in self._leased and r.mono_ms < mono_ms - age_ms]
        if old and self._store(old):
            for row in old:
                self._forget(row.id)

    def get_meta(self, key: str) -> str | None:
        """A small value kept in the file."""
        if self._db is None:
            return None
        try:
            found = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as e:
            self._failed(e)
            return None
        return None if found is None else str(found[0])

    def set_meta(self, key: str, value: str) -> None:
        if self._db is None:
            return
        try:
            with self._db:
                self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
        except sqlite3.Error as e:
            self._failed(e)

    def close(self) -> None:
        """Writes what is in memory and closes the file. Idempotent."""
        self.release()
        self.spill()
        if self._db is not None:
            self._save_losses()
        if self._db is not None:
            self._db.close()
            self._db = None
            # Not an error: put() must not open it again.
            self._retry_mono_ms = 1 << 62

    # -- disk -------------------------------------------------------------------------------------

    def _open(self) -> None:
        path = self._directory / FILE_NAME
        for attempt in (1, 2):
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._db = self._connect(path)
                self._load()
            except sqlite3.Error as e:
                self._close_quietly()
                if attempt == 1 and _is_corrupt(e):
                    self._set_aside(path, e)
                    continue
                self._unusable(f"cannot open the outbox: {e}")
            except OSError as e:
                self._unusable(f"cannot open the outbox: {e}")
            else:
                if self.problem is not None:
                    log.info("outbox is on disk again file=%s", path)
                self.problem = None
                if self._memory:
                    self.spill()
            return

    def _connect(self, path: Path) -> sqlite3.Connection:
        # 0600: bodies name pods and namespaces.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(path, timeout=0.2, cached_statements=32)
        try:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL").fetchone()
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA cache_size = -512")
            db.execute("PRAGMA journal_size_limit = 1048576")
            (page_bytes,) = db.execute("PRAGMA page_size").fetchone()
            # The file may grow a third beyond the rows: free pages, quarantine, indexes.
            pages = self._fill_pages or max(64, self._max_bytes * 4 // 3 // page_bytes)
            db.execute(f"PRAGMA max_page_count = {pages:d}").fetchone()
            if version == 0:
                db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            elif version != SCHEMA_VERSION:
                raise sqlite3.DatabaseError(f"malformed: version {version} is not {SCHEMA_VERSION}")
            (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(f"malformed: {verdict}")
        except sqlite3.Error:
            db.close()
            raise
        return db

    def _load(self) -> None:
        assert self._db is not None
        with self._db:
            found = self._db.execute("SELECT value FROM meta WHERE key = 'id'").fetchone()
            if found is None:
                self._db.execute("INSERT INTO meta VALUES ('id', ?)", (_new_id(),))
                found = self._db.execute("SELECT value FROM meta WHERE key = 'id'").fetchone()
            reserved = self._db.execute("SELECT value FROM meta WHERE key = 'seq'").fetchone()
            # Begins where no earlier run can have been, even one that was killed.
            start = int(reserved[0]) if reserved else 0
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('seq', ?)", (str(start + SEQ_BLOCK),))
        self.id = str(found[0])
        self._seq, self._seq_reserved = start, start + SEQ_BLOCK
        self._dry = False
        self._count = dict.fromkeys(MessageClass, 0)
        self._bytes = 0
        for cls, n, size in self._db.execute(
            "SELECT class, count(*), sum(length(body) + length(topic)) FROM rows GROUP BY class"
        ):
            self._count[MessageClass(cls)] = n
            self._bytes += size + n * ROW_OVERHEAD_BYTES
        (last,) = self._db.execute("SELECT coalesce(max(id), 0) FROM rows").fetchone()
        self._last_id = max(self._last_id, int(last))
        for label, n in self._db.execute("SELECT class, n FROM dropped"):
            self._losses[label] = n + self._losses_unsaved[label]
        (self._quarantined,) = self._db.execute("SELECT count(*) FROM quarantine").fetchone()

    def _take_seq(self) -> int:
        if self._seq >= self._seq_reserved:
            if self._db is not None:
                try:
                    with self._db:
                        self._db.execute(
                            "INSERT OR REPLACE INTO meta VALUES ('seq', ?)", (str(self._seq + SEQ_BLOCK),)
                        )
                except sqlite3.Error as e:
                    self._failed(e)
                else:
                    self._seq_reserved = self._seq + SEQ_BLOCK
            if self._seq >= self._seq_reserved:
                # Without a place to note what was given out, only a new name is never used twice.
                self.id = _new_id()
                self._seq, self._seq_reserved = 0, 1 << 62
        self._seq += 1
        return self._seq

    def _store(self, rows: list[Row]) -> bool:
        if self._db is None:
            return False
        critical = any(r.cls is MessageClass.CRITICAL for r in rows)
        try:
            # An XID must survive the power cut that often follows it; NORMAL syncs at checkpoints only.
            if critical:
                self._db.execute("PRAGMA synchronous = FULL")
            with self._db:
                for row in rows:
                    self._last_id += 1
                    self._db.execute(
                        f"INSERT INTO rows({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?)",
                        (
                            self._last_id, row.box, row.seq, int(row.cls), row.topic, row.body, row.wall_ms,
                            row.mono_ms, row.boot, row.session, row.clock,
                        ),
                    )  # fmt: skip
            if critical:
                self._db.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.Error as e:
            self._failed(e)
            return False
        if self.problem is not None:
            log.info("outbox is writable again")
            self.problem = None
        self._dry = False
        for row in rows:
            self._count[row.cls] += 1
            self._bytes += row.stored_bytes
        if self._bytes > self._max_bytes:
            self._make_room()
        return True

    def _delete(self, ids: set[int]) -> bool:
        if self._db is None:
            return False
        marks = ",".join(str(int(i)) for i in ids)
        try:
            with self._db:
                gone = self._db.execute(
                    f"DELETE FROM rows WHERE id IN ({marks}) RETURNING class, length(body) + length(topic)"
                ).fetchall()
        except sqlite3.Error as e:
            self._failed(e)
            return False
        for cls, size in gone:
            self._count[MessageClass(cls)] -= 1
            self._bytes -= size + ROW_OVERHEAD_BYTES
        return True

    def _select(self, where: str, parameters: tuple[object, ...]) -> list[Row]:
        if self._db is None:
            return []
        try:
            found = self._db.execute(f"SELECT {_COLUMNS} FROM rows {where}", parameters).fetchall()
        except sqlite3.Error as e:
            self._failed(e)
            return []
        return [Row(r[0], r[1], r[2], MessageClass(r[3]), *r[4:]) for r in found]

    def _make_room(self) -> None:
        """Brings the rows well below the bound, in the order of giving up."""
        target = self._max_bytes * 9 // 10
        self._thin(target)
        for cls in MessageClass:
            while self._bytes > target and self._count[cls]:
                found = self._select_ids(
                    f"WHERE class = ? AND {self._not_leased()} ORDER BY id LIMIT 64", (int(cls),)
                )
                before = self._count[cls]
                if not found or not self._delete(set(found)):
                    break
                self.count_loss(cls.label, before - self._count[cls])
        self._save_losses()

    def _thin(self, target: int) -> None:
        """Keeps one telemetry message in five minutes, beginning with the oldest not yet thinned."""
        while self._bytes > target and self._db is not None:
            try:
                found = self._db.execute(
                    f"SELECT id, boot, mono FROM rows WHERE class = {MessageClass.TELEMETRY:d} AND id > ?"
                    " ORDER BY id LIMIT 512",
                    (self._thinned_to,),
                ).fetchall()
            except sqlite3.Error as e:
                self._failed(e)
                return
            seen: set[tuple[str, int]] = set()
            doomed: set[int] = set()
            for ident, boot, mono in found:
                slot = (boot, mono // THIN_MS)
                if slot in seen and ident not in self._leased:
                    doomed.add(ident)
                seen.add(slot)
            if len(found) < 512 and not doomed:
                return
            if doomed:
                before = self._count[MessageClass.TELEMETRY]
                if not self._delete(doomed):
                    return
                self.count_loss("thinned", before - self._count[MessageClass.TELEMETRY])
            self._thinned_to = found[-1][0]

    def _select_ids(self, where: str, parameters: tuple[object, ...]) -> list[int]:
        if self._db is None:
            return []
        try:
            return [i for (i,) in self._db.execute(f"SELECT id FROM rows {where}", parameters)]
        except sqlite3.Error as e:
            self._failed(e)
            return []

    def _save_losses(self) -> None:
        if self._db is None or not self._losses_unsaved:
            return
        try:
            with self._db:
                self._db.executemany(
                    "INSERT INTO dropped VALUES (?, ?) ON CONFLICT(class) DO UPDATE SET n = excluded.n",
                    [(label, self._losses[label]) for label in self._losses_unsaved],
                )
        except sqlite3.Error as e:
            self._failed(e)
        else:
            self._losses_unsaved.clear()

    def _failed(self, error: sqlite3.Error) -> None:
        """The disk did not do what was asked. Corrupt: a new file is begun. Else it is tried again
        with the next message."""
        if _is_corrupt(error):
            self._close_quietly()
            self._set_aside(self._directory / FILE_NAME, error)
            self._open()
            return
        if self.problem is None:
            self.problem = f"cannot write the outbox: {error}"
            log.warning("%s", self.problem)
            self.incidents.append(self.problem)

    def _unusable(self, problem: str) -> None:
        self._retry_mono_ms = self._seen_mono_ms + REOPEN_AFTER_MS
        if self.problem is None:
            log.warning("%s", problem)
            self.incidents.append(problem)
        self.problem = problem

    def _set_aside(self, path: Path, error: sqlite3.Error) -> None:
        lost = sum(self._count.values())
        self._leased.clear()
        self._undeleted.clear()
        self._count = dict.fromkeys(MessageClass, 0)
        self._bytes = 0
        self._backlog_to = self._thinned_to = 0
        kept = sorted(self._directory.glob("outbox-corrupt-*.db"))
        for old in kept[: max(0, len(kept) - KEPT_CORRUPT_FILES + 1)]:
            old.unlink(missing_ok=True)
        name = f"outbox-corrupt-{_next_number(kept):03d}.db"
        try:
            os.replace(path, self._directory / name)
        except OSError as e:
            log.warning("cannot set the corrupt outbox aside file=%s: %s", path, e)
        # The log belongs to the corrupt file; a new one must not replay it.
        for suffix in ("-wal", "-shm"):
            try:
                os.unlink(f"{path}{suffix}")
            except OSError:
                pass  # there is none
        self.incidents.append(
            f"the outbox file was corrupt ({error}): kept as {name}, a new one started"
            + (f", {lost} messages lost" if lost else "")
        )
        log.error("%s", self.incidents[-1])

    def _close_quietly(self) -> None:
        if self._db is not None:
            try:
                self._db.close()
            except sqlite3.Error:
                pass  # it is given up anyway
            self._db = None

    # -- memory -----------------------------------------------------------------------------------

    def _remember(self, row: Row) -> None:
        ident = self._next_memory_id
        self._next_memory_id -= 1
        self._memory[ident] = Row(
            ident, row.box, row.seq, row.cls, row.topic, row.body, row.wall_ms, row.mono_ms, row.boot,
            row.session, row.clock,
        )  # fmt: skip
        self._memory_bytes += row.stored_bytes
        while len(self._memory) > MEMORY_MAX_ROWS or self._memory_bytes > MEMORY_MAX_BYTES:
            free = [r for r in self._memory.values() if r.id not in self._leased]
            if not free:
                return
            victim = min(free, key=lambda r: (r.cls, -r.id))
            self._forget(victim.id)
            self.count_loss(victim.cls.label)

    def _forget(self, ident: int) -> None:
        row = self._memory.pop(ident, None)
        if row is not None:
            self._memory_bytes -= row.stored_bytes

    def _lease(self, rows: Iterable[Row]) -> list[Row]:
        out = [r for r in rows if r.id not in self._leased]
        self._leased.update(r.id for r in out)
        return out

    def _not_leased(self) -> str:
        skip = [i for i in self._leased if i > 0] + list(self._undeleted)
        return f"id NOT IN ({','.join(map(str, skip))})" if skip else "1"


def _new_id() -> str:
    return secrets.token_hex(6)


def _next_number(kept: list[Path]) -> int:
    numbers = [int(p.stem.rpartition("-")[2]) for p in kept if p.stem.rpartition("-")[2].isdigit()]
    return max(numbers, default=0) + 1


def _is_corrupt(error: sqlite3.Error) -> bool:
    text = str(error)
    return isinstance(error, sqlite3.DatabaseError) and ("malformed" in text or "not a database" in text)
