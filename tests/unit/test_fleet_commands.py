"""Commands: which are taken, each done once, every one answered, none of them a shell."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from edgeagent.errors import NodeError
from edgeagent.fleet import commands, trial
from edgeagent.fleet.client import Received
from edgeagent.fleet.commands import VERBS, CommandDesk, sign
from edgeagent.fleet.topics import Topics
from edgeagent.node.clock import Moment
from tests.fakes.fleet import schemas
from tests.fakes.fleet.harness import Actions, wait_until
from tests.fakes.fleet.snapshots import NODE, SITE

TOPICS = Topics(SITE, NODE)
NOW_MS = 1_790_000_000_000


class Desk:
    """A desk with its clock; collects the answers."""

    def __init__(self, state_dir: Path, **more: Any) -> None:
        self.actions = Actions()
        self.now = Moment(NOW_MS, 1_000_000, "boot", True)
        values = {"allow": VERBS, "per_minute": 600, "session": "sess-1", **more}
        self.desk = CommandDesk(topics=TOPICS, actions=self.actions, state_dir=state_dir, **values)

    def send(
        self,
        verb: str = "cordon-gpu",
        *,
        raw: bytes | None = None,
        mqtt: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        body = {
            "id": "c1", "verb": verb, "node": NODE, "exp": NOW_MS + 60_000, "args": {"gpu": "GPU-1"},
            **fields,
        }  # fmt: skip
        body = {k: v for k, v in body.items() if v is not None}
        payload = json.dumps(body).encode() if raw is None else raw
        values = {
            "retained": False,
            "mid": 1,
            "qos": 1,
            "response_topic": f"{TOPICS.base}/res/ops-1",
            **(mqtt or {}),
        }
        self.desk.receive(
            Received(epoch=1, topic=f"{TOPICS.base}/cmd/{verb}", payload=payload, **values), self.now
        )

    def answers(self) -> list[dict[str, Any]]:
        """All answers, once the command ended."""
        wait_until(lambda: self.desk._running is None or not self.desk._running.is_alive())
        out = self.desk.answers()
        for a in out:
            envelope = {
                "v": 1,
                "id": "x",
                "ts": 1,
                "mono": 1,
                "boot": "b",
                "sess": "s",
                "seq": 1,
                "clk": "synced",
            }
            schemas.check("res", {**envelope, **a.body})
        return [a.body for a in out]

    def code(self) -> str | None:
        """The code of the only answer."""
        (answer,) = self.answers()
        assert answer["state"] == "rejected"
        return str(answer["code"])


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.mark.parametrize(
    ("verb", "args", "call"),
    [
        ("snapshot", {}, ("snapshot",)),
        ("set-log-level", {"level": "debug"}, ("set-log-level", "debug", False)),
        ("cordon-gpu", {"gpu": "GPU-1"}, ("cordon-gpu", "GPU-1", False)),
        ("uncordon-gpu", {"gpu": "GPU-1"}, ("uncordon-gpu", "GPU-1", False)),
        ("drain-gpu", {"gpu": "GPU-1", "graceS": 5}, ("drain-gpu", "GPU-1", 5.0, False)),
        ("restart-agent", {}, ("restart-agent", False)),
        ("collect-diagnostics", {}, ("collect-diagnostics", False)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_every_verb_reaches_its_callable_and_is_answered(desk: Desk, verb: str, args: Any, call: Any) -> None:
    desk.send(verb, args=args)
    states = [a["state"] for a in desk.answers()]
    assert states == ["accepted", "succeeded"]
    assert desk.actions.calls == [call]


def test_a_dry_run_is_passed_on_and_said(desk: Desk) -> None:
    desk.send(dryRun=True)
    assert all(a["dryRun"] for a in desk.answers())
    assert desk.actions.calls == [("cordon-gpu", "GPU-1", True)]


def test_what_the_agent_cannot_do_is_a_failure_with_its_sentence(desk: Desk) -> None:
    def cannot(uuid: str, dry_run: bool) -> Any:
        raise NodeError("cannot cordon GPU-1: no such GPU")

    desk.actions.cordon_gpu = cannot  # type: ignore[method-assign]
    desk.send()
    answer = desk.answers()[-1]
    assert (answer["state"], answer["code"], answer["message"]) == (
        "failed", "failed", "cannot cordon GPU-1: no such GPU",
    )  # fmt: skip


def test_a_fault_of_ours_is_answered_too(desk: Desk) -> None:
    desk.actions.cordon_gpu = lambda uuid, dry_run: 1 / 0  # type: ignore[assignment, method-assign]
    desk.send()
    assert desk.answers()[-1]["code"] == "internal"


# -- what is not taken ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"node": "box-2"}, "wrong-node"),
        ({"node": None}, "wrong-node"),
        ({"exp": NOW_MS - 1}, "expired"),
        ({"exp": NOW_MS + 8 * 86_400_000}, "malformed"),
        ({"exp": None}, "malformed"),
        ({"exp": "soon"}, "malformed"),
        ({"exp": True}, "malformed"),
        ({"sess": "another"}, "wrong-session"),
        ({"args": []}, "malformed"),
        ({"dryRun": "yes"}, "malformed"),
    ],
    ids=str,
)
def test_what_is_wrong_is_rejected_with_a_code(desk: Desk, fields: Any, code: str) -> None:
    desk.send(**fields)
    assert desk.code() == code
    assert desk.actions.calls == []


def test_verb_and_topic_must_agree(desk: Desk) -> None:
    desk.send(
        "snapshot", raw=json.dumps({"id": "c", "verb": "drain-gpu", "node": NODE, "exp": NOW_MS + 1}).encode()
    )
    assert desk.code() == "malformed"


@pytest.mark.parametrize("verb", ["shell", "exec", "reboot"])
def test_there_is_no_such_verb(desk: Desk, verb: str) -> None:
    desk.send(verb)
    assert desk.code() == "unknown-verb"


def test_only_what_the_node_allows(tmp_path: Path) -> None:
    desk = Desk(tmp_path, allow=("snapshot",))
    desk.send("drain-gpu")
    assert desk.code() == "not-allowed"
    desk.send("snapshot", id="c2")
    assert desk.answers()[-1]["state"] == "succeeded"


@pytest.mark.parametrize(
    "mqtt",
    [
        {"retained": True},
        {"response_topic": f"gpufleet/v1/{SITE}/box-2/res/ops"},
        {"response_topic": f"{TOPICS.base}/status"},
        {"response_topic": "x/#"},
    ],
    ids=str,
)
def test_retained_and_misdirected_commands_are_ignored_without_an_answer(desk: Desk, mqtt: Any) -> None:
    desk.send(mqtt=mqtt)
    assert desk.answers() == []
    assert desk.actions.calls == []
    assert desk.desk.ignored == 1
    assert desk.desk.incidents


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"id":5}',
        b'{"id":"../x"}',
        b"\xff\xfe",
        b"[" * 100_000,
        b"x" * 9000,
        b"{}",
    ],
)
def test_garbage_is_ignored(desk: Desk, raw: bytes) -> None:
    desk.send(raw=raw)
    assert desk.answers() == []
    assert desk.desk.ignored == 1


def test_the_answer_goes_where_it_was_asked_for(desk: Desk) -> None:
    desk.send(mqtt={"response_topic": None, "correlation": b"\x01"}, replyTo="page-7")
    wait_until(lambda: desk.actions.calls)
    assert {(a.requester, a.correlation) for a in desk.desk.answers()} == {("page-7", b"\x01")}


# -- time and sessions ----------------------------------------------------------------------------


def test_without_a_synchronised_clock_the_session_decides(desk: Desk) -> None:
    desk.now = Moment(5, 1_000_000, "boot", False)
    desk.send(exp=1)
    assert desk.code() == "no-session"
    desk.send(exp=1, sess="sess-1")
    assert desk.answers()[-1]["state"] == "succeeded"


# -- once only ------------------------------------------------------------------------------------


def test_a_repeated_command_is_answered_from_the_stored_result(desk: Desk) -> None:
    desk.send()
    first = desk.answers()[-1]
    for _ in range(3):
        desk.send()
        (again,) = desk.answers()
        assert again == {**first, "replayed": True}
    assert len(desk.actions.calls) == 1


def test_an_id_cannot_be_used_for_something_else(desk: Desk) -> None:
    desk.send()
    desk.answers()
    desk.send("uncordon-gpu")
    assert desk.code() == "id-reused"


def test_a_command_that_killed_the_agent_is_not_run_again(tmp_path: Path) -> None:
    first = Desk(tmp_path)
    first.actions.block = threading.Event()
    first.send("drain-gpu")
    wait_until(lambda: first.actions.calls)
    second = Desk(tmp_path)  # as after kill −9: the first never finished
    second.desk.resume()
    second.send("drain-gpu")
    (answer,) = second.answers()
    assert (answer["state"], answer["code"], answer["replayed"]) == ("failed", "interrupted", True)
    assert second.actions.calls == []
    first.actions.block.set()


def test_a_restart_succeeds_by_having_happened(tmp_path: Path) -> None:
    first = Desk(tmp_path)
    first.actions.block = threading.Event()
    first.send("restart-agent", args={})
    wait_until(lambda: first.actions.calls)
    second = Desk(tmp_path)
    second.desk.resume()
    second.send("restart-agent", args={})
    assert second.answers()[0]["state"] == "succeeded"
    first.actions.block.set()


def test_ids_are_remembered_across_restarts_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "MAX_REMEMBERED", 5)
    desk = Desk(tmp_path)
    for n in range(9):
        desk.now = Moment(NOW_MS + n, 1_000_000 + 1000 * n, "boot", True)
        desk.send("snapshot", id=f"c{n}", args={})
        desk.answers()
    again = Desk(tmp_path)
    again.send("snapshot", id="c8", args={})
    assert again.answers()[0]["replayed"] is True
    assert again.actions.calls == []


def test_without_memory_only_what_is_harmless_is_done(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    desk = Desk(tmp_path / "state")
    desk.send()
    assert desk.answers()[-1]["code"] == "no-memory"
    desk.send("snapshot", id="c2", args={})
    assert desk.answers()[-1]["state"] == "succeeded"


def test_one_at_a_time(desk: Desk) -> None:
    desk.actions.block = threading.Event()
    desk.send(id="a")
    wait_until(lambda: desk.actions.calls)
    desk.send(id="b")
    states = [(a.body["cmd"], a.body["state"]) for a in desk.desk.answers()]
    assert states == [("a", "accepted"), ("b", "rejected")]
    desk.actions.block.set()
    assert desk.answers()[-1]["state"] == "succeeded"


def test_too_many_are_rejected_and_a_flood_is_not_answered_in_full(tmp_path: Path) -> None:
    desk = Desk(tmp_path, per_minute=6)
    answered = 0
    for n in range(60):
        desk.send("snapshot", id=f"c{n}", args={})
        answered += len(desk.answers())
    assert len(desk.actions.calls) == 6
    assert answered <= 2 * 6 + 12


# -- signatures -----------------------------------------------------------------------------------


@pytest.fixture
def signed(tmp_path: Path) -> Desk:
    key = tmp_path / "key"
    key.write_bytes(b"0123456789abcdef\n")
    return Desk(tmp_path, hmac_key_file=key)


def signed_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "id": "c1",
        "verb": "cordon-gpu",
        "node": NODE,
        "exp": NOW_MS + 60_000,
        "args": {"gpu": "GPU-1"},
    }
    fields["sig"] = sign(fields, b"0123456789abcdef")
    return {**fields, **changes}


def test_a_signed_command_is_taken(signed: Desk) -> None:
    signed.send(**signed_fields())
    assert signed.answers()[-1]["state"] == "succeeded"


@pytest.mark.parametrize(
    "changes",
    [
        {"sig": None},
        {"sig": "0" * 64},
        {"sig": "ü"},
        {"sig": 5},
        {"args": {"gpu": "GPU-2"}},
        {"exp": NOW_MS + 90_000},
    ],
    ids=str,
)
def test_a_wrong_signature_is_rejected(signed: Desk, changes: Any) -> None:
    signed.send(**signed_fields(**changes))
    assert signed.code() == "signature"


def test_a_key_that_cannot_be_read_lets_nothing_through(tmp_path: Path) -> None:
    desk = Desk(tmp_path, hmac_key_file=tmp_path / "absent")
    desk.send(**signed_fields())
    assert desk.code() == "signature"


# -- sharing on trial -----------------------------------------------------------------------------

NEW = {"placement": "spread"}


def sharing(**changes: Any) -> dict[str, Any]:
    return {"args": {"sharing": NEW, "expectConfigHash": "c0ffee123456", **changes}}


def test_sharing_is_set_when_the_agent_is_ready_with_it(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ready_within_s=2.0)
    desk.send("set-sharing", **sharing())
    assert desk.answers()[-1]["state"] == "succeeded"
    assert desk.actions.calls == [("set-sharing", NEW, True), ("set-sharing", NEW, False)]
    assert trial.pending(tmp_path) is None


def test_sharing_with_another_config_hash_is_not_touched(desk: Desk) -> None:
    desk.send("set-sharing", **sharing(expectConfigHash="old"))
    assert desk.answers()[-1]["code"] == "config-changed"
    assert desk.actions.calls == []


def test_sharing_reverts_by_itself_when_the_agent_is_not_ready(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ready_within_s=0.3)
    desk.actions.is_ready = False
    desk.send("set-sharing", **sharing())
    answer = desk.answers()[-1]
    assert (answer["state"], answer["code"]) == ("failed", "reverted")
    assert desk.actions.present == {"placement": "binpack"}
    assert trial.pending(tmp_path) is None


@pytest.mark.parametrize("ready", [True, False])
def test_a_trial_goes_on_after_the_restart_it_needed(tmp_path: Path, ready: bool) -> None:
    first = Desk(tmp_path, ready_within_s=30.0)
    first.actions.is_ready = False
    first.send("set-sharing", **sharing())
    wait_until(lambda: len(first.actions.calls) == 2)
    first.desk.stop(timeout_s=2.0)
    assert trial.pending(tmp_path) is not None
    second = Desk(tmp_path, ready_within_s=0.3)
    second.actions.is_ready = ready
    second.desk.resume()
    answer = second.answers()[-1]
    assert answer["cmd"] == "c1"
    assert answer["state"] == ("succeeded" if ready else "failed")
    assert second.actions.calls == ([] if ready else [("set-sharing", {"placement": "binpack"}, False)])
    second.send("set-sharing", **sharing())
    assert second.answers()[0]["replayed"] is True


def test_starts_that_never_got_ready_end_a_trial(tmp_path: Path) -> None:
    trial.begin(tmp_path, trial.Trial("c1", "ops", {"placement": "binpack"}))
    assert [trial.count_start(tmp_path) for _ in range(trial.MAX_STARTS)] == [None] * trial.MAX_STARTS
    must_revert = trial.count_start(tmp_path)
    assert must_revert is not None
    assert must_revert.previous == {"placement": "binpack"}
    trial.end(tmp_path)
    assert trial.count_start(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"command_id": 1}'])
def test_a_broken_trial_note_is_no_trial(tmp_path: Path, text: str) -> None:
    (tmp_path / trial.FILE_NAME).write_text(text)
    assert trial.pending(tmp_path) is None
