"""Scales of float8 KV caches in checkpoints; the tests of devices show what they change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.models.cache_scales import CacheScales
from quire.engine.models.errors import BrokenFolder, WeightMismatch
from quire.engine.models.model_config import read_model_config
from quire.engine.models.parallel.group import RankGroups
from quire.engine.models.parallel.placement import Placement
from quire.engine.models.sharded_decoder import ShardedDecoder
from quire.engine.models.spec import DecoderSpec
from tests.support.engine import load
from tests.support.models import make_model, save_model
from tests.support.oracle import change_weights


def scales_of(folder: Path) -> list[tuple[float, float]]:
    return [(layer.attn.key_scale, layer.attn.value_scale) for layer in load(folder).model.layers]


def test_each_layer_has_its_scales(tmp_path: Path) -> None:
    folder = save_model(make_model("llama", num_hidden_layers=4), tmp_path / "model")
    assert scales_of(folder) == [(1.0, 1.0)] * 4
    prefix = "model.layers"
    change_weights(
        folder,
        {
            f"{prefix}.0.self_attn.k_scale": torch.tensor(0.5),
            f"{prefix}.0.self_attn.v_scale": torch.tensor([0.25]),
            f"{prefix}.1.self_attn.kv_scale": torch.tensor(2.0),
            f"{prefix}.3.self_attn.k_proj.k_scale": torch.tensor(4.0, dtype=torch.bfloat16),
            f"{prefix}.3.self_attn.v_proj.v_scale": torch.tensor(8.0),
        },
    )
    assert scales_of(folder) == [(0.5, 0.25), (2.0, 2.0), (1.0, 1.0), (4.0, 8.0)]


def test_a_pipeline_stage_has_the_scales_of_its_layers(tmp_path: Path) -> None:
    folder = save_model(make_model("llama", num_hidden_layers=4), tmp_path / "model")
    spec = read_model_config(folder).spec
    assert isinstance(spec, DecoderSpec)
    scales = CacheScales(spec)
    tensors = [(f"model.layers.{layer}.self_attn.kv_scale", torch.tensor(layer + 1.0)) for layer in range(4)]
    assert list(scales.without_scales(tensors)) == []
    for stage, expected in ((0, [1.0, 2.0]), (1, [3.0, 4.0])):
        with torch.device("meta"):
            part = ShardedDecoder(spec, RankGroups.of(Placement(stage, 1, 2)), torch.float32)
        scales.apply(part)
        layers: list[Any] = list(part.layers)
        assert [layer.attn.key_scale for layer in layers] == expected


@pytest.mark.parametrize(
    ("scale", "complaint"),
    [
        ([1.0, 2.0], r"layers.0.self_attn.k_scale must be one number, but has shape \(2,\)"),
        (0.0, "k_scale must be a positive number, not 0.0"),
        (float("nan"), "k_scale must be a positive number, not nan"),
    ],
)
def test_scales_that_cannot_be_used_are_refused(scale: float | list[float], complaint: str, tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path / "model")
    change_weights(folder, {"model.layers.0.self_attn.k_scale": torch.tensor(scale)})
    with pytest.raises(BrokenFolder, match=complaint):
        load(folder)


@pytest.mark.parametrize(("case", "layer"), [("deepseek_v3", 0), ("llama", 99)])
def test_scales_of_other_layers_are_unexpected(case: str, layer: int, tmp_path: Path) -> None:
    folder = save_model(make_model(case), tmp_path / "model")
    change_weights(folder, {f"model.layers.{layer}.self_attn.k_scale": torch.tensor(1.0)})
    with pytest.raises(WeightMismatch, match="unexpected weights"):
        load(folder)
