"""The local socket: what `status`, `top`, `cordon`, `reload` and `doctor` ask the running agent.

A unix stream socket (mode 0600, owner root) in `runDir`. One request and one answer per connection,
each a line of JSON: {"verb": "snapshot", "args": {…}} -> {"ok": true, "result": …} or
{"ok": false, "error": "sentence"}.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgeagent.errors import AgentError, ControlError

log = logging.getLogger(__name__)

SOCKET_NAME = "agent.sock"
LOCK_NAME = "agent.lock"
MAX_REQUEST_BYTES = 64 * 1024
REQUEST_TIMEOUT_S = 2.0

Verb = Callable[[Mapping[str, Any]], Any]


class InstanceLock:
    """At most one agent per run directory. The lock is the kernel's: it dies with the process."""

    def __init__(self, run_dir: Path) -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True, mode=0o755)
            self._fd = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise ControlError(f"cannot use run directory {run_dir}: {e.strerror}") from e
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise ControlError(
                f"another agent is running (pid {holder or 'unknown'}, lock {run_dir / LOCK_NAME}); "
                "stop it first: systemctl stop edgeagent"
            ) from e
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)


class ControlServer:
    """Answers on the socket. `verbs` run in this service's thread, one at a time: they must be quick."""

    def __init__(self, run_dir: Path, verbs: Mapping[str, Verb]) -> None:
        self._path = run_dir / SOCKET_NAME
        self._verbs = dict(verbs)
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._listener = self._listen()

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._path.unlink(missing_ok=True)  # a stale one: the instance lock says we are alone
            old = os.umask(0o177)
            try:
                listener.bind(str(self._path))
            finally:
                os.umask(old)
        except OSError as e:
            listener.close()
            raise ControlError(f"cannot listen on {self._path}: {e.strerror}") from e
        listener.listen(8)
        listener.setblocking(False)
        return listener

    def run(self, stop: threading.Event) -> None:
        """Serves until `stop`. A slow or silent client costs at most REQUEST_TIMEOUT_S."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_r, selectors.EVENT_READ)
            while not stop.is_set():
                for ready, _ in selector.select():
                    if ready.fileobj is self._listener:
                        self._accept()
        self._listener.close()
        self._path.unlink(missing_ok=True)
        os.close(self._wake_r)

    def wake(self) -> None:
        try:
            os.write(self._wake_w, b"x")
        except OSError:
            pass  # full pipe: it is awake already

    def _accept(self) -> None:
        try:
            conn, _ = self._listener.accept()
        except OSError:
            return
        with conn:
            conn.settimeout(REQUEST_TIMEOUT_S)
            try:
                answer = self._answer(_read_line(conn))
                conn.settimeout(REQUEST_TIMEOUT_S)
                conn.sendall(json.dumps(answer, allow_nan=False).encode() + b"\n")
            except (OSError, ValueError) as e:
                log.debug("control client went away error=%s", e)

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            verb = self._verbs[request["verb"]]
            args = request.get("args") or {}
        except (ValueError, KeyError, TypeError, RecursionError):
            return {"ok": False, "error": f"unknown request; verbs: {', '.join(sorted(self._verbs))}"}
        if not isinstance(args, dict):
            return {"ok": False, "error": "args must be an object"}
        try:
            return {"ok": True, "result": verb(args)}
        except AgentError as e:
            return {"ok": False, "error": str(e)}
        except Exception:  # a fault of ours in showing something must not end what is shown
            log.exception("request failed verb=%s", request["verb"])
            return {"ok": False, "error": "the agent failed in this request; its log says where"}


def _read_line(conn: socket.socket) -> bytes:
    """Raises OSError (TimeoutError) when the line does not come within REQUEST_TIMEOUT_S altogether."""
    data = b""
    until_s = time.monotonic() + REQUEST_TIMEOUT_S
    while not data.endswith(b"\n") and len(data) < MAX_REQUEST_BYTES:
        conn.settimeout(max(0.001, until_s - time.monotonic()))
        chunk = conn.recv(65536)
        if not chunk:
            break
        data += chunk
    return data


class ControlClient:
    """Asks the running agent. Raises ControlError with what to do about it."""

    def __init__(self, run_dir: str | Path, timeout_s: float = 10.0) -> None:
        self._path = Path(run_dir) / SOCKET_NAME
        self._timeout_s = timeout_s

    def call(self, verb: str, **args: Any) -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as conn:
            conn.settimeout(self._timeout_s)
            try:
                conn.connect(str(self._path))
                conn.sendall(json.dumps({"verb": verb, "args": args}).encode() + b"\n")
                chunks: list[bytes] = []
                while chunk := conn.recv(1 << 16):
                    chunks.append(chunk)
            except (FileNotFoundError, ConnectionRefusedError) as e:
                raise ControlError(
                    f"no agent answers on {self._path}; is it running? (systemctl status edgeagent)"
                ) from e
            except PermissionError as e:
                raise ControlError(f"not allowed to use {self._path}; run this as root") from e
            except OSError as e:
                raise ControlError(f"cannot ask the agent on {self._path}: {e}") from e
        try:
            answer = json.loads(b"".join(chunks))
        except ValueError as e:
            raise ControlError(f"the agent on {self._path} gave no answer") from e
        if not answer.get("ok"):
            raise ControlError(str(answer.get("error")))
        return answer.get("result")
