"""The kubelet side as the agent drives it: which resources are offered, on which sockets, registered
or not, and what can be said about them.

`set_gpus` may be called from any thread and reaches the kubelet at once; sockets, registrations and
their retries belong to the watching thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from edgeagent.config.schema import Config
from edgeagent.errors import KubeletError, NodeError
from edgeagent.gpus.model import Gpu, Topology
from edgeagent.hostroot import HostRoot
from edgeagent.isolation.backend import ShareToEnforce
from edgeagent.kubelet.bookings import BookingFile
from edgeagent.kubelet.checkpoint import FILE_NAME, Checkpoint, CheckpointView
from edgeagent.kubelet.containers import GPU_ENV, Containers
from edgeagent.kubelet.encode import TokenEntries
from edgeagent.kubelet.gate import AllocEvent, Gate, GateHooks, GateSettings, Isolation
from edgeagent.kubelet.named import NamedDevice, NamedService
from edgeagent.kubelet.offers import GpuOffer, Offers, plan_offers
from edgeagent.kubelet.plan import Plan, letters, links_of, make_plan, unit_in_name
from edgeagent.kubelet.podresources import AllocateGuard, PodResources
from edgeagent.kubelet.registrar import Offering, Registrar
from edgeagent.kubelet.server import DeviceService, PluginServer
from edgeagent.kubelet.share_specs import ShareSpecs
from edgeagent.kubelet.shares import ShareService
from edgeagent.node.cdi import GPU_CLASS, ContainerEdits, SpecDir, qualified_name, spec_text
from edgeagent.node.nvidia_cdi import NvidiaCdi
from edgeagent.sharing import names as resource_names
from edgeagent.sharing import units
from edgeagent.sharing.ledger import GpuCapacity, Ledger, Wording
from edgeagent.sharing.modes import GpuMode
from edgeagent.sharing.tokens import CORES, MEMORY, NUMBER, Demand
from edgeagent.sharing.topology import Links
from edgeagent.sharing.waiting import WaitingLine
from edgeagent.snapshot import ContainerShare, ResourceState, WaitingContainer

log = logging.getLogger(__name__)

READMIT_S = 10.0  # after a kubelet's start its pods have been admitted again

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
        self._guard = AllocateGuard()
        self.pod_resources = PodResources(host.path(kubelet.pod_resources_socket), self._guard)
        self._nvidia = NvidiaCdi(host, (kubelet.cdi_dir, kubelet.cdi_static_dir))
        self._specs = SpecDir(host, kubelet.cdi_dir)
        self._checkpoint_path = kubelet.checkpoint_file or f"{kubelet.device_plugin_dir}/{FILE_NAME}"

        self.unit_mib, self.unit_problem = self._unit_to_use()
        self.names = self._names(self.unit_mib)
        self._letters = letters(self.names)

        self._lock = threading.RLock()
        self._offers = Offers()
        self._links: Links = {}
        self._plan: Plan | None = None
        self._entries: dict[str, TokenEntries] = {}
        self._unhealthy = Demand()  # as listed
        # Of what is held, what is not listed as unhealthy until then; None: all of it.
        self._spared: Demand | None = Demand()
        self._spared_until_s: float | None = None
        self._registrar = Registrar(
            host.path(kubelet.device_plugin_dir),
            Offering(
                self._resources,
                self._service,
                self._fill,
                self._spare_holders,
                self._end_sparing,
                self._hooks.on_change,
            ),
            use_inotify=use_inotify,
        )
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
            specs=ShareSpecs(self._specs),
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
                self._links = links_of(topology)
            capacities = [self._capacity(offer) for offer in offers.in_mode(GpuMode.SHARED)]
            self.gate.set_gpus(capacities, {offer.uuid: offer.gpu for offer in offers.gpus})
            if not self._restored:
                self._restored = True
                self.gate.restore()
            plan = make_plan(
                offers,
                self._config.sharing,
                self.names,
                self.gate.read(lambda ledger, line, now_s: ledger.offered),
                links=self._links,
                cluster_version=self.cluster_version,
            )
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
            self._registrar.wake()
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
            unit = unit_in_name(resource, base)
            living = [uid for uid in sorted(uids) if self._containers.pod_alive(uid) is not False]
            if unit is not None and living:
                in_use[unit] = [self._pod_text(uid) for uid in living]
        unit, problem = units.unit_to_use(self._config.sharing.memory_unit_mib, in_use)
        if problem is not None:
            log.warning("%s", problem)
        return unit, problem

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
                for name in self._specs.names(GPU_CLASS):
                    if name not in wanted:
                        self._specs.remove(GPU_CLASS, name)
                for name, text in wanted.items():
                    if self._specs.read(GPU_CLASS, name) != text:
                        self._specs.write(GPU_CLASS, name, text)
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
            servers = self._registrar.servers()
            payloads = self._token_payloads() if self._plan.tokens else {}
            for resource, server in servers.items():
                payload = payloads.get(resource) or self._named_payload(server.service)
                if payload is not None:
                    server.publish(payload)

    def _token_payloads(self) -> dict[str, bytes]:
        assert self._plan is not None
        listed = self._unhealthy
        offered, unhealthy, held = self.gate.read(
            lambda ledger, line, now_s: (ledger.offered, ledger.unhealthy(listed), ledger.held())
        )
        self._unhealthy = unhealthy = unhealthy - (held if self._spared is None else self._spared & held)
        payloads = {}
        for resource, letter in self._plan.tokens.items():
            count = offered[(MEMORY, CORES, NUMBER).index(letter)]
            entries = self._entries.get(letter)
            if entries is None or entries.count != count:
                entries = self._entries[letter] = TokenEntries(letter, count)
            payloads[resource] = entries.payload(unhealthy.of(letter))
        return payloads

    def _named_payload(self, service: DeviceService) -> bytes | None:
        assert self._plan is not None
        if not isinstance(service, NamedService) or service.resource not in self._plan.named:
            return None  # not offered any more: its server ends soon
        service.update(self._plan.named[service.resource], self._spared_until_s is not None)
        return service.payload()

    # --- the threads ---

    def services(self) -> list[tuple[str, Callable[[threading.Event], None], Callable[[], None]]]:
        """(name, service, wake) for the supervisor."""
        return [
            ("kubelet-watch", self._registrar.run, self._registrar.wake),
            ("gate-sweep", lambda stop: self.gate.sweep(), self.gate.wake),
        ]

    # --- what the registrar asks ---

    def _resources(self) -> Collection[str] | None:
        with self._lock:
            return self._plan.resources if self._plan is not None else None

    def _service(self, resource: str) -> DeviceService:
        with self._lock:
            plan = self._plan or Plan()
        letter = plan.tokens.get(resource)
        if letter is not None:
            return ShareService(resource, letter, self.gate, self._guard)
        return NamedService(
            plan.named[resource], self._named_answer, self._held_cards, self._guard, self._named_refusal
        )

    def _fill(self, server: PluginServer) -> None:
        with self._lock:  # so that no later list is overtaken by this one
            if self._plan is None:
                return
            payload = self._named_payload(server.service)
            if payload is None:
                payload = self._token_payloads().get(server.service.resource)
            if payload is not None:
                server.publish(payload)

    def _spare_holders(self, restarted: bool) -> None:
        """A kubelet that starts admits its pods again, and rejects one that does not run at that moment
        if an ID of it is Unhealthy. So what is held is listed as Healthy until it has done that: whatever
        falls ill meanwhile if the kubelet is known to have started again, else only what is ill now."""
        with self._lock:
            plan = self._plan or Plan()
            unhealthy, held = self.gate.read(
                lambda ledger, line, now_s: (ledger.unhealthy(self._unhealthy), ledger.held())
            )
            self._spared = None if restarted else unhealthy & held
            hurt = any(device.unusable for p in plan.named.values() for device in p.devices)
            spared = restarted or self._spared or hurt
            self._spared_until_s = time.monotonic() + READMIT_S if spared else None
        self._relist()

    def _end_sparing(self) -> float | None:
        """When it is time; else when it will be."""
        with self._lock:
            until_s = self._spared_until_s
            if until_s is None or time.monotonic() < until_s:
                return until_s
            self._spared, self._spared_until_s = Demand(), None
        self._relist()
        return None

    # --- what can be said ---

    @property
    def connected(self) -> bool:
        """Whether the kubelet listens to every resource that is offered."""
        wanted = self._resources() or ()
        servers = self._registrar.servers()
        return bool(wanted) and servers.keys() == set(wanted) and all(s.streams for s in servers.values())

    def problems(self) -> tuple[str, ...]:
        """Sentences for the status, the most important first."""
        with self._lock:
            plan = self._plan or Plan()
            offers = self._offers
        own = [p for p in (self.unit_problem, self.gate.problem) if p is not None]
        found = [*plan.problems.values(), *offers.problems, *own, *plan.notes, *self.access_problems()]
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
        services = [
            s.service for s in self._registrar.servers().values() if isinstance(s.service, NamedService)
        ]
        if not services:
            return []
        found = []
        for key, held in view.containers.items():
            if self._containers.pod_alive(key.pod_uid) is False:
                continue
            name = self._containers.pod_name(key.pod_uid)
            for service in services:
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
            plan = self._plan or Plan()
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
                    registered=self._registrar.registered(resource),
                    problem=plan.problems.get(resource),
                )
            )
        servers = self._registrar.servers()
        for resource, named in plan.named.items():
            server = servers.get(resource)
            service = server.service if server is not None else None
            health = service.health() if isinstance(service, NamedService) else {}
            found.append(
                ResourceState(
                    name=resource,
                    kind=named.mode.value,
                    unit_mib=None,
                    total=sum(d.replicas for d in named.devices),
                    healthy=sum(health.values()),
                    allocated=len(self._held_cards(resource)),
                    registered=self._registrar.registered(resource),
                )
            )
        clashing = [r for r in plan.problems if r not in self._letters]
        found += [ResourceState(r, "exclusive", None, 0, 0, 0, False, plan.problems[r]) for r in clashing]
        return tuple(found)

    def counters(self) -> dict[str, int]:
        return {
            **self.gate.counters(),
            "registrations_total": self._registrar.registrations,
            "list_streams": sum(server.streams for server in self._registrar.servers().values()),
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


def _mig_nodes(device: NamedDevice) -> tuple[str, ...]:
    return device.mig.device_nodes if device.mig is not None else ()
