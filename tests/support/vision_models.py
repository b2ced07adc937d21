"""Small language models that read pictures, with random weights: the whole of them, as transformers makes it."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoConfig, AutoModelForMultimodalLM
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from quire.engine.client.pictures import PictureInfo
from quire.engine.client.protocol import PictureItem
from quire.multimodal.pictures.layout import ItemLayout, layout
from quire.multimodal.pictures.pixels import picture_pixels
from tests.support import mobilenet as _mobilenet  # noqa: F401 takes the place of timm
from tests.support.audio_models import ADAPTED, adapt, config_fields, draw_statistics
from tests.support.models import draw_weights
from tests.support.phi4_tiles import Phi4Tiles
from tests.support.tiny_configs import TEXT, VISION
from tests.support.video_processors import image_processor

Value = TypeVar("Value")
PICTURE, VIDEO = 290, 293  # placeholder tokens
_ROW_END, SEPARATOR = 291, 292  # text within a picture
_TEXT = {**TEXT, "max_position_embeddings": 256}
_LARGER = {**VISION, "image_size": 56}
_SIGLIP = {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False}
_WINDOWS = {
    "pad_token_id": 0,
    "num_hidden_layers": 4,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_LAYER_INPUTS = {
    **_WINDOWS,
    "head_dim": 16,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 300,
}
_GEMMA4_VISION = {
    **{name: value for name, value in VISION.items() if name not in ("image_size", "num_channels")},
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 256,
}
_GEMMA4_TOKENS = {"image_token_id": PICTURE, "video_token_id": VIDEO, "audio_token_id": 296} | {
    "boi_token_id": 297,
    "eoi_token_id": 298,
}
_GEMMA3N_MODEL_ARGS = {"channel_multiplier": 0.03, "msfa_output_resolution": 2}
_GEMMA3N_AUDIO = {
    "vocab_offset": 292,
    "vocab_size": 8,
    "hidden_size": 32,
    "input_feat_size": 16,
    "conf_num_hidden_layers": 2,
    "conf_num_attention_heads": 4,
    "conf_attention_chunk_size": 4,
    "conf_attention_context_left": 6,
    "conf_attention_context_right": 2,
    "conf_attention_logit_cap": 3.0,
    "conf_reduction_factor": 2,
    "gradient_clipping": 2.0,
    "sscp_conv_channel_size": [16, 8],
}
_GEMMA4_AUDIO_ENDS = {"boa_token_id": 295, "eoa_token_index": 299}
_GEMMA4_AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "subsampling_conv_channels": [16, 8],
    "attention_chunk_size": 4,
    "attention_context_left": 6,
    "attention_context_right": 2,
    "attention_logit_cap": 3.0,
    "gradient_clipping": 2.0,
    "output_proj_dims": 24,
}
_ROOM = {"max_position_embeddings": 1024}  # for pictures of 70 tokens
_CANVASES = [[28, 56], [56, 28], [56, 56], [28, 84]]
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 14,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}
_QWEN3_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 14,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
_GLM_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 14,
    "image_size": 56,
}
_GLM_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
_GLM_TOKENS = {"image_token_id": PICTURE, "video_token_id": VIDEO}
_QWEN_TOKENS = {"image_token_id": PICTURE, "video_token_id": VIDEO, "vision_start_token_id": 294}
_PERCEIVER = {
    "resampler_n_latents": 4,
    "resampler_depth": 1,
    "resampler_n_heads": 2,
    "resampler_head_dim": 16,
    "num_key_value_heads": 2,
}
_PHI4 = config_fields("phi4_multimodal")
_PHI4_VISION = {**VISION, "num_hidden_layers": 3, "crop_size": 28, "patch_size": 7, "image_token_id": PICTURE}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_QWEN3_5_VISION = {name: value for name, value in _QWEN3_VISION.items() if name != "deepstack_visual_indexes"}
_QWEN3_5_TEXT = {
    "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def _config(text: str, vision: dict[str, Any], *, text_fields: dict[str, Any] | None = None, **fields: Any) -> Any:
    return {
        "text_config": {"model_type": text, **_TEXT, **(text_fields or {})},
        "vision_config": vision,
        "tie_word_embeddings": False,
        **fields,
    }


# Case -> (model type, config). Those whose vision config has no type have one of their own.
COMPOSITES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        _config(
            "gemma3_text",
            {"model_type": "siglip_vision_model", **VISION},
            text_fields={"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
            | {"num_hidden_layers": 4},
            tie_word_embeddings=True,
            image_token_index=PICTURE,
            mm_tokens_per_image=4,
        ),
    ),
    "gemma3-narrow": (  # windows end within pictures, whose patches are pooled; heads that compiled kernels can read
        "gemma3",
        _config(
            "gemma3_text",
            {"model_type": "siglip_vision_model", **VISION, "image_size": 112, "vision_use_head": False},
            text_fields={"sliding_window": 10, "layer_types": ["full_attention", "sliding_attention"] * 2}
            | {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
            | {"query_pre_attn_scalar": 4},  # sharp attention, so that pictures matter
            image_token_index=PICTURE,
            mm_tokens_per_image=16,
        ),
    ),
    "glm4v": (
        "glm4v",
        _config("glm4v_text", _GLM_VISION, text_fields={"rope_parameters": _GLM_ROPE}, **_GLM_TOKENS),
    ),
    "glm46v": (
        "glm46v",
        _config(
            "glm4v_text",
            {"model_type": "glm4v_vision", **_GLM_VISION},
            text_fields={"rope_parameters": _GLM_ROPE},
            **_GLM_TOKENS,
        ),
    ),
    "gemma4": (  # a small one, with inputs of layers
        "gemma4",
        _config(
            "gemma4_text",
            {**_GEMMA4_VISION, "use_clipped_linears": True},
            text_fields={**_LAYER_INPUTS, **_ROOM, "pad_token_id": 7},
            **_GEMMA4_TOKENS,
        ),
    ),
    "gemma4-tied": (
        "gemma4",
        _config(
            "gemma4_text",
            {**_GEMMA4_VISION, "use_clipped_linears": True},
            text_fields={**_LAYER_INPUTS, **_ROOM, "pad_token_id": 7},
            tie_word_embeddings=True,
            **_GEMMA4_TOKENS,
        ),
    ),
    "gemma4-experts": (  # a large one: layers with a window attend in both directions within pictures
        "gemma4",
        _config(
            "gemma4_text",
            {**_GEMMA4_VISION, "standardize": True},
            text_fields={**_WINDOWS, **_ROOM, "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0}
            | {"use_bidirectional_attention": "vision", "attention_k_eq_v": True, "num_global_key_value_heads": 1}
            | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
            **_GEMMA4_TOKENS,
        ),
    ),
    "gemma4_unified": (
        "gemma4_unified",
        _config(
            "gemma4_unified_text",
            {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 80}
            | {"output_proj_dims": 32},
            text_fields={**_WINDOWS, **_ROOM, "head_dim": 16, "global_head_dim": 32, "sliding_window": 75}
            | {"use_bidirectional_attention": "vision"},
            **_GEMMA4_TOKENS,
        ),
    ),
    "glm4v_moe": (
        "glm4v_moe",
        _config(
            "glm4v_moe_text",
            _GLM_VISION,
            text_fields={"rope_parameters": _GLM_ROPE, "n_routed_experts": 8, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 48, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
            **_GLM_TOKENS,
        ),
    ),
    "idefics2": ("idefics2", _config("mistral", {"model_type": "idefics2", **VISION}, perceiver_config=_PERCEIVER)),
    "llama4": (
        "llama4",
        _config(
            "llama4_text",
            {"model_type": "llama4_vision_model", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
            | {"intermediate_size": 128, "image_size": 56, "patch_size": 14, "vision_output_dim": 64}
            | {"projector_input_dim": 64, "projector_output_dim": 64},
            text_fields={"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96, "moe_layers": [1]}
            | {"attention_chunk_size": 48, "no_rope_layers": [1, 0, 1]},
            image_token_index=PICTURE,
        ),
    ),
    "idefics3": (
        "idefics3",
        _config("llama", {"model_type": "idefics3_vision", **_LARGER}, image_token_id=PICTURE, scale_factor=2),
    ),
    "internvl": (
        "internvl",
        _config(
            "qwen2", {"model_type": "internvl_vision", **_LARGER}, tie_word_embeddings=True, image_token_id=PICTURE
        ),
    ),
    "internvl-qwen3": (
        "internvl",
        _config("qwen3", {"model_type": "internvl_vision", **_LARGER}, image_token_id=PICTURE),
    ),
    "llava": ("llava", _config("llama", {"model_type": "clip_vision_model", **VISION}, image_token_index=PICTURE)),
    "llava_next": (
        "llava_next",
        _config(
            "mistral",
            {"model_type": "clip_vision_model", **VISION},
            image_token_index=PICTURE,
            image_grid_pinpoints=_CANVASES,
        ),
    ),
    "llava_onevision": (
        "llava_onevision",
        _config("qwen2", _SIGLIP, image_token_index=PICTURE, image_grid_pinpoints=_CANVASES, video_token_index=VIDEO)
        | {"vision_aspect_ratio": "anyres_max_2"},
    ),
    "llava-pixtral": (
        "llava",
        _config(
            "mistral",
            {"model_type": "pixtral", **VISION},
            image_token_index=PICTURE,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
    ),
    "llava-siglip": (
        "llava",
        _config("llama", _SIGLIP, image_token_index=PICTURE, vision_feature_select_strategy="full"),
    ),
    "mistral3": (
        "mistral3",
        _config(
            "mistral",
            {"model_type": "pixtral", **VISION},
            text_fields={"sliding_window": None},
            image_token_index=PICTURE,
        ),
    ),
    "ovis2": ("ovis2", _config("qwen2", {"model_type": "ovis2", **VISION}, tie_word_embeddings=True)),
    "paligemma": (
        "paligemma",
        _config("gemma", _SIGLIP, projection_dim=64, image_token_index=PICTURE),
    ),
    "paligemma2": (  # windows end within prompts
        "paligemma",
        _config(
            "gemma2",
            _SIGLIP,
            text_fields={"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"] * 2}
            | {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
            projection_dim=64,
            image_token_index=PICTURE,
        ),
    ),
    "paddleocr_vl": (
        "paddleocr_vl",
        _config(
            "paddleocr_vl_text",
            {"model_type": "paddleocr_vl_vision", **_LARGER},
            text_fields={"rope_parameters": _MROPE, "use_bias": True},
            **_QWEN_TOKENS,
        ),
    ),
    "qwen2_vl": (
        "qwen2_vl",
        _config(
            "qwen2_vl_text",
            {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14, "in_channels": 3},
            text_fields={"rope_parameters": _MROPE},
            **_QWEN_TOKENS,
        ),
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        _config("qwen2_5_vl_text", QWEN_VISION, text_fields={"rope_parameters": _MROPE}, **_QWEN_TOKENS),
    ),
    "qwen2_5_vl-tied": (
        "qwen2_5_vl",
        _config(
            "qwen2_5_vl_text",
            QWEN_VISION,
            text_fields={"rope_parameters": _MROPE},
            tie_word_embeddings=True,
            **_QWEN_TOKENS,
        ),
    ),
    "qwen2_5_vl-wide": (  # heads that compiled kernels can rotate
        "qwen2_5_vl",
        _config(
            "qwen2_5_vl_text",
            QWEN_VISION,
            text_fields={"rope_parameters": {**_MROPE, "mrope_section": [4, 6, 6]}}
            | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
            **_QWEN_TOKENS,
        ),
    ),
    "qwen3_vl": (
        "qwen3_vl",
        _config(
            "qwen3_vl_text",
            _QWEN3_VISION,
            text_fields={"rope_parameters": {**_MROPE, "mrope_interleaved": True}},
            **_QWEN_TOKENS,
        ),
    ),
    "qwen3_5": (
        "qwen3_5",
        _config("qwen3_5_text", _QWEN3_5_VISION, text_fields=_QWEN3_5_TEXT, **_QWEN_TOKENS),
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        _config(
            "qwen3_5_moe_text",
            _QWEN3_5_VISION,
            text_fields=_QWEN3_5_TEXT
            | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
            | {"shared_expert_intermediate_size": 48},
            **_QWEN_TOKENS,
        ),
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        _config(
            "qwen3_vl_moe_text",
            _QWEN3_VISION,
            text_fields={"rope_parameters": {**_MROPE, "mrope_interleaved": True}, "decoder_sparse_step": 1}
            | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]},
            **_QWEN_TOKENS,
        ),
    ),
    "smolvlm": (
        "smolvlm",
        _config("llama", {"model_type": "smolvlm_vision", **_LARGER}, image_token_id=PICTURE, scale_factor=2),
    ),
    "vipllava": (
        "vipllava",
        _config(
            "llama",
            {"model_type": "clip_vision_model", **VISION},
            image_token_index=PICTURE,
            vision_feature_layers=[-1],
        ),
    ),
}
# Those that read audio as well.
HEARING: dict[str, tuple[str, dict[str, Any]]] = {
    "phi4_multimodal": (
        "phi4_multimodal",
        {**_PHI4, "vision_config": _PHI4_VISION, "audio_config": {**_PHI4["audio_config"], "audio_token_id": 289}},
    ),
    "gemma4": ("gemma4", {**COMPOSITES["gemma4"][1], "audio_config": _GEMMA4_AUDIO, **_GEMMA4_AUDIO_ENDS}),
    "gemma3n": (
        "gemma3n",
        _config(
            "gemma3n_text",
            {"vocab_offset": 280, "vocab_size": 12, "model_args": _GEMMA3N_MODEL_ARGS},
            text_fields={**_LAYER_INPUTS, **_ROOM, "vocab_size_per_layer_input": 280, "head_dim": 16}
            | {"altup_num_inputs": 2, "laurel_rank": 8, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
            audio_config=_GEMMA3N_AUDIO,
            vision_soft_tokens_per_image=4,
            audio_soft_tokens_per_image=10,
            image_token_id=PICTURE,
            audio_token_id=296,
            boi_token_id=278,
            eoi_token_id=281,
            boa_token_id=279,
            eoa_token_id=292,
        ),
    ),
    "gemma4_unified": (
        "gemma4_unified",
        {**COMPOSITES["gemma4_unified"][1], "audio_config": {"audio_embed_dim": 640}, **_GEMMA4_AUDIO_ENDS},
    ),
}


class MadeWhenAsked(dict[str, Value]):
    """A dictionary whose values are made when they are asked for: most tests need few of them."""

    def __init__(self, make: Callable[[str], Value]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: str) -> Value:
        self[key] = self._make(key)
        return self[key]


def make_composite(case: str, *, seed: int = 0, hears: bool = False) -> Any:
    """Build the whole model of a case in float32, with weights large enough for distinct logits.

    `hears`: one that reads audio, if there are both.
    """
    kind, fields = HEARING[case] if hears or case not in COMPOSITES else COMPOSITES[case]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **copy.deepcopy(fields))
    model = AutoModelForMultimodalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    draw_weights(model, kind)
    model.generation_config.eos_token_id = None
    if kind.startswith("gemma4"):
        _draw_gemma4(model)
    if kind == "gemma3n":
        _draw_gemma3n(model)
    if kind == "llama4":  # transformers' class reads a field that the outputs of its language model do not have
        MoeCausalLMOutputWithPast.image_outputs = None
    if kind == "phi4_multimodal":
        draw_statistics(model)
        # transformers encodes pictures again where their placeholder is generated, so it must not be.
        model.lm_head.weight.data[[289, PICTURE]] = 0.0
    if kind in ADAPTED:
        model.adapted = (adapt(model, ADAPTED[kind]),)  # in a tuple, so that it is not a module of the model
    return model


@torch.no_grad()
def _draw_gemma4(model: Any) -> None:
    """Draw what Gemma 4 has beside weights: bounds of values, and means and scales. Its norms multiply by weights."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter += 1
    for name, buffer in model.named_buffers():
        if "put_m" in name:  # of inputs and outputs
            buffer.fill_(1.5 if name.endswith("max") else -1.5)
        elif "std_" in name:
            torch.nn.init.normal_(buffer, mean=0.5, std=0.2)
    # transformers embeds placeholders that are generated as padding, so they must not be.
    model.get_output_embeddings().weight[[*_GEMMA4_TOKENS.values(), *_GEMMA4_AUDIO_ENDS.values()]] = 0.0


