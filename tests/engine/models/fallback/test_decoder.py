"""Models that transformers runs and Quire cannot are refused by name, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from quire.engine.models.errors import UnsupportedModel
from tests.support.engine import load, random_prompt
from tests.support.models import BASE, DECODERS
from tests.support.oracle import assert_equal, write_folder

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
    "recurrent_gemma": ({"lru_width": 64}, "recurrent_gemma models are recurrent"),
    "llama4_text": ({"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96}, "in chunks of tokens"),
    "deepseek_v32": (_MLA, "unsupported type indexed_attention"),
    "glm_moe_dsa": (_MLA, "unsupported type indexed_attention"),
    "doge": ({"num_experts": 4}, "uses a custom mask"),
    "dory": (
        {
            "num_hidden_layers": 4,
            "n_input_layers": 1,
            "n_output_layers": 1,
            "head_dim": 16,
            "recurrent_kv_cache_mode": "last_loop",
        },
        "recurrent_kv_cache_mode 'last_loop' is not supported",
    ),
    "moshi": ({"sliding_window": 24, "ffn_dim": 96}, "its masks have none"),
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
        load(folder, model_impl="transformers")


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


def test_layers_that_run_in_loops(tmp_path: Path) -> None:
    """Dory: each loop of a layer has a cache."""
    loops = {"num_hidden_layers": 8, "n_input_layers": 2, "n_recurrent_layers": 4, "n_output_layers": 2}
    kinds = ["sliding_attention", "mlp", "full_attention", "mlp"] * 2  # as published: attention and MLP are layers
    config = {"model_type": "dory", **BASE, **loops, "layer_types": kinds, "head_dim": 16, "sliding_window": 24}
    engine = assert_equal(write_folder(tmp_path, config), [random_prompt(1, 40), random_prompt(2, 5)], tokens=3)
    assert len(engine.model.caches) == 6


_PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("case", "changes", "refusal"),
    [
        ("phi", {"qk_layernorm": True}, "Phi with qk_layernorm"),
        ("cohere", {"use_qk_norm": True}, "Cohere with use_qk_norm"),
        ("opt", {"do_layer_norm_before": False}, "OPT with post-LN layers"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim"),
        ("opt", {"layer_norm_elementwise_affine": False}, "OPT with non-affine norms"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("llama", {"rope_parameters": _PROPORTIONAL}, "rope type 'proportional'"),
        ("mistral", {"hidden_act": "laplace"}, "activation 'laplace'"),
    ],
)
def test_transformers_runs_what_quires_decoder_refuses(
    case: str, changes: dict[str, Any], refusal: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A variant of an architecture that Quire's decoder supports; a log message says why it is slower."""
    model_type, overrides = DECODERS[case]
    folder = write_folder(tmp_path, {"model_type": model_type, **BASE, **overrides, **changes})
    assert_equal(folder, [random_prompt(1, 40), random_prompt(2, 5)], tokens=3)
    assert refusal in caplog.text
    assert load(folder).config.implementation == "transformers"
    with pytest.raises(UnsupportedModel, match=refusal):
        load(folder, model_impl="quire")
    with pytest.raises(UnsupportedModel, match=rf"--quantization works with Quire's own decoder only.*{refusal}"):
        load(folder, quantization="int8")


@pytest.mark.parametrize(
    ("case", "changes", "refusal"),
    [
        ("falcon", {"alibi": True}, "Falcon with ALiBi is not supported; .*has its own attention code"),
        ("stablelm", {"qk_layernorm": True}, "StableLM with qk_layernorm is not supported; .*its own attention code"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not.*; .*is bidirectional"),
    ],
)
def test_what_neither_runs_is_refused_with_both_reasons(
    case: str, changes: dict[str, Any], refusal: str, tmp_path: Path
) -> None:
    model_type, overrides = DECODERS[case]
    folder = write_folder(tmp_path, {"model_type": model_type, **BASE, **overrides, **changes})
    with pytest.raises(UnsupportedModel, match=refusal):
        load(folder)
