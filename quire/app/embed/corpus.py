"""Files of a corpus: texts that are read, and embeddings that are written while they arrive.

A file of embeddings appears under its name when it is complete.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import orjson
from numpy.typing import NDArray

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


FORMATS = (".npy", ".parquet")
Vectors = NDArray[np.float32]


class Sink(Protocol):
    """A file; a context manager. It is removed if the block in the `with` statement fails."""

    def write(self, texts: Sequence[str], vectors: Vectors) -> None:
        """Append texts and their embeddings."""

    def __enter__(self) -> Self:
        """Open the file."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the file its name, or remove it."""


def has_parquet() -> bool:
    """Return whether the package is installed that writes .parquet."""
    return importlib.util.find_spec("pyarrow") is not None


def open_sink(path: Path, rows: int, field: str) -> Sink:
    """A sink for `rows` embeddings. `field`: name of the column with the texts, in a .parquet file."""
    return _ParquetSink(path, field) if path.suffix.lower() == ".parquet" else _NpySink(path, rows)


class _Partial:
    """A file with a temporary name beside its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.partial")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()
        if kind is None:
            self._partial.replace(self._path)
        else:
            self._partial.unlink(missing_ok=True)

    def _finish(self) -> None:
        """Write the rest of the file."""


class _NpySink(_Partial):
    """One array of float32, a row for each text."""

    def __init__(self, path: Path, rows: int) -> None:
        super().__init__(path)
        self._rows = rows
        self._written = 0
        self._array: Any = None

    def write(self, texts: Sequence[str], vectors: Vectors) -> None:
        if self._array is None:
            self._open(vectors.shape[1])
        self._array[self._written : self._written + len(vectors)] = vectors
        self._written += len(vectors)

    def _open(self, size: int) -> None:
        # NumPy's annotations call the result an array of any type.
        self._array = np.lib.format.open_memmap(self._partial, "w+", np.float32, (self._rows, size))

    def _finish(self) -> None:
        if self._array is None:
            self._open(0)
        self._array.flush()
        self._array = None


class _ParquetSink(_Partial):
    """Columns with the texts and their embeddings."""

    def __init__(self, path: Path, field: str) -> None:
        super().__init__(path)
        self._field = field
        self._writer: Any = None

    def write(self, texts: Sequence[str], vectors: Vectors) -> None:
        import pyarrow as pa  # noqa: PLC0415 not installed everywhere
        from pyarrow import parquet  # noqa: PLC0415 as above

        size = vectors.shape[1]
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), size)
        table = pa.table({self._field: pa.array(texts, pa.string()), "embedding": column})
        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._partial, table.schema)
        self._writer.write_table(table)

    def _finish(self) -> None:
        if self._writer is None:
            self.write([], np.zeros((0, 1), np.float32))
        self._writer.close()
