"""Distributed traces of requests, which OpenTelemetry's SDK exports."""
