"""Command lines of vLLM's documentation and of model cards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_QWEN = "Qwen/Qwen3-8B"
_MISTRAL = "mistralai/Mistral-7B-Instruct-v0.3"

# Of vLLM's documentation and of model cards; each with what it sets, or the flag that is refused.
DOCUMENTED: list[tuple[str, dict[str, Any] | str]] = [
    (
        "NousResearch/Meta-Llama-3-8B-Instruct --dtype auto --api-key token-abc123",
        {"model": ("NousResearch/Meta-Llama-3-8B-Instruct",), "api_key": ("token-abc123",)},
    ),
    ("meta-llama/Llama-2-7b-hf --uds /tmp/vllm.sock", {"uds": Path("/tmp/vllm.sock")}),  # noqa: S108 only parsed
    (
        "meta-llama/Llama-3.1-8B-Instruct --enable-auto-tool-choice --tool-call-parser llama3_json "
        "--chat-template examples/tool_chat_template_llama3.1_json.jinja",
        {"tool_call_parser": "llama3_json", "chat_template": "examples/tool_chat_template_llama3.1_json.jinja"},
    ),
    (
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --enable-reasoning --reasoning-parser deepseek_r1",
        {"reasoning_parser": "deepseek_r1"},
    ),
    ("facebook/opt-13b --tensor-parallel-size 4", {"tensor_parallel_size": 4}),
    ("meta-llama/Llama-2-7b-hf --enable-lora --lora-modules sql=a", "--enable-lora of vLLM is not supported"),
    (
        f"{_QWEN} --port 8000 --enable-prefix-caching "
        '--speculative_config \'{"method": "ngram", "num_speculative_tokens": 5}\'',
        {"enable_prefix_caching": True, "speculative_method": "ngram", "num_speculative_tokens": 5},
    ),
    (
        f"{_MISTRAL} --tokenizer_mode mistral --config_format mistral --load_format mistral "
        "--tool-call-parser mistral --enable-auto-tool-choice",
        {"model": (_MISTRAL,), "tool_call_parser": "mistral"},
    ),
    (
        f'{_QWEN} --hf-overrides \'{{"rope_parameters": {{"factor": 4.0}}}}\' --max-model-len 131072',
        {"hf_overrides": {"rope_parameters": {"factor": 4.0}}, "max_model_len": 131072},
    ),
    (f"{_QWEN} --rope-scaling '{{}}' --max-model-len 131072", "Quire's is --hf-overrides"),
    (
        "gradientai/Llama-3-8B-Instruct-Gradient-1048k --swap-space 16 --disable-log-requests "
        "--tensor_parallel_size 1 --max_model_len 65000",
        {"max_model_len": 65000},
    ),
    ("openai/gpt-oss-20b --tool-call-parser openai --async-scheduling", {"tool_call_parser": "openai"}),
    (
        "--model facebook/opt-125m --host 0.0.0.0 --dtype half --gpu-memory-utilization 0.9 --enforce-eager",
        {"model": ("facebook/opt-125m",), "host": "0.0.0.0", "dtype": "float16", "gpu_memory_utilization": 0.9},  # noqa: S104
    ),
    (
        "Qwen/Qwen2.5-VL-7B-Instruct --limit-mm-per-prompt '{\"image\": 5}' --trust-remote-code --max-num-seqs 5",
        {"max_num_seqs": 5},
    ),
]
