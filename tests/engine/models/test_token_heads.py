"""Models with a head on every token: late interaction, reward models, decoders that classify tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForTokenClassification

from quire.engine.client.pooling_params import PoolingParams
from tests.support.engine import Engine
from tests.support.hf_encoders import assert_close, make_encoder, output, pool, random_text
from tests.support.models import BASE, draw_weights

TEXTS = [random_text(i, length) for i, length in enumerate((1, 12, 60))]
SIZE = 24


def decoder(auto: Any = AutoModel, **changes: Any) -> Any:
    """A small Qwen2."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **{**BASE, **changes})
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    draw_weights(model, "qwen2")
    return model


def rewrite(folder: Path, prefix: str, added: dict[str, Tensor], **changes: Any) -> None:
    """Put a prefix before the names of a checkpoint's weights, add some, and change its config."""
    weights = {f"{prefix}{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({**weights, **added}, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("case", "prefix", "architecture"),
    [("bert", "bert.", "HF_ColBERT"), ("modernbert", "model.", "ColModernBertModel"), ("gte", "new.", "ColBERT")],
)
def test_late_interaction_without_modules(case: str, prefix: str, architecture: str, tmp_path: Path) -> None:
    """ColBERT's own checkpoints: a linear layer beside the encoder, whose size the file of the training names."""
    model = make_encoder(case)
    model.save_pretrained(tmp_path)
    weight = torch.randn(SIZE, 64)
    rewrite(tmp_path, prefix, {"linear.weight": weight}, architectures=[architecture])
    (tmp_path / "artifact.metadata").write_text(json.dumps({"dim": SIZE, "query_maxlen": 32}))
    engine = Engine(tmp_path)
    assert engine.pools.tasks == ("token_embed",)
    assert engine.pools.score_method == "max_sim"
    assert engine.pools.token_embedding_size == SIZE
    for got, text in zip(pool(engine, TEXTS, PoolingParams(task="token_embed")), TEXTS, strict=True):
        assert_close(got, F.normalize(F.linear(output(model, text).last_hidden_state[0], weight), dim=-1))


@pytest.mark.parametrize(("architecture", "labels"), [("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2)])
@pytest.mark.parametrize("budget", [512, 16])
def test_reward_models(architecture: str, labels: int, budget: int, tmp_path: Path) -> None:
    """Two linear layers with a relu between them, on every token, also of prompts in chunks."""
    model = decoder()
    model.save_pretrained(tmp_path)
    shapes = {
        "score.0.weight": (64, 64),
        "score.0.bias": (64,),
        "score.2.weight": (labels, 64),
        "score.2.bias": (labels,),
    }
    head = {name: torch.randn(*shape) for name, shape in shapes.items()}
    names = {index: f"LABEL_{index}" for index in range(labels)}
    rewrite(tmp_path, "model.", head, architectures=[architecture], id2label=names)
    engine = Engine(tmp_path, block_size=8, max_num_batched_tokens=budget)
    assert engine.pools.tasks == ("token_classify",)
    for got, text in zip(pool(engine, TEXTS, PoolingParams(task="token_classify")), TEXTS, strict=True):
        hidden = F.relu(
            F.linear(output(model, text).last_hidden_state[0], head["score.0.weight"], head["score.0.bias"])
        )
        assert_close(got, F.linear(hidden, head["score.2.weight"], head["score.2.bias"]))


def test_decoders_classify_tokens(tmp_path: Path) -> None:
    model = decoder(AutoModelForTokenClassification, num_labels=3)
    model.save_pretrained(tmp_path)
    engine = Engine(tmp_path)
    for got, text in zip(pool(engine, TEXTS, PoolingParams(task="token_classify")), TEXTS, strict=True):
        assert_close(got, output(model, text).logits[0].softmax(-1))
