"""Attention to keys and values that an earlier layer has computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire.engine.models.specs.decoder import Attention
from quire.engine.models.specs.rope import Rope


@dataclass(frozen=True, kw_only=True)
class SharedKeysAttention(Attention):
    """Attention whose keys and values are those of another layer; it keeps nothing of a sequence itself.

    Attributes:
        source: index of that layer, which is an earlier one with as many heads of keys, of the same size.
        qk_norm: each head of queries is normalized.
        window, is_causal: see `GroupedQueryAttention`.
    """

    description: ClassVar = "attention to keys of an earlier layer"
    positive: ClassVar = ("heads", "kv_heads", "head_dim", "scale")

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    source: int
    qk_norm: bool = False
    window: int | None = None
    q_bias: bool = False
    out_bias: bool = False
    is_causal: bool = False

    @property
    def cache(self) -> None:
        """Nothing."""
