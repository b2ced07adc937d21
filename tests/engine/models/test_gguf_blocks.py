"""Blocks of GGUF files stand for the numbers that the package `gguf` says, also in parts and in another order."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from quire.engine.models.checkpoint.gguf import blocks as blocks_module
from quire.engine.models.checkpoint.gguf.blocks import PLAIN, stored_blocks
from quire.engine.models.checkpoint.gguf.container import BLOCK_KINDS, BlockKind
from quire.engine.models.errors import UnsupportedModel

ROWS, INPUTS = 6, 1024
# Where the 16-bit numbers of a block are, which must not be infinite.
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"), (0,)),
    **dict.fromkeys(("IQ3_S", "IQ1_S", "Q1_0", "Q2_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    **dict.fromkeys(("IQ1_M", "MXFP4", "NVFP4"), ()),
}
KINDS = {kind.name: kind for kind in BLOCK_KINDS.values() if kind.name not in PLAIN}
FOUR_BITS = {"Q4_0", "Q4_1", "Q4_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "Q1_0", "Q2_0"}


def random_blocks(kind: BlockKind, rows: int = ROWS, inputs: int = INPUTS) -> Tensor:
    generator = np.random.default_rng(kind.nbytes)
    data = generator.integers(0, 256, (rows, inputs // kind.values, kind.nbytes), dtype=np.uint8)
    for at in HALVES[kind.name]:
        halves = generator.normal(0, 0.1, data.shape[:2]).astype(np.float16)
        data[..., at : at + 2] = halves[..., None].view(np.uint8)
    if kind.name == "IQ1_M":  # the number is in pieces, of which this one has the exponent's upper bits
        data[..., 55] = data[..., 55] & 15 | 0x20
    if kind.name == "MXFP4":
        data[..., 0] = np.arange(data[..., 0].size).reshape(data.shape[:2]) % 253
    return torch.from_numpy(data)


def reference(data: Tensor, kind: BlockKind) -> Tensor:
    array = data.flatten(1).numpy()
    if kind.name not in ("Q1_0", "Q2_0"):
        return torch.from_numpy(gguf.dequantize(array, gguf.GGMLQuantizationType[kind.name]))
    bits = 1 if kind.name == "Q1_0" else 2  # kinds that the package names, and does not read
    codes = np.stack([data[..., 2:].numpy() >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -1)
    values = np.where(codes, 1, -1) if bits == 1 else codes.astype(np.int8) - 1
    scales = data[..., :2].numpy().copy().view(np.float16).astype(np.float32)
    return torch.from_numpy(values.reshape(*scales.shape[:2], -1) * scales).flatten(1).float()


@pytest.mark.parametrize("name", sorted(KINDS))
def test_the_numbers_of_blocks(name: str) -> None:
    data = random_blocks(KINDS[name])
    numbers = reference(data, KINDS[name])
    assert numbers.isfinite().all()
    weight = stored_blocks(data, KINDS[name])
    assert weight.shape == (ROWS, INPUTS)
    assert torch.equal(weight.dequantize(torch.float32), numbers)
    assert weight.is_finite()
    assert weight.groups().bits == (4 if name in FOUR_BITS or name.startswith("TQ") else 8)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_parts_and_rows_in_another_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "_VALUES_AT_ONCE", INPUTS)  # several steps
    data = random_blocks(KINDS[name])
    numbers = reference(data, KINDS[name])
    order = torch.tensor([4, 1, 1, 5, 0])
    for weight, expected in (
        (stored_blocks(data, KINDS[name]), numbers),
        (stored_blocks(data, KINDS[name], order), numbers[order]),
    ):
        group = weight.groups().group
        for window in (
            (slice(1, 4),),
            (slice(0, 0), slice(None)),
            (slice(None), slice(0, INPUTS // 2)),
            (slice(2, None), slice(INPUTS // 2, None)),
            (slice(1, 3), slice(group, 3 * group)),
        ):
            part = weight.part(window)
            assert torch.equal(part.dequantize(torch.float32), expected[window])
            assert torch.equal(part.copied().dequantize(torch.float32), expected[window])
            assert part.shape == expected[window].shape
        with pytest.raises(UnsupportedModel, match="tensor-parallel-size"):
            weight.part((slice(None), slice(0, group // 2))).groups()


def test_reading_takes_little_memory_besides_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    reader = blocks_module._READERS["Q6_K"]

    def counting(blocks: Tensor) -> Any:
        read.append(len(blocks))
        return reader.read(blocks)

    monkeypatch.setitem(blocks_module._READERS, "Q6_K", blocks_module._Reader(16, counting))
    monkeypatch.setattr(blocks_module, "_VALUES_AT_ONCE", 2 * INPUTS)
    data = random_blocks(KINDS["Q6_K"], rows=7)
    assert torch.equal(stored_blocks(data, KINDS["Q6_K"]).dequantize(torch.float32), reference(data, KINDS["Q6_K"]))
    assert read == [2, 2, 2, 1]


def test_all_scales_of_nvfp4() -> None:
    data = torch.zeros(64, 1, 36, dtype=torch.uint8)
    data[:, 0, :4] = torch.arange(256).view(64, 4)
    data[:, 0, 4:] = 0x17
    assert torch.equal(stored_blocks(data, KINDS["NVFP4"]).dequantize(torch.float32), reference(data, KINDS["NVFP4"]))


@pytest.mark.parametrize("name", sorted(name for name, halves in HALVES.items() if halves))
def test_infinite_scales_show(name: str) -> None:
    data = random_blocks(KINDS[name])
    for at in HALVES[name]:
        broken = data.clone()
        broken[3, 0, at : at + 2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
        assert not stored_blocks(broken, KINDS[name]).is_finite()
