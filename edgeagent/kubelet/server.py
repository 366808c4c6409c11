"""One resource's device plugin server: a unix socket on which the kubelet calls us.

Payloads pass through as bytes. Every open ListAndWatch stream gets every change; one whose kubelet
has gone ends by itself. All servers live on one event loop (grpcio's synchronous server would be a
thread of its own for each, woken ten times a second); the calls run in a pool of worker threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from edgeagent.errors import AllocationError, KubeletError
from edgeagent.kubelet.protos import deviceplugin as api

log = logging.getLogger(__name__)

T = TypeVar("T")

# The shared workers: starts that wait hold one each (gate.py bounds those), and the kubelet's other
# calls come one at a time. Threads are made as they are needed.
MAX_WORKERS = 64
LOOP_CALL_S = 10.0
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


class ServerLoop:
    """The event loop of all plugin servers, in a thread of its own, and the workers that run the calls."""

    def __init__(self) -> None:
        self.workers = ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="kubelet-call")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kubelet-grpc", daemon=True)
        self._lock = threading.Lock()
        self._closed = False

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the loop and waits for it. Raises KubeletError where the loop does not answer."""
        with self._lock:
            if self._closed:
                work.close()
                raise KubeletError("the plugin servers' loop has ended")
            if not self._thread.is_alive():
                self._thread.start()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(LOOP_CALL_S)
        except FutureTimeoutError as e:
            future.cancel()
            raise KubeletError("the plugin servers' loop does not answer") from e

    def soon(self, work: Callable[[], None]) -> None:
        """Runs `work` on the loop, without waiting; nothing when the loop has ended."""
        with self._lock:
            if not self._closed and self._thread.is_alive():
                self._loop.call_soon_threadsafe(work)

    def shutdown(self) -> None:
        """Ends the loop; its servers must be closed before. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            running = self._thread.is_alive()
        if running:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(LOOP_CALL_S)
        else:
            self._loop.close()
        self.workers.shutdown(wait=False)


class PluginServer:
    """Serves one DeviceService. Thread-safe. `on_stream_end` is called when a stream has ended."""

    def __init__(
        self,
        service: DeviceService,
        socket: Path,
        loop: ServerLoop,
        payload: bytes,
        on_stream_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.service = service
        self.socket = socket
        self._loop = loop
        self._on_stream_end = on_stream_end
        self._lock = threading.Lock()
        self._payload = payload
        self._version = 1
        self._streams: dict[int, asyncio.Event] = {}  # number -> something changed
        self._last_stream = 0
        self._closing = False
        self._last_stream_end_mono_s = time.monotonic()
        self._server: Any = None
        self._inode: int | None = None

    # --- life ---

    def listen(self) -> None:
        """Binds the socket. Raises KubeletError."""
        if len(os.fsencode(self.socket)) > _MAX_SOCKET_PATH_BYTES:
            raise KubeletError(f"cannot serve {self.service.resource}: the path {self.socket} is too long")
        try:
            self.socket.unlink(missing_ok=True)  # of a run that was killed
            self._closing = False
            self._server = self._loop.call(self._listen())
            os.chmod(self.socket, 0o600)
            self._inode = os.stat(self.socket).st_ino
        except (OSError, RuntimeError, KubeletError) as e:
            self.close()
            raise KubeletError(f"cannot serve {self.service.resource} on {self.socket}: {e}") from e

    async def _listen(self) -> Any:
        server = grpc.aio.server(
            handlers=(self._handlers(),),
            options=(
                ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ),
        )
        server.add_insecure_port(f"unix:{self.socket}")
        await server.start()
        return server

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
        with self._lock:
            self._closing = True
        self._loop.soon(self._wake_streams)
        if server is not None:
            try:
                self._loop.call(server.stop(grace_s))
            except KubeletError as e:
                log.warning("cannot end the server of %s in time: %s", self.service.resource, e)

    # --- the list ---

    def publish(self, payload: bytes) -> None:
        """Sends the list to every open stream, unless it is the one they have."""
        with self._lock:
            if payload is self._payload or payload == self._payload:
                return
            self._payload = payload
            self._version += 1
        self._loop.soon(self._wake_streams)

    def _wake_streams(self) -> None:
        """On the loop."""
        with self._lock:
            changed = list(self._streams.values())
        for event in changed:
            event.set()

    @property
    def streams(self) -> int:
        """How many ListAndWatch streams are open."""
        with self._lock:
            return len(self._streams)

    @property
    def without_stream_s(self) -> float:
        """For how long no stream has been open; 0 while there is one."""
        with self._lock:
            return 0.0 if self._streams else time.monotonic() - self._last_stream_end_mono_s

    async def _list_and_watch(self, _request: bytes, _context: Any) -> AsyncIterator[bytes]:
        """One stream. Cancelled where its kubelet has gone."""
        changed = asyncio.Event()
        with self._lock:
            self._last_stream += 1
            number = self._last_stream
            self._streams[number] = changed
            while len(self._streams) > MAX_STREAMS:
                self._streams.pop(min(self._streams)).set()
        log.debug("list stream opened resource=%s open=%d", self.service.resource, self.streams)
        sent = 0
        try:
            while True:
                changed.clear()
                with self._lock:
                    version, payload = self._version, self._payload
                    ended = self._closing or number not in self._streams
                if ended:
                    return
                if version != sent:
                    sent = version
                    yield payload
                else:
                    await changed.wait()
        finally:
            with self._lock:
                self._streams.pop(number, None)
                self._last_stream_end_mono_s = time.monotonic()
            self._on_stream_end()

    # --- gRPC ---

    def _options(self, _request: bytes) -> bytes:
        return options_of(self.service).SerializeToString()  # type: ignore[no-any-return]  # protobuf is untyped here

    async def _answer(self, call: Callable[[bytes], bytes], request: bytes, context: Any) -> bytes:
        """The wall between our code and gRPC: refusals become status codes, accidents INTERNAL. A call
        that the kubelet gives up ends here at once; its worker comes back when it is done."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._loop.workers, call, request)
        except AllocationError as e:
            code, details = getattr(grpc.StatusCode, e.code, grpc.StatusCode.FAILED_PRECONDITION), str(e)
        except Exception:
            log.exception("call failed resource=%s", self.service.resource)
            code, details = grpc.StatusCode.INTERNAL, "edgeagent failed in this call; its log says where"
        await context.abort(
            code, details if len(details) <= _MAX_DETAILS else details[: _MAX_DETAILS - 1] + "…"
        )
        raise AssertionError("abort raises")

    def _handlers(self) -> Any:
        def unary(call: Callable[[bytes], bytes]) -> Any:
            async def handler(request: bytes, context: Any) -> bytes:
                return await self._answer(call, request, context)

            return grpc.unary_unary_rpc_method_handler(handler)

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
