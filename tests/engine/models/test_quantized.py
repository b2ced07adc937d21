"""Packed checkpoints: unpacked values equal transformers', and tokens equal those of the unpacked checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.engine.models.quantized import unpack_fp8, unpack_mxfp4
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model


def test_mxfp4_equals_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(118, 132, (3, 10, 4), generator=generator).to(torch.uint8)
    expected = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
    assert torch.equal(unpack_mxfp4(blocks, scales, torch.float32), expected)


def test_fp8_weights_are_scaled_per_block() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 300, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator) + 0.5
    out = unpack_fp8(weight, scales, torch.float32)
    for row, column in ((0, 0), (127, 127), (128, 128), (199, 299), (5, 256)):
        assert out[row, column] == weight[row, column].float() * scales[row // 128, column // 128]


def test_gpt_oss_with_mxfp4_experts(tmp_path: Path) -> None:
    """Weights that FP4 represents exactly give the same tokens packed and unpacked."""
    model = make_model("gpt_oss", hidden_size=64, intermediate_size=64)
    generator = torch.Generator().manual_seed(1)
    packed: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(layer.mlp.experts, name)
            experts, size_in, size_out = parameter.shape
            blocks = torch.randint(0, 256, (experts, size_out, size_in // 32, 16), generator=generator).to(torch.uint8)
            scales = torch.randint(123, 126, (experts, size_out, size_in // 32), generator=generator).to(torch.uint8)
            parameter.data.copy_(convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32))
            packed[f"model.layers.{index}.mlp.experts.{name}_blocks"] = blocks
            packed[f"model.layers.{index}.mlp.experts.{name}_scales"] = scales
    plain, folder = save_model(model, tmp_path / "plain"), save_model(model, tmp_path / "packed")
    weights = {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }
    save_file({**weights, **packed}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    prompt = random_prompt(1, 12)
    assert Engine(folder).generate(prompt, greedy(24)).tokens == Engine(plain).generate(prompt, greedy(24)).tokens


def test_deepseek_with_fp8_weights(tmp_path: Path) -> None:
    model = make_model("deepseek_v3")
    folder = save_model(model, tmp_path / "packed")
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("down_proj.weight")]:
        packed = weights[name].to(torch.float8_e4m3fn)
        weights[name] = packed
        weights[f"{name}_scale_inv"] = torch.full((1, 1), 0.5)
    plain = {name: tensor for name, tensor in weights.items() if not name.endswith("_scale_inv")}
    plain = {
        name: tensor.float() * 0.5 if tensor.dtype == torch.float8_e4m3fn else tensor for name, tensor in plain.items()
    }
    reference = save_model(model, tmp_path / "plain")
    save_file(plain, reference / "model.safetensors", metadata={"format": "pt"})
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    prompt = random_prompt(1, 12)
    assert Engine(folder).generate(prompt, greedy(24)).tokens == Engine(reference).generate(prompt, greedy(24)).tokens
