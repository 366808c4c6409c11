"""A small Kubernetes API client: the few calls that the agent makes, over one kept connection.

The official client costs more memory than the whole agent. Credentials, in this order: a kubeconfig
named in the configuration, a pod's service account, the K3s node's own identity, K3s's administrator.
Every failure is a NodeError; nothing here is needed for pods to start.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from edgeagent.config.plain import load_plain
from edgeagent.errors import ConfigError, NodeError
from edgeagent.hostroot import HostRoot
from edgeagent.node.k3s import find_k3s

if TYPE_CHECKING:
    import urllib3

log = logging.getLogger(__name__)

SERVICE_ACCOUNT_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"
CONNECT_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 5.0
MAX_RESPONSE_BYTES = 32 << 20
TOKEN_MAX_AGE_S = 60.0  # the kubelet renews a bound service account token in its file

_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
_MERGE_PATCH = "application/merge-patch+json"


class ApiStatusError(NodeError):
    """The API server refused; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Where the API server is and how to prove who we are. Certificates are PEM bytes."""

    server: str
    ca: bytes | None = None
    verify: bool = True
    token: str | None = None
    token_file: Path | None = None
    client_cert: bytes | None = None
    client_key: bytes | None = None
    server_name: str | None = None
    origin: str = ""


@dataclass(frozen=True, slots=True)
class PodRef:
    """A pod by all its names."""

    namespace: str
    name: str
    uid: str


# -- credentials -------------------------------------------------------------------------------------


def find_credentials(
    host: HostRoot, kubeconfig: str | None = None, environ: Mapping[str, str] = os.environ
) -> Credentials:
    """The credentials to use here. `kubeconfig` is a host path. Raises NodeError when there are none."""
    if kubeconfig is not None:
        return read_kubeconfig(host, kubeconfig)
    api_host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    account = Path(SERVICE_ACCOUNT_DIR)
    if api_host and (account / "token").exists():
        where = f"[{api_host}]" if ":" in api_host else api_host
        return Credentials(
            server=f"https://{where}:{port}",
            ca=_read(account / "ca.crt"),
            token_file=account / "token",
            origin="service account",
        )
    k3s = find_k3s(host, ask_version=False)
    if k3s is not None and k3s.kubeconfig is not None:
        return read_kubeconfig(host, k3s.kubeconfig)
    raise NodeError("no API server access: neither a kubeconfig, a service account nor K3s's own was found")


def read_kubeconfig(host: HostRoot, path: str) -> Credentials:
    """The current context of a kubeconfig; file names in it are the host's. Raises NodeError."""
    try:
        document = load_plain(host.path(host.resolve(path)))
    except ConfigError as e:
        raise NodeError(str(e)) from e
    try:
        context = _named(document["contexts"], document["current-context"])["context"]
        cluster = _named(document["clusters"], context["cluster"])["cluster"]
        user = _named(document.get("users") or [], context.get("user")).get("user") or {}
        server = str(cluster["server"])
    except (KeyError, TypeError, AttributeError) as e:
        raise NodeError(f"cannot use kubeconfig {path}: no usable current context") from e
    if "exec" in user or "auth-provider" in user:
        raise NodeError(f"cannot use kubeconfig {path}: credential plug-ins are not supported")

    def pem(section: Mapping[str, Any], name: str) -> bytes | None:
        inline, file = section.get(f"{name}-data"), section.get(name)
        if inline:
            try:
                return base64.b64decode(inline, validate=True)
            except (binascii.Error, ValueError, TypeError) as e:
                raise NodeError(f"cannot use kubeconfig {path}: {name}-data is not base64") from e
        if not file:
            return None
        absolute = file if str(file).startswith("/") else f"{path.rpartition('/')[0]}/{file}"
        return _read(host.path(host.resolve(absolute)))

    token_file = user.get("tokenFile")
    return Credentials(
        server=server.rstrip("/"),
        ca=pem(cluster, "certificate-authority"),
        verify=not cluster.get("insecure-skip-tls-verify"),
        token=user.get("token"),
        token_file=host.path(host.resolve(token_file)) if token_file else None,
        client_cert=pem(user, "client-certificate"),
        client_key=pem(user, "client-key"),
        server_name=cluster.get("tls-server-name"),
        origin=path,
    )


def _named(items: Any, name: Any) -> Any:
    return next((i for i in items if i.get("name") == name), {})


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise NodeError(f"cannot read {path}: {e.strerror}") from e


def tls_context(credentials: Credentials) -> ssl.SSLContext:
    """Raises NodeError where a certificate or key is damaged."""
    try:
        context = ssl.create_default_context(
            cadata=credentials.ca.decode("ascii", "ignore") if credentials.ca else None
        )
        if not credentials.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if credentials.client_cert and credentials.client_key:
            # ssl loads client certificates from files only: from one in memory, so no key touches a disk.
            with os.fdopen(os.memfd_create("client-cert", os.MFD_CLOEXEC), "wb") as f:
                f.write(credentials.client_cert + b"\n" + credentials.client_key)
                f.flush()
                context.load_cert_chain(f"/proc/self/fd/{f.fileno()}")
    except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
        raise NodeError(f"cannot use the certificates of {credentials.origin}: {e}") from e
    return context


# -- the client --------------------------------------------------------------------------------------


