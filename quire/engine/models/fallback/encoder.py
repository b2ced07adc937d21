"""Runs any Hugging Face encoder of text with transformers' own code, for models without a spec.

Texts of a step are padded to a batch. A dry run finds out whether padding changes what the model computes; if it does,
only texts of one length run together, or each text alone.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
)
from typing_extensions import override

from quire.engine.models.checkpoint.weights import check_finite
from quire.engine.models.errors import UnknownArchitecture, UnsupportedModel, WeightMismatch
from quire.engine.models.layers.heads import PoolerHeads
from quire.engine.models.layers.inputs import ModelInputs, StepAttention
from quire.engine.models.networks.encoder import TextEncoder
from quire.engine.models.specs.pooler import PoolerSpec

logger = logging.getLogger(__name__)
HeadKind = Literal["none", "masked_lm", "sequence", "tokens"]
_AUTO: dict[HeadKind, Any] = {
    "none": AutoModel,
    "masked_lm": AutoModelForMaskedLM,
    "sequence": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
}
_DESCRIPTIONS: dict[HeadKind, str] = {
    "none": "an encoder",
    "masked_lm": "a masked language model",
    "sequence": "a classifier of texts",
    "tokens": "a classifier of tokens",
}
_loading = threading.Lock()  # from_pretrained changes torch's default dtype for the whole process, and back
_MAX_PADDED = 2  # times the tokens of a batch
_DRY_RUN_LENGTHS = (11, 5, 11, 8)
_TOLERANCE = {torch.float32: 1e-4}  # of the largest value
_LOW_PRECISION_TOLERANCE = 0.1


class Batching(IntEnum):
    """Which texts run together."""

    PADDED = 0
    EQUAL_LENGTHS = 1
    ALONE = 2


class TransformersEncoder(TextEncoder):
    """A Hugging Face module that encodes texts.

    Attributes:
        module: the module.
        batching: which texts of a step run together.
    """

    def __init__(self, module: Any, pooler: PoolerSpec) -> None:
        """Choose how texts run together, on the device of the module.

        Raises:
            UnsupportedModel: transformers cannot run it on texts, or not twice with the same result.
        """
        config = module.config.get_text_config()
        self.module = module
        self._kind = head_kind(pooler)
        self._accepted = set(inspect.signature(module.forward).parameters)
        self._pad = getattr(config, "pad_token_id", None) or 0
        self._hidden_size: int = config.hidden_size
        self._token_types: int = getattr(config, "type_vocab_size", 0) if "token_type_ids" in self._accepted else 0
        self._heads = PoolerHeads(pooler, config.hidden_size, config.vocab_size)
        self.batching = self._choose_batching(config.vocab_size)

    @property
    @override
    def hidden_size(self) -> int:
        return self._hidden_size

    @property
    @override
    def token_types(self) -> int:
        return self._token_types

    @property
    @override
    def pooler_heads(self) -> PoolerHeads:
        return self._heads

    @override
    def set_context(self, context_len: int) -> None:
        """Do nothing: the module computes its own position embeddings."""

    @override
    def encode(self, inputs: ModelInputs, attend: StepAttention) -> Sequence[Tensor]:
        """What the module computes for each text: hidden states (tokens, hidden), or logits.

        Logits of labels are (1, labels) or (tokens, labels); those of a masked language model (tokens, vocab). `attend`
        is not read: the module has its own attention.
        """
        assert inputs.cu_seqlens is not None
        lengths = inputs.cu_seqlens.diff().tolist()
        texts = inputs.token_ids.split(lengths)
        types = None if inputs.type_ids is None else inputs.type_ids.split(lengths)
        outputs: list[Tensor] = [texts[0]] * len(texts)
        for group in _groups(lengths, self.batching):
            computed = self._run([texts[i] for i in group], None if types is None else [types[i] for i in group])
            for index, output in zip(group, computed, strict=True):
                outputs[index] = output
        return outputs

    def _run(self, texts: list[Tensor], types: list[Tensor] | None = None) -> list[Tensor]:
        """Run a batch."""
        fields = {
            "input_ids": nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=self._pad),
            "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True),
        }
        if types is not None:
            fields["token_type_ids"] = nn.utils.rnn.pad_sequence(types, batch_first=True)
        out = self.module(**{name: value for name, value in fields.items() if name in self._accepted})
        if self._kind == "sequence":
            return list(out.logits[:, None])
        rows = out[0] if self._kind == "none" else out.logits
        return [row[: len(text)] for row, text in zip(rows, texts, strict=True)]

    @torch.inference_mode()
    def _choose_batching(self, vocab: int) -> Batching:
        device = self.module.device
        lengths = _DRY_RUN_LENGTHS
        ids = [(5 + 37 * torch.arange(length) + 11 * index) % vocab for index, length in enumerate(lengths)]
        texts = [text.to(device) for text in ids]
        try:
            alone, again = ([self._run([text])[0] for text in texts] for _ in range(2))
        except Exception as error:  # of the model's own code
            raise UnsupportedModel(f"transformers cannot run it on a text: {type(error).__name__}: {error}") from error
        if not _equal(alone, again):
            raise UnsupportedModel("transformers computes other values for the same text each time")
        return next(batching for batching in Batching if self._is_exact(texts, alone, batching))

    def _is_exact(self, texts: list[Tensor], alone: Sequence[Tensor], batching: Batching) -> bool:
        """Whether texts that run together have the same results as those which run alone."""
        for group in _groups([len(text) for text in texts], batching):
            try:
                together = self._run([texts[i] for i in group])
            except Exception:  # of the model's own code, which may not be able to batch
                logger.debug("texts cannot be batched as %s", batching.name, exc_info=True)
                return False
            if not _equal([alone[i] for i in group], together):
                return False
        return True


def head_kind(pooler: PoolerSpec) -> HeadKind:
    """The head that transformers runs for a pooler."""
    if pooler.sparse_head is not None:
        return "masked_lm"
    if not pooler.labels:
        return "none"
    return "tokens" if "token_classify" in pooler.tasks else "sequence"


def load_transformers_encoder(
    folder: Path, config: Any, pooler: PoolerSpec, dtype: torch.dtype, device: torch.device
) -> TransformersEncoder:
    """Load a folder with transformers, for a config that was read from it.

    Raises:
        UnknownArchitecture: transformers has no such model, or it reads something else than text.
        UnsupportedModel: transformers cannot run it, or it needs a head that only Quire has.
        WeightMismatch: the checkpoint does not match the model.
    """
    kind = head_kind(pooler)
    auto = _auto_class(config, kind)
    if pooler.token_embed and not pooler.extra_weights:
        raise UnsupportedModel(f"late interaction with {config.model_type}, which transformers runs, is not supported")
    try:
        with _loading:
            module, report = auto.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report
            )
    except Exception as error:  # safetensors and the model's own code have more kinds of errors
        raise WeightMismatch(f"transformers cannot load it: {type(error).__name__}: {error}") from error
    _check_report(module, report, kind)
    for name, parameter in module.named_parameters():
        check_finite(name, parameter.data)
    return TransformersEncoder(module.to(device).eval(), pooler)


def position_limit(model: TransformersEncoder) -> int | None:
    """Tokens for which the module has learned positions; None if it has none."""
    rows = [
        len(part.weight) - (0 if part.padding_idx is None else part.padding_idx + 1)
        for name, part in model.module.named_modules()
        if name.endswith("position_embeddings") and hasattr(part, "padding_idx")
    ]
    return min(rows, default=None)


def _auto_class(config: Any, kind: HeadKind) -> Any:
    names = getattr(config, "architectures", None) or []
    only_encoder = kind == "none" and any(name.endswith("EncoderModel") for name in names)
    auto = AutoModelForTextEncoding if only_encoder else _AUTO[kind]
    try:
        classes = auto._model_mapping[type(config)]
    except KeyError:
        raise UnknownArchitecture(
            f"neither Quire nor transformers has {_DESCRIPTIONS[kind]} of model type {config.model_type!r}"
        ) from None
    module = classes[0] if isinstance(classes, tuple) else classes
    if "input_ids" not in inspect.signature(module.forward).parameters:
        raise UnknownArchitecture(f"{module.__name__} does not read text: its forward() does not accept input_ids")
    return auto


def _check_report(module: Any, report: Any, kind: HeadKind) -> None:
    """Check what transformers did not find, and what it did not use.

    A checkpoint may have the weights of a head that is not needed, or lack those of a pooler that is not read.
    """
    missing = [key for key in report["missing_keys"] if kind != "none" or not key.startswith("pooler.")]
    prefix = f"{module.base_model_prefix}."
    parts = {part for part, _ in module.base_model.named_children()} - {"pooler"}
    unused = [key for key in report["unexpected_keys"] if key.removeprefix(prefix).partition(".")[0] in parts]
    if missing:
        raise WeightMismatch(f"weights missing from the checkpoint: {', '.join(sorted(missing)[:5])}")
    if unused:
        raise WeightMismatch(f"unexpected weights in the checkpoint: {', '.join(sorted(unused)[:5])}")
    for key, shape, expected in report["mismatched_keys"]:
        raise WeightMismatch(f"{key} has shape {tuple(shape)}, but the model's is {tuple(expected)}")
    if errors := report.get("error_msgs"):
        raise WeightMismatch(f"transformers cannot load it: {errors}")


def _groups(lengths: Sequence[int], batching: Batching) -> Iterator[list[int]]:
    """The indices of texts that run together, shorter ones first; at most half of a batch is padding."""
    group: list[int] = []
    total = 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        length = lengths[index]
        fits = {
            Batching.PADDED: (len(group) + 1) * length <= _MAX_PADDED * (total + length),
            Batching.EQUAL_LENGTHS: bool(group) and length == lengths[group[0]],
            Batching.ALONE: False,
        }[batching]
        if group and not fits:
            yield group
            group, total = [], 0
        group.append(index)
        total += length
    if group:
        yield group


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether results differ by rounding only."""
    for actual, other in zip(some, others, strict=True):
        tolerance = _TOLERANCE.get(actual.dtype, _LOW_PRECISION_TOLERANCE)
        if actual.shape != other.shape or bool((actual - other).abs().max() > tolerance * actual.abs().max()):
            return False
    return True
