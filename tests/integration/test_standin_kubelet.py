"""The stand-in kubelet behaves as was measured on a real one: each behaviour is a test."""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from edgeagent.kubelet.protos import deviceplugin as dp
from edgeagent.kubelet.protos import podresources as pr
from tests.fakes.kubelet import FAST, ContainerSpec, Deployment, Pod, Scheduler, StandInKubelet
from tests.fakes.kubelet.kubelet import POD_RESOURCES

MEM = "volcano.sh/vgpu-memory"
CORES = "volcano.sh/vgpu-cores"


class Plugin:
    """One resource of `count` IDs, as bare as can be. Hooks replace what a call answers."""

    def __init__(self, k: StandInKubelet, resource: str, count: int = 8, *, pre_start: bool = False,
                 prefer: Callable[[list[str], list[str], int], list[str]] | None = None,
                 ids: list[str] | None = None) -> None:  # fmt: skip
        self.k = k
        self.resource = resource
        self.endpoint = resource.replace("/", "-") + ".sock"
        letter = resource.rpartition("-")[2][0]
        self.health = dict.fromkeys(ids or [f"{letter}{n:06d}" for n in range(count)], dp.HEALTHY)
        self.options = dp.DevicePluginOptions(
            pre_start_required=pre_start, get_preferred_allocation_available=prefer is not None
        )
        self.prefer = prefer
        self.on_allocate: Callable[[list[str]], dp.ContainerAllocateResponse | None] = lambda ids: None
        self.on_pre_start: Callable[[list[str], grpc.ServicerContext], None] = lambda ids, context: None
        self._lists: list[queue.Queue[bool]] = []
        self._server: grpc.Server | None = None

    def __enter__(self) -> Plugin:
        self.serve()
        self.register()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def serve(self) -> None:
        def unary(method: Any, request: Any) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(
                method,
                request_deserializer=request.FromString,
                response_serializer=lambda m: m.SerializeToString(),
            )

        handlers = {
            "GetDevicePluginOptions": unary(lambda request, context: self.options, dp.Empty),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self._list_and_watch,
                request_deserializer=dp.Empty.FromString,
                response_serializer=lambda m: m.SerializeToString(),
            ),
            "GetPreferredAllocation": unary(self._preferred, dp.PreferredAllocationRequest),
            "Allocate": unary(self._allocate, dp.AllocateRequest),
            "PreStartContainer": unary(self._pre_start, dp.PreStartContainerRequest),
        }
        path = self.k.directory / self.endpoint
        path.unlink(missing_ok=True)
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="plugin")
        self._server = grpc.server(self._pool, options=(("grpc.max_send_message_length", -1),))
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(dp.DEVICE_PLUGIN_SERVICE, handlers),)
        )
        self._server.add_insecure_port(f"unix:{path}")
        self._server.start()

    def register(self, **fields: Any) -> None:
        request = {"version": dp.VERSION, "endpoint": self.endpoint, "resource_name": self.resource}
        request |= {"options": self.options, **fields}
        with grpc.insecure_channel(f"unix:{self.k.directory}/kubelet.sock") as channel:
            call = channel.unary_unary(
                dp.REGISTER,
                request_serializer=dp.RegisterRequest.SerializeToString,
                response_deserializer=dp.Empty.FromString,
            )
            call(dp.RegisterRequest(**request), timeout=5, wait_for_ready=True)

    def stop(self) -> None:
        if self._server is not None:
            for one in self._lists:
                one.put(False)
            self._server.stop(None).wait()
            self._pool.shutdown()
            self._server = None

    def send(self) -> None:
        for one in self._lists:
            one.put(True)

    def set_health(self, health: str, ids: list[str]) -> None:
        self.health.update(dict.fromkeys(ids, health))
        self.send()

    def _list_and_watch(self, request: dp.Empty, context: grpc.ServicerContext) -> Iterator[Any]:
        wake: queue.Queue[bool] = queue.Queue()
        self._lists.append(wake)
        context.add_callback(lambda: wake.put(False))
        again = True
        while again:
            devices = [dp.Device(ID=i, health=h) for i, h in self.health.items()]
            yield dp.ListAndWatchResponse(devices=devices)
            again = wake.get()
        self._lists.remove(wake)

    def _preferred(self, request: Any, context: grpc.ServicerContext) -> dp.PreferredAllocationResponse:
        assert self.prefer is not None
        (one,) = request.container_requests
        try:
            ids = self.prefer(
                list(one.available_deviceIDs), list(one.must_include_deviceIDs), one.allocation_size
            )
        except ValueError as e:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
        answer = dp.PreferredAllocationResponse()
        answer.container_responses.add(deviceIDs=ids)
        return answer

    def _allocate(self, request: dp.AllocateRequest, context: grpc.ServicerContext) -> dp.AllocateResponse:
        (one,) = request.container_requests
        try:
            response = self.on_allocate(list(one.devices_ids))
        except ValueError as e:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(e))
        return dp.AllocateResponse(container_responses=[response or dp.ContainerAllocateResponse()])

    def _pre_start(
        self, request: dp.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> dp.PreStartContainerResponse:
        try:
            self.on_pre_start(list(request.devices_ids), context)
        except ValueError as e:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(e))
        return dp.PreStartContainerResponse()


@pytest.fixture
def k() -> Iterator[StandInKubelet]:
    with StandInKubelet() as kubelet:
        yield kubelet


def pod(name: str, limits: dict[str, str | int] | None = None, **fields: Any) -> Pod:
    return Pod(name, [ContainerSpec("app", limits or {})], **fields)


def ready(k: StandInKubelet, **sums: int) -> None:
    """Waits until the node offers so much."""
    wanted = {{"mem": MEM, "cores": CORES}[name]: n for name, n in sums.items()}
    k.wait_for(lambda: {r: k.allocatable.get(r) for r in wanted} == wanted)


def lister(k: StandInKubelet, method: str, request: Any, response: Any) -> Any:
    with grpc.insecure_channel(f"unix:{k.root / POD_RESOURCES}/kubelet.sock") as channel:
        call = channel.unary_unary(
            method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        return call(request, timeout=5)


def listed(k: StandInKubelet) -> dict[str, dict[str, list[tuple[str, list[str]]]]]:
    """pod -> container -> entries, as podresources List says."""
    answer = lister(k, pr.LIST, pr.ListPodResourcesRequest(), pr.ListPodResourcesResponse)
    return {
        p.name: {c.name: [(d.resource_name, list(d.device_ids)) for d in c.devices] for c in p.containers}
        for p in answer.pod_resources
    }


def checkpoint(k: StandInKubelet) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((k.directory / "kubelet_internal_checkpoint").read_text())
    return data


def methods(k: StandInKubelet, **where: str) -> list[tuple[str, str]]:
    return [
        (c.method, c.resource) for c in k.calls if all(getattr(c, name) == v for name, v in where.items())
    ]


# Registration and lists.


def test_register_dials_back_and_offers_the_list(k: StandInKubelet) -> None:
    with Plugin(k, MEM, 8):
        ready(k, mem=8)
        assert k.capacity == {MEM: 8}
        (request,) = k.registrations
        assert (request.resource_name, request.endpoint) == (MEM, "volcano.sh-vgpu-memory.sock")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"version": "v1alpha"}, "not supported by kubelet"),
        ({"resource_name": "vgpu"}, 'the ResourceName "vgpu" is invalid'),
        ({"endpoint": "absent.sock"}, "failed to dial device plugin"),
    ],
    ids=["version", "name", "endpoint"],
)
def test_register_refuses(fields: dict[str, str], text: str) -> None:
    with StandInKubelet(timing=FAST.but(dial_s=0.2)) as k:
        plugin = Plugin(k, MEM)
        with pytest.raises(grpc.RpcError) as refused:
            plugin.register(**fields)
        assert text in refused.value.details()
        assert not k.registrations
        assert k.allocatable == {}


