"""Chooses one GGUF file of several that hold the same model in different quantizations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from quire.engine.models.checkpoint.gguf.folder import gguf_models, name_of

_DEFAULT = "Q4_K_M"
_MOST_SHOWN = 20  # files in an error
# What names of files say about their quantization. `UD-`: with other bits where they matter.
_LABEL = re.compile(
    r"(?:^|(?<=[-._ ]))"
    r"(?:UD-)?(?:I?Q\d(?:_K(?:_(?:XXL|XL|L|M|S|XS))?|_\d(?:_\d_\d)?|_(?:XXS|XS|S|M|L|XL|NL|K[A-Z]+))?"
    r"|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4)"
    r"(?=$|[-._ ])",
    re.IGNORECASE,
)
_ALIASES = {"FP16": "F16", "FP32": "F32", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "Q3_K": "Q3_K_M"}
_DYNAMIC = "UD-"
# Endings of labels with as many bits, the most exact last.
_ENDINGS = ("XXS", "XS", "S", "M", "NL", "0", "K_S", "1", "K", "K_M", "K_L", "K_XL")
_SEPARATORS = "-._ "
_STATISTICS = "imatrix"  # in names of files, without a label: what was measured for quantizing


@dataclass(frozen=True, slots=True)
class GgufChoice:
    """A file, and why it is the one."""

    file: str
    reason: str


def choose_gguf(names: Iterable[str], variant: str = "") -> GgufChoice | None:
    """Choose among the files of a folder or a repository.

    Args:
        names: paths of all files.
        variant: the quantization that is wanted, or the name of a file; empty: none was named.

    Returns:
        None if no file holds a model.

    Raises:
        ValueError: there is none with this quantization, or files hold different models.
    """
    files = [name for name in gguf_models(names) if label_of(name) or _STATISTICS not in name]
    if not files:
        return None
    if variant:
        return GgufChoice(_named(files, variant), f"as {variant} was named, of {_labels(files)}")
    if len(files) == 1:
        return GgufChoice(files[0], "the only GGUF file with one")
    if len({_model(file) for file in files}) > 1:
        raise ValueError(f"has several models; name the file of one: {_some(files)}")
    default = [file for file in files if label_of(file) == _DEFAULT]
    if default:
        return GgufChoice(default[0], f"as {_DEFAULT} is taken where no quantization is named, of {_labels(files)}")
    best = max(files, key=lambda file: _exactness(label_of(file)))
    return GgufChoice(
        best,
        f"the most exact one of at most 8 bits, as no quantization is named, of {_labels(files)} without {_DEFAULT}",
    )


def label_of(file: str) -> str:
    """The quantization that the name of a file, or else that of its directory, says; empty if none does."""
    path = PurePosixPath(file)
    for name in (name_of(path), path.parent.name):
        if labels := _LABEL.findall(name):
            label = str(labels[-1]).upper()
            return _ALIASES.get(label, label)
    return ""


def _named(files: Sequence[str], variant: str) -> str:
    """The file that a quantization or the name of a file means.

    Raises:
        ValueError: there is none, or there are several.
    """
    label = _ALIASES.get(variant.upper(), variant.upper())
    stem = variant.removesuffix(".gguf")
    tries = (
        [file for file in files if file == variant or name_of(PurePosixPath(file)) == stem],
        [file for file in files if label_of(file) == label],
        [file for file in files if label_of(file).removeprefix(_DYNAMIC) == label],
    )
    matching = next(filter(None, tries), [])
    if not matching:
        raise ValueError(f"has no GGUF file {variant!r}; it has {_labels(files)}")
    if len({_model(file) for file in matching}) > 1:
        raise ValueError(f"has several models in {variant}; name the file of one: {_some(matching)}")
    return matching[0]


def _model(file: str) -> str:
    """The name of the model in a file: that of the file without its quantization."""
    name = name_of(PurePosixPath(file))
    matches = list(_LABEL.finditer(name))
    if matches:
        name = name[: matches[-1].start()] + name[matches[-1].end() :]
    return name.strip(_SEPARATORS).lower()


def _exactness(label: str) -> tuple[int, int, int, bool]:
    """A key by which the best file is the largest: up to 8 bits before 16 and 32, since these are no better there."""
    plain = label.removeprefix(_DYNAMIC)
    digits = re.search(r"\d+", plain)
    if digits is None:
        return 0, 0, 0, False
    bits = int(digits[0])
    ending = plain[digits.end() :].strip("_")
    rank = _ENDINGS.index(ending) if ending in _ENDINGS else 0
    return (2 if bits <= 8 else 1), (bits if bits <= 8 else -bits), rank, label != plain


def _labels(files: Sequence[str]) -> str:
    return _some([label_of(file) or file for file in files])


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_SHOWN
    return ", ".join(names[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")
