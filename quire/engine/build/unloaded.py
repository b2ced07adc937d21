"""Facts about a model whose weights are not read, for a front end without an engine."""

from __future__ import annotations

from quire.config.options import EngineOptions, ModelOptions, ParallelOptions
from quire.engine.client.model_info import ModelInfo
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.model_config import ModelConfig
from quire.engine.models.sharding.shard import with_pictures_of_stages


def info_of_unloaded(
    config: ModelConfig, model: ModelOptions, engine: EngineOptions, parallel: ParallelOptions
) -> ModelInfo:
    """Return what an engine with these settings would tell of the model, but for what only it knows.

    It has no device, dtype, weights and cache. Its context is that of an engine whose KV cache has room for it, and an
    item of a picture may be as long.

    Raises:
        UnsupportedModel: the model has no such context, or how long it is is known only once it is loaded.
    """
    if config.spec is None and config.facts.pooler is not None and model.max_model_len is None:
        raise UnsupportedModel(
            "transformers runs this model, whose longest input is known only once it is loaded: set --max-model-len to "
            "what its server has"
        )
    config = with_pictures_of_stages(config, parallel.pipeline_parallel_size)
    step = engine.max_num_batched_tokens
    context_len = config.within_step(config.context_len(model.max_model_len), model.max_model_len, step)
    return ModelInfo(
        architecture=config.model_type,
        implementation=config.implementation,
        device="",
        dtype="",
        vocab_size=config.sizes.vocab,
        max_model_len=context_len,
        num_blocks=0,
        block_size=engine.block_size,
        weight_bytes=0,
        cache_bytes=0,
        kind=config.kind(context_len, step),
    )
