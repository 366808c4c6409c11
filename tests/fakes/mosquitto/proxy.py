"""A TCP proxy that cuts, stalls, half-opens and counts."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Pair:
    client: socket.socket
    server: socket.socket
    to: dict[socket.socket, bytearray] = field(default_factory=dict)


class FlakyProxy:
    """Listens on `port` and passes bytes to the broker's port.

    `cut()` resets every connection; `refuse(True)` closes new ones at once; `stall(True)` passes no
    bytes (a frozen path: nothing is lost); `half_open()` swallows the bytes of the present
    connections for ever while new ones work, as a NAT that forgot them.
    """

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.bytes_up = self.bytes_down = self.connections = 0
        self._stalled = self._refusing = self._closing = False
        self._dead: set[_Pair] = set()
        self._pairs: set[_Pair] = set()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="flaky-proxy", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def cut(self) -> None:
        with self._lock:
            for pair in list(self._pairs):
                self._drop(pair, reset=True)

    def stall(self, on: bool) -> None:
        with self._lock:
            self._stalled = on
            for pair in self._pairs:
                self._watch(pair)
        self._wake_w.send(b"x")

    def refuse(self, on: bool) -> None:
        self._refusing = on

    def half_open(self) -> None:
        with self._lock:
            self._dead |= self._pairs

    def close(self) -> None:
        self._closing = True
        self._wake_w.send(b"x")
        self._thread.join(5)

    def __enter__(self) -> FlakyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the thread

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._selector.select(5):
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._wake_r:
                        self._wake_r.recv(4096)
                    elif key.data in self._pairs:
                        assert isinstance(key.fileobj, socket.socket)
                        self._pass(key.data, key.fileobj, events)
        with self._lock:
            for pair in list(self._pairs):
                self._drop(pair)
        self._selector.close()
        for s in (self._listener, self._wake_r, self._wake_w):
            s.close()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        self.connections += 1
        if self._refusing:
            client.close()
            return
        try:
            server = socket.create_connection(("127.0.0.1", self.upstream_port), timeout=2)
        except OSError:
            client.close()
            return
        pair = _Pair(client, server, {client: bytearray(), server: bytearray()})
        for s in (client, server):
            s.setblocking(False)
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(s, selectors.EVENT_READ, pair)
        self._pairs.add(pair)
        self._watch(pair)

    def _watch(self, pair: _Pair) -> None:
        for s in (pair.client, pair.server):
            events = 0 if self._stalled else selectors.EVENT_READ
            if pair.to[s] and not self._stalled:
                events |= selectors.EVENT_WRITE
            registered = s in self._selector.get_map()
            if events and registered:
                self._selector.modify(s, events, pair)
            elif events:
                self._selector.register(s, events, pair)
            elif registered:
                self._selector.unregister(s)

    def _pass(self, pair: _Pair, sock: socket.socket, events: int) -> None:
        other = pair.server if sock is pair.client else pair.client
        try:
            if events & selectors.EVENT_WRITE and pair.to[sock]:
                del pair.to[sock][: sock.send(pair.to[sock])]
            if events & selectors.EVENT_READ:
                data = sock.recv(65536)
                if not data:
                    self._drop(pair)
                    return
                if sock is pair.client:
                    self.bytes_up += len(data)
                else:
                    self.bytes_down += len(data)
                if pair not in self._dead:
                    pair.to[other] += data
                    del pair.to[other][: other.send(pair.to[other])]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(pair)
            return
        self._watch(pair)

    def _drop(self, pair: _Pair, *, reset: bool = False) -> None:
        self._pairs.discard(pair)
        self._dead.discard(pair)
        for s in (pair.client, pair.server):
            if s in self._selector.get_map():
                self._selector.unregister(s)
            if reset:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            s.close()
