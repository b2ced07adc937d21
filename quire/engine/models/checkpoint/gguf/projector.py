"""Configs of models whose part that reads pictures lies in a GGUF file of its own ("mmproj"), beside the text's.

What a file leaves out is said here, as in `architectures`: how pictures are resized, windows, and which tokens stand
for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quire.engine.models.checkpoint.gguf.decoder_config import EMBEDDING
from quire.engine.models.checkpoint.gguf.facts import GgufFacts
from quire.engine.models.errors import BrokenFolder, UnsupportedModel

Config = dict[str, Any]
ARCHITECTURE = "clip"  # of the files
PATCHES = "v.patch_embd.weight"
_BICUBIC, _BILINEAR, _LANCZOS = 3, 2, 1  # Pillow's numbers
_QWEN_AREA = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 128 * 128}  # of Qwen2-VL and Qwen2.5-VL; not in files
_QWEN3_AREA = {"min_pixels": 256 * 256, "max_pixels": 4096 * 4096}
_GLM_AREA = {"min_pixels": 112 * 112, "max_pixels": 112 * 112 * 768}  # of GLM-4.1V
_MERGED, _FRAMES, _WINDOW = 2, 2, 112  # of Qwen-VL and GLM-V
_GEMMA_POOLED = 4  # patches along the edge of a token of Gemma 3
_INTERN_TILES = (1, 12)
NEWLINES = ("v.image_newline", "model.image_newline")  # of LLaVA 1.6, as newer and older files name it
_CLASS, _SECOND_NORM = "v.class_embd", "mm.3.weight"
_MERGER = "mm.patch_merger.weight"  # of Mistral 3
_PIXTRAL_THETA = 10000.0
# Tokens that stand for pictures, the best first; LLaVA's own is in few files, and no text has an unknown token.
_LLAVA_TOKENS = ("<image>", "<|reserved_special_token_0|>", "<unk>")


@dataclass(frozen=True)
class Projector:
    """The part of a model that reads pictures.

    Attributes:
        path: of its file.
        facts: those of its file, whose kind is one of `KINDS`.
        text: those of the file with the language model.
    """

    path: Path
    facts: GgufFacts
    text: GgufFacts

    @property
    def kind(self) -> str:
        """What llama.cpp calls the kind of its projector."""
        return kind_of(self.facts)

    def check_fits(self) -> None:
        """Check that it belongs to the language model.

        Raises:
            UnsupportedModel: it does not.
        """
        accepted, text = KINDS[self.kind].architectures, self.text
        if text.architecture not in accepted:
            raise UnsupportedModel(
                f"{self.facts.file} has a projector of the type {self.kind!r} for models of the architecture "
                f"{' or '.join(accepted)}, but {text.file} is of {text.architecture!r}"
            )
        width = text.integer(".embedding_length")
        if (made := self._width()) != width:
            raise UnsupportedModel(
                f"{self.facts.file} makes embeddings of {made} values, but those of {text.file} have {width}"
            )

    def _width(self) -> int:
        """Values of an embedding. Files of LLaVA's have something else under the key for it."""
        tensor = KINDS[self.kind].output
        return self.facts.integer(".vision.projection_dim") if tensor is None else self.facts.shape(tensor)[0]

    def config(self, text: Config) -> Config:
        """The config of the whole model. `text`: that of the language model.

        Raises:
            UnsupportedModel: the vocabulary has no token that stands for pictures.
            BrokenFolder: a value is missing, or of a wrong kind.
        """
        inner = {name: value for name, value in text.items() if name != "architectures"}
        special = {name: value for name, value in text.items() if name.endswith("_token_id")}
        config = KINDS[self.kind].config(self, inner)
        return {**special, "tie_word_embeddings": text["tie_word_embeddings"], "text_config": inner, **config}

    def preprocessor(self) -> Config:
        """The config of the image processor; raises as `config` does."""
        numbers = {name: self._colors(name) for name in ("image_mean", "image_std")}
        return {**numbers, **KINDS[self.kind].preprocessor(self)}

    def token(self, *texts: str) -> int:
        """The id of the first of some tokens that the vocabulary has."""
        for text in texts:
            if text in self.tokens:
                return self.tokens.index(text)
        raise UnsupportedModel(f"{self.text.file} has no token {texts[0]!r}, which stands for a picture")

    @cached_property
    def tokens(self) -> Sequence[str]:
        """The vocabulary of the language model."""
        return self.text.texts("tokenizer.ggml.tokens")

    def integer(self, key: str, default: int | None = None) -> int:
        """The integer above 0 under a key of the file, or the default if it has none; None: it must have one."""
        value = self.facts.integer(key) if default is None else self.facts.optional_integer(key)
        value = default if value is None else value
        if value is None or value < 1:
            raise BrokenFolder(f"{self.facts.file}: {ARCHITECTURE}{key} must be above 0, not {value}")
        return value

    def layers(self) -> int:
        """Number of the encoder's layers."""
        layers = self.integer(".vision.block_count")
        if layers > len(self.facts.shapes):
            raise BrokenFolder(
                f"{self.facts.file} has {len(self.facts.shapes)} tensors, but its metadata {layers} layers"
            )
        return layers

    def patches(self) -> int:
        """Number of patches along the edge of an image."""
        return self.integer(".vision.image_size") // self.integer(".vision.patch_size")

    def _colors(self, name: str) -> list[float]:
        values = self.facts.sequence(f".vision.{name}")
        if len(values) != 3 or any(type(value) is not float for value in values):
            raise BrokenFolder(f"{self.facts.file}: {ARCHITECTURE}.vision.{name} must have 3 numbers")
        return list(values)