def test_unhealthy_ids_leave_allocatable_but_not_capacity(k: StandInKubelet) -> None:
    with Plugin(k, MEM, 8) as plugin:
        ready(k, mem=8)
        plugin.set_health(dp.UNHEALTHY, ["m000001", "m000002"])
        ready(k, mem=6)
        assert k.capacity == {MEM: 8}
        plugin.set_health(dp.HEALTHY, ["m000001"])
        ready(k, mem=7)


@pytest.mark.parametrize(
    ("length", "passes", "fails"), [(12, 167_000, 168_500), (40, 79_000, 79_200)], ids=["12", "40"]
)
def test_lists_over_4_mib_drop_the_stream_and_nobody_tells_the_plugin(
    k: StandInKubelet, length: int, passes: int, fails: int
) -> None:
    ids = [f"{n:0{length}d}" for n in range(fails)]
    with Plugin(k, MEM, ids=ids[:passes]) as plugin:
        ready(k, mem=passes)
        plugin.health.update(dict.fromkeys(ids, dp.HEALTHY))
        plugin.send()
        ready(k, mem=0)
        assert k.capacity == {MEM: passes}
        assert k.devices.endpoints[MEM].error.startswith("rpc error: code = ResourceExhausted")
        # The plugin must register again, with a list that fits.
        plugin.health = dict.fromkeys(ids[:8], dp.HEALTHY)
        plugin.register()
        ready(k, mem=8)


def test_every_open_stream_counts(k: StandInKubelet) -> None:
    """A second registration leaves the first stream open; the list comes on both."""
    with Plugin(k, MEM, 8) as plugin:
        ready(k, mem=8)
        plugin.register()
        k.wait_for(lambda: len(k.updates) == 2)
        plugin.set_health(dp.UNHEALTHY, ["m000001"])
        k.wait_for(lambda: len(k.updates) == 4)
        assert k.allocatable == {MEM: 7}


# Order of calls.


def test_containers_in_order_and_resources_at_random() -> None:
    """GPA(r1), Allocate(r1), GPA(r2), Allocate(r2) per container, the first resource drawn anew."""
    first: list[str] = []
    with StandInKubelet(seed=3) as k:
        prefer = lambda available, must, size: sorted(available)[:size]  # noqa: E731
        with Plugin(k, MEM, 100, prefer=prefer), Plugin(k, CORES, 100, prefer=prefer):
            ready(k, mem=100, cores=100)
            for n in range(12):
                p = k.run(pod(f"p{n}", {MEM: 2, CORES: 3}))
                k.wait_for(lambda p=p: p.running)
                order = methods(k, pod=p.name)
                assert [m for m, _ in order] == ["GetPreferredAllocation", "Allocate"] * 2
                assert order[0][1] == order[1][1] != order[2][1] == order[3][1]
                first.append(order[0][1])
    assert set(first) == {MEM, CORES}


def test_init_containers_come_first(k: StandInKubelet) -> None:
    with Plugin(k, MEM, 20):
        ready(k, mem=20)
        p = k.run(
            Pod(
                "p",
                [ContainerSpec("a", {MEM: 1}), ContainerSpec("b", {MEM: 1})],
                init=[
                    ContainerSpec("i", {MEM: 1}, run_s=0),
                    ContainerSpec("s", {MEM: 1}, sidecar=True),
                ],
            )
        )
        k.wait_for(lambda: p.running)
        assert [c.container for c in k.calls] == ["i", "s", "a", "b"]
        assert p.containers["i"].state == "terminated"
        assert p.containers["s"].running


def test_never_two_calls_at_a_time_and_pods_not_interleaved() -> None:
    """Ten pods at once with slow handlers; pods are admitted in an order that is not their creation's."""
    with StandInKubelet(seed=1) as k:
        gate = threading.Event()
        with Plugin(k, MEM, 100) as memory, Plugin(k, CORES, 100) as cores:
            memory.on_allocate = cores.on_allocate = lambda ids: gate.wait(5) and None
            ready(k, mem=100, cores=100)
            pods = [k.run(pod(f"p{n}", {MEM: 1, CORES: 1})) for n in range(10)]
            k.wait_for(lambda: k.calls)
            gate.set()
            k.wait_for(lambda: all(p.running for p in pods))
        calls = k.calls
        assert len(calls) == 20
        assert all(a.end_s <= b.begin_s for a, b in itertools.pairwise(calls))
        names = [name for name, _ in itertools.groupby(c.pod for c in calls)]
        assert len(names) == 10
        assert names != sorted(names)


def test_slow_allocate_holds_up_the_admission_of_all_pods(k: StandInKubelet) -> None:
    gate = threading.Event()
    with Plugin(k, MEM, 8) as plugin:
        plugin.on_allocate = lambda ids: gate.wait(5) and None
        ready(k, mem=8)
        k.run(pod("gpu", {MEM: 1}))
        k.wait_for(lambda: k.calls)
        other = k.run(pod("plain"))
        with pytest.raises(TimeoutError):
            k.wait_for(lambda: other.admitted, 0.2)
        gate.set()
        k.wait_for(lambda: other.running)


# Preferences.


def test_preference_asked_only_when_there_is_a_choice(k: StandInKubelet) -> None:
    with Plugin(k, MEM, 8, prefer=lambda available, must, size: sorted(available)[-size:]):
        ready(k, mem=8)
        a = k.run(pod("a", {MEM: 3}))
        k.wait_for(lambda: a.running)
        assert k.ids(a, "app") == {MEM: {"m000005", "m000006", "m000007"}}
        b = k.run(pod("b", {MEM: 5}))  # all that is left
        k.wait_for(lambda: b.running)
        assert [c.method for c in k.calls] == ["GetPreferredAllocation", "Allocate", "Allocate"]
        assert k.calls[0].size == 3
        assert len(k.calls[0].ids) == 8


def test_preference_is_advice(k: StandInKubelet) -> None:
    """IDs that are not available are dropped, the rest is filled at random."""
    with Plugin(k, MEM, 8, prefer=lambda available, must, size: ["m000003", "m000099"]):
        ready(k, mem=8)
        a = k.run(pod("a", {MEM: 3}))
        k.wait_for(lambda: a.running)
        ids = k.ids(a, "app")[MEM]
        assert "m000003" in ids
        assert "m000099" not in ids
        assert len(ids) == 3


def test_ids_are_chosen_at_random_or_by_a_hostile_chooser() -> None:
    chosen = []
    for seed in (0, 1):
        with StandInKubelet(seed=seed) as k, Plugin(k, MEM, 50):
            ready(k, mem=50)
            a = k.run(pod("a", {MEM: 10}))
            k.wait_for(lambda a=a: a.running)
            chosen.append(k.ids(a, "app")[MEM])
    assert chosen[0] != chosen[1]
    hostile = lambda resource, available, needed: sorted(available)[::2][:needed]  # noqa: E731
    with StandInKubelet(choose=hostile) as k, Plugin(k, MEM, 8):
        ready(k, mem=8)
        a = k.run(pod("a", {MEM: 3}))
        k.wait_for(lambda: a.running)
        assert k.ids(a, "app")[MEM] == {"m000000", "m000002", "m000004"}


