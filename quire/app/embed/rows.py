"""The texts of a file: JSON lines, or plain lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

_MAX_QUOTED = 60  # characters of a line in error messages


class RowError(Exception):
    """A line of the file has no text."""


@dataclass(frozen=True, slots=True)
class Row:
    """A text, and the number of its line."""

    line: int
    text: str


def rows_of(path: Path, field: str) -> Iterator[Row]:
    """The texts of a file, in order; blank lines have none.

    Args:
        path: the file; with the suffix .txt each line is a text, else a JSON object.
        field: field of the objects that contains the text.

    Raises:
        RowError: a line is not an object with a text in this field.
    """
    plain = path.suffix.lower() == ".txt"
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield Row(number, _plain(path, number, line) if plain else _text(path, number, line, field))


def count_rows(path: Path) -> int:
    """The number of texts in a file."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def batches_of(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    """Rows in lists of this size; the last one may be shorter."""
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _plain(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise RowError(f"{path}, line {number}: the line is not UTF-8") from error


def _text(path: Path, number: int, line: bytes, field: str) -> str:
    try:
        content = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise RowError(f"{path}, line {number}: the line is not JSON: {_shown(line)}") from error
    text = content.get(field) if isinstance(content, dict) else None
    if not isinstance(text, str):
        raise RowError(f"{path}, line {number}: expected an object with a string in {field!r}, not {_shown(line)}")
    return text


def _shown(line: bytes) -> str:
    return repr(line.decode(errors="replace").strip()[:_MAX_QUOTED])
