"""Commands from operators: which are accepted, each done at most once, every one answered.

A command is looked at in this order: retained (ignored), shape, addressee, signature, replay
(answered from the stored result), allow-list, time, rate, concurrency (one at a time). It is on
disk, with its attempt count, before it acts; one that was running when the agent died is not run
again. There is no verb that runs a program.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from edgeagent.errors import AgentError, FleetError
from edgeagent.fleet import trial as trials
from edgeagent.fleet.client import Received
from edgeagent.fleet.messages import Body, response
from edgeagent.fleet.pacing import TokenBucket
from edgeagent.fleet.topics import Topics, is_name
from edgeagent.node.clock import Moment

log = logging.getLogger(__name__)

VERBS = (
    "snapshot", "set-log-level", "cordon-gpu", "uncordon-gpu", "drain-gpu", "set-sharing",
    "restart-agent", "collect-diagnostics",
)  # fmt: skip
MAX_COMMAND_BYTES = 8 * 1024
MAX_FUTURE_MS = 7 * 86_400_000  # as long as ids are remembered at least
MAX_REMEMBERED = 2000
FILE_NAME = "commands.db"
DEFAULT_REQUESTER = "ops"
ANSWER_EXPIRY_S = 3600

_ID = re.compile(r"^[A-Za-z0-9._:-]{1,64}$")
_SCHEMA = """CREATE TABLE IF NOT EXISTS commands(
  id TEXT PRIMARY KEY, verb TEXT NOT NULL, at INTEGER NOT NULL, attempts INTEGER NOT NULL,
  state TEXT NOT NULL, answer TEXT, digest TEXT NOT NULL) WITHOUT ROWID"""


class CommandActions(Protocol):
    """What the agent does for each verb. A method returns what the answer shall carry; it raises
    AgentError when it cannot. With `dry_run` it only says what it would do. Methods run in a thread
    of their own and may take their time."""

    def snapshot(self) -> Mapping[str, Any]: ...

    def set_log_level(self, level: str, dry_run: bool) -> Mapping[str, Any]: ...

    def cordon_gpu(self, uuid: str, dry_run: bool) -> Mapping[str, Any]: ...

    def uncordon_gpu(self, uuid: str, dry_run: bool) -> Mapping[str, Any]: ...

    def drain_gpu(self, uuid: str, grace_s: float, dry_run: bool) -> Mapping[str, Any]: ...

    def config_hash(self) -> str: ...

    def sharing(self) -> Mapping[str, Any]:
        """The sharing settings in force, in the form that `set_sharing` takes."""

    def set_sharing(self, sharing: Mapping[str, Any], dry_run: bool) -> Mapping[str, Any]:
        """Checks (dry_run) or applies. It may restart the agent after it returned."""

    def ready(self) -> bool:
        """Whether the agent serves the kubelet with the settings in force."""

    def restart_agent(self, dry_run: bool) -> Mapping[str, Any]:
        """Asks for the restart and returns; the process ends a moment later."""

    def collect_diagnostics(self, dry_run: bool) -> Mapping[str, Any]:
        """Writes a redacted archive to local disk, and says where; its content never goes by MQTT."""


@dataclass(frozen=True, slots=True)
class Command:
    id: str
    verb: str
    args: Mapping[str, Any]
    dry_run: bool
    requester: str
    correlation: bytes | None
    session: str | None
    expires_ms: int
    digest: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One message to `res/{requester}`."""

    requester: str
    body: Body
    correlation: bytes | None


