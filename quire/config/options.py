"""Groups of options. Each package gets its own group, never the whole configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from quire.config.kv_events import KVEventsConfig, KVEventsOption
from quire.config.kv_transfer import KVTransferConfig, KVTransferOption
from quire.config.profiler import ProfilerConfig, ProfilerOption
from quire.config.types import (
    SECRET,
    AttentionBackendName,
    Counts,
    Endpoints,
    Flag,
    HistogramBuckets,
    JsonObject,
    Keys,
    LogFormat,
    MetricsVersion,
    Names,
    NonNegativeInt,
    Origins,
    PathPrefix,
    PositiveInt,
    RateLimit,
    Seconds,
    SecondsOrNever,
    Size,
    SizeFromKiB,
    SizeFromMiB,
    SizeOrNone,
    ToolServers,
    TraceDetails,
)

# Typed as Any because a command inherits from both BaseSettings and Options.
_CONFIG: Any = ConfigDict(frozen=True, extra="forbid")


class Options(BaseModel):
    model_config = _CONFIG

    @classmethod
    def of(cls, settings: BaseModel) -> Self:
        """The options of this group from the settings of a command."""
        return cls.model_validate({name: getattr(settings, name) for name in cls.model_fields})


class ServerOptions(Options):
    """Where the server listens, and which clients it accepts."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all interfaces")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8000, description="port to listen on; 0 picks a free one")
    uds: Path | None = Field(
        None, description="path of a Unix domain socket to listen on, instead of --host and --port"
    )
    api_server_count: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="number of processes that serve HTTP before the engine or the replicas of one MODEL, and share the "
        "port; one that dies is started again; Linux only",
    )
    api_key: Keys = Field(
        (), description="key that clients must send as Bearer token; repeat the flag for several keys"
    )
    admin_api_key: Keys = Field(
        (),
        description="key for the endpoints that change the server for everybody, such as /sleep and /pause, which "
        "other keys then do not open; it opens everything else as well; repeatable",
    )
    api_key_file: Path | None = Field(
        None,
        description="TOML file with a table for each client: `sha256` of its key, `admin`, and its limits, as "
        "`quire key` writes it; read again when it changes and on SIGHUP",
    )
    requests_per_minute: RateLimit = Field(
        0,
        description="requests that may be sent with each API key in a minute; beyond it: status 429 with Retry-After; "
        "0: no limit; --api-key-file may set others",
    )
    tokens_per_minute: RateLimit = Field(
        0,
        description="tokens that each API key may use in a minute: prompt tokens that are not cached, and generated "
        "ones; 0: no limit; --api-key-file may set others",
    )
    max_concurrent_requests: RateLimit = Field(
        0,
        description="requests and realtime sessions of each API key that may be answered at the same time; 0: no "
        "limit; --api-key-file may set others",
    )
    served_model_name: Names = Field((), description="names of the model in the API; with several models NAME=MODEL")
    allowed_origins: Origins = Field((), description="browser origins that may call the API (CORS); * for all")
    allowed_hosts: Origins = Field(
        (),
        description="host names that clients may use in URLs of this server, * for all; default: all, or on a loopback "
        "address without --api-key: localhost, names in .localhost and .internal, and --host; IP addresses are always "
        "accepted",
    )
    root_path: PathPrefix = Field(
        "",
        description="path prefix of a reverse proxy; requests are served with and without it, and redirects have it",
    )
    strict_fields: Flag = Field(
        False,
        description="refuse request fields that are unknown or have no effect, with status 400; default: they are "
        "ignored and named in a header",
    )
    sse_keep_alive_interval: SecondsOrNever = Field(
        15.0,
        description="seconds without an event after which a stream of server-sent events sends a comment, so that "
        "proxies keep the connection open; 0: never",
    )
    enable_force_include_usage: Flag = Field(
        False, description="end every stream of chats and completions with a chunk that has `usage`"
    )
    return_tokens_as_token_ids: Flag = Field(
        False, description="write tokens of log-probabilities as token_id:N unless a request asks for their text"
    )
    enable_tokenizer_info_endpoint: Flag = Field(
        False, description="serve the tokenizer's configuration and the chat template at /tokenizer_info"
    )
    response_store: str | None = Field(
        None,
        description="database of stored responses, as a SQLAlchemy URL; sqlite:// is in memory; default: a SQLite file "
        "in the user's state directory",
    )
    response_store_size: SizeFromMiB | None = Field(
        None,
        description="total size of stored responses, above which the oldest are deleted; default: 1GiB, or 256MiB in "
        "memory",
    )
    response_ttl: SecondsOrNever = Field(
        30 * 24 * 3600.0, description="seconds after which a stored response expires; 0: never"
    )
    tool_server: ToolServers = Field(
        (), description="MCP server available to /v1/responses; repeatable; requires quire[mcp]"
    )
    tool_timeout: Seconds = Field(60.0, description="timeout of calls to MCP servers in seconds")
    max_tool_answer_size: SizeFromKiB = Field(
        ByteSize(4 << 20),
        description="largest answer of an MCP server to one list of its tools or one call; a larger one is refused, "
        "and the model sees the error of the call",
    )
    shutdown_timeout: Seconds = Field(
        20.0,
        description="seconds after SIGTERM until running requests are aborted; the process ends within 5 more seconds",
    )
    stall_timeout: Seconds = Field(
        120.0,
        description="seconds without engine progress after which /health returns 503, or a replica is started again",
    )
    enable_per_request_metrics: Flag = Field(
        False,
        description="have timings of the request in `metrics` of each answer of completions, chats, responses and "
        "messages, and in the last chunk of a stream with `usage`; requests may ask for them with `return_metrics`",
    )
    vllm_metric_names: Flag = Field(True, description="export metrics under vLLM's names as well")

    @property
    def needs_key(self) -> bool:
        """Whether clients need a key."""
        return bool(self.api_key) or self.api_key_file is not None


