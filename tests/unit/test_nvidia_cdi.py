"""What a container gets to use a GPU, from what is on the host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgeagent.gpus.model import Gpu, GpuKind, MigInstance
from edgeagent.hostroot import HostRoot
from edgeagent.node.nvidia_cdi import NvidiaCdi

NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")
UUID = "GPU-1a2b3c4d-0000-0000-0000-000000000000"
TRIPLET = "aarch64-linux-gnu" if os.uname().machine == "aarch64" else "x86_64-linux-gnu"


def gpu(nodes: tuple[str, ...] = NODES, **facts: object) -> Gpu:
    return Gpu(UUID, 0, GpuKind.DISCRETE, "nvml", "RTX A2000", 6138, device_nodes=nodes, **facts)  # type: ignore[arg-type]


def touch(root: Path, *paths: str) -> None:
    for path in paths:
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()


def driver(root: Path, directory: str, version: str) -> None:
    """Libraries as a driver package leaves them: the file, the loader's link, the linker's link."""
    for library, soname in (
        ("libcuda", "1"),
        ("libnvidia-ml", "1"),
        ("libnvidia-ptxjitcompiler", "1"),
        ("libnvidia-nvvm", "4"),
        ("libGLX_nvidia", "0"),
    ):
        touch(root, f"{directory}/{library}.so.{version}")
        (root / directory.lstrip("/") / f"{library}.so.{soname}").symlink_to(f"{library}.so.{version}")
    (root / directory.lstrip("/") / "libcuda.so").symlink_to("libcuda.so.1")
    touch(root, f"{directory}/libnvidia-gpucomp.so.{version}")


def spec(root: Path, text: str, name: str = "var/run/cdi/nvidia.yaml") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n" + text)
    return path


def device(name: str, *nodes: str) -> str:
    return (
        f"- name: '{name}'\n  containerEdits:\n    deviceNodes: ["
        + ", ".join(f"{{path: {n}}}" for n in nodes)
        + "]\n"
    )


def test_libraries_are_mounted_under_every_name_where_loaders_look(tmp_path: Path) -> None:
    touch(tmp_path, *NODES, "/usr/bin/nvidia-smi")
    driver(tmp_path, "/usr/lib/x86_64-linux-gnu", "550.90.07")
    access = NvidiaCdi(HostRoot(tmp_path)).access(gpu(driver_version="550.90.07"))
    assert access.problem is None
    assert access.edits.device_nodes == NODES
    mounts = {m.container_path: m.host_path for m in access.edits.mounts}
    for directory in (f"/usr/lib/{TRIPLET}", "/usr/lib64"):
        for name in ("libcuda.so", "libcuda.so.1", "libcuda.so.550.90.07"):
            assert mounts[f"{directory}/{name}"] == "/usr/lib/x86_64-linux-gnu/libcuda.so.550.90.07"
        assert f"{directory}/libnvidia-nvvm.so.4" in mounts
        assert f"{directory}/libnvidia-gpucomp.so.550.90.07" in mounts
        assert not any("GLX" in path for path in mounts)
    assert mounts["/usr/bin/nvidia-smi"] == "/usr/bin/nvidia-smi"
    # Nothing is named that is not there.
    assert all((tmp_path / path.lstrip("/")).is_file() for path in mounts.values())


def test_libraries_of_another_driver_version_are_not_given(tmp_path: Path) -> None:
    touch(tmp_path, *NODES)
    driver(tmp_path, "/usr/lib/x86_64-linux-gnu", "535.1")
    driver(tmp_path, "/usr/lib64", "550.90.07")
    access = NvidiaCdi(HostRoot(tmp_path)).access(gpu(driver_version="550.90.07"))
    assert {m.host_path for m in access.edits.mounts if "libcuda.so" in m.host_path} == {
        "/usr/lib64/libcuda.so.550.90.07"
    }
    gone = NvidiaCdi(HostRoot(tmp_path)).access(gpu(driver_version="560.1"))
    assert gone.edits.mounts == ()
    assert "nvidia-ctk cdi generate" in (gone.problem or "")


def test_links_to_nowhere_and_absolute_links(tmp_path: Path) -> None:
    touch(tmp_path, *NODES, "/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.550.1")
    directory = tmp_path / "usr/lib/x86_64-linux-gnu"
    (directory / "libcuda.so.1").symlink_to("/etc/alternatives/libcuda")
    (tmp_path / "etc/alternatives").mkdir(parents=True)
    (tmp_path / "etc/alternatives/libcuda").symlink_to(
        "/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.550.1"
    )
    (directory / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.535.1")
    access = NvidiaCdi(HostRoot(tmp_path)).access(gpu(driver_version="550.1"))
    mounts = {m.container_path: m.host_path for m in access.edits.mounts}
    assert mounts["/usr/lib64/libcuda.so.1"] == "/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.550.1"
    assert not any("libnvidia-ml" in path for path in mounts)


@pytest.mark.parametrize(
    ("devices", "chosen"),
    [
        pytest.param(device("0", "/dev/nvidia1") + device(UUID, "/dev/nvidia0"), UUID, id="by UUID"),
        pytest.param(
            device("0", "/dev/nvidia1") + device("1", "/dev/nvidia0"), "1", id="by node, not by index"
        ),
        pytest.param(device("all", "/dev/nvidia0", "/dev/nvidia1"), None, id="never all GPUs"),
        pytest.param(device("0", "/dev/nvidia1"), None, id="not there"),
    ],
)
def test_nvidias_spec_is_used_for_this_gpu_and_no_other(
    tmp_path: Path, devices: str, chosen: str | None
) -> None:
    touch(tmp_path, *NODES, "/dev/nvidia1", "/usr/bin/hook", "/lib.so")
    spec(
        tmp_path,
        f"devices:\n{devices}containerEdits:\n  deviceNodes: [{{path: /dev/nvidiactl}}]\n"
        "  hooks: [{hookName: createContainer, path: /usr/bin/hook}]\n"
        "  mounts: [{hostPath: /lib.so, containerPath: /lib.so}]\n",
    )
    access = NvidiaCdi(HostRoot(tmp_path)).access(gpu(), gpus_on_node=2)
    if chosen is None:
        assert access.device is None
        assert access.edits.device_nodes == NODES
    else:
        assert access.device == f"nvidia.com/gpu={chosen}"
        assert access.edits.device_nodes == ("/dev/nvidiactl", "/dev/nvidia0")
        assert [h.path for h in access.edits.hooks] == ["/usr/bin/hook"]
        assert [m.host_path for m in access.edits.mounts] == ["/lib.so"]


def test_a_spec_that_a_driver_upgrade_left_behind_is_not_used(tmp_path: Path) -> None:
    touch(tmp_path, *NODES)
    driver(tmp_path, "/usr/lib64", "560.1")
    path = spec(
        tmp_path,
        f"devices:\n{device(UUID, '/dev/nvidia0')}containerEdits:\n  mounts: [{{hostPath: /usr/lib64/libcuda.so.550.1, containerPath: /x}}]\n",
    )
    cdi = NvidiaCdi(HostRoot(tmp_path))
    access = cdi.access(gpu())
    assert access.device is None
    assert "libcuda.so.550.1, which does not exist" in access.evidence
    assert access.edits.mounts
    path.unlink()
    spec(tmp_path, f"devices:\n{device(UUID, '/dev/nvidia0')}")
    assert cdi.access(gpu()).device == f"nvidia.com/gpu={UUID}"  # made anew, noticed


def test_our_own_specs_and_junk_are_not_taken_for_nvidias(tmp_path: Path) -> None:
    touch(tmp_path, *NODES)
    spec(tmp_path, f"devices:\n{device(UUID, '/dev/nvidia0')}", "var/run/cdi/edgeagent.io-share-m000001.json")
    spec(tmp_path, "devices: [", "etc/cdi/broken.yaml")
    assert NvidiaCdi(HostRoot(tmp_path)).access(gpu()).device is None


def test_a_mig_instance_gets_its_parents_node_and_its_own_capabilities(tmp_path: Path) -> None:
    caps = ("/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13")
    touch(tmp_path, *NODES, *caps)
    instance = MigInstance("MIG-1", "1g.5gb", 1, 0, 4864, caps)
    own = NvidiaCdi(HostRoot(tmp_path)).access(gpu(), instance)
    assert own.edits.device_nodes == (*NODES, *caps)
    spec(
        tmp_path,
        "devices:\n" + device("0:0", "/dev/nvidia0", *caps) + device("0:1", "/dev/nvidia0", "/dev/other"),
    )
    assert NvidiaCdi(HostRoot(tmp_path)).access(gpu(), instance).device == "nvidia.com/gpu=0:0"


def test_wsl_has_one_device_and_its_own_libraries(tmp_path: Path) -> None:
    """D1: no node is named that does not exist."""
    touch(
        tmp_path,
        "/dev/dxg",
        "/usr/lib/wsl/lib/libcuda.so.1.1",
        "/usr/lib/wsl/lib/libdxcore.so",
        "/usr/lib/wsl/lib/nvidia-smi",
    )
    (tmp_path / "usr/lib/wsl/lib/libcuda.so.1").symlink_to("libcuda.so.1.1")
    access = NvidiaCdi(HostRoot(tmp_path)).access(gpu(("/dev/dxg",)))
    assert access.edits.device_nodes == ("/dev/dxg",)
    assert access.edits.env == {"CUDA_VISIBLE_DEVICES": UUID}
    mounts = {m.container_path: m.host_path for m in access.edits.mounts}
    assert mounts["/usr/lib64/libcuda.so.1"] == "/usr/lib/wsl/lib/libcuda.so.1.1"
    assert mounts["/usr/lib/wsl"] == "/usr/lib/wsl"
    assert access.problem is None
    spec(tmp_path, f"devices:\n{device('all', '/dev/dxg')}")
    assert NvidiaCdi(HostRoot(tmp_path)).access(gpu(("/dev/dxg",))).device == "nvidia.com/gpu=all"
    # Two GPUs behind one device: "all" would not say which.
    assert NvidiaCdi(HostRoot(tmp_path)).access(gpu(("/dev/dxg",)), gpus_on_node=2).device is None


def test_without_device_nodes_the_problem_is_said(tmp_path: Path) -> None:
    access = NvidiaCdi(HostRoot(tmp_path)).access(gpu(()))
    assert "is the NVIDIA driver loaded" in (access.problem or "")
