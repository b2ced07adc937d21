"""ConfigCache: configs of models that earlier starts have read.

To read a config imports transformers: 1.5 s of CPU time, on a core that the rest of a start could use. What was read of
a folder is kept in the user's cache under a key of the folder's files, of the options, of Quire's code and of the
installed packages. All of them are known by names, sizes and times: nothing is read to find a config.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import io
import logging
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from typing_extensions import override

import quire
from quire.engine.models.errors import BrokenFolder
from quire.engine.models.user_cache import user_cache

if TYPE_CHECKING:  # whether there are configs is known before anything else is imported
    from quire.engine.models.model_config import ModelConfig

logger = logging.getLogger(__name__)
_DIRECTORY, _SUFFIX = "configs", ".config"
_CODE = ("engine/models", "engine/client")  # what reads configs, and what they consist of
_PACKAGE = f"{quire.__name__}.engine."  # of the classes that configs consist of
_MOST_CONFIGS = 64
_MOST_FILES = 10_000  # of a folder
_MOST_BYTES = 1 << 20  # of a config
_DIGEST_SIZE = hashlib.sha256().digest_size
_VALUES = (msgspec.Struct, enum.Enum)  # beside dataclasses


class ConfigCache:
    """A directory with a file for each config. Those that were used last are kept."""

    def __init__(self) -> None:
        self._version = _version()
        self._folder: Path | None = None
        with suppress(BrokenFolder):  # nothing is kept then
            self._folder = user_cache(_DIRECTORY)

    def has_any(self) -> bool:
        """Whether this version of the code has read a config before."""
        return self._folder is not None and any(self._folder.glob(f"{self._version}-*{_SUFFIX}"))

    def key_of(self, folder: Path, *options: object) -> str | None:
        """Return the key of a folder as it is now; None if its config is not kept."""
        if self._folder is None:
            return None
        digest = hashlib.sha256(repr((str(folder.absolute()), options)).encode())
        try:
            for count, (name, status) in enumerate(_files(folder)):
                if count == _MOST_FILES:
                    return None
                digest.update(f"\0{name}\0{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}".encode())
        except OSError:  # reading the config says why
            return None
        return digest.hexdigest()[:40]

    def get(self, key: str | None) -> ModelConfig | None:
        """Return the config with a key; None if there is none, or it is damaged."""
        if self._folder is None or key is None:
            return None
        path = self._path(self._folder, key)
        try:
            data = path.read_bytes()
            if hashlib.sha256(data[_DIGEST_SIZE:]).digest() != data[:_DIGEST_SIZE]:
                raise ValueError("it is damaged")
            config = _loaded(data[_DIGEST_SIZE:])
            os.utime(path)
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001 what is not a pickle of a config may raise anything
            logger.warning("the config in %s is read again: %s", path, error)
            return None
        return config

    def add(self, key: str | None, config: ModelConfig) -> None:
        """Keep a config, if reading it again gives an equal one."""
        if self._folder is None or key is None:
            return
        data = pickle.dumps(config)
        try:
            if len(data) > _MOST_BYTES or _loaded(data) != config:
                return
            path = self._path(self._folder, key)
            unfinished = path.with_name(f"{path.name}.{os.getpid()}")
            unfinished.write_bytes(hashlib.sha256(data).digest() + data)
            unfinished.rename(path)
            self._remove_oldest(self._folder)
        except (OSError, pickle.UnpicklingError) as error:
            logger.debug("a config is not kept: %s", error)

    def _path(self, folder: Path, key: str) -> Path:
        return folder / f"{self._version}-{key}{_SUFFIX}"

    def _remove_oldest(self, folder: Path) -> None:
        """Remove all but the files that were used last, unfinished ones among them."""
        times = {}
        for path in folder.iterdir():
            with suppress(OSError):  # another process removes it
                times[path] = path.stat().st_mtime
        for path in sorted(times, key=times.__getitem__)[:-_MOST_CONFIGS]:
            path.unlink(missing_ok=True)


def _version() -> str:
    """Return what this version of the code that reads configs, and of the packages that it uses, is known by."""
    digest = hashlib.sha256(sys.version.encode())
    package = Path(quire.__file__).parent
    for inner in _CODE:
        for name, status in _files(package / inner):
            if name.endswith(".py"):
                digest.update(f"\0{name} {status.st_size} {status.st_mtime_ns}".encode())
    for place in sys.path:
        with suppress(OSError):  # it does not exist, or is an archive
            names = sorted(name for name in os.listdir(place) if name.endswith((".dist-info", ".egg-info")))
            digest.update(repr(names).encode())
    return digest.hexdigest()[:16]


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files in a folder, and in those in it, in the order of their names.

    Raises:
        OSError: the folder or a file in it cannot be read.
    """
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            for name, status in _files(Path(entry.path)):
                yield f"{entry.name}/{name}", status
        else:
            yield entry.name, entry.stat()


def _loaded(data: bytes) -> ModelConfig:
    """Return the config in a pickle.

    Raises:
        pickle.UnpicklingError: it holds something else than configs consist of.
        Exception: it is not a pickle.
    """
    from quire.engine.models.model_config import ModelConfig  # noqa: PLC0415 imports what configs consist of

    config = _Values(io.BytesIO(data)).load()
    if not isinstance(config, ModelConfig):
        raise pickle.UnpicklingError("it is not a config")
    return config


class _Values(pickle.Unpickler):
    """Reads values only: nothing in a file of the cache makes it call anything else than the classes of values."""

    @override
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) == ("msgspec._utils", "rebuild"):  # makes a Struct of its class and its fields
            return super().find_class(module, name)
        value = super().find_class(module, name) if module.startswith(_PACKAGE) else None
        is_value = dataclasses.is_dataclass(value) or (isinstance(value, type) and issubclass(value, _VALUES))
        if not is_value:
            raise pickle.UnpicklingError(f"configs do not consist of {module}.{name}")
        return value
