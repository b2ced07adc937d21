"""Runs any Hugging Face causal LM whose attention goes through transformers' AttentionInterface.

The module is Hugging Face's own; only its attention is replaced by paged attention, so it takes part in continuous
batching like any other model. It is slower than `Decoder`, but covers new architectures without any code.
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
from quire.engine.models.errors import ModelError, UnknownArchitecture, UnsupportedModel, WeightMismatch
from quire.engine.models.inputs import Attend, ModelInputs
from quire.engine.models.weights import check_finite
from quire.kernels.paged_attention import AttentionParams

_NAME = "quire_paged"
_loading = threading.Lock()  # from_pretrained changes torch's default dtype for the whole process, and back


class _Binding:
    """Connects the attention modules of a Hugging Face model with the attention of the current step."""

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
    """Paged attention with Hugging Face's signature: query, key and value are (1, heads, tokens, dim)."""
    if attention_mask is not None:
        raise UnsupportedModel("the model's attention passes its own attention mask, which is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    dtype = module.quire_binding.dtype  # some modules leave a rope's or a norm's float32 as it is
    q, k, v = (part[0].transpose(0, 1).to(dtype) for part in (query, key, value))
    params = AttentionParams(scale, sliding_window, softcap, s_aux)
    return module.quire_binding.attend(module.layer_idx, q, k, v, params)[None], None


AttentionInterface.register(_NAME, _paged_attention)


class FallbackHead:
    """Logits of the hidden states of the last run, which the module has computed along with them."""

    def __init__(self, module: Any) -> None:
        self.vocab_size: int = module.config.get_text_config().vocab_size
        self.hidden = self.logits = torch.empty(0)
        module.get_output_embeddings().register_forward_pre_hook(self._record)

    def project(self, hidden: Tensor, *, rows: Tensor | slice | None = None, out: Tensor | None = None) -> Tensor:
        """See `LogitsHead`."""
        assert hidden is self.hidden, "these are not the hidden states of the last run"
        logits = (self.logits if rows is None else self.logits[rows]).float()
        return logits if out is None else out.copy_(logits)

    def adjust(self, projected: Tensor) -> Tensor:
        """Nothing to do: the module has applied scale and softcap."""
        return projected

    def _record(self, _: Any, arguments: tuple[Tensor, ...]) -> None:
        self.hidden = arguments[0][0]  # the input of the output projection


class FallbackModel:
    """A Hugging Face module as a `LanguageModel`."""

    rope_switch = None  # ropes that depend on the sequence's length are refused

    def __init__(self, module: Any) -> None:
        """Replace the attention of a module.

        Raises:
            UnsupportedModel: not all of its attention can be replaced.
        """
        self._module = module
        accepted = set(inspect.signature(module.forward).parameters)
        if "position_ids" not in accepted:
            raise UnsupportedModel("the model's forward() does not accept position_ids")
        self._selects_rows = "logits_to_keep" in accepted
        self._binding = _Binding()
        self._binding.dtype = module.dtype
        for part in module.modules():
            if hasattr(part, "layer_idx"):
                part.quire_binding = self._binding
        self.lm_head = FallbackHead(module)
        self.caches: Sequence[CacheShape] = _probe(self, module.config)

    def run(self, inputs: ModelInputs, attend: Attend, *, last_token_only: bool = False) -> Tensor:
        """See `LanguageModel`."""
        self._binding.attend = attend
        rows = inputs.logits_indices if last_token_only else None
        select = rows is not None and self._selects_rows
        out = self._module(
            input_ids=inputs.token_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            **({"logits_to_keep": rows} if select else {}),
        )
        head = self.lm_head
        head.logits = out.logits[0]
        if rows is not None and not select:
            head.hidden, head.logits = head.hidden[rows], head.logits[rows]
        return head.hidden

    def set_context(self, context_len: int) -> None:
        """Nothing to do."""


def load_fallback(folder: Path, config: Any, dtype: torch.dtype) -> FallbackModel:
    """Load a folder, whose config was read, with transformers.

    Raises:
        UnknownArchitecture: transformers knows no causal LM of this kind.
        UnsupportedModel: its attention cannot be replaced, or its rope depends on the batch.
        WeightMismatch: the checkpoint does not match the model.
    """
    _check_rope(config.get_text_config())
    try:
        with _loading:
            module, report = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=_NAME, local_files_only=True, output_loading_info=True
            )
    except (ValueError, KeyError) as error:
        raise UnknownArchitecture(
            f"neither Quire nor transformers can run this model as a causal LM: {error}"
        ) from error
    except Exception as error:  # wrong shapes; safetensors and the model's own code have more kinds of errors
        raise WeightMismatch(f"transformers cannot load the model: {type(error).__name__}: {error}") from error
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if wrong:
        raise WeightMismatch(f"the checkpoint does not match the model: {wrong}")
    for name, parameter in module.named_parameters():
        check_finite(name, parameter.data)
    if not getattr(module, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{type(module).__name__} does not support custom attention implementations")
    try:
        return FallbackModel(module.eval())
    except ModelError:
        raise
    except Exception as error:  # of the model's own code, in the dry run
        raise UnsupportedModel(f"a dry run of the model failed: {type(error).__name__}: {error}") from error


def _check_rope(config: Any) -> None:
    """Refuse ropes whose frequencies transformers derives from the batch's largest position.

    Other requests would change the output of a request.
    """
    params = getattr(config, "rope_parameters", None) or {}
    for part in (params, *(value for value in params.values() if isinstance(value, dict))):
        kind = part.get("rope_type", "default")
        if "dynamic" in kind or kind == "longrope":
            raise UnsupportedModel(
                f"rope type {kind!r} is not supported with transformers models: "
                "it depends on the largest position in the batch"
            )


class _Probe:
    """Takes the place of attention in a dry run and records what each layer caches."""

    def __init__(self) -> None:
        self.shapes: dict[int, CacheShape] = {}
        self.windows: dict[int, int | None] = {}

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        params: AttentionParams,
        *,
        last_layer: bool = False,
        last_token_only: bool = False,
    ) -> Tensor:
        assert v is not None
        self.shapes[layer] = CacheShape(k.shape[1], k.shape[2], v.shape[2])
        self.windows[layer] = params.window
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])


@torch.inference_mode()
def _probe(model: FallbackModel, config: Any) -> list[CacheShape]:
    probe = _Probe()
    token = torch.zeros(1, dtype=torch.int64)
    model.run(ModelInputs(token, token), probe)
    text = config.get_text_config()
    if sorted(probe.shapes) != list(range(text.num_hidden_layers)):
        raise UnsupportedModel(
            "some layers of the model are not softmax attention, or do not use transformers' attention interface"
        )
    for layer, kind in enumerate(getattr(text, "layer_types", None) or ()):
        windowed = kind == "sliding_attention"
        if kind not in ("full_attention", "sliding_attention") or windowed != (probe.windows[layer] is not None):
            raise UnsupportedModel(f"layer {layer} of the model has the unsupported type {kind}")
    return [probe.shapes[layer] for layer in range(text.num_hidden_layers)]
