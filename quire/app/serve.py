"""`quire serve`: load the models, listen, drain, stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn
import uvloop
from starlette.types import ASGIApp

from quire import __version__
from quire.api.served import ServedModel, Services
from quire.app.engines import RunningEngine
from quire.app.factory import create_app
from quire.app.models import ModelSource, resolve_models
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
    sources = resolve_models(settings.model, settings.served_model_name, settings.revision)
    try:
        status: int = uvloop.run(_serve(settings, sources))
        return status
    except (EngineDead, TokenizerMissing, PromptError) as error:
        logger.error("cannot serve: %s", error)
        return 1


async def _serve(settings: Serve, sources: Sequence[ModelSource]) -> int:
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
        server = _Server(create_app(services, metrics, options), services, options)
        await server.serve()
        return 0 if server.started else 1


@asynccontextmanager
async def _engines(settings: Serve, sources: Sequence[ModelSource]) -> AsyncIterator[list[ServedModel]]:
    """All engines, loaded side by side and stopped at the end."""
    engines: list[RunningEngine] = []
    try:
        engines.extend(RunningEngine(source, settings, sharers=len(sources)) for source in sources)
        yield [await engine.serve() for engine in engines]
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


class _Server(uvicorn.Server):
    """Uvicorn, with our start-up line, and readiness that falls as soon as a signal comes."""

    def __init__(self, app: ASGIApp, services: Services, settings: ServerOptions) -> None:
        self._services = services
        self._settings = settings
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                loop="none",
                http="httptools",
                lifespan="off",
                log_config=None,
                access_log=settings.access_log,
                log_level=settings.log_level,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                timeout_graceful_shutdown=round(settings.drain_timeout),
                server_header=False,
            )
        )

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Listen, and say what is served where."""
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            scheme = "https" if self._settings.ssl_certfile else "http"
            for model in self._services.models:
                logger.info(_start_line(model, f"{scheme}://{host}:{port}"))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take no new requests; a second signal does not wait for the running ones."""
        if not self._services.draining:
            logger.info("draining: running requests get %g s to finish", self._settings.drain_timeout)
        self._services.draining = True
        super().handle_exit(sig, frame)


def _start_line(model: ServedModel, address: str) -> str:
    info = model.info
    return (
        f"Quire {__version__} serves {model.names[0]} ({info.architecture} by {info.implementation}) on {info.device}, "
        f"{info.dtype}, weights {_size(info.weight_bytes)}, KV {info.num_blocks} blocks of {info.block_size} tokens "
        f"({_size(info.cache_bytes)}), context {info.max_model_len}, at {address}"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"


def _check(settings: Serve) -> None:
    """Refuse settings that contradict each other."""
    if (settings.ssl_certfile is None) != (settings.ssl_keyfile is None):
        raise ConfigError("quire serve: --ssl-certfile and --ssl-keyfile go together")
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise ConfigError("quire serve: --max-num-batched-tokens must be at least --max-num-seqs")
