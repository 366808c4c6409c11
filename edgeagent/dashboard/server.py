"""The page server: takes what the link delivers, keeps it in the store, shows it to browsers.

Everything but the link's thread runs in one event loop, so the store needs no locks. A browser gets
one stream of server-sent events: rows that changed since it last got some (several changes of a node
are one), the figures of the bar, the state of the link, and the node it has open. A slow browser holds
up nobody: what it missed is merged into its next update.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeagent import __version__
from edgeagent.dashboard import access, commands, detail
from edgeagent.dashboard import link as mqtt
from edgeagent.dashboard.node import Node
from edgeagent.dashboard.store import ROW_FIELDS, Changes, Expected, FleetStore
from edgeagent.errors import FleetError
from edgeagent.fleet import topics

log = logging.getLogger(__name__)

MAX_STREAMS = 64
MAX_BODY_BYTES = 16 * 1024
BATCH = 500  # messages between two looks at the browsers
TICK_S = 5.0
ASK_A_TICK = 500
BEAT_S = 15.0  # a stream says something at least so often: proxies cut silent ones
UPDATE_S = (0.5, 1.0)  # between two updates of a browser; the longer for large fleets
LARGE = 2000
STATIC = {
    "index.html": "text/html",
    "style.css": "text/css",
    **{
        f"{name}.js": "text/javascript"
        for name in ("app", "commands", "dom", "format", "gpu", "grid", "node", "plot", "stream")
    },
    "icon.svg": "image/svg+xml",
}
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


@dataclass(frozen=True, slots=True)
class PageSettings:
    """How the page is served. `telemetry`: of all nodes, of opened ones, or auto: of all up to
    `telemetry_nodes` nodes."""

    secret: str
    secure: bool = False  # served by TLS
    host_names: tuple[str, ...] = ()
    read_only: bool = False
    telemetry: Literal["auto", "all", "opened"] = "auto"
    telemetry_nodes: int = 2000
    expected: Expected | None = None
    command_keys: Path | None = None


@dataclass(eq=False, slots=True)
class _Client:
    """One browser's stream."""

    ident: str
    version: int
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    watching: str | None = None
    node_version: int = -1
    series_to_s: int = 0
    series_rewrites: int = -1
    bar: str = ""
    link: str = ""