def kind_of(facts: GgufFacts) -> str:
    """What llama.cpp calls the kind of a file's projector; of one that hears only, that of sounds."""
    kinds = (facts.optional_text(key) for key in (".projector_type", ".vision.projector_type", ".audio.projector_type"))
    return next(filter(None, kinds), None) or facts.text(".vision.projector_type")


def _encoder(projector: Projector) -> Config:
    """What the configs of all encoders have."""
    return {
        "hidden_size": projector.integer(".vision.embedding_length"),
        "intermediate_size": projector.integer(".vision.feed_forward_length"),
        "num_hidden_layers": projector.layers(),
        "num_attention_heads": projector.integer(".vision.attention.head_count"),
        "image_size": projector.integer(".vision.image_size"),
        "patch_size": projector.integer(".vision.patch_size"),
        "layer_norm_eps": projector.facts.number(".vision.attention.layer_norm_epsilon"),
    }


def _square(projector: Projector) -> dict[str, int]:
    edge = projector.integer(".vision.image_size")
    return {"height": edge, "width": edge}


def _gemma3(projector: Projector, _: Config) -> Config:
    pooled = projector.integer(".vision.projector.scale_factor", _GEMMA_POOLED)
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **_encoder(projector)},
        "mm_tokens_per_image": (projector.patches() // pooled) ** 2,
        "image_token_index": _soft_token(projector),
        "boi_token_index": projector.token("<start_of_image>"),
        "eoi_token_index": projector.token("<end_of_image>"),
    }


def _soft_token(projector: Projector) -> int:
    """Gemma's token for pictures. Some files end before it: a token that is not used stands for them there."""
    known = projector.tokens[: projector.text.shape(EMBEDDING)[0]]
    unused = [token for token in known if token.startswith("<unused")]
    return projector.token("<image_soft_token>", *unused[-1:])


def _gemma3_preprocessor(projector: Projector) -> Config:
    return {"image_processor_type": "Gemma3ImageProcessor", "resample": _BILINEAR, "size": _square(projector)}


def _idefics3(projector: Projector, _: Config) -> Config:
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "vision_config": {"model_type": "idefics3_vision", **_encoder(projector)},
        "scale_factor": projector.integer(".vision.projector.scale_factor", 2),
        "image_token_id": projector.token("<image>"),
    }


def _idefics3_preprocessor(projector: Projector) -> Config:
    tile = projector.integer(".vision.image_size")
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "resample": _LANCZOS,
        "max_image_size": {"longest_edge": tile},
        "size": {"longest_edge": projector.integer(".vision.preproc_image_size", 4 * tile)},
    }