class _Rejected(Exception):
    """The command is not carried out; `code` is for machines."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class CommandDesk:
    """Takes commands, gives answers. `receive` and `answers` are the uplink thread's; commands run in
    a thread that exists only while one runs. `wake` is called when there is an answer."""

    def __init__(
        self,
        *,
        topics: Topics,
        session: str,
        actions: CommandActions,
        allow: Collection[str],
        per_minute: int,
        state_dir: Path,
        hmac_key_file: Path | None = None,
        wake: Callable[[], None] = lambda: None,
        ready_within_s: float = trials.READY_WITHIN_S,
    ) -> None:
        self.allow = frozenset(allow)
        self.signed = hmac_key_file is not None
        self.ignored = 0  # retained, unreadable, or asking for an answer elsewhere
        self.incidents: deque[str] = deque(maxlen=16)
        self._topics = topics
        self._session = session
        self._actions = actions
        self._rate = TokenBucket(per_minute / 60, per_minute)
        # Refusals cost a message each: a flood must not make us flood.
        self._refusals = TokenBucket(per_minute / 30, 2 * per_minute)
        self._state_dir = state_dir
        self._key_file = hmac_key_file
        self._wake = wake
        self._ready_within_s = ready_within_s
        self._answers: deque[Answer] = deque(maxlen=256)
        self._finished: deque[tuple[Command, Body]] = deque()
        self._running: threading.Thread | None = None
        self._stop = threading.Event()
        self._memory = _Memory(state_dir / FILE_NAME)

    # -- the uplink's side ------------------------------------------------------------------------

    def receive(self, message: Received, now: Moment) -> None:
        """Looks at one message on `cmd/+`. Never blocks for long, never raises."""
        if message.retained:
            # It would act again at every connect.
            self._ignore("a retained command", message.topic)
            return
        try:
            command = self._parse(message)
        except _Rejected as e:
            self._ignore(f"{e.code}: {e}", message.topic)
            return
        stored = self._memory.find(command.id)
        try:
            self._check(command, message.payload, now, stored)
        except _Rejected as e:
            log.info("command rejected verb=%s id=%s code=%s: %s", command.verb, command.id, e.code, e)
            if self._refusals.take(now.mono_ms / 1000):
                self._answer(command, response(
                    command.id, command.verb, "rejected", code=e.code, message=str(e), dry_run=command.dry_run
                ))  # fmt: skip
            return
        if stored is not None:
            if stored.answer is not None and self._refusals.take(now.mono_ms / 1000):
                self._answer(command, {**stored.answer, "replayed": True})
            return
        self._begin(command, now)

    def answers(self) -> list[Answer]:
        """What is to be sent now."""
        while self._finished:
            command, body = self._finished.popleft()
            self._memory.finish(command.id, body)
            self._answer(command, body)
            log.info("command ended verb=%s id=%s state=%s", command.verb, command.id, body["state"])
        if self._running is not None and not self._running.is_alive():
            self._running = None
        out = list(self._answers)
        self._answers.clear()
        return out

    def resume(self) -> None:
        """At the start: what an earlier run left unfinished is answered, a sharing trial is watched."""
        trial = trials.pending(self._state_dir)
        for ident, verb in self._memory.unfinished():
            if trial is not None and ident == trial.command_id:
                continue
            code = "restarted" if verb == "restart-agent" else "interrupted"
            state = "succeeded" if verb == "restart-agent" else "failed"
            message = None if verb == "restart-agent" else "the agent ended while the command ran"
            self._memory.finish(ident, response(ident, verb, state, code=code, message=message))
        if trial is not None:
            command = Command(trial.command_id, "set-sharing", {}, False, trial.requester, None, None, 0, "")
            self._start(command, lambda: self._watch_trial(trial))

    def stop(self, timeout_s: float = 0.3) -> None:
        """A command that still runs is left (its thread is a daemon) and reported at the next start."""
        self._stop.set()
        if self._running is not None:
            self._running.join(timeout_s)
        self._memory.close()

    # -- judging ------------------------------------------------------------------------------------

    def _parse(self, message: Received) -> Command:
        verb = self._topics.verb(message.topic)
        if verb is None:
            raise _Rejected("malformed", "no verb in the topic")
        if len(message.payload) > MAX_COMMAND_BYTES:
            raise _Rejected("malformed", f"larger than {MAX_COMMAND_BYTES} bytes")
        try:
            value = json.loads(message.payload)
        except (ValueError, RecursionError) as e:
            raise _Rejected("malformed", "not JSON") from e
        if not isinstance(value, dict) or not isinstance(value.get("id"), str) or not _ID.match(value["id"]):
            raise _Rejected("malformed", "no usable id")
        requester = value.get("replyTo", DEFAULT_REQUESTER)
        if message.response_topic is not None:
            # An answer anywhere else would let one who may send commands write where he may not.
            if not self._topics.is_own_response(message.response_topic):
                raise _Rejected("response-topic", "the response topic is not below the node's own res/")
            requester = message.response_topic.rpartition("/")[2]
        if not isinstance(requester, str) or not is_name(requester):
            raise _Rejected("malformed", "replyTo is no name")
        args = value.get("args", {})
        session = value.get("sess")
        expires = value.get("exp")
        return Command(
            id=value["id"],
            verb=verb,
            args=args if isinstance(args, dict) else {},
            dry_run=value.get("dryRun") is True,
            requester=requester,
            correlation=message.correlation,
            session=session if isinstance(session, str) else None,
            expires_ms=expires if isinstance(expires, int) and not isinstance(expires, bool) else -1,
            digest=hashlib.sha256(message.payload).hexdigest(),
        )

    def _check(self, command: Command, payload: bytes, now: Moment, stored: _Stored | None) -> None:
        value = json.loads(payload)
        if value.get("node") != self._topics.node:
            raise _Rejected("wrong-node", "the command names another node")
        if value.get("verb", command.verb) != command.verb:
            raise _Rejected("malformed", "verb and topic differ")
        if not isinstance(value.get("args", {}), dict) or not isinstance(value.get("dryRun", False), bool):
            raise _Rejected("malformed", "args must be an object, dryRun true or false")
        if self._key_file is not None:
            self._check_signature(value)
        if command.verb not in VERBS:
            raise _Rejected("unknown-verb", f"known are {', '.join(VERBS)}")
        if command.verb not in self.allow:
            raise _Rejected("not-allowed", f"{command.verb} is not in fleet.commands.allow of this node")
        if stored is not None:
            if stored.digest != command.digest:
                raise _Rejected("id-reused", "the id was used for another command")
            return
        if command.session is not None and command.session != self._session:
            raise _Rejected("wrong-session", "the node restarted since: read sess from its status")
        if now.synced:
            if command.expires_ms < 0:
                raise _Rejected("malformed", "exp (unix ms) is needed")
            if command.expires_ms <= now.wall_ms:
                raise _Rejected("expired", f"exp was {(now.wall_ms - command.expires_ms) / 1000:.0f} s ago")
            if command.expires_ms > now.wall_ms + MAX_FUTURE_MS:
                raise _Rejected("malformed", "exp is more than 7 days ahead")
        elif command.session is None:
            raise _Rejected("no-session", "the node's clock is not synchronised: sess is needed")
        if not self._rate.take(now.mono_ms / 1000):
            raise _Rejected("rate-limited", "too many commands")
        if self._running is not None and self._running.is_alive():
            raise _Rejected("busy", "another command runs")

    def _check_signature(self, value: Mapping[str, Any]) -> None:
        assert self._key_file is not None
        try:
            key = self._key_file.read_bytes().strip()
        except OSError as e:
            raise _Rejected("signature", f"the node cannot read its key: {e.strerror}") from e
        given = value.get("sig")
        if not key or not isinstance(given, str) or not given.isascii():
            raise _Rejected("signature", "sig is missing")
        if not hmac.compare_digest(given, sign(value, key)):
            raise _Rejected("signature", "sig is wrong")

    # -- acting -------------------------------------------------------------------------------------

    def _begin(self, command: Command, now: Moment) -> None:
        try:
            self._memory.begin(command, now.wall_ms)
        except FleetError as e:
            # What cannot be remembered could act twice.
            if command.verb != "snapshot":
                self._answer(
                    command, response(command.id, command.verb, "failed", code="no-memory", message=str(e))
                )
                return
        log.info("command accepted verb=%s id=%s dry_run=%s", command.verb, command.id, command.dry_run)
        self._answer(command, response(command.id, command.verb, "accepted", dry_run=command.dry_run))
        self._start(command, lambda: self._act(command))

    def _start(self, command: Command, act: Callable[[], Body]) -> None:
        def run() -> None:
            try:
                body = act()
            except _Interrupted as e:
                log.info("%s", e)
                return
            except AgentError as e:
                body = self._failure(command, "failed", str(e))
            except Exception as e:  # a fault of ours in a verb must not end the agent
                log.exception("command failed verb=%s id=%s", command.verb, command.id)
                body = self._failure(command, "internal", f"{type(e).__name__}: {e}")
            self._finished.append((command, body))
            self._wake()

        self._running = threading.Thread(target=run, name="uplink-command", daemon=True)
        self._running.start()

    def _act(self, command: Command) -> Body:
        if command.verb == "set-sharing":
            return self._set_sharing(command)
        result = self._call(command)
        return response(command.id, command.verb, "succeeded", result=result, dry_run=command.dry_run)

    def _call(self, command: Command) -> Mapping[str, Any]:
        a, args, dry = self._actions, command.args, command.dry_run
        match command.verb:
            case "snapshot":
                return a.snapshot()
            case "set-log-level":
                return a.set_log_level(_text(args, "level"), dry)
            case "cordon-gpu":
                return a.cordon_gpu(_text(args, "gpu"), dry)
            case "uncordon-gpu":
                return a.uncordon_gpu(_text(args, "gpu"), dry)
            case "drain-gpu":
                grace_s = args.get("graceS", 30)
                if (
                    isinstance(grace_s, bool)
                    or not isinstance(grace_s, (int, float))
                    or not 0 <= grace_s <= 3600
                ):
                    raise FleetError("graceS must be 0 to 3600")
                return a.drain_gpu(_text(args, "gpu"), float(grace_s), dry)
            case "restart-agent":
                return a.restart_agent(dry)
            case "collect-diagnostics":
                return a.collect_diagnostics(dry)
        raise FleetError(f"nothing does {command.verb}")

    def _set_sharing(self, command: Command) -> Body:
        sharing = command.args.get("sharing")
        if not isinstance(sharing, dict):
            raise FleetError("args.sharing must be an object")
        expected, actual = command.args.get("expectConfigHash"), self._actions.config_hash()
        if expected != actual:
            return self._failure(
                command, "config-changed", f"expectConfigHash is {expected!r}, the node's is {actual!r}"
            )
        # Checked first in any case: what cannot work is not tried.
        result = self._actions.set_sharing(sharing, True)
        if command.dry_run:
            return response(command.id, command.verb, "succeeded", result=result, dry_run=True)
        trial = trials.Trial(command.id, command.requester, self._actions.sharing())
        trials.begin(self._state_dir, trial)
        try:
            self._actions.set_sharing(sharing, False)
        except AgentError as e:
            self._revert(trial)
            return self._failure(command, "reverted", f"it could not be applied: {e}")
        return self._watch_trial(trial)

    def _watch_trial(self, trial: trials.Trial) -> Body:
        """Ready within a minute: it stays. Else what was before comes back."""
        deadline = time.monotonic() + self._ready_within_s
        # The old settings are still ready for a moment after the change was asked for.
        self._stop.wait(min(1.0, self._ready_within_s / 10))
        while not self._actions.ready():
            if self._stop.wait(0.25):
                raise _Interrupted("the agent stops while the new sharing is on trial")
            if time.monotonic() > deadline:
                self._revert(trial)
                return response(
                    trial.command_id, "set-sharing", "failed", code="reverted",
                    message=f"the agent was not ready within {self._ready_within_s:.0f} s: "
                    "the previous sharing is back",
                )  # fmt: skip
        trials.end(self._state_dir)
        return response(
            trial.command_id, "set-sharing", "succeeded", result={"configHash": self._actions.config_hash()}
        )

    def _revert(self, trial: trials.Trial) -> None:
        log.warning("sharing on trial is taken back id=%s", trial.command_id)
        trials.end(self._state_dir)
        self._actions.set_sharing(trial.previous, False)

    # -- answering ----------------------------------------------------------------------------------

    def _failure(self, command: Command, code: str, message: str) -> Body:
        return response(
            command.id, command.verb, "failed", code=code, message=message, dry_run=command.dry_run
        )

    def _answer(self, command: Command, body: Body) -> None:
        self._answers.append(Answer(command.requester, body, command.correlation))

    def _ignore(self, why: str, topic: str) -> None:
        self.ignored += 1
        text = f"ignored a command on {topic.rpartition('/')[2][:40]}: {why}"
        if not self.incidents or self.incidents[-1] != text:
            self.incidents.append(text)
        log.debug("%s", text)


class _Interrupted(AgentError):
    """The agent ends: the command's fate is known at the next start."""


