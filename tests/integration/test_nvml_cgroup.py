"""Memory limits per cgroup over the fake NVML and a cgroup tree: set, read back, changed by others,
taken back, outliving the agent; and why not, where they cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeagent.errors import IsolationError
from edgeagent.gpus.model import Gpu
from edgeagent.gpus.nvml import NvmlBackend
from edgeagent.hostroot import HostRoot
from edgeagent.isolation.backend import RunningContainer, ShareToEnforce
from edgeagent.isolation.levels import Axis, AxisLevel, Level
from edgeagent.isolation.manager import IsolationManager
from edgeagent.isolation.nvml_cgroup import NvmlCgroupBackend
from tests.fakes.kubelet.hosttree import HostTree
from tests.fakes.nvml import FakeNvml, Mig
from tests.fakes.nvml.driver import GPU_IS_LOST, MIB, NO_PERMISSION, NOT_FOUND
from tests.fakes.nvml.host import nvidia_host

POD = "aaaaaaaa-0000-4000-8000-000000000001"
UNLIMITED = 0xFFFFFFFFFFFFFFFF
MEMORY = frozenset({Axis.MEMORY})
CONTAINER_ID = "c1" * 32


class Node:
    """A card, cgroups, and the mechanism over both; `restart` is a new agent."""

    def __init__(self, directory: Path, style: str = "systemd-v2", supported: bool = True) -> None:
        self.root = directory / "r"
        self.root.mkdir()
        self.tree = HostTree(self.root, style)
        self.nvml = FakeNvml(directory / "nvml")
        self.uuid = self.nvml.add("rtx-4000-ada")
        self.nvml.add("rtx-4000-ada")
        self.nvml.memory_limits_supported(supported)
        nvidia_host(self.root, self.nvml)
        self.pod = self.tree.pod_cgroup(POD, "burstable")
        self.tree.make_cgroup(self.pod)
        self._open: list[NvmlBackend] = []
        self.restart()

    def restart(self) -> None:
        backend = NvmlBackend(HostRoot(self.root), str(self.nvml.library_path))
        self._open.append(backend)
        self.gpu, self.other = backend.inventory().gpus
        self.backend = NvmlCgroupBackend(backend, HostRoot(self.root), "/sys/fs/cgroup")

    def close(self) -> None:
        for backend in self._open:
            backend.close()

    def share(self, container: str, mib: int, gpu: Gpu | None = None) -> ShareToEnforce:
        return ShareToEnforce(
            POD, container, f"m-{container}", gpu or self.gpu, mib, None, f"/sys/fs/cgroup{self.pod}"
        )

    def start(self, number: int = 1) -> RunningContainer:
        """A container's own cgroup appears, with a process in it."""
        leaf = self.tree.leaf_cgroup(self.pod, f"c{number}" * 32)
        self.tree.make_cgroup(leaf)
        return RunningContainer(f"c{number}" * 32, f"/sys/fs/cgroup{leaf}", (4100 + number,))

    def limits(self) -> dict[str, int | None]:
        """Last part of the cgroup's path -> hard limit in MiB."""
        found = self.nvml.limits().items()
        return {
            Path(cgroup).name: None if hard == UNLIMITED else hard // MIB
            for (_, cgroup), (soft, hard) in found
            if Path(cgroup).exists() and soft == 0
        }

    def level(self, share: ShareToEnforce, running: RunningContainer) -> tuple[Level, str | None]:
        seen = self.backend.evidence(share, running, Axis.MEMORY)
        return seen.level, seen.reason

    @property
    def pod_name(self) -> str:
        return Path(self.pod).name


@pytest.fixture
def node(short_dir: Path) -> Iterator[Node]:
    made = Node(short_dir)
    yield made
    made.close()


NOT_STARTED = RunningContainer(None, None, ())
HARD = (Level.HARD, None)


# ---- probe ---------------------------------------------------------------------------------------


def test_a_probe_sets_reads_back_and_leaves_nothing_behind(node: Node) -> None:
    result = node.backend.probe(node.gpu, Axis.MEMORY)
    assert (result.level, result.problem) == (Level.HARD, None)
    assert not (node.root / "sys/fs/cgroup/edgeagent-probe").exists()
    ((_, cgroup),) = node.nvml.limits()
    assert cgroup == str(node.root / "sys/fs/cgroup/edgeagent-probe"), "the path as this process sees it"


def test_where_it_cannot_be_and_why(short_dir: Path) -> None:
    for style, supported, problem in (
        ("systemd-v1", True, "needs cgroup v2 mounted at /sys/fs/cgroup"),
        ("systemd-v2", False, "needs driver r615 or newer"),
    ):
        (short_dir / style).mkdir()
        node = Node(short_dir / style, style, supported)
        result = node.backend.probe(node.gpu, Axis.MEMORY)
        assert result.level is Level.NONE
        assert problem in (result.problem or "")
        node.close()


