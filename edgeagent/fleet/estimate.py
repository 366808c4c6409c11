"""How many bytes the uplink costs: of one message, and of a month.

Counted are IP packets, as a mobile operator counts them, both ways. The shares: IP and TCP headers
with timestamps (52 bytes) on each of the three packets of a QoS 1 exchange (the PUBACK carries TCP's
acknowledgement), TLS 1.3 records (22 bytes each), MQTT headers and the topic.
tests/bench/fleet_bench.py holds it against a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeagent.config.schema import FleetConfig

IP_TCP_BYTES = 52
TLS_RECORD_BYTES = 22
PUBACK_BYTES = 4
TLS_CONNECT_BYTES = 5500  # handshake with both certificates, in ECDSA
PLAIN_CONNECT_BYTES = 900
STATUS_BODY_BYTES = 800
ALLOC_CHANGES_PER_DAY = 24
EVENTS_PER_DAY = 20
RECONNECTS_PER_DAY = 4
DAYS = 30

# Bodies, measured with tests/fakes/fleet/snapshots.py's node of 1 GPU and 4 pods (messages.sample).
_ROW_BASE_BYTES = 100
_ROW_GPU_BYTES = 270
_ROW_POD_BYTES = 100
_ENVELOPE_BYTES = 230
_COLUMN_BASE_BYTES = 190
_COLUMN_GPU_BYTES = 150
_COLUMN_POD_BYTES = 25
_COLUMN_VALUE_BYTES = 1.5  # of one changing value in one sample, deflated
_COLUMN_VALUES_PER_GPU = 7
_COLUMN_VALUES_PER_POD = 2


@dataclass(frozen=True, slots=True)
class Estimate:
    """A month's bytes by cause, and their sum in MB (10^6)."""

    telemetry_bytes: int
    state_bytes: int
    events_bytes: int
    keepalive_bytes: int
    connects_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.telemetry_bytes
            + self.state_bytes
            + self.events_bytes
            + self.keepalive_bytes
            + self.connects_bytes
        )

    @property
    def total_mb(self) -> float:
        return self.total_bytes / 1e6


def message_bytes(payload_bytes: int, topic_bytes: int = 40, *, tls: bool = True) -> int:
    """What one QoS 1 message costs on the wire, both ways, its PUBACK and TCP's own packets
    included. Large payloads take several packets."""
    publish = payload_bytes + topic_bytes + 8
    segments = max(1, -(-publish // 1400))
    total = publish + PUBACK_BYTES + (segments + 2) * IP_TCP_BYTES
    return total + (segments + 1) * TLS_RECORD_BYTES if tls else total


def monthly(config: FleetConfig, *, gpus: int = 1, pods: int = 4) -> Estimate:
    """What `config` costs in 30 days on a node with so many GPUs and pods with shares."""
    tls = any(url.startswith(("mqtts:", "wss:")) for url in config.brokers) or not config.brokers
    seconds = DAYS * 86_400
    batch_s = batch_seconds(config) or config.telemetry_seconds
    samples = max(1.0, batch_s / config.telemetry_seconds)
    messages = seconds / max(batch_s, config.telemetry_seconds)
    if deflates(config):
        values = gpus * _COLUMN_VALUES_PER_GPU + pods * _COLUMN_VALUES_PER_POD
        payload = (
            _COLUMN_BASE_BYTES + gpus * _COLUMN_GPU_BYTES + pods * _COLUMN_POD_BYTES
        ) + samples * values * _COLUMN_VALUE_BYTES
    else:
        row = _ROW_BASE_BYTES + gpus * _ROW_GPU_BYTES + pods * _ROW_POD_BYTES
        payload = _ENVELOPE_BYTES + samples * row
    telemetry = messages * message_bytes(int(payload), tls=tls)
    # On metered MQTT 5 links our own status does not come back to us.
    echoes = 1 if config.link == "metered" and config.protocol == "5" else 2
    state = seconds / status_seconds(config) * echoes * message_bytes(STATUS_BODY_BYTES, tls=tls)
    state += DAYS * ALLOC_CHANGES_PER_DAY * message_bytes(alloc_body_bytes(gpus, pods), tls=tls)
    events = DAYS * EVENTS_PER_DAY * message_bytes(600, tls=tls)
    # A ping goes only where nothing else went for a keepalive.
    silence = max(0.0, min(batch_s, status_seconds(config)) - keepalive_seconds(config))
    ping = 2 * 2 + 3 * IP_TCP_BYTES + (2 * TLS_RECORD_BYTES if tls else 0)
    keepalive = seconds / keepalive_seconds(config) * ping if silence else 0
    birth = 3 * message_bytes(2500, tls=tls)
    connects = DAYS * RECONNECTS_PER_DAY * ((TLS_CONNECT_BYTES if tls else PLAIN_CONNECT_BYTES) + birth)
    return Estimate(int(telemetry), int(state), int(events), int(keepalive), int(connects))


def alloc_body_bytes(gpus: int, pods: int) -> int:
    return 400 + gpus * 250 + pods * 330


def batch_seconds(config: FleetConfig) -> float | None:
    """How long samples are gathered for one message; None: each goes by itself."""
    if config.batch_seconds is not None:
        return config.batch_seconds
    return 60.0 if config.link == "metered" else None


def deflates(config: FleetConfig) -> bool:
    """Whether telemetry goes out by column and deflated, on tele/z."""
    return config.link == "metered" if config.deflate is None else config.deflate


def status_seconds(config: FleetConfig) -> int:
    """The longest silence of `status`. On a metered link telemetry shows life more often anyway."""
    return 900 if config.link == "metered" else 300


def keepalive_seconds(config: FleetConfig) -> int:
    if config.keepalive_seconds is not None:
        return config.keepalive_seconds
    return 120 if config.link == "metered" else 30
