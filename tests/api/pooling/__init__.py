"""Endpoints that pool."""
