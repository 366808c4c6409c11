"""Public bug reports turned into inputs, against the whole agent: each case and what must be seen then.

The parts have tests of their own for most of them (grep for the case's letter and number); here the real
process runs among its surroundings, and what counts is what the kubelet, containers and operators see.
"""

from __future__ import annotations

import json
import os
import random
import re
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes.agent import CHECKOUT
from tests.fakes.jetson import BOARDS, JetsonTree
from tests.fakes.kubelet import FAST, ContainerSpec, Pod
from tests.fakes.kubelet.hosttree import STYLES
from tests.fakes.nvml import driver, host
from tests.fakes.whole import CORES, IMAGE_ENV, MEMORY, WholeNode, closed_port, container, process_size

Start = Callable[..., WholeNode]


def reasons(snapshot: dict[str, Any]) -> str:
    return " | ".join(snapshot["reasons"])


# -- D: what the GPUs do ------------------------------------------------------------------------------


def test_d1_wsl2_has_one_gpu_and_names_no_node_that_is_absent(start: Start) -> None:
    def wsl(node: WholeNode) -> None:
        node.gpus = [node.nvml.add("rtx-3070", minor=None)]
        host.wsl_host(node.root)
        (node.root / "usr/lib/wsl/lib").mkdir(parents=True)

    node = start(prepare=wsl).ready()
    pod = node.share("a", 1000)
    assert node.gpu_of(pod) == node.gpus[0]
    assert "/dev/dxg" in pod.apps[0].device_nodes
    assert all((node.root / n.lstrip("/")).exists() for n in pod.apps[0].device_nodes)


def test_d2_a_driver_upgraded_under_the_agent_is_said_with_both_versions_and_heals(start: Start) -> None:
    """All units Unhealthy but listed; a container that restarts meanwhile waits with that reason."""
    node = start("l4", "l4").ready()
    listed = node.kubelet.capacity[MEMORY]
    pod = node.share("a", 1000)
    node.env(pod)
    node.nvml.driver_version = "550.107.02"
    node.nvml.all_calls(driver.LIB_RM_VERSION_MISMATCH)
    host.kernel_module(node.root, "550.90.07")
    node.kubelet.wait_for(lambda: node.kubelet.allocatable[MEMORY] == 0)
    assert node.kubelet.capacity[MEMORY] == listed
    condition = node.wait_condition("DriverMismatch", node.gpus[0])
    assert "550.90.07" in condition["message"]
    assert "550.107.02" in condition["message"]
    node.kubelet.exit(pod, "app", 139)
    waiting = node.agent.wait_snapshot(lambda s: s["waiting"])["waiting"][0]
    assert "550.90.07" in waiting["reason"]
    node.nvml.all_calls(None)
    host.kernel_module(node.root, "550.107.02")
    node.kubelet.wait_for(lambda: node.kubelet.allocatable[MEMORY] == listed, 15)
    node.kubelet.wait_for(lambda: pod.apps[0].running)
    assert node.agent.running


def test_d3_one_lost_gpu_of_two_disturbs_no_other_and_is_not_called_by_allocations(start: Start) -> None:
    node = start("rtx-4000-ada", "rtx-4000-ada", broker=True).ready()
    good, dead = node.gpus
    before = node.gpu(good)["gpu"]
    half = node.kubelet.allocatable[MEMORY] // 2
    node.nvml.lose(dead)
    node.kubelet.wait_for(lambda: node.kubelet.allocatable[MEMORY] == half)
    alert = node.observer.wait_payload(f"alert/lost-{dead.lower()}")
    assert "0000:66:00.0" in json.dumps(alert)
    # No poll comes in between from now on: whatever is called is called for the pods.
    node.config["gpus"]["pollSeconds"] = 300
    node.config["isolation"]["watchdog"]["pollSeconds"] = 60
    node.agent.write_config(node.config)
    node.agent.call("reload")
    node.agent.wait_snapshot(lambda s: s["kubeletConnected"])
    node.share("settle", 100)
    mark = node.nvml.mark()
    pods = [node.share(f"p{i}", 1000) for i in range(4)]
    assert {node.gpu_of(pod) for pod in pods} == {good}
    assert [c for c in node.nvml.calls(mark, gpu=dead) if c.mark != "lookup"] == []
    assert node.gpu(good)["gpu"] == before
    calls = [c for c in node.kubelet.calls if c.method != "PreStartContainer"]
    assert max((c.end_s or 0) - c.begin_s for c in calls) < 1.0
    assert len([s for s in node.observer.on(f"alert/lost-{dead.lower()}") if s.data]) == 1


