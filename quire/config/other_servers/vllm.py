"""vLLM's flags of `vllm serve`."""

from __future__ import annotations

from quire.config.other_servers.table import OtherServerFlag, ignored, ignored_switch, refused, same, translated_to
from quire.config.other_servers.values import CACHE_DTYPES
from quire.config.types import ATTENTION_BACKENDS

_ONE_MACHINE = "Quire runs a model once, on one machine"
_ONE_COPY = "Quire runs one copy of a model; for more, start several servers behind a load balancer"
_CONTEXT = "there is no context parallelism"
_EXPERTS = "each rank has an equal, fixed part of the experts"
_DUAL_BATCH = "a step is not divided into two batches"
_ADAPTERS = (
    "LoRA adapters chosen by requests are not supported (a model's own speech adapter is); "
    "merge the adapter into the model"
)
_MEDIA = "audio is the only multimodal input, and its preprocessing cannot be configured"
_GPU = "Quire chooses its kernels on a GPU; only that of attention is a setting"
_ATTENTION = "`auto` is Quire's own kernels; VLLM_ATTENTION_BACKEND is QUIRE_ATTENTION_BACKEND, with the same values"
_COMPILATION = (
    "nothing is compiled with torch.compile; CUDA graphs are set with --enforce-eager and --cudagraph-capture-sizes"
)
_MAMBA = "state-space models (Mamba) are not supported"
_METRICS = "the metrics in /metrics cannot be configured"
_PROXY = "put a reverse proxy in front of Quire"
_BUILT_IN = "the engine has no plugins"
_FORMAT = "only Hugging Face's file format is read"
_MEMORY = "weights and KV cache are always in the memory of the device that runs the model"
_REPOSITORY = "all files are read from the model's directory or repository"
_CACHE_DTYPES = {name: ours for name, ours in CACHE_DTYPES.items() if name != ours}

