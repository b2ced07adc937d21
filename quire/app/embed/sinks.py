"""Files of embeddings, which are written while they arrive and appear under their names when they are complete."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

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
    """Whether the package is installed that writes .parquet."""
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
