"""The link's own reading of QoS 0 messages agrees with paho's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from edgeagent.dashboard.link import _BufferedClient

V311, V5 = MQTTProtocolVersion.MQTTv311, MQTTProtocolVersion.MQTTv5
Seen = list[tuple[str, bytes, bool]]


def read(
    protocol: MQTTProtocolVersion, command: int, packet: bytes, *, plain: bool
) -> tuple[MQTTErrorCode, Seen]:
    """What comes of one PUBLISH packet, by our reading (`plain`) or by paho's."""
    seen: Seen = []
    client: Any = _BufferedClient(CallbackAPIVersion.VERSION2, protocol=protocol)
    client.on_message = lambda _c, _u, m: seen.append((m.topic, bytes(m.payload), m.retain))
    if plain:
        client.on_plain_message = lambda *message: seen.append(message)
    client._in_packet = {"command": command, "packet": bytearray(packet)}
    return client._handle_publish(), seen


@settings(max_examples=50, deadline=None)
@given(
    topic=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40),
    payload=st.binary(max_size=60),
    retained=st.booleans(),
    user=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=200),
    protocol=st.sampled_from([V311, V5]),
)
def test_the_short_way_says_what_paho_says(
    topic: str, payload: bytes, retained: bool, user: str, protocol: MQTTProtocolVersion
) -> None:
    name = topic.encode()
    packet = len(name).to_bytes(2, "big") + name
    if protocol == V5:
        properties: Any = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        properties.UserProperty = ("key", user)
        properties.ContentType = "application/json"
        packet += properties.pack()
    packet += payload
    command = 0x30 | retained
    assert read(protocol, command, packet, plain=True) == read(protocol, command, packet, plain=False)


@pytest.mark.parametrize(
    "packet", [b"", b"\0", b"\0\0", b"\0\x05ab", b"\0\x01a\xff\xff\xff\xff\xff", b"\0\x01a\x7f"]
)
def test_broken_packets_end_the_connection(packet: bytes) -> None:
    code, seen = read(V5, 0x30, packet, plain=True)
    assert (code, seen) == (MQTTErrorCode.MQTT_ERR_PROTOCOL, [])


def test_a_topic_that_is_no_text_is_left_out() -> None:
    assert read(V5, 0x30, b"\0\x02\xff\xfe\0payload", plain=True) == (MQTTErrorCode.MQTT_ERR_SUCCESS, [])
