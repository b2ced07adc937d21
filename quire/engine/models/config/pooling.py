"""Reads from a model's files which pooling tasks it can do, and how: a PoolerSpec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from quire.engine.client.json_file import read_json
from quire.engine.client.pooling_params import PoolingTask, PoolingType
from quire.engine.models.config.pooler_settings import PoolerSettings, read_pooler_settings
from quire.engine.models.config.sentence_transformers import Modules, read_modules
from quire.engine.models.errors import BrokenFolder, UnknownArchitecture, UnsupportedModel
from quire.engine.models.specs.decoder import DecoderSpec, EncoderSpec, TransformerSpec
from quire.engine.models.specs.dual_encoder import DualEncoderSpec
from quire.engine.models.specs.pooler import (
    Dense,
    HeadReaders,
    HeadStep,
    LabelActivation,
    PoolerSpec,
    ScoreMethod,
    SparseHead,
)

TaskOption = Literal["auto", "generate", "embed", "classify", "score", "token_embed", "token_classify"]
_EMBED: tuple[PoolingTask, ...] = ("embed", "token_embed")
# Where the config of a classifier says which hidden state it reads; "late": all, and it averages their logits.
_CLASSIFIER_POOLING: dict[str, PoolingType] = {"cls": "cls", "bos": "cls", "mean": "mean", "late": "mean"}
_REWARD = ("ForRewardModel", "ForProcessRewardModel")
_LABELS_CLASS = "AutoModelForSequenceClassification"  # of auto_map
_MAX_LABELS = 10_000
_COLBERT_SIZE = 128


@dataclass(frozen=True)
class PoolingOptions:
    """The settings that concern pooling.

    Attributes:
        task: value of --task.
        convert: value of --convert.
        pooler: value of --pooler-config.
    """

    task: TaskOption = "auto"
    convert: Literal["none", "embed", "classify"] = "none"
    pooler: Mapping[str, Any] = field(default_factory=dict)


def read_pooler(
    folder: Path, config: Any, spec: TransformerSpec | None, options: PoolingOptions, heads: HeadReaders
) -> PoolerSpec | None:
    """How a model pools; None if it generates.

    Args:
        folder: the model's directory.
        config: the model's Hugging Face config.
        spec: the model's architecture; None: transformers runs it, with its head for labels or for masked tokens.
        options: the settings.
        heads: how configs of the model's family describe heads.

    Raises:
        ModelError: the model does not support the settings, or a module is not supported.
    """
    modules = read_modules(folder)
    name = next(iter(getattr(config, "architectures", None) or []), "")
    settings = read_pooler_settings(options.pooler)
    options = _with_task(options, settings)
    text = config.get_text_config() if spec is None else None
    hidden, vocab = (
        (getattr(text, "hidden_size", 0), getattr(text, "vocab_size", 0)) if spec is None else (spec.hidden, spec.vocab)
    )
    if settings.returned_token_ids:
        pooler: PoolerSpec | None = _token_logits(spec, name, settings)
    else:
        pooler = _of_files(folder, config, spec, modules, name, options, heads)
    if pooler is None:
        return None
    pooler = _with_settings(pooler, settings, hidden, vocab)
    if options.task != "auto" and options.task not in pooler.tasks:
        raise UnsupportedModel(f"--task {options.task}: the model's tasks are {', '.join(pooler.tasks)}")
    return pooler


def read_dual_pooler(spec: DualEncoderSpec, options: PoolingOptions) -> PoolerSpec:
    """How an encoder of texts and one of pictures pool.

    Raises:
        ModelError: the model does not support the settings.
    """
    settings = read_pooler_settings(options.pooler)
    options = _with_task(options, settings)
    if options.task not in ("auto", "embed") or options.convert == "classify" or settings.pooling_type is not None:
        raise UnsupportedModel("the model embeds texts and pictures, each with a pooling of its own")
    pooler = PoolerSpec(tasks=("embed",), score_method="cosine", padded_to=spec.max_positions if spec.pads else 0)
    return _with_settings(pooler, settings, spec.size, spec.vocab)


def _with_task(options: PoolingOptions, settings: PoolerSettings) -> PoolingOptions:
    """The options with the task of --pooler-config, which is that of --task."""
    if settings.task is None or settings.task == options.task:
        return options
    if options.task != "auto":
        raise UnsupportedModel(f"--pooler-config: task {settings.task} differs from --task {options.task}")
    return replace(options, task=cast("TaskOption", settings.task))


def _token_logits(spec: TransformerSpec | None, name: str, settings: PoolerSettings) -> PoolerSpec:
    """A language model that rates steps: the logits of a few tokens at each position (Math-Shepherd)."""
    if not isinstance(spec, DecoderSpec) or not ("CausalLM" in name or "LMHead" in name):
        raise _inapplicable("returned_token_ids", "the model has no logits of tokens that Quire can compute")
    tokens = settings.returned_token_ids
    return PoolerSpec(
        tasks=("token_classify",),
        classify=(Dense(size_in=0, size_out=len(tokens), bias=False),),
        labels=tuple(f"token_{token}" for token in tokens),
        label_tokens=tokens,
    )


def _of_files(
    folder: Path,
    config: Any,
    spec: TransformerSpec | None,
    modules: Modules | None,
    name: str,
    options: PoolingOptions,
    heads: HeadReaders,
) -> PoolerSpec | None:
    wants_labels = options.convert == "classify" or options.task in ("classify", "score")
    # vLLM's users name the architecture of a classifier, too, if the labels are tokens of a language model.
    from_tokens = "ForSequenceClassification" in name and getattr(config, "classifier_from_token", None) is not None
    if from_tokens and isinstance(spec, DecoderSpec):
        return _converted_classifier(folder, config)
    if any(kind in name for kind in ("ForSequenceClassification", "ForTokenClassification", *_REWARD)):
        pooler = _classifier(config, name, heads, _labels(config))
        return pooler if spec is not None else _without_head(pooler, name)
    if wants_labels and isinstance(spec, DecoderSpec):
        return _converted_classifier(folder, config)
    if options.task in ("classify", "score") and modules is None and _may_have_labels(config, spec):
        labels = ("LABEL_0",) if options.task == "score" else _labels(config)
        return _classifier(config, "ForSequenceClassification", heads, labels)
    if options.task == "generate":
        return None
    if (modules is not None and modules.splade) or "SpladeSparse" in name:
        return _sparse(config, modules, None if spec is None else heads)
    if modules is not None:
        return _embedder(folder, config, modules)
    if name.startswith("ColModernBert") or "ColBERT" in name or getattr(config, "colbert_dim", None):
        return _late_interaction(_size(folder, config), None)
    if name.endswith("ForRetrieval"):  # ColPali and ColQwen2
        return _late_interaction(config.embedding_dim, None, bias=True)
    is_base = _letters(name) == f"{_letters(config.model_type)}model"
    if isinstance(spec, DecoderSpec) and not (is_base or _wants_embedding(options)):
        return None
    is_causal = isinstance(spec, DecoderSpec) or "CausalLM" in name or "LMHead" in name
    pooling_type: PoolingType = "last" if is_causal else "mean"
    return _with_matryoshka(PoolerSpec(tasks=_EMBED, pooling_type=pooling_type, score_method="cosine"), config)


def _may_have_labels(config: Any, spec: TransformerSpec | None) -> bool:
    """Whether an encoder whose architecture has no labels can have a head for them, as Jina's rerankers v1 do."""
    classes = getattr(config, "auto_map", None)
    return isinstance(spec, EncoderSpec) and isinstance(classes, dict) and _LABELS_CLASS in classes


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _size(folder: Path, config: Any) -> int:
    """Elements of a token's embedding: the config's, or that of the file which ColBERT's training writes, or 128."""
    trained = read_json(folder / "artifact.metadata", BrokenFolder).get("dim")
    size = getattr(config, "colbert_dim", None) or trained or _COLBERT_SIZE
    if type(size) is not int or size < 1:
        raise UnsupportedModel(f"the size of a token's embedding must be a positive integer, not {size!r}")
    return size