@torch.no_grad()
def _draw_gemma3n(model: Any) -> None:
    """Draw factors near one, and let no placeholder be generated, which transformers embeds as media."""
    for name, parameter in model.named_parameters():
        if "vision_tower" in name or "audio_tower" in name or "embed_" in name:
            if parameter.dim() == 1:
                parameter.normal_(0.8, 0.3)
            elif parameter.dim() == 4:
                parameter.normal_(0, 0.4)
    model.get_output_embeddings().weight[280:] = 0.0


def save_composite(case: str, folder: Path) -> Path:
    """Save the whole model of a case to a folder, without a tokenizer."""
    make_composite(case).save_pretrained(folder)
    return folder


def _untyped(_: torch.Tensor) -> dict[str, torch.Tensor]:
    return {}


def _typed(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"mm_token_type_ids": (ids == PICTURE).int()}


def _gemma_types(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"token_type_ids": (ids == PICTURE).int()}


def _prefix_types(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"token_type_ids": torch.zeros_like(ids)}


@dataclass(frozen=True)
class Eyes:
    """How transformers prepares the pictures of a model.

    Attributes:
        processor: its image processor.
        inputs: the arguments of `generate` for pictures, of which there is at least one.
        written: changes of the processor's fields in the config that is saved.
        types: the arguments of `generate` that say which of some tokens stand for pictures.
        least_step: tokens of a step that computes each of the prompts here, or each picture in them.
    """

    processor: Any
    inputs: Callable[[Any, list[Image.Image]], dict[str, torch.Tensor]]
    written: dict[str, Any]
    types: Callable[[torch.Tensor], dict[str, torch.Tensor]] = field(default=_untyped)
    least_step: int = 1


