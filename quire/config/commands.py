"""The commands of `quire` and their settings. The docstring of a class is the beginning of its command's help."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, CliPositionalArg, PydanticBaseSettingsSource

from quire.config.command import Command, ConfigError
from quire.config.options import (
    AudioOptions,
    ChatOptions,
    ConnectionOptions,
    EngineOptions,
    LimitOptions,
    LogOptions,
    MediaOptions,
    MetricsOptions,
    ModelOptions,
    ParallelOptions,
    PictureOptions,
    RealtimeOptions,
    ServerOptions,
    TlsOptions,
    TracingOptions,
    VideoOptions,
)
from quire.config.other_servers.translate import translate_flags
from quire.config.other_servers.variables import VllmVariables, notes_on_variables
from quire.config.types import Flag, Names, NonNegativeInt, PositiveInt, RateLimit, Seconds

Fraction = Annotated[float, Field(ge=0, le=1)]


class Serve(
    Command,
    EngineOptions,
    ChatOptions,
    ParallelOptions,
    ModelOptions,
    RealtimeOptions,
    MediaOptions,
    PictureOptions,
    VideoOptions,
    AudioOptions,
    LimitOptions,
    ConnectionOptions,
    TlsOptions,
    LogOptions,
    MetricsOptions,
    TracingOptions,
    ServerOptions,
):
    """Serve models with an OpenAI-compatible HTTP API."""

    name = "serve"
    positional = frozenset({"model"})

    model: CliPositionalArg[Names] = Field(
        (),
        description="Hugging Face ids or directories of models; default: the bundled quire-nano, "
        "quire-nano-embed, quire-nano-hear and quire-nano-see",
    )

    @classmethod
    def translate(cls, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
        """Understand vLLM's flags; see `Command.translate`."""
        flags = {cls.flag(name) for name in cls.model_fields}
        switches = {f"--no-{flag[2:]}" for flag in flags}
        try:
            return translate_flags(arguments, frozenset(flags | switches))
        except ConfigError as error:
            raise ConfigError(f"quire {cls.name}: {error}") from error

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *sources: PydanticBaseSettingsSource, **named: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Add vLLM's variables as the source with the lowest precedence."""
        sources_of_all = super().settings_customise_sources(settings_cls, *sources, **named)
        return *sources_of_all, VllmVariables(settings_cls, os.environ)

    def notes_on_environment(self) -> tuple[list[str], list[str]]:
        """Return what to say about vLLM's variables as well."""
        notes, warnings = super().notes_on_environment()
        obeyed, ineffective = notes_on_variables(self, os.environ)
        return [*notes, *obeyed], [*warnings, *ineffective]


# Settings that say how an engine runs a model, and nothing of its prompts.
_OF_ENGINES = frozenset(
    {
        *(EngineOptions.model_fields.keys() - {"max_num_seqs", "max_num_batched_tokens", "scheduling_policy"}),
        *(ParallelOptions.model_fields.keys() - {"data_parallel_size", "data_parallel_rank", "pipeline_parallel_size"}),
        *RealtimeOptions.model_fields,
        *("dtype", "quantization", "activation_quantization", "packed_weight_cache_size", "device"),
        *("stall_timeout", "transcription_events", "file_store_size", "file_ttl", "collect_detailed_traces"),
        *("log_stats", "log_stats_interval", "enable_log_requests", "enable_log_outputs", "max_log_len"),
    }
)


class Render(Serve):
    """Serve the render and tokenize endpoints of models without loading them: no weights, no engine, no torch."""

    name = "render"
    table = "serve"

    def notes_on_environment(self) -> tuple[list[str], list[str]]:
        """Return as well which settings have no effect."""
        notes, warnings = super().notes_on_environment()
        idle = ", ".join(self.flag(field) for field in sorted(self.model_fields_set & _OF_ENGINES))
        return [*notes, *([f"without effect, as no engine runs: {idle}"] if idle else [])], warnings


class Key(Command):
    """Make an API key; prints its entry for --api-key-file, and the key itself to standard error."""

    name = "key"
    positional = frozenset({"client"})

    client: CliPositionalArg[str] = Field(description="name of the client, for logs and metrics")
    admin: Flag = Field(False, description="make an admin key")
    requests_per_minute: RateLimit | None = Field(
        None, description="requests that may be sent with the key in a minute; 0: no limit; default: that of the server"
    )
    tokens_per_minute: RateLimit | None = Field(
        None, description="tokens that the key may use in a minute; 0: no limit; default: that of the server"
    )
    max_concurrent_requests: RateLimit | None = Field(
        None,
        description="requests and realtime sessions of the key that may be answered at the same time; 0: no limit; "
        "default: that of the server",
    )


