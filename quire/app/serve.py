"""`quire serve`: check settings, find the models, and serve them."""

from __future__ import annotations

import importlib.util
import logging
import ssl

from quire.app.exits import end_on_signals
from quire.app.files import check_readable, check_template
from quire.app.logs import start_logging
from quire.app.models import resolve_models
from quire.app.sockets import bind_sockets
from quire.config.command import ConfigError
from quire.config.commands import Serve
from quire.config.options import ServerOptions
from quire.engine.models.model_config import start_reading_configs
from quire.engine.models.pooling_config import PoolingOptions

logger = logging.getLogger("quire")


def run(settings: Serve) -> int:
    """Serve until a signal arrives; returns the exit status."""
    start_logging(settings.log_level)
    for note in settings.notes:
        logger.info("%s", note)
    for warning in settings.warnings:
        logger.warning("%s", warning)
    end_on_signals()  # until the server handles them itself
    _check(settings)
    with bind_sockets(ServerOptions.of(settings)) as sockets:
        sources = resolve_models(settings.model, settings.served_model_name, settings.revision)
        model_configs = start_reading_configs(
            [source.folder for source in sources],
            settings.model_impl,
            settings.hf_overrides,
            PoolingOptions(settings.task, settings.convert, settings.pooler_config),
        )
        from quire.app.lifecycle import serve  # noqa: PLC0415 imports torch while the configs are read

        return serve(settings, sources, model_configs, sockets)


def _check(settings: Serve) -> None:
    """Refuse settings that contradict each other, or whose files cannot be used."""
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise ConfigError(
            f"quire serve: --max-num-batched-tokens is {settings.max_num_batched_tokens}, but must be at least "
            f"--max-num-seqs, which is {settings.max_num_seqs}"
        )
    check_template(settings, "chat_template")
    if settings.tool_server and importlib.util.find_spec("mcp") is None:
        raise ConfigError("quire serve: --tool-server needs the package mcp: pip install 'quire[mcp]'")
    _check_parsers(settings)
    _check_overrides(settings)
    _check_certificate(settings)


def _check_parsers(settings: Serve) -> None:
    if settings.reasoning_parser == "auto" and settings.tool_call_parser == "auto":
        return
    from quire.api.answers.parsers import check_parsers  # noqa: PLC0415 imports the grammar library

    problem = check_parsers(settings.reasoning_parser, settings.tool_call_parser)
    if problem is not None:
        field, expected = problem
        value = getattr(settings, field)
        raise ConfigError(f"quire serve: {settings.flag(field)} expects {expected}, not {value!r}")


def _check_overrides(settings: Serve) -> None:
    if not settings.override_generation_config:
        return
    from quire.api.serving.defaults import check_overrides  # noqa: PLC0415 imports the tokenizer

    if (expected := check_overrides(settings.override_generation_config)) is not None:
        raise ConfigError(f"quire serve: --override-generation-config expects {expected}")


def _check_certificate(settings: Serve) -> None:
    if settings.ssl_certfile is None and settings.ssl_keyfile is None:
        return
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        raise ConfigError("quire serve: --ssl-certfile and --ssl-keyfile must be set together")
    check_readable(settings, "ssl_certfile")
    check_readable(settings, "ssl_keyfile")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as error:  # SSLError is one
        raise ConfigError(
            f"quire serve: --ssl-certfile and --ssl-keyfile are not a valid certificate and key: {error}"
        ) from error
