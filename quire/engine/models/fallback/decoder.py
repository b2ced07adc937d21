"""Runs any Hugging Face causal LM whose attention goes through transformers' AttentionInterface.

The module is Hugging Face's own; only its attention is replaced by paged attention, so it takes part in continuous
batching like any other model. It is slower than `Decoder`, but covers new architectures without any code.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from quire.engine.models.checkpoint.weights import check_finite
from quire.engine.models.errors import ModelError, UnsupportedModel, WeightMismatch
from quire.engine.models.fallback.checks import DryRun, check_equal, dry_run_steps, dry_run_tokens, make_mask, window_of
from quire.engine.models.layers.inputs import ModelInputs, StepAttention, StepCrossAttention
from quire.engine.models.specs.cache import CacheGroup, CacheShape, FullCache
from quire.kernels.paged_attention import AttentionParams

_NAME = "quire_paged"
_DRY_RUN = "quire_dry_run"  # the same, with masks to look at
_loading = threading.Lock()  # from_pretrained changes torch's default dtype for the whole process, and back


class _Binding:
    """Connect the attention modules of a Hugging Face model with the attention of the current step.

    Each attention call of a run has a separate cache, as a layer may call attention more than once.

    Attributes:
        dtype: dtype of the KV cache.
        layers: caches of the calls of the current run, in order.
        windows: those of the calls of each run, from the masks that transformers makes: the argument `sliding_window`
            is not passed everywhere. None in the dry run, which finds them out.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.layers: list[int] = []
        self.windows: list[int | None] | None = None
        self._attend: StepAttention | None = None

    def begin(self, attend: StepAttention) -> None:
        """Start a run."""
        self._attend, self.layers = attend, []

    def window(self, mask: Tensor | None, sliding_window: int | None) -> int | None:
        """The window of the next call."""
        if self.windows is not None:
            return self.windows[len(self.layers)]
        return sliding_window if mask is None else window_of(mask, sliding_window)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        assert self._attend is not None
        self.layers.append(layer)
        return self._attend(len(self.layers) - 1, q, k, v, params)


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
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Paged attention with Hugging Face's signature: query, key and value are (1, heads, tokens, dim)."""
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedModel(
            f"{type(module).__name__} is bidirectional, as in encoders; only causal decoders are supported"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    binding: _Binding = module.quire_binding
    dtype = binding.dtype  # some modules leave a rope's or a norm's float32 as it is
    q, k, v = (part[0].transpose(0, 1).to(dtype) for part in (query, key, value))
    params = AttentionParams(scale, binding.window(attention_mask, sliding_window), softcap, s_aux)
    # Some modules take a view of the result, which transformers' own attention returns contiguous.
    return binding.attend(module.layer_idx, q, k, v, params).contiguous()[None], None


AttentionInterface.register(_NAME, _paged_attention)
AttentionInterface.register(_DRY_RUN, _paged_attention)
AttentionMaskInterface.register(_DRY_RUN, make_mask)


class TransformersHead:
    """Logits of the hidden states of the last run, which the module has computed along with them."""

    def __init__(self, module: Any) -> None:
        self.vocab_size: int = module.config.get_text_config().vocab_size
        self.last_hidden = self.last_logits = torch.empty(0)
        module.get_output_embeddings().register_forward_pre_hook(self._record)

    def logits(self, hidden: Tensor, *, rows: Tensor | slice | None = None, out: Tensor | None = None) -> Tensor:
        assert hidden is self.last_hidden, "these are not the hidden states of the last run"
        logits = (self.last_logits if rows is None else self.last_logits[rows]).float()
        return logits if out is None else out.copy_(logits)

    def _record(self, _: Any, arguments: tuple[Tensor, ...]) -> None:
        self.last_hidden = arguments[0][0]  # the input of the output projection


class TransformersModel:
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
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"  # the former since transformers 5.24
        self._binding = _Binding(module.dtype)
        for part in module.modules():
            if hasattr(part, "layer_idx"):
                part.quire_binding = self._binding
        self.lm_head = TransformersHead(module)
        self.caches: Mapping[int, CacheShape] = dict(enumerate(self._dry_run()))

    def run(
        self,
        inputs: ModelInputs,
        attend: StepAttention,
        *,
        last_token_only: bool = False,
        cross: StepCrossAttention | None = None,
    ) -> Tensor:
        """Run the module with `attend` in place of its attention; `cross` is not read, no such model has it."""
        self._binding.begin(attend)
        rows = inputs.logits_indices if last_token_only else None
        select = rows is not None and self._selects_rows
        out = self._module(
            input_ids=inputs.token_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            **({"logits_to_keep": rows} if select else {}),
        )
        head = self.lm_head
        head.last_logits = out.logits[0]
        if rows is not None and not select:
            head.last_hidden, head.last_logits = head.last_hidden[rows], head.last_logits[rows]
        return head.last_hidden

    @torch.inference_mode()
    def _dry_run(self) -> list[CacheShape]:
        """The shape that each call of the attention caches.

        The tokens are computed at once, which finds out the masks, and again in steps, as requests are.
        """
        config, dry_run = self._module.config, DryRun()
        tokens = dry_run_tokens(self.lm_head.vocab_size)
        at_once = self._dry_steps(dry_run, [tokens])
        dry_run.check_layers(self._binding.layers, config.get_text_config())
        self._binding.windows = dry_run.windows
        self._module.set_attn_implementation(_NAME)
        in_steps = self._dry_steps(DryRun(), dry_run_steps(tokens))
        self._module.set_attn_implementation("eager")
        for logits, steps in ((at_once, [tokens]), (in_steps, dry_run_steps(tokens))):
            expected, cache = self._expected(steps)
            dry_run.check_cache(cache)
            check_equal(logits, expected, self._module.dtype)
        self._module.set_attn_implementation(_NAME)
        return dry_run.shapes

    def _dry_steps(self, dry_run: DryRun, steps: Sequence[Tensor]) -> Tensor:
        """Logits (tokens, vocab) with Quire's attention."""
        logits, begin = [], 0
        for step in steps:
            dry_run.begin(len(step))
            last = torch.tensor([len(step) - 1])
            self.run(
                ModelInputs(step, torch.arange(begin, begin + len(step)), last), dry_run, last_token_only=begin > 0
            )
            logits.append(self.lm_head.last_logits)
            begin += len(step)
        return torch.cat(logits)

    def _expected(self, steps: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """Logits (tokens, vocab) with transformers' attention and cache, and the cache; None for a single step.

        Raises:
            UnsupportedModel: transformers cannot run the model.
        """
        logits: list[Tensor] = []
        cache: Any = None
        try:
            for step in steps:
                past = {} if cache is None else {self._cache_name: cache}
                out = self._module(input_ids=step[None], use_cache=len(steps) > 1, **past)
                logits.append(out.logits[0])
                cache = out[self._cache_name] if len(steps) > 1 else None
        except Exception as error:  # of the model's own code
            # RoBERTa and its like compare tokens with it.
            padless = isinstance(error, TypeError) and getattr(self._module.config, "pad_token_id", 0) is None
            hint = ", perhaps as the config has no pad_token_id" if padless else ""
            raise UnsupportedModel(
                f"transformers itself cannot run it{hint}: {type(error).__name__}: {error}"
            ) from error
        return torch.cat(logits), cache

    def cache_groups(self, context_len: int) -> tuple[CacheGroup, ...]:
        """Return one group: all layers keep all tokens."""
        return (CacheGroup(FullCache(), tuple(self.caches)),)

    def set_context(self, context_len: int) -> None:
        """Do nothing: the module computes its own position embeddings."""


def load_transformers_model(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> TransformersModel:
    """Load a folder with transformers, for a config that was read from it and is supported.

    It is checked on the CPU before it moves to `device`.

    Raises:
        UnsupportedModel: its attention cannot be replaced.
        WeightMismatch: the checkpoint does not match the model.
    """
    try:
        with _loading:
            module, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=_DRY_RUN,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # wrong shapes; safetensors and the model's own code have more kinds of errors
        raise WeightMismatch(f"transformers cannot load the model: {type(error).__name__}: {error}") from error
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if wrong:
        raise WeightMismatch(f"the checkpoint does not match the model: {wrong}")
    for name, parameter in module.named_parameters():
        check_finite(name, parameter.data)
    try:
        model = TransformersModel(module.eval())
    except ModelError:
        raise
    except Exception as error:  # of the model's own code, in the dry run
        raise UnsupportedModel(f"a dry run of the model failed: {type(error).__name__}: {error}") from error
    module.to(device)
    return model
