"""Small encoders of transformers with random weights, and what they compute for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModel

from quire.engine.client.pooling_params import PoolingParams
from tests.support.engine import Engine
from tests.support.models import BASE, draw_weights

Array = NDArray[np.float32]
_DEBERTA = {
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["p2c", "c2p"],
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_buckets": 16,
    "max_relative_positions": -1,
    "type_vocab_size": 0,
    "pad_token_id": 0,
}

_MODERN = {
    "local_attention": 24,
    "global_attn_every_n_layers": 2,
    "pad_token_id": 0,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "bos_token_id": 1,
    "classifier_pooling": "mean",
}

# Case -> (model type, overrides of BASE).
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {"hidden_act": "gelu"}),
    "bert-odd": ("bert", {"hidden_act": "relu", "type_vocab_size": 3, "layer_norm_eps": 1e-3}),
    "roberta": ("roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("xlm-roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "camembert": ("camembert", {"pad_token_id": 1, "type_vocab_size": 1}),
    "mpnet": ("mpnet", {"pad_token_id": 1}),
    "distilbert": (
        "distilbert",
        {"dim": 64, "n_layers": 4, "n_heads": 4, "hidden_dim": 96, "pad_token_id": 0},
    ),
    "modernbert": ("modernbert", {**_MODERN, "num_hidden_layers": 5}),
    "modernbert-biased": (
        "modernbert",
        {**_MODERN, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_pooling": "cls"},
    ),
    "nomic_bert": ("nomic_bert", {"pad_token_id": 0, "num_hidden_layers": 2}),
    "gte": ("gte", {"pad_token_id": 0}),
    "gte-untyped": ("gte", {"pad_token_id": 0, "type_vocab_size": 0, "num_hidden_layers": 2}),
    "electra": ("electra", {"embedding_size": 32, "pad_token_id": 0}),
    "electra-plain": ("electra", {"embedding_size": 64, "pad_token_id": 0}),
    "albert": ("albert", {"embedding_size": 32, "num_hidden_groups": 2, "pad_token_id": 0, "num_hidden_layers": 5}),
    "albert-one-group": ("albert", {"embedding_size": 64, "pad_token_id": 0}),
    "ernie": ("ernie", {"pad_token_id": 0}),
    "ernie-tasks": ("ernie", {"pad_token_id": 0, "use_task_id": True}),
    "data2vec-text": ("data2vec-text", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta-xl": ("xlm-roberta-xl", {"pad_token_id": 1, "type_vocab_size": 1}),
    "eurobert": ("eurobert", {"pad_token_id": 0, "num_key_value_heads": 2}),
    "eurobert-biased": ("eurobert", {"pad_token_id": 0, "attention_bias": True, "mlp_bias": True}),
    "jina-v3": ("jina_embeddings_v3", {"pad_token_id": 1, "type_vocab_size": 1, "num_hidden_layers": 2}),
    "deberta-v3": ("deberta-v2", _DEBERTA),
    "deberta-v2": (
        "deberta-v2",
        {
            **_DEBERTA,
            "share_att_key": False,
            "position_biased_input": True,
            "type_vocab_size": 2,
            "norm_rel_ebd": "none",
        },
    ),
    "deberta-clipped": ("deberta-v2", {**_DEBERTA, "position_buckets": -1, "max_relative_positions": 40}),
    "deberta-c2p": ("deberta-v2", {**_DEBERTA, "pos_att_type": ["c2p"], "share_att_key": False}),
    "deberta-p2c": ("deberta-v2", {**_DEBERTA, "pos_att_type": "p2c"}),
    "deberta-content": ("deberta-v2", {**_DEBERTA, "pos_att_type": []}),
    "deberta-projected": ("deberta-v2", {**_DEBERTA, "embedding_size": 32, "max_relative_positions": 100}),
}


def make_encoder(case: str, auto: Any = AutoModel, *, seed: int = 0, **changes: Any) -> Any:
    """Build a transformers model of a case, or of a model type, in float32; `auto`: the class that makes it."""
    model_type, overrides = ENCODERS.get(case, (case, {}))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**BASE, **overrides, **changes})
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    draw_weights(model, model_type)
    return model


def random_text(seed: int, length: int) -> list[int]:
    """Random token ids without special ones, which would have other positions."""
    return [int(token) for token in np.random.default_rng(seed).integers(5, 256, length)]


def output(model: Any, prompt: Sequence[int], second_text_start: int | None = None) -> Any:
    """What transformers computes for one prompt."""
    fields = {}
    if second_text_start is not None:
        fields["token_type_ids"] = torch.tensor([[int(i >= second_text_start) for i in range(len(prompt))]])
    with torch.inference_mode():
        return model(torch.tensor([prompt]), **fields)


def hidden_states(engine: Engine, prompts: Sequence[Sequence[int]], **fields: Any) -> list[Array]:
    """The hidden states of prompts that run together."""
    return pool(engine, prompts, PoolingParams(task="token_embed", use_activation=False), **fields)


def pool(engine: Engine, prompts: Sequence[Sequence[int]], params: PoolingParams, **fields: Any) -> list[Array]:
    """The arrays of prompts that run together."""
    first = len(engine.results)
    names = [f"prompt-{first + i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add(name, prompt, params, **fields)
    engine.run()
    arrays = []
    for name in names:
        result = engine.results[name]
        assert result.error is None
        assert result.pooled is not None
        arrays.append(result.pooled.data)
    return arrays


def assert_close(got: Array, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Equal shapes, and values that differ by so much of the largest."""
    array = expected.float().numpy()
    assert got.dtype == np.float32
    assert got.shape == array.shape
    assert np.abs(got - array).max() <= tolerance * np.abs(array).max()


def engine_of(encoder: Any, folder: Path, **options: Any) -> Engine:
    """Save a model, and load it."""
    encoder.save_pretrained(folder)
    return Engine(folder, **options)
