"""Embeddings of pictures that clients have computed: one tensor in a file of torch or of safetensors.

They are read in worker processes. Nothing of a file is executed: of torch's pickles only the names that a tensor needs
are known.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from quire.engine.client.pictures import (
    LARGEST_VALUE,
    FixedSize,
    PanAndScan,
    PatchBudget,
    PictureInfo,
    SmartResize,
    TokenBudget,
)
from quire.engine.client.protocol import FeatureArray, PictureItem
from quire.multimodal.errors import PromptError
from quire.multimodal.pictures.layout import ItemLayout, PictureLayout, layout

_ZIP = b"PK\3\4"
_MAX_HEAD = 1 << 16  # bytes of a pickle, or of the header of safetensors
_MAX_MEMBERS = 16  # of a file of torch
_MAX_AXES = 8  # of a tensor
_BFLOAT16 = "bfloat16"
# Types of tensors, by torch's names of storages and by those of safetensors.
_STORAGES: Mapping[str, str] = {
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "DoubleStorage": "<f8",
    "BFloat16Storage": _BFLOAT16,
    "LongStorage": "<i8",
    "IntStorage": "<i4",
}
_TYPES: Mapping[str, str] = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": _BFLOAT16, "I64": "<i8", "I32": "<i4"}
_AXES = 3  # of a grid: time, height and width
_SQUARE = 64  # edge of a picture that has the same layout as any other square
_NOT_A_TENSOR = "The content must be one tensor, saved by torch.save or safetensors."


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What a pickle says of a tensor."""

    kind: str
    key: str
    offset: int
    shape: tuple[int, ...]