class FleetPage:
    """The application, its link and its store. `failed` is set when something died that must not."""

    def __init__(self, settings: PageSettings, link_settings: mqtt.LinkSettings) -> None:
        self.settings = settings
        self.store = FleetStore(expected=settings.expected)
        self.link = mqtt.FleetLink(link_settings, wake=self._wake_from_link)
        self.sessions = access.Sessions(settings.secret)
        self.failed = asyncio.Event()
        self._limiter = access.LoginLimiter()
        self._names = access.own_names(settings.host_names)
        self._clients: dict[str, _Client] = {}
        self._files = _load_files()
        self._came_in = asyncio.Event()
        self._woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._asked: set[str] = set()
        self._cache: tuple[tuple[int, int], Changes] | None = None
        self._telemetry: frozenset[str] | None = frozenset()
        self.app = self._make_app()

    def _make_app(self) -> ASGIApp:
        routes = [
            Route("/", self._file),
            Route("/static/{name}", self._file),
            Route("/healthz", self._healthz),
            Route("/events", self._events),
            Route("/api/session", self._session),
            Route("/api/figures", self._figures),
            Route("/api/login", self._login, methods=["POST"]),
            Route("/api/logout", self._logout, methods=["POST"]),
            Route("/api/watch", self._watch, methods=["POST"]),
            Route("/api/command", self._command, methods=["POST"]),
        ]
        return _Guard(Starlette(routes=routes, lifespan=self._lifespan), self)

    # -- life -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self.link.start()
        tasks = [
            asyncio.create_task(self._pump(), name="pump"),
            asyncio.create_task(self._tick(), name="tick"),
        ]
        for task in tasks:
            task.add_done_callback(self._ended)
        try:
            yield
        finally:
            self.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self.link.close)

    def stop(self) -> None:
        """Ends the streams, which never end by themselves."""
        self._stopping.set()
        self._notify()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_name(), exc_info=task.exception())
            self.failed.set()

    def _wake_from_link(self) -> None:
        """Called in the link's thread. One wake-up for many messages."""
        if self._loop is not None and not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._came_in.set)
            except RuntimeError:
                pass  # the loop has ended, and so do we

    async def _pump(self) -> None:
        """From the link into the store."""
        inbox = self.link.inbox
        while True:
            await self._came_in.wait()
            self._came_in.clear()
            self._woken = False
            while inbox:
                for _ in range(min(BATCH, len(inbox))):
                    self._take(inbox.popleft())
                self._notify()
                await asyncio.sleep(0)

    def _take(self, item: mqtt.Item) -> None:
        match item:
            case mqtt.Message():
                self.link.taken(item)
                self.store.apply(item.topic, item.data, item.retained, item.at_ms)
            case mqtt.Up():
                self._asked.clear()
                self.store.begin_load(_now_ms())
            case mqtt.Loaded():
                self.store.end_load(_now_ms())
                self._choose_telemetry()
                log.info("loaded nodes=%d messages=%d", len(self.store.nodes), self.store.received)
            case mqtt.AskedBySite(found):
                self.store.found_by_site = found
                for text in self.store.shortfalls():
                    log.warning("%s", text)
            case mqtt.Down():
                self.store.link_lost()
            case mqtt.CommandRefused(ident, reason):
                for key in list(self.store.nodes):
                    self.store.refused_command(key, ident, reason, _now_ms())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if not self.link.alive:
                raise FleetError("the link's thread ended")
            self.store.sweep(_now_ms(), hearing=self.store.loaded_ms is not None)
            self._ask_for_missing()
            self._choose_telemetry()
            self._notify()

    def _ask_for_missing(self) -> None:
        """What the broker cut off of nodes that are known by now, a few at a time; each once."""
        if self.store.loaded_ms is None:
            return
        missing = [key for key in self.store.incomplete() if key not in self._asked][:ASK_A_TICK]
        self._asked.update(missing)
        self.link.ask(missing)

    def _notify(self) -> None:
        for client in self._clients.values():
            client.changed.set()

    def _choose_telemetry(self) -> None:
        """Of all nodes while the fleet is small, else of those that somebody looks at."""
        s = self.settings
        every = s.telemetry == "all" or (s.telemetry == "auto" and len(self.store.nodes) <= s.telemetry_nodes)
        opened = frozenset(c.watching for c in self._clients.values() if c.watching is not None)
        wanted = None if every else opened
        if wanted != self._telemetry:
            self._telemetry = wanted
            self.link.follow_telemetry(wanted)

    # -- the stream -----------------------------------------------------------------------------

    async def _events(self, request: Request) -> Response:
        if len(self._clients) >= MAX_STREAMS:
            return PlainTextResponse("too many open pages\n", 503, {"retry-after": "10"})
        client = _Client(secrets.token_hex(8), self._version_of(request))
        self._clients[client.ident] = client
        return StreamingResponse(
            self._stream(client),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    def _version_of(self, request: Request) -> int:
        """The version that a browser that comes back has already."""
        last = request.headers.get("last-event-id") or request.query_params.get("since") or ""
        identity, _, version = last.partition("-")
        if identity != self.store.identity or not version.isdigit() or len(version) > 15:
            return 0
        return int(version)

    async def _stream(self, client: _Client) -> AsyncIterator[bytes]:
        try:
            yield _event("hello", {
                "client": client.ident, "fields": ROW_FIELDS, "now": _now_ms(), "version": __version__,
                "readOnly": self.settings.read_only, "identity": self.store.identity,
            })  # fmt: skip
            while not self._stopping.is_set():
                client.changed.clear()
                update = self._update(client)
                if update:
                    yield update
                large = len(self.store.nodes) > LARGE
                await asyncio.sleep(UPDATE_S[large] if update else 0.05)
                try:
                    await asyncio.wait_for(client.changed.wait(), BEAT_S)
                except asyncio.TimeoutError:
                    yield _event("beat", {"now": _now_ms()})
        finally:
            self._clients.pop(client.ident, None)
            self._choose_telemetry()

    def _update(self, client: _Client) -> bytes:
        """All that is new for this browser, as events."""
        out = []
        link = json.dumps(self._link_state(), ensure_ascii=False)
        if link != client.link:
            client.link = link
            out.append(_event_text("link", link))
        changes = self._changes(client.version)
        if changes.reset or changes.count:
            text = (
                f'{{"now":{_now_ms()},"reset":{json.dumps(changes.reset)},'
                f'"rows":{changes.rows},"gone":{changes.gone}}}'
            )
            out.append(_event_text("rows", text, f"{self.store.identity}-{changes.version}"))
        client.version = max(changes.version, 1)
        if not self.store.loading or changes.count:
            bar = json.dumps(self.store.bar())
            if bar != client.bar:
                client.bar = bar
                out.append(_event_text("bar", bar))
        node = self.store.nodes.get(client.watching or "")
        if node is not None and node.version != client.node_version:
            out.append(_event("node", self._node(client, node)))
        return b"".join(out)

    def _changes(self, since: int) -> Changes:
        """Browsers are mostly at the same version: made once for them."""
        key = (since, self.store.version)
        if self._cache is None or self._cache[0] != key:
            self._cache = (key, self.store.changes(since))
        return self._cache[1]

    def _node(self, client: _Client, node: Node) -> dict[str, Any]:
        now_ms = _now_ms()
        rewrites = detail.rewrites(node)
        fresh = client.node_version == -1 or rewrites != client.series_rewrites
        since_s = 0 if fresh else client.series_to_s
        client.node_version = node.version
        client.series_rewrites = rewrites
        client.series_to_s = max((hour.newest_s for hour in node.hours.values()), default=0)
        return {
            **detail.detail(node, now_ms),
            "now": now_ms,
            "series": detail.series(node, since_s, now_ms),
            "seriesFresh": fresh,
        }

    def _link_state(self) -> dict[str, Any]:
        s, store = self.link.state, self.store
        loading = s.connected and store.loaded_ms is None
        return {
            "connected": s.connected,
            "since": s.since_ms,
            "broker": s.broker,
            "problem": s.problem,
            "loading": loading,
            "shortfalls": [] if loading else store.shortfalls(),
            "incomplete": 0 if loading else len(store.incomplete()),
            "rejected": store.rejected,
            "telemetry": "all" if self._telemetry is None else "opened",
        }

    # -- requests -------------------------------------------------------------------------------

    async def _file(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        body = self._files.get(name)
        if body is None:
            return PlainTextResponse("not found\n", 404)
        return Response(body, media_type=STATIC[name], headers={"cache-control": "no-cache"})

    async def _healthz(self, _: Request) -> Response:
        state = self.link.state
        ok = state.connected and self.store.loaded_ms is not None
        return PlainTextResponse("ok\n" if ok else f"{state.problem or 'loading'}\n", 200 if ok else 503)

    async def _session(self, _: Request) -> Response:
        """For a browser to learn whether it is logged in: the guard answers 401 if not."""
        return JSONResponse({"ok": True})

    async def _figures(self, _: Request) -> Response:
        """What the bar and the link say, and what came in, for scripts."""
        store = self.store
        counts = {
            "received": store.received, "samples": store.samples, "duplicates": store.duplicates,
            "rejected": store.rejected, "streams": len(self._clients), "loadMs": store.load_took_ms,
        }  # fmt: skip
        return JSONResponse({"bar": store.bar(), "link": self._link_state(), "counts": counts})

    async def _login(self, request: Request) -> Response:
        now_s = time.monotonic()
        address = request.client.host if request.client is not None else ""
        if not self._limiter.allowed(address, now_s):
            return JSONResponse({"error": "too many tries: wait a little"}, 429, {"retry-after": "20"})
        secret = (await _json(request)).get("secret")
        if not isinstance(secret, str) or not self.sessions.knows(secret):
            self._limiter.failed(address, now_s)
            log.warning("login refused address=%s", address)
            return JSONResponse({"error": "that is not it"}, 403)
        response = JSONResponse({"ok": True})
        response.set_cookie(
            access.COOKIE, self.sessions.open(now_s), max_age=access.SESSION_S, httponly=True,
            secure=self.settings.secure, samesite="strict", path="/",
        )  # fmt: skip
        return response

    async def _logout(self, request: Request) -> Response:
        self.sessions.close(request.cookies.get(access.COOKIE, ""))
        response = JSONResponse({"ok": True})
        response.delete_cookie(access.COOKIE, path="/")
        return response

    async def _watch(self, request: Request) -> Response:
        """The browser opens a node, or (null) closes it."""
        body = await _json(request)
        client = self._clients.get(str(body.get("client")))
        node = body.get("node")
        if client is None:
            return JSONResponse({"error": "no such stream"}, 404)
        # Also one that is not known yet: it is shown once it comes.
        client.watching = (
            node if isinstance(node, str) and topics.parse(f"{topics.ROOT}/{node}/status") else None
        )
        client.node_version = -1
        client.changed.set()
        self._choose_telemetry()
        return JSONResponse({"known": client.watching in self.store.nodes})

    async def _command(self, request: Request) -> Response:
        if self.settings.read_only:
            return JSONResponse({"error": "this page is read-only"}, 403)
        body = await _json(request)
        node = self.store.nodes.get(str(body.get("node")))
        if node is None:
            return JSONResponse({"error": "no such node"}, 404)
        if not self.link.state.connected:
            return JSONResponse({"error": "the page has no link to the broker"}, 503)
        try:
            entry, data = commands.build(
                node, body.get("verb"), body.get("args", {}), body.get("dryRun", False),
                requester=self.link.settings.requester, now_ms=_now_ms(), keys=self.settings.command_keys,
            )  # fmt: skip
        except FleetError as e:
            return JSONResponse({"error": str(e)}, 400)
        address = request.client.host if request.client is not None else ""
        log.info("command %s node=%s id=%s dry_run=%s address=%s",
                 entry.verb, node.key, entry.id, entry.dry_run, address)  # fmt: skip
        self.store.sent_command(node.key, entry)
        self.link.send_command(node.key, entry.verb, entry.id, data)
        self._notify()
        return JSONResponse({"id": entry.id})

    # -- the guard's questions ------------------------------------------------------------------

    def refusal(self, path: str, method: str, headers: Headers) -> Response | None:
        """Why a request is not looked at; None: it is."""
        if not access.host_allowed(headers.get("host"), self._names):
            return PlainTextResponse("unknown host name: see --host-name\n", 421)
        if method not in ("GET", "HEAD", "POST"):
            return PlainTextResponse("method not allowed\n", 405)
        if method == "POST":
            if not access.same_origin(headers):
                return JSONResponse({"error": "cross-origin request"}, 403)
            if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
                return JSONResponse({"error": "application/json is needed"}, 415)
        open_to_all = path in ("/", "/healthz", "/api/login") or path.startswith("/static/")
        if open_to_all:
            return None
        cookie = Request({"type": "http", "headers": headers.raw}).cookies.get(access.COOKIE)
        if not self.sessions.admits(cookie, headers.get("authorization"), time.monotonic()):
            return JSONResponse({"error": "log in first"}, 401)
        return None


class _Guard:
    """In front of everything: refusals, the size of bodies, security headers on every answer."""

    def __init__(self, app: ASGIApp, page: FleetPage) -> None:
        self._app = app
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._page.refusal(scope["path"], scope["method"], Headers(scope=scope))
        if refusal is None and scope["method"] == "POST":
            body = await _whole_body(receive)
            if body is None:
                refusal = PlainTextResponse("too large\n", 413)
            else:
                receive = _replayed(body, receive)
        await (refusal or self._app)(scope, receive, guarded)


async def _whole_body(receive: Receive) -> bytes | None:
    """None: it is larger than anything the page sends."""
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return body


def _replayed(body: bytes, receive: Receive) -> Receive:
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay


# -- small parts ----------------------------------------------------------------------------------


async def _json(request: Request) -> dict[str, Any]:
    try:
        value = json.loads(await request.body())
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _event(name: str, value: Any) -> bytes:
    return _event_text(name, json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _event_text(name: str, text: str, ident: str | None = None) -> bytes:
    head = f"id: {ident}\n" if ident is not None else ""
    # JSON has no raw line breaks, so one data line does. Lone surrogates were replaced on reading.
    return f"{head}event: {name}\ndata: {text}\n\n".encode("utf-8", "replace")


def _load_files() -> dict[str, bytes]:
    folder = resources.files("edgeagent.dashboard") / "static"
    return {name: (folder / name).read_bytes() for name in STATIC}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
