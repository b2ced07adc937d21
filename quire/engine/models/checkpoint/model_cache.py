"""ModelCache: the packed weights of one model, which are read from a cache or written to it while it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from quire.engine.models.checkpoint.packed_cache import CachedWeights, PackedCache, WrittenWeights, key_of
from quire.engine.models.errors import BrokenFolder
from quire.engine.models.layers.linear import Packable
from quire.engine.models.user_cache import user_cache
from quire.kernels.linear import SavableWeight
from quire.kernels.packed_groups import PackedGroups

logger = logging.getLogger(__name__)
_DIRECTORY = "packed"
_LEAST = 32 << 20  # bytes of a checkpoint; smaller ones are packed at once
_FILES = (".safetensors", ".gguf", ".json")  # that decide what weights are, or how they are read


class ModelCache:
    """The packed weights of a model by the names of their parameters.

    Weights in bfloat16 are not kept: to pack them takes little more than to read them.
    """

    def __init__(self, cached: CachedWeights | None = None, written: WrittenWeights | None = None) -> None:
        """`cached`: those of an earlier load; None: there are none. `written`: gets new ones."""
        self._cached = cached
        self._written = written

    def has(self, parameter: str, shape: Iterable[int]) -> bool:
        """Whether the weight of a parameter was kept by an earlier load."""
        return self._cached is not None and self._cached.has(parameter, shape)

    def weight(self, parameter: str) -> SavableWeight:
        """The weight of a parameter."""
        assert self._cached is not None
        return self._cached.weight(parameter)

    def add(self, parameter: str, layers: Sequence[Packable]) -> None:
        """Keep the weight of a parameter, if all layers that have it share a packed one."""
        if self._written is None or not layers:
            return
        packed = layers[0].packed
        if isinstance(packed, PackedGroups) and all(
            layer.packed is packed and layer.weight is None for layer in layers
        ):
            self._written.add(parameter, packed)

    def finish(self) -> None:
        """Keep what was added: all weights are loaded."""
        if self._written is not None:
            self._written.finish()

    def abandon(self) -> None:
        """Keep nothing of what was added."""
        if self._written is not None:
            self._written.abandon()


NO_CACHE = ModelCache()


@contextmanager
def model_cache(folder: Path, limit: int, nbytes: int, model: nn.Module, *facts: object) -> Iterator[ModelCache]:
    """The cache of a model's packed weights while it is loaded. What was added is kept if there is no error.

    Args:
        folder: of the checkpoint.
        limit: bytes of all cached weights; 0: there is no cache.
        nbytes: bytes of the checkpoint.
        model: it has its parameters, and no weights yet.
        facts: what else decides how weights are packed.
    """
    cache = _opened(folder, limit, nbytes, model, facts) if limit and nbytes >= _LEAST else NO_CACHE
    try:
        yield cache
    except BaseException:
        cache.abandon()
        raise
    cache.finish()


def _opened(folder: Path, limit: int, nbytes: int, model: nn.Module, facts: Sequence[object]) -> ModelCache:
    parameters = [(name, str(parameter.dtype), [*parameter.shape]) for name, parameter in model.named_parameters()]
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix in _FILES)
        key = key_of(files, type(model).__name__, parameters, *facts)
        cache = PackedCache(user_cache(_DIRECTORY), limit)
        cached = cache.open(key)
        return ModelCache(cached, None if cached is not None else cache.create(key, nbytes))
    except (OSError, BrokenFolder) as error:  # a model is loaded without a cache then
        logger.warning("packed weights are not cached: %s", error)
        return NO_CACHE
