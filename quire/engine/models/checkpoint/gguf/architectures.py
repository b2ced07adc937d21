"""Configs of Hugging Face's kind from the metadata of GGUF files, one function for each architecture.

What a file leaves out, since llama.cpp has it in code, is said in them: patterns of sliding windows, scales,
activations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quire.engine.models.checkpoint.gguf.decoder_config import Config, rms_decoder
from quire.engine.models.checkpoint.gguf.decoders import DECODERS
from quire.engine.models.checkpoint.gguf.encoders import ENCODERS, head_for_labels
from quire.engine.models.checkpoint.gguf.facts import GgufFacts
from quire.engine.models.checkpoint.gguf.gemma import GEMMAS
from quire.engine.models.checkpoint.gguf.hybrids import HYBRIDS
from quire.engine.models.checkpoint.gguf.relatives import RELATIVES, Relative
from quire.engine.models.errors import UnknownArchitecture

_POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}
_RANK = 4


def config_of(facts: GgufFacts) -> Config:
    """The config of a file's model.

    Raises:
        UnknownArchitecture: the architecture is not supported.
        UnsupportedModel: a variant of it is not.
        BrokenFolder: a value is missing, or of a wrong kind.
    """
    name = facts.architecture
    if name not in CONFIGS:
        raise UnknownArchitecture(
            f"{facts.file} is a GGUF file of the architecture {name!r}, which is not supported; supported are "
            f"{', '.join(sorted(CONFIGS))}"
        )
    config = CONFIGS[name](facts)
    return {**config, **head_for_labels(facts)} if _has_labels(facts) else config


def pooling_of(facts: GgufFacts) -> str | None:
    """How the model pools, as sentence-transformers names it; None: it generates, or has a head for labels."""
    return None if _has_labels(facts) else _POOLING.get(facts.optional_integer(".pooling_type") or 0)


def _has_labels(facts: GgufFacts) -> bool:
    is_cls = any(name.startswith("cls.") for name in facts.shapes)
    return is_cls or facts.optional_integer(".pooling_type") == _RANK


def _relative(make: Callable[[GgufFacts], Relative], facts: GgufFacts) -> Config:
    relative = make(facts)
    return rms_decoder(facts, relative.model_type, relative.head, head_dim=facts.head_dim, **relative.fields)


CONFIGS: dict[str, Callable[[GgufFacts], Config]] = {
    **{name: partial(_relative, make) for name, make in RELATIVES.items()},
    **DECODERS,
    **ENCODERS,
    **GEMMAS,
    **HYBRIDS,
}
