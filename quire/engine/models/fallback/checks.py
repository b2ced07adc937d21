"""Finds out whether Quire can run a transformers module, before and after it is loaded."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from typing_extensions import override

from quire.engine.models.errors import UnknownArchitecture, UnsupportedModel
from quire.engine.models.layers.inputs import StepAttention
from quire.engine.models.specs.cache import CacheShape
from quire.kernels.paged_attention import AttentionParams, paged_decode, paged_prefill
from quire.kernels.write_pages import write_pages

_TOKENS = 8  # of the dry run
_FAR = 1 << 20  # a position that no window reaches back from to the first one
# Of the norm of a token's logits; either dtype needs a tenth of it.
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_HALF = 0.1


def check_class(config: Any) -> None:
    """Check the class that transformers would run for a config; the model is not loaded.

    Raises:
        UnknownArchitecture: transformers has no causal LM of this kind.
        UnsupportedModel: its attention cannot be replaced, or its rope depends on the batch.
    """
    kind = config.model_type
    try:
        classes = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise UnknownArchitecture(
            f"neither Quire nor transformers can run models of type {kind} as causal language models"
        ) from None
    module = classes[0] if isinstance(classes, tuple) else classes
    if getattr(module, "_is_stateful", False):
        raise UnsupportedModel(
            f"{kind} models are recurrent: their layers keep a state instead of keys and values, which transformers' "
            "code is not run with, and Quire's own decoder cannot run this model"
        )
    if not getattr(module, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"{kind} models are not supported: transformers' {module.__name__} has its own attention code, "
            "which Quire cannot replace"
        )
    if getattr(config, "recurrent_kv_cache_mode", None) == "last_loop":
        raise UnsupportedModel(
            "recurrent_kv_cache_mode 'last_loop' is not supported: its logits depend on how a prompt is divided into "
            "steps; supported is per_loop"
        )
    _check_rope(config.get_text_config())


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


def dry_run_steps(tokens: Tensor) -> Sequence[Tensor]:
    """The tokens of the dry run in steps: half of them, then one at a time."""
    half = _TOKENS // 2
    return [tokens[:half], *(tokens[i : i + 1] for i in range(half, _TOKENS))]


def dry_run_tokens(vocab: int) -> Tensor:
    """(tokens,) int64 of the dry run; rarely a special token."""
    return (3 + 37 * torch.arange(_TOKENS)) % vocab


class _Masks(threading.local):
    """The masks of the dry run in this thread, with their windows."""

    def __init__(self) -> None:
        self.made: list[tuple[Tensor, int | None, bool]] = []  # the last: the window is known


_masks = _Masks()


def make_mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any) -> Tensor:
    """Make a mask (1, 1, q_length, kv_length) in a dry run, as transformers' AttentionMaskInterface requires.

    Raises:
        UnsupportedModel: it is neither causal nor a window of the last tokens.
    """
    mask = _seen(mask_function, torch.arange(q_length)[:, None], torch.arange(kv_length))[None, None]
    try:
        window, known = _window_of(mask_function, _FAR), True
    except IndexError:  # the mask depends on the kinds of the tokens of the dry run, in models that read images, too
        window, known = _window_of(mask_function, q_length - 1), False
    _masks.made.append((mask, window, known))
    return mask


def window_of(mask: Tensor, default: int | None) -> int | None:
    """The window of a mask that `make_mask` has made, or the default if the mask does not cover distant tokens.

    Raises:
        UnsupportedModel: the mask is another one.
    """
    for made, window, known in _masks.made:
        if made.data_ptr() == mask.data_ptr():  # it may have been cut
            return window if known else default
    raise UnsupportedModel("the model's attention uses a custom mask, as sparse attention does; this is not supported")


def _window_of(mask_function: Callable[..., Any], last: int) -> int | None:
    windows = set()
    for query in (last, last - 1):  # two, as the last chunk of chunked attention looks like a window
        keys = torch.arange(last + 1)
        distance, seen = query - keys, _seen(mask_function, torch.tensor(query), keys)
        if bool((seen & (distance < 0)).any()):
            raise UnsupportedModel(
                "the model's attention is bidirectional, as in encoders; only causal decoders are supported"
            )
        count = int(seen.sum())
        if not seen.equal((distance >= 0) & (distance < count)):
            raise UnsupportedModel("the model's attention mask is neither causal nor a sliding window")
        windows.add(None if count > query else count)
    if len(windows) > 1:
        raise UnsupportedModel("the model's attention is in chunks of tokens, which is not supported")
    return windows.pop()


def _seen(mask_function: Callable[..., Any], queries: Tensor, keys: Tensor) -> Tensor:
    zero = torch.tensor(0)
    shape = torch.broadcast_shapes(queries.shape, keys.shape)
    return torch.as_tensor(mask_function(zero, zero, queries, keys)).bool().expand(shape)


class DryRun(StepAttention):
    """Paged attention of one sequence, whose tokens come in any steps; records the cache shape of each call.

    Attributes:
        shapes, windows: of the calls of a step, in order; all steps have the same calls.
    """

    def __init__(self) -> None:
        self.shapes: list[CacheShape] = []
        self.windows: list[int | None] = []
        self._pages: list[tuple[Tensor, Tensor]] = []
        self._length = 0  # tokens of the sequence, with those of the step
        _masks.made.clear()

    def begin(self, tokens: int) -> None:
        """Start a step with the next tokens."""
        self._length += tokens

    @override
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
        """Store keys and values in pages of the call, and attend to them; `layer` is the number of the call."""
        assert v is not None
        if layer == len(self._pages):
            if self._length > len(k):
                raise UnsupportedModel("the number of the model's attention calls depends on the step")
            self.shapes.append(CacheShape(k.shape[1], k.shape[2], v.shape[2]))
            self.windows.append(params.window)
            keys, values = (part.new_zeros(part.shape[1], 1, _TOKENS, part.shape[2]) for part in (k, v))
            self._pages.append((keys, values))
        keys, values = self._pages[layer]
        write_pages(keys, values, torch.arange(self._length - len(k), self._length), k, v)
        table = torch.zeros(1, dtype=torch.int32)
        if len(q) == 1:
            return paged_decode(q, keys, values, table[None], torch.tensor([self._length]), params)
        return paged_prefill(q, keys, values, table, self._length, params)

    def check_layers(self, layers: list[int], config: Any) -> None:
        """Check that every layer is attention that Quire can compute; `layers` are those of the calls.

        Raises:
            UnsupportedModel: one is not.
        """
        calls = Counter(layers)
        if sorted(calls) != list(range(config.num_hidden_layers)):
            raise UnsupportedModel(
                "some layers of the model are not softmax attention, or do not use transformers' attention interface"
            )
        kinds = getattr(config, "layer_types", None) or ()
        for layer, window in zip(layers, self.windows, strict=True):
            kind = kinds[layer] if layer < len(kinds) else None
            windowed = kind == "sliding_attention"
            if kind and (kind not in ("full_attention", "sliding_attention") or windowed != (window is not None)):
                raise UnsupportedModel(f"layer {layer} of the model has the unsupported type {kind}")

    def check_cache(self, cache: Any) -> None:
        """Check that transformers' cache of several steps, if there is one, keeps what the masks show.

        Raises:
            UnsupportedModel: it has a window, but the masks have none.
        """
        if any(getattr(cache, "is_sliding", ())) and all(window is None for window in self.windows):
            raise UnsupportedModel(
                "transformers' cache of the model has a sliding window, but its masks have none: its logits depend on "
                "how a prompt is divided into steps"
            )


def check_equal(logits: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Check logits (tokens, vocab) with Quire's attention against those with transformers' own.

    `dtype`: that of the model.

    Raises:
        UnsupportedModel: those of transformers are not finite, or they differ by more than rounding, which may change
            the experts of a few tokens.
    """
    if not bool(expected.isfinite().all()):
        raise UnsupportedModel("transformers itself computes logits that are not finite numbers")
    error, size = (logits.float() - expected.float()).norm(dim=-1), expected.float().norm(dim=-1)
    close = error <= _TOLERANCE.get(dtype, _TOLERANCE_HALF) * size  # not for NaN
    if bool((~close).float().mean() > 1 / 4):
        raise UnsupportedModel(
            "the model's logits with Quire's attention differ from those with transformers' attention: "
            "it has masks, positions or biases that are not supported"
        )