def test_app_that_needs_more_than_its_init_must_include_the_inits(k: StandInKubelet) -> None:
    with Plugin(k, MEM, 8, prefer=lambda available, must, size: must + sorted(set(available) - set(must))):
        ready(k, mem=8)
        p = k.run(Pod("p", [ContainerSpec("app", {MEM: 4})], init=[ContainerSpec("i", {MEM: 2}, run_s=0)]))
        k.wait_for(lambda: p.running)
        held = k.ids(p, "i")[MEM]
        asked = [c for c in k.calls if c.method == "GetPreferredAllocation" and c.container == "app"]
        assert [set(c.must_include) for c in asked] == [held]
        assert held < set(asked[0].ids)
        assert asked[0].size == 4
        assert held < k.ids(p, "app")[MEM]


def test_apps_take_random_parts_of_a_larger_init_without_a_preference(k: StandInKubelet) -> None:
    with Plugin(k, MEM, 16, prefer=lambda available, must, size: sorted(available)[:size]):
        ready(k, mem=16)
        p = k.run(
            Pod(
                "p",
                [ContainerSpec("a", {MEM: 3}), ContainerSpec("b", {MEM: 4})],
                init=[ContainerSpec("i", {MEM: 8}, run_s=0)],
            )
        )
        k.wait_for(lambda: p.running)
        a, b, init = (k.ids(p, name)[MEM] for name in ("a", "b", "i"))
        assert a | b < init
        assert not a & b
        preferences = [c.container for c in k.calls if c.method == "GetPreferredAllocation"]
        assert preferences == ["i"]
        # podresources shows neither the init container nor that its 8 are still bound.
        assert set(listed(k)["p"]) == {"a", "b"}
        fits = k.run(pod("fits", {MEM: 8}))
        k.wait_for(lambda: fits.running)
        over = k.run(pod("over", {MEM: 1}))
        k.wait_for(lambda: over.phase == "Failed")


def test_sidecars_keep_their_own(k: StandInKubelet) -> None:
    with Plugin(k, MEM, 32):
        ready(k, mem=32)
        p = k.run(
            Pod(
                "p",
                [ContainerSpec("app1", {MEM: 3}), ContainerSpec("app2", {MEM: 4})],
                init=[
                    ContainerSpec("side", {MEM: 2}, sidecar=True),
                    ContainerSpec("init", {MEM: 6}, run_s=0),
                    ContainerSpec("plain", run_s=0),
                ],
            )
        )
        k.wait_for(lambda: p.running)
        ids = {name: k.ids(p, name).get(MEM, set()) for name in p.containers}
        assert {name: len(held) for name, held in ids.items()} == {
            "side": 2, "init": 6, "plain": 0, "app1": 3, "app2": 4,
        }  # fmt: skip
        assert not ids["side"] & (ids["init"] | ids["app1"] | ids["app2"])
        assert len(ids["init"] & (ids["app1"] | ids["app2"])) == 6
        assert p.requests() == {MEM: 9}


# Who is asking.


def test_podresources_answers_during_calls_and_shows_the_pod_being_admitted(k: StandInKubelet) -> None:
    seen: list[Any] = []
    plugins = {MEM: Plugin(k, MEM, 8), CORES: Plugin(k, CORES, 8)}
    for plugin in plugins.values():
        plugin.on_allocate = lambda ids: seen.append(listed(k))
    with plugins[MEM], plugins[CORES]:
        ready(k, mem=8, cores=8)
        plain = k.run(pod("plain"))
        k.wait_for(lambda: plain.running)
        p = k.run(pod("p", {MEM: 2, CORES: 3}))
        k.wait_for(lambda: p.running)
    assert seen[0] == {"plain": {"app": []}, "p": {"app": []}}
    first = k.calls[0].resource
    assert {r for r, _ in seen[1]["p"]["app"]} == {first}
    assert all(len(ids) == 1 for _, ids in seen[1]["p"]["app"]), "one entry per ID"


def test_podresources_get_and_allocatable(k: StandInKubelet) -> None:
    with Plugin(k, MEM, 4):
        ready(k, mem=4)
        p = k.run(pod("p", {MEM: 2}))
        k.wait_for(lambda: p.running)
        got = lister(
            k,
            pr.GET,
            pr.GetPodResourcesRequest(pod_name="p", pod_namespace="default"),
            pr.GetPodResourcesResponse,
        )
        assert {d.device_ids[0] for d in got.pod_resources.containers[0].devices} == k.ids(p, "app")[MEM]
        allocatable = lister(
            k, pr.GET_ALLOCATABLE, pr.AllocatableResourcesRequest(), pr.AllocatableResourcesResponse
        )
        assert len(allocatable.devices) == 4
        with pytest.raises(grpc.RpcError, match="not found"):
            lister(k, pr.GET, pr.GetPodResourcesRequest(pod_name="x"), pr.GetPodResourcesResponse)


def test_list_during_allocate_hands_ids_out_twice(k: StandInKubelet) -> None:
    """The danger: a List while an Allocate is in flight, after another pod finished."""
    begun, go_on = threading.Event(), threading.Event()
    with Plugin(k, MEM, 4) as plugin:
        ready(k, mem=4)
        done = k.run(pod("done", {MEM: 1}, restart_policy="Never"))
        k.wait_for(lambda: done.running)

        def slow(ids: list[str]) -> None:
            begun.set()
            go_on.wait(5)

        plugin.on_allocate = slow
        first = k.run(pod("first", {MEM: 3}))
        assert begun.wait(5)
        k.exit(done, "app")
        k.wait_for(lambda: done.phase == "Succeeded")
        listed(k)
        go_on.set()
        second = k.run(pod("second", {MEM: 4}))  # there should be one
        k.wait_for(lambda: first.running and second.running)
        assert k.ids(first, "app")[MEM] < k.ids(second, "app")[MEM]


def test_list_at_other_times_is_safe(k: StandInKubelet) -> None:
    with Plugin(k, MEM, 4):
        ready(k, mem=4)
        done = k.run(pod("done", {MEM: 1}, restart_policy="Never"))
        first = k.run(pod("first", {MEM: 3}))
        k.wait_for(lambda: done.running and first.running)
        k.exit(done, "app")
        k.wait_for(lambda: done.phase == "Succeeded")
        assert set(listed(k)) == {"first"}
        second = k.run(pod("second", {MEM: 1}))
        third = k.run(pod("third", {MEM: 1}))
        k.wait_for(lambda: {second.phase, third.phase} == {"Running", "Failed"})


# Refusals.


@pytest.mark.parametrize("method", ["Allocate", "GetPreferredAllocation"])
def test_refused_allocation_fails_the_pod(k: StandInKubelet, method: str) -> None:
    def refuse(*_: object) -> Any:
        raise ValueError("no room on one card")

    with Plugin(k, MEM, 8, prefer=refuse if method == "GetPreferredAllocation" else None) as plugin:
        if method == "Allocate":
            plugin.on_allocate = refuse
        ready(k, mem=8)
        p = k.run(pod("p", {MEM: 2}))
        k.wait_for(lambda: p.phase == "Failed")
        assert p.reason == "UnexpectedAdmissionError"
        code = "ResourceExhausted" if method == "Allocate" else "InvalidArgument"
        err = f"rpc error: code = {code} desc = no room on one card"
        if method != "Allocate":
            err = f"device plugin GetPreferredAllocation rpc failed with err: {err}"
        assert p.message == f"Pod was rejected: Allocate failed due to {err}, which is unexpected"
        assert [e.reason for e in k.cluster.events_of(p)] == ["UnexpectedAdmissionError"]
        assert listed(k) == {}
        assert not k.runtime.pod_cgroup(p)