VLLM: tuple[OtherServerFlag, ...] = (
    # server
    *same("--host", "--port", "--uds", "--api-key", "--served-model-name", "--root-path", "--tool-server"),
    *same("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers"),
    *same("--enable-ssl-refresh"),
    translated_to("--config", "--config", "a TOML file with Quire's names, not YAML"),
    translated_to("--model", "MODEL", "a positional argument"),
    translated_to("--allowed-origins", "--allowed-origins", "a list in JSON, or names; none are allowed by default"),
    *ignored("--allowed-methods --allowed-headers", "all are allowed to --allowed-origins", only=['["*"]', "*"]),
    *refused("--allow-credentials --middleware", _PROXY),
    translated_to("--uvicorn-log-level", "--log-level", values={"critical": "error", "trace": "debug"}),
    translated_to("--disable-uvicorn-access-log", "--no-access-log", switch=True),
    *refused("--disable-access-log-for-endpoints", "all requests are logged, or none", "--no-access-log"),
    *ignored_switch(
        "--disable-log-requests --enable-log-requests",
        "prompts are never logged; --access-log logs requests",
        "--access-log",
    ),
    *ignored_switch("--disable-log-stats", "no statistics are logged; /metrics has them"),
    *ignored_switch("--enable-log-deltas --enable-log-outputs", "outputs are never logged"),
    *ignored_switch("--log-error-stack", "stack traces of internal errors are always logged"),
    *ignored_switch("--aggregate-engine-logging", "each model has only one engine"),
    *ignored("--max-log-len", "prompts are never logged"),
    *refused("--log-config-file --logging-config", "logs go to standard error", "--log-level"),
    *same("--log-level"),
    *same("--sse-keep-alive-interval", "--shutdown-timeout"),
    translated_to("--max-num-queued-reqs", "--max-num-queued-seqs", "a request with n choices counts as n sequences"),
    *refused("--max-num-queued-tokens", "sequences are counted, not tokens", "--max-num-queued-seqs"),
    translated_to("--h11-max-header-count", "--max-header-count"),
    translated_to("--h11-max-incomplete-event-size", "--max-header-size"),
    *ignored_switch("--disable-frontend-multiprocessing", "the engine runs in a thread", "--engine-process"),
    *ignored("--api-server-count|-asc", "one process serves HTTP", only=["1"]),
    *ignored_switch("--enable-request-id-headers", "every response has X-Request-Id"),
    *ignored_switch("--enable-server-load-tracking", "/load always counts requests"),
    *ignored_switch("--enable-prompt-tokens-details", "usage always has token details"),
    *ignored_switch("--enable-per-request-metrics", "set `return_metrics` in requests"),
    *ignored_switch("--enable-scale-out", "/inference/v1/generate is always enabled"),
    *same("--enable-force-include-usage", "--enable-tokenizer-info-endpoint", "--return-tokens-as-token-ids"),
    *refused("--disable-fastapi-docs --enable-offline-docs", _PROXY),
    *refused("--fingerprint-mode --fingerprint-value", "`system_fingerprint` cannot be configured"),
    *refused("--grpc-port --tokens-only --headless", "Quire serves HTTP only"),
    *refused("--otlp-traces-endpoint --collect-detailed-traces", "there is no tracing; /metrics has latencies"),
    *ignored("--show-hidden-metrics-for-version", "no metric is hidden"),
    *refused("--kv-cache-metrics --kv-cache-metrics-sample --cudagraph-metrics --custom-histogram-buckets", _METRICS),
    *refused("--kv-events-config", "KV cache events are not published"),
    *refused("--profiler-config", "there is no profiler"),
    *ignored_switch("--enable-logging-iteration-details", "/metrics has latencies"),
    *ignored_switch("--enable-layerwise-nvtx-tracing", "there is no NVTX tracing"),
    *ignored_switch("--fail-on-environ-validation", "unknown variables of Quire are always refused"),
    # chats
    *same("--chat-template", "--default-chat-template-kwargs", "--trust-request-chat-template", "--reasoning-parser"),
    *same("--tool-call-parser"),
    *ignored("--chat-template-content-format", "it is detected in the chat template", only=["auto"]),
    *ignored("--response-role", "the role of answers is always assistant", only=["assistant"]),
    *ignored_switch("--enable-auto-tool-choice", "automatic tool choice is always enabled", "--tool-call-parser"),
    *ignored_switch("--enable-reasoning", "it is detected in the chat template", "--reasoning-parser"),
    *refused("--exclude-tools-when-tool-choice-none", "leave `tools` out of such requests"),
    *refused("--tool-parser-plugin", "parser plugins are not supported", "--tool-call-parser"),
    *refused("--reasoning-parser-plugin", "parser plugins are not supported", "--reasoning-parser"),
    *ignored("--guided-decoding-backend", "llguidance is the only grammar backend"),
    *ignored("--tool-strict-level", "set `strict` in the function of a request"),
    translated_to("--structured-outputs-config", "--reasoning-parser", "only its key reasoning_parser has an effect"),
    translated_to("--generation-config", "--generation-config", values={"vllm": "none"}),
    *same("--override-generation-config", "--max-logprobs"),
    *ignored(
        "--logprobs-mode",
        "log-probabilities are computed before sampling parameters are applied",
        only=["raw_logprobs"],
    ),
    *refused(
        "--logits-processors --logits-processor-pattern",
        "custom logits processors are not supported; use `logit_bias` or `allowed_token_ids` in requests",
    ),
    *ignored("--stream-interval", "streams send each token as soon as it is generated", only=["1"]),
    # model
    *same("--revision", "--hf-overrides", "--seed"),
    translated_to("--max-model-len", "--max-model-len", "also as 16k, 16K or auto"),
    translated_to("--dtype", "--dtype", values={"half": "float16", "float": "float32"}),
    translated_to("--model-impl", "--model-impl", values={"vllm": "quire"}),
    translated_to(
        "--quantization -q", "--quantization", "the format of a quantized checkpoint is read from its config.json"
    ),
    *ignored("--tokenizer-mode --config-format", _FORMAT, only=["auto", "hf", "fast", "mistral"]),
    *ignored("--load-format", _FORMAT, only=["auto", "hf", "safetensors", "mistral"]),
    *ignored_switch("--trust-remote-code", "code from model repositories is never run", "--model-impl"),
    *refused("--code-revision --tokenizer-revision", "all files are read from one revision", "--revision"),
    *refused("--tokenizer --hf-config-path", _REPOSITORY),
    *refused("--download-dir", "set the environment variable HF_HUB_CACHE"),
    *refused("--hf-token", "set the environment variable HF_TOKEN"),
    *same("--task", "--pooler-config"),
    translated_to("--runner", "--task", "`pooling` is `--convert embed`, unless --convert is set"),
    translated_to("--convert", "--convert", "`auto` has no effect: it is the default"),
    *refused("--skip-tokenizer-init --enable-prompt-embeds", "prompts must be text or token ids"),
    *refused(
        "--disable-sliding-window",
        "sliding windows cannot be disabled, but have no effect if this is at most the window",
        "--max-model-len",
    ),
    *ignored(
        "--safetensors-load-strategy --max-parallel-loading-workers --ignore-patterns",
        "weights are always read in one pass",
    ),
    *ignored("--model-loader-extra-config --pt-load-map-location", "weights are always read in one pass"),
    *ignored(
        "--safetensors-prefetch-num-threads --safetensors-prefetch-block-size", "weights are always read in one pass"
    ),
    *ignored_switch("--use-tqdm-on-load", "the progress bar is shown in terminals only"),
    *ignored_switch(
        "--allow-deprecated-quantization", "the format of a quantized checkpoint is read from its config.json"
    ),
    *refused(
        "--quantization-config", "the format of a quantized checkpoint is read from its config.json", "--quantization"
    ),
    *same("--enable-sleep-mode"),
    *refused("--enable-lora --lora-modules", _ADAPTERS),
    *refused("--max-loras --max-lora-rank --max-cpu-loras --lora-dtype --fully-sharded-loras", _ADAPTERS),
    *refused("--default-mm-loras --enable-tower-connector-lora --specialize-active-lora", _ADAPTERS),
    *ignored("--lora-extra-vocab-size --long-lora-scaling-factors", _ADAPTERS),
    *refused(
        "--rope-scaling --rope-theta", "override `rope_parameters` or `rope_scaling` of config.json", "--hf-overrides"
    ),
    # memory and scheduling
    *same("--max-num-seqs", "--scheduling-policy", "--block-size"),
    translated_to(
        "--kv-cache-dtype",
        "--kv-cache-dtype",
        values=_CACHE_DTYPES,
    ),
    translated_to("--max-num-batched-tokens", "--max-num-batched-tokens", "also as 8k or 8K"),
    translated_to(
        "--gpu-memory-utilization",
        "--gpu-memory-utilization",
        "on CPUs a share of the memory that is free after loading, for KV caches alone",
    ),
    translated_to("--kv-cache-memory-bytes", "--kv-cache-memory-bytes", "also as 4g or 4G"),
    *refused("--max-num-scheduled-tokens", "a step has only one token limit", "--max-num-batched-tokens"),
    *refused("--num-gpu-blocks-override", "set the size of the KV cache", "--kv-cache-memory-bytes"),
    *same("--enable-prefix-caching"),
    translated_to(
        "--prefix-caching-hash-algo",
        "--prefix-caching-hash-algo",
        values={"sha256_cbor": "sha256", "xxhash_cbor": "xxhash"},
    ),
    *ignored("--swap-space", "preempted sequences are recomputed, never swapped"),
    *ignored("--cpu-offload-gb --kv-offloading-size --kv-offloading-backend", _MEMORY),
    *ignored("--offload-backend --offload-group-size --offload-num-in-group --offload-prefetch-step", _MEMORY),
    *ignored("--offload-params --cpu-offload-params", _MEMORY),
    *ignored_switch(
        "--calculate-kv-scales",
        "scales of int8 are always computed, those of fp8 are the checkpoint's",
        "--kv-cache-dtype",
    ),
    *ignored_switch("--enable-chunked-prefill", "long prompts are always computed in chunks"),
    *refused("--no-enable-chunked-prefill", "long prompts are always in chunks", "--max-num-batched-tokens"),
    *ignored(
        "--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold",
        "a long prompt always leaves a token for each decoding sequence",
        ours="--max-num-batched-tokens",
    ),
    *ignored("--preemption-mode", "preempted sequences are always recomputed", only=["recompute"]),
    *ignored("--num-scheduler-steps --scheduler-delay-factor --performance-mode", "every step is scheduled separately"),
    *ignored_switch("--multi-step-stream-outputs --disable-async-output-proc", "every step is scheduled separately"),
    *ignored_switch("--use-v2-block-manager", "there is only one block manager"),
    *ignored_switch("--async-scheduling", "steps are always scheduled ahead on GPUs, and never on CPUs"),
    *ignored_switch("--disable-hybrid-kv-cache-manager", "all layers use the same kind of block"),
    *refused("--scheduler-cls", "the scheduler cannot be replaced", "--scheduling-policy"),
    translated_to(
        "--speculative-config",
        "--speculative-method",
        "only the method ngram is supported; see also --num-speculative-tokens",
    ),
    translated_to("--spec-method", "--speculative-method"),
    translated_to("--spec-tokens", "--num-speculative-tokens"),
    *refused(
        "--speculative-model --spec-model", "the only method is ngram, which has no draft model", "--speculative-method"
    ),
    *refused("--kv-transfer-config --ec-transfer-config", "KV caches are not sent to other servers"),
    # machines and devices
    *same("--device", "--tensor-parallel-size", "--pipeline-parallel-size", "--enable-expert-parallel"),
    translated_to("-tp", "--tensor-parallel-size"),
    translated_to("-pp", "--pipeline-parallel-size"),
    translated_to("-ep", "--enable-expert-parallel", switch=True),
    *ignored("--data-parallel-size|-dp", _ONE_COPY, only=["1"]),
    *ignored("--data-parallel-size-local|-dpl", _ONE_COPY, only=["1"]),
    *ignored("--renderer-num-workers", "the number of renderer processes cannot be set", only=["1"]),
    *ignored_switch("--worker-use-ray --engine-use-ray --ray-workers-use-nsight", _ONE_MACHINE),
    *ignored("--prefill-context-parallel-size|-pcp", _CONTEXT, only=["1"], ours="--tensor-parallel-size"),
    *ignored("--decode-context-parallel-size|-dcp", _CONTEXT, only=["1"], ours="--tensor-parallel-size"),
    *ignored("--cp-kv-cache-interleave-size --dcp-kv-cache-interleave-size", _CONTEXT),
    *ignored("--dbo-decode-token-threshold --dbo-prefill-token-threshold", _DUAL_BATCH),
    *ignored_switch("--disable-nccl-for-dp-synchronization", _ONE_MACHINE),
    *refused("--data-parallel-rank|-dpn --data-parallel-start-rank|-dpr --data-parallel-backend|-dpb", _ONE_COPY),
    *refused("--data-parallel-external-lb|-dpe --data-parallel-hybrid-lb|-dph", _ONE_COPY),
    *refused("--device-ids", "set CUDA_VISIBLE_DEVICES"),
    *ignored("--nnodes|-n", _ONE_MACHINE, only=["1"]),
    *refused("--node-rank|-r --master-addr --master-port", _ONE_MACHINE),
    *refused("--data-parallel-address|-dpa --data-parallel-rpc-port|-dpp", _ONE_COPY),
    *refused("--worker-cls --worker-extension-cls --io-processor-plugin --additional-config", _BUILT_IN),
    *refused("--weight-transfer-config", "weights are only read from the model's directory"),
    *refused("--enable-return-routed-experts", "answers do not contain the experts of tokens"),
    *ignored("--distributed-executor-backend", _ONE_MACHINE, only=["mp", "uni"], ours="--engine-process"),
    *ignored_switch("--enable-eplb", _EXPERTS),
    *ignored("--eplb-config --all2all-backend --expert-placement-strategy", _EXPERTS),
    *ignored_switch("--enable-dbo", _DUAL_BATCH),
    *ignored_switch("--disable-custom-all-reduce", "there is one implementation of all-reduce for each device"),
    *same("--enforce-eager"),
    translated_to("--cudagraph-capture-sizes", "--cudagraph-capture-sizes", "also separated by spaces"),
    *ignored(
        "--max-cudagraph-capture-size", "set the sizes with --cudagraph-capture-sizes", ours="--cudagraph-capture-sizes"
    ),
    *ignored("--compilation-config|-cc|-O --optimization-level", _COMPILATION),
    *ignored("--max-seq-len-to-capture", "CUDA graphs serve sequences of any length"),
    translated_to("--attention-backend", "--attention-backend", _ATTENTION, values=ATTENTION_BACKENDS),
    translated_to("--attention-config -ac", "--attention-backend", "only its key backend has an effect"),
    *ignored("--moe-backend", _GPU),
    *ignored("--kernel-config --linear-backend --ir-op-priority --override-attention-dtype", _GPU),
    *ignored("--mamba-block-size --mamba-cache-mode --mamba-backend", _MAMBA),
    *ignored("--mamba-ssm-cache-dtype --mamba-cache-dtype", _MAMBA),
    *ignored_switch("--kv-sharing-fast-prefill", "layers do not share keys and values"),
    *ignored_switch("--disable-cascade-attn --enable-flashinfer-autotune", _GPU),
    *ignored_switch("--enable-cumem-allocator", "--enable-sleep-mode needs no allocator of its own"),
    *ignored_switch("--enable-mfu-metrics", "there is no metric of model FLOPs utilization"),
    # media
    *same("--allowed-media-domains", "--allowed-local-media-path"),
    translated_to("--limit-mm-per-prompt", "--max-audio-parts", "the value of `audio` in the JSON object"),
    *ignored("--mm-processor-kwargs --media-io-kwargs --mm-processor-cache-gb", _MEDIA),
    *ignored("--mm-encoder-tp-mode --mm-processor-cache-type --video-pruning-rate", _MEDIA),
    *ignored("--mm-encoder-attn-backend --mm-shm-cache-max-object-size-mb --mm-hasher-algorithm", _MEDIA),
    *ignored_switch("--trust-request-mm-kwargs", _MEDIA),
    *ignored_switch("--language-model-only --skip-mm-profiling --interleave-mm-strings", _MEDIA),
    *ignored_switch("--disable-chunked-mm-input --disable-mm-preprocessor-cache", _MEDIA),
    *refused("--enable-mm-embeds --mm-encoder-only", _MEDIA),
)
