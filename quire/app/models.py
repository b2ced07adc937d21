"""Finds the directories of the models on the command line, and their names in the API."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from quire.config.command import ConfigError
from quire.engine.models.checkpoint.gguf.folder import gguf_models, model_folder, name_of
from quire.engine.models.checkpoint.weight_files import NO_WEIGHTS, complaint_about, readable_weights
from quire.engine.models.errors import ModelError

logger = logging.getLogger(__name__)
# name -> directory in the package
BUNDLED = {
    "quire-nano": "nano",
    "quire-nano-embed": "nano_embed",
    "quire-nano-hear": "nano_hear",
    "quire-nano-see": "nano_see",
}
_GGUF = ".gguf"
_MODULES = "modules.json"  # of sentence-transformers
# A pattern also matches files in subdirectories, such as those of sentence-transformers' modules.
_PATTERNS = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model", "*.txt", "artifact.metadata"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model to serve: its directory, its name on the command line, and its names in the API."""

    folder: Path
    argument: str
    names: tuple[str, ...]

    @property
    def root(self) -> str:
        """Where clients find the model's files, such as its tokenizer: a directory, or the id of a repository."""
        return str(self.folder) if self.argument in BUNDLED else self.argument


def resolve_models(arguments: Sequence[str], served_names: Sequence[str], revision: str | None) -> list[ModelSource]:
    """Find all models, downloading those that are neither directories nor cached.

    Raises:
        ConfigError: a model cannot be found, or names are ambiguous.
    """
    models = list(arguments) or list(BUNDLED)
    if twice := [model for model in models if models.count(model) > 1]:
        raise ConfigError(f"quire serve: MODEL contains {twice[0]!r} twice")
    names = _names(models, served_names, first_only=not arguments)
    sources = [ModelSource(find_folder(model, revision), model, names[model]) for model in models]
    all_names = [name for source in sources for name in source.names]
    for name in all_names:
        if all_names.count(name) > 1:
            raise ConfigError(f"quire serve: two models have the name {name!r}; use --served-model-name NAME=MODEL")
    return sources


def find_folder(model: str, revision: str | None) -> Path:
    """The directory of a model.

    Raises:
        ConfigError: there is no such directory, and it cannot be downloaded; or its weights are in another format.
    """
    if model in BUNDLED:
        return Path(str(files("quire") / "bundled" / BUNDLED[model]))
    if _is_dir(model):
        return _folder_of(model)
    if _is_file(model):
        if not model.endswith(_GGUF):
            raise ConfigError(
                f"quire: {model!r} is a file; expected a .gguf file, or a directory with config.json, tokenizer.json "
                "and .safetensors files"
            )
        return _gguf_folder(Path(model))
    from httpx import HTTPError  # noqa: PLC0415
    from huggingface_hub import list_repo_files, snapshot_download  # noqa: PLC0415 slow, not needed for directories
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"quire: {model!r} is not a directory, and cannot be downloaded from the Hugging Face Hub: {error}"
        ) from error
    if not _can_be_loaded(_files_in(folder)):  # weights of other formats are not downloaded
        with suppress(HfHubHTTPError, HTTPError, OSError):  # without a network
            _check_format(model, list_repo_files(model, revision=revision))
    return folder


def _folder_of(model: str) -> Path:
    """The directory of a model in a directory: itself, unless it has a GGUF file only."""
    names = _files_in(Path(model))
    files = [] if _can_be_loaded(names) else gguf_models(names)
    if not files:
        _check_format(model, names)
        return Path(model)
    if len(files) > 1:
        raise ConfigError(f"quire: {model!r} has several models; name the file of one: {', '.join(files)}")
    logger.info("%s: the model is %s, the only GGUF file with one; there are no .safetensors files", model, files[0])
    return _gguf_folder(Path(model) / files[0])


def _gguf_folder(file: Path) -> Path:
    """The directory that is made of a GGUF file, with the parts of a config and a tokenizer in its metadata.

    Raises:
        ConfigError: its model is not supported.
    """
    try:
        folder = model_folder(file)
    except ModelError as error:
        raise ConfigError(f"quire: {error}") from error
    logger.info("%s: config and tokenizer are those in the file, written to %s", file, folder)
    return folder


def _files_in(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:  # no permission; reading the config says so
        return []


def _can_be_loaded(names: Sequence[str]) -> bool:
    """Return whether there are weights; those of modules are in subdirectories."""
    return _MODULES in names or bool(readable_weights(names))


def _check_format(model: str, names: Sequence[str]) -> None:
    """Refuse a model whose weights are in another format only, before its other files, which it may lack, are read."""
    complaint = complaint_about(names)
    if not _can_be_loaded(names) and complaint != NO_WEIGHTS:
        raise ConfigError(f"quire: {model!r} {complaint}")


def _names(models: Sequence[str], served: Sequence[str], *, first_only: bool) -> dict[str, tuple[str, ...]]:
    """The names of each model. `first_only`: names without MODEL= belong to the first model."""
    names_by_model: dict[str, list[str]] = {model: [] for model in models}
    for entry in served:
        name, equals, model = entry.partition("=")
        if not equals and len(models) > 1 and not first_only:
            raise ConfigError(f"quire serve: with several models --served-model-name expects NAME=MODEL, not {entry!r}")
        target = model if equals else models[0]
        if target not in names_by_model or not name:
            raise ConfigError(f"quire serve: --served-model-name {entry!r} does not match any MODEL")
        names_by_model[target].append(name)
    return {model: tuple(names) or _default_names(model) for model, names in names_by_model.items()}


def _default_names(model: str) -> tuple[str, ...]:
    """The id of a repository, or the name of a directory and its path."""
    if model.endswith(_GGUF) and _is_file(model):
        return name_of(Path(model)), model
    base = Path(model).name
    return (model,) if not _is_dir(model) or not base or base == model else (base, model)


def _is_file(model: str) -> bool:
    try:
        return Path(model).is_file()
    except (OSError, ValueError):
        return False


def _is_dir(model: str) -> bool:
    try:
        return Path(model).is_dir()
    except (OSError, ValueError):  # too long for a path, no permission, or a null character
        return False
