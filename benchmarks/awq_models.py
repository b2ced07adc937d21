"""AWQ checkpoints in the shapes of released models, with random weights.

    python -m benchmarks.awq_models qwen3-0.6b TOKENIZER.json --out FOLDER

Linear layers are as AutoAWQ's kernel "gemm" reads them: words of eight codes along outputs, and for each 128 inputs
float16 scales and a zero. Codes are random, and zeros in their middle, so that activations keep their usual size. The
embeddings, which are the head as well, and norms are in float16.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gguf_models import CHAT, SHAPES, WEIGHT_SIZE, Shape, token_ids

_GROUP = 128  # inputs
_CODE_DEVIATION = 4.61  # of codes from 0 to 15
_ZEROS = -0x77777778  # eight codes of 8: 0x88888888 in an int32


def config(shape: Shape, end: int) -> dict[str, object]:
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
        "quantization_config": {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": _GROUP,
            "zero_point": True,
            "modules_to_not_convert": None,
        },
    }


def linear(name: str, outputs: int, inputs: int, random: torch.Generator) -> dict[str, Tensor]:
    """Return the tensors of a linear layer."""
    groups, words = inputs // _GROUP, outputs // 8
    codes = torch.randint(-(1 << 31), 1 << 31, (inputs, words), generator=random, dtype=torch.int64)
    spread = 0.5 + torch.rand(groups, outputs, generator=random)  # scales of groups differ by a factor of up to 3
    return {
        f"{name}.qweight": codes.to(torch.int32),
        f"{name}.qzeros": torch.full((groups, words), _ZEROS, dtype=torch.int32),
        f"{name}.scales": (spread * WEIGHT_SIZE / _CODE_DEVIATION).half(),
    }


def weights(shape: Shape) -> dict[str, Tensor]:
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
            tensors |= linear(f"{prefix}.{name}", outputs, inputs, random)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(shape.hidden).half()
        for norm in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{norm}.weight"] = torch.ones(shape.head_dim).half()
    return tensors


def write_model(shape: Shape, tokenizer: Path, folder: Path) -> None:
    """Write the checkpoint."""
    end = token_ids(tokenizer, shape.vocabulary)["<|im_end|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(shape, end), indent=1), encoding="utf-8")
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    about_tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about_tokens, indent=1), encoding="utf-8")
    save_file(weights(shape), folder / "model.safetensors", {"format": "pt"})


def main() -> None:
    """Write a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("tokenizer", type=Path, help="a tokenizer.json of Qwen3, or one of its size")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    write_model(SHAPES[options.shape], options.tokenizer, options.out)


if __name__ == "__main__":
    main()
