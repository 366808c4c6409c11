"""The demo where no mosquitto is installed: the embedded broker carries what the agent's client sends."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from tests.fakes.demo.broker import Ear, EmbeddedBroker

pytest.importorskip("amqtt")


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    made = EmbeddedBroker()
    made.start()
    yield made
    made.stop()


def test_what_is_published_is_heard(broker: EmbeddedBroker) -> None:
    """A retained message of MQTT 3.1.1, the version that the demo's agent is told to speak."""
    assert broker.protocol == "3.1.1"
    ear = Ear(int(broker.url.rpartition(":")[2]))
    client = paho.Client(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv311)
    try:
        client.connect("127.0.0.1", int(broker.url.rpartition(":")[2]))
        client.loop_start()
        topic = "gpufleet/v1/lab/box/status"
        heard = threading.Event()
        ear._client.message_callback_add(topic, lambda *_: heard.set())
        client.publish(topic, b'{"state": "ready"}', qos=1, retain=True).wait_for_publish(10)
        assert heard.wait(10)
    finally:
        client.disconnect()
        client.loop_stop()
        ear.close()
