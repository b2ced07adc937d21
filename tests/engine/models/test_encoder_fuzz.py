"""Random configs of every family of encoders: what each head computes is what transformers computes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from quire.engine.client.pooling_params import PoolingParams
from tests.support.engine import Engine
from tests.support.hf_encoders import assert_close, output, pool, random_text
from tests.support.models import draw_weights
from tests.support.odd_encoders import ENCODER_FAMILIES, odd_encoders

PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
TEXTS = [random_text(1, 40), random_text(2, 5), random_text(3, 1)]
# Head -> the class of transformers, the pooling task, and what is expected of the class's output.
HEADS: dict[str, tuple[Any, PoolingParams, Any]] = {
    "hidden states": (AutoModel, PoolingParams(task="token_embed", use_activation=False), lambda out: out[0][0]),
    "sparse": (
        AutoModelForMaskedLM,
        PoolingParams(task="embed"),
        lambda out: out.logits[0].relu().amax(0).log1p(),
    ),
    "labels": (
        AutoModelForSequenceClassification,
        PoolingParams(task="classify", use_activation=False),
        lambda out: out.logits[0],
    ),
    "token labels": (
        AutoModelForTokenClassification,
        PoolingParams(task="token_classify", use_activation=False),
        lambda out: out.logits[0],
    ),
}


def compare(config: dict[str, Any], head: str) -> None:
    auto, params, expected = HEADS[head]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        torch.manual_seed(0)
        model = auto.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager", dtype=torch.float32)
        draw_weights(model.eval(), config["model_type"])
        model.save_pretrained(folder)
        architectures = json.loads((folder / "config.json").read_text())["architectures"]
        (folder / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
        if head == "sparse":
            modules = [{"path": "", "type": "MLMTransformer"}, {"path": "1_SpladePooling", "type": "SpladePooling"}]
            (folder / "modules.json").write_text(json.dumps(modules))
        for got, text in zip(pool(Engine(folder), TEXTS, params), TEXTS, strict=True):
            assert_close(got, expected(output(model, text)), 5e-4)


@pytest.mark.parametrize("family", ENCODER_FAMILIES)
@given(st.data(), st.sampled_from(sorted(HEADS)))
@settings(max_examples=3, deadline=None, derandomize=True, phases=PHASES, suppress_health_check=list(HealthCheck))
def test_random_encoders(family: str, data: st.DataObject, head: str) -> None:
    compare(data.draw(odd_encoders(family)), head)


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", ENCODER_FAMILIES)
@given(st.data())
@settings(max_examples=15, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
def test_many_random_encoders(family: str, head: str, data: st.DataObject) -> None:
    compare(data.draw(odd_encoders(family)), head)
