"""Sequences in paged caches, for tests of attention kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels.int8_pages import scale_bytes
from quire.kernels.paged_attention import AttentionParams
from quire.kernels.write_pages import write_reference

PAGES = ("plain", "int8", "float8")
HEAD_SCALES = "float8-heads"  # pages of float8 whose heads have scales of their own
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
KEY_SCALE, VALUE_SCALE = 0.25, 0.5  # of float8 pages


@dataclass(frozen=True)
class Cached:
    """Pages with the keys and values of sequences; all else in them is NaN, also the blocks of ends of tables."""

    keys: Tensor
    values: Tensor
    tables: Tensor
    lengths: Tensor

    @property
    def exact(self) -> tuple[Tensor, Tensor]:
        """The pages for references that compute in float32."""
        plain = self.keys.dtype not in (torch.int8, torch.float8_e4m3fn)
        return (self.keys.float(), self.values.float()) if plain else (self.keys, self.values)


def cache(
    lengths: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    pages: str = "plain",
    kv_heads: int = 2,
    dim: int = 32,
    value_dim: int = 32,
    block_size: int = 16,
    latent: bool = False,
) -> Cached:
    """Sequences of random keys and values. latent: values are the first `value_dim` elements of keys."""
    widths = [-(-length // block_size) for length in lengths]
    blocks = 1 + sum(widths)
    float8 = dict.fromkeys(("float8", HEAD_SCALES), torch.float8_e4m3fn)
    page_dtype = {"plain": dtype, "int8": torch.int8, **float8}[pages]
    head_scales = scales_of_heads(kv_heads) if pages == HEAD_SCALES else None
    extra, value_extra = (scale_bytes(size) if pages == "int8" else 0 for size in (dim, value_dim))
    keys, values = (
        torch.full((blocks, kv_heads, block_size, size), torch.nan).to(page_dtype).transpose(0, 1)
        for size in (dim + extra, value_dim + value_extra)
    )
    if pages == "int8":
        for rows, size in ((keys, extra), (values, value_extra)):
            rows[..., :size] = torch.full((size // 4,), torch.nan).view(torch.int8)
    values_in_keys = slice(extra - value_extra, extra + value_dim)
    if latent:
        values = keys[..., values_in_keys]
    order = (torch.randperm(blocks - 1) + 1).split(widths) if sum(widths) else [torch.empty(0)] * len(lengths)
    tables = torch.zeros(len(lengths), max(1, *widths), dtype=torch.int32)
    for table, entries, length in zip(tables, order, lengths, strict=True):
        table[: len(entries)] = entries
        position = torch.arange(length)
        slots = table[position // block_size].long() * block_size + position % block_size
        k, v = (torch.randn(length, kv_heads, size).to(dtype) for size in (dim, value_dim))
        write_reference(keys, values, slots, k, None if latent else v, (KEY_SCALE, VALUE_SCALE), head_scales)
    keys = keys.to(device)
    values = keys[..., values_in_keys] if latent else values.to(device)  # a view there, too
    return Cached(keys, values, tables.to(device), torch.tensor(lengths, device=device))


def params(heads: int, which: str, device: torch.device) -> dict[str, Any]:
    """Arguments of a kernel: the features that `which` names, such as "window+sinks"."""
    features = {
        "window": 40,
        "softcap": 3.0,
        "sinks": torch.randn(heads, device=device),
        "alibi": torch.rand(heads, device=device),
    }
    return {"scale": 0.3, **{name: features[name] for name in which.split("+") if name}}


def scales_of_heads(kv_heads: int) -> Tensor:
    """Those of keys and of values: (2, kv_heads)."""
    return (torch.arange(2 * kv_heads) % 5 * 0.3 + 0.5).view(2, kv_heads)


def scales(pages: str, arguments: dict[str, Any], kv_heads: int = 2) -> tuple[dict[str, Any], AttentionParams]:
    """The arguments of a kernel and the params of its reference for these pages."""
    if pages not in ("float8", HEAD_SCALES):
        return arguments, AttentionParams(**arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    of_heads: dict[str, Any] = {"head_scales": scales_of_heads(kv_heads).to(device)} if pages == HEAD_SCALES else {}
    scaled = {**arguments, "scale": arguments["scale"] * KEY_SCALE, "value_scale": VALUE_SCALE}
    return {**scaled, **of_heads}, AttentionParams(
        **arguments, key_scale=KEY_SCALE, value_scale=VALUE_SCALE, **of_heads
    )
