"""The tenant of the current request: its API key and address. Queues and the event loop are fair among tenants."""

from __future__ import annotations

from contextvars import ContextVar

from starlette.types import Scope

from quire.workers.turns import turns

AUTHENTICATED = "quire.api_key"  # scope key: which of the API keys a request has
_tenant: ContextVar[str] = ContextVar("tenant", default="")


def tenant_of(scope: Scope) -> str:
    """The tenant of a request: its API key, if that has been checked, and its address."""
    address = scope.get("client")
    return f"{scope.get(AUTHENTICATED, '')}@{address[0] if address else ''}"


def set_tenant(scope: Scope) -> None:
    """Set the tenant of the current task from a request."""
    _tenant.set(tenant_of(scope))


def current_tenant() -> str:
    """The tenant of the current request; empty outside of requests."""
    return _tenant.get()


async def take_turn() -> None:
    """Wait until the current request may do a millisecond of work; to be called before each slice of long work."""
    await turns().take(current_tenant())