def _internvl(projector: Projector, _: Config) -> Config:
    shapes, width = projector.facts.shapes, projector.integer(".vision.embedding_length")
    vision = {
        "model_type": "internvl_vision",
        **_encoder(projector),
        "attention_bias": "v.blk.0.attn_q.bias" in shapes,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in shapes,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in shapes else "rms_norm",
    }
    merged = projector.integer(".vision.projector.scale_factor", 2)
    if projector.facts.shape("mm.model.mlp.1.weight")[-1] != width * merged**2:
        raise BrokenFolder(f"{projector.facts.file}: mm.model.mlp.1.weight does not read {merged}x{merged} patches")
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "vision_config": vision,
        "downsample_ratio": 1 / merged,
        "image_token_id": projector.token("<IMG_CONTEXT>"),
    }


def _internvl_preprocessor(projector: Projector) -> Config:
    least, most = _INTERN_TILES
    return {
        "image_processor_type": "GotOcr2ImageProcessor",
        "resample": _BICUBIC,
        "size": _square(projector),
        "crop_to_patches": True,
        "min_patches": projector.integer(".vision.preproc_min_tiles", least),
        "max_patches": projector.integer(".vision.preproc_max_tiles", most),
    }


def _llava(projector: Projector, _: Config) -> Config:
    """LLaVA 1.5 and 1.6 with CLIP or SigLIP. Files have its layers up to the last one that is read."""
    facts = projector.facts
    if _SECOND_NORM in facts.shapes:
        raise UnsupportedModel(
            f"{facts.file} has a projector of the type 'mlp' with norms between its layers, which is not supported"
        )
    config: Config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_config": _llava_tower(projector),
        "vision_feature_layer": _feature_layers(projector),
        "vision_feature_select_strategy": "full" if is_siglip(facts) else "default",
        "image_token_index": projector.token(*_LLAVA_TOKENS),
    }
    if not is_llava_next(facts):
        return config
    return {
        **config,
        "architectures": ["LlavaNextForConditionalGeneration"],
        "model_type": "llava_next",
        "image_grid_pinpoints": _canvases(facts),
    }


def _llava_tower(projector: Projector) -> Config:
    if is_siglip(projector.facts):
        return {
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
            **_encoder(projector),
            "hidden_act": "gelu_pytorch_tanh",
        }
    act = "gelu" if projector.facts.flag(".use_gelu") else "quick_gelu"
    return {"model_type": "clip_vision_model", **_encoder(projector), "hidden_act": act}


def _feature_layers(projector: Projector) -> int | list[int]:
    """The layers whose results are read, counted from the embeddings; -1: the last one alone."""
    layers, read = projector.layers(), list(projector.facts.sequence(".vision.feature_layer"))
    if any(type(layer) is not int or not 0 <= layer <= layers for layer in read):
        raise BrokenFolder(
            f"{projector.facts.file}: clip.vision.feature_layer must have numbers from 0 to {layers}, the layers of "
            f"the file, not {read!r:.40}"
        )
    return -1 if read in ([], [layers]) else read


def is_siglip(facts: GgufFacts) -> bool:
    """Whether the tower of a LLaVA is SigLIP, which has no token for its class."""
    return _CLASS not in facts.shapes


def is_llava_next(facts: GgufFacts) -> bool:
    """Whether pictures are divided, as by LLaVA 1.6."""
    return any(name in facts.shapes for name in NEWLINES) and bool(facts.sequence(".vision.image_grid_pinpoints"))


def _canvases(facts: GgufFacts) -> list[list[int]]:
    """Heights and widths of the canvases that pictures are divided on."""
    edges = list(facts.sequence(".vision.image_grid_pinpoints"))
    if len(edges) % 2 or any(type(edge) is not int for edge in edges):
        raise BrokenFolder(f"{facts.file}: clip.vision.image_grid_pinpoints must have pairs of numbers")
    return [edges[index : index + 2] for index in range(0, len(edges), 2)]


