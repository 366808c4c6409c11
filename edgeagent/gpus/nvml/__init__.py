"""GPUs through NVIDIA's management library, NVML.

library.py is the only place that knows pynvml; session.py opens and closes the library; card.py is one
GPU; events.py waits for the driver; backend.py puts them together.
"""

from edgeagent.gpus.nvml.backend import NvmlBackend

__all__ = ["NvmlBackend"]
