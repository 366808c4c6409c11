"""gRPC servers on unix sockets that behave like the kubelet's when it stops and starts.

gRPC removes a socket's file when its server stops; a kubelet leaves it behind. So the server listens
under a name of its own and the public name is a second link to it.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

_MAX_PATH_BYTES = 107  # sun_path without its final NUL


class UnixServer:
    """A gRPC server reached under `path`. `refuse_s`: it exists but refuses connections at first."""

    def __init__(
        self, path: Path, handler: grpc.GenericRpcHandler, *, name: str, refuse_s: float = 0.0
    ) -> None:
        if len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise ValueError(f"{path} is too long for a unix socket; use a shorter root")
        self.path = path
        self._pool = ThreadPoolExecutor(8, thread_name_prefix=name)
        self._server = grpc.server(self._pool, handlers=(handler,))
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = path.parent.parent / f".{path.parent.name[0]}"
        hidden.unlink(missing_ok=True)
        self._server.add_insecure_port(f"unix:{hidden}")
        self._server.start()
        self._relay: _Relay | None = None
        path.unlink(missing_ok=True)
        if refuse_s > 0:
            self._relay = _Relay(path, hidden, refuse_s, name)
        else:
            os.link(hidden, path)

    def stop(self) -> None:
        """Ends the server; the file `path` stays, and nobody answers there."""
        if self._relay is not None:
            self._relay.stop()
        self._server.stop(None).wait()
        self._pool.shutdown(wait=True)


class _Relay:
    """A socket that is bound at once, listens after `refuse_s` and passes everything on to `target`."""

    def __init__(self, path: Path, target: Path, refuse_s: float, name: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._target = target
        self._refuse_s = refuse_s
        self._stop = threading.Event()
        self._wake_read, self._wake_write = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name=f"{name}-relay", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._wake_write.send(b"x")
        self._thread.join()
        for one in (self._listener, self._wake_read, self._wake_write):
            one.close()

    def _run(self) -> None:
        if self._stop.wait(self._refuse_s):
            return
        self._listener.listen()
        peers: dict[socket.socket, socket.socket] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while not self._stop.is_set():
                for key, _ in selector.select():
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    if sock is self._listener:
                        near, _address = sock.accept()
                        far = socket.socket(socket.AF_UNIX)
                        far.connect(str(self._target))
                        peers[near], peers[far] = far, near
                        selector.register(near, selectors.EVENT_READ)
                        selector.register(far, selectors.EVENT_READ)
                    elif sock in peers:
                        self._pass_on(sock, peers, selector)
        for one in peers:
            one.close()

    def _pass_on(
        self,
        sock: socket.socket,
        peers: dict[socket.socket, socket.socket],
        selector: selectors.BaseSelector,
    ) -> None:
        try:
            data = sock.recv(65536)
            if data:
                peers[sock].sendall(data)
                return
        except OSError:
            pass  # either side is gone: close both
        for one in (sock, peers[sock]):
            selector.unregister(one)
            del peers[one]
            one.close()
