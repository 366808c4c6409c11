"""Registration through the kubelet's plugin watcher, v1: the kubelet asks on our socket."""

from __future__ import annotations

from typing import TYPE_CHECKING

TYPE_DEVICE_PLUGIN = "DevicePlugin"

REGISTRATION_SERVICE = "pluginregistration.Registration"
GET_INFO = "/pluginregistration.Registration/GetInfo"
NOTIFY_REGISTRATION_STATUS = "/pluginregistration.Registration/NotifyRegistrationStatus"

if TYPE_CHECKING:
    from edgeagent.kubelet.protos.pluginregistration_pb2 import *  # noqa: F403 (a stub made by protoc: all of it)
else:
    from edgeagent.kubelet.protos.descriptors import message_classes

    globals().update(message_classes("pluginregistration"))
