"""A secret and TLS between engines: who lacks one gets no block, and the error says which end has what."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire.config.kv_transfer import ConnectorConfig
from quire.engine.client.kv_transfer import RemoteBlocks
from quire.engine.transfer import wire
from quire.engine.transfer.block_reader import BlockReader, ReadBlock
from quire.engine.transfer.block_server import BlockServer
from quire.engine.transfer.loop_thread import LoopThread
from quire.engine.transfer.security import Security, UnusableSecurity
from tests.support.certificates import make_pair
from tests.support.patience import PATIENCE

BLOCK = 100_000
CONTENT = bytes(range(250)) * 400
FACTS = {"block size": "16"}
SECRET, OTHER = Security(b"a secret that is long"), Security(b"another one, also long")


def remote(port: int) -> RemoteBlocks:
    return RemoteBlocks(engine_id="x", host="127.0.0.1", port=port, request_id="r", num_tokens=1)


def read(prefiller: Security, decoder: Security, count: int = 40) -> ReadBlock:
    """The last block that a decoder reads of a prefiller."""
    thread = LoopThread()
    server = BlockServer(thread, ("127.0.0.1", 0), BLOCK, 8, lambda: None, prefiller)
    reader = BlockReader(thread, BLOCK, PATIENCE, decoder)
    try:
        for end in (server, reader):
            end.set_facts(FACTS)
        reader.load(1, remote(server.port), [b"%d" % number for number in range(count)])
        while True:
            for asked in server.readable():
                server.put(asked, CONTENT)
            block = reader.take()
            if block is not None and (block.content is None or block.index == count - 1):
                return block
            reader.wait(0.001)
    finally:
        server.close()
        thread.close()


def test_those_who_have_the_secret_read_blocks() -> None:
    assert read(SECRET, SECRET).content == CONTENT


@pytest.mark.parametrize(
    ("prefiller", "decoder", "error"),
    [
        (SECRET, OTHER, "it refuses: the decoder does not prove that it has the secret of the prefiller"),
        (SECRET, Security(), "only the prefiller has a secret"),
        (Security(), SECRET, "only this server has a secret"),
    ],
)
def test_others_read_nothing(prefiller: Security, decoder: Security, error: str) -> None:
    block = read(prefiller, decoder)
    assert block.content is None
    assert error in block.error


def test_a_prefiller_has_to_prove_that_it_has_the_secret() -> None:
    """Blocks of an impostor would be answers of its choice."""

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            wire.write(writer, wire.Greeting(wire.PROTOCOL, b"x" * 32))
            await wire.read(reader, "handshake")
            wire.write(writer, wire.Welcome())
            await reader.read()  # until the decoder has closed the connection
        finally:
            writer.transport.abort()

    thread = LoopThread()
    impostor = thread.run(asyncio.start_server(welcome, "127.0.0.1", 0))
    reader = BlockReader(thread, BLOCK, PATIENCE, SECRET)
    reader.set_facts(FACTS)
    try:
        reader.load(1, remote(impostor.sockets[0].getsockname()[1]), [b"1"])
        while (block := reader.take()) is None:
            reader.wait(0.01)
    finally:
        thread.call(impostor.close)
        thread.close()
    assert "it does not prove that it has the secret of this server" in block.error


def test_a_proof_is_of_one_side_and_one_connection() -> None:
    first, second = SECRET.challenge(), SECRET.challenge()
    proof = SECRET.proof("decoder", first, second)
    assert SECRET.accepts(proof, "decoder", first, second)
    assert not SECRET.accepts(proof, "prefiller", first, second)
    assert not SECRET.accepts(proof, "decoder", second, first)
    assert not SECRET.accepts(proof, "decoder", SECRET.challenge(), second)
    assert not SECRET.accepts(b"", "decoder", first, second)


def test_tls(tmp_path: Path) -> None:
    authority = make_pair(tmp_path, "authority")
    ours = make_pair(tmp_path, "ours", issuer=authority)
    elsewhere = make_pair(tmp_path, "elsewhere", host="elsewhere.example", issuer=authority)
    other = make_pair(tmp_path, "other")

    def security(**files: Path) -> Security:
        return Security.of(ConnectorConfig(**files))

    knows = security(tls_ca_file=authority.certificate)
    encrypts = security(tls_certfile=ours.certificate, tls_keyfile=ours.key)
    assert read(encrypts, knows).content == CONTENT
    (tmp_path / "secret").write_text("a secret that is long\n")
    files = {"tls_certfile": ours.certificate, "tls_keyfile": ours.key, "tls_ca_file": authority.certificate}
    both = security(secret_file=tmp_path / "secret", **files)
    assert read(both, both).content == CONTENT
    for prefiller, decoder, error in (
        (encrypts, security(tls_ca_file=other.certificate), "certificate verify failed"),
        (security(tls_certfile=elsewhere.certificate, tls_keyfile=elsewhere.key), knows, "IP address mismatch"),
        (encrypts, Security(), "only the prefiller has TLS"),
        (Security(), knows, "only this server has TLS"),
    ):
        block = read(prefiller, decoder)
        assert block.content is None
        assert error in block.error


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    locked = make_pair(tmp_path, "locked", password="x")
    (tmp_path / "short").write_text("short\n")
    for files, error in (
        ({"secret_file": tmp_path / "short"}, "secret_file: .* has 5 bytes, fewer than 16"),
        ({"secret_file": tmp_path / "absent"}, "secret_file: .* cannot be read: No such file"),
        ({"tls_certfile": tmp_path / "short"}, "tls_certfile, tls_keyfile: .* cannot be used"),
        ({"tls_certfile": locked.certificate, "tls_keyfile": locked.key}, "its key has a password"),
        ({"tls_ca_file": tmp_path / "short"}, "tls_ca_file: .* cannot be used"),
    ):
        with pytest.raises(UnusableSecurity, match=error):
            Security.of(ConnectorConfig(**files))
