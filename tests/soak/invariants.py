"""What must hold at every moment of a soak run, checked from what containers really got.

Truth is the stand-in runtime: the environment and device nodes of running containers. The agent's own
books are compared with it, never believed.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from edgeagent.errors import ControlError
from tests.fakes.whole import CORES, MEMORY, WholeNode

WAIT_ALTHOUGH_ROOM_S = 8.0  # how long a container may wait while the agent itself shows room for it
GRACE_S = 0.3  # of the scheduler: it binds by sums that may be this old


@dataclass
class Check:
    """One invariant: how often it was looked at, and what broke it."""

    text: str
    looks: int = 0
    broken: list[str] = field(default_factory=list)

    def hold(self, ok: object, why: str) -> None:
        self.looks += 1
        if not ok and len(self.broken) < 20:
            self.broken.append(why)


class Invariants:
    """`look` often, `finish` once at the end with every pod gone."""

    def __init__(self, node: WholeNode) -> None:
        self.node = node
        self.usable: dict[str, int] = {}
        self.last_fault_s = time.monotonic()
        self.notes: deque[tuple[float, str]] = deque(maxlen=8)  # what was done last
        self.killed: set[str] = set()  # sessions that ended by SIGKILL
        self.excused: Counter[str] = Counter()  # rejections that no plugin can prevent, by message
        self._rejected: set[str] = set()
        self._bound_s: dict[str, float] = {}
        self._looked_s = time.monotonic()
        self._room_since: dict[tuple[str, str], float] = {}
        self._log_read = 0
        self._seen_index = 0
        self._session = ""
        self.topics: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self.sequences: dict[str, Counter[int]] = defaultdict(
            Counter
        )  # outbox and session -> seq -> times seen
        self.checks = {
            "promise": Check("limits of running containers on a GPU sum up to no more than it has"),
            "one_gpu": Check("every container is on exactly one GPU, the one its environment names"),
            "admission": Check("no pod is rejected for want of room"),
            "starts": Check("a waiting container starts once there is room for it"),
            "log": Check("no exception in the log"),
            "events": Check("no event is lost (gaps in the numbers of the outbox)"),
            "books": Check("when all pods are gone nothing is booked, waiting or left on disk"),
        }

    def fault(self) -> None:
        """Something was broken or mended just now."""
        self.last_fault_s = time.monotonic()

    def note(self, what: str) -> None:
        self.notes.append((time.monotonic(), what))

    def kill_comes(self) -> None:
        """The agent is about to be killed: telemetry that only its memory holds (it spares the flash
        while the link is up) may be lost, nothing else."""
        self._messages()
        if self._session:
            self.killed.add(self._session)

    @property
    def broken(self) -> dict[str, list[str]]:
        return {name: check.broken for name, check in self.checks.items() if check.broken}

    # -- at every moment --

    def look(self) -> None:
        self._promises()
        self._admission()
        self._waiting()
        self._log()
        self._messages()

    def _promises(self) -> None:
        memory: Counter[str] = Counter()
        cores: Counter[str] = Counter()
        minors = {g.uuid: g.readings["minor"] for g in self.node.nvml.gpus}
        with self.node.kubelet.cluster.lock:
            instances = [i for i in self.node.kubelet.runtime.instances.values() if i.container]
            for i in instances:
                uuid = i.env.get("EDGEAGENT_GPU_UUID")
                asked = i.pod.containers[i.container].spec.limits
                if MEMORY not in asked:
                    self.checks["one_gpu"].hold(
                        uuid is None, f"{i.pod.name} asked for nothing and got {uuid}"
                    )
                    continue
                nodes = [n for n in i.devices if n.startswith("/dev/nvidia") and n[11:].isdigit()]
                good = uuid in minors and nodes == [f"/dev/nvidia{minors[uuid]}"]
                self.checks["one_gpu"].hold(good, f"{i.pod.name}/{i.container}: {uuid} {nodes}")
                limit = int(i.env.get("EDGEAGENT_MEMORY_MIB", -1))
                self.checks["one_gpu"].hold(
                    limit == int(asked[MEMORY]), f"{i.pod.name}: limit {limit}, asked {asked}"
                )
                memory[uuid or ""] += limit
                cores[uuid or ""] += int(asked.get(CORES, 0))
        for uuid, total in memory.items():
            self.checks["promise"].hold(total <= self.usable.get(uuid, 0), f"{uuid}: {total} MiB promised")
            self.checks["promise"].hold(cores[uuid] <= 100, f"{uuid}: {cores[uuid]} % promised")

    def _admission(self) -> None:
        """A rejection is excused where a fault or a changed list came between the pod's binding by the
        scheduler and the kubelet's look at it: no plugin can prevent that."""
        before_s, self._looked_s = self._looked_s, time.monotonic()
        for pod in list(self.node.kubelet.cluster.pods.values()):
            if pod.node_name is not None:
                self._bound_s.setdefault(pod.uid, before_s)  # bound since the last look
            if not pod.rejected or pod.uid in self._rejected:
                continue
            self._rejected.add(pod.uid)
            changed_s = max([u.at_s for u in self.node.kubelet.updates] + [self.last_fault_s])
            if changed_s >= self._bound_s[pod.uid] - GRACE_S:
                reason = (pod.message or "").split(", which is")[0].rpartition("due to ")[2]
                self.excused[re.sub(r"\d+", "N", reason)[:120]] += 1
                continue
            now_s = self._looked_s
            lately = ", ".join(f"{what} {now_s - at_s:.1f} s ago" for at_s, what in self.notes)
            why = f"{pod.name}, bound {now_s - self._bound_s[pod.uid]:.1f} s ago: {pod.message} ({lately})"
            self.checks["admission"].hold(False, why)
        self.checks["admission"].hold(True, "")

    def _waiting(self) -> None:
        """A container that waits although a GPU takes containers and shows room for it: for how long?"""
        try:
            snapshot = self.node.agent.snapshot()
        except (ControlError, OSError):
            self._room_since.clear()
            return
        now_s = time.monotonic()
        waiting = {(w["podUid"], w["container"]): w for w in snapshot["waiting"]}
        for key in set(self._room_since) - set(waiting):
            del self._room_since[key]
        for key, w in waiting.items():
            room = [
                g["gpu"]["uuid"]
                for g in snapshot["gpus"]
                if g["freeMiB"] >= w["memoryMiB"] and g["freeCoresPct"] >= w.get("coresPct", 0)
            ]
            if not room or "kept for" in w["reason"] or w.get("permanent"):
                self._room_since.pop(key, None)
                continue
            since_s = self._room_since.setdefault(key, now_s)
            self.checks["starts"].hold(
                now_s - since_s < WAIT_ALTHOUGH_ROOM_S,
                f"{w.get('pod')} waits {now_s - since_s:.0f} s although {room} has room: {w['reason'][:200]}",
            )
        self.checks["starts"].hold(True, "")

    def _log(self) -> None:
        with self.node.agent.log_path.open(errors="replace") as file:
            file.seek(self._log_read)
            text = file.read()
            self._log_read = file.tell()
        for word in ("Traceback", "call failed resource", "Exception in thread"):
            at = text.find(word)
            self.checks["log"].hold(at < 0, text[max(0, at - 200) : at + 1500])

    def _messages(self) -> None:
        seen = self.node.observer.seen
        for message in seen[self._seen_index :]:
            self._seen_index += 1
            if message.data and not message.retained:
                payload = json.loads(message.data)
                if "node" not in payload:
                    self._session = payload.get("sess", self._session)
                if "box" in payload:  # numbers go on in blocks after a restart
                    box = f"{payload['box']} {payload['sess']}"
                    self.sequences[box][payload["seq"]] += 1
                    self.topics[box].append((payload["seq"], message.topic.removeprefix("gpufleet/v1/")))

    # -- at the end --

    def finish(self) -> None:
        """Every pod has been deleted and everything mended."""
        node = self.node
        check = self.checks["books"]
        try:
            node.agent.wait_snapshot(
                lambda s: (
                    not s["containers"]
                    and not s["waiting"]
                    and all(g["freeMiB"] == self.usable[g["gpu"]["uuid"]] for g in s["gpus"])
                    and all(g["freeCoresPct"] == 100 for g in s["gpus"])
                    and all(r["healthy"] == r["total"] for r in s["resources"])
                ),
                30,
            )
            # The uplink tries again after a minute at the latest.
            node.agent.wait_snapshot(lambda s: s["uplink"]["queued"] == 0, 90)
            check.hold(True, "")
        except AssertionError as e:
            check.hold(False, str(e)[:3000])
        specs = sorted(p.name for p in (node.root / "var/run/cdi").glob("edgeagent.io-share-*"))
        check.hold(not specs, f"CDI specs left: {specs[:5]}")
        left = sorted(p.name for p in (node.root / "run/edgeagent/limiter").glob("m*"))
        check.hold(not left, f"limiter files left: {left[:5]}")
        try:  # what the broker has may not have reached the observer yet
            node.observer.wait(lambda seen: self._messages() or not self._gaps(), 5)
        except AssertionError:
            pass  # judged below
        gaps = self._gaps()
        for box in self.sequences:
            missing = gaps.get(box, [])
            near = [m for n in missing[:3] for m in self.topics[box] if abs(m[0] - n) <= 2]
            why = f"outbox {box}: {len(missing)} missing, {missing[:5]}, near {near}"
            self.checks["events"].hold(not missing or box.split()[1] in self.killed, why)
        self._log()

    def _gaps(self) -> dict[str, list[int]]:
        """The numbers missing between the first and the last seen, by outbox and session."""
        found = {
            box: sorted(set(range(min(times), max(times) + 1)) - set(times))
            for box, times in self.sequences.items()
        }
        return {box: missing for box, missing in found.items() if missing}

    @property
    def messages(self) -> tuple[int, int]:
        """(different ones, repeated ones) that came through the outbox."""
        different = sum(len(t) for t in self.sequences.values())
        return different, sum(sum(t.values()) for t in self.sequences.values()) - different


def slope(points: list[tuple[float, float]]) -> float:
    """Least squares: units per minute of (seconds, value)."""
    n = len(points)
    if n < 2:
        return 0.0
    mean_t, mean_v = sum(t for t, _ in points) / n, sum(v for _, v in points) / n
    below = sum((t - mean_t) ** 2 for t, _ in points)
    above = sum((t - mean_t) * (v - mean_v) for t, v in points)
    return 60.0 * above / below if below else 0.0


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


Figures = dict[str, Any]
