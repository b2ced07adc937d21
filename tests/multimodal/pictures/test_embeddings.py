"""Embeddings of pictures: one tensor in a file of torch or of safetensors, of which nothing is executed."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from quire.engine.client.pictures import (
    FixedSize,
    Geometry,
    PanAndScan,
    PatchBudget,
    PictureInfo,
    SmartResize,
    SplitTiles,
    TokenBudget,
)
from quire.multimodal.errors import PromptError
from quire.multimodal.pictures.embeddings import embeddings_item, embeddings_layout, read_embeddings, read_grid

VALUES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
SMART = SmartResize(multiple=4, min_pixels=16, max_pixels=1 << 12)


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("write", [saved, lambda value: safetensors.torch.save({"a": value})])
def test_tensors_of_floats(dtype: torch.dtype, write: Callable[[torch.Tensor], bytes]) -> None:
    values = VALUES.to(dtype)
    for sent in (values, values[None]):
        np.testing.assert_array_equal(read_embeddings(write(sent)), values.float().numpy())


def test_a_part_of_a_larger_tensor() -> None:
    np.testing.assert_array_equal(read_embeddings(saved(VALUES[2:4])), VALUES[2:4].numpy())


def test_grids() -> None:
    for grid in (torch.tensor([[1, 4, 6]]), torch.tensor([1, 4, 6], dtype=torch.int32)):
        assert read_grid(saved(grid)) == read_grid(safetensors.torch.save({"a": grid})) == (1, 4, 6)
    for wrong in (saved(VALUES), saved(torch.tensor([1, 2])), b""):
        with pytest.raises(PromptError):
            read_grid(wrong)


class _Command:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def _zip(pickled: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/data/0", bytes(1000))
    return file.getvalue()


def _of_many_axes() -> bytes:
    """The pickle of a tensor whose number of values takes seconds to compute."""

    def pushed(value: Any) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    storage = b"(" + pushed("storage") + b"ctorch\nFloatStorage\n" + pushed("0") + pushed("cpu") + pushed(1) + b"tQ"
    sizes = pushed((2,) * 15_000)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + pushed(0) + sizes + sizes + b"tR."


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "must be one tensor"),
    "a picture": (lambda: b"\x89PNG\r\n\x1a\n" + bytes(100), "must be one tensor"),
    "a command": (lambda: _zip(pickle.dumps(_Command())), "must be one tensor"),
    "a command beside it": (lambda: saved([VALUES, _Command()]), "must be one tensor"),
    "several tensors": (lambda: saved([VALUES, VALUES]), "must be one tensor"),
    "no tensor": (lambda: saved({"a": 5}), "must be one tensor"),
    "compressed": (lambda: _zip(pickle.dumps(5), zipfile.ZIP_DEFLATED), "must be one tensor"),
    "half": (lambda: saved(VALUES)[:500], "must be one tensor"),
    "another order": (lambda: saved(VALUES.T), "must be one tensor"),
    "integers": (lambda: saved(torch.arange(6)), "floating-point"),
    "one axis": (lambda: saved(VALUES[0]), "not of 4"),
    "empty": (lambda: saved(VALUES[:0]), "not of 0x4"),
    "not finite": (lambda: saved(VALUES / 0), "NaN or infinite"),
    "an old file": (lambda: saved(VALUES, _use_new_zipfile_serialization=False), "must be one tensor"),
    "a header without an end": (lambda: b"\xff" * 100, "must be one tensor"),
    "a tensor that is longer": (
        lambda: safetensors.torch.save({"a": VALUES}).replace(b"[6,4]", b"[9,4]"), "must be one tensor"
    ),
    "a size below zero": (
        lambda: safetensors.torch.save({"a": VALUES}).replace(b"[6,4]", b" [-1]"), "must be one tensor"
    ),
    "an end behind the file": (
        lambda: safetensors.torch.save({"a": VALUES}).replace(b"[0,96]", b"[0,99]"), "must be one tensor"
    ),
    "thousands of axes": (lambda: _zip(_of_many_axes()), "must be one tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_tensor_is_refused(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, reason = HOSTILE[name]
    with pytest.raises(PromptError, match=reason):
        read_embeddings(make())
    assert not list(tmp_path.iterdir())


def _info(geometry: Geometry) -> PictureInfo:
    return PictureInfo(placeholder=1, placeholder_text="<image>", geometry=geometry, embedding_size=4)


def test_items() -> None:
    values = VALUES.numpy()
    for geometry in (
        FixedSize(height=8, width=8, tokens=6),
        PanAndScan(height=8, width=8, tokens=6),
        PatchBudget(patch=4, max_patches=9, tokens=6),
        TokenBudget(multiple=4, max_tokens=5, largest=6),
    ):
        planned = embeddings_layout(_info(geometry), values, None)
        item = embeddings_item(values, planned)
        assert (planned.text, item.length, item.positions, item.pixels.size) == ("<image>", 6, None, 0)
    planned = embeddings_layout(_info(SMART), values, (1, 4, 6))
    item = embeddings_item(values, planned)
    assert item.positions is not None
    assert (item.positions.max(1).tolist(), item.advance) == ([0, 1, 2], 3)
    upright = embeddings_item(values, embeddings_layout(_info(SMART), values, (1, 6, 4)))
    assert item.hash != upright.hash


@pytest.mark.parametrize(
    ("geometry", "grid", "reason"),
    [
        (FixedSize(height=8, width=8, tokens=5), None, "6 embeddings; a picture of this model has 5"),
        (TokenBudget(multiple=4, max_tokens=5, largest=5), None, "6 embeddings; a picture of this model has 5 at most"),
        (SMART, None, "must be"),
        (SMART, (2, 4, 6), "must be"),
        (SMART, (1, -4, -6), "must be"),
        (SMART, (1, 4, 5), "multiples of 2"),
        (SMART, (1, 2, 3), "multiples of 2"),  # one embedding for each patch
        (SMART, (1, 6, 9), "multiples of 2"),  # for each nine
        (SMART, (1, 12, 18), "do not become 6 embeddings"),
        (SMART, (1, 1 << 62, 1 << 62), "do not become 6 embeddings"),
        (SplitTiles(tile=8, longest_edge=8, tokens=6), None, "not supported for this model"),
    ],
)
def test_what_does_not_fit_is_refused(geometry: Geometry, grid: tuple[int, ...] | None, reason: str) -> None:
    with pytest.raises(PromptError, match=reason):
        embeddings_layout(_info(geometry), VALUES.numpy(), grid)


def test_another_size_is_refused() -> None:
    with pytest.raises(PromptError, match="have 3 values each; those of this model have 4"):
        embeddings_layout(_info(SMART), VALUES.numpy()[:, :3], (1, 4, 6))