def _inputs(names: Sequence[str], processor: Any, pictures: list[Image.Image]) -> dict[str, torch.Tensor]:
    processed = processor(images=pictures, return_tensors="pt")
    return {name: processed[name] for name in names if name in processed}


def _nested_inputs(processor: Any, pictures: list[Image.Image]) -> dict[str, torch.Tensor]:
    return _inputs(("pixel_values", "pixel_attention_mask"), processor, [pictures])  # type: ignore[list-item]


_FIXED = partial(_inputs, ("pixel_values",))
_SIZED = partial(_inputs, ("pixel_values", "image_sizes"))
_CLIP = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
_TILES = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
_SQUARES = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
_PATCHES = partial(_inputs, ("pixel_values", "image_position_ids"))


def _unified_processor() -> Any:
    return image_processor("gemma4_unified", "Gemma4UnifiedImageProcessor")(**_SQUARES)


def _llama4_processor() -> Any:
    return image_processor("llama4", "Llama4ImageProcessor")(size={"height": 56, "width": 56}, max_patches=5)


def _tiles(processor: Any, pictures: list[Image.Image]) -> dict[str, torch.Tensor]:
    """The tiles of all pictures, which transformers joins only of one size."""
    tiles = [processor(images=picture, return_tensors="pt")["pixel_values"] for picture in pictures]
    return {"pixel_values": torch.cat([each.flatten(0, -4) for each in tiles]).float()}


