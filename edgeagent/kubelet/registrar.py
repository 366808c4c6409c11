"""Servers on their sockets, and the kubelet knowing of them, whatever it does to either.

The kubelet deletes our sockets when it starts, comes back under a socket of the same name, refuses for
a moment, and may drop a stream without a word. One thread looks at the directory whenever something
happens in it, and puts right what is not.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from edgeagent.errors import KubeletError
from edgeagent.kubelet import registration
from edgeagent.kubelet.server import DeviceService, PluginServer, ServerLoop
from edgeagent.kubelet.watch import DirectoryWatch

log = logging.getLogger(__name__)

SOCKET_PREFIX = "edgeagent-"
STREAM_GRACE_S = 2.0  # after Register the kubelet opens its stream within milliseconds
MAX_LOST_PAUSE_S = 60.0
FIRST_RETRY_S, MAX_RETRY_S, SLOW_RETRY_S = 0.01, 0.1, 5.0
FAST_TRIES = 100  # about 10 s of them, then slowly
SERVE_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Offering:
    """What the registrar asks about what it serves. Called from its thread, none of its locks held.

    `resources`: names of those to be served now; None while that is not known yet. `fill`: publishes
    the list on a new server. `kubelet_seen`: there is a socket of a kubelet that was not there before;
    true: there has been another one. `tick`: called at every look; the monotonic time by which it wants
    to be called again, or None. `changed`: something in the status did.
    """

    resources: Callable[[], Collection[str] | None]
    service: Callable[[str], DeviceService]
    fill: Callable[[PluginServer], None]
    kubelet_seen: Callable[[bool], None]
    tick: Callable[[], float | None]
    changed: Callable[[], None]


@dataclass(slots=True)
class _Endpoint:
    """One resource's server and where it stands with the kubelet."""

    server: PluginServer
    registered_as: tuple[int, int] | None = None  # inode and ctime of the kubelet's socket
    registered_s: float = 0.0
    tries: int = 0  # failed in a row
    lost: int = 0  # streams lost in a row
    next_try_s: float = 0.0