class LogOptions(Options):
    """What is logged, and how."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest level of messages that are logged"
    )
    log_format: LogFormat = Field("text", description="format of the log; json: an object in each line")
    access_log: Flag = Field(True, description="log each HTTP request and realtime session, when it ends")
    disable_access_log_for_endpoints: Endpoints = Field(
        ("/health", "/ready", "/ping", "/metrics"),
        description="paths whose requests --access-log does not log; separated by commas; an empty value: none",
    )
    enable_log_requests: Flag = Field(
        False, description="log the prompt and the parameters of each request to an engine, cut to --max-log-len"
    )
    enable_log_outputs: Flag = Field(
        False, description="log the text of each answer, cut to --max-log-len; with --enable-log-requests"
    )
    max_log_len: Annotated[int, Field(ge=0, le=1 << 20)] = Field(
        1024, description="most characters of a prompt, of parameters and of an answer in the log"
    )
    log_stats: Flag = Field(
        True, description="log throughput, queue and cache of each engine every --log-stats-interval, while it works"
    )
    log_stats_interval: Seconds = Field(10.0, description="seconds between two lines of --log-stats")


class MetricsOptions(Options):
    """Which metrics there are, and where they go."""

    show_hidden_metrics_for_version: MetricsVersion | None = Field(
        None,
        description="export deprecated metrics that have been hidden since this version of vLLM, or a later one; "
        "docs/metrics.md lists them",
    )
    custom_histogram_buckets: HistogramBuckets = Field(
        {},
        description="JSON object with the upper bounds of the buckets of histograms instead of the default ones; "
        "docs/metrics.md lists the histograms of each key",
    )
    otlp_metrics_endpoint: str | None = Field(
        None,
        description="URL of an OpenTelemetry collector to which metrics are sent over OTLP as well; the variables "
        "OTEL_* of OpenTelemetry's SDK are obeyed; default: none, unless OTEL_METRICS_EXPORTER is otlp or "
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT is set",
    )


class TracingOptions(Options):
    """Traces of requests, by OpenTelemetry."""

    otlp_traces_endpoint: str | None = Field(
        None,
        description="URL of an OpenTelemetry collector that gets a trace of each request, such as "
        "http://localhost:4317; default: that of OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT, "
        "else none. The protocol is gRPC, or http/protobuf with OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    )
    collect_detailed_traces: TraceDetails = Field(
        (), description="add the steps of the engine to traces; all values of vLLM do the same"
    )


class TlsOptions(Options):
    """HTTPS. Names and values are uvicorn's."""

    ssl_certfile: Path | None = Field(None, description="certificate file; with --ssl-keyfile the server speaks HTTPS")
    ssl_keyfile: Path | None = Field(None, description="private key of --ssl-certfile")
    ssl_keyfile_password: Annotated[str | None, SECRET] = Field(
        None, description="password of --ssl-keyfile, if it is encrypted"
    )
    ssl_ca_certs: Path | None = Field(
        None, description="file with certificates of authorities, for the certificates of clients"
    )
    ssl_cert_reqs: Literal["0", "1", "2"] = Field(
        "0",
        description="certificates of clients (mutual TLS); 0: not asked for; 1: checked if a client sends one; 2: "
        "required; 1 and 2 need --ssl-ca-certs",
    )
    ssl_ciphers: str | None = Field(
        None, description="cipher suites of TLS 1.2, as OpenSSL's cipher list; default: those that Python chooses"
    )
    ssl_version: Literal["17", "5"] = Field(
        "17", description="versions of TLS, as a number of Python's ssl module; 17: 1.2 and 1.3; 5: 1.2 only"
    )
    enable_ssl_refresh: Flag = Field(
        False,
        description="read the files of --ssl-certfile, --ssl-keyfile and --ssl-ca-certs again when they change, not "
        "only on SIGHUP",
    )


