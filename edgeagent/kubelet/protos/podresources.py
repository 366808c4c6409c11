"""The pod resources interface, v1: which container holds which devices, as the kubelet sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

LISTER_SERVICE = "v1.PodResourcesLister"
LIST = "/v1.PodResourcesLister/List"
GET = "/v1.PodResourcesLister/Get"
GET_ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"

if TYPE_CHECKING:
    from edgeagent.kubelet.protos.podresources_pb2 import *  # noqa: F403 (a stub made by protoc: all of it)
else:
    from edgeagent.kubelet.protos.descriptors import message_classes

    globals().update(message_classes("podresources"))