class _TensorUnpickler(pickle.Unpickler):
    """Read the pickle of one tensor."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuilt
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"{module}.{name}")

    @override
    def persistent_load(self, pid: Any) -> Any:
        _, kind, key, *_ = pid
        return kind, str(key)


def _rebuilt(storage: tuple[str, str], offset: int, shape: Sequence[int], stride: Sequence[int], *_: Any) -> _Tensor:
    _check_shape(shape)
    dense = [math.prod(shape[index + 1 :]) for index in range(len(shape))]
    if any(step != dense_step for step, dense_step, size in zip(stride, dense, shape, strict=True) if size > 1):
        raise ValueError("it is not contiguous")
    return _Tensor(*storage, offset, tuple(shape))


def _check_shape(shape: Sequence[Any]) -> None:
    """Refuse sizes that no tensor has, before anything is computed with them."""
    if len(shape) > _MAX_AXES or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("it has another shape")


def read_embeddings(content: bytes) -> FeatureArray:
    """The embeddings in a file: (tokens, size).

    Raises:
        PromptError: it has another content.
    """
    values = _tensor(content)
    if values.dtype != np.float32:
        raise PromptError("The embeddings must be floating-point numbers.", "image_embeds")
    if values.ndim == 3 and len(values) == 1:
        values = values[0]
    if values.ndim != 2 or not values.size:
        raise PromptError(
            f"The embeddings must be a tensor of tokens and their values, not of {'x'.join(map(str, values.shape))}.",
            "image_embeds",
        )
    if not bool((np.abs(values) <= LARGEST_VALUE).all()):  # not so with NaN either
        raise PromptError(
            f"The embeddings have NaN or infinite values, or values beyond {LARGEST_VALUE:.0f}.", "image_embeds"
        )
    return values


def read_grid(content: bytes) -> tuple[int, ...]:
    """The numbers in a file with a tensor of integers.

    Raises:
        PromptError: it has another content, or more than three numbers.
    """
    values = _tensor(content)
    if values.dtype != np.int64 or values.size != _AXES:
        raise PromptError("`image_grid_thw` must be a tensor of three integers.", "image_embeds.image_grid_thw")
    return tuple(values.reshape(-1).tolist())


def _tensor(content: bytes) -> NDArray[Any]:
    try:
        return _from_torch(content) if content.startswith(_ZIP) else _from_safetensors(content)
    except MemoryError:
        raise
    except Exception as error:  # pickle and zipfile raise whatever they come across in a broken file
        raise PromptError(_NOT_A_TENSOR, "image_embeds") from error


def _from_torch(content: bytes) -> NDArray[Any]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {member.filename: member for member in archive.infolist()}
        (head,) = [name for name in members if name.endswith("/data.pkl")]
        if len(members) > _MAX_MEMBERS or members[head].file_size > _MAX_HEAD:
            raise ValueError("it has more than a tensor")
        if any(member.compress_type != zipfile.ZIP_STORED for member in members.values()):
            raise ValueError("it is compressed")
        folder = head.removesuffix("data.pkl")
        tensor = _TensorUnpickler(io.BytesIO(archive.read(head))).load()
        if not isinstance(tensor, _Tensor):
            raise TypeError("it is no tensor")
        if members.get(f"{folder}byteorder") and archive.read(f"{folder}byteorder") != b"little":
            raise ValueError("it is of another byte order")
        return _array(archive.read(f"{folder}data/{tensor.key}"), tensor.kind, tensor.shape, tensor.offset)


def _from_safetensors(content: bytes) -> NDArray[Any]:
    length = int.from_bytes(content[:8], "little")
    if length > _MAX_HEAD:
        raise ValueError("its header is too long")
    header, values = json.loads(content[8 : 8 + length]), content[8 + length :]
    (tensor,) = [entry for name, entry in header.items() if name != "__metadata__"]
    start, end = tensor["data_offsets"]
    if not 0 <= start <= end <= len(values):
        raise ValueError("the values are not where its header says")
    _check_shape(tensor["shape"])
    return _array(values[start:end], _TYPES[tensor["dtype"]], tuple(tensor["shape"]), 0)


def _array(content: bytes, kind: str, shape: tuple[int, ...], offset: int) -> NDArray[Any]:
    """The values of a tensor: float32, or int64."""
    count = math.prod(shape)
    if kind == _BFLOAT16:
        halves = np.frombuffer(content, "<u2", count, 2 * offset)
        return (halves.astype(np.uint32) << 16).view(np.float32).reshape(shape)
    values = np.frombuffer(content, kind, count, np.dtype(kind).itemsize * offset)
    is_integer = np.issubdtype(values.dtype, np.integer)
    return (values.astype(np.int64) if is_integer else values.astype(np.float32)).reshape(shape)


def embeddings_layout(info: PictureInfo, values: FeatureArray, grid: Sequence[int] | None) -> PictureLayout:
    """The layout of a picture whose embeddings are known.

    Args:
        info: facts about the model.
        values: the embeddings.
        grid: time, height and width in patches, of models that need them (Qwen-VL, GLM-V).

    Raises:
        PromptError: they do not fit to each other or to the model.
    """
    tokens, size = values.shape
    if size != info.embedding_size:
        raise PromptError(
            f"The embeddings have {size} values each; those of this model have {info.embedding_size}.", "image_embeds"
        )
    match info.geometry:
        case FixedSize(tokens=expected) | PanAndScan(tokens=expected) | PatchBudget(tokens=expected):
            if tokens != expected:
                raise PromptError(
                    f"There are {tokens} embeddings; a picture of this model has {expected}.", "image_embeds"
                )
            return layout(info, _SQUARE, _SQUARE)
        case TokenBudget(largest=most):
            if tokens > most:
                raise PromptError(
                    f"There are {tokens} embeddings; a picture of this model has {most} at most.", "image_embeds"
                )
            item = ItemLayout(images=0, height=0, width=0, row_length=tokens)
            return PictureLayout(f"{info.before}{info.token}{info.after}", (item,))
        case SmartResize(merged=edge):
            rows, columns = _merged(tokens, grid, edge)
            item = ItemLayout(images=0, height=0, width=0, row_length=tokens, grid=(rows, columns))
            return PictureLayout(f"{info.before}{info.token}{info.after}", (item,))
    raise PromptError(
        "Embeddings of pictures are not supported for this model, which divides pictures into tiles or rows.",
        "image_embeds",
    )


def _merged(tokens: int, grid: Sequence[int] | None, edge: int) -> tuple[int, int]:
    """Rows and columns of the tokens; each stands for a square of `edge` times `edge` patches."""
    if grid is None or len(grid) != _AXES or grid[0] != 1 or min(grid) < 1:
        raise PromptError(
            "`image_grid_thw` must be [1, HEIGHT, WIDTH]: the patches of the picture.", "image_embeds.image_grid_thw"
        )
    _, height, width = grid
    if height % edge or width % edge:
        raise PromptError(
            f"`image_grid_thw` has {height} x {width} patches; both must be multiples of {edge}, as each embedding of "
            f"this model stands for {edge} x {edge} patches.",
            "image_embeds.image_grid_thw",
        )
    if height * width != tokens * edge**2:
        raise PromptError(
            f"`image_grid_thw` has {height} x {width} patches, which do not become {tokens} embeddings.",
            "image_embeds.image_grid_thw",
        )
    return height // edge, width // edge


def embeddings_item(values: FeatureArray, planned: PictureLayout) -> PictureItem:
    """The item of a picture whose embeddings are known."""
    (item,) = planned.items
    digest = hashlib.sha256(b"embeddings")
    digest.update(repr((values.shape, item.grid)).encode())
    digest.update(values.tobytes())
    return PictureItem(
        hash=digest.digest(),
        length=item.length,
        pixels=np.empty((0, 0, 0, 3), np.uint8),
        encoding=values,
        positions=item.positions(),
        advance=item.advance,
    )
