"""One MQTT connection and what keeps it: the only place that knows paho.

`Link` runs a thread that connects (brokers in order, jittered backoff), moves packets, and drops a
link that is half open. All of paho happens in that thread, driven by our own poll loop. Everything
between it and the uplink is hand-over: `publish` and `acknowledge` append to a queue, what comes in
is appended to `inbox` or `messages`, and the uplink is woken. So nothing the network does can hold
up a caller.

A new paho client is made for every connection: certificates, passwords and DNS are read afresh, and
paho never holds messages of an earlier connection (it would send them all at once, whatever the
broker's ReceiveMaximum). What was not acknowledged is sent again by its owner.
"""

from __future__ import annotations

import logging
import random
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from edgeagent.errors import FleetError

log = logging.getLogger(__name__)

OWN_WINDOW = 16
MAX_MESSAGES = 64  # received and not yet looked at
MAX_INCOMING_BYTES = 256 * 1024
DEFAULT_PORTS = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
_TAKEN_OVER = 0x8E
# Unspecified error, implementation specific error, quota exceeded.
_MAY_PASS = frozenset({0x80, 0x83, 0x97})
# The broker blames the packet it just read: malformed, protocol error, too large, bad format, …
_BLAMES_PACKET = frozenset({0x81, 0x82, 0x90, 0x95, 0x99, 0x9A, 0x9B})


@dataclass(frozen=True, slots=True)
class Broker:
    """One URL of `fleet.brokers`, taken apart."""

    url: str
    host: str
    port: int
    tls: bool
    websocket_path: str | None

    @classmethod
    def parse(cls, url: str) -> Broker:
        try:
            parts = urlsplit(url)
            port = parts.port or DEFAULT_PORTS[parts.scheme]
        except (ValueError, KeyError) as e:
            raise FleetError(f"cannot use broker URL {url!r}: {e}") from e
        if not parts.hostname:
            raise FleetError(f"cannot use broker URL {url!r}: no host")
        return cls(
            url=url,
            host=parts.hostname,
            port=port,
            tls=parts.scheme in ("mqtts", "wss"),
            websocket_path=(parts.path or "/mqtt") if parts.scheme in ("ws", "wss") else None,
        )


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How to connect. Times are seconds."""

    brokers: tuple[Broker, ...]
    client_id: str
    protocol: str = "5"  # "5" | "3.1.1"
    username: str | None = None
    password_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    proxy: str | None = None
    keepalive_s: int = 30
    will_delay_s: int = 60
    session_expiry_s: int = 3600
    connect_timeout_s: float = 25.0
    backoff_min_s: float = 1.0
    backoff_max_s: float = 60.0
    ack_timeout_s: float = 30.0  # a PUBACK older than this: the link is dead

    @property
    def is_v5(self) -> bool:
        return self.protocol == "5"


@dataclass(frozen=True, slots=True)
class Subscription:
    """A filter subscribed on every connect. `retained`: whether the retained messages are wanted on
    it. `own`: whether messages of this client come back to it (MQTT 5; always in 3.1.1)."""

    topic: str
    retained: bool = True
    own: bool = False


# -- what comes in --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """`epoch` numbers the connections: what is handed over for an earlier one is not sent."""

    epoch: int
    broker: Broker
    session_present: bool
    window: int  # QoS 1 messages that may be unacknowledged at once
    max_packet_bytes: int | None


@dataclass(frozen=True, slots=True)
class Disconnected:
    """`by_peer`: the broker closed it (it may have disliked a packet); `blames_packet`: it said so.
    `taken_over`: another client came with our client id."""

    reason: str
    was_connected: bool
    by_peer: bool = False
    blames_packet: bool = False
    taken_over: bool = False
    certificate_time: bool = False  # TLS failed over the dates of a certificate
    lasted_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Acked:
    """A PUBACK. `refused`: the broker's reason where it did not take the message; `temporary`: the
    reason may pass."""

    token: int
    refused: str | None
    temporary: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    """A message; give it to `acknowledge` once it is safe."""

    epoch: int
    topic: str
    payload: bytes
    retained: bool
    mid: int
    qos: int
    response_topic: str | None = None
    correlation: bytes | None = None
    expiry_s: int | None = None


@dataclass(frozen=True, slots=True)
class Subscribed:
    """SUBACK: filters the broker refused."""

    refused: tuple[str, ...]


LinkEvent = Connected | Disconnected | Acked | Subscribed


@dataclass(slots=True)
class _Publish:
    epoch: int
    token: int
    topic: str
    payload: bytes
    retain: bool
    expiry_s: int | None
    content_type: str | None
    correlation: bytes | None


@dataclass(slots=True)
class _Acknowledge:
    epoch: int
    mid: int
    qos: int


@dataclass(slots=True)
class _Connection:
    """State of one connection; used by the link's thread only."""

    epoch: int
    client: paho.Client
    broker: Broker
    began_s: float
    connected_s: float | None = None
    tokens: dict[int, int] = field(default_factory=dict)  # paho's mid -> our token
    sent_s: dict[int, float] = field(default_factory=dict)  # our token -> when
    filters: dict[int, tuple[str, ...]] = field(default_factory=dict)  # SUBSCRIBE's mid -> filters
    ended: Disconnected | None = None
    trouble: str | None = None  # what paho logged last as an error before the connection stood

    @property
    def stands(self) -> bool:
        return self.connected_s is not None

    @property
    def over(self) -> bool:
        return self.ended is not None


