"""Packed checkpoints: unpacked values equal transformers', and tokens equal those of the unpacked checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.engine.models.checkpoint.formats.fp8 import Fp8Weight
from quire.engine.models.checkpoint.formats.mxfp4 import Mxfp4Weight
from quire.engine.models.errors import BrokenFolder, ModelError
from tests.support.engine import Engine, greedy, load, random_prompt
from tests.support.models import make_model, save_model
from tests.support.packed_checkpoints import SCALINGS, Scaled, pack_fp8, save_gpt_oss


def test_mxfp4_equals_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(118, 132, (3, 10, 4), generator=generator).to(torch.uint8)
    expected = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
    assert torch.equal(Mxfp4Weight(blocks, scales).dequantize(torch.float32), expected)


@pytest.mark.parametrize("block", [(128, 128), (96, 64), (1, 300), (50, 7)])
def test_fp8_weights_are_scaled_per_block(block: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 300, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-200 // block[0]), -(-300 // block[1]), generator=generator) + 0.5
    out = Fp8Weight(weight, scales, block).dequantize(torch.float32)
    for row, column in ((0, 0), (127, 127), (128, 128), (199, 299), (5, 256), (95, 64), (96, 63)):
        assert out[row, column] == weight[row, column].float() * scales[row // block[0], column // block[1]]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (200,), (200, 1)])
@pytest.mark.parametrize("block", [(128, 128), None])
def test_fp8_weights_with_one_scale_or_one_for_each_row(shape: tuple[int, ...], block: tuple[int, int] | None) -> None:
    weight = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scales = torch.rand(shape) + 0.5
    expected = weight.float() * (scales.view(-1, 1) if scales.numel() > 1 else scales.item())
    assert torch.equal(Fp8Weight(weight, scales, block).dequantize(torch.float32), expected)


@pytest.mark.parametrize("shape", [(2, 2), (4, 3), (2, 3, 1), (3,), (0,)])
def test_fp8_scales_that_do_not_match_are_refused(shape: tuple[int, ...]) -> None:
    weight = torch.randn(200, 300).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="scales have shape"):
        Fp8Weight(weight, torch.ones(shape)).dequantize(torch.float32)


def test_gpt_oss_with_mxfp4_experts(tmp_path: Path) -> None:
    """The same tokens packed and unpacked."""
    plain, folder = save_gpt_oss(tmp_path)
    prompt = random_prompt(1, 12)
    assert Engine(folder).generate(prompt, greedy(24)).tokens == Engine(plain).generate(prompt, greedy(24)).tokens


@pytest.mark.parametrize("scaled", SCALINGS.values(), ids=SCALINGS)
def test_deepseek_with_fp8_weights(tmp_path: Path, scaled: Scaled) -> None:
    model = make_model("deepseek_v3")
    folder, reference = save_model(model, tmp_path / "packed"), save_model(model, tmp_path / "plain")
    save_file(pack_fp8(folder, scaled), reference / "model.safetensors", metadata={"format": "pt"})
    prompt = random_prompt(1, 12)
    assert Engine(folder).generate(prompt, greedy(24)).tokens == Engine(reference).generate(prompt, greedy(24)).tokens


def test_fp8_weights_without_scales_are_refused(tmp_path: Path) -> None:
    folder = save_model(make_model("deepseek_v3"), tmp_path)
    pack_fp8(folder, SCALINGS["one scale"])
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    save_file({k: v for k, v in weights.items() if k != f"{name}.weight_scale_inv"}, folder / "model.safetensors")
    with pytest.raises(BrokenFolder, match=f"{name}.weight is float8_e4m3fn, but {name}.weight_scale_inv is missing"):
        load(folder)


@pytest.mark.parametrize("block", [[128], [128, 0], "128", [1.5, 2], 128])
def test_a_block_size_that_is_none_is_refused(tmp_path: Path, block: Any) -> None:
    folder = save_model(make_model("deepseek_v3"), tmp_path)
    pack_fp8(folder, SCALINGS["one scale"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = block
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="weight_block_size"):
        load(folder)


def test_float8_needs_a_gpu(tmp_path: Path) -> None:
    folder = save_model(make_model("qwen3"), tmp_path)
    with pytest.raises(ModelError, match=r"--quantization fp8 needs a GPU .* none, int8 and int4 are accepted here"):
        load(folder, quantization="fp8")
