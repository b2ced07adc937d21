"""Odd configs: what transformers makes of them is what is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire.engine.models.errors import UnsupportedModel
from tests.support.engine import load, random_prompt
from tests.support.models import BASE, DECODERS, LONGROPE
from tests.support.oracle import assert_equal, change_weights, write_folder
from tests.support.variants import slow_but

_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}
_GROUPS = {"n_routed_experts": 16, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}


def _scaled(kind: str, place: str, form: str) -> dict[str, Any]:
    """A scaled rope whose trained length is nested, beside it, or both with different values."""
    scalings: dict[str, dict[str, Any]] = {
        "yarn": {"factor": 4.0},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "longrope": {"factor": 4.0, "short_factor": LONGROPE["short_factor"], "long_factor": LONGROPE["long_factor"]},
    }
    params = {"rope_type": kind, "rope_theta": 1e4, **scalings[kind]}
    if place == "at both levels":
        params["original_max_position_embeddings"] = 32
    return {form: params, **({} if place == "nowhere" else {"original_max_position_embeddings": 24})}


# Name -> (case of `DECODERS`, changes of its config).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "groups of experts": ("deepseek_v3", _GROUPS),
    "deepseek's shared expert with another activation": ("deepseek_v3", {"hidden_act": "gelu_pytorch_tanh"}),
    "no shared expert": ("deepseek_v3", {"n_shared_experts": 0}),
    "deepseek without interleaving": ("deepseek_v3", {"rope_interleave": False, "attention_bias": True}),
    **{
        f"yarn with a factor of {factor} and mscale": (
            "deepseek_v3",
            {"rope_parameters": {**_YARN, "factor": factor, "mscale": 0.7, "mscale_all_dim": 1.3}},
        )
        for factor in (0.5, 1.0, 4.0)
    },
    **{
        f"hidden_act beside hidden_activation, {case}": (
            case,
            {"hidden_act": "relu", "hidden_activation": "gelu_pytorch_tanh"},
        )
        for case in ("gemma2", "gemma3")
    },
    "a softcap of gemma3's attention": ("gemma3", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 9.0}),
    "a softcap of gemma2's attention": ("gemma2", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": None}),
    "yarn per layer type, with truncate": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {**_YARN, "factor": 4.0, "truncate": False},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    **{
        f"biases that {case} does not have": (case, {"attention_bias": True, "mlp_bias": True})
        for case in ("mistral", "mixtral", "phi3", "qwen2")
    },
    **{f"mlp_bias that {case} does not have": (case, {"mlp_bias": True}) for case in ("qwen3", "olmo2", "qwen3_moe")},
    **{
        f"a partial rope that {case} does not have": (case, {"partial_rotary_factor": 0.5})
        for case in ("llama", "mistral", "qwen2", "qwen3", "olmo2", "granite", "smollm3", "mixtral", "gemma2")
    },
    "a partial rope of an odd size": ("phi3", {"partial_rotary_factor": 0.47}),
    "a list of layers without rope that is too long": ("smollm3", {"no_rope_layers": [1, 0, 1, 1, 0, 0, 1]}),
    "no experts": ("qwen3_moe", {"num_experts": 0}),
    "experts of qwen2 with weights that sum to 1": ("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False}),
    "deepseek v2 without groups": ("deepseek_v2", {"topk_method": "greedy", "q_lora_rank": None}),
    **{
        f"longrope, {name}": (case, {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 24, **params}})
        for name, case, params in (
            ("a prompt on each side", "phi3", {}),
            ("llama", "llama", {"factor": 3.0}),
            ("its scale given", "mistral", {"attention_factor": 0.8}),
            (
                "a partial one",
                "phi3",
                {f"{kind}_factor": [1.0, 2.0, 4.0] for kind in ("short", "long")} | {"partial_rotary_factor": 0.4},
            ),
        )
    },
    **{
        f"{kind} of {case}, its trained length {place}, {form}": (case, _scaled(kind, place, form))
        for case, kind, place, form in (
            ("llama", "llama3", "at the top level", "rope_parameters"),
            ("qwen2", "yarn", "at the top level", "rope_parameters"),
            ("qwen3", "yarn", "at both levels", "rope_scaling"),
            ("mistral", "longrope", "at the top level", "rope_scaling"),
            ("starcoder2", "yarn", "at the top level", "rope_scaling"),
            ("starcoder2", "llama3", "at both levels", "rope_parameters"),
            ("phi3", "longrope", "at both levels", "rope_parameters"),
            ("deepseek_v3", "yarn", "nowhere", "rope_parameters"),
        )
    },
    "a trained length beside the ropes of layer types": (
        "gemma3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "another activation": ("llama", {"hidden_act": "quick_gelu"}),
}
LIKE_OTHERS = ("experts of qwen2 with weights that sum to 1", "deepseek v2 without groups")  # in test_oracle
PROMPTS = [random_prompt(1, 40), random_prompt(2, 5)]


def config_of(case: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a case of `DECODERS`, as someone may have written it."""
    model_type, overrides = DECODERS[case]
    return {"model_type": model_type, **BASE, **overrides, **changes}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # in a shared expert of size 0
