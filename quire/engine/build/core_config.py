"""CoreConfig: what a core is built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from quire.config.options import EngineOptions, ModelOptions, ParallelOptions
from quire.engine.execution.memory import MemoryShare
from quire.engine.models.model_config import ModelConfig


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Configuration of a core.

    Attributes:
        memory_share: what it takes of the memory, if several engines share it.
        start_process: called first in the processes of other ranks, where it starts logging. It can be pickled.
    """

    folder: Path
    model_config: ModelConfig
    model: ModelOptions
    engine: EngineOptions
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    memory_share: MemoryShare | None = None
    start_process: Callable[[], None] = _nothing
