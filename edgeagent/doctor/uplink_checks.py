"""From the node to the broker: the clock, the network, TLS, the dates of certificates."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import urlsplit

from edgeagent.doctor.certificates import validities
from edgeagent.doctor.examination import Examination
from edgeagent.doctor.findings import Finding, fail, ok, skip, warn
from edgeagent.node.clock import Moment, SystemClock

CONNECT_TIMEOUT_S = 5.0
SOON = timedelta(days=30)
_PORTS = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
_OLDEST_PLAUSIBLE = datetime(2025, 1, 1, tzinfo=timezone.utc)


def clock(x: Examination) -> Iterator[Finding]:
    yield judge_clock(SystemClock(x.host).now())


def judge_clock(now: Moment) -> Finding:
    at = datetime.fromtimestamp(now.wall_ms / 1000, timezone.utc)
    shown = f"{at:%Y-%m-%d %H:%M} UTC"
    if at < _OLDEST_PLAUSIBLE:
        return fail(f"the clock says {shown}", "timedatectl set-ntp true; TLS cannot work with a wrong clock")
    if now.synced:
        return ok(f"{shown}, kept right by time synchronisation")
    return warn(f"{shown}, and nothing keeps it right", "timedatectl set-ntp true, or install chrony")


def broker(x: Examination) -> Iterator[Finding]:
    fleet = x.config.fleet
    if not fleet.enabled:
        yield skip("fleet.enabled is false")
        return
    if x.snapshot is not None:
        up = x.snapshot["uplink"]
        if up["connected"]:
            yield ok(f"the agent is connected to {up.get('broker')}, {up.get('queued', 0)} messages wait")
        else:
            why = up.get("problem") or "it is trying"
            yield warn(f"the agent is not connected: {why}; {up.get('queued', 0)} messages wait")
    if fleet.proxy is not None:
        yield skip(f"brokers are behind {fleet.proxy}: not tried from here")
        return
    context = None
    for url in fleet.brokers:
        parts = urlsplit(url)
        if parts.scheme in ("mqtts", "wss") and context is None:
            try:
                context = _tls(x)
            except (OSError, ValueError) as e:
                yield fail(f"TLS cannot be set up: {e}", "fleet.tls names the files")
                return
        yield _reach(url, context if parts.scheme in ("mqtts", "wss") else None)


def _tls(x: Examination) -> ssl.SSLContext:
    tls = x.config.fleet.tls
    context = ssl.create_default_context(cafile=_file(x, tls.ca_file))
    cert = _file(x, tls.cert_file)
    if cert is not None:
        context.load_cert_chain(cert, _file(x, tls.key_file))
    return context


def _file(x: Examination, path: str | None) -> str | None:
    return None if path is None else str(x.host.path(path))


def _reach(url: str, context: ssl.SSLContext | None) -> Finding:
    """TCP and TLS only: an MQTT connection with the agent's client id would throw the agent out."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    try:
        with socket.create_connection((host, port), CONNECT_TIMEOUT_S) as plain:
            if context is None:
                return ok(f"{url} answers, without encryption")
            with context.wrap_socket(plain, server_hostname=host) as secure:
                until = _until(secure)
                if until is not None and until - datetime.now(timezone.utc) < SOON:
                    return warn(
                        f"{url} answers; its certificate ends on {until:%Y-%m-%d}", "renew it on the broker"
                    )
                return ok(f"{url} answers, {secure.version()}")
    except ssl.SSLCertVerificationError as e:
        return fail(
            f"{url}: its certificate is not accepted: {e.verify_message}",
            "fleet.tls.caFile must hold the CA that signed it, and the URL the name that is in it",
        )
    except socket.gaierror as e:
        return fail(
            f"{url}: {host} cannot be resolved ({e.strerror})", "is DNS set up? resolvectl query " + host
        )
    except TimeoutError:
        return fail(f"{url}: no answer within {CONNECT_TIMEOUT_S:g} s", f"does a firewall drop port {port}?")
    except OSError as e:
        return fail(f"{url}: {e.strerror or e}", f"does the broker listen on port {port}?")


def _until(connection: ssl.SSLSocket) -> datetime | None:
    end = (connection.getpeercert() or {}).get("notAfter")
    return (
        datetime.fromtimestamp(ssl.cert_time_to_seconds(end), timezone.utc) if isinstance(end, str) else None
    )


def certificates(x: Examination) -> Iterator[Finding]:
    tls = x.config.fleet.tls
    files = [f for f in (tls.ca_file, tls.cert_file) if f is not None]
    if not x.config.fleet.enabled or not files:
        yield skip("no certificate files are configured")
        return
    now = datetime.now(timezone.utc)
    for path in files:
        text = x.host.read_text(path)
        if text is None:
            yield fail(f"{path} cannot be read", "fleet.tls names the files")
            continue
        try:
            found = validities(text)
        except ValueError as e:
            yield fail(f"{path}: {e}", "it must be PEM: -----BEGIN CERTIFICATE-----")
            continue
        # In a CA file the oldest may have ended long ago; the others count.
        until = max(v.not_after for v in found) if path == tls.ca_file else found[0].not_after
        since = min(v.not_before for v in found) if path == tls.ca_file else found[0].not_before
        if now > until:
            yield fail(
                f"{path} ended on {until:%Y-%m-%d}", "renew it; it is read again at the next connection"
            )
        elif now < since:
            yield fail(f"{path} is valid from {since:%Y-%m-%d} only", "is this node's clock right?")
        elif until - now < SOON:
            yield warn(
                f"{path} ends on {until:%Y-%m-%d}", "renew it; it is read again at the next connection"
            )
        else:
            yield ok(f"{path} is valid until {until:%Y-%m-%d}")
    if tls.key_file is not None:
        yield from _key(x, x.host.path(tls.key_file))


def _key(x: Examination, path: Path) -> Iterator[Finding]:
    shown = x.config.fleet.tls.key_file
    try:
        mode = os.stat(path).st_mode & 0o777
        _tls(x)
    except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
        yield fail(f"{shown} does not go with {x.config.fleet.tls.cert_file}: {e}")
        return
    if mode & 0o077:
        yield warn(f"{shown} can be read by others (mode {mode:o})", f"chmod 600 {shown}")
