"""Somebody else at the broker: collects what comes, and says what operators say."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.fakes.fleet import schemas


@dataclass(frozen=True)
class Seen:
    topic: str
    data: bytes
    retained: bool
    correlation: bytes | None

    @property
    def payload(self) -> dict[str, Any]:
        """Parsed; checked against its schema."""
        return schemas.validate(self.topic, self.data)


class Observer:
    """Connects at once and reconnects for ever. `filters` are subscribed with `qos`."""

    def __init__(
        self,
        port: int,
        filters: str | list[str] = "gpufleet/#",
        *,
        username: str | None = None,
        password: str | None = None,
        tls: Callable[[paho.Client], None] | None = None,
        name: str = "",
        qos: int = 1,
    ) -> None:
        self.seen: list[Seen] = []
        self.subscriptions = 0
        self._qos = qos
        self._filters = [filters] if isinstance(filters, str) else filters
        self._changed = threading.Condition()
        self._subscribed = threading.Event()
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id=name, protocol=MQTTProtocolVersion.MQTTv5
        )
        if username is not None:
            self._client.username_pw_set(username, password)
        if tls is not None:
            tls(self._client)
        self._client.reconnect_delay_set(1, 1)
        self._client.max_inflight_messages_set(0)
        self._client.on_connect = self._on_connect
        self._client.on_subscribe = self._on_subscribe
        self._client.on_message = self._on_message
        properties = Properties(PacketTypes.CONNECT)
        properties.ReceiveMaximum = 1000
        self._client.connect_async("127.0.0.1", port, keepalive=60, properties=properties)
        self._client.loop_start()
        assert self._subscribed.wait(10), "the observer cannot subscribe"

    def _on_connect(self, client: paho.Client, *_: Any) -> None:
        client.subscribe([(f, self._qos) for f in self._filters])

    def _on_subscribe(self, *_: Any) -> None:
        with self._changed:
            self.subscriptions += 1
            self._changed.notify_all()
        self._subscribed.set()

    def wait_subscribed_again(self, before: int) -> None:
        """Until it came back since `subscriptions` was `before`."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.subscriptions > before, 15)

    def _on_message(self, _client: Any, _data: Any, m: paho.MQTTMessage) -> None:
        correlation = getattr(m.properties, "CorrelationData", None)
        with self._changed:
            self.seen.append(Seen(m.topic, bytes(m.payload), m.retain, correlation))
            self._changed.notify_all()

    def wait(self, condition: Callable[[list[Seen]], Any], timeout_s: float = 15.0) -> Any:
        """What `condition` of everything seen gives, once it is true."""
        with self._changed:
            result = self._changed.wait_for(lambda: condition(self.seen), timeout_s)
            if not result:
                tail = "\n".join(f"{s.topic} {s.data[:200]!r}" for s in self.seen[-15:])
                raise AssertionError(f"did not come within {timeout_s} s; last seen:\n{tail}")
            return result

    def on(self, suffix: str) -> list[Seen]:
        """Messages whose topic ends so."""
        with self._changed:
            return [s for s in self.seen if s.topic.endswith(suffix)]

    def last(self, suffix: str) -> dict[str, Any]:
        return self.on(suffix)[-1].payload

    def wait_payload(
        self,
        suffix: str,
        condition: Callable[[dict[str, Any]], Any] = lambda p: True,
        timeout_s: float = 15.0,
    ) -> dict[str, Any]:
        """The first payload on a topic that ends so and fulfils the condition."""

        def find(seen: list[Seen]) -> dict[str, Any] | None:
            for s in seen:
                if s.topic.endswith(suffix) and s.data:
                    payload = s.payload
                    if condition(payload):
                        return payload
            return None

        result = self.wait(find, timeout_s)
        assert isinstance(result, dict)
        return result

    def clear(self) -> None:
        with self._changed:
            self.seen.clear()

    def publish(
        self,
        topic: str,
        payload: bytes | str | dict[str, Any] | None,
        *,
        retain: bool = False,
        response_topic: str | None = None,
        correlation: bytes | None = None,
        expiry_s: int | None = None,
        qos: int = 1,
    ) -> None:
        properties = Properties(PacketTypes.PUBLISH)
        if response_topic is not None:
            properties.ResponseTopic = response_topic
        if correlation is not None:
            properties.CorrelationData = correlation
        if expiry_s is not None:
            properties.MessageExpiryInterval = expiry_s
        data = json.dumps(payload) if isinstance(payload, dict) else payload
        info = self._client.publish(topic, data, qos=qos, retain=retain, properties=properties)
        if qos:
            info.wait_for_publish(10)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