class Link:
    """The connection, whatever happens to it. `will` gives topic and payload of the last will anew
    for every connection. `wake` is called (in the link's thread) when something came in."""

    def __init__(
        self,
        settings: LinkSettings,
        *,
        will: Callable[[], tuple[str, bytes]],
        subscriptions: Callable[[], Sequence[Subscription]],
        stale_filters: Callable[[], Sequence[str]] = tuple,
        wake: Callable[[], None],
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings
        self.inbox: deque[LinkEvent] = deque()
        self.messages: deque[Received] = deque()
        self.overflowed = 0  # messages not taken because too many waited
        self._will = will
        self._subscriptions = subscriptions
        self._stale_filters = stale_filters
        self._wake_uplink = wake
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._outgoing: deque[_Publish | _Acknowledge] = deque()
        self._stop = threading.Event()
        self._disconnect = threading.Event()
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self._slow_down = False
        self._epoch = 0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="uplink-mqtt", daemon=True)

    # -- for the uplink -------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def publish(
        self,
        epoch: int,
        token: int,
        topic: str,
        payload: bytes,
        *,
        retain: bool = False,
        expiry_s: int | None = None,
        content_type: str | None = None,
        correlation: bytes | None = None,
    ) -> None:
        """Hands over a QoS 1 message; `Acked(token)` follows, or the connection ends."""
        self._outgoing.append(
            _Publish(epoch, token, topic, payload, retain, expiry_s, content_type, correlation)
        )

    def acknowledge(self, message: Received) -> None:
        """Tells the broker that a received message need not come again."""
        if message.qos:
            self._outgoing.append(_Acknowledge(message.epoch, message.mid, message.qos))

    def flush(self) -> None:
        """Sends what was handed over."""
        try:
            self._wake_w.send(b"\0")
        except OSError:
            pass  # full: it is awake anyway; closed: it ended

    def slow_down(self) -> None:
        """The next connection waits longer: another client fights for our id."""
        self._slow_down = True

    def drop(self) -> None:
        """Ends the current connection without DISCONNECT; the link connects anew."""
        self._disconnect.set()
        self.flush()

    def close(self, timeout_s: float) -> bool:
        """Sends DISCONNECT after what was handed over, ends the thread. False when it did not end in
        time (a frozen broker, DNS): it is a daemon, and it is left."""
        self._stop.set()
        self.flush()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._wake_r.close()
        self._wake_w.close()
        return True

    # -- the thread -----------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._run()
        except Exception as e:  # the uplink's own guard: it starts a new link
            self.error = e
            log.warning("mqtt thread failed", exc_info=e)
        self._wake_uplink()

    def _run(self) -> None:
        backoff_s = 0.0
        # Per node, so that a fleet does not come back in step after its broker was down.
        first_backoff_s = self.settings.backoff_min_s * self._rng.uniform(1.0, 4.0)
        while not self._stop.is_set():
            for broker in self.settings.brokers:
                ended = self._connection(broker)
                if self._stop.is_set():
                    return
                self._deliver(ended)
                if ended.was_connected:
                    break  # the next attempt begins with the first broker again
            if ended.was_connected and ended.lasted_s > 2 * first_backoff_s:
                backoff_s = 0.0
            backoff_s = min(max(2 * backoff_s, first_backoff_s), self.settings.backoff_max_s)
            wait_s = backoff_s * self._rng.uniform(0.5, 1.0)
            if self._slow_down:
                self._slow_down = False
                wait_s = self.settings.backoff_max_s * self._rng.uniform(0.5, 1.0)
            self._stop.wait(wait_s)

    def _deliver(self, event: LinkEvent) -> None:
        self.inbox.append(event)
        self._wake_uplink()

    def _connection(self, broker: Broker) -> Disconnected:
        """One connection from its beginning to its end."""
        self._disconnect.clear()
        self._epoch += 1
        began_s = time.monotonic()
        try:
            conn = _Connection(self._epoch, self._make_client(broker), broker, began_s)
        except (OSError, ValueError, FleetError) as e:
            return Disconnected(str(e), was_connected=False)
        conn.client.user_data_set(conn)
        try:
            if self.settings.is_v5:
                conn.client.connect(
                    broker.host,
                    broker.port,
                    self.settings.keepalive_s,
                    clean_start=False,
                    properties=self._connect_properties(),
                )
            else:
                conn.client.connect(broker.host, broker.port, self.settings.keepalive_s)
            self._serve(conn)
        # ssl.SSLError, gaierror, timeouts and PySocks' errors are OSErrors; a host name like "a..b"
        # is a UnicodeError, which is a ValueError.
        except (OSError, ValueError) as e:
            conn.ended = _explain(e, conn)
        finally:
            self._close_socket(conn)
        return conn.ended or Disconnected("closed", was_connected=conn.stands)

    def _serve(self, conn: _Connection) -> None:
        client = conn.client
        deadline_s = conn.began_s + self.settings.connect_timeout_s
        poller = select.poll()
        poller.register(self._wake_r.fileno(), select.POLLIN)
        sock = client.socket()
        if sock is None:
            return
        fd = sock.fileno()
        poller.register(fd, select.POLLIN)
        writable = False
        said_goodbye = False
        while not conn.over:
            if self._stop.is_set() and not said_goodbye:
                self._hand_over(conn)
                client.disconnect()
                said_goodbye = True
                deadline_s = time.monotonic() + 1.0
            if client.want_write() != writable:
                writable = not writable
                poller.modify(fd, select.POLLIN | (select.POLLOUT if writable else 0))
            pending = _pending(client)
            # TLS and WebSocket frames may lie decoded already, where poll does not see them.
            ready = dict(poller.poll(0 if pending else self._wait_ms(conn, deadline_s)))
            if self._wake_r.fileno() in ready:
                _empty(self._wake_r)
            if conn.stands and not said_goodbye:
                self._hand_over(conn)
            if fd in ready or pending:
                _check(client.loop_read(), conn)
                _refuse_huge(client)
                if len(self.messages) >= MAX_MESSAGES // 2:
                    # A flood: reading slower makes it the broker's problem, not the node's.
                    self._stop.wait(0.002)
            if client.want_write():
                _check(client.loop_write(), conn)
            _check(client.loop_misc(), conn)
            if not conn.over:
                conn.ended = self._verdict(conn, said_goodbye, deadline_s)
        ended = conn.ended
        if conn.connected_s is not None and ended is not None:
            conn.ended = replace(ended, lasted_s=time.monotonic() - conn.connected_s)
        elif conn.trouble is not None and ended is not None:
            conn.ended = replace(ended, reason=f"{ended.reason} ({conn.trouble})")

    def _verdict(self, conn: _Connection, said_goodbye: bool, deadline_s: float) -> Disconnected | None:
        """Why the connection is over although paho has not said so; None: it is not."""
        now_s = time.monotonic()
        if conn.client.socket() is None:
            return Disconnected("closed", was_connected=conn.stands)
        if (not conn.stands or said_goodbye) and now_s > deadline_s:
            what = "no answer to DISCONNECT" if said_goodbye else "no answer to CONNECT"
            return Disconnected(what, was_connected=conn.stands)
        if self._disconnect.is_set():
            return Disconnected("dropped", was_connected=conn.stands)
        if conn.sent_s and now_s - next(iter(conn.sent_s.values())) > self.settings.ack_timeout_s:
            return Disconnected(
                f"no PUBACK for {self.settings.ack_timeout_s:.0f} s: the link is half open",
                was_connected=True,
            )
        return None

    def _wait_ms(self, conn: _Connection, deadline_s: float) -> int:
        now_s = time.monotonic()
        # paho's keepalive needs a look now and then; late by a quarter is within the broker's 1.5.
        wait_s = min(self.settings.keepalive_s / 4, 15.0)
        if not conn.stands or self._stop.is_set():
            wait_s = min(wait_s, deadline_s - now_s)
        if conn.sent_s:
            oldest_s = next(iter(conn.sent_s.values()))
            wait_s = min(wait_s, oldest_s + self.settings.ack_timeout_s - now_s)
        return max(10, int(wait_s * 1000) + 1)

    def _hand_over(self, conn: _Connection) -> None:
        """Gives paho what the uplink handed over."""
        while self._outgoing:
            item = self._outgoing.popleft()
            if item.epoch != conn.epoch:
                continue
            if isinstance(item, _Acknowledge):
                conn.client.ack(item.mid, item.qos)
                continue
            info = conn.client.publish(
                item.topic, item.payload, qos=1, retain=item.retain, properties=self._publish_properties(item)
            )
            conn.tokens[info.mid] = item.token
            conn.sent_s[item.token] = time.monotonic()

    def _close_socket(self, conn: _Connection) -> None:
        sock = conn.client.socket()
        if sock is not None:
            try:
                sock.close()
            except OSError:
                pass  # it is gone already
        # paho's callbacks refer to us and we to it: break the circle, else each connection stays
        # until the garbage collector comes by.
        conn.client.user_data_set(None)
        conn.client.on_connect = conn.client.on_disconnect = None
        conn.client.on_publish = conn.client.on_message = conn.client.on_subscribe = None
        conn.client.on_log = None

    # -- making a client ------------------------------------------------------------------------

    def _make_client(self, broker: Broker) -> paho.Client:
        s = self.settings
        client = _Client(
            CallbackAPIVersion.VERSION2,
            client_id=s.client_id,
            protocol=MQTTProtocolVersion.MQTTv5 if s.is_v5 else MQTTProtocolVersion.MQTTv311,
            transport="websockets" if broker.websocket_path else "tcp",
            reconnect_on_failure=False,
            manual_ack=True,
            **({} if s.is_v5 else {"clean_session": False}),
        )
        client.suppress_exceptions = True
        client.connect_timeout = s.connect_timeout_s
        client.max_inflight_messages_set(0)  # our own window is smaller than any
        if broker.websocket_path:
            client.ws_set_options(path=broker.websocket_path)
        if broker.tls:
            client.tls, client.tls_host = self._tls_context(), broker.host
            client.tls_timeout_s = s.connect_timeout_s
            client.tls_set_context(client.tls)
        if s.username is not None:
            client.username_pw_set(s.username, _read_secret(s.password_file))
        if s.proxy is not None:
            client.proxy_set(**_proxy_arguments(s.proxy))
        topic, payload = self._will()
        will_properties = None
        if s.is_v5:
            will_properties = _properties(PacketTypes.WILLMESSAGE)
            will_properties.WillDelayInterval = s.will_delay_s
            will_properties.ContentType = "application/json"
        client.will_set(topic, payload, qos=1, retain=True, properties=will_properties)
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_publish = self._on_publish
        client.on_message = self._on_message
        client.on_subscribe = self._on_subscribe
        client.on_log = _note_trouble
        # With these set paho only queues when something is published; our loop writes.
        client.on_socket_register_write = _nothing
        client.on_socket_unregister_write = _nothing
        return client

    def _tls_context(self) -> ssl.SSLContext:
        """Read anew for every connection, so that rotated certificates count from the next one on.
        Host names are always checked."""
        s = self.settings
        context = ssl.create_default_context(cafile=None if s.ca_file is None else str(s.ca_file))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if s.cert_file is not None:
            try:
                context.load_cert_chain(str(s.cert_file), None if s.key_file is None else str(s.key_file))
            except (OSError, ssl.SSLError) as e:
                raise FleetError(f"cannot use client certificate {s.cert_file}: {e}") from e
        return context

    def _connect_properties(self) -> Properties:
        properties = _properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = self.settings.session_expiry_s
        properties.ReceiveMaximum = OWN_WINDOW
        properties.MaximumPacketSize = MAX_INCOMING_BYTES
        return properties

    def _publish_properties(self, item: _Publish) -> Properties | None:
        # Mostly there is nothing to say, and making the object costs a tenth of sending the message.
        nothing = item.expiry_s is None and item.content_type is None and item.correlation is None
        if nothing or not self.settings.is_v5:
            return None
        properties = _properties(PacketTypes.PUBLISH)
        if item.expiry_s is not None:
            properties.MessageExpiryInterval = item.expiry_s
        if item.content_type is not None:
            properties.ContentType = item.content_type
        if item.correlation is not None:
            properties.CorrelationData = item.correlation
        return properties

    # -- paho's callbacks: they note and enqueue, nothing else ------------------------------------

    def _on_connect(
        self,
        client: paho.Client,
        conn: _Connection,
        flags: paho.ConnectFlags,
        code: ReasonCode,
        properties: Properties | None,
    ) -> None:
        if code.is_failure:
            conn.ended = Disconnected(f"connection refused: {code}", was_connected=False)
            return
        conn.connected_s = time.monotonic()
        client.on_log = None
        receive_maximum = getattr(properties, "ReceiveMaximum", None)
        max_packet = getattr(properties, "MaximumPacketSize", None)
        self._deliver(
            Connected(
                conn.epoch,
                conn.broker,
                flags.session_present,
                min(OWN_WINDOW, int(receive_maximum)) if receive_maximum else OWN_WINDOW,
                int(max_packet) if max_packet else None,
            )
        )
        stale = list(self._stale_filters())
        if stale:
            client.unsubscribe(stale)
        wanted = self._subscriptions()
        if not wanted:
            return
        if self.settings.is_v5:
            request: Any = [
                (s.topic, SubscribeOptions(qos=1, noLocal=not s.own, retainHandling=0 if s.retained else 2))
                for s in wanted
            ]
        else:
            request = [(s.topic, 1) for s in wanted]
        _, mid = client.subscribe(request)
        if mid is not None:
            conn.filters[mid] = tuple(s.topic for s in wanted)

    def _on_disconnect(
        self,
        client: paho.Client,
        conn: _Connection | None,
        flags: paho.DisconnectFlags,
        code: ReasonCode,
        properties: Properties | None,
    ) -> None:
        if conn is None or conn.ended is not None:  # paho may call it twice
            return
        text = getattr(properties, "ReasonString", None) or str(code)
        from_broker = flags.is_disconnect_packet_from_server
        timed_out = not from_broker and str(code) == "Keep alive timeout"
        conn.ended = Disconnected(
            text,
            was_connected=conn.stands,
            by_peer=not timed_out,
            blames_packet=from_broker and code.value in _BLAMES_PACKET,
            taken_over=from_broker and code.value == _TAKEN_OVER,
        )

    def _on_publish(
        self, client: paho.Client, conn: _Connection, mid: int, code: ReasonCode, properties: Properties
    ) -> None:
        token = conn.tokens.pop(mid, None)
        if token is not None:
            conn.sent_s.pop(token, None)
            refused = str(code) if code.is_failure else None
            self._deliver(Acked(token, refused, code.value in _MAY_PASS))

    def _on_message(self, client: paho.Client, conn: _Connection, message: paho.MQTTMessage) -> None:
        # QoS 1 is bounded by our ReceiveMaximum (the broker's inflight limit in 3.1.1); QoS 0 by nothing.
        if len(self.messages) >= (MAX_MESSAGES if message.qos else MAX_MESSAGES // 2):
            self.overflowed += 1
            client.ack(message.mid, message.qos)
            return
        try:
            topic = message.topic
        except UnicodeDecodeError:
            client.ack(message.mid, message.qos)
            return
        p = message.properties
        self.messages.append(
            Received(
                epoch=conn.epoch,
                topic=topic,
                payload=bytes(message.payload),
                retained=message.retain,
                mid=message.mid,
                qos=message.qos,
                response_topic=getattr(p, "ResponseTopic", None),
                correlation=getattr(p, "CorrelationData", None),
                expiry_s=getattr(p, "MessageExpiryInterval", None),
            )
        )
        self._wake_uplink()

    def _on_subscribe(
        self,
        client: paho.Client,
        conn: _Connection,
        mid: int,
        codes: list[ReasonCode],
        properties: Properties | None,
    ) -> None:
        filters = conn.filters.pop(mid, ())
        refused = tuple(f for f, code in zip(filters, codes, strict=False) if code.is_failure)
        self._deliver(Subscribed(refused))


class _Client(paho.Client):
    """paho's client, which leaves a socket open when its TLS handshake fails; that is put right here.
    Should paho ever rename the method, only that is lost."""

    tls: ssl.SSLContext | None = None
    tls_host = ""
    tls_timeout_s = 25.0

    def _ssl_wrap_socket(self, tcp_sock: socket.socket) -> ssl.SSLSocket:
        assert self.tls is not None, "set before connecting"
        sock = self.tls.wrap_socket(tcp_sock, server_hostname=self.tls_host, do_handshake_on_connect=False)
        try:
            sock.settimeout(self.tls_timeout_s)
            sock.do_handshake()
        except (OSError, ValueError):
            sock.close()
            raise
        return sock


# -- small parts ----------------------------------------------------------------------------------


def _properties(packet_type: int) -> Properties:
    return Properties(packet_type)  # type: ignore[no-untyped-call]  # paho leaves it untyped


def _nothing(*_: object) -> None:
    """Stands where paho wants a callback."""


def _note_trouble(client: paho.Client, conn: _Connection | None, level: int, text: str) -> None:
    """Why a handshake failed is nowhere else: paho reports "unspecified error"."""
    if conn is not None and level == paho.MQTT_LOG_ERR:
        conn.trouble = text[-200:]


def _pending(client: paho.Client) -> bool:
    pending = getattr(client.socket(), "pending", None)
    return bool(pending is not None and pending() > 0)


def _empty(sock: socket.socket) -> None:
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        pass


def _check(code: MQTTErrorCode, conn: _Connection) -> None:
    if code is not MQTTErrorCode.MQTT_ERR_SUCCESS and conn.ended is None:
        conn.ended = Disconnected(paho.error_string(code), was_connected=conn.stands, by_peer=True)


def _refuse_huge(client: paho.Client) -> None:
    """MQTT 3.1.1 cannot tell the broker how large a packet may be, and paho would gather 256 MB."""
    packet = getattr(client, "_in_packet", None)
    if isinstance(packet, dict) and packet.get("remaining_length", 0) > MAX_INCOMING_BYTES:
        raise OSError(f"incoming packet of {packet['remaining_length']} bytes")


def _explain(error: Exception, conn: _Connection) -> Disconnected:
    text = str(error) or type(error).__name__
    certificate_time = False
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"the broker's certificate is not accepted: {error.verify_message}"
        # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED, and the same of a CRL
        certificate_time = error.verify_code in (9, 10, 11, 12)
    elif isinstance(error, socket.gaierror):
        text = f"cannot resolve {conn.broker.host}: {error.strerror or text}"
    elif isinstance(error, UnicodeError):
        text = f"{conn.broker.host!r} is no host name"
    return Disconnected(text, was_connected=conn.stands, by_peer=False, certificate_time=certificate_time)


def _read_secret(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise FleetError(f"cannot read the password file {path}: {e}") from e
    return text.rstrip("\r\n")


def _proxy_arguments(url: str) -> dict[str, Any]:
    try:
        import socks  # type: ignore[import-not-found, import-untyped, unused-ignore]  # an extra
    except ImportError as e:
        # paho would ignore the proxy and go out directly.
        raise FleetError("cannot use a proxy: PySocks is not installed (pip install PySocks)") from e
    parts = urlsplit(url)
    kinds = {"http": socks.HTTP, "socks5": socks.SOCKS5, "socks5h": socks.SOCKS5, "socks4": socks.SOCKS4}
    if parts.scheme not in kinds or not parts.hostname:
        raise FleetError(
            f"cannot use proxy {parts.scheme}://{parts.hostname}: http, socks4 or socks5 is needed"
        )
    return {
        "proxy_type": kinds[parts.scheme],
        "proxy_addr": parts.hostname,
        "proxy_port": parts.port or (3128 if parts.scheme == "http" else 1080),
        "proxy_rdns": parts.scheme != "socks5",
        "proxy_username": parts.username,
        "proxy_password": parts.password,
    }
