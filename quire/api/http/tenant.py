"""Who sends a request: its tenant, among whom the server's capacity is shared, and the owner of what it stores.

A tenant is an API key if the server has several, otherwise an address: a single key tells nobody apart. An IPv6 address
counts as its network of 64 bits, as each host may use all addresses of it.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.types import Scope

from quire.workers.tenant import set_current_owner, set_current_tenant

API_KEY = "quire.api_key"  # scope key: the `ApiKey` of an authenticated request
_HOST_BITS = 64  # of an IPv6 address


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One of the server's API keys.

    Attributes:
        text: the key itself.
        number: its position among the keys.
        is_only: the server has no other.
    """

    text: str = field(repr=False)
    number: int
    is_only: bool

    @property
    def digest(self) -> str:
        """A name of the key from which it cannot be computed."""
        return hashlib.blake2b(self.text.encode(errors="surrogateescape"), digest_size=24, person=b"quire").hexdigest()


def api_keys(texts: Sequence[str]) -> list[ApiKey]:
    """The server's keys; a key that is given twice is one."""
    texts = list(dict.fromkeys(texts))
    return [ApiKey(text, number, len(texts) == 1) for number, text in enumerate(texts)]


def set_tenant(scope: Scope) -> None:
    """Set the tenant and the owner of the current task from a request."""
    set_current_tenant(tenant_of(scope))
    set_current_owner(owner_of(scope))


def tenant_of(scope: Scope) -> str:
    """The tenant of a request; before its key has been checked, that of its address."""
    key: ApiKey | None = scope.get(API_KEY)
    if key is not None and not key.is_only:
        return f"key {key.number}"
    address = scope.get("client")
    return _host(address[0]) if address else ""


def owner_of(scope: Scope) -> str:
    """The owner of what a request stores: a digest of its API key; empty without one, which means everybody."""
    key: ApiKey | None = scope.get(API_KEY)
    return "" if key is None else key.digest


def _host(address: str) -> str:
    with suppress(ValueError):
        parsed = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(parsed, ipaddress.IPv6Address):
            mapped = parsed.ipv4_mapped
            return str(mapped or ipaddress.IPv6Network((parsed, _HOST_BITS), strict=False))
    return address
