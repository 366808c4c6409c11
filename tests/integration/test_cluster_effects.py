"""What health does in the cluster, against the stand-in API server: Events, labels, evictions, outages."""

from __future__ import annotations

import base64
import http.server
import json
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeagent.config import HealthConfig, KubernetesConfig
from edgeagent.errors import NodeError
from edgeagent.gpus.model import GpuEvent, GpuEventKind, GpuFault
from edgeagent.health.effects import Effects
from edgeagent.health.monitor import HealthMonitor
from edgeagent.health.xid import load_catalogue
from edgeagent.hostroot import HostRoot
from edgeagent.node.apiserver import (
    ApiServer,
    ApiStatusError,
    Credentials,
    PodRef,
    find_credentials,
    read_kubeconfig,
)
from tests.fakes.gpus import UUIDS, ScriptedBackend, make_gpu
from tests.fakes.kubelet import ContainerSpec, Pod, StandInApiServer, StandInKubelet

NODE = "edge-1"


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[StandInKubelet]:
    with StandInKubelet() as kubelet:
        yield kubelet


@pytest.fixture
def api(kubelet: StandInKubelet) -> Iterator[StandInApiServer]:
    with StandInApiServer(kubelet) as api:
        yield api


def client(api: StandInApiServer, **timeouts: float) -> ApiServer:
    return ApiServer(lambda: Credentials(api.url, token=api.token), **timeouts)


def bound_pod(kubelet: StandInKubelet, name: str) -> PodRef:
    pod = kubelet.cluster.create(Pod(name, [ContainerSpec("app")]), bind=True)
    return PodRef(pod.namespace, pod.name, pod.uid)


# -- the client --------------------------------------------------------------------------------------


def test_the_calls_the_agent_makes(kubelet: StandInKubelet, api: StandInApiServer) -> None:
    server = client(api)
    assert server.server_version() == "v1.36.2"
    server.patch_node_labels(NODE, {"edgeagent.io/health": "ok"})
    assert server.node_labels(NODE)["edgeagent.io/health"] == "ok"
    server.patch_node_labels(NODE, {"edgeagent.io/health": None})
    assert "edgeagent.io/health" not in server.node_labels(NODE)
    pod = bound_pod(kubelet, "a")
    assert server.pods_on_node(NODE) == (pod,)
    assert server.pods_on_node("elsewhere") == ()
    server.close()


def test_only_that_very_pod_is_evicted(kubelet: StandInKubelet, api: StandInApiServer) -> None:
    server = client(api)
    pod = bound_pod(kubelet, "a")
    assert not server.evict_pod(PodRef(pod.namespace, pod.name, "00000000-0000-4000-8000-000000000000"))
    assert not server.evict_pod(PodRef(pod.namespace, "nobody", pod.uid))
    api.behaviour.evictions_blocked = True
    with pytest.raises(ApiStatusError) as blocked:
        server.evict_pod(pod)
    assert blocked.value.status == 429
    api.behaviour.evictions_blocked = False
    assert server.evict_pod(pod)


def test_one_connection_is_kept(api: StandInApiServer) -> None:
    server = client(api)
    for _ in range(5):
        server.server_version()
    assert (
        threading.active_count() - len([t for t in threading.enumerate() if t.name != "apiserver-request"])
        <= 1
    )


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda api: setattr(api.behaviour, "refuse", 503), "503"),
        (lambda api: setattr(api, "token", "another"), "401"),
        (lambda api: api.behaviour.forbid.append(("GET", "/version")), "forbidden"),
    ],
    ids=["unavailable", "unauthorised", "forbidden"],
)
def test_refusals_say_why(
    api: StandInApiServer, spoil: Callable[[StandInApiServer], None], words: str
) -> None:
    server = client(api)
    assert server.server_version()
    spoil(api)
    with pytest.raises(ApiStatusError, match=words):
        server.server_version()


