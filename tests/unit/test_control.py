"""The local socket: what any client may send, and what it costs the agent."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent import control
from edgeagent.control import ControlClient, ControlServer, InstanceLock
from edgeagent.errors import ControlError, NodeError

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


def fail(args: object) -> None:
    raise NodeError("cannot do it: on purpose")


def crash(args: object) -> None:
    raise ZeroDivisionError("a fault of ours")


@pytest.fixture
def server(short_dir: Path) -> Iterator[Path]:
    """A running server's directory. Its thread must live until the stop."""
    verbs = {"echo": lambda args: dict(args), "fail": fail, "crash": crash, "nan": lambda args: float("nan")}
    served = ControlServer(short_dir, verbs)
    stop = threading.Event()
    thread = threading.Thread(target=served.run, args=(stop,))
    thread.start()
    yield short_dir
    assert thread.is_alive()
    stop.set()
    served.wake()
    thread.join(5)
    assert not (short_dir / control.SOCKET_NAME).exists()


def send(directory: Path, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as conn:
        conn.settimeout(10)
        conn.connect(str(directory / control.SOCKET_NAME))
        try:
            conn.sendall(data)
            conn.shutdown(socket.SHUT_WR)
            return conn.makefile("rb").read()
        except (BrokenPipeError, ConnectionResetError):
            return b""


def test_it_is_for_its_owner_alone(server: Path) -> None:
    assert stat.S_IMODE(os.stat(server / control.SOCKET_NAME).st_mode) == 0o600


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"null\n", b"[]\n", b"{}\n", b'{"verb": []}\n', b'{"verb": "none"}\n', b"\xff\n", b"[" * 60_000,
     b'{"verb": "echo", "args": 3}\n', b'{"a":' * 10_000, b"x" * 200_000],
    ids=lambda line: repr(line[:20]),
)  # fmt: skip
def test_nonsense_gets_an_answer_or_nothing_and_the_next_is_served(server: Path, line: bytes) -> None:
    answer = send(server, line)
    assert not answer or json.loads(answer)["ok"] is False
    assert ControlClient(server).call("echo", a=1) == {"a": 1}


def test_whatever_is_sent_the_server_lives(server: Path) -> None:
    @settings(max_examples=60, deadline=None)
    @given(st.binary(max_size=200) | ANYTHING.map(lambda v: json.dumps(v).encode()))
    def sent(data: bytes) -> None:
        send(server, data)

    sent()
    assert ControlClient(server).call("echo") == {}


def test_a_verb_that_cannot_is_told_in_its_words_and_a_fault_of_ours_ends_nothing(server: Path) -> None:
    with pytest.raises(ControlError, match="on purpose"):
        ControlClient(server).call("fail")
    with pytest.raises(ControlError, match="its log says where"):
        ControlClient(server).call("crash")
    with pytest.raises(ControlError, match="gave no answer"):
        ControlClient(server).call("nan")


def test_a_client_that_drips_is_cut_off_in_time(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "REQUEST_TIMEOUT_S", 0.3)
    done = threading.Event()

    def drip() -> None:
        with socket.socket(socket.AF_UNIX) as conn:
            conn.connect(str(server / control.SOCKET_NAME))
            try:
                while not done.wait(0.05):
                    conn.send(b" ")
            except (BrokenPipeError, ConnectionResetError):
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        assert ControlClient(server, timeout_s=5).call("echo") == {}
    finally:
        done.set()
        dripping.join(5)


def test_one_agent_a_directory(short_dir: Path) -> None:
    first = InstanceLock(short_dir)
    with pytest.raises(ControlError, match=f"pid {os.getpid()}"):
        InstanceLock(short_dir)
    first.release()
    InstanceLock(short_dir).release()
