"""The kubelet's pod resources service over the device manager."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import grpc

from edgeagent.kubelet.protos import podresources as pr
from tests.fakes.kubelet.devices import DeviceManager
from tests.fakes.kubelet.model import Pod


def handler(devices: DeviceManager, pods: Callable[[], list[Pod]]) -> grpc.GenericRpcHandler:
    """`pods()`: those that are active, the one being admitted included."""

    def pod_resources(pod: Pod) -> pr.PodResources:
        answer = pr.PodResources(name=pod.name, namespace=pod.namespace)
        for container in (*pod.init, *pod.apps):
            if container.role == "init":
                continue  # ordinary init containers are not shown, although they may hold more
            shown = answer.containers.add(name=container.name)
            for resource, held in devices.held(pod.uid, container.name).items():
                _one_each(shown, resource, held.ids)
        return answer

    def list_(
        request: pr.ListPodResourcesRequest, context: grpc.ServicerContext
    ) -> pr.ListPodResourcesResponse:
        with devices.cluster.lock:
            devices.update_allocated()
            return pr.ListPodResourcesResponse(pod_resources=[pod_resources(p) for p in pods()])

    def get(request: pr.GetPodResourcesRequest, context: grpc.ServicerContext) -> pr.GetPodResourcesResponse:
        with devices.cluster.lock:
            for pod in pods():
                if pod.key == (request.pod_namespace, request.pod_name):
                    return pr.GetPodResourcesResponse(pod_resources=pod_resources(pod))
        context.abort(
            grpc.StatusCode.UNKNOWN, f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
        )
        raise AssertionError("abort raises")

    def get_allocatable(
        request: pr.AllocatableResourcesRequest, context: grpc.ServicerContext
    ) -> pr.AllocatableResourcesResponse:
        answer = pr.AllocatableResourcesResponse()
        with devices.cluster.lock:
            for resource, ids in devices.healthy.items():
                _one_each(answer, resource, ids)
        return answer

    def unary(method: Callable[..., Any], request: Any) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(
            method,
            request_deserializer=request.FromString,
            response_serializer=lambda m: m.SerializeToString(),
        )

    return grpc.method_handlers_generic_handler(
        pr.LISTER_SERVICE,
        {
            "List": unary(list_, pr.ListPodResourcesRequest),
            "Get": unary(get, pr.GetPodResourcesRequest),
            "GetAllocatableResources": unary(get_allocatable, pr.AllocatableResourcesRequest),
        },
    )


def _one_each(answer: Any, resource: str, ids: Iterable[str]) -> None:
    """One entry per ID, not grouped."""
    for one in sorted(ids):
        answer.devices.add(resource_name=resource, device_ids=[one])
