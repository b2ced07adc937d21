"""Tiny models that read pictures, as folders that can be served: weights, processor, tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.support.tiny_configs import VOCAB
from tests.support.tokenizer import ALPHABET, with_placeholders
from tests.support.vision_models import PICTURE, VIDEO, make_composite, save_seeing

# The text of the placeholder, by case.
PLACEHOLDERS = {
    "llava": "<image>",
    "llava_next": "<image>",
    "llava_onevision": "<image>",
    "idefics3": "<image>",
    "internvl": "<IMG_CONTEXT>",
    "llava-pixtral": "[IMG]",
    "mistral3": "[IMG]",
    "smolvlm": "<image>",
    "qwen2_5_vl": "<|image_pad|>",
    "qwen3_vl": "<|image_pad|>",
    "glm4v": "<|image|>",
    "gemma4": "<|image|>",
    "llama4": "<|patch|>",
}
_MARKERS = {"<|patch|>": "<|image|>"}  # what a chat template writes for a picture, if it is not the placeholder
_GEMMA4_TOKENS = {297: "<|image>", 298: "<image|>"}
_SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<fake_token_around_image>", "<global-img>", "[IMG_BREAK]", "[IMG_END]"),
    *("<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
_CONTEXT = 4096


def write_tokenizer(folder: Path, placeholder: str) -> None:
    """Write a tokenizer of bytes and special tokens, with the placeholder where the model has it."""
    special = [text for text in _SPECIAL if text != placeholder]
    tokenizer = with_placeholders(special, {PICTURE: placeholder, **_GEMMA4_TOKENS}, VOCAB)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}PICTURE"
        "{% elif c.type == 'video' %}VIDEO{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}".replace(
            "PICTURE", _MARKERS.get(placeholder, placeholder)
        ).replace("VIDEO", str(tokenizer.id_to_token(VIDEO)))
    )


def answering_model(case: str, folder: Path) -> Path:
    """Save a model that answers with letters only and has room for conversations."""
    model = make_composite(case, seed=4)
    letters = [token for token, char in enumerate(ALPHABET) if char.isascii() and char.isalpha()]
    silent = torch.ones(VOCAB, dtype=torch.bool)
    silent[letters] = False
    with torch.no_grad():
        model.lm_head.weight[silent] = 0
    save_seeing(model, case, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = _CONTEXT
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, PLACEHOLDERS[case])
    return folder