class ConnectionOptions(Options):
    """Bounds on connections, and on headers, URLs and bodies while they arrive."""

    limit_concurrency: PositiveInt = Field(
        8192,
        description="maximum number of concurrent HTTP requests; further requests, except health probes, get "
        "status 503 with Retry-After; reduced if the process's limit of open files is lower",
    )
    max_header_count: PositiveInt = Field(256, description="maximum number of headers of a request")
    max_header_size: Size = Field(ByteSize(32 << 10), description="maximum size of all headers of a request")
    max_url_size: Size = Field(ByteSize(16 << 10), description="maximum size of the URL of a request")
    max_total_body_size: Size = Field(
        ByteSize(512 << 20),
        description="maximum size of all request bodies together that are arriving or being parsed, uploaded files "
        "included; beyond it the slowest get status 503 with Retry-After; at least --max-body-size",
    )
    header_timeout: Seconds = Field(
        20.0, description="time for sending the headers of a request, in seconds; after it: status 408"
    )
    body_timeout: Seconds = Field(
        20.0,
        description="time for sending the body of a request, in seconds; each received KiB postpones the "
        "deadline by a second, to at most this many seconds in the future; after it: status 408",
    )
    write_timeout: Seconds = Field(
        30.0, description="seconds after which a client that reads nothing of its response is disconnected"
    )
    timeout_keep_alive: Seconds = Field(5.0, description="seconds without a request after which a connection is closed")


class LimitOptions(Options):
    """Limits of requests."""

    max_body_size: Size = Field(ByteSize(32 << 20), description="largest request body")
    max_json_values: Annotated[int, Field(ge=1024)] = Field(
        1 << 20,
        description="maximum number of JSON values in a request body; at most a quarter of this number may be strings, "
        "keys included, and at most an eighth arrays, objects and keys together",
    )
    max_num_queued_seqs: NonNegativeInt = Field(
        512,
        description="maximum number of waiting sequences (a request with n=4 has four sequences); "
        "further requests get status 503 with Retry-After",
    )
    max_client_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.75,
        description="largest share of the slots for sequences, the realtime sessions and other shared resources that "
        "one client may hold while nobody else uses them; less while others do; a client is an API key, or an address "
        "if there are not several keys; beyond it requests get status 429 with Retry-After; 1: no limit",
    )
    request_timeout: SecondsOrNever = Field(
        0.0, description="seconds after which a request is aborted with status 408; 0: never"
    )
    max_n: PositiveInt = Field(64, description="maximum of `n` in a request")
    max_prompts: PositiveInt = Field(1024, description="maximum number of prompts in a completions request")
    max_inputs: Annotated[int, Field(ge=1, le=1 << 14)] = Field(
        2048,
        description="maximum number of inputs, documents or pairs in a request for embeddings, classification or "
        "scores",
    )
    max_stop: PositiveInt = Field(16, description="maximum number of stop strings in a request")
    max_bad_words: PositiveInt = Field(128, description="maximum number of bad_words in a request")
    max_logprobs: Annotated[int, Field(ge=-1)] = Field(
        20,
        description="maximum of `top_logprobs`, `prompt_logprobs` and `logprobs` of completions: alternatives for "
        "each token; -1: no limit, and a request for the whole vocabulary then gets megabytes for each token",
    )


class RealtimeOptions(Options):
    """Limits of sessions of /v1/realtime."""

    max_realtime_sessions: PositiveInt = Field(
        64, description="maximum number of realtime sessions; further ones get status 503 with Retry-After"
    )
    max_realtime_event_size: Size = Field(
        ByteSize(21 << 20),
        description="largest event of a realtime client, in characters; an event up to twice as large is refused, a "
        "larger one closes the connection; the default holds 15 MiB of audio in base64",
    )
    max_realtime_audio: Seconds = Field(
        600.0,
        description="maximum seconds of audio that a realtime client may append without a commit, if there is no voice "
        "activity detection",
    )
    realtime_idle_timeout: SecondsOrNever = Field(
        120.0, description="seconds without an event after which a realtime session ends; 0: never"
    )
    realtime_session_timeout: SecondsOrNever = Field(
        14400.0, description="seconds after which a realtime session ends; 0: never"
    )
    realtime_interim_interval: SecondsOrNever = Field(
        0.25,
        description="minimum seconds of new audio between two interim transcriptions of an utterance that is being "
        "spoken; 0: no interim transcriptions",
    )


LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
HubName = Literal["huggingface", "modelscope"]
OnlineQuantization = Literal["none", "int8", "int4", "fp8"]
# vLLM's names of the formats of checkpoints; fp8 is one, too.
CheckpointQuantization = Literal[
    "auto-round",
    "auto_awq",
    "auto_gptq",
    "auto_round",
    "awq",
    "awq_marlin",
    "bitsandbytes",
    "compressed-tensors",
    "compressed_tensors",
    "fbgemm_fp8",
    "gguf",
    "gpt_oss_mxfp4",
    "gptq",
    "gptq_bitblas",
    "gptq_marlin",
    "hqq",
    "inc",
    "modelopt",
    "modelopt_fp4",
    "modelopt_mixed",
    "modelopt_mxfp8",
    "moe_wna16",
    "mxfp4",
    "mxfp8",
    "quark",
    "torchao",
]


