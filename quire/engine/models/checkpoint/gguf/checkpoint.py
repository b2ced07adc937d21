"""GgufCheckpoint: the tensors of GGUF files, as the weights of a Hugging Face checkpoint."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.models.checkpoint.checkpoint import Checkpoint, Progress, WeightTaker, wanted
from quire.engine.models.checkpoint.formats.stored_groups import StoredGroups
from quire.engine.models.checkpoint.formats.weight_format import NamedWeight
from quire.engine.models.checkpoint.gguf.blocks import PLAIN, stored_blocks, with_columns
from quire.engine.models.checkpoint.gguf.container import GgufFile, TensorInfo, open_parts
from quire.engine.models.checkpoint.gguf.facts import facts_of
from quire.engine.models.checkpoint.gguf.folder import PROJECTOR, gguf_models
from quire.engine.models.checkpoint.gguf.projector_names import ProjectorNames
from quire.engine.models.checkpoint.gguf.rules import Piece
from quire.engine.models.checkpoint.gguf.tensor_names import GgufNames
from quire.engine.models.checkpoint.safetensors import PlainName
from quire.engine.models.errors import BrokenFolder


class GgufCheckpoint(Checkpoint):
    """The tensors of GGUF files."""

    def __init__(self, folder: Path, plain_name: PlainName = str) -> None:
        """Open the files.

        Args:
            folder: one that was made of them, see `gguf.folder`.
            plain_name: see `SafetensorsFile`.

        Raises:
            BrokenFolder: a file is missing or cannot be read.
        """
        names = gguf_models(path.name for path in folder.iterdir())
        if len(names) != 1:
            raise BrokenFolder(f"{folder} must have one GGUF file, but has {len(names)}")
        text, projector = open_parts(folder / names[0]), _projector(folder)
        self._files = [*text, *projector]
        self._owner = {name: file for file in self._files for name in file.tensors}
        if len(self._owner) < sum(len(file.tensors) for file in self._files):
            raise BrokenFolder(f"{names[0]} and the file with its projector both have tensors of some name")
        names_of_text = GgufNames(facts_of(text))
        pieces = _pieces(names_of_text, text)
        if projector:
            pieces |= _pieces(ProjectorNames(facts_of(projector)), projector)
        self._pieces = {
            tensor: [(name, piece) for piece in tensor_pieces if (name := plain_name(piece.name)) is not None]
            for tensor, tensor_pieces in pieces.items()
        }
        self._numbers_of = {
            plain: numbers
            for name, numbers in names_of_text.numbers().items()
            if (plain := plain_name(name)) is not None
        }
        self._tensor_of = {name: tensor for tensor, pieces in self._pieces.items() for name, _ in pieces}

    @override
    def __exit__(self, *_: object) -> None:
        # Tensors may still be views of the maps; they are closed with the last of them.
        self._owner.clear()
        self._files.clear()

    @property
    @override
    def num_tensors(self) -> int:
        return len(self._tensor_of) + len(self._numbers_of)

    @property
    @override
    def total_bytes(self) -> int:
        return sum(info.end - info.begin for file in self._files for info in file.tensors.values())

    @override
    def dtype(self) -> torch.dtype:
        """bfloat16 where most bytes are those of quantized weights."""
        sizes: dict[torch.dtype, int] = {}
        for file in self._files:
            for info in file.tensors.values():
                dtype = PLAIN.get(info.kind.name, torch.bfloat16)
                sizes[dtype] = sizes.get(dtype, 0) + info.end - info.begin
        return max(sizes, key=lambda dtype: sizes[dtype], default=torch.bfloat16)

    @override
    def names(self) -> Set[str]:
        return self._tensor_of.keys() | self._numbers_of.keys()

    @override
    def dtype_of(self, name: str) -> torch.dtype:
        if name in self._numbers_of:
            return torch.float32
        return PLAIN.get(self._info(self._tensor_of[name]).kind.name, torch.bfloat16)

    @override
    def equal(self, first: str, second: str) -> bool:
        tensors = self._tensor_of[first], self._tensor_of[second]
        kinds = {self._info(tensor).kind for tensor in tensors}
        left, right = (self._bytes(tensor) for tensor in tensors)
        same = len(kinds) == 1 and torch.equal(left, right)
        for tensor in tensors:
            self._release(tensor)
        return same

    @override
    def tensors(
        self, dtype: torch.dtype, progress: Progress, taker: WeightTaker | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, stated in self._numbers_of.items():
            yield name, torch.tensor(stated)
        for tensor, pieces in self._pieces.items():
            for name, piece in pieces:
                weight = self._made(tensor, piece) if piece.make is not None else self._part(tensor, piece)
                if isinstance(weight, Tensor):
                    yield name, weight
                    continue
                named = NamedWeight(name, weight, ())
                file = self._owner[tensor].path.name
                if (numbers := wanted(file, tensor, named, dtype, taker)) is not None:
                    yield name, numbers
            self._release(tensor)
            progress(self._info(tensor).end - self._info(tensor).begin)

    def _made(self, tensor: str, piece: Piece) -> Tensor:
        """A weight that is computed from tensors.

        Raises:
            BrokenFolder: one of them is missing, or their shapes do not match.
        """
        assert piece.make is not None
        if missing := [name for name in piece.others if name not in self._owner]:
            raise BrokenFolder(f"{self._owner[tensor].path.name}: {tensor} is there, but {missing[0]} is missing")
        try:
            return piece.make([self._numbers(name) for name in (tensor, *piece.others)])
        except (RuntimeError, ValueError, IndexError) as error:
            raise BrokenFolder(f"{self._owner[tensor].path.name}: {tensor} has a wrong shape: {error}") from error

    def _numbers(self, tensor: str) -> Tensor:
        """All numbers of a tensor."""
        weight = self._part(tensor, Piece(tensor))
        shape = self._info(tensor).shape
        return weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32).view(shape)

    def _part(self, tensor: str, piece: Piece) -> Tensor | StoredGroups:
        """The part of a tensor that a weight has, with its rows in order."""
        weight = self._stored_part(tensor, piece)
        factor = self._factor(tensor, piece)
        if factor is None:
            return weight
        return weight.times(factor) if isinstance(weight, StoredGroups) else weight.float() * factor

    def _factor(self, tensor: str, piece: Piece) -> float | None:
        """The scale of a whole weight, as of NVFP4; None: it has none.

        Raises:
            BrokenFolder: there is not one scale for each expert.
        """
        name = f"{tensor.removesuffix('.weight')}.scale"
        if name == tensor or name not in self._owner or not tensor.endswith(".weight") or self._pieces.get(name):
            return None
        scales = self._numbers(name).flatten()
        index = 0 if piece.expert is None or len(scales) == 1 else piece.expert
        experts = 1 if piece.expert is None else self._info(tensor).shape[0]
        if len(scales) not in (1, experts):
            raise BrokenFolder(f"{self._owner[name].path.name}: {name} has {len(scales)} values for {experts} weights")
        return float(scales[index])

    def _stored_part(self, tensor: str, piece: Piece) -> Tensor | StoredGroups:
        info = self._info(tensor)
        data = self._bytes(tensor)
        rows = piece.rows
        if (dtype := PLAIN.get(info.kind.name)) is not None:
            plain = data.view(dtype).view(info.shape)
            plain = plain if piece.expert is None else plain[piece.expert]
            plain = plain if rows is None else plain[rows]
            return plain if piece.columns is None else plain[:, piece.columns]
        blocks = data.view(*info.shape[:-1], info.shape[-1] // info.kind.values, info.kind.nbytes)
        blocks = blocks[None] if blocks.dim() == 2 else blocks
        blocks = blocks.flatten(0, -3) if piece.expert is None else blocks[piece.expert]
        weight = stored_blocks(blocks, info.kind, rows)
        return weight if piece.columns is None else with_columns(weight, info.kind, piece.columns)

    def _info(self, tensor: str) -> TensorInfo:
        return self._owner[tensor].tensors[tensor]

    def _bytes(self, tensor: str) -> Tensor:
        file, info = self._owner[tensor], self._info(tensor)
        if info.begin == info.end:
            return torch.empty(0, dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            data = torch.frombuffer(file.map, dtype=torch.uint8, count=info.end - info.begin, offset=info.begin)
        return data if data.data_ptr() % 4 == 0 else data.clone()

    def _release(self, tensor: str) -> None:
        """Allow the operating system to drop the pages of a tensor from memory."""
        file, info = self._owner[tensor], self._info(tensor)
        first, last = -(-info.begin // mmap.PAGESIZE) * mmap.PAGESIZE, info.end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            file.map.madvise(mmap.MADV_DONTNEED, first, last - first)


def _projector(folder: Path) -> list[GgufFile]:
    """The file with the part that reads pictures; empty: the model has none."""
    path = folder / PROJECTOR
    return open_parts(path) if path.is_symlink() else []


def _pieces(names: GgufNames | ProjectorNames, files: Sequence[GgufFile]) -> dict[str, list[Piece]]:
    return {tensor: names.pieces(tensor) for file in files for tensor in file.tensors}
