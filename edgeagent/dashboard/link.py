"""The page's connection to the broker: the one place in the dashboard that knows paho.

`FleetLink` runs one thread that connects, loads what the broker retains, then follows what is said.
Everything that comes in is appended to `inbox`, in order; the owner of the store takes it from there.
When he does not keep up, the thread stops reading, and it is the broker's queue that grows.

The load. Brokers cut off what they retain for a subscriber at their queue limit, without a word
(mosquitto: QoS 1 at 1,020 messages). So the retained topics are asked for one kind after the other, with
QoS 0, which mosquitto does not queue over TCP; only then the same filters are subscribed again with QoS 1
and without retained messages (MQTT 5). A large fleet is then asked for once more, site by site and in the
background: a node that comes only then proves that the broker truncates.
"""

from __future__ import annotations

import functools
import logging
import random
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from edgeagent.errors import FleetError
from edgeagent.fleet.client import Broker
from edgeagent.fleet.topics import ROOT

log = logging.getLogger(__name__)

ALL = f"{ROOT}/+/+"
RETAINED = ("status", "alert/+", "inv", "alloc")
DROPPED = "$SYS/broker/publish/messages/dropped"
QUIET_S = 0.3  # no retained message for so long after the SUBACK: that was all
MAX_STEP_S = 30.0  # a broker that never falls quiet must not keep the page waiting
ASK_BY_SITE_FROM = 64  # nodes; fewer are not cut off by any sensible limit
ASK_AT_ONCE = 40  # nodes
MAX_INBOX = 20_000
MAX_INBOX_BYTES = 64 << 20
MAX_PACKET_BYTES = 256 * 1024
MAX_PACKET_311_BYTES = 16 << 20  # MQTT 3.1.1 cannot tell the broker
COMMAND_EXPIRY_S = 60
NO_SUBSCRIBER = 0x10


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How to connect. `requester` is the last level of the topic that answers come to."""

    brokers: tuple[Broker, ...]
    client_id: str
    requester: str
    protocol: Literal["5", "3.1.1"] = "5"
    username: str | None = None
    password_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    keepalive_s: int = 30
    connect_timeout_s: float = 20.0
    backoff_s: tuple[float, float] = (0.5, 15.0)
    quiet_s: float = QUIET_S
    sites: tuple[str, ...] = ()  # that are known to exist, whatever the broker hands out

    @property
    def is_v5(self) -> bool:
        return self.protocol == "5"


@dataclass(frozen=True, slots=True)
class LinkState:
    """As the page shows it. `since_ms`: of being connected, or of not being connected."""

    connected: bool
    since_ms: int
    broker: str
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    topic: str
    data: bytes
    retained: bool
    at_ms: int


@dataclass(frozen=True, slots=True)
class Up:
    """Connected: the load begins."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """All that the broker hands out of what it retains has come."""


@dataclass(frozen=True, slots=True)
class AskedBySite:
    """Every site was asked for by itself; `found` nodes came only then."""

    found: int


@dataclass(frozen=True, slots=True)
class Down:
    reason: str


@dataclass(frozen=True, slots=True)
class CommandRefused:
    """The broker did not take a command, or nobody listens to it."""

    ident: str
    reason: str


Item = Message | Up | Loaded | AskedBySite | Down | CommandRefused


@dataclass(frozen=True, slots=True)
class _Command:
    ident: str
    topic: str
    data: bytes
    answer_topic: str


@dataclass(slots=True)
class _Load:
    """The retained load of one connection, step by step."""

    steps: deque[list[str]]
    began_s: float = 0.0
    heard_s: float = 0.0
    acknowledged: bool = False
    filters: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)  # "site/node" of every status
    new: set[str] = field(default_factory=set)  # those that came only by site, and have not been asked for
    found: int = 0  # all of those
    done: bool = False  # the first pass; asking goes on
    asks_by_site: bool = False


@dataclass(slots=True)
class _Connection:
    client: _BufferedClient
    broker: Broker
    load: _Load
    stands: bool = False
    ended: str | None = None
    trouble: str | None = None
    telemetry: frozenset[str] = frozenset()
    subscribes: set[int] = field(default_factory=set)
    commands: dict[int, str] = field(default_factory=dict)  # paho's mid -> id of the command


class FleetLink:
    """`wake` is called in the link's thread when the inbox has something new."""

    def __init__(self, settings: LinkSettings, *, wake: Callable[[], None]) -> None:
        self.settings = settings
        self.inbox: deque[Item] = deque()
        self.state = LinkState(False, _now_ms(), settings.brokers[0].url, "connecting")
        self._wake = wake
        self._queued_bytes = 0
        self._taken_bytes = 0
        self._commands: deque[_Command] = deque()
        self._telemetry: frozenset[str] = frozenset()
        self._asks: deque[list[str]] = deque()
        self._stop = threading.Event()
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self._rng = random.Random()  # noqa: S311 - jitter
        self._thread = threading.Thread(target=self._run, name="fleet-link", daemon=True)

    # -- for the server -------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, timeout_s: float = 2.0) -> None:
        self._stop.set()
        self._nudge()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the link's thread did not end in time; it is left")  # it is a daemon
            return
        self._wake_r.close()
        self._wake_w.close()

    def taken(self, message: Message) -> None:
        """To be called for every message taken from the inbox."""
        self._taken_bytes += len(message.data)

    def follow_telemetry(self, nodes: frozenset[str] | None) -> None:
        """Of these nodes ("site/node"); None: of all."""
        wanted = [ALL] if nodes is None else [f"{ROOT}/{key}" for key in sorted(nodes)]
        self._telemetry = frozenset(f"{base}/tele/{form}" for base in wanted for form in ("m", "z"))
        self._nudge()

    def ask(self, nodes: Sequence[str]) -> None:
        """Asks the broker once more for what it retains of these nodes ("site/node")."""
        if nodes:
            self._asks.extend([f"{ROOT}/{key}/{kind}" for kind in RETAINED] for key in nodes)
            self._nudge()

    def send_command(self, key: str, verb: str, ident: str, data: bytes) -> None:
        """Publishes a command to a node; the answer comes to the requester's topic."""
        base = f"{ROOT}/{key}"
        answer = f"{base}/res/{self.settings.requester}"
        self._commands.append(_Command(ident, f"{base}/cmd/{verb}", data, answer))
        self._nudge()

    def _nudge(self) -> None:
        try:
            self._wake_w.send(b"\0")
        except OSError:
            pass  # full: it is awake anyway; closed: it ended

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        least_s, most_s = self.settings.backoff_s
        backoff_s = least_s
        while not self._stop.is_set():
            for broker in self.settings.brokers:
                stood, reason = self._connection(broker)
                if self._stop.is_set():
                    return
                self._note_down(broker, reason)
                if stood:
                    backoff_s = least_s
                    break
            self._stop.wait(backoff_s * self._rng.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, most_s)

    def _note_down(self, broker: Broker, reason: str) -> None:
        was = self.state
        if was.connected or was.problem in (None, "connecting"):
            log.warning("no link to the broker broker=%s: %s", broker.url, reason)
        else:
            log.debug("no link to the broker broker=%s: %s", broker.url, reason)
        since_ms = _now_ms() if was.connected else was.since_ms
        self.state = LinkState(False, since_ms, broker.url, reason)
        self._deliver(Down(reason))

    def _deliver(self, item: Item) -> None:
        self.inbox.append(item)
        self._wake()

    def _connection(self, broker: Broker) -> tuple[bool, str]:
        """One connection from its beginning to its end: whether it stood, and why it ended."""
        try:
            client = self._make_client(broker)
        except (OSError, ValueError, FleetError) as e:
            return False, str(e)
        load = _Load(deque([[DROPPED], *([f"{ALL}/{kind}"] for kind in RETAINED)]))
        conn = _Connection(client, broker, load)
        client.user_data_set(conn)
        client.on_plain_message = functools.partial(self._came, load)
        try:
            if self.settings.is_v5:
                client.connect(
                    broker.host, broker.port, self.settings.keepalive_s, clean_start=True,
                    properties=self._connect_properties(),
                )  # fmt: skip
            else:
                client.connect(broker.host, broker.port, self.settings.keepalive_s)
            self._serve(conn)
        except (OSError, ValueError) as e:  # a host name like "a..b" is a UnicodeError
            conn.ended = _explain(e, broker)
        finally:
            sock = client.socket()
            if sock is not None:
                sock.close()
            client.user_data_set(None)
        reason = conn.ended or "closed"
        if conn.trouble and not conn.stands:
            # What paho logged says more than its "Unspecified error".
            reason = conn.trouble if reason == "Unspecified error" else f"{reason} ({conn.trouble})"
        return conn.stands, reason

    def _serve(self, conn: _Connection) -> None:
        client = conn.client
        sock = client.socket()
        if sock is None:
            return
        deadline_s = time.monotonic() + self.settings.connect_timeout_s
        fd = sock.fileno()
        poller = select.poll()
        poller.register(self._wake_r.fileno(), select.POLLIN)
        poller.register(fd, select.POLLIN)
        writable = False
        while conn.ended is None:
            if self._stop.is_set():
                client.disconnect()
                client.loop_write()
                return
            if client.want_write() != writable:
                writable = not writable
                poller.modify(fd, select.POLLIN | (select.POLLOUT if writable else 0))
            ready = dict(poller.poll(self._wait_ms(conn)))
            if self._wake_r.fileno() in ready:
                _empty(self._wake_r)
            if conn.stands:
                self._hand_over(conn)
                self._load_on(conn)
            if fd in ready:
                self._read(conn)
            if conn.ended is None and client.want_write():
                _check(client.loop_write(), conn)
            if conn.ended is None:
                _check(client.loop_misc(), conn)
            if not conn.stands and time.monotonic() > deadline_s:
                conn.ended = conn.ended or "no answer to CONNECT"

    def _wait_ms(self, conn: _Connection) -> int:
        if not conn.stands:
            return 500
        busy = not conn.load.done or conn.load.steps or conn.load.filters
        return 30 if busy else 5000

    def _read(self, conn: _Connection) -> None:
        client = conn.client
        while conn.ended is None:
            _check(client.loop_read(), conn)
            if conn.ended is None:
                _refuse_huge(client, MAX_PACKET_311_BYTES)
            if client.want_write():
                _check(client.loop_write(), conn)  # acknowledgements, while much is coming in
            if not client.has_more:
                return
            while self._is_full() and not self._stop.wait(0.01):
                pass

    def _is_full(self) -> bool:
        return len(self.inbox) > MAX_INBOX or self._queued_bytes - self._taken_bytes > MAX_INBOX_BYTES

    # -- what is wanted -------------------------------------------------------------------------

    def _hand_over(self, conn: _Connection) -> None:
        client = conn.client
        while self._commands:
            command = self._commands.popleft()
            properties = None
            if self.settings.is_v5:
                properties = _properties(PacketTypes.PUBLISH)
                properties.ResponseTopic = command.answer_topic
                properties.CorrelationData = command.ident.encode()
                properties.MessageExpiryInterval = COMMAND_EXPIRY_S
                properties.ContentType = "application/json"
            info = client.publish(command.topic, command.data, qos=1, properties=properties)
            conn.commands[info.mid] = command.ident
        if conn.load.done and conn.telemetry != self._telemetry:
            wanted = self._telemetry
            gone, new = sorted(conn.telemetry - wanted), sorted(wanted - conn.telemetry)
            if gone:
                client.unsubscribe(gone)
            if new:
                self._subscribe(conn, new, qos=1, retained=False)
            conn.telemetry = wanted

    def _subscribe(self, conn: _Connection, filters: Sequence[str], *, qos: int, retained: bool) -> None:
        request: Any = [(f, qos) for f in filters]
        if self.settings.is_v5:
            options = SubscribeOptions(qos=qos, noLocal=True, retainHandling=0 if retained else 2)
            request = [(f, options) for f in filters]
        _, mid = conn.client.subscribe(request)
        if retained and mid is not None:
            conn.subscribes = {mid}

    def _load_on(self, conn: _Connection) -> None:
        """The next step of the load, if the present one is over."""
        load, now_s = conn.load, time.monotonic()
        if load.filters:
            quiet_s = self.settings.quiet_s / (3 if load.done else 1)
            quiet = load.acknowledged and now_s - load.heard_s > quiet_s
            if not quiet and now_s - load.began_s < MAX_STEP_S:
                return
            if load.done:
                conn.client.unsubscribe(load.filters)
                self._ask_for_the_rest(load)
            load.filters = []
        if not load.done and not load.steps:
            self._begin_live(conn)
            load.done = True
            self._deliver(Loaded())
            if len(load.seen) >= ASK_BY_SITE_FROM or self.settings.sites:
                load.asks_by_site = True
                sites = {key.split("/")[0] for key in load.seen} | set(self.settings.sites)
                load.steps.extend([f"{ROOT}/{site}/+/status"] for site in sorted(sites))
        if load.asks_by_site and not load.steps:
            load.asks_by_site = False
            load.seen.clear()
            self._deliver(AskedBySite(load.found))
        if load.done and not load.steps and self._asks:
            load.steps.append(
                [f for _ in range(min(ASK_AT_ONCE, len(self._asks))) for f in self._asks.popleft()]
            )
        if load.steps:
            load.filters = load.steps.popleft()
            load.began_s = load.heard_s = now_s
            load.acknowledged = False
            self._subscribe(conn, load.filters, qos=0, retained=True)

    def _ask_for_the_rest(self, load: _Load) -> None:
        """Of sites where asking by site brought nodes that had not come before."""
        sites = sorted({key.split("/")[0] for key in load.new})
        load.new.clear()
        load.steps.extendleft([f"{ROOT}/{site}/+/{kind}"] for site in sites for kind in RETAINED[1:])

    def _begin_live(self, conn: _Connection) -> None:
        answers = f"{ALL}/res/{self.settings.requester}"
        self._subscribe(conn, [f"{ALL}/evt/+", answers], qos=1, retained=False)
        if self.settings.is_v5:
            self._subscribe(conn, [f"{ALL}/{kind}" for kind in RETAINED], qos=1, retained=False)

    # -- making a client ------------------------------------------------------------------------

    def _make_client(self, broker: Broker) -> _BufferedClient:
        s = self.settings
        client = _BufferedClient(
            CallbackAPIVersion.VERSION2,
            client_id=s.client_id,
            protocol=MQTTProtocolVersion.MQTTv5 if s.is_v5 else MQTTProtocolVersion.MQTTv311,
            transport="websockets" if broker.websocket_path else "tcp",
            reconnect_on_failure=False,
        )
        client.suppress_exceptions = True
        client.connect_timeout = s.connect_timeout_s
        if broker.websocket_path:
            client.ws_set_options(path=broker.websocket_path)
        if broker.tls:
            client.tls_set_context(self._tls_context())
        if s.username is not None:
            client.username_pw_set(s.username, _read_secret(s.password_file))
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_subscribe = self._on_subscribe
        client.on_publish = self._on_publish
        client.on_log = _note_trouble
        # With these set paho only queues; our loop writes.
        client.on_socket_register_write = _nothing
        client.on_socket_unregister_write = _nothing
        return client

    def _tls_context(self) -> ssl.SSLContext:
        """Read anew for every connection, so that rotated certificates count. Host names are always
        checked."""
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
        properties.ReceiveMaximum = 2000
        properties.MaximumPacketSize = MAX_PACKET_BYTES
        return properties

    # -- paho's callbacks: they note and enqueue, nothing else ------------------------------------

    def _on_connect(
        self, _: paho.Client, conn: _Connection, flags: paho.ConnectFlags, code: ReasonCode, more: Any
    ) -> None:
        if code.is_failure:
            conn.ended = f"connection refused: {code}"
            return
        conn.stands = True
        conn.client.on_log = None  # paho formats a line for every packet for it
        self.state = LinkState(True, _now_ms(), conn.broker.url)
        log.info("linked to the broker broker=%s", conn.broker.url)
        self._deliver(Up())

    def _on_disconnect(
        self, _: paho.Client, conn: _Connection | None, flags: Any, code: ReasonCode, properties: Any
    ) -> None:
        if conn is not None and conn.ended is None:
            conn.ended = getattr(properties, "ReasonString", None) or str(code)

    def _on_message(self, _: paho.Client, conn: _Connection, message: paho.MQTTMessage) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError:
            return
        self._came(conn.load, topic, bytes(message.payload), message.retain)

    def _came(self, load: _Load, topic: str, data: bytes, retained: bool) -> None:
        if retained and load.filters:
            load.heard_s = time.monotonic()
            if topic.endswith("/status") and (load.asks_by_site or not load.done):
                key = "/".join(topic.split("/")[2:4])
                if load.asks_by_site and key not in load.seen:
                    load.new.add(key)
                    load.found += 1
                load.seen.add(key)
        self._queued_bytes += len(data)
        self._deliver(Message(topic, data, retained, _now_ms()))

    def _on_subscribe(
        self, _: paho.Client, conn: _Connection, mid: int, codes: list[ReasonCode], more: Any
    ) -> None:
        if mid in conn.subscribes:
            conn.load.acknowledged = True
            conn.load.heard_s = time.monotonic()

    def _on_publish(self, _: paho.Client, conn: _Connection, mid: int, code: ReasonCode, more: Any) -> None:
        ident = conn.commands.pop(mid, None)
        if ident is None:
            return
        if code.is_failure:
            self._deliver(CommandRefused(ident, f"the broker does not take it: {code}"))
        elif code.value == NO_SUBSCRIBER:
            self._deliver(CommandRefused(ident, "the node does not listen at the broker"))