JETSONS = {
    "a: NVML lists a GPU that answers nothing": ("orin-nano-jp6", "service", "orin", None),
    "b: container view of a Thor": ("thor-jp7", "container", None, None),
    "c: a revision in no table": ("orin-nx-jp6", "service", None, "R36 (release), REVISION: 9.9"),
    "d: AGX Orin without NVML": ("agx-orin-jp72", "service", None, None),
}


@pytest.mark.parametrize(("board", "view", "nvml", "release"), JETSONS.values(), ids=JETSONS.keys())
def test_d4_a_jetson_is_one_gpu_with_memory_and_a_load(
    start: Start, board: str, view: Any, nvml: str | None, release: str | None
) -> None:
    trees: list[JetsonTree] = []

    def jetson(node: WholeNode) -> None:
        late = board == "orin-nano-jp6"
        trees.append(JetsonTree(node.root, BOARDS[board], view, gpu_appears=not late))
        if nvml is not None:
            node.nvml.add(nvml)
        if release is not None:
            trees[0].put("etc/nv_tegra_release", f"# {release}, GCID: 1, BOARD: generic, EABI: aarch64\n")

    config = {} if nvml else {"gpus": {"nvml": {"libraryPath": "/nowhere/libnvidia-ml.so.1"}}}
    node = start(prepare=jetson, config=config).ready()
    (gpu,) = node.agent.snapshot()["gpus"]
    assert (gpu["gpu"]["source"], gpu["gpu"]["kind"]) == ("tegra", "integrated")
    assert 0 < gpu["usableMiB"] == node.kubelet.allocatable[MEMORY] < gpu["gpu"]["memoryTotalMiB"]
    if board != "thor-jp7":  # its driver has no load file
        trees[0].gpu_appears()
        node.agent.wait_snapshot(lambda s: s["gpus"][0]["reading"].get("utilPct") == 43.7)
    pod = node.share("a", 500)
    assert node.env(pod)["EDGEAGENT_MEMORY_MIB"] == "500"
    assert all((node.root / n.lstrip("/")).exists() for n in pod.apps[0].device_nodes)


# -- K: what the kubelet does -------------------------------------------------------------------------


def test_k1_a_kubelet_that_restarts_again_and_again_is_registered_with_once_each_time(start: Start) -> None:
    """Directory wiped, socket back at once but refusing; our own socket deleted; nothing leaks."""
    node = start("l4").ready()
    kubelet, rng = node.kubelet, random.Random(1)

    def registered(before: int) -> bool:
        return len(kubelet.registrations) == before + 3 and kubelet.allocatable.get(MEMORY) == 22544

    before = process_size(node.agent.pid)
    for round_ in range(12):
        count = len(kubelet.registrations)
        if round_ % 4 == 3:
            for path in kubelet.directory.glob("edgeagent-*.sock"):
                path.unlink()
        else:
            kubelet.stop()
            for path in kubelet.directory.iterdir():
                path.unlink()
            kubelet.start(refuse_s=rng.choice((0, 0.005, 0.2)))
        kubelet.wait_for(lambda count=count: registered(count), 5)  # type: ignore[misc]
    assert len(list(kubelet.directory.glob("edgeagent-*.sock"))) == 3
    node.agent.wait_snapshot(lambda s: s["kubeletConnected"])
    kubelet.wait_for(lambda: process_size(node.agent.pid)["fds"] <= before["fds"] + 4)
    assert process_size(node.agent.pid)["threads"] <= before["threads"] + 8  # workers made as needed


def test_k2_after_a_reboot_pods_find_their_ids_although_the_network_is_dead(start: Start) -> None:
    """NVML comes late, the broker is a black hole, DNS does not answer: the first list is complete."""
    fleet = {"enabled": True, "brokers": ["mqtt://broker.invalid:1883", "mqtt://192.0.2.1:1883"]}
    patient = FAST.but(readmit_s=5.0)  # the kubelet takes up its pods when the agent is there
    node = start("l4", "t4", config={"fleet": fleet}, kubelet={"timing": patient}).ready()
    pod = node.share("a", 4000, 20)
    node.env(pod)
    ids, total = node.kubelet.ids(pod, "app"), node.kubelet.allocatable[MEMORY]
    node.agent.kill()
    node.nvml.hang("nvmlInit_v2")
    seen = len(node.kubelet.updates)
    node.kubelet.reboot()
    node.agent.start()
    node.kubelet.wait_for(lambda: node.agent.log().count("edgeagent starts") == 2)
    assert node.kubelet.updates[seen:] == []
    node.nvml.release()
    node.kubelet.wait_for(lambda: len(pod.apps[0].instances) == 2, 15)
    first = {u.resource: u for u in reversed(node.kubelet.updates[seen:])}
    assert (first[MEMORY].healthy, first[MEMORY].unhealthy) == (total, 0)
    assert node.kubelet.ids(pod, "app") == ids
    unit = (CHECKOUT / "systemd/edgeagent.service").read_text().splitlines()
    assert not [line for line in unit if "network-online" in line and not line.startswith("#")]


