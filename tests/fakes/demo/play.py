"""What happens in the demo, and when. Each step waits for what it wants to show, not for a time."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.fakes.agent import AgentProcess
from tests.fakes.demo.broker import Ear, start_broker
from tests.fakes.demo.view import PlainView, View, live_view
from tests.fakes.kubelet import ContainerSpec, Pod, Scheduler, StandInKubelet, Timing

MEMORY, CORES = "volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores"
STORY_S = 20.0  # how long the story takes when nobody says otherwise

# A node's real delays would fill a minute; the order of things stays.
TIMING = Timing(
    start_retry_s=(0.3, 1.0),
    restart_backoff_s=(0.3, 0.5),
    cgroup_gone_s=0.3,
    termination_s=0.2,
    node_status_s=0.0,
    endpoint_grace_s=60.0,
    readmit_s=0.5,
)


class Ended(Exception):
    """Somebody pressed Ctrl-C."""


class Demo:
    def __init__(self, for_s: float | None, plain: bool) -> None:
        self.work = Path(tempfile.mkdtemp(prefix="edgeagent-demo-"))
        self.root = self.work / "node"
        self.root.mkdir()
        self.until_s = None if for_s is None else time.monotonic() + for_s
        self.pace_s = min(for_s or STORY_S, STORY_S) / STORY_S
        self.stop = threading.Event()
        self.plain = plain
        self.story: list[str] = []
        self.pods: dict[str, Pod] = {}

    # -- parts --

    @contextmanager
    def parts(self) -> Iterator[View]:
        broker = start_broker(self.work / "broker")
        ear = Ear(broker.port)
        config = {
            "node": {"name": "demo-box", "site": "lab"},
            "gpus": {
                "source": "simulated",
                "pollSeconds": 0.4,
                "simulated": {
                    "profile": "2x-rtx-4000-ada",
                    "faultFile": str(self.work / "faults.yaml"),
                    "processFile": str(self.work / "processes.yaml"),
                },
            },
            # Processes that are only files load no library: the demo shows what watching alone does.
            "isolation": {"memory": "watchdog", "compute": "none", "watchdog": {"pollSeconds": 1}},
            "health": {"xidHoldSeconds": 1, "recoverPolls": 2},
            "fleet": {
                "enabled": True,
                "brokers": [broker.url],
                "protocol": broker.protocol,
                "telemetrySeconds": 2,
                "willDelaySeconds": 0,
            },
        }
        agent = AgentProcess(self.root, self.work / "agent", config)
        kubelet = StandInKubelet(self.root, timing=TIMING, node_name="demo-box")
        try:
            with kubelet, Scheduler(kubelet.cluster), agent:
                self.kubelet, self.agent = kubelet, agent
                view = PlainView(self) if self.plain else live_view(self)
                self.view = view
                self.ear, self.broker_name = ear, broker.name
                with view:
                    yield view
        finally:
            ear.close()
            broker.stop()

    # -- telling --

    def say(self, text: str) -> None:
        self.story.append(text)
        self.view.said(text)

    def wait(self, what: str, predicate: Callable[[], object], timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not predicate():
            self.look()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the demo waited {timeout_s:.0f} s in vain: {what}\n{self.agent.log()[-2000:]}"
                )

    def pause(self, seconds: float) -> None:
        """Time to read; on a slow machine that is behind, less of it or none."""
        end = time.monotonic() + seconds * self.pace_s
        while time.monotonic() < end and not self.time_is_up:
            self.look()

    @property
    def time_is_up(self) -> bool:
        return self.until_s is not None and time.monotonic() >= self.until_s

    def look(self) -> None:
        """One refresh of the view; Ctrl-C ends the demo here."""
        self.view.refresh()
        if self.stop.wait(0.05):
            raise Ended

    # -- the node's life --

    def start_pod(self, name: str, memory_mib: int, cores: int) -> Pod:
        spec = ContainerSpec(
            "app", {MEMORY: memory_mib, CORES: cores}, image_env={"NVIDIA_VISIBLE_DEVICES": "all"}
        )
        pod = self.kubelet.cluster.create(Pod(name, [spec]))
        self.pods[name] = pod
        return pod

    def running(self, name: str) -> bool:
        return self.pods[name].apps[0].running

    def gpu_of(self, name: str) -> int:
        uuid = self.pods[name].apps[0].env["EDGEAGENT_GPU_UUID"]
        return next(g["gpu"]["index"] for g in self.agent.snapshot()["gpus"] if g["gpu"]["uuid"] == uuid)

    def processes_follow(self) -> None:
        """What runs on the simulated GPUs: the processes of the running containers."""
        entries = []
        with self.kubelet.cluster.lock:
            for pod in self.pods.values():
                app = pod.apps[0]
                if app.running and not pod.gone:
                    env = app.env
                    entries.append(
                        {
                            "pid": app.instance.pid, "gpu": env["EDGEAGENT_GPU_UUID"], "name": pod.name,
                            "shareMiB": int(env["EDGEAGENT_MEMORY_MIB"]),
                            "coresPct": float(env.get("EDGEAGENT_CORES_PCT", 100)),
                        }
                    )  # fmt: skip
        text = yaml.safe_dump({"processes": entries})
        path = self.work / "processes.yaml"
        if not path.exists() or path.read_text() != text:
            temporary = path.with_suffix(".new")
            temporary.write_text(text)
            temporary.replace(path)

    def fault(self, gpu: int | None) -> None:
        path = self.work / "faults.yaml"
        faults = [] if gpu is None else [{"gpu": str(gpu), "fault": "lost"}]
        temporary = path.with_suffix(".new")
        temporary.write_text(yaml.safe_dump({"faults": faults}))
        temporary.replace(path)

    # -- the story --

    def tell(self) -> None:
        self.say("The agent starts, finds two simulated GPUs and registers with the kubelet.")
        self.wait("registration", lambda: self.kubelet.allocatable.get(MEMORY))
        offered = self.kubelet.allocatable[MEMORY]
        self.say(f"The node offers {offered} MiB of GPU memory and 200 % of compute.")
        self.pause(1.0)
        for name, mib, cores in (("detector", 7000, 30), ("tracker", 7000, 30), ("counter", 8000, 40)):
            self.start_pod(name, mib, cores)
            self.wait(f"{name} runs", lambda name=name: self.running(name))
            self.say(f"Pod {name} asks for {mib} MiB and {cores} %: it runs on GPU {self.gpu_of(name)}.")
            self.pause(0.6)
        self.pause(0.6)
        waiting = self.start_pod("segmenter", 12500, 30)
        self.wait("segmenter waits", lambda: self.agent.snapshot().get("waiting"))
        reason = self.agent.snapshot()["waiting"][0]["reason"]
        self.say("Pod segmenter asks for 12500 MiB: the node's sum has it, no single GPU does. It waits:")
        self.say(f"  {reason}")
        self.pause(2.5)
        self.kubelet.delete(self.pods["counter"])
        self.say("Pod counter is deleted.")
        self.wait("segmenter runs", lambda: self.running("segmenter"))
        del waiting
        self.say(f"Its room is free: segmenter starts at once, on GPU {self.gpu_of('segmenter')}.")
        self.pause(1.5)
        before = self.gpu_of("detector")
        self.fault(before)
        self.say(f"GPU {before} falls off the bus. Its shares are withdrawn, the fleet gets an alert.")
        self.wait(
            "the GPU is sick", lambda: any(g["health"] == "sick" for g in self.agent.snapshot()["gpus"])
        )
        self.kubelet.exit(self.pods["detector"], "app", 139)
        self.say("Pod detector crashes with it; the kubelet starts it again.")
        self.wait("detector is back", lambda: self.running("detector") and self.gpu_of("detector") != before)
        self.say(
            f"The fail-over: detector comes back on GPU {self.gpu_of('detector')}, without being rescheduled."
        )
        self.pause(1.5)
        self.fault(None)
        self.wait("recovery", lambda: all(g["health"] != "sick" for g in self.agent.snapshot()["gpus"]))
        self.say(
            f"GPU {before} answers again: it recovered, its shares are offered again. Nobody drove anywhere."
        )
        self.pause(2.0)


def play(for_s: float | None, *, plain: bool = False) -> int:
    """Plays until the story ends, `for_s` is over, or Ctrl-C. Returns the exit status."""
    demo = Demo(for_s, plain or not sys.stdout.isatty())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: demo.stop.set())
    status = 0
    try:
        with demo.parts() as view:
            try:
                demo.tell()
                if for_s is None and not demo.plain:
                    demo.say("That was the story. Watch on, or press Ctrl-C.")
                while not demo.time_is_up and not (for_s is None and demo.plain):
                    demo.look()
            except Ended:
                pass
            except RuntimeError as e:
                status = 1
                print(e, file=sys.stderr)
            view.refresh()
    finally:
        shutil.rmtree(demo.work, ignore_errors=True)
    return status
