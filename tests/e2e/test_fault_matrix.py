"""Every external party × every way in which it can fail the agent, as one table.

In each row the party is broken and a container is started: the kubelet gets its answer in time and the
container runs (or waits with the reason, where the fault is in what it needs). The reason is in the
status. The party is mended, and everything is as before without anybody's help.

`python -m tests.e2e.test_fault_matrix` (make fault-matrix) prints the matrix.
"""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.clock import FakeClock
from tests.fakes.jetson import BOARDS, JetsonTree
from tests.fakes.kubelet import Pod
from tests.fakes.mps import FakeMps
from tests.fakes.nvml.host import nvidia_host
from tests.fakes.whole import WholeNode

BUDGET_S = 5.0  # from a pod's creation to its running container, on a busy machine
RECOVERY_S = 30.0
RECONNECT_S = 75.0  # the uplink tries again after a minute at the latest
MODES = ("slow", "hangs", "refuses", "lies", "disappears", "comes back")
Snapshot = dict[str, Any]
Does = Callable[[WholeNode], object]


@dataclass(frozen=True)
class Row:
    """`reason`: true of a snapshot that says what is wrong; None: nothing is wrong with the node, and
    the status must not say so. `starts`: a new pod runs meanwhile; else `held` says that it waits."""

    broken: Does
    mended: Does
    reason: Callable[[Snapshot], object] | None
    starts: bool = True
    node: str = "cards"
    within_s: float = RECOVERY_S
    well: Callable[[Snapshot], object] = lambda s: s["kubeletConnected"]


def said(*words: str) -> Callable[[Snapshot], object]:
    """Some reason or condition has all the words."""

    def look(s: Snapshot) -> object:
        found = [*s["reasons"], *s["host"]["facts"].values(), s["uplink"].get("problem") or ""]
        found += [c["message"] for g in s["gpus"] for c in g["conditions"]] + [
            w["reason"] for w in s["waiting"]
        ]
        return [f for f in found if all(w.lower() in f.lower() for w in words)]

    return look


def condition(kind: str) -> Callable[[Snapshot], object]:
    return lambda s: [c for g in s["gpus"] for c in g["conditions"] if c["type"] == kind]


def healthy(s: Snapshot) -> bool:
    return s["kubeletConnected"] and not any(c["makesUnhealthy"] for g in s["gpus"] for c in g["conditions"])


SLOW: list[threading.Timer] = []


def later(delay_s: float, answer: Callable[[], object]) -> None:
    """What is slow answers at last."""
    SLOW.append(threading.Timer(delay_s, answer))
    SLOW[-1].start()


def answered(node: WholeNode) -> None:
    """Returns when it has."""
    while SLOW:
        SLOW.pop().join()


def offline(s: Snapshot) -> object:
    return not s["uplink"]["connected"] and s["uplink"].get("problem")


def online(s: Snapshot) -> object:
    return s["uplink"]["connected"]


# -- NVML: the second card's calls ----------------------------------------------------------------------

SLOW_CALLS = ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")


def nvml_slow(node: WholeNode) -> None:
    """A third of a second, well within callTimeoutSeconds."""
    node.nvml.hang(SLOW_CALLS[0], node.gpus[1])
    later(0.15, node.nvml.release)


def nvml_hangs(node: WholeNode) -> None:
    for symbol in SLOW_CALLS:
        node.nvml.hang(symbol, node.gpus[1])


def nvml_lies(node: WholeNode) -> None:
    """Counters that wrapped, a temperature of -256, 300 % load, and more use than memory."""
    node.nvml.set(node.gpus[1], temperature_c=-256, util_pct=300, memory_used_mib=17592186044134)
    node.nvml.processes(node.gpus[1], compute=[(4_999_998, 17592186044134.0)])


def nvml_true(node: WholeNode) -> None:
    node.nvml.set(node.gpus[1], temperature_c=40, util_pct=0, memory_used_mib=0)
    node.nvml.processes(node.gpus[1])


def card_goes(node: WholeNode) -> None:
    node.nvml.remove(node.gpus[1])
    nvidia_host(node.root, node.nvml)


def card_comes(node: WholeNode) -> None:
    node.nvml.insert(node.gpus[1])
    nvidia_host(node.root, node.nvml)


# -- kubelet ------------------------------------------------------------------------------------------------


