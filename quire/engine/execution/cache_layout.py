"""CacheLayout: how the layers of a model share the blocks of a KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.engine.models.specs.cache import CacheGroup, CacheShape, CrossCache, StateCache
from quire.kernels import int8_pages


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Pages of one layer, each (heads, blocks, block_size, dim), not contiguous. `values` may be a view of `keys`.

    In int8 pages scales precede each row of elements. Between rows there may be unused bytes, which align them.

    Attributes:
        shape: elements that the layer caches of a token.
        group: index of its group among those that grow.
    """

    keys: Tensor
    values: Tensor
    shape: CacheShape
    group: int = 0


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How layers share blocks: a block belongs to one group at a time, and has places for the layers of any group.

    There is a place for each layer of the group with the largest ones; several smaller layers may share one.

    States of a fixed size are not in blocks, see `StateSlots`.

    Attributes:
        shapes: what each layer caches of a token, by its index; without the layers that have states.
        groups: the groups of a model's layers, of which a rank may have a part.
    """

    shapes: Mapping[int, CacheShape]
    groups: tuple[CacheGroup, ...]

    @classmethod
    def of_one_group(cls, shapes: Sequence[CacheShape], group: CacheGroup) -> CacheLayout:
        """Return the layout of layers that have one block table."""
        return cls(dict(enumerate(shapes)), (group,))

    @property
    def growing(self) -> list[CacheGroup]:
        """The groups that take more blocks as a sequence grows."""
        return [group for group in self.groups if not isinstance(group.kind, StateCache | CrossCache)]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group that grows."""
        return tuple(group.window for group in self.growing)

    @property
    def has_states(self) -> bool:
        """Whether layers of the model have states; those of this rank may have none."""
        return any(isinstance(group.kind, StateCache) for group in self.groups)

    @property
    def states(self) -> dict[int, StateCache]:
        """The states of each layer that has some, by its index."""
        return {
            layer: group.kind for group in self.groups if isinstance(group.kind, StateCache) for layer in group.layers
        }

    def place_bytes(self, block_size: int, dtype: torch.dtype) -> list[int]:
        """Return the bytes of each place in a block."""
        return self._places(block_size, dtype)[0]

    def _places(self, block_size: int, dtype: torch.dtype) -> tuple[list[int], dict[int, _Position]]:
        """Return the bytes of each place in a block, and where each layer is."""
        rows = [
            [(layer, self._layer_bytes(layer, block_size, dtype)) for layer in group.layers] for group in self.growing
        ]
        places, positions = list[int](), dict[int, _Position]()
        for row in sorted(rows, key=lambda row: max((nbytes for _, nbytes in row), default=0), reverse=True):
            number, begin = 0, 0
            for layer, nbytes in row:
                if begin and begin + nbytes > places[number]:
                    number, begin = number + 1, 0
                if number == len(places):
                    places.append(nbytes)
                elif not begin:
                    places[number] = max(places[number], nbytes)
                positions[layer] = _Position(number, begin)
                begin += nbytes
        return places, positions

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one block; 0: the model has states alone."""
        return sum(self.place_bytes(block_size, dtype))

    def _layer_bytes(self, layer: int, block_size: int, dtype: torch.dtype) -> int:
        return _elements_per_token(self.shapes[layer], dtype) * block_size * dtype.itemsize

    def divide(
        self, memory: Tensor, num_blocks: int, block_size: int, dtype: torch.dtype, *, by_place: bool
    ) -> dict[int, LayerCache]:
        """Divide memory into the pages of layers.

        Args:
            memory: (num_blocks * block_bytes,) uint8.
            num_blocks: blocks.
            block_size: tokens of a block.
            dtype: of the elements of pages.
            by_place: the same places of all blocks are adjacent, else all places of the same block.
        """
        places, begin = list[_Place](), 0
        sizes, positions = self._places(block_size, dtype)
        for nbytes in sizes:
            places.append(_Place(begin, nbytes if by_place else sum(sizes)))
            begin += nbytes * (num_blocks if by_place else 1)
        elements, layers = memory.view(dtype), dict[int, LayerCache]()
        for number, group in enumerate(self.growing):
            for layer in group.layers:
                place = places[positions[layer].place]
                pages = _Pages(elements, place.begin + positions[layer].begin, place.stride, num_blocks, block_size)
                layers[layer] = pages.layer(self.shapes[layer], number)
        return dict(sorted(layers.items()))


class _Position(NamedTuple):
    """Where a layer is in blocks: the number of a place, and the byte where it begins in it."""

    place: int
    begin: int


class _Place(NamedTuple):
    """A place in blocks: the byte where it begins in the first one, and those from a block to the next."""

    begin: int
    stride: int


@dataclass(slots=True)
class _Pages:
    """Allocate the pages of one layer, one part behind the other in its place of a block.

    Attributes:
        memory: elements of all blocks.
        begin: byte where the next part begins in the first block.
        stride: bytes from a block to the next.
    """

    memory: Tensor
    begin: int
    stride: int
    num_blocks: int
    block_size: int

    def layer(self, shape: CacheShape, group: int) -> LayerCache:
        """Return the pages of a layer."""
        keys = self._rows(shape, shape.key_elements)
        if not shape.values_in_keys:
            return LayerCache(keys, self._rows(shape, shape.value_elements), shape, group)
        first, last = (scale_bytes(dim, self.memory.dtype) for dim in (shape.key_elements, shape.value_elements))
        return LayerCache(keys, keys[..., first - last : first + shape.value_elements], shape, group)

    def _rows(self, shape: CacheShape, dim: int) -> Tensor:
        """Return rows of `dim` elements with their scales: (heads, blocks, block_size, elements)."""
        dtype = self.memory.dtype
        taken, unused = _row(shape, dim, dtype)
        size = (shape.heads, self.num_blocks, self.block_size, taken)
        strides = (self.block_size * taken, self.stride // dtype.itemsize, taken, 1)
        pages = self.memory.as_strided(size, strides, self.begin // dtype.itemsize)
        self.begin += shape.heads * self.block_size * taken * dtype.itemsize
        return pages[..., unused : unused + scale_bytes(dim, dtype) + dim]


def _elements_per_token(shape: CacheShape, dtype: torch.dtype) -> int:
    """Elements of a token in one layer, including the bytes of scales and those that align rows."""
    return sum(_row(shape, dim, dtype)[0] for dim in _dims(shape)) * shape.heads


def _dims(shape: CacheShape) -> tuple[int, ...]:
    """Elements of each of a head's rows."""
    return (shape.key_elements,) if shape.values_in_keys else (shape.key_elements, shape.value_elements)


def _row(shape: CacheShape, dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Elements that a row of `dim` elements takes in pages, and how many of them are unused in front of it."""
    alignment, scales = shape.row_alignment, scale_bytes(dim, dtype)
    header, elements = (-(-nbytes // alignment) * alignment for nbytes in (scales, dim * dtype.itemsize))
    return (header + elements) // dtype.itemsize, header - scales


def scale_bytes(dim: int, dtype: torch.dtype) -> int:
    """Bytes of the scales that precede each row of `dim` elements in a page."""
    return int8_pages.scale_bytes(dim) if dtype is torch.int8 else 0
