"""The agent: makes the parts, tells them of each other, runs them and ends them. It alone knows all.

What happens, in one picture: health reads the GPUs and decides who is sick; the kubelet side offers
what is healthy and binds containers; isolation makes their shares real and the share watch looks for
proof; the uplink, the metrics and the local socket show the one snapshot of all of it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgeagent import __version__, logs
from edgeagent.assembly import Identity, KubeletPart, build
from edgeagent.cluster import ClusterLink
from edgeagent.config import Config, load_file, to_plain
from edgeagent.config.diff import changes, config_hash, with_reloadable
from edgeagent.config.overlay import overlaid
from edgeagent.control import ControlServer, InstanceLock
from edgeagent.cordons import Cordons
from edgeagent.errors import AgentError, ConfigError, ControlError, NodeError
from edgeagent.gpus.detect import NodeGpus
from edgeagent.gpus.model import Gpu
from edgeagent.health.conditions import Books, ConditionType, withdrawn_mib
from edgeagent.health.labels import node_labels
from edgeagent.health.monitor import HealthChange, HealthMonitor, HealthState, Surroundings
from edgeagent.health.remembered import FILE_NAME as REMEMBERED_GPUS
from edgeagent.health.remembered import RememberedGpus
from edgeagent.health.share_watch import ShareWatch
from edgeagent.health.xid import load_catalogue
from edgeagent.hostroot import HostRoot
from edgeagent.isolation.backend import ShareToEnforce
from edgeagent.isolation.manager import IsolationManager
from edgeagent.isolation.mps import MpsBackend
from edgeagent.isolation.watchdog import Actions, Watchdog
from edgeagent.kubelet.containers import HostContainers
from edgeagent.kubelet.gate import AllocEvent
from edgeagent.kubelet.plugin import KubeletSide, SideHooks
from edgeagent.mechanisms import isolation_backends
from edgeagent.node.apiserver import PodRef
from edgeagent.node.cgroups import PodCgroups, parse_path
from edgeagent.node.clock import SystemClock
from edgeagent.node.container_runtime import cdi_support
from edgeagent.node.host import Host
from edgeagent.node.k3s import K3sFacts, find_k3s
from edgeagent.node.kmsg import KernelLog, OomKill
from edgeagent.node.podlogs import PodLogs
from edgeagent.node.processes import Processes
from edgeagent.node.unified_memory import kubelet_memory
from edgeagent.notices import Notices
from edgeagent.snapshot import HostFacts, NodeSnapshot, UplinkState
from edgeagent.snapshot_json import to_json
from edgeagent.supervisor import Supervisor
from edgeagent.systemd import Notifier

log = logging.getLogger(__name__)

EX_RESTART = 75  # EX_TEMPFAIL: start me again (in a pod: with a new container)
STOP_TIMEOUT_S = 4.0
TICK_S = 10.0
IDLE_LOOK_S = 60.0
TRY_AGAIN_S = 300.0  # mechanisms that were configured and did not work
WITHDRAWN_STEP_MIB = 64  # what the host uses wavers; every change of the list costs the kubelet work
MIN_UPTIME_BEFORE_REEXEC_S = 30.0
SHARING_FILE = "sharing.json"


class Agent:
    """Construct with a valid configuration, then `run`."""

    def __init__(self, config: Config, path: Path | None) -> None:
        self._path = path
        self._file_config = config  # what the file says
        self._wishes: Mapping[str, Any] = {}  # what the fleet wants on top
        self.config = config  # what is in force
        self._host = HostRoot(config.host_root)
        self._supervisor = Supervisor()
        self._notifier = Notifier()
        self._reload_asked = False
        self._restart_reason: str | None = None
        self._new_container_needed = False
        self._config_lock = threading.RLock()
        self._started_mono_s = time.monotonic()

    # --- life ---------------------------------------------------------------------------------------

    def run(self) -> int:
        """Runs until a signal or a failure; returns the exit status. Raises AgentError when it cannot
        even start (another agent runs, no place for its files)."""
        run_dir, self._state_dir = self._directories()
        lock = InstanceLock(run_dir)
        self._catch_signals()
        log.info("edgeagent starts version=%s pid=%s config=%s", __version__, os.getpid(), self._path or "-")
        self._take_kept_sharing()
        self._make_parts()
        control = ControlServer(run_dir, self._verbs())
        self._start(control)
        self._watch()
        status = self._stop()
        lock.release()
        if self._restart_reason is not None and self._supervisor.failed is None:
            if self._new_container_needed:
                log.warning("the agent ends to be started again reason=%s", self._restart_reason)
                return EX_RESTART
            log.info("the agent starts itself again reason=%s", self._restart_reason)
            sys.stderr.flush()
            os.execv(sys.executable, [sys.executable, "-m", "edgeagent", *sys.argv[1:]])  # noqa: S606
        return status

    def _directories(self) -> tuple[Path, Path]:
        run_dir = self._host.path(self.config.run_dir)
        state_dir = self._host.path(self.config.state_dir)
        try:
            state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as e:
            raise NodeError(f"cannot use the state directory {state_dir}: {e.strerror}") from e
        return run_dir, state_dir

    def _catch_signals(self) -> None:
        def stop(number: int, frame: object) -> None:
            self._supervisor.request_stop()

        def reload(number: int, frame: object) -> None:
            self._reload_asked = True
            self._supervisor.nudge()

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGHUP, reload)

    def _start(self, control: ControlServer) -> None:
        """The order does not matter to the parts; this one has the local socket answer first."""
        add = self._supervisor.add
        add("control", control.run, control.wake)
        for name, service, wake in self.kubelet.services():
            add(name, service, wake)
        add("health-poll", self.health.poll, self.health.wake)
        add("health-events", self.health.events)
        if self._jetson_stats is not None:
            add("jetson-stats", self._jetson_stats.run)
        if self._kernel_log is not None:
            add("kernel-log", self._kernel_log.run, self._kernel_log.wake)
        add("share-watch", self._watch_shares, self._look_now.set)
        if self._uplink is not None:
            add("uplink", self._uplink.run, self._uplink.wake)
        if self._metrics is not None:
            add("metrics", self._metrics.run, self._metrics.wake)
        if self._cluster is not None:
            add("cluster", self._cluster.run, self._cluster.wake)

    def _watch(self) -> None:
        """The main thread's part: signals, systemd's watchdog, and what needs a look now and then."""
        watchdog_s = self._notifier.watchdog_s
        ready_told = False
        tick_s = TICK_S if watchdog_s is None else min(TICK_S, watchdog_s / 3)
        while not self._supervisor.wait(tick_s if ready_told else 0.05):
            if self._reload_asked:
                self._reload_asked = False
                try:
                    self.reload()
                except AgentError as e:
                    log.error("configuration not taken: %s", e)
            if not ready_told and self.health.state.polls:
                ready_told = True
                self._notifier.send("READY=1", f"STATUS={self._status_line()}")
            if self._cluster is not None and ready_told:
                self._cluster.set_labels(node_labels(self.snapshot()))
            if self._core_answers():
                self._notifier.send("WATCHDOG=1", f"STATUS={self._status_line()}")
            if (
                self.gpus.needs_reexec
                and time.monotonic() - self._started_mono_s > MIN_UPTIME_BEFORE_REEXEC_S
            ):
                self.restart("the GPU driver was replaced", new_container=self._in_container())

    def _core_answers(self) -> bool:
        """Whether the kubelet path is alive: its lock can be had. A deadlock there keeps us here, and
        systemd's watchdog ends it."""
        answered: bool = self.kubelet.gate.read(lambda ledger, line, now_s: True)
        return answered

    def _status_line(self) -> str:
        state = self.health.state
        sick = f", {len(state.sick)} sick" if state.sick else ""
        problem = f": {state.inventory.problem}" if state.inventory.problem and not state.gpus else ""
        return f"{len(state.gpus)} GPUs{sick}{problem}, {len(self.kubelet.bound())} shares in use"

    def _stop(self) -> int:
        self._notifier.send("STOPPING=1")
        failed = self._supervisor.failed
        log.info("edgeagent stops reason=%s", failed or self._restart_reason or "asked to")
        late = self._supervisor.shutdown(STOP_TIMEOUT_S)
        if not late:
            # With a call stuck in the driver, closing would wait for it too.
            self._isolation.close()
            self.gpus.close()
        return 1 if failed is not None else 0

    def restart(self, reason: str, *, new_container: bool = False) -> None:
        """Ends the agent in order, to begin anew: by exec, or by whoever started the container."""
        self._restart_reason = self._restart_reason or reason
        self._new_container_needed = self._new_container_needed or new_container
        self._supervisor.request_stop()

    @staticmethod
    def _in_container() -> bool:
        return "KUBERNETES_SERVICE_HOST" in os.environ

    # --- parts --------------------------------------------------------------------------------------

    def _make_parts(self) -> None:
        config, host = self.config, self._host
        self._host_reader = Host(host)
        self._clock = SystemClock(host, self._state_dir / "clock-floor")
        self._k3s = find_k3s(host, ask_version=False)
        node_name = config.kubernetes.node_name or os.environ.get("NODE_NAME") or self._host_reader.hostname
        self._identity = Identity(
            node=config.node.name or _fleet_name(node_name),
            site=config.node.site,
            agent_version=__version__,
            started_ms=self._clock.now().wall_ms,
            binding=self._binding(self._k3s),
        )
        self._cordons = Cordons(self._state_dir)
        self._look_now = threading.Event()
        self._unprobed: set[str] = set()
        self._offered: object = None
        self._withdrawn: Mapping[str, int] = {}

        cgroups = PodCgroups(host, config.kubelet.cgroup_root)
        self._processes = Processes(host)
        pod_logs = PodLogs(host, config.kubelet.pod_log_dir)
        self._containers = HostContainers(host, cgroups, pod_logs, self._processes)
        self.notices = Notices(self._containers.pod_name, self._known_gpu)
        self._jetson_stats = self._make_jetson_stats()
        self.gpus = NodeGpus(config.gpus, host, second=self._jetson_stats)
        backends = isolation_backends(config, host, self.gpus.limiter, self.gpus.compute_modes)
        self._mps = next(b for b in backends if isinstance(b, MpsBackend))
        self._isolation = IsolationManager(
            backends,
            memory=config.isolation.memory,
            compute=config.isolation.compute,
            fallback=config.isolation.fallback,
            allow_mps=config.isolation.allow_mps,
            on_level_lost=self.notices.level_lost,
        )
        self.kubelet = KubeletSide(
            config,
            host,
            containers=self._containers,
            isolation=self._isolation,
            hooks=SideHooks(self.notices.changed, self._alloc_event, self.notices.evict_waiting),
            stop=self._supervisor.stop,
            binding=self._identity.binding,
        )
        self._share_watch = ShareWatch(
            host, self._isolation, cgroups, self._processes, pod_logs, self._shares, self.gpus.read
        )
        self._watchdog = Watchdog(
            config.isolation.watchdog,
            self._share_watch.measure,
            Actions(
                told=self.notices.over_limit,
                evict=self.notices.evict_over_limit,
                kill=self._processes.kill,
                terminate_client=lambda process: self._mps.terminate_client(process.pid),
            ),
        )
        self.health = HealthMonitor(
            self.gpus,
            config.health,
            load_catalogue(config.health.xid_classes),
            poll_seconds=config.gpus.poll_seconds,
            surroundings=Surroundings(
                pods_on=self._pods_on,
                books=self._books,
                usage=self._share_watch.usage,
                gpu_places=lambda: tuple(host.listdir("/proc/driver/nvidia/gpus")),
                mps_problem=self._mps.problem,
                restart_needed=lambda reason: self.restart(reason, new_container=True),
            ),
            remembered=RememberedGpus(self._state_dir / REMEMBERED_GPUS),
        )
        self.health.on_change(self._health_changed)
        self.health.on_poll(self.offer)
        self.health.on_event(self.notices.gpu_event)
        self._kernel_log = (
            KernelLog(host, self._state_dir, self.health.gpu_at, self.health.handle_event, self._oom_kill)
            if config.health.kernel_log
            else None
        )
        self._cluster = (
            ClusterLink(config, host, node_name, self._pods_with_uid_on, self._cluster_seen)
            if config.kubernetes.enabled
            else None
        )
        self.notices.cluster = self._cluster
        if self._cluster is not None:
            self.health.on_change(self._cluster.health_changed)
        self._uplink = self.notices.uplink = self._make_uplink()
        self._metrics = self._make_metrics()

    def _make_jetson_stats(self) -> Any:
        if not self.config.gpus.jetson_stats:
            return None
        from edgeagent.gpus.jtop import JetsonStats

        return JetsonStats(self._host)

    def _binding(self, k3s: K3sFacts | None) -> str:
        wanted = self.config.sharing.binding
        if wanted != "auto":
            return wanted
        support = cdi_support(self._host, k3s)
        if support.enabled is False and k3s is not None:
            # An old template makes containerd 2 look like 1: the version, asked for once, tells.
            support = cdi_support(self._host, find_k3s(self._host))
        binding = "early" if support.enabled is False else "late"
        log.info("binding chosen binding=%s reason=%s", binding, support.reason)
        return binding

    def _make_uplink(self) -> Any:
        if not self.config.fleet.enabled:
            return None
        from edgeagent.actions import AgentActions  # the uplink's libraries cost 9 MiB
        from edgeagent.fleet.publisher import Uplink

        return Uplink(
            self.config.fleet,
            node=self._identity.node,
            site=self._identity.site,
            state_dir=self._state_dir,
            clock=self._clock,
            snapshot=self.snapshot,
            actions=AgentActions(self),
            apply_desired=self.apply_wishes,
        )

    def _make_metrics(self) -> Any:
        if not self.config.metrics.enabled:
            return None
        from edgeagent.metrics import server

        return server.MetricsServer(
            self.config.metrics.listen,
            lambda: server.render(self.snapshot(), self.config.metrics.dcgm, self.config.metrics.hami),
            healthy=self._alive,
            ready=lambda: (self.kubelet.connected, "the kubelet listens to every resource"),
        )

    def _alive(self) -> tuple[bool, str]:
        """For the liveness probe: the kubelet path answers and GPUs are still being read."""
        self._core_answers()
        late = self.health.late(self.config.gpus.call_timeout_seconds)
        return late is None, late or "the kubelet path answers, GPUs are read"

    # --- what the parts tell each other -------------------------------------------------------------

    def _health_changed(self, state: HealthState, change: HealthChange) -> None:
        self.offer()
        if change.became_sick:
            self._look_now.set()
        if change.recovered:
            # What failed while the GPU was sick may work now.
            self._unprobed |= change.recovered
            self._look_now.set()
        self.notices.conditions(change)
        self.notices.changed()

    def offer(self) -> None:
        """Brings the kubelet side up to date with health, cordons and the host's own use."""
        state = self.health.state
        if not state.inventory.gpus and not state.gpus and not state.inventory.evidence:
            return  # nothing has been looked at yet
        gpus = tuple(g.gpu for g in state.gpus.values())
        sick = {
            uuid: next(c.message for c in g.conditions if c.makes_unhealthy)
            for uuid, g in state.gpus.items()
            if g.sick
        }
        closed = {
            uuid: c.message
            for uuid, g in state.gpus.items()
            for c in g.conditions
            if c.type == ConditionType.HOST_OVERCOMMIT.value
        }
        absent = frozenset(uuid for uuid, g in state.gpus.items() if not g.present)
        cordoned = self._cordons.uuids & frozenset(state.gpus)
        with self._config_lock:
            first = self._offered is None
            # Who holds what is known from the first offer on.
            withdrawn = {} if first else self._to_withdraw(state)
            offered = (gpus, sick, closed, absent, cordoned, withdrawn)
            if offered == self._offered:
                return
            known = {g.uuid for g in self._offered[0]} if isinstance(self._offered, tuple) else set()
            new = [g for g in gpus if g.uuid not in known]
            self._offered = offered
            self._withdrawn = withdrawn
            for gpu in new:
                self._isolation.expect(gpu.uuid)
                self._unprobed.add(gpu.uuid)
            self.kubelet.set_gpus(
                gpus,
                sick=sick,
                cordoned=cordoned,
                closed=closed,
                absent=absent,
                withdrawn=withdrawn,
                topology=self.gpus.topology() if new and len(gpus) > 1 else None,
            )
        if new:
            self._look_now.set()
        if first:
            self.offer()

    def _to_withdraw(self, state: HealthState) -> dict[str, int]:
        """MiB per GPU that programs outside of pods use beyond the reserve. On unified memory the
        reserve is for the host, and HostOvercommit says when it does not suffice."""
        found = {}
        for uuid, g in state.gpus.items():
            books = self._books(uuid)
            if books is None or g.usage is None or g.gpu.unified_memory:
                if uuid in self._withdrawn:
                    found[uuid] = self._withdrawn[uuid]  # it cannot be seen now
                continue
            now_mib = withdrawn_mib(books, g.usage.beyond_promises_mib(books.holders))
            mib = _in_steps(now_mib, self._withdrawn.get(uuid, 0))
            if mib:
                found[uuid] = mib
        return found

    def _watch_shares(self, stop: threading.Event) -> None:
        """Probes isolation on GPUs that are new, then looks at every share again and again."""
        tried_s = time.monotonic()
        while not stop.is_set():
            if time.monotonic() - tried_s > TRY_AGAIN_S:
                tried_s = time.monotonic()
                self._unprobed |= self._isolation.failed()
            self._probe_isolation()
            self._mps.tend()
            before = self._share_watch.levels()
            self._watchdog.look(self._share_watch.measure())
            if self._share_watch.levels() != before:
                self.notices.changed()
            # A GPU may be sick for want of a mechanism that is tried again here.
            busy = bool(self.kubelet.bound() or self.health.state.sick)
            self._look_now.wait(self.config.isolation.watchdog.poll_seconds if busy else IDLE_LOOK_S)
            self._look_now.clear()

    def _probe_isolation(self) -> None:
        while self._unprobed:
            uuid = self._unprobed.pop()
            known = self.health.state.gpus.get(uuid)
            if known is not None:
                lists_processes = known.reading is None or known.reading.processes is not None
                self._isolation.probe(known.gpu, watchdog=lists_processes)
            self.notices.changed()

    def _alloc_event(self, event: AllocEvent) -> None:
        if event.kind == "bound":
            self._look_now.set()
        self.notices.alloc_event(event)

    def _cluster_seen(self, version: str) -> None:
        self.kubelet.cluster_version = self.config.sharing.cluster_version or version

    # --- what the parts ask each other --------------------------------------------------------------

    def _shares(self) -> list[ShareToEnforce]:
        return [b.share for b in self.kubelet.bound()]

    def _oom_kill(self, killed: OomKill) -> None:
        """On unified memory a pod that takes more GPU memory than there is RAM ends like this."""
        owner = parse_path(killed.cgroup)
        shares = [c for c in self.kubelet.containers() if c.pod_uid == owner.pod_uid]
        if shares:
            # Of several containers the kernel's line names none.
            self.notices.oom_kill(shares[0] if len(shares) == 1 else replace(shares[0], container=""), killed)

    def _pods_on(self, uuid: str) -> tuple[str, ...]:
        return tuple(sorted({c.pod_label for c in self.kubelet.containers() if c.gpu_uuid == uuid}))

    def _pods_with_uid_on(self, uuid: str) -> tuple[PodRef, ...]:
        """Those whose name is known: the API server takes no other."""
        found = {
            c.pod_uid: PodRef(c.namespace, c.pod, c.pod_uid)
            for c in self.kubelet.containers()
            if c.gpu_uuid == uuid and c.namespace and c.pod
        }
        return tuple(found.values())

    def _books(self, uuid: str) -> Books | None:
        offer = next((o for o in self.kubelet.offers() if o.uuid == uuid), None)
        if offer is None:
            return None
        holders = frozenset(c.pod_uid for c in self.kubelet.containers() if c.gpu_uuid == uuid)
        reserve_mib = max(0, offer.reserved_mib - (offer.gpu.memory_reserved_mib or 0))
        return Books(offer.usable_mib, self.kubelet.room(uuid).promised_mib, reserve_mib, holders)

    def _known_gpu(self, uuid: str) -> Gpu | None:
        known = self.health.state.gpus.get(uuid)
        return known.gpu if known is not None else None

    def gpu_uuid(self, text: str) -> str:
        """The UUID of a GPU named by UUID or index. Raises ControlError."""
        gpus: list[Gpu] = [g.gpu for g in self.health.state.gpus.values()]
        for gpu in gpus:
            if text in (gpu.uuid, str(gpu.index)):
                return gpu.uuid
        known = ", ".join(f"{g.index} ({g.uuid})" for g in gpus) or "none"
        raise ControlError(f"no GPU {text!r} here; known: {known}")

    # --- the picture --------------------------------------------------------------------------------

    def snapshot(self) -> NodeSnapshot:
        kubelet = self.kubelet
        return build(
            self._identity,
            config_hash(self.config),
            self._clock.now().wall_ms,
            self.health.state,
            KubeletPart(
                offers=kubelet.offers(),
                room=kubelet.room,
                containers=kubelet.containers(),
                waiting=kubelet.waiting(),
                resources=kubelet.resources(),
                problems=kubelet.problems(),
                connected=kubelet.connected,
                memory_unit_mib=kubelet.unit_mib,
            ),
            self._isolation.levels,
            self._share_watch.seen,
            frozenset(self._watchdog.over),
            self._isolation.problems(),
            self._host_facts(),
            self._uplink.state() if self._uplink is not None else UplinkState(enabled=False),
            {
                **kubelet.counters(),
                **self._watchdog.counters,
                **self.health.counters,
                **(self._cluster.counters if self._cluster is not None else {}),
                **self.notices.counters,
            },
            draining=bool(kubelet.offers()) and all(o.cordoned for o in kubelet.offers()),
        )

    def _host_facts(self) -> HostFacts:
        host = self._host_reader
        total, available = host.memory_mib()
        k3s_version = self._cluster.k3s_version if self._cluster is not None else None
        return HostFacts(
            hostname=host.hostname,
            machine=host.machine,
            os=host.os,
            kernel=host.kernel,
            k3s_version=k3s_version,
            kubelet_version=self.kubelet.cluster_version,
            boot_id=host.boot_id,
            memory_total_mib=total,
            memory_available_mib=available,
            load_1m=host.load_1m(),
            cpu_count=host.cpu_count,
            facts=self._host_notes(total),
        )

    def _host_notes(self, memory_total_mib: int | None) -> dict[str, str]:
        notes = {"hardware": self._host_reader.hardware} if self._host_reader.hardware else {}
        unified = next((o for o in self.kubelet.offers() if o.gpu.unified_memory and o.present), None)
        if unified is not None and memory_total_mib is not None:
            notes["unifiedMemory"] = kubelet_memory(memory_total_mib, unified.usable_mib).sentence()
        if self._cluster is not None and self._cluster.problem is not None:
            notes["apiServer"] = self._cluster.problem  # said, and no fault of the node: it works without
        return notes

    # --- asked from outside -------------------------------------------------------------------------

    def _verbs(self) -> dict[str, Any]:
        return {
            "snapshot": lambda args: to_json(self.snapshot()),
            "cordon": lambda args: self.cordon(str(args.get("gpu")), True),
            "uncordon": lambda args: self.cordon(str(args.get("gpu")), False),
            "reload": lambda args: self.reload(),
            "config": lambda args: to_plain(self.config),
        }

    def cordon(self, gpu: str, cordoned: bool) -> str:
        """A sentence that says what is so now. Raises AgentError."""
        uuid = self.gpu_uuid(gpu)
        changed = self._cordons.set(uuid, cordoned)
        self.offer()
        self.notices.changed()
        state = "cordoned: running containers keep it, new ones do not get it" if cordoned else "in use again"
        log.info("GPU cordon changed gpu=%s cordoned=%s", uuid, cordoned)
        return f"GPU {uuid} is {'' if changed else 'already '}{state}"

    def reload(self) -> dict[str, list[str]]:
        """Reads the file again; an invalid one changes nothing. Raises ConfigError, ControlError."""
        if self._path is None:
            raise ControlError("the agent runs without a configuration file: nothing to read")
        with self._config_lock:
            self._file_config = load_file(self._path)
            return self._take_config()

    def apply_wishes(self, keys: Mapping[str, Any]) -> dict[str, str]:
        """The fleet's desired configuration; returns what was refused, by key."""
        with self._config_lock:
            before, self._wishes = self._wishes, keys
            try:
                self._take_config()
            except ConfigError as e:
                self._wishes = before
                return {"": "; ".join(e.problems)}
            return {}

    def _take_config(self) -> dict[str, list[str]]:
        wanted = overlaid(self._file_config, self._wishes, "desired configuration")
        found = changes(self.config, wanted)
        self.config = config = with_reloadable(self.config, wanted)
        logs.set_level(config.log.level)
        self.health.configure(
            config.health, load_catalogue(config.health.xid_classes), config.gpus.poll_seconds
        )
        self.kubelet.set_policy(config.sharing.placement)
        self._watchdog.configure(config.isolation.watchdog)
        if self._cluster is not None:
            self._cluster.configure(config)
        if self._uplink is not None:
            self._uplink.set_telemetry_seconds(config.fleet.telemetry_seconds)
            self._uplink.set_commands_allowed(config.fleet.commands.allow)
        if found.reloadable or found.restart:
            log.info(
                "configuration read again changed=%s restart_needed=%s",
                ",".join(found.reloadable) or "-", ",".join(found.restart) or "-",
            )  # fmt: skip
        self.notices.changed()
        return {"changed": list(found.reloadable), "restartNeeded": list(found.restart)}

    def _take_kept_sharing(self) -> None:
        """A sharing set from afar lies over the file's; one on trial that never got ready goes."""
        from edgeagent.fleet import statefile, trial

        fleet_dir = self._state_dir / "fleet"
        failed = trial.count_start(fleet_dir)
        if failed is not None:
            log.warning("sharing on trial never became ready, the previous one is back")
            self.keep_sharing(failed.previous)
            trial.end(fleet_dir)
        kept = statefile.read(self._state_dir / SHARING_FILE)
        if isinstance(kept, dict) and kept:
            try:
                self._file_config = overlaid(self._file_config, {"sharing": kept}, SHARING_FILE)
                self.config = self._file_config
            except ConfigError as e:
                log.error("sharing set from afar is not used: %s", e)

    def keep_sharing(self, sharing: Mapping[str, Any]) -> None:
        """Kept for the next start. Raises FleetError."""
        from edgeagent.fleet import statefile

        statefile.write(self._state_dir / SHARING_FILE, dict(sharing))

    @property
    def diagnostics_dir(self) -> Path:
        return self._state_dir / "diagnostics"


def _in_steps(mib: int, before_mib: int) -> int:
    """`mib` in whole steps, upwards; falls only when it fell by more than a step."""
    steps = -(-mib // WITHDRAWN_STEP_MIB) * WITHDRAWN_STEP_MIB
    if 0 < mib <= before_mib <= steps + WITHDRAWN_STEP_MIB:
        return before_mib
    return steps


def _fleet_name(name: str) -> str:
    """A host's name as MQTT topics and the fleet take it: [a-z0-9-]."""
    cleaned = "".join(c if c.isascii() and (c.isalnum() or c == "-") else "-" for c in name.lower())
    return cleaned.strip("-")[:63] or "node"
