"""A model in this process, behind the same code as the endpoints."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray

from quire.api.pooling.prepare import embed_params, prefix_of, text_group, truncation_of
from quire.api.pooling.run import PoolingContext, run_pooling
from quire.app.embed.embedders import Embedder, TextRefused, new_id
from quire.app.engines import RunningEngine
from quire.app.models import Lookup, resolve_models
from quire.app.openai_client import ServerError
from quire.config.command import ConfigError
from quire.config.commands import Embed, Serve
from quire.config.options import ModelOptions
from quire.engine.client.errors import EngineDead, EngineError
from quire.engine.models.config.pooling import PoolingOptions
from quire.engine.models.errors import ModelError
from quire.engine.models.model_config import read_model_config
from quire.multimodal.errors import ModelFileError, PromptError
from quire.protocol.errors import ApiError, as_api_error
from quire.serving.models import PoolingModel
from quire.serving.result_memory import ResultMemory
from quire.workers.errors import WorkerError

_BUNDLED = "quire-nano-embed"
_CLIENT_ERROR = 400


class LocalEmbedder:
    """Send batches to the engine of a model."""

    def __init__(self, model: PoolingModel, settings: Embed) -> None:
        self._model = model
        self._truncation = truncation_of(model, -1 if settings.truncate else None, None, embeds=True)
        self._params = embed_params(model, "embed", settings.dimensions, None)
        self._prefix = prefix_of(model, settings.prompt_name, None, None)

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        results = ResultMemory().reservation("")  # no other request needs memory
        context = PoolingContext(id=new_id(), model=self._model, results=results)
        group = text_group(self._model, texts, self._params, self._truncation, "input", prefix=self._prefix)
        try:
            with self._model.client.slots(1):
                pooled = await run_pooling(context, group)
        except (ApiError, EngineError, PromptError, WorkerError) as error:
            refusal = error if isinstance(error, ApiError) else as_api_error(error)
            if refusal.status == _CLIENT_ERROR:
                raise TextRefused(refusal.message, refusal.param) from error
            raise ServerError(refusal.message) from error
        return np.stack(pooled.arrays)


@asynccontextmanager
async def local_embedder(settings: Embed) -> AsyncIterator[Embedder]:
    """Load a model, and stop its engine at the end.

    Raises:
        ConfigError: the model cannot be found, or --serve-args are not valid.
        ServerError: it cannot be loaded, or does not embed, or has no such prompt or dimensions.
    """
    try:
        flags = shlex.split(settings.serve_args)
    except ValueError as error:
        raise ConfigError(f"quire embed: --serve-args expects flags, not {settings.serve_args!r}: {error}") from error
    serve = Serve.parse([settings.model_name or _BUNDLED, *flags])
    source = resolve_models(serve.model, serve.served_model_name, Lookup.of(ModelOptions.of(serve)))[0]
    pooling = PoolingOptions(serve.task, serve.convert, serve.pooler_config)
    try:
        config = read_model_config(
            source.folder, serve.model_impl, serve.hf_overrides, pooling, language_model_only=serve.language_model_only
        )
        engine = RunningEngine(source, config, serve, None)
    except (ModelError, ModelFileError) as error:
        raise ServerError(str(error)) from error
    try:
        model = await engine.loaded()
        if not isinstance(model, PoolingModel) or "embed" not in model.tasks:
            raise ServerError(f"{source.argument} does not embed; its tasks are {', '.join(model.tasks)}")
        yield LocalEmbedder(model, settings)
    except (ApiError, EngineDead, ModelFileError, PromptError) as error:
        raise ServerError(str(error)) from error
    finally:
        await engine.stop()
