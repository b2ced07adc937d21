"""Who sends a request: its tenant, among whom the server's capacity is shared, and the owner of what it stores.

A tenant is an API key if the server has several, or a file of them; otherwise an address: a single key tells nobody
apart. An IPv6 address counts as its network of 64 bits, as each host may use all addresses of it.
"""

from __future__ import annotations

import ipaddress
from contextlib import suppress

from starlette.types import Scope

from quire.api.http.keys import API_KEY, ApiKey
from quire.workers.tenant import set_current_owner, set_current_tenant

_HOST_BITS = 64  # of an IPv6 address


def set_tenant(scope: Scope) -> None:
    """Set the tenant and the owner of the current task from a request."""
    set_current_tenant(tenant_of(scope))
    set_current_owner(owner_of(scope))


def tenant_of(scope: Scope) -> str:
    """The tenant of a request; before its key has been checked, that of its address."""
    key: ApiKey | None = scope.get(API_KEY)
    if key is not None and key.is_client:
        return f"key {key.name}"
    address = scope.get("client")
    return _host(address[0]) if address else ""


def owner_of(scope: Scope) -> str:
    """The owner of what a request stores: that of its API key; empty without one, which means everybody."""
    key: ApiKey | None = scope.get(API_KEY)
    return "" if key is None else key.owner


def _host(address: str) -> str:
    with suppress(ValueError):
        parsed = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(parsed, ipaddress.IPv6Address):
            mapped = parsed.ipv4_mapped
            return str(mapped or ipaddress.IPv6Network((parsed, _HOST_BITS), strict=False))
    return address
