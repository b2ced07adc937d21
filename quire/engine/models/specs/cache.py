"""What a layer keeps of a sequence between steps, its size, and which layers share block tables (cache groups)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Literal

_MOST_GROUPS = 8  # that grow: each costs some microseconds of every step
StateDtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class FullCache:
    """Keys and values of all tokens."""


@dataclass(frozen=True)
class LatentCache:
    """One latent vector of each token."""


@dataclass(frozen=True)
class IndexedCache(LatentCache):
    """A latent vector of each token, and a key by which `top_k` of these are selected for each token."""

    top_k: int


@dataclass(frozen=True)
class WindowCache:
    """Keys and values of the last tokens. `window`: positions that a token attends to, its own included."""

    window: int


@dataclass(frozen=True)
class ChunkCache:
    """Keys and values of the chunk of tokens that the last one is in. `size`: tokens of a chunk."""

    size: int


@dataclass(frozen=True)
class CrossCache:
    """Keys and values of the positions of an encoder, filled once."""


@dataclass(frozen=True)
class StateArray:
    """An array of a state, zero before the first token. `dtype`: its name in torch; configs are read without that."""

    shape: tuple[int, ...]
    dtype: StateDtype

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return prod(self.shape) * (4 if self.dtype == "float32" else 2)


@dataclass(frozen=True)
class StateCache:
    """A state whose size does not depend on the number of tokens."""

    arrays: tuple[StateArray, ...]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Elements that a layer caches of a token: key_dim per head, and value_dim more unless values lie in the keys.

    Each key and each value takes a multiple of `alignment` elements in the pages; those past its own are zero.

    Attributes:
        row_alignment: the elements of each row in pages begin at a multiple of this many bytes.
    """

    heads: int
    key_dim: int
    value_dim: int
    values_in_keys: bool = False
    alignment: int = 1
    row_alignment: int = 1

    @property
    def key_elements(self) -> int:
        """Elements of a key in the pages."""
        return -(-self.key_dim // self.alignment) * self.alignment

    @property
    def value_elements(self) -> int:
        """Elements of a value in the pages."""
        return -(-self.value_dim // self.alignment) * self.alignment

    @property
    def is_padded(self) -> bool:
        """Whether keys or values have zeros appended in the pages."""
        return self.key_elements != self.key_dim or self.value_elements != self.value_dim


TokenCache = FullCache | LatentCache | WindowCache | ChunkCache
CacheKind = TokenCache | CrossCache | StateCache


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose caches have a block table in common.

    Attributes:
        layers: their indices.
    """

    kind: CacheKind
    layers: tuple[int, ...]

    @property
    def window(self) -> int | None:
        """Positions that a token attends to at most; None: all."""
        return _most_positions(self.kind)


def _most_positions(kind: CacheKind) -> int | None:
    match kind:
        case WindowCache(window=most) | ChunkCache(size=most):
            return most
    return None


def _within(kind: TokenCache, context_len: int) -> TokenCache:
    """What a layer keeps of sequences that are not longer than `context_len`."""
    if isinstance(kind, IndexedCache) and kind.top_k >= context_len:
        return LatentCache()
    most = _most_positions(kind)
    return kind if most is None or most < context_len else FullCache()


def group_layers(
    kinds: Sequence[TokenCache | StateCache | None],
    context_len: int,
    *,
    crossing: Sequence[int] = (),
    beside: Mapping[int, StateCache | None] = MappingProxyType({}),
) -> tuple[CacheGroup, ...]:
    """Return the groups of a decoder: those that grow with a sequence, that of cross-attention, those of states.

    All groups take equal blocks from one pool, with room for as many layers as the smallest kind has: the layers that
    keep all tokens are usually the fewest, and a place that they leave empty costs most. A kind with more layers makes
    several groups, whose layers alternate, so that each pipeline stage has layers of all groups.

    Args:
        kinds: what each layer keeps; None: nothing.
        context_len: tokens of the longest sequence. A window or chunk that is not shorter keeps all tokens, and where
            as many are selected, these are all.
        crossing: indices of the layers with cross-attention. It reads the pages of a layer at other blocks, so no
            other layer may have the same place in a block: the layers that grow are one group then.
        beside: states that layers keep beside that, by their indices.
    """
    growing: dict[TokenCache, list[int]] = {}
    states: dict[StateCache, list[int]] = {}
    for layer, kind in enumerate(kinds):
        if kind is None:
            continue
        if isinstance(kind, StateCache):
            states.setdefault(kind, []).append(layer)
        else:
            growing.setdefault(FullCache() if crossing else _within(kind, context_len), []).append(layer)
    for layer, state in beside.items():
        if state is not None:
            states.setdefault(state, []).append(layer)
    size = _block_layers([len(layers) for layers in growing.values()])
    groups = [
        CacheGroup(kind, tuple(layers[part :: -(-len(layers) // size)]))
        for kind, layers in growing.items()
        for part in range(-(-len(layers) // size))
    ]
    if crossing:
        groups.append(CacheGroup(CrossCache(), tuple(crossing)))
    return (*groups, *(CacheGroup(kind, tuple(layers)) for kind, layers in states.items()))


def _block_layers(counts: Sequence[int]) -> int:
    """Return the number of layers in a block, from those of each kind."""
    size = min(counts, default=1)
    while sum(-(-count // size) for count in counts) > max(_MOST_GROUPS, len(counts)):
        size += 1
    return size
