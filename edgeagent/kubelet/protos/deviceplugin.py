"""The device plugin interface, v1beta1: between the kubelet and the servers of resources."""

from __future__ import annotations

from typing import TYPE_CHECKING

VERSION = "v1beta1"
HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"

# What gRPC calls the methods. Registration is served by the kubelet, DevicePlugin by us.
REGISTRATION_SERVICE = "v1beta1.Registration"
REGISTER = "/v1beta1.Registration/Register"
DEVICE_PLUGIN_SERVICE = "v1beta1.DevicePlugin"
GET_OPTIONS = "/v1beta1.DevicePlugin/GetDevicePluginOptions"
LIST_AND_WATCH = "/v1beta1.DevicePlugin/ListAndWatch"
GET_PREFERRED_ALLOCATION = "/v1beta1.DevicePlugin/GetPreferredAllocation"
ALLOCATE = "/v1beta1.DevicePlugin/Allocate"
PRE_START_CONTAINER = "/v1beta1.DevicePlugin/PreStartContainer"

# The kubelet's receive limit for one message (grpc-go's default); on a larger list it drops the stream.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024

if TYPE_CHECKING:
    from edgeagent.kubelet.protos.deviceplugin_pb2 import *  # noqa: F403 (a stub made by protoc: all of it)
else:
    from edgeagent.kubelet.protos.descriptors import message_classes

    globals().update(message_classes("deviceplugin"))