def _wants_embedding(options: PoolingOptions) -> bool:
    return options.convert == "embed" or options.task in _EMBED


def _embedder(folder: Path, config: Any, modules: Modules) -> PoolerSpec:
    trained = read_json(folder / "config_sentence_transformers.json", BrokenFolder)
    similarity = trained.get("similarity_fn_name") or "cosine"
    method: ScoreMethod = "dot" if similarity in ("dot", "dot_product") else "cosine"
    steps = tuple(step for step, _ in modules.steps)
    if modules.pooling_type is None:  # PyLate
        last = modules.steps[-1][0] if modules.steps else None
        size = last.size_out if isinstance(last, Dense) else 0
        return _late_interaction(size, modules)
    weights = tuple((f"embed.{i}", inner) for i, (_, inner) in enumerate(modules.steps))
    pooler = PoolerSpec(
        tasks=_EMBED,
        pooling_type=modules.pooling_type,
        embed=steps,
        normalize=modules.normalize,
        score_method=method,
        extra_weights=weights,
    )
    return _with_matryoshka(pooler, config)


def _with_matryoshka(pooler: PoolerSpec, config: Any) -> PoolerSpec:
    dimensions = getattr(config, "matryoshka_dimensions", None) or ()
    if not dimensions and not getattr(config, "is_matryoshka", False):
        return pooler
    if not isinstance(dimensions, list | tuple) or not all(type(size) is int and size > 0 for size in dimensions):
        raise UnsupportedModel("the model's config.json: matryoshka_dimensions must be a list of positive integers")
    return replace(pooler, matryoshka=True, dimensions=tuple(dimensions))