class Config(Serve):
    """Print what `quire serve` would do with these flags, the variables and the file, and what a model makes of it."""

    name = "config"
    table = "serve"

    format: Literal["text", "toml", "json"] = Field(
        "text", description="toml: a file for --config; json: also where each value comes from"
    )

    @classmethod
    def own_fields(cls) -> frozenset[str]:
        """Return the settings that `quire serve` does not have."""
        return frozenset(cls.model_fields.keys() - Serve.model_fields.keys())


class CollectEnv(Command):
    """Print the versions, the hardware and the variables that a report of a problem needs, without secrets."""

    name = "collect-env"

    format: Literal["text", "json"] = Field("text", description="format of the output")


class Chat(Command):
    """Chat in the terminal with any OpenAI-compatible server."""

    name = "chat"

    url: str = Field("http://127.0.0.1:8000/v1", description="base URL of the server")
    model_name: str | None = Field(None, description="model to chat with; default: the first model of the server")
    api_key: str | None = Field(None, description="API key of the server")
    system: str | None = Field(None, description="system message of the conversation")
    message: str | None = Field(None, description="send this message, print the answer and exit")
    temperature: Annotated[float, Field(ge=0)] | None = Field(None, description="sampling temperature")
    max_tokens: PositiveInt | None = Field(None, description="maximum number of tokens of an answer")


class Listen(Command):
    """Print a live transcription of a file, standard input or a microphone, using a server's realtime API."""

    name = "listen"
    positional = frozenset({"file"})

    file: CliPositionalArg[Path | None] = Field(
        None, description="audio file, or - for 16-bit PCM of one channel at standard input; default: the microphone"
    )
    url: str = Field("http://127.0.0.1:8000/v1", description="base URL of the server")
    model_name: str | None = Field(None, description="model to use; default: the server's first model that transcribes")
    api_key: str | None = Field(None, description="API key of the server")
    language: str | None = Field(
        None, description="code of the language that is spoken; default: detected by the model"
    )
    prompt: str | None = Field(None, description="earlier text, as context for the model")
    rate: Literal["16000", "24000"] = Field(
        "16000", description="samples per second of standard input, or of the microphone"
    )
    real_time: Flag = Field(False, description="send a file at real-time speed, instead of as fast as possible")
    input_device: str | None = Field(
        None, description="name or number of the microphone; default: the system's default input"
    )


class Embed(Command):
    """Embed the texts of a file, with a server or with a model in this process."""

    name = "embed"
    positional = frozenset({"file"})

    file: CliPositionalArg[Path] = Field(
        description="JSON lines file with a text in each object, or .txt with a text per line"
    )
    out: Path | None = Field(
        None,
        description=".npy or .parquet file to write; default: the name of the file with .npy instead of its suffix",
    )
    url: str | None = Field(
        None, description="base URL of an OpenAI-compatible server; default: the model runs in this process"
    )
    model_name: str | None = Field(
        None,
        description="with --url: name of a model of the server; without: Hugging Face id or directory of a model; "
        "default: the server's first model that embeds, or the bundled quire-nano-embed",
    )
    api_key: str | None = Field(None, description="API key of the server")
    serve_args: str = Field("", description="without --url: flags of `quire serve` for the model, as one quoted string")
    text_field: str = Field("text", description="field of the JSON objects that contains the text")
    batch_size: Annotated[int, Field(ge=1, le=2048)] = Field(256, description="number of texts per request")
    concurrency: PositiveInt = Field(2, description="maximum number of concurrent requests")
    prompt_name: str | None = Field(
        None, description="name of one of the model's prompts, which is prepended to each text"
    )
    dimensions: PositiveInt | None = Field(
        None, description="length of the embeddings, if the model supports shorter ones (Matryoshka)"
    )
    truncate: Flag = Field(True, description="truncate texts that are longer than the model's context")
    timeout: Seconds = Field(600.0, description="timeout of a request in seconds")