def _llava_preprocessor(projector: Projector) -> Config:
    is_next = is_llava_next(projector.facts)
    if is_siglip(projector.facts) and not is_next:
        return {"image_processor_type": "SiglipImageProcessor", "resample": _BICUBIC, "size": _square(projector)}
    return {
        "image_processor_type": "LlavaNextImageProcessor" if is_next else "CLIPImageProcessor",
        "resample": _BICUBIC,
        "size": {"shortest_edge": projector.integer(".vision.image_size")},
        "do_center_crop": True,
        "crop_size": _square(projector),
        **({"image_grid_pinpoints": _canvases(projector.facts)} if is_next else {}),
    }


def _pixtral(projector: Projector, _: Config) -> Config:
    """Pixtral, and Mistral 3, which merges patches."""
    facts = projector.facts
    vision = {
        "model_type": "pixtral",
        **_encoder(projector),
        "hidden_act": "silu" if facts.flag(".use_silu") else "gelu",
        "rope_parameters": {"rope_type": "default", "rope_theta": _PIXTRAL_THETA},
    }
    for text in ("[IMG_BREAK]", "[IMG_END]"):
        projector.token(text)
    config: Config = {
        "vision_config": vision,
        "vision_feature_layer": -1,
        "multimodal_projector_bias": "mm.1.bias" in facts.shapes,
        "image_token_index": projector.token("[IMG]"),
    }
    if _MERGER in facts.shapes:
        return {
            **config,
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "spatial_merge_size": projector.integer(".vision.spatial_merge_size"),
        }
    return {
        **config,
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_feature_select_strategy": "full",
    }


def _pixtral_preprocessor(projector: Projector) -> Config:
    patch = projector.integer(".vision.patch_size")
    return {
        "image_processor_type": "PixtralImageProcessor",
        "resample": _BICUBIC,
        "size": {"longest_edge": projector.integer(".vision.image_size")},
        "patch_size": {"height": patch, "width": patch},
    }


def _glm4v(projector: Projector, text: Config) -> Config:
    """GLM-4.1V. Its feed-forwards are as wide as its results; the width in the file is that of the layers behind."""
    facts = projector.facts
    _with_sections(projector, text, "glm4v_text")
    patch, places = projector.integer(".vision.patch_size"), facts.shape("v.position_embd.weight")[0]
    vision = {
        "hidden_size": projector.integer(".vision.embedding_length"),
        "intermediate_size": facts.rows("mm.up.weight"),
        "out_hidden_size": facts.rows("mm.model.fc.weight"),
        "image_size": math.isqrt(places) * patch,
        "rms_norm_eps": facts.number(".vision.attention.layer_norm_epsilon"),
        "hidden_act": "gelu" if facts.flag(".use_gelu") else "silu",
    }
    return {
        "architectures": ["Glm4vForConditionalGeneration"],
        "model_type": "glm4v",
        "vision_config": {**_grid(projector), **vision},
        "image_token_id": projector.token("<|image|>"),
        "video_token_id": projector.token("<|video|>"),
        "image_start_token_id": projector.token("<|begin_of_image|>"),
        "image_end_token_id": projector.token("<|end_of_image|>"),
        "video_start_token_id": projector.token("<|begin_of_video|>"),
        "video_end_token_id": projector.token("<|end_of_video|>"),
    }


def _glm4v_preprocessor(projector: Projector) -> Config:
    sizes = {
        "shortest_edge": projector.integer(".vision.image_min_pixels", _GLM_AREA["min_pixels"]),
        "longest_edge": projector.integer(".vision.image_max_pixels", _GLM_AREA["max_pixels"]),
    }
    return {
        "image_processor_type": "Glm4vImageProcessor",
        "resample": _BICUBIC,
        "patch_size": projector.integer(".vision.patch_size"),
        "merge_size": projector.integer(".vision.spatial_merge_size", _MERGED),
        "temporal_patch_size": _FRAMES,
        "size": sizes,
    }


