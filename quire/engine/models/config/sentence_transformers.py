"""Folders of sentence-transformers: modules.json and the configs of its modules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeGuard

from quire.engine.client.json_file import read_json
from quire.engine.client.pooling_params import PoolingType
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.engine.models.specs.pooler import Dense, HeadStep

_MODES: dict[str, PoolingType] = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": "weighted_mean",
    "lasttoken": "last",
}
POOLING_NAMES: dict[str, PoolingType] = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "lasttoken": "last",
    "last": "last",
    "weightedmean": "weighted_mean",
    "weighted_mean": "weighted_mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "mean_sqrt_len": "mean_sqrt_len",
}
_ACTS = {"tanh": "tanh", "identity": "linear", "relu": "relu", "gelu": "gelu", "sigmoid": "sigmoid", "silu": "silu"}
_MAX_SIZE = 1 << 20  # of a Dense module


@dataclass
class Modules:
    """The modules after the transformer.

    Attributes:
        transformer: folder of the transformer, relative to the model's.
        static: folder of a table of embeddings that takes the place of the transformer.
        pooling_type: how hidden states are pooled; None if they are not.
        steps: dense layers behind the pooling, or, without one, of each token; each with the folder of its weights.
        splade: embeddings are those of a masked language model's head.
        sparse_pooling, log_twice: see `SparseHead`.
    """

    transformer: str = ""
    static: str | None = None
    pooling_type: PoolingType | None = None
    steps: list[tuple[HeadStep, str]] = field(default_factory=list)
    normalize: bool = False
    splade: bool = False
    sparse_pooling: Literal["max", "sum"] = "max"
    log_twice: bool = False


def read_modules(folder: Path) -> Modules | None:
    """Read modules.json; None if the folder has none.

    Raises:
        BrokenFolder: a file cannot be read.
        UnsupportedModel: a module is not supported.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        entries = [(str(entry["type"]), str(entry["path"])) for entry in listed]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BrokenFolder(f"{path} cannot be read: {error}") from error
    modules = Modules()
    for kind, inner in entries:
        _add(modules, kind.rpartition(".")[2], inner, folder)
    return modules


def _add(modules: Modules, kind: str, inner: str, folder: Path) -> None:
    if ".." in Path(inner).parts or Path(inner).is_absolute():
        raise BrokenFolder(f"{folder / 'modules.json'}: the path {inner!r} is not inside the model's directory")
    match kind:
        case "Transformer" | "MLMTransformer":
            modules.transformer = inner
        case "StaticEmbedding":
            modules.static = inner
            modules.pooling_type = "mean"
        case "Pooling":
            modules.pooling_type = _pooling_type(read_json(folder / inner / "config.json", BrokenFolder))
        case "Dense":
            modules.steps.append((_dense(read_json(folder / inner / "config.json", BrokenFolder)), inner))
        case "Normalize":
            modules.normalize = True
        case "SpladePooling":
            _add_splade(modules, read_json(folder / inner / "config.json", BrokenFolder))
        case "Dropout" | "LogitScore":
            pass
        case _:
            raise UnsupportedModel(
                f"modules.json has a module of type {kind!r}; supported are Transformer, Pooling, Dense, Normalize, "
                "SpladePooling and StaticEmbedding"
            )


def _pooling_type(config: Mapping[str, Any]) -> PoolingType:
    if (named := config.get("pooling_mode")) is not None:
        names = [str(name) for name in (named if isinstance(named, list) else [named])]
        kinds = [POOLING_NAMES.get(name) for name in names]
    else:
        kinds = [kind for mode, kind in _MODES.items() if config.get(f"pooling_mode_{mode}")]
        names = [str(kind) for kind in kinds]
    if len(kinds) != 1 or kinds[0] is None:
        raise UnsupportedModel(f"pooling by {' and '.join(names) or 'nothing'} is not supported; supported is one mode")
    return kinds[0]


def _dense(config: Mapping[str, Any]) -> Dense:
    name = str(config.get("activation_function", "torch.nn.modules.linear.Identity")).rpartition(".")[2].lower()
    if name not in _ACTS:
        raise UnsupportedModel(
            f"a Dense module with activation {name!r} is not supported; supported: {', '.join(_ACTS)}"
        )
    size_in, size_out = config.get("in_features"), config.get("out_features")
    if not (_is_size(size_in) and _is_size(size_out)):
        raise BrokenFolder(
            f"the config of a Dense module has in_features {size_in!r:.100} and out_features {size_out!r:.100}; "
            f"both must be integers from 1 to {_MAX_SIZE}"
        )
    if config.get("use_residual"):
        raise UnsupportedModel("a Dense module with use_residual is not supported")
    return Dense(size_in=size_in, size_out=size_out, act=_ACTS[name], bias=bool(config.get("bias", True)))


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and 1 <= value <= _MAX_SIZE


def _add_splade(modules: Modules, config: Mapping[str, Any]) -> None:
    strategy, act = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if strategy not in ("max", "sum") or act not in ("relu", "log1p_relu"):
        raise UnsupportedModel(
            f"SpladePooling by {strategy!r} with {act!r} is not supported; supported are max and sum with relu and "
            "log1p_relu"
        )
    modules.splade, modules.sparse_pooling, modules.log_twice = True, strategy, act == "log1p_relu"
