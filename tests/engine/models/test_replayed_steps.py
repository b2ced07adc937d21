"""Replayed steps of families whose layers are more than attention and a feed-forward."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from quire.engine.execution.step_graphs import StepGraphs
from quire.kernels import native
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.variants import slow_but

pytestmark = pytest.mark.skipif(
    native.instructions() is None, reason="only calls of the compiled kernels can be captured"
)

_TWO = {"num_attention_heads": 2, "num_key_value_heads": 1}  # heads as large as attention kernels read
_WIDE: dict[str, Any] = {**_TWO, "head_dim": 64}
_LATENT = {
    "num_hidden_layers": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
CASES: dict[str, dict[str, Any]] = {
    "granitemoe": _TWO,
    "qwen2_moe": _TWO,
    "qwen3_moe": _WIDE,
    "gpt_oss": {"num_hidden_layers": 2, "head_dim": 32},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": {**_LATENT, "first_k_dense_replace": 1},
    "glm_moe_dsa": {**_LATENT, "num_hidden_layers": 3},
    "kimi_linear": {**_LATENT, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 2, **_TWO},
    "granitemoehybrid": {"num_hidden_layers": 2, **_TWO},
    "jamba": _TWO,
    "nemotron_h": {**_WIDE},
    "falcon_h1": _TWO,
    "qwen3_next": _WIDE,
    "qwen3_5_moe": _WIDE,
    "olmo_hybrid": _TWO,
    "minimax": _TWO,
    "minimax_m2": _WIDE,
    "zamba2": {"num_attention_heads": 2, "num_key_value_heads": 2},
    "ernie4_5_moe": _WIDE,
    "ministral3": _WIDE,
    "apertus": _TWO,
    "cohere2": _TWO,
    "glm4": _WIDE,
    "phi": {"num_attention_heads": 4},
    "gemma4": {**_TWO, "head_dim": 32, "global_head_dim": 64},
    "gemma4-moe": {**_TWO, "head_dim": 32, "global_head_dim": 64},
    "gemma3n": {},
    "llama4": _WIDE,
    "recurrent_gemma": _TWO,
    "bloom": {"n_head": 2},
}
NOT_REPLAYED = {"bloom": {(False, None)}}  # steps with chunks of prompts

_DEFAULT = (
    ("qwen3_5_moe", "int8"),
    ("nemotron_h", "none"),
    ("falcon_h1", "int8"),
    ("gemma3n", "none"),
    ("deepseek_v3", "none"),
    ("glm_moe_dsa", "none"),
    ("gpt_oss", "none"),
)


@cache
def _saved(case: str, folder: Path) -> Path:
    return save_model(make_model(case, **CASES[case]).bfloat16(), folder / case)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(
    ("case", "quantization"),
    slow_but([(case, quantization) for case in CASES for quantization in ("none", "int8")], *_DEFAULT),
)
def test_replayed_steps_give_the_same_tokens(
    folder: Path, case: str, quantization: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sequences that begin and end at different steps, with chunks of prompts beside those that decode."""

    def tokens() -> tuple[list[list[int]], StepGraphs]:
        model = ModelOptions(dtype="bfloat16", quantization=quantization)
        engine = Engine(_saved(case, folder), model=model, max_num_seqs=3, max_num_batched_tokens=16)
        engine.generate(random_prompt(9, 5), greedy(8))  # alone, so that a step with one row is captured
        for number in range(4):
            engine.add(str(number), random_prompt(number, 3 + 12 * number), greedy(10 + 5 * number))
            engine.step()
        engine.run()
        return [engine.results[str(number)].tokens for number in range(4)], engine.runner.steps

    replayed, steps = tokens()
    assert (True, None) in steps.graphs
    assert steps.not_capturable == NOT_REPLAYED.get(case, set())
    monkeypatch.setattr(StepGraphs, "logits", lambda self, *args: self._eager.logits(*args))
    assert tokens()[0] == replayed
