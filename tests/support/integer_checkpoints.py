"""Weights of integers as the tools of their formats write them, with the numbers that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.toy_format import twin_of

Tensors = dict[str, Tensor]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output each place of a word has, the lowest bits first


@dataclass(frozen=True)
class Rounded:
    """A weight whose inputs k stand for (codes[:, k] - zeros[:, g]) * scales[:, g] with g = group_of[k].

    Attributes:
        codes: (size_out, size_in), from 0 on.
        zeros, scales: (size_out, groups).
    """

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    group_of: Tensor
    bits: int

    @property
    def values(self) -> Tensor:
        zeros, scales = (values[:, self.group_of].float() for values in (self.zeros, self.scales))
        return (self.codes.float() - zeros) * scales


def rounded(weight: Tensor, bits: int, group_of: Tensor, *, symmetric: bool = True) -> Rounded:
    """Round a weight to integers with a scale for each row and group."""
    most, middle = (1 << bits) - 1, 1 << bits - 1
    columns = []
    for group in range(int(group_of.max()) + 1):
        inputs = weight[:, group_of == group]
        if symmetric:
            scale, zero = inputs.abs().amax(1) / max(1, middle - 1), torch.full((len(weight),), float(middle))
        else:
            low, high = inputs.amin(1).clamp(max=0), inputs.amax(1).clamp(min=0)
            scale = (high - low) / most
            zero = (-low / scale).round().clamp(0, most)
        columns.append((scale.half(), zero.int()))
    scales, zeros = (torch.stack(values, 1) for values in zip(*columns, strict=True))
    codes = (weight / scales[:, group_of].float()).round() + zeros[:, group_of]
    return Rounded(codes.clamp(0, most).to(torch.uint8), zeros, scales, group_of, bits)


def in_turn(size_in: int, group: int | None) -> Tensor:
    """The group of each input, if those of a group follow each other."""
    return torch.arange(size_in) // (group or size_in)


def act_order(size_in: int, group: int | None, seed: int = 0) -> Tensor:
    """The group of each input, if groups are made in the order of activations."""
    order = torch.randperm(size_in, generator=torch.Generator().manual_seed(seed))
    return torch.empty_like(order).index_copy_(0, order, in_turn(size_in, group))


def gptq_words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (n, columns) along n as GPTQ's tools do, without gaps: (n * bits / 32, columns) int32."""
    words = torch.zeros(-(-len(codes) * bits // 32), codes.shape[1], dtype=torch.long)
    for index, code in enumerate(codes.long()):
        word, place = divmod(index * bits, 32)
        words[word] |= code << place & (1 << 32) - 1
        if place + bits > 32:
            words[word + 1] |= code >> 32 - place
    return _signed(words)


def _signed(words: Tensor) -> Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def awq_words(codes: Tensor) -> Tensor:
    """Pack codes (n, columns) of 4 bits along columns as AutoAWQ does for its kernel "gemm"."""
    words = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.long)
    for place, column in enumerate(_AWQ_ORDER):
        words |= codes[:, column::8].long() << 4 * place
    return _signed(words)


@dataclass(frozen=True)
class Variant:
    """A format with its options.

    Attributes:
        section: the config's `quantization_config`.
        pack: gives the tensors of a weight by their names in the module, and what the weight stands for.
        metadata: gives what the file says of a weight, if it says something.
        exact: whether nothing is rounded where weights in groups have a minimum.
    """

    section: Mapping[str, Any]
    pack: Callable[[Tensor], tuple[Tensors, Tensor]]
    metadata: Callable[[Tensor], str] | None = None
    exact: bool = True


def gptq(
    bits: int = 4,
    group: int | None = 16,
    *,
    symmetric: bool = False,
    version: int = 1,
    ordered: bool = False,
    with_groups: bool = True,
) -> Variant:
    """Weights as AutoGPTQ (version 1) or GPTQModel (2) writes them."""

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        size_in = weight.shape[1]
        group_of = act_order(size_in, group) if ordered else in_turn(size_in, group)
        made = rounded(weight, bits, group_of, symmetric=symmetric)
        zeros = made.zeros - 1 & (1 << bits) - 1 if version == 1 else made.zeros
        tensors = {
            "qweight": gptq_words(made.codes.T, bits),
            "qzeros": gptq_words(zeros, bits).T.contiguous(),
            "scales": made.scales.T.contiguous(),
            "g_idx": group_of.int(),
        }
        return {name: tensors[name] for name in tensors if with_groups or name != "g_idx"}, made.values

    section = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": ordered, "sym": symmetric}
    return Variant({**section, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}, pack)


def awq(version: str = "gemm", group: int | None = 16, *, zero_point: bool = True) -> Variant:
    """Weights as AutoAWQ writes them."""

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        made = rounded(weight, 4, in_turn(weight.shape[1], group), symmetric=not zero_point)
        if version.lower() == "gemm":
            codes, zeros, scales = awq_words(made.codes.T), awq_words(made.zeros.T), made.scales.T.contiguous()
        else:
            more = -made.zeros.shape[1] % 8 + 8  # columns that pad
            codes = gptq_words(made.codes.T, 4).T.contiguous()
            zeros = gptq_words(torch.nn.functional.pad(made.zeros, (0, more)).T, 4).T.contiguous()
            scales = torch.nn.functional.pad(made.scales, (0, more))
        tensors = {"qweight": codes, "qzeros": zeros, "scales": scales}
        return {name: tensors[name] for name in tensors if zero_point or name != "qzeros"}, made.values

    section = {"quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": zero_point}
    return Variant({**section, "version": version}, pack)


def auto_round(packing: str, bits: int = 4, group: int = 16) -> Variant:
    """Weights as AutoRound writes them."""
    versions = {"auto_round:auto_gptq": 1, "auto_round:gptqmodel": 2, "auto_round": 2}
    inner = gptq(bits, group, version=versions[packing]) if packing in versions else awq("gemm", group)
    section = {"quant_method": "auto-round", "bits": bits, "group_size": group, "sym": False}
    return Variant({**section, "data_type": "int", "packing_format": packing}, inner.pack)


def compressed(
    stored_as: str = "pack-quantized",
    bits: int = 4,
    *,
    strategy: str = "group",
    group: int | None = 16,
    symmetric: bool = True,
    actorder: str | None = None,
) -> Variant:
    """Weights of integers as compressed-tensors writes them."""
    group = group if strategy == "group" else None

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        size_out, size_in = weight.shape
        group_of = act_order(size_in, group) if actorder == "group" else in_turn(size_in, group)
        made = rounded(weight, bits, group_of, symmetric=symmetric)
        if strategy == "tensor":
            whole = rounded(weight.reshape(1, -1), bits, torch.zeros(weight.numel(), dtype=torch.long))
            zeros, scales = (values.expand(size_out, 1) for values in (whole.zeros, whole.scales))
            made = Rounded(whole.codes.view_as(weight), zeros, scales, group_of, bits)
        middle = 1 << bits - 1
        tensors = {"weight_scale": made.scales[0, :1].clone() if strategy == "tensor" else made.scales.float()}
        if stored_as == "pack-quantized":
            tensors["weight_packed"] = gptq_words(made.codes.T, bits).T.contiguous()
            tensors["weight_shape"] = torch.tensor(weight.shape)
            zeros = gptq_words(made.zeros, bits)
        else:
            tensors["weight"] = (made.codes.int() - middle).to(torch.int8)
            tensors["input_scale"] = torch.tensor(7.0)
            zeros = (made.zeros - middle).to(torch.int8)
        if not symmetric:
            tensors["weight_zero_point"] = zeros
        if actorder == "group":
            tensors["weight_g_idx"] = group_of.int()
        return tensors, made.values

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": {**weights, "actorder": actorder}}}
    section = {"quant_method": "compressed-tensors", "format": stored_as, "ignore": ["lm_head"]}
    return Variant({**section, "config_groups": groups}, pack)


_HQQ_PACKINGS = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}


