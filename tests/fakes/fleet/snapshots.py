"""NodeSnapshots for tests: a node with two GPUs, shares, a waiting container and a condition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgeagent.gpus.model import Gpu, GpuKind, GpuReading
from edgeagent.isolation.levels import AxisLevel, Level, Levels
from edgeagent.snapshot import (
    Condition,
    ContainerShare,
    GpuMode,
    GpuState,
    Health,
    HostFacts,
    HostUse,
    NodeSnapshot,
    NodeState,
    ResourceState,
    UplinkState,
    WaitingContainer,
)

NODE, SITE = "box-1", "plant-7"
T0_MS = 1_790_000_000_000
COOPERATIVE = Levels(
    AxisLevel(Level.COOPERATIVE, "limiter", "library mapped", None),
    AxisLevel(Level.NONE, "none", "", "no_mechanism"),
)


def gpu_uuid(n: int) -> str:
    return f"GPU-1a2b3c4d-0000-4000-8000-{n:012d}"


def container(n: int, gpu: int = 0, **changes: Any) -> ContainerShare:
    return replace(
        ContainerShare(
            pod_uid=f"0f8fad5b-d9cb-469f-a165-7086{n:08d}",
            container="main",
            gpu_uuid=gpu_uuid(gpu),
            mode=GpuMode.SHARED,
            namespace="vision",
            pod=f"inference-7c9d8f-{n:05d}",
            memory_mib=4000,
            cores_pct=25,
            used_mib=1234.4 + n,
            util_pct=17.26,
            levels=COOPERATIVE,
            since_ms=T0_MS,
            running=True,
        ),
        **changes,
    )


def reading(gpu: int = 0, **changes: Any) -> GpuReading:
    return replace(
        GpuReading(
            uuid=gpu_uuid(gpu),
            taken_mono_s=100.0,
            memory_used_mib=5000.5,
            memory_free_mib=15000.0,
            util_pct=43.0,
            temperature_c=61.0,
            power_w=70.25,
            clock_sm_mhz=1500.0,
            throttle_reasons=frozenset({"idle"}),
        ),
        **changes,
    )


def condition(ident: str = "overtemperature-gpu-1a2b", **changes: Any) -> Condition:
    return replace(
        Condition(
            id=ident,
            type="OverTemperature",
            severity="warning",
            since_ms=T0_MS,
            message="GPU 0 is at 95 °C, above 90 °C: check the fan.",
            gpu_uuid=gpu_uuid(0),
            makes_unhealthy=False,
            facts={"temperatureC": 95},
            pods_hurt=("vision/inference-7c9d8f-00001",),
        ),
        **changes,
    )


def gpu_state(n: int = 0, promised_mib: int = 8000, **changes: Any) -> GpuState:
    return replace(
        GpuState(
            gpu=Gpu(
                uuid=gpu_uuid(n),
                index=n,
                kind=GpuKind.DISCRETE,
                source="simulated",
                model="RTX 4000 Ada",
                memory_total_mib=20475,
                memory_reserved_mib=475,
                compute_capability=(8, 9),
                pci_address=f"0000:6{n}:00.0",
                driver_version="570.86.10",
                temperature_slowdown_c=90.0,
            ),
            mode=GpuMode.SHARED,
            health=Health.OK,
            usable_mib=20000,
            reserved_mib=475,
            promised_mib=promised_mib,
            free_mib=20000 - promised_mib,
            promised_cores_pct=50,
            free_cores_pct=50,
            reading=reading(n),
            levels=COOPERATIVE,
            host_use=HostUse(120.0, ((77, "Xorg", 120.0),)),
        ),
        **changes,
    )


def snapshot(**changes: Any) -> NodeSnapshot:
    return replace(
        NodeSnapshot(
            node=NODE,
            site=SITE,
            agent_version="0.1.0",
            config_hash="c0ffee123456",
            started_ms=T0_MS - 60_000,
            taken_ms=T0_MS,
            state=NodeState.READY,
            health=Health.DEGRADED,
            reasons=("GPU 0 is at 95 °C, above 90 °C: check the fan.",),
            gpus=(gpu_state(0, conditions=(condition(),)), gpu_state(1, promised_mib=0)),
            containers=(container(1), container(2)),
            waiting=(
                WaitingContainer(
                    pod_uid="0f8fad5b-d9cb-469f-a165-708600000009",
                    container="main",
                    reason="needs 30000 MiB; the largest free block is 20000 MiB on GPU 1",
                    since_ms=T0_MS,
                    memory_mib=30000,
                    namespace="vision",
                    pod="big-0",
                    permanent=True,
                ),
            ),
            resources=(
                ResourceState("volcano.sh/vgpu-memory", "memory", 1, 40000, 40000, 8000, True),
                ResourceState(
                    "volcano.sh/vgpu-cores", "cores", None, 0, 0, 0, False, problem="the list is too large"
                ),
            ),
            host=HostFacts("box-1", "x86_64", memory_total_mib=32000, cpu_count=8, load_1m=0.5),
            uplink=UplinkState(True),
            kubelet_connected=True,
            counters={"allocations_total": 12},
            evidence=("profile 2x-rtx-4000-ada",),
        ),
        **changes,
    )


def one_gpu_four_pods(n: int = 0) -> NodeSnapshot:
    """The node of the byte budget: 1 GPU, 4 pods, values that move a little with `n`."""
    wobble = (n * 7919) % 97
    return snapshot(
        gpus=(
            gpu_state(
                0,
                promised_mib=16000,
                reading=reading(
                    0,
                    memory_used_mib=9000.0 + wobble * 16,
                    memory_free_mib=11000.0 - wobble * 16,
                    util_pct=float(20 + wobble % 60),
                    temperature_c=55.0 + wobble % 9,
                    power_w=60.0 + wobble / 3,
                    clock_sm_mhz=1500.0 + 15 * (wobble % 7),
                ),
            ),
        ),
        containers=tuple(
            container(i, used_mib=2000.0 + i * 100 + (wobble * i) % 64, util_pct=float((wobble + 5 * i) % 25))
            for i in range(4)
        ),
        waiting=(),
        reasons=(),
        health=Health.OK,
    )