_GRIDS = partial(_inputs, ("pixel_values", "image_grid_thw"))
_MIDDLE = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_AREA = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 12}
_FRAMES = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 24}
# Those that read pictures, by case. The longest edge of Pixtral's is not a multiple of its patches.
SEES: dict[str, Eyes] = {
    "gemma3-narrow": Eyes(
        Gemma3ImageProcessorPil(size={"height": 112, "width": 112}), _FIXED, {}, types=_gemma_types, least_step=16
    ),
    "gemma3n": Eyes(
        SiglipImageProcessorPil(size={"height": 64, "width": 64}, resample=2, do_normalize=False), _FIXED, {}
    ),
    "gemma4": Eyes(Gemma4ImageProcessorPil(**_SQUARES), _PATCHES, {}, types=_typed),
    "gemma4-experts": Eyes(Gemma4ImageProcessorPil(**_SQUARES), _PATCHES, {}, types=_typed, least_step=70),
    "gemma4_unified": Eyes(_unified_processor(), _PATCHES, {}, types=_typed, least_step=70),
    "llama4": Eyes(_llama4_processor(), _tiles, {}),
    "glm4v": Eyes(Glm4vImageProcessorPil(size=_FRAMES), _GRIDS, {}, types=_typed),
    "glm46v": Eyes(Glm46VImageProcessorPil(size=_FRAMES), _GRIDS, {}, types=_typed),
    "glm4v_moe": Eyes(Glm4vImageProcessorPil(size=_FRAMES), _GRIDS, {}, types=_typed),
    "idefics3": Eyes(Idefics3ImageProcessorPil(**_TILES), _nested_inputs, {}),
    "internvl": Eyes(
        GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, crop_to_patches=True, min_patches=1, max_patches=4),
        _FIXED,
        {},
    ),
    "llava": Eyes(CLIPImageProcessorPil(**_CLIP), _FIXED, {}),
    "llava-pixtral": Eyes(
        PixtralImageProcessorPil(size={"longest_edge": 75}, patch_size={"height": 14, "width": 14}), _SIZED, {}
    ),
    "llava-siglip": Eyes(
        SiglipImageProcessorPil(size={"height": 28, "width": 28}),
        _FIXED,
        {},
    ),
    "llava_next": Eyes(LlavaNextImageProcessorPil(**_CLIP, image_grid_pinpoints=_CANVASES), _SIZED, {}),
    "llava_onevision": Eyes(
        LlavaOnevisionImageProcessorPil(size={"height": 28, "width": 28}, image_grid_pinpoints=_CANVASES), _SIZED, {}
    ),
    "mistral3": Eyes(
        PixtralImageProcessorPil(size={"longest_edge": 130}, patch_size={"height": 28, "width": 28}),
        _SIZED,
        {"patch_size": {"height": 14, "width": 14}},
    ),
    "paligemma": Eyes(
        SiglipImageProcessorPil(size={"height": 28, "width": 28}), _FIXED, {}, types=_prefix_types, least_step=32
    ),
    "paligemma2": Eyes(
        SiglipImageProcessorPil(size={"height": 28, "width": 28}), _FIXED, {}, types=_prefix_types, least_step=32
    ),
    "paddleocr_vl": Eyes(PaddleOCRVLImageProcessorPil(size=_AREA), _GRIDS, {}, types=_typed),
    "phi4_multimodal": Eyes(Phi4Tiles(), Phi4Tiles.inputs, {}),
    "qwen2_vl": Eyes(Qwen2VLImageProcessorPil(size=_AREA), _GRIDS, {}, types=_typed),
    "qwen2_5_vl": Eyes(Qwen2VLImageProcessorPil(size=_AREA), _GRIDS, {}, types=_typed),
    "qwen3_vl": Eyes(Qwen2VLImageProcessorPil(size=_AREA, **_MIDDLE), _GRIDS, {}, types=_typed),
    "qwen3_5": Eyes(Qwen2VLImageProcessorPil(size=_AREA, **_MIDDLE), _GRIDS, {}, types=_typed),
    "qwen3_5_moe": Eyes(Qwen2VLImageProcessorPil(size=_AREA, **_MIDDLE), _GRIDS, {}, types=_typed),
    "qwen3_vl_moe": Eyes(Qwen2VLImageProcessorPil(size=_AREA, **_MIDDLE), _GRIDS, {}, types=_typed),
    "smolvlm": Eyes(SmolVLMImageProcessorPil(**_TILES), _nested_inputs, {}),
    "vipllava": Eyes(CLIPImageProcessorPil(**_CLIP), _FIXED, {}),
}