class ModelOptions(Options):
    """How models are loaded."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="data type of weights and KV cache; auto: bfloat16, or float32 for float32 checkpoints on CPUs "
        "without bfloat16 instructions, or float16 for float16 checkpoints on GPUs; float16 on CPUs: the same as auto, "
        "with a warning",
    )
    quantization: Literal[OnlineQuantization, CheckpointQuantization] = Field(
        "none",
        description="quantization of the weights of linear layers while they are loaded; int8 raises perplexity by "
        "less than 1 %, int4 by 1 to 2 % on CPUs, where small models get 6 bits, and by more on GPUs; fp8: on GPUs of "
        "compute capability 8.9 or more. The other values are vLLM's names of formats of checkpoints: accepted if the "
        "checkpoint has this format, which is read from its files in any case",
    )
    activation_quantization: Literal["auto", "none"] = Field(
        "auto",
        description="rounding of what quantized weights are multiplied with; auto: on CPUs with bfloat16 to int8 in "
        "groups of 32 inputs, on GPUs as the format of the weights has it; none: on CPUs there is none, and weights "
        "take 16 bits in memory, with the values that quantization has left them",
    )
    load_format: LoadFormat = Field(
        "auto",
        description="files that weights are read from; auto: .safetensors files, or one .gguf file if there are none; "
        "dummy: none, weights are random, for benchmarks",
    )
    packed_weight_cache_size: SizeOrNone = Field(
        ByteSize(32 << 30),
        description="disk space for packed weights of quantized models on CPUs, in quire/packed of the user's cache, "
        "from which the next start maps them; those used least recently are removed; 0: no cache",
    )
    device: Literal["auto", "cpu", "cuda", "reference"] = Field(
        "auto",
        description="what runs the model; auto: cuda if there is a CUDA device and triton is installed, otherwise cpu; "
        "cpu: compiled kernels on the CPU; cuda: Triton kernels on the first GPU of CUDA_VISIBLE_DEVICES (with several "
        "ranks, on one GPU for each); reference: plain PyTorch on the CPU, several times slower, which cpu also uses "
        "if the compiled kernels are not installed",
    )
    max_model_len: PositiveInt | None = Field(
        None, description="context length in tokens; default: that of the model, reduced if the KV cache is smaller"
    )
    revision: str | None = Field(None, description="branch, tag or commit of the repository of a model")
    model_hub: HubName = Field(
        "huggingface",
        description="where repositories of models are downloaded from; huggingface: the Hugging Face Hub or the mirror "
        "in HF_ENDPOINT, with all variables HF_* of huggingface_hub; modelscope: needs quire[modelscope]",
    )
    hf_overrides: JsonObject = Field(
        {}, description="JSON object of values that replace those of the model's config.json"
    )
    model_impl: Literal["auto", "quire", "transformers"] = Field(
        "auto",
        description="auto: Quire's implementation if it supports the model's architecture and config, otherwise that "
        "of transformers",
    )
    task: Literal["auto", "generate", "embed", "classify", "score", "token_embed", "token_classify"] = Field(
        "auto",
        description="task of the model; auto: read from its configuration files, also for pooling models; "
        "transcription models are always detected",
    )
    language_model_only: Flag = Field(
        False,
        description="load the language model alone of a model that reads pictures; it then answers text only",
    )
    convert: Literal["none", "embed", "classify"] = Field(
        "none",
        description="use of a causal language model for another task; none: the model is used for its own task; "
        "embed: its hidden states become embeddings (vLLM's `--runner pooling`); classify: its logits of the tokens in "
        "classifier_from_token of config.json (default: no and yes) become scores, as for rerank",
    )
    pooler_config: JsonObject = Field(
        {},
        description="JSON object with settings of pooling instead of the model's own, with vLLM's names: task, "
        "pooling_type (LAST, CLS, MEAN, MAX, MEAN_SQRT_LEN or WEIGHTED_MEAN), seq_pooling_type, tok_pooling_type (ALL "
        "or STEP), use_activation, dimensions, enable_chunked_processing, max_embed_len, logit_mean, logit_sigma, "
        "step_tag_id, returned_token_ids",
    )

    @property
    def online_quantization(self) -> OnlineQuantization:
        """How weights are quantized while they are loaded; none if `quantization` names the checkpoint's format."""
        online: tuple[OnlineQuantization, ...] = get_args(OnlineQuantization)
        return next((method for method in online if method == self.quantization), "none")


