"""Model folders without weights, and random weights on the GPU in place of a checkpoint's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from benchmarks.hybrid_shapes import SHAPES as HYBRIDS
from quire.engine.models import loader
from quire.engine.models.checkpoint.checkpoint import Progress, WeightTaker
from quire.engine.models.checkpoint.safetensors import PlainName
from quire.kernels.linear import Quantization

_STD = 0.02
DEVICE = "cuda"
GENERATED = 64  # tokens of each request where prefill and decode are measured together
_LLAMA = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 40960}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True, "rope_theta": 1e6,
    },
    "llama-3-8b": {
        **_LLAMA, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "tie_word_embeddings": False, "rope_theta": 5e5,
    },
    "qwen3-30b-a3b": {
        **_LLAMA, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
        "rope_theta": 1e6, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "qwen3.5-0.8b": {  # the gated delta rule
        **_LLAMA, **HYBRIDS["qwen3.5-0.8b"], "architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": True,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6, "eos_token_id": None,
    },
    "granite-4-h-350m": {  # Mamba-2
        **_LLAMA, **HYBRIDS["granite-4-h-350m"], "architectures": ["GraniteMoeHybridForCausalLM"],
        "tie_word_embeddings": True, "eos_token_id": None,
    },
}  # fmt: skip


def write_folder(shape: str, folder: Path) -> Path:
    """Write the config.json of a shape to a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **SHAPES[shape]}))
    return folder


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a checkpoint, as in files on the Hugging Face Hub."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer(config, index).items()}
    return shapes


def has_states(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer has a state of a fixed size instead of keys and values."""
    return bool(config.get("layer_types")) and config["layer_types"][layer] in ("linear_attention", "mamba")


def _layer(config: dict[str, Any], index: int) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    mixer = _attention(config)
    if has_states(config, index):
        mixer = _mamba(config) if "mamba_n_heads" in config else _delta_net(config)
    norms = {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return {**norms, **mixer, **_feed_forward(config)}


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", hidden // heads)
    is_gated = config["model_type"] == "qwen3_5_text"  # by rows of the queries' projection
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (heads * dim * (2 if is_gated else 1), hidden),
        "self_attn.k_proj.weight": (kv_heads * dim, hidden),
        "self_attn.v_proj.weight": (kv_heads * dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * dim),
    }
    if config["model_type"].startswith("qwen3"):
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return shapes


def _mamba(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["mamba_n_heads"]
    inner = heads * config["mamba_d_head"]
    channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    return {
        "mamba.in_proj.weight": (inner + channels + heads, hidden),
        "mamba.conv1d.weight": (channels, 1, config["mamba_d_conv"]),
        "mamba.conv1d.bias": (channels,),
        **{f"mamba.{name}": (heads,) for name in ("A_log", "D", "dt_bias")},
        "mamba.norm.weight": (inner,),
        "mamba.out_proj.weight": (hidden, inner),
    }


def _delta_net(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, dim = config["hidden_size"], config["linear_num_value_heads"], config["linear_value_head_dim"]
    inner = heads * dim
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + inner
    return {
        "linear_attn.in_proj_qkv.weight": (channels, hidden),
        "linear_attn.in_proj_z.weight": (inner, hidden),
        **{f"linear_attn.in_proj_{name}.weight": (heads, hidden) for name in "ab"},
        "linear_attn.conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
        **{f"linear_attn.{name}": (heads,) for name in ("A_log", "dt_bias")},
        "linear_attn.norm.weight": (dim,),
        "linear_attn.out_proj.weight": (hidden, inner),
    }


def _feed_forward(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, experts = config["hidden_size"], config.get("num_experts", 0)
    if (shared := config.get("shared_intermediate_size")) is not None:  # Granite without experts
        return {
            "shared_mlp.input_linear.weight": (2 * shared, hidden),
            "shared_mlp.output_linear.weight": (hidden, shared),
        }
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts, hidden)} if experts else {}
    size = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    for mlp in [f"mlp.experts.{expert}" for expert in range(experts)] or ["mlp"]:
        shapes |= {f"{mlp}.gate_proj.weight": (size, hidden), f"{mlp}.up_proj.weight": (size, hidden)}
        shapes[f"{mlp}.down_proj.weight"] = (hidden, size)
    return shapes


class RandomCheckpoint:
    """Stand in for a `Checkpoint`: random tensors that the GPU makes."""

    def __init__(
        self, folder: Path, quantization: Mapping[str, Any] | None = None, plain_name: PlainName = str
    ) -> None:
        self._shapes = tensor_shapes(json.loads((folder / "config.json").read_text()))
        self._generator = torch.Generator(DEVICE).manual_seed(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: there are no files."""

    @property
    def num_tensors(self) -> int:
        """Number of tensors."""
        return len(self._shapes)

    @property
    def total_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(torch.Size(shape).numel() for shape in self._shapes.values()) * torch.bfloat16.itemsize

    def dtype(self) -> torch.dtype:
        """The dtype of the tensors."""
        return torch.bfloat16

    def names(self) -> Set[str]:
        """Names of all tensors."""
        return self._shapes.keys()

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return torch.bfloat16

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors have the same values."""
        return False

    def requantized(self, quantization: Quantization) -> Quantization:
        """The quantization of the tensors: the one asked for."""
        return quantization

    def tensors(
        self, dtype: torch.dtype, progress: Progress, taker: WeightTaker | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors; norms are 1."""
        for name, shape in self._shapes.items():
            tensor = torch.ones(shape, dtype=torch.bfloat16, device=DEVICE)
            if len(shape) > 1:
                tensor.normal_(std=_STD, generator=self._generator)
            yield name, tensor
            progress(tensor.nbytes)


def use_random_weights() -> None:
    """Load random weights in this process, whatever a folder has."""
    loader.checkpoint_in = RandomCheckpoint  # type: ignore[assignment,attr-defined]
