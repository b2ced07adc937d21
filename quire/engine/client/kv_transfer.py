"""Values about KV blocks that an engine reads from another one."""

from __future__ import annotations

import msgspec

from quire.config.kv_transfer import is_allowed_host


class RemoteBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of a prompt that an engine keeps for another one.

    Attributes:
        engine_id: of the engine that has them.
        host, port: where it listens.
        request_id: the request in that engine that has computed them.
        num_tokens: tokens of the prompt.
        block_ids: numbers of the blocks in that engine's pool. A reader asks for blocks by their keys, not by these.
        expires_at: seconds since 1970 until which they are kept; 0: not known.
    """

    engine_id: str
    host: str
    port: int
    request_id: str
    num_tokens: int
    block_ids: list[int] = []
    expires_at: float = 0.0


class KVTransferInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an engine sends KV blocks to others and reads theirs; see `KVTransferConfig`."""

    sends: bool
    receives: bool
    allowed_hosts: tuple[str, ...] = ()

    def allows(self, host: str) -> bool:
        """Return whether blocks may be read from a host."""
        return is_allowed_host(host, self.allowed_hosts)


class BlockTransfer(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of one request, which have come from another engine."""

    seconds: float
    nbytes: int
