"""Engines whose model is divided among ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.config.options import ParallelOptions
from tests.support.engine import Engine

TP = {"tensor_parallel_size": 2}
PP = {"pipeline_parallel_size": 2}
EP = {**TP, "enable_expert_parallel": True}


@contextmanager
def running(folder: Path, parallel: dict[str, Any], **options: Any) -> Iterator[Engine]:
    """An engine on several ranks, which end after the block."""
    engine = Engine(folder, parallel=ParallelOptions(**parallel), **{"kv_cache_memory_bytes": 8 << 20, **options})
    try:
        yield engine
    finally:
        engine.core.close()
