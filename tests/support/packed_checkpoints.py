"""Checkpoints with packed weights: experts in MXFP4, linear layers in FP8."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.engine.models.checkpoint.formats.fp8 import Fp8Weight
from tests.support.models import make_model, save_model


class Scaled(NamedTuple):
    """How a checkpoint scales its FP8 weights, and the names of the scales."""

    suffix: str
    shape: Callable[[torch.Tensor], tuple[int, ...]]
    section: dict[str, Any]


def _blocks(height: int, width: int) -> Callable[[torch.Tensor], tuple[int, ...]]:
    return lambda weight: (-(-len(weight) // height), -(-weight.shape[1] // width))


SCALINGS = {
    "blocks of 128": Scaled("weight_scale_inv", _blocks(128, 128), {}),
    "blocks of 48 x 32": Scaled("weight_scale_inv", _blocks(48, 32), {"weight_block_size": [48, 32]}),
    "one scale": Scaled("weight_scale_inv", lambda _: (), {"weight_block_size": None, "activation_scheme": "static"}),
    "one scale of another name": Scaled("weight_scale", lambda _: (1,), {"activation_scheme": "static"}),
    "a scale for each row": Scaled("weight_scale", lambda weight: (len(weight), 1), {}),
}


def pack_fp8(folder: Path, scaled: Scaled) -> dict[str, torch.Tensor]:
    """Pack some weights of a folder, which then differ from the original ones; returns the same weights, unpacked."""
    weights, plain = load_file(folder / "model.safetensors"), {}
    for name in [name for name in weights if name.endswith("down_proj.weight")]:
        module, weight = name.removesuffix(".weight"), weights[name].to(torch.float8_e4m3fn)
        scales = torch.rand(scaled.shape(weight)) + 0.5
        weights |= {
            name: weight,
            f"{module}.{scaled.suffix}": scales,
            f"{module}.activation_scale": torch.tensor(7.0),
        }
        block = scaled.section.get("weight_block_size", (128, 128))
        plain[name] = Fp8Weight(weight, scales, block).dequantize(torch.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    section = {"quant_method": "fp8", **scaled.section}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return {name: tensor for name, tensor in weights.items() if "scale" not in name} | plain


def save_gpt_oss(tmp_path: Path, size: int = 64) -> tuple[Path, Path]:
    """Folders with the same experts of width `size`, unpacked and in MXFP4, which represents them exactly."""
    model = make_model("gpt_oss", hidden_size=64, intermediate_size=size)
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
    return plain, folder
