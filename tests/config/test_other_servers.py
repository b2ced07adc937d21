"""Command lines of vLLM work, or are refused by name."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, get_args

import pytest

from quire.config.command import ConfigError
from quire.config.commands import Serve
from quire.config.other_servers.page import page
from quire.config.other_servers.table import Server, flags_of
from quire.config.other_servers.values import CACHE_DTYPES
from quire.config.types import ATTENTION_BACKENDS
from tests.support.vllm_command_lines import DOCUMENTED

OWN = {Serve.flag(name) for name in Serve.model_fields}

# Besides those of the documentation; each with what it sets.
COMMON: list[tuple[str, dict[str, Any]]] = [
    ("m -q fp8", {"quantization": "fp8"}),
    ("m --reasoning-parser deepseek_r1 --max-model-len 16k", {"max_model_len": 16000}),
    (
        "gpt2 --tensor-parallel-size 4 --pipeline-parallel-size 2",
        {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
    ),
    ("m -tp 8 -pp 2 -ep", {"tensor_parallel_size": 8, "pipeline_parallel_size": 2, "enable_expert_parallel": True}),
    (
        "m -tp 16 -n 2 -r 1 --master-addr 10.0.0.5 --master_port=1234 --headless --distributed-timeout-seconds 60",
        {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.5", "master_port": 1234, "headless": True},
    ),
    ("m -tp 1 --max_num_seqs 16 --swap-space 8", {"max_num_seqs": 16, "model": ("m",)}),
    (
        "m --served-model-name a b --no-enable-prefix-caching",
        {"served_model_name": ("a", "b"), "enable_prefix_caching": False},
    ),
    (
        "m --generation-config vllm --override-generation-config '{\"temperature\": 0.5}' --chat-template x.jinja",
        {"generation_config": "none", "override_generation_config": {"temperature": 0.5}},
    ),
    ("m --max-model-len auto -O3 -O.mode=3", {"max_model_len": None, "model": ("m",)}),
    ("m --allowed-origins '[\"*\"]' --uvicorn-log-level warning", {"allowed_origins": ("*",), "log_level": "warning"}),
    ("m --kv-cache-memory-bytes=4G --block_size=32", {"kv_cache_memory_bytes": 4 << 30, "block_size": 32}),
    ("m --kv-cache-dtype fp8_e4m3", {"kv_cache_dtype": "fp8"}),
    ("m --kv_cache_dtype=fp8", {"kv_cache_dtype": "fp8"}),
    ("m --kv-cache-dtype auto", {"kv_cache_dtype": "auto"}),
    ("m --kv-cache-dtype bfloat16", {"kv_cache_dtype": "bfloat16"}),
    ("m --kv-cache-dtype half", {"kv_cache_dtype": "float16"}),
    ("m --kv-cache-dtype int8_per_token_head", {"kv_cache_dtype": "int8"}),
    ("m --pooler-config.pooling_type MEAN", {"pooler_config": {"pooling_type": "MEAN"}}),
    (
        "m --pooler_config.use_activation=false --port 9 --pooler-config.pooling_type LAST",
        {"pooler_config": {"use_activation": False, "pooling_type": "LAST"}, "port": 9},
    ),
    ("m --hf-overrides.a.b 1 --hf-overrides.a.c_d x", {"hf_overrides": {"a": {"b": 1, "c_d": "x"}}}),
    (
        'm --hf-overrides \'{"a": {"b": 0, "c": 2}}\' --hf_overrides.a.b -1',
        {"hf_overrides": {"a": {"b": -1, "c": 2}}},
    ),
    (
        "m --hf-overrides.list+ x --hf-overrides.list+=2,true --hf-overrides.list+ '{\"y\": 1}'",
        {"hf_overrides": {"list": ["x", 2, True, {"y": 1}]}},
    ),
    ("m --override-generation-config.temperature 0.5", {"override_generation_config": {"temperature": 0.5}}),
    ("m --default-chat-template-kwargs.thinking false", {"default_chat_template_kwargs": {"thinking": False}}),
    (
        "m --speculative-config.method ngram --speculative-config.num_speculative_tokens 3 "
        "--speculative-config.prompt_lookup_max 4",
        {"speculative_method": "ngram", "num_speculative_tokens": 3},
    ),
    ("m --limit-mm-per-prompt.audio 3", {"max_audio_parts": 3}),
    (
        'm --limit-mm-per-prompt \'{"image": {"count": 5, "width": 512}, "video": {"count": 1}, "audio": 0}\'',
        {"max_image_parts": 5, "max_audio_parts": 0},
    ),
    ("m --limit_mm_per_prompt image=2,video=1", {"max_image_parts": 2, "max_video_parts": 1, "max_audio_parts": 16}),
    ("m --limit-mm-per-prompt.image.count 4", {"max_image_parts": 4}),
    ("m --mm-processor-kwargs.max_pixels 784", {"mm_processor_kwargs": {"max_pixels": 784}}),
    (
        "m --media-io-kwargs.image.rgba_background_color+ 0,0,0 --interleave-mm-strings",
        {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}},
    ),
    (
        "m --structured-outputs-config.backend xgrammar --structured-outputs-config.reasoning_parser qwen3",
        {"reasoning_parser": "qwen3"},
    ),
    ("m --compilation-config.x y --compilation-config.pass_config.z+ 1,2 -cc.mode=3 --port 9", {"port": 9}),
    ("m --chat-template '{{ messages[0].content }}'", {"chat_template": "{{ messages[0].content }}"}),
    ("m --cudagraph-capture-sizes 1 2 4 --port 9", {"cudagraph_capture_sizes": (1, 2, 4), "port": 9}),
    ("m --cudagraph-capture-sizes=1,2 --device cuda", {"cudagraph_capture_sizes": (1, 2), "device": "cuda"}),
    (
        'm --runner pooling --hf_overrides \'{"classifier_from_token": ["no", "yes"]}\'',
        {"task": "auto", "convert": "embed", "hf_overrides": {"classifier_from_token": ["no", "yes"]}},
    ),
    ("m --attention-backend FLASH_ATTN --block-size 256", {"attention_backend": "flash_attn", "block_size": 256}),
    ("m --attention_backend=FLASHINFER", {"attention_backend": "flashinfer"}),
    ("m --attention-backend flashinfer", {"attention_backend": "flashinfer"}),
    ("m --attention-config.backend TRITON_ATTN", {"attention_backend": "triton"}),
    ("m -ac.backend=FLASH_ATTN", {"attention_backend": "flash_attn"}),
    (
        'm --attention-config \'{"backend": "FLASHINFER", "flash_attn_version": 2}\'',
        {"attention_backend": "flashinfer"},
    ),
    ("m -ac '{\"flash_attn_version\": 2}'", {"attention_backend": "auto"}),
    ("m -ac.flash_attn_version 2 -ac.backend flash_attn", {"attention_backend": "flash_attn"}),
    ("m --attention-backend TORCH_SDPA", {"attention_backend": "auto"}),
    ("m --attention-backend CPU_ATTN", {"attention_backend": "auto"}),
    ("m --attention-backend XFORMERS", {"attention_backend": "auto"}),
    ("m --attention-backend cpu_attn", {"attention_backend": "auto"}),
    ("m --attention-backend triton_attn", {"attention_backend": "triton"}),
    ('m --attention-config \'{"backend": "TORCH_SDPA"}\'', {"attention_backend": "auto"}),
    ("m --convert classify --runner pooling", {"task": "auto", "convert": "classify"}),
    ("m --runner=pooling --convert auto", {"task": "auto", "convert": "embed"}),
    ("m --runner auto", {"task": "auto", "convert": "none"}),
    ("m --runner generate", {"task": "generate", "convert": "none"}),
    ("m --quantization gptq_marlin", {"quantization": "gptq_marlin"}),
    ("m -q bitsandbytes --load-format bitsandbytes", {"quantization": "bitsandbytes", "load_format": "auto"}),
    ("m --load-format dummy --revision v1", {"load_format": "dummy", "revision": "v1"}),
    ("-m some/file.gguf --alias x", {"model": ("some/file.gguf",), "served_model_name": ("x",)}),
    ("-hf user/model-GGUF:Q8_0 --port 9", {"model": ("user/model-GGUF:Q8_0",), "port": 9}),
    ("--port 9 -hf user/model:Q8_0 -hff a/x.gguf", {"model": ("user/model/a/x.gguf",), "port": 9}),
    ("-mu https://hf.co/user/model", {"model": ("https://hf.co/user/model",)}),
    ("m --spec-method ngram --spec-tokens 3", {"speculative_method": "ngram", "num_speculative_tokens": 3}),
]


@pytest.mark.parametrize(("line", "expected"), DOCUMENTED, ids=[line for line, _ in DOCUMENTED])
def test_a_documented_command_line_of_vllm_works_or_is_refused_by_name(
    line: str, expected: dict[str, Any] | str
) -> None:
    if isinstance(expected, str):
        with pytest.raises(ConfigError) as refused:
            Serve.parse(shlex.split(line))
        assert expected in str(refused.value)
    else:
        settings = Serve.parse(shlex.split(line))
        assert {name: getattr(settings, name) for name in expected} == expected


@pytest.mark.parametrize(("line", "expected"), COMMON, ids=[line for line, _ in COMMON])
def test_flags_of_vllm_are_understood(line: str, expected: dict[str, Any]) -> None:
    settings = Serve.parse(shlex.split(line))
    assert {name: getattr(settings, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("m -dpa 10.0.0.1", "-dpa of vLLM is not supported: all replicas of a server are on its machine"),
        ("m -dpb ray", "-dpb ray of vLLM is not supported: replicas are processes on this machine"),
        ("m --data-parallel-address 10.0.0.1", "--data-parallel-address of vLLM is not supported: all replicas of a"),
        ("m -tp 0", "--tensor-parallel-size expects an integer from 1 to 64, not '0'"),
        ("m --enable-lora --lora-modules a=b", "--enable-lora of vLLM is not supported: LoRA adapters"),
        ("m --quantization exl3", "--quantization expects none, int8, int4, fp8, auto-round, "),
        ("m --load-format pt", "--load-format expects auto, safetensors, gguf or dummy, not 'pt'"),
        ("-hff x-Q8_0.gguf", "--hf-file of llama-server needs --hf-repo"),
        ("-hf a/b -hft x", "-hft of llama-server is not supported: set the environment variable HF_TOKEN"),
        (
            "m --kv-cache-dtype fp8_e5m2",
            "--kv-cache-dtype fp8_e5m2 is not supported: Quire has auto, bf",
        ),
        (
            "m --attention-backend FLASHMLA",
            "--attention-backend expects auto, triton, flash_attn or flashinfer, not 'FLASHMLA'",
        ),
        ("m --kv-cache-dtype nvfp4", "--kv-cache-dtype nvfp4 is not supported: Quire has auto"),
        ("m --hf-overrides.a", "--hf-overrides.a expects a value"),
        ("m --hf-overrides.a --port 1", "--hf-overrides.a expects a value"),
        ("m --hf-overrides. 1", "--hf-overrides. has an empty key"),
        ("m --hf-overrides.a..b 1", "--hf-overrides.a..b has an empty key"),
        ("m --hf-overrides.a 1 --hf-overrides.a.b 2", "--hf-overrides.a.b: the value of 'a' is not an object"),
        ("m --hf-overrides.a 1 --hf-overrides.a+ 2", "--hf-overrides.a+: the value of 'a' is not a list"),
        ("m --hf-overrides x --hf-overrides.a 2", "--hf-overrides expects a JSON object, not 'x'"),
        ("m --ec-transfer-config.ec_role x", "--ec-transfer-config.ec_role of vLLM is not supported"),
        ("m --attention-config [1]", "it expects a JSON object"),
        (
            'm --attention-config \'{"backend": "FLASH_ATTN", "flash_attn_version": 3}\'',
            "is not supported: flash_attn_version 3 cannot be set: FlashAttention 2 is used",
        ),
        ("m -ac.flash_attn_version 3", "flash_attn_version 3 cannot be set: FlashAttention 2 is used"),
        ("m -ac '{\"use_cudnn_prefill\": true}'", "is not supported: use_cudnn_prefill cannot be set"),
        ("m --attention-config.use_cudnn_prefill true", "is not supported: use_cudnn_prefill cannot be set"),
        ('m --speculative-config \'{"method": "eagle"}\'', "the only method is ngram"),
        ("m --speculative-config [1", "--speculative-config"),
        ("m --speculative-config.model x", "the only method is ngram"),
        ("m --runner draft", "--runner draft is not supported: it expects auto, generate or pooling"),
        ("m --allowed-origins [1]", "it expects a list of strings"),
        ("m --max-model-len 16x", "--max-model-len expects an integer of at least 1, not '16x'"),
        ("m --swap-space", "--swap-space expects a value"),
        ("m --no-enable-chunked-prefill", "Quire's is --max-num-batched-tokens"),
        ("m --ctx-size 4096", "--ctx-size of llama-server is not supported; Quire's is --max-model-len"),
        ("m --main-gpu 1", "--main-gpu of llama-server is not supported; Quire's is --device: the first GPU"),
        ("m --embedding", "--embedding of llama-server is not supported; Quire's is --convert"),
        ("m --pooling mean", "--pooling of llama-server is not supported; Quire's is --pooler-config"),
        ("m -np 4", "-np of llama-server is not supported; Quire's is --max-num-seqs"),
    ],
)
def test_what_quire_cannot_do_is_refused_by_name(line: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Serve.parse(shlex.split(line))
    assert complaint in str(refused.value)


def test_one_line_for_each_flag_says_what_became_of_it() -> None:
    line = "m --async-scheduling --max-num-batched-tokens 8k --disable-uvicorn-access-log --port 1 --enforce-eager"
    scheduling, tokens, log = Serve.parse(shlex.split(line)).notes
    assert scheduling.startswith("--async-scheduling has no effect: ")
    assert tokens.startswith("--max-num-batched-tokens 8k is translated to --max-num-batched-tokens 8000")
    assert log == "--disable-uvicorn-access-log is translated to --no-access-log"


def test_a_backend_that_quire_has_not_is_named() -> None:
    (note,) = Serve.parse(["m", "--attention-backend", "XFORMERS"]).notes
    assert note.startswith("--attention-backend XFORMERS is translated to --attention-backend auto (`auto` is Quire")


def test_names_of_attention_backends_are_vllms_in_variables_and_files_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_ATTENTION_BACKEND", "FLASH_ATTN")
    assert Serve.parse([]).attention_backend == "flash_attn"
    monkeypatch.setenv("QUIRE_ATTENTION_BACKEND", "FLASHMLA")
    with pytest.raises(ConfigError, match="expects auto, triton, flash_attn or flashinfer, not 'FLASHMLA'"):
        Serve.parse([])
    monkeypatch.delenv("QUIRE_ATTENTION_BACKEND")
    path = tmp_path / "quire.toml"
    path.write_text('[serve]\nattention-backend = "torch_sdpa"\n', encoding="utf-8")
    assert Serve.parse(["--config", str(path)]).attention_backend == "auto"
    path.write_text("[serve]\nattention-backend = 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="expects auto, triton, flash_attn or flashinfer, not 1"):
        Serve.parse(["--config", str(path)])


def test_names_of_models_and_lists_are_told_apart() -> None:
    (note,) = Serve.parse(["m", "--api-key", "secret", "other"]).notes
    assert note.startswith("--api-key takes the 2 values that follow it")
    assert Serve.parse(["--served-model-name", "name", "m"]).model == ("m",)
    two = Serve.parse(["m", "n", "--served-model-name", "a=m", "--served-model-name", "b=n"])
    assert (two.model, two.served_model_name) == (("m", "n"), ("a=m", "b=n"))


def test_every_setting_that_is_an_object_takes_dotted_keys() -> None:
    profiler = {"profiler": "torch", "torch_profiler_dir": "traces"}
    events = {"publisher": "zmq", "endpoint": "tcp://*:5557"}
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    with_checked_keys = {
        "profiler_config": profiler,
        "kv_events_config": events,
        "kv_transfer_config": transfer,
    }
    for name, value in with_checked_keys.items():
        flags = [f"{Serve.flag(name)}.{key}={item}" for key, item in value.items()]
        assert getattr(Serve.parse(flags), name) == value
    for name, field in Serve.model_fields.items():
        if "dict[str" in str(field.annotation) and name not in with_checked_keys:
            assert getattr(Serve.parse([f"{Serve.flag(name)}.a.b", "1"]), name) == {"a": {"b": 1}}


@pytest.mark.parametrize("server", get_args(Server))
def test_the_tables_name_flags_that_exist(server: Server) -> None:
    flags = flags_of(server)
    for flag in flags:
        assert not flag.ours or flag.ours in OWN or flag.ours.replace("--no-", "--") in OWN, flag
        assert flag.ours or flag.note, flag
        assert flag.kind != "same" or flag.names == (flag.ours,), flag
    names = [name for flag in flags for name in flag.names]
    assert len(set(names)) == len(names)


def test_values_of_the_table_are_those_that_are_translated() -> None:
    values = {flag.names[0]: flag.values for flag in flags_of("vllm")}
    assert values["--attention-backend"] == ATTENTION_BACKENDS
    assert values["--kv-cache-dtype"] == {name: new_name for name, new_name in CACHE_DTYPES.items() if name != new_name}


def test_the_page_is_up_to_date() -> None:
    written = Path(__file__).parents[2] / "docs" / "flags-of-other-servers.md"
    command = "python -m quire.config.other_servers.page > docs/flags-of-other-servers.md"
    assert written.read_text(encoding="utf-8") == page(), f"run: {command}"
