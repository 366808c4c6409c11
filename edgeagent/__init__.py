"""edgeagent: shares the GPUs of one K3s edge node between pods, and reports on them."""

__version__ = "0.1.0"
