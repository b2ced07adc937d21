"""TLS: the server's certificate, and connections until their handshake is complete."""

from __future__ import annotations

import asyncio
import math
import ssl
from typing import Any

from quire.app.connections import Connection, Connections
from quire.config.options import TlsOptions

_TLS_1_2_ONLY = "5"  # ssl.PROTOCOL_TLSv1_2


class TlsError(Exception):
    """The certificate or another setting of TLS cannot be used; `field` is the setting."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


class Tls:
    """The server's certificate and key, and the certificates of authorities that it accepts from clients.

    Attributes:
        files: with all of them.
        context: of new connections.
    """

    def __init__(self, options: TlsOptions) -> None:
        """Read all files.

        Raises:
            TlsError: one of them cannot be used.
        """
        self._options = options
        self.files = [file for file in (options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs) if file]
        self.read()

    def read(self) -> None:
        """Read all files, for new connections. Those that are open go on as they are.

        Raises:
            TlsError: one of them cannot be used; nothing changes.
        """
        self.context = self._new_context()

    def _new_context(self) -> ssl.SSLContext:
        options = self._options
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = max(context.minimum_version, ssl.TLSVersion.TLSv1_2)  # OpenSSL's may be older
        if options.ssl_version == _TLS_1_2_ONLY:
            context.maximum_version = ssl.TLSVersion.TLSv1_2
        self._load(context)
        context.verify_mode = ssl.VerifyMode(int(options.ssl_cert_reqs))
        if options.ssl_ciphers is not None:
            try:
                context.set_ciphers(options.ssl_ciphers)
            except ssl.SSLError as error:
                raise TlsError("ssl_ciphers", str(error)) from error
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        options = self._options
        assert options.ssl_certfile is not None
        password = options.ssl_keyfile_password or ""  # without one, OpenSSL would ask on the terminal
        try:
            context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, lambda: password)
        except (OSError, ValueError) as error:  # SSLError is an OSError; a password may be too long
            raise TlsError("ssl_certfile", str(error)) from error
        if options.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(options.ssl_ca_certs)
            except OSError as error:
                raise TlsError("ssl_ca_certs", str(error)) from error


class TlsHandshake(asyncio.Protocol, Connection):
    """A connection whose TLS handshake is not complete. Like the head of a request, it has a deadline.

    The event loop's own TLS would not count such connections, so clients that do not go on could use up all files.
    """

    def __init__(self, table: Connections, context: ssl.SSLContext, protocol: asyncio.Protocol) -> None:
        """Start with a connection that `protocol` takes over after the handshake."""
        self._table = table
        self._context = context
        self._protocol = protocol
        self._deadline = math.inf
        self._received = bytearray()  # before the handshake began, or with its end
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Begin the handshake."""
        self.transport = transport
        if not self._table.add(self):
            transport.abort()
            return
        self._deadline = self._table.deadline(self._table.options.header_timeout)
        self._task = asyncio.get_running_loop().create_task(self._shake_hands())

    def data_received(self, data: bytes) -> None:
        """Keep what arrives before the loop's TLS reads, and then what arrives before `protocol` has the connection."""
        self._received += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._table.remove(self)

    def overdue(self) -> bool:
        """Return whether the handshake takes too long."""
        return self._table.clock > self._deadline

    def end_overdue(self) -> None:
        """Close the connection."""
        self.transport.abort()

    async def _shake_hands(self) -> None:
        try:
            secured = await self._secured()
        except OSError:  # not TLS, no common version or cipher, or no more connection
            self.transport.abort()
            return
        finally:
            self._table.remove(self)
        secured.set_protocol(self._protocol)
        self._protocol.connection_made(secured)
        if self._received:
            self._protocol.data_received(bytes(self._received))

    async def _secured(self) -> asyncio.Transport:
        """The connection after the handshake.

        The event loop's TLS begins to read within two iterations. It gets what has arrived until then first.
        """
        if self.transport.is_closing():
            raise ConnectionResetError
        loop = asyncio.get_running_loop()
        starting = loop.create_task(loop.start_tls(self.transport, self, self._context, server_side=True))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        reader: Any = self.transport.get_protocol()
        while self._received and not starting.done():
            buffer = reader.get_buffer(len(self._received))
            size = min(len(buffer), len(self._received))
            buffer[:size] = self._received[:size]
            del self._received[:size]
            reader.buffer_updated(size)
        secured = await starting
        if secured is None or self.transport.is_closing():  # uvloop does not say that the connection was lost
            raise ConnectionResetError
        return secured