def _late_interaction(size: int, modules: Modules | None, *, bias: bool = False) -> PoolerSpec:
    if modules is None:
        steps: tuple[HeadStep, ...] = (Dense(size_in=0, size_out=size, bias=bias),)
        return PoolerSpec(tasks=("token_embed",), token_embed=steps, score_method="max_sim")
    weights = tuple((f"token_embed.{i}", inner) for i, (_, inner) in enumerate(modules.steps))
    return PoolerSpec(
        tasks=("token_embed",),
        token_embed=tuple(step for step, _ in modules.steps),
        score_method="max_sim",
        extra_weights=weights,
    )


def _sparse(config: Any, modules: Modules | None, heads: HeadReaders | None) -> PoolerSpec:
    """`heads`: those of the family; None: the logits are computed by transformers, not by a head of the pooler."""
    head = SparseHead(dense=None, norm=None, bias=False) if heads is None else _masked_lm_head(config, heads)
    if modules is not None:
        head = replace(head, pooling=modules.sparse_pooling, log_twice=modules.log_twice)
    return PoolerSpec(tasks=("embed",), normalize=False, score_method="dot", sparse_head=head)


def _masked_lm_head(config: Any, heads: HeadReaders) -> SparseHead:
    if heads.masked_lm is None:
        raise UnsupportedModel(f"models of type {config.model_type} have no masked language model's head")
    return replace(heads.masked_lm(config), tied=bool(getattr(config, "tie_word_embeddings", True)))


def _classifier(config: Any, name: str, heads: HeadReaders, labels: tuple[str, ...]) -> PoolerSpec:
    if "ForTokenClassification" in name:
        before = () if heads.token_labels is None else heads.token_labels(config)
        steps: tuple[HeadStep, ...] = (*before, _last(labels, config.hidden_size if before else 0))
        act = _label_act(config, labels)
        return PoolerSpec(tasks=("token_classify",), classify=steps, labels=labels, label_act=act)
    if any(kind in name for kind in _REWARD):
        steps = (Dense(size_in=0, size_out=config.hidden_size, act="relu"), _last(labels, config.hidden_size))
        return PoolerSpec(tasks=("token_classify",), classify=steps, labels=labels, label_act="none")
    encoder_head = heads.labels
    before = () if encoder_head is None else encoder_head(config)
    is_score = len(labels) == 1
    named = getattr(config, "classifier_pooling", None) or "cls"
    if encoder_head is not None and named not in _CLASSIFIER_POOLING:
        raise UnsupportedModel(f"classifier_pooling {named!r} is not supported: {', '.join(_CLASSIFIER_POOLING)}")
    return PoolerSpec(
        tasks=("score", "classify") if is_score else ("classify",),
        pooling_type="last" if encoder_head is None else _CLASSIFIER_POOLING[named],
        classify_tokens=encoder_head is not None and named == "late",
        classify=(*before, _last(labels, config.hidden_size if before else 0, bias=encoder_head is not None)),
        labels=labels,
        label_act=_label_act(config, labels),
        score_method="cross_encoder" if is_score else None,
    )


def _without_head(pooler: PoolerSpec, name: str) -> PoolerSpec:
    """The pooler of a classifier whose logits transformers computes: one row for each text, or for each token."""
    if any(kind in name for kind in _REWARD):
        raise UnsupportedModel(f"{name} is not supported: transformers has no class of that name")
    return replace(pooler, classify=(), pooling_type="last", classify_tokens=False)


def _last(labels: tuple[str, ...], size_in: int = 0, *, bias: bool = True) -> Dense:
    return Dense(size_in=size_in, size_out=len(labels), bias=bias)


