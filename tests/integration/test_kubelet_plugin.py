"""The device plugin servers themselves: registration whatever the kubelet does, streams, lists, modes,
and what malformed or hostile requests get."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from pathlib import Path

import pytest

from edgeagent.config.schema import GpuMatch, GpuRule, TimeSlicing, TimeSlicingResource
from edgeagent.gpus.model import GpuLink, MigInstance
from edgeagent.kubelet.protos import deviceplugin as dp
from tests.fakes.kubelet import ContainerSpec, Pod, StandInKubelet
from tests.fakes.kubelet_side import (
    CORES,
    MEMORY,
    NUMBER,
    RawCaller,
    Side,
    eventually,
    pretend_gpu,
    running_side,
)

GPU = "nvidia.com/gpu"


def listed(side: Side, resource: str) -> dict[str, str]:
    with RawCaller(side, resource) as caller:
        stream = caller.stream()
        devices = {d.ID: d.health for d in next(iter(stream)).devices}
        stream.cancel()
        return devices


def open_files_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


# --- registration (K1) ---


def test_every_socket_is_for_root_only_and_gone_after_the_stop() -> None:
    with StandInKubelet() as k:
        side = Side(k, [pretend_gpu(0)])
        k.wait_for(side.registered)
        sockets = sorted(k.directory.glob("edgeagent-*.sock"))
        assert [oct(p.stat().st_mode & 0o777) for p in sockets] == ["0o600"] * 3
        assert {r.endpoint for r in k.registrations} == {p.name for p in sockets}
        side.stop()
        assert not list(k.directory.glob("edgeagent-*"))


@pytest.mark.parametrize("use_inotify", [True, False], ids=["inotify", "polling"])
def test_a_kubelet_that_comes_later_is_found(use_inotify: bool) -> None:
    k = StandInKubelet()
    try:
        side = Side(k, [pretend_gpu(0)], use_inotify=use_inotify)
        eventually(lambda: len(list(k.directory.glob("edgeagent-*.sock"))) == 3)
        assert not side.side.connected
        k.start()
        k.wait_for(side.registered)
        side.stop()
    finally:
        k.close()


def test_a_kubelet_that_restarts_again_and_again_gets_one_register_each_time_and_nothing_leaks() -> None:
    rng = random.Random(7)
    with running_side([pretend_gpu(0)]) as (k, side):

        def once() -> None:
            before = len(k.registrations)
            k.stop()
            k.start(refuse_s=rng.choice((0.0, 0.005, 0.3)))
            k.wait_for(side.registered)
            k.wait_for(lambda: k.allocatable == {MEMORY: 8192, CORES: 100, NUMBER: 16})
            names = [r.resource_name for r in k.registrations[before:]]
            assert sorted(names) == sorted([MEMORY, CORES, NUMBER])
            assert all((k.directory / r.endpoint).is_socket() for r in k.registrations[before:])

        for _ in range(5):
            once()
        time.sleep(0.1)
        files, threads = open_files_and_threads()
        for _ in range(15):
            once()
        eventually(lambda: open_files_and_threads()[0] <= files + 4)
        eventually(lambda: open_files_and_threads()[1] <= threads + 4)


def test_kubelet_sock_made_anew_right_after_registration_is_registered_with_again() -> None:
    with running_side([pretend_gpu(0)]) as (k, side):
        for _ in range(5):
            k.stop()
            k.start()
            # Milliseconds after the Register: wiped and made again.
            k.wait_for(lambda: side.side.counters()["list_streams"] > 0)
            k.stop()
            k.start(refuse_s=0.05)
            k.wait_for(side.registered)


def test_own_sockets_that_are_deleted_come_back_registered() -> None:
    with running_side([pretend_gpu(0)]) as (k, side):
        before = len(k.registrations)
        for path in k.directory.glob("edgeagent-*.sock"):
            path.unlink()
        k.wait_for(lambda: len(k.registrations) >= before + 3 and side.registered())
        assert len(list(k.directory.glob("edgeagent-*.sock"))) == 3
        pod = k.run(Pod("a", [ContainerSpec("app", {MEMORY: 10})]))
        k.wait_for(lambda: pod.running)
        assert len(k.registrations) == before + 3


def test_the_whole_directory_may_vanish_and_come_back() -> None:
    with running_side([pretend_gpu(0)]) as (k, side):
        k.stop()
        aside = k.directory.with_name("aside")
        k.directory.rename(aside)
        eventually(lambda: not side.side.connected)
        k.directory.mkdir()
        k.start()
        k.wait_for(side.registered)


def test_a_refused_registration_is_tried_again() -> None:
    k = StandInKubelet()
    try:
        k.fail_register = "not now"
        k.start()
        side = Side(k, [pretend_gpu(0)])
        k.wait_for(lambda: len(k.register_errors) >= 3)
        k.fail_register = None
        k.wait_for(side.registered)
        side.stop()
    finally:
        k.close()


def test_a_stream_that_the_kubelet_drops_in_silence_is_registered_again() -> None:
    with running_side([pretend_gpu(0)]) as (k, side):
        before = len(k.registrations)
        with k.cluster.lock:
            endpoint = k.devices.endpoints[MEMORY]
        endpoint.close()  # as on a list too large: the plugin is told nothing
        k.wait_for(lambda: any(r.resource_name == MEMORY for r in k.registrations[before:]))
        k.wait_for(side.registered)


def test_nothing_is_registered_before_the_gpus_are_known() -> None:
    """K2: never an empty or all-Unhealthy first list because probing takes its time."""
    with StandInKubelet() as k:

        class Slow(Side):
            def tell_gpus(self) -> None:
                if told.is_set():
                    super().tell_gpus()

        told = threading.Event()
        side = Slow(k, [pretend_gpu(0)])
        time.sleep(0.2)
        assert k.registrations == []
        told.set()
        side.tell_gpus()
        k.wait_for(side.registered)
        assert [(u.healthy, u.unhealthy) for u in k.updates if u.resource == MEMORY] == [(8192, 0)]
        side.stop()


def test_without_gpus_nothing_is_offered_and_they_are_offered_once_found() -> None:
    with StandInKubelet() as k:
        side = Side(k, [])
        time.sleep(0.1)
        assert k.registrations == []
        assert side.side.resources() == ()
        side.gpus = [pretend_gpu(0)]
        side.tell_gpus()
        k.wait_for(side.registered)
        side.stop()


# --- streams ---


def test_every_stream_gets_every_change_and_abandoned_ones_give_their_worker_back() -> None:
    with running_side() as (k, side), RawCaller(side, MEMORY) as caller:
        streams = [caller.stream() for _ in range(4)]
        lists = [iter(s) for s in streams]
        for one in lists:
            assert sum(d.health == "Healthy" for d in next(one).devices) == 16384
        streams[0].cancel()
        side.make_sick(1)
        for one in lists[1:]:
            assert sum(d.health == "Healthy" for d in next(one).devices) == 8192
        k.wait_for(lambda: k.allocatable[MEMORY] == 8192)
        for stream in streams:
            stream.cancel()
        eventually(lambda: side.side.counters()["list_streams"] == 3)  # the kubelet's own


def test_more_streams_than_a_kubelet_has_end_the_oldest_and_never_starve_calls() -> None:
    with running_side([pretend_gpu(0)]) as (k, side), RawCaller(side, MEMORY) as caller:
        streams = []
        for _ in range(40):
            stream = caller.stream()
            next(iter(stream))
            streams.append(stream)
        assert side.side.counters()["list_streams"] <= 3 * 6
        assert caller.allocate(["m000000"]) is not None
        for stream in streams:
            stream.cancel()
        k.wait_for(side.registered)


# --- how many (K3) ---


def test_a_list_that_the_kubelet_could_not_swallow_is_not_offered_and_the_unit_that_fits_is_named() -> None:
    with StandInKubelet() as k:
        side = Side(k, [pretend_gpu(i, 143771) for i in range(8)])
        (memory, cores, number) = side.side.resources()
        assert memory.problem is not None
        assert "set memoryUnitMiB to 8" in memory.problem
        assert (memory.registered, cores.registered, number.registered) == (False, False, False)
        time.sleep(0.1)
        assert k.registrations == []
        assert memory.problem in side.side.problems()
        side.stop()


def test_163840_units_are_listed_and_flip_by_half() -> None:
    with running_side([pretend_gpu(0, 81920), pretend_gpu(1, 81920)]) as (k, side):
        k.wait_for(lambda: k.allocatable.get(MEMORY) == 163840)
        side.make_sick(1)
        k.wait_for(lambda: k.allocatable[MEMORY] == 81920)
        pod = k.run(Pod("big", [ContainerSpec("app", {MEMORY: "8k", CORES: 50})]))
        k.wait_for(lambda: pod.running)
        ids = sorted(k.ids(pod, "app")[MEMORY])
        assert ids == [f"m{n:06d}" for n in range(8000)]  # asked for in one piece


def test_a_coarser_unit_is_in_the_name_and_floors_the_supply() -> None:
    with running_side([pretend_gpu(0, 23034)], memory_unit_mib=100, reserve_mib=800) as (k, side):
        k.wait_for(lambda: k.allocatable.get(f"{MEMORY}-100mi") == 222)
        pod = k.run(Pod("all", [ContainerSpec("app", {f"{MEMORY}-100mi": 222})]))
        k.wait_for(lambda: pod.running)
        assert pod.containers["app"].env["EDGEAGENT_MEMORY_MIB"] == "22200"
        assert side.side.room(side.gpus[0].uuid).free_mib == 0


def test_hami_names() -> None:
    with running_side([pretend_gpu(0)], names="hami") as (k, _):
        k.wait_for(lambda: k.allocatable == {"nvidia.com/gpumem": 8192, "nvidia.com/gpucores": 100, GPU: 16})
        pod = k.run(
            Pod("a", [ContainerSpec("app", {GPU: 1, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30})])
        )
        k.wait_for(lambda: pod.running)
        assert pod.containers["app"].env["EDGEAGENT_MEMORY_MIB"] == "3000"


# --- preference ---


def test_a_preference_is_one_piece_of_free_tokens_with_what_must_be_in_it() -> None:
    with running_side([pretend_gpu(0, 100)]) as (k, side), RawCaller(side, MEMORY) as caller:
        pod = k.run(Pod("a", [ContainerSpec("app", {MEMORY: 10})]))
        k.wait_for(lambda: pod.running)
        every = [f"m{n:06d}" for n in range(100)]
        random.Random(1).shuffle(every)
        assert sorted(caller.prefer(every, [], 5)) == [f"m{n:06d}" for n in range(10, 15)]
        assert sorted(caller.prefer(every, ["m000050"], 3)) == ["m000010", "m000011", "m000050"]
        # Only what is available, held by us or not.
        assert sorted(caller.prefer(["m000001", "m000002", "m000099"], [], 3)) == [
            "m000001", "m000002", "m000099"
        ]  # fmt: skip


# --- bad input ---


def _checkpoint(k: StandInKubelet, text: str | None) -> None:
    path = k.directory / "kubelet_internal_checkpoint"
    if text is None:
        path.unlink()
    else:
        path.write_text(text)


@pytest.mark.parametrize(
    ("ids", "code", "sentence"),
    [
        pytest.param(["m999999"], "NOT_FOUND", "never offered", id="never offered"),
        pytest.param(["m000001", "m000001"], "ALREADY_EXISTS", "twice", id="twice"),
        pytest.param([], "INVALID_ARGUMENT", "no device ID", id="none"),
        pytest.param(["c000001"], "INVALID_ARGUMENT", "not an ID of this resource", id="another letter"),
        pytest.param(["m00001٢"], "INVALID_ARGUMENT", "not an ID of this resource", id="foreign digits"),
        pytest.param(["x" * 5000], "INVALID_ARGUMENT", "not an ID of this resource", id="long"),
    ],
)
def test_allocate_refuses_only_what_would_be_wrong_to_grant(ids: list[str], code: str, sentence: str) -> None:
    with running_side([pretend_gpu(0)]) as (_, side), RawCaller(side, MEMORY) as caller:
        before = side.side.gate.read(lambda ledger, line, now_s: (ledger.held(), ledger.bookings()))
        assert caller.allocate(ids) is None
        assert caller.code == code
        assert sentence in caller.text
        assert (
            caller.raw(
                dp.PRE_START_CONTAINER, dp.PreStartContainerRequest(devices_ids=ids).SerializeToString()
            )
            is None
        )
        assert caller.code == code
        assert side.side.gate.read(lambda ledger, line, now_s: (ledger.held(), ledger.bookings())) == before


@pytest.mark.parametrize("method", [dp.ALLOCATE, dp.GET_PREFERRED_ALLOCATION, dp.PRE_START_CONTAINER])
@pytest.mark.parametrize(
    "junk", [b"\xff" * 40, b"\x0a\x7f", b"\x0a\x05\x0a\x07m00"], ids=["ff", "short", "cut"]
)
def test_junk_gets_a_status_and_no_traceback(method: str, junk: bytes) -> None:
    with running_side([pretend_gpu(0)]) as (_, side), RawCaller(side, MEMORY) as caller:
        assert caller.raw(method, junk) is None
        assert caller.code == "INVALID_ARGUMENT"
        assert "Traceback" not in caller.text
        assert caller.allocate(["m000000"]) is not None


@pytest.mark.parametrize(
    ("spoil", "code", "sentence"),
    [
        pytest.param(None, "DATA_LOSS", "checkpoint", id="no checkpoint"),
        pytest.param(
            '{"Data": {"PodDeviceEntries": [{"PodUID"', "DATA_LOSS", "not whole JSON", id="truncated"
        ),
        pytest.param("[" * 200_000, "DATA_LOSS", "checkpoint", id="deep"),
        pytest.param('{"Data": {}}', "DEADLINE_EXCEEDED", "names none that holds", id="never shows it"),
    ],
)
def test_a_start_that_cannot_be_attributed_is_refused_with_the_reason(
    spoil: str | None, code: str, sentence: str
) -> None:
    with running_side([pretend_gpu(0)]) as (k, side), RawCaller(side, MEMORY) as caller:
        assert caller.allocate(["m000005", "m000006"]) is not None
        _checkpoint(k, spoil)
        assert not caller.pre_start(["m000005", "m000006"])
        assert caller.code == code
        assert sentence in caller.text
        assert side.side.containers() == ()
        assert [e.code for e in side.kinds("refused")] == [code]


def test_a_checkpoint_that_is_written_late_is_waited_for() -> None:
    with running_side([pretend_gpu(0)]) as (k, side), RawCaller(side, MEMORY) as caller:
        assert caller.allocate(["m000005"]) is not None
        entry = {"PodUID": "8f3c2c0e-0000-0000-0000-000000000001", "ContainerName": "app", "ResourceName": MEMORY,
                 "DeviceIDs": {"-1": ["m000005"]}, "AllocResp": ""}  # fmt: skip
        text = json.dumps({"Data": {"PodDeviceEntries": [entry], "RegisteredDevices": {}}, "Checksum": 1})
        _checkpoint(k, text[:40])
        later = threading.Timer(0.15, _checkpoint, (k, text))
        later.start()
        assert caller.pre_start(["m000005"]), (caller.code, caller.text)
        later.join()
        assert [c.container for c in side.side.containers()] == ["app"]


def test_a_fault_inside_becomes_internal_and_the_process_lives() -> None:
    with running_side([pretend_gpu(0)]) as (_, side), RawCaller(side, MEMORY) as caller:
        grant = side.side.gate.grant

        def broken(letter: str, mask: int) -> object:
            raise ZeroDivisionError("secret detail")

        side.side.gate.grant = broken  # type: ignore[assignment,method-assign]
        assert caller.allocate(["m000000"]) is None
        assert (caller.code, "secret" in caller.text) == ("INTERNAL", False)
        side.side.gate.grant = grant  # type: ignore[method-assign]
        assert caller.allocate(["m000000"]) is not None


def test_replayed_allocates_and_starts_change_nothing() -> None:
    with running_side([pretend_gpu(0)]) as (k, side), RawCaller(side, MEMORY) as caller:
        pod = k.run(Pod("a", [ContainerSpec("app", {MEMORY: 4, CORES: 10})]))
        k.wait_for(lambda: pod.running)
        ids = sorted(k.ids(pod, "app")[MEMORY])
        before = side.side.gate.read(lambda ledger, line, now_s: (ledger.held(), ledger.bookings()))
        assert caller.allocate(ids) is not None
        assert caller.pre_start(ids)
        after = side.side.gate.read(lambda ledger, line, now_s: (ledger.held(), ledger.bookings()))
        assert after == before


# --- modes ---


def rules(*modes: str, **more: object) -> tuple[GpuRule, ...]:
    return tuple(GpuRule(match=GpuMatch(index=i), mode=mode, **more) for i, mode in enumerate(modes))  # type: ignore[arg-type]


def test_modes_mix_on_one_node() -> None:
    gpus = [pretend_gpu(i) for i in range(4)]
    with running_side(gpus, gpus=rules("shared", "exclusive", "off", "exclusive")) as (k, side):
        k.wait_for(lambda: k.allocatable == {MEMORY: 8192, CORES: 100, NUMBER: 16, GPU: 2})
        assert set(listed(side, GPU)) == {gpus[1].uuid, gpus[3].uuid}
        shared = k.run(Pod("s", [ContainerSpec("app", {MEMORY: 100})]))
        whole = k.run(Pod("w", [ContainerSpec("app", {GPU: 1})]))
        k.wait_for(lambda: shared.running and whole.running)
        uuid = whole.containers["app"].env["EDGEAGENT_GPU_UUID"]
        assert whole.containers["app"].cdi_devices == [f"edgeagent.io/gpu={uuid}"]
        assert whole.containers["app"].env["NVIDIA_VISIBLE_DEVICES"] == "void"
        shown = {c.pod: (c.mode.value, c.gpu_uuid, c.memory_mib) for c in side.side.containers()}
        assert shown == {"s": ("shared", gpus[0].uuid, 100), "w": ("exclusive", uuid, None)}


def test_a_sick_exclusive_card_goes_unhealthy_alone_and_a_cordoned_one_keeps_its_pod() -> None:
    gpus = [pretend_gpu(i) for i in range(3)]
    with running_side(gpus, mode="exclusive") as (k, side):
        pod = k.run(Pod("a", [ContainerSpec("app", {GPU: 1})]))
        k.wait_for(lambda: pod.running)
        mine = pod.containers["app"].env["EDGEAGENT_GPU_UUID"]
        other, third = (g for g in gpus if g.uuid != mine)
        side.make_sick(other.index)
        k.wait_for(lambda: k.allocatable[GPU] == 2)
        assert listed(side, GPU)[other.uuid] == "Unhealthy"
        side.cordon(next(g.index for g in gpus if g.uuid == mine))
        side.cordon(third.index)
        k.wait_for(lambda: k.allocatable[GPU] == 1)
        assert listed(side, GPU)[mine] == "Healthy"
        with RawCaller(side, GPU) as caller:
            assert caller.allocate([other.uuid]) is None
            assert (caller.code, "XID 79" in caller.text) == ("UNAVAILABLE", True)
            assert caller.allocate(["GPU-unknown"]) is None
            assert caller.code == "NOT_FOUND"


def test_several_cards_come_with_the_best_links() -> None:
    gpus = [pretend_gpu(i) for i in range(4)]
    pair = lambda a, b: frozenset((gpus[a].uuid, gpus[b].uuid))  # noqa: E731
    topology = {pair(0, 2): GpuLink("nvlink", 4), pair(1, 3): GpuLink("pix"), pair(0, 1): GpuLink("node")}
    with running_side(gpus, mode="exclusive") as (_, side), RawCaller(side, GPU) as caller:
        side.side.set_gpus(gpus, topology=topology)
        every = [g.uuid for g in reversed(gpus)]
        assert set(caller.prefer(every, [], 2)) == {gpus[0].uuid, gpus[2].uuid}
        assert set(caller.prefer(every, [gpus[3].uuid], 2)) == {gpus[3].uuid, gpus[1].uuid}


def test_a_pasted_time_slicing_block() -> None:
    block = TimeSlicing(
        rename_by_default=True,
        fail_requests_greater_than_one=True,
        resources=(TimeSlicingResource(GPU, 4),),
    )
    gpus = [pretend_gpu(0), pretend_gpu(1)]
    with running_side(gpus, time_slicing=block) as (k, side), RawCaller(side, f"{GPU}.shared") as caller:
        k.wait_for(lambda: k.allocatable == {f"{GPU}.shared": 8})
        ids = sorted(listed(side, f"{GPU}.shared"))
        assert ids[0] == f"{gpus[0].uuid}::0"
        pods = [k.run(Pod(f"p{i}", [ContainerSpec("app", {f"{GPU}.shared": 1})])) for i in range(2)]
        k.wait_for(lambda: all(p.running for p in pods))
        assert {p.containers["app"].env["EDGEAGENT_GPU_UUID"] for p in pods} == {g.uuid for g in gpus}
        assert caller.allocate(ids[:2]) is None
        assert (caller.code, "failRequestsGreaterThanOne" in caller.text) == ("INVALID_ARGUMENT", True)
        side.make_sick(0)
        k.wait_for(lambda: k.allocatable[f"{GPU}.shared"] == 4)  # all four replicas, not one


def test_mig_instances_are_offered_and_followed_and_the_parent_never() -> None:
    def with_instances(*profiles: str) -> list[object]:
        instances = tuple(MigInstance(f"MIG-{p}-{i}", p, i, 0, 4864) for i, p in enumerate(profiles))
        return [pretend_gpu(0, mig_enabled=True, mig_instances=instances), pretend_gpu(1, mig_enabled=False)]

    with running_side(with_instances("1g.5gb", "1g.5gb", "3g.20gb")) as (k, side):  # type: ignore[arg-type]
        expected = {
            "nvidia.com/mig-1g.5gb": 2,
            "nvidia.com/mig-3g.20gb": 1,
            MEMORY: 8192,
            CORES: 100,
            NUMBER: 16,
        }
        k.wait_for(lambda: k.allocatable == expected)
        pod = k.run(Pod("a", [ContainerSpec("app", {"nvidia.com/mig-3g.20gb": 1})]))
        k.wait_for(lambda: pod.running)
        (share,) = side.side.containers()
        assert (share.mode.value, share.share, share.memory_mib) == ("mig", "MIG-3g.20gb-2", 4864)
        side.gpus = with_instances("3g.20gb")  # type: ignore[assignment]
        side.tell_gpus()
        k.wait_for(lambda: k.allocatable.get("nvidia.com/mig-1g.5gb", 0) == 0)
        assert k.allocatable["nvidia.com/mig-3g.20gb"] == 1


def test_a_name_that_would_mean_two_things_is_offered_once_and_said() -> None:
    with running_side(names="hami", gpus=rules("shared", "exclusive")) as (k, side):
        k.wait_for(lambda: k.allocatable.get("nvidia.com/gpumem") == 8192)
        assert k.allocatable[GPU] == 16
        (problem,) = (r.problem for r in side.side.resources() if r.problem)
        assert "cannot mean a share" in (problem or "")


def test_a_device_of_nvidias_own_spec_is_named_where_there_is_one(tmp_path: Path) -> None:
    def prepare(root: Path, uuid: str) -> None:
        (root / "dev").mkdir(exist_ok=True)
        (root / "dev/nvidia0").touch()
        (root / "etc/cdi").mkdir(parents=True, exist_ok=True)
        (root / "etc/cdi/nvidia.yaml").write_text(
            "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n"
            f"- name: {uuid}\n  containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia0\n"
            "containerEdits:\n  env:\n  - NVIDIA_VISIBLE_DEVICES=void\n"
        )

    gpu = pretend_gpu(0, source="nvml", device_nodes=("/dev/nvidia0",))
    with StandInKubelet() as k:
        prepare(k.root, gpu.uuid)
        side = Side(k, [gpu, pretend_gpu(1)], gpus=rules("exclusive"))
        k.wait_for(side.registered)
        pod = k.run(Pod("a", [ContainerSpec("app", {GPU: 1})]))
        k.wait_for(lambda: pod.running)
        assert pod.containers["app"].cdi_devices == [f"nvidia.com/gpu={gpu.uuid}"]
        assert pod.containers["app"].device_nodes == ["/dev/nvidia0"]
        side.stop()
        # The same edits in a share.
        side = Side(k, [gpu])
        k.wait_for(side.registered)
        share = k.run(Pod("s", [ContainerSpec("app", {MEMORY: 100})]))
        k.wait_for(lambda: share.running)
        assert share.containers["app"].device_nodes == ["/dev/nvidia0"]
        side.stop()


def test_wakes_while_idle_are_few() -> None:
    """Nothing polls in a loop: the process's threads are asleep."""
    with running_side([pretend_gpu(0)]) as (_, side):
        time.sleep(0.3)
        names = {t.name for t in threading.enumerate()}
        assert {"kubelet-watch", "gate-sweep"} <= names
        assert side.side.counters()["list_streams"] == 3
