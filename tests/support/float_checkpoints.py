"""Weights of 4 and 8 bits in floating point as the tools of their formats write them, with what they stand for.

What they stand for is computed value by value, from the definitions of the formats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.support.integer_checkpoints import Tensors, Variant

FP8, FP8_E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_BNB_FP4 = tuple(
    sign * size / 12 for sign in (1, -1) for size in (0, 0.0625, 8, 12, 4, 6, 2, 3)
)  # three bits after the sign


def e2m1(code: int) -> float:
    """The value of a code of FP4: a sign, two bits of an exponent with a bias of 1, a bit of a mantissa."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2))


E2M1 = torch.tensor([e2m1(code) for code in range(16)])


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """The codes of the nearest values of a table: uint8."""
    return (values[..., None] - table).abs().argmin(-1).to(torch.uint8)


def low_first(codes: Tensor) -> Tensor:
    """Two codes of a row in each byte, the first in the lower half."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def in_groups(weight: Tensor, group: int) -> Tensor:
    """(rows, groups, group)."""
    groups: Tensor = weight.unflatten(1, (-1, group))
    return groups


def per_block(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """A scale for each element of a matrix."""
    rows, columns = torch.arange(shape[0]) // block[0], torch.arange(shape[1]) // block[1]
    return scales[rows[:, None], columns]


def fp8(
    section: Mapping[str, Any],
    block: tuple[int, int] | None,
    *,
    name: str = "weight_scale",
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = FP8,
    powers: bool = False,
) -> Variant:
    """FP8 with a scale for each block.

    Args:
        section: the config's `quantization_config`.
        block: rows and columns of a block, 0 for all of them; None: one scale.
        name, shape: of the scales; None: as many dimensions as there are blocks in.
        dtype: of the weight.
        powers: scales are powers of two, of which the exponents are stored.
    """

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        rows, columns = (size or whole for size, whole in zip(block or (0, 0), weight.shape, strict=True))
        blocks = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        largest = torch.zeros(blocks)
        for row in range(blocks[0]):
            for column in range(blocks[1]):
                part = weight[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
                largest[row, column] = part.abs().max()
        scales = largest / torch.finfo(dtype).max
        scales = torch.exp2(scales.log2().ceil()) if powers else scales
        each = per_block(scales, (rows, columns), weight.shape)
        codes = (weight / each).to(dtype)
        stored = (scales.log2() + 127).to(torch.uint8) if powers else scales
        tensors = {"weight": codes, name: stored.reshape(shape or stored.shape), "input_scale": torch.tensor(7.0)}
        return tensors, codes.float() * each

    return Variant(section, pack)


def nvfp4(section: Mapping[str, Any], *, divides: bool) -> Variant:
    """NVFP4 of compressed-tensors, which divides by the factor, or of ModelOpt, which multiplies."""

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        groups = in_groups(weight, 16)
        factor = weight.abs().max() / (6 * 448)  # so that scales fill FP8
        factor = 1 / factor if divides else factor
        wanted = groups.abs().amax(2) / 6
        scales = (wanted * factor if divides else wanted / factor).to(FP8)
        each = scales.float() / factor if divides else scales.float() * factor
        codes = nearest(groups / each[..., None].clamp(min=1e-9), E2M1).flatten(1)
        values = E2M1[codes.int()] * each.repeat_interleave(16, 1)
        if divides:
            names = "weight_packed", "weight_global_scale", "input_global_scale"
        else:
            names = "weight", "weight_scale_2", "input_scale"
        tensors = {names[0]: low_first(codes), "weight_scale": scales, names[1]: factor.reshape(1)}
        return {**tensors, names[2]: torch.tensor(7.0)}, values

    return Variant(section, pack)


def mxfp4(section: Mapping[str, Any], name: str = "weight_packed") -> Variant:
    """MXFP4 in two tensors."""

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        groups = in_groups(weight, 32)
        exponents = (groups.abs().amax(2) / 6).log2().ceil()
        each = torch.exp2(exponents)
        codes = nearest(groups / each[..., None], E2M1).flatten(1)
        values = E2M1[codes.int()] * each.repeat_interleave(32, 1)
        return {name: low_first(codes), "weight_scale": (exponents + 127).to(torch.uint8)}, values

    return Variant(section, pack)


def compressed(stored_as: str, **weights: Any) -> dict[str, Any]:
    """A section of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"type": "float", "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": stored_as, "config_groups": {"group_0": group}}


