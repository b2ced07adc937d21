"""The rules by which Dynamo's router reads a server's KV events and finds the prefix of a request, restated.

Read from its source of mid 2026 (the normalizer of events, the filter of repeated ones, the tree of prefixes). In
short, for the events of a server:

1. Events of groups of layers count if these attend to all tokens. A removal says its group only, whose kind was learnt
   from what was stored; a group that is not known counts if its number is 0.
2. What is stored in another tier than the device's memory is not in the tree.
3. A stored block has an identity within its parent: XXH3 of its tokens and of the hashes of its media. The first
   block's `cache_salt` counts if it begins with Dynamo's own prefix, for all blocks behind it; other text in extra keys
   does not.
4. Blocks of another size than the router's are dropped, as are blocks whose parent is not in the tree, and an event
   that has a hash twice.
5. A block is gone when it was removed as often as it was stored.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from tests.support.kv_events import decode_batch, hash_of

SALT_PREFIX = "dynamo-cache-salt:"
_SEED = 1337
_MAIN_KINDS = {"full_attention", "mla_attention", "sink_full_attention"}
Identity = tuple[str, int]  # of a block within its parent: the salt, and the hash of tokens and media
Path = tuple[Identity, ...]


def media_hash(identifier: str) -> int:
    """The hash of a medium: the first 64 bits of a digest, or a hash of another identifier."""
    if len(identifier) == 64 and set(identifier) <= set("0123456789abcdefABCDEF"):
        return int(identifier[:16], 16)
    return int(xxhash.xxh3_64_intdigest(identifier.encode()))


def identity(tokens: Sequence[int], media: Sequence[str], salt: str) -> Identity:
    """The identity of a block. `media`: identifiers of those in it."""
    data = struct.pack(f"<{len(tokens)}I", *tokens)
    hashes = sorted(map(media_hash, media))
    return salt, xxhash.xxh3_64_intdigest(data + struct.pack(f"<{len(hashes)}Q", *hashes), _SEED)


def request_path(
    tokens: Sequence[int], media: Sequence[tuple[int, int, str]], size: int, salt: str | None = None
) -> Path:
    """The identities of a request's whole blocks. `media`: the start, end and identifier of each."""
    namespace = (salt or "").removeprefix(SALT_PREFIX) if (salt or "").startswith(SALT_PREFIX) else ""
    return tuple(
        identity(
            tokens[begin : begin + size],
            [name for start, end, name in media if start < begin + size and end > begin],
            namespace,
        )
        for begin in range(0, len(tokens) // size * size, size)
    )


@dataclass
class PrefixTree:
    """What Dynamo's router knows of one server.

    Attributes:
        size: tokens of a block.
        paths: of the engine's hash of each block in the tree, the identities up to it.
        dropped: blocks that were not taken.
    """

    size: int
    paths: dict[int, Path] = field(default_factory=dict)
    dropped: int = 0
    _kinds: dict[int, str] = field(default_factory=dict)
    _salts: dict[int, str] = field(default_factory=dict)
    _times_stored: Counter[int] = field(default_factory=Counter)

    def take(self, payload: bytes) -> None:
        """Apply a batch."""
        for event in decode_batch(payload)[1]:
            match event["type"]:
                case "BlockStored":
                    if event["group_idx"] is not None and event["kv_cache_spec_kind"] is not None:
                        self._kinds[event["group_idx"]] = event["kv_cache_spec_kind"]
                    if self._counts(event):
                        self._store(event)
                case "BlockRemoved":
                    if self._counts(event):
                        self._remove(event)
                case "AllBlocksCleared":
                    self.paths.clear()
                    self._salts.clear()
                    self._times_stored.clear()

    def matched(self, path: Path) -> int:
        """How many of a request's first blocks the server has."""
        known = set(self.paths.values())
        count = 0
        while count < len(path) and path[: count + 1] in known:
            count += 1
        return count

    def _counts(self, event: Mapping[str, Any]) -> bool:
        if event["medium"] not in (None, "GPU"):
            return False
        kind = event.get("kv_cache_spec_kind") or self._kinds.get(event["group_idx"])
        return event["group_idx"] in (None, 0) if kind is None else kind in _MAIN_KINDS

    def _store(self, event: Mapping[str, Any]) -> None:
        hashes, tokens = list(map(hash_of, event["block_hashes"])), event["token_ids"]
        parent = None if event["parent_block_hash"] is None else hash_of(event["parent_block_hash"])
        self._times_stored.update(hashes)
        is_whole = event["block_size"] == self.size and len(tokens) == self.size * len(hashes)
        if not is_whole or len({parent, *hashes}) <= len(hashes) or (parent is not None and parent not in self.paths):
            self.dropped += len(hashes)
            return
        extra_keys = event["extra_keys"] or [None] * len(hashes)
        salt = _salt(extra_keys[0]) if parent is None else self._salts.get(parent, "")
        path = () if parent is None else self.paths[parent]
        for index, key in enumerate(hashes):
            block = tokens[index * self.size : (index + 1) * self.size]
            path = (*path, identity(block, _media(extra_keys[index]), salt))
            self.paths[key] = path
            self._salts[key] = salt

    def _remove(self, event: Mapping[str, Any]) -> None:
        for key in map(hash_of, event["block_hashes"]):
            self._times_stored[key] -= 1
            if self._times_stored[key] <= 0:
                del self._times_stored[key]
                self.paths.pop(key, None)
                self._salts.pop(key, None)


def _salt(extra_keys: Sequence[Any] | None) -> str:
    texts = [key for key in extra_keys or () if isinstance(key, str) and key.startswith(SALT_PREFIX)]
    return texts[0].removeprefix(SALT_PREFIX) if texts else ""


def _media(extra_keys: Sequence[Any] | None) -> list[str]:
    """Identifiers of media: pairs with an offset, and text that can be nothing but a digest."""
    pairs = [key[0] for key in extra_keys or () if not isinstance(key, str)]
    digests = [key for key in extra_keys or () if isinstance(key, str) and len(key) == 64]
    return pairs + digests
