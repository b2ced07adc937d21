"""A server of a model that pools, over the fake core."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.engine.client.protocol import AddRequest
from tests.support.fake_core import INFO, FakeCore
from tests.support.pooling import pooling_info
from tests.support.server import Server, running_server
from tests.support.tokenizer import byte_tokenizer


@asynccontextmanager
async def pooling_server(
    folder: Path,
    *tasks: str,
    core: FakeCore | None = None,
    files: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    max_model_len: int = 512,
    **options: Any,
) -> AsyncIterator[Server]:
    """A server of a model with these pooling tasks; default: all of them.

    Args:
        folder: of the model.
        tasks: of the model.
        core: that answers.
        files: JSON files of the model.
        facts: fields of its `Pools`.
        max_model_len: context length in tokens.
        options: of `running_server`.
    """
    core = core or FakeCore()
    info = pooling_info(INFO, *tasks, **(facts or {}))
    core.info = msgspec.structs.replace(info, max_model_len=max_model_len)
    write_files(folder, files or {})
    async with running_server(folder, core, **options) as server:
        yield server


def write_files(folder: Path, files: dict[str, Any]) -> None:
    """Write JSON files."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))


def vectors(body: Any) -> NDArray[np.float32]:
    """The embeddings in a response."""
    return np.array([entry["embedding"] for entry in body["data"]], np.float32)


def added(core: FakeCore) -> list[AddRequest]:
    """The requests that the core has got."""
    return [message for message in core.received if isinstance(message, AddRequest)]


def texts(core: FakeCore) -> list[str]:
    """Texts of the prompts that the core has got."""
    return [byte_tokenizer().decode(message.prompt.tolist(), skip_special_tokens=False) for message in added(core)]
