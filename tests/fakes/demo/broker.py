"""The demo's broker (mosquitto where there is one, else amqtt inside this process) and an ear on it."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from tests.fakes.mosquitto.broker import Mosquitto, available, free_port


class EmbeddedBroker:
    """amqtt in a thread of its own; speaks MQTT 3.1.1 only."""

    protocol = "3.1.1"
    name = "amqtt (embedded)"

    def __init__(self) -> None:
        self.port = free_port()
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="broker", daemon=True)

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def start(self) -> None:
        logging.getLogger("amqtt").setLevel(logging.CRITICAL)
        logging.getLogger("transitions").setLevel(logging.CRITICAL)
        self._thread.start()
        if not self._up.wait(10):
            raise RuntimeError("the embedded broker does not start")

    def _run(self) -> None:
        from amqtt.broker import Broker

        asyncio.set_event_loop(self._loop)
        self._broker = Broker(
            {
                "listeners": {"default": {"type": "tcp", "bind": f"127.0.0.1:{self.port}"}},
                "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
            },
            self._loop,
        )
        self._loop.run_until_complete(self._broker.start())
        self._up.set()
        self._loop.run_forever()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._broker.shutdown(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)


class MosquittoBroker(Mosquitto):
    protocol = "5"
    name = "mosquitto"


def start_broker(directory: Path) -> MosquittoBroker | EmbeddedBroker:
    broker: MosquittoBroker | EmbeddedBroker
    broker = MosquittoBroker(directory, log=False) if available() else EmbeddedBroker()
    broker.start()
    return broker


class Ear:
    """Hears everything the node says. `messages`: (time, topic, text), newest last."""

    def __init__(self, port: int) -> None:
        self.messages: deque[tuple[float, str, str]] = deque(maxlen=200)
        self.count = 0
        self._client = paho.Client(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv311)
        self._client.on_connect = lambda client, *_: client.subscribe("gpufleet/#", 1)
        self._client.on_message = self._heard
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()

    def _heard(self, _client: Any, _data: Any, message: paho.MQTTMessage) -> None:
        self.count += 1
        self.messages.append((time.time(), message.topic, _summary(message.topic, message.payload)))

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


def _summary(topic: str, payload: bytes) -> str:
    """What a message says, in a line."""
    if not payload:
        return "cleared"
    try:
        m = json.loads(payload)
    except ValueError:
        return f"{len(payload)} bytes"
    size = f"{len(payload)} B"
    tail = topic.rpartition("/")[2]
    if tail == "status":
        return f"{m.get('state')}, health {m.get('health')} {'; '.join(m.get('reasons', []))} ({size})"
    if "/alert/" in topic:
        return f"{m.get('severity')}: {m.get('message')} ({size})"
    if "/evt/" in topic:
        return f"{m.get('type')}: {m.get('message')} ({size})"
    return size
