"""Hidden states of encoders equal transformers', for every architecture."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.models.errors import UnsupportedModel
from tests.support.engine import Engine, load
from tests.support.hf_encoders import (
    ENCODERS,
    assert_close,
    engine_of,
    hidden_states,
    make_encoder,
    output,
    random_text,
)
from tests.support.variants import slow_but


@pytest.mark.parametrize(
    ("case", "device"),
    slow_but(
        product(ENCODERS, ["cpu", "reference"]),
        *((case, "cpu") for case in ENCODERS),
        *((case, "reference") for case in ("bert-odd", "mpnet", "modernbert", "gte", "deberta-v2", "jina-v3")),
    ),
)
def test_hidden_states_equal_transformers(case: str, device: Any, tmp_path: Path) -> None:
    """Of texts from one token to the whole context, together and alone."""
    model = make_encoder(case)
    engine = engine_of(model, tmp_path, model=ModelOptions(device=device))
    assert engine.pools.tasks == ("embed", "token_embed")
    texts = [random_text(i, length) for i, length in enumerate((1, 2, 17, engine.info.max_model_len, 40))]
    expected = [output(model, text).last_hidden_state[0] for text in texts]
    for got, hidden in zip(hidden_states(engine, texts), expected, strict=True):
        assert_close(got, hidden)
    assert_close(hidden_states(engine, texts[4:])[0], expected[4])


@pytest.mark.parametrize("case", ["modernbert", "nomic_bert", "gte"])
def test_a_partial_rope_that_an_encoder_does_not_have(case: str, tmp_path: Path) -> None:
    """It has no effect without a scaling; with one, transformers fails."""
    engine_of(make_encoder(case), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "partial_rotary_factor": 0.5}))
    model, text = AutoModel.from_pretrained(tmp_path, attn_implementation="eager"), random_text(1, 30)
    assert_close(hidden_states(Engine(tmp_path), [text])[0], output(model, text).last_hidden_state[0])
    rope: dict[str, Any] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    params = rope if case != "modernbert" else dict.fromkeys(("full_attention", "sliding_attention"), rope)
    path.write_text(json.dumps({**config, "rope_parameters": params}))
    with pytest.raises(UnsupportedModel, match="they rotate whole heads"):
        load(tmp_path)


@pytest.mark.parametrize("case", ["nomic_bert", "gte"])
def test_texts_are_as_long_as_an_encoders_dynamic_rope_was_trained(case: str, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = make_encoder(case, max_position_embeddings=48, rope_parameters=rope)
    engine = engine_of(model, tmp_path)
    assert engine.info.max_model_len == 48
    text = random_text(1, 48)
    assert_close(hidden_states(engine, [text])[0], output(model, text).last_hidden_state[0])


MASKED = ("bert", "roberta", "mpnet", "distilbert", "electra", "deberta-v3")


@pytest.mark.parametrize("case", MASKED)
def test_masked_language_models_load_as_embedders(case: str, tmp_path: Path) -> None:
    """Without their heads, and with the prefix of their base model's weights."""
    model = make_encoder(case, AutoModelForMaskedLM)
    engine = engine_of(model, tmp_path)
    text = random_text(1, 30)
    assert_close(hidden_states(engine, [text])[0], output(model.base_model, text).last_hidden_state[0])


@pytest.mark.parametrize("case", ["bert", "roberta", "distilbert"])
def test_old_names_of_weights(case: str, tmp_path: Path) -> None:
    """Norms with gamma and beta, buffers of position ids, weights with or without a prefix."""
    model = make_encoder(case)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {
        re.sub(r"(?i)(norm)\.weight", r"\1.gamma", re.sub(r"(?i)(norm)\.bias", r"\1.beta", name)): tensor
        for name, tensor in weights.items()
    }
    text = random_text(1, 30)
    for prefix in ("", f"{case}.", "model."):
        changed = {prefix + name: tensor for name, tensor in renamed.items()}
        changed[f"{prefix}embeddings.position_ids"] = torch.arange(256)[None]
        save_file(changed, tmp_path / "model.safetensors")
        assert_close(hidden_states(Engine(tmp_path), [text])[0], output(model, text).last_hidden_state[0])


def test_token_types_of_pairs(tmp_path: Path) -> None:
    """In a batch with single texts, and where one text is empty."""
    model = make_encoder("bert")
    engine = engine_of(model, tmp_path)
    text = random_text(1, 30)
    params = PoolingParams(task="token_embed", use_activation=False)
    for start in (None, 0, 12, 30):
        engine.add(str(start), text, params, second_text_start=start)
    engine.run()
    for start in (None, 0, 12, 30):
        pooled = engine.results[str(start)].pooled
        assert pooled is not None
        assert_close(pooled.data, output(model, text, start).last_hidden_state[0])


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("roberta", {"hidden_act": "never_heard_of"}, "never_heard_of"),
    ],
)
def test_what_is_not_supported_is_refused(case: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tmp_path / case
    make_encoder(case).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UnsupportedModel, match=message):
        load(folder)
