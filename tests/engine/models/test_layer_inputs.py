"""Gemma 3n and 4: transformers' tokens, in any schedule."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.options import ModelOptions
from quire.engine.execution.step_graphs import StepGraphs
from quire.kernels import native
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.families import (
    SCHEDULED,
    SEED,
    check_bits,
    check_log_probabilities,
    check_ranks,
    check_refused,
    check_schedule,
)
from tests.support.invariance import together
from tests.support.models import LAYER_INPUTS, make_model, save_model
from tests.support.variants import covering, slow_but

FolderOf = Callable[[str], Path]


@cache
def model_of(case: str) -> Any:
    return make_model(case)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    return cache(lambda case: save_model(model_of(case), tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("case", "device"),
    slow_but(
        [(case, device) for case in LAYER_INPUTS for device in ("cpu", "reference")],
        *((case, "cpu") for case in LAYER_INPUTS),
    ),
)
def test_engine_equals_transformers(folder_of: FolderOf, case: str, device: Any) -> None:
    """Greedy tokens and their log-probabilities, behind prompts that are longer than a chunk and a window."""
    check_log_probabilities(model_of(case), folder_of(case), device)


@pytest.mark.parametrize(("case", "schedule"), covering(list(LAYER_INPUTS), SCHEDULED))
def test_tokens_do_not_depend_on_the_schedule(folder_of: FolderOf, case: str, schedule: dict[str, Any]) -> None:
    check_schedule(folder_of(case), Engine(folder_of(case), **schedule))


def test_tokens_do_not_depend_on_preemption(folder_of: FolderOf) -> None:
    folder = folder_of("gemma4")
    model = ModelOptions(max_model_len=104)
    roomy = Engine(folder, model=model, block_size=4)
    size = 54 * roomy.info.cache_bytes // roomy.info.num_blocks
    engine = Engine(folder, model=model, block_size=4, kv_cache_memory_bytes=size)
    requests = [(random_prompt(seed, 6), greedy(60)) for seed in range(6)]  # few blocks at first, and then many
    assert together(engine, requests, SEED) == [roomy.generate(*request).tokens for request in requests]
    assert engine.preemptions > 0


@pytest.mark.parametrize(
    ("case", "parallel"),
    slow_but(
        [
            ("gemma4", {"tensor_parallel_size": 2}),
            ("gemma4-moe", {"tensor_parallel_size": 2}),
            ("gemma4", {"pipeline_parallel_size": 2}),
            ("gemma4", {"pipeline_parallel_size": 4}),
            ("gemma4", {"pipeline_parallel_size": 3, "tensor_parallel_size": 2}),
            ("gemma3n", {"tensor_parallel_size": 2}),
            ("gemma3n", {"tensor_parallel_size": 4}),
            ("gemma3n", {"pipeline_parallel_size": 2}),
            ("gemma3n", {"pipeline_parallel_size": 4}),
            ("gemma3n", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        ],
        ("gemma4", {"tensor_parallel_size": 2}),
        ("gemma3n", {"tensor_parallel_size": 2}),
        ("gemma3n", {"pipeline_parallel_size": 2}),
    ),
)
def test_tokens_do_not_depend_on_the_ranks(folder_of: FolderOf, case: str, parallel: dict[str, int]) -> None:
    """Stages begin with layers that read keys of layers in earlier ones; ranks compare gates with those of others."""
    check_ranks(folder_of(case), parallel)


@pytest.mark.skipif(native.instructions() is None, reason="torch's products sum in another order with more rows")
@pytest.mark.parametrize(("case", "quantization"), covering(list(LAYER_INPUTS), ["none", "int8"]))
def test_bits_in_low_precision_do_not_depend_on_the_batch(folder_of: FolderOf, case: str, quantization: Any) -> None:
    check_bits(folder_of(case), quantization)


@pytest.mark.skipif(native.instructions() is None, reason="only calls of the compiled kernels can be captured")
@pytest.mark.parametrize("case", ["gemma4", "gemma4-unified"])
def test_decode_steps_are_replayed(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without inputs of layers. Prompts end in steps in which the last layers compute a part of the rows."""
    heads: dict[str, Any] = {"head_dim": 64, "global_head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = save_model(make_model(case, **heads).bfloat16(), tmp_path)

    def tokens() -> tuple[list[list[int]], StepGraphs]:
        engine = Engine(folder, model=ModelOptions(dtype="bfloat16"), max_num_seqs=3, max_num_batched_tokens=16)
        for number in range(5):
            engine.add(str(number), random_prompt(number, 1 + 9 * number), greedy(8 + 7 * (number % 3)))
            engine.step()
        engine.run()
        return [engine.results[str(number)].tokens for number in range(5)], engine.runner.steps

    replayed, graphs = tokens()
    assert (True, None) in graphs.graphs
    assert not graphs.not_capturable
    monkeypatch.setattr(StepGraphs, "logits", lambda self, *args: self._eager.logits(*args))
    assert tokens()[0] == replayed


def test_layers_that_share_keys_take_no_memory_of_the_cache(folder_of: FolderOf, tmp_path: Path) -> None:
    """Of four layers two have keys of their own, as those of a model with two layers."""
    half = save_model(
        make_model("gemma4", num_hidden_layers=2, num_kv_shared_layers=0, layer_types=LAYER_TYPES), tmp_path
    )
    per_block = [
        engine.info.cache_bytes // engine.info.num_blocks for engine in (Engine(folder_of("gemma4")), Engine(half))
    ]
    assert per_block[0] == per_block[1]


LAYER_TYPES = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gemma4", {"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3: the last layers cannot share"),
        ("gemma4", {"is_causal": False}, "attention in both directions is not supported"),
        ("gemma3n", {"activation_sparsity_pattern": [0.9, 1.0, 0.0, 0.0]}, "activation_sparsity_pattern has 1.0;"),
        ("gemma3n", {"altup_active_idx": 1}, "altup_active_idx is 1; supported are 2 to 9, and 0"),
    ],
)
def test_configs_that_are_not_supported_are_refused(
    folder_of: FolderOf, case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    check_refused(model_of(case), folder_of(case), changes, message, tmp_path)


def test_text_of_a_model_that_reads_pictures(folder_of: FolderOf, tmp_path: Path) -> None:
    """Gemma 3n as published: the language model is one of its parts. transformers needs another package to make it."""
    folder = folder_of("gemma3n")
    text = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": text})
    )
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = ("vision_tower.stem.weight", "audio_tower.layers.0.weight", "embed_vision.norm.weight", "embed_audio.norm")
    parts = {f"model.{name}": torch.zeros(2) for name in others}
    save_file({**renamed, **parts}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompt = random_prompt(1, 40)
    engines = Engine(folder), Engine(tmp_path)
    assert engines[1].info.implementation == "quire"
    assert len({tuple(engine.generate(prompt, greedy(12)).tokens) for engine in engines}) == 1
