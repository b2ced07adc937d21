"""Builds the modules of transformers that encode the pictures of a composite model, with kernels of Quire."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel
from transformers.activations import ACT2FN
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from typing_extensions import override

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.family import Tower
from quire.engine.models.layers.linear import Linear, LoRARows
from quire.engine.models.layers.norm import LayerNorm, RMSNorm
from quire.kernels.activation import ACTIVATIONS, kernel_activation
from quire.kernels.add_scaled import add_scaled
from quire.kernels.linear import Quantization
from quire.kernels.projected_heads import CosSin, ProjectedHeads
from quire.kernels.qk_norm_rope import qk_norm_rope
from quire.kernels.varlen_attention import EncoderAttentionParams, varlen_attention

# Names of the attention, for transformers. Models are built under the first; under the second, which has "flash" in it,
# they say where sequences lie in one that is packed, in place of a mask, or of a call for each of them.
_NAME = "quire_tower"
_PACKED_NAME = "quire_flash_tower"
# Names of the activations that kernels compute, by the class that transformers has for them.
_ACT_NAMES = {type(ACT2FN[name]): name for name in ACTIVATIONS if name in ACT2FN and kernel_activation(name)}
# Names of transformers' layers that are norm, attention, norm and feed-forward, each pair with a residual.
_PRE_NORM_LAYERS = frozenset(
    {
        "CLIPEncoderLayer",
        "Idefics3EncoderLayer",
        "Phi4MultimodalVisionEncoderLayer",
        "SiglipEncoderLayer",
        "SmolVLMEncoderLayer",
    }
)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of all tokens of an image, or of a packed sequence, to each other.

    It is transformers' own where a mask hides some of them.

    Args:
        query, key, value: (images, heads, tokens, dim).
        cu_seq_lens_q: where each sequence of the one image begins, and then the number of tokens; None: an image is one
            sequence.

    Returns:
        (images, tokens, heads, dim)
    """
    images, _, tokens, dim = query.shape
    if key.shape != query.shape or not _shows_all(attention_mask) or options.get("is_causal"):
        attended, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return attended, None
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if cu_seq_lens_q is None:
        offsets = torch.arange(0, (images + 1) * tokens, tokens, device=query.device)
    else:
        offsets = cu_seq_lens_q.to(query.device, torch.int64)
    params = EncoderAttentionParams(scale=dim**-0.5 if scaling is None else scaling)
    return varlen_attention(q, k, v, offsets, params).unflatten(0, (images, tokens)), None


def _shows_all(mask: Tensor | None) -> bool:
    """Whether a mask hides nothing: one of zeros that are added, or of booleans that are true."""
    if mask is None:
        return True
    return bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())


for _name in (_NAME, _PACKED_NAME):
    AttentionInterface.register(_name, _attention)
    AttentionMaskInterface.register(_name, sdpa_mask)


