"""Media from other servers: only allowed hosts, only public addresses, also behind redirects and names that change."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.client.origin import Origin, set_current_origin
from quire.engine.client.trace_context import TraceContext
from quire.multimodal.errors import PromptError
from quire.multimodal.fetch import ANY_HOST, Fetcher, is_public
from quire.multimodal.size_limit import SizeLimit
from tests.support.certificates import make_pair

LIMIT = SizeLimit(1000, "--max-image-size")
Answer = Callable[[httpx.Request], httpx.Response]
NAMES = {
    "media.example": ["93.184.216.34"],
    "cdn.example": ["2606:2800:21f:cb07::1", "93.184.216.35"],
    "inner.example": ["10.0.0.7"],
    "mixed.example": ["127.0.0.1", "93.184.216.36"],
    "127.1": ["127.0.0.1"],
    "2130706433": ["127.0.0.1"],
}


class Web:
    """Names, and answers by the host and path that a client asks for; what it has asked, and at which address."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.names = {name: list(addresses) for name, addresses in NAMES.items()}
        self.asked: list[tuple[str, str]] = []
        self.looked_up: list[str] = []

    def look_up(self, name: str) -> list[Any]:
        self.looked_up.append(name)
        if name not in self.names:
            raise OSError("unknown name")
        return [ipaddress.ip_address(address) for address in self.names[name]]

    def handle(self, request: httpx.Request) -> httpx.Response:
        host = request.headers["host"]
        self.asked.append((request.url.host, host))
        if request.url.scheme == "https":
            assert request.extensions["sni_hostname"] == host.partition(":")[0]
        return self.answers[host + request.url.path](request)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Web:
    served = Web()
    real = httpx.AsyncClient

    def client(**options: Any) -> httpx.AsyncClient:
        assert options["trust_env"] is False
        return real(transport=httpx.MockTransport(served.handle), **options)

    monkeypatch.setattr("quire.multimodal.fetch.httpx.AsyncClient", client)
    monkeypatch.setattr("quire.multimodal.fetch._look_up", served.look_up)
    return served


def content(text: bytes = b"picture") -> Answer:
    return lambda _: httpx.Response(200, stream=httpx.ByteStream(text))


def moved(to: str, status: int = 302) -> Answer:
    return lambda _: httpx.Response(status, headers={"location": to})


