"""A hostile pod's tricks against the whole agent, each with its outcome (docs/security.md), and what must stay
secret."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.kubelet import ContainerSpec, Pod
from tests.fakes.whole import CORES, IMAGE_ENV, MEMORY, WholeNode, container

SECRETS = ("hunter2-of-the-broker", "key-of-the-commands")


@pytest.fixture(scope="module")
def node() -> Iterator[WholeNode]:
    """Two cards, a broker that is told a password, signed commands; everything logged."""
    directory = Path(f"/tmp/ea-hostile-{os.getpid()}")
    directory.mkdir()
    secrets = directory / "r/etc/edgeagent"
    secrets.mkdir(parents=True)
    for name, text in zip(("password", "hmac"), SECRETS, strict=True):
        (secrets / name).write_text(text)
        (secrets / name).chmod(0o600)
    config = {
        "log": {"level": "debug"},
        "fleet": {
            "username": "edge-1",
            "passwordFile": str(secrets / "password"),
            "commands": {"allow": ["snapshot", "collect-diagnostics"], "perMinute": 600},
        },
    }
    try:
        with WholeNode(directory, "l4", "l4", config=config, broker=True, api=True) as made:
            made.ready()
            yield made
            made.assert_clean_log()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run(node: WholeNode, name: str, limits: dict[str, str | int], env: dict[str, str]) -> Pod:
    pod = node.pod(name, ContainerSpec("app", limits, env=env, image_env=IMAGE_ENV))
    node.kubelet.wait_for(lambda: pod.apps[0].running)
    return pod


def gpu_nodes(pod: Pod) -> list[str]:
    return [n for n in pod.apps[0].device_nodes if n.startswith("/dev/nvidia") and n[11:].isdigit()]


def test_asking_for_every_gpu_in_image_or_pod_gives_none_beyond_the_share(node: WholeNode) -> None:
    pod = run(
        node, "all", {MEMORY: 500}, {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "all"}
    )
    assert pod.apps[0].env["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert len(gpu_nodes(pod)) == 1
    node.gone(pod)


def test_an_environment_that_claims_more_changes_neither_limit_nor_books(node: WholeNode) -> None:
    claims = {"EDGEAGENT_MEMORY_MIB": "999999", "EDGEAGENT_CORES_PCT": "100", "EDGEAGENT_GPU_UUID": "GPU-x",
              "EDGEAGENT_SHARE": "m009999", "EDGEAGENT_POD_UID": "x", "LD_PRELOAD": "/mine.so"}  # fmt: skip
    pod = run(node, "claims", {MEMORY: 500, CORES: 10}, claims)
    env = pod.apps[0].env
    assert (env["EDGEAGENT_MEMORY_MIB"], env["EDGEAGENT_CORES_PCT"]) == ("500", "10")
    assert env["EDGEAGENT_GPU_UUID"] in node.gpus
    (shown,) = node.agent.wait_snapshot(lambda s: s["containers"] and s["containers"][0]["running"])[
        "containers"
    ]
    assert (shown["memoryMiB"], shown["coresPct"], shown["gpuUuid"]) == (500, 10, env["EDGEAGENT_GPU_UUID"])
    limits = node.root / pod.apps[0].mounts["/usr/local/lib/edgeagent/limiter/limits"].lstrip("/")
    assert "999999" not in limits.read_text()
    node.gone(pod)


def test_use_behind_a_forged_share_is_not_charged_to_its_owner(node: WholeNode) -> None:
    """A pod without a share shows another's in its environment and uses the GPU all the same."""
    owner = run(node, "owner", {MEMORY: 500}, {})
    env = owner.apps[0].env
    thief = run(node, "thief", {}, dict(env))
    gpu = env["EDGEAGENT_GPU_UUID"]
    node.nvml.processes(gpu, compute=[(owner.apps[0].instance.pid, 100), (thief.apps[0].instance.pid, 3000)])
    node.nvml.set(gpu, memory_used_mib=3100)
    snapshot = node.agent.wait_snapshot(lambda s: s["containers"] and s["containers"][0].get("usedMiB"))
    assert snapshot["containers"][0]["usedMiB"] == 100
    assert not snapshot["containers"][0]["overLimit"]
    node.nvml.processes(gpu)
    node.nvml.set(gpu, memory_used_mib=0)
    node.kubelet.delete(thief)
    node.gone(owner)


@pytest.mark.parametrize("amount", [23_000, 10**9], ids=["larger than a card", "absurd"])
def test_a_huge_request_holds_up_nobody(node: WholeNode, amount: int) -> None:
    huge = node.share(f"huge-{amount}", amount)
    modest = node.share(f"modest-{amount}", 500)
    node.env(modest)
    assert not huge.apps[0].instances
    node.kubelet.delete(huge)
    node.gone(modest)


