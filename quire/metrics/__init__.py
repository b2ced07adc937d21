"""Prometheus metrics, made from the engine's records."""