class ApiServer:
    """Thread-safe. `find` gives the credentials; it is asked again after a failure to connect or to
    authenticate, because certificates and tokens are renewed in their files."""

    def __init__(
        self,
        find: Callable[[], Credentials],
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        read_timeout_s: float = READ_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find = find
        self._timeouts_s = (connect_timeout_s, read_timeout_s)
        self._clock = clock
        self._lock = threading.Lock()
        self._pool: urllib3.PoolManager | None = None
        self._credentials: Credentials | None = None
        self._token: tuple[float, str] | None = None

    def server_version(self) -> str:
        """'v1.33.5+k3s1'."""
        return str(self.request("GET", "/version").get("gitVersion", ""))

    def node(self, name: str) -> dict[str, Any]:
        return self.request("GET", f"/api/v1/nodes/{quote(name, safe='')}")

    def node_labels(self, name: str) -> dict[str, str]:
        return dict((self.node(name).get("metadata") or {}).get("labels") or {})

    def patch_node_labels(self, name: str, labels: Mapping[str, str | None]) -> None:
        """Sets labels; None removes one."""
        body = {"metadata": {"labels": dict(labels)}}
        self.request("PATCH", f"/api/v1/nodes/{quote(name, safe='')}", body, content_type=_MERGE_PATCH)

    def pods_on_node(self, node: str) -> tuple[PodRef, ...]:
        """From the server's cache and without specs: cheap for both sides."""
        query = {"fieldSelector": f"spec.nodeName={node}", "resourceVersion": "0"}
        answer = self.request("GET", "/api/v1/pods", query=query, accept=_METADATA_ONLY)
        found = []
        for item in answer.get("items") or []:
            meta = item.get("metadata") or {}
            if meta.get("name") and meta.get("namespace") and meta.get("uid"):
                found.append(PodRef(meta["namespace"], meta["name"], meta["uid"]))
        return tuple(found)

    def create_event(self, namespace: str, event: Mapping[str, Any]) -> None:
        """`event` is a core/v1 Event without namespace."""
        body = {"apiVersion": "v1", "kind": "Event", **event}
        body["metadata"] = {**event.get("metadata", {}), "namespace": namespace}
        self.request("POST", f"/api/v1/namespaces/{quote(namespace, safe='')}/events", body)

    def evict_pod(self, pod: PodRef) -> bool:
        """Asks for a graceful end of that very pod (its own terminationGracePeriodSeconds counts).
        False: it is gone already, or another pod has its name. Raises ApiStatusError with status 429
        while a PodDisruptionBudget forbids it."""
        path = f"/api/v1/namespaces/{quote(pod.namespace, safe='')}/pods/{quote(pod.name, safe='')}/eviction"
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
        try:
            self.request("POST", path, body)
        except ApiStatusError as e:
            if e.status in (404, 409):
                return False
            raise
        return True

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> dict[str, Any]:
        """One call. Raises NodeError: cannot connect; ApiStatusError: the server refuses."""
        import urllib3  # 2 MB and 40 ms: only for nodes that talk to an API server

        pool, credentials = self._connect()
        url = credentials.server + path + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": accept, "User-Agent": "edgeagent"}
        token = self._bearer(credentials)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        data = None
        if body is not None:
            data = json.dumps(body, allow_nan=False).encode()
            headers["Content-Type"] = content_type
        try:
            response = pool.request(method, url, body=data, headers=headers, preload_content=False)
            try:
                content = response.read(MAX_RESPONSE_BYTES + 1)
            finally:
                response.release_conn()
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as e:
            self._forget()
            raise NodeError(f"cannot reach the API server {credentials.server}: {e}") from e
        if response.status == 401:
            self._forget()
        if response.status >= 400:
            raise ApiStatusError(
                f"the API server refuses {method} {path}: {response.status} {_reason(content)}",
                response.status,
            )
        if len(content) > MAX_RESPONSE_BYTES:
            self._forget()
            raise NodeError(f"the API server's answer to {method} {path} is too long")
        try:
            answer = json.loads(content) if content else {}
        except ValueError as e:
            raise NodeError(f"the API server's answer to {method} {path} is no JSON") from e
        return answer if isinstance(answer, dict) else {}

    def close(self) -> None:
        self._forget()

    def _connect(self) -> tuple[urllib3.PoolManager, Credentials]:
        import urllib3

        with self._lock:
            if self._pool is None or self._credentials is None:
                credentials = self._find()
                connect_s, read_s = self._timeouts_s
                options: dict[str, Any] = {}
                if credentials.server.startswith("https:"):
                    options["ssl_context"] = tls_context(credentials)
                    if credentials.server_name:
                        options["server_hostname"] = credentials.server_name
                        options["assert_hostname"] = credentials.server_name
                    if not credentials.verify:
                        options["assert_hostname"] = False
                self._pool = urllib3.PoolManager(
                    num_pools=1,
                    maxsize=2,
                    retries=False,
                    timeout=urllib3.Timeout(connect=connect_s, read=read_s),
                    **options,
                )
                self._credentials = credentials
            return self._pool, self._credentials

    def _bearer(self, credentials: Credentials) -> str | None:
        if credentials.token_file is None:
            return credentials.token
        now = self._clock()
        with self._lock:
            if self._token is None or now - self._token[0] > TOKEN_MAX_AGE_S:
                text = _read(credentials.token_file).decode("ascii", "ignore").strip()
                self._token = (now, text)
            return self._token[1]

    def _forget(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.clear()
            self._pool = None
            self._credentials = None
            self._token = None


def _reason(content: bytes) -> str:
    """The message of a Status object, else the start of the text."""
    try:
        return str(json.loads(content)["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return content[:200].decode("utf-8", "replace").strip()
