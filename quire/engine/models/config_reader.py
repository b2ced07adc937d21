"""ConfigReader: reads the configs of models in a child process, while its server imports torch.

Configs that earlier starts have read need no such process.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import override

from quire.engine.client.launch import child_process, end_with_parent, forked_process, start_without_signals
from quire.engine.models.config_cache import ConfigCache
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
    """Read configs: those that were read before from a cache, the others in a child process.

    The process imports transformers, which takes a second, and then waits for the folders.
    """

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._read: deque[ModelConfig | None] = deque()  # None: the process reads it

    def begin(self, *, forks: bool = False) -> None:
        """Start the process before the folders are known.

        `forks`: it may be a copy of this process, see `forked_process`.
        """
        self._connection, end = multiprocessing.Pipe()
        process = (forked_process if forks else child_process)(_read_all, (end,), "quire-configs", daemon=True)
        start_without_signals(process)
        end.close()  # so that the end of the process ends the pipe

    def start(self, folders: Sequence[Path], options: ReadingOptions) -> None:
        """Read the configs of folders; `next` waits for each of them."""
        options = options._replace(overrides=dict(options.overrides))
        cache = ConfigCache()
        keys = [cache.key_of(folder, options) for folder in folders]
        self._read = deque(map(cache.get, keys))
        unread = [pair for pair, config in zip(zip(folders, keys, strict=True), self._read, strict=True) if not config]
        if not unread:
            self._close()
            return
        if self._connection is None:
            self.begin()
        assert self._connection is not None
        with suppress(OSError):  # the process has ended, which `next` says
            self._connection.send((unread, options))

    def next(self) -> ModelConfig:
        """Return the config of the next folder, once it has been read.

        Raises:
            ModelError: as `read_model_config` does.
        """
        result = self._read.popleft() or self._received()
        if not any(config is None for config in self._read):
            self._close()
        if isinstance(result, ModelError):
            raise result
        return result

    def _received(self) -> ModelConfig | ModelError:
        """Wait for the next result of the process.

        Raises:
            BrokenFolder: it has ended.
        """
        assert self._connection is not None
        try:
            result: ModelConfig | ModelError = self._connection.recv()
        except (EOFError, OSError) as error:  # the second if it had not read all of what was sent
            raise BrokenFolder("the process that reads model configs ended unexpectedly") from error
        return result

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _read_all(connection: Connection) -> None:
    """Body of the child process."""
    end_with_parent()
    # Makes `import torch` fail, unless it has been imported already.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # hides the warning that torch is missing
    from transformers import AutoConfig  # noqa: F401, PLC0415 before the folders are known

    from quire.engine.models.model_config import read_model_config  # noqa: PLC0415 like it
    from quire.engine.models.registry import has_outside_families  # noqa: PLC0415 like it

    cache = ConfigCache()
    with closing(connection), suppress(EOFError):  # the server has ended, or knows all configs
        folders, options = connection.recv()
        for folder, key in folders:
            warnings = _Warnings()
            try:
                with warnings.noticed():
                    config = read_model_config(
                        folder,
                        options.implementation,
                        options.overrides,
                        options.pooling,
                        language_model_only=options.language_model_only,
                    )
            except ModelError as error:
                connection.send(error)
                continue
            connection.send(config)
            # The next start has to give warnings as well, and code of other packages is not known by its version.
            if not warnings.any and not has_outside_families():
                cache.add(key, config)


class _Warnings(logging.Handler):
    """Notices warnings and errors that are logged, and prints them as without a handler.

    Attributes:
        any: there were some.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.any = False

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.any = True
        if logging.lastResort is not None:
            logging.lastResort.handle(record)

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Notice them meanwhile."""
        root = logging.getLogger()
        root.addHandler(self)
        try:
            yield
        finally:
            root.removeHandler(self)
