"""What --attention-backend works with; checked before a model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import torch

from quire.engine.build.core_config import CoreConfig
from quire.engine.execution.attention.libraries import (
    LIBRARIES,
    MIN_CAPABILITY,
    AttentionLibrary,
    check_installed,
)
from quire.engine.execution.devices.device import Device
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.family import WithoutCache
from quire.engine.models.specs.decoder import Attention, DecoderSpec, GroupedQueryAttention

logger = logging.getLogger(__name__)


def with_attention_backend(config: CoreConfig, device: Device) -> CoreConfig:
    """The configuration with the attention backend of this model: `auto` where a library does not apply to its kind.

    One --attention-backend is for all models of a server, and may suit some of them only.

    Raises:
        UnsupportedModel: the device, the model or another option does not work with the configured backend; the
            message names it and what is accepted.
        UnavailableLibrary: the backend is a library that cannot be imported.
    """
    name = config.engine.attention_backend
    if name not in device.attention_backends:
        accepted = " and ".join(device.attention_backends)
        raise UnsupportedModel(
            f"--attention-backend {name} needs a GPU, but the device is {device.name}; accepted here: {accepted}"
        )
    library = LIBRARIES.get(name)
    if library is None:
        return config
    if reason := _no_effect(config):
        logger.warning("--attention-backend %s has no effect for %s: %s", name, config.folder.name, reason)
        return replace(config, engine=config.engine.model_copy(update={"attention_backend": "auto"}))
    for refusal in (*_device_refusals(device), *_model_refusals(config), *_option_refusals(library, config)):
        raise UnsupportedModel(f"--attention-backend {name} {refusal}; --attention-backend auto is accepted")
    check_installed(name)
    return config


def _no_effect(config: CoreConfig) -> str:
    """Why Quire's own kernels run a model of this kind; empty if they need not."""
    spec = config.model_config.spec
    if isinstance(spec, WithoutCache):
        return "it has no KV cache"
    if isinstance(spec, DecoderSpec) and spec.has_cross_attention:
        return "the library has no cross-attention"
    if config.model_config.facts.streaming is not None:
        return "audio arrives while it transcribes"
    return ""


def _device_refusals(device: Device) -> Iterator[str]:
    if device.torch_device.type == "cuda" and torch.cuda.get_device_capability(device.torch_device) < MIN_CAPABILITY:
        yield "needs a GPU of compute capability {}.{} or more".format(*MIN_CAPABILITY)


def _model_refusals(config: CoreConfig) -> Iterator[str]:
    """Why it does not work with the implementation of a model."""
    spec, pictures = config.model_config.spec, config.model_config.facts.pictures
    if spec is None:
        yield "works with Quire's implementation of a model only, not with --model-impl transformers"
    if isinstance(spec, DecoderSpec) and spec.prefix_lm:
        yield "does not support prompts whose tokens attend to each other in both directions"
    if pictures is not None and pictures.info.bidirectional:
        yield (
            "does not support pictures whose tokens attend to each other in both directions; --language-model-only "
            "loads the model without them"
        )


def _option_refusals(library: AttentionLibrary, config: CoreConfig) -> Iterator[str]:
    """Why it does not work with the options of the KV cache, or with the layers of a decoder."""
    options, spec = config.engine, config.model_config.spec
    if options.kv_cache_dtype in ("int8", "fp8"):
        yield f"needs --kv-cache-dtype auto, not {options.kv_cache_dtype}"
    if library.block_sizes is not None and options.block_size not in library.block_sizes:
        sizes = " or ".join(map(str, library.block_sizes))
        yield f"needs --block-size {sizes}, not {options.block_size}"
    if isinstance(spec, DecoderSpec):
        for layer in spec.layers:
            yield from _layer_refusals(library, layer.attn)


def _layer_refusals(library: AttentionLibrary, attn: Attention) -> Iterator[str]:
    if not isinstance(attn, GroupedQueryAttention):
        yield f"does not support {attn.description}"
        return
    if attn.sinks:
        yield "does not support attention sinks"
    if attn.alibi is not None and not library.alibi:
        yield "does not support ALiBi biases"
    if attn.head_dim not in library.head_dims:
        yield f"needs heads of {library.head_sizes} elements; those of the model have {attn.head_dim}"