def hqq(bits: int = 4, group: int = 16, axis: int = 1, dtype: torch.dtype = torch.float16) -> Variant:
    """Weights as transformers writes those of HQQ."""

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        groups = weight.reshape(-1, group) if axis == 1 else weight.reshape(group, -1)
        low, high = groups.amin(axis, keepdim=True), groups.amax(axis, keepdim=True)
        scales = ((high - low) / ((1 << bits) - 1)).to(dtype)
        zeros = (-low / scales.float() + 0.25).to(dtype)
        codes = (groups / scales.float() + zeros.float()).round().clamp(0, (1 << bits) - 1)
        values = ((codes - zeros.float()) * scales.float()).reshape(weight.shape)
        per = 10 if bits == 3 else 8 // bits
        codes = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % per)).int()
        packed = torch.zeros(len(codes) // per, codes.shape[1], dtype=torch.int32)
        for place, part in enumerate(codes.chunk(per)):
            packed |= part << bits * (per - 1 - place)
        tensors = {
            "W_q": packed if bits == 3 else packed.to(torch.uint8),
            "scale": scales,
            "zero": zeros,
            "shape": torch.tensor(weight.shape),
            "axis": torch.tensor(axis, dtype=torch.int32),
            "nbits": torch.tensor(bits, dtype=torch.int32),
            "group_size": torch.tensor(group, dtype=torch.int32),
            "packing": torch.tensor(list(_HQQ_PACKINGS[bits].encode()), dtype=torch.uint8),
            "stores_quant_config": torch.tensor(1, dtype=torch.uint8),
        }
        return tensors, values

    return Variant({"quant_method": "hqq", "quant_config": {}, "skip_modules": ["lm_head"]}, pack, exact=False)


def torchao(kind: str, group: int | None = 16) -> Variant:
    """Weights as transformers writes those of torchao."""

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        made = rounded(weight, 4 if kind == "Int4Tensor" else 8, in_turn(weight.shape[1], group), symmetric=False)
        middle = 8 if kind == "Int4Tensor" else 128
        if kind == "Int8Tensor":
            made = rounded(weight, 8, made.group_of)
        codes = (made.codes.int() - middle).to(torch.int8)
        if kind == "Int4Tensor":  # (integer - 8) * scale + zero
            offsets = ((middle - made.zeros) * made.scales).half()
            values = codes.float() * made.scales[:, made.group_of].float() + offsets[:, made.group_of].float()
            packed = codes[:, ::2] & 15 | codes[:, 1::2] << 4
            tensors = {"qdata": packed, "scale": made.scales.T.contiguous(), "zero_point": offsets.T.contiguous()}
            return {f"_weight_{name}": tensor for name, tensor in tensors.items()}, values
        tensors = {"qdata": codes, "scale": made.scales}
        if kind == "IntxUnpackedToInt8Tensor":
            tensors["zero_point"] = (made.zeros - middle).to(torch.int8)
        return {f"_weight_{name}": tensor for name, tensor in tensors.items()}, made.values

    def metadata(weight: Tensor) -> str:
        block = [1, group or weight.shape[1]]
        return json.dumps({"_type": kind, "_data": {"block_size": block}, "_tensor_data_names": ["qdata", "scale"]})

    return Variant({"quant_method": "torchao", "quant_type": {}}, pack, metadata, exact=False)


def quantize(
    folder: Path,
    variant: Variant | Callable[[str], Variant | None],
    section: Mapping[str, Any] | None = None,
    ends: str | tuple[str, ...] = "_proj",
) -> Path:
    """Put the linear layers of a folder into a format, and leave its dequantized twin beside it, see `twin_of`.

    Args:
        folder: with plain weights.
        variant: of all modules, or by the name of one; None: it stays plain.
        section: of the config; None: that of the variant.
        ends: how the names of modules end that are quantized.
    """
    weights, twin = load_file(folder / "model.safetensors"), twin_of(folder)
    config = json.loads((folder / "config.json").read_text())
    stored, plain, metadata = dict(weights), dict(weights), {"format": "pt"}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        chosen = variant(module) if callable(variant) else variant
        if module == name or not module.endswith(ends) or chosen is None:
            continue
        tensors, plain[name] = chosen.pack(weight.float())
        del stored[name]
        stored |= {f"{module}.{part}": tensor for part, tensor in tensors.items()}
        if chosen.metadata is not None:
            metadata[name] = chosen.metadata(weight)
    if section is None:
        assert isinstance(variant, Variant)
        section = variant.section
    twin.mkdir()
    (twin / "config.json").write_text(json.dumps(config))
    save_file(plain, twin / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folder / "model.safetensors", metadata=metadata)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return folder
