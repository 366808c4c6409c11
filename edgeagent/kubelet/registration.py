"""Telling the kubelet that a resource is served on one of our sockets."""

from __future__ import annotations

from pathlib import Path

import grpc

from edgeagent.errors import KubeletError
from edgeagent.kubelet.protos import deviceplugin as api
from edgeagent.kubelet.server import DeviceService, options_of

KUBELET_SOCKET = "kubelet.sock"
_TIMEOUT_S = 5.0


def register(kubelet_socket: Path, endpoint: str, service: DeviceService) -> None:
    """One Register call. Raises KubeletError; the caller tries again.

    Every call has a connection of its own: grpc's pooled ones wait a second and more before they try
    a socket again that refused, and the kubelet's refuses for a moment after it appeared.
    """
    channel = grpc.insecure_channel(
        f"unix:{kubelet_socket}",
        options=(("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)),
    )
    try:
        call = channel.unary_unary(api.REGISTER)
        request = api.RegisterRequest(
            version=api.VERSION,
            endpoint=endpoint,
            resource_name=service.resource,
            options=options_of(service),
        )
        call(request.SerializeToString(), timeout=_TIMEOUT_S)
    except grpc.RpcError as e:
        code, details = e.code(), e.details()
        raise KubeletError(
            f"cannot register {service.resource} with the kubelet: {code.name}: {details}"
        ) from e
    finally:
        channel.close()
