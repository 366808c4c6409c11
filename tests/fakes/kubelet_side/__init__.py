"""The agent's kubelet side against the stand-in kubelet: two pretend GPUs and what a test may do to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from edgeagent.config.schema import Config, KubeletConfig, SharingConfig
from edgeagent.gpus.model import Gpu, GpuKind
from edgeagent.hostroot import HostRoot
from edgeagent.isolation.backend import ShareToEnforce
from edgeagent.kubelet.containers import HostContainers
from edgeagent.kubelet.gate import AllocEvent
from edgeagent.kubelet.plugin import KubeletSide, SideHooks
from edgeagent.kubelet.protos import deviceplugin as dp
from edgeagent.node.cdi import ContainerEdits
from edgeagent.node.cgroups import PodCgroups
from edgeagent.node.podlogs import PodLogs
from edgeagent.node.processes import Processes
from edgeagent.supervisor import Supervisor
from tests.fakes.kubelet import StandInKubelet

MEMORY = "volcano.sh/vgpu-memory"
CORES = "volcano.sh/vgpu-cores"
NUMBER = "volcano.sh/vgpu-number"


def pretend_gpu(number: int, mib: int = 8192, **facts: object) -> Gpu:
    """The GPU of that number: its UUID, index and minor, unless `facts` say otherwise."""
    gpu = Gpu(
        uuid=f"GPU-{number:08x}-0000-0000-0000-000000000000",
        index=number,
        kind=GpuKind.DISCRETE,
        source="simulated",
        model="Pretend A2000",
        memory_total_mib=mib,
        minor=number,
    )
    return replace(gpu, **facts) if facts else gpu  # type: ignore[arg-type]


def config_for(root: Path, **sharing: object) -> Config:
    """Everything under `root`; `sharing`: fields of SharingConfig."""
    return Config(
        host_root=str(root),
        state_dir="/var/lib/edgeagent",
        sharing=SharingConfig(**sharing),  # type: ignore[arg-type]
        kubelet=KubeletConfig(),
    )


@dataclass
class RecordedIsolation:
    """An isolation manager that remembers what it was asked. `edits`: what prepare returns; `error`:
    raised by prepare."""

    edits: ContainerEdits = field(default_factory=ContainerEdits)
    error: Exception | None = None
    prepared: list[ShareToEnforce] = field(default_factory=list)
    released: list[ShareToEnforce] = field(default_factory=list)
    adopted: list[ShareToEnforce] = field(default_factory=list)

    def adopt(self, share: ShareToEnforce) -> None:
        self.adopted.append(share)

    def prepare(self, share: ShareToEnforce) -> ContainerEdits:
        if self.error is not None:
            raise self.error
        self.prepared.append(share)
        return self.edits

    def release(self, share: ShareToEnforce) -> None:
        self.released.append(share)


class Side:
    """A running KubeletSide; `stop` ends it as the agent does, `start` makes a new one."""

    def __init__(
        self,
        kubelet: StandInKubelet,
        cards: list[Gpu],
        *,
        binding: str = "late",
        use_inotify: bool = True,
        **sharing: object,
    ) -> None:
        self.kubelet = kubelet
        self.gpus = cards
        self.sick: dict[str, str] = {}
        self.cordoned: set[str] = set()
        self.absent: set[str] = set()
        self.events: list[AllocEvent] = []
        self.evicted: list[tuple[str, str]] = []
        self.isolation = RecordedIsolation()
        self.config = config_for(kubelet.root, **sharing)
        self._binding = binding
        self._use_inotify = use_inotify
        self.start()

    def start(self) -> None:
        host = HostRoot(self.kubelet.root)
        self.supervisor = Supervisor()
        self.containers = HostContainers(host, PodCgroups(host), PodLogs(host), Processes(host))
        self.side = KubeletSide(
            self.config,
            host,
            containers=self.containers,
            isolation=self.isolation,
            hooks=SideHooks(
                on_change=self.kubelet.cluster.notify,
                on_event=self.events.append,
                evict=lambda uid, why: self.evicted.append((uid, why)),
            ),
            stop=self.supervisor.stop,
            binding=self._binding,
            use_inotify=self._use_inotify,
        )
        self.tell_gpus()
        for name, service, wake in self.side.services():
            self.supervisor.add(name, service, wake)

    def stop(self) -> None:
        late = self.supervisor.shutdown(4.0)
        assert not late, late
        assert self.supervisor.failed is None, self.supervisor.failed

    def restart(self) -> None:
        self.stop()
        self.start()

    def tell_gpus(self) -> None:
        self.side.set_gpus(self.gpus, sick=self.sick, cordoned=self.cordoned, absent=self.absent)

    def make_sick(self, index: int, why: str | None = "XID 79: fallen off the bus") -> None:
        """`why` None: well again."""
        uuid = self.gpus[index].uuid
        if why is None:
            self.sick.pop(uuid, None)
        else:
            self.sick[uuid] = why
        self.tell_gpus()

    def cordon(self, index: int, cordoned: bool = True) -> None:
        uuid = self.gpus[index].uuid
        (self.cordoned.add if cordoned else self.cordoned.discard)(uuid)
        self.tell_gpus()

    def registered(self) -> bool:
        """The kubelet has heard all of it."""
        offered = [r for r in self.side.resources() if r.problem is None]
        return self.side.connected and all(
            r.registered and self.kubelet.capacity.get(r.name) == r.total for r in offered
        )

    def kinds(self, kind: str) -> list[AllocEvent]:
        return [event for event in self.events if event.kind == kind]


@contextmanager
def running_side(
    cards: list[Gpu] | None = None, *, kubelet: Mapping[str, object] | None = None, **options: object
) -> Iterator[tuple[StandInKubelet, Side]]:
    """A kubelet and a registered kubelet side. `kubelet`: options of the stand-in; the rest are the
    side's."""
    with StandInKubelet(**(kubelet or {})) as k:  # type: ignore[arg-type]
        side = Side(k, cards or [pretend_gpu(0), pretend_gpu(1)], **options)  # type: ignore[arg-type]
        try:
            k.wait_for(side.registered)
            yield k, side
        finally:
            side.stop()