class ParallelOptions(Options):
    """How a model is divided among processes, which are called ranks."""

    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="number of ranks that share each layer; each has a GPU of its own, or a part of the CPU's cores; "
        "for models that generate text from text and pictures; with several ranks there are no CUDA graphs",
    )
    pipeline_parallel_size: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="number of stages: groups of ranks that each have a part of the layers; as many steps are computed "
        "at the same time, each with prompts or with a part of many running requests",
    )
    enable_expert_parallel: Flag = Field(
        False,
        description="give each rank of --tensor-parallel-size whole experts of a mixture of experts, instead of a part "
        "of each expert",
    )
    nnodes: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="number of machines that run the model together, each with the same number of ranks; each runs "
        "quire serve with the same model and settings, those with a --node-rank above 0 with --headless; Linux only",
    )
    node_rank: Annotated[int, Field(ge=0, lt=64)] = Field(
        0, description="number of this machine among --nnodes; 0 is the server, and has the first ranks"
    )
    headless: Flag = Field(
        False,
        description="run ranks for the server on node 0, without an HTTP server; for a --node-rank above 0; settings "
        "of the HTTP server and of clients have no effect",
    )
    master_addr: str = Field(
        "127.0.0.1",
        description="address of node 0, where it waits for the other nodes; it listens there only. What nodes send is "
        "neither encrypted nor signed: use a private network",
    )
    master_port: Annotated[int, Field(ge=1, le=65535)] = Field(
        29501, description="port of node 0 at --master-addr; tensors and the store of ranks have other ports"
    )
    node_addr: str | None = Field(
        None,
        description="address of this machine by which other nodes reach it; default: the one from which it reaches "
        "--master-addr, on node 0 --master-addr itself",
    )
    distributed_timeout_seconds: Seconds = Field(
        600.0, description="seconds in which all nodes have to come together, after each has found its model"
    )
    data_parallel_size: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="number of replicas of the model, which are engines in processes of their own; the server divides "
        "the CPU's cores or the GPUs among them, and sends a request to where it makes the least new work",
    )
    data_parallel_size_local: Annotated[int, Field(ge=1, le=64)] | None = Field(
        None,
        description="number of replicas of this server: all of --data-parallel-size, or fewer with "
        "--data-parallel-hybrid-lb",
    )
    data_parallel_rank: Annotated[int, Field(ge=0, lt=1 << 16)] | None = Field(
        None,
        description="this server has one replica only, with this rank of --data-parallel-size, and others are servers "
        "of their own behind a load balancer; metrics have the rank in their label `engine`",
    )
    data_parallel_external_lb: Flag = Field(
        False,
        description="a load balancer divides requests among servers; needs --data-parallel-rank",
    )
    data_parallel_start_rank: Annotated[int, Field(ge=0, lt=1 << 16)] | None = Field(
        None, description="rank of the first replica of this server; needs --data-parallel-hybrid-lb"
    )
    data_parallel_hybrid_lb: Flag = Field(
        False,
        description="a load balancer divides requests among servers, and each divides its own among "
        "--data-parallel-size-local replicas, which have ranks of --data-parallel-size from "
        "--data-parallel-start-rank on",
    )
    enable_elastic_ep: Flag = Field(
        False,
        description="run the engine in a process even with one replica, so that POST /scale_elastic_ep can add others",
    )

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def local_ranks(self) -> int:
        """Number of ranks of each machine."""
        return self.ranks // self.nnodes

    @property
    def has_replicas(self) -> bool:
        """Whether the server has a set of replicas, of which there may be one at first."""
        return self.replicas > 1 or self.enable_elastic_ep

    @property
    def replicas(self) -> int:
        """Number of replicas that the server starts with."""
        if self.data_parallel_rank is not None:
            return 1
        local = self.data_parallel_size_local
        return local if self.data_parallel_hybrid_lb and local is not None else self.data_parallel_size

    @property
    def has_part_of_replicas(self) -> bool:
        """Whether other servers have the other ranks of --data-parallel-size."""
        return self.data_parallel_rank is not None or self.data_parallel_hybrid_lb

    @property
    def first_replica(self) -> int:
        """Rank of the server's first replica."""
        return self.data_parallel_rank or self.data_parallel_start_rank or 0


class ChatOptions(Options):
    """Chat templates, parsers and defaults of requests."""

    chat_template: str | None = Field(
        None, description="Jinja file, or the text of a template, to use instead of the model's chat template"
    )
    default_chat_template_kwargs: JsonObject = Field({}, description="JSON object of variables for every chat template")
    trust_request_chat_template: Flag = Field(False, description="allow `chat_template` in requests")
    generation_config: Literal["auto", "none"] = Field(
        "auto", description="auto: use sampling defaults of the model's generation_config.json; none: ignore them"
    )
    override_generation_config: JsonObject = Field(
        {}, description="JSON object of sampling defaults that replace those of generation_config.json"
    )
    reasoning_parser: str = Field(
        "auto",
        description="parser that splits off reasoning: auto (detected in the chat template), none (keep it in the "
        "content), a vLLM parser name, or START...END",
    )
    tool_call_parser: str = Field(
        "auto",
        description="parser that finds tool calls: auto (detected in the chat template), none (keep them in the "
        "content), or a vLLM parser name",
    )


