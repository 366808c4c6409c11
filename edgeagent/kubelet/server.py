"""One resource's device plugin server: a unix socket on which the kubelet calls us.

Payloads pass through as bytes. Every open ListAndWatch stream gets every change; one whose kubelet
has gone ends by itself and gives its worker back.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import grpc

from edgeagent.errors import AllocationError, KubeletError
from edgeagent.kubelet.protos import deviceplugin as api

log = logging.getLogger(__name__)

# The shared workers: streams hold one each, starts that wait hold one each (gate.py bounds those), and
# the kubelet's other calls come one at a time. Threads are made as they are needed.
MAX_WORKERS = 64
MAX_STREAMS = 6  # of one resource; the kubelet has one, the rest are leftovers of dead kubelets

MAX_REQUEST_BYTES = 64 * 1024 * 1024  # GetPreferredAllocation names every free device
_MAX_DETAILS = 1500  # gRPC sends the text as a header
_MAX_SOCKET_PATH_BYTES = 107  # sun_path


class DeviceService(Protocol):
    """What a resource answers. Messages are encoded; only AllocationError is raised on purpose."""

    resource: str
    pre_start_required: bool

    def prefer(self, request: bytes) -> bytes: ...

    def allocate(self, request: bytes) -> bytes: ...

    def pre_start(self, request: bytes) -> bytes: ...


def new_workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="kubelet-call")


class PluginServer:
    """Serves one DeviceService. Thread-safe. `on_stream_end` is called when a stream has ended."""

    def __init__(
        self,
        service: DeviceService,
        socket: Path,
        workers: ThreadPoolExecutor,
        payload: bytes,
        on_stream_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.service = service
        self.socket = socket
        self._workers = workers
        self._on_stream_end = on_stream_end
        self._changed = threading.Condition()
        self._payload = payload
        self._version = 1
        self._streams: dict[int, threading.Event] = {}  # number -> told to end
        self._last_stream = 0
        self._last_stream_end_mono_s = time.monotonic()
        self._server: Any = None
        self._inode: int | None = None

    # --- life ---

    def listen(self) -> None:
        """Binds the socket. Raises KubeletError."""
        if len(os.fsencode(self.socket)) > _MAX_SOCKET_PATH_BYTES:
            raise KubeletError(f"cannot serve {self.service.resource}: the path {self.socket} is too long")
        server = grpc.server(
            self._workers,
            handlers=(self._handlers(),),
            options=(
                ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ),
        )
        try:
            self.socket.unlink(missing_ok=True)  # of a run that was killed
            server.add_insecure_port(f"unix:{self.socket}")
            server.start()
            os.chmod(self.socket, 0o600)
            self._inode = os.stat(self.socket).st_ino
        except (OSError, RuntimeError) as e:
            server.stop(None)
            raise KubeletError(f"cannot serve {self.service.resource} on {self.socket}: {e}") from e
        self._server = server

    @property
    def listening(self) -> bool:
        """Whether the kubelet can find us: our socket is where we put it."""
        try:
            return self._server is not None and os.stat(self.socket).st_ino == self._inode
        except OSError:
            return False

    def close(self, grace_s: float | None = None) -> None:
        """Ends all streams and stops serving; the socket is gone when this returns. Idempotent.

        It must have returned before the same path is bound again: grpc unlinks the path, whoever's
        socket is there by then.
        """
        server, self._server = self._server, None
        with self._changed:
            for told in self._streams.values():
                told.set()
            self._changed.notify_all()
        if server is not None:
            server.stop(grace_s).wait(5.0)

    # --- the list ---

    def publish(self, payload: bytes) -> None:
        """Sends the list to every open stream, unless it is the one they have."""
        with self._changed:
            if payload is not self._payload and payload != self._payload:
                self._payload = payload
                self._version += 1
                self._changed.notify_all()

    @property
    def streams(self) -> int:
        """How many ListAndWatch streams are open."""
        with self._changed:
            return len(self._streams)

    @property
    def without_stream_s(self) -> float:
        """For how long no stream has been open; 0 while there is one."""
        with self._changed:
            return 0.0 if self._streams else time.monotonic() - self._last_stream_end_mono_s

    def _list_and_watch(self, _request: bytes, context: Any) -> Iterator[bytes]:
        told_to_end = threading.Event()

        def wake() -> None:
            with self._changed:
                told_to_end.set()
                self._changed.notify_all()

        with self._changed:
            self._last_stream += 1
            number = self._last_stream
            self._streams[number] = told_to_end
            while len(self._streams) > MAX_STREAMS:
                self._streams.pop(min(self._streams)).set()
            self._changed.notify_all()
        log.debug("list stream opened resource=%s open=%d", self.service.resource, self.streams)
        sent = 0
        try:
            # False: the call ended before we came to it.
            alive = context.add_callback(wake)
            while alive:
                with self._changed:
                    while self._version == sent and not told_to_end.is_set():
                        self._changed.wait()
                    if told_to_end.is_set():
                        return
                    sent, payload = self._version, self._payload
                yield payload
        finally:
            with self._changed:
                self._streams.pop(number, None)
                self._last_stream_end_mono_s = time.monotonic()
            self._on_stream_end()

    # --- gRPC ---

    def _options(self, _request: bytes) -> bytes:
        return options_of(self.service).SerializeToString()  # type: ignore[no-any-return]  # protobuf is untyped here

    def _handlers(self) -> Any:
        def unary(call: Callable[[bytes], bytes]) -> Any:
            return grpc.unary_unary_rpc_method_handler(_guarded(self.service.resource, call))

        # Without (de)serialisers grpc hands over bytes.
        return grpc.method_handlers_generic_handler(
            api.DEVICE_PLUGIN_SERVICE,
            {
                api.GET_OPTIONS.rpartition("/")[2]: unary(self._options),
                api.LIST_AND_WATCH.rpartition("/")[2]: grpc.unary_stream_rpc_method_handler(
                    self._list_and_watch
                ),
                api.GET_PREFERRED_ALLOCATION.rpartition("/")[2]: unary(self.service.prefer),
                api.ALLOCATE.rpartition("/")[2]: unary(self.service.allocate),
                api.PRE_START_CONTAINER.rpartition("/")[2]: unary(self.service.pre_start),
            },
        )


def options_of(service: DeviceService) -> Any:
    return api.DevicePluginOptions(
        pre_start_required=service.pre_start_required, get_preferred_allocation_available=True
    )


def _guarded(resource: str, call: Callable[[bytes], bytes]) -> Callable[[bytes, Any], bytes]:
    """The wall between our code and gRPC: refusals become status codes, accidents INTERNAL."""

    def handler(request: bytes, context: Any) -> bytes:
        try:
            return call(request)
        except AllocationError as e:
            code, details = getattr(grpc.StatusCode, e.code, grpc.StatusCode.FAILED_PRECONDITION), str(e)
        except Exception:
            log.exception("call failed resource=%s", resource)
            code, details = grpc.StatusCode.INTERNAL, "edgeagent failed in this call; its log says where"
        context.abort(code, details if len(details) <= _MAX_DETAILS else details[: _MAX_DETAILS - 1] + "…")
        raise AssertionError("abort raises")

    return handler