class TowerLinear(Linear):
    """A linear layer in the place of torch's, for inputs of any number of dimensions. It is never quantized.

    Attributes:
        act: activation that follows it; None: none.
    """

    is_exact = True
    act: str | None = None

    @override
    def pack_weights(self, quantization: Quantization) -> None:
        super().pack_weights("none")

    @override
    def forward(
        self,
        x: Tensor,
        *,
        act: str | None = None,
        lora: LoRARows | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = super().forward(rows, act=act or self.act, lora=lora, out_dtype=out_dtype, out=out)
        return y.view(*x.shape[:-1], -1)


class TowerLayerNorm(LayerNorm):
    """A layer norm in the place of torch's, for inputs of any number of dimensions."""

    @override
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert residual is None
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


class TowerRMSNorm(RMSNorm):
    """A root mean square norm in the place of transformers', for inputs of any number of dimensions."""

    @override
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert residual is None
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


class RotaryAttention(nn.Module):
    """Attention of a packed sequence with rotary positions, in the place of Qwen-VL's and of those built alike.

    transformers rotates queries and keys with a dozen operators in float32, here it is one kernel.
    """

    def __init__(self, attention: Any) -> None:
        """`attention`: transformers' module, with its linear layers replaced."""
        super().__init__()
        self.qkv, self.proj = attention.qkv, attention.proj
        self.num_heads: int = attention.num_heads
        self._params = EncoderAttentionParams(scale=attention.scaling)

    def forward(
        self, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> Tensor:
        """(tokens, hidden) to (tokens, hidden).

        Args:
            hidden_states: the tokens of all sequences.
            cu_seqlens: where each sequence begins, and then the number of tokens.
            position_embeddings: cosines and sines (tokens, dim), whose second half is as the first.
        """
        cos, sin = (table.float().chunk(2, -1)[0].contiguous() for table in position_embeddings)
        angles = CosSin(cos, sin, interleaved=False)
        projected = ProjectedHeads(self.qkv(hidden_states), self.num_heads, self.num_heads, None, angles)
        q, k, v = qk_norm_rope(projected)
        attended = varlen_attention(q, k, v, cu_seqlens.to(q.device, torch.int64), self._params)
        out: Tensor = self.proj(attended.flatten(1))
        return out


class PreNormLayer(nn.Module):
    """Adds residuals with Quire's kernel, in the place of a `_PRE_NORM_LAYERS`, of whose class it is as well.

    torch's own threads would add them, which compete for the cores with those of the kernels before and after.
    """

    layer_norm1: nn.Module
    layer_norm2: nn.Module
    self_attn: nn.Module
    mlp: nn.Module

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
        """(images, tokens, hidden) to the same shape; see transformers' layers."""
        attended, _ = self.self_attn(
            hidden_states=self.layer_norm1(hidden_states), attention_mask=attention_mask, **options
        )
        hidden_states = add_scaled(hidden_states, attended)
        return add_scaled(hidden_states, self.mlp(self.layer_norm2(hidden_states)))


class PatchConv(nn.Conv2d):
    """A convolution of patches that do not overlap: a product of matrices.

    The channels of a patch lie together in its result, as the layers read them.
    """

    @override
    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or self.groups != 1 or self.dilation != (1, 1) or self.padding not in ("valid", (0, 0)):
            return super().forward(x).contiguous(memory_format=torch.channels_last)
        height, width = self.kernel_size
        rows, columns = x.shape[2] // height, x.shape[3] // width
        patches = x[:, :, : rows * height, : columns * width].unflatten(3, (columns, width))
        patches = patches.unflatten(2, (rows, height)).permute(0, 2, 4, 1, 3, 5).flatten(3)
        return F.linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class PatchConv3d(nn.Conv3d):
    """A convolution of patches of several frames. Of patches as large as its kernel it is a product of matrices."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[2:]) != self.kernel_size:
            return super().forward(x)
        rows = F.linear(x.flatten(1), self.weight.flatten(1), self.bias)
        return rows[:, :, None, None, None]


def empty_tower(config: Any, tower: Tower | None, *, hears: bool = False) -> Any:
    """transformers' model for the config of a checkpoint, on the meta device.

    It is without its language model and other modules that the `tower` does not need; None: it needs all. `hears`: it
    keeps those of `Tower.audio`.

    Raises:
        UnsupportedModel: transformers cannot build it.
    """
    config = config if tower is None else tower.config(config)
    config._attn_implementation = _NAME
    with torch.device("meta"):
        try:
            model = _transformers_model(config)
        except (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError) as error:  # sizes that do not fit
            raise UnsupportedModel(f"the model's config cannot be built: {error}") from error
        model.config._attn_implementation = _PACKED_NAME  # building it would import a library of that name
        deaf = () if tower is None or tower.audio is None or hears else tower.audio.modules
        for name in () if tower is None else (tower.language_model, *tower.unused, *deaf):
            owner, _, attribute = name.rpartition(".")
            delattr(model.get_submodule(owner), attribute)
        for module in [*model.modules()]:
            for name, child in [*module.named_children()]:
                setattr(module, name, _replacement(child, tower))
            _fuse_activation(module)
            _read_buffers(module)
    return model.eval()


def _transformers_model(config: Any) -> Any:
    """transformers' model of a config, or what has its parts without another package that transformers' needs."""
    if config.model_type == "gemma3n":
        from quire.engine.models.fallback.gemma3n import Gemma3nReaders  # noqa: PLC0415 for few models

        return Gemma3nReaders(config)
    return AutoModel.from_config(config)


def _replacement(module: Any, tower: Tower | None) -> Any:
    """Quire's layer in the place of torch's, with parameters of the same names and shapes; or the module itself."""
    if type(module) is nn.Linear:
        return TowerLinear(module.in_features, module.out_features, bias=module.bias is not None)
    if type(module) is nn.LayerNorm and module.weight is not None and len(module.normalized_shape) == 1:
        return TowerLayerNorm(module.normalized_shape[0], module.eps, bias=module.bias is not None)
    if tower is not None and type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return TowerRMSNorm(len(module.weight), module.variance_epsilon)
    if tower is not None and tower.has_rotary_qkv and {name for name, _ in module.named_children()} == {"qkv", "proj"}:
        module.qkv, module.proj = _replacement(module.qkv, tower), _replacement(module.proj, tower)
        return RotaryAttention(module)
    if type(module).__name__ in _PRE_NORM_LAYERS:
        module.__class__ = type(type(module).__name__, (PreNormLayer, type(module)), {})
    if type(module) is nn.Conv2d and module.kernel_size == module.stride:
        module.__class__ = PatchConv
    if type(module) is nn.Conv3d:
        module.__class__ = PatchConv3d
    return module


def _read_buffers(module: nn.Module) -> None:
    """Make parameters of the buffers of numbers that checkpoints have, such as bounds of values (Gemma 4)."""
    for name, buffer in [*module.named_buffers(recurse=False)]:
        if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
            delattr(module, name)
            module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


def _fuse_activation(module: nn.Module) -> None:
    """Let the linear layer of a feed-forward compute the activation that follows it."""
    for linear_name, act_name in (("fc1", "activation_fn"), ("gate_proj", "act_fn")):
        linear, function = getattr(module, linear_name, None), getattr(module, act_name, None)
        act = _ACT_NAMES.get(type(function))
        if isinstance(linear, TowerLinear) and act is not None:
            linear.act = act
            setattr(module, act_name, nn.Identity())