def text_types(case: str, prompt: Sequence[int]) -> dict[str, torch.Tensor]:
    """The arguments of `generate` that say which tokens of a text attend to each other in both directions."""
    is_prefix = case in SEES and SEES[case].types is _prefix_types
    return _prefix_types(torch.tensor([prompt])) if is_prefix else {}


def save_seeing(model: Any, case: str, folder: Path) -> Path:
    """Save a model with the config of its image processor, without a tokenizer."""
    model.save_pretrained(folder)
    write_image_processor(case, folder)
    if hasattr(model, "lora"):
        model.lora.save(folder / "vision-lora")
    return folder


def write_image_processor(case: str, folder: Path) -> None:
    """Write the config of a model's image processor."""
    eyes = SEES[case]
    config = {**json.loads(eyes.processor.to_json_string()), **eyes.written}
    (folder / "preprocessor_config.json").write_text(json.dumps(config))


def seen(info: PictureInfo, picture: Image.Image, start: int) -> tuple[list[int], list[PictureItem]]:
    """The tokens of a picture that begin at `start`, and its items. Text between items is one token."""
    planned = layout(info, picture.height, picture.width)
    pixels = picture_pixels(info.geometry, picture, planned)
    tokens: list[int] = []
    items: list[PictureItem] = []
    first = 0
    for place in planned.items:
        if items:
            tokens.append(SEPARATOR)
        own = np.ascontiguousarray(pixels[first : first + place.images])
        first += place.images
        items.append(
            PictureItem(
                hash=hashlib.sha256(own.tobytes() + repr((own.shape, place.original_size)).encode()).digest(),
                start=start + len(tokens),
                length=place.length,
                pixels=own,
                text_offsets=place.text_offsets(),
                positions=place.positions(),
                advance=place.advance,
                original_size=place.original_size,
            )
        )
        tokens += _tokens(info, place)
    return tokens, items


