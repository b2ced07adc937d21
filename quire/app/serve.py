"""`quire serve`: check settings, find the models, and serve them."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from quire.api.http.keys import KeyRing
from quire.app.exits import end_on_signals
from quire.app.files import check_readable, check_template
from quire.app.logs import start_logging
from quire.app.models import Lookup, ModelSource, resolve_models
from quire.app.running_models import RunningModel, StepTraces
from quire.app.sockets import bind_shared_sockets, bind_sockets
from quire.app.tls import Tls, TlsError
from quire.config.command import ConfigError
from quire.config.commands import Render, Serve
from quire.config.key_file import KeyFileError
from quire.config.options import ModelOptions, ServerOptions, TlsOptions
from quire.engine.client.launch import PreparedProcess
from quire.engine.models.config.pooling import PoolingOptions
from quire.engine.models.config_reader import ConfigReader, ReadingOptions
from quire.engine.models.torch_import import import_torch
from quire.otlp.settings import OtlpSettingsError, metric_settings, trace_settings

logger = logging.getLogger("quire")
StartSources = Callable[[Sequence[ModelSource], ConfigReader, StepTraces | None], AsyncIterator[RunningModel]]


def run(settings: Serve, configs: ConfigReader | None = None, prepared: PreparedProcess | None = None) -> int:
    """Serve until a signal arrives; returns the exit status.

    Args:
        settings: settings of the command.
        configs: a reader that has been started.
        prepared: a process for the engine, if there is one engine and it is to have one.
    """
    begin(settings)
    settings, prepared = _with_place(settings, prepared)
    if settings.api_server_count > 1:
        return _run_several(settings, configs or ConfigReader(), prepared)
    if settings.headless:
        configs = configs or ConfigReader()
        (source,) = find_models(settings, configs)
        import_torch()
        from quire.app.headless import run_headless  # noqa: PLC0415 imports torch

        return run_headless(settings, source, configs)

    def import_engines() -> StartSources:
        if prepared is None:
            import_torch()
        from quire.app.engines import start_engines  # noqa: PLC0415 while the models' configs are read

        return partial(start_engines, settings, prepared=prepared)

    return run_server(settings, configs, import_engines)


def _with_place(settings: Serve, prepared: PreparedProcess | None) -> tuple[Serve, PreparedProcess | None]:
    """Decide whether the engine has a process of its own, and whether it is the one that has been started."""
    is_single = len(settings.model) == 1 and not (settings.has_replicas or settings.headless)
    if prepared is not None and (settings.engine_process is False or not is_single):
        prepared.cancel()
        prepared = None
    if settings.engine_process is None:
        has_process = prepared is not None or settings.api_server_count > 1
        settings = settings.model_copy(update={"engine_process": has_process})
    return settings, prepared


def _run_several(settings: Serve, configs: ConfigReader, prepared: PreparedProcess | None) -> int:
    """Serve with several processes before the engine."""
    with bind_shared_sockets(ServerOptions.of(settings), settings.api_server_count) as sockets:
        (source,) = find_models(settings, configs)
        from quire.app.front_ends import run_front_ends  # noqa: PLC0415 a quarter of a second of imports

        return run_front_ends(settings, source, configs, sockets, prepared)


def begin(settings: Serve) -> None:
    """Log what there is to say about the settings, and check them."""
    start_logging(settings.log_level, settings.log_format)
    for note in settings.notes:
        logger.info("%s", note)
    for warning in settings.warnings:
        logger.warning("%s", warning)
    end_on_signals()  # until the server handles them itself
    check_settings(settings)


def run_server(settings: Serve, configs: ConfigReader | None, import_start: Callable[[], StartSources]) -> int:
    """Serve the models of the settings until a signal arrives; returns the exit status.

    Args:
        settings: settings of the command, which `begin` has checked.
        configs: a reader that has been started; None: there is none yet.
        import_start: imports what starts models, while their configs are read.
    """
    with bind_sockets(ServerOptions.of(settings)) as sockets:
        configs = configs or ConfigReader()
        sources = find_models(settings, configs)
        start = import_start()
        from quire.app.lifecycle import serve  # noqa: PLC0415 a quarter of a second of imports

        gc.freeze()  # a full collection would search all modules, for 150 ms
        gc.enable()
        return serve(settings, partial(start, sources, configs), sockets)


def find_models(settings: Serve, configs: ConfigReader) -> list[ModelSource]:
    """Return the models of the settings, downloaded where needed; the reader starts to read their configs."""
    lookup = Lookup.of(ModelOptions.of(settings), with_weights=not isinstance(settings, Render))
    sources = resolve_models(settings.model, settings.served_model_name, lookup)
    if len(sources) > 1 and settings.kv_events_config:
        raise _refusal(settings, f"--kv-events-config works with one MODEL, but {len(sources)} are served")
    if len(sources) > 1 and settings.kv_transfer_config:
        raise _refusal(settings, f"--kv-transfer-config works with one MODEL, but {len(sources)} are served")
    pooling = PoolingOptions(settings.task, settings.convert, settings.pooler_config)
    configs.start(
        [source.folder for source in sources],
        ReadingOptions(settings.model_impl, settings.hf_overrides, pooling, settings.language_model_only),
    )
    return sources


def check_settings(settings: Serve) -> None:
    """Refuse settings that contradict each other, or whose files cannot be used."""
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise _refusal(
            settings,
            f"--max-num-batched-tokens is {settings.max_num_batched_tokens}, but must be at least "
            f"--max-num-seqs, which is {settings.max_num_seqs}",
        )
    if settings.max_total_body_size < settings.max_body_size:
        raise _refusal(
            settings,
            f"--max-total-body-size is {settings.max_total_body_size:d} bytes, but must be at least "
            f"--max-body-size, which is {settings.max_body_size:d} bytes",
        )
    if settings.enable_log_outputs and not settings.enable_log_requests:
        raise _refusal(settings, "--enable-log-outputs needs --enable-log-requests")
    _check_replicas(settings)
    _check_nodes(settings)
    if settings.api_server_count > 1:
        _check_front_ends(settings)
    check_template(settings, "chat_template")
    if settings.tool_server and importlib.util.find_spec("mcp") is None:
        raise _refusal(settings, "--tool-server needs the package mcp: pip install 'quire[mcp]'")
    _check_parsers(settings)
    _check_overrides(settings)
    _check_certificate(settings)
    _check_otlp(settings)
    _check_keys(settings)


def _check_replicas(settings: Serve) -> None:
    size, rank, local = settings.data_parallel_size, settings.data_parallel_rank, settings.data_parallel_size_local
    if rank is not None and rank >= size:
        raise _refusal(settings, f"--data-parallel-rank is {rank}, but must be less than --data-parallel-size {size}")
    if rank is not None and settings.enable_elastic_ep:
        raise _refusal(settings, "--enable-elastic-ep does not work with --data-parallel-rank: a server has one rank")
    if rank is None and settings.data_parallel_external_lb:
        raise _refusal(settings, "--data-parallel-external-lb needs --data-parallel-rank, that of this server")
    if settings.data_parallel_hybrid_lb:
        _check_hybrid(settings)
    elif settings.data_parallel_start_rank is not None:
        raise _refusal(
            settings,
            "--data-parallel-start-rank needs --data-parallel-hybrid-lb; --data-parallel-rank is for one replica",
        )
    elif local not in (None, settings.replicas):
        raise _refusal(
            settings,
            f"--data-parallel-size-local is {local}, but must be {settings.replicas}: all replicas of a "
            "server are on its machine; for more machines give each server --data-parallel-hybrid-lb and its "
            "--data-parallel-start-rank, or a --data-parallel-rank",
        )
    if settings.has_replicas and len(settings.model) != 1:
        flag = "--enable-elastic-ep" if size == 1 else "--data-parallel-size"
        raise _refusal(settings, f"{flag} works with one MODEL")


def _check_hybrid(settings: Serve) -> None:
    """Refuse what does not fit --data-parallel-hybrid-lb."""
    flag = "--data-parallel-hybrid-lb"
    size, first, local = settings.data_parallel_size, settings.first_replica, settings.data_parallel_size_local
    if settings.data_parallel_rank is not None:
        raise _refusal(settings, f"{flag} does not work with --data-parallel-rank, but with --data-parallel-start-rank")
    if settings.enable_elastic_ep:
        raise _refusal(settings, f"--enable-elastic-ep does not work with {flag}: the next ranks are those of others")
    if local is None:
        raise _refusal(settings, f"{flag} needs --data-parallel-size-local, the number of this server's replicas")
    if first + local > size:
        raise _refusal(
            settings,
            f"--data-parallel-start-rank {first} and --data-parallel-size-local {local} make ranks up to "
            f"{first + local - 1}, but they must be less than --data-parallel-size {size}",
        )


def _check_nodes(settings: Serve) -> None:
    """Refuse what does not fit several nodes."""
    nodes, node, ranks = settings.nnodes, settings.node_rank, settings.ranks
    if node >= nodes:
        raise _refusal(settings, f"--node-rank is {node}, but must be less than --nnodes {nodes}")
    if settings.headless != (node > 0):
        text = "--headless needs a --node-rank above 0" if settings.headless else f"--node-rank {node} needs --headless"
        raise _refusal(settings, f"{text}: node 0 is the server, and all others run ranks for it")
    if nodes == 1:
        return
    if sys.platform != "linux":
        raise _refusal(settings, f"--nnodes {nodes} needs Linux; 1 is accepted here")
    if ranks % nodes:
        raise _refusal(
            settings,
            f"--tensor-parallel-size times --pipeline-parallel-size is {ranks}, but must be a multiple of "
            f"--nnodes {nodes}: all nodes have the same number of ranks",
        )
    if len(settings.model) != 1:
        raise _refusal(settings, "--nnodes works with one MODEL")
    for field, idle in (
        ("data_parallel_size", 1),
        ("enable_elastic_ep", False),
        ("weight_update_path", None),
        ("on_engine_death", "exit"),
    ):
        if getattr(settings, field) != idle:
            raise _refusal(settings, f"{settings.flag(field)} does not work with --nnodes {nodes}")


def _check_front_ends(settings: Serve) -> None:
    """Refuse what does not fit several processes that serve HTTP."""
    flag = f"--api-server-count {settings.api_server_count}"
    if sys.platform != "linux":
        raise _refusal(settings, f"{flag} needs Linux; 1 is accepted here")
    if settings.name != "serve":
        raise _refusal(settings, f"{flag} needs an engine: start several servers, which need not share anything")
    if len(settings.model) != 1:
        raise _refusal(settings, f"--api-server-count works with one MODEL; 1 is accepted with {len(settings.model)}")
    idle: Mapping[str, Any] = {"uds": None, "headless": False, "nnodes": 1, "enable_elastic_ep": False}
    for field, value in idle.items():
        if getattr(settings, field) != value:
            raise _refusal(settings, f"{settings.flag(field)} does not work with {flag}")
    if settings.engine_process is False:
        raise _refusal(settings, f"--no-engine-process does not work with {flag}, which share a process")
    if settings.response_store is not None and settings.response_store.rstrip("/") in ("sqlite:", "sqlite:///:memory:"):
        raise _refusal(
            settings, f"--response-store {settings.response_store} does not work with {flag}: each has its own memory"
        )
    if metric_settings(settings.otlp_metrics_endpoint, os.environ) is not None:
        raise _refusal(settings, f"metrics are not exported over OTLP with {flag}; scrape /metrics, which adds them up")
    part = settings.max_total_body_size // settings.api_server_count
    if part < settings.max_body_size:
        raise _refusal(
            settings,
            f"--max-total-body-size is {settings.max_total_body_size:d} bytes, of which each of {flag} has a part; it "
            f"must be at least --max-body-size, which is {settings.max_body_size:d}",
        )


def _check_parsers(settings: Serve) -> None:
    if settings.reasoning_parser == "auto" and settings.tool_call_parser == "auto":
        return
    from quire.parsing.parsers import check_parsers  # noqa: PLC0415 imports the grammar library

    problem = check_parsers(settings.reasoning_parser, settings.tool_call_parser)
    if problem is not None:
        field, expected = problem
        value = getattr(settings, field)
        raise _refusal(settings, f"{settings.flag(field)} expects {expected}, not {value!r}")


def _check_overrides(settings: Serve) -> None:
    if not settings.override_generation_config:
        return
    from quire.serving.defaults import check_overrides  # noqa: PLC0415 imports the tokenizer

    if (expected := check_overrides(settings.override_generation_config)) is not None:
        raise _refusal(settings, f"--override-generation-config expects {expected}")


def _check_certificate(settings: Serve) -> None:
    if settings.ssl_certfile is None and settings.ssl_keyfile is None:
        for field, idle in TlsOptions().model_dump().items():
            if getattr(settings, field) != idle:
                raise _refusal(settings, f"{settings.flag(field)} needs --ssl-certfile and --ssl-keyfile")
        return
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        raise _refusal(settings, "--ssl-certfile and --ssl-keyfile must be set together")
    check_readable(settings, "ssl_certfile")
    check_readable(settings, "ssl_keyfile")
    check_readable(settings, "ssl_ca_certs")
    if settings.ssl_cert_reqs != "0" and settings.ssl_ca_certs is None:
        raise _refusal(settings, f"--ssl-cert-reqs {settings.ssl_cert_reqs} needs --ssl-ca-certs")
    try:
        Tls(TlsOptions.of(settings))
    except TlsError as error:
        wrong = {
            "ssl_certfile": "--ssl-certfile and --ssl-keyfile are not a valid certificate and key",
            "ssl_ca_certs": "--ssl-ca-certs has no valid certificates",
            "ssl_ciphers": "--ssl-ciphers is not a list of ciphers that OpenSSL knows",
        }
        raise _refusal(settings, f"{wrong[error.field]}: {error}") from error


def _check_otlp(settings: Serve) -> None:
    try:
        metric_settings(settings.otlp_metrics_endpoint, os.environ)
        traces = trace_settings(settings.otlp_traces_endpoint, os.environ)
    except OtlpSettingsError as error:
        raise _refusal(settings, f"{error}") from error
    if traces is None and settings.collect_detailed_traces and settings.otlp_traces_endpoint is None:
        raise _refusal(settings, "--collect-detailed-traces needs --otlp-traces-endpoint")


def _check_keys(settings: Serve) -> None:
    if not settings.needs_key:
        for field in ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests"):
            if getattr(settings, field):
                raise _refusal(settings, f"{settings.flag(field)} needs --api-key or --api-key-file")
    try:
        KeyRing(ServerOptions.of(settings))
    except KeyFileError as error:
        raise _refusal(settings, f"{error}") from error


def _refusal(settings: Serve, reason: str) -> ConfigError:
    return ConfigError(f"quire {settings.name}: {reason}")
