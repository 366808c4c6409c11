"""The least device plugin that grpcio can serve, to compare the agent's figures with.

    python -m tests.fakes.kubelet.bare_plugin --dir DIR [--resource R] [--count N]

One resource, a list made once, Allocate answered with one env. Ends on SIGTERM or SIGINT. Prints
"registered" when the kubelet has accepted it. SIGUSR1 turns all IDs Unhealthy, SIGUSR2 Healthy.
"""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from edgeagent.kubelet.protos import deviceplugin as dp


class BarePlugin:
    """Serves `count` IDs of `resource` in `directory`, where kubelet.sock is."""

    def __init__(self, directory: Path, resource: str, count: int, *, pre_start: bool = False) -> None:
        self.directory = directory
        self.resource = resource
        self.endpoint = f"bare-{resource.rpartition('/')[2]}.sock"
        self.options = dp.DevicePluginOptions(
            pre_start_required=pre_start, get_preferred_allocation_available=True
        )
        ids = [f"b{n:06d}" for n in range(count)]
        self._lists = {
            health: dp.ListAndWatchResponse(
                devices=[dp.Device(ID=one, health=health) for one in ids]
            ).SerializeToString()
            for health in (dp.HEALTHY, dp.UNHEALTHY)
        }
        self._changed = threading.Condition()
        self._health = dp.HEALTHY
        self._number = 0
        self._stopped = False
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="bare-plugin")
        self._server = grpc.server(self._pool, options=(("grpc.max_send_message_length", -1),))
        self._server.add_generic_rpc_handlers((self._handler(),))

    def start(self) -> None:
        path = self.directory / self.endpoint
        path.unlink(missing_ok=True)
        self._server.add_insecure_port(f"unix:{path}")
        self._server.start()
        with grpc.insecure_channel(f"unix:{self.directory}/kubelet.sock") as channel:
            register = channel.unary_unary(
                dp.REGISTER,
                request_serializer=dp.RegisterRequest.SerializeToString,
                response_deserializer=dp.Empty.FromString,
            )
            request = dp.RegisterRequest(
                version=dp.VERSION, endpoint=self.endpoint, resource_name=self.resource, options=self.options
            )
            register(request, timeout=10, wait_for_ready=True)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._server.stop(None).wait()
        self._pool.shutdown()

    def set_health(self, health: str) -> None:
        with self._changed:
            self._health = health
            self._number += 1
            self._changed.notify_all()

    def _handler(self) -> grpc.GenericRpcHandler:
        def unary(method: Any, request: Any) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(
                method,
                request_deserializer=request.FromString,
                response_serializer=lambda m: m.SerializeToString(),
            )

        return grpc.method_handlers_generic_handler(
            dp.DEVICE_PLUGIN_SERVICE,
            {
                "GetDevicePluginOptions": unary(lambda request, context: self.options, dp.Empty),
                "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                    self._list_and_watch, request_deserializer=dp.Empty.FromString
                ),
                "GetPreferredAllocation": unary(self._preferred, dp.PreferredAllocationRequest),
                "Allocate": unary(self._allocate, dp.AllocateRequest),
                "PreStartContainer": unary(
                    lambda request, context: dp.PreStartContainerResponse(), dp.PreStartContainerRequest
                ),
            },
        )

    def _list_and_watch(self, request: dp.Empty, context: grpc.ServicerContext) -> Iterator[bytes]:
        def wake() -> None:
            with self._changed:
                self._changed.notify_all()

        context.add_callback(wake)
        sent = -1
        while True:
            with self._changed:
                while self._number == sent and not self._stopped and context.is_active():
                    self._changed.wait()
                if self._stopped or not context.is_active():
                    return
                sent, message = self._number, self._lists[self._health]
            yield message

    def _preferred(
        self, request: dp.PreferredAllocationRequest, context: grpc.ServicerContext
    ) -> dp.PreferredAllocationResponse:
        answer = dp.PreferredAllocationResponse()
        for one in request.container_requests:
            must = set(one.must_include_deviceIDs)
            rest = [i for i in one.available_deviceIDs if i not in must]
            chosen = [*must, *rest[: one.allocation_size - len(must)]]
            answer.container_responses.add(deviceIDs=chosen)
        return answer

    def _allocate(self, request: dp.AllocateRequest, context: grpc.ServicerContext) -> dp.AllocateResponse:
        answer = dp.AllocateResponse()
        for one in request.container_requests:
            answer.container_responses.add(envs={"BARE_UNITS": str(len(one.devices_ids))})
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description="A bare grpcio device plugin.")
    parser.add_argument("--dir", type=Path, required=True, help="the directory of kubelet.sock")
    parser.add_argument("--resource", default="example.com/bare")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--pre-start", action="store_true", help="ask for PreStartContainer")
    arguments = parser.parse_args()
    plugin = BarePlugin(arguments.dir, arguments.resource, arguments.count, pre_start=arguments.pre_start)
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    plugin.start()
    print("registered", flush=True)
    while True:
        got = signal.sigwait(signals)
        if got not in (signal.SIGUSR1, signal.SIGUSR2):
            break
        plugin.set_health(dp.UNHEALTHY if got == signal.SIGUSR1 else dp.HEALTHY)
    plugin.stop()


if __name__ == "__main__":
    main()