class EngineOptions(Options):
    """Scheduling, and the memory of the KV cache."""

    max_num_seqs: Annotated[int, Field(ge=1, le=1 << 16)] = Field(
        64, description="maximum number of running sequences; at most --max-num-batched-tokens"
    )
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=1 << 24)] = Field(
        512,
        description="maximum number of tokens in a step; longer prompts are computed in chunks (by encoder models: "
        "whole, in a step of their own); at least --max-num-seqs",
    )
    block_size: Annotated[int, Field(ge=1, le=256)] = Field(16, description="tokens in a KV block")
    kv_cache_memory_bytes: Size | None = Field(
        None,
        description="size of the KV cache of each model, e.g. 4GiB; with several ranks that of each rank; default: "
        "from --kv-cache-free-memory-fraction, or on GPUs from --gpu-memory-utilization",
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "int8", "fp8"] = Field(
        "auto",
        description="data type of the KV cache; auto: that of the model, or fp8 where the checkpoint was made for it "
        "and the device has it; bfloat16, float16: that of the model, for models that run in it; int8: 8 bits with a "
        "scale for each 64 elements of a head of a token; fp8: float8_e4m3 with the checkpoint's scales, if it has "
        "any, on GPUs of compute capability 8.9 or more",
    )
    kv_offloading_size: Annotated[float, Field(ge=0, le=1 << 20, allow_inf_nan=False)] = Field(
        0,
        description="on GPUs: GiB of host memory, pinned, for KV blocks of the prefix cache of each model, which later "
        "requests copy back instead of computing them; with one rank; 0: none. On CPUs the KV cache is in this memory: "
        "see --kv-offloading-disk-size",
    )
    kv_offloading_disk_size: Annotated[float, Field(ge=0, le=1 << 20, allow_inf_nan=False)] = Field(
        0,
        description="GiB of the disk for KV blocks of the prefix cache, which later requests read instead of computing "
        "them, also after a restart; of all models and servers that use the same folder; with one rank, and on GPUs "
        "behind the memory of --kv-offloading-size; 0: none",
    )
    kv_offloading_backend: Literal["native"] = Field(
        "native",
        description="what keeps KV blocks in host memory and on the disk; native: Quire itself (lmcache is not "
        "supported)",
    )
    kv_offloading_path: Path | None = Field(
        None,
        description="folder of --kv-offloading-disk-size, on a local disk; its files can be read as prompts by whoever "
        "has the model; default: quire/kv in the user's cache",
    )
    kv_cache_free_memory_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5,
        description="share of the memory that is free after the models are loaded, used for the KV caches of all "
        "models; does not include weights, unlike --gpu-memory-utilization; without effect on GPUs",
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="share of a GPU's memory for weights, KV caches and intermediate results of all models together; "
        "default: 0.9; on CPUs the same as --kv-cache-free-memory-fraction, which it overrides",
    )
    enforce_eager: Flag = Field(False, description="run each step kernel by kernel on a GPU, without CUDA graphs")
    cudagraph_capture_sizes: Counts = Field(
        (),
        description="numbers of sequences of the decode steps for which CUDA graphs are captured; smaller steps are "
        "padded to the next of them, larger ones run without; sizes above --max-num-seqs are ignored; default: 1, 2, "
        "4, multiples of 8 up to 256, multiples of 16 above, and --max-num-seqs itself; at most 512",
    )
    attention_backend: AttentionBackendName = Field(
        "auto",
        description="kernels of attention over the KV cache; auto: Quire's own, which alone are batch-invariant "
        "(bitwise); triton: the same, on GPUs only; flash_attn: FlashAttention 2, which needs "
        "--block-size 256; flashinfer: FlashInfer; these two are on GPUs, if the package is installed, with "
        "--dtype float16 or bfloat16",
    )
    encoder_cache_memory: Size = Field(
        ByteSize(256 << 20),
        description="size of the encoder cache: embeddings of audio, pictures and videos, kept for later chunks of a "
        "prompt and for other prompts with the same ones; in addition to the KV cache, and at least the size of one "
        "item. For "
        "Voxtral Realtime and Nemotron Speech Streaming it holds the encoder states of running requests instead, and "
        "so limits how many run at once (at least one)",
    )
    enable_prefix_caching: Flag = Field(True, description="reuse the KV blocks of common prompt prefixes")
    state_snapshot_memory: Size | None = Field(
        None,
        description="size of the host's memory for saved states of recurrent layers, without which prompts of models "
        "with such layers find nothing in the prefix cache; of each model, and with several ranks of each rank; "
        "beside a KV cache whose size is given; default: a quarter of the KV cache, at most 4GiB; 0: none",
    )
    prefix_caching_hash_algo: Literal["sha256", "xxhash"] = Field(
        "sha256",
        description="hash function of KV blocks; xxhash is faster, but a malicious client could produce collisions",
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="order of waiting requests: first come first served, or lowest `priority` first"
    )
    num_scheduler_steps: Annotated[int, Field(ge=1, le=64)] = Field(
        8,
        description="most decode steps that run on a CPU before their tokens are sent, together, if they take at most "
        "60 ms and no request waits or arrives; 1 sends each token by itself",
    )
    speculative_method: Literal["none", "ngram"] = Field(
        "none",
        description="method of speculative decoding; ngram: draft tokens are copied from earlier text; the output is "
        "unchanged",
    )
    num_speculative_tokens: Annotated[int, Field(ge=1, le=1 << 10)] = Field(
        16, description="maximum number of draft tokens of a sequence per step"
    )
    enable_sleep_mode: Flag = Field(
        False,
        description="accept /sleep and /wake_up, which free the memory of weights and KV cache and restore it; not "
        "with several ranks, nor for models that transcribe audio while it arrives",
    )
    weight_update_path: Path | None = Field(
        None,
        description="directory of models by whose weights /update_weights may replace those of a running model; "
        "default: none",
    )
    profiler_config: ProfilerOption = Field(
        {},
        description="JSON object of settings of torch's profiler, with vLLM's names, for /start_profile and "
        "/stop_profile; torch_profiler_dir is a directory or a URI of fsspec; a profile ends by itself after "
        "max_iterations steps (default: 200; 0: no limit) or max_seconds (default: 60); default: no profiler",
    )
    engine_process: Flag | None = Field(
        None,
        description="run an engine in a process of its own, and not in a thread of the server; default: a process for "
        "one model, threads for several",
    )
    on_engine_death: Literal["exit", "restart"] = Field(
        "exit",
        description="action when an engine has died; exit: stop the server with status 1; restart: load the model "
        "again, up to five times in a row; a replica is always started again while another one runs",
    )
    kv_cache_metrics: Flag = Field(
        False,
        description="measure how long KV blocks stay in the prefix cache, and how soon they are used again; needs "
        "--enable-prefix-caching",
    )
    kv_cache_metrics_sample: Annotated[float, Field(gt=0, le=1)] = Field(
        0.01, description="share of the KV blocks that --kv-cache-metrics watches"
    )
    kv_events_config: KVEventsOption = Field(
        {},
        description="JSON object by which the events of the prefix cache are published over ZeroMQ, with vLLM's names, "
        'such as {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "topic": "kv@10.0.0.5:8000@MODEL"}; who '
        "can connect reads the tokens of all prompts; works with one MODEL; default: they are not",
    )
    kv_transfer_config: KVTransferOption = Field(
        {},
        description="JSON object by which KV blocks of prompts are sent to other servers, or read from them, with "
        'vLLM\'s names, such as {"kv_connector": "QuireConnector", "kv_role": "kv_both", "kv_ip": "10.0.0.5"}; who can '
        "connect to kv_ip can read the blocks of prompts whose text is known there; on CPUs, with one rank and one "
        "MODEL; default: they are not",
    )
    num_threads: Annotated[int, Field(ge=1, le=1 << 10)] | None = Field(
        None,
        description="CPU threads of the engine, or of each rank; default: all cores, or as many as the CPU limit of a "
        "container, divided among replicas and ranks",
    )
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = Field(0, description="base seed for requests without `seed`")

    @property
    def profiler(self) -> ProfilerConfig | None:
        """The settings of the profiler; None: there is none."""
        return ProfilerConfig.model_validate(self.profiler_config) if self.profiler_config else None

    @property
    def kv_transfer(self) -> KVTransferConfig | None:
        """How KV blocks are sent to other servers and read from them; None: they are not."""
        return KVTransferConfig.model_validate(self.kv_transfer_config) if self.kv_transfer_config else None

    @property
    def kv_events(self) -> KVEventsConfig:
        """How events of the prefix cache are published, or that they are not."""
        return KVEventsConfig.model_validate(self.kv_events_config)