@pytest.mark.parametrize("name", slow_but(CASES, *(name for name in CASES if name not in LIKE_OTHERS)))
def test_odd_configs(name: str, tmp_path: Path) -> None:
    case, changes = CASES[name]
    assert_equal(write_folder(tmp_path, config_of(case, **changes)), PROMPTS)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_accurate", "quick_gelu",
    "relu", "relu2", "relu6", "leaky_relu", "swish", "mish", "hardswish", "sigmoid", "tanh", "linear"])  # fmt: skip
def test_activations(activation: str, tmp_path: Path) -> None:
    assert_equal(write_folder(tmp_path, config_of("llama", hidden_act=activation)), PROMPTS[1:], tokens=2)


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_a_tied_head_beside_its_own_weight(case: str, equal: bool, tmp_path: Path) -> None:
    """It is not tied if the checkpoint has different values for it."""
    folder = write_folder(tmp_path, config_of(case, tie_word_embeddings=True))
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(folder, {"lm_head.weight": embedding.clone() if equal else torch.randn_like(embedding) * 0.3})
    assert_equal(folder, PROMPTS)


def test_a_tied_weight_under_the_heads_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, config_of("llama", tie_word_embeddings=True))
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(folder, {"lm_head.weight": embedding.clone()}, remove=("model.embed_tokens.weight",))
    assert_equal(folder, PROMPTS)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4, "sliding_window": None}, "no sliding_window"),
        ("gemma2", {"sliding_window": None}, "no sliding_window"),
        (
            "gemma3",
            {
                "layer_types": ["full_attention", "sliding_attention"] * 2,
                "head_dim": 16,
                "rope_parameters": {
                    kind: {**LONGROPE, "original_max_position_embeddings": length}
                    for kind, length in (("full_attention", 16), ("sliding_attention", 24))
                },
            },
            "different original_max_position_embeddings: 16 and 24",
        ),
        ("llama", {"rope_parameters": {**_YARN, "factor": 4.0, "partial_rotary_factor": 0.5}}, "rotate whole heads"),
        ("llama", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": -1}}, "trained_len is -1"),
        *(("granite", {"attention_multiplier": value}, "attention_multiplier must be above 0") for value in (0, -0.3)),
        ("granite", {"logits_scaling": 0}, "logits_scaling must not be 0; .* not finite numbers"),
        *(("gemma2", {"attn_logit_softcapping": value}, "softcap of attention scores") for value in (0.0, -5.0)),
        ("gemma2", {"query_pre_attn_scalar": -16}, "scale is .*, not a number"),
        *(
            (
                "llama",
                {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": value}},
                "context length",
            )
            for value in (0.0, -2.0)
        ),
        ("deepseek_v3", {"n_group": 8}, "8 experts cannot be split into 8 groups of two or more"),
        ("deepseek_v3", {"n_group": 3}, "8 experts cannot be split into 3 groups"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group is 5, but there are only 4 groups"),
        ("deepseek_v2", {"n_group": 3}, "8 experts cannot be split into 3 groups"),
        ("deepseek_v2", {"topk_group": 5}, "topk_group is 5, but there are only 4 groups"),
        ("deepseek_v3", {"hidden_act": "swoosh"}, "'swoosh' is not supported"),
    ],
)
def test_configs_that_transformers_cannot_run_are_refused(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path, config_of(case))
    (folder / "config.json").write_text(json.dumps(config_of(case, **changes)))
    with pytest.raises(UnsupportedModel, match=message):
        load(folder)
