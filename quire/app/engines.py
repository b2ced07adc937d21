"""Starts the engine of a model, with its tokenizer, chat template and sampling defaults."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from quire.app.cores import CoreFactory, SingleCore
from quire.app.logs import start_logging
from quire.app.models import ModelSource
from quire.app.running_models import NewObserver, RunningModel, StepTraces, engine_options, front_end_of
from quire.config.commands import Serve
from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.build.core_config import CoreConfig
from quire.engine.client.engine import Engine
from quire.engine.client.errors import EngineDead
from quire.engine.client.launch import PreparedProcess
from quire.engine.client.model_info import ModelInfo
from quire.engine.client.replicas.scaling import Scaling
from quire.engine.client.slots import Slots
from quire.engine.execution.memory import MemoryShare, free_memory
from quire.engine.models.config_reader import ConfigReader
from quire.engine.models.family import WithoutCache
from quire.engine.models.model_config import ModelConfig
from quire.multimodal.memory import MediaMemory
from quire.rendering.tokenizer import Tokenizer
from quire.serving.models import ServedModel, ServerState

if TYPE_CHECKING:  # it imports torch
    from quire.app.replicas import Replicas


def weight_bytes(source: ModelSource) -> int:
    """Size of a model's weights in its files."""
    files = list(source.folder.glob("*.safetensors")) or source.folder.glob("*.gguf")
    return sum(file.stat().st_size for file in files if file.exists())


def host_share(sources: Sequence[ModelSource]) -> MemoryShare | None:
    """Return what each of several engines may take of the host's memory; None for a single engine.

    It is divided before they load: the pages of a KV cache count as free memory until they are used, so that an
    engine could not see what others have reserved.
    """
    if len(sources) < 2:
        return None
    return MemoryShare(max(0, free_memory() - sum(map(weight_bytes, sources))) // len(sources))


async def start_engines(
    settings: Serve,
    sources: Sequence[ModelSource],
    configs: ConfigReader,
    traces: StepTraces | None = None,
    *,
    prepared: PreparedProcess | None = None,
) -> AsyncIterator[RunningEngine]:
    """Start an engine for each model; those on a GPU one after the other, so that each sees what others have taken.

    `traces`: how their steps are traced; None: they are not. `prepared`: the process of the engine, if there is one
    model.

    Raises:
        ModelError: a model's config cannot be read.
        EngineDead: an engine before the last one could not be loaded.
    """
    if len(sources) == 1:
        yield RunningEngine(sources[0], configs.next(), settings, None, traces, prepared)
        return
    from quire.engine.execution.devices.select import uses_gpu  # noqa: PLC0415 imports torch

    if not uses_gpu(settings.device):
        share = host_share(sources)
        for source in sources:
            yield RunningEngine(source, configs.next(), settings, share, traces)
        return
    model_configs = [configs.next() for _ in sources]
    steps: list[tuple[RunningEngine, int]] = []  # bytes of their intermediate results
    for index, (source, config) in enumerate(zip(sources, model_configs, strict=True)):
        share = gpu_share(sources[index:], model_configs[index:], sum(nbytes for _, nbytes in steps))
        engine = RunningEngine(source, config, settings, share, traces)
        yield engine
        info = await engine.ready()
        # The memory of other processes is seen as it is.
        steps.append((engine, 0 if settings.engine_process else info.step_bytes))
    for engine, step in steps:
        engine.set_memory_share(MemoryShare(0, steps=sum(nbytes for _, nbytes in steps) - step))


def gpu_share(sources: Sequence[ModelSource], configs: Sequence[ModelConfig], steps: int) -> MemoryShare:
    """Return what the engine of the first of these models may take of a GPU that it shares with others.

    Args:
        sources: it, and those that load after it.
        configs: their configs.
        steps: bytes of intermediate results of the engines that are loaded.
    """
    with_cache = sum(not isinstance(config.spec, WithoutCache) for config in configs)
    return MemoryShare(0, max(1, with_cache), sum(map(weight_bytes, sources[1:])), steps)


def core_config(source: ModelSource, model_config: ModelConfig, settings: Serve) -> CoreConfig:
    """Return the configuration of a model's cores."""
    return CoreConfig(
        folder=source.folder,
        model_config=model_config,
        model=ModelOptions.of(settings),
        engine=engine_options(settings, model_config),
        parallel=ParallelOptions.of(settings),
        start_process=partial(
            start_logging, "debug" if settings.log_level == "debug" else "error", settings.log_format
        ),
    )


class RunningEngine(RunningModel):
    """A model and its engine, of one core or of replicas.

    Attributes:
        client: the engine.
    """

    def __init__(
        self,
        source: ModelSource,
        model_config: ModelConfig,
        settings: Serve,
        memory_share: MemoryShare | None,
        traces: StepTraces | None = None,
        prepared: PreparedProcess | None = None,
    ) -> None:
        """Start loading the model; `loaded` waits for it.

        Raises:
            ModelError: there are not enough GPUs for its replicas.
        """
        self._source = source
        self._settings = settings
        self._tokenizer = Tokenizer.load(source.folder)
        factory = CoreFactory(
            settings,
            core_config(source, model_config, settings),
            self._tokenizer,
            Slots(settings.max_num_seqs + settings.max_num_queued_seqs, settings.max_client_share),
            traces,
            prepared,
        )
        self._model: ServedModel | None = None
        self._cores: SingleCore | Replicas
        self._scaling: Scaling | None = None
        if settings.has_replicas:
            from quire.app.replicas import Replicas  # noqa: PLC0415 imports torch

            self._cores = self._scaling = Replicas(factory, weight_bytes(source))
        else:
            self._cores = SingleCore(factory, memory_share)
        self.client: Engine = self._cores.engine

    async def ready(self) -> ModelInfo:
        """Wait until all cores are loaded.

        Raises:
            EngineDead: one could not be loaded; it names the model, which may be one of several.
        """
        try:
            return await self._cores.ready()
        except EngineDead as error:
            raise EngineDead(f"{self._source.names[0]}: {error}") from error

    async def loaded(self, media_memory: MediaMemory | None = None) -> ServedModel:
        """See `RunningModel`."""
        info = await self.ready()
        self._model = front_end_of(
            self._source, self._settings, self._tokenizer, self.client, info, self._scaling, media_memory
        )
        return self._model

    def observe(self, new_observer: NewObserver, number: int) -> None:
        """See `RunningModel`."""
        self._cores.observe(new_observer, number)

    async def watch(self, state: ServerState, give_up: Callable[[str], None]) -> None:
        """See `RunningModel`."""
        await self._cores.watch(state, give_up)

    def set_memory_share(self, share: MemoryShare) -> None:
        """Set what a core that is started later may take, when all other engines are built."""
        self._cores.set_memory_share(share)

    async def restart(self) -> None:
        """Start another core in place of one that has died; see `SingleCore.restart`."""
        assert isinstance(self._cores, SingleCore)
        await self._cores.restart()

    async def stop(self) -> None:
        """See `RunningModel`."""
        if self._model is not None:
            await self._model.close()
        await self._cores.stop()
