"""Writes checkpoints with random weights and states of a fixed size, in real shapes, in the files of Hugging Face.

    python -m benchmarks.hybrid_models FOLDER --tokenizer SMOLLM2 --shapes qwen3.5-0.8b
    python -m benchmarks.hybrid_models FOLDER --configs

`qwen3.5-0.8b` has the shape of Qwen3.5-0.8B's language model (the gated delta rule), `lfm2-350m` that of LFM2-350M
(short convolutions) and `granite-4-h-350m` that of Granite 4.0 H 350M (Mamba-2). `qwen3.5-moe-0.9b` and `gemma4-0.8b`
are no published sizes: a mixture of experts with the gated delta rule, and inputs of layers. With --configs the folders
have a config alone, for `benchmarks.cpu.steps --load-format dummy`. SMOLLM2 is a folder with SmolLM2's
tokenizer.json. Greedy decoding never chooses a special token, so that answers are as long as asked for.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gguf_models import CHAT
from benchmarks.hybrid_shapes import SHAPES
from benchmarks.picture_models import END, write_chat_tokenizer, write_json


def make_config(name: str, folder: Path) -> None:
    """Write the config of a shape alone, whose tokens end no answer."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {key: value for key, value in SHAPES[name].items() if key != "model_type"}
    config = AutoConfig.for_model(SHAPES[name]["model_type"], tie_word_embeddings=True, dtype=torch.bfloat16, **fields)
    config.update({"eos_token_id": None, "bos_token_id": None, "pad_token_id": None})
    config.save_pretrained(folder)


def make_model(name: str, folder: Path, tokenizer: Path) -> None:
    """Write a checkpoint."""
    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    ids = write_chat_tokenizer(tokenizer, folder, shape["vocab_size"], CHAT)
    end = {"eos_token_id": ids[END], "pad_token_id": ids["<|endoftext|>"], "bos_token_id": None}
    torch.manual_seed(0)
    fields = {key: value for key, value in shape.items() if key != "model_type"}
    config = AutoConfig.for_model(shape["model_type"], tie_word_embeddings=True, **fields, **end)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_output_embeddings().weight[list(ids.values())] = 0
    model.generation_config.update(do_sample=False, **end)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "layer_types" in shape:  # the names of published files, which llama.cpp's converter reads
        write_json(folder / "config.json", written | {"layer_types": shape["layer_types"]})
    print(f"{folder}: {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f} million parameters")


def main() -> None:
    """Write the checkpoints that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--tokenizer", type=Path, help="folder with SmolLM2's tokenizer.json")
    kind.add_argument("--configs", action="store_true", help="write configs alone")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    for name in options.shapes:
        if options.configs:
            make_config(name, options.folder / name)
        else:
            make_model(name, options.folder / name, options.tokenizer)


if __name__ == "__main__":
    main()
