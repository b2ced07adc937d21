"""CoreConfig: what a core is built from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.options import EngineOptions, ModelOptions, ParallelOptions
from quire.engine.client.pictures import FixedSize, Geometry, PanAndScan, TokenBudget
from quire.engine.models.model_config import ModelConfig
from quire.engine.models.specs.decoder import DecoderSpec

if TYPE_CHECKING:  # it imports torch, and front ends without an engine import this module
    from quire.engine.execution.memory import MemoryShare

logger = logging.getLogger(__name__)
_TEXT = 512  # tokens of a prompt beside those of a picture


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Configuration of a core.

    Attributes:
        memory_share: what it takes of the memory, if several engines share it.
        replica: its number among the replicas of the model.
        sharers: replicas that share the CPU time that a container may use.
        front_ends: processes that send it requests.
        start_process: called first in the processes of other ranks, where it starts logging. It can be pickled.
    """

    folder: Path
    model_config: ModelConfig
    model: ModelOptions
    engine: EngineOptions
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    memory_share: MemoryShare | None = None
    replica: int = 0
    sharers: int = 1
    front_ends: int = 1
    start_process: Callable[[], None] = _nothing


def _tokens(geometry: Geometry) -> int:
    """Tokens of the largest item of a picture, if its size says nothing of them; otherwise 0."""
    match geometry:
        case FixedSize(tokens=tokens) | PanAndScan(tokens=tokens) | TokenBudget(max_tokens=tokens):
            return tokens
        case _:
            return 0


def with_room_for_pictures(options: EngineOptions, config: ModelConfig) -> EngineOptions:
    """The options with steps that have room for a picture whose tokens attend to each other in both directions.

    If they do so with all others of the prompt, there is room for a text as well.
    """
    pictures, spec = config.facts.pictures, config.spec
    if pictures is None or not pictures.info.bidirectional or not isinstance(spec, DecoderSpec):
        return options
    video = pictures.info.video
    tokens = max(_tokens(pictures.info.geometry), 0 if video is None else _tokens(video.geometry))
    needed = tokens + _TEXT if spec.prefix_lm else tokens
    if needed <= options.max_num_batched_tokens:
        return options
    logger.info("max_num_batched_tokens is %d, since one step computes all tokens of a picture", needed)
    return options.model_copy(update={"max_num_batched_tokens": needed})