def test_k3_a_list_the_kubelet_could_not_swallow_is_refused_with_the_unit_that_fits(start: Start) -> None:
    node = start("a100-80", "a100-80", "a100-80", "a100-80")
    node.agent.wait_ready()
    snapshot = node.agent.wait_snapshot(lambda s: s["resources"])
    problem = next(r["problem"] for r in snapshot["resources"] if r["name"] == MEMORY)
    assert problem in snapshot["reasons"]
    fits = re.search(r"memoryUnitMiB to (\d+)", problem)
    assert fits is not None, problem
    assert node.kubelet.registrations == []
    unit = int(fits[1])
    coarse = f"{MEMORY}-{unit}mi"
    node.agent.stop()
    node.agent.write_config({**node.config, "sharing": {"memoryUnitMiB": unit}})
    node.agent.start().wait_ready()
    node.kubelet.wait_for(lambda: node.kubelet.allocatable.get(coarse) == 4 * ((81920 - 770) // unit))
    pod = node.pod("a", _raw("app", {coarse: 10}))
    assert node.env(pod)["EDGEAGENT_MEMORY_MIB"] == str(10 * unit)
    # Not under a running pod, and the same after every restart.
    node.agent.stop()
    node.agent.write_config({**node.config, "sharing": {"memoryUnitMiB": 512}})
    node.agent.start().wait_ready()
    node.kubelet.wait_for(lambda: node.kubelet.allocatable.get(coarse))
    assert node.agent.snapshot()["memoryUnitMiB"] == unit
    assert "default/a" in reasons(node.agent.snapshot())


# -- S: sums and sharing ------------------------------------------------------------------------------


def test_s1_supply_floors_demand_ceils_and_the_sum_never_exceeds_what_is_there(start: Start) -> None:
    def cards(node: WholeNode) -> None:
        for total in (23034, 15360, 16376):
            node.gpus.append(node.nvml.add("rtx-3070", memory_total_mib=total, memory_reserved_mib=300))
        host.nvidia_host(node.root, node.nvml)

    config = {"sharing": {"memoryUnitMiB": 100, "reserveMiB": 500}}
    node = start(prepare=cards, config=config).ready(f"{MEMORY}-100mi")
    units = [(total - 800) // 100 for total in (23034, 15360, 16376)]
    assert node.kubelet.allocatable[f"{MEMORY}-100mi"] == sum(units) == 222 + 145 + 155
    pods = [node.pod(f"p{n}", _raw("app", {f"{MEMORY}-100mi": n})) for n in sorted(units, reverse=True)]
    assert [node.env(p)["EDGEAGENT_MEMORY_MIB"] for p in pods] == ["22200", "15500", "14500"]
    for gpu in node.agent.snapshot()["gpus"]:
        assert gpu["promisedMiB"] <= gpu["usableMiB"] <= gpu["gpu"]["memoryTotalMiB"] - 800
        assert gpu["freeMiB"] == 0


def hostile(resource: str, available: set[str], needed: int) -> list[str]:
    """IDs from both ends: "half of one card's, half of the other's"."""
    ordered = sorted(available)
    return [*ordered[: needed // 2], *ordered[len(ordered) - (needed - needed // 2) :]]


def test_s2_a_container_is_on_one_card_whatever_ids_the_kubelet_picks(start: Start) -> None:
    """Rows a to e: 10 free on one and 20 on the other, more than any card, in pieces, a hostile choice."""

    def cards(node: WholeNode) -> None:
        node.gpus = [node.nvml.add("rtx-3070", memory_reserved_mib=0) for _ in range(2)]
        host.nvidia_host(node.root, node.nvml)

    resource = f"{MEMORY}-256mi"
    config = {"sharing": {"memoryUnitMiB": 256}}
    node = start(prepare=cards, config=config, kubelet={"choose": hostile}).ready(resource)
    assert node.kubelet.allocatable[resource] == 64
    twenty_two = node.pod("holds-22", _raw("app", {resource: 22, CORES: 10}))
    full = node.gpu_of(twenty_two)
    twelve = node.pod("holds-12", _raw("app", {resource: 12, CORES: 10}))
    other = node.gpu_of(twelve)
    assert full != other
    sixteen = node.pod("a-16", _raw("app", {resource: 16, CORES: 20}))
    assert node.gpu_of(sixteen) == other
    node.gone(sixteen)
    too_large = node.pod("b-28", _raw("app", {resource: 28}))
    waiting = node.agent.wait_snapshot(lambda s: s["waiting"])["waiting"][0]
    assert "largest free block: 5120 MiB" in waiting["reason"]
    node.gone(too_large)
    never = node.pod("b-40", _raw("app", {resource: 30}), _raw("second", {}))
    node.kubelet.delete(never)
    # c: the sum is free, no card has the block; of two that race for the last block one waits.
    race = [node.pod(f"race-{n}", _raw("app", {resource: 15})) for n in "xy"]
    node.kubelet.wait_for(lambda: any(p.apps[0].running for p in race))
    node.agent.wait_snapshot(lambda s: [w for w in s["waiting"] if w["pod"].startswith("race")])
    assert sum(p.apps[0].running for p in race) == 1
    node.gone(twenty_two)
    node.kubelet.wait_for(lambda: all(p.apps[0].running for p in race))
    for gpu in node.agent.snapshot()["gpus"]:
        assert gpu["promisedMiB"] <= gpu["usableMiB"]


def test_s2_what_no_card_can_hold_is_refused_at_once_with_the_numbers(start: Start) -> None:
    node = start("rtx-3070", "rtx-3070").ready()
    pod = node.share("large", 9000)
    waiting = node.agent.wait_snapshot(lambda s: s["waiting"])["waiting"][0]
    assert waiting["permanent"]
    assert "7978" in waiting["reason"]
    node.kubelet.wait_for(lambda: pod.waiting)
    assert pod.phase == "Pending"


def test_s3_each_container_has_its_own_limit_and_restarts_change_nothing(start: Start) -> None:
    """Sidecar 2, init 6, init without a GPU, apps 3 and 4: the pod's total is 9."""
    node = start("l4").ready()
    unit = 1000
    pod = Pod(
        "s3",
        [container("app1", 3 * unit), container("app2", 4 * unit)],
        init=[
            container("side", 2 * unit, sidecar=True),
            container("first", 6 * unit, run_s=0.0),
            _raw("plain", {}, run_s=0.0),
        ],
    )
    node.kubelet.cluster.create(pod)
    node.kubelet.wait_for(lambda: pod.running, 15)
    limits = {n: c.env.get("EDGEAGENT_MEMORY_MIB") for n, c in pod.containers.items()}
    assert limits == {"side": "2000", "first": "6000", "plain": None, "app1": "3000", "app2": "4000"}
    assert pod.containers["plain"].device_nodes == []
    assert pod.requests()[MEMORY] == 9 * unit

    def books() -> tuple[Any, ...]:
        snapshot = node.agent.wait_snapshot(lambda s: s["kubeletConnected"])
        held = sorted((c["container"], c["memoryMiB"]) for c in snapshot["containers"])
        return held, snapshot["gpus"][0]["promisedMiB"], sum(c["leftoverMiB"] for c in snapshot["containers"])

    before = books()
    assert before[0] == [("app1", 3000), ("app2", 4000), ("side", 2000)]
    assert before[1] == 9 * unit
    node.kubelet.restart()
    node.kubelet.wait_for(lambda: node.kubelet.allocatable.get(MEMORY) == 22544)
    assert books() == before
    node.agent.stop()
    node.agent.start().wait_ready()
    assert books()[0] == before[0]
    node.gone(pod)
    assert node.gpu(node.gpus[0])["freeMiB"] == 22544


DEMANDS = {
    "a: memory only": ({MEMORY: 10}, ("10", None), 22534),
    "b: cores only": ({CORES: 30}, None, 22544),
    "c: both": ({MEMORY: 10, CORES: 30}, ("10", "30"), 22534),
    "d: 100 cores, 1 MiB": ({MEMORY: 1, CORES: 100}, ("1", "100"), 0),
}


@pytest.mark.parametrize(("limits", "given", "free"), DEMANDS.values(), ids=DEMANDS.keys())
def test_s4_one_rule_a_row_in_the_container_status_and_for_the_next_pod(
    start: Start, limits: dict[str, str | int], given: tuple[str, str | None] | None, free: int
) -> None:
    node = start("l4").ready()
    pod = node.pod("a", _raw("app", limits))
    if given is None:
        waiting = node.agent.wait_snapshot(lambda s: s["waiting"])["waiting"][0]
        assert waiting["permanent"]
        assert MEMORY in waiting["reason"]
    else:
        env = node.env(pod)
        assert (env["EDGEAGENT_MEMORY_MIB"], env.get("EDGEAGENT_CORES_PCT")) == given
        (shown,) = node.agent.snapshot()["containers"]
        assert str(shown["memoryMiB"]) == given[0]
        assert shown.get("coresPct") == (int(given[1]) if given[1] else None)
    gpu = node.gpu(node.gpus[0])
    assert gpu["freeMiB"] == (free or 22543)
    second = node.pod(
        "b", _raw("app", {MEMORY: gpu["freeMiB"], **({} if limits.get(CORES) == 100 else {CORES: 1})})
    )
    assert node.env(second)["EDGEAGENT_MEMORY_MIB"] == str(gpu["freeMiB"])


# -- E: limits in force, use, and who uses what ---------------------------------------------------------


def test_e1_a_limit_that_is_not_in_force_is_never_called_enforced(start: Start) -> None:
    """Limit 512 MiB, use 1500: not mapped, an empty library, an image's own preload file, mapped but
    not in the account. Each has its reason and one over-limit event; a level is claimed on proof only."""
    node = start("l4", broker=True).ready()
    pods = {name: node.share(name, 512) for name in ("unmapped", "empty", "own-preload", "no-account")}
    pids: dict[str, int] = {}
    library = "/usr/local/lib/edgeagent/limiter/libedgeagent-limiter.so"
    for name, pod in pods.items():
        node.env(pod)
        instance = pod.apps[0].instance
        pids[name] = node.kubelet.runtime.spawn(instance, "python3", maps=["/lib/x86_64-linux-gnu/libc.so.6"])
        root = node.root / f"proc/{pids[name]}/root"
        preload = root / "etc/ld.so.preload"
        preload.parent.mkdir(parents=True, exist_ok=True)
        preload.write_text("/mine.so\n" if name == "own-preload" else f"{library}\n")
        seen = root / library.lstrip("/")
        seen.parent.mkdir(parents=True, exist_ok=True)
        seen.write_bytes(b"" if name == "empty" else b"\x7fELF rest")
        if name == "no-account":
            inode = next((node.root / "var/lib/edgeagent/lib").glob("*.so")).stat().st_ino
            maps = node.root / f"proc/{pids[name]}/maps"
            maps.write_text(f"7f0000000000-7f0000001000 r-xp 00000000 08:01 {inode} {library}\n")
    node.nvml.processes(node.gpus[0], compute=[(pid, 1500) for pid in pids.values()])
    node.nvml.set(node.gpus[0], memory_used_mib=6100)

    def told(s: dict[str, Any]) -> bool:
        return len([c for c in s["containers"] if c["overLimit"]]) == 4

    snapshot = node.agent.wait_snapshot(told)
    levels = {c["pod"]: c["levels"]["memory"] for c in snapshot["containers"]}
    assert {pod: level["level"] for pod, level in levels.items()} == dict.fromkeys(pods, "reactive")
    assert {pod: level["reason"] for pod, level in levels.items()} == {
        "unmapped": "not_preloaded",
        "empty": "empty_library",
        "own-preload": "opted_out",
        "no-account": "state_denied",
    }
    node.observer.wait(lambda seen: len([s for s in seen if s.topic.endswith("/evt/overlimit")]) >= 4)
    events = node.events("overlimit")
    assert sorted(e["pod"] for e in events) == sorted(pods)
    assert {(e["facts"]["limitMiB"], e["facts"]["usedMiB"]) for e in events} == {(512, 1500)}
    assert all(pod.apps[0].running for pod in pods.values()), "the policy is to report"


def test_e2_use_is_one_number_a_pod_and_parts_sum_up(start: Start) -> None:
    """A PID in both lists; a PID that has vanished; the card's own number below the last one."""
    node = start("rtx-3070").ready()
    pod = node.share("a", 2000)
    node.env(pod)
    gpu, pid = node.gpus[0], pod.apps[0].instance.pid
    node.nvml.processes(gpu, compute=[(pid, 1660), (4_999_999, 200)], graphics=[(pid, 1660)])
    node.nvml.set(gpu, memory_used_mib=1870)
    snapshot = node.agent.wait_snapshot(lambda s: s["containers"][0].get("usedMiB") == 1660)
    state = node.agent.wait_snapshot(lambda s: node.gpu(gpu, s).get("unattributedMiB"))
    parts = snapshot["containers"][0]["usedMiB"] + node.gpu(gpu, state)["unattributedMiB"]
    assert parts == pytest.approx(1870, rel=0.01)
    node.nvml.set(gpu, memory_used_mib=100)
    snapshot = node.agent.wait_snapshot(lambda s: node.gpu(gpu, s)["reading"]["memoryUsedMiB"] == 100)
    assert snapshot["containers"][0]["usedMiB"] == 1660
    assert node.gpu(gpu, snapshot)["unattributedMiB"] >= 0


def test_e3_what_the_host_uses_is_named_not_promised_and_never_killed(start: Start) -> None:
    node = start("rtx-3070", broker=True).ready()
    gpu = node.gpus[0]
    for pid, name in ((5_900_001, "Xorg"), (5_900_002, "gnome-shell"), (5_900_003, "python")):
        node.kubelet.runtime.host.make_process(pid, cgroup="/user.slice/user-1000.slice", comm=name)
    pod = node.share("a", 4096)
    node.env(pod)
    node.nvml.processes(gpu, graphics=[(5_900_001, 450), (5_900_002, 210)], compute=[(5_900_003, 2000)])
    node.nvml.set(gpu, memory_used_mib=2660)
    state = node.gpu(
        gpu, node.agent.wait_snapshot(lambda s: node.gpu(gpu, s)["freeMiB"] <= 8192 - 214 - 4096 - 2660)
    )
    assert {p["name"] for p in state["hostUse"]["processes"]} == {"Xorg", "gnome-shell", "python"}
    node.nvml.processes(gpu, compute=[(5_900_003, 6000)])
    node.nvml.set(gpu, memory_used_mib=6000)
    condition = node.wait_condition("HostOvercommit", gpu)
    assert condition["facts"]["hostUsedMiB"] == 6000
    node.observer.wait_payload(f"alert/hostovercommit-{gpu.lower()}")
    assert pod.apps[0].running
    # The running pod's units stay; nothing new is let in while the host has what was promised.
    assert node.agent.snapshot()["containers"][0]["memoryMiB"] == 4096
    late = node.share("b", 500)
    node.kubelet.wait_for(lambda: late.message or late.waiting)  # the scheduler or the gate says so
    assert not late.apps[0].instances
    node.nvml.processes(gpu)
    node.nvml.set(gpu, memory_used_mib=0)
    node.env(late, timeout_s=15)


# -- M: messages ----------------------------------------------------------------------------------------


def test_m1_the_retained_status_tells_the_truth_whatever_becomes_of_broker_and_agent(start: Start) -> None:
    """Broker restarted without persistence; link cut; agent killed, started again, stopped."""
    node = start("l4", broker=True).ready()
    topic = "gpufleet/v1/lab/edge-1/status"

    def status_is(word: str) -> None:
        node.observer.wait(
            lambda seen: [s for s in seen if s.topic == topic][-1:] and _last(seen, topic) == word
        )

    status_is("ready")
    sessions = {json.loads(node.observer.on(topic)[-1].data)["sess"]}
    before = node.observer.subscriptions
    node.broker.restart()
    node.observer.wait_subscribed_again(before)
    node.observer.clear()
    status_is("ready")
    node.observer.clear()
    node.proxy.cut()
    status_is("ready")
    node.agent.kill()
    status_is("lost")
    node.agent.start().wait_ready()
    status_is("ready")
    sessions.add(json.loads(node.observer.on(topic)[-1].data)["sess"])
    assert len(sessions) == 2, "a will of the run before can be told apart"
    assert node.agent.stop(5.0) == 0
    status_is("offline")


def test_m2_what_is_no_number_is_left_out_and_a_zone_that_blocks_holds_nothing_up(start: Start) -> None:
    """Zones of a Jetson: 43000, -256000, one whose read blocks for ever; every payload is strict JSON."""

    def jetson(node: WholeNode) -> None:
        tree = JetsonTree(node.root, BOARDS["orin-nano-jp6"])
        kinds = list(BOARDS["orin-nano-jp6"].zones_milli_c)
        tree.set_zone(kinds[0], -256000)
        blocked = tree.path(f"{tree.zone(kinds[1])}/temp")
        blocked.unlink()
        os.mkfifo(blocked)

    node = start(prepare=jetson, broker=True).ready()
    telemetry = node.observer.wait_payload("/tele/m", lambda m: m["samples"][0]["gpus"])
    assert telemetry["samples"]
    for seen in node.observer.on(""):
        if seen.data:
            json.loads(seen.data, parse_constant=pytest.fail)
    reading = node.agent.snapshot()["gpus"][0]["reading"]
    assert -256 not in reading["temperaturesC"].values()
    assert reading["temperaturesC"], "the zones that answer are there"
    pod = node.share("a", 500)
    node.env(pod)
    polls = reading["takenMonoS"]
    node.agent.wait_snapshot(lambda s: s["gpus"][0]["reading"]["takenMonoS"] > polls)
    assert node.agent.stop(6.0) == 0


def test_m3_an_outage_loses_no_event_and_status_is_the_newest(start: Start) -> None:
    """The broker is away while pods come and go and a GPU falls ill: afterwards every event arrives."""
    node = start("l4", broker=True).ready()
    node.observer.wait(lambda seen: [s for s in seen if s.topic.endswith("/status")])
    node.proxy.refuse(True)
    node.proxy.cut()
    node.agent.wait_snapshot(lambda s: not s["uplink"]["connected"])
    names = [f"p{i}" for i in range(5)]
    for name in names:
        pod = node.share(name, 1000)
        node.env(pod)
        node.gone(pod)
    slow = [c for c in node.kubelet.calls if c.method == "Allocate" and (c.end_s or 0) - c.begin_s > 1.0]
    assert slow == []
    node.nvml.xid(node.gpus[0], 79)
    node.wait_condition("XidFatal")
    node.nvml.lose(node.gpus[0])
    node.wait_condition("Lost")
    node.nvml.recover(node.gpus[0])
    node.wait_cleared("Lost")
    node.proxy.refuse(False)
    node.observer.wait(
        lambda seen: len([s for s in seen if s.topic.endswith("/evt/alloc") and b'"bound"' in s.data]) >= 5,
        30,
    )
    bound = [e for e in node.events("alloc") if e["type"] == "bound"]
    assert sorted(e["pod"] for e in bound) == names
    assert len({e["id"] for e in bound}) == len(bound)
    node.observer.wait_payload("/evt/xid", lambda e: e["facts"]["xid"] == 79)
    node.observer.wait_payload(
        "/evt/agent", lambda e: (e["type"], e["facts"].get("condition")) == ("condition_cleared", "Lost")
    )
    lost = [e["type"] for e in node.events("agent") if e["facts"].get("condition") == "Lost"]
    assert lost == ["condition_raised", "condition_cleared"], "no alert is left of it"


# -- I: who is who ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_i3_pods_are_known_by_their_cgroups_in_every_layout(start: Start, style: str) -> None:
    node = start("l4", kubelet={"cgroups": style}).ready()
    pod = node.share("a", 1000)
    node.env(pod)
    node.nvml.processes(node.gpus[0], compute=[(pod.apps[0].instance.pid, 700)])
    snapshot = node.agent.wait_snapshot(
        lambda s: s["containers"] and s["containers"][0].get("usedMiB") == 700
    )
    assert (snapshot["containers"][0]["namespace"], snapshot["containers"][0]["pod"]) == ("default", "a")
    node.gone(pod)


# -- X: the rest ------------------------------------------------------------------------------------------


def test_x1_a_card_that_goes_and_comes_back_has_its_identity_and_its_pod(start: Start) -> None:
    node = start("l4").ready()
    pod = node.share("a", 1000)
    uuid, total = node.gpu_of(pod), node.kubelet.allocatable[MEMORY]
    node.nvml.remove(uuid)
    host.nvidia_host(node.root, node.nvml)
    node.kubelet.wait_for(lambda: node.kubelet.allocatable[MEMORY] == 0)
    node.agent.wait_snapshot(
        lambda s: not node.gpu(uuid, s)["present"] or node.gpu(uuid, s)["health"] == "sick"
    )
    node.kubelet.exit(pod, "app", 139)
    node.agent.wait_snapshot(lambda s: s["waiting"])
    node.nvml.insert(uuid)
    host.nvidia_host(node.root, node.nvml)
    node.kubelet.wait_for(lambda: node.kubelet.allocatable[MEMORY] == total, 15)
    assert node.gpu_of(pod) == uuid
    assert [c for c in node.nvml.calls() if c.mark == "stale"] == []


def test_x2_a_call_that_never_returns_hurts_its_gpu_alone(start: Start) -> None:
    port = closed_port()
    metrics = {"metrics": {"enabled": True, "listen": f"127.0.0.1:{port}"}}
    node = start("l4", "l4", broker=True, config=metrics).ready()
    good, stuck = node.gpus
    for symbol in ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"):
        node.nvml.hang(symbol, stuck)
    node.wait_condition("DriverUnresponsive", stuck)
    node.observer.wait_payload(f"alert/driverunresponsive-{stuck.lower()}")
    assert node.gpu_of(node.share("a", 1000)) == good
    assert node.agent.snapshot()["uplink"]["connected"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
        assert answer.read() == b"the kubelet path answers, GPUs are read\n"
    node.nvml.release()
    node.wait_cleared("DriverUnresponsive")


def test_x3_an_agent_that_lost_its_device_nodes_starts_again_once_and_blames_no_gpu(start: Start) -> None:
    """daemon-reload in a DaemonSet: every call answers 999 in here while the driver on the host is fine."""
    node = start("l4").ready()
    pod = node.share("a", 1000)
    node.env(pod)
    node.nvml.all_calls(driver.UNKNOWN)
    assert node.agent.wait_exit(15) == 75
    assert "lost" in node.agent.log().rpartition("the agent has to be restarted")[2][:300]
    assert "condition raised type=Lost " not in node.agent.log()
    # Whoever starts it again too early must not see it end over and over.
    node.agent.start().wait_ready()
    node.agent.wait_snapshot(lambda s: s["reasons"])
    assert node.agent.running
    node.nvml.all_calls(None)
    node.kubelet.wait_for(lambda: node.kubelet.allocatable.get(MEMORY) == 22544, 15)
    assert node.gpu(node.gpus[0])["promisedMiB"] == 1000


def test_x5_a_death_that_only_the_kernel_log_tells_is_told_once_over_restarts(start: Start) -> None:
    lines = [
        "NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus",
        "NVRM: The NVIDIA GPU 0000:65:00.0",
        "NVRM: (PCI ID: 10de:26b5) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    ]
    burst = ["NVRM: Xid (PCI:0000:65:00): 45, pid=77, name=x, Ch 0000000a"] * 60
    log = "".join(f"3,{n},{1_000_000 + n},-;{line}\n" for n, line in enumerate([*lines, *burst]))

    def kernel_log(node: WholeNode) -> None:
        host.write(node.root, "/dev/kmsg", "")
        host.write(node.root, "/proc/uptime", "100000.00 1.00\n")

    node = start("l4", prepare=kernel_log, broker=True).ready()
    pod = node.share("a", 1000)
    node.env(pod)
    node.nvml.error("nvmlDeviceGetUUID", driver.GPU_IS_LOST)
    with (node.root / "dev/kmsg").open("a") as file:
        file.write(log)
    node.observer.wait_payload("/evt/xid", lambda e: e["facts"]["xid"] == 79)
    node.observer.wait_payload("/evt/xid", lambda e: e["facts"]["xid"] == 45)
    node.agent.wait_snapshot(lambda s: s["uplink"]["queued"] == 0)
    node.agent.stop()
    node.agent.start().wait_ready()
    with (node.root / "dev/kmsg").open("a") as file:
        file.write("3,900,900000000,-;NVRM: Xid (PCI:0000:65:00): 13, pid=9, name=late, Graphics\n")
        cgroup = f"/kubepods/burstable/pod{pod.uid}/{'c' * 64}"
        for number, path in enumerate(("/system.slice/sshd.service", cgroup)):
            file.write(
                f"6,{901 + number},900000001,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,"
                f"mems_allowed=0,global_oom,task_memcg={path},task=python3,pid=4100,uid=0\n"
            )
    node.observer.wait_payload("/evt/xid", lambda e: e["facts"]["xid"] == 13)
    oom = node.observer.wait_payload("/evt/oom")
    assert (oom["namespace"], oom["pod"], oom["container"]) == ("default", "a", "app")
    assert len(node.events("oom")) == 1, "sshd has no share"
    told = [e["facts"]["xid"] for e in node.events("xid")]
    assert (told.count(79), told.count(45)) == (1, 1), told
    assert {e["gpu"] for e in node.events("xid")} == {node.gpus[0]}


def test_x8_a_share_too_small_for_a_context_is_refused_with_the_least_that_is_granted(start: Start) -> None:
    node = start("l4", config={"sharing": {"minShareMiB": 346}}).ready()
    pod = node.share("a", 345)
    waiting = node.agent.wait_snapshot(lambda s: s["waiting"])["waiting"][0]
    assert "346" in waiting["reason"]
    assert waiting["permanent"]
    node.kubelet.wait_for(lambda: pod.waiting)
    assert node.env(node.share("b", 346))["EDGEAGENT_MEMORY_MIB"] == "346"


def _raw(name: str, limits: dict[str, str | int], run_s: float | None = None) -> ContainerSpec:
    return ContainerSpec(name, limits, image_env=IMAGE_ENV, run_s=run_s)


def _last(seen: list[Any], topic: str) -> str:
    data = [s for s in seen if s.topic == topic][-1].data
    return str(json.loads(data)["state"]) if data else ""