def sign(command: Mapping[str, Any], key: bytes) -> str:
    """HMAC-SHA256 over the JSON of every field but `sig`: keys sorted, no spaces, UTF-8."""
    unsigned = {k: v for k, v in command.items() if k != "sig"}
    text = json.dumps(unsigned, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hmac.new(key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def _text(args: Mapping[str, Any], key: str) -> str:
    value = args.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= 200:
        raise FleetError(f"args.{key} is needed")
    return value


# -- memory ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stored:
    answer: Body | None
    digest: str


class _Memory:
    """Ids and results on disk: at least the last 2,000. One thread's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._open()

    def _open(self) -> None:
        for attempt in (1, 2):
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._db = sqlite3.connect(self._path, timeout=0.2)
                self._db.execute("PRAGMA journal_mode = WAL").fetchone()
                self._db.execute("PRAGMA cache_size = -64")
                self._db.execute(_SCHEMA)
            except (sqlite3.Error, OSError) as e:
                if self._db is not None:
                    self._db.close()
                    self._db = None
                log.warning("cannot remember commands file=%s: %s", self._path, e)
                if attempt == 2 or not isinstance(e, sqlite3.DatabaseError):
                    return
                self._path.unlink(missing_ok=True)
            else:
                return

    def find(self, ident: str) -> _Stored | None:
        if self._db is None:
            return None
        try:
            found = self._db.execute("SELECT answer, digest FROM commands WHERE id = ?", (ident,)).fetchone()
            return (
                None
                if found is None
                else _Stored(None if found[0] is None else json.loads(found[0]), found[1])
            )
        except (sqlite3.Error, ValueError) as e:
            log.warning("cannot look up a command: %s", e)
            return None

    def begin(self, command: Command, now_ms: int) -> None:
        """FleetError: it is not remembered."""
        if self._db is None:
            self._open()
        if self._db is None:
            raise FleetError("cannot remember the command")
        try:
            with self._db:
                self._db.execute(
                    "INSERT INTO commands VALUES (?, ?, ?, 1, 'running', NULL, ?)",
                    (command.id, command.verb, now_ms, command.digest),
                )
                self._db.execute(
                    "DELETE FROM commands WHERE state <> 'running' AND id NOT IN"
                    " (SELECT id FROM commands ORDER BY at DESC LIMIT ?)",
                    (MAX_REMEMBERED,),
                )
        except sqlite3.Error as e:
            raise FleetError(f"cannot remember the command: {e}") from e

    def finish(self, ident: str, body: Body) -> None:
        if self._db is None:
            return
        text = json.dumps(body)
        if len(text) > 16384:
            text = json.dumps({k: v for k, v in body.items() if k != "result"})
        try:
            with self._db:
                self._db.execute("UPDATE commands SET state = 'done', answer = ? WHERE id = ?", (text, ident))
        except sqlite3.Error as e:
            log.warning("cannot remember a command's result: %s", e)

    def unfinished(self) -> list[tuple[str, str]]:
        if self._db is None:
            return []
        try:
            return self._db.execute("SELECT id, verb FROM commands WHERE state = 'running'").fetchall()
        except sqlite3.Error as e:
            log.warning("cannot read what commands ran: %s", e)
            return []

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
