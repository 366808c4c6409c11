"""The page server in a thread, and a fleet of a few nodes that a test can hurt."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from edgeagent.dashboard.link import LinkSettings
from edgeagent.dashboard.server import FleetPage, PageSettings
from edgeagent.fleet.client import Broker
from tests.fakes.mosquitto.broker import free_port

SECRET = "correct-horse-battery"


class PageServer:
    """Serves at `url`; `wait` waits until the store is as a condition wants it."""

    def __init__(self, broker_url: str, *, protocol: str = "5", **settings: Any) -> None:
        self.port = free_port()
        self.page = FleetPage(
            PageSettings(secret=SECRET, **settings),
            LinkSettings(
                brokers=(Broker.parse(broker_url),),
                client_id=f"page-test-{self.port}",
                requester="page-test",
                protocol=protocol,  # type: ignore[arg-type]
                backoff_s=(0.05, 0.3),
                quiet_s=0.15,
                sites=tuple(settings["expected"].sites) if settings.get("expected") else (),
            ),
        )
        config = uvicorn.Config(
            self.page.app, host="127.0.0.1", port=self.port, log_config=None, ws="none", http="h11",
            loop="asyncio", timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, name="page", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def login_url(self) -> str:
        return f"{self.url}/#token={SECRET}"

    def __enter__(self) -> PageServer:
        self._thread.start()
        self.wait(lambda store: self._server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.page.stop()
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive(), "the page server did not stop"

    def wait(self, condition: Callable[[Any], Any], timeout_s: float = 15.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition(self.page.store):
            assert self._thread.is_alive(), "the page server ended"
            assert time.monotonic() < deadline, f"did not happen within {timeout_s} s"
            time.sleep(0.01)

    def wait_loaded(self, nodes: int) -> None:
        self.wait(lambda store: store.loaded_ms is not None and len(store.nodes) >= nodes)

    # -- HTTP ---------------------------------------------------------------------------------

    def request(
        self, method: str, path: str, body: Any = None, *, secret: str | None = SECRET, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """As a script with the Bearer secret, or (`secret` None) as a stranger."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        sent = {k.replace("_", "-"): v for k, v in headers.items()}
        if secret is not None:
            sent.setdefault("authorization", f"Bearer {secret}")
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        if data is not None:
            sent.setdefault("content-type", "application/json")
        try:
            connection.request(method, path, data, sent)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    @contextmanager
    def events(
        self, path: str = "/events", **headers: str
    ) -> Iterator[Iterator[tuple[str, Any, str | None]]]:
        """The server-sent events of one stream: name, value, id."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("GET", path, headers={"authorization": f"Bearer {SECRET}", **headers})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()

        def read() -> Iterator[tuple[str, Any, str | None]]:
            event: dict[str, str] = {}
            while line := answer.readline().decode().rstrip("\n"):
                event = {}
                while line:
                    name, _, value = line.partition(": ")
                    event[name] = value
                    line = answer.readline().decode().rstrip("\n")
                yield event["event"], json.loads(event["data"]), event.get("id")

        try:
            yield read()
        finally:
            answer.close()
            connection.close()
