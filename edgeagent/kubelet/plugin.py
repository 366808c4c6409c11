"""The kubelet side as the agent drives it: which resources are offered, on which sockets, registered
or not, and what can be said about them.

`set_gpus` may be called from any thread and reaches the kubelet at once; sockets, registrations and
their retries belong to the watching thread.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from edgeagent.config.schema import Config
from edgeagent.errors import KubeletError, NodeError
from edgeagent.gpus.model import Gpu, GpuLink, Topology
from edgeagent.hostroot import HostRoot
from edgeagent.isolation.backend import ShareToEnforce
from edgeagent.kubelet import registration
from edgeagent.kubelet.bookings import BookingFile
from edgeagent.kubelet.checkpoint import FILE_NAME, Checkpoint, CheckpointView
from edgeagent.kubelet.containers import GPU_ENV, Containers
from edgeagent.kubelet.encode import TokenEntries
from edgeagent.kubelet.gate import AllocEvent, Gate, GateHooks, GateSettings, Isolation
from edgeagent.kubelet.named import NamedDevice, NamedPlan, NamedService
from edgeagent.kubelet.offers import GpuOffer, Offers, plan_offers
from edgeagent.kubelet.podresources import AllocateGuard, PodResources
from edgeagent.kubelet.server import DeviceService, PluginServer, ServerLoop
from edgeagent.kubelet.shares import ShareService
from edgeagent.kubelet.watch import DirectoryWatch
from edgeagent.node.cdi import GPU_CLASS, ContainerEdits, SpecDir, qualified_name, spec_text
from edgeagent.node.nvidia_cdi import NvidiaCdi
from edgeagent.sharing import names as resource_names
from edgeagent.sharing import units
from edgeagent.sharing.ledger import GpuCapacity, Ledger, Wording
from edgeagent.sharing.modes import GpuMode
from edgeagent.sharing.tokens import CORES, MEMORY, NUMBER, Amounts, Demand
from edgeagent.sharing.topology import Link, Links
from edgeagent.sharing.waiting import WaitingLine
from edgeagent.snapshot import ContainerShare, ResourceState, WaitingContainer

log = logging.getLogger(__name__)

SOCKET_PREFIX = "edgeagent-"
READMIT_S = 10.0  # after a kubelet's start its pods have been admitted again
STREAM_GRACE_S = 2.0  # after Register the kubelet opens its stream within milliseconds
MAX_LOST_PAUSE_S = 60.0
FIRST_RETRY_S, MAX_RETRY_S, SLOW_RETRY_S = 0.01, 0.1, 5.0
FAST_TRIES = 100  # about 10 s of them, then slowly

_KINDS = {MEMORY: "memory", CORES: "cores", NUMBER: "number"}


@dataclass(frozen=True, slots=True)
class SideHooks:
    """What the kubelet side tells the agent. None may block or raise."""

    on_change: Callable[[], None] = lambda: None  # anything in the snapshot's parts
    on_event: Callable[[AllocEvent], None] = lambda event: None
    evict: Callable[[str, str], None] = lambda pod_uid, reason: None


@dataclass(frozen=True, slots=True)
class GpuRoom:
    """What is promised and free on one GPU, for the snapshot. MiB and per cent of compute."""

    promised_mib: int
    free_mib: int
    promised_cores_pct: int
    free_cores_pct: int


@dataclass(frozen=True, slots=True)
class BoundShare:
    """A bound container for whoever enforces and measures; `since_ms` of its last start."""

    share: ShareToEnforce
    since_ms: int
    running: bool


@dataclass(slots=True)
class _Endpoint:
    """One resource's server and where it stands with the kubelet."""

    server: PluginServer
    registered_as: tuple[int, int] | None = None  # inode and ctime of the kubelet's socket
    registered_s: float = 0.0
    tries: int = 0  # failed in a row
    lost: int = 0  # streams lost in a row
    next_try_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to be offered. `problems`: resource -> why it is not."""

    tokens: Mapping[str, str] = field(default_factory=dict)  # resource -> letter
    named: Mapping[str, NamedPlan] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class KubeletSide:
    """Construct, `set_gpus`, then run the two services. `stop` is the agent's own stop event."""

    def __init__(
        self,
        config: Config,
        host: HostRoot,
        *,
        containers: Containers,
        isolation: Isolation,
        hooks: SideHooks | None = None,
        stop: threading.Event | None = None,
        binding: str = "late",
        cluster_version: str | None = None,
        use_inotify: bool = True,
    ) -> None:
        """`binding`: "late" or "early", decided by the agent where the configuration says auto;
        `cluster_version`: "v1.36.2+k3s1" where it is known."""
        self._config = config
        self._host = host
        self._containers = containers
        self._hooks = hooks or SideHooks()
        self._stop = stop or threading.Event()
        self.binding = binding
        self.cluster_version = config.sharing.cluster_version or cluster_version
        kubelet = config.kubelet
        self._dir = host.path(kubelet.device_plugin_dir)
        self._loop = ServerLoop()
        self._watch = DirectoryWatch(self._dir, use_inotify)
        self._guard = AllocateGuard()
        self.pod_resources = PodResources(host.path(kubelet.pod_resources_socket), self._guard)
        self._nvidia = NvidiaCdi(host, (kubelet.cdi_dir, kubelet.cdi_static_dir))
        self._specs = SpecDir(host, kubelet.cdi_dir)
        self._checkpoint_path = kubelet.checkpoint_file or f"{kubelet.device_plugin_dir}/{FILE_NAME}"

        self.unit_mib, self.unit_problem = self._unit_to_use()
        self.names = self._names(self.unit_mib)
        self._letters = {self.names.memory: MEMORY, self.names.cores: CORES, self.names.number: NUMBER}

        self._lock = threading.RLock()
        self._offers = Offers()
        self._links: Links = {}
        self._plan: _Plan | None = None
        self._entries: dict[str, TokenEntries] = {}
        self._unhealthy = Demand()  # as listed
        # Of what is held, what is not listed as unhealthy until then; None: all of it.
        self._spared: Demand | None = Demand()
        self._spared_until_s: float | None = None
        self._gpu_specs: dict[str, str] = {}
        self._endpoints: dict[str, _Endpoint] = {}
        self._kubelet_seen = False
        self._kubelet: tuple[int, int] | None = None  # the socket of the last one seen
        self._new_socket = False  # the kubelet has made its socket since the last look
        self._failing = False
        self._registrations = 0
        self._cards = Checkpoint(host, self._checkpoint_path, dict, self._is_named)
        self._cards_lock = threading.Lock()

        self.gate = Gate(
            ledger=Ledger(
                unit_mib=self.unit_mib,
                policy=config.sharing.placement,
                min_share_mib=config.sharing.min_share_mib,
                wording=Wording(
                    self.names.memory_in_mib, self.names.cores, self.names.number, self._pod_text
                ),
            ),
            line=WaitingLine(config.sharing.reserve_after_seconds),
            names=self.names,
            checkpoint=Checkpoint(host, self._checkpoint_path, lambda: self._letters, lambda name: False),
            specs=self._specs,
            bookings=BookingFile(host.path(config.state_dir), host),
            containers=containers,
            isolation=isolation,
            guard=self._guard,
            settings=GateSettings(
                hold_s=config.sharing.hold_seconds,
                wait_s=config.sharing.wait_seconds,
                binding=binding,
                visible_devices="uuid"
                if config.sharing.visible_devices == "auto"
                else config.sharing.visible_devices,
            ),
            hooks=GateHooks(
                self._gate_changed,
                self._hooks.on_event,
                self._hooks.evict,
                self._gpu_edits,
                self._early_env,
                self._not_init,
            ),
            stop=self._stop,
        )
        self._restored = False

    # --- what there is ---

    def set_gpus(
        self,
        gpus: Iterable[Gpu],
        *,
        sick: Mapping[str, str] | None = None,
        cordoned: Collection[str] = (),
        closed: Mapping[str, str] | None = None,
        absent: Collection[str] = (),
        withdrawn: Mapping[str, int] | None = None,
        topology: Topology | None = None,
    ) -> None:
        """The GPUs as they are now, in their order. `sick` and `closed` (takes nothing new, running
        containers stay): UUID -> why; `absent`: those of `gpus` that are not there at the moment;
        `withdrawn`: UUID -> MiB that nobody new gets, because programs outside of pods use them.

        Until the first call nothing is offered: call it when probing is done, not before.
        """
        offers = plan_offers(
            gpus,
            self._config.sharing,
            sick=sick,
            cordoned=cordoned,
            closed=closed,
            absent=absent,
            withdrawn=withdrawn,
        )
        with self._lock:
            first = self._plan is None
            self._offers = offers
            if topology is not None:
                self._links = {pair: _score(link) for pair, link in topology.items()}
            capacities = [self._capacity(offer) for offer in offers.in_mode(GpuMode.SHARED)]
            self.gate.set_gpus(capacities, {offer.uuid: offer.gpu for offer in offers.gpus})
            if not self._restored:
                self._restored = True
                self.gate.restore()
            plan = self._make_plan()
            same = self._plan is not None and (plan.tokens, plan.named) == (
                self._plan.tokens,
                self._plan.named,
            )
            self._plan = plan
        for offer in offers.gpus:
            if offer.present and offer.mode is not GpuMode.OFF:
                self._nvidia.access(offer.gpu, gpus_on_node=len(offers.gpus))  # found out before it is needed
        self._write_gpu_specs()
        self._relist()
        if not same:
            self._watch.wake()
        if first:
            for resource, problem in plan.problems.items():
                log.error("resource not offered resource=%s: %s", resource, problem)
            for note in (*plan.notes, *offers.notes):
                log.warning("%s", note)
        self._hooks.on_change()

    def set_policy(self, placement: str) -> None:
        """ "binpack" or "spread", for containers that start from now on."""
        self.gate.set_policy(placement)

    def _capacity(self, offer: GpuOffer) -> GpuCapacity:
        return GpuCapacity(
            offer.uuid,
            units.supply_units(offer.usable_mib, self.unit_mib),
            100,
            offer.max_shares,
            accepting=offer.nothing_new is None,
            sick=offer.unusable is not None,
            reason=offer.nothing_new or "",
            withheld=units.demand_units(offer.withdrawn_mib, self.unit_mib),
        )

    def _names(self, unit_mib: int) -> resource_names.ResourceNames:
        sharing = self._config.sharing
        return resource_names.resource_names(sharing.names, prefix=sharing.prefix, unit_mib=unit_mib)

    def _unit_to_use(self) -> tuple[int, str | None]:
        """The configured unit, unless living pods hold tokens of another one."""
        base = self._names(1).memory
        checkpoint = Checkpoint(self._host, self._checkpoint_path, dict, lambda name: False)
        try:
            others = checkpoint.read().other_resources
        except KubeletError:
            others = {}
        in_use: dict[int, list[str]] = {}
        for resource, uids in others.items():
            unit = _unit_in_name(resource, base)
            living = [uid for uid in sorted(uids) if self._containers.pod_alive(uid) is not False]
            if unit is not None and living:
                in_use[unit] = [self._pod_text(uid) for uid in living]
        unit, problem = units.unit_to_use(self._config.sharing.memory_unit_mib, in_use)
        if problem is not None:
            log.warning("%s", problem)
        return unit, problem

    def _make_plan(self) -> _Plan:
        offers = self._offers
        problems: dict[str, str] = {}
        notes: list[str] = []
        tokens: dict[str, str] = {}
        offered: Amounts = self.gate.read(lambda ledger, line, now_s: ledger.offered)
        shared = offers.in_mode(GpuMode.SHARED)
        if shared or any(offered):
            sized = units.memory_units(
                [offer.usable_mib for offer in shared], self.unit_mib, self.cluster_version
            )
            problem = sized.problem
            if problem is None and offered.memory > units.max_count():
                problem = (
                    f"cannot offer {offered.memory} units of {self.unit_mib} MiB: the kubelet takes at most "
                    f"{units.max_count()}; set a coarser memoryUnitMiB"
                )
            if problem is not None:
                problems.update(dict.fromkeys(self._letters, problem))
            else:
                tokens = dict(self._letters)
            if sized.warning is not None:
                notes.append(sized.warning)
        if self.unit_problem is not None:
            notes.append(self.unit_problem)
        if self.names.note is not None and tokens:
            notes.append(self.names.note)
        named = self._named_plans()
        by_mode = {mode: [p.resource for p in named if p.mode is mode] for mode in GpuMode}
        clashes = resource_names.collisions(
            self.names if tokens else None, by_mode[GpuMode.EXCLUSIVE], by_mode[GpuMode.TIMESLICE]
        )
        used: dict[str, NamedPlan] = {}
        for plan in named:
            if plan.resource in tokens or plan.resource in used:
                problems[plan.resource] = next((c for c in clashes if plan.resource in c), "named twice")
            else:
                used[plan.resource] = plan
        return _Plan(tokens, used, problems, tuple(notes))

    def _named_plans(self) -> list[NamedPlan]:
        """In a fixed order: with a clash of names, whole cards come first."""
        block = self._config.sharing.time_slicing
        renamed = block is not None and block.rename_by_default
        fail_above_one = block is not None and block.fail_requests_greater_than_one
        found: dict[tuple[str, GpuMode], list[NamedDevice]] = {}
        for offer in self._offers.gpus:
            gpu = offer.gpu
            if offer.mode is GpuMode.EXCLUSIVE:
                device = NamedDevice(gpu.uuid, gpu, None, 1, offer.unusable, offer.nothing_new)
                found.setdefault((resource_names.GPU, offer.mode), []).append(device)
            elif offer.mode is GpuMode.TIMESLICE:
                name = resource_names.timeslice_name(resource_names.GPU, renamed=renamed)
                device = NamedDevice(gpu.uuid, gpu, None, offer.replicas, offer.unusable, offer.nothing_new)
                found.setdefault((name, offer.mode), []).append(device)
            elif offer.mode is GpuMode.MIG:
                for instance in gpu.mig_instances:
                    replicas = offer.mig_replicas.get(instance.profile, 1)
                    name = resource_names.mig_name(instance.profile)
                    name = resource_names.timeslice_name(name, renamed=renamed and replicas > 1)
                    device = NamedDevice(
                        instance.uuid, gpu, instance, replicas, offer.unusable, offer.nothing_new
                    )
                    found.setdefault((name, offer.mode), []).append(device)
        order = (GpuMode.EXCLUSIVE, GpuMode.TIMESLICE, GpuMode.MIG)
        return [
            NamedPlan(
                name, mode, tuple(devices), self._links,
                fail_above_one and any(d.replicas > 1 for d in devices),
            )
            for (name, mode), devices in sorted(found.items(), key=lambda item: order.index(item[0][1]))
        ]  # fmt: skip

    # --- what containers get ---

    def _gpu_edits(self, gpu: Gpu) -> ContainerEdits:
        return self._nvidia.access(gpu, gpus_on_node=len(self._offers.gpus)).edits

    def _early_env(self, gpu: Gpu) -> Mapping[str, str]:
        return self._nvidia.access(gpu, gpus_on_node=len(self._offers.gpus)).early_env

    def access_problems(self) -> tuple[str, ...]:
        """Why containers will not be able to use their GPU, one sentence each."""
        found = [
            self._nvidia.access(offer.gpu, gpus_on_node=len(self._offers.gpus)).problem
            for offer in self._offers.gpus
            if offer.present and offer.mode is not GpuMode.OFF
        ]
        return tuple(dict.fromkeys(problem for problem in found if problem is not None))

    def _named_answer(self, devices: Sequence[NamedDevice]) -> tuple[ContainerEdits, list[str]]:
        count = len(self._offers.gpus)
        if self.binding == "early":
            uuids = [device.uuid for device in devices]
            if self._config.sharing.visible_devices == "index" and all(d.mig is None for d in devices):
                uuids = [str(device.gpu.index) for device in devices]
            nodes = tuple(dict.fromkeys(n for d in devices for n in (*d.gpu.device_nodes, *_mig_nodes(d))))
            return ContainerEdits({"NVIDIA_VISIBLE_DEVICES": ",".join(uuids)}, (), nodes), []
        names = []
        for device in devices:
            access = self._nvidia.access(device.gpu, device.mig, count)
            names.append(access.device or qualified_name(GPU_CLASS, device.uuid))
        return ContainerEdits(), names

    def _write_gpu_specs(self) -> None:
        """Specs of whole devices for hosts where NVIDIA's toolkit has made none."""
        with self._lock:
            plan = self._plan
            if plan is None or self.binding == "early":
                return
            wanted: dict[str, str] = {}
            for device in (d for p in plan.named.values() for d in p.devices if d.unusable is None):
                access = self._nvidia.access(device.gpu, device.mig, len(self._offers.gpus))
                if access.device is None:
                    env = {"NVIDIA_VISIBLE_DEVICES": "void", GPU_ENV: device.uuid}
                    edits = access.edits.merged(ContainerEdits(env=env))
                    wanted[device.uuid] = spec_text(GPU_CLASS, {device.uuid: edits})
            try:
                for name, text in wanted.items():
                    if self._specs.read(GPU_CLASS, name) != text:
                        self._specs.write(GPU_CLASS, name, text)
                self._gpu_specs = wanted
            except NodeError as e:
                log.warning("%s", e)

    # --- lists ---

    def _gate_changed(self) -> None:
        self._relist()
        self._hooks.on_change()

    def _relist(self) -> None:
        """Brings every open stream up to date."""
        with self._lock:
            if self._plan is None:
                return
            for resource, payload in self._payloads().items():
                endpoint = self._endpoints.get(resource)
                if endpoint is not None:
                    endpoint.server.publish(payload)

    def _payloads(self) -> dict[str, bytes]:
        assert self._plan is not None
        payloads: dict[str, bytes] = {}
        if self._plan.tokens:
            listed = self._unhealthy
            offered, unhealthy, held = self.gate.read(
                lambda ledger, line, now_s: (ledger.offered, ledger.unhealthy(listed), ledger.held())
            )
            self._unhealthy = unhealthy = unhealthy - (held if self._spared is None else self._spared & held)
            for resource, letter in self._plan.tokens.items():
                count = offered[(MEMORY, CORES, NUMBER).index(letter)]
                entries = self._entries.get(letter)
                if entries is None or entries.count != count:
                    entries = self._entries[letter] = TokenEntries(letter, count)
                payloads[resource] = entries.payload(unhealthy.of(letter))
        for resource, endpoint in self._endpoints.items():
            if isinstance(endpoint.server.service, NamedService) and resource in self._plan.named:
                endpoint.server.service.update(self._plan.named[resource], self._spared_until_s is not None)
                payloads[resource] = endpoint.server.service.payload()
        return payloads

    # --- the watching thread ---

    def services(self) -> list[tuple[str, Callable[[threading.Event], None], Callable[[], None]]]:
        """(name, service, wake) for the supervisor."""
        return [
            ("kubelet-watch", self.run, self.wake),
            ("gate-sweep", lambda stop: self.gate.sweep(), self.gate.wake),
        ]

    def wake(self) -> None:
        self._watch.wake()

    def run(self, stop: threading.Event) -> None:
        """Serves, registers and registers again until `stop`."""
        self._remove_old_sockets()
        try:
            while not stop.is_set():
                self._watch.arm()
                delay_s = self._step()
                if registration.KUBELET_SOCKET in self._watch.wait(delay_s):
                    self._new_socket = True
        finally:
            with self._lock:
                endpoints = list(self._endpoints.values())
                self._endpoints.clear()
            for endpoint in endpoints:
                endpoint.server.close()
            self._loop.shutdown()
            self._watch.close()

    def _step(self) -> float | None:
        """One look at sockets and registrations; returns when to look again at the latest."""
        if self._plan is None or not self._dir.is_dir():
            self._note_kubelet(None)
            return None
        # In this order: the kubelet deletes our sockets before it makes its own, so those that are there
        # after its own was seen stay. Registering one that is gone would hang until its dial times out.
        sock = self._kubelet_identity()
        now_s = time.monotonic()
        if sock is not None and sock != self._kubelet:
            self._spare_holders(now_s + READMIT_S, restarted=self._kubelet is not None)
            self._kubelet = sock
        self._match_servers()
        self._note_kubelet(sock)
        if sock is None:
            return None
        due_s: list[float] = []
        if self._spared_until_s is not None:
            if now_s >= self._spared_until_s:
                self._spare_nobody()
            else:
                due_s.append(self._spared_until_s)
        for endpoint in list(self._endpoints.values()):
            when_s = self._registration_due(endpoint, sock)
            if when_s is None:
                continue
            if when_s <= now_s:
                if self._kubelet_identity() != sock:
                    return 0.0  # a new kubelet since the look at our sockets
                self._register(endpoint, sock)
                when_s = endpoint.next_try_s if endpoint.registered_as is None else now_s + STREAM_GRACE_S
            due_s.append(when_s)
        self._new_socket = False
        return max(0.0, min(due_s) - time.monotonic()) if due_s else None

    def _spare_holders(self, until_s: float, *, restarted: bool) -> None:
        """A kubelet that starts admits its pods again, and rejects one that does not run at that moment
        if an ID of it is Unhealthy. So what is held is listed as Healthy until it has done that: whatever
        falls ill meanwhile if the kubelet is known to have started again, else only what is ill now."""
        with self._lock:
            plan = self._plan or _Plan()
            unhealthy, held = self.gate.read(
                lambda ledger, line, now_s: (ledger.unhealthy(self._unhealthy), ledger.held())
            )
            self._spared = None if restarted else unhealthy & held
            hurt = any(device.unusable for p in plan.named.values() for device in p.devices)
            self._spared_until_s = until_s if restarted or self._spared or hurt else None
        self._relist()

    def _spare_nobody(self) -> None:
        with self._lock:
            self._spared, self._spared_until_s = Demand(), None
        self._relist()

    def _match_servers(self) -> None:
        """Starts servers of resources that are offered now, ends the others, and puts back those whose
        socket has been removed."""
        plan = self._plan
        assert plan is not None
        wanted = {*plan.tokens, *plan.named}
        for resource in [r for r in self._endpoints if r not in wanted]:
            log.info("resource not offered any more resource=%s", resource)
            with self._lock:
                gone = self._endpoints.pop(resource)
            gone.server.close()
        for resource in sorted(wanted):
            endpoint = self._endpoints.get(resource)
            if endpoint is not None and endpoint.server.listening:
                continue
            if endpoint is not None:
                # The kubelet deletes our sockets when it starts: their absence means register again.
                log.info("own socket is gone, serving again resource=%s", resource)
                endpoint.server.close()
            self._serve(resource, endpoint.server.service if endpoint is not None else None)

    def _serve(self, resource: str, service: DeviceService | None) -> None:
        plan = self._plan
        assert plan is not None
        if service is None:
            letter = plan.tokens.get(resource)
            service = (
                ShareService(resource, letter, self.gate, self._guard)
                if letter is not None
                else NamedService(
                    plan.named[resource],
                    self._named_answer,
                    self._held_cards,
                    self._guard,
                    self._named_refusal,
                )
            )
        socket = self._dir / f"{SOCKET_PREFIX}{resource.replace('/', '_')}.sock"
        server = PluginServer(service, socket, self._loop, b"", self._watch.wake)
        with self._lock:
            self._endpoints[resource] = _Endpoint(server)
            server.publish(self._payloads()[resource])
        try:
            server.listen()
        except KubeletError as e:
            log.log(logging.DEBUG if self._failing else logging.ERROR, "%s", e)
            self._failing = True
            with self._lock:
                self._endpoints.pop(resource, None)

    def _kubelet_identity(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._dir / registration.KUBELET_SOCKET)
        except OSError:
            return None
        return (found.st_ino, found.st_ctime_ns) if stat.S_ISSOCK(found.st_mode) else None

    def _registration_due(self, endpoint: _Endpoint, sock: tuple[int, int]) -> float | None:
        """When to (try to) register: a monotonic time, in the past for now; None: not at all."""
        known = endpoint.registered_as
        # A new socket can have the old one's inode; its ctime alone also changes by a chmod.
        if known is not None and (
            known[0] != sock[0] or (known[1] != sock[1] and (self._new_socket or not self._watch.active))
        ):
            endpoint.registered_as = None
            endpoint.tries = endpoint.lost = 0
            endpoint.next_try_s = 0.0
        if endpoint.registered_as is None:
            return endpoint.next_try_s
        if endpoint.server.streams:
            if time.monotonic() - endpoint.registered_s > MAX_LOST_PAUSE_S:
                endpoint.lost = 0
            return None
        # Registered and not listened to: the kubelet drops a list that it cannot swallow, or an endpoint
        # that was replaced while it was being replaced, and tells nobody.
        pause_s = min(STREAM_GRACE_S * 2**endpoint.lost, MAX_LOST_PAUSE_S)
        since_s = max(endpoint.registered_s, time.monotonic() - endpoint.server.without_stream_s)
        when_s: float = since_s + pause_s
        if when_s <= time.monotonic():
            endpoint.lost += 1
            endpoint.registered_as = None
            endpoint.next_try_s = 0.0
            log.info(
                "kubelet does not listen, registering again resource=%s", endpoint.server.service.resource
            )
        return when_s

    def _register(self, endpoint: _Endpoint, sock: tuple[int, int]) -> None:
        service = endpoint.server.service
        try:
            registration.register(
                self._dir / registration.KUBELET_SOCKET, endpoint.server.socket.name, service
            )
        except KubeletError as e:
            log.log(logging.DEBUG if self._failing else logging.WARNING, "%s", e)
            self._failing = True
            endpoint.tries += 1
            fast = min(FIRST_RETRY_S * 2 ** min(endpoint.tries, 10), MAX_RETRY_S)
            endpoint.next_try_s = time.monotonic() + (fast if endpoint.tries < FAST_TRIES else SLOW_RETRY_S)
            return
        self._failing = False
        endpoint.registered_as = sock
        endpoint.registered_s = time.monotonic()
        endpoint.tries = 0
        self._registrations += 1
        log.info("registered with the kubelet resource=%s", service.resource)
        self._hooks.on_change()

    def _note_kubelet(self, sock: tuple[int, int] | None) -> None:
        if (sock is not None) == self._kubelet_seen:
            return
        self._kubelet_seen = sock is not None
        if sock is None:
            log.warning("the kubelet's socket is gone dir=%s", self._dir)
            for endpoint in self._endpoints.values():
                endpoint.registered_as = None
                endpoint.next_try_s = 0.0
        else:
            log.info("the kubelet's socket is there dir=%s", self._dir)
        self._hooks.on_change()

    def _remove_old_sockets(self) -> None:
        """Of a run that was killed, for resources that are perhaps not offered now."""
        for name in self._host.listdir(self._config.kubelet.device_plugin_dir):
            path = self._dir / name
            if name.startswith(SOCKET_PREFIX) and name.endswith(".sock") and path.is_socket():
                try:
                    path.unlink()
                except OSError as e:
                    log.warning("cannot remove the old socket %s: %s", path, e.strerror)

    # --- what can be said ---

    @property
    def connected(self) -> bool:
        """Whether the kubelet listens to every resource that is offered."""
        with self._lock:
            endpoints = list(self._endpoints.values())
            wanted = len(self._plan.tokens) + len(self._plan.named) if self._plan is not None else 0
        return bool(endpoints) and len(endpoints) == wanted and all(e.server.streams for e in endpoints)

    def problems(self) -> tuple[str, ...]:
        """Sentences for the status, the most important first."""
        with self._lock:
            plan = self._plan or _Plan()
            offers = self._offers
        found = [*plan.problems.values(), *offers.problems, *plan.notes, *self.access_problems()]
        return tuple(dict.fromkeys(found))

    def offers(self) -> tuple[GpuOffer, ...]:
        with self._lock:
            return self._offers.gpus

    def room(self, uuid: str) -> GpuRoom:
        """Of a GPU in mode shared; zero for others."""
        used, free = self.gate.read(lambda ledger, line, now_s: (ledger.used_on(uuid), ledger.free_on(uuid)))
        return GpuRoom(used.memory * self.unit_mib, free.memory * self.unit_mib, used.cores, free.cores)

    def bound(self) -> tuple[BoundShare, ...]:
        """Every container that holds a share, for those who enforce and measure."""
        return tuple(
            BoundShare(start.share, start.since_ms, start.state == "running")
            for booking, start in self.gate.bookings()
            if start is not None and start.share is not None and not booking.retired
        )

    def containers(self) -> tuple[ContainerShare, ...]:
        """Shares and whole devices, with limits; use and levels are for others to fill in."""
        return (*self._shares(), *self._cards_held())

    def _shares(self) -> list[ContainerShare]:
        leftovers = self.gate.read(
            lambda ledger, line, now_s: {
                uid: sum(left.tokens.memory.bit_count() for left in ledger.leftovers() if left.pod_uid == uid)
                for uid in ledger.pods()
            }
        )
        found = []
        for booking, start in self.gate.bookings():
            if booking.retired or booking.uuid is None:
                continue
            uid = booking.key.pod_uid
            name = self._containers.pod_name(uid)
            found.append(
                ContainerShare(
                    pod_uid=uid,
                    container=booking.key.container,
                    gpu_uuid=booking.uuid,
                    mode=GpuMode.SHARED,
                    namespace=name[0] if name else None,
                    pod=name[1] if name else None,
                    share=booking.demand.share_name,
                    memory_mib=booking.memory_units * self.unit_mib,
                    cores_pct=booking.cores,
                    since_ms=start.since_ms if start is not None else None,
                    running=start.state == "running" if start is not None else None,
                    leftover_mib=leftovers.pop(uid, 0) * self.unit_mib,  # once a pod
                )
            )
        return found

    def _cards_held(self) -> list[ContainerShare]:
        view = self._named_view()
        with self._lock:
            services = [e.server.service for e in self._endpoints.values()]
        found = []
        for key, held in view.containers.items():
            if self._containers.pod_alive(key.pod_uid) is False:
                continue
            name = self._containers.pod_name(key.pod_uid)
            for service in services:
                if isinstance(service, NamedService):
                    found += [
                        ContainerShare(
                            pod_uid=key.pod_uid,
                            container=key.container,
                            gpu_uuid=device.gpu.uuid,
                            mode=service.plan.mode,
                            namespace=name[0] if name else None,
                            pod=name[1] if name else None,
                            share=device.uuid,
                            memory_mib=device.mig.memory_mib if device.mig is not None else None,
                        )
                        for device in service.holders(held.named)
                    ]
        return found

    def waiting(self) -> tuple[WaitingContainer, ...]:
        """The longest waiting first."""
        waiters, now_s = self.gate.read(lambda ledger, line, now_s: (line.waiters(), now_s))
        now_ms = time.time() * 1000
        found = []
        for waiter in waiters:
            name = self._containers.pod_name(waiter.key.pod_uid)
            amounts = waiter.demand.amounts
            found.append(
                WaitingContainer(
                    pod_uid=waiter.key.pod_uid,
                    container=waiter.key.container,
                    reason=waiter.refusal.message,
                    since_ms=int(now_ms - (now_s - waiter.since_s) * 1000),
                    memory_mib=amounts.memory * self.unit_mib,
                    cores_pct=amounts.cores or None,
                    namespace=name[0] if name else None,
                    pod=name[1] if name else None,
                    permanent=waiter.refusal.permanent,
                )
            )
        return tuple(found)

    def resources(self) -> tuple[ResourceState, ...]:
        with self._lock:
            plan = self._plan or _Plan()
            endpoints = dict(self._endpoints)
            unhealthy = self._unhealthy
        offered, held = self.gate.read(lambda ledger, line, now_s: (ledger.offered, ledger.held()))
        found = []
        for resource, letter in self._letters.items():
            if resource not in plan.tokens and resource not in plan.problems:
                continue
            total = offered[(MEMORY, CORES, NUMBER).index(letter)]
            found.append(
                ResourceState(
                    name=resource,
                    kind=_KINDS[letter],
                    unit_mib=self.unit_mib if letter == MEMORY else None,
                    total=total,
                    healthy=total - unhealthy.of(letter).bit_count(),
                    allocated=held.of(letter).bit_count(),
                    registered=_registered(endpoints.get(resource)),
                    problem=plan.problems.get(resource),
                )
            )
        for resource, named in plan.named.items():
            endpoint = endpoints.get(resource)
            service = endpoint.server.service if endpoint is not None else None
            health = service.health() if isinstance(service, NamedService) else {}
            found.append(
                ResourceState(
                    name=resource,
                    kind=named.mode.value,
                    unit_mib=None,
                    total=sum(d.replicas for d in named.devices),
                    healthy=sum(health.values()),
                    allocated=len(self._held_cards(resource)),
                    registered=_registered(endpoint),
                )
            )
        clashing = [r for r in plan.problems if r not in self._letters]
        found += [ResourceState(r, "exclusive", None, 0, 0, 0, False, plan.problems[r]) for r in clashing]
        return tuple(found)

    def counters(self) -> dict[str, int]:
        with self._lock:
            streams = sum(e.server.streams for e in self._endpoints.values())
        return {
            **self.gate.counters(),
            "registrations_total": self._registrations,
            "list_streams": streams,
        }

    # --- holders of named devices ---

    def _is_named(self, resource: str) -> bool:
        return resource not in self._letters and resource.startswith(
            (resource_names.GPU, f"{resource_names.NVIDIA_PREFIX}/mig-")
        )

    def _named_view(self) -> CheckpointView:
        with self._cards_lock:
            try:
                return self._cards.read()
            except KubeletError:
                return CheckpointView()

    def _held_cards(self, resource: str) -> frozenset[str]:
        """IDs that living pods hold."""
        return frozenset(
            name
            for key, held in self._named_view().containers.items()
            if resource in held.named and self._containers.pod_alive(key.pod_uid) is not False
            for name in held.named[resource]
        )

    def _named_refusal(self, code: str, message: str) -> None:
        log.warning("cannot grant code=%s: %s", code, message)
        self._hooks.on_event(AllocEvent("refused", message, code=code))

    def _not_init(self, pod_uid: str) -> frozenset[str]:
        """podresources leaves ordinary init containers out; asked only where two containers of a pod hold
        the very same IDs."""
        name = self._containers.pod_name(pod_uid)
        try:
            found = self.pod_resources.get(*name) if name is not None else None
        except KubeletError as e:
            log.debug("%s", e)
            found = None
        return frozenset(container.container for container in found or ())

    def _pod_text(self, pod_uid: str) -> str:
        name = self._containers.pod_name(pod_uid)
        return f"{name[0]}/{name[1]}" if name is not None else f"pod {pod_uid}"


def _registered(endpoint: _Endpoint | None) -> bool:
    return endpoint is not None and endpoint.registered_as is not None and endpoint.server.streams > 0


def _mig_nodes(device: NamedDevice) -> tuple[str, ...]:
    return device.mig.device_nodes if device.mig is not None else ()


def _score(link: GpuLink) -> int:
    """A link of the inventory as sharing/topology.py counts it."""
    if link.kind == "nvlink":
        return Link.NVLINK * max(1, link.nvlinks)
    if link.kind in ("board", "pix", "pxb"):
        return Link.PCIE_SWITCH
    return Link.NUMA_NODE if link.kind in ("phb", "node") else Link.FAR


def _unit_in_name(resource: str, base: str) -> int | None:
    """The unit of a memory resource's name (`…-64mi`); None where it is no memory resource of ours."""
    if resource == base:
        return 1
    unit = resource.removeprefix(f"{base}-").removesuffix("mi")
    return int(unit) if resource == f"{base}-{unit}mi" and unit.isascii() and unit.isdigit() else None
