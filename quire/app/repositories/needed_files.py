"""Which files of a repository a model needs: without other formats, duplicates and what only others read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from quire.engine.models.checkpoint.gguf.container import parts_of
from quire.engine.models.checkpoint.gguf.folder import BESIDE, PREPROCESSOR, projectors
from quire.engine.models.checkpoint.weight_files import INDEX, MODULES, WHOLE, readable_weights

# Files that say which others are needed.
FIRST = ("config.json", MODULES, INDEX)
_SMALL = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "artifact.metadata")
_OTHER_INDEX = ".index.json"  # ends the names of indexes of weights in other formats, too
_TEMPLATES = "additional_chat_templates"
_ADAPTER, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_ADAPTERS = "*-lora"  # directories, of adapters for one kind of media each


def needed_files(names: Iterable[str], folder: Path) -> list[str]:
    """The files that a model with .safetensors files needs.

    Args:
        names: paths of all files of the repository.
        folder: has those in `FIRST`.
    """
    listed = list(names)
    directories = _module_directories(folder)
    needed = small_files(listed, directories)
    needed += _weights(listed, "", folder)
    for directory in directories:
        needed += _weights(listed, directory, folder)
    return sorted({*needed, *_adapters(listed)})


def small_files(names: Iterable[str], directories: Sequence[str] = ()) -> list[str]:
    """Configs, tokenizers and templates of a model, and those in some directories of its repository."""
    places = {"": _SMALL, **dict.fromkeys(directories, _SMALL), _TEMPLATES: ("*.jinja",)}
    needed = []
    for name in names:
        path = PurePosixPath(name)
        patterns = places.get(_directory(path), ())
        is_other_index = name.endswith(_OTHER_INDEX) and path.name != INDEX
        if not is_other_index and any(fnmatch(path.name, pattern) for pattern in patterns):
            needed.append(name)
    return needed


def gguf_files(names: Iterable[str], file: str) -> list[str]:
    """A GGUF file with its other parts, its vision tower, and files beside it that take the place of what it says."""
    listed = set(names)
    parts = parts_of(Path(file))
    beside = [(parts[0].parent / name).as_posix() for name in (*BESIDE, PREPROCESSOR)]
    towers = projectors(name for name in listed if PurePosixPath(name).parent == PurePosixPath(parts[0].parent))
    return [part.as_posix() for part in parts] + [name for name in beside if name in listed] + towers[:1]


def _weights(names: Sequence[str], directory: str, folder: Path) -> list[str]:
    """The weight files in a directory: those that are loaded, see `weight_files`."""
    inside = [PurePosixPath(name).name for name in names if _directory(PurePosixPath(name)) == directory]
    prefix = f"{directory}/" if directory else ""
    index = _read(folder / INDEX) if INDEX in inside and not directory else None
    if isinstance(index, dict) and isinstance(weight_map := index.get("weight_map"), dict):
        return [str(name) for name in weight_map.values()]
    return [prefix + name for name in ([WHOLE] if WHOLE in inside else readable_weights(inside))]


def _adapters(names: Sequence[str]) -> list[str]:
    """Adapters that a model always has."""
    directories = {_directory(PurePosixPath(name)) for name in names if PurePosixPath(name).name == _ADAPTER_CONFIG}
    chosen = [directory for directory in directories if not directory or fnmatch(directory, _ADAPTERS)]
    files = [str(PurePosixPath(directory, name)) for directory in chosen for name in (_ADAPTER_CONFIG, _ADAPTER)]
    return [name for name in files if name in names]


def _module_directories(folder: Path) -> list[str]:
    """Directories of the modules of sentence-transformers."""
    modules = _read(folder / MODULES)
    entries = modules if isinstance(modules, list) else []
    paths = [entry.get("path") for entry in entries if isinstance(entry, dict)]
    return [PurePosixPath(path).as_posix() for path in paths if isinstance(path, str) and path]


def _read(path: Path) -> Any:
    """What a JSON file has; nothing if it cannot be read, as reading the model says so."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}


def _directory(path: PurePosixPath) -> str:
    return "" if path.parent == PurePosixPath() else path.parent.as_posix()
