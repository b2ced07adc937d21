"""What a step hands to every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.engine.models.spec import Rope
from quire.kernels.paged_attention import AttentionParams
from quire.kernels.qk_norm_rope import CosSin


class Attend(Protocol):
    """The attention of one step: stores a layer's new keys and values, then lets its queries read all of them."""

    @property
    def stays(self) -> bool:
        """Whether the step's inputs lie where those of others do, and no draft's logits are wanted."""

    @property
    def ends(self) -> Tensor | None:
        """Rows of the last tokens of sequences that get a next one, which attend as single tokens in the last layer.

        None if there is nothing but such tokens in the step, or if its attention makes no difference.
        """

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        math: AttentionParams,
        *,
        last: bool = False,
        cut: bool = False,
    ) -> Tensor:
        """Attend.

        Args:
            layer: index of the layer's cache.
            q: (tokens, heads, dim).
            k: (tokens, kv_heads, dim).
            v: (tokens, kv_heads, value_dim); none where values are the first numbers of the keys.
            math: what happens to the scores.
            last: it is the last layer.
            cut: of its queries, only those of `ends` are wanted.

        Returns:
            (tokens, heads, value_dim), or (ends, heads, value_dim)
        """


@dataclass(frozen=True, slots=True)
class StepContext:
    """Rope angles of the step's tokens, by rope, and its attention.

    Attributes:
        cut: nothing but the rows `attend.ends` is wanted of the last layer.
    """

    ropes: dict[Rope, CosSin]
    attend: Attend
    cut: bool = False
