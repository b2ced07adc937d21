"""Checkpoints of 4-bit integers in groups, in the shapes of released models, with random weights.

    python -m benchmarks.integer_models qwen3-0.6b TOKENIZER --format awq --out FOLDER

Linear layers have float16 scales for each 128 inputs. `awq` is as AutoAWQ's kernel "gemm" reads it, with zeros; `gptq`
as GPTQModel writes it, symmetric and without an order of activations; `compressed-tensors` as its "pack-quantized",
symmetric. Codes are random, and zeros in their middle, so that activations keep their usual size. The embeddings, which
are the head as well, and norms are in float16. TOKENIZER is a folder with SmolLM2's tokenizer.json: tokens that it
lacks have texts as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gguf_models import CHAT, SHAPES, WEIGHT_SIZE, Shape
from benchmarks.picture_models import END, write_chat_tokenizer, write_json

_GROUP = 128  # inputs
_CODE_DEVIATION = 4.61  # of codes from 0 to 15
_EIGHTS = -0x77777778  # eight codes of 8: 0x88888888 in an int32
_SEVENS = 0x77777777  # GPTQ's first format stores zeros less one

Linear = Callable[[int, int, torch.Generator], dict[str, Tensor]]


def _codes(rows: int, columns: int, random: torch.Generator) -> Tensor:
    """Return words of random codes."""
    return torch.randint(-(1 << 31), 1 << 31, (rows, columns), generator=random, dtype=torch.int64).to(torch.int32)


def _scales(groups: int, outputs: int, random: torch.Generator) -> Tensor:
    """Return scales, which differ by a factor of up to 3."""
    return ((0.5 + torch.rand(groups, outputs, generator=random)) * WEIGHT_SIZE / _CODE_DEVIATION).half()


def awq(outputs: int, inputs: int, random: torch.Generator) -> dict[str, Tensor]:
    """Return the tensors of a linear layer: words of eight codes along outputs."""
    groups, words = inputs // _GROUP, outputs // 8
    return {
        "qweight": _codes(inputs, words, random),
        "qzeros": torch.full((groups, words), _EIGHTS, dtype=torch.int32),
        "scales": _scales(groups, outputs, random),
    }


def gptq(outputs: int, inputs: int, random: torch.Generator) -> dict[str, Tensor]:
    """Return the tensors of a linear layer: words of eight codes along inputs."""
    groups = inputs // _GROUP
    return {
        "qweight": _codes(inputs // 8, outputs, random),
        "qzeros": torch.full((groups, outputs // 8), _SEVENS, dtype=torch.int32),
        "scales": _scales(groups, outputs, random),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // _GROUP,
    }


def compressed(outputs: int, inputs: int, random: torch.Generator) -> dict[str, Tensor]:
    """Return the tensors of a linear layer: words of eight codes along inputs, outputs first."""
    return {
        "weight_packed": _codes(outputs, inputs // 8, random),
        "weight_scale": _scales(inputs // _GROUP, outputs, random).T.contiguous(),
        "weight_shape": torch.tensor([outputs, inputs]),
    }


_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP}
# By name: the tensors of a linear layer, and the config's `quantization_config`.
FORMATS: dict[str, tuple[Linear, dict[str, Any]]] = {
    "awq": (
        awq,
        {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": _GROUP,
            "zero_point": True,
            "modules_to_not_convert": None,
        },
    ),
    "gptq": (
        gptq,
        {
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "bits": 4,
            "group_size": _GROUP,
            "desc_act": False,
            "sym": True,
            "lm_head": False,
        },
    ),
    "compressed-tensors": (
        compressed,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
        },
    ),
}


def config(shape: Shape, end: int, quantization: dict[str, Any]) -> dict[str, object]:
    """Return a model's config.json. `end`: id of the token that ends answers."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "eos_token_id": end,
        "torch_dtype": "float16",
        "quantization_config": quantization,
    }


def weights(shape: Shape, linear: Linear) -> dict[str, Tensor]:
    """Return all tensors."""
    random = torch.Generator().manual_seed(0)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    table = torch.randn(shape.vocabulary, shape.hidden, generator=random) * WEIGHT_SIZE
    tensors = {"model.embed_tokens.weight": table.half(), "model.norm.weight": torch.ones(shape.hidden).half()}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for name, outputs, inputs in (
            ("self_attn.q_proj", queries, shape.hidden),
            ("self_attn.k_proj", keys, shape.hidden),
            ("self_attn.v_proj", keys, shape.hidden),
            ("self_attn.o_proj", shape.hidden, queries),
            ("mlp.gate_proj", shape.intermediate, shape.hidden),
            ("mlp.up_proj", shape.intermediate, shape.hidden),
            ("mlp.down_proj", shape.hidden, shape.intermediate),
        ):
            parts = linear(outputs, inputs, random)
            tensors |= {f"{prefix}.{name}.{part}": tensor for part, tensor in parts.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(shape.hidden).half()
        for norm in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{norm}.weight"] = torch.ones(shape.head_dim).half()
    return tensors


def write_model(shape: Shape, tokenizer: Path, stored_as: str, folder: Path) -> None:
    """Write the checkpoint."""
    linear, quantization = FORMATS[stored_as]
    folder.mkdir(parents=True, exist_ok=True)
    ids = write_chat_tokenizer(tokenizer, folder, shape.vocabulary, CHAT)
    write_json(folder / "config.json", config(shape, ids[END], quantization))
    save_file(weights(shape, linear), folder / "model.safetensors", {"format": "pt"})


def main() -> None:
    """Write a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("tokenizer", type=Path, help="a folder with SmolLM2's tokenizer.json")
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    write_model(SHAPES[options.shape], options.tokenizer, options.format, options.out)


if __name__ == "__main__":
    main()
