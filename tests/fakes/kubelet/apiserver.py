"""An API server over the stand-in's cluster: plain HTTP and JSON on loopback.

As much of the API as a node agent uses: nodes, pods, events, evictions, /version. It records every
request, and can be slow, refuse, or hang.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.fakes.kubelet import quantity
from tests.fakes.kubelet.kubelet import StandInKubelet
from tests.fakes.kubelet.model import Container, Event, Pod

_PATCHES = ("application/merge-patch+json", "application/strategic-merge-patch+json")
_POD_FIELDS: dict[str, Callable[[Pod], str]] = {  # for field selectors
    "spec.nodeName": lambda p: p.node_name or "",
    "metadata.name": lambda p: p.name,
    "metadata.namespace": lambda p: p.namespace,
    "status.phase": lambda p: p.phase,
}
_REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict",
    415: "UnsupportedMediaType", 422: "Invalid", 429: "TooManyRequests", 500: "InternalError",
    503: "ServiceUnavailable",
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """One request that came in; `status` is what it was answered with."""

    method: str
    path: str
    query: dict[str, str]
    body: Any
    status: int


@dataclass
class Behaviour:
    """How the server misbehaves. Changed while it runs.

    `refuse`: every request is answered with this status. `forbid`: (method, pattern of the path)
    that RBAC does not allow. `hang`: requests are read and never answered, until it is False again.
    """

    slow_s: float = 0.0
    refuse: int | None = None
    hang: bool = False
    forbid: list[tuple[str, str]] = field(default_factory=list)
    evictions_blocked: bool = False  # a PodDisruptionBudget that allows none


class ApiError(Exception):
    def __init__(self, status: int, message: str) -> None:
        self.status = status
        self.message = message
        super().__init__(message)


class StandInApiServer:
    """`with StandInApiServer(k) as api: …`; `api.url`, `api.token`, `api.write_kubeconfig(path)`."""

    def __init__(self, kubelet: StandInKubelet, *, token: str = "secret-token") -> None:
        self.kubelet = kubelet
        self.cluster = kubelet.cluster
        self.token = token
        self.behaviour = Behaviour()
        self.requests: list[Request] = []
        self._closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _handler_for(self))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="apiserver", daemon=True
        )

    def __enter__(self) -> StandInApiServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def write_kubeconfig(self, path: Path) -> None:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "default",
            "clusters": [{"name": "default", "cluster": {"server": self.url}}],
            "users": [{"name": "default", "user": {"token": self.token}}],
            "contexts": [{"name": "default", "context": {"cluster": "default", "user": "default"}}],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config))  # JSON is YAML

    def requested(self, method: str, pattern: str) -> list[Request]:
        """Requests of a method whose path matches the whole pattern."""
        return [r for r in self.requests if r.method == method and re.fullmatch(pattern, r.path)]

    # Answering.

    def answer(self, method: str, target: str, headers: Any, body: bytes) -> tuple[int, Any]:
        """(status, JSON object). Records the request and tells who waits."""
        parts = urlsplit(target)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        parsed: Any = None
        try:
            if self.behaviour.slow_s:
                self._closing.wait(self.behaviour.slow_s)
            while self.behaviour.hang and not self._closing.wait(0.02):
                pass
            parsed = self._parse(body)
            self._check(method, parts.path, headers)
            status, result = self._route(method, parts.path, query, headers, parsed)
        except ApiError as e:
            status = e.status
            result = {
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "message": e.message, "reason": _REASONS.get(status, "Unknown"), "code": status,
            }  # fmt: skip
        self.requests.append(Request(method, parts.path, query, parsed, status))
        self.cluster.notify()
        return status, result

    def _parse(self, body: bytes) -> Any:
        try:
            return json.loads(body) if body else None
        except ValueError as e:
            raise ApiError(400, f"cannot parse the body: {e}") from e

    def _check(self, method: str, path: str, headers: Any) -> None:
        if self.behaviour.refuse is not None:
            raise ApiError(self.behaviour.refuse, "the server is currently unable to handle the request")
        if headers.get("Authorization") != f"Bearer {self.token}":
            raise ApiError(401, "Unauthorized")
        for verb, pattern in self.behaviour.forbid:
            if verb == method and re.fullmatch(pattern, path):
                raise ApiError(403, f"forbidden: cannot {method} {path}")

    def _route(
        self, method: str, path: str, query: dict[str, str], headers: Any, body: Any
    ) -> tuple[int, Any]:
        node = self.cluster.node
        if (method, path) == ("GET", "/version"):
            major, minor = re.findall(r"\d+", self.cluster.version)[:2]
            return 200, {"major": major, "minor": minor, "gitVersion": self.cluster.version}
        if found := re.fullmatch(r"/api/v1/nodes/([^/]+)(/status)?", path):
            if found[1] != node.name:
                raise ApiError(404, f'nodes "{found[1]}" not found')
            if method == "PATCH":
                self._patch_node(headers.get("Content-Type", ""), body, status=bool(found[2]))
            elif method != "GET":
                raise ApiError(405, f"{method} is not supported")
            return 200, self.node_json()
        if method == "GET" and (found := re.fullmatch(r"/api/v1/(?:namespaces/([^/]+)/)?pods", path)):
            return 200, self._list_pods(found[1], query)
        if found := re.fullmatch(r"/api/v1/namespaces/([^/]+)/pods/([^/]+)(/eviction)?", path):
            return self._pod(method, found[1], found[2], eviction=bool(found[3]), body=body)
        if method == "POST" and (found := re.fullmatch(r"/api/v1/namespaces/([^/]+)/events", path)):
            return 201, self._event(found[1], body)
        raise ApiError(404, "the server could not find the requested resource")

    # Nodes.

    def _patch_node(self, content_type: str, patch: Any, *, status: bool) -> None:
        if content_type.partition(";")[0] not in _PATCHES:
            raise ApiError(415, f"the body of the request was in an unknown format: {content_type}")
        if not isinstance(patch, dict):
            raise ApiError(400, "a patch is an object")
        with self.cluster.lock:
            node = self.cluster.node
            if status:
                # Conditions merge by type, as a strategic merge patch does.
                for condition in (patch.get("status") or {}).get("conditions") or []:
                    node.conditions[condition["type"]] = dict(condition)
            else:
                metadata = patch.get("metadata") or {}
                for values, name in ((node.labels, "labels"), (node.annotations, "annotations")):
                    for key, value in (metadata.get(name) or {}).items():
                        if value is None:
                            values.pop(key, None)
                        elif not isinstance(value, str):
                            raise ApiError(400, f"{name}: {key}: not a string")
                        elif name == "labels" and not re.fullmatch(
                            r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?", value[:64]
                        ):
                            raise ApiError(422, f"metadata.labels: Invalid value: {value!r}")
                        elif name == "labels" and len(value) > 63:
                            raise ApiError(422, f"metadata.labels: {key}: must be no more than 63 characters")
                        else:
                            values[key] = value

    def node_json(self) -> dict[str, Any]:
        with self.cluster.lock:
            node = self.cluster.node
            conditions = {"Ready": {"type": "Ready", "status": "True"}, **node.conditions}
            return {
                "kind": "Node",
                "apiVersion": "v1",
                "metadata": {
                    "name": node.name, "uid": node.name, "labels": dict(node.labels),
                    "annotations": dict(node.annotations),
                },
                "status": {
                    "capacity": {r: quantity.canonical(n) for r, n in node.capacity.items()},
                    "allocatable": {r: quantity.canonical(n) for r, n in node.allocatable.items()},
                    "conditions": list(conditions.values()),
                    "nodeInfo": {"kubeletVersion": self.cluster.version},
                },
            }  # fmt: skip

    # Pods.

    def _list_pods(self, namespace: str | None, query: dict[str, str]) -> dict[str, Any]:
        pods = [p for p in self.cluster.pods.values() if namespace in (None, p.namespace)]
        for term in filter(None, query.get("fieldSelector", "").split(",")):
            name, _, value = term.partition("=")
            negated, name = name.endswith("!"), name.rstrip("!")
            if name not in _POD_FIELDS:
                raise ApiError(400, f"field label not supported: {name}")
            value = value.lstrip("=")
            pods = [p for p in pods if (_POD_FIELDS[name](p) == value) != negated]
        return {
            "kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"},
            "items": [self.pod_json(p) for p in pods],
        }  # fmt: skip

    def _pod(
        self, method: str, namespace: str, name: str, *, eviction: bool, body: Any
    ) -> tuple[int, dict[str, Any]]:
        pod = self.cluster.pods.get((namespace, name))
        if pod is None:
            raise ApiError(404, f'pods "{name}" not found')
        if method == "GET" and not eviction:
            return 200, self.pod_json(pod)
        if method not in ("POST", "DELETE") or eviction != (method == "POST"):
            raise ApiError(405, f"{method} is not supported")
        options = (body or {}).get("deleteOptions") or body or {}
        uid = (options.get("preconditions") or {}).get("uid")
        if uid is not None and uid != pod.uid:
            raise ApiError(409, f"the UID in the precondition ({uid}) does not match ({pod.uid})")
        if eviction and self.behaviour.evictions_blocked:
            raise ApiError(429, "Cannot evict pod as it would violate the pod's disruption budget.")
        self.cluster.delete(pod)
        return 201 if eviction else 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def pod_json(self, pod: Pod) -> dict[str, Any]:
        with self.cluster.lock:
            metadata: dict[str, Any] = {
                "name": pod.name, "namespace": pod.namespace, "uid": pod.uid, "labels": dict(pod.labels),
                "annotations": dict(pod.annotations),
            }  # fmt: skip
            if pod.owner:
                metadata["ownerReferences"] = [{"kind": "ReplicaSet", "name": pod.owner, "controller": True}]
            if pod.deleted:
                metadata["deletionTimestamp"] = "2025-01-01T00:00:00Z"
            spec: dict[str, Any] = {
                "restartPolicy": pod.restart_policy,
                "initContainers": [_spec_json(c) for c in pod.init],
                "containers": [_spec_json(c) for c in pod.apps],
            }
            if pod.node_name:
                spec["nodeName"] = pod.node_name
            health = self.kubelet.resource_health(pod)
            status: dict[str, Any] = {
                "phase": pod.phase,
                "qosClass": {"guaranteed": "Guaranteed", "burstable": "Burstable"}.get(pod.qos, "BestEffort"),
                "initContainerStatuses": [_status_json(c, health) for c in pod.init],
                "containerStatuses": [_status_json(c, health) for c in pod.apps],
            }
            if pod.reason:
                status |= {"reason": pod.reason, "message": pod.message}
            return {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": spec, "status": status}

    # Events.

    def _event(self, namespace: str, body: Any) -> dict[str, Any]:
        about = (body or {}).get("involvedObject") or {}
        if not about.get("kind") or not about.get("name"):
            raise ApiError(422, "involvedObject: kind and name are required")
        # An event lies in its object's namespace; a node's in "default".
        if about.get("namespace") not in (None, "", namespace):
            raise ApiError(400, "involvedObject.namespace: does not match event.namespace")
        metadata = body.get("metadata") or {}
        if not metadata.get("name") and not metadata.get("generateName"):
            raise ApiError(422, "metadata.name: Required value: name or generateName is required")
        with self.cluster.lock:
            self.cluster.events.append(
                Event(
                    about["kind"], namespace, about["name"], about.get("uid", ""), body.get("type", "Normal"),
                    body.get("reason", ""), body.get("message", ""),
                    (body.get("source") or {}).get("component", body.get("reportingComponent", "")),
                    body.get("count", 1),
                )
            )  # fmt: skip
        name = metadata.get("name") or f"{metadata['generateName']}{uuid.uuid4().hex[:5]}"
        return {**body, "metadata": {**metadata, "name": name, "namespace": namespace}}


def _spec_json(c: Container) -> dict[str, Any]:
    limits = {
        r: quantity.canonical(n) if "/" in r else str(c.spec.limits[r]) for r, n in c.spec.amounts().items()
    }
    shown: dict[str, Any] = {"name": c.name, "image": "example.com/app:1"}
    shown["env"] = [{"name": name, "value": value} for name, value in c.spec.env.items()]
    shown["resources"] = {"limits": limits, "requests": dict(limits)}
    if c.role == "sidecar":
        shown["restartPolicy"] = "Always"
    return shown


def _status_json(c: Container, health: dict[str, dict[str, dict[str, str]]]) -> dict[str, Any]:
    state: dict[str, Any] = {"waiting": {"reason": c.reason, "message": c.message}}
    if c.state == "running":
        state = {"running": {"startedAt": "2025-01-01T00:00:00Z"}}
    elif c.state == "terminated":
        state = {"terminated": {"exitCode": c.exit_code or 0, "reason": c.reason}}
    shown: dict[str, Any] = {
        "name": c.name, "state": state, "ready": c.running, "started": c.running, "restartCount": c.restarts,
    }  # fmt: skip
    if c.instances:
        shown["containerID"] = f"containerd://{c.instance.id}"
    if c.name in health:
        shown["allocatedResourcesStatus"] = [
            {"name": resource, "resources": [{"resourceID": i, "health": h} for i, h in ids.items()]}
            for resource, ids in health[c.name].items()
        ]
    return shown


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # joined at server_close: nothing is left behind


def _handler_for(api: StandInApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 0.5  # of an idle connection, so that closing the server does not wait for its clients

        def _do(self) -> None:
            threading.current_thread().name = "apiserver-request"
            length = int(self.headers.get("Content-Length") or 0)
            status, result = api.answer(self.command, self.path, self.headers, self.rfile.read(length))
            data = json.dumps(result).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                self.close_connection = True  # the client gave up

        do_GET = do_PATCH = do_POST = do_DELETE = do_PUT = _do

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
