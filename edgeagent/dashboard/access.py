"""Who may use the page: one secret, sessions made from it, and which requests are believed.

Pure but for the random source: times are passed in.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections import OrderedDict
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

SESSION_S = 12 * 3600
MAX_SESSIONS = 256
COOKIE = "edgeagent_fleet"
LOGIN_TRIES = 5  # wrong ones of one address, then one every LOGIN_REFILL_S
LOGIN_REFILL_S = 20.0
LOGIN_TRIES_ALL = 40  # of all addresses together
MAX_ADDRESSES = 1024


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class Sessions:
    """Sessions of browsers that gave the secret. Only digests are kept."""

    def __init__(self, secret: str) -> None:
        self._secret = _digest(secret)
        self._expires: OrderedDict[bytes, float] = OrderedDict()

    def knows(self, secret: str) -> bool:
        return hmac.compare_digest(_digest(secret), self._secret)

    def open(self, now_s: float) -> str:
        """A new session's token; the oldest session ends where there are too many."""
        token = secrets.token_urlsafe(32)
        self._expires[_digest(token)] = now_s + SESSION_S
        while len(self._expires) > MAX_SESSIONS:
            self._expires.popitem(last=False)
        return token

    def close(self, token: str) -> None:
        self._expires.pop(_digest(token), None)

    def admits(self, cookie: str | None, authorization: str | None, now_s: float) -> bool:
        """By session cookie, or by `Authorization: Bearer SECRET` for scripts."""
        if authorization is not None and authorization.startswith("Bearer "):
            return self.knows(authorization.removeprefix("Bearer ").strip())
        if not cookie:
            return False
        # Looked up by digest: a guess that shares a prefix takes no longer.
        key = _digest(cookie)
        expires_s = self._expires.get(key)
        if expires_s is None or expires_s <= now_s:
            self._expires.pop(key, None)
            return False
        self._expires[key] = now_s + SESSION_S
        self._expires.move_to_end(key)
        return True


class LoginLimiter:
    """Wrong secrets cost tries, which come back slowly."""

    def __init__(self) -> None:
        self._tries: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address -> (left, at)
        self._all: tuple[float, float] = (LOGIN_TRIES_ALL, 0.0)

    def allowed(self, address: str, now_s: float) -> bool:
        return self._left(address, now_s) >= 1 and self._left_of_all(now_s) >= 1

    def failed(self, address: str, now_s: float) -> None:
        self._tries[address] = (self._left(address, now_s) - 1, now_s)
        self._tries.move_to_end(address)
        while len(self._tries) > MAX_ADDRESSES:
            self._tries.popitem(last=False)
        self._all = (self._left_of_all(now_s) - 1, now_s)

    def _left(self, address: str, now_s: float) -> float:
        left, at_s = self._tries.get(address, (float(LOGIN_TRIES), now_s))
        return min(float(LOGIN_TRIES), left + (now_s - at_s) / LOGIN_REFILL_S)

    def _left_of_all(self, now_s: float) -> float:
        left, at_s = self._all
        return min(float(LOGIN_TRIES_ALL), left + (now_s - at_s) * LOGIN_TRIES / LOGIN_REFILL_S)


def own_names(more: Collection[str] = ()) -> frozenset[str]:
    """Names under which the page may be asked for. A page of another name that resolves to our address
    (DNS rebinding) is not one of them; addresses themselves cannot be rebound."""
    host = socket.gethostname().lower()
    return frozenset({"localhost", host, f"{host}.local", *(name.lower().rstrip(".") for name in more)})


def host_allowed(host_header: str | None, names: Collection[str]) -> bool:
    if not host_header or len(host_header) > 300:
        return False
    try:
        name = urlsplit(f"//{host_header}").hostname
    except ValueError:
        return False
    if not name:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.rstrip(".") in names
    return True


def same_origin(headers: Mapping[str, str]) -> bool:
    """Whether a request that changes something comes from our own page. Scripts with a Bearer token
    send no Origin, and no browser adds the token by itself."""
    origin = headers.get("origin")
    if origin is None:
        return "authorization" in headers
    try:
        return urlsplit(origin).netloc.lower() == headers.get("host", "").lower()
    except ValueError:
        return False
