"""The client of the current task: the tenant, among whom capacity is shared, and the owner of what it stores."""

from __future__ import annotations

from contextvars import ContextVar

from quire.workers.turns import turns

_tenant: ContextVar[str] = ContextVar("tenant", default="")
_owner: ContextVar[str] = ContextVar("owner", default="")


def set_current_tenant(tenant: str) -> None:
    """Set the tenant of the current task."""
    _tenant.set(tenant)


def current_tenant() -> str:
    """Return the tenant of the current task; empty outside of requests."""
    return _tenant.get()


def set_current_owner(owner: str) -> None:
    """Set the owner of what the current task stores and uses."""
    _owner.set(owner)


def current_owner() -> str:
    """Return the owner of what the current task stores and uses; empty: everybody."""
    return _owner.get()


async def take_turn() -> None:
    """Wait until the current request may do a millisecond of work; to be called before each slice of long work."""
    await turns().take(current_tenant())
