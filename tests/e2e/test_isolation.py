"""Limits on the whole agent: put in place before containers run, proved or not claimed, lost, acted upon.

Field cases E1 and E3 as kinds: what is configured but not in force, and what uses memory and is no pod.
"""

from __future__ import annotations

import io
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from edgeagent.cli.status import render
from edgeagent.cli.top import render as render_top
from edgeagent.isolation.limiter import files
from tests.fakes.kubelet import Pod
from tests.fakes.mps import FakeMps
from tests.fakes.nvml.driver import MIB
from tests.fakes.whole import CORES, MEMORY, WholeNode, closed_port, container

LIBRARY = f"{files.CONTAINER_DIR}/{files.LIBRARY_NAME}"
LIBC = "/usr/lib/x86_64-linux-gnu/libc.so.6"
Start = Callable[..., WholeNode]


def level(snapshot: dict[str, Any], pod: str, axis: str = "memory") -> dict[str, Any]:
    found = next((c["levels"][axis] for c in snapshot["containers"] if c.get("pod") == pod), {})
    assert isinstance(found, dict)
    return found


def leaf_of(node: WholeNode, pod: Pod) -> str:
    return str(node.root / f"sys/fs/cgroup{pod.apps[0].instance.cgroup}")


def hard_limits(node: WholeNode) -> dict[str, int]:
    """Cgroup directory that still stands -> hard limit in MiB."""
    return {c: hard // MIB for (_, c), (_, hard) in node.nvml.limits().items() if Path(c).exists()}


# ---- nvml-cgroup -----------------------------------------------------------------------------------


def test_the_drivers_limit_is_on_the_pod_before_its_container_runs_and_outlives_the_agent(
    start: Start,
) -> None:
    """Order, the container's own limit, a change by somebody, SIGKILL of the agent, the pod's end."""
    node = start("l4", prepare=lambda n: n.nvml.memory_limits_supported(), broker=True).ready()
    at_start: list[dict[str, int]] = []
    really_start = node.kubelet.runtime.start

    def seen_start(*args: Any, **more: Any) -> Any:
        at_start.append(hard_limits(node))
        return really_start(*args, **more)

    node.kubelet.runtime.start = seen_start  # type: ignore[method-assign]
    pod = node.pod("a", container("app", 2000), container("side", 500))
    node.env(pod, "app"), node.env(pod, "side")
    cgroup = str(node.root / f"sys/fs/cgroup{node.kubelet.runtime.pod_cgroup(pod)}")
    assert at_start[0][cgroup] in (2000, 500), "the first container finds its own share as the limit"
    assert at_start[1][cgroup] == 2500, "the second one the sum"

    def proved(s: dict[str, Any]) -> bool:
        return [c["levels"]["memory"]["level"] for c in s["containers"]] == ["hard", "hard"]

    node.agent.wait_snapshot(proved)
    node.agent.wait_snapshot(lambda s: sorted(hard_limits(node).values()) == [500, 2000, 2500])
    top, s = Console(width=200, record=True, file=io.StringIO()), node.agent.snapshot()
    top.print(render_top(s, s["takenMs"] / 1000))
    assert top.export_text().count("mem hard") == 2
    alloc = node.observer.wait_payload(
        "edge-1/alloc",
        lambda m: (
            [c["levels"]["memory"]["enforced"] for g in m["gpus"] for c in g["containers"]] == [True] * 2
        ),
    )
    assert alloc["gpus"][0]["containers"][0]["levels"]["memory"]["mechanism"] == "nvml-cgroup"

    leaf = str(node.root / f"sys/fs/cgroup{pod.containers['app'].instance.cgroup}")
    with (node.nvml.root / "limits").open("a") as f:  # somebody runs nvidia-smi memory-limits
        f.write(f"{node.gpus[0]} 0 {8000 * MIB} {leaf}\n")
    node.agent.wait_snapshot(lambda s: hard_limits(node)[leaf] == 2000)
    assert "somebody changed a limit" in node.agent.log()

    before = hard_limits(node)
    node.agent.kill()
    assert hard_limits(node) == before
    mark = node.nvml.mark()
    node.agent.start().wait_ready()
    node.agent.wait_snapshot(proved)
    assert len(node.nvml.calls(mark, "nvmlDeviceSetMemoryLimits_v1")) == 2, (
        "only the probe set and lifted its own"
    )
    assert hard_limits(node) == before
    node.gone(pod)
    assert hard_limits(node) == {}
    assert not node.events("agent"), "nothing was ever lost"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kubelet": {"cgroups": "systemd-v1"}}, "needs cgroup v2"),
        ({"prepare": lambda n: n.nvml.memory_limits_supported(False)}, "needs driver r615 or newer"),
    ],
    ids=["cgroup v1", "old driver"],
)
def test_a_named_mechanism_that_cannot_be_is_said_and_not_replaced_in_silence(
    start: Start, options: dict[str, Any], why: str
) -> None:
    prepare = options.pop("prepare", lambda n: n.nvml.memory_limits_supported())
    config = {"isolation": {"memory": "nvml-cgroup", "compute": "none"}}
    node = start("l4", config=config, prepare=prepare, **options).ready()
    node.env(node.share("a", 2000))
    s = node.agent.wait_snapshot(lambda s: level(s, "a"))
    assert (s["health"], node.gpu(node.gpus[0], s)["levels"]["memory"]["reason"]) == (
        "degraded",
        "probe_failed",
    )
    (reason,) = [r for r in s["reasons"] if "isolation.memory: nvml-cgroup cannot be used" in r]
    assert why in reason
    assert not level(s, "a")["enforced"]
    assert why in "\n".join(render(s, s["takenMs"] / 1000))


