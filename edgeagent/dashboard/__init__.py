"""The fleet page: edgeagent fleet."""
