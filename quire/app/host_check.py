"""Refuses requests to host names that are not the server's, which a browser sends after DNS rebinding.

A web page may make its own host name resolve to this machine. It could then read the responses of a server without API
key.
"""

from __future__ import annotations

from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.http.paths import endpoint_path
from quire.app.middleware import PROBE_PATHS, Middleware
from quire.config.options import ServerOptions
from quire.protocol.errors import Misdirected

_OWN_NAMES = ("localhost", "*.localhost", "*.internal")  # reserved names that cannot be registered


def host_check(server: ServerOptions) -> Middleware | None:
    """The middleware; None if all host names are accepted."""
    if "*" in server.allowed_hosts or not (server.allowed_hosts or _relies_on_loopback(server)):
        return None
    names = [name.lower() for name in (*_OWN_NAMES, *server.allowed_hosts, server.host)]
    exact, suffixes = frozenset(names), tuple(name[1:] for name in names if name.startswith("*."))

    def accepts(host: str) -> bool:
        name = _name_of(host)
        return name in exact or name.endswith(suffixes) or _is_address(name)

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            host = Headers(scope=scope).get("host", "") if scope["type"] in ("http", "websocket") else ""
            if not host or accepts(host) or endpoint_path(scope) in PROBE_PATHS:  # browsers always send a host
                await app(scope, receive, send)
            else:
                refusal = Misdirected(
                    f"This server does not accept the host name {_name_of(host)[:100]!r}. "
                    "Add it with --allowed-hosts if clients or a proxy use it."
                )
                await refusal.response(endpoint_path(scope))(scope, receive, send)

        return handle

    return layer


def _relies_on_loopback(server: ServerOptions) -> bool:
    """Whether nothing protects the server but that it listens on this machine only."""
    if server.uds is not None:
        return False  # browsers do not reach it
    return not server.api_key and (server.host == "localhost" or _is_address(server.host, loopback=True))


def _name_of(host: str) -> str:
    """The name or address in a Host header, without port and brackets."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


def _is_address(name: str, *, loopback: bool = False) -> bool:
    try:
        address = ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or not loopback