def test_a_renewed_token_is_read_again_after_a_refusal(api: StandInApiServer, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{api.token}\n")
    server = ApiServer(lambda: Credentials(api.url, token_file=token))
    assert server.server_version()
    api.token = "renewed"
    token.write_text("renewed")
    with pytest.raises(ApiStatusError):
        server.server_version()
    assert server.server_version()


def test_a_server_that_hangs_or_is_away_costs_the_time_out(api: StandInApiServer) -> None:
    api.behaviour.hang = True
    with pytest.raises(NodeError, match="cannot reach"):
        client(api, read_timeout_s=0.2).server_version()
    with pytest.raises(NodeError, match="cannot reach"):
        ApiServer(lambda: Credentials("http://127.0.0.1:9")).server_version()


# -- credentials -------------------------------------------------------------------------------------


def test_credentials_come_from_k3s_when_nothing_else_is_there(api: StandInApiServer, tmp_path: Path) -> None:
    api.write_kubeconfig(tmp_path / "var/lib/rancher/k3s/agent/kubelet.kubeconfig")
    found = find_credentials(HostRoot(tmp_path), environ={})
    assert (found.server, found.token) == (api.url, api.token)
    with pytest.raises(NodeError, match="no API server access"):
        find_credentials(HostRoot(tmp_path / "empty"), environ={})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "current-context: x\ncontexts: []\nclusters: []\n",
        json.dumps({
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": "https://x", "certificate-authority-data": "%%"}}],
            "users": [{"name": "u", "user": {}}],
        }),
        json.dumps({
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": "https://x"}}],
            "users": [{"name": "u", "user": {"exec": {"command": "aws"}}}],
        }),
    ],
    ids=["empty", "not YAML", "a list", "no such context", "bad base64", "plug-in"],
)  # fmt: skip
def test_a_kubeconfig_that_cannot_be_used_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "kubeconfig").write_text(text)
    with pytest.raises(NodeError, match="cannot"):
        read_kubeconfig(HostRoot(tmp_path), "/kubeconfig")


def test_a_node_identity_with_certificates_over_tls(tmp_path: Path) -> None:
    """As K3s's kubelet.kubeconfig: certificates in files whose names are the host's."""
    certs = tmp_path / "etc/certs"
    certs.mkdir(parents=True)
    _certificates(certs)
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            subject = dict(pair[0] for pair in self.connection.getpeercert()["subject"])  # type: ignore[attr-defined]
            asked.append(subject["commonName"])
            body = json.dumps({"gitVersion": "v1.33.5+k3s1"}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certs / "server.crt", certs / "server.key")
    context.load_verify_locations(certs / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    try:
        ca = base64.b64encode((certs / "ca.crt").read_bytes()).decode()
        config = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {
                "server": f"https://127.0.0.1:{server.server_address[1]}", "certificate-authority-data": ca,
            }}],
            "users": [{"name": "u", "user": {
                "client-certificate": "/etc/certs/node.crt", "client-key": "/etc/certs/node.key",
            }}],
        }  # fmt: skip
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        api = ApiServer(lambda: read_kubeconfig(HostRoot(tmp_path), "/kubeconfig"))
        assert api.server_version() == "v1.33.5+k3s1"
        assert asked == ["system:node:edge-1"]
        api.close()
    finally:
        thread.join(5)
        server.server_close()


