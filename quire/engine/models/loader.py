"""From a model folder to a model that runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from quire.config.options import ModelOptions
from quire.engine.models.archs.rope import max_positions
from quire.engine.models.blueprint import Blueprint, read_config
from quire.engine.models.checkpoint import Checkpoint, Progress
from quire.engine.models.decoder import CausalLM, Decoder
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.layers.linear import Packable
from quire.engine.models.spec import DecoderSpec
from quire.engine.models.weights import WeightFiller, allocate
from quire.kernels import native

ProgressBar = Callable[[int], AbstractContextManager[Progress]]  # given the bytes to come


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what is known of it."""

    model: CausalLM
    architecture: str
    implementation: Literal["quire", "transformers"]
    dtype: torch.dtype
    vocab_size: int
    context_len: int
    weight_bytes: int


def load_model(folder: Path, blueprint: Blueprint, options: ModelOptions, bar: ProgressBar) -> LoadedModel:
    """Load the model in a folder, whose config was read.

    Raises:
        ModelError: the folder, the architecture or the weights will not do; the text says what.
    """
    if options.quantization != "none" and native.instructions() is None:
        raise UnsupportedModel("--quantization needs Quire's compiled kernels, which this installation lacks")
    with Checkpoint(folder) as checkpoint:
        dtype = _dtype(options, checkpoint)
        if options.quantization != "none" and dtype not in native.DTYPES:
            raise UnsupportedModel("--quantization works with --dtype bfloat16 or float32")
        total = checkpoint.total_bytes
        if blueprint.spec is not None:
            return _load_decoder(blueprint, blueprint.spec, options, checkpoint, dtype, bar)
    if options.quantization != "none":
        raise UnsupportedModel(
            f"--quantization works with Quire's decoder only, which does not run {blueprint.model_type}"
        )
    from quire.engine.models.fallback import load_fallback  # noqa: PLC0415 a second of imports, for few models

    config = read_config(folder)
    context_len = _context_len(options, _promised_positions(config.get_text_config()))
    with bar(total) as progress:
        model = load_fallback(folder, config, dtype)
        progress(total)
    vocab = config.get_text_config().vocab_size
    return LoadedModel(model, config.model_type, "transformers", dtype, vocab, context_len, total)


def _load_decoder(
    blueprint: Blueprint,
    spec: DecoderSpec,
    options: ModelOptions,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    bar: ProgressBar,
) -> LoadedModel:
    context_len = _context_len(options, spec.max_positions)
    with torch.device("meta"):
        model = Decoder(spec)
    allocate(model, dtype)
    filler = WeightFiller(model, options.quantization, extra_layers=blueprint.extra_layers)
    with bar(checkpoint.total_bytes) as progress:
        filler.fill(checkpoint.tensors(dtype, progress))
    return LoadedModel(model.eval(), blueprint.model_type, "quire", dtype, spec.vocab, context_len, _bytes(model))


def _bytes(model: Decoder) -> int:
    panels = sum(layer.packed_bytes for layer in model.modules() if isinstance(layer, Packable))
    return panels + sum(parameter.nbytes for parameter in model.parameters())


def _dtype(options: ModelOptions, checkpoint: Checkpoint) -> torch.dtype:
    if options.dtype != "auto":
        dtype: torch.dtype = getattr(torch, options.dtype)
        return dtype
    stored = checkpoint.dtype()
    if stored == torch.float16 or (stored == torch.float32 and native.has_bfloat16()):
        return torch.bfloat16  # CPUs are ten times slower in float16, and half as fast in float32
    return stored


def _context_len(options: ModelOptions, promised: int) -> int:
    wanted = options.max_model_len
    if wanted is not None and wanted > promised:
        raise UnsupportedModel(f"--max-model-len is {wanted}, but the model was made for {promised} tokens at most")
    return wanted or promised


def _promised_positions(config: Any) -> int:
    """Context length of a config that may say it in one of several ways."""
    if getattr(config, "rope_parameters", None):
        return max_positions(config)
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"):
        if isinstance(value := getattr(config, name, None), int):
            return value
    raise UnsupportedModel("its config does not say how long a context may be")
