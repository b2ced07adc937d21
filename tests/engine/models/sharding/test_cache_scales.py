"""Scales of float8 KV caches in checkpoints; the tests of devices show what they change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.options import ModelOptions
from quire.engine.models.distributed.group import RankGroups
from quire.engine.models.distributed.placement import Placement
from quire.engine.models.errors import BrokenFolder, UnsupportedModel, WeightMismatch
from quire.engine.models.model_config import read_model_config
from quire.engine.models.sharding.cache_scales import CacheScales
from quire.engine.models.sharding.decoder import ShardedDecoder
from quire.engine.models.specs.decoder import DecoderSpec
from quire.kernels import gpu
from tests.support.engine import Engine, greedy, load, random_prompt
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


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ({"k_scale": 0.5}, (0.5, 0.5)),
        ({"kv_scale": 0.5}, (0.5, 0.5)),
        ({"mla_attn.mla_attn.k_scale": 0.5, "mla_attn.mla_attn.v_scale": 0.5}, (0.5, 0.5)),
        ({"k_proj.k_scale": 0.5, "v_proj.v_scale": 0.5}, (0.5, 0.5)),
        ({"kv_b_proj.k_scale": 0.5, "kv_b_proj.v_scale": 0.5}, (0.5, 0.5)),
        ({"attn_mqa.k_scale": 0.5, "attn_mqa.v_scale": 0.25}, (0.5, 0.25)),
        ({"mla_attn.mla_attn.q_scale": 2.0, "mla_attn.mla_attn.k_scale": 0.5}, (0.5, 0.5)),
        ({"attn.v_scale": 0.25}, (1.0, 0.25)),
    ],
)
def test_latent_attention_has_its_scales(
    scales: dict[str, float], expected: tuple[float, float], tmp_path: Path
) -> None:
    """Values are a part of keys: without a scale of their own they have that of keys."""
    folder = save_model(make_model("deepseek_v3", num_hidden_layers=2), tmp_path / "model")
    named = {f"model.layers.1.self_attn.{name}": torch.tensor(scale) for name, scale in scales.items()}
    change_weights(folder, named)
    assert scales_of(folder) == [(1.0, 1.0), expected]


def test_latent_pages_of_float8_have_one_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(make_model("deepseek_v3", num_hidden_layers=2), tmp_path / "model")
    prefix = "model.layers.1.self_attn.mla_attn.mla_attn"
    change_weights(folder, {f"{prefix}.k_scale": torch.tensor(0.5), f"{prefix}.v_scale": torch.tensor(0.25)})
    monkeypatch.setattr(gpu, "computes_float8", lambda _: True)
    model = ModelOptions(device="reference")
    message = "--kv-cache-dtype fp8: layer 1 has k_scale 0.5 and v_scale 0.25, but .* accepted here are int8, and"
    with pytest.raises(UnsupportedModel, match=message):
        Engine(folder, model=model, kv_cache_dtype="fp8")
    assert len(Engine(folder, model=model).generate(random_prompt(1, 5), greedy(2)).tokens) == 2
    change_weights(folder, {f"{prefix}.v_scale": torch.tensor(0.5)})
    assert len(Engine(folder, model=model, kv_cache_dtype="fp8").generate(random_prompt(1, 5), greedy(2)).tokens) == 2


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
        ([1.0, 2.0, 3.0], r"layers.0.self_attn.k_scale must be one number, or .* each of 2 KV heads, but .* \(3,\)"),
        ([1.0, -2.0], "k_scale must be a positive number, not -2.0"),
        (0.0, "k_scale must be a positive number, not 0.0"),
        (float("nan"), "k_scale must be a positive number, not nan"),
    ],
)
def test_scales_that_cannot_be_used_are_refused(scale: float | list[float], complaint: str, tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path / "model")
    change_weights(folder, {"model.layers.0.self_attn.k_scale": torch.tensor(scale)})
    with pytest.raises(BrokenFolder, match=complaint):
        load(folder)


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1), (1, 2, 1)])
def test_each_head_has_its_scales(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Where only keys or values have such, the others have one for all heads."""
    folder = save_model(make_model("llama", num_hidden_layers=2), tmp_path / "model")
    of_heads = torch.tensor([0.5, 2.0]).reshape(shape)
    prefix = "model.layers"
    change_weights(
        folder,
        {
            f"{prefix}.0.self_attn.k_scale": of_heads,
            f"{prefix}.0.self_attn.v_scale": torch.tensor(4.0),
            f"{prefix}.1.self_attn.v_scale": of_heads.bfloat16(),
        },
    )
    layers = [layer.attn for layer in load(folder).model.layers]
    assert [layer.head_scales.tolist() for layer in layers] == [[[0.5, 2.0], [4.0, 4.0]], [[1.0, 1.0], [0.5, 2.0]]]
    assert scales_of(folder) == [(1.0, 1.0)] * 2


@pytest.mark.parametrize(("ranks", "expected"), [(2, [[1.0], [2.0]]), (4, [[1.0], [1.0], [2.0], [2.0]])])
def test_ranks_have_the_scales_of_their_heads(ranks: int, expected: list[list[float]], tmp_path: Path) -> None:
    spec = read_model_config(save_model(make_model("llama", num_hidden_layers=1), tmp_path / "model")).spec
    assert isinstance(spec, DecoderSpec)
    scales = CacheScales(spec)
    assert list(scales.without_scales([("model.layers.0.self_attn.kv_scale", torch.tensor([1.0, 2.0]))])) == []
    for rank in range(ranks):
        with torch.device("meta"):
            part = ShardedDecoder(spec, RankGroups.of(Placement(rank, ranks)), torch.float32)
        scales.apply(part)
        layers: list[Any] = list(part.layers)
        assert layers[0].attn.head_scales.tolist() == [expected[rank]] * 2


@pytest.mark.parametrize(
    "name",
    [
        *("self_attn.k_scale", "self_attn.attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.qkv_proj.k_scale"),
        *("self_attn.k_proj.output_scale", "attn.k_scale", "attention.k_scale", "mixer.k_proj.k_scale"),
    ],
)
def test_names_of_scales(name: str, tmp_path: Path) -> None:
    """Those of queries and of probabilities are not needed, and zero points are 0."""
    folder = save_model(make_model("llama", num_hidden_layers=1), tmp_path / "model")
    others = ("q_scale", "prob_scale", "k_zero_point", "v_zero_point")
    change_weights(
        folder,
        {
            f"model.layers.0.{name}": torch.tensor(0.5),
            **{f"model.layers.0.self_attn.{other}": torch.zeros(1) for other in others},
        },
    )
    assert scales_of(folder) == [(0.5, 1.0)]


def test_zero_points_are_refused(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path / "model")
    change_weights(folder, {"model.layers.0.self_attn.v_zero_point": torch.tensor([0, 3], dtype=torch.int8)})
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.self_attn\.v_zero_point is not 0: .* only with scales"):
        load(folder)


def test_scales_of_other_layers_are_unexpected(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path / "model")
    change_weights(folder, {"model.layers.99.self_attn.k_scale": torch.tensor(1.0)})
    with pytest.raises(WeightMismatch, match="unexpected weights"):
        load(folder)