class Registrar:
    """`run` is a service of its own; everything else may be called from any thread."""

    def __init__(self, directory: Path, offering: Offering, *, use_inotify: bool = True) -> None:
        self._dir = directory
        self._offering = offering
        self._loop = ServerLoop()
        self._watch = DirectoryWatch(directory, use_inotify)
        self._lock = threading.Lock()
        self._endpoints: dict[str, _Endpoint] = {}  # changed by the registrar's thread only
        self._kubelet: tuple[int, int] | None = None  # the socket of the last one seen
        self._kubelet_there = False
        self._new_socket = False  # the kubelet has made its socket since the last look
        self._failing = False
        self.registrations = 0

    # --- asked from outside ---

    def wake(self) -> None:
        """Looks again soon."""
        self._watch.wake()

    def servers(self) -> dict[str, PluginServer]:
        with self._lock:
            return {resource: endpoint.server for resource, endpoint in self._endpoints.items()}

    def registered(self, resource: str) -> bool:
        """Whether the kubelet knows of the resource and listens to it."""
        with self._lock:
            endpoint = self._endpoints.get(resource)
        return endpoint is not None and endpoint.registered_as is not None and endpoint.server.streams > 0

    # --- the thread ---

    def run(self, stop: threading.Event) -> None:
        """Serves, registers and registers again until `stop`."""
        self._remove_old_sockets()
        try:
            while not stop.is_set():
                self._watch.arm()
                delay_s = self._step()
                if registration.KUBELET_SOCKET in self._watch.wait(delay_s):
                    self._new_socket = True
        finally:
            with self._lock:
                endpoints = list(self._endpoints.values())
                self._endpoints.clear()
            for endpoint in endpoints:
                endpoint.server.close()
            self._loop.shutdown()
            self._watch.close()

    def _step(self) -> float | None:
        """One look at sockets and registrations; returns when to look again at the latest."""
        wanted = self._offering.resources()
        if wanted is None or not self._dir.is_dir():
            self._note_kubelet(None)
            return None
        # In this order: the kubelet deletes our sockets before it makes its own, so those that are there
        # after its own was seen stay. Registering one that is gone would hang until its dial times out.
        sock = self._kubelet_identity()
        now_s = time.monotonic()
        if sock is not None and sock != self._kubelet:
            self._offering.kubelet_seen(self._kubelet is not None)
            self._kubelet = sock
        self._match_servers(wanted)
        self._note_kubelet(sock)
        if sock is None:
            return None
        tick_s = self._offering.tick()
        due_s: list[float] = [] if tick_s is None else [tick_s]
        if len(self._endpoints) < len(wanted):
            due_s.append(now_s + SERVE_RETRY_S)
        for endpoint in list(self._endpoints.values()):
            when_s = self._registration_due(endpoint, sock)
            if when_s is None:
                continue
            if when_s <= now_s:
                if self._kubelet_identity() != sock:
                    return 0.0  # a new kubelet since the look at our sockets
                self._register(endpoint, sock)
                when_s = endpoint.next_try_s if endpoint.registered_as is None else now_s + STREAM_GRACE_S
            due_s.append(when_s)
        self._new_socket = False
        return max(0.0, min(due_s) - time.monotonic()) if due_s else None

    def _match_servers(self, wanted: Collection[str]) -> None:
        """Starts servers of resources that are offered now, ends the others, and puts back those whose
        socket has been removed."""
        for resource in [r for r in self._endpoints if r not in wanted]:
            log.info("resource not offered any more resource=%s", resource)
            with self._lock:
                gone = self._endpoints.pop(resource)
            gone.server.close()
        for resource in sorted(wanted):
            endpoint = self._endpoints.get(resource)
            if endpoint is not None and endpoint.server.listening:
                continue
            if endpoint is not None:
                # The kubelet deletes our sockets when it starts: their absence means register again.
                log.info("own socket is gone, serving again resource=%s", resource)
                endpoint.server.close()
            service = endpoint.server.service if endpoint is not None else self._offering.service(resource)
            self._serve(resource, service)

    def _serve(self, resource: str, service: DeviceService) -> None:
        socket = self._dir / f"{SOCKET_PREFIX}{resource.replace('/', '_')}.sock"
        server = PluginServer(service, socket, self._loop, b"", self._watch.wake)
        with self._lock:
            self._endpoints[resource] = _Endpoint(server)
        # Known to others first: a change from now on is published to it, so none is missed.
        self._offering.fill(server)
        try:
            server.listen()
        except KubeletError as e:
            log.log(logging.DEBUG if self._failing else logging.ERROR, "%s", e)
            self._failing = True
            with self._lock:
                self._endpoints.pop(resource, None)

    def _kubelet_identity(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._dir / registration.KUBELET_SOCKET)
        except OSError:
            return None
        return (found.st_ino, found.st_ctime_ns) if stat.S_ISSOCK(found.st_mode) else None

    def _registration_due(self, endpoint: _Endpoint, sock: tuple[int, int]) -> float | None:
        """When to (try to) register: a monotonic time, in the past for now; None: not at all."""
        known = endpoint.registered_as
        # A new socket can have the old one's inode; its ctime alone also changes by a chmod.
        if known is not None and (
            known[0] != sock[0] or (known[1] != sock[1] and (self._new_socket or not self._watch.active))
        ):
            endpoint.registered_as = None
            endpoint.tries = endpoint.lost = 0
            endpoint.next_try_s = 0.0
        if endpoint.registered_as is None:
            return endpoint.next_try_s
        if endpoint.server.streams:
            if time.monotonic() - endpoint.registered_s > MAX_LOST_PAUSE_S:
                endpoint.lost = 0
            return None
        # Registered and not listened to: the kubelet drops a list that it cannot swallow, or an endpoint
        # that was replaced while it was being replaced, and tells nobody.
        pause_s = min(STREAM_GRACE_S * 2**endpoint.lost, MAX_LOST_PAUSE_S)
        since_s = max(endpoint.registered_s, time.monotonic() - endpoint.server.without_stream_s)
        when_s: float = since_s + pause_s
        if when_s <= time.monotonic():
            endpoint.lost += 1
            endpoint.registered_as = None
            endpoint.next_try_s = 0.0
            log.info(
                "kubelet does not listen, registering again resource=%s", endpoint.server.service.resource
            )
        return when_s

    def _register(self, endpoint: _Endpoint, sock: tuple[int, int]) -> None:
        service = endpoint.server.service
        try:
            registration.register(
                self._dir / registration.KUBELET_SOCKET, endpoint.server.socket.name, service
            )
        except KubeletError as e:
            log.log(logging.DEBUG if self._failing else logging.WARNING, "%s", e)
            self._failing = True
            endpoint.tries += 1
            fast = min(FIRST_RETRY_S * 2 ** min(endpoint.tries, 10), MAX_RETRY_S)
            endpoint.next_try_s = time.monotonic() + (fast if endpoint.tries < FAST_TRIES else SLOW_RETRY_S)
            return
        self._failing = False
        endpoint.registered_as = sock
        endpoint.registered_s = time.monotonic()
        endpoint.tries = 0
        self.registrations += 1
        log.info("registered with the kubelet resource=%s", service.resource)
        self._offering.changed()

    def _note_kubelet(self, sock: tuple[int, int] | None) -> None:
        if (sock is not None) == self._kubelet_there:
            return
        self._kubelet_there = sock is not None
        if sock is None:
            log.warning("the kubelet's socket is gone dir=%s", self._dir)
            for endpoint in self._endpoints.values():
                endpoint.registered_as = None
                endpoint.next_try_s = 0.0
        else:
            log.info("the kubelet's socket is there dir=%s", self._dir)
        self._offering.changed()

    def _remove_old_sockets(self) -> None:
        """Of a run that was killed, for resources that are perhaps not offered now."""
        for path in self._dir.glob(f"{SOCKET_PREFIX}*.sock"):
            if path.is_socket():
                try:
                    path.unlink()
                except OSError as e:
                    log.warning("cannot remove the old socket %s: %s", path, e.strerror)
