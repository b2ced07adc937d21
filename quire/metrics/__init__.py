"""Sinks that are fed with plain records: Prometheus now, OpenTelemetry when its issue comes."""