def unreachable(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("no route to 10.1.2.3")


async def fetched(url: str, *domains: str, **options: Any) -> bytes:
    fetcher = Fetcher(frozenset(domains or {"media.example", "cdn.example"}), **options)
    try:
        return await fetcher.fetch(fetcher.checked(url, "part"), LIMIT, "part")
    finally:
        fetcher.close()


async def refusal(url: str, *domains: str, **options: Any) -> str:
    with pytest.raises(PromptError) as caught:
        await fetched(url, *domains, **options)
    assert caught.value.param == "part"
    return str(caught.value)


async def test_the_connection_goes_to_the_address_that_was_checked(web: Web) -> None:
    """With the host's name for its certificate and its virtual host, and its port."""
    web.answers["media.example:8443/a"] = content()
    assert await fetched("https://MEDIA.example:8443/a") == b"picture"
    assert web.asked == [("93.184.216.34", "media.example:8443")]


async def test_another_address_is_tried_if_one_cannot_be_reached(web: Web) -> None:
    answers = iter([unreachable, content()])

    def answer(request: httpx.Request) -> httpx.Response:
        return next(answers)(request)

    web.answers["cdn.example/a"] = answer
    assert await fetched("http://cdn.example/a") == b"picture"
    assert [address for address, _ in web.asked] == ["2606:2800:21f:cb07::1", "93.184.216.35"]
    web.answers["media.example/a"] = unreachable
    assert await refusal("http://media.example/a") == "The URL could not be fetched."


@pytest.mark.parametrize(
    "url",
    [
        "http://inner.example/a",
        "http://127.1/a",
        "http://2130706433/a",
        "http://127.0.0.1/a",
        "http://[::1]/a",
        "http://[::ffff:10.0.0.7]/a",
        "http://[64:ff9b::a00:7]/a",
        "http://169.254.169.254/latest/meta-data",
        "http://0.0.0.0/a",
        "http://100.64.0.1/a",
        "http://224.0.0.1/a",
    ],
)
async def test_private_addresses_are_refused(web: Web, url: str) -> None:
    assert "--allow-private-media-addresses" in await refusal(url, ANY_HOST)
    assert web.asked == []


async def test_private_addresses_can_be_allowed(web: Web) -> None:
    """By an option for all names, and by listing an address itself."""
    web.answers["inner.example/a"] = web.answers["10.0.0.9/a"] = content()
    assert await fetched("http://inner.example/a", "inner.example", private_addresses=True) == b"picture"
    assert await fetched("http://10.0.0.9/a", "10.0.0.9") == b"picture"
    assert "--allow-private" in await refusal("http://inner.example/a", "inner.example")


async def test_of_several_addresses_only_public_ones_are_connected_to(web: Web) -> None:
    web.answers["mixed.example/a"] = content()
    assert await fetched("http://mixed.example/a", ANY_HOST) == b"picture"
    assert web.asked == [("93.184.216.36", "mixed.example")]


async def test_redirects_are_followed_and_checked_each_time(web: Web) -> None:
    web.answers["media.example/a"] = moved("/b", 301)
    web.answers["media.example/b"] = moved("//cdn.example/c", 307)
    web.answers["cdn.example/c"] = content()
    assert await fetched("http://media.example/a") == b"picture"
    assert web.looked_up == ["media.example", "media.example", "cdn.example"]
    assert "redirected more than 1 times" in await refusal("http://media.example/a", max_redirects=1)
    assert "redirects are not followed" in await refusal("http://media.example/a", max_redirects=0)


@pytest.mark.parametrize(
    "to",
    ["http://169.254.169.254/", "http://inner.example/a", "file:///etc/passwd", "ftp://media.example/a", "http://["],
)
async def test_redirects_to_what_is_not_allowed(web: Web, to: str) -> None:
    web.answers["media.example/a"] = moved(to)
    message = await refusal("http://media.example/a")
    assert message in ("The server of the URL redirects to a URL that is not allowed.", "The URL could not be fetched.")
    message = await refusal("http://media.example/a", ANY_HOST)
    assert "169.254" not in message
    assert len(web.asked) == 2


async def test_a_name_whose_address_changes(web: Web) -> None:
    """Every connection goes to an address that was checked, also after a redirect to the same name."""

    def change(_: httpx.Request) -> httpx.Response:
        web.names["media.example"] = ["127.0.0.1"]
        return httpx.Response(302, headers={"location": "/b"})

    web.answers["media.example/a"] = change
    web.answers["media.example/b"] = content(b"secret")
    assert "--allow-private" in await refusal("http://media.example/a")
    assert [address for address, _ in web.asked] == ["93.184.216.34"]


async def test_answers_that_are_refused(web: Web) -> None:
    web.answers["media.example/large"] = content(bytes(1001))
    web.answers["media.example/gone"] = lambda _: httpx.Response(404, text="secret")
    web.answers["media.example/packed"] = lambda _: httpx.Response(
        200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"")
    )
    assert "too large (limit: 1000 bytes, --max-image-size)" in await refusal("http://media.example/large")
    assert await refusal("http://media.example/gone") == "The server of the URL returned status 404."
    assert "compressed" in await refusal("http://media.example/packed")
    assert await refusal("http://nothing.example/a", ANY_HOST) == "The URL could not be fetched."


@pytest.mark.parametrize("owner", ["media.example", "other.example"])
async def test_the_certificate_must_be_that_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    """Over a real connection to the address that was looked up."""
    pair = make_pair(tmp_path, "media", host=owner)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    hosts: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        hosts.append(head.partition("\r\nhost: ")[2].partition("\r\n")[0])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nConnection: close\r\n\r\npicture")
        await writer.drain()
        writer.close()

    trusting = ssl.create_default_context(cafile=str(pair.certificate))
    monkeypatch.setattr("quire.multimodal.fetch._certificates", lambda: trusting)
    monkeypatch.setattr("quire.multimodal.fetch._look_up", lambda _: [ipaddress.ip_address("127.0.0.1")])
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"https://media.example:{port}/a.png"
        if owner == "media.example":
            assert await fetched(url, private_addresses=True) == b"picture"
            assert hosts == [f"media.example:{port}"]
        else:
            assert await refusal(url, private_addresses=True) == "The URL could not be fetched."
            assert hosts == []


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:21f:cb07::1", "64:ff9b::5db8:d822"])
def test_public_addresses(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


async def test_a_traced_request_carries_its_trace_on(web: Web) -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("traceparent"))
        return content()(request)

    web.answers["media.example/a"] = answer
    await fetched("http://media.example/a", ANY_HOST)
    trace = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    set_current_origin(Origin("request", trace=trace))
    await fetched("http://media.example/a", ANY_HOST)
    assert seen == [None, trace.traceparent]
