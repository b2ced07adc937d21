"""Models that transformers runs and Quire cannot are refused by name, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from quire.engine.models.errors import UnsupportedModel
from tests.support.engine import load
from tests.support.models import BASE

_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 64,
    "head_dim": 8,
}

# Model type -> (changes of its config, the reason).
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "bert": ({}, "is bidirectional, as in encoders; only causal decoders are supported"),
    "roberta": ({"pad_token_id": 1}, "is bidirectional"),
    "mamba": ({"state_size": 8}, "mamba models are recurrent"),
    "recurrent_gemma": ({"lru_width": 64}, "recurrent_gemma models are recurrent"),
    "llama4_text": ({"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96}, "in chunks of tokens"),
    "deepseek_v32": (_MLA, "unsupported type indexed_attention"),
    "glm_moe_dsa": (_MLA, "unsupported type indexed_attention"),
    "doge": ({"num_experts": 4}, "uses a custom mask"),
}


def save(folder: Path, model_type: str, **changes: Any) -> Path:
    config = AutoConfig.for_model(model_type, **{**BASE, "num_hidden_layers": 2, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model_type", CASES)
def test_models_that_cannot_run_are_refused_with_the_reason(model_type: str, tmp_path: Path) -> None:
    changes, reason = CASES[model_type]
    folder = save(tmp_path, model_type, **changes)
    with pytest.raises(UnsupportedModel, match=reason):
        load(folder)


def test_other_positions_than_those_of_the_tokens_are_refused(tmp_path: Path) -> None:
    """RoBERTa's begin after that of the padding token."""
    folder = save(tmp_path, "roberta", is_decoder=True, pad_token_id=1)
    with pytest.raises(UnsupportedModel, match="masks, positions or biases that are not supported"):
        load(folder)


def test_a_model_that_transformers_cannot_run_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, "roberta", is_decoder=True)
    with pytest.raises(UnsupportedModel, match=r"cannot run it, perhaps as .* no pad_token_id"):
        load(folder)


def test_each_call_of_attention_has_a_cache(tmp_path: Path) -> None:
    model = load(save(tmp_path, "diffllama")).model
    assert len(model.caches) == 4
