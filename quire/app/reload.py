"""Files that a running server reads again: the certificate and the keys of its clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from quire.app.tls import TlsError
from quire.config.key_file import KeyFileError

logger = logging.getLogger("quire")
_CHECK_SECONDS = 5.0  # between two looks at the files
Version = tuple[int, int, int]


class WatchedFiles:
    """Files that are read again when they change, or when an operator asks for it.

    While they cannot be used, as in the middle of a change, what was read before stays in use.
    """

    def __init__(self, name: str, files: Sequence[Path], read: Callable[[], None]) -> None:
        """Start after the files were read.

        Args:
            name: what the files are, for the log.
            files: all of them.
            read: reads them; raises TlsError or KeyFileError, and then has changed nothing.
        """
        self._name = name
        self._files = files
        self._read = read
        self._in_use = self._versions()
        self._logged: tuple[list[Version | None], str] | None = None  # the last problem

    async def watch(self, interval: float = _CHECK_SECONDS) -> None:
        """Read the files whenever they have changed; never returns."""
        while True:
            await asyncio.sleep(interval)
            if self._versions() != self._in_use:
                self._read_again()

    def reload(self) -> None:
        """Read the files now."""
        self._logged = None
        self._read_again()

    def _read_again(self) -> None:
        versions = self._versions()
        try:
            self._read()
        except (TlsError, KeyFileError) as error:
            problem = (versions, str(error))
            if problem != self._logged:
                logger.warning("%s: changed, but cannot be used yet: %s", self._name, error)
            self._logged = problem
            return
        self._in_use, self._logged = versions, None
        logger.info("%s: read again", self._name)

    def _versions(self) -> list[Version | None]:
        return [_version(file) for file in self._files]


def _version(file: Path) -> Version | None:
    try:
        status = file.stat()
    except OSError:  # it is being replaced
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
