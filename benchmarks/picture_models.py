"""Writes checkpoints with random weights that read pictures, in real shapes, in the files of Hugging Face.

    python -m benchmarks.picture_models FOLDER --tokenizer SMOLLM2

`smolvlm-256m` has SmolVLM-256M's shape, `smolvlm-256m-5-tiles` the same and pictures of 1,024 pixels instead of 2,048,
which have 5 tiles instead of 17; `qwen2.5-vl-3b-6-layers` Qwen2.5-VL-3B's with 6 of its 36 layers and 8 of the
32 of its tower. SMOLLM2 is a folder with SmolLM2's tokenizer.json. All other tokens than special ones have a text, and
greedy decoding never chooses a special one, so that answers are as long as asked for and each token is a chunk.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

END = "<|im_end|>"
_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_QWEN_PICTURE = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
SHAPES: dict[str, dict[str, Any]] = {
    "smolvlm-256m": {
        "model_type": "idefics3",
        "added": ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *_TILES],
        "tokens": {"image_token_id": "<image>"},
        "picture": "<image>",
        "config": {
            "scale_factor": 4,
            "text_config": {
                "architectures": ["VLlama3ForCausalLM"],  # as SmolVLM has it; llama.cpp's converter reads it
                "model_type": "llama",
                "vocab_size": 49280,
                "hidden_size": 576,
                "intermediate_size": 1536,
                "num_hidden_layers": 30,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "max_position_embeddings": 8192,
                "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
            },
            "vision_config": {
                "model_type": "idefics3_vision",
                "hidden_size": 768,
                "intermediate_size": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "image_size": 512,
                "patch_size": 16,
            },
        },
        "processor": {
            "processor_class": "Idefics3Processor",
            "image_processor_type": "Idefics3ImageProcessor",
            "do_convert_rgb": True,
            "do_image_splitting": True,
            "do_pad": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "max_image_size": {"longest_edge": 512},
            "resample": 1,
            "size": {"longest_edge": 2048},
        },
        "sequence": {"processor_class": "Idefics3Processor", "image_seq_len": 64},
    },
    "qwen2.5-vl-3b-6-layers": {
        "model_type": "qwen2_5_vl",
        "added": _QWEN_PICTURE,
        "tokens": {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
        "picture": "<|vision_start|><|image_pad|><|vision_end|>",
        "config": {
            "text_config": {
                "model_type": "qwen2_5_vl_text",
                "vocab_size": 151_936,
                "hidden_size": 2048,
                "intermediate_size": 11_008,
                "num_hidden_layers": 6,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "max_position_embeddings": 32_768,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [16, 24, 24]},
            },
            "vision_config": {
                "depth": 8,
                "hidden_size": 1280,
                "out_hidden_size": 2048,
                "intermediate_size": 3420,
                "num_heads": 16,
                "patch_size": 14,
                "window_size": 112,
                "fullatt_block_indexes": [3, 7],
            },
        },
        "processor": {
            "processor_class": "Qwen2_5_VLProcessor",
            "image_processor_type": "Qwen2VLImageProcessor",
            "do_convert_rgb": True,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "max_pixels": 12_845_056,
            "merge_size": 2,
            "min_pixels": 3136,
            "patch_size": 14,
            "temporal_patch_size": 2,
        },
        "sequence": {"processor_class": "Qwen2_5_VLProcessor"},
    },
}

_SMOLVLM = SHAPES["smolvlm-256m"]
SHAPES["smolvlm-256m-5-tiles"] = {
    **_SMOLVLM,
    "processor": {**_SMOLVLM["processor"], "size": {"longest_edge": 1024}},
}


def chat_template(picture: str) -> str:
    """Return a template that writes `picture` for each picture."""
    part = f"{{% if part.type == 'text' %}}{{{{ part.text }}}}{{% else %}}{picture}{{% endif %}}"
    content = (
        "{% if message.content is string %}{{ message.content }}{% else %}"
        f"{{% for part in message.content %}}{part}{{% endfor %}}{{% endif %}}"
    )
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        f"{content}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def write_tokenizer(tokenizer: Path, folder: Path, added: Sequence[str], size: int) -> dict[str, int]:
    """Write the tokenizer with further special tokens and texts, and return the ids of all special tokens.

    Args:
        tokenizer: the folder of the tokenizer.
        folder: where it is written.
        added: the further special tokens.
        size: number of tokens of the vocabulary.
    """
    fields = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = fields["model"]["vocab"]
    for number in range(size - len(added) - len(vocabulary)):  # no merge makes them: texts have the same tokens
        vocabulary[f"\u0120extra{number}"] = len(vocabulary)
    kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    fields["added_tokens"] += [
        {"id": len(vocabulary) + index, "content": name, **kind} for index, name in enumerate(added)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(fields), encoding="utf-8")
    return {token["content"]: token["id"] for token in fields["added_tokens"]}


def write_chat_tokenizer(tokenizer: Path, folder: Path, size: int, template: str) -> dict[str, int]:
    """Write the tokenizer of a model of text and its config, and return the ids of all special tokens.

    Args:
        tokenizer: the folder of the tokenizer.
        folder: where it is written.
        size: number of tokens of the vocabulary.
        template: the chat template.
    """
    ids = write_tokenizer(tokenizer, folder, (), size)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": END,
            "pad_token": "<|endoftext|>",
            "chat_template": template,
        },
    )
    return ids


def make_model(name: str, folder: Path, tokenizer: Path) -> None:
    """Write a checkpoint."""
    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(tokenizer, folder, shape["added"], shape["config"]["text_config"]["vocab_size"])
    specials = {"eos_token": END, "pad_token": "<|endoftext|>", "bos_token": "<|im_start|>"}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": shape["processor"]["processor_class"],
            "clean_up_tokenization_spaces": False,
            **specials,
        },
    )
    template = chat_template(shape["picture"])
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_json(folder / "chat_template.json", {"chat_template": template})
    write_json(folder / "preprocessor_config.json", shape["processor"])
    write_json(folder / "processor_config.json", shape["sequence"])
    end = {"eos_token_id": ids[END], "pad_token_id": ids["<|endoftext|>"], "bos_token_id": ids["<|im_start|>"]}
    text = {**shape["config"]["text_config"], **end, "tie_word_embeddings": True}
    tokens = {field: ids[token] for field, token in shape["tokens"].items()}
    fields = {**shape["config"], "text_config": text, "tie_word_embeddings": True, **end, **tokens}
    torch.manual_seed(0)
    config = AutoConfig.for_model(shape["model_type"], **fields)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_output_embeddings().weight[list(ids.values())] = 0
    model.generation_config.update(do_sample=False, **end)
    model.save_pretrained(folder)
    print(f"{folder}: {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f} million parameters")


def write_json(path: Path, fields: dict[str, Any]) -> None:
    """Write a file of JSON."""
    path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Write the checkpoints that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with SmolLM2's tokenizer.json")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    for name in options.shapes:
        make_model(name, options.folder / name, options.tokenizer)


if __name__ == "__main__":
    main()
