"""Quantized checkpoints of models with states: all fused projections are read, and give transformers' tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Engine, greedy, random_prompt
from tests.support.float_checkpoints import VARIANTS
from tests.support.integer_checkpoints import Variant, awq, compressed, gptq, quantize
from tests.support.models import make_model, save_model
from tests.support.oracle import generated, transformers_model
from tests.support.toy_format import twin_of
from tests.support.variants import slow_but

TOKENS = 12
FORMATS: dict[str, Variant] = {
    "fp8-blocks": VARIANTS["fp8-blocks"],
    "compressed-fp8-tensor": VARIANTS["compressed-fp8-tensor"],
    "gptq": gptq(),
    "awq": awq(),
    "compressed-int4": compressed(),
}
# Sizes that groups and packed words divide.
CASES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"mlp_only_layers": [0], "num_hidden_layers": 4, "linear_key_head_dim": 16},
    "qwen3_5": {"num_hidden_layers": 4, "linear_key_head_dim": 16},
    "qwen3_5_moe": {"num_hidden_layers": 4, "linear_key_head_dim": 16},
    "lfm2": {"num_hidden_layers": 2, "intermediate_size": 96},
    "lfm2_moe": {"num_hidden_layers": 2},
    "granitemoehybrid": {"num_hidden_layers": 2, "mamba_n_heads": 8, "mamba_d_head": 16},
    "granitemoehybrid-dense": {"num_hidden_layers": 2, "mamba_n_heads": 8, "mamba_d_head": 16},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16},
    "falcon_h1": {"num_hidden_layers": 2, "mamba_n_heads": 8, "mamba_d_head": 16},
}
# Modules as tools quantize them: not convolutions, gates of states and routers.
ENDS = ("_proj", "_linear", "in_proj_qkvz", "in_proj_qkv", "in_proj_z", ".w1", ".w2", ".w3")
MATRIX = [(case, name) for case in CASES for name in FORMATS]


@pytest.mark.parametrize(
    ("case", "name"),
    slow_but(MATRIX, ("qwen3_next", "fp8-blocks"), ("granitemoehybrid-dense", "gptq"), ("lfm2", "compressed-int4")),
)
def test_tokens_of_transformers_on_the_same_numbers(tmp_path: Path, case: str, name: str) -> None:
    folder = save_model(make_model(case, **CASES[case]), tmp_path / "model")
    variant = FORMATS[name]

    def chosen(module: str) -> Variant | None:
        return None if "block_sparse_moe" in module else variant  # experts that are one tensor stay plain

    quantize(folder, chosen, variant.section, ENDS)
    prompt = random_prompt(1, 40)
    expected, _ = generated(transformers_model(twin_of(folder)), prompt, TOKENS)
    engine = Engine(folder)
    assert engine.info.implementation == "quire"
    assert engine.generate(prompt, greedy(TOKENS)).tokens == expected
