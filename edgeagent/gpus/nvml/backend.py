"""The NVML back end: which GPUs there are, which of them answer, and what may be asked of them.

A lost GPU answers "lost" to everything. One known to be lost is not called again until `inventory` found
it anew. Calls may hang inside the driver: gpus/guard.py bounds them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from edgeagent.errors import GpuError
from edgeagent.gpus import nvidia_host
from edgeagent.gpus.model import Gpu, GpuEvent, GpuFault, GpuLink, GpuReading, Inventory, Topology
from edgeagent.gpus.nvml.card import MIB, SOURCE, Card, pci_address
from edgeagent.gpus.nvml.events import EventWaiter
from edgeagent.gpus.nvml.library import (
    FUNCTION_NOT_FOUND,
    GPU_FAULTS,
    LIBRARY_FAULTS,
    NO_PERMISSION,
    UNSUPPORTED,
    GoneError,
    Library,
    NvmlError,
    address,
)
from edgeagent.gpus.nvml.session import NEEDS_NODES, Session
from edgeagent.hostroot import HostRoot

log = logging.getLogger(__name__)

HANGING_S = 2.0  # a read takes milliseconds; longer, and `inventory` leaves the GPU alone
REINIT_BACKOFF_S = (5.0, 300.0)  # between two tries to find a missing GPU by Shutdown and Init

_UNLIMITED = 0xFFFFFFFFFFFFFFFF  # NVML_DEVICE_MEMORY_LIMIT_MAX
_TOPOLOGY = {0: "board", 10: "pix", 20: "pxb", 30: "phb", 40: "node", 50: "sys"}
_MAX_NVLINKS = 36
_COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")  # by NVML's number


class NvmlBackend:
    """GpuBackend and CgroupMemoryLimiter over libnvidia-ml.

    Integrated GPUs that NVML lists (Orin, Thor, GB10) are in the inventory too; on a Jetson the Tegra
    back end offers them instead (gpus/detect.py). `call_timeout_s`: how long re-initialising waits for
    calls in flight. `close` releases the driver (a GPU reset needs that); `inventory` opens it again.
    """

    name = SOURCE

    def __init__(
        self,
        host: HostRoot,
        library_path: str | None = None,
        call_timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._library = Library(host, library_path)
        self._session = Session(host, self._library, call_timeout_s)
        self._waiter = EventWaiter(self._session, self, clock)
        self._call_timeout_s = call_timeout_s
        self._clock = clock
        self._inventory_lock = threading.Lock()
        self._reinit_at_s = 0.0
        self._reinit_pause_s = REINIT_BACKOFF_S[0]
        self._lock = threading.Lock()  # over the fields below
        self._gpus: dict[str, Gpu] = {}  # every GPU seen since the start, as last seen
        self._cards: dict[str, Card] = {}  # those that the session has handles of
        self._sick: dict[str, tuple[GpuFault, str]] = {}  # not to be called until found anew
        self._change = 0  # of which cards are listened to

    # ---- inventory ------------------------------------------------------------------------------

    def inventory(self) -> Inventory:
        with self._inventory_lock:
            evidence: list[str] = []
            try:
                gpus, refusals = self._look(evidence)
                if self._reinit_due(gpus) and self._may_close(evidence):
                    gpus, refusals = self._look(evidence)
            except GpuError as e:
                return Inventory((), (*evidence, str(e)), str(e), GpuFault(e.fault))
            self._waiter.listen_now()
        problem, fault = (None, None) if gpus else _why_none(refusals)
        return Inventory(gpus, tuple(evidence), problem, fault)

    def _look(self, evidence: list[str]) -> tuple[tuple[Gpu, ...], list[NvmlError]]:
        if self._session.fault is not None:
            self._close_session()
        if self._session.is_open:
            try:
                return self._enumerate(evidence)
            except GpuError as e:
                log.debug("NVML is initialised again: %s", e)
                self._close_session()
        self._session.open(evidence)
        return self._enumerate(evidence)

    def _close_session(self) -> None:
        """Raises GpuError where a call in flight forbids it."""
        if self._session.close(self._waiter.take_set):
            with self._lock:
                self._cards = {}
                self._change += 1

    def _may_close(self, evidence: list[str]) -> bool:
        """Closes the session for a fresh look, unless a hanging call forbids it."""
        try:
            self._close_session()
        except GpuError as e:
            evidence.append(str(e))
            return False
        evidence.append("a GPU is missing or new: NVML initialised again")
        return True

    def _reinit_due(self, found: tuple[Gpu, ...]) -> bool:
        """Whether Shutdown and Init could find more: the kernel drives other GPUs than at the last
        Init, or one that was known is missing though the kernel still has it (or shows nothing)."""
        now = self._clock()
        bound = nvidia_host.bound_gpus(self._host)
        if bound != self._session.bound:
            self._reinit_pause_s = REINIT_BACKOFF_S[0]
            return True
        here = {gpu.uuid for gpu in found}
        missing = [gpu for uuid, gpu in self._gpus.items() if uuid not in here]
        if not any(not bound or gpu.pci_address in bound for gpu in missing):
            self._reinit_pause_s = REINIT_BACKOFF_S[0]
            return False
        if now < self._reinit_at_s:
            return False
        self._reinit_at_s = now + self._reinit_pause_s
        self._reinit_pause_s = min(2 * self._reinit_pause_s, REINIT_BACKOFF_S[1])
        return True

    def _enumerate(self, evidence: list[str]) -> tuple[tuple[Gpu, ...], list[NvmlError]]:
        """Every GPU that answers now, and what the others said; known ones of those become sick."""
        cards: list[Card] = []
        refusals: list[NvmlError] = []
        with self._session.calling("list the GPUs"):
            driver = self._library.optional("nvmlSystemGetDriverVersion")
            cuda = self._library.optional("nvmlSystemGetCudaDriverVersion_v2")
            cuda_version = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None
            try:
                count = self._library.call("nvmlDeviceGetCount")
            except NvmlError as e:
                raise self._session.failed(e) from e
            for index in range(count):
                try:
                    handle = self._library.call("nvmlDeviceGetHandleByIndex", index)
                    card = self._hanging(handle)
                    if card is not None:
                        card.gpu = replace(card.gpu, index=index)
                        evidence.append(f"GPU {card.uuid} at index {index}: a call on it does not return")
                    else:
                        card = Card(self._library, self._host, handle)
                        gpu = card.identify(index, driver, cuda_version)
                        evidence.append(
                            f"GPU {gpu.uuid} at index {index}: {gpu.model}, {gpu.memory_total_mib} MiB"
                        )
                    cards.append(card)
                except (NvmlError, GoneError) as e:
                    error = e.error if isinstance(e, GoneError) else e
                    if error.code in LIBRARY_FAULTS:
                        raise self._session.failed(error) from e
                    refusals.append(error)
                    evidence.append(f"GPU at index {index} left out: {error}")
        self._settle(cards, refusals)
        return tuple(card.gpu for card in cards), refusals

    def _hanging(self, handle: Any) -> Card | None:
        """The known GPU of this handle if a call on it is under way for suspiciously long."""
        with self._lock:
            for card in self._cards.values():
                since_s = card.busy_since_s
                if since_s is not None and address(card.handle) == address(handle):
                    return card if self._clock() - since_s > HANGING_S else None
        return None

    def _settle(self, cards: Sequence[Card], refusals: Sequence[NvmlError]) -> None:
        lost = next((e for e in refusals if e.code in GPU_FAULTS), None)
        now = {card.uuid: card for card in cards}
        with self._lock:
            before = {uuid: address(c.handle) for uuid, c in self._cards.items() if uuid not in self._sick}
            for uuid, card in now.items():
                if uuid in self._cards:
                    card.last_sample_us = self._cards[uuid].last_sample_us
                if self._sick.pop(uuid, None) is not None:
                    log.info("GPU answers again uuid=%s", uuid)
            self._cards = now
            self._gpus.update({uuid: card.gpu for uuid, card in now.items()})
            for uuid in self._gpus.keys() - now.keys() - self._sick.keys():
                fault = GPU_FAULTS[lost.code] if lost else GpuFault.NOT_FOUND
                self._sick[uuid] = (fault, str(lost) if lost else "the driver no longer lists it")
                log.warning("GPU is gone uuid=%s fault=%s", uuid, fault.value)
            changed = before != {uuid: address(card.handle) for uuid, card in now.items()}
            self._change += changed
        if changed:
            self._waiter.changed()

    @property
    def needs_reexec(self) -> bool:
        """Whether only a new process can recover: the driver changed and this process keeps the old
        library mapped, or it lost its device nodes. A container must be recreated (exit non-zero)."""
        return self._session.needs_reexec

    # ---- readings -------------------------------------------------------------------------------

    def read(self, uuid: str) -> GpuReading:
        if not self._session.gate.enter(self._call_timeout_s):
            return self._sick_reading(uuid, GpuFault.UNRESPONSIVE, "NVML is being initialised")
        try:
            with self._lock:
                fault = self._session.fault or self._sick.get(uuid)
                card = self._cards.get(uuid)
            if fault is not None:
                return self._sick_reading(uuid, *fault)
            if card is None:
                return self._sick_reading(uuid, GpuFault.NOT_FOUND, "no such GPU in the last inventory")
            card.busy_since_s = self._clock()
            try:
                return card.read(self._clock)
            except GoneError as e:
                if e.library:
                    error = self._session.failed(e.error)
                    return self._sick_reading(uuid, GpuFault(error.fault), str(error))
                if e.error.code in GPU_FAULTS:
                    self.card_failed(uuid, e.fault, str(e.error))
                return self._sick_reading(uuid, e.fault, str(e.error))
            finally:
                card.busy_since_s = None
        finally:
            self._session.gate.leave()

    def _sick_reading(self, uuid: str, fault: GpuFault, detail: str) -> GpuReading:
        return GpuReading(uuid, self._clock(), fault=fault, fault_detail=detail)

    def card_failed(self, uuid: str, fault: GpuFault, why: str) -> None:
        """Remembers that a GPU is not to be called until it was found anew."""
        with self._lock:
            if uuid in self._sick:
                return
            self._sick[uuid] = (fault, why)
            self._change += 1
        self._waiter.changed()
        log.warning("GPU does not answer uuid=%s fault=%s: %s", uuid, fault.value, why)

    # ---- events ---------------------------------------------------------------------------------

    def listening(self) -> tuple[int, Sequence[Card]]:
        """For the event waiter: a number that grows with every change, and the cards that answer."""
        with self._lock:
            return self._change, [c for uuid, c in self._cards.items() if uuid not in self._sick]

    def wait_event(self, timeout_s: float) -> GpuEvent | None:
        return self._waiter.wait(timeout_s)

    def wake(self) -> None:
        self._waiter.wake()

    # ---- memory limits per cgroup (driver r615 and later) ---------------------------------------

    def set_memory_limits(self, uuid: str, cgroup_dir: str, soft_mib: int, hard_mib: int | None) -> None:
        with self._on_card(uuid, "set memory limits of a cgroup") as card:
            limits = self._limits_structure("c_nvmlSetMemoryLimits_v1_t", cgroup_dir)
            limits.softLimit = soft_mib * MIB
            limits.hardLimit = _UNLIMITED if hard_mib is None else hard_mib * MIB
            self._library.call("nvmlDeviceSetMemoryLimits_v1", card.handle, limits)

    def get_memory_limits(self, uuid: str, cgroup_dir: str) -> tuple[int, int | None, int]:
        with self._on_card(uuid, "get memory limits of a cgroup") as card:
            limits = self._limits_structure("c_nvmlGetMemoryLimits_v1_t", cgroup_dir)
            self._library.call("nvmlDeviceGetMemoryLimits_v1", card.handle, limits)
            hard_mib = None if limits.hardLimit == _UNLIMITED else int(limits.hardLimit) // MIB
            return int(limits.softLimit) // MIB, hard_mib, int(limits.currentUsed)

    def _limits_structure(self, name: str, cgroup_dir: str) -> Any:
        path = str(self._host.path(cgroup_dir))
        try:
            # NVML opens the directory itself. Where the host's is mounted here at its usual place too,
            # that is the name that its documentation shows.
            if os.path.samefile(path, cgroup_dir):
                path = cgroup_dir
        except OSError:
            pass  # only below the host root
        limits = self._library.structure(name, nameSpace=path.encode())
        if limits is None:
            raise NvmlError(name, FUNCTION_NOT_FOUND, "this nvidia-ml-py is older than 13.615")
        return limits

    # ---- compute modes --------------------------------------------------------------------------

    def get_compute_mode(self, uuid: str) -> str:
        with self._on_card(uuid, "get the compute mode") as card:
            number = int(self._library.call("nvmlDeviceGetComputeMode", card.handle))
            return _COMPUTE_MODES[number] if number < len(_COMPUTE_MODES) else f"mode {number}"

    def set_compute_mode(self, uuid: str, mode: str) -> None:
        with self._on_card(uuid, "set the compute mode") as card:
            self._library.call("nvmlDeviceSetComputeMode", card.handle, _COMPUTE_MODES.index(mode))

    @contextlib.contextmanager
    def _on_card(self, uuid: str, verb: str) -> Iterator[Card]:
        what = f"{verb} on {uuid}"
        with self._session.calling(what):
            with self._lock:
                sick = self._sick.get(uuid)
                card = self._cards.get(uuid)
            if sick is not None or card is None:
                fault, why = sick or (GpuFault.NOT_FOUND, "no such GPU")
                raise GpuError(f"cannot {what}: {why}", fault.value)
            try:
                yield card
            except NvmlError as e:
                if e.code in UNSUPPORTED:
                    raise GpuError(f"cannot {what}: not offered here: {e}", "not_supported") from e
                if e.code == NO_PERMISSION:
                    raise GpuError(f"cannot {what}: {e}; only root may", GpuFault.NO_PERMISSION.value) from e
                if e.code in LIBRARY_FAULTS:
                    raise self._session.failed(e) from e
                if e.code in GPU_FAULTS:
                    self.card_failed(uuid, GPU_FAULTS[e.code], str(e))
                raise GpuError(f"cannot {what}: {e}", GPU_FAULTS.get(e.code, GpuFault.FAILED).value) from e

    # ---- topology -------------------------------------------------------------------------------

    def topology(self) -> Topology:
        """How the GPUs of the last inventory are joined. Raises GpuError."""
        links: dict[frozenset[str], GpuLink] = {}
        with self._session.calling("read the topology"):
            cards = self.listening()[1]
            by_pci = {card.gpu.pci_address: card.uuid for card in cards}
            peers = {card.uuid: self._nvlink_peers(card, by_pci) for card in cards}
            for a, b in combinations(cards, 2):
                direct = peers[a.uuid].get(b.uuid, 0)
                # Links that end in no GPU end in a switch, which joins all that have such links.
                switched = min(peers[a.uuid].get(None, 0), peers[b.uuid].get(None, 0))
                ancestor = self._library.optional("nvmlDeviceGetTopologyCommonAncestor", a.handle, b.handle)
                if direct or switched:
                    links[frozenset((a.uuid, b.uuid))] = GpuLink("nvlink", direct or switched)
                elif ancestor in _TOPOLOGY:
                    links[frozenset((a.uuid, b.uuid))] = GpuLink(_TOPOLOGY[ancestor])
        return links

    def _nvlink_peers(self, card: Card, by_pci: dict[str | None, str]) -> dict[str | None, int]:
        """Active links per peer; None: ends in something that is no GPU of ours."""
        peers: dict[str | None, int] = {}
        for link in range(_MAX_NVLINKS):
            active = self._library.optional("nvmlDeviceGetNvLinkState", card.handle, link)
            if active is None:
                break
            if not active:
                continue
            info = self._library.optional("nvmlDeviceGetNvLinkRemotePciInfo", card.handle, link)
            if info is not None:
                peer = by_pci.get(pci_address(str(info.busId)))
                peers[peer] = peers.get(peer, 0) + 1
        return peers

    def close(self) -> None:
        self._waiter.wake()
        with self._inventory_lock:
            try:
                self._close_session()
            except GpuError as e:
                log.debug("NVML left open: %s", e)


def _why_none(refusals: Sequence[NvmlError]) -> tuple[str, GpuFault]:
    """Why no GPU can be offered although NVML works."""
    if not refusals:
        return "NVML works but lists no GPU: look at lspci and the kernel log", GpuFault.NOT_FOUND
    first = refusals[0]
    if first.code == NO_PERMISSION:
        return f"no GPU may be opened: {NEEDS_NODES}", GpuFault.NO_PERMISSION
    return f"no GPU answers: {first}", GPU_FAULTS.get(first.code, GpuFault.FAILED)
