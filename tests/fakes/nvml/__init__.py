"""A stand-in for NVIDIA's libnvidia-ml.so.1, driven by a scenario that changes while it is loaded."""

from tests.fakes.nvml.driver import Call, FakeNvml, Mig

__all__ = ["Call", "FakeNvml", "Mig"]