class _BufferedClient(paho.Client):
    """A paho client that loads tens of thousands of retained messages in half the time: it reads 64 KiB
    at a time (paho: three or more system calls a packet), and takes QoS 0 messages apart without making
    paho's message and property objects. Should paho ever rename these methods, only that is lost."""

    on_plain_message: Callable[[str, bytes, bool], None] | None = None

    _buffer = b""
    _at = 0
    has_more = False  # bytes may be left that poll does not show

    def _sock_recv(self, bufsize: int) -> bytes:
        if self._at >= len(self._buffer):
            self.has_more = False
            self._buffer = super()._sock_recv(65536)
            self._at = 0
            self.has_more = True
        out = self._buffer[self._at : self._at + bufsize]
        self._at += len(out)
        return out

    def _handle_publish(self) -> MQTTErrorCode:
        packet = self._in_packet
        if self.on_plain_message is None or packet["command"] & 0b0110:  # QoS 1: paho acknowledges
            return super()._handle_publish()
        data = bytes(packet["packet"])
        end = 2 + int.from_bytes(data[:2], "big")
        start = end
        if self._protocol == MQTTProtocolVersion.MQTTv5:
            length, start = _variable_integer(data, end)
            start += length
        if not 2 < end <= start <= len(data):
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        try:
            topic = data[2:end].decode()
        except UnicodeDecodeError:
            return MQTTErrorCode.MQTT_ERR_SUCCESS  # no topic of ours
        self.on_plain_message(topic, data[start:], bool(packet["command"] & 1))
        return MQTTErrorCode.MQTT_ERR_SUCCESS


