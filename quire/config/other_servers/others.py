"""Flags of llama-server, and variables and parameters of ollama. Their flags are refused with the name of Quire's."""

from __future__ import annotations

from quire.config.other_servers.table import OtherServerFlag, refused, same

_GGUF = "Quire reads directories and repositories with safetensors files"
_REQUESTS = "set the field in requests, or its default in generation_config.json"
_ONE_DEVICE = "all layers of a model are on CPUs, or all on GPUs"
_ATTENTION = "attention on CPUs has one implementation"
_ADAPTERS = (
    "LoRA adapters chosen by requests are not supported (a model's own speech adapter is); "
    "merge the adapter into the model"
)

LLAMA_SERVER: tuple[OtherServerFlag, ...] = (
    *same("--host", "--port", "--api-key", "--seed"),
    *refused("--model|-m --hf-repo|-hf|-hfr --hf-file|-hff --model-url|-mu", _GGUF, "MODEL"),
    *refused("--alias|-a", "", "--served-model-name"),
    *refused("--ctx-size|-c", "for each sequence, not for all together", "--max-model-len"),
    *refused("--parallel|-np", "", "--max-num-seqs"),
    *refused("--batch-size|-b --ubatch-size|-ub", "", "--max-num-batched-tokens"),
    *refused("--threads|-t --threads-batch|-tb", "", "--num-threads"),
    *refused("--threads-http", "one thread serves HTTP"),
    *refused("--cache-type-k|-ctk --cache-type-v|-ctv", "", "--kv-cache-dtype"),
    *refused("--cache-ram|-cram", "", "--kv-cache-memory-bytes"),
    *refused("--cache-prompt --cache-reuse --slot-prompt-similarity|-sps", "on by default", "--enable-prefix-caching"),
    *refused("--chat-template-file", "", "--chat-template"),
    *refused("--chat-template-kwargs", "", "--default-chat-template-kwargs"),
    *refused("--jinja", "chat templates are always Jinja"),
    *refused("--reasoning-format", "", "--reasoning-parser"),
    *refused(
        "--reasoning-budget",
        "a chat template may read a variable such as `enable_thinking`; numbers of tokens are not supported",
        "--default-chat-template-kwargs",
    ),
    *refused("--timeout|-to", "", "--request-timeout"),
    *refused("--ssl-key-file", "", "--ssl-keyfile"),
    *refused("--ssl-cert-file", "", "--ssl-certfile"),
    *refused("--api-key-file", "or the variable QUIRE_API_KEY", "--api-key"),
    *refused("--api-prefix", "", "--root-path"),
    *refused("--model-draft|-md", "the only method is ngram, which has no draft model", "--speculative-method"),
    *refused("--draft-max|--draft", "", "--num-speculative-tokens"),
    *refused(
        "--predict|-n|--n-predict --temp --top-k --top-p --min-p --repeat-penalty",
        _REQUESTS,
        "--override-generation-config",
    ),
    *refused("--override-kv", "", "--hf-overrides"),
    *refused("--verbosity|-lv --verbose|-v --log-verbosity", "", "--log-level"),
    *refused("--metrics --slots --props", "always on: /metrics, /load, /v1/models"),
    *refused("--cont-batching|-cb", "always on"),
    *refused("--gpu-layers|-ngl|--n-gpu-layers", _ONE_DEVICE, "--device"),
    *refused("--main-gpu|-mg", "the first GPU of CUDA_VISIBLE_DEVICES is used", "--device"),
    *refused("--split-mode|-sm --tensor-split|-ts", "weights are divided equally", "--tensor-parallel-size"),
    *refused("--flash-attn|-fa", _ATTENTION),
    *refused("--mlock --no-mmap --mmap --numa", "weights are copied into memory while they load"),
    *refused("--lora --lora-scaled", _ADAPTERS),
    *refused("--mmproj|-mm", "image input is not supported"),
    *refused("--embedding|--embeddings --rerank|--reranking", "the task is read from the model's files", "--convert"),
    *refused("--pooling", "", "--pooler-config"),
    *refused("--rope-scaling --rope-scale --rope-freq-base --yarn-orig-ctx", "", "--hf-overrides"),
)

# Ollama is set by variables, and by PARAMETER lines of a Modelfile.
OLLAMA: tuple[OtherServerFlag, ...] = (
    *refused("OLLAMA_HOST", "", "--host"),
    *refused("OLLAMA_ORIGINS", "", "--allowed-origins"),
    *refused("OLLAMA_MODELS", "set the environment variable HF_HUB_CACHE"),
    *refused("OLLAMA_CONTEXT_LENGTH num_ctx", "", "--max-model-len"),
    *refused("OLLAMA_NUM_PARALLEL", "", "--max-num-seqs"),
    *refused("OLLAMA_MAX_QUEUE", "", "--max-num-queued-seqs"),
    *refused("OLLAMA_MAX_LOADED_MODELS", "all models of the command line are loaded", "MODEL"),
    *refused("OLLAMA_KEEP_ALIVE", "models stay loaded"),
    *refused("OLLAMA_LOAD_TIMEOUT", "loading has no time limit"),
    *refused("OLLAMA_KV_CACHE_TYPE", "", "--kv-cache-dtype"),
    *refused("OLLAMA_FLASH_ATTENTION", _ATTENTION),
    *refused("num_gpu", _ONE_DEVICE, "--device"),
    *refused("OLLAMA_DEBUG", "", "--log-level"),
    *refused("num_batch", "", "--max-num-batched-tokens"),
    *refused("num_thread", "", "--num-threads"),
    *refused("num_predict temperature top_k top_p min_p repeat_penalty", _REQUESTS, "--override-generation-config"),
    *refused("stop", "set the field in requests"),
    *refused("seed", "or set the field in requests", "--seed"),
    *refused("TEMPLATE", "", "--chat-template"),
    *refused("SYSTEM", "send a system message in each request"),
    *refused("ADAPTER", _ADAPTERS),
)