def test_resource_allocated_before_a_refusal_is_freed_at_the_next_admission() -> None:
    with StandInKubelet() as k, Plugin(k, MEM, 4), Plugin(k, CORES, 4) as cores:
        cores.on_allocate = lambda ids: (_ for _ in ()).throw(ValueError("no"))
        ready(k, mem=4, cores=4)
        for n in range(6):  # with either resource first
            p = k.run(pod(f"p{n}", {MEM: 4, CORES: 1}))
            k.wait_for(lambda p=p: p.phase == "Failed")
            assert "desc = no" in p.message
        assert {"Allocate"} == {c.method for c in k.calls}
        assert [c.resource for c in k.calls].count(MEM) > 1


@pytest.mark.parametrize(
    ("amount", "unhealthy", "text"),
    [
        (
            9,
            0,
            "requested number of devices unavailable for volcano.sh/vgpu-memory. Requested: 9, Available: 8",
        ),
        (1, 8, "no healthy devices present; cannot allocate unhealthy devices volcano.sh/vgpu-memory"),
    ],
    ids=["too few", "none healthy"],
)
def test_kubelets_own_refusals(k: StandInKubelet, amount: int, unhealthy: int, text: str) -> None:
    with Plugin(k, MEM, 8) as plugin:
        plugin.set_health(dp.UNHEALTHY, list(plugin.health)[:unhealthy])
        ready(k, mem=8 - unhealthy)
        p = k.run(pod("p", {MEM: amount}))
        k.wait_for(lambda: p.phase == "Failed")
        assert p.message == f"Pod was rejected: Allocate failed due to {text}, which is unexpected"
        assert not k.calls


def test_deployment_storms_over_refused_allocations(k: StandInKubelet) -> None:
    with Plugin(k, MEM, 8) as plugin:
        plugin.on_allocate = lambda ids: (_ for _ in ()).throw(ValueError("no"))
        ready(k, mem=8)
        template = lambda name: pod(name, {MEM: 2})  # noqa: E731
        with Scheduler(k.cluster):
            with Deployment(k.cluster, "d", template, 2, per_second=1e-6) as d:
                k.wait_for(lambda: len(d.failed) == 14)
                assert len(d.pods) == 14, "the burst is over; more come at the rate"
            with Deployment(k.cluster, "e", template, 2, per_second=100, most=30) as e:
                k.wait_for(lambda: len(e.failed) == 30)
        assert all(p.key in k.cluster.pods for p in d.failed), "they stay around"


def test_refused_start_makes_the_pod_wait_and_recovers(k: StandInKubelet) -> None:
    full = True

    def gate(ids: list[str], context: grpc.ServicerContext) -> None:
        if full:
            raise ValueError("no GPU has room for 2 MiB; largest free block 1 MiB")

    with Plugin(k, MEM, 8, pre_start=True) as plugin:
        plugin.on_pre_start = gate
        ready(k, mem=8)
        with Scheduler(k.cluster), Deployment(k.cluster, "d", lambda name: pod(name, {MEM: 2})) as d:
            k.wait_for(lambda: d.pods and d.pods[0].containers["app"].failed_starts >= 3)
            (p,) = d.pods
            assert p.phase == "Pending"
            text = (
                "device plugin PreStartContainer rpc failed with err: rpc error: code = FailedPrecondition "
                "desc = no GPU has room for 2 MiB; largest free block 1 MiB"
            )
            assert p.waiting == f"CreateContainerConfigError: {text}"
            (event,) = k.cluster.events_of(p, "Failed")
            assert event.message == f"Error: {text}"
            assert event.count >= 3
            full = False
            k.wait_for(lambda: p.running)
            assert len(d.pods) == 1
            assert [c.method for c in k.calls].count("Allocate") == 1


def test_pre_start_per_resource_before_every_start_and_again_after_a_refusal(k: StandInKubelet) -> None:
    """One that was accepted is called again at the next try."""
    refusals = iter([True, False])
    with Plugin(k, MEM, 8, pre_start=True) as memory, Plugin(k, CORES, 8, pre_start=True) as cores:

        def gate(ids: list[str], context: grpc.ServicerContext) -> None:
            if next(refusals, False):
                raise ValueError("full")

        cores.on_pre_start = gate
        ready(k, mem=8, cores=8)
        p = k.run(pod("p", {MEM: 2, CORES: 1}))
        k.wait_for(lambda: p.running)

        def starts() -> list[Any]:
            return [c for c in k.calls if c.method == "PreStartContainer"]

        assert [c.resource for c in starts()].count(CORES) == 2
        last_two = {c.resource: set(c.ids) for c in starts()[-2:]}
        assert last_two == k.ids(p, "app")
        before = len(starts())
        k.exit(p, "app", 1)
        k.wait_for(lambda: p.containers["app"].restarts == 1 and p.running)
        assert len(starts()) == before + 2
        assert [c.method for c in k.calls].count("Allocate") == 2
        assert memory.resource in last_two


def test_start_held_in_the_call_blocks_nothing_else(k: StandInKubelet) -> None:
    room = threading.Event()
    with Plugin(k, MEM, 8, pre_start=True) as plugin:
        plugin.on_pre_start = lambda ids, context: room.wait(5) and None if len(ids) == 2 else None
        ready(k, mem=8)
        held = k.run(pod("held", {MEM: 2}))
        k.wait_for(lambda: any(c.method == "PreStartContainer" for c in k.calls))
        assert held.containers["app"].reason in ("ContainerCreating", "PodInitializing")
        other = k.run(pod("other", {MEM: 1}))
        k.wait_for(lambda: other.running)
        assert listed(k).keys() == {"held", "other"}
        room.set()
        k.wait_for(lambda: held.running)


def test_pre_start_has_a_deadline() -> None:
    ended = threading.Event()

    def forever(ids: list[str], context: grpc.ServicerContext) -> None:
        context.add_callback(ended.set)
        ended.wait(5)

    with (
        StandInKubelet(timing=FAST.but(pre_start_deadline_s=0.2)) as k,
        Plugin(k, MEM, 8, pre_start=True) as plugin,
    ):
        plugin.on_pre_start = forever
        ready(k, mem=8)
        p = k.run(pod("p", {MEM: 1}))
        k.wait_for(lambda: p.waiting)
        assert "code = DeadlineExceeded desc = context deadline exceeded" in (p.waiting or "")
        assert ended.is_set()


def test_deleting_a_waiting_pod_cancels_its_call(k: StandInKubelet) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    def forever(ids: list[str], context: grpc.ServicerContext) -> None:
        context.add_callback(cancelled.set)
        begun.set()
        cancelled.wait(10)

    with Plugin(k, MEM, 8, pre_start=True) as plugin:
        plugin.on_pre_start = forever
        ready(k, mem=8)
        p = k.run(pod("p", {MEM: 1}))
        assert begun.wait(5)
        assert k.runtime.pod_cgroup(p)
        k.delete(p)
        k.wait_for(lambda: p.gone, 5)
        assert cancelled.wait(5)
        assert listed(k) == {}
        # It stays in the checkpoint until the next allocation.
        assert [e["PodUID"] for e in checkpoint(k)["Data"]["PodDeviceEntries"]] == [p.uid]
        plugin.on_pre_start = lambda ids, context: None
        q = k.run(pod("q", {MEM: 1}))
        k.wait_for(lambda: q.running)
        assert [e["PodUID"] for e in checkpoint(k)["Data"]["PodDeviceEntries"]] == [q.uid]


