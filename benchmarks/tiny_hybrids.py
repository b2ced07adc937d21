"""Small hybrids of attention and layers with states, with random weights, for benchmarks of what servers compute again.

    python -m benchmarks.tiny_hybrids lfm2 FOLDER_WITH_TOKENIZER --out DIR

The folder's tokenizer has to have `<|im_start|>` and `<|im_end|>`. The chat template drops the reasoning of earlier
answers. Weights are float32, so that llama.cpp's convert_hf_to_gguf.py makes the same model of the folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- if tools and loop.first %}{{- '\\n\\n# Tools\\n' }}"
    "{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_LAYERS = ("conv", "conv", "full_attention", "conv", "conv", "full_attention", "conv", "full_attention")
_COMMON = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": len(_LAYERS),
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "Lfm2",
        {**_COMMON, "layer_types": list(_LAYERS), "block_auto_adjust_ff_dim": False, "block_dim": 256, "conv_dim": 256},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **_COMMON,
            "shared_intermediate_size": 512,
            "layer_types": ["attention" if kind == "full_attention" else "mamba" for kind in _LAYERS],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 16,
            "mamba_d_head": 32,
            "mamba_d_state": 64,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "position_embedding_type": "rope",
        },
    ),
}


def write_model(kind: str, tokenizer: Path, folder: Path) -> None:
    """Write a checkpoint with the tokenizer of another."""
    folder.mkdir(parents=True, exist_ok=True)
    names = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {token["content"]: token["id"] for token in names["added_tokens"]}
    class_name, settings = CONFIGS[kind]
    config = getattr(transformers, f"{class_name}Config")(
        **settings,
        vocab_size=len(names["model"]["vocab"]),
        bos_token_id=ids["<|im_start|>"],
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|im_end|>"],
        dtype="float32",
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{class_name}ForCausalLM")(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() > 1 and "embed" not in name:
                tensor.normal_(std=tensor[0].numel() ** -0.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def main() -> None:
    """Write a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=CONFIGS)
    parser.add_argument("tokenizer", type=Path, help="a folder with tokenizer.json and tokenizer_config.json")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    write_model(options.kind, options.tokenizer, options.out)


if __name__ == "__main__":
    main()