def _certificates(directory: Path) -> None:
    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=ca", "-days", "2")
    (directory / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    for name, subject in (
        ("server", "/CN=kube-apiserver"),
        ("node", "/O=system:nodes/CN=system:node:edge-1"),
    ):
        openssl("req", "-new", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", f"{name}.crt", "-days", "2", "-extfile", "san",
        )  # fmt: skip


# -- effects -----------------------------------------------------------------------------------------


class Bench:
    """Monitor and effects over one clock, worked by hand."""

    def __init__(
        self,
        kubelet: StandInKubelet,
        api: StandInApiServer,
        health: HealthConfig | None = None,
        kubernetes: KubernetesConfig | None = None,
    ) -> None:
        self.kubelet, self.api, self.now = kubelet, api, 1000.0
        self.pods: dict[str, tuple[PodRef, ...]] = {}
        health = health or HealthConfig()
        self.backend = ScriptedBackend([make_gpu(0), make_gpu(1)])
        self.monitor = HealthMonitor(self.backend, health, load_catalogue(), mono=lambda: self.now)
        self.effects = Effects(
            client(api, read_timeout_s=0.3),
            NODE,
            kubernetes or KubernetesConfig(),
            health,
            lambda uuid: self.pods.get(uuid, ()),
            mono=lambda: self.now,
        )
        self.monitor.on_change(self.effects.health_changed)
        self.monitor.poll_once()

    def xid(self, number: int = 79, gpu: int = 0) -> None:
        self.monitor.handle_event(GpuEvent(GpuEventKind.XID, UUIDS[gpu], number))

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.monitor.poll_once()
        self.effects.work()

    def events(self, kind: str) -> list[tuple[str, str, str]]:
        with self.kubelet.cluster.lock:
            mine = [e for e in self.kubelet.cluster.events if e.source == "edgeagent" and e.kind == kind]
            return [(e.name, e.type, e.reason) for e in mine]

    def evictions(self) -> list[str]:
        return [r.path for r in self.api.requested("POST", r".*/eviction") if r.status == 201]


def test_a_sick_gpu_is_told_on_the_node_and_on_the_pods_it_hurts(
    kubelet: StandInKubelet, api: StandInApiServer
) -> None:
    bench = Bench(kubelet, api)
    bench.pods[UUIDS[0]] = (bound_pod(kubelet, "train"),)
    bench.pods[UUIDS[1]] = (bound_pod(kubelet, "other"),)
    bench.xid()
    bench.effects.work()
    assert bench.events("Node") == [(NODE, "Warning", "XidFatal")]
    assert bench.events("Pod") == [("train", "Warning", "XidFatal")]
    for _ in range(14):
        bench.after(5)
    assert bench.events("Node")[-1] == (NODE, "Normal", "XidFatalCleared")
    assert bench.events("Pod")[-1] == ("train", "Normal", "XidFatalCleared")


def test_conditions_that_hurt_no_pod_are_told_on_the_node_only(
    kubelet: StandInKubelet, api: StandInApiServer
) -> None:
    bench = Bench(kubelet, api)
    bench.pods[UUIDS[0]] = (bound_pod(kubelet, "train"),)
    bench.xid(63)
    bench.effects.work()
    assert bench.events("Node") == [(NODE, "Warning", "XidDegraded")]
    assert bench.events("Pod") == []


def test_by_default_nobody_is_evicted(kubelet: StandInKubelet, api: StandInApiServer) -> None:
    bench = Bench(kubelet, api)
    bench.pods[UUIDS[0]] = (bound_pod(kubelet, "train"),)
    bench.backend.faults[UUIDS[0]] = GpuFault.LOST
    for _ in range(10):
        bench.after(60)
    assert bench.evictions() == []


EVICT = HealthConfig(on_fatal="evict", grace_seconds=30)


def test_pods_of_a_dead_gpu_are_evicted_after_the_grace_time_and_no_others(
    kubelet: StandInKubelet, api: StandInApiServer
) -> None:
    bench = Bench(kubelet, api, EVICT)
    bench.pods[UUIDS[0]] = (bound_pod(kubelet, "train"),)
    bench.pods[UUIDS[1]] = (bound_pod(kubelet, "other"),)
    bench.backend.faults[UUIDS[0]] = GpuFault.LOST
    bench.after(1)
    bench.after(29)
    assert bench.evictions() == []
    bench.after(1)
    assert bench.evictions() == ["/api/v1/namespaces/default/pods/train/eviction"]
    assert ("train", "Warning", "GpuFailed") in bench.events("Pod")
    bench.after(600)
    assert len(bench.evictions()) == 1


def test_a_gpu_that_comes_back_in_time_keeps_its_pods(kubelet: StandInKubelet, api: StandInApiServer) -> None:
    bench = Bench(kubelet, api, EVICT)
    bench.pods[UUIDS[0]] = (bound_pod(kubelet, "train"),)
    bench.backend.faults[UUIDS[0]] = GpuFault.LOST
    bench.after(5)
    bench.backend.faults.clear()
    for _ in range(20):
        bench.after(5)
    assert bench.evictions() == []


@pytest.mark.parametrize("fault", [GpuFault.UNRESPONSIVE, GpuFault.DRIVER_MISMATCH])
def test_trouble_that_may_leave_running_pods_unharmed_evicts_nobody(
    kubelet: StandInKubelet, api: StandInApiServer, fault: GpuFault
) -> None:
    bench = Bench(kubelet, api, EVICT)
    bench.pods[UUIDS[0]] = (bound_pod(kubelet, "train"),)
    bench.backend.faults[UUIDS[0]] = fault
    for _ in range(20):
        bench.after(10)
    assert bench.evictions() == []


def test_an_eviction_that_a_budget_forbids_is_tried_again(
    kubelet: StandInKubelet, api: StandInApiServer
) -> None:
    bench = Bench(kubelet, api, EVICT)
    api.behaviour.evictions_blocked = True
    bench.pods[UUIDS[0]] = (bound_pod(kubelet, "train"),)
    bench.backend.faults[UUIDS[0]] = GpuFault.LOST
    bench.after(1)
    bench.after(31)
    bench.after(60)
    assert bench.evictions() == []
    api.behaviour.evictions_blocked = False
    bench.after(300)
    assert len(bench.evictions()) == 1


def test_an_outage_delays_and_does_not_lose(kubelet: StandInKubelet, api: StandInApiServer) -> None:
    bench = Bench(kubelet, api)
    bench.effects.set_labels({"edgeagent.io/health": "ok"})
    api.behaviour.refuse = 503
    bench.xid()
    bench.after(1)
    bench.after(10)
    assert (bench.events("Node"), kubelet.cluster.node.labels.get("edgeagent.io/health")) == ([], None)
    api.behaviour.refuse = None
    bench.after(30)
    assert bench.events("Node")[0] == (NODE, "Warning", "XidFatal")
    assert kubelet.cluster.node.labels["edgeagent.io/health"] == "ok"


def test_what_the_server_forbids_is_dropped_and_counted(
    kubelet: StandInKubelet, api: StandInApiServer
) -> None:
    bench = Bench(kubelet, api)
    api.behaviour.forbid.append(("POST", ".*/events"))
    bench.xid()
    bench.effects.work()
    assert bench.effects.counters["kubernetes_dropped_total"] == 1
    tries = len(api.requests)
    bench.after(400)
    assert (
        len([r for r in api.requests[tries:] if r.method == "POST" and r.body["reason"] == "XidFatal"]) == 0
    )


def test_labels_follow_and_are_put_back(kubelet: StandInKubelet, api: StandInApiServer) -> None:
    bench = Bench(kubelet, api)
    bench.effects.set_labels({"edgeagent.io/health": "ok", "edgeagent.io/mode": "shared"})
    bench.effects.work()
    labels = kubelet.cluster.node.labels
    assert labels["edgeagent.io/mode"] == "shared"
    bench.effects.set_labels({"edgeagent.io/health": "sick"})
    bench.effects.work()
    assert labels["edgeagent.io/health"] == "sick"
    assert "edgeagent.io/mode" not in labels
    patches = len(api.requested("PATCH", ".*"))
    bench.effects.set_labels({"edgeagent.io/health": "sick"})
    bench.effects.work()
    assert len(api.requested("PATCH", ".*")) == patches
    del labels["edgeagent.io/health"]
    bench.after(700)
    assert labels["edgeagent.io/health"] == "sick"


def test_what_is_switched_off_is_not_done(kubelet: StandInKubelet, api: StandInApiServer) -> None:
    bench = Bench(kubelet, api, kubernetes=KubernetesConfig(labels=False, events=False))
    bench.effects.set_labels({"edgeagent.io/health": "ok"})
    bench.xid()
    bench.effects.work()
    assert api.requests == []


def test_a_hanging_server_never_holds_health_up(kubelet: StandInKubelet, api: StandInApiServer) -> None:
    bench = Bench(kubelet, api)
    api.behaviour.hang = True
    stop = threading.Event()
    thread = threading.Thread(target=bench.effects.run, args=(stop,))
    thread.start()
    try:
        for gpu in (0, 1):
            for number in (79, 48, 95, 119):
                bench.xid(number, gpu)
        assert bench.monitor.state.sick == set(UUIDS)
    finally:
        api.behaviour.hang = False
        stop.set()
        bench.effects.wake()
        thread.join(10)
    assert not thread.is_alive()
