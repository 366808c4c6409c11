"""The CDI specs of shares: what a container gets, written when it starts and gone when it has ended.

A container runtime may go on using the spec that it read before (one of 45 starts on a loaded node),
so a spec whose content changes is removed first and the start waits a moment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from edgeagent.errors import NodeError
from edgeagent.isolation.backend import ShareToEnforce
from edgeagent.kubelet.containers import CONTAINER_ENV, GPU_ENV, SHARE_ENV
from edgeagent.node.cdi import SHARE_CLASS, ContainerEdits, SpecDir, annotations_of, spec_text
from edgeagent.sharing.ledger import ContainerKey
from edgeagent.sharing.tokens import NUMBER, Demand, lowest, token_id

log = logging.getLogger(__name__)

POD_ENV = "EDGEAGENT_POD_UID"
MEMORY_ENV = "EDGEAGENT_MEMORY_MIB"
CORES_ENV = "EDGEAGENT_CORES_PCT"

PAUSE_S = 0.3  # measured: shorter, and a loaded runtime may use the spec before ours
FORGOTTEN_S = 1.0  # a spec removed this long ago is in no runtime's cache


def spec_names(demand: Demand) -> tuple[str, ...]:
    """The CDI devices that the container's Allocates named: the share first, then the number's where
    there is one beside the memory (a number may also come alone, which nobody knows at Allocate)."""
    share = demand.share_name
    names = [share] if share is not None else []
    if demand.shares:
        names.append(token_id(NUMBER, lowest(demand.shares)))
    return tuple(dict.fromkeys(names))


class ShareSpecs:
    """Thread-safe as far as one container's specs are written by one thread at a time."""

    def __init__(self, specs: SpecDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._specs = specs
        self._clock = clock
        self._lock = threading.Lock()
        self._removed: dict[str, tuple[str, float]] = {}  # name -> (text, when)

    def write(
        self, share: ShareToEnforce, demand: Demand, edits: ContainerEdits, stop: threading.Event
    ) -> None:
        """Puts the container's specs in place, and waits (until `stop`) where the runtime may still know
        others by these names. Raises NodeError."""
        changed = False
        for name, text in self._texts(share, demand, edits).items():
            changed = self._write(name, text) or changed
        if changed:
            stop.wait(PAUSE_S)

    def remove(self, names: Iterable[str]) -> None:
        """A spec that cannot be removed is logged."""
        for name in names:
            text = self._specs.read(SHARE_CLASS, name)
            try:
                self._specs.remove(SHARE_CLASS, name)
            except NodeError as e:
                log.warning("%s", e)
            if text is not None:
                self._note_removed(name, text)

    def remove_others(self, names: Iterable[str]) -> None:
        """At start: what a run before this one has left, but for `names`."""
        kept = set(names)
        self._specs.remove_leftovers()
        self.remove(name for name in self._specs.names(SHARE_CLASS) if name not in kept)

    def gpu_of(self, key: ContainerKey, demand: Demand) -> str | None:
        """The GPU that the container's spec names; None where there is none of that very container."""
        name = demand.share_name
        text = self._specs.read(SHARE_CLASS, name) if name is not None else None
        notes = annotations_of(text) if text is not None else {}
        written_for = notes.get("pod-uid"), notes.get("container")
        return notes.get("gpu") if written_for == (key.pod_uid, key.container) else None

    @staticmethod
    def _texts(share: ShareToEnforce, demand: Demand, edits: ContainerEdits) -> Mapping[str, str]:
        info = {
            SHARE_ENV: share.share,
            POD_ENV: share.pod_uid,
            CONTAINER_ENV: share.container,
            GPU_ENV: share.gpu.uuid,
            MEMORY_ENV: str(share.memory_mib),
        }
        if share.cores_pct is not None:
            info[CORES_ENV] = str(share.cores_pct)
        # The image may ask for all GPUs, and a runtime class may obey: void says no.
        own = ContainerEdits(env={"NVIDIA_VISIBLE_DEVICES": "void", **info})
        beside = ContainerEdits(env={SHARE_ENV: share.share})
        notes = {"pod-uid": share.pod_uid, "container": share.container, "gpu": share.gpu.uuid}
        return {
            name: spec_text(SHARE_CLASS, {name: beside if number else edits.merged(own)}, notes)
            for number, name in enumerate(spec_names(demand))
        }

    def _write(self, name: str, text: str) -> bool:
        """Whether the runtime may still know another spec by this name."""
        there = self._specs.read(SHARE_CLASS, name)
        if there == text:
            return False
        with self._lock:
            removed = self._removed.pop(name, None)
        known = there
        if known is None and removed is not None and self._clock() - removed[1] < FORGOTTEN_S:
            known = removed[0]
        if there is not None:
            # Gone and written anew: whoever reads too early finds nothing rather than the old one.
            self._specs.remove(SHARE_CLASS, name)
        self._specs.write(SHARE_CLASS, name, text)
        return known is not None and known != text

    def _note_removed(self, name: str, text: str) -> None:
        now_s = self._clock()
        with self._lock:
            self._removed = {n: r for n, r in self._removed.items() if now_s - r[1] < FORGOTTEN_S}
            self._removed[name] = (text, now_s)
