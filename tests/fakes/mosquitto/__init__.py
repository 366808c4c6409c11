"""A real mosquitto on a loopback port, and a TCP proxy in front of it that misbehaves on demand."""

from tests.fakes.mosquitto.broker import Mosquitto, available
from tests.fakes.mosquitto.observer import Observer
from tests.fakes.mosquitto.proxy import FlakyProxy
from tests.fakes.mosquitto.refusing import RefusingBroker

__all__ = ["FlakyProxy", "Mosquitto", "Observer", "RefusingBroker", "available"]