class Deaf:
    """A socket that is there and never answers, in the place of a server's."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(16)
        self._path = path

    def close(self) -> None:
        self._socket.close()
        self._path.unlink(missing_ok=True)


DEAF: list[Deaf] = []


def kubelet_deaf(node: WholeNode) -> None:
    node.kubelet.stop()
    for path in node.kubelet.directory.glob("*.sock"):
        path.unlink()
    DEAF.append(Deaf(node.kubelet.directory / "kubelet.sock"))


def kubelet_hears(node: WholeNode) -> None:
    DEAF.pop().close()
    node.kubelet.start()


def kubelet_refuses(node: WholeNode) -> None:
    node.kubelet.fail_register = "the resource name is taken"
    node.kubelet.restart()


def kubelet_takes(node: WholeNode) -> None:
    node.kubelet.fail_register = None


# -- podresources -------------------------------------------------------------------------------------------


def pod_resources(node: WholeNode) -> Path:
    return node.root / "var/lib/kubelet/pod-resources/kubelet.sock"


def resources_deaf(node: WholeNode) -> None:
    pod_resources(node).rename(pod_resources(node).with_suffix(".kept"))
    DEAF.append(Deaf(pod_resources(node)))


def resources_back(node: WholeNode) -> None:
    while DEAF:
        DEAF.pop().close()
    pod_resources(node).with_suffix(".kept").rename(pod_resources(node))


def resources_gone(node: WholeNode) -> None:
    pod_resources(node).rename(pod_resources(node).with_suffix(".kept"))


def resources_refuse(node: WholeNode) -> None:
    """A file that is no socket: connecting is refused."""
    resources_gone(node)
    pod_resources(node).touch()


# -- API server ---------------------------------------------------------------------------------------------


XIDS = itertools.cycle((79, 95, 119, 46, 62, 74, 109))


def told(node: WholeNode) -> None:
    """Something that the cluster is to hear of, so that the link is used: a new XID each time."""
    node.nvml.xid(node.gpus[1], next(XIDS))


def api(**behaviour: Any) -> Does:
    def change(node: WholeNode) -> None:
        for name, value in behaviour.items():
            setattr(node.api.behaviour, name, value)
        told(node)

    return change


def api_gone(node: WholeNode) -> None:
    node.api_proxy.refuse(True)
    node.api_proxy.cut()
    told(node)


def api_back(node: WholeNode) -> None:
    node.api_proxy.refuse(False)


def api_said(s: Snapshot) -> object:
    return s["host"]["facts"].get("apiServer")


def api_well(s: Snapshot) -> object:
    return healthy(s) and "apiServer" not in s["host"]["facts"]


# -- broker -------------------------------------------------------------------------------------------------


def broker_slow(node: WholeNode) -> None:
    node.proxy.stall(True)
    later(0.7, lambda: node.proxy.stall(False))


def broker_refuses(node: WholeNode) -> None:
    node.proxy.refuse(True)
    node.proxy.cut()


def broker_lies(node: WholeNode) -> None:
    """Commands and configuration that nobody sent: garbage, retained ones, another node's."""
    base = "gpufleet/v1/lab/edge-1"
    for payload in (
        b"\xff\x00",
        b"[" * 9000,
        b'{"id":"x","node":"edge-2","exp":1}',
        b"{}",
        b'{"v":1,"keys":{"a":[[]]}}',
    ):
        for topic in ("cmd/restart-agent", "cmd/set-sharing", "cmd/", "desired", "cfg/desired"):
            node.observer.publish(f"{base}/{topic}", payload, retain=False)
    node.observer.publish(f"{base}/cmd/restart-agent", b'{"id":"1","node":"edge-1","exp":9999999999999}')


def broker_dies(node: WholeNode) -> None:
    node.broker.kill()


# -- disk ---------------------------------------------------------------------------------------------------


