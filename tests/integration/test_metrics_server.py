"""The HTTP side over real sockets: answers, probes, bad clients, a stop in time."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from edgeagent.metrics import server as metrics_server
from edgeagent.metrics.server import MAX_CONNECTIONS, MetricsServer, render
from tests.fakes.fleet import snapshots


class Running:
    def __init__(self, listen: str = "127.0.0.1:0") -> None:
        self.health = (True, "all services run")
        self.ready = (False, "no GPUs were looked for yet")
        self.server = MetricsServer(
            listen,
            lambda: render(snapshots.snapshot(), dcgm=False, hami=False),
            lambda: self.health,
            lambda: self.ready,
        )
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.server.run, args=(self.stop,))
        self.thread.start()

    def address(self) -> tuple[str, int]:
        for _ in range(500):
            if self.server.address is not None:
                return self.server.address
            self.stop.wait(0.01)
        raise AssertionError("never listened")

    def close(self) -> None:
        self.stop.set()
        self.server.wake()
        self.thread.join(5)
        assert not self.thread.is_alive()

    def get(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self.address(), timeout=5)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def raw(self, data: bytes) -> bytes:
        answer = b""
        with socket.create_connection(self.address(), timeout=5) as s:
            try:
                s.sendall(data)
                s.shutdown(socket.SHUT_WR)
                while chunk := s.recv(65536):
                    answer += chunk
            except ConnectionError:
                pass  # it closes on a client that goes on talking
        return answer


@pytest.fixture
def running() -> Iterator[Running]:
    server = Running()
    yield server
    server.close()


def test_metrics(running: Running) -> None:
    status, body = running.get("/metrics")
    assert status == 200
    assert b"edgeagent_gpu_memory_usable_bytes" in body
    assert running.get("/metrics?x=1")[0] == 200
    assert running.get("/metrics", "HEAD") == (200, b"")


def test_probes(running: Running) -> None:
    assert running.get("/healthz") == (200, b"all services run\n")
    assert running.get("/readyz") == (503, b"no GPUs were looked for yet\n")
    running.ready = (True, "ready")
    assert running.get("/readyz") == (200, b"ready\n")
    running.health = (False, "service health-poll hangs")
    assert running.get("/healthz") == (503, b"service health-poll hangs\n")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n\r\n",
        b"GET",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"POST /metrics HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello",
        b"GET /../../etc/passwd HTTP/1.0\r\n\r\n",
        b"GET /" + b"a" * 70000 + b" HTTP/1.0\r\n\r\n",
        b"GET /metrics HTTP/1.0\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
    ],
    ids=[
        "nothing",
        "blank",
        "half a word",
        "version",
        "TLS",
        "POST",
        "traversal",
        "long path",
        "many headers",
    ],
)
def test_bad_requests_hurt_nobody(running: Running, data: bytes) -> None:
    answer = running.raw(data)
    assert b" 200 " not in answer.split(b"\r\n", 1)[0]
    assert b"root:" not in answer
    assert running.get("/metrics")[0] == 200


def test_silent_clients_are_bounded_and_lose_their_place(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.get("/healthz")
    threads = threading.active_count()
    silent = [socket.create_connection(running.address(), timeout=5) for _ in range(MAX_CONNECTIONS + 3)]
    try:
        refused = b""
        for s in silent[MAX_CONNECTIONS:]:
            refused += s.recv(100)
        assert refused.count(b"503") == 3
        assert threading.active_count() <= threads + MAX_CONNECTIONS
        monkeypatch.setattr(metrics_server, "IO_TIMEOUT_S", 0.0)  # as if they had been silent for long
        assert running.get("/healthz")[0] == 200
    finally:
        for s in silent:
            s.close()


def test_it_stops_while_a_client_is_connected(running: Running) -> None:
    with socket.create_connection(running.address(), timeout=5):
        running.close()


def test_a_port_that_is_taken_is_said_and_does_not_end_the_service() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        server = Running(f"127.0.0.1:{other.getsockname()[1]}")
        try:
            for _ in range(500):
                if server.server.problem:
                    break
                server.stop.wait(0.01)
            assert "cannot listen" in (server.server.problem or "")
            assert server.thread.is_alive()
        finally:
            server.close()


@pytest.mark.parametrize("listen", [":0", "127.0.0.1:0", "[::1]:0"])
def test_address_forms(listen: str) -> None:
    if "::1" in listen and not _has_ipv6():
        pytest.skip("no IPv6 here")
    server = Running(listen)
    try:
        assert server.address()[1] > 0
    finally:
        server.close()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as s:
            s.bind(("::1", 0))
    except OSError:
        return False
    return True