def eventually(predicate: Callable[[], object], timeout_s: float = 10.0) -> None:
    """For what nobody notifies of."""
    until = time.monotonic() + timeout_s
    pause = threading.Event()
    while not predicate():
        if time.monotonic() > until:
            raise AssertionError("did not happen in time")
        pause.wait(0.01)


class RawCaller:
    """Calls one resource's socket as a kubelet would, or as none would. `code` and `text` of the last
    refusal."""

    def __init__(self, side: Side, resource: str) -> None:
        directory = side.kubelet.directory
        self._channel = grpc.insecure_channel(
            f"unix:{directory}/edgeagent-{resource.replace('/', '_')}.sock",
            options=(("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)),
        )
        self.code = ""
        self.text = ""

    def __enter__(self) -> RawCaller:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def raw(self, method: str, request: bytes) -> bytes | None:
        """The answer, or None where it was refused."""
        try:
            answer: bytes = self._channel.unary_unary(method)(request, timeout=30)
        except grpc.RpcError as e:
            self.code, self.text = e.code().name, e.details()
            return None
        self.code, self.text = "OK", ""
        return answer

    def allocate(self, ids: Sequence[str]) -> dp.AllocateResponse | None:
        request = dp.AllocateRequest(container_requests=[dp.ContainerAllocateRequest(devices_ids=ids)])
        answer = self.raw(dp.ALLOCATE, request.SerializeToString())
        return None if answer is None else dp.AllocateResponse.FromString(answer)

    def prefer(self, available: Sequence[str], must: Sequence[str], size: int) -> list[str]:
        request = dp.PreferredAllocationRequest()
        request.container_requests.add(
            available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
        )
        answer = self.raw(dp.GET_PREFERRED_ALLOCATION, request.SerializeToString())
        assert answer is not None, (self.code, self.text)
        (one,) = dp.PreferredAllocationResponse.FromString(answer).container_responses
        return list(one.deviceIDs)

    def pre_start(self, ids: Sequence[str]) -> bool:
        request = dp.PreStartContainerRequest(devices_ids=ids)
        return self.raw(dp.PRE_START_CONTAINER, request.SerializeToString()) is not None

    def stream(self) -> grpc.Call:
        """A ListAndWatch call of its own."""
        return self._channel.unary_stream(
            dp.LIST_AND_WATCH, response_deserializer=dp.ListAndWatchResponse.FromString
        )(b"")