# ---- E1: configured and not in force -----------------------------------------------------------------


def uses(node: WholeNode, pod: Pod, *, seen: str, image_libc: str = LIBC) -> int:
    """A process of the pod's container that uses the GPU, with the limiter as `seen` in it."""
    instance = pod.apps[0].instance
    pid = node.kubelet.runtime.spawn(instance, "python3", maps=[image_libc])
    root = node.root / f"proc/{pid}/root"
    for path, content in (
        (root / "etc/ld.so.preload", f"{LIBRARY}\n".encode()),
        (root / LIBRARY.lstrip("/"), b"" if seen == "empty" else b"\x7fELF"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    if seen in ("in force", "denied"):
        inode = next((node.root / "var/lib/edgeagent/lib").glob("*.so")).stat().st_ino
        with (node.root / f"proc/{pid}/maps").open("a") as f:
            f.write(f"7f1000000000-7f1000001000 r-xp 00000000 08:01 {inode} {LIBRARY}\n")
    if seen == "in force":
        inner = len(instance.pids)
        started = 100_000 + pid % 100_000
        state = node.root / f"run/edgeagent/limiter/{pod.apps[0].env['EDGEAGENT_SHARE']}/state"
        data = bytearray(state.read_bytes())
        header = list(files._HEADER.unpack_from(data))
        header[4], header[5] = 1, 400 * MIB  # slots in use, bytes in all
        files._HEADER.pack_into(data, 0, *header)
        files._SLOT.pack_into(data, files._SLOTS_AT, inner, 0, started, 400 * MIB, 400 * MIB, 0)
        state.write_bytes(data)
    return pid


E1 = {
    "good": ("in force", LIBC, 400, None),
    "musl": ("unmapped", "/lib/ld-musl-x86_64.so.1", 1500, "musl_image"),
    "empty": ("empty", LIBC, 1500, "empty_library"),
    "denied": ("denied", LIBC, 1500, "state_denied"),
}


def test_e1_enforced_is_said_of_the_one_whose_limit_is_in_force_and_everywhere_the_same(start: Start) -> None:
    """Limiter mapped and accounted; a musl image; an empty library file; a state file it may not write:
    the same in status, MQTT, metrics and top; one event and one alert each for those over their limit."""
    port = closed_port()
    metrics = {"metrics": {"enabled": True, "listen": f"127.0.0.1:{port}"}}
    node = start("l4", broker=True, api=True, config=metrics).ready()
    pods = {name: node.share(name, 512) for name in E1}
    for pod in pods.values():
        node.env(pod)
    pids = {
        name: uses(node, pods[name], seen=seen, image_libc=libc) for name, (seen, libc, _, _) in E1.items()
    }
    node.nvml.processes(node.gpus[0], compute=[(pids[name], mib) for name, (_, _, mib, _) in E1.items()])
    node.nvml.set(node.gpus[0], memory_used_mib=5000)

    def settled(s: dict[str, Any]) -> bool:
        return {n: level(s, n).get("reason") for n in E1} == {
            n: why for n, (_, _, _, why) in E1.items()
        } and (len([c for c in s["containers"] if c["overLimit"]]) == 3)

    s = node.agent.wait_snapshot(settled)
    expected = {name: name == "good" for name in E1}
    assert {name: level(s, name)["enforced"] for name in E1} == expected
    assert level(s, "good")["level"] == "cooperative"
    assert {level(s, name)["level"] for name in E1 if name != "good"} == {"reactive"}, "it can be acted on"

    alloc = node.observer.wait_payload(
        "edge-1/alloc",
        lambda m: len([c for g in m["gpus"] for c in g["containers"] if c.get("overLimit")]) == 3,
    )
    told = {c["pod"]: c["levels"]["memory"] for g in alloc["gpus"] for c in g["containers"]}
    assert {name: axis["enforced"] for name, axis in told.items()} == expected
    assert {name: axis.get("reason") for name, axis in told.items()} == {
        n: why for n, (*_, why) in E1.items()
    }
    inv = node.observer.wait_payload("edge-1/inv", lambda m: m["gpus"][0]["levels"]["memory"].get("evidence"))
    assert inv["gpus"][0]["levels"]["memory"]["mechanism"] == "limiter"

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    lines = [line for line in text.splitlines() if line.startswith("edgeagent_container_limit_enforced{")]
    for name, enforced in expected.items():
        (line,) = [one for one in lines if f'pod="{name}"' in one]
        assert 'axis="memory"' in line
        assert float(line.rsplit(" ", 1)[1]) == enforced
    assert "musl_image" in "\n".join(render(s, s["takenMs"] / 1000))

    node.observer.wait(lambda seen: len([m for m in seen if m.topic.endswith("/evt/overlimit")]) >= 3)
    over = node.events("overlimit")
    assert sorted(e["pod"] for e in over) == ["denied", "empty", "musl"]
    assert {(e["facts"]["limitMiB"], e["facts"]["usedMiB"]) for e in over} == {(512, 1500)}
    node.kubelet.wait_for(
        lambda: len([e for e in node.kubelet.cluster.events if e.reason == "GpuMemoryOverLimit"]) == 3
    )
    assert all(p.apps[0].running for p in pods.values()), "to report is all that is done by default"


def test_proof_that_is_lost_lowers_the_level_within_two_polls_and_is_told_once(start: Start) -> None:
    node = start("l4", broker=True).ready()
    pod = node.share("a", 512)
    node.env(pod)
    pid = uses(node, pod, seen="in force")
    node.nvml.processes(node.gpus[0], compute=[(pid, 400)])
    node.agent.wait_snapshot(
        lambda s: level(s, "a").get("enforced") and "accounted" in level(s, "a")["evidence"]
    )
    # Another program is executed in its place: a static one.
    (node.root / f"proc/{pid}/maps").write_text("400000-401000 r-xp 00000000 08:01 7 /usr/bin/static\n")
    s = node.agent.wait_snapshot(lambda s: not level(s, "a")["enforced"])
    assert (level(s, "a")["level"], level(s, "a")["reason"]) == ("reactive", "not_preloaded")
    node.observer.wait(lambda seen: [m for m in seen if m.topic.endswith("/evt/agent")])
    (event,) = node.events("agent")
    assert (event["pod"], event["facts"]["axis"], event["facts"]["reason"]) == (
        "a",
        "memory",
        "not_preloaded",
    )
    # Counted before it is told, and told after the level is shown: `s` may be older than the count.
    assert node.agent.snapshot()["counters"]["isolation_levels_lost_total"] == 1
    # A container that simply ends has lost nothing.
    node.gone(pod)
    assert node.agent.snapshot()["counters"]["isolation_levels_lost_total"] == 1


@contextmanager
def real_process(node: WholeNode, cgroup: str, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that can really be killed, shown under the host tree as one of a cgroup."""
    process = subprocess.Popen(["sleep", "60"])
    try:
        node.kubelet.runtime.host.make_process(process.pid, cgroup=cgroup, comm=name)
        yield process
    finally:
        process.kill()
        process.wait()


def test_policy_evict_asks_the_api_server_once(start: Start) -> None:
    config = {"isolation": {"watchdog": {"policy": "evict"}}}
    node = start("l4", api=True, config=config).ready()
    pod = node.share("greedy", 512)
    node.env(pod)
    node.nvml.processes(node.gpus[0], compute=[(pod.apps[0].instance.pid, 1500)])
    node.kubelet.wait_for(lambda: pod.gone or pod.deleted, 15)
    assert len(node.api.requested("POST", r".*/pods/greedy/eviction")) == 1
    assert node.agent.snapshot()["counters"]["over_limit_evicted_total"] == 1


def test_policy_kill_ends_the_containers_processes_and_nobody_elses(start: Start) -> None:
    """The neighbour within its limit and the host's own program use the GPU too, and live."""
    config = {"isolation": {"watchdog": {"policy": "kill"}}}
    node = start("l4", config=config).ready()
    pod, other = node.share("greedy", 512), node.share("modest", 2000)
    node.env(pod), node.env(other)
    with (
        real_process(node, pod.apps[0].instance.cgroup, "train") as greedy,
        real_process(node, other.apps[0].instance.cgroup, "serve") as modest,
        real_process(node, "/user.slice/user-1000.slice", "python") as host,
    ):
        use = [(greedy.pid, 1500), (modest.pid, 1500), (host.pid, 3000)]
        node.nvml.processes(node.gpus[0], compute=use)
        assert greedy.wait(10) == -signal.SIGKILL
        node.agent.wait_snapshot(lambda s: s["counters"]["over_limit_killed_total"] == 1)
        assert (modest.poll(), host.poll()) == (None, None)


# ---- E3: memory that pods do not use -----------------------------------------------------------------


def test_e3_what_the_host_uses_already_is_not_promised_to_the_first_pod(start: Start) -> None:
    """Xorg, gnome-shell and a program of a user before any pod; then the user's program grows."""

    def host_programs(node: WholeNode) -> None:
        node.nvml.processes(
            node.gpus[0], graphics=[(5_900_001, 450), (5_900_002, 210)], compute=[(5_900_003, 2000)]
        )
        node.nvml.set(node.gpus[0], memory_used_mib=2660)

    def with_names(node: WholeNode) -> None:
        host_programs(node)
        from tests.fakes.kubelet.hosttree import HostTree

        tree = HostTree(node.root)
        for pid, name in ((5_900_001, "Xorg"), (5_900_002, "gnome-shell"), (5_900_003, "python")):
            tree.make_process(pid, cgroup="/user.slice/user-1000.slice", comm=name)

    config = {"isolation": {"watchdog": {"policy": "kill"}}}
    node = start("rtx-3070", broker=True, config=config, prepare=with_names).ready()
    gpu = node.gpus[0]
    s = node.agent.wait_snapshot(lambda s: node.gpu(gpu, s)["withdrawnMiB"] == 2688)
    state = node.gpu(gpu, s)
    usable = state["usableMiB"]
    assert state["freeMiB"] == usable - 2688
    assert state["hostUse"]["usedMiB"] == 2660
    assert {p["name"]: p["usedMiB"] for p in state["hostUse"]["processes"]} == {
        "Xorg": 450, "gnome-shell": 210, "python": 2000,
    }  # fmt: skip
    node.kubelet.wait_for(lambda: node.kubelet.allocatable[MEMORY] == usable - 2688)
    assert node.kubelet.capacity[MEMORY] == usable, "what the GPU has is as before"
    assert "not promised" in "\n".join(render(s, s["takenMs"] / 1000))

    pod = node.share("a", 4096)
    assert node.env(pod)["EDGEAGENT_MEMORY_MIB"] == "4096"
    node.nvml.processes(gpu, compute=[(5_900_003, 6000)])
    node.nvml.set(gpu, memory_used_mib=6000)
    condition = node.wait_condition("HostOvercommit", gpu)
    assert condition["facts"] == {
        "overcommittedMiB": 4096 + 6000 - usable, "promisedMiB": 4096, "usableMiB": usable, "hostUsedMiB": 6000,
    }  # fmt: skip
    alert = node.observer.wait_payload(f"alert/hostovercommit-{gpu.lower()}")
    assert alert["podsHurt"] == ["default/a"]
    node.kubelet.wait_for(lambda: node.kubelet.allocatable[MEMORY] == 4096)
    assert not node.agent.snapshot()["containers"][0]["overLimit"], "it is nobody's pod"
    assert pod.apps[0].running
    health = node.kubelet.resource_health(pod)["app"][MEMORY]
    assert set(health.values()) == {"Healthy"}, "what runs keeps its IDs"


def test_a_pod_that_fits_only_without_the_hosts_programs_waits_and_starts_when_they_end(start: Start) -> None:
    node = start("rtx-3070").ready()
    gpu = node.gpus[0]
    node.kubelet.runtime.host.make_process(5_900_003, cgroup="/user.slice/user-1000.slice", comm="python")
    pod = node.kubelet.cluster.create(Pod("big", [container("app", 7000, 50)]), bind=True)
    node.env(pod)
    node.gone(pod)
    node.nvml.processes(gpu, compute=[(5_900_003, 2000)])
    node.nvml.set(gpu, memory_used_mib=2000)
    node.kubelet.wait_for(lambda: node.kubelet.allocatable[MEMORY] < 7000)
    again = node.share("again", 7000)
    node.kubelet.cluster.wait_for(lambda: not again.apps[0].running)
    node.nvml.processes(gpu)
    node.nvml.set(gpu, memory_used_mib=0)
    node.env(again, timeout_s=15)


# ---- MPS -------------------------------------------------------------------------------------------


def test_mps_limits_each_container_and_its_daemons_death_is_a_condition_until_it_is_back(
    start: Start,
) -> None:
    config = {"isolation": {"memory": "mps", "compute": "mps", "watchdog": {"policy": "kill"}}}

    def prepare(node: WholeNode) -> None:
        FakeMps(node.root)
        node.nvml.driver_version = "615.71.09"
        node.nvml.set(node.gpus[0])

    node = start("l4", config=config, prepare=prepare, broker=True).ready()
    gpu = node.gpus[0]
    mps = FakeMps(node.root).daemon(gpu)
    pod = node.share("a", 2000, 30)
    env = node.env(pod)
    assert env["CUDA_MPS_PIPE_DIRECTORY"] == "/run/edgeagent-mps"
    assert mps.namespaces() == {env["EDGEAGENT_SHARE"]: ("2000M", "30")}
    assert pod.apps[0].mounts["/run/edgeagent-mps"].endswith(f"{gpu}/pipe/shares/{env['EDGEAGENT_SHARE']}")
    assert node.nvml.compute_mode(gpu) == 3

    with real_process(node, pod.apps[0].instance.cgroup, "train") as client:
        mps.connect(client.pid, env["EDGEAGENT_SHARE"])
        node.nvml.processes(gpu, compute=[(client.pid, 1000)], mps=[(client.pid, 1000)])
        s = node.agent.wait_snapshot(lambda s: level(s, "a", "compute").get("level") == "hard")
        assert level(s, "a")["level"] == "cooperative"
        assert (level(s, "a")["mechanism"], level(s, "a", "compute")["mechanism"]) == ("mps", "mps")
        node.nvml.set_compute_mode(gpu, 0)  # somebody runs nvidia-smi -c 0
        node.agent.wait_snapshot(lambda s: node.nvml.compute_mode(gpu) == 3)
        # Over its limit: its work is ended in order first, then the process.
        node.nvml.processes(gpu, compute=[(client.pid, 3000)], mps=[(client.pid, 3000)])
        assert client.wait(10) == -signal.SIGKILL
        assert f"client terminate {client.pid}" in mps.calls
        assert client.pid not in mps.clients
    node.nvml.processes(gpu)

    # The daemon ends and cannot be started again for a while.
    FakeMps(node.root).start_fails("no device")
    mps.die()
    condition = node.wait_condition("MpsDaemon", gpu)
    assert condition["makesUnhealthy"]
    node.observer.wait_payload(f"alert/mpsdaemon-{gpu.lower()}")
    node.kubelet.wait_for(lambda: node.kubelet.allocatable[CORES] == 0)
    FakeMps(node.root)
    node.wait_cleared("MpsDaemon", 20)
    node.kubelet.wait_for(lambda: node.kubelet.allocatable[CORES] == 100)
    assert mps.running
    node.agent.stop()
    assert mps.running, "containers outlive the agent, and so does what they depend on"
