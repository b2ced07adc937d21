"""Serves models over HTTP until a signal arrives."""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop
from starlette.types import ASGIApp

from quire.api.http.keys import KeyRing
from quire.api.mcp.servers import ToolServers
from quire.api.responses.errors import StoreFailed
from quire.api.responses.service import ResponseService
from quire.api.responses.store import ResponseStore
from quire.app.exits import end_process
from quire.app.factory import create_app, create_routes
from quire.app.front_end import FrontEnd
from quire.app.rate_limits import TokenCounter
from quire.app.reload import WatchedFiles
from quire.app.running_models import RunningModel, StartModels, StepTraces
from quire.app.schemas import make_schemas
from quire.app.server import Server
from quire.app.siblings import Siblings, open_siblings
from quire.app.stats_log import StatsLog
from quire.app.tls import Tls, TlsError
from quire.config.commands import Render, Serve
from quire.config.key_file import KeyFileError
from quire.config.options import (
    AudioOptions,
    EngineOptions,
    LimitOptions,
    LogOptions,
    MediaOptions,
    MetricsOptions,
    RealtimeOptions,
    ServerOptions,
    TlsOptions,
    VideoOptions,
)
from quire.config.types import urls_by_label
from quire.engine.client.errors import EngineDead
from quire.engine.models.errors import ModelError
from quire.metrics.exposition import Exposition
from quire.metrics.model_metrics import ModelMetrics
from quire.metrics.prometheus import Metrics
from quire.multimodal.documents import DocumentReader
from quire.multimodal.errors import ModelFileError, PromptError
from quire.multimodal.memory import MediaMemory
from quire.multimodal.sources import MediaSources
from quire.otlp.settings import OtlpSettingsError, metric_settings, trace_settings
from quire.realtime.secrets import ClientSecrets
from quire.realtime.sessions import Sessions
from quire.realtime.transcribers import transcriber_factory
from quire.serving.models import GeneratingModel, ServedModel, ServerState
from quire.serving.result_memory import LARGEST_RESULTS, ResultMemory

if TYPE_CHECKING:  # it imports OpenTelemetry
    from quire.tracing.start import RunningTraces

logger = logging.getLogger("quire")
_QUIET_SECONDS, _LONGEST_WAIT = 1.0, 60.0  # without requests; until helpers start although there are some
_FLUSH_SECONDS = 0.7  # for spans that wait at the end; part of the time that a shutdown may take after the drain


def serve(settings: Serve, start: StartModels, sockets: list[socket.socket], front_end: FrontEnd | None = None) -> int:
    """Serve the models, then end the process with its exit status. Returns the status if it did not get to serve.

    Args:
        settings: settings of the command.
        start: starts the models.
        sockets: sockets to listen on.
        front_end: this process is one of several; None: it is the only one.
    """
    try:
        status: int = uvloop.run(_serve(settings, start, sockets, front_end))
        if settings.uds is not None:
            settings.uds.unlink(missing_ok=True)
        end_process(status)  # all is closed; Python's own exit takes seconds with torch, and waits for busy threads
    except (
        *(EngineDead, KeyFileError, ModelError, ModelFileError, OtlpSettingsError),
        *(PromptError, StoreFailed, TlsError),
    ) as error:
        if front_end is None or front_end.index == 0 or not isinstance(error, EngineDead):  # which all others say
            logger.error("cannot serve: %s", error)
    return 1


async def _serve(settings: Serve, start: StartModels, sockets: list[socket.socket], front_end: FrontEnd | None) -> int:
    if front_end is not None:
        front_end.listen()
    async with open_application(settings, start, front_end) as application:
        tls = None if settings.ssl_certfile is None else Tls(TlsOptions.of(settings))
        watched = list(_watched_files(settings, tls, application.keys))
        server = Server(
            application.asgi,
            application.state,
            application.responses,
            settings,
            application.sessions,
            tls,
            [files.reload for files, _ in watched],
            front_end,
        )
        if front_end is not None:
            front_end.on_signal = server.handle_exit
        gc.freeze()  # a full collection would search all modules, for 150 ms in which the event loop waits
        watching = [files.watch() for files, regularly in watched if regularly]
        async with application.running(server.stop_failed, watching):
            await server.serve(sockets)
        return 1 if server.failed or not server.started else 0


