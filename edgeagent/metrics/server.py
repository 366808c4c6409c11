"""The HTTP side: /metrics, /healthz and /readyz for Prometheus and probes, and nothing else.

A handful of short-lived threads at most; a client that is slow, silent or talks nonsense costs one of
them a few seconds. A port that cannot be had is tried again: metrics must not take the agent down.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from edgeagent.snapshot import NodeSnapshot

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4
IO_TIMEOUT_S = 5.0
RETRY_S = 30.0
TEXT = "text/plain; charset=utf-8"

Probe = Callable[[], tuple[bool, str]]  # (all well, one sentence)


def render(snapshot: NodeSnapshot, dcgm: bool, hami: bool) -> tuple[bytes, str]:
    """(body, content type) of /metrics. The library is imported at the first scrape: a node that
    nobody scrapes does not pay for it."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

    from edgeagent.metrics import series

    class Snapshot:
        def collect(self) -> Any:
            yield from series.own(snapshot)
            if dcgm:
                yield from series.dcgm(snapshot)
            if hami:
                yield from series.hami(snapshot)

    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(Snapshot())
    return generate_latest(registry), CONTENT_TYPE_LATEST


class MetricsServer:
    """`page` gives the body of /metrics; `healthy` and `ready` answer the probes (200 or 503)."""

    def __init__(
        self, listen: str, page: Callable[[], tuple[bytes, str]], healthy: Probe, ready: Probe
    ) -> None:
        host, _, port = listen.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._pages: dict[str, Callable[[], tuple[int, bytes, str]]] = {
            "/metrics": lambda: (HTTPStatus.OK, *page()),
            "/healthz": lambda: _probe(healthy),
            "/readyz": lambda: _probe(ready),
        }
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, float] = {}  # open ones, with their start (monotonic)
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.address: tuple[str, int] | None = None  # where it listens, once it does
        self.problem: str | None = None

    def run(self, stop: threading.Event) -> None:
        """Serves until `stop`."""
        try:
            while not stop.is_set():
                listener = self._listen()
                if listener is None:
                    stop.wait(RETRY_S)
                    continue
                with listener:
                    self._serve(listener, stop)
        finally:
            os.close(self._wake_r)

    def wake(self) -> None:
        """Makes `run` look at its stop event."""
        try:
            os.write(self._wake_w, b"x")
        except OSError:
            pass  # full: it is awake already

    def _listen(self) -> socket.socket | None:
        try:
            try:
                listener = _bind(self._host, self._port)
            except OSError as e:
                if self._host:
                    raise
                log.debug("no dual-stack socket, using IPv4 error=%s", e)
                # The configured "every address", on a host without IPv6.
                listener = _bind("0.0.0.0", self._port)  # noqa: S104
        except OSError as e:
            problem = f"cannot listen on {self._host}:{self._port}: {e.strerror or e}"
            if problem != self.problem:
                log.warning("metrics are not served reason=%s", problem)
            self.problem = problem
            return None
        self.problem = None
        self.address = listener.getsockname()[:2]
        log.info("metrics are served address=%s port=%s", *self.address)
        return listener

    def _serve(self, listener: socket.socket, stop: threading.Event) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(self._wake_r, selectors.EVENT_READ)
            while not stop.is_set():
                for ready, _ in selector.select():
                    if ready.fileobj is listener:
                        self._accept(listener)
                    else:
                        os.read(self._wake_r, 64)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, client = listener.accept()
        except OSError:
            return  # it went away again
        connection.settimeout(IO_TIMEOUT_S)
        if not self._admit(connection):
            _refuse(connection)
            return
        # Not a service: it ends by itself within a few time-outs, whatever the client does.
        threading.Thread(
            target=self._talk, args=(connection, client), name="metrics-conn", daemon=True
        ).start()

    def _admit(self, connection: socket.socket) -> bool:
        """Whether there is room. A client that drips bytes for ever loses its place to a new one."""
        now = time.monotonic()
        with self._lock:
            if len(self._connections) >= MAX_CONNECTIONS:
                oldest = min(self._connections, key=self._connections.__getitem__)
                if now - self._connections[oldest] < 2 * IO_TIMEOUT_S:
                    return False
                try:
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread wakes up and ends
                except OSError:
                    pass  # it is ending already
                del self._connections[oldest]
            self._connections[connection] = now
            return True

    def _talk(self, connection: socket.socket, client: Any) -> None:
        try:
            with connection:
                _Handler(connection, client, self)  # type: ignore[arg-type]  # see _Handler.server
        except (OSError, ValueError) as e:
            log.debug("metrics client went away client=%s error=%s", client, e)
        finally:
            with self._lock:
                self._connections.pop(connection, None)

    def answer(self, path: str) -> tuple[int, bytes, str]:
        """(status, body, content type) for a GET of `path`."""
        page = self._pages.get(path.partition("?")[0])
        if page is None:
            return HTTPStatus.NOT_FOUND, b"try /metrics, /healthz or /readyz\n", TEXT
        return page()


def _probe(probe: Probe) -> tuple[int, bytes, str]:
    good, sentence = probe()
    return (HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE), f"{sentence}\n".encode(), TEXT


def _bind(host: str, port: int) -> socket.socket:
    """A non-blocking listener; an empty host is every address of both families."""
    family = socket.AF_INET6 if not host or ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(bool(host)))
        listener.bind((host or "::", port))
        listener.listen(16)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _refuse(connection: socket.socket) -> None:
    with connection:
        try:
            connection.sendall(b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
        except OSError:
            pass  # it went away, which is as good


class _Handler(BaseHTTPRequestHandler):
    """One request on one connection (HTTP/1.0: closed after the answer)."""

    timeout = IO_TIMEOUT_S
    server_version = "edgeagent"
    sys_version = ""
    server: MetricsServer  # type: ignore[assignment]  # only `answer` is used of it

    def do_GET(self) -> None:
        status, body, content_type = self.server.answer(self.path)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("metrics request client=%s %s", self.client_address[0], format % args)