# The checkpoint.


def test_checkpoint_holds_both_resources_at_the_first_start_call(k: StandInKubelet) -> None:
    seen: list[Any] = []
    with Plugin(k, MEM, 4, pre_start=True) as memory, Plugin(k, CORES, 4) as cores:
        memory.on_allocate = lambda ids: dp.ContainerAllocateResponse(envs={"A": "b"})
        memory.on_pre_start = lambda ids, context: seen.append(checkpoint(k))
        ready(k, mem=4, cores=4)
        p = k.run(pod("p", {MEM: 2, CORES: 1}))
        k.wait_for(lambda: p.running)
        assert cores.resource == CORES
    (data,) = seen
    assert isinstance(data["Checksum"], int)
    entries = {e["ResourceName"]: e for e in data["Data"]["PodDeviceEntries"]}
    assert set(entries) == {MEM, CORES}
    assert {(e["PodUID"], e["ContainerName"]) for e in entries.values()} == {(p.uid, "app")}
    assert set(entries[MEM]["DeviceIDs"]) == {"-1"}
    assert set(entries[MEM]["DeviceIDs"]["-1"]) == k.ids(p, "app")[MEM]
    response = dp.ContainerAllocateResponse.FromString(base64.b64decode(entries[MEM]["AllocResp"]))
    assert response.envs == {"A": "b"}
    assert sorted(data["Data"]["RegisteredDevices"][MEM]) == sorted(memory.health)


def test_checkpoint_in_list_form() -> None:
    with StandInKubelet(checkpoint_form="list") as k, Plugin(k, MEM, 4):
        ready(k, mem=4)
        assert checkpoint(k)["Data"]["PodDeviceEntries"] is None
        p = k.run(pod("p", {MEM: 2}))
        k.wait_for(lambda: p.running)
        ids = k.ids(p, "app")
        (entry,) = checkpoint(k)["Data"]["PodDeviceEntries"]
        assert set(entry["DeviceIDs"]) == ids[MEM]
        k.restart()
        assert k.ids(p, "app") == ids


# Restarts.


def test_kubelet_stop_removes_nothing_and_start_removes_every_socket(k: StandInKubelet) -> None:
    (k.directory / "sub").mkdir()
    (k.directory / "file").write_text("x")
    inode = (k.directory / "kubelet.sock").stat()
    with Plugin(k, MEM, 4) as plugin:
        ready(k, mem=4)
        k.stop()
        before = {p.name for p in k.directory.iterdir()}
        assert before == {"kubelet.sock", plugin.endpoint, "kubelet_internal_checkpoint", "sub", "file"}
        with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
            client.connect(str(k.directory / "kubelet.sock"))
        k.start()
        after = {p.name for p in k.directory.iterdir()}
        assert after == before - {plugin.endpoint}
        assert (k.directory / "kubelet.sock").stat().st_ctime_ns != inode.st_ctime_ns
        assert k.allocatable == {MEM: 0}
        plugin.stop()
        plugin.serve()
        plugin.register()
        ready(k, mem=4)


def test_kubelet_sock_can_refuse_at_first(k: StandInKubelet) -> None:
    k.restart(refuse_s=0.3)
    path = str(k.directory / "kubelet.sock")
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(path)
    inode = os.stat(path).st_ino
    with Plugin(k, MEM, 4):
        ready(k, mem=4)
        assert os.stat(path).st_ino == inode


def test_running_pods_survive_a_kubelet_restart_with_their_ids(k: StandInKubelet) -> None:
    with Plugin(k, MEM, 8, pre_start=True) as plugin:
        ready(k, mem=8)
        p = k.run(pod("p", {MEM: 3}))
        k.wait_for(lambda: p.running)
        held, instance = k.ids(p, "app"), p.containers["app"].instance
        k.stop()
        k.start()
        plugin.stop()
        plugin.serve()
        plugin.register()
        ready(k, mem=8)
        k.wait_for(lambda: "p" in listed(k))
        assert k.ids(p, "app") == held
        assert p.containers["app"].instance is instance
        q = k.run(pod("q", {MEM: 5}))
        k.wait_for(lambda: q.running)
        assert not k.ids(q, "app")[MEM] & held[MEM]
        assert [c.method for c in k.calls].count("Allocate") == 2


@pytest.mark.parametrize("in_time", [True, False], ids=["registered in time", "not registered"])
def test_after_a_reboot_pods_need_the_plugin(in_time: bool) -> None:
    with StandInKubelet(timing=FAST.but(readmit_s=0.5 if in_time else 0.0)) as k:
        with Plugin(k, MEM, 8, pre_start=True) as plugin:
            ready(k, mem=8)
            p = k.run(pod("p", {MEM: 3}))
            k.wait_for(lambda: p.running)
            held = k.ids(p, "app")
            plugin.stop()
        boot_id = (k.root / "proc/sys/kernel/random/boot_id").read_text()
        (k.root / "var/run/cdi").mkdir(parents=True)
        k.reboot()
        assert not (k.root / "var/run").exists()
        assert (k.root / "proc/sys/kernel/random/boot_id").read_text() != boot_id
        if not in_time:
            k.wait_for(lambda: p.phase == "Failed")
            assert "no healthy devices present; cannot allocate unhealthy devices" in p.message
            return
        with Plugin(k, MEM, 8, pre_start=True):
            k.wait_for(lambda: p.running and p.containers["app"].restarts == 1)
            assert k.ids(p, "app") == held
            assert [c.method for c in k.calls].count("Allocate") == 1


def test_first_list_after_a_restart_must_show_held_ids_healthy() -> None:
    with StandInKubelet(timing=FAST.but(readmit_s=0.5)) as k, Plugin(k, MEM, 8, pre_start=True) as plugin:
        full = True

        def gate(ids: list[str], context: grpc.ServicerContext) -> None:
            if full:
                raise ValueError("full")

        plugin.on_pre_start = gate
        ready(k, mem=8)
        p = k.run(pod("p", {MEM: 3}))
        k.wait_for(lambda: p.waiting)
        plugin.set_health(dp.UNHEALTHY, list(k.ids(p, "app")[MEM]))
        k.restart()
        plugin.stop()
        plugin.serve()
        plugin.register()
        k.wait_for(lambda: p.phase == "Failed")
        assert "previously allocated devices are no longer healthy" in p.message


def test_plugin_death(k: StandInKubelet) -> None:
    with Plugin(k, MEM, 8, pre_start=True) as plugin:
        ready(k, mem=8)
        p = k.run(pod("p", {MEM: 3}))
        k.wait_for(lambda: p.running)
        held = k.ids(p, "app")
        plugin.stop()
        ready(k, mem=0)
        assert k.capacity == {MEM: 8}
        k.exit(p, "app", 1)
        k.wait_for(lambda: p.waiting)
        assert "endpoint not found in cache for a registered resource: volcano.sh/vgpu-memory" in p.waiting
        plugin.serve()
        plugin.register()
        k.wait_for(lambda: p.running)
        assert k.ids(p, "app") == held


def test_capacity_of_a_dead_plugin_goes_after_the_grace() -> None:
    with StandInKubelet(timing=FAST.but(endpoint_grace_s=0.2)) as k:
        with Plugin(k, MEM, 8):
            ready(k, mem=8)
        k.wait_for(lambda: k.allocatable == {})
        assert k.capacity == {}


