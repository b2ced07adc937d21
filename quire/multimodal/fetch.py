"""Fetches media from other servers: allowed hosts only, at public addresses only, also after redirects."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import Sequence
from functools import partial

import httpx

from quire.engine.client.origin import current_origin
from quire.multimodal.errors import PromptError
from quire.multimodal.size_limit import SizeLimit, shown
from quire.workers.tenant import current_tenant
from quire.workers.threads import FairThreads

ANY_HOST = "*"  # in the allowed domains
_CHUNK = 1 << 16  # bytes that are read at once
_MOST_ADDRESSES = 3  # of one name that are tried
_LOOKUPS = 8  # at once: a name server may take many seconds
_QUEUED_LOOKUPS = 1024
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # addresses that end in one of IPv4

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Fetcher:
    """Fetch URLs. For one event loop.

    Names are looked up here, and the connection is made to an address that was checked: a name server that answers
    differently the next time (DNS rebinding) changes nothing.
    """

    def __init__(
        self,
        domains: frozenset[str],
        *,
        private_addresses: bool = False,
        max_redirects: int = 3,
        seconds: float = 10.0,
        share: float = 1.0,
    ) -> None:
        """Prepare; nothing is started.

        Args:
            domains: host names in lower case that may be fetched from; `ANY_HOST`: all.
            private_addresses: names may lead to private, local and reserved addresses.
            max_redirects: redirects that are followed.
            seconds: time for all of it.
            share: the largest part of the places of names that wait to be looked up, for one tenant; see `Shares`.
        """
        self._domains = domains
        self._private_addresses = private_addresses
        self._max_redirects = max_redirects
        self._seconds = seconds
        # Not those of asyncio: slow name servers would hold up everything that runs there.
        self._lookups = FairThreads("lookup", size=_LOOKUPS, max_queued=_QUEUED_LOOKUPS, share=share)

    def checked(self, url: str, where: str) -> httpx.URL:
        """Check a URL without looking up its name.

        Raises:
            PromptError: it is not allowed.
        """
        try:
            address = httpx.URL(url)  # the parser of the client that fetches it
        except (httpx.InvalidURL, ValueError) as error:
            raise PromptError(f"The URL {shown(url)} is not valid.", where) from error
        if address.scheme not in ("http", "https"):
            raise PromptError(f"The URL {shown(url)} must be an http or https URL.", where)
        if address.userinfo:
            raise PromptError("URLs with a user name or password are not accepted.", where)
        if not address.host or (ANY_HOST not in self._domains and address.host.lower() not in self._domains):
            allowed = ", ".join(sorted(self._domains))
            raise PromptError(f"The URL must be from one of the allowed domains: {allowed}.", where)
        return address

    async def fetch(self, address: httpx.URL, limit: SizeLimit, where: str) -> bytes:
        """Fetch what `checked` has allowed, without proxies of the environment.

        Raises:
            PromptError: it cannot be fetched, or is not allowed.
            QueueFull: too many names wait to be looked up.
        """
        certificates = await asyncio.to_thread(_certificates)
        try:
            async with (
                asyncio.timeout(self._seconds),
                httpx.AsyncClient(trust_env=False, verify=certificates, timeout=self._seconds) as client,
            ):
                for _ in range(self._max_redirects + 1):
                    answer = await self._get(client, address, limit, where)
                    if isinstance(answer, bytes):
                        return answer
                    address = self._redirected(answer, where)
        except TimeoutError as error:
            raise PromptError(f"The URL could not be fetched within {self._seconds:g} s.", where) from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            if isinstance(error, PromptError):
                raise
            # Its text may have addresses of the operator's network.
            raise PromptError("The URL could not be fetched.", where) from error
        raise PromptError(f"The URL is redirected more than {self._max_redirects} times.", where)

    def close(self) -> None:
        """End the threads that look up names."""
        self._lookups.close()

    def _redirected(self, target: httpx.URL, where: str) -> httpx.URL:
        try:
            return self.checked(str(target), where)
        except PromptError as error:
            raise PromptError("The server of the URL redirects to a URL that is not allowed.", where) from error

    async def _get(
        self, client: httpx.AsyncClient, address: httpx.URL, limit: SizeLimit, where: str
    ) -> bytes | httpx.URL:
        """The content at an address, or where it redirects to."""
        places = await self._places(address, where)
        for place in places[:-1]:
            try:
                return await self._get_from(place, client, address, limit, where)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                pass  # such as an address of IPv6 on a machine that has none
        return await self._get_from(places[-1], client, address, limit, where)

    async def _get_from(
        self, place: Address, client: httpx.AsyncClient, address: httpx.URL, limit: SizeLimit, where: str
    ) -> bytes | httpx.URL:
        name = address.raw_host.decode("ascii")
        headers = {
            "Host": address.netloc.decode("ascii"),
            "Accept-Encoding": "identity",  # a compressed answer could grow without bounds
            **current_origin().trace_headers,
        }
        target = address.copy_with(host=str(place))
        async with client.stream("GET", target, headers=headers, extensions={"sni_hostname": name}) as response:
            if response.has_redirect_location and self._max_redirects:
                return address.join(response.headers["location"])
            if response.status_code != httpx.codes.OK:
                redirected = "; redirects are not followed" if response.is_redirect else ""
                raise PromptError(f"The server of the URL returned status {response.status_code}{redirected}.", where)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise PromptError("The server of the URL returned compressed content.", where)
            return await _collect(response, limit, where)

    async def _places(self, address: httpx.URL, where: str) -> Sequence[Address]:
        """Addresses of a URL's host that may be connected to; at least one."""
        host = address.host.lower()
        literal = _literal(host)
        if literal is not None:
            places = [literal]
            allowed = self._private_addresses or host in self._domains  # the operator means this very address
        else:
            name = address.raw_host.decode("ascii")
            places = list(await self._lookups.run(partial(_look_up, name), tenant=current_tenant()))
            allowed = self._private_addresses
        if not allowed:
            places = [place for place in places if is_public(place)]
        if not places:
            raise PromptError(
                "The URL leads to a private or local address, which this server does not fetch from "
                "(--allow-private-media-addresses).",
                where,
            )
        return places[:_MOST_ADDRESSES]


def is_public(address: Address) -> bool:
    """Return whether an address, and one of IPv4 inside of it, is for everybody: not private, local or reserved."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None or address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _look_up(name: str) -> list[Address]:
    """The different addresses of a name. May take many seconds."""
    entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries)
    return [ipaddress.ip_address(address) for address in addresses]


@functools.cache
def _certificates() -> ssl.SSLContext:
    """CA certificates, read once: that takes tens of milliseconds."""
    return httpx.create_ssl_context(trust_env=False)


async def _collect(response: httpx.Response, limit: SizeLimit, where: str) -> bytes:
    content = bytearray()
    async for chunk in response.aiter_raw(_CHUNK):
        content += chunk
        if len(content) > limit.size:
            raise limit.refusal("The content that the server of the URL returned is", where)
    return bytes(content)
