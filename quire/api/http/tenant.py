"""The tenant of the current request: its API key and address. Queues of jobs are fair among tenants."""

from __future__ import annotations

from contextvars import ContextVar

from starlette.types import Scope

AUTHENTICATED = "quire.api_key"  # scope key: which of the API keys a request has
_tenant: ContextVar[str] = ContextVar("tenant", default="")


def set_tenant(scope: Scope) -> None:
    """Set the tenant of the current task from a request: its API key and address."""
    address = scope.get("client")
    _tenant.set(f"{scope.get(AUTHENTICATED, '')}@{address[0] if address else ''}")


def current_tenant() -> str:
    """The tenant of the current request; empty outside of requests."""
    return _tenant.get()
