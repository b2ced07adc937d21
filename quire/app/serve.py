"""`quire serve`: load the models, listen, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import uvloop

from quire.api.served import ServedModel, Services
from quire.app.engines import RunningEngine, memory_share
from quire.app.factory import create_app
from quire.app.files import check_readable
from quire.app.models import ModelSource, resolve_models
from quire.app.server import Server, bound
from quire.config.command import ConfigError
from quire.config.commands import Serve
from quire.config.options import LimitOptions, ServerOptions
from quire.engine.wire.errors import EngineDead
from quire.metrics.prometheus import Metrics, ModelMetrics
from quire.multimodal.errors import PromptError
from quire.multimodal.tokenizer import TokenizerMissing

logger = logging.getLogger("quire")


def run(settings: Serve) -> int:
    """Serve until a signal comes; gives the exit status."""
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("httpx", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
    _check(settings)
    with bound(ServerOptions.of(settings)) as sockets:
        sources = resolve_models(settings.model, settings.served_model_name, settings.revision)
        try:
            status: int = uvloop.run(_serve(settings, sources, sockets))
            return status
        except (EngineDead, TokenizerMissing, PromptError) as error:
            logger.error("cannot serve: %s", error)
            return 1


async def _serve(settings: Serve, sources: Sequence[ModelSource], sockets: list[socket.socket]) -> int:
    async with _engines(settings, sources) as models:
        services = Services(
            models=models,
            limits=LimitOptions.of(settings),
            strict_fields=settings.strict_fields,
            trust_request_chat_template=settings.trust_request_chat_template,
            stall_timeout=settings.stall_timeout,
        )
        metrics = Metrics(
            max_model_len=max(model.info.max_model_len for model in models), vllm_names=settings.vllm_metric_names
        )
        for index, model in enumerate(models):
            model.client.observer = ModelMetrics(metrics, model.names[0], index)
        options = ServerOptions.of(settings)
        server = Server(create_app(services, metrics, options), services, options)
        await server.serve(sockets)
        return 0 if server.started else 1


@asynccontextmanager
async def _engines(settings: Serve, sources: Sequence[ModelSource]) -> AsyncIterator[list[ServedModel]]:
    """All engines, loaded side by side and stopped at the end."""
    engines: list[RunningEngine] = []
    try:
        share = memory_share(sources)
        engines.extend(RunningEngine(source, settings, share) for source in sources)
        yield [await engine.serve() for engine in engines]
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


def _check(settings: Serve) -> None:
    """Refuse settings that contradict each other or name files that will not do."""
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise ConfigError("quire serve: --max-num-batched-tokens must be at least --max-num-seqs")
    check_readable(settings, "chat_template", "utf-8")
    _check_certificate(settings)


def _check_certificate(settings: Serve) -> None:
    if settings.ssl_certfile is None and settings.ssl_keyfile is None:
        return
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        raise ConfigError("quire serve: --ssl-certfile and --ssl-keyfile go together")
    check_readable(settings, "ssl_certfile")
    check_readable(settings, "ssl_keyfile")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as error:  # SSLError is one
        raise ConfigError(
            f"quire serve: --ssl-certfile and --ssl-keyfile are no certificate and key: {error}"
        ) from error
