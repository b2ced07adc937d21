"""PoolerSettings: the value of --pooler-config, with vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from quire.engine.client.pooling_params import PoolingType
from quire.engine.models.config.sentence_transformers import POOLING_NAMES
from quire.engine.models.errors import UnsupportedModel

_TOKEN_TYPES = ("ALL", "STEP")
_TASKS = ("embed", "classify", "token_embed", "token_classify")
_MAX_IDS = 1024  # returned_token_ids
_MAX_INT = (1 << 31) - 1
_NAMES = (
    *("task", "pooling_type", "seq_pooling_type", "tok_pooling_type", "use_activation", "dimensions"),
    *("enable_chunked_processing", "max_embed_len", "logit_mean", "logit_sigma", "step_tag_id", "returned_token_ids"),
    "enable_flash_late_interaction",
)
_REMOVED = {
    "normalize": "use_activation",
    "softmax": "use_activation",
    "activation": "use_activation",
    "logit_bias": "logit_mean",
    "logit_scale": "logit_sigma, its reciprocal",
}


@dataclass(frozen=True, kw_only=True)
class PoolerSettings:
    """Settings in place of the model's own; None: those of the model.

    Attributes:
        task: the model's task.
        pooling_type: how the hidden states of a text are pooled.
        steps_only: results of tokens are those of the tokens `step_tag_id` only.
        use_activation: normalize embeddings; apply the activation of labels.
        dimensions: values of an embedding, for requests that do not say.
        chunked: inputs beyond the context length are embedded in chunks.
        max_embed_len: tokens of the longest input of embeddings.
        logit_mean, logit_sigma: subtracted from logits of labels, and what they are divided by then.
        step_tag_id: see `steps_only`.
        returned_token_ids: tokens of a language model whose logits are the labels of each token.
    """

    task: str | None = None
    pooling_type: PoolingType | None = None
    steps_only: bool = False
    use_activation: bool | None = None
    dimensions: int | None = None
    chunked: bool = False
    max_embed_len: int | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] = ()


def read_pooler_settings(values: Mapping[str, Any]) -> PoolerSettings:
    """Check the value of --pooler-config.

    Raises:
        UnsupportedModel: a name is not known, or a value is not valid.
    """
    for name in values:
        if name in _REMOVED:
            raise _error(f"{name} was removed from vLLM's PoolerConfig; use {_REMOVED[name]}")
        if name not in _NAMES:
            raise _error(f"{name} is not supported; supported are {', '.join(_NAMES)}")
    options = {name: value for name, value in values.items() if value is not None}
    pooling_type, steps_only = _pooling_types(options)
    settings = PoolerSettings(
        task=_one_of(options, "task", _TASKS),
        pooling_type=pooling_type,
        steps_only=steps_only,
        use_activation=_flag(options, "use_activation"),
        dimensions=_integer(options, "dimensions", 1),
        chunked=_flag(options, "enable_chunked_processing") or False,
        max_embed_len=_integer(options, "max_embed_len", 1),
        logit_mean=_number(options, "logit_mean"),
        logit_sigma=_number(options, "logit_sigma"),
        step_tag_id=_integer(options, "step_tag_id", 0),
        returned_token_ids=_token_ids(options),
    )
    _flag(options, "enable_flash_late_interaction")  # chooses one of vLLM's kernels, of which the results are the same
    if settings.logit_sigma == 0:
        raise _error("logit_sigma must not be 0: logits are divided by it")
    if settings.step_tag_id is not None and not steps_only:
        raise _error("step_tag_id needs the tok_pooling_type STEP")
    return settings


def _pooling_types(options: Mapping[str, Any]) -> tuple[PoolingType | None, bool]:
    """The pooling type of texts, and whether results of tokens are those of steps only."""
    both = options.get("pooling_type")
    for name in ("seq_pooling_type", "tok_pooling_type"):
        if both is not None and name in options:
            raise _error(f"pooling_type and {name} cannot both be set")
    known = (*(kind.upper() for kind in get_args(PoolingType)), *_TOKEN_TYPES)
    if both is not None and str(both).upper() not in known and str(both).lower() not in POOLING_NAMES:
        raise _error(f"pooling_type must be one of {', '.join(known)}, not {both!r}")
    is_token_type = str(both).upper() in _TOKEN_TYPES
    tokens = both if is_token_type else options.get("tok_pooling_type", "ALL")
    if str(tokens).upper() not in _TOKEN_TYPES:
        raise _error(f"tok_pooling_type must be one of {', '.join(_TOKEN_TYPES)}, not {tokens!r}")
    texts = None if is_token_type else options.get("seq_pooling_type", both)
    if texts is not None and str(texts).lower() not in POOLING_NAMES:
        raise _error(f"seq_pooling_type must be one of {', '.join(known[: -len(_TOKEN_TYPES)])}, not {texts!r}")
    return None if texts is None else POOLING_NAMES[str(texts).lower()], str(tokens).upper() == "STEP"


def _one_of(options: Mapping[str, Any], name: str, known: tuple[str, ...]) -> str | None:
    value = options.get(name)
    if value is not None and value not in known:
        raise _error(f"{name} must be one of {', '.join(known)}, not {value!r}")
    return value


def _flag(options: Mapping[str, Any], name: str) -> bool | None:
    value = options.get(name)
    if value is not None and not isinstance(value, bool):
        raise _error(f"{name} must be true or false, not {value!r}")
    return value


def _integer(options: Mapping[str, Any], name: str, low: int) -> int | None:
    value = options.get(name)
    if value is not None and (type(value) is not int or not low <= value <= _MAX_INT):
        raise _error(f"{name} must be an integer from {low} to {_MAX_INT}, not {value!r:.100}")
    return value


def _number(options: Mapping[str, Any], name: str) -> float | None:
    value = options.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _error(f"{name} must be a finite number, not {value!r:.100}")
    return float(value)


def _token_ids(options: Mapping[str, Any]) -> tuple[int, ...]:
    value = options.get("returned_token_ids", [])
    valid = isinstance(value, list) and len(value) <= _MAX_IDS
    if not valid or not all(type(token) is int and 0 <= token <= _MAX_INT for token in value):
        raise _error(f"returned_token_ids must be a list of at most {_MAX_IDS} token ids, not {value!r:.100}")
    return tuple(value)


def _error(text: str) -> UnsupportedModel:
    return UnsupportedModel(f"--pooler-config: {text}")
