"""Frames between a decoder and a prefiller: a message in msgpack, and for some the bytes of a block.

The prefiller speaks first, so that a decoder sends nothing to a server of another kind. TLS begins after its greeting,
if it has a certificate. Then the decoder says what its blocks are, and proves that it knows the secret if there is one;
the prefiller accepts or refuses that, with a proof of its own. The decoder asks for blocks by their keys, which come in
this order, and gives up what is kept for it. A connection is for one request.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Annotated, Literal

import msgspec
import xxhash
from typing_extensions import Buffer

PROTOCOL = "quire-kv-2"
_HEADER = struct.Struct("<II")  # bytes of the message, and of the content behind it
_SMALL = 1 << 16  # bytes of a message before the handshake has ended
_LARGEST = 8 << 20  # bytes of any other
_MOST_KEYS = 1 << 17  # blocks of a request


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    """The first message, of the prefiller.

    Attributes:
        challenge: to be answered with a proof; empty: none is needed.
        tls: all that follows is encrypted.
    """

    protocol: str
    challenge: bytes = b""
    tls: bool = False


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """What the blocks of the decoder are; see `block_facts`. `challenge`, `proof`: see `Security`."""

    facts: dict[str, str]
    challenge: bytes = b""
    proof: bytes = b""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The prefiller has blocks of the same kind."""

    proof: bytes = b""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The prefiller sends nothing, and says why."""

    reason: str


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Send the blocks with these keys. `request_id`: what was computed, and kept for this."""

    request_id: str
    keys: Annotated[list[bytes], msgspec.Meta(max_length=_MOST_KEYS)]


class Block(msgspec.Struct, frozen=True, tag="block"):
    """A block that was asked for; its bytes follow."""

    index: int
    checksum: bytes


class Missing(msgspec.Struct, frozen=True, tag="missing"):
    """A block is not there any more; no further one follows."""

    index: int


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The blocks of a request need not be kept any longer."""

    request_id: str


Message = Greeting | Hello | Welcome | Refused | Ask | Block | Missing | Release
Phase = Literal["handshake", "open"]
_DECODER = msgspec.msgpack.Decoder(Message)


class TransferError(Exception):
    """A peer cannot be reached, does not speak the protocol, or refuses; the message is for whoever sent a request."""


def checksum(key: bytes, content: Buffer) -> bytes:
    """Return the checksum of a block with a key."""
    digest = xxhash.xxh3_128(key)
    digest.update(content)
    return digest.digest()


def write(writer: asyncio.StreamWriter, message: Message, content: bytes = b"") -> None:
    """Queue a message, and the content of a block behind it."""
    encoded = msgspec.msgpack.encode(message)
    writer.write(_HEADER.pack(len(encoded), len(content)))
    writer.write(encoded)
    if content:
        writer.write(content)


async def read(
    reader: asyncio.StreamReader, phase: Phase = "open", content_size: int = 0
) -> tuple[Message, bytes] | None:
    """Wait for the next message and its content; None: the peer has closed the connection.

    Args:
        reader: of the connection.
        phase: decides how long a message may be.
        content_size: bytes of a content; 0: there must be none.

    Raises:
        TransferError: it is no message.
        OSError: the connection has failed.
    """
    try:
        header = await reader.readexactly(_HEADER.size)
        length, following = _HEADER.unpack(header)
        if length > (_SMALL if phase == "handshake" else _LARGEST) or following not in (0, content_size):
            raise TransferError("the peer has sent something that is no message of Quire's transfer of KV blocks")
        message = _DECODER.decode(await reader.readexactly(length))
        return message, await reader.readexactly(following) if following else b""
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise TransferError("the peer has closed the connection within a message") from error
        return None
    except msgspec.MsgspecError as error:
        raise TransferError(f"the peer has sent a malformed message: {error}") from error
