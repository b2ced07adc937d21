"""HTTPS with certificates that are made here: handshakes, client certificates, versions, renewal."""

from __future__ import annotations

import asyncio
import socket
import ssl
import warnings
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from websockets.asyncio.client import connect

from quire.app.connections import Connections
from quire.app.reload import WatchedFiles
from quire.app.serve import run
from quire.app.tls import Tls
from quire.config.command import ConfigError
from quire.config.commands import Serve
from quire.config.options import ConnectionOptions, TlsOptions
from tests.support.certificates import Pair, make_pair
from tests.support.raw import on_uvloop
from tests.support.server import listening, until

PASSWORD = "secret"


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that answers with its scheme."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": scope["scheme"]})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


def ending_after(go: asyncio.Event) -> ASGIApp:
    """An app whose answers at /wait begin at once and end when a test says so."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/wait":
            await hello(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begin", "more_body": True})
        await go.wait()
        await send({"type": "http.response.body", "body": b"end"})

    return app


@asynccontextmanager
async def https(
    pair: Pair, table: Connections | None = None, app: ASGIApp = hello, **options: Any
) -> AsyncIterator[tuple[str, Tls]]:
    """The URL of a server."""
    tls = Tls(TlsOptions(ssl_certfile=pair.certificate, ssl_keyfile=pair.key, **options))
    async with listening(app, connections=Connections(ConnectionOptions()) if table is None else table, tls=tls) as url:
        yield url, tls


def trusting(pair: Pair, client: Pair | None = None) -> ssl.SSLContext:
    """What a client needs that knows a certificate, and may have one of its own."""
    context = ssl.create_default_context(cafile=pair.certificate)
    if client is not None:
        context.load_cert_chain(client.certificate, client.key)
    return context


async def get(url: str, context: ssl.SSLContext) -> str:
    async with httpx.AsyncClient(verify=context) as client:
        return (await client.get(url)).text


@on_uvloop
async def test_requests_and_websockets_are_encrypted(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "server")
    async with https(pair) as (url, _):
        assert await get(url, trusting(pair)) == "https"
        async with connect(f"{url.replace('https', 'wss')}/v1/realtime", ssl=trusting(pair)) as client:
            assert await client.recv() == "wss"
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await get(url, ssl.create_default_context())


@on_uvloop
async def test_keys_may_be_encrypted(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "server", PASSWORD)
    async with https(pair, ssl_keyfile_password=PASSWORD) as (url, _):
        assert await get(url, trusting(pair)) == "https"


@pytest.mark.parametrize(("required", "without"), [("0", True), ("1", True), ("2", False)])
def test_certificates_of_clients_are_checked(tmp_path: Path, required: str, without: bool) -> None:
    pair, known, unknown = (make_pair(tmp_path, name) for name in ("server", "known", "unknown"))

    @on_uvloop
    async def check() -> None:
        async with https(pair, ssl_ca_certs=known.certificate, ssl_cert_reqs=required) as (url, _):
            assert await get(url, trusting(pair, known)) == "https"
            for client, accepted in ((None, without), (unknown, required == "0")):
                if accepted:
                    assert await get(url, trusting(pair, client)) == "https"
                else:
                    with pytest.raises(httpx.TransportError):
                        await get(url, trusting(pair, client))

    check()


@on_uvloop
async def test_versions_and_ciphers_are_those_that_were_chosen(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "server")
    cipher = "ECDHE-ECDSA-AES256-GCM-SHA384"
    async with https(pair, ssl_version="5", ssl_ciphers=cipher) as (url, _):
        port = int(url.rpartition(":")[2])

        def negotiated() -> tuple[str, str | None]:
            with (
                socket.create_connection(("127.0.0.1", port)) as plain,
                trusting(pair).wrap_socket(plain, server_hostname="127.0.0.1") as secured,
            ):
                used = secured.cipher()
                assert used is not None
                return used[0], secured.version()

        assert await asyncio.to_thread(negotiated) == (cipher, "TLSv1.2")
        newer = trusting(pair)
        newer.minimum_version = ssl.TLSVersion.TLSv1_3
        with pytest.raises(httpx.ConnectError):
            await get(url, newer)


@on_uvloop
async def test_old_versions_and_ciphers_are_refused(tmp_path: Path) -> None:
    """Without any setting, whatever the client would accept."""
    pair = make_pair(tmp_path, "server")
    async with https(pair) as (url, _):
        for version, ciphers, accepted in (
            (ssl.TLSVersion.TLSv1_3, "ALL", True),
            (ssl.TLSVersion.TLSv1_2, "ECDHE-ECDSA-AES128-GCM-SHA256", True),
            (ssl.TLSVersion.TLSv1_2, "ECDHE-ECDSA-AES128-SHA", False),  # CBC with SHA-1
            (ssl.TLSVersion.TLSv1_2, "AECDH-AES256-SHA", False),  # without a certificate
            (ssl.TLSVersion.TLSv1_2, "ECDHE-ECDSA-NULL-SHA", False),  # without encryption
            (ssl.TLSVersion.TLSv1_1, "ALL", False),
            (ssl.TLSVersion.TLSv1, "ALL", False),
        ):
            context = trusting(pair)
            context.set_ciphers(f"{ciphers}:@SECLEVEL=0")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of the old versions
                context.minimum_version = context.maximum_version = version
            if accepted:
                assert await get(url, context) == "https", (version, ciphers)
            else:
                with pytest.raises(httpx.ConnectError):
                    await get(url, context)


@on_uvloop
async def test_certificates_of_an_authority(tmp_path: Path) -> None:
    """On both sides: the client knows the authority of the server, the server knows that of the client."""
    authority, impostor = make_pair(tmp_path, "authority"), make_pair(tmp_path, "impostor")
    (tmp_path / "other").mkdir()
    impostor_named_authority = make_pair(tmp_path / "other", "authority")
    server = make_pair(tmp_path, "server", issuer=authority)
    member = make_pair(tmp_path, "member", issuer=authority)
    async with https(server, ssl_ca_certs=authority.certificate, ssl_cert_reqs="2") as (url, _):
        assert await get(url, trusting(authority, member)) == "https"
        for wrong in (impostor, impostor_named_authority):
            stranger = make_pair(tmp_path, "stranger", issuer=wrong)
            with pytest.raises(httpx.TransportError):
                await get(url, trusting(authority, stranger))
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await get(url, trusting(wrong, member))


def replace(served: Pair, pair: Pair) -> None:
    served.certificate.write_bytes(pair.certificate.read_bytes())
    served.key.write_bytes(pair.key.read_bytes())


@on_uvloop
async def test_a_renewed_certificate_is_used_once_its_key_fits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make_pair(tmp_path, "first"), make_pair(tmp_path, "second")
    served = Pair(tmp_path / "served.pem", tmp_path / "served.key")
    replace(served, first)
    async with https(served) as (url, tls):
        refreshing = asyncio.create_task(WatchedFiles("certificate", tls.files, tls.read).watch(0.01))
        assert await get(url, trusting(first)) == "https"
        served.certificate.write_bytes(second.certificate.read_bytes())
        await until(lambda: "cannot be used yet" in caplog.text)
        assert await get(url, trusting(first)) == "https", "the old certificate, as its key is still the old one"
        served.key.write_bytes(second.key.read_bytes())
        async with asyncio.timeout(60):
            while True:
                with suppress(httpx.ConnectError):
                    assert await get(url, trusting(second)) == "https"
                    break
        refreshing.cancel()


@on_uvloop
async def test_connections_outlive_their_certificate(tmp_path: Path) -> None:
    """A stream, and a connection between two requests."""
    first, second = make_pair(tmp_path, "first"), make_pair(tmp_path, "second")
    served = Pair(tmp_path / "served.pem", tmp_path / "served.key")
    replace(served, first)
    go = asyncio.Event()
    async with (
        https(served, app=ending_after(go)) as (url, tls),
        httpx.AsyncClient(verify=trusting(first)) as client,
        client.stream("GET", f"{url}/wait") as stream,
    ):
        chunks = stream.aiter_text()
        assert await anext(chunks) == "begin"
        assert (await client.get(url)).text == "https"
        replace(served, second)
        tls.read()
        with pytest.raises(httpx.ConnectError):
            await get(url, trusting(first))
        assert await get(url, trusting(second)) == "https"
        assert (await client.get(url)).text == "https", "over the connection that is open"
        go.set()
        assert [chunk async for chunk in chunks] == ["end"]


@on_uvloop
async def test_a_removed_authority_is_refused_without_a_restart(tmp_path: Path) -> None:
    pair, known, other = (make_pair(tmp_path, name) for name in ("server", "known", "other"))
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(known.certificate.read_bytes())
    async with https(pair, ssl_ca_certs=authorities, ssl_cert_reqs="2") as (url, tls):
        assert await get(url, trusting(pair, known)) == "https"
        authorities.write_bytes(other.certificate.read_bytes())
        tls.read()
        assert await get(url, trusting(pair, other)) == "https"
        with pytest.raises(httpx.TransportError):
            await get(url, trusting(pair, known))


def open_plain(stack: ExitStack, url: str, data: bytes = b"") -> socket.socket:
    """A connection whose client does not speak TLS."""
    made = stack.enter_context(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))))
    made.sendall(data)
    made.setblocking(False)
    return made


@on_uvloop
async def test_clients_that_do_not_shake_hands_are_closed(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "server")
    table = Connections(ConnectionOptions(header_timeout=0.3))
    async with https(pair, table) as (url, _):
        with ExitStack() as stack:
            for data in (b"", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/1.1\r\n\r\n"):
                client = open_plain(stack, url, data)
                async with asyncio.timeout(60):
                    with suppress(ConnectionResetError):
                        while await asyncio.get_running_loop().sock_recv(client, 1000):
                            pass
        await until(lambda: len(table) == 0)
        assert await get(url, trusting(pair)) == "https"


@on_uvloop
async def test_handshakes_make_room_for_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.app.connections._RESERVE", 2)
    pair = make_pair(tmp_path, "server")
    table = Connections(ConnectionOptions(limit_concurrency=1))
    async with https(pair, table) as (url, _):
        with ExitStack() as stack:
            for _ in range(10):
                open_plain(stack, url)
            await until(lambda: len(table) == 3)
            assert await get(f"{url}/health", trusting(pair)) == "https"
            assert len(table) <= 3


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    pair, other = make_pair(tmp_path, "server"), make_pair(tmp_path, "other", PASSWORD)
    files = ["--ssl-certfile", str(pair.certificate), "--ssl-keyfile", str(pair.key)]
    encrypted = ["--ssl-certfile", str(other.certificate), "--ssl-keyfile", str(other.key)]
    for arguments, complaint in (
        (["--ssl-ciphers", "ALL"], "--ssl-ciphers needs --ssl-certfile"),
        (["--enable-ssl-refresh"], "--enable-ssl-refresh needs --ssl-certfile"),
        ([*files, "--ssl-ciphers", "nonsense"], "--ssl-ciphers is not a list of ciphers"),
        ([*files, "--ssl-cert-reqs", "2"], "--ssl-cert-reqs 2 needs --ssl-ca-certs"),
        ([*files, "--ssl-cert-reqs", "3"], "--ssl-cert-reqs expects"),
        ([*files, "--ssl-version", "2"], "--ssl-version expects"),
        ([*files, "--ssl-ca-certs", str(pair.key)], "--ssl-ca-certs has no valid certificates"),
        ([*files, "--ssl-ca-certs", str(tmp_path / "none")], "--ssl-ca-certs expects a readable file"),
        (encrypted, "are not a valid certificate and key"),
        ([*encrypted, "--ssl-keyfile-password", "wrong"], "are not a valid certificate and key"),
    ):
        with pytest.raises(ConfigError) as error:
            run(Serve.parse(["model", *arguments]))
        assert complaint in str(error.value), arguments