def test_container_restart_on_an_unhealthy_id_needs_no_new_allocation(k: StandInKubelet) -> None:
    with Plugin(k, MEM, 8, pre_start=True) as plugin:
        ready(k, mem=8)
        p = k.run(pod("p", {MEM: 3}))
        k.wait_for(lambda: p.running)
        plugin.set_health(dp.UNHEALTHY, list(k.ids(p, "app")[MEM]))
        ready(k, mem=5)
        assert set(k.resource_health(p)["app"][MEM].values()) == {"Unhealthy"}
        k.exit(p, "app", 1)
        k.wait_for(lambda: p.containers["app"].restarts == 1 and p.running)
        assert [c.method for c in k.calls] == ["Allocate", "PreStartContainer", "PreStartContainer"]


def test_fewer_and_other_ids(k: StandInKubelet) -> None:
    """Holders keep what they have; all new IDs count as free."""
    with Plugin(k, MEM, 4) as plugin:
        ready(k, mem=4)
        p = k.run(pod("p", {MEM: 3}))
        k.wait_for(lambda: p.running)
        held = k.ids(p, "app")
        plugin.health = {f"x{n}": dp.HEALTHY for n in range(2)}
        plugin.send()
        ready(k, mem=2)
        assert k.ids(p, "app") == held
        assert p.running
        assert set(k.resource_health(p)["app"][MEM].values()) == {"Healthy"}, (
            "what vanished still shows Healthy"
        )
        q = k.run(pod("q", {MEM: 2}))
        k.wait_for(lambda: q.running)
        assert k.ids(q, "app") == {MEM: {"x0", "x1"}}


# What a container gets.


def test_disagreeing_resources_first_in_random_order_wins() -> None:
    seen = set()
    with StandInKubelet() as k, Plugin(k, MEM, 8) as memory, Plugin(k, CORES, 8) as cores:
        (k.root / "dev").mkdir()
        (k.root / "dev/nvidia0").touch()
        for plugin, value in ((memory, "m"), (cores, "c")):
            response = dp.ContainerAllocateResponse(
                envs={"WHO": value, value: "1"}, annotations={"who": value}
            )
            response.mounts.add(container_path="/data", host_path=f"/srv/{value}", read_only=True)
            response.devices.add(container_path="/dev/nvidia0", host_path="/dev/nvidia0", permissions="rw")
            response.cdi_devices.add(name="example.com/gpu=0")
            plugin.on_allocate = lambda ids, response=response: response
        cdi_spec(k, "both", "example.com/gpu", {"0": {"env": ["GPU=0"]}})
        ready(k, mem=8, cores=8)
        p = k.run(pod("p", {MEM: 1, CORES: 1}))
        for n in range(12):
            k.wait_for(lambda n=n: p.running and p.containers["app"].restarts == n)
            app = p.containers["app"]
            assert app.env["m"] == app.env["c"] == "1"
            assert app.device_nodes == ["/dev/nvidia0"]
            assert app.cdi_devices == ["example.com/gpu=0"]
            assert app.env["GPU"] == "0"
            seen.add((app.env["WHO"], app.mounts["/data"][-1], app.annotations["who"]))
            k.exit(p, "app", 1)
    assert seen == {("m", "m", "m"), ("c", "c", "c")}
    assert (k.root / "srv").exists() is False  # the root itself is gone with the kubelet


def cdi_spec(k: StandInKubelet, name: str, kind: str, devices: dict[str, Any], **fields: Any) -> Path:
    """Writes a spec as one should: a temporary name in the same directory, then a rename."""
    directory = k.root / "var/run/cdi"
    directory.mkdir(parents=True, exist_ok=True)
    spec = {"cdiVersion": "0.6.0", "kind": kind, **fields}
    spec["devices"] = [{"name": n, "containerEdits": edits} for n, edits in devices.items()]
    path = directory / f"{name}.json"
    temporary = directory / f".{name}.tmp"
    temporary.write_text(json.dumps(spec))
    temporary.rename(path)
    return path


def cdi_plugin(k: StandInKubelet, *names: str, **fields: Any) -> Plugin:
    plugin = Plugin(k, MEM, 8, **fields)
    response = dp.ContainerAllocateResponse(envs={"FROM": "plugin"})
    for name in names:
        response.cdi_devices.add(name=name)
    plugin.on_allocate = lambda ids: response
    return plugin


def test_env_of_image_plugin_pod_and_cdi_in_that_order(k: StandInKubelet) -> None:
    with cdi_plugin(k, "example.com/gpu=0"):
        ready(k, mem=8)
        cdi_spec(
            k, "s", "example.com/gpu", {"0": {"env": ["D=cdi"]}}, containerEdits={"env": ["E=spec", "D=spec"]}
        )
        layers = {"A": "image", "FROM": "image", "D": "image"}
        own = {"B": "pod", "D": "pod", "E": "pod"}
        p = k.run(Pod("p", [ContainerSpec("app", {MEM: 1}, env=own, image_env=layers)]))
        k.wait_for(lambda: p.running)
        assert p.containers["app"].env == {
            "A": "image",
            "FROM": "plugin",
            "B": "pod",
            "D": "cdi",
            "E": "spec",
        }
    with Plugin(k, CORES, 1) as plugin:
        plugin.on_allocate = lambda ids: dp.ContainerAllocateResponse(envs={"X": "plugin"})
        ready(k, cores=1)
        q = k.run(Pod("q", [ContainerSpec("app", {CORES: 1}, env={"X": "pod"})]))
        k.wait_for(lambda: q.running)
        assert q.containers["app"].env["X"] == "pod"


def test_spec_written_in_pre_start_is_found(k: StandInKubelet) -> None:
    """Late binding: the directory itself did not exist before."""
    with cdi_plugin(k, "edgeagent.io/share=m1", pre_start=True) as plugin:
        plugin.on_pre_start = lambda ids, context: (
            cdi_spec(
                k,
                "share",
                "edgeagent.io/share",
                {"m1": {"env": ["GPU=1"], "deviceNodes": [{"path": "/dev/nvidia1"}]}},
            )
            and None
        )
        (k.root / "dev").mkdir()
        (k.root / "dev/nvidia1").touch()
        ready(k, mem=8)
        p = k.run(pod("p", {MEM: 1}))
        k.wait_for(lambda: p.running)
        app = p.containers["app"]
        assert app.env == {"FROM": "plugin", "GPU": "1"}
        assert app.device_nodes == ["/dev/nvidia1"]
        assert (k.root / f"proc/{app.instance.pid}/root/dev/nvidia1").exists()


def test_missing_spec_is_retried_with_pre_start_each_time(k: StandInKubelet) -> None:
    with cdi_plugin(k, "edgeagent.io/share=m1", pre_start=True):
        ready(k, mem=8)
        p = k.run(pod("p", {MEM: 1}))
        k.wait_for(lambda: p.containers["app"].failed_starts >= 2)
        assert p.waiting.startswith("CreateContainerError: ")
        assert "unresolvable CDI devices edgeagent.io/share=m1" in p.waiting
        cdi_spec(k, "share", "edgeagent.io/share", {"m1": {"env": ["GPU=1"]}})
        k.wait_for(lambda: p.running)
        starts = [c for c in k.calls if c.method == "PreStartContainer"]
        assert len(starts) >= 3


def write(path: Path, text: str) -> None:
    path.write_text(text)