@dataclass(frozen=True, slots=True)
class Application:
    """The ASGI app with all routes, and what it works with.

    Attributes:
        asgi: the app.
        state: the models, and the requests that are being answered.
        responses: responses in the background.
        sessions: realtime sessions.
        keys: the keys of clients.
        siblings: the other processes that serve HTTP; None: there are none.
    """

    settings: Serve
    running_models: Sequence[RunningModel]
    store: ResponseStore
    metrics: Metrics
    asgi: ASGIApp
    state: ServerState
    responses: ResponseService
    sessions: Sessions
    keys: KeyRing
    siblings: Siblings | None = None

    @asynccontextmanager
    async def running(
        self, stop_failed: Callable[[str], None], watching: Sequence[Coroutine[Any, Any, None]] = ()
    ) -> AsyncIterator[None]:
        """Do meanwhile what goes on beside requests: restart engines, export metrics, write statistics.

        Args:
            stop_failed: called with a reason when an engine has died, and is not restarted.
            watching: what else to do.
        """
        settings, state = self.settings, self.state
        tasks = [asyncio.create_task(model.watch(state, stop_failed)) for model in self.running_models]
        if settings.log_stats:
            logs = [StatsLog(model.names[0], model.client) for model in state.models]
            if self.siblings is None:
                tasks += [asyncio.create_task(log.write_regularly(settings.log_stats_interval)) for log in logs]
            elif (writing := self.siblings.write_stats(logs[0], settings.log_stats_interval)) is not None:
                tasks.append(asyncio.create_task(writing))
        tasks += [asyncio.create_task(task) for task in watching]
        tasks.append(asyncio.create_task(_start_helpers(state, self.store)))
        tasks.append(asyncio.create_task(state.malloc_trimmer.trim_regularly(lambda: state.in_flight == 0)))
        try:
            answering = nullcontext() if self.siblings is None else self.siblings.answering()
            async with _otlp_metrics(settings, self.metrics, state.models), answering:
                with state.malloc_trimmer.rationed_collections():
                    yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def open_application(
    settings: Serve, start: StartModels, front_end: FrontEnd | None = None
) -> AsyncIterator[Application]:
    """Load the models, and make the app of them; close all of it at the end.

    Args:
        settings: of the server.
        start: starts the models.
        front_end: this process is one of several; None: it is the only one.
    """
    store = ResponseStore(
        settings.response_store, settings.response_ttl, settings.response_store_size, settings.max_client_share
    )
    async with aclosing(store):
        opening = asyncio.ensure_future(store.open())
        opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, if loading fails first
        if settings.response_store is not None:
            await opening
        async with _traces(settings) as traces, _running(settings, start, traces) as running:
            await opening  # a file in the default location is checked while the models load
            async with _application(settings, running, store, traces, front_end) as application:
                yield application


@asynccontextmanager
async def _application(
    settings: Serve,
    running: Sequence[RunningModel],
    store: ResponseStore,
    traces: RunningTraces | None,
    front_end: FrontEnd | None,
) -> AsyncIterator[Application]:
    media_memory = MediaMemory(int(settings.max_media_memory), settings.max_client_share)
    loading = asyncio.gather(*(model.loaded(media_memory) for model in running))
    state = _state(settings, media_memory)
    tool_servers = ToolServers(
        urls_by_label(settings.tool_server),
        settings.tool_timeout,
        int(settings.max_tool_answer_size),
        settings.max_client_share,
    )
    responses = ResponseService(state, store, tool_servers)
    options = ServerOptions.of(settings)
    try:
        routes = create_routes(state, responses, options)  # a quarter of a second, in which the models load
        state.models = models = await loading
        multiprocessing.active_children()  # reaps the process that has read the configs: nobody waits for it
        metrics = Metrics(
            max_model_len=max(model.info.max_model_len for model in models),
            vllm_names=settings.vllm_metric_names,
            options=MetricsOptions.of(settings),
            kv_cache_metrics=settings.kv_cache_metrics,
        )
        keys = KeyRing(options) if front_end is None else front_end.key_ring(options)
        for number, (started, model) in enumerate(zip(running, models, strict=True)):
            started.observe(partial(_model_metrics, {}, metrics, model, EngineOptions.of(settings)), number)
            model.client.observers.add(TokenCounter(keys))
            if traces is not None:
                model.client.observers.add(traces.tracing.observer(model.names[0]))
        tracing = None
        if traces is not None:
            tracing = traces.tracing
            traces.export.count_drops(metrics.trace_spans_dropped.inc)
        sessions = Sessions(
            state,
            RealtimeOptions.of(settings),
            options,
            metrics,
            transcriber_factory(),
            settings.max_client_share,
            utterance_trace=nullcontext if tracing is None else tracing.utterance,
            places=None if front_end is None else front_end.session_places(settings),
            secrets=None if front_end is None else ClientSecrets(front_end.secret_key),
        )
        siblings = None if front_end is None else open_siblings(front_end, state, metrics, running)
        exposition = Exposition(metrics, None if siblings is None else siblings.metrics)
        logs = LogOptions.of(settings)
        app = create_app(routes, state, metrics, sessions, options, keys, logs, tracing, exposition)
        yield Application(settings, running, store, metrics, app, state, responses, sessions, keys, siblings)
    finally:
        await tool_servers.aclose()
        await state.close_media()


