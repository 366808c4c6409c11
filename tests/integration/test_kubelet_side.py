"""The kubelet side over real sockets: grants, binds, waits, fails over, restarts."""

from __future__ import annotations

from tests.fakes.kubelet import ContainerSpec, Pod
from tests.fakes.kubelet_side import CORES, MEMORY, eventually, running_side


def one(name: str, mib: int, cores: int | None = None, **more: object) -> Pod:
    limits = {MEMORY: mib} | ({CORES: cores} if cores is not None else {})
    return Pod(name, [ContainerSpec("app", limits, **more)])  # type: ignore[arg-type]


def test_a_pod_gets_one_gpu_its_limits_and_nothing_else() -> None:
    with running_side() as (k, side):
        assert k.allocatable == {MEMORY: 16384, CORES: 200, "volcano.sh/vgpu-number": 32}
        pod = k.run(one("a", 3000, 40, image_env={"NVIDIA_VISIBLE_DEVICES": "all"}))
        k.wait_for(lambda: pod.running)
        env = pod.containers["app"].env
        assert env["NVIDIA_VISIBLE_DEVICES"] == "void"
        assert env["EDGEAGENT_MEMORY_MIB"] == "3000"
        assert env["EDGEAGENT_CORES_PCT"] == "40"
        (share,) = side.side.containers()
        assert (share.pod, share.container, share.memory_mib, share.cores_pct) == ("a", "app", 3000, 40)
        assert env["EDGEAGENT_GPU_UUID"] == share.gpu_uuid
        k.delete(pod)
        eventually(lambda: not side.side.containers())
        assert not list((k.root / "var/run/cdi").iterdir())