class BenchServe(Command):
    """Benchmark a server: TTFT, TPOT, ITL and throughput."""

    name = "bench serve"

    url: str = Field("http://127.0.0.1:8000/v1", description="base URL of an OpenAI-compatible server")
    model_name: str | None = Field(None, description="model to benchmark; default: the first model of the server")
    api_key: str | None = Field(None, description="API key of the server")
    endpoint: Literal["completions", "chat"] = Field("completions", description="API to benchmark")
    num_requests: PositiveInt = Field(64, description="number of requests")
    duration: Seconds | None = Field(
        None, description="send requests for this many seconds, instead of a number of requests"
    )
    concurrency: PositiveInt = Field(16, description="maximum number of concurrent requests")
    request_rate: Seconds | None = Field(
        None, description="requests per second, as a Poisson process; default: as fast as possible"
    )
    input_len: PositiveInt = Field(
        128, description="length of a prompt without the shared prefix, in words of about one token"
    )
    prefix_len: NonNegativeInt = Field(0, description="length of the shared prefix of all prompts, in words")
    output_len: PositiveInt = Field(128, description="tokens to generate per request")
    abort_fraction: Fraction = Field(
        0.0, description="fraction of streams that the client aborts, at a random chunk of the first half"
    )
    ignore_eos: Flag = Field(
        True, description="generate output-len tokens even if the model emits an end token earlier"
    )
    profile: Flag = Field(
        False, description="let the server record a profile of its steps meanwhile (its --profiler-config)"
    )
    workload_seed: NonNegativeInt = Field(0, description="seed of prompts and arrival times")
    timeout: Seconds = Field(600.0, description="timeout of a request in seconds")
    result: Path | None = Field(None, description="JSON file to write the results to")
    plot: Path | None = Field(None, description="PNG or SVG file to write a plot of the latencies to")


class BenchPooling(Command):
    """Benchmark embeddings or rerank: throughput and latency."""

    name = "bench pooling"

    url: str = Field("http://127.0.0.1:8000/v1", description="base URL of an OpenAI-compatible server")
    model_name: str | None = Field(None, description="model to benchmark; default: the first model that has the task")
    api_key: str | None = Field(None, description="API key of the server")
    endpoint: Literal["embeddings", "rerank"] = Field("embeddings", description="API to benchmark")
    num_requests: PositiveInt = Field(64, description="number of requests")
    duration: Seconds | None = Field(
        None, description="send requests for this many seconds, instead of a number of requests"
    )
    concurrency: PositiveInt = Field(4, description="maximum number of concurrent requests")
    request_rate: Seconds | None = Field(
        None, description="requests per second, as a Poisson process; default: as fast as possible"
    )
    batch_size: PositiveInt = Field(32, description="number of texts per request, or documents of a rerank")
    min_len: PositiveInt = Field(8, description="length of the shortest texts, in words of about one token")
    max_len: PositiveInt = Field(400, description="length of the longest texts, in words of about one token")
    truncate: Flag = Field(
        False, description="ask the server to truncate texts that are longer than the model's context"
    )
    query_len: PositiveInt = Field(12, description="length of the query of a rerank, in words of about one token")
    encoding_format: Literal["float", "base64"] = Field("base64", description="format of the embeddings")
    workload_seed: NonNegativeInt = Field(0, description="seed of texts and arrival times")
    timeout: Seconds = Field(600.0, description="timeout of a request in seconds")
    result: Path | None = Field(None, description="JSON file to write the results to")


class BenchStartup(Command):
    """Benchmark the start-up of a server, until it is ready and until its first token."""

    name = "bench startup"
    positional = frozenset({"model"})

    model: CliPositionalArg[Names] = Field((), description="model to start; default: the bundled quire-nano")
    runs: PositiveInt = Field(3, description="number of server starts to measure")
    timeout: Seconds = Field(600.0, description="timeout of a start in seconds")
    serve_args: str = Field("", description="further flags of `quire serve`, as one quoted string")
    result: Path | None = Field(None, description="JSON file to write the results to")


class BenchAccuracy(Command):
    """Compare models, formats and servers: perplexity of texts, and agreement of the most probable tokens."""

    name = "bench accuracy"
    positional = frozenset({"texts"})

    texts: CliPositionalArg[Names] = Field((), description="files of UTF-8 text; default: a story that is bundled")
    run: Names = Field(
        (),
        description="a model to compare; repeat the flag, the first is the one that the others are compared with: "
        "a model with flags of `quire serve`, as one quoted string, or the base URL of a server and, behind it, a name "
        "of one of its models",
    )
    api_key: str | None = Field(None, description="API key of the servers")
    window: Annotated[int, Field(ge=2)] = Field(
        1024, description="number of tokens that a model reads at once, with special tokens in front"
    )
    stride: PositiveInt = Field(
        512, description="tokens by which windows move on; the tokens of a window before the last ones are context"
    )
    top_logprobs: PositiveInt = Field(
        10, description="most probable tokens to ask for at each place, for the divergence of models"
    )
    timeout: Seconds = Field(600.0, description="timeout of a request in seconds")
    result: Path | None = Field(None, description="JSON file to write the results to")
    plot: Path | None = Field(None, description="PNG or SVG file to write a plot of the differences to")


COMMANDS: tuple[type[Command], ...] = (
    Serve,
    Render,
    Key,
    Config,
    CollectEnv,
    Chat,
    Listen,
    Embed,
    BenchServe,
    BenchPooling,
    BenchStartup,
    BenchAccuracy,
)