def _model_metrics(
    by_rank: dict[int, ModelMetrics], metrics: Metrics, model: ServedModel, options: EngineOptions, rank: int
) -> ModelMetrics:
    """The metrics of a core of a model. A rank that is removed and added again has those that it had."""
    if rank not in by_rank:
        by_rank[rank] = ModelMetrics(metrics, model.names[0], rank)
        by_rank[rank].describe(model.info, options)
    return by_rank[rank]


async def _start_helpers(state: ServerState, store: ResponseStore) -> None:
    """Start what few requests need, and would wait for, once there is none, or after a minute on a busy server."""
    latest = time.monotonic() + _LONGEST_WAIT
    is_due = False
    while not is_due:
        await asyncio.sleep(_QUIET_SECONDS)
        is_due = not state.in_flight or time.monotonic() > latest
    await make_schemas()
    store.start_checks()
    for model in state.models:
        if isinstance(model, GeneratingModel):
            model.grammars.start()


def _watched_files(settings: Serve, tls: Tls | None, keys: KeyRing) -> Iterator[tuple[WatchedFiles, bool]]:
    """Files that SIGHUP makes the server read again, and whether it does so whenever they change."""
    if tls is not None:
        yield WatchedFiles(f"certificate {settings.ssl_certfile}", tls.files, tls.read), settings.enable_ssl_refresh
    if settings.api_key_file is not None:
        yield WatchedFiles(f"keys {settings.api_key_file}", [settings.api_key_file], keys.read), True


def _state(settings: Serve, media_memory: MediaMemory) -> ServerState:
    """The state of a server whose models are being loaded."""
    media = MediaOptions.of(settings)
    return ServerState(
        models=[],
        limits=LimitOptions.of(settings),
        media_memory=media_memory,
        strict_fields=settings.strict_fields,
        trust_request_chat_template=settings.trust_request_chat_template,
        tokenizer_info=settings.enable_tokenizer_info_endpoint,
        include_usage=settings.enable_force_include_usage,
        include_metrics=settings.enable_per_request_metrics,
        tokens_as_ids=settings.return_tokens_as_token_ids,
        stall_timeout=settings.stall_timeout,
        sse_keep_alive_interval=settings.sse_keep_alive_interval,
        transcription_events=settings.transcription_events,
        media=MediaSources(media, AudioOptions.of(settings), VideoOptions.of(settings), settings.max_client_share),
        documents=DocumentReader(media, share=settings.max_client_share),
        sleep_mode=settings.enable_sleep_mode,
        weight_update_path=settings.weight_update_path,
        profiler=bool(settings.profiler_config),
        max_audio_parts=settings.max_audio_parts,
        max_image_parts=settings.max_image_parts,
        max_video_parts=settings.max_video_parts,
        results=ResultMemory(LARGEST_RESULTS // settings.api_server_count, settings.max_client_share),
        renders_only=isinstance(settings, Render),
    )


@asynccontextmanager
async def _otlp_metrics(settings: Serve, metrics: Metrics, models: Sequence[ServedModel]) -> AsyncIterator[None]:
    """Send metrics over OTLP meanwhile, if that is asked for."""
    otlp = metric_settings(settings.otlp_metrics_endpoint, os.environ)
    if otlp is None:
        yield
        return
    from quire.metrics.gen_ai import GenAiMetrics  # noqa: PLC0415 imports OpenTelemetry
    from quire.metrics.otlp import OtlpExport  # noqa: PLC0415

    export = OtlpExport(metrics.collect, otlp)
    for model in models:
        model.client.observers.add(GenAiMetrics(export.gen_ai, model.names[0]))
    export.start()
    try:
        yield
    finally:
        await export.close()


@asynccontextmanager
async def _traces(settings: Serve) -> AsyncIterator[RunningTraces | None]:
    """Traces of requests, if they are to be exported. What waits at the end is exported, but not for long."""
    export = trace_settings(settings.otlp_traces_endpoint, os.environ)
    if export is None:
        yield None
        return
    from quire.tracing.start import start_traces  # noqa: PLC0415 imports OpenTelemetry

    traces = start_traces(export)
    try:
        yield traces
    finally:
        await asyncio.to_thread(traces.export.close, _FLUSH_SECONDS)


@asynccontextmanager
async def _running(
    settings: Serve, start: StartModels, traces: RunningTraces | None
) -> AsyncIterator[list[RunningModel]]:
    """All models, which are stopped at the end."""
    models: list[RunningModel] = []
    steps = None
    if traces is not None and settings.collect_detailed_traces:
        steps = StepTraces(traces.export.settings, traces.step_observer)
    try:
        async for model in start(steps):
            models.append(model)  # noqa: PERF401 (those that have started are stopped if another one fails)
        yield models
    finally:
        await asyncio.gather(*(model.stop() for model in models))
