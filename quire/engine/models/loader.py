"""Loads a model folder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from quire.config.options import ModelOptions
from quire.engine.models.archs.rope import max_positions
from quire.engine.models.checkpoint import Checkpoint, Progress
from quire.engine.models.decoder import Decoder, LanguageModel
from quire.engine.models.errors import UnsupportedModel, WeightMismatch
from quire.engine.models.layers.linear import Packable
from quire.engine.models.model_config import ModelConfig, read_config
from quire.engine.models.spec import ClampedSwigluExperts, DecoderSpec, MoE
from quire.engine.models.weights import EMBEDDING, HEAD, WeightFiller, allocate, check_unpacked
from quire.kernels.activation import ACTIVATIONS

logger = logging.getLogger(__name__)
ProgressBar = Callable[[int], AbstractContextManager[Progress]]  # given the bytes to come
_MAX_EXPANSION = 16  # of weights when they are unpacked: from four bits with scales to float32 it is 8


class LoadTarget(Protocol):
    """What loading needs to know of a device.

    Attributes:
        torch_device: where parameters are allocated.
        quantizable_dtypes: dtypes whose weights the device can quantize while they load.
        computes_bfloat16: bfloat16 arithmetic is faster than float32.
    """

    torch_device: torch.device
    quantizable_dtypes: frozenset[torch.dtype]
    computes_bfloat16: bool


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and the facts that the engine needs of it."""

    model: LanguageModel
    architecture: str
    implementation: Literal["quire", "transformers"]
    dtype: torch.dtype
    vocab_size: int
    context_len: int
    weight_bytes: int


def load_model(
    folder: Path, config: ModelConfig, options: ModelOptions, target: LoadTarget, bar: ProgressBar
) -> LoadedModel:
    """Load the model in a folder, whose config was read.

    Raises:
        ModelError: the folder, the architecture or the weights are not supported; the message says why.
    """
    quantize = options.quantization != "none"
    if quantize and not target.quantizable_dtypes:
        raise UnsupportedModel("--quantization needs Quire's compiled kernels, which are not in use")
    with Checkpoint(folder, config.fp8) as checkpoint:
        dtype = _dtype(options, checkpoint, target)
        if quantize and dtype not in target.quantizable_dtypes:
            raise UnsupportedModel("--quantization works with --dtype bfloat16 or float32")
        total = checkpoint.total_bytes
        if config.spec is not None:
            return _load_decoder(config, config.spec, options, checkpoint, dtype, target, bar)
        for name in checkpoint.names():
            if name.endswith("weight"):  # masks may be integers
                check_unpacked(name, checkpoint.dtype_of(name))
    if quantize:
        raise UnsupportedModel(
            f"--quantization works with Quire's own decoder only, which does not support {config.model_type}"
        )
    from quire.engine.models.fallback import load_fallback  # noqa: PLC0415 a second of imports, for few models
    from quire.engine.models.fallback_checks import check_class  # noqa: PLC0415 like it

    hf_config = read_config(folder, options.hf_overrides)
    check_class(hf_config)
    context_len = _context_len(options, _max_positions(hf_config.get_text_config()))
    with bar(total) as progress:
        model = load_fallback(folder, hf_config, dtype)
        progress(total)
    vocab = hf_config.get_text_config().vocab_size
    return LoadedModel(model, hf_config.model_type, "transformers", dtype, vocab, context_len, total)


def _load_decoder(
    config: ModelConfig,
    spec: DecoderSpec,
    options: ModelOptions,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    target: LoadTarget,
    bar: ProgressBar,
) -> LoadedModel:
    context_len = _context_len(options, spec.max_positions)
    _check_acts(spec)
    _check_layers(len(spec.layers), checkpoint)
    if spec.tied and {EMBEDDING, HEAD} <= checkpoint.names() and not checkpoint.equal(EMBEDDING, HEAD):
        logger.warning("the config says that the head shares the embedding's weight, but the checkpoint's differ")
        spec = replace(spec, tied=False)
    with torch.device("meta"):
        model = Decoder(spec)
    _check_bytes(model, dtype, checkpoint)
    allocate(model, dtype, target.torch_device)
    filler = WeightFiller(
        model,
        options.quantization,
        extra_layers=config.extra_layers,
        embeds_with_head=EMBEDDING not in checkpoint.names(),
    )
    with bar(checkpoint.total_bytes) as progress:
        filler.fill(checkpoint.tensors(dtype, progress))
    return LoadedModel(model.eval(), config.model_type, "quire", dtype, spec.vocab, context_len, _bytes(model))


def _check_acts(spec: DecoderSpec) -> None:
    ffns = [layer.ffn.expert if isinstance(layer.ffn, MoE) else layer.ffn for layer in spec.layers]
    for act in (part.act for part in ffns if not isinstance(part, ClampedSwigluExperts)):
        if act not in ACTIVATIONS:
            raise UnsupportedModel(f"activation {act!r} is not supported; supported are {', '.join(ACTIVATIONS)}")


def _check_layers(layers: int, checkpoint: Checkpoint) -> None:
    """Raise WeightMismatch for a config with so many layers that building them would take long, for nothing."""
    if layers > checkpoint.num_tensors:
        raise WeightMismatch(
            f"config.json has {layers} layers, but the checkpoint has {checkpoint.num_tensors} tensors"
        )


def _check_bytes(model: Decoder, dtype: torch.dtype, checkpoint: Checkpoint) -> None:
    """Raise WeightMismatch for a model that is too large for its checkpoint, before memory is allocated for it."""
    needed = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    if needed > _MAX_EXPANSION * checkpoint.total_bytes:
        raise WeightMismatch(
            f"config.json describes {needed} bytes of weights, but the checkpoint has {checkpoint.total_bytes}"
        )


def _bytes(model: Decoder) -> int:
    panels = sum(layer.packed_bytes for layer in model.modules() if isinstance(layer, Packable))
    return panels + sum(parameter.nbytes for parameter in model.parameters())


def _dtype(options: ModelOptions, checkpoint: Checkpoint, target: LoadTarget) -> torch.dtype:
    widened = options.dtype == "float16" and target.torch_device.type == "cpu"
    if options.dtype != "auto" and not widened:
        dtype: torch.dtype = getattr(torch, options.dtype)
        return dtype
    stored = checkpoint.dtype()
    # CPUs are a hundred times slower in float16, and half as fast in float32.
    narrow = stored == torch.float16 or (stored == torch.float32 and target.computes_bfloat16)
    fast = torch.bfloat16 if narrow else stored
    if widened:
        logger.warning("--dtype float16 is slow on CPUs: %s is used instead", str(fast).removeprefix("torch."))
    return fast


def _context_len(options: ModelOptions, trained: int) -> int:
    wanted = options.max_model_len
    if wanted is not None and wanted > trained:
        raise UnsupportedModel(f"--max-model-len is {wanted}, but the model supports at most {trained} tokens")
    return wanted or trained


def _max_positions(config: Any) -> int:
    """Context length of a config that may say it in one of several ways."""
    if getattr(config, "rope_parameters", None):
        return max_positions(config)
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"):
        if isinstance(value := getattr(config, name, None), int):
            return value
    raise UnsupportedModel("the model's config.json gives no maximum context length (such as max_position_embeddings)")