def test_not_while_the_gpu_is_in_mig_mode(node: Node) -> None:
    node.nvml.mig(node.uuid, Mig("1g.5gb"))
    node.restart()
    result = node.backend.probe(node.gpu, Axis.MEMORY)
    assert (result.level, result.problem) == (Level.NONE, "not available while the GPU is in MIG mode")


@pytest.mark.parametrize(
    ("code", "problem"), [(NO_PERMISSION, "only root may"), (GPU_IS_LOST, "cannot set memory limits")]
)
def test_a_driver_that_refuses_is_quoted(node: Node, code: int, problem: str) -> None:
    node.nvml.error("nvmlDeviceSetMemoryLimits_v1", code)
    result = node.backend.probe(node.gpu, Axis.MEMORY)
    assert result.level is Level.NONE
    assert problem in (result.problem or "")
    assert "r615" not in (result.problem or "")


def test_a_cgroup_tree_that_cannot_be_written_is_a_reason(node: Node) -> None:
    (node.root / "sys/fs/cgroup/edgeagent-probe").touch()
    result = node.backend.probe(node.gpu, Axis.MEMORY)
    assert "cannot make a scratch cgroup" in (result.problem or "")


# ---- limits --------------------------------------------------------------------------------------


def test_on_the_pod_before_the_start_then_on_the_container(node: Node) -> None:
    share = node.share("app", 2000)
    node.backend.prepare(share, MEMORY)
    assert node.limits() == {node.pod_name: 2000}
    assert node.level(share, NOT_STARTED) == HARD
    running = node.start()
    assert node.level(share, running) == HARD
    assert node.limits() == {node.pod_name: 2000, Path(running.cgroup or "").name: 2000}


def test_a_pod_gets_the_sum_and_each_container_its_own(node: Node) -> None:
    first, second = node.share("a", 1500), node.share("b", 500)
    node.backend.prepare(first, MEMORY)
    node.backend.prepare(second, MEMORY)
    one, two = node.start(1), node.start(2)
    assert [node.level(first, one), node.level(second, two)] == [HARD, HARD]
    assert sorted(mib or 0 for mib in node.limits().values()) == [500, 1500, 2000]
    node.backend.release(first)
    assert node.limits()[node.pod_name] == 500


def test_a_restart_with_another_size_replaces_the_limit(node: Node) -> None:
    node.backend.prepare(node.share("app", 2000), MEMORY)
    node.backend.prepare(node.share("app", 1000), MEMORY)
    assert node.limits() == {node.pod_name: 1000}


