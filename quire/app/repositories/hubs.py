"""Hubs that models are downloaded from: the Hugging Face Hub with its mirrors, and ModelScope."""

from __future__ import annotations

import glob
import importlib.util
import io
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from quire.app.repositories.needed_files import FIRST
from quire.config.options import HubName

logger = logging.getLogger(__name__)
# A file that every repository has: huggingface_hub warns if no file matches.
_ALWAYS_THERE = ".gitattributes"
_LOG_SECONDS = 10.0  # between two lines about a download
_BYTES_BAR = "huggingface_hub.snapshot_download"


class HubError(Exception):
    """A repository cannot be read or downloaded; the message says why, in words that follow its name."""


class NotOnThisMachine(HubError):
    """Nothing of a repository is on this machine, and nothing may be downloaded."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A repository at a revision.

    Attributes:
        repository: its id.
        revision: a commit, or what was asked for.
        folder: where its files are on this machine, of which those in `FIRST` are there.
        sizes: bytes of all of its files, by path; of those on this machine only, if it is used offline.
    """

    repository: str
    revision: str | None
    folder: Path
    sizes: Mapping[str, int] = field(repr=False)


class ModelHub(Protocol):
    """Where repositories are."""

    def open(self, repository: str, revision: str | None, *, is_offline: bool) -> Snapshot:
        """Find a repository, and download the files that say which others are needed.

        Raises:
            HubError: that is not possible. NotOnThisMachine: because nothing may be downloaded.
        """

    def download(self, snapshot: Snapshot, names: Sequence[str]) -> None:
        """Download files that are not on this machine yet.

        Raises:
            HubError: that is not possible.
        """


def hub_named(name: HubName) -> ModelHub:
    """The hub of this name.

    Raises:
        HubError: its package is not installed.
    """
    if name == "huggingface":
        return HuggingFaceHub()
    if importlib.util.find_spec("modelscope") is None:
        raise HubError("needs the package modelscope to be downloaded from ModelScope: pip install 'quire[modelscope]'")
    return ModelScopeHub()


class HuggingFaceHub(ModelHub):
    """The Hugging Face Hub, or the mirror that HF_ENDPOINT names; huggingface_hub obeys all HF_* variables."""

    @override
    def open(self, repository: str, revision: str | None, *, is_offline: bool) -> Snapshot:
        from huggingface_hub import constants, get_cached_repo_tree, snapshot_download  # noqa: PLC0415 slow
        from huggingface_hub.errors import CachedRepoTreeNotFoundError  # noqa: PLC0415

        is_offline = is_offline or constants.HF_HUB_OFFLINE
        patterns = [*FIRST, _ALWAYS_THERE]
        with _huggingface_errors(revision, is_offline=is_offline):
            folder = Path(
                snapshot_download(
                    repository,
                    revision=revision,
                    allow_patterns=patterns,
                    local_files_only=is_offline,
                    tqdm_class=_bar(),
                )
            )
        if is_offline:
            return Snapshot(repository, folder.name, folder, _sizes_in(folder))
        try:
            files = get_cached_repo_tree(repository, revision=folder.name)
        except CachedRepoTreeNotFoundError:  # no network now, and an older version downloaded it
            return Snapshot(repository, folder.name, folder, _sizes_in(folder))
        return Snapshot(repository, folder.name, folder, {file.path: file.size for file in files})

    @override
    def download(self, snapshot: Snapshot, names: Sequence[str]) -> None:
        from huggingface_hub import snapshot_download  # noqa: PLC0415

        patterns = [glob.escape(name) for name in names]
        with _huggingface_errors(snapshot.revision, is_offline=False):
            snapshot_download(
                snapshot.repository, revision=snapshot.revision, allow_patterns=patterns, tqdm_class=_bar()
            )


