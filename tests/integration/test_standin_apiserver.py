"""The stand-in API server and the bare plugin: what a node agent's requests and calls come back with."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeagent.kubelet.protos import deviceplugin as dp
from tests.fakes.kubelet import ContainerSpec, Pod, StandInKubelet
from tests.fakes.kubelet.apiserver import StandInApiServer
from tests.fakes.kubelet.bare_plugin import BarePlugin

BARE = "example.com/bare"
MERGE = {"Content-Type": "application/merge-patch+json"}


@pytest.fixture
def api() -> Iterator[StandInApiServer]:
    with StandInKubelet() as k, StandInApiServer(k) as server:
        yield server


def ask(
    api: StandInApiServer, method: str, path: str, body: Any = None, *, token: str | None = None, timeout_s: float = 5,
    **headers: str,
) -> tuple[int, Any]:  # fmt: skip
    connection = http.client.HTTPConnection(api.url.removeprefix("http://"), timeout=timeout_s)
    try:
        headers = {"Authorization": f"Bearer {token or api.token}", **headers}
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_version(api: StandInApiServer) -> None:
    assert ask(api, "GET", "/version") == (200, {"major": "1", "minor": "36", "gitVersion": "v1.36.2"})


def test_wrong_token_and_unknown_things(api: StandInApiServer) -> None:
    status, answer = ask(api, "GET", "/version", token="wrong")
    assert (status, answer["reason"]) == (401, "Unauthorized")
    assert ask(api, "GET", "/api/v1/nodes/other")[0] == 404
    assert ask(api, "GET", "/api/v1/namespaces/default/pods/none")[0] == 404
    assert ask(api, "GET", "/apis/none")[0] == 404
    assert [r.status for r in api.requests] == [401, 404, 404, 404]


def test_node_labels_and_conditions_are_patched(api: StandInApiServer) -> None:
    node = f"/api/v1/nodes/{api.cluster.node.name}"
    patch = {"metadata": {"labels": {"a": "1", "b": "2"}, "annotations": {"x": "any / text"}}}
    assert ask(api, "PATCH", node, patch, **MERGE)[0] == 200
    assert ask(api, "PATCH", node, {"metadata": {"labels": {"a": None}}}, **MERGE)[0] == 200
    condition = {"type": "GpuHealthy", "status": "False", "reason": "Xid79"}
    strategic = {"Content-Type": "application/strategic-merge-patch+json"}
    assert ask(api, "PATCH", f"{node}/status", {"status": {"conditions": [condition]}}, **strategic)[0] == 200
    status, answer = ask(api, "GET", node)
    assert status == 200
    assert answer["metadata"]["labels"] == {"b": "2"}
    assert answer["metadata"]["annotations"] == {"x": "any / text"}
    assert condition in answer["status"]["conditions"]
    assert len(api.requested("PATCH", r"/api/v1/nodes/[^/]+")) == 2


@pytest.mark.parametrize("value", ["has space", "x" * 64, "-dash"])
def test_bad_labels_are_refused(api: StandInApiServer, value: str) -> None:
    node = f"/api/v1/nodes/{api.cluster.node.name}"
    assert ask(api, "PATCH", node, {"metadata": {"labels": {"a": value}}}, **MERGE)[0] == 422
    assert ask(api, "PATCH", node, {}, **{"Content-Type": "application/json"})[0] == 415


def test_pods_as_the_kubelet_has_them(api: StandInApiServer) -> None:
    k = api.kubelet
    plugin = BarePlugin(k.directory, BARE, 8000)
    plugin.start()
    try:
        k.wait_for(lambda: k.allocatable == {BARE: 8000})
        answer = ask(api, "GET", f"/api/v1/nodes/{k.cluster.node.name}")[1]
        assert answer["status"]["allocatable"] == {BARE: "8k"}
        p = k.run(Pod("p", [ContainerSpec("app", {BARE: "2"}, env={"A": "b"})], owner="d"))
        k.cluster.create(Pod("unbound", [ContainerSpec("app")]))
        k.wait_for(lambda: p.running)
        listed = ask(api, "GET", f"/api/v1/pods?fieldSelector=spec.nodeName%3D{k.cluster.node.name}")[1]
        assert [i["metadata"]["name"] for i in listed["items"]] == ["p"]
        assert len(ask(api, "GET", "/api/v1/pods")[1]["items"]) == 2
        one = ask(api, "GET", "/api/v1/namespaces/default/pods/p")[1]
        assert one == listed["items"][0]
        assert one["metadata"]["uid"] == p.uid
        assert one["status"]["phase"] == "Running"
        (container,) = one["spec"]["containers"]
        assert container["resources"]["limits"] == {BARE: "2"}
        (status,) = one["status"]["containerStatuses"]
        assert "running" in status["state"]
        assert status["containerID"] == f"containerd://{p.containers['app'].instance.id}"
        (shown,) = status["allocatedResourcesStatus"]
        assert {r["resourceID"] for r in shown["resources"]} == k.ids(p, "app")[BARE]
        plugin.set_health(dp.UNHEALTHY)
        k.wait_for(lambda: k.allocatable == {BARE: 0})
        q = k.run(Pod("q", [ContainerSpec("app", {BARE: 1})]))
        k.wait_for(lambda: q.phase == "Failed")
        failed = ask(api, "GET", "/api/v1/namespaces/default/pods/q")[1]["status"]
        assert failed["reason"] == "UnexpectedAdmissionError"
    finally:
        plugin.stop()


def test_eviction_deletes_unless_a_budget_or_the_uid_forbids(api: StandInApiServer) -> None:
    p = api.kubelet.run(Pod("p", [ContainerSpec("app")]))
    api.kubelet.wait_for(lambda: p.running)
    path = "/api/v1/namespaces/default/pods/p/eviction"
    body: dict[str, Any] = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p"}}
    api.behaviour.evictions_blocked = True
    assert ask(api, "POST", path, body)[0] == 429
    api.behaviour.evictions_blocked = False
    other = {**body, "deleteOptions": {"preconditions": {"uid": "another"}}}
    assert ask(api, "POST", path, other)[0] == 409
    assert p.running
    assert ask(api, "POST", path, body)[0] == 201
    api.kubelet.wait_for(lambda: p.gone)


def test_events_are_kept_and_checked(api: StandInApiServer) -> None:
    p = api.kubelet.run(Pod("p", [ContainerSpec("app")]))
    event = {
        "metadata": {"generateName": "p."},
        "involvedObject": {"kind": "Pod", "namespace": "default", "name": "p", "uid": p.uid},
        "reason": "GpuSick", "message": "GPU-1 is sick", "type": "Warning", "source": {"component": "edgeagent"},
    }  # fmt: skip
    status, answer = ask(api, "POST", "/api/v1/namespaces/default/events", event)
    assert status == 201
    assert answer["metadata"]["name"].startswith("p.")
    (kept,) = api.cluster.events_of(p, "GpuSick")
    assert (kept.message, kept.type, kept.source) == ("GPU-1 is sick", "Warning", "edgeagent")
    assert ask(api, "POST", "/api/v1/namespaces/other/events", event)[0] == 400
    assert ask(api, "POST", "/api/v1/namespaces/default/events", {"metadata": {"name": "x"}})[0] == 422


def test_it_can_refuse_forbid_and_hang(api: StandInApiServer) -> None:
    api.behaviour.refuse = 503
    assert ask(api, "GET", "/version")[0] == 503
    api.behaviour.refuse = None
    api.behaviour.forbid.append(("POST", ".*/events"))
    assert ask(api, "POST", "/api/v1/namespaces/default/events", {})[0] == 403
    api.behaviour.hang = True
    with pytest.raises(TimeoutError):
        ask(api, "GET", "/version", timeout_s=0.2)
    api.behaviour.hang = False
    assert ask(api, "GET", "/version")[0] == 200


def test_kubeconfig_names_server_and_token(api: StandInApiServer, tmp_path: Path) -> None:
    api.write_kubeconfig(tmp_path / "etc/k3s.yaml")
    config = json.loads((tmp_path / "etc/k3s.yaml").read_text())
    assert config["clusters"][0]["cluster"]["server"] == api.url
    assert config["users"][0]["user"]["token"] == api.token


def test_no_thread_stays_behind_an_open_client() -> None:
    before = {t.ident for t in threading.enumerate()}
    with StandInKubelet() as k, StandInApiServer(k) as api:
        api.behaviour.hang = True
        connection = http.client.HTTPConnection(api.url.removeprefix("http://"), timeout=5)
        connection.request("GET", "/version")
    connection.close()
    assert {t.ident for t in threading.enumerate()} <= before


def test_bare_plugin_as_a_program() -> None:
    with StandInKubelet() as k:
        command = [sys.executable, "-m", "tests.fakes.kubelet.bare_plugin", "--dir", str(k.directory)]
        with subprocess.Popen([*command, "--count", "50"], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "registered\n"
                k.wait_for(lambda: k.allocatable == {BARE: 50})
                p = k.run(Pod("p", [ContainerSpec("app", {BARE: 20})]))
                k.wait_for(lambda: p.running)
                assert p.containers["app"].env == {"BARE_UNITS": "20"}
                assert [c.method for c in k.calls] == ["GetPreferredAllocation", "Allocate"]
                process.send_signal(signal.SIGUSR1)
                k.wait_for(lambda: k.allocatable == {BARE: 0})
                process.send_signal(signal.SIGUSR2)
                k.wait_for(lambda: k.allocatable == {BARE: 50})
                process.terminate()
                assert process.wait(5) == 0
            finally:
                process.kill()
