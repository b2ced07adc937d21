"""The events of the prefix cache as vLLM writes them: structs, and their two encodings.

A message has three frames: the topic, a sequence number (8 bytes, big-endian, from 0), and a batch in msgpack, which is
the array [seconds since 1970, events, rank]. vLLM writes an event as a map with its name under "type", and did so as an
array that begins with its name until the middle of 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from quire.engine.client.protocol import LoadSource
from quire.engine.scheduling.request import ExtraKey

Hash = int  # the last 64 bits of a block's hash
Medium = Literal["GPU", "CPU", "STORAGE"]
# The first tier of every device, also of CPUs: those who read events value it most, and know no other name of it.
FIRST_TIER: Medium = "GPU"
MEDIUM_OF: Mapping[LoadSource, Medium] = {"host": "CPU", "disk": "STORAGE"}  # the names of tiers behind it
END_OF_REPLAY = (-1).to_bytes(8, signed=True)


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, kw_only=True):
    """Blocks of a sequence, each of which follows the one before it.

    In a tier behind the first they are blocks whose tokens were told before, when they were in the first one: as in
    vLLM's events of offloading there are neither tokens nor a parent, and the size is 0.

    Attributes:
        parent_block_hash: the block before the first of them; None: there is none.
        token_ids: the tokens of all of them.
        lora_id, lora_name: the adapter that a request has asked for; Quire has none of these.
        medium: where they are.
        extra_keys: of each block, what it depends on beside tokens: an adapter's digest; pairs of a medium's hash and
            its offset from the block's begin; of a first block the salt.
        group_idx: index of the group of layers that they are of.
        kv_cache_spec_kind: how these layers attend.
        kv_cache_spec_sliding_window: number of tokens that they attend to; None: all.
    """

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[ExtraKey, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True, kw_only=True):
    """Blocks of a group that can no longer be found in a medium."""

    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No block can be found any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """What has happened until the end of a step, in order.

    Attributes:
        ts: when, in seconds since 1970.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def external_hash(key: bytes) -> Hash:
    """Return a block's hash as events have it."""
    return int.from_bytes(key[-8:])


class BatchEncoder:
    """Encode batches."""

    def __init__(self, encoding: Literal["map", "array"]) -> None:
        self._positional = encoding == "array"
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, batch: EventBatch) -> bytes:
        """Return a batch in msgpack."""
        if not self._positional:
            return self._encoder.encode(batch)
        return self._encoder.encode((batch.ts, [_as_array(event) for event in batch.events], batch.data_parallel_rank))


def _as_array(event: Event) -> tuple[object, ...]:
    match event:
        case BlockStored():
            fields: tuple[object, ...] = (
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids,
                event.block_size,
                event.lora_id,
                event.medium,
                event.lora_name,
                event.extra_keys,
                event.group_idx,
                event.kv_cache_spec_kind,
                event.kv_cache_spec_sliding_window,
            )
        case BlockRemoved():
            fields = (event.block_hashes, event.medium, event.group_idx)
        case AllBlocksCleared():
            fields = ()
    return (type(event).__name__, *fields)
