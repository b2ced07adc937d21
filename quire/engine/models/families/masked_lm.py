"""Heads of masked language models, from which sparse embeddings are made (SPLADE)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.specs.decoder import LayerNormSpec
from quire.engine.models.specs.pooler import Dense, SparseHead


def masked_lm_head(config: Any) -> SparseHead:
    """The head of a config's masked language model.

    Raises:
        UnsupportedModel: transformers has no such head for this kind of model.
    """
    if (head := _HEADS.get(config.model_type)) is None:
        raise UnsupportedModel(f"models of type {config.model_type} have no masked language model's head")
    return replace(head(config), tied=bool(getattr(config, "tie_word_embeddings", True)))


def _bert(config: Any) -> SparseHead:
    return _head(config.hidden_size, config.hidden_act, config.layer_norm_eps)


def _roberta(config: Any) -> SparseHead:
    """transformers' heads of RoBERTa's relatives do not read `hidden_act`."""
    return _head(config.hidden_size, "gelu", config.layer_norm_eps)


def _distilbert(config: Any) -> SparseHead:
    return _head(config.dim, config.activation, 1e-12)


def _electra(config: Any) -> SparseHead:
    return _head(config.embedding_size, "gelu", config.layer_norm_eps)


def _embedding_sized(config: Any) -> SparseHead:
    size = getattr(config, "embedding_size", None) or config.hidden_size
    return _head(size, config.hidden_act, config.layer_norm_eps)


def _modernbert(config: Any) -> SparseHead:
    dense = Dense(size_in=0, size_out=config.hidden_size, act=config.classifier_activation, bias=config.classifier_bias)
    norm = LayerNormSpec(eps=config.norm_eps, bias=config.norm_bias)
    return SparseHead(dense=dense, norm=norm, bias=config.decoder_bias)


def _eurobert(config: Any) -> SparseHead:
    return SparseHead(dense=None, norm=None, bias=config.mlp_bias)


def _head(size: int, act: str, eps: float) -> SparseHead:
    return SparseHead(dense=Dense(size_in=0, size_out=size, act=act), norm=LayerNormSpec(eps=eps), bias=True)


_HEADS: dict[str, Callable[[Any], SparseHead]] = {
    **dict.fromkeys(("bert", "ernie", "nomic_bert"), _bert),
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert", "mpnet", "gte", "data2vec-text", "xlm-roberta-xl"), _roberta
    ),
    "jina_embeddings_v3": _roberta,
    "albert": _embedding_sized,
    "deberta-v2": _embedding_sized,
    "distilbert": _distilbert,
    "electra": _electra,
    "eurobert": _eurobert,
    "modernbert": _modernbert,
}
