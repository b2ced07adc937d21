"""PrefixIndex: which prefixes of prompts the prefix cache of a replica probably holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

import numpy as np
import xxhash
from typing_extensions import override

from quire.engine.client.protocol import TokenArray
from quire.engine.client.stream import EngineRequest

_MOST_BLOCKS = 1 << 17  # of an index: some 16 MiB


def block_keys(request: EngineRequest, block_size: int) -> list[int]:
    """Return the chained keys of the full blocks of a prompt. Equal keys mean equal tokens, media and salts up to them.

    They are of the front end alone: an engine has keys of its own.
    """
    content = np.ascontiguousarray(request.prompt, np.int32).tobytes()
    width = 4 * block_size
    media: dict[int, bytes] = {}
    for item in request.items:
        index = item.start // block_size
        media[index] = media.get(index, b"") + item.hash
    key = xxhash.xxh3_64_intdigest((request.cache_salt or "").encode(errors="surrogatepass"))
    keys: list[int] = []
    for index in range(len(content) // width):
        block = content[index * width : (index + 1) * width]
        key = xxhash.xxh3_64_intdigest(block + media.get(index, b""), seed=key)
        keys.append(key)
    return keys


class PromptKeys:
    """The keys of prompts. Those of the last prompt are kept: a request for several answers has it several times.

    Attributes:
        block_size: tokens of a block.
    """

    def __init__(self) -> None:
        self.block_size = 1
        self._prompt: TokenArray | None = None
        self._context: object = None  # what the keys depend on beside the prompt
        self._keys: list[int] = []

    def of(self, request: EngineRequest) -> list[int]:
        """Return the keys of a request's prompt; see `block_keys`."""
        context = (request.cache_salt, [(item.hash, item.start) for item in request.items])
        if request.prompt is not self._prompt or context != self._context:
            self._keys = block_keys(request, self.block_size)
            self._prompt, self._context = request.prompt, context
        return self._keys


class Prefixes(Protocol):
    """Which prefixes of prompts a replica probably has."""

    def matched(self, keys: Sequence[int]) -> int:
        """Return how many of a prompt's blocks, from its beginning, are there."""

    def add(self, keys: Sequence[int]) -> object:
        """Note a prompt that is sent to the replica."""

    def clear(self) -> None:
        """Forget all: the replica's cache is empty."""


class PrefixIndex(Prefixes):
    """The keys of the blocks that a replica has computed and not evicted, as far as the front end can know.

    It has the keys of the prompts that were sent there, as many as the replica's cache has blocks. As in the cache,
    those that were used least recently leave first, and the end of a prompt before its beginning.
    """

    def __init__(self, num_blocks: int, most: int = _MOST_BLOCKS) -> None:
        """Make an empty one.

        Args:
            num_blocks: blocks of the replica's KV cache.
            most: keys that are held at most, however large the cache is.
        """
        self._most = most
        self._keys: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._capacity = 0
        self.resize(num_blocks)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    @property
    def capacity(self) -> int:
        """How many keys it holds at most."""
        return self._capacity

    def resize(self, num_blocks: int) -> None:
        """Take note of how many blocks the replica's KV cache has."""
        self._capacity = min(num_blocks, self._most)
        self._evict()

    @override
    def matched(self, keys: Sequence[int]) -> int:
        known = self._keys
        for index, key in enumerate(keys):
            if key not in known:
                return index
        return len(keys)

    @override
    def add(self, keys: Sequence[int]) -> list[int]:
        """Note a prompt that is sent to the replica; return the keys that had to leave for it."""
        known = self._keys
        for key in reversed(keys):
            known[key] = None
            known.move_to_end(key)
        return self._evict()

    def note(self, keys: Iterable[int]) -> None:
        """Note that the replica has blocks, as it says itself; those that are known keep their place."""
        for key in keys:
            self._keys.setdefault(key, None)
        self._evict()

    def recent(self, number: int) -> list[int]:
        """Return the keys that were used last, the newest first."""
        return list(islice(reversed(self._keys), number))

    @override
    def clear(self) -> None:
        self._keys.clear()

    def _evict(self) -> list[int]:
        known = self._keys
        return [known.popitem(last=False)[0] for _ in range(len(known) - self._capacity)]