class AudioOptions(Options):
    """Limits of audio files, and the events of transcriptions."""

    max_audio_size: SizeFromKiB = Field(
        ByteSize(25 << 20), description="largest audio file; --max-body-size must be larger"
    )
    max_audio_seconds: Annotated[float, Field(gt=0, le=24 * 3600)] = Field(
        3600.0,
        description="longest audio in seconds; an hour of audio takes 280 MiB of memory while it is transcribed, and "
        "440 MiB while it is decoded",
    )
    max_audio_decoded_size: SizeFromMiB = Field(
        ByteSize(4 << 30),
        description="largest audio file after decompression, counted with all channels at the sample rate of the file; "
        "a larger one is refused (files are decoded in pieces, so decoding takes less memory than this)",
    )
    transcription_events: Literal["openai", "vllm"] = Field(
        "openai",
        description="format of streamed transcriptions without `stream_format`: OpenAI's events or vLLM's chunks",
    )


class PictureOptions(Options):
    """Limits of pictures, and the cache of prepared ones."""

    max_image_pixels: Annotated[int, Field(ge=1, le=1 << 30)] = Field(
        50_000_000,
        description="largest picture in pixels, width times height; a picture takes 12 bytes of memory for each while "
        "it is decoded (--max-media-memory)",
    )
    mm_processor_cache_gb: Annotated[float, Field(ge=0, le=1 << 20, allow_inf_nan=False)] = Field(
        0.5,
        description="GiB of the cache of each model that reads pictures, for decoded and resized pictures and frames, "
        "which later requests may have again; 0: none",
    )


