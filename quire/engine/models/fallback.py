"""Runs any Hugging Face causal LM whose attention goes through transformers' AttentionInterface.

The module is Hugging Face's own; only its attention is replaced by ours, so it takes part in continuous batching like
any other model. Slower than the decoder, but there from a new model's first day.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from quire.engine.models.decoder import CacheShape
from quire.engine.models.errors import UnknownArchitecture, UnsupportedModel, WeightMismatch
from quire.engine.models.layers.step import Attend
from quire.kernels.paged_attention import AttentionParams

_NAME = "quire_paged"
_loading = threading.Lock()  # from_pretrained changes torch's default dtype for the whole process, and back


class _Binding:
    """Leads from an attention module of Hugging Face's to the attention of the step that runs."""

    attend: Attend | None = None
    dtype: torch.dtype | None = None  # that of the KV cache


def _paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Our attention under Hugging Face's signature: query, key and value are (1, heads, tokens, dim)."""
    if attention_mask is not None:
        raise UnsupportedModel("its attention takes a mask of its own")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    dtype = module.quire_binding.dtype  # some modules leave a rope's or a norm's float32 as it is
    q, k, v = (part[0].transpose(0, 1).to(dtype) for part in (query, key, value))
    math = AttentionParams(scale, sliding_window, softcap, s_aux)
    return module.quire_binding.attend(module.layer_idx, q, k, v, math)[None], None


AttentionInterface.register(_NAME, _paged_attention)


class FallbackModel:
    """A Hugging Face module behind the interface of our decoder."""

    def __init__(self, module: Any) -> None:
        """Take over a module's attention.

        Raises:
            UnsupportedModel: its attention cannot be taken over completely.
        """
        self._module = module
        accepted = set(inspect.signature(module.forward).parameters)
        if "position_ids" not in accepted:
            raise UnsupportedModel("its forward takes no position_ids")
        self._keeps_rows = "logits_to_keep" in accepted
        self._binding = _Binding()
        self._binding.dtype = module.dtype
        for part in module.modules():
            if hasattr(part, "layer_idx"):
                part.quire_binding = self._binding
        self.caches: Sequence[CacheShape] = _probe(self, module.config)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor) -> Tensor:
        """Logits (rows, vocab) of some rows of the tokens at positions, both (tokens,)."""
        self._binding.attend = attend
        arguments: dict[str, Any] = {"logits_to_keep": rows} if self._keeps_rows else {}
        out = self._module(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **arguments)
        logits: Tensor = out.logits[0]
        return logits if self._keeps_rows else logits[rows]

    def decode(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `CausalLM`."""
        ends = torch.arange(len(tokens)) if attend.ends is None else attend.ends
        return self.logits(self.forward(tokens, positions, attend, ends))

    def set_context(self, context_len: int) -> None:
        """Ropes that would depend on it are refused."""

    def logits(self, features: Tensor) -> Tensor:
        """As float32; they are logits already."""
        return features.float()


def load_fallback(folder: Path, config: Any, dtype: torch.dtype) -> FallbackModel:
    """Load a folder, whose config was read, with transformers.

    Raises:
        UnknownArchitecture: transformers knows no causal LM of this kind.
        UnsupportedModel: its attention cannot be taken over, or its rope depends on the batch.
        WeightMismatch: the checkpoint does not fit.
    """
    _check_rope(config.get_text_config())
    try:
        with _loading:
            module, report = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=_NAME, local_files_only=True, output_loading_info=True
            )
    except (ValueError, KeyError) as error:
        raise UnknownArchitecture(f"neither Quire nor transformers can run it as a causal LM: {error}") from error
    except RuntimeError as error:  # mis-shaped weights
        raise WeightMismatch(str(error)) from error
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if wrong:
        raise WeightMismatch(f"the checkpoint does not fit the model: {wrong}")
    if not getattr(module, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{type(module).__name__} does not let its attention be replaced")
    return FallbackModel(module.eval())


def _check_rope(config: Any) -> None:
    """Refuse ropes that transformers turns by the batch's largest position: other requests would change the output."""
    params = getattr(config, "rope_parameters", None) or {}
    for part in (params, *(value for value in params.values() if isinstance(value, dict))):
        kind = part.get("rope_type", "default")
        if "dynamic" in kind or kind == "longrope":
            raise UnsupportedModel(
                f"transformers turns its rope, of type {kind!r}, by the largest position in the batch, "
                "so requests would change each other's output"
            )


class _Probe:
    """Stands in for attention in a dry run and notes what each layer wants to cache."""

    stays = False
    ends = None

    def __init__(self) -> None:
        self.shapes: dict[int, CacheShape] = {}
        self.windows: dict[int, int | None] = {}

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        math: AttentionParams,
        *,
        last: bool = False,
        cut: bool = False,
    ) -> Tensor:
        assert v is not None
        assert not last
        assert not cut
        self.shapes[layer] = CacheShape(k.shape[1], k.shape[2], v.shape[2])
        self.windows[layer] = math.window
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])


@torch.inference_mode()
def _probe(model: FallbackModel, config: Any) -> list[CacheShape]:
    probe = _Probe()
    first = torch.zeros(1, dtype=torch.int64)
    model.forward(first, first, probe, first)
    text = config.get_text_config()
    if sorted(probe.shapes) != list(range(text.num_hidden_layers)):
        raise UnsupportedModel("some of its layers are not softmax attention, or do not use transformers' interface")
    for layer, kind in enumerate(getattr(text, "layer_types", None) or ()):
        windowed = kind == "sliding_attention"
        if kind not in ("full_attention", "sliding_attention") or windowed != (probe.windows[layer] is not None):
            raise UnsupportedModel(f"its layer {layer} is of type {kind}, whose mask does not reach us")
    return [probe.shapes[layer] for layer in range(text.num_hidden_layers)]