def test_links_that_a_container_makes_lead_nowhere(node: WholeNode) -> None:
    """Its /etc/ld.so.preload is a link to the host's secrets, to a device, to itself, to a pipe: read with a
    bound, never waited for, never shown."""
    pod = run(node, "links", {MEMORY: 500}, {})
    pid = pod.apps[0].instance.pid
    preload = node.root / f"proc/{pid}/root/etc/ld.so.preload"
    preload.parent.mkdir(parents=True, exist_ok=True)
    secret = node.root / "etc/edgeagent/password"
    node.nvml.processes(pod.apps[0].env["EDGEAGENT_GPU_UUID"], compute=[(pid, 10)])
    for target in (str(secret), "/dev/zero", str(preload), None):
        preload.unlink(missing_ok=True)
        if target is None:
            os.mkfifo(preload)
        else:
            preload.symlink_to(target)
        before = node.agent.snapshot()["takenMs"]
        snapshot = node.agent.wait_snapshot(lambda s, b=before: s["takenMs"] > b + 700 and s["containers"])  # type: ignore[misc]
        assert snapshot["containers"][0]["levels"]["memory"]["level"] != "cooperative"
        assert SECRETS[0] not in json.dumps(snapshot)
    node.nvml.processes(pod.apps[0].env["EDGEAGENT_GPU_UUID"])
    node.gone(pod)


def test_what_a_container_writes_into_its_own_account_hurts_itself_alone(node: WholeNode) -> None:
    pod = run(node, "scribbler", {MEMORY: 500}, {})
    other = run(node, "bystander", {MEMORY: 500}, {})
    state = node.root / pod.apps[0].mounts["/usr/local/lib/edgeagent/limiter/state"].lstrip("/")
    assert stat.S_ISREG(state.stat().st_mode), "a file, so that no link can be put there"
    for content in (b"", b"\xff" * 70_000, b"\0" * 10):
        state.write_bytes(content)
        before = node.agent.snapshot()["takenMs"]
        node.agent.wait_snapshot(lambda s, b=before: s["takenMs"] > b + 400)  # type: ignore[misc]
    assert {c["pod"]: c["memoryMiB"] for c in node.agent.snapshot()["containers"]} == {
        "scribbler": 500,
        "bystander": 500,
    }
    assert other.apps[0].running
    node.gone(pod)
    node.gone(other)


def test_every_socket_and_file_is_for_the_agents_user_alone(node: WholeNode) -> None:
    sockets = [node.agent.run_dir / "agent.sock", *node.kubelet.directory.glob("edgeagent-*.sock")]
    assert len(sockets) == 4
    assert {stat.S_IMODE(s.stat().st_mode) for s in sockets} == {0o600}
    assert stat.S_IMODE(node.agent.state_dir.stat().st_mode) == 0o700
    limiter = node.agent.run_dir / "limiter"
    written = [p for p in [node.agent.run_dir, *limiter.rglob("*")] if p.name != "state"]
    assert [p for p in written if stat.S_IMODE(p.lstat().st_mode) & 0o022] == []


def test_no_secret_is_in_the_log_the_status_the_metrics_or_a_diagnostics_bundle(node: WholeNode) -> None:
    base = "gpufleet/v1/lab/edge-1"
    command = {"v": 1, "id": "d1", "node": "edge-1", "exp": int(time.time() * 1000) + 60_000,
               "sess": node.observer.last("/status")["sess"]}  # fmt: skip
    node.observer.publish(f"{base}/cmd/collect-diagnostics", command)
    answer = node.observer.wait_payload(
        "/res/ops", lambda p: p["state"] in ("succeeded", "failed", "rejected")
    )
    assert answer["state"] == "succeeded", answer
    (bundle,) = (node.agent.state_dir / "diagnostics").glob("*.tar.gz")
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
    with tarfile.open(bundle) as archive:
        members: dict[str, Any] = {m.name: archive.extractfile(m) for m in archive.getmembers()}
        texts = {name: f.read().decode(errors="replace") for name, f in members.items() if f is not None}
    assert len(texts) > 3
    texts["log"] = node.agent.log()
    texts["snapshot"] = json.dumps(node.agent.snapshot())
    texts["config"] = json.dumps(node.agent.call("config"))
    texts["messages"] = "".join(s.data.decode(errors="replace") for s in node.observer.seen)
    for where, text in texts.items():
        for secret in (*SECRETS, node.api.token):
            assert secret not in text, where


def test_a_container_that_holds_a_share_and_one_that_holds_none_see_no_other_gpu(node: WholeNode) -> None:
    pod = node.pod("two", container("app", 500), container("plain"))
    node.kubelet.wait_for(lambda: pod.running)
    plain = pod.containers["plain"]
    assert plain.device_nodes == []
    assert "EDGEAGENT_GPU_UUID" not in plain.env
    node.gone(pod)