class VideoOptions(Options):
    """Limits of videos in messages."""

    max_video_parts: NonNegativeInt = Field(4, description="maximum number of videos in a chat")
    max_video_size: SizeFromKiB = Field(
        ByteSize(64 << 20), description="largest video as a file; videos in bodies also need a larger --max-body-size"
    )
    max_video_pixels: Annotated[int, Field(ge=1, le=1 << 28)] = Field(
        9_437_184,
        description="largest frame of a video in pixels, width times height; a video takes 48 bytes of memory for each "
        "while it is decoded (--max-media-memory)",
    )
    max_video_frames: Annotated[int, Field(ge=1, le=1 << 14)] = Field(
        768, description="maximum number of frames of a video that are read"
    )


class MediaOptions(Options):
    """Memory of media; media in messages, and the URLs that may be fetched."""

    max_media_memory: SizeFromMiB = Field(
        ByteSize(1 << 30),
        description="memory for all audio, pictures and videos at once: files while they are decoded, samples, "
        "features, pixels, and realtime sessions; what does not fit now, or not into the share of its client, waits, "
        "clients taking turns, and what can never fit is refused",
    )
    allowed_media_domains: Origins = Field(
        (),
        description="host names from which media in messages may be fetched; *: all; default: none, so media must be "
        "sent in data URLs",
    )
    allow_private_media_addresses: Flag = Field(
        False,
        description="fetch media from private, local and reserved IP addresses as well, if the host name is allowed; "
        "an IP address in --allowed-media-domains is always allowed",
    )
    max_media_redirects: Annotated[int, Field(ge=0, le=100)] = Field(
        3,
        description="maximum number of redirects of a URL in a message that are followed; each is checked like the URL "
        "itself; 0: none",
    )
    allowed_local_media_path: Path | None = Field(
        None, description="directory whose files may be used in messages by file:// URLs; default: none"
    )
    media_fetch_timeout: Seconds = Field(
        10.0, description="timeout of fetching a URL in a message, with its redirects, in seconds"
    )
    enable_mm_embeds: Flag = Field(
        False,
        description="accept embeddings of pictures (`image_embeds`) that clients have computed, of which only the size "
        "is checked: with them a client may say anything to the model",
    )
    max_audio_parts: NonNegativeInt = Field(16, description="maximum number of audio content parts in a chat")
    max_image_parts: NonNegativeInt = Field(
        64, description="maximum number of pictures in a chat; each page of a PDF file is one"
    )
    max_image_size: SizeFromKiB = Field(
        ByteSize(25 << 20), description="largest picture as a file; --max-body-size must be larger"
    )
    max_document_size: SizeFromKiB = Field(
        ByteSize(25 << 20), description="largest file in a message, in a part for files; --max-body-size must be larger"
    )
    max_document_pages: Annotated[int, Field(ge=1, le=1 << 10)] = Field(
        32, description="maximum number of pages of a PDF file in a message"
    )
    file_store_size: SizeOrNone = Field(
        ByteSize(256 << 20),
        description="size of all files that clients have uploaded to /v1/files, in a temporary directory; 0: none",
    )
    file_ttl: SecondsOrNever = Field(
        24 * 3600.0, description="seconds after which an uploaded file is deleted, unless its client says so; 0: never"
    )
    media_io_kwargs: JsonObject = Field(
        {},
        description="JSON object with settings of decoding media, with vLLM's names: image.rgba_background_color, the "
        "colour behind transparent pictures as [r, g, b], default: white; video.num_frames or video.fps, how many "
        "frames of a video are read, default: as the model's video processor does; requests may set them as well",
    )
    mm_processor_kwargs: JsonObject = Field(
        {},
        description="JSON object of settings of pictures and videos instead of those in the model's "
        "preprocessor_config.json, with transformers' names, such as max_pixels for Qwen-VL or do_image_splitting for "
        "SmolVLM; requests may set them as well",
    )
