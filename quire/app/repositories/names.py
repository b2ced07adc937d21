"""ModelName: what a name of a model says that is no path: a repository, its revision, and which of its files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from quire.config.command import ConfigError

_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_VIEWS = ("tree", "blob", "resolve", "raw")  # in URLs of pages and files, before the revision
_GGUF = ".gguf"
_LATEST = "latest"  # what ollama has for a tag that was not given


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model in a repository.

    Attributes:
        repository: its id.
        revision: the one in a URL; None: the name has none.
        variant: a quantization, or the name of a file, behind the colon; empty: none is named.
        path: a .gguf file of the repository, or a directory with such files; empty: none is named.
    """

    repository: str
    revision: str | None = None
    variant: str = ""
    path: str = ""

    @property
    def short(self) -> str:
        """The name without what people copy along with it."""
        return self.repository + (f"/{self.path}" if self.path else "") + (f":{self.variant}" if self.variant else "")


def parse_name(text: str) -> ModelName:
    """Read a name such as `user/repository:Q4_K_M`, `hf.co/user/repository` or the URL of a page or a file.

    Raises:
        ConfigError: it is a URL of another host.
    """
    path = _path_at_hub(text)
    if path is None:
        return _parts_of(text, accepts_any_path=False)
    parts = [unquote(part) for part in path.strip("/").split("/")]
    for index in (1, 2):
        if len(parts) > index + 1 and parts[index] in _VIEWS:
            inner = "/".join(parts[index + 2 :])
            is_directory = parts[index] == "tree"
            return ModelName(
                "/".join(parts[:index]),
                parts[index + 1],
                path=inner if is_directory or inner.endswith(_GGUF) else "",
            )
    return _parts_of("/".join(parts), accepts_any_path=True)


def split_variant(text: str) -> tuple[str, str]:
    """A name, and what follows its last colon; empty if there is none, or a slash behind it."""
    name, _, variant = text.rpartition(":")
    if not name or "/" in variant:
        return text, ""
    return name, "" if variant.lower() == _LATEST else variant


def _parts_of(text: str, *, accepts_any_path: bool) -> ModelName:
    name, variant = split_variant(text)
    parts = PurePosixPath(name).parts
    if len(parts) > 2 and parts[0] != "/" and (accepts_any_path or name.endswith(_GGUF)):
        return ModelName("/".join(parts[:2]), variant=variant, path="/".join(parts[2:]))
    return ModelName(name, variant=variant)


def _path_at_hub(text: str) -> str | None:
    """The path of a URL of the hub, with or without its scheme; None if the text is no URL."""
    if "://" not in text:
        host, slash, path = text.partition("/")
        return path if slash and host in _HOSTS else None
    try:
        url, mirror = urlsplit(text), urlsplit(os.environ.get("HF_ENDPOINT", ""))
    except ValueError as error:
        raise ConfigError(f"quire: {text!r} is not a URL: {error}") from error
    if url.scheme in ("http", "https") and (url.netloc in _HOSTS or (url.netloc and url.netloc == mirror.netloc)):
        return url.path
    raise ConfigError(
        f"quire: {text!r} is a URL of another host; accepted are URLs of huggingface.co, hf.co and HF_ENDPOINT, ids of "
        "repositories and paths"
    )