def _converted_classifier(folder: Path, config: Any) -> PoolerSpec:
    """A causal language model whose answer's first token is the label (Qwen3-Reranker: no or yes)."""
    words = getattr(config, "classifier_from_token", None) or ["no", "yes"]
    if not isinstance(words, list) or len(words) not in (1, 2) or not all(isinstance(word, str) for word in words):
        raise UnsupportedModel('classifier_from_token must be a list of one or two tokens, such as ["no", "yes"]')
    return PoolerSpec(
        tasks=("score", "classify"),
        pooling_type="last",
        classify=(Dense(size_in=0, size_out=len(words), bias=False),),
        labels=("LABEL_0",),
        label_act="sigmoid",
        score_method="cross_encoder",
        label_tokens=_token_ids(folder, words),
        subtract_labels=len(words) == 2,
    )


def _token_ids(folder: Path, words: list[str]) -> tuple[int, ...]:
    from tokenizers import Tokenizer  # noqa: PLC0415 for few models

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = []
    for word in words:
        token_id = tokenizer.token_to_id(word)
        if token_id is None:
            raise UnsupportedModel(f"classifier_from_token: {word!r} is not a token of the model's vocabulary")
        ids.append(int(token_id))
    return tuple(ids)


def _labels(config: Any) -> tuple[str, ...]:
    names = getattr(config, "id2label", None) or {0: "LABEL_0"}
    try:
        count = len(names)
        labels = tuple(str(names[index]) for index in range(count))
    except (KeyError, TypeError) as error:
        raise UnsupportedModel("the model's config.json: id2label must number the labels from 0 on") from error
    if not 1 <= count <= _MAX_LABELS:
        raise UnknownArchitecture(f"a classifier with {count} labels is not supported")
    return labels


def _label_act(config: Any, labels: tuple[str, ...]) -> LabelActivation:
    """The activation of the labels: sentence-transformers' setting, then that of transformers' problem type."""
    section = getattr(config, "sentence_transformers", None)
    named = section.get("activation_fn") if isinstance(section, dict) else None
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    if named:
        known: dict[str, LabelActivation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
        if (name := str(named).rpartition(".")[2]) not in known:
            raise UnsupportedModel(f"the activation {named} of labels is not supported; supported: {', '.join(known)}")
        return known[name]
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        return "none"
    return "sigmoid" if problem == "multi_label_classification" or len(labels) == 1 else "softmax"


def _with_settings(pooler: PoolerSpec, settings: PoolerSettings, hidden: int, vocab: int) -> PoolerSpec:
    """The settings in place of the model's.

    Raises:
        UnsupportedModel: one does not apply to the model.
    """
    _check_applies(pooler, settings, hidden, vocab)
    if settings.pooling_type is not None and pooler.labels and not pooler.classify:
        raise _inapplicable("pooling_type", "transformers runs the model with a pooling of its own")
    if (activates := settings.use_activation) is not None:
        pooler = replace(pooler, normalize=activates, label_act=pooler.label_act if activates else "none")
    return replace(
        pooler,
        pooling_type=settings.pooling_type or pooler.pooling_type,
        default_dimensions=settings.dimensions,
        chunked=settings.chunked,
        max_embed_len=settings.max_embed_len,
        logit_mean=settings.logit_mean or 0.0,
        logit_sigma=settings.logit_sigma or 1.0,
        step_tag=settings.step_tag_id,
    )


def _check_applies(pooler: PoolerSpec, settings: PoolerSettings, hidden: int, vocab: int) -> None:
    embeds = "embed" in pooler.tasks and pooler.sparse_head is None
    for name, value in (("enable_chunked_processing", settings.chunked), ("max_embed_len", settings.max_embed_len)):
        if value and not embeds:
            raise _inapplicable(name, "the model has no dense embeddings of texts")
    for name in ("logit_mean", "logit_sigma"):
        if getattr(settings, name) is not None and not pooler.labels:
            raise _inapplicable(name, "the model has no labels")
    if settings.steps_only and not any(task.startswith("token_") for task in pooler.tasks):
        raise _inapplicable("tok_pooling_type STEP", "the model has no results of tokens")
    if (size := settings.dimensions) is not None:
        if not pooler.matryoshka:
            raise _inapplicable("dimensions", "the model has no Matryoshka embeddings")
        if pooler.dimensions and size not in pooler.dimensions:
            raise _inapplicable("dimensions", f"the model's are {', '.join(map(str, pooler.dimensions))}")
        if size > (most := next((step.size_out for step in reversed(pooler.embed) if isinstance(step, Dense)), hidden)):
            raise _inapplicable("dimensions", f"the model's embeddings have {most} values")
    for token in (settings.step_tag_id, *settings.returned_token_ids):
        if token is not None and token >= vocab:
            raise UnsupportedModel(f"--pooler-config: token id {token} is not in the vocabulary of {vocab}")


def _inapplicable(name: str, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"--pooler-config: {name} does not apply: {reason}")
