"""Command lines of vLLM work, or are refused by name."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from quire.config.command import ConfigError
from quire.config.commands import Serve
from quire.config.foreign.others import LLAMA_SERVER, OLLAMA
from quire.config.foreign.page import page
from quire.config.foreign.vllm import VLLM

OWN = {Serve.flag(name) for name in Serve.model_fields}

# As they are common in vLLM's documentation; each with what it sets.
COMMON: list[tuple[str, dict[str, Any]]] = [
    ("Qwen/Qwen2.5-1.5B-Instruct", {"model": ("Qwen/Qwen2.5-1.5B-Instruct",)}),
    ("NousResearch/Llama --dtype auto --api-key token-abc123", {"dtype": "auto", "api_key": ("token-abc123",)}),
    ("m --enable-auto-tool-choice --tool-call-parser hermes", {"tool_call_parser": "hermes"}),
    ("m --reasoning-parser deepseek_r1 --max-model-len 16k", {"max_model_len": 16000}),
    ("m --gpu-memory-utilization 0.8 --enforce-eager", {"memory_fraction": 0.8}),
    ("m -tp 1 --trust-remote-code --max_num_seqs 16 --swap-space 8", {"max_num_seqs": 16, "model": ("m",)}),
    (
        'm --speculative-config \'{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}\'',
        {"speculation": "ngram", "num_speculative_tokens": 5},
    ),
    (
        "m --served-model-name a b --no-enable-prefix-caching",
        {"served_model_name": ("a", "b"), "prefix_caching": False},
    ),
    ("--model m --host 0.0.0.0 --port 8001 --dtype half --disable-log-requests", {"model": ("m",), "dtype": "float16"}),
    (
        "m --generation-config vllm --override-generation-config '{\"temperature\": 0.5}' --chat-template x.jinja",
        {"generation_config": "none", "override_generation_config": {"temperature": 0.5}},
    ),
    ("m --max-model-len auto -O3 --limit-mm-per-prompt '{\"image\": 2}'", {"max_model_len": None, "model": ("m",)}),
    ("m --allowed-origins '[\"*\"]' --uvicorn-log-level warning", {"allowed_origins": ("*",), "log_level": "warning"}),
    ("m --kv-cache-memory-bytes=4G --block_size=32", {"kv_cache_memory": 4 << 30, "block_size": 32}),
    ("m --cudagraph-capture-sizes 1 2 4 --port 9", {"model": ("m",), "port": 9}),
]


@pytest.mark.parametrize(("line", "expected"), COMMON, ids=[line for line, _ in COMMON])
def test_a_common_command_line_of_vllm_is_understood(line: str, expected: dict[str, Any]) -> None:
    settings = Serve.parse(shlex.split(line))
    assert {name: getattr(settings, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("m --tensor-parallel-size 4", "--tensor-parallel-size 4 of vLLM is not supported; Quire's is --num-threads"),
        ("m --enable-lora --lora-modules a=b", "--enable-lora of vLLM is not supported: adapters"),
        ("m --quantization awq", "--quantization expects none, int8 or int4, not 'awq'"),
        ("m -q fp8", "--quantization expects none, int8 or int4, not 'fp8'"),
        ("m --kv-cache-dtype fp8", "--kv-cache-dtype expects auto or int8, not 'fp8'"),
        ('m --speculative-config \'{"method": "eagle"}\'', "the only method is ngram"),
        ("m --speculative-config [1", "--speculative-config"),
        ("m --speculative-config.model x", "--speculative-config.model is not supported"),
        ("m --allowed-origins [1]", "it expects a list of strings"),
        ("m --max-model-len 16x", "--max-model-len expects an integer of at least 1, not '16x'"),
        ("m --swap-space", "--swap-space expects a value"),
        ("m --no-enable-chunked-prefill", "Quire's is --max-num-batched-tokens"),
        ("m --ctx-size 4096", "--ctx-size of llama-server is not supported; Quire's is --max-model-len"),
        ("m -np 4", "-np of llama-server is not supported; Quire's is --max-num-seqs"),
    ],
)
def test_what_quire_cannot_do_is_refused_by_name(line: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Serve.parse(shlex.split(line))
    assert complaint in str(refused.value)


def test_one_line_for_each_flag_says_what_became_of_it() -> None:
    line = "m --enforce-eager --gpu-memory-utilization 0.8 --disable-uvicorn-access-log --port 1 --dtype bfloat16"
    eager, memory, log = Serve.parse(shlex.split(line)).notes
    assert eager.startswith("--enforce-eager has no effect: ")
    assert memory.startswith("--gpu-memory-utilization 0.8 is taken as --memory-fraction 0.8")
    assert log == "--disable-uvicorn-access-log is taken as --no-access-log"


def test_names_of_models_and_lists_are_told_apart() -> None:
    assert Serve.parse(["--served-model-name", "name", "m"]).model == ("m",)
    two = Serve.parse(["m", "n", "--served-model-name", "a=m", "--served-model-name", "b=n"])
    assert (two.model, two.served_model_name) == (("m", "n"), ("a=m", "b=n"))


def test_the_tables_name_flags_that_exist() -> None:
    for flag in (*VLLM, *LLAMA_SERVER, *OLLAMA):
        assert not flag.ours or flag.ours in OWN or flag.ours.replace("--no-", "--") in OWN, flag
        assert flag.ours or flag.note, flag
        assert flag.kind != "same" or flag.names == (flag.ours,), flag
    for table in (VLLM, LLAMA_SERVER, OLLAMA):
        names = [name for flag in table for name in flag.names]
        assert len(set(names)) == len(names)


def test_the_page_is_up_to_date() -> None:
    written = Path(__file__).parents[2] / "docs" / "flags-of-other-servers.md"
    command = "python -m quire.config.foreign.page > docs/flags-of-other-servers.md"
    assert written.read_text(encoding="utf-8") == page(), f"run: {command}"
