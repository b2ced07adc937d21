"""Makes model folders of GGUF files, so that everything that reads a model's folder works for them too.

A folder has config.json, the files of a tokenizer, and links to the GGUF files. It lies in the user's cache, under a
key of the files' paths, sizes and times, so that it is made once; the folders that were used last are kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import tokenizers

from quire.engine.models.checkpoint.gguf.architectures import config_of, pooling_of
from quire.engine.models.checkpoint.gguf.container import open_parts, parts_of
from quire.engine.models.checkpoint.gguf.facts import GgufFacts, facts_of
from quire.engine.models.checkpoint.gguf.projector import ARCHITECTURE, KINDS, Projector, kind_of
from quire.engine.models.checkpoint.gguf.tokenizer import GgufTokenizer
from quire.engine.models.errors import BrokenFolder, ModelError, UnsupportedModel
from quire.engine.models.user_cache import user_cache

logger = logging.getLogger(__name__)
METHOD = "gguf"  # `quant_method` in the config of such a folder
PROJECTOR = "mmproj.gguf"  # name of the link to the file with the part that reads pictures
_VERSION = 5  # of what is written; folders of others are not used
_MOST_FOLDERS = 32
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
_PROJECTOR = "mmproj"  # in the names of files with the part of a model that reads pictures
_DENSE = ("dense_2.weight", "dense_3.weight")  # layers behind the pooling
_EXACT = ("BF16", "F16", "F32")  # kinds of numbers in such files, best first
# Files beside a GGUF file that take the place of what it says about its tokenizer.
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
BESIDE = (_TOKENIZER, _TOKENIZER_CONFIG, "chat_template.jinja")
PREPROCESSOR = "preprocessor_config.json"  # and one that says how pictures are resized


def gguf_models(names: Iterable[str]) -> list[str]:
    """The files that hold a model each, of the files of a folder; of one that is split into several, the first."""
    files = sorted(name for name in names if name.endswith(".gguf") and not is_projector(name))
    return [name for name in files if not _SPLIT.search(name[:-5]) or "-00001-of-" in name]


def is_projector(name: str) -> bool:
    """Whether this is the name of a GGUF file with the part of a model that reads pictures."""
    base = PurePosixPath(name).name
    return base.endswith(".gguf") and _PROJECTOR in base


def projectors(names: Iterable[str]) -> list[str]:
    """The files with parts that read pictures, those first whose numbers seem to be exactest."""
    return sorted(filter(is_projector, names), key=_exactness)


def name_of(file: PurePath) -> str:
    """The name of a model by that of its file."""
    return _SPLIT.sub("", file.stem)


def model_folder(file: Path, *, with_weights: bool = True) -> Path:
    """The model folder of a GGUF file, which is made if there is none yet.

    Args:
        file: if the model is split into several, the first. A file with a part that reads pictures lies beside it.
        with_weights: the file must have all of its tensors. Else its head is enough, if no small tensor is needed.

    Raises:
        ModelError: the file cannot be read, or its model is not supported.
    """
    files = parts_of(file.absolute())
    cache = user_cache(METHOD)
    beside = _names_beside(files[0])
    seeing = [files[0].parent / name for name in projectors(beside)]
    key = cache / _key([*files, *seeing])
    folder = key / name_of(files[0])
    if folder.is_dir():
        with suppress(OSError):
            os.utime(key)
    else:
        facts = facts_of(open_parts(files[0], with_tensors=with_weights))
        _make(key, folder.name, files, facts, seeing, is_only=len(gguf_models(beside)) == 1)
    if not folder.is_dir():
        raise BrokenFolder(f"{folder} cannot be written")
    if not (folder / PROJECTOR).is_symlink():
        _log_unsupported(files[0].name, seeing)
    return folder


def _make(
    key: Path, name: str, files: Sequence[Path], facts: GgufFacts, seeing: Sequence[Path], *, is_only: bool
) -> None:
    """Make the folder of a model, which appears when it is complete.

    Args:
        key: the directory in the cache that the folder lies in.
        name: of the folder.
        files: the model's.
        facts: what they say.
        seeing: files that may have the part that reads pictures, the best first.
        is_only: no other model lies beside these files.
    """
    made = Path(tempfile.mkdtemp(prefix=".", dir=key.parent))
    try:
        inner = made / name
        inner.mkdir()
        _write(inner, files, facts, _projector(seeing, facts, is_only=is_only))
        with suppress(OSError):  # another process was faster
            made.rename(key)
    except OSError as error:
        raise BrokenFolder(f"{key / name} cannot be written: {error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    _remove_oldest(key.parent)


def _names_beside(file: Path) -> list[str]:
    """The names of the files in the directory of a file."""
    try:
        return sorted(path.name for path in file.parent.iterdir())
    except OSError:  # no permission
        return [file.name]


def _projector(candidates: Sequence[Path], text: GgufFacts, *, is_only: bool) -> Projector | None:
    """The part of a model that reads pictures; None if there is none.

    Args:
        candidates: files that may have it, the best first.
        text: facts of the language model.
        is_only: no other model lies beside these files, so that they belong to this one.

    Raises:
        ModelError: there are files of types that are supported, of which none can be used.
    """
    if text.architecture == ARCHITECTURE:
        raise UnsupportedModel(
            f"{text.file} is the part of a model that reads pictures; give the path of the file with its language "
            "model, and leave this one beside it"
        )
    refusal: ModelError | None = None
    for path in candidates:
        try:
            facts = facts_of(open_parts(path))
            if kind_of(facts) not in KINDS:
                continue
            projector = Projector(path, facts, text)
            projector.check_fits()
        except ModelError as error:
            refusal = refusal or error
            continue
        logger.info("%s reads pictures with %s, which lies beside it", text.file, path.name)
        return projector
    if refusal is not None and is_only:
        raise refusal
    if refusal is not None:
        logger.info("%s reads no pictures: no file beside it is the part for that (%s)", text.file, refusal)
    return None


def _log_unsupported(text: str, candidates: Sequence[Path]) -> None:
    """Say that a model reads no pictures, since the part for that is of a type that is not supported.

    Args:
        text: name of the file with the language model.
        candidates: files that may have the part, the best first.
    """
    for path in candidates:
        with suppress(ModelError):
            if (kind := kind_of(facts_of(open_parts(path)))) not in KINDS:
                logger.warning(
                    "%s reads no pictures: %s, which lies beside it, has a projector of the type %r, which is not "
                    "supported; supported are %s",
                    text,
                    path.name,
                    kind,
                    ", ".join(sorted(KINDS)),
                )
                return


def _exactness(name: str) -> tuple[int, str]:
    """A key by which the exactest numbers come first."""
    words = re.split(r"[^A-Z0-9]", PurePosixPath(name).stem.upper())
    return next((index for index, kind in enumerate(_EXACT) if kind in words), len(_EXACT)), name


def _key(files: Sequence[Path]) -> str:
    """A name for files as they are now, and for what lies beside them."""
    digest = hashlib.sha256(f"{_VERSION}".encode())
    for file in (*files, *_beside(files[0])):
        try:
            status = file.stat()
        except OSError as error:
            raise BrokenFolder(f"{file} cannot be read: {error}") from error
        digest.update(f"\0{file}\0{status.st_size}\0{status.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def _beside(file: Path) -> list[Path]:
    return [path for name in (*BESIDE, PREPROCESSOR) if (path := file.parent / name).is_file()]


def _write(folder: Path, files: Sequence[Path], facts: GgufFacts, projector: Projector | None) -> None:
    """Write the files of a model's folder.

    Raises:
        ModelError: the model is not supported.
    """
    config = config_of(facts)
    whole = config if projector is None else projector.config(config)
    _dump(folder / "config.json", {**whole, "quantization_config": {"quant_method": METHOD}})
    tokenizer = GgufTokenizer(facts)
    links = {path.name: path for path in _beside(files[0])}
    if _TOKENIZER in links:
        logger.info("the tokenizer of %s is that of %s", files[0].name, links[_TOKENIZER])
    else:
        links.pop(_TOKENIZER_CONFIG, None)
        _dump(folder / _TOKENIZER, tokenizer.tokenizer())
        _check_tokenizer(folder / _TOKENIZER, files[0].name)
    if _TOKENIZER_CONFIG not in links:
        _dump(folder / _TOKENIZER_CONFIG, tokenizer.config())
    _dump(folder / "generation_config.json", tokenizer.generation())
    if (pooling := pooling_of(facts)) is not None:
        _write_modules(folder, config, pooling, _dense_layers(facts))
    if projector is None:
        links.pop(PREPROCESSOR, None)
    else:
        (folder / PROJECTOR).symlink_to(projector.path)
        if PREPROCESSOR not in links:
            _dump(folder / PREPROCESSOR, projector.preprocessor())
    for path in (*files, *links.values()):
        (folder / path.name).symlink_to(path)


def _check_tokenizer(path: Path, file: str) -> None:
    try:
        tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # it has no kind of its own for broken files
        raise BrokenFolder(f"{file}: its tokenizer cannot be used: {error}") from error


def _dense_layers(facts: GgufFacts) -> list[tuple[int, ...]]:
    """The shapes of the layers behind the pooling.

    Raises:
        BrokenFolder: one is no matrix.
    """
    shapes = [facts.shapes[name] for name in _DENSE if name in facts.shapes]
    for shape in shapes:
        if len(shape) != 2:
            raise BrokenFolder(f"{facts.file}: {' and '.join(_DENSE)} must be matrices, but a shape is {shape}")
    return shapes


def _write_modules(folder: Path, config: Mapping[str, Any], pooling: str, layers: Sequence[tuple[int, ...]]) -> None:
    """Write the modules that sentence-transformers has behind the model.

    `layers`: shapes of the weights of those behind the pooling, which lie in the file.
    """
    names = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "lasttoken": "pooling_mode_lasttoken"}
    dense = {f"{index}_Dense": "Dense" for index in range(2, len(layers) + 2)}
    kinds = {"": "Transformer", "1_Pooling": "Pooling", **dense, f"{len(layers) + 2}_Normalize": "Normalize"}
    for path, (size_out, size_in) in zip(dense, layers, strict=True):
        (folder / path).mkdir()
        _dump(folder / path / "config.json", {"in_features": size_in, "out_features": size_out, "bias": False})
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    _dump(folder / "modules.json", modules)
    (folder / "1_Pooling").mkdir()
    _dump(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": config["hidden_size"], names[pooling]: True},
    )


def _dump(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _remove_oldest(cache: Path) -> None:
    """Keep the folders that were used last."""
    with suppress(OSError):
        used = sorted((path for path in cache.iterdir() if not path.name.startswith(".")), key=_time, reverse=True)
        for path in used[_MOST_FOLDERS:]:
            shutil.rmtree(path, ignore_errors=True)


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process removes it
        return 0.0
