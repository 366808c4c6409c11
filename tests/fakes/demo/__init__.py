"""The demo: a real agent on simulated GPUs, a stand-in kubelet, a real broker, and a story that unfolds."""

from tests.fakes.demo.play import play

__all__ = ["play"]