def _paddleocr(projector: Projector, text: Config) -> Config:
    """PaddleOCR-VL. Files have the largest edge of a picture in the place of the tower's."""
    _with_sections(projector, text, "paddleocr_vl_text")
    patch, places = projector.integer(".vision.patch_size"), projector.facts.shape("v.position_embd.weight")[0]
    vision = {
        "model_type": "paddleocr_vl_vision",
        **_encoder(projector),
        "image_size": math.isqrt(places) * patch,
        "spatial_merge_size": projector.integer(".vision.spatial_merge_size", _MERGED),
        "hidden_act": "gelu_pytorch_tanh",
    }
    return {
        "architectures": ["PaddleOCRVLForConditionalGeneration"],
        "model_type": "paddleocr_vl",
        "vision_config": vision,
        "image_token_id": projector.token("<|IMAGE_PLACEHOLDER|>"),
        "video_token_id": projector.token("<|video_pad|>"),
        "vision_start_token_id": projector.token("<|IMAGE_START|>"),
        "vision_end_token_id": projector.token("<|IMAGE_END|>"),
    }


def _paddleocr_preprocessor(projector: Projector) -> Config:
    return {
        "image_processor_type": "PaddleOCRVLImageProcessor",
        "resample": _BICUBIC,
        "patch_size": projector.integer(".vision.patch_size"),
        "merge_size": projector.integer(".vision.spatial_merge_size", _MERGED),
        "temporal_patch_size": 1,
        "min_pixels": projector.integer(".vision.image_min_pixels"),
        "max_pixels": projector.integer(".vision.image_max_pixels"),
    }


def _grid(projector: Projector) -> Config:
    """What the configs of towers have for pictures of any size."""
    return {
        "depth": projector.layers(),
        "num_heads": projector.integer(".vision.attention.head_count"),
        "patch_size": projector.integer(".vision.patch_size"),
        "spatial_merge_size": projector.integer(".vision.spatial_merge_size", _MERGED),
        "temporal_patch_size": _FRAMES,
    }


def _qwen(projector: Projector, kind: str, head: str, vision: Config) -> Config:
    return {
        "architectures": [f"{head}ForConditionalGeneration"],
        "model_type": kind,
        "vision_config": {**_grid(projector), **vision},
        "image_token_id": projector.token("<|image_pad|>"),
        "video_token_id": projector.token("<|video_pad|>"),
        "vision_start_token_id": projector.token("<|vision_start|>"),
        "vision_end_token_id": projector.token("<|vision_end|>"),
    }


def _with_sections(projector: Projector, text: Config, kind: str, **fields: Any) -> None:
    """Make the language model's config one with rotary positions of time, height and width."""
    sections = list(projector.text.sequence(".rope.dimension_sections"))[:3]
    if len(sections) != 3 or any(type(value) is not int for value in sections):
        raise BrokenFolder(
            f"{projector.text.file}: {projector.text.architecture}.rope.dimension_sections must have 3 numbers"
        )
    text["model_type"] = kind
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": sections, **fields}


def _qwen2_vl(projector: Projector, text: Config) -> Config:
    """Qwen2-VL. The width of its feed-forwards is not in files."""
    _with_sections(projector, text, "qwen2_vl_text")
    width = projector.integer(".vision.embedding_length")
    vision = {
        "embed_dim": width,
        "hidden_size": projector.integer(".vision.projection_dim"),
        "mlp_ratio": max(projector.facts.shape("v.blk.0.ffn_up.weight")) // width,
    }
    return _qwen(projector, "qwen2_vl", "Qwen2VL", vision)


def _qwen2_5_vl(projector: Projector, text: Config) -> Config:
    _with_sections(projector, text, "qwen2_5_vl_text")
    period, layers = projector.integer(".vision.n_wa_pattern"), projector.layers()
    vision = {
        "hidden_size": projector.integer(".vision.embedding_length"),
        "intermediate_size": projector.integer(".vision.feed_forward_length"),
        "out_hidden_size": projector.integer(".vision.projection_dim"),
        "window_size": projector.integer(".vision.window_size", _WINDOW),
        "fullatt_block_indexes": [*range(period - 1, layers, period)],
    }
    return _qwen(projector, "qwen2_5_vl", "Qwen2_5_VL", vision)


