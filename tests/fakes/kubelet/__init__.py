"""A kubelet, container runtime, scheduler and API server to test and show the agent without a cluster.

They behave as measured on Kubernetes 1.36.2 with containerd 2.2.7, faults included. Nothing here
imports pytest: the demo uses it too.
"""

import os

# grpc's core writes its own lines about every closed stream otherwise.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from tests.fakes.kubelet.apiserver import StandInApiServer
from tests.fakes.kubelet.cluster import Cluster
from tests.fakes.kubelet.kubelet import StandInKubelet
from tests.fakes.kubelet.model import Container, ContainerSpec, Event, Node, Pod
from tests.fakes.kubelet.runtime import Instance, Runtime
from tests.fakes.kubelet.scheduler import Deployment, Scheduler
from tests.fakes.kubelet.timing import FAST, REAL, Timing

__all__ = [
    "FAST",
    "REAL",
    "Cluster",
    "Container",
    "ContainerSpec",
    "Deployment",
    "Event",
    "Instance",
    "Node",
    "Pod",
    "Runtime",
    "Scheduler",
    "StandInApiServer",
    "StandInKubelet",
    "Timing",
]