def _tokens(info: PictureInfo, place: ItemLayout) -> list[int]:
    row = [info.placeholder] * place.row_length + [_ROW_END] * place.row_ends
    return row * place.rows


def prompt_with_pictures(
    info: PictureInfo, *parts: Sequence[int] | Image.Image
) -> tuple[list[int], tuple[PictureItem, ...]]:
    """The prompt of tokens and pictures one behind the other, and its items."""
    tokens: list[int] = []
    items: list[PictureItem] = []
    for part in parts:
        if isinstance(part, Image.Image):
            own, of_part = seen(info, part, len(tokens))
            tokens += own
            items += of_part
        else:
            tokens += part
    return tokens, tuple(items)


def greedy_tokens(model: Any, ids: torch.Tensor, max_tokens: int, inputs: dict[str, torch.Tensor]) -> list[int]:
    """Greedy tokens of transformers' `generate` for a prompt (1, tokens) with its media."""
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            **inputs,
        )
    return [int(token) for token in out[0, ids.shape[1] :]]


def expected_of_pictures(
    model: Any, case: str, prompt: Sequence[int], pictures: list[Image.Image], max_tokens: int
) -> list[int]:
    """Greedy tokens of transformers' `generate`."""
    ids = torch.tensor([prompt])
    eyes = SEES[case]
    model = getattr(model, "adapted", (model,))[0] if pictures else model
    inputs = eyes.inputs(eyes.processor, pictures) if pictures else {}
    inputs |= eyes.types(ids)
    if "mm_token_type_ids" in inputs:
        model.model.rope_deltas = None  # of the call before
    return greedy_tokens(model, ids, max_tokens, inputs)


def expected_hidden(model: Any, case: str, prompt: Sequence[int], pictures: list[Image.Image]) -> torch.Tensor:
    """The hidden states (tokens, size) that transformers' model has behind its last norm."""
    ids = torch.tensor([prompt])
    if case == "llama4":
        return _hidden_of_llama4(model, ids, pictures)
    eyes = SEES[case]
    inputs = eyes.inputs(eyes.processor, pictures) if pictures else {}
    inputs |= eyes.types(ids)
    if "mm_token_type_ids" in inputs:
        model.model.rope_deltas = None  # of the call before
    with torch.inference_mode():
        hidden: torch.Tensor = model.model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)[0]
    return hidden[0]


@torch.inference_mode()
def _hidden_of_llama4(model: Any, ids: torch.Tensor, pictures: list[Image.Image]) -> torch.Tensor:
    """The same of the model whose class has no part without a head."""
    eyes, hidden = SEES["llama4"], list[torch.Tensor]()
    inputs = eyes.inputs(eyes.processor, pictures) if pictures else {}
    hook = model.language_model.model.norm.register_forward_hook(lambda _, __, out: hidden.append(out[0]))
    try:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)
    finally:
        hook.remove()
    return hidden[0]
