"""Who may use the page: sessions, tries, host names, origins; and the commands it may send."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeagent.dashboard import access, commands
from edgeagent.dashboard.node import Node
from edgeagent.errors import FleetError
from edgeagent.fleet.commands import sign
from tests.fakes.fleet import schemas


def test_a_session_is_opened_by_the_secret_and_ends() -> None:
    sessions = access.Sessions("correct horse battery")
    assert sessions.knows("correct horse battery")
    assert not sessions.knows("correct horse batterx")
    token = sessions.open(0.0)
    assert sessions.admits(token, None, 1.0)
    assert not sessions.admits(token + "x", None, 1.0)
    assert sessions.admits(token, None, access.SESSION_S), "use keeps it"
    assert not sessions.admits(token, None, 3 * access.SESSION_S)
    other = sessions.open(0.0)
    sessions.close(other)
    assert not sessions.admits(other, None, 1.0)


def test_a_script_gives_the_secret_itself() -> None:
    sessions = access.Sessions("secret")
    assert sessions.admits(None, "Bearer secret", 0.0)
    assert not sessions.admits(None, "Bearer wrong", 0.0)
    assert not sessions.admits(None, "Basic secret", 0.0)
    assert not sessions.admits("", None, 0.0)


def test_there_are_not_endlessly_many_sessions() -> None:
    sessions = access.Sessions("secret")
    first = sessions.open(0.0)
    for _ in range(access.MAX_SESSIONS):
        last = sessions.open(0.0)
    assert not sessions.admits(first, None, 1.0)
    assert sessions.admits(last, None, 1.0)


def test_wrong_secrets_use_up_tries_which_come_back() -> None:
    limiter = access.LoginLimiter()
    for _ in range(access.LOGIN_TRIES):
        assert limiter.allowed("10.0.0.1", 0.0)
        limiter.failed("10.0.0.1", 0.0)
    assert not limiter.allowed("10.0.0.1", 1.0)
    assert limiter.allowed("10.0.0.2", 1.0), "others are not locked out"
    assert limiter.allowed("10.0.0.1", access.LOGIN_REFILL_S + 1)


def test_many_addresses_together_are_limited_too() -> None:
    limiter = access.LoginLimiter()
    tried = 0
    while limiter.allowed(f"10.0.{tried >> 8}.{tried & 255}", 0.0):
        limiter.failed(f"10.0.{tried >> 8}.{tried & 255}", 0.0)
        tried += 1
    assert tried == access.LOGIN_TRIES_ALL


HOSTS = {
    "127.0.0.1:8080": True, "[::1]:8080": True, "10.1.2.3": True, "localhost:8080": True, "fleet.example.com": True,
    "FLEET.example.com.": True, "evil.example.com": False, "127.0.0.1.evil.com": False, "": False,
    "x" * 400: False, "[::1": False, "a b": False,
}  # fmt: skip


@pytest.mark.parametrize(("host", "allowed"), HOSTS.items())
def test_only_addresses_and_own_names_are_answered(host: str, allowed: bool) -> None:
    """A name of somebody else that resolves to this address is DNS rebinding."""
    assert access.host_allowed(host, access.own_names(["Fleet.example.com"])) is allowed


ORIGINS = [
    ({"host": "fleet:8080", "origin": "http://fleet:8080"}, True),
    ({"host": "fleet:8080", "origin": "http://evil"}, False),
    ({"host": "fleet:8080", "origin": "http://fleet:9090"}, False),
    ({"host": "fleet:8080", "origin": "null"}, False),
    ({"host": "fleet:8080"}, False),
    ({"host": "fleet:8080", "authorization": "Bearer x"}, True),
    ({"host": "fleet:8080", "authorization": "Bearer x", "origin": "http://evil"}, False),
]


@pytest.mark.parametrize(("headers", "same"), ORIGINS)
def test_what_changes_something_must_come_from_the_page(headers: dict[str, str], same: bool) -> None:
    assert access.same_origin(headers) is same


# -- commands --------------------------------------------------------------------------------------


def make_node(**changes: object) -> Node:
    node = Node("plant-7", "box-1", session="5e55", commands_allowed=("snapshot", "cordon-gpu"))
    for name, value in changes.items():
        setattr(node, name, value)
    return node


def test_a_command_is_what_the_interface_says() -> None:
    entry, data = commands.build(
        make_node(), "cordon-gpu", {"gpu": "GPU-1"}, True, requester="page-1", now_ms=1000
    )
    payload = json.loads(data)
    schemas.check("cmd", payload)
    assert (payload["id"], payload["node"], payload["sess"], payload["dryRun"]) == (
        entry.id,
        "box-1",
        "5e55",
        True,
    )
    assert payload["exp"] - payload["iat"] == commands.LIFETIME_MS


BAD = {
    "unknown": ("rm", {}, False, "there is no command"),
    "not allowed": ("restart-agent", {}, False, "does not allow restart-agent"),
    "no object": ("snapshot", [], False, "args must be an object"),
    "no flag": ("snapshot", {}, "yes", "dryRun true or false"),
    "no JSON": ("snapshot", {"x": float("nan")}, False, "cannot be sent"),
    "too large": ("snapshot", {"x": "y" * 9000}, False, "larger than"),
    "no text": (7, {}, False, "there is no command"),
}


@pytest.mark.parametrize(("verb", "args", "dry_run", "says"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_sent_says_why(verb: object, args: object, dry_run: object, says: str) -> None:
    with pytest.raises(FleetError, match=says):
        commands.build(make_node(), verb, args, dry_run, requester="page-1", now_ms=1000)


def test_nodes_that_want_signed_commands_get_them(tmp_path: Path) -> None:
    node = make_node(signed_commands=True)
    with pytest.raises(FleetError, match="--command-keys"):
        commands.build(node, "snapshot", {}, False, requester="page-1", now_ms=1)
    with pytest.raises(FleetError, match="cannot read the key"):
        commands.build(node, "snapshot", {}, False, requester="page-1", now_ms=1, keys=tmp_path)
    (tmp_path / "box-1.key").write_bytes(b"k3y\n")
    _, data = commands.build(node, "snapshot", {}, False, requester="page-1", now_ms=1, keys=tmp_path)
    payload = json.loads(data)
    assert payload["sig"] == sign(payload, b"k3y")