# -- small parts ----------------------------------------------------------------------------------


def _variable_integer(data: bytes, at: int) -> tuple[int, int]:
    """An MQTT variable byte integer, and where what follows it begins."""
    value = shift = 0
    while at < len(data) and shift <= 21:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    return value, at


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _properties(packet_type: int) -> Properties:
    return Properties(packet_type)  # type: ignore[no-untyped-call]  # paho leaves it untyped


def _nothing(*_: object) -> None:
    """Stands where paho wants a callback."""


def _note_trouble(client: paho.Client, conn: _Connection | None, level: int, text: str) -> None:
    """Why a handshake failed is nowhere else: paho reports "unspecified error"."""
    if conn is not None and level == paho.MQTT_LOG_ERR:
        conn.trouble = text[-200:]


def _empty(sock: socket.socket) -> None:
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        pass


def _check(code: MQTTErrorCode, conn: _Connection) -> None:
    if code is not MQTTErrorCode.MQTT_ERR_SUCCESS and conn.ended is None:
        conn.ended = paho.error_string(code)


def _refuse_huge(client: paho.Client, limit: int) -> None:
    packet = getattr(client, "_in_packet", None)
    if isinstance(packet, dict) and packet.get("remaining_length", 0) > limit:
        raise OSError(f"incoming packet of {packet['remaining_length']} bytes")


def _explain(error: Exception, broker: Broker) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the broker's certificate is not accepted: {error.verify_message}"
    if isinstance(error, socket.gaierror):
        return f"cannot resolve {broker.host}: {error.strerror or error}"
    if isinstance(error, UnicodeError):
        return f"{broker.host!r} is no host name"
    return str(error) or type(error).__name__


def _read_secret(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as e:
        raise FleetError(f"cannot read the password file {path}: {e}") from e