def modelopt(algorithm: str, **options: Any) -> dict[str, Any]:
    """A section of ModelOpt."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **options}


def quark(dtype: str, scheme: str, **options: Any) -> dict[str, Any]:
    """A section of Quark."""
    weights = {"dtype": dtype, "qscheme": scheme, "group_size": None, **options}
    config = {"weight": weights, "input_tensors": None, "output_tensors": None, "bias": None}
    return {"quant_method": "quark", "global_quant_config": config, "export": {"pack_method": "reorder"}}


def bnb_4bit(
    kind: str = "nf4", block: int = 64, *, nested: bool = False, storage: torch.dtype = torch.uint8
) -> Variant:
    """Weights of 4 bits of bitsandbytes. `nested`: scales are quantized; `storage`: what the bytes are kept as."""
    table = torch.tensor(_NF4 if kind == "nf4" else _BNB_FP4)

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        flat = weight.flatten()
        count = -(-len(flat) // block)
        scales = torch.stack([part.abs().max() for part in flat.split(block)])
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": block,
            "dtype": "float32",
            "shape": list(weight.shape),
        }
        tensors: Tensors = {"weight.quant_map": table.clone()}
        if nested:
            offset = float(scales.mean())
            nested_map = torch.linspace(-1, 1, 256) ** 3
            parts = (scales - offset).split(256)
            largest = torch.stack([part.abs().max() for part in parts]).clamp(min=1e-9)
            codes = torch.cat([nearest(part / most, nested_map) for part, most in zip(parts, largest, strict=True)])
            scales = nested_map[codes.int()] * largest[torch.arange(count) // 256] + offset
            tensors |= {"weight.nested_absmax": largest, "weight.nested_quant_map": nested_map, "weight.absmax": codes}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        else:
            tensors["weight.absmax"] = scales
        each = scales.repeat_interleave(block)[: len(flat)]
        indices = nearest(flat / each, table)
        padded = torch.nn.functional.pad(indices, (0, len(flat) % 2))
        packed = padded[::2] << 4 | padded[1::2]
        tensors["weight"] = packed.view(storage).reshape(-1, 1)
        text = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
        return tensors, (table[indices.int()] * each).view_as(weight)

    section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind}
    return Variant({**section, "bnb_4bit_use_double_quant": nested, "llm_int8_skip_modules": ["lm_head"]}, pack)


def bnb_int8() -> Variant:
    """Weights of int8 of bitsandbytes."""

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        largest = weight.abs().amax(1)
        codes = (weight * 127 / largest[:, None]).round().to(torch.int8)
        tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, codes.float() * largest[:, None] / 127

    section = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
    return Variant({**section, "llm_int8_threshold": 6.0, "llm_int8_skip_modules": None}, pack, exact=False)


BLOCKS = (16, 24)  # rows and columns
VARIANTS: dict[str, Variant] = {
    "fp8-tensor": fp8({"quant_method": "fp8", "activation_scheme": "static"}, None, shape=()),
    "fp8-blocks": fp8({"quant_method": "fp8", "weight_block_size": [*BLOCKS]}, BLOCKS, name="weight_scale_inv"),
    "fp8-e5m2": fp8({"quant_method": "fp8", "weight_block_size": None}, (1, 0), dtype=FP8_E5M2),
    "fbgemm": fp8({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, (1, 0)),
    "mxfp8": fp8({"quant_method": "mxfp8"}, (1, 32), name="weight_scale_inv", powers=True),
    "modelopt-fp8": fp8(modelopt("FP8"), None, shape=()),
    "modelopt-rows": fp8(modelopt("FP8_PER_CHANNEL_PER_TOKEN"), (1, 0), shape=(-1,)),
    "modelopt-blocks": fp8(modelopt("fp8_pb_wo"), (128, 128), shape=(1, 1, 1, 1)),
    "modelopt-mxfp8": fp8(modelopt("MXFP8"), (1, 32), powers=True),
    "modelopt-nvfp4": nvfp4(modelopt("NVFP4", group_size=16), divides=False),
    "compressed-fp8-tensor": fp8(compressed("float-quantized", num_bits=8, strategy="tensor"), None, shape=(1,)),
    "compressed-fp8-rows": fp8(compressed("float-quantized", num_bits=8, strategy="channel"), (1, 0)),
    "compressed-fp8-blocks": fp8(
        compressed("float-quantized", num_bits=8, strategy="block", block_structure=[*BLOCKS]), BLOCKS
    ),
    "compressed-fp8-groups": fp8(compressed("float-quantized", num_bits=8, strategy="group", group_size=16), (1, 16)),
    "compressed-nvfp4": nvfp4(
        compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16), divides=True
    ),
    "compressed-mxfp4": mxfp4(compressed("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32)),
    "quark-fp8": fp8(quark("fp8_e4m3", "per_tensor"), None, shape=()),
    "quark-fp8-rows": fp8(quark("fp8_e4m3", "per_channel", ch_axis=0), (1, 0), shape=(-1,)),
    "quark-mxfp4": mxfp4(quark("fp4", "per_group", group_size=32, scale_format="e8m0"), "weight"),
    **{f"bnb-nf4-{block}": bnb_4bit(block=block) for block in (32, 64, 256, 4096)},
    "bnb-fp4": bnb_4bit("fp4", 32),
    "bnb-nf4-nested": bnb_4bit(block=32, nested=True),
    "bnb-nf4-bfloat16": bnb_4bit(block=32, storage=torch.bfloat16),
    "bnb-int8": bnb_int8(),
}
