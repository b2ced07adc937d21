"""Starts the engine of a model, with its tokenizer, chat template and sampling defaults."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from quire.app.logs import flush_logs, start_logging
from quire.app.models import ModelSource
from quire.config.commands import Serve
from quire.config.options import ChatOptions, EngineOptions, LogOptions, ModelOptions, ParallelOptions
from quire.engine.build.core_config import CoreConfig, with_room_for_pictures
from quire.engine.build.engine import serve_core
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.launch import CoreEntry, CoreHandle, ProcessCore, ThreadCore
from quire.engine.client.request_log import RequestLog
from quire.engine.client.step_observer import StepObserver
from quire.engine.client.transport import ClientChannel, flush_messages
from quire.engine.execution.devices.select import uses_gpu
from quire.engine.execution.memory import MemoryShare, free_memory
from quire.engine.models.config_reader import ConfigReader
from quire.engine.models.family import WithoutCache
from quire.engine.models.model_config import ModelConfig
from quire.multimodal.memory import MediaMemory
from quire.otlp.settings import TraceSettings
from quire.rendering.renderer import Renderer
from quire.rendering.tokenizer import Tokenizer
from quire.serving.defaults import read_defaults
from quire.serving.models import ModelParts, ServedModel, served_model

logger = logging.getLogger(__name__)
_STOP_TIMEOUT = 2.0  # seconds; part of the time that a shutdown may take after the drain
_FLUSH_SECONDS = 0.5  # for spans of the steps


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


@dataclass(frozen=True, slots=True)
class StepTraces:
    """How the steps of engines are traced.

    Attributes:
        settings: for engines in processes of their own.
        new_observer: watches the steps of an engine in a thread.
    """

    settings: TraceSettings
    new_observer: Callable[[], StepObserver]


async def start_engines(
    settings: Serve,
    sources: Sequence[ModelSource],
    configs: ConfigReader,
    traces: StepTraces | None = None,
) -> AsyncIterator[RunningEngine]:
    """Start an engine for each model; those on a GPU one after the other, so that each sees what others have taken.

    `traces`: how their steps are traced; None: they are not.

    Raises:
        ModelError: a model's config cannot be read.
        EngineDead: an engine before the last one could not be loaded.
    """
    if len(sources) < 2 or not uses_gpu(settings.device):
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
        info = await engine.client.ready()
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


def serve_core_in_process(config: CoreConfig, logs: LogOptions, traces: TraceSettings | None, address: str) -> None:
    """Body of a core's process. `traces`: where its steps are exported to; None: they are not traced."""
    start_logging(logs.log_level, logs.log_format)
    if traces is None:
        serve_core(config, address)
    else:
        from quire.tracing.start import start_traces  # noqa: PLC0415 imports OpenTelemetry

        running = start_traces(traces)
        serve_core(config, address, running.step_observer())
        running.export.close(_FLUSH_SECONDS)
    flush_messages()
    flush_logs()
    os._exit(0)  # all is closed; Python's own exit takes seconds with torch


class RunningEngine:
    """The engine core of a model, and its client."""

    def __init__(
        self,
        source: ModelSource,
        model_config: ModelConfig,
        settings: Serve,
        memory_share: MemoryShare | None,
        traces: StepTraces | None = None,
    ) -> None:
        """Start loading the model; `loaded` waits for it."""
        self._source = source
        self._settings = settings
        self._traces = traces
        self._tokenizer = Tokenizer.load(source.folder)
        options = EngineOptions.of(settings)
        if "max_num_batched_tokens" not in settings.model_fields_set:
            options = with_room_for_pictures(options, model_config)
        self._config = CoreConfig(
            folder=source.folder,
            model_config=model_config,
            model=ModelOptions.of(settings),
            engine=options,
            parallel=ParallelOptions.of(settings),
            memory_share=memory_share,
            start_process=partial(
                start_logging, "debug" if settings.log_level == "debug" else "error", settings.log_format
            ),
        )
        self._handle = self._new_handle()
        self.client = EngineClient(
            ClientChannel(self._handle.address),
            self._tokenizer.backend,
            capacity=settings.max_num_seqs + settings.max_num_queued_seqs,
            share=settings.max_client_share,
        )
        if settings.enable_log_requests:
            self.client.request_log = RequestLog(
                self._tokenizer.backend, settings.max_log_len, has_outputs=settings.enable_log_outputs
            )
        self._start()
        self._model: ServedModel | None = None

    async def loaded(self, media_memory: MediaMemory | None = None) -> ServedModel:
        """The model, once it has been loaded.

        Args:
            media_memory: the memory for media, which all models of a server share; None: the model has its own.

        Raises:
            EngineDead: it could not be loaded.
        """
        info = await self.client.ready()
        settings = self._settings
        folder = self._source.folder
        renderer = Renderer(
            folder,
            self._tokenizer,
            ChatOptions.of(settings),
            info.max_model_len,
            media_tokens=info.media_tokens,
            max_queued=settings.max_num_seqs + settings.max_num_queued_seqs,
            share=settings.max_client_share,
        )
        defaults = read_defaults(
            folder,
            self._tokenizer,
            settings.generation_config,
            settings.override_generation_config,
            settings.hf_overrides,
        )
        parts = ModelParts(
            names=self._source.names,
            root=self._source.root,
            client=self.client,
            renderer=renderer,
            info=info,
            defaults=defaults,
            priority_scheduling=settings.scheduling_policy == "priority",
        )
        self._model = served_model(parts, folder, settings, media_memory)
        return self._model

    def set_memory_share(self, share: MemoryShare) -> None:
        """Set what a core that is started later may take, when all other engines are built."""
        self._config = replace(self._config, memory_share=share)

    async def restart(self) -> None:
        """Start another core in place of one that has died, and wait until it is loaded.

        Raises:
            EngineDead: it could not be loaded.
        """
        await self._handle.join(_STOP_TIMEOUT)
        gc.unfreeze()
        gc.collect()  # of a core in a thread: its model and KV cache, before the next ones need their memory
        self._handle = self._new_handle()
        await self.client.reconnect(ClientChannel(self._handle.address))
        self._start()
        await self.client.ready()

    async def stop(self) -> None:
        """Stop the core, loaded or not, and wait until it has ended, but not for long."""
        if self._model is not None:
            await self._model.close()
        connected = await self.client.close()
        await self._handle.join(_STOP_TIMEOUT if connected else 0.0)

    def _new_handle(self) -> CoreHandle:
        return ProcessCore() if self._settings.engine_process else ThreadCore()

    def _start(self) -> None:
        traces = self._traces
        if self._settings.engine_process:
            logs, exported = LogOptions.of(self._settings), None if traces is None else traces.settings
            body: CoreEntry = partial(serve_core_in_process, self._config, logs, exported)
        else:
            body = partial(serve_core, self._config, observer=None if traces is None else traces.new_observer())
        self._handle.start(body, self.client.fail)