class ModelScopeHub(ModelHub):
    """ModelScope, or the server that MODELSCOPE_DOMAIN names; the package obeys all MODELSCOPE_* variables."""

    @override
    def open(self, repository: str, revision: str | None, *, is_offline: bool) -> Snapshot:
        from huggingface_hub import constants  # noqa: PLC0415 slow

        is_offline = is_offline or constants.HF_HUB_OFFLINE  # as in vLLM
        folder = self._download(repository, revision, FIRST, is_offline=is_offline)
        if is_offline:
            return Snapshot(repository, revision, folder, _sizes_in(folder))
        from modelscope.hub.api import HubApi  # noqa: PLC0415 slow

        files = self._answer(lambda: HubApi().get_model_files(repository, revision=revision, recursive=True))
        sizes = {file["Path"]: int(file.get("Size") or 0) for file in files if file.get("Type") != "tree"}
        return Snapshot(repository, revision, folder, sizes)

    @override
    def download(self, snapshot: Snapshot, names: Sequence[str]) -> None:
        patterns = [glob.escape(name) for name in names]
        self._download(snapshot.repository, snapshot.revision, patterns, is_offline=False)

    def _download(self, repository: str, revision: str | None, patterns: Sequence[str], *, is_offline: bool) -> Path:
        from modelscope.hub.snapshot_download import snapshot_download  # noqa: PLC0415 slow

        def call() -> str:
            return str(
                snapshot_download(
                    repository, revision=revision, allow_patterns=list(patterns), local_files_only=is_offline
                )
            )

        try:
            return Path(self._answer(call))
        except HubError as error:
            if is_offline:
                raise NotOnThisMachine("is not on this machine, and nothing may be downloaded") from error
            raise

    def _answer(self, call: Callable[[], Any]) -> Any:
        """What the package returns.

        Raises:
            HubError: it cannot.
        """
        from modelscope_hub.errors import HubError as ModelScopeError  # noqa: PLC0415 a dependency of modelscope

        try:
            return call()
        except (ModelScopeError, OSError, ValueError) as error:  # requests has errors of the second kind
            raise HubError(f"cannot be downloaded from ModelScope: {_one_line(error)}") from error


def fetch(hub: ModelHub, snapshot: Snapshot, names: Sequence[str]) -> None:
    """Download the files of a repository that are needed and not on this machine yet, and say so in the log.

    Raises:
        HubError: that is not possible.
    """
    missing = [name for name in names if not (snapshot.folder / name).exists()]
    if not missing:
        return
    size = _size_text(sum(snapshot.sizes.get(name, 0) for name in missing))
    logger.info(
        "%s: downloading %d of its %d files, %s, to %s",
        snapshot.repository,
        len(missing),
        len(snapshot.sizes),
        size,
        snapshot.folder,
    )
    started = time.monotonic()
    hub.download(snapshot, missing)
    if absent := [name for name in missing if not (snapshot.folder / name).exists()]:
        raise HubError(f"lacks files that the model needs: {', '.join(absent)}")
    logger.info("%s: downloaded in %.0f s", snapshot.repository, time.monotonic() - started)


@contextmanager
def _huggingface_errors(revision: str | None, *, is_offline: bool) -> Iterator[None]:
    """Turn errors of huggingface_hub into a `HubError`."""
    from httpx2 import HTTPError  # noqa: PLC0415 the HTTP client of huggingface_hub
    from huggingface_hub import errors  # noqa: PLC0415 slow

    try:
        yield
    except errors.LocalEntryNotFoundError as error:
        if is_offline:
            raise NotOnThisMachine("is not on this machine, and nothing may be downloaded") from error
        raise _refused(_one_line(error)) from error
    except errors.GatedRepoError as error:
        raise _refused("its authors give access on request; ask for it on its page, and set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise _refused(f"it has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise _refused("there is no such repository, or it is private and HF_TOKEN does not open it") from error
    except (HTTPError, errors.HFValidationError, OSError) as error:
        raise _refused(_one_line(error)) from error


def _refused(reason: str) -> HubError:
    return HubError(f"cannot be downloaded from the Hugging Face Hub: {reason}")


def _bar() -> Any:
    """The class of progress bars: None is huggingface_hub's, for terminals; elsewhere there are lines in the log."""
    if sys.stderr is not None and sys.stderr.isatty():
        return None
    from huggingface_hub.utils.tqdm import tqdm  # noqa: PLC0415 slow

    class LoggedBar(tqdm):
        """The bar of all bytes, as lines in the log."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            if options.get("name") != _BYTES_BAR:
                options["disable"] = True
            log = {"file": _LogLines(), "mininterval": _LOG_SECONDS, "leave": False}
            super().__init__(*arguments, **{**options, **log})  # type: ignore[no-untyped-call]

    return LoggedBar


class _LogLines(io.StringIO):
    """A terminal, as far as progress bars know, each of whose lines goes to the log."""

    @override
    def isatty(self) -> bool:
        return True

    @override
    def write(self, text: str, /) -> int:
        if "%" in text:  # the others are escape sequences, and bars of nothing
            logger.info("%s", text.strip())
        return len(text)


def _sizes_in(folder: Path) -> dict[str, int]:
    """The files in a directory and its subdirectories."""
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def _size_text(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
