"""GGUF files of tiny models that read pictures: one of the language model, and one of the part that sees ("mmproj")."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file, save_file

from tests.support.gguf_models import TOKENS, Array, add_value, in_pairs, write_gguf
from tests.support.tiny_configs import VOCAB
from tests.support.vision_models import PICTURE, VIDEO

MODEL, PROJECTOR = "model.gguf", "mmproj-model-f32.gguf"
_SEES = re.compile(
    r"(?:model\.)?(?:(?:visual|vision_tower|vision_model|mlp_AR|multi_modal_projector|connector)\..*|image_newline)"
)
_TEXT = re.compile(r"(?:model\.)?(?:(?:language_model|text_model)\.)?(?:model\.)?(?P<name>.*)")
_QWEN_TOKENS = {PICTURE: "<|image_pad|>", VIDEO: "<|video_pad|>", 294: "<|vision_start|>", 295: "<|vision_end|>"}
_PADDLE_TOKENS = {PICTURE: "<|IMAGE_PLACEHOLDER|>", VIDEO: "<|video_pad|>"}
_PADDLE_TOKENS |= {294: "<|IMAGE_START|>", 295: "<|IMAGE_END|>"}
_GLM_TOKENS = {PICTURE: "<|image|>", VIDEO: "<|video|>", 291: "<|begin_of_image|>", 292: "<|end_of_image|>"}
_GLM_TOKENS |= {294: "<|begin_of_video|>", 295: "<|end_of_video|>"}
# The kinds of projectors, and texts of tokens, by model type.
KINDS: dict[str, tuple[str, dict[int, str]]] = {
    "gemma3": ("gemma3", {PICTURE: "<image_soft_token>", 294: "<start_of_image>", 295: "<end_of_image>"}),
    "glm4v": ("glm4v", _GLM_TOKENS),
    "idefics3": ("idefics3", {PICTURE: "<image>"}),
    "internvl": ("internvl", {PICTURE: "<IMG_CONTEXT>"}),
    "llava": ("mlp", {PICTURE: "<image>"}),
    "llava_next": ("mlp", {PICTURE: "<unk>"}),
    "mistral3": ("pixtral", {PICTURE: "[IMG]", 291: "[IMG_BREAK]", 292: "[IMG_END]"}),
    "qwen3_5": ("qwen3vl_merger", _QWEN_TOKENS),
    "qwen3_5_moe": ("qwen3vl_merger", _QWEN_TOKENS),
    "qwen2_5_vl": ("qwen2.5vl_merger", _QWEN_TOKENS),
    "paddleocr_vl": ("paddleocr", _PADDLE_TOKENS),
    "qwen2_vl": ("qwen2vl_merger", _QWEN_TOKENS),
    "qwen3_vl": ("qwen3vl_merger", _QWEN_TOKENS),
    "qwen3_vl_moe": ("qwen3vl_merger", _QWEN_TOKENS),
    "smolvlm": ("idefics3", {PICTURE: "<image>"}),
}


def write_seeing(folder: Path, target: Path, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write the model in a folder to files of a directory, in float32. Returns the path of the language model's.

    `metadata`: values of the part that sees, which are added or replaced.
    """
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    text = target / "text"
    text.mkdir()
    inner = {"tie_word_embeddings": config["tie_word_embeddings"], **config["text_config"]}
    (text / "config.json").write_text(json.dumps(inner))
    own = {_plain(name): tensor for name, tensor in weights.items() if not _SEES.fullmatch(name)}
    save_file(own, text / "model.safetensors")
    tokenizer = _Tokenizer(KINDS[config["model_type"]][1])
    write_gguf(text, target / MODEL, kind=None, metadata=_positions(inner), tokenizer=tokenizer)
    arrays = {name: tensor.numpy() for name, tensor in weights.items() if _SEES.fullmatch(name)}
    _write_projector(folder, config, arrays, target / PROJECTOR, metadata or {})
    return target / MODEL


def _plain(name: str) -> str:
    """The name of a weight in a checkpoint of the language model alone."""
    match = _TEXT.fullmatch(name)
    assert match is not None
    return match["name"] if match["name"].startswith("lm_head.") else f"model.{match['name']}"


