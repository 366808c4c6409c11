"""The retained topics of the node: what each should hold, and what the broker is known to hold.

Only the latest body of a topic matters: it is replaced, never queued. After a (re)connect all are
sent again, because a broker may have lost what it retained.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeagent.fleet.messages import Body


@dataclass(slots=True)
class _Slot:
    body: Body | None  # None: the topic is to be empty
    version: int
    acknowledged: int = 0
    in_flight: bool = False
    refused: int = 0  # the version that the broker would not have
    poison: bool = False  # brokers hang up on this body: it is not offered to any


class RetainedState:
    """One thread owns it."""

    def __init__(self) -> None:
        self._slots: dict[str, _Slot] = {}
        self._version = 0

    def want(self, topic: str, body: Body | None, *, again: bool = False) -> bool:
        """`topic` should hold `body`. True when it has to be sent: it changed, or `again`."""
        slot = self._slots.get(topic)
        if slot is not None and slot.body == body and not again:
            return False
        self._version += 1
        if slot is None:
            self._slots[topic] = _Slot(body, self._version)
        else:
            slot.body, slot.version, slot.poison = body, self._version, False
        return True

    def body(self, topic: str) -> Body | None:
        slot = self._slots.get(topic)
        return None if slot is None else slot.body

    def __contains__(self, topic: str) -> bool:
        """Whether the topic should hold something."""
        slot = self._slots.get(topic)
        return slot is not None and slot.body is not None

    def topics(self) -> list[str]:
        return [t for t, s in self._slots.items() if s.body is not None]

    def next_due(self) -> str | None:
        """The first topic, in the order they were first wanted, whose body must be sent."""
        for topic, slot in self._slots.items():
            if not slot.in_flight and not slot.poison and slot.version > max(slot.acknowledged, slot.refused):
                return topic
        return None

    def sent(self, topic: str) -> int:
        """Notes that the present body is on its way; gives its version."""
        slot = self._slots[topic]
        slot.in_flight = True
        return slot.version

    def acknowledge(self, topic: str, version: int) -> None:
        slot = self._slots.get(topic)
        if slot is None:
            return
        slot.in_flight = False
        slot.acknowledged = max(slot.acknowledged, version)
        if slot.body is None and slot.acknowledged == slot.version:
            del self._slots[topic]

    def refuse(self, topic: str, version: int, *, poison: bool = False) -> None:
        """The broker will not have this version: it is not offered again before the next connection
        or, if it is `poison` (it ended connections), before it changes."""
        slot = self._slots.get(topic)
        if slot is not None:
            slot.in_flight = False
            slot.refused = version
            slot.poison = poison

    def retry(self, topic: str) -> None:
        """It did not get through: it is due again."""
        slot = self._slots.get(topic)
        if slot is not None:
            slot.in_flight = False

    def confirmed(self, topic: str) -> bool:
        """Whether the broker holds the present body."""
        slot = self._slots.get(topic)
        return slot is not None and slot.acknowledged == slot.version

    def disconnected(self) -> None:
        for slot in self._slots.values():
            slot.in_flight = False

    def connected(self) -> None:
        """Everything is to be sent again. What was refused gets another try: it may be another
        broker, or another ACL."""
        for slot in self._slots.values():
            self._version += 1
            slot.version = self._version
            slot.in_flight = False
            slot.refused = 0
