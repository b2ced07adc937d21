"""ConfigReader: reads the configs of models in a child process, while its server imports torch."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.engine.client.launch import child_process, end_with_parent, forked_process, start_without_signals
from quire.engine.models.errors import BrokenFolder, ModelError

if TYPE_CHECKING:  # the parent starts the process before it imports anything
    from quire.engine.models.config.pooling import PoolingOptions
    from quire.engine.models.model_config import ModelConfig, ModelImplementation


class ReadingOptions(NamedTuple):
    """How configs are read; see `read_model_config`."""

    implementation: ModelImplementation
    overrides: Mapping[str, Any]
    pooling: PoolingOptions
    language_model_only: bool = False


class ConfigReader:
    """Read configs in a child process.

    It imports transformers, which takes a second, from its start on, and waits for the folders.
    """

    def __init__(self, *, forks: bool = False) -> None:
        """Start the process. `forks`: the child may be a copy of this process, see `forked_process`."""
        self._connection, end = multiprocessing.Pipe()
        process = (forked_process if forks else child_process)(_read_all, (end,), "quire-configs", daemon=True)
        start_without_signals(process)
        end.close()  # so that the end of the process ends the pipe
        self._left = 0

    def start(self, folders: Sequence[Path], options: ReadingOptions) -> None:
        """Read the configs of folders; `next` waits for each of them."""
        self._left = len(folders)
        with suppress(ConnectionError):  # the process has ended, as `next` says
            self._connection.send((list(folders), options._replace(overrides=dict(options.overrides))))

    def next(self) -> ModelConfig:
        """Wait for the config of the next folder.

        Raises:
            ModelError: as `read_model_config` does.
        """
        try:
            result: ModelConfig | ModelError = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise BrokenFolder("the process that reads model configs ended unexpectedly") from error
        self._left -= 1
        if not self._left:
            self._connection.close()
        if isinstance(result, ModelError):
            raise result
        return result


def _read_all(connection: Connection) -> None:
    """Body of the child process."""
    end_with_parent()
    # Makes `import torch` fail, unless it has been imported already.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # hides the warning that torch is missing
    from transformers import AutoConfig  # noqa: F401, PLC0415 before the folders are known

    from quire.engine.models.model_config import read_model_config  # noqa: PLC0415 like it

    with closing(connection), suppress(EOFError):  # the server has ended before it knew the folders
        folders, options = connection.recv()
        for folder in folders:
            result: ModelConfig | ModelError
            try:
                result = read_model_config(
                    folder,
                    options.implementation,
                    options.overrides,
                    options.pooling,
                    language_model_only=options.language_model_only,
                )
            except ModelError as error:
                result = error
            connection.send(result)
