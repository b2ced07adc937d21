"""Groups of options. Each room is handed its own group, never the whole configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, WithJsonSchema
from pydantic_settings import CliImplicitFlag, NoDecode

from quire.config.lists import Keys, Names, Origins
from quire.config.tool_servers import ToolServers

Flag = CliImplicitFlag[bool]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _parse_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


JsonObject = Annotated[dict[str, Any], NoDecode, BeforeValidator(_parse_json)]
Size = Annotated[ByteSize, WithJsonSchema({"takes": "a size in bytes such as 512MiB or 4GiB"})]


# The loosest type, as a command is settings and options at once.
_CONFIG: Any = ConfigDict(frozen=True, extra="forbid")


class Options(BaseModel):
    model_config = _CONFIG

    @classmethod
    def of(cls, settings: BaseModel) -> Self:
        """This group's share of a command's settings."""
        return cls.model_validate({name: getattr(settings, name) for name in cls.model_fields})


class ServerOptions(Options):
    """Where the server listens and who may talk to it."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for every interface")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8000, description="port to listen on; 0 picks a free one")
    api_key: Keys = Field((), description="key that clients must send as Bearer token; repeat it for several keys")
    served_model_name: Names = Field(
        (), description="names under which the model answers; with several models write NAME=MODEL"
    )
    allowed_origins: Origins = Field((), description="browser origins that may call the API (CORS); * for all")
    root_path: str = Field("", description="path prefix that a proxy in front strips off")
    ssl_certfile: Path | None = Field(None, description="certificate file; with --ssl-keyfile the server speaks HTTPS")
    ssl_keyfile: Path | None = Field(None, description="private key of --ssl-certfile")
    strict_fields: Flag = Field(False, description="refuse request fields that nobody knows instead of naming them")
    sse_keepalive: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        15.0, description="seconds after which a stream that has nothing to say sends a comment; 0: never"
    )
    response_store: str | None = Field(
        None,
        description="where stored responses are kept, as a SQLAlchemy URL; a SQLite file in the user's state folder if "
        "not given, sqlite:// for memory",
    )
    response_ttl: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        30 * 24 * 3600.0, description="seconds for which a stored response is kept; 0: for ever"
    )
    tool_server: ToolServers = Field(
        (), description="MCP servers whose tools requests to /v1/responses may use; needs quire[mcp]"
    )
    tool_timeout: Seconds = Field(60.0, description="seconds that a call of a tool server may take")
    drain_timeout: Seconds = Field(30.0, description="seconds that running requests get to finish at SIGTERM")
    stall_timeout: Seconds = Field(120.0, description="seconds without progress after which /health turns red")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe message to log")
    access_log: Flag = Field(True, description="log a line for each HTTP request")
    vllm_metric_names: Flag = Field(
        True, description="export each metric under vLLM's name as well, for its dashboards"
    )


class LimitOptions(Options):
    """What one client may ask for."""

    max_body_size: Size = Field(ByteSize(32 << 20), description="largest request body, e.g. 32MiB")
    max_queued_requests: NonNegativeInt = Field(
        512, description="sequences that may wait for a place in the batch; more are answered 503 with Retry-After"
    )
    request_timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.0, description="seconds after which an answer is given up with status 408; 0: never"
    )
    max_n: PositiveInt = Field(64, description="largest n of a request")
    max_prompts: PositiveInt = Field(1024, description="most prompts in one completions request")
    max_stop: PositiveInt = Field(16, description="most stop strings of a request")
    max_bad_words: PositiveInt = Field(128, description="most bad_words of a request")
    max_logprobs: NonNegativeInt = Field(20, description="largest number of alternatives in logprobs")


class ModelOptions(Options):
    """How a model folder is read."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="number format of weights and KV cache; auto is bfloat16, or float32 for float32 checkpoints where "
        "the CPU does not compute in bfloat16",
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none", description="bits to which the weights of linear layers are rounded while they load"
    )
    device: Literal["cpu"] = Field("cpu", description="device that runs the model")
    max_model_len: PositiveInt | None = Field(
        None, description="context length in tokens; the model's own, as far as the KV cache holds it, if not given"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a Hugging Face repository")
    model_impl: Literal["auto", "quire", "transformers"] = Field(
        "auto", description="auto uses Quire's decoder where it knows the architecture, else Hugging Face's module"
    )


class ChatOptions(Options):
    """How messages become a prompt and which defaults a request gets."""

    chat_template: Path | None = Field(None, description="Jinja file to use instead of the model's chat template")
    default_chat_template_kwargs: JsonObject = Field({}, description="JSON object given to every chat template")
    trust_request_chat_template: Flag = Field(False, description="let requests bring a chat_template of their own")
    generation_config: Literal["auto", "none"] = Field(
        "auto", description="auto takes sampling defaults from the model's generation_config.json, none does not"
    )
    reasoning_parser: str = Field(
        "auto",
        description="parser that splits off reasoning: auto (by the chat template), none, a name as in vLLM, or "
        "START...END tags",
    )
    tool_call_parser: str = Field(
        "auto", description="parser that finds tool calls: auto (by the chat template), none, or a name as in vLLM"
    )


class EngineOptions(Options):
    """How the engine batches and how much memory its KV cache takes."""

    max_num_seqs: PositiveInt = Field(64, description="most sequences in one step")
    max_num_batched_tokens: PositiveInt = Field(
        512, description="token budget of a step; longer prompts are computed in chunks"
    )
    block_size: Annotated[int, Field(ge=1, le=256)] = Field(16, description="tokens in a KV block")
    kv_cache_memory: Size | None = Field(
        None, description="bytes for the KV cache of each model, e.g. 4GiB; sized from free memory if not given"
    )
    kv_cache_dtype: Literal["auto", "int8"] = Field(
        "auto", description="number format of the KV cache: that of the model, or 8 bits with a scale for each head"
    )
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="share of the memory free after loading that KV caches may take together"
    )
    prefix_caching: Flag = Field(True, description="reuse the KV blocks of prompts that begin alike")
    prefix_hash: Literal["sha256", "xxhash"] = Field(
        "sha256", description="hash of KV blocks; xxhash is faster, but a hostile client could forge a collision"
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="order of waiting requests; priority serves the lowest `priority` first"
    )
    speculation: Literal["none", "ngram"] = Field(
        "none", description="ngram guesses tokens from earlier ones and verifies several at once; the text is the same"
    )
    num_speculative_tokens: PositiveInt = Field(16, description="most tokens guessed at once for a sequence")
    engine_process: Flag = Field(False, description="run the engine in a process of its own instead of a thread")
    num_threads: PositiveInt | None = Field(None, description="CPU threads of the engine; all cores if not given")
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = Field(0, description="seeds the requests that bring no seed")
