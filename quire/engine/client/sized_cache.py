"""A cache that is bounded in bytes."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")
_OVERHEAD = 256  # bytes of an entry beside its value
Key = bytes


def key_of(*parts: str) -> Key:
    """A hash that stands for texts of any length."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part.encode(errors="surrogatepass")
        digest.update(len(content).to_bytes(8))
        digest.update(content)
    return digest.digest()


class SizedCache(Generic[V]):
    """An LRU cache that is bounded in bytes."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: bytes of all entries together."""
        self._capacity = capacity
        self._values: OrderedDict[Key, tuple[V, int]] = OrderedDict()
        self.size = 0  # bytes

    def get(self, key: Key) -> V | None:
        """A value that is held; None if there is none."""
        entry = self._values.get(key)
        if entry is None:
            return None
        self._values.move_to_end(key)
        return entry[0]

    def put(self, key: Key, value: V, size: int) -> None:
        """Hold a value of `size` bytes, unless it is larger than the cache."""
        self._drop(key)
        if size + _OVERHEAD <= self._capacity:
            self._values[key] = value, size + _OVERHEAD
            self.size += size + _OVERHEAD
            while self.size > self._capacity:
                self._drop(next(iter(self._values)))

    def _drop(self, key: Key) -> None:
        entry = self._values.pop(key, None)
        if entry is not None:
            self.size -= entry[1]