class _Tokenizer:
    """Writes the tokenizer of bytes and of some special tokens. `special`: these by id."""

    def __init__(self, special: Mapping[int, str]) -> None:
        self._special = special

    def __call__(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        tokens = [*TOKENS, *(f"unused{index}" for index in range(len(TOKENS), VOCAB))]
        writer.add_token_list([self._special.get(index, token) for index, token in enumerate(tokens)])
        writer.add_token_types([3 if index in self._special else 1 for index in range(VOCAB)])
        writer.add_token_merges(["h e", "t h"])


def _positions(text: Mapping[str, Any]) -> dict[str, Any]:
    """What files of the language model say about positions."""
    values: dict[str, Any] = {}
    sections = (text.get("rope_parameters") or {}).get("mrope_section")
    if sections:
        values[".rope.dimension_sections"] = [*sections, 0]
    if text["model_type"] == "gemma3_text":
        values[".attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in text["layer_types"]]
    return values


def _write_projector(
    folder: Path, config: dict[str, Any], weights: dict[str, Array], path: Path, metadata: Mapping[str, Any]
) -> None:
    vision, kind = config["vision_config"], config["model_type"]
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    layers = vision.get("depth") or vision["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(3, layers))  # of projectors as well
    writer = gguf.GGUFWriter(path, "clip")
    values = {**_metadata(config, vision, processor), **metadata}
    for key, value in values.items():
        if value is not None:
            add_value(writer, f"clip.{key}", value)
    for name, array in _split(kind, weights, vision).items():
        writer.add_tensor(_name(names, kind, name, vision), np.ascontiguousarray(array))
    if kind == "mistral3":
        writer.add_tensor("v.token_embd.img_break", np.ones(config["text_config"]["hidden_size"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(config: dict[str, Any], vision: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp's scripts write of a config."""
    kind = config["model_type"]
    size, area = processor.get("size") or {}, kind.startswith(("qwen", "paddle", "glm"))
    edge = vision.get("image_size", 56)
    edge = edge if isinstance(edge, int) else edge[0]
    patch = vision["patch_size"] if isinstance(vision["patch_size"], int) else vision["patch_size"][0]
    deep = vision.get("deepstack_visual_indexes")
    layers = _layers(kind, vision)
    canvases = config.get("image_grid_pinpoints")
    return {
        "has_vision_encoder": True,
        "projector_type": KINDS[kind][0],
        # Of LLaVA it is that of CLIP as a whole.
        "vision.projection_dim": 24 if kind.startswith("llava") else config["text_config"]["hidden_size"],
        "vision.image_size": edge,
        "vision.patch_size": patch,
        "vision.embedding_length": vision.get("embed_dim") or vision["hidden_size"],
        "vision.feed_forward_length": vision.get("intermediate_size") or vision["hidden_size"],
        "vision.block_count": layers,
        "vision.attention.head_count": vision.get("num_heads") or vision["num_attention_heads"],
        "vision.attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6),
        "vision.image_mean": processor["image_mean"],
        "vision.image_std": processor["image_std"],
        "vision.image_min_pixels": size["shortest_edge"] if area else None,
        "vision.image_max_pixels": size["longest_edge"] if area else None,
        "vision.preproc_image_size": size.get("longest_edge") if kind in ("idefics3", "smolvlm") else None,
        "vision.projector.scale_factor": _scale(config, edge // patch),
        "vision.preproc_max_tiles": processor.get("max_patches") if kind == "internvl" else None,
        "vision.n_wa_pattern": vision["fullatt_block_indexes"][0] + 1 if "fullatt_block_indexes" in vision else None,
        "vision.window_size": vision.get("window_size"),
        "vision.is_deepstack_layers": None if deep is None else [index in deep for index in range(layers)],
        "vision.feature_layer": [layers] if kind == "llava" else None,
        "vision.image_grid_pinpoints": None if canvases is None else [edge for canvas in canvases for edge in canvas],
        "vision.spatial_merge_size": config.get("spatial_merge_size"),
        "use_gelu": vision.get("hidden_act") not in ("quick_gelu", "silu"),
    }


def _layers(kind: str, vision: dict[str, Any]) -> int:
    """Layers that a file has: of LLaVA's, those before the last."""
    layers: int = vision.get("depth") or vision["num_hidden_layers"]
    return layers - 1 if kind.startswith("llava") else layers


def _scale(config: dict[str, Any], patches: int) -> int | None:
    if config["model_type"] == "gemma3":
        return int(patches // config["mm_tokens_per_image"] ** 0.5)
    if config["model_type"] == "internvl":
        return int(1 / config["downsample_ratio"])
    return config.get("scale_factor")


def _split(kind: str, weights: dict[str, Array], vision: dict[str, Any]) -> dict[str, Array]:
    """The arrays of a file, by the names of modules that llama.cpp's scripts know."""
    arrays: dict[str, Array] = {}
    for name, weight in weights.items():
        if kind.startswith("llava") and (f".layers.{_layers(kind, vision)}." in name or "post_layernorm" in name):
            continue  # behind the layer that is read
        if kind == "mistral3" and (".q_proj." in name or ".k_proj." in name):
            arrays[name] = in_pairs(weight, vision["num_attention_heads"])
            continue
        name = name.removeprefix("model.") if kind.startswith(("qwen", "glm")) else name
        if "patch_embed.proj.weight" in name:
            arrays["v.patch_embd.weight"], arrays["v.patch_embd.weight.1"] = weight[:, :, 0], weight[:, :, 1]
        elif ".attn.qkv." in name and kind.startswith("qwen2"):
            parts = np.split(weight, 3)
            arrays |= {name.replace(".qkv.", f".{side}."): part for side, part in zip("qkv", parts, strict=True)}
        elif kind == "internvl" and name.endswith(("cls_token", "position_embeddings")):
            arrays["v.class_embd" if name.endswith("token") else "v.position_embd.weight"] = weight[0]
        elif kind == "internvl" and "lambda_" in name:
            arrays[f"v.blk.{name.split('.')[-2]}.ls{name[-1]}.weight"] = weight
        elif "soft_emb_norm" in name:
            arrays[name] = weight + np.float32(1)
        else:
            arrays[name.replace("projection_weight", "projection.weight")] = weight
    return arrays


_MERGER = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
_DEEPSTACK = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
_INTERN = {"layer_norm": "mm.model.mlp.0", "linear_1": "mm.model.mlp.1", "linear_2": "mm.model.mlp.3"}


def _name(names: gguf.TensorNameMap, kind: str, name: str, vision: dict[str, Any]) -> str:
    """The name of a tensor in files by that of a module."""
    if name.startswith("v."):
        return name
    if name.endswith("image_newline"):
        return "model.image_newline"
    module, _, suffix = name.rpartition(".")
    if kind.startswith("llava") and "multi_modal_projector" in name:
        return f"mm.{0 if '1' in module else 2}.{suffix}"
    if name.startswith("visual.deepstack_merger_list."):
        index, part = module.split(".")[2:4]
        return f"v.deepstack.{vision['deepstack_visual_indexes'][int(index)]}.{_DEEPSTACK[part]}.{suffix}"
    if name.startswith("visual.merger.") and kind.startswith("qwen3"):
        return f"{_MERGER[module.split('.')[2]]}.{suffix}"
    if name == "visual.patch_embed.proj.bias" or "patch_embeddings.projection." in name:
        return f"v.patch_embd.{suffix}"
    if kind == "internvl" and "multi_modal_projector" in name:
        return f"{_INTERN[module.rpartition('.')[2]]}.{suffix}"
    tower = name.replace("vision_tower.", "vision_tower.vision_model.", 1).replace(
        "visual.vision", "vision_tower.vision"
    )
    for spelled in (name, tower, f"model.{name}"):
        mapped = names.get_name(spelled, try_suffixes=(".weight", ".bias"))
        if mapped is not None:
            return mapped
    raise KeyError(name)