SHARE = {"m1": {"env": ["GPU=1"]}}
CDI_CASES: dict[str, tuple[Callable[[StandInKubelet], object], str | None]] = {
    "garbage of others disturbs nothing": (
        lambda k: (cdi_spec(k, "a", "edgeagent.io/share", SHARE), write(k.root / "var/run/cdi/x.json", "{nonsense")),
        None,
    ),
    "YAML spec": (
        lambda k: (
            (k.root / "var/run/cdi").mkdir(parents=True),
            write(
                k.root / "var/run/cdi/a.yaml",
                "cdiVersion: 0.6.0\nkind: edgeagent.io/share\n"
                "devices: [{name: m1, containerEdits: {env: [GPU=1]}}]\n",
            ),
        ),
        None,
    ),
    "twice at one priority drops both": (
        lambda k: (cdi_spec(k, "a", "edgeagent.io/share", SHARE), cdi_spec(k, "b", "edgeagent.io/share", SHARE)),
        "unresolvable CDI devices edgeagent.io/share=m1",
    ),
    "one-letter class takes the runtime down": (
        lambda k: (cdi_spec(k, "a", "edgeagent.io/share", SHARE), cdi_spec(k, "b", "example.com/g", SHARE)),
        "code = Unavailable",
    ),
    "device without edits": (
        lambda k: cdi_spec(k, "a", "edgeagent.io/share", {"m1": {}}),
        "unresolvable CDI devices",
    ),
    "device node that is not on the host": (
        lambda k: cdi_spec(
            k, "a", "edgeagent.io/share", {"m1": {"deviceNodes": [{"path": "/dev/nvidia7"}]}}
        ),
        'failed to stat CDI host device "/dev/nvidia7"',
    ),
    "mount that is not on the host": (
        lambda k: cdi_spec(
            k, "a", "edgeagent.io/share", {"m1": {"mounts": [{"hostPath": "/no", "containerPath": "/x"}]}}
        ),
        'error mounting "/no" to rootfs at "/x"',
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CDI_CASES)
def test_cdi(k: StandInKubelet, case: str) -> None:
    prepare, error = CDI_CASES[case]
    prepare(k)
    with cdi_plugin(k, "edgeagent.io/share=m1"):
        ready(k, mem=8)
        p = k.run(pod("p", {MEM: 1}))
        k.wait_for(lambda: p.running or p.waiting)
        if error is None:
            assert p.containers["app"].env["GPU"] == "1"
        else:
            assert error in (p.waiting or "")


def test_higher_priority_directory_wins(k: StandInKubelet) -> None:
    static = k.root / "etc/cdi"
    static.mkdir(parents=True)
    cdi_spec(k, "a", "edgeagent.io/share", SHARE)
    low = {"cdiVersion": "0.6.0", "kind": "edgeagent.io/share"}
    low["devices"] = [{"name": "m1", "containerEdits": {"env": ["GPU=0"]}}]
    (static / "a.json").write_text(json.dumps(low))
    with cdi_plugin(k, "edgeagent.io/share=m1"):
        ready(k, mem=8)
        p = k.run(pod("p", {MEM: 1}))
        k.wait_for(lambda: p.running)
        assert p.containers["app"].env["GPU"] == "1"


def test_spec_renamed_in_from_elsewhere_is_not_noticed(k: StandInKubelet) -> None:
    with cdi_plugin(k, "edgeagent.io/share=m1"):
        ready(k, mem=8)
        p = k.run(pod("p", {MEM: 1}))  # from now on the directory is watched
        (k.root / "var/run/cdi").mkdir(parents=True)
        k.wait_for(lambda: p.containers["app"].failed_starts >= 2)
        spec = cdi_spec(k, "x", "edgeagent.io/share", SHARE)
        outside = k.root / "elsewhere.json"
        spec.rename(outside)
        failed = p.containers["app"].failed_starts
        k.wait_for(lambda: p.containers["app"].failed_starts >= failed + 2)
        outside.rename(spec)
        failed = p.containers["app"].failed_starts
        k.wait_for(lambda: p.containers["app"].failed_starts >= failed + 2)
        cdi_spec(k, "y", "edgeagent.io/other", SHARE)  # any noticed change has it all read again
        k.wait_for(lambda: p.running)


def test_stale_read_gives_what_the_device_was_before(k: StandInKubelet) -> None:
    with cdi_plugin(k, "edgeagent.io/share=m1"):
        spec = cdi_spec(k, "a", "edgeagent.io/share", {"m1": {"env": ["GPU=0"]}})
        ready(k, mem=8)
        p = k.run(pod("p", {MEM: 1}))
        k.wait_for(lambda: p.running)
        cdi_spec(k, "a", "edgeagent.io/share", {"m1": {"env": ["GPU=1"]}})
        k.runtime.stale_reads = 1
        k.exit(p, "app", 1)
        k.wait_for(lambda: p.running and p.containers["app"].restarts == 1)
        assert p.containers["app"].env["GPU"] == "0"
        k.exit(p, "app", 1)
        k.wait_for(lambda: p.running and p.containers["app"].restarts == 2)
        assert p.containers["app"].env["GPU"] == "1"
        # Where the old spec was removed first, a stale read is an unresolved device and a retry.
        spec.unlink()
        cdi_spec(k, "a", "edgeagent.io/share", {"m1": {"env": ["GPU=2"]}})
        k.runtime.stale_reads = 1
        k.exit(p, "app", 1)
        k.wait_for(lambda: p.running and p.containers["app"].restarts == 3)
        assert p.containers["app"].env["GPU"] == "2"
        assert k.cluster.events_of(p, "Failed")


def test_containerd_1_ignores_cdi_names() -> None:
    with StandInKubelet(cdi=False) as k, cdi_plugin(k, "edgeagent.io/share=m1"):
        ready(k, mem=8)
        p = k.run(pod("p", {MEM: 1}))
        k.wait_for(lambda: p.running)
        assert p.containers["app"].env == {"FROM": "plugin"}


def test_plugins_own_mounts_and_devices(k: StandInKubelet) -> None:
    with Plugin(k, MEM, 8) as plugin:
        response = dp.ContainerAllocateResponse()
        response.mounts.add(container_path="/data", host_path="/srv/new")
        response.devices.add(container_path="/dev/x", host_path="/dev/x", permissions="rw")
        plugin.on_allocate = lambda ids: response
        ready(k, mem=8)
        p = k.run(pod("p", {MEM: 1}))
        k.wait_for(lambda: p.waiting)
        assert "lstat /dev/x: no such file or directory" in p.waiting
        (k.root / "dev").mkdir()
        (k.root / "dev/x").touch()
        k.wait_for(lambda: p.running)
        assert p.containers["app"].device_nodes == ["/dev/x"]
        assert (k.root / "srv/new").is_dir(), "a missing mount source is created as a directory"


# What the host shows.


_SLICES = "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{u}.slice"
_KIND_SLICES = _SLICES.replace("kubepods", "kubelet-kubepods")
# Where cgroups lie, the pod's part, the container's part.
CGROUPS = {
    "systemd-v2": ("/sys/fs/cgroup", _SLICES, "/cri-containerd-{c}.scope"),
    "cgroupfs-v2": ("/sys/fs/cgroup", "/kubepods/besteffort/pod{U}", "/{c}"),
    "systemd-v1": ("/sys/fs/cgroup/memory", _SLICES, "/cri-containerd-{c}.scope"),
    "cgroupfs-v1": ("/sys/fs/cgroup/memory", "/kubepods/besteffort/pod{U}", "/{c}"),
    "kind-v2": ("/sys/fs/cgroup", f"/kubelet.slice{_KIND_SLICES}", "/cri-containerd-{c}.scope"),
}


@pytest.mark.parametrize("style", CGROUPS)
def test_cgroups_processes_and_logs_come_and_go(style: str) -> None:
    with StandInKubelet(cgroups=style) as k:
        p = k.run(Pod("p", [ContainerSpec("app", env={"A": "b"})], restart_policy="Never"))
        k.wait_for(lambda: p.running)
        instance = p.containers["app"].instance
        top, pod_part, leaf = CGROUPS[style]
        names = {"u": p.uid.replace("-", "_"), "U": p.uid, "c": instance.id}
        pod_cgroup = pod_part.format(**names)
        cgroup = (pod_part + leaf).format(**names)
        directory = k.root / (top + cgroup).lstrip("/")
        assert (directory / "cgroup.procs").read_text() == f"{instance.pid}\n"
        proc = k.root / f"proc/{instance.pid}"
        lines = (proc / "cgroup").read_text().splitlines()
        v1 = ["name=systemd", "pids", "devices", "cpu,cpuacct", "memory"]
        assert [line.split(":", 2)[1] for line in lines] == ([""] if style.endswith("v2") else v1)
        assert all(line.endswith(f":{cgroup}") for line in lines)
        assert (proc / "environ").read_bytes().split(b"\0")[1:] == [b"HOSTNAME=p", b"A=b", b""]
        assert (proc / "stat").read_text().split()[1] == "(app)"
        assert len((proc / "stat").read_text().split()) == 52
        logs = k.root / f"var/log/pods/default_p_{p.uid}"
        assert logs.is_dir()
        (link,) = (k.root / "var/log/containers").iterdir()
        assert link.name == f"p_default_app-{instance.id}.log"
        assert str(link.readlink()) == f"/var/log/pods/default_p_{p.uid}/app/0.log"
        k.runtime.map_library(instance, "/usr/local/lib/edgeagent/libx.so")
        assert (proc / "maps").read_text().splitlines()[-1].endswith(" /usr/local/lib/edgeagent/libx.so")
        child = k.runtime.spawn(instance, "python3")
        assert (directory / "cgroup.procs").read_text() == f"{instance.pid}\n{child}\n"
        k.exit(p, "app")
        k.wait_for(lambda: p.phase == "Succeeded")
        assert not directory.exists()
        assert not proc.exists()
        pod_directory = k.root / (top + pod_cgroup).lstrip("/")
        k.wait_for(lambda: not pod_directory.exists())
        assert logs.is_dir()
        k.delete(p)
        k.wait_for(lambda: p.gone)
        assert not logs.exists()
        assert not list(link.parent.iterdir())


def test_cgroup_of_a_finished_pod_stands_a_moment_while_its_ids_are_given_out() -> None:
    with StandInKubelet(timing=FAST.but(cgroup_gone_s=0.5)) as k, Plugin(k, MEM, 4):
        ready(k, mem=4)
        with Scheduler(k.cluster):
            p = k.cluster.create(pod("p", {MEM: 4}, restart_policy="Never"))
            k.wait_for(lambda: p.running)
            q = k.cluster.create(pod("q", {MEM: 4}))
            k.wait_for(lambda: q.reason == "Unschedulable")
            k.exit(p, "app")
            k.wait_for(lambda: q.running)
            assert k.runtime.pod_cgroup(p)
            k.wait_for(lambda: not k.runtime.pod_cgroup(p))


def test_log_directory_and_pod_cgroup_exist_before_the_first_start(k: StandInKubelet) -> None:
    seen: list[Any] = []
    with Plugin(k, MEM, 4, pre_start=True) as plugin:
        plugin.on_pre_start = lambda ids, context: seen.extend((k.root / "var/log/pods").rglob("*"))
        ready(k, mem=4)
        p = k.run(pod("p", {MEM: 1}))
        k.wait_for(lambda: p.running)
    assert [s.name for s in seen] == [f"default_p_{p.uid}"]


def test_cgroup_kill_ends_the_container(k: StandInKubelet) -> None:
    p = k.run(pod("p"))
    k.wait_for(lambda: p.running)
    cgroup = p.containers["app"].instance.cgroup
    (k.root / "sys/fs/cgroup" / cgroup.lstrip("/") / "cgroup.kill").write_text("1")
    k.wait_for(lambda: p.running and p.containers["app"].restarts == 1)
    assert p.containers["app"].instances[0].exit_code == 137


# Pods' lives.


@pytest.mark.parametrize(
    ("policy", "code", "phase", "restarts"),
    [
        ("Always", 0, "Running", 1),
        ("OnFailure", 1, "Running", 1),
        ("OnFailure", 0, "Succeeded", 0),
        ("Never", 0, "Succeeded", 0),
        ("Never", 3, "Failed", 0),
    ],
)
def test_restart_policies(k: StandInKubelet, policy: str, code: int, phase: str, restarts: int) -> None:
    p = k.run(pod("p", restart_policy=policy))
    k.wait_for(lambda: p.running)
    k.exit(p, "app", code)
    k.wait_for(lambda: p.phase == phase and p.containers["app"].restarts == restarts)
    k.wait_for(lambda: p.containers["app"].running == (phase == "Running"))


def test_init_container_runs_to_its_end_first(k: StandInKubelet) -> None:
    p = k.run(Pod("p", [ContainerSpec("app")], init=[ContainerSpec("i")]))
    k.wait_for(lambda: p.containers["i"].running)
    assert not p.containers["app"].instances
    k.exit(p, "i", 1)
    k.wait_for(lambda: p.containers["i"].running and p.containers["i"].restarts == 1)
    k.exit(p, "i", 0)
    k.wait_for(lambda: p.running)
    assert p.containers["i"].state == "terminated"


def test_scheduler_sees_sums_only(k: StandInKubelet) -> None:
    with Plugin(k, MEM, 8):
        ready(k, mem=8)
        with Scheduler(k.cluster):
            a = k.cluster.create(pod("a", {MEM: 5}))
            k.wait_for(lambda: a.running)
            b = k.cluster.create(pod("b", {MEM: "4"}))
            c = k.cluster.create(pod("c", {MEM: 3}))  # what does not fit holds up nobody
            k.wait_for(lambda: c.running)
            assert b.message == f"0/1 nodes are available: 1 Insufficient {MEM}."
            k.delete(a)
            k.wait_for(lambda: b.running)
            assert a.gone


def test_node_status_can_lag_behind() -> None:
    with StandInKubelet(timing=FAST.but(node_status_s=0.3)) as k, Plugin(k, MEM, 8):
        k.wait_for(lambda: k.updates)
        assert k.allocatable == {}
        ready(k, mem=8)


def test_deployment_replaces_deleted_pods_and_scales(k: StandInKubelet) -> None:
    with Scheduler(k.cluster), Deployment(k.cluster, "d", pod, 2) as d:
        k.wait_for(lambda: len(d.living) == 2 and all(p.running for p in d.living))
        k.delete(d.pods[0])
        k.wait_for(lambda: len(d.pods) == 3 and d.pods[0].gone and all(p.running for p in d.living))
        d.scale(1)
        k.wait_for(lambda: [p.name for p in k.cluster.pods.values()] == ["d-0001"])


def test_nothing_is_left_behind() -> None:
    before = {t.name for t in threading.enumerate()}
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with StandInKubelet() as k, Plugin(k, MEM, 8, pre_start=True) as plugin:
            plugin.on_pre_start = lambda ids, context: threading.Event().wait(0.05) and None
            ready(k, mem=8)
            p = k.run(pod("p", {MEM: 1}))
            k.run(pod("q", {MEM: 1}))
            k.wait_for(lambda p=p: p.running)
            k.restart()
        assert not k.root.exists()
    assert {t.name for t in threading.enumerate() if "channel_spin" not in t.name} <= before
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 10
