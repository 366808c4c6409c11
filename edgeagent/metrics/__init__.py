"""Prometheus text and health probes over HTTP."""
