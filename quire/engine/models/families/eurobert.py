"""EuroBERT: Llama with attention in both directions."""

from __future__ import annotations

from typing import Any

from quire.engine.models.config.bidirectional import as_encoder
from quire.engine.models.families.bert import MASKED_LM, with_last_step
from quire.engine.models.families.llama import LLAMA, llama
from quire.engine.models.families.rope_bert import IGNORED
from quire.engine.models.family import Facts, Family
from quire.engine.models.specs.decoder import EncoderSpec
from quire.engine.models.specs.pooler import Dense, HeadReaders, HeadStep, SparseHead
from quire.engine.models.specs.tensor_names import KIND, WeightNames

_HEADS = (
    (r"dense" + KIND, "heads.classify.0.{kind}"),
    (r"classifier" + KIND, "heads.classify.{last}.{kind}"),
)


def eurobert(config: Any) -> EncoderSpec:
    """EuroBERT: Llama with attention in both directions."""
    return as_encoder(llama(config), config)


def _names(_spec: EncoderSpec, facts: Facts) -> WeightNames:
    rules = (*LLAMA.rules, *with_last_step(_HEADS, facts), *MASKED_LM)
    return WeightNames(rules, ignored=f"{LLAMA.ignored}|{IGNORED}")


def _head(config: Any) -> tuple[HeadStep, ...]:
    """EuroBERT's dense layer."""
    return (Dense(size_in=0, size_out=config.hidden_size, act="gelu"),)


def _masked_lm(config: Any) -> SparseHead:
    return SparseHead(dense=None, norm=None, bias=config.mlp_bias)


FAMILIES = (
    Family(
        name="eurobert",
        config_types=("eurobert",),
        kind="encoder",
        spec=eurobert,
        tensors=_names,
        heads=HeadReaders(labels=_head, masked_lm=_masked_lm),
    ),
)
