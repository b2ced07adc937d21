"""Static embeddings (sentence-transformers' StaticEmbedding, model2vec): a table of tokens, and no layers."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import EncoderSpec, LayerNormSpec
from quire.engine.models.specs.tensor_names import NamedTensors, WeightNames

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

STATIC = "static"  # the model type of a table of embeddings
_WEIGHTS = "model.safetensors"
_TABLES = ("embedding.weight", "embeddings")  # sentence-transformers' name and model2vec's
_MAX_TOKENS = 1 << 16  # of an input; a table has no limit, but the rows of a text take memory
_MAX_HEADER = 1 << 20


def static_spec(folder: Path) -> EncoderSpec:
    """The spec of the table in a folder.

    Raises:
        BrokenFolder: there is none that can be read.
    """
    shapes = _shapes(folder / _WEIGHTS)
    tables = [shapes[name] for name in _TABLES if name in shapes]
    if not tables or len(tables[0]) != 2 or not all(type(size) is int and size > 0 for size in tables[0]):
        raise BrokenFolder(f"{folder / _WEIGHTS} has no table of embeddings ({' or '.join(_TABLES)})")
    rows, hidden = tables[0]
    vocab = shapes["mapping"][0] if shapes.get("mapping") else rows
    return EncoderSpec(
        hidden=hidden,
        vocab=vocab,
        layers=(),
        norm=LayerNormSpec(eps=1e-5),
        max_positions=_MAX_TOKENS,
        final_norm=False,
        family=STATIC,
    )


def _plain_table(tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """The table with a row for each token of the vocabulary; model2vec may share rows, and weigh tokens.

    Raises:
        BrokenFolder: its tensors do not fit together.
    """
    parts = {("table" if name in _TABLES else name): tensor.clone() for name, tensor in tensors}
    table = parts.pop("table").float()
    mapping, weights = parts.pop("mapping", None), parts.pop("weights", None)
    try:
        table = table if mapping is None else table[mapping.long()]
        table = table if weights is None else table * weights.float()[:, None]
    except (IndexError, RuntimeError) as error:
        raise BrokenFolder(f"the table of embeddings does not fit its mapping or its weights: {error}") from error
    yield "embed.weight", table
    yield from parts.items()


def _shapes(path: Path) -> dict[str, Any]:
    """The shapes of the tensors in a safetensors file, from its header."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, _MAX_HEADER)))
        return {name: list(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise BrokenFolder(f"{path} cannot be read: {error}") from error


def _refuse(_config: Any) -> EncoderSpec:
    raise UnsupportedModel("a table of embeddings is described by its weights, not by a config.json")


FAMILIES = (
    Family(
        name=STATIC,
        config_types=(),
        kind="encoder",
        spec=_refuse,
        tensors=WeightNames(((r"embed\.weight", "embed.weight"),), prepare=_plain_table),
    ),
)
