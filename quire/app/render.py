"""`quire render`: serve what turns requests into tokens, for models whose weights are not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from quire.app.models import ModelSource
from quire.app.running_models import NewObserver, RunningModel, StepTraces, engine_options, front_end_of
from quire.app.serve import begin, run_server
from quire.config.commands import Render, Serve
from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.build.unloaded import info_of_unloaded
from quire.engine.client.absent import AbsentEngine
from quire.engine.client.slots import Slots
from quire.engine.models.config_reader import ConfigReader
from quire.engine.models.model_config import ModelConfig
from quire.multimodal.memory import MediaMemory
from quire.rendering.tokenizer import Tokenizer
from quire.serving.models import ServedModel, ServerState


def run(settings: Render, configs: ConfigReader | None = None) -> int:
    """Serve until a signal arrives; returns the exit status. `configs`: a reader that has been started."""

    async def start(
        sources: Sequence[ModelSource], reader: ConfigReader, _: StepTraces | None
    ) -> AsyncIterator[RunningModel]:
        for source in sources:
            yield RenderedModel(source, reader.next(), settings)

    begin(settings)
    return run_server(settings, configs, lambda: start)


class RenderedModel(RunningModel):
    """A model whose requests are rendered, and not run."""

    def __init__(self, source: ModelSource, config: ModelConfig, settings: Serve) -> None:
        """Read its tokenizer.

        Raises:
            ModelFileError: it cannot be read.
        """
        self._source = source
        self._config = config
        self._settings = settings
        self._tokenizer = Tokenizer.load(source.folder)
        capacity = (settings.max_num_seqs + settings.max_num_queued_seqs) * settings.replicas
        self._engine = AbsentEngine(Slots(capacity, settings.max_client_share))
        self._model: ServedModel | None = None

    async def loaded(self, media_memory: MediaMemory | None = None) -> ServedModel:
        """See `RunningModel`. Nothing is loaded.

        Raises:
            UnsupportedModel: a setting does not fit the model.
            ModelFileError: a file of the model cannot be used.
        """
        settings = self._settings
        engine = engine_options(settings, self._config)
        info = info_of_unloaded(self._config, ModelOptions.of(settings), engine, ParallelOptions.of(settings))
        self._model = front_end_of(
            self._source, settings, self._tokenizer, self._engine, info, media_memory=media_memory
        )
        return self._model

    def observe(self, new_observer: NewObserver, number: int) -> None:
        """Have the requests observed, as those of the only core."""
        self._engine.observers.add(new_observer(number))

    async def watch(self, state: ServerState, give_up: Callable[[str], None]) -> None:
        """Wait: nothing dies here."""
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Stop what prepares requests."""
        if self._model is not None:
            await self._model.close()
