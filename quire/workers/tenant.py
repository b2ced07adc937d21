"""The tenant of the current task: the client among whom the server's capacity is shared."""

from __future__ import annotations

from contextvars import ContextVar

from quire.workers.turns import turns

_tenant: ContextVar[str] = ContextVar("tenant", default="")


def set_current_tenant(tenant: str) -> None:
    """Set the tenant of the current task."""
    _tenant.set(tenant)


def current_tenant() -> str:
    """Return the tenant of the current task; empty outside of requests."""
    return _tenant.get()


async def take_turn() -> None:
    """Wait until the current request may do a millisecond of work; to be called before each slice of long work."""
    await turns().take(current_tenant())
