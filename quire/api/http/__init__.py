"""Shared by all endpoints: strict JSON bodies, server-sent events, undeclared fields, request ids, errors."""
