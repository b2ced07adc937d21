"""Products of the rows of each head with the head's own weight; see `quire.kernels.head_linear`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import gpu
from quire.kernels.triton.products import block_inputs, tile_product, tile_sizes
from quire.kernels.triton.variants import KernelVariant

_KIND = "plain"


@triton.jit(do_not_specialize=["rows"])
def head_linear_kernel(
    x, weight, out, rows, size_out, size_in, x_stride, x_head, weight_head, weight_stride, out_stride, out_head,
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One program per tile of rows and outputs on axis 0, and per head on axis 1."""
    tiles_t = tl.cdiv(rows, BLOCK_T)
    tile_o, tile_t = tl.program_id(0) // tiles_t, tl.program_id(0) % tiles_t
    head = tl.program_id(1).to(tl.int64)
    outputs = (tile_o * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    indices = (tile_t * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    output_mask, row_mask = outputs < size_out, indices < rows
    sums = tile_product(
        x + head * x_head, indices, row_mask, x_stride, x, 0,
        weight + head * weight_head, outputs, output_mask, weight_stride, weight, 0,
        0, size_in, size_in, weight, weight, weight, "plain", 1, None, 0, False, 0,
        BLOCK_O, BLOCK_T, BLOCK_K, EVEN, INTERPRETED,
    )  # fmt: skip
    target = out + head * out_head + indices[:, None] * out_stride + outputs[None, :]
    tl.store(target, tl.trans(sums).to(out.dtype.element_ty), mask=row_mask[:, None] & output_mask[None, :])


def head_linear(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """x W^T of each head, with the same bits for a row however many there are: sums are not cut into segments.

    Args:
        x: (rows, heads, size_in), last stride 1.
        weight: (heads, size_out, size_in) of x's dtype, last stride 1.
        out: (rows, heads, size_out), written to; last stride 1.

    Returns:
        out.
    """
    (rows, heads, size_in), size_out = x.shape, weight.shape[1]
    if not out.numel():
        return out
    block = block_inputs(x, _KIND)
    tiles = tile_sizes(rows, x.device, _KIND, 8 * x.itemsize)
    head_linear_kernel[(-(-size_out // tiles["BLOCK_O"]) * -(-rows // tiles["BLOCK_T"]), heads)](
        x, weight, out, rows, size_out, size_in, x.stride(0), x.stride(1), weight.stride(0), weight.stride(1),
        out.stride(0), out.stride(1), BLOCK_K=block, EVEN=size_in % block == 0, INTERPRETED=gpu.is_interpreted(),
        **tiles,
    )  # fmt: skip
    return out


_NUMBERS = (
    "size_out", "size_in", "x_stride", "x_head", "weight_head", "weight_stride", "out_stride", "out_head",
)  # fmt: skip


def _variant(dtype: str, bits: int, rows: int) -> KernelVariant:
    tiles = dict(tile_sizes(rows, torch.device("cpu"), _KIND, bits))
    launch = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
    return KernelVariant(
        head_linear_kernel,
        dict.fromkeys(("x", "weight", "out"), f"*{dtype}") | dict.fromkeys(("rows", *_NUMBERS), "i32"),
        {**tiles, "BLOCK_K": 1024 // bits, "EVEN": True, "INTERPRETED": False},
        divisible=_NUMBERS,
        **launch,
    )


VARIANTS = [_variant("bf16", 16, 1), _variant("bf16", 16, 1024), _variant("fp32", 32, 1), _variant("fp32", 32, 1024)]