def _qwen3_vl(projector: Projector, text: Config) -> Config:
    """Qwen3-VL and Qwen 3.5, and those with experts."""
    if text["model_type"].startswith("qwen3_5"):
        return _qwen3_5(projector, text)
    moe = "_moe" if "num_experts" in text else ""
    _with_sections(projector, text, f"qwen3_vl{moe}_text", mrope_interleaved=True)
    vision = {**_qwen3_tower(projector), "deepstack_visual_indexes": deepstack_layers(projector.facts)}
    return _qwen(projector, f"qwen3_vl{moe}", f"Qwen3VL{'Moe' if moe else ''}", vision)


def _qwen3_5(projector: Projector, text: Config) -> Config:
    """Qwen 3.5, and that with experts: the tower of Qwen3-VL, whose values go to the embeddings only."""
    moe = "_moe" if "num_experts" in text else ""
    if levels := deepstack_layers(projector.facts):
        raise UnsupportedModel(
            f"{projector.facts.file}: clip.vision.is_deepstack_layers names {len(levels)} layers, but Qwen 3.5 has none"
        )
    _with_sections(projector, text, f"qwen3_5{moe}_text", mrope_interleaved=True)
    return _qwen(projector, f"qwen3_5{moe}", f"Qwen3_5{'Moe' if moe else ''}", _qwen3_tower(projector))


def _qwen3_tower(projector: Projector) -> Config:
    return {
        "hidden_size": projector.integer(".vision.embedding_length"),
        "intermediate_size": projector.integer(".vision.feed_forward_length"),
        "out_hidden_size": projector.integer(".vision.projection_dim"),
        "num_position_embeddings": projector.facts.shape("v.position_embd.weight")[0],
    }


def deepstack_layers(facts: GgufFacts) -> list[int]:
    """The layers of Qwen3-VL whose values go to the language model's first layers."""
    flags = facts.sequence(".vision.is_deepstack_layers")
    return [index for index, flag in enumerate(flags) if flag]


def _qwen_preprocessor(projector: Projector) -> Config:
    areas = _QWEN3_AREA if _is_qwen3(projector.facts) else _QWEN_AREA
    names = {"min_pixels": ".vision.image_min_pixels", "max_pixels": ".vision.image_max_pixels"}
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "resample": _BICUBIC,
        "patch_size": projector.integer(".vision.patch_size"),
        "merge_size": projector.integer(".vision.spatial_merge_size", _MERGED),
        "temporal_patch_size": _FRAMES,
        **{name: projector.integer(key, areas[name]) for name, key in names.items()},
    }


def _is_qwen3(facts: GgufFacts) -> bool:
    return kind_of(facts) == "qwen3vl_merger"


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of projectors.

    Attributes:
        architectures: those of the language models that it is for.
        config: makes the config of the whole model; given that of the language model, which it may change.
        preprocessor: makes the config of the image processor.
        output: the matrix that makes the embeddings; None: the file has their size in its metadata.
    """

    architectures: tuple[str, ...]
    config: Callable[[Projector, Config], Config]
    preprocessor: Callable[[Projector], Config]
    output: str | None = None


KINDS: Mapping[str, _Kind] = {
    "gemma3": _Kind(("gemma3",), _gemma3, _gemma3_preprocessor),
    "glm4v": _Kind(("glm4",), _glm4v, _glm4v_preprocessor, output="mm.down.weight"),
    "idefics3": _Kind(("llama",), _idefics3, _idefics3_preprocessor),
    "internvl": _Kind(("llama", "qwen2", "qwen3"), _internvl, _internvl_preprocessor),
    "mlp": _Kind(("granite", "llama", "phi3", "qwen2"), _llava, _llava_preprocessor, output="mm.2.weight"),
    "paddleocr": _Kind(("paddleocr",), _paddleocr, _paddleocr_preprocessor, output="mm.2.weight"),
    "pixtral": _Kind(("llama", "mistral3"), _pixtral, _pixtral_preprocessor),
    "qwen2vl_merger": _Kind(("qwen2vl",), _qwen2_vl, _qwen_preprocessor),
    "qwen2.5vl_merger": _Kind(("qwen2vl",), _qwen2_5_vl, _qwen_preprocessor),
    "qwen3vl_merger": _Kind(("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"), _qwen3_vl, _qwen_preprocessor),
}
