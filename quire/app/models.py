"""Finds the directories of the models on the command line, and their names in the API."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Self

from quire.app.repositories.gguf_choice import choose_gguf
from quire.app.repositories.hubs import HubError, NotOnThisMachine, Snapshot, fetch, hub_named
from quire.app.repositories.names import ModelName, parse_name, split_variant
from quire.app.repositories.needed_files import gguf_files, needed_files, small_files
from quire.config.command import ConfigError
from quire.config.options import HubName, LoadFormat, ModelOptions
from quire.engine.models.checkpoint.gguf.folder import is_projector, model_folder, name_of
from quire.engine.models.checkpoint.weight_files import MODULES, NO_WEIGHTS, complaint_about, readable_weights
from quire.engine.models.errors import ModelError

logger = logging.getLogger(__name__)
# name -> directory in the package
BUNDLED = {
    "quire-nano": "nano",
    "quire-nano-embed": "nano_embed",
    "quire-nano-hear": "nano_hear",
    "quire-nano-see": "nano_see",
}
_GGUF, _WEIGHTS = ".gguf", ".safetensors"
_CONFIG = "config.json"
_PROJECTOR = "is the part of a model that reads pictures (mmproj); name the file with its language model"


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


@dataclass(frozen=True, slots=True)
class Lookup:
    """How models are looked up.

    Attributes:
        revision: of repositories; None: that in the name, or the newest.
        load_format: which files are wanted.
        hub: where repositories are.
        is_offline: nothing is downloaded.
        with_weights: weights are needed. A GGUF file, which has all in one, always is, but its head is enough.
    """

    revision: str | None = None
    load_format: LoadFormat = "auto"
    hub: HubName = "huggingface"
    is_offline: bool = False
    with_weights: bool = True

    @classmethod
    def of(cls, options: ModelOptions, *, is_offline: bool = False, with_weights: bool = True) -> Self:
        """How the settings look them up."""
        return cls(options.revision, options.load_format, options.model_hub, is_offline, with_weights)


class NotHere(ConfigError):
    """A model is not on this machine, and must not be downloaded."""


def resolve_models(arguments: Sequence[str], served_names: Sequence[str], lookup: Lookup) -> list[ModelSource]:
    """Find all models, downloading those that are neither directories nor cached.

    Raises:
        ConfigError: a model cannot be found, or names are ambiguous.
    """
    models = list(arguments) or list(BUNDLED)
    if twice := [model for model in models if models.count(model) > 1]:
        raise ConfigError(f"quire: MODEL contains {twice[0]!r} twice")
    names = _names(models, served_names, first_only=not arguments)
    sources = [ModelSource(find_folder(model, lookup), model, names[model]) for model in models]
    all_names = [name for source in sources for name in source.names]
    for name in all_names:
        if all_names.count(name) > 1:
            raise ConfigError(f"quire: two models have the name {name!r}; use --served-model-name NAME=MODEL")
    return sources


def find_folder(model: str, lookup: Lookup) -> Path:
    """The directory of a model.

    Raises:
        ConfigError: there is no such directory, and it cannot be downloaded; or its weights are in another format.
    """
    if model in BUNDLED:
        return Path(str(files("quire") / "bundled" / BUNDLED[model]))
    if _is_dir(model):
        return _folder_of(model, Path(model), "", lookup)
    if _is_file(model):
        return _folder_of_file(model, lookup)
    directory, variant = split_variant(model)
    if variant and _is_dir(directory):
        return _folder_of(model, Path(directory), variant, lookup)
    if Path(model).is_absolute() or model.startswith((".", "~")):
        raise ConfigError(f"quire: {model!r} is neither a file nor a directory")
    return _downloaded(model, lookup)


def _folder_of_file(model: str, lookup: Lookup) -> Path:
    """The directory of a model in a file."""
    if not model.endswith(_GGUF):
        raise ConfigError(
            f"quire: {model!r} is a file; expected a .gguf file, or a directory with config.json, tokenizer.json "
            "and .safetensors files"
        )
    if lookup.load_format == "safetensors":
        raise ConfigError(f"quire: {model!r} is a GGUF file, but --load-format is safetensors")
    if is_projector(model):
        raise ConfigError(f"quire: {model!r} {_PROJECTOR}")
    return _gguf_folder(Path(model), lookup)


def _folder_of(model: str, folder: Path, variant: str, lookup: Lookup) -> Path:
    """The directory of a model in a directory: itself, unless a GGUF file is wanted or there are no other weights."""
    names, load_format = _files_in(folder), lookup.load_format
    if not variant and _wants_safetensors(names, load_format):
        return folder
    inner = [f"{path.parent.name}/{path.name}" for path in sorted(folder.glob(f"*/*{_GGUF}"))]
    file = None if load_format == "safetensors" else _chosen(model, [*names, *inner], variant)
    if file is None:
        _check_format(model, names)
        return folder
    return _gguf_folder(folder / file, lookup)


def _wants_safetensors(names: Sequence[str], load_format: LoadFormat) -> bool:
    """Return whether a model is loaded from safetensors files. `names`: those in its directory, without others."""
    if load_format == "dummy":
        return _CONFIG in names
    return load_format != "gguf" and _can_be_loaded(names)


def _chosen(model: str, names: Sequence[str], variant: str) -> str | None:
    """The GGUF file that is served; None if there is none with a model."""
    try:
        choice = choose_gguf(names, variant)
    except ValueError as error:
        raise ConfigError(f"quire: {model!r} {error}") from error
    if choice is None:
        if parts := sorted(filter(is_projector, names)):
            raise ConfigError(f"quire: {model!r} has no GGUF file with a model: {parts[0]} {_PROJECTOR}")
        if variant:
            raise ConfigError(f"quire: {model!r}: there is no GGUF file with a model, of which {variant} could be one")
        return None
    logger.info("%s: the model is %s, %s", model, choice.file, choice.reason)
    return choice.file


def _downloaded(model: str, lookup: Lookup) -> Path:
    """The directory of a model in a repository, of which the needed files are downloaded."""
    name = parse_name(model)
    if name.revision is not None and lookup.revision not in (None, name.revision):
        raise ConfigError(f"quire: --revision is {lookup.revision}, but {model!r} has the revision {name.revision}")
    try:
        hub = hub_named(lookup.hub)
        snapshot = hub.open(name.repository, name.revision or lookup.revision, is_offline=lookup.is_offline)
        file, needed = _needed(model, name, snapshot, lookup)
        if not lookup.is_offline:
            fetch(hub, snapshot, needed)
    except NotOnThisMachine as error:
        raise NotHere(f"quire: {model!r} {error}") from error
    except HubError as error:
        raise ConfigError(f"quire: {model!r} is not a directory, and {error}") from error
    if any(not (snapshot.folder / path).exists() for path in needed):
        raise NotHere(f"quire: files of {model!r} are not on this machine, and nothing may be downloaded")
    return snapshot.folder if file is None else _gguf_folder(snapshot.folder / file, lookup)


def _needed(model: str, name: ModelName, snapshot: Snapshot, lookup: Lookup) -> tuple[str | None, Sequence[str]]:
    """The GGUF file with the model, if that is wanted or there are no other weights, and all files that it needs."""
    names = list(snapshot.sizes)
    outer = [path for path in names if "/" not in path]
    load_format = lookup.load_format
    if not name.variant and not name.path and _wants_safetensors(outer, load_format):
        if load_format == "dummy":
            return None, small_files(names)
        needed = needed_files(names, snapshot.folder)
        return None, needed if lookup.with_weights else [path for path in needed if not path.endswith(_WEIGHTS)]
    inside = [path for path in names if f"{path}/".startswith(f"{name.path}/" if name.path else "")]
    file = None if load_format == "safetensors" else _chosen(model, inside, name.variant)
    if file is not None:
        return file, gguf_files(names, file)
    if name.path:
        raise ConfigError(f"quire: {model!r}: there is no GGUF file with a model at {name.path}")
    _check_format(model, outer)
    return None, small_files(names)


def _gguf_folder(file: Path, lookup: Lookup) -> Path:
    """The directory that is made of a GGUF file, with the parts of a config and a tokenizer in its metadata.

    Raises:
        ConfigError: its model is not supported.
    """
    try:
        folder = model_folder(file, with_weights=lookup.with_weights)
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
    return MODULES in names or bool(readable_weights(names))


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
            raise ConfigError(f"quire: with several models --served-model-name expects NAME=MODEL, not {entry!r}")
        target = model if equals else models[0]
        if target not in names_by_model or not name:
            raise ConfigError(f"quire: --served-model-name {entry!r} does not match any MODEL")
        names_by_model[target].append(name)
    return {model: tuple(names) or _default_names(model) for model, names in names_by_model.items()}


def _default_names(model: str) -> tuple[str, ...]:
    """The id of a repository, or the name of a directory and its path."""
    if model.endswith(_GGUF) and _is_file(model):
        return name_of(Path(model)), model
    if model in BUNDLED:
        return (model,)
    directory, _ = split_variant(model)
    if not _is_dir(model) and not _is_dir(directory):
        return tuple(dict.fromkeys((parse_name(model).short, model)))
    base = Path(model).name
    return (model,) if not base or base == model else (base, model)


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
