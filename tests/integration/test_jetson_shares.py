"""Pods on a Jetson: every board's RAM is shared out once, and containers get what is on the host."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeagent.gpus.tegra import TegraBackend
from edgeagent.hostroot import HostRoot
from edgeagent.sharing.units import unified_usable_mib
from tests.fakes.jetson import BOARDS, JetsonTree
from tests.fakes.kubelet import ContainerSpec, Pod, StandInKubelet
from tests.fakes.kubelet_side import CORES, MEMORY, Side, running_side

# MemTotal − max(1536 MiB, 20 %), floored.
USABLE_MIB = {
    "nano-jp4": 2421,
    "xavier-nx-jp5": 5299,
    "orin-nano-jp6": 6084,
    "orin-nx-jp6": 12540,
    "agx-orin-jp72": 50253,
    "thor-jp7": 100616,
    "agx-orin-dgpu": 24428,
}


@pytest.fixture(params=list(BOARDS))
def board(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def node(board: str) -> Iterator[tuple[StandInKubelet, Side, JetsonTree]]:
    """The board with a kubelet on it and the plugin registered."""
    with tempfile.TemporaryDirectory(prefix="jetson-") as name:  # short: sockets lie below it
        root = Path(name)
        tree = JetsonTree(root, BOARDS[board])
        backend = TegraBackend(HostRoot(root))
        gpus = list(backend.inventory().gpus)
        backend.close()
        with running_side(gpus, kubelet={"root": root}) as (kubelet, side):
            yield kubelet, side, tree


def pod(name: str, mib: int) -> Pod:
    return Pod(
        name, [ContainerSpec("app", {MEMORY: mib, CORES: 30}, image_env={"NVIDIA_VISIBLE_DEVICES": "all"})]
    )


def test_two_pods_are_admitted_and_a_third_refused_with_the_numbers(
    node: tuple[StandInKubelet, Side, JetsonTree], board: str
) -> None:
    kubelet, side, tree = node
    usable = unified_usable_mib(int(tree.board.mem_total_kib / 1024))
    assert usable == USABLE_MIB[board]
    assert kubelet.allocatable[MEMORY] == usable
    each = usable * 2 // 5
    first, second = kubelet.run(pod("first", each)), kubelet.run(pod("second", each))
    kubelet.wait_for(lambda: first.running and second.running)
    (gpu,) = side.gpus
    assert side.side.room(gpu.uuid).free_mib == usable - 2 * each

    third = kubelet.run(pod("third", each))
    kubelet.wait_for(lambda: third.phase == "Failed")
    assert f"Requested: {each}, Available: {usable - 2 * each}" in (third.message or "")

    env = first.containers["app"].env
    assert env["NVIDIA_VISIBLE_DEVICES"] == "void"
    given = first.containers["app"]
    assert given.device_nodes
    assert all(tree.path(n.lstrip("/")).exists() for n in given.device_nodes)
    assert not [n for n in given.device_nodes if "sched" in n]
    assert "/usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1.1" in given.mounts
