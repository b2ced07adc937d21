"""Model families of a package outside of Quire: Llama under other types, with names and a layer of their own."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from quire.engine.models.families.llama import llama
from quire.engine.models.family import Family
from quire.engine.models.specs.cache import CacheShape, FullCache
from quire.engine.models.specs.decoder import Attention, DecoderSpec, GroupedQueryAttention
from quire.engine.models.specs.rope import Rope
from quire.engine.models.specs.tensor_names import KIND, WeightNames


@dataclass(frozen=True, kw_only=True)
class SeparateAttention(Attention):
    """Attention whose queries, keys and values have projections of their own; Quire's have one for all of them."""

    description: ClassVar = "separate attention"
    layer: ClassVar = "tests.support.outside_layer:SeparateAttentionLayer"
    positive: ClassVar = ("heads", "kv_heads", "head_dim", "scale")

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope

    @property
    def cache(self) -> FullCache:
        """Keys and values of all tokens."""
        return FullCache()

    @override
    def cache_shape(self, alignment: int = 1) -> CacheShape:
        return CacheShape(self.kv_heads, self.head_dim, self.head_dim, alignment=alignment)


_BLOCK = r"blocks\.(?P<layer>\d+)\."
_NAMES = WeightNames(
    (
        (r"tokens\.weight", "embed.weight"),
        (r"output\.weight", "head.weight"),
        (r"last_norm\.weight", "norm.weight"),
        (_BLOCK + r"attention\.(?P<part>q|k|v)" + KIND, "attn.qkv.{kind}"),
        (_BLOCK + r"attention\.o" + KIND, "attn.out.{kind}"),
        (_BLOCK + r"attention_norm\.weight", "attn_norm.weight"),
        (_BLOCK + r"mlp\.(?P<part>gate|up)" + KIND, "ffn.gate_up.{kind}"),
        (_BLOCK + r"mlp\.down" + KIND, "ffn.down.{kind}"),
        (_BLOCK + r"mlp_norm\.weight", "ffn_norm.weight"),
    ),
    prefixes=r"outside\.",
)
_SEPARATE_NAMES = replace(
    _NAMES,
    rules=(*((_BLOCK + rf"attention\.{part}" + KIND, f"attn.{part}.{{kind}}") for part in "qkv"), *_NAMES.rules),
)
_FIELDS = {"width": "hidden_size", "depth": "num_hidden_layers", "heads": "num_attention_heads"}  # by ours
_TENSORS = {
    "model.layers": "outside.blocks",
    "model.embed_tokens": "outside.tokens",
    "model.norm": "outside.last_norm",
    "lm_head": "output",
    "self_attn": "attention",
    "_proj": "",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}


def _config(raw: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    config = LlamaConfig(**{_FIELDS.get(name, name): value for name, value in raw.items() if name != "model_type"})
    config.model_type = raw["model_type"]
    return config


def _separate(config: Any) -> DecoderSpec:
    spec = llama(config)
    attn = spec.layers[0].attn
    assert isinstance(attn, GroupedQueryAttention)
    assert attn.rope is not None
    separate = SeparateAttention(
        heads=attn.heads, kv_heads=attn.kv_heads, head_dim=attn.head_dim, scale=attn.scale, rope=attn.rope
    )
    return replace(spec, layers=tuple(replace(layer, attn=separate) for layer in spec.layers))


OUTSIDE = Family(name="outside", config_types=("outside",), spec=llama, tensors=_NAMES, config=_config)
SEPARATE = Family(name="separate", config_types=("separate",), spec=_separate, tensors=_SEPARATE_NAMES, config=_config)
TAKES_LLAMA = Family(name="my-llama", config_types=("my-llama", "llama"), spec=llama, tensors=_NAMES)
TAKES_NAME = Family(name="llama", config_types=("llama-5",), spec=llama, tensors=_NAMES)
CHANGES_LLAMA = Family(
    name="my-llama", config_types=("my-llama",), spec=llama, tensors=_NAMES, published={"llama": lambda raw: {**raw}}
)
NOT_A_FAMILY = {"name": "outside"}


def install(folder: Path, **entries: str) -> None:
    """Write what pip writes for a distribution with entry points, which are names and objects."""
    info = folder / "outside_models-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-models\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[quire.families]", *lines, ""]))


def save_outside(folder: Path, model_type: str = "outside") -> Any:
    """Write a folder of a family; returns the model that transformers would run for it, if it knew the family."""
    from safetensors.torch import load_file, save_file  # the family itself is read without torch

    from tests.support.models import make_model

    model = make_model("llama")
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(path).items():
        outside = name
        for original, renaming in _TENSORS.items():
            outside = outside.replace(original, renaming)
        renamed[outside] = tensor
    save_file(renamed, path, metadata={"format": "pt"})
    names = {original: renaming for renaming, original in _FIELDS.items()}
    written = json.loads((folder / "config.json").read_text())
    config = {names.get(name, name): value for name, value in written.items()}
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": model_type, "architectures": ["OutsideForCausalLM"]})
    )
    return model
