"""Who tells the isolation mechanisms of a share's beginning and end, and that they hear of it in order."""

from __future__ import annotations

import os
from pathlib import Path

from edgeagent.isolation.backend import ShareToEnforce
from tests.fakes.kubelet import ContainerSpec, Pod
from tests.fakes.kubelet_side import CORES, MEMORY, RecordedIsolation, running_side
from tests.fakes.whole import WholeNode


class InOrder(RecordedIsolation):
    """Keeps one list of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, str]] = []

    def prepare(self, share: ShareToEnforce):  # type: ignore[no-untyped-def]
        self.told.append(("prepare", share.container))
        return super().prepare(share)

    def release(self, share: ShareToEnforce) -> None:
        self.told.append(("release", share.container))
        super().release(share)


def test_an_init_containers_limits_go_before_the_app_takes_its_tokens_over() -> None:
    """They share a name on disk, and the pod's sum must not count who has ended."""
    with running_side() as (k, side):
        side.isolation = InOrder()
        side.side.gate._isolation = side.isolation
        pod = Pod(
            "s",
            [ContainerSpec("app", {MEMORY: 3}), ContainerSpec("app2", {MEMORY: 4})],
            init=[ContainerSpec("init", {MEMORY: 6}, run_s=0.2)],
        )
        k.run(pod)
        k.wait_for(lambda: pod.running)
        told = side.isolation.told
        assert told[0] == ("prepare", "init")
        assert told.index(("release", "init")) < min(
            told.index(("prepare", "app")), told.index(("prepare", "app2"))
        )
        assert told.count(("release", "init")) == 1
        k.delete(pod)
        k.wait_for(lambda: pod.gone and len(told) == 6)
        assert sorted(told[4:]) == [("release", "app"), ("release", "app2")]


def test_after_a_restart_the_mechanisms_know_of_running_containers_before_anything_else() -> None:
    with running_side() as (k, side):
        pod = k.run(Pod("a", [ContainerSpec("app", {MEMORY: 1000, CORES: 30})]))
        k.wait_for(lambda: pod.running)
        side.stop()
        side.isolation = RecordedIsolation()
        side.start()
        (share,) = side.isolation.adopted
        assert (share.container, share.memory_mib, share.cores_pct) == ("app", 1000, 30)
        assert share.pod_cgroup is not None
        assert share.pod_cgroup.startswith("/sys/fs/cgroup/kubepods.slice/")
        assert side.isolation.prepared == []


def test_a_start_that_fails_after_its_limits_were_prepared_takes_them_back() -> None:
    with running_side() as (k, side):
        specs = k.root / "var/run/cdi"
        specs.mkdir(parents=True, exist_ok=True)
        for old in specs.iterdir():
            old.unlink()
        specs.rmdir()
        specs.symlink_to("/proc/nowhere")  # no spec can be written
        pod = k.run(Pod("a", [ContainerSpec("app", {MEMORY: 1000})]))
        k.wait_for(lambda: pod.waiting and side.isolation.released)
        assert side.side.containers() == ()
        assert side.isolation.prepared[0].share == side.isolation.released[0].share
        os.unlink(specs)
        specs.mkdir()
        k.wait_for(lambda: pod.running)
        assert [c.container for c in side.side.containers()] == ["app"]


def test_early_binding_gets_its_compute_limit_although_allocate_knows_no_cores(short_dir: Path) -> None:
    """Without CDI: the limiter's files are mounted by Allocate and say the percentage when it starts."""
    config = {"sharing": {"binding": "early"}}
    with WholeNode(short_dir, "l4", config=config, kubelet={"cdi": False}) as node:
        node.ready()
        pod = node.share("a", 2000, 30)
        env = node.env(pod)
        assert env["EDGEAGENT_MEMORY_MIB"] == "2000"
        mounts = pod.apps[0].mounts
        host = {inner: node.root / path.lstrip("/") for inner, path in mounts.items()}
        assert host["/etc/ld.so.preload"].exists()
        text = next(path for inner, path in host.items() if inner.endswith("/limits")).read_text()
        assert f"memory_bytes {2000 << 20}\n" in text
        assert "cores_pct 30\n" in text
