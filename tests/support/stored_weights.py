"""Weights of quantized checkpoints, read by formats, against what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quire.config.options import ParallelOptions
from quire.engine.models.checkpoint.formats import formats_of
from quire.engine.models.checkpoint.formats.weight_format import NamedWeight, StoredWeight
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.integer_checkpoints import Tensors, Variant
from tests.support.toy_format import twin_of

MODULE = "model.layers.0.self_attn.q_proj"
TOKENS = 16


def packed(variant: Variant, size_out: int = 48, size_in: int = 96) -> tuple[NamedWeight, torch.Tensor]:
    """A weight as the format reads it, and what it stands for."""
    weight = torch.randn(size_out, size_in, generator=torch.Generator().manual_seed(1))
    tensors, values = variant.pack(weight)
    stored = {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}
    return read(variant.section, stored, variant.metadata and {f"{MODULE}.weight": variant.metadata(weight)}), values


def read(section: Any, stored: Tensors, metadata: dict[str, str] | None = None) -> NamedWeight:
    """The weight that some tensors make."""
    formats = formats_of(section)
    for weight_format in formats:
        weight_format.use_metadata(metadata or {})
    firsts = [name for name in stored if not any(weight_format.is_part(name, stored) for weight_format in formats)]
    weights = [formats[0].read(name, stored) for name in firsts]
    (weight,) = filter(None, weights)
    return weight


def check(weight: StoredWeight, values: torch.Tensor, variant: Variant) -> None:
    """Check what a weight, or a part of one, stands for."""
    dequantized = weight.dequantize(torch.float32)
    assert dequantized.shape == values.shape
    tolerance = 0 if variant.exact else 1e-6
    torch.testing.assert_close(dequantized, values, rtol=tolerance, atol=tolerance)


def check_tokens(folder: Path, parallel: ParallelOptions | None = None) -> None:
    """Check that a folder gives the tokens of its dequantized twin."""
    prompt = random_prompt(2, 12)
    engine = Engine(folder, parallel=parallel or ParallelOptions(), kv_cache_memory_bytes=8 << 20)
    try:
        tokens = engine.generate(prompt, greedy(TOKENS)).tokens
    finally:
        engine.core.close()
    assert tokens == Engine(twin_of(folder), kv_cache_memory_bytes=8 << 20).generate(prompt, greedy(TOKENS)).tokens
