"""The whole HTTP side on a real port, over cores without models."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp

from quire.api.http.keys import KeyRing
from quire.api.mcp.servers import ToolServers
from quire.api.responses.service import ResponseService
from quire.api.responses.store import ResponseStore
from quire.app.access_log import AccessLog
from quire.app.connections import Connections
from quire.app.factory import create_app, create_routes
from quire.app.listener import accept_connections
from quire.app.rate_limits import TokenCounter
from quire.app.server import protocol_of
from quire.app.tls import Tls
from quire.app.websocket import BoundedWebSocket
from quire.config.commands import Serve
from quire.config.options import LogOptions
from quire.config.types import urls_by_label
from quire.engine.client.launch import CoreEntry, CoreHandle
from quire.metrics.model_metrics import ModelMetrics
from quire.metrics.prometheus import Metrics
from quire.multimodal.documents import DocumentReader
from quire.multimodal.memory import MediaMemory
from quire.multimodal.sources import MediaSources
from quire.parsing.parsers import reasoning_tags, tool_format
from quire.realtime.sessions import Sessions
from quire.realtime.transcribers import transcriber_factory
from quire.realtime.utterance_transcriber import UtteranceTranscriber
from quire.rendering.renderer import Renderer
from quire.rendering.tokenizer import Tokenizer
from quire.serving.defaults import read_defaults
from quire.serving.models import GeneratingModel, ModelParts, ServerState, served_model
from quire.serving.result_memory import ResultMemory
from quire.tracing.tracing import Tracing
from tests.support.fake_core import CONTEXT, FakeCore, running_client
from tests.support.patience import PATIENCE
from tests.support.shared_routes import STARTED
from tests.support.tokenizer import write_tokenizer


@dataclass
class Server:
    """A running server and a client for it."""

    url: str
    http: httpx.AsyncClient
    state: ServerState
    app: ASGIApp
    connections: Connections
    sessions: Sessions
    keys: KeyRing

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **options)


@asynccontextmanager
async def running_server(
    folder: Path,
    *cores: CoreEntry,
    names: Sequence[str] = ("fake", "alias"),
    capacity: int = 64,
    chat_template: str | None = None,
    handle: CoreHandle | None = None,
    joins: bool = False,
    speech: UtteranceTranscriber | None = None,
    write: Callable[[Path], None] | None = None,
    tracing: Tracing | None = None,
    **settings: Any,
) -> AsyncIterator[Server]:
    """A server for one model per core; the first has all names, others are `fake-1` and so on.

    `handle` says where a single core runs, if not in a thread; `joins`: the tokenizer is that of a cross-encoder;
    `speech` transcribes in realtime sessions, instead of the model's own transcriber; `write` writes another tokenizer;
    `tracing` traces its requests.
    """
    if write is None:
        write_tokenizer(folder, joins=joins, **({} if chat_template is None else {"chat_template": chat_template}))
    else:
        write(folder)
    settings.setdefault("max_client_share", 1.0)  # all clients of a test have one address
    options = Serve(**settings)
    media_memory = MediaMemory(int(options.max_media_memory), options.max_client_share)
    metrics = Metrics(
        max_model_len=CONTEXT,
        vllm_names=options.vllm_metric_names,
        options=options,
        kv_cache_metrics=options.kv_cache_metrics,
    )
    keys = KeyRing(options)
    async with AsyncExitStack() as stack:
        models = []
        for index, core in enumerate(cores or (FakeCore(),)):
            client = await stack.enter_async_context(
                running_client(core, capacity=capacity, share=options.max_client_share, handle=handle)
            )
            info = await client.ready()
            tokenizer = Tokenizer.load(folder)
            parts = ModelParts(
                names=tuple(names) if index == 0 else (f"fake-{index}",),
                root=f"root-{index}",
                client=client,
                renderer=Renderer(
                    folder,
                    tokenizer,
                    options,
                    info.max_model_len,
                    media_tokens=info.media_tokens,
                    share=options.max_client_share,
                ),
                info=info,
                defaults=read_defaults(
                    folder, tokenizer, options.generation_config, options.override_generation_config
                ),
                priority_scheduling=options.scheduling_policy == "priority",
            )
            model = served_model(parts, folder, options, media_memory)
            if isinstance(model, GeneratingModel):  # whatever the template
                model = replace(
                    model,
                    reasoning=reasoning_tags(options.reasoning_parser, "</think>"),
                    tools=tool_format(options.tool_call_parser, ""),
                    parser_tokens=(),
                )
            model_metrics = ModelMetrics(metrics, model.names[0], index)
            model_metrics.describe(info, options)
            client.observers.add(model_metrics)
            client.observers.add(TokenCounter(keys))
            if tracing is not None:
                client.observers.add(tracing.observer(model.names[0]))
            stack.push_async_callback(model.close)
            models.append(model)
        state = ServerState(
            models=models,
            limits=options,
            media_memory=media_memory,
            strict_fields=options.strict_fields,
            trust_request_chat_template=options.trust_request_chat_template,
            tokenizer_info=options.enable_tokenizer_info_endpoint,
            include_usage=options.enable_force_include_usage,
            include_metrics=options.enable_per_request_metrics,
            tokens_as_ids=options.return_tokens_as_token_ids,
            stall_timeout=options.stall_timeout,
            sse_keep_alive_interval=options.sse_keep_alive_interval,
            transcription_events=options.transcription_events,
            media=MediaSources(options, options, options, options.max_client_share),
            documents=DocumentReader(options, share=options.max_client_share),
            sleep_mode=options.enable_sleep_mode,
            weight_update_path=options.weight_update_path,
            profiler=bool(options.profiler_config),
            max_audio_parts=options.max_audio_parts,
            max_image_parts=options.max_image_parts,
            max_video_parts=options.max_video_parts,
            results=ResultMemory(share=options.max_client_share),
        )
        stack.push_async_callback(state.close_media)
        database = options.response_store or f"sqlite:///{folder / 'responses.db'}"
        store = ResponseStore(database, options.response_ttl, options.response_store_size, options.max_client_share)
        await stack.enter_async_context(aclosing(store))
        tool_servers = ToolServers(
            urls_by_label(options.tool_server),
            options.tool_timeout,
            int(options.max_tool_answer_size),
            options.max_client_share,
        )
        await stack.enter_async_context(aclosing(tool_servers))
        transcriber_of = transcriber_factory() if speech is None else lambda _: speech
        sessions = Sessions(
            state,
            options,
            options,
            metrics,
            transcriber_of,
            options.max_client_share,
            utterance_trace=nullcontext if tracing is None else tracing.utterance,
        )
        STARTED.set(state)
        routes = create_routes(state, ResponseService(state, store, tool_servers), options)
        app = create_app(routes, state, metrics, sessions, options, keys, options, tracing)
        connections = Connections(options)
        event_size = int(options.max_realtime_event_size)
        url = await stack.enter_async_context(
            listening(
                app,
                connections=connections,
                event_size=event_size,
                root_path=options.root_path,
                access_log=AccessLog(options),
            )
        )
        # Without `verify` it reads no certificates, which takes longer than most requests; the server has none.
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=PATIENCE, verify=False))  # noqa: S501
        yield Server(url, http, state, app, connections, sessions, keys)


@asynccontextmanager
async def listening(
    app: Any,
    port: int = 0,
    connections: Connections | None = None,
    event_size: int = 1 << 20,
    root_path: str = "",
    tls: Tls | None = None,
    access_log: AccessLog | None = None,
) -> AsyncIterator[str]:
    """Uvicorn around an app, on a free port if none is given, with the bounds of `connections`."""
    access_log = access_log or AccessLog(LogOptions(access_log=False))
    config = uvicorn.Config(
        app,
        http="httptools" if connections is None else protocol_of(connections, tls, access_log),  # type: ignore[arg-type]
        lifespan="off",
        log_level="error",
        timeout_graceful_shutdown=1,
        ws="none" if connections is None else partial(BoundedWebSocket, connections),  # type: ignore[arg-type]
        ws_max_size=2 * event_size,
        ws_ping_timeout=None,
        ws_per_message_deflate=False,
        root_path=root_path,
    )
    server = _Uvicorn(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup([])
    sockets = [socket.create_server(("127.0.0.1", port), backlog=config.backlog)]
    accept_connections(server, sockets, lambda: config.backlog if connections is None else connections.room)
    await server.on_tick(0)  # sets the headers of all answers
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
    finally:
        await server.shutdown()


class _Uvicorn(uvicorn.Server):
    """Uvicorn that ends when its connections have ended; uvicorn itself looks every tenth of a second."""

    async def shutdown(self, sockets: Any = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(0.001)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()
        for server in self.servers:
            await server.wait_closed()


async def until(condition: Any) -> None:
    """Wait for a condition that another thread brings about."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


def chunks_of(text: str) -> list[dict[str, Any]]:
    """Bodies of a stream's events, which must end in [DONE]."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]