def disk_full(node: WholeNode) -> None:
    """Every write of the agent fails: EFBIG stands for ENOSPC."""
    _, hard = resource.prlimit(node.agent.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(node.agent.pid, resource.RLIMIT_FSIZE, (0, hard))


def disk_free(node: WholeNode) -> None:
    _, hard = resource.prlimit(node.agent.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(node.agent.pid, resource.RLIMIT_FSIZE, (hard, hard))


def state_gone(node: WholeNode) -> None:
    shutil.rmtree(node.agent.state_dir)


def state_refuses(node: WholeNode) -> None:
    """Mounted read-only, where this may be done here."""
    state = str(node.agent.state_dir)
    for command in (["mount", "--bind", state, state], ["mount", "-o", "remount,ro,bind", state]):
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs root and mounts")


def state_back(node: WholeNode) -> None:
    subprocess.run(["umount", str(node.agent.state_dir)], capture_output=True, check=False)


def state_lies(node: WholeNode) -> None:
    """Every file has other contents, and the agent starts again from them."""
    node.agent.kill()
    for path in node.agent.state_dir.rglob("*"):
        if path.is_file() and path.suffix != ".so":
            path.write_bytes(b"\x00\xff[[[" * 50)
    node.agent.start().wait_ready()


# -- sysfs: a Jetson's files ------------------------------------------------------------------------------------

ZONE = next(iter(BOARDS["orin-nano-jp6"].zones_milli_c))
TREES: dict[Path, JetsonTree] = {}


def tree(node: WholeNode) -> JetsonTree:
    return TREES[node.root]


def zone_file(node: WholeNode) -> Path:
    return tree(node).path(f"{tree(node).zone(ZONE)}/temp")


def zone_hangs(node: WholeNode) -> None:
    """Reading it waits for a writer that never comes."""
    zone_file(node).unlink()
    os.mkfifo(zone_file(node))


def zone_refuses(node: WholeNode) -> None:
    """A directory: reading it fails."""
    zone_file(node).unlink()
    zone_file(node).mkdir()


def zone_answers(node: WholeNode) -> None:
    path = zone_file(node)
    if path.is_dir():
        path.rmdir()
    else:
        # Whoever waits in it is let go.
        if stat.S_ISFIFO(path.stat().st_mode):
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        path.unlink()
    path.write_text("41000\n")


def load_goes(node: WholeNode) -> None:
    shutil.rmtree(tree(node).path(f"sys/devices/{tree(node).board.gpu_device}/devfreq"))
    tree(node).path(f"sys/devices/{tree(node).board.gpu_device}/load").unlink()


# -- the MPS daemon of the only card --------------------------------------------------------------------------


def mps(node: WholeNode) -> Any:
    return FakeMps(node.root).daemon(node.gpus[0])


def mps_hangs(node: WholeNode) -> None:
    mps(node).change(lambda s: s.update(hang=[""]))


def mps_refuses(node: WholeNode) -> None:
    mps(node).change(lambda s: s.update(refuse=[""]))


def mps_well(node: WholeNode) -> None:
    mps(node).change(lambda s: s.update(hang=[], refuse=[]))


def mps_dies(node: WholeNode) -> None:
    mps(node).die()


# -- the table ----------------------------------------------------------------------------------------------


def nothing(node: WholeNode) -> None:
    """Time alone mends it."""


ROWS: dict[tuple[str, str], Row | str] = {
    ("NVML", "slow"): Row(nvml_slow, answered, None),
    ("NVML", "hangs"): Row(nvml_hangs, lambda n: n.nvml.release(), condition("DriverUnresponsive")),
    ("NVML", "refuses"): Row(
        lambda n: n.nvml.require_reset(n.gpus[1]), lambda n: n.nvml.recover(n.gpus[1]), said("reset")
    ),
    ("NVML", "lies"): Row(nvml_lies, nvml_true, None),
    ("NVML", "disappears"): Row(card_goes, card_comes, condition("Lost")),
    (
        "sysfs",
        "slow",
    ): "a slow zone is a hanging one that answers: the sweep keeps it out of the poll either way",
    ("sysfs", "hangs"): Row(lambda n: zone_hangs(n), lambda n: zone_answers(n), None, node="jetson"),
    ("sysfs", "refuses"): Row(lambda n: zone_refuses(n), lambda n: zone_answers(n), None, node="jetson"),
    ("sysfs", "lies"): Row(
        lambda n: tree(n).set_zone(ZONE, -256000),
        lambda n: tree(n).set_zone(ZONE, 41000),
        None,
        node="jetson",
    ),
    ("sysfs", "disappears"): Row(
        lambda n: load_goes(n), lambda n: tree(n).gpu_appears(), None, node="jetson"
    ),
    ("kubelet", "slow"): Row(
        lambda n: n.kubelet.restart(refuse_s=1.0), nothing, lambda s: not s["kubeletConnected"], starts=False
    ),
    ("kubelet", "hangs"): Row(kubelet_deaf, kubelet_hears, said("kubelet", "does not listen"), starts=False),
    ("kubelet", "refuses"): Row(
        kubelet_refuses, kubelet_takes, said("kubelet", "does not listen"), starts=False
    ),
    (
        "kubelet",
        "lies",
    ): "IDs never offered, junk, replays: test_kubelet_plugin; a damaged checkpoint: test_kubelet_side",
    ("kubelet", "disappears"): Row(
        lambda n: n.kubelet.stop(),
        lambda n: n.kubelet.start(),
        said("kubelet", "does not listen"),
        starts=False,
    ),
    (
        "podresources",
        "slow",
    ): "asked in one rare case, never while an Allocate is in flight: as when it hangs",
    ("podresources", "hangs"): Row(resources_deaf, resources_back, None),
    ("podresources", "refuses"): Row(
        resources_refuse, lambda n: (pod_resources(n).unlink(), resources_back(n)), None
    ),
    (
        "podresources",
        "lies",
    ): "only tells twins in one pod apart; a wrong answer is a wrong order of their starts",
    ("podresources", "disappears"): Row(resources_gone, resources_back, None),
    ("API server", "slow"): Row(api(slow_s=1.0), api(slow_s=0.0), None, well=api_well),
    ("API server", "hangs"): Row(api(hang=True), api(hang=False), api_said, well=api_well),
    ("API server", "refuses"): Row(api(refuse=503), api(refuse=None), api_said, well=api_well),
    (
        "API server",
        "lies",
    ): "nothing that it says is acted upon: it is told, not asked (the version sets a unit's advice)",
    ("API server", "disappears"): Row(api_gone, api_back, api_said, well=api_well),
    ("broker", "slow"): Row(broker_slow, answered, None, well=online, within_s=RECONNECT_S),
    ("broker", "hangs"): Row(
        lambda n: n.proxy.stall(True),
        lambda n: n.proxy.stall(False),
        offline,
        well=online,
        within_s=RECONNECT_S,
    ),
    ("broker", "refuses"): Row(
        broker_refuses, lambda n: n.proxy.refuse(False), offline, well=online, within_s=RECONNECT_S
    ),
    ("broker", "lies"): Row(broker_lies, nothing, None, well=online, within_s=RECONNECT_S),
    ("broker", "disappears"): Row(
        broker_dies, lambda n: n.broker.start(), offline, well=online, within_s=RECONNECT_S
    ),
    (
        "disk",
        "slow",
    ): "no file is written or synced under the gate's lock; a slow disk cannot be had without a device",
    ("disk", "hangs"): "as slow: an uplink that hangs in fsync is its own thread",
    ("disk", "refuses"): Row(state_refuses, state_back, said("state")),
    ("disk", "lies"): Row(state_lies, nothing, None),
    ("disk", "disappears"): Row(state_gone, nothing, None),
    ("disk", "full"): Row(disk_full, disk_free, said("cannot write"), starts=False),
    ("clock", "slow"): "has no meaning",
    ("clock", "hangs"): "has no meaning",
    ("clock", "refuses"): "has no meaning",
    ("clock", "lies"): Row(lambda n: n.clock.set_s(400 * 86400), lambda n: n.clock.set_s(0), None),  # type: ignore[attr-defined]
    ("clock", "disappears"): Row(lambda n: n.clock.set_s(-30 * 86400), lambda n: n.clock.set_s(0), None),  # type: ignore[attr-defined]
    ("MPS daemon", "slow"): "as hanging, below the control program's time limit",
    ("MPS daemon", "hangs"): Row(mps_hangs, mps_well, said("mps"), starts=False, node="mps"),
    ("MPS daemon", "refuses"): Row(mps_refuses, mps_well, said("mps"), starts=False, node="mps"),
    ("MPS daemon", "lies"): "its answers are evidence, read back: test_mps",
    ("MPS daemon", "disappears"): Row(lambda n: mps_dies(n), nothing, None, node="mps"),
}


# -- running it ---------------------------------------------------------------------------------------------


def cards(directory: Path) -> WholeNode:
    clock = FakeClock(directory / "clock")
    node = WholeNode(directory, "l4", "l4", broker=True, api=True, env=clock.env())
    node.clock = clock  # type: ignore[attr-defined]
    return node


def jetson(directory: Path) -> WholeNode:
    node = WholeNode(directory)
    TREES[node.root] = JetsonTree(node.root, BOARDS["orin-nano-jp6"])
    return node


def with_mps(directory: Path) -> WholeNode:
    node = WholeNode(directory, "l4", config={"isolation": {"memory": "mps", "compute": "mps"}})
    FakeMps(node.root)
    node.nvml.driver_version = "615.71.09"
    node.nvml.set(node.gpus[0])
    return node


NODES: dict[str, Callable[[Path], WholeNode]] = {"cards": cards, "jetson": jetson, "mps": with_mps}


class Nodes:
    """Each kind of node is made once, and serves all its rows."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._made: dict[str, WholeNode] = {}
        self.number = 0

    def of(self, kind: str) -> WholeNode:
        if kind not in self._made:
            directory = Path(tempfile.mkdtemp(prefix="ea-"))
            self._stack.callback(shutil.rmtree, directory, ignore_errors=True)
            node = self._stack.enter_context(NODES[kind](directory)).ready()
            took_to_start(self, node, 2 * BUDGET_S)  # what is made for the first container is there then
            self._made[kind] = node
        return self._made[kind]

    def pod(self, node: WholeNode) -> Pod:
        self.number += 1
        return node.share(f"p{self.number}", 1000)

    def close(self) -> None:
        self._stack.close()


def took_to_start(nodes: Nodes, node: WholeNode, timeout_s: float) -> float:
    """Seconds from a pod's creation to its running container; the pod is gone afterwards."""
    begun_s = time.monotonic()
    pod = nodes.pod(node)
    node.kubelet.wait_for(lambda: pod.apps[0].running, timeout_s)
    took_s = time.monotonic() - begun_s
    node.kubelet.delete(pod)
    node.kubelet.wait_for(lambda: pod.gone)
    return took_s


def play(nodes: Nodes, row: Row) -> tuple[str, float]:
    """(what became of the pod meanwhile, seconds from mending to well). AssertionError, TimeoutError."""
    node = nodes.of(row.node)
    node.agent.wait_snapshot(row.well, row.within_s)
    pid, log_before = node.agent.pid, len(node.agent.log())
    row.broken(node)
    try:
        if row.starts:
            pod = f"runs in {took_to_start(nodes, node, BUDGET_S):.1f} s"
        else:
            held = nodes.pod(node)
            node.kubelet.wait_for(lambda: True)
            pod = "waits"
        if row.reason is not None:
            node.agent.wait_snapshot(row.reason, row.within_s)
            pod += ", said"
        else:
            assert node.agent.snapshot()["gpus"]
        if not row.starts:
            assert not held.apps[0].instances, "a row that does not start must not"
    finally:
        begun_s = time.monotonic()
        row.mended(node)
    node.agent.wait_snapshot(row.well, row.within_s)
    back_s = time.monotonic() - begun_s
    if not row.starts:
        node.kubelet.wait_for(lambda: held.apps[0].running or held.finished, row.within_s)
        node.kubelet.delete(held)
        node.kubelet.wait_for(lambda: held.gone)
    took_to_start(nodes, node, BUDGET_S)
    assert node.agent.pid == pid or row.broken is state_lies, "it recovered by being started again"
    new = node.agent.log()[log_before:]
    assert "Traceback" not in new, new[new.index("Traceback") - 300 :][:3000]
    return pod, back_s


PLAYED = {key: row for key, row in ROWS.items() if isinstance(row, Row)}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


@pytest.mark.parametrize(("party", "mode"), PLAYED, ids=[f"{p} {m}" for p, m in PLAYED])
def test_pods_start_the_reason_is_said_and_recovery_is_unaided(nodes: Nodes, party: str, mode: str) -> None:
    play(nodes, PLAYED[party, mode])


def test_every_combination_is_played_or_says_why_not() -> None:
    parties = list(dict.fromkeys(party for party, _ in ROWS))
    assert len(parties) == 9
    for party in parties:
        for mode in MODES[:-1]:
            assert (party, mode) in ROWS, (party, mode)
    assert all(len(why) > 10 for why in ROWS.values() if isinstance(why, str))


def matrix() -> str:
    """The table in Markdown. "comes back": how long after the party was mended all was well again."""
    made = Nodes()
    cells: dict[tuple[str, str], str] = {}
    back: dict[str, list[float]] = {}
    notes: list[str] = []
    try:
        for (party, mode), row in ROWS.items():
            if isinstance(row, str):
                notes.append(f"{party}, {mode}: {row}.")
                cells[party, mode] = f"[{len(notes)}]"
                continue
            try:
                pod, back_s = play(made, row)
                cells[party, mode] = pod
                back.setdefault(party, []).append(back_s)
            except (AssertionError, TimeoutError) as e:
                cells[party, mode] = f"FAILED: {str(e)[:80]}"
            print(party, mode, cells[party, mode], file=sys.stderr, flush=True)
    finally:
        made.close()
    modes = list(dict.fromkeys(mode for _, mode in ROWS))
    lines = ["| party | " + " | ".join(modes) + " | comes back |", "|---" * (len(modes) + 2) + "|"]
    for party in dict.fromkeys(party for party, _ in ROWS):
        times = back.get(party, [])
        well = f"well after {max(times):.1f} s at most" if times else ""
        lines.append(f"| {party} | " + " | ".join(cells.get((party, m), "") for m in modes) + f" | {well} |")
    return "\n".join([*lines, "", *(f"{n}. {note}" for n, note in enumerate(notes, 1))])


if __name__ == "__main__":
    print(matrix())
