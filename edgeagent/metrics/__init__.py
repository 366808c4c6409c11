"""Prometheus text."""
