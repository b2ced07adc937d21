"""DummyCheckpoint: a checkpoint without tensors, for models whose weights are random (--load-format dummy)."""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.client.json_file import read_json
from quire.engine.models.checkpoint.checkpoint import Checkpoint, Progress, WeightTaker
from quire.engine.models.errors import BrokenFolder

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_MOST_LAYERS = 1 << 12
_MOST_BYTES = 1 << 40


class DummyCheckpoint(Checkpoint):
    """No tensors; it is as large as models may be."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the model's directory, whose config.json says in which type weights would be stored."""
        config = read_json(folder / "config.json", BrokenFolder)
        self._dtype = _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.bfloat16)

    @override
    def __exit__(self, *_: object) -> None:
        pass

    @property
    @override
    def num_tensors(self) -> int:
        return _MOST_LAYERS

    @property
    @override
    def total_bytes(self) -> int:
        return _MOST_BYTES

    @override
    def dtype(self) -> torch.dtype:
        return self._dtype

    @override
    def names(self) -> Set[str]:
        return frozenset()

    @override
    def dtype_of(self, name: str) -> torch.dtype:
        raise KeyError(name)

    @override
    def equal(self, first: str, second: str) -> bool:
        raise KeyError(first)

    @override
    def tensors(
        self, dtype: torch.dtype, progress: Progress, taker: WeightTaker | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        yield from ()
