"""The commands of `quire` and their settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import CliPositionalArg

from quire.config.command import Command
from quire.config.lists import Names
from quire.config.options import (
    ChatOptions,
    EngineOptions,
    Flag,
    LimitOptions,
    ModelOptions,
    NonNegativeInt,
    PositiveInt,
    Seconds,
    ServerOptions,
)

Fraction = Annotated[float, Field(ge=0, le=1)]


class Serve(Command, EngineOptions, ChatOptions, ModelOptions, LimitOptions, ServerOptions):
    """Settings of `quire serve`."""

    name = "serve"
    summary = "serve models over OpenAI's HTTP API"
    positional = frozenset({"model"})

    model: CliPositionalArg[Names] = Field(
        (), description="Hugging Face ids or folders; the bundled quire-nano if none is given"
    )


class Chat(Command):
    """Settings of `quire chat`."""

    name = "chat"
    summary = "chat in the terminal with any OpenAI server"

    url: str = Field("http://127.0.0.1:8000/v1", description="base URL of the server")
    model_name: str | None = Field(None, description="model to talk to; the server's first if not given")
    api_key: str | None = Field(None, description="key to send as Bearer token")
    system: str | None = Field(None, description="system message that opens the conversation")
    message: str | None = Field(None, description="send this one message, print the answer and leave")
    temperature: Annotated[float, Field(ge=0)] | None = Field(None, description="sampling temperature")
    max_tokens: PositiveInt | None = Field(None, description="most tokens of an answer")


class BenchServe(Command):
    """Settings of `quire bench serve`."""

    name = "bench serve"
    summary = "load a server and measure TTFT, TPOT, ITL and throughput"

    url: str = Field("http://127.0.0.1:8000/v1", description="base URL of any OpenAI server")
    model_name: str | None = Field(None, description="model to ask; the server's first if not given")
    api_key: str | None = Field(None, description="key to send as Bearer token")
    endpoint: Literal["completions", "chat"] = Field("completions", description="API to load")
    num_requests: PositiveInt = Field(64, description="requests to send")
    duration: Seconds | None = Field(None, description="keep sending for so many seconds instead")
    concurrency: PositiveInt = Field(16, description="most requests in flight")
    request_rate: Seconds | None = Field(None, description="requests a second, Poisson arrivals; at once if not given")
    input_len: PositiveInt = Field(128, description="words of a prompt's own part; about as many tokens")
    prefix_len: NonNegativeInt = Field(0, description="words that all prompts begin with")
    output_len: PositiveInt = Field(128, description="tokens to generate for a request")
    abandon: Fraction = Field(0.0, description="share of the streams that the client closes half-way")
    ignore_eos: Flag = Field(True, description="generate output-len tokens whatever the model says")
    seed: NonNegativeInt = Field(0, description="seeds prompts and arrivals")
    timeout: Seconds = Field(600.0, description="seconds that one request may take")
    result: Path | None = Field(None, description="JSON file for the result")
    plot: Path | None = Field(None, description="PNG or SVG file for a plot of the latencies")


class BenchStartup(Command):
    """Settings of `quire bench startup`."""

    name = "bench startup"
    summary = "time a server from process start to ready and to its first token"
    positional = frozenset({"model"})

    model: CliPositionalArg[Names] = Field((), description="model to start; the bundled quire-nano if none is given")
    runs: PositiveInt = Field(3, description="how often to start it")
    timeout: Seconds = Field(600.0, description="seconds that one start may take")
    serve_args: str = Field("", description="further flags for `quire serve`, as one quoted text")
    result: Path | None = Field(None, description="JSON file for the result")


COMMANDS: tuple[type[Command], ...] = (Serve, Chat, BenchServe, BenchStartup)