@pytest.mark.parametrize("where", ["pod", "container"])
def test_a_limit_that_somebody_changes_is_set_again_and_not_claimed_meanwhile(
    node: Node, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    share = node.share("app", 2000)
    node.backend.prepare(share, MEMORY)
    running = node.start()
    assert node.level(share, running) == HARD
    cgroup = f"/sys/fs/cgroup{node.pod}" if where == "pod" else running.cgroup
    node.backend._limiter.set_memory_limits(node.uuid, cgroup or "", 0, None)  # nvidia-smi memory-limits
    assert node.level(share, running) == (Level.NONE, "limit_changed")
    assert node.level(share, running) == HARD
    assert set(node.limits().values()) == {2000}
    assert "somebody changed a limit" in caplog.text


def test_where_the_container_cannot_be_limited_the_pods_limit_still_holds(node: Node) -> None:
    share = node.share("app", 2000)
    node.backend.prepare(share, MEMORY)
    running = RunningContainer(CONTAINER_ID, f"/sys/fs/cgroup{node.pod}/gone", (4101,))
    assert node.level(share, running) == (Level.HARD, "pod_limit_only")


def test_limits_that_cannot_be_read_are_not_claimed(node: Node) -> None:
    share = node.share("app", 2000)
    node.backend.prepare(share, MEMORY)
    node.nvml.error("nvmlDeviceGetMemoryLimits_v1", NOT_FOUND)
    assert node.level(share, NOT_STARTED) == (Level.NONE, "limit_not_readable")


def test_a_limit_that_cannot_be_set_stops_the_start_and_keeps_the_books_right(node: Node) -> None:
    node.backend.prepare(node.share("a", 1000), MEMORY)
    node.nvml.error("nvmlDeviceSetMemoryLimits_v1", NOT_FOUND)
    with pytest.raises(IsolationError, match="cannot limit GPU memory"):
        node.backend.prepare(node.share("b", 500), MEMORY)
    node.nvml.clear_errors()
    assert node.level(node.share("a", 1000), NOT_STARTED) == HARD
    node.backend.prepare(node.share("b", 500), MEMORY)
    assert node.limits()[node.pod_name] == 1500


def test_no_pod_no_limit(node: Node) -> None:
    lost = ShareToEnforce(POD, "app", "m", node.gpu, 100, None, None)
    with pytest.raises(IsolationError, match="was not found"):
        node.backend.prepare(lost, MEMORY)
    assert node.level(lost, NOT_STARTED) == (Level.NONE, "cgroup_not_found")
    early = ShareToEnforce("", "", "m", node.gpu, 100, None, None)
    node.backend.prepare(early, MEMORY)  # early binding: the pod is not known yet
    assert node.nvml.limits() == {}


# ---- the end -------------------------------------------------------------------------------------


def test_a_container_that_goes_to_another_gpu_leaves_no_limit_here(node: Node) -> None:
    """The soft limit stays 0 and the hard one is lifted while the cgroups still stand."""
    share = node.share("app", 2000)
    node.backend.prepare(share, MEMORY)
    running = node.start()
    node.level(share, running)
    node.backend.release(share)
    node.backend.release(share)
    assert set(node.limits().values()) == {None}
    node.backend.prepare(node.share("app", 2000, node.other), MEMORY)
    pod = str(node.root / f"sys/fs/cgroup{node.pod}")
    assert node.nvml.limits()[node.other.uuid, pod] == (0, 2000 * MIB)


def test_a_cgroup_that_is_gone_is_not_touched(node: Node) -> None:
    share = node.share("app", 2000)
    node.backend.prepare(share, MEMORY)
    node.tree.remove_cgroup(node.pod)
    mark = node.nvml.mark()
    node.backend.release(share)
    assert node.nvml.calls(mark, "nvmlDeviceSetMemoryLimits_v1") == []


def test_one_limit_that_cannot_be_lifted_does_not_keep_the_other(node: Node) -> None:
    share = node.share("app", 2000)
    node.backend.prepare(share, MEMORY)
    node.level(share, node.start())
    node.nvml.error("nvmlDeviceSetMemoryLimits_v1", NOT_FOUND)
    with pytest.raises(IsolationError) as e:
        node.backend.release(share)
    assert str(e.value).count("cannot take back") == 2


def test_after_a_restart_of_the_agent_the_limits_are_in_force_and_the_sums_right(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGKILL: nothing is taken back. The next agent knows of both containers before it touches any."""
    first, second = node.share("a", 1500), node.share("b", 500)
    for share in (first, second):
        node.backend.prepare(share, MEMORY)
    one = node.start(1)
    node.level(first, one)
    before = node.limits()
    node.restart()
    assert node.limits() == before
    mark = node.nvml.mark()
    for share in (first, second):
        node.backend.adopt(share)
    assert node.level(first, one) == HARD
    assert node.nvml.calls(mark, "nvmlDeviceSetMemoryLimits_v1") == [], "they were as they should be"
    node.backend.prepare(node.share("c", 100), MEMORY)
    assert node.limits()[node.pod_name] == 2100
    node.backend.release(second)
    assert node.limits()[node.pod_name] == 1600
    assert "somebody changed" not in caplog.text


def test_limits_lifted_while_no_agent_ran_are_put_back(node: Node) -> None:
    share = node.share("app", 2000)
    node.backend.prepare(share, MEMORY)
    running = node.start()
    node.restart()
    node.backend._limiter.set_memory_limits(node.uuid, f"/sys/fs/cgroup{node.pod}", 0, None)
    node.backend.adopt(share)
    assert node.level(share, running) == HARD
    assert set(node.limits().values()) == {2000}


# ---- kernels with the dmem controller ----------------------------------------------------------------


def test_the_controller_is_passed_on_to_where_limits_are_set(node: Node) -> None:
    top = node.root / "sys/fs/cgroup"
    (top / "cgroup.controllers").write_text("cpu memory dmem\n")
    controls = [top, top / "kubepods.slice", (top / node.pod.lstrip("/")).parent]
    for directory in controls:
        (directory / "cgroup.subtree_control").write_text("cpu memory\n")
    node.backend.prepare(node.share("app", 100), MEMORY)
    assert [(d / "cgroup.subtree_control").read_text() for d in controls] == ["+dmem"] * 3


def test_the_manager_prefers_it_and_reports_its_loss_at_the_second_poll(node: Node) -> None:
    lost: list[AxisLevel] = []
    manager = IsolationManager(
        [node.backend], memory="auto", compute="auto", fallback=False, allow_mps=False,
        on_level_lost=lambda share, axis, before, now: lost.append(now),
    )  # fmt: skip
    manager.probe(node.gpu, watchdog=True)
    share = node.share("app", 2000)
    manager.prepare(share)
    running = node.start()
    assert manager.observe(share, running).memory.level is Level.HARD
    node.nvml.error("nvmlDeviceGetMemoryLimits_v1", NOT_FOUND)
    assert [manager.observe(share, running).memory.level for _ in range(2)] == [Level.HARD, Level.NONE]
    assert [level.reason for level in lost] == ["limit_not_readable"]
