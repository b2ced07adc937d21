"""Models that read pictures answer text: their language model alone is loaded, and equals the whole in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.models.errors import BrokenFolder, UnsupportedModel, WeightMismatch
from quire.engine.models.family import Composite
from quire.engine.models.model_config import read_model_config
from quire.engine.models.registry import registry
from tests.support.engine import Engine, greedy, load, random_prompt
from tests.support.oracle import change_weights
from tests.support.vision_models import COMPOSITES, make_composite, save_composite, text_types

TOKENS = 6
EMBEDS = {"colpali", "colqwen2"}  # types of models that do not generate
NEEDS_TIMM = "gemma3n"  # to be made by transformers; its text is compared in test_layer_inputs.py


@pytest.mark.parametrize("case", COMPOSITES)
def test_text_equals_hugging_face(case: str, tmp_path: Path) -> None:
    model = make_composite(case)
    model.save_pretrained(tmp_path)
    engine = Engine(tmp_path, block_size=8, max_num_batched_tokens=48)
    assert engine.info.implementation == "quire"
    for seed, length in ((1, 5), (2, 40)):
        prompt = random_prompt(seed, length)
        with torch.inference_mode():
            out = model.generate(
                input_ids=torch.tensor([prompt]),
                max_new_tokens=TOKENS,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
                **text_types(case, prompt),
            )
        result = engine.generate(prompt, greedy(TOKENS, logprobs=20))
        assert result.tokens == out.sequences[0, len(prompt) :].tolist()
        for logits, output in zip(out.logits, result.outputs, strict=True):
            assert output.logprobs is not None
            expected = logits[0].log_softmax(-1)[output.logprobs[0].token_ids]
            error = (torch.tensor(output.logprobs[0].logprobs) - expected).abs().max()
            assert (error / logits.abs().max()).item() < 1e-4


def test_embeddings_equal_hugging_face(tmp_path: Path) -> None:
    model = make_composite("mistral3")
    model.save_pretrained(tmp_path)
    engine = Engine(tmp_path, model=ModelOptions(convert="embed"))
    prompt = random_prompt(1, 20)
    engine.add("0", prompt, PoolingParams(task="embed"))
    engine.run()
    with torch.inference_mode():
        state = model.model.language_model(torch.tensor([prompt])).last_hidden_state[0, -1]
    pooled = engine.results["0"].pooled
    assert pooled is not None
    assert (torch.from_numpy(pooled.data) - state / state.norm()).abs().max() < 1e-4


@pytest.mark.parametrize("case", ["qwen2_5_vl-tied", "paligemma2"])
def test_two_ranks_load_their_parts(tmp_path: Path, case: str) -> None:
    save_composite(case, tmp_path)
    prompt = random_prompt(1, 20)
    expected = Engine(tmp_path).generate(prompt, greedy(TOKENS)).tokens
    ranks = Engine(tmp_path, parallel=ParallelOptions(tensor_parallel_size=2))
    try:
        assert ranks.generate(prompt, greedy(TOKENS)).tokens == expected
    finally:
        ranks.core.close()


def test_every_type_is_compared() -> None:
    """A type that a family without facts claims has a case here, unless it only embeds: test_retrieval.py has these."""
    claimed = {
        kind for kind, family in registry().types.items() if isinstance(family, Composite) and family.facts is None
    }
    assert claimed - EMBEDS - {NEEDS_TIMM} == {kind for kind, _ in COMPOSITES.values()}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ],
)
def test_names_of_other_versions_of_transformers(before: str, after: str, tmp_path: Path) -> None:
    save_composite("llava", tmp_path)
    expected = load(tmp_path).model.state_dict()
    path = tmp_path / "model.safetensors"
    renamed = {name.replace(before, after): tensor for name, tensor in load_file(path).items()}
    assert any(name.startswith(after) for name in renamed)
    save_file(renamed, path, metadata={"format": "pt"})
    loaded = load(tmp_path).model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_weights_of_the_vision_tower_are_not_read(tmp_path: Path) -> None:
    """They may be in any dtype or damaged; they do not count."""
    save_composite("mistral3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    seen = [tensor.nbytes for name, tensor in tensors.items() if name.startswith("language_model.")]
    damaged = {
        name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items() if name.startswith("vision_tower.")
    }
    assert damaged
    change_weights(tmp_path, {**damaged, "vision_tower.packed.weight": torch.zeros(1 << 20, dtype=torch.uint8)})
    loaded = load(tmp_path)
    assert loaded.weight_bytes == sum(seen)


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    save_composite("mistral3", tmp_path)
    change_weights(tmp_path, {"language_model.model.layers.0.extra.weight": torch.zeros(2)})
    with pytest.raises(WeightMismatch, match=r"unexpected weights.*layers\.0\.extra"):
        load(tmp_path)


def test_a_weight_under_two_names_is_refused(tmp_path: Path) -> None:
    save_composite("mistral3", tmp_path)
    norm = load_file(tmp_path / "model.safetensors")["language_model.model.norm.weight"]
    change_weights(tmp_path, {"model.language_model.norm.weight": norm})
    with pytest.raises(BrokenFolder, match="another name"):
        load(tmp_path)


def test_a_language_model_of_another_type_is_refused(tmp_path: Path) -> None:
    """With --model-impl auto, transformers is asked; it has no causal language model of such a type."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"],'
        ' "text_config": {"model_type": "bloom"}, "vision_config": {"model_type": "clip_vision_model"}}'
    )
    with pytest.raises(UnsupportedModel, match="language model of type 'persimmon' is not supported"):
        read_model_config(tmp_path, "quire", {"text_config": {"model_type": "persimmon"}})


def test_experts_of_qwen3_vl_as_published(tmp_path: Path) -> None:
    """Inputs lie before outputs; transformers saves them the other way round."""
    save_composite("qwen3_vl_moe", tmp_path)
    expected = load(tmp_path).model.state_dict()
    path = tmp_path / "model.safetensors"
    turned = {
        name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in load_file(path).items()
    }
    assert any(".experts." in name for name in turned)
    save_file(turned, path, metadata={"format": "pt"})
    loaded = load(tmp_path).model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
