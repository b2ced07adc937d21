"""The state of an encoder between pieces of audio, as layers read and write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerState:
    """What a layer keeps of the positions before a piece.

    Attributes:
        keys, values: (heads, past, head_dim), of attention; see `ChunkedAttention`.
        columns: (kernel - 1, channels), input of the convolution.
    """

    keys: Tensor
    values: Tensor
    columns: Tensor


class Pieces:
    """The next pieces of several sequences, which a step encodes together.

    States are not changed: layers collect new ones, so that a step that fails changes nothing.

    Attributes:
        valid: (chunks, past + chunk) bool: the positions that each chunk can attend to exist.
    """

    def __init__(self, before: Sequence[Sequence[LayerState]], valid: Tensor) -> None:
        """`before`: for each sequence, the state of each layer."""
        self.valid = valid
        self._before = before
        self._attended: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._columns: dict[int, list[Tensor]] = {}

    def attended(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each sequence."""
        return [(state[layer].keys, state[layer].values) for state in self._before]

    def columns(self, layer: int) -> list[Tensor]:
        """Columns of each sequence."""
        return [state[layer].columns for state in self._before]

    def keep_attended(self, layer: int, attended: list[tuple[Tensor, Tensor]]) -> None:
        """Set the keys and values behind the pieces."""
        self._attended[layer] = attended

    def keep_columns(self, layer: int, columns: list[Tensor]) -> None:
        """Set the columns behind the pieces."""
        self._columns[layer] = columns

    def after(self) -> list[list[LayerState]]:
        """For each sequence, the state of each layer behind its piece."""
        layers = range(len(self._columns))
        return [
            [LayerState(*self._attended[layer][number], self._columns[layer][number]) for layer in layers]
            for number in range(len(self._before))
        ]
