"""Checkpoints of integers: GPTQ, AWQ, AutoRound, compressed-tensors, HQQ and torchao.

Their weights are what the tools' own arithmetic makes of them, whole and in parts, and models compute with these.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quire.config.options import ParallelOptions
from quire.engine.models.checkpoint.formats import formats_of
from quire.engine.models.checkpoint.formats.weight_format import NamedWeight, StoredWeight
from quire.engine.models.config.quantization import quantization_section, vllm_names
from quire.engine.models.errors import BrokenFolder, ModelError, UnsupportedModel
from quire.engine.models.layers.linear import Linear
from quire.kernels.grouped import can_pack_groups
from quire.kernels.packed_groups import PackedGroups
from tests.support.engine import Engine, greedy, load, random_prompt
from tests.support.integer_checkpoints import (
    Tensors,
    Variant,
    auto_round,
    awq,
    compressed,
    gptq,
    hqq,
    quantize,
    torchao,
)
from tests.support.models import make_model, save_model
from tests.support.oracle import generated, transformers_model
from tests.support.toy_format import twin_of
from tests.support.variants import slow_but

TOKENS = 16
TP = {"tensor_parallel_size": 2}
MODULE = "model.layers.0.self_attn.q_proj"

VARIANTS: dict[str, Variant] = {
    **{f"gptq-{bits}": gptq(bits) for bits in (2, 3, 4, 8)},
    **{f"gptq-{bits}-order": gptq(bits, ordered=True) for bits in (2, 3, 4, 8)},
    "gptq-v2": gptq(version=2),
    "gptq-sym": gptq(symmetric=True),
    "gptq-8-sym": gptq(8, symmetric=True),
    "gptq-row": gptq(group=None),
    "gptq-no-g_idx": gptq(with_groups=False),
    "gptq-uneven": gptq(group=40),
    "gptq-uneven-order": gptq(group=40, ordered=True),
    "awq-gemm": awq(),
    "awq-GEMM-row": awq("GEMM", None),
    "awq-gemv": awq("gemv"),
    "awq-no-zeros": awq(zero_point=False),
    "auto-round": auto_round("auto_round:auto_gptq"),
    "auto-round-3": auto_round("auto_round:auto_gptq", 3),
    "auto-round-v2": auto_round("auto_round:gptqmodel", 2),
    "auto-round-6": auto_round("auto_round:auto_gptq", 6),
    "auto-round-awq": auto_round("auto_round:auto_awq"),
    "pack-4": compressed(),
    "pack-4-zeros": compressed(symmetric=False),
    "pack-4-order": compressed(actorder="group"),
    "pack-4-static-order": compressed(actorder="static"),
    "pack-4-row": compressed(strategy="channel"),
    "pack-4-row-zeros": compressed(strategy="channel", symmetric=False),
    "pack-4-tensor": compressed(strategy="tensor"),
    "pack-8": compressed(bits=8),
    **{f"pack-{bits}-zeros": compressed(bits=bits, symmetric=False) for bits in (2, 3, 5, 7)},
    "pack-8-zeros-order": compressed(bits=8, symmetric=False, actorder="group"),
    "int-8": compressed("int-quantized", 8, strategy="channel"),
    "int-8-zeros": compressed("int-quantized", 8, strategy="channel", symmetric=False),
    "int-8-tensor": compressed("int-quantized", 8, strategy="tensor"),
    "int-8-group": compressed("int-quantized", 8),
    "int-8-order": compressed("int-quantized", 8, actorder="group"),
    "naive-8": compressed("naive-quantized", 8, strategy="channel"),
    **{f"hqq-{bits}": hqq(bits) for bits in (1, 2, 3, 4, 8)},
    **{f"hqq-{bits}-across": hqq(bits, axis=0) for bits in (3, 4)},
    "hqq-bfloat16": hqq(dtype=torch.bfloat16),
    "hqq-several-rows": hqq(group=128),
    "torchao-4": torchao("Int4Tensor"),
    "torchao-8": torchao("Int8Tensor", None),
    "torchao-8-zeros": torchao("IntxUnpackedToInt8Tensor"),
}


def packed(variant: Variant, size_out: int = 48, size_in: int = 96) -> tuple[NamedWeight, torch.Tensor]:
    """A weight as the format reads it, and what it stands for."""
    weight = torch.randn(size_out, size_in, generator=torch.Generator().manual_seed(1))
    tensors, values = variant.pack(weight)
    stored = {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}
    return read(variant.section, stored, variant.metadata and {f"{MODULE}.weight": variant.metadata(weight)}), values


def read(section: Any, stored: Tensors, metadata: dict[str, str] | None = None) -> NamedWeight:
    formats = formats_of(section)
    for weight_format in formats:
        weight_format.use_metadata(metadata or {})
    firsts = [name for name in stored if not any(weight_format.is_part(name) for weight_format in formats)]
    weights = [formats[0].read(name, stored) for name in firsts]
    (weight,) = filter(None, weights)
    return weight


def check(weight: StoredWeight, values: torch.Tensor, variant: Variant) -> None:
    assert weight.dequantize(torch.float32).shape == values.shape
    torch.testing.assert_close(
        weight.dequantize(torch.float32), values, rtol=0 if variant.exact else 1e-6, atol=0 if variant.exact else 1e-6
    )


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_weights_are_what_their_integers_stand_for(variant: Variant) -> None:
    """Whole, and the parts of ranks: rows, and inputs."""
    (name, weight, tensors), values = packed(variant)
    assert name == f"{MODULE}.weight"
    assert all(tensor.startswith(f"{MODULE}.") for tensor in tensors)
    assert weight.shape == (48, 96)
    check(weight, values, variant)
    for rows in (slice(0, 24), slice(20, 45), slice(None)):
        for columns in (slice(0, 48), slice(48, 96), slice(16, 80), slice(None)):
            check(weight.part((rows, columns)), values[rows, columns], variant)


RECORDED = Path(__file__).parent / "recordings" / "weights_of_tools.safetensors"


def test_files_of_the_tools() -> None:
    """Weights that the formats' own tools have written are the numbers that these tools make of them again.

    Tools that compute in 16 bits round these; ours are rounded for the comparison.
    """
    stored = load_file(RECORDED)
    with safe_open(RECORDED, "pt") as file:
        entries = {name: json.loads(text) for name, text in file.metadata().items()}
    assert {entry["tool"].partition(" ")[0] for entry in entries.values()} == {
        *("compressed-tensors", "auto-round", "hqq", "torchao")
    }
    for module, entry in entries.items():
        tensors = {name: tensor for name, tensor in stored.items() if name.startswith(f"{module}.")}
        sections = [entry["section"]]
        if sections[0].get("packing_format") == "auto_round:auto_gptq" and sections[0]["bits"] != 5:
            sections.append({**sections[0], "quant_method": "gptq"})
        for section in sections:
            named = read(section, dict(tensors), {f"{module}.weight": entry.get("metadata", "")})
            values = named.weight.dequantize(torch.float32).to(getattr(torch, entry["dtype"]))
            assert zlib.crc32(values.contiguous().view(torch.uint8).numpy().tobytes()) == entry["crc32"], module


@pytest.mark.parametrize("name", ["gptq-4-order", "awq-gemm", "awq-gemv", "pack-4", "hqq-4", "torchao-4"])
def test_ranks_cannot_share_a_group(name: str) -> None:
    """Unless inputs are in the order of activations: groups then have inputs on every rank."""
    variant = VARIANTS[name]
    (_, weight, _), values = packed(variant)
    part = weight.part((slice(0, 48), slice(0, 40)))
    if variant.section.get("desc_act"):
        check(part, values[:, :40], variant)
    else:
        with pytest.raises(UnsupportedModel, match="a rank has inputs 0 to 40, but 16 of them share a scale"):
            part.dequantize(torch.float32)


def test_memory_of_groups() -> None:
    """Codes of 4 bits stay codes of 4 bits; symmetric ones of 8 bits have no minimums."""
    weights = {name: packed(VARIANTS[name])[0].weight for name in ("gptq-3", "awq-gemm", "pack-4", "hqq-2", "int-8")}
    groups = {name: weight.groups() for name, weight in weights.items()}  # type: ignore[attr-defined]
    assert {name: weight.bits for name, weight in groups.items()} == {
        **dict.fromkeys(("gptq-3", "awq-gemm", "pack-4", "hqq-2"), 4),
        "int-8": 8,
    }
    assert groups["int-8"].minimums is None
    assert packed(VARIANTS["gptq-8-sym"])[0].weight.groups().minimums is None  # type: ignore[attr-defined]


@pytest.mark.skipif(not can_pack_groups(torch.bfloat16, torch.device("cpu")), reason="no kernels for groups")
@pytest.mark.parametrize("name", slow_but(["gptq-4-order", "awq-gemm", "int-8", "hqq-4"], "gptq-4-order"))
def test_weights_stay_packed(tmp_path: Path, name: str) -> None:
    """Where a kernel multiplies with groups of integers; they take less memory."""
    folder = quantize(saved(tmp_path), VARIANTS[name])
    packed, plain = (load(path, dtype="bfloat16") for path in (folder, twin_of(folder)))
    kinds = {type(module.packed) for module in packed.model.layers.modules() if isinstance(module, Linear)}
    assert kinds == {PackedGroups}
    assert packed.weight_bytes < (0.8 if name == "int-8" else 0.7) * plain.weight_bytes


CASES = [
    ("llama-biased-tied", "gptq-4-order"),
    ("qwen3", "pack-4-zeros"),
    ("qwen3_moe", "awq-gemm"),
    *(("llama", name) for name in ("gptq-3", "auto-round", "int-8", "hqq-4", "hqq-4-across", "torchao-4", "torchao-8")),
    *(("qwen3_moe", name) for name in ("gptq-4", "pack-4-order", "int-8")),
    *(("qwen3", name) for name in ("gptq-8-order", "awq-gemv", "naive-8", "torchao-8-zeros")),
]


@pytest.mark.parametrize(("case", "variant"), slow_but(CASES, *CASES[:3]))
def test_tokens_of_transformers_on_the_same_numbers(tmp_path: Path, case: str, variant: str) -> None:
    folder = quantize(save_model(make_model(case), tmp_path / "model"), VARIANTS[variant])
    prompt = random_prompt(1, 12)
    expected, _ = generated(transformers_model(twin_of(folder)), prompt, TOKENS)
    assert Engine(folder).generate(prompt, greedy(TOKENS)).tokens == expected


OF_RANKS = {
    "gptq-order": gptq(group=8, ordered=True),
    "gptq-row": gptq(group=None),
    "awq": awq(group=8),
    "pack-zeros": compressed(group=8, symmetric=False),
    "hqq-across": hqq(group=8, axis=0),
}
RANKS = [
    *(("llama", "gptq-order"), ("llama", "gptq-row"), ("qwen3_moe", "awq"), ("qwen3_moe", "pack-zeros")),
    ("qwen3", "hqq-across"),
]


@pytest.mark.parametrize(("case", "variant"), slow_but(RANKS, RANKS[0]))
def test_ranks_have_parts(tmp_path: Path, case: str, variant: str) -> None:
    folder = quantize(save_model(make_model(case), tmp_path / "model"), OF_RANKS[variant])
    check_tokens(folder, ParallelOptions(**TP))


def check_tokens(folder: Path, parallel: ParallelOptions | None = None) -> None:
    """Check that a folder gives the tokens of its dequantized twin."""
    prompt = random_prompt(2, 12)
    engine = Engine(folder, parallel=parallel or ParallelOptions(), kv_cache_memory_bytes=8 << 20)
    try:
        tokens = engine.generate(prompt, greedy(TOKENS)).tokens
    finally:
        engine.core.close()
    assert tokens == Engine(twin_of(folder), kv_cache_memory_bytes=8 << 20).generate(prompt, greedy(TOKENS)).tokens


def saved(tmp_path: Path, case: str = "llama", **changes: Any) -> Path:
    return save_model(make_model(case, num_hidden_layers=2, **changes), tmp_path / "model")


def mixed(*rules: tuple[str, Variant | None]) -> Callable[[str], Variant | None]:
    """The variant of the first rule whose text is in the name of a module."""
    return lambda module: next(variant for text, variant in rules if text in module)


def test_gptq_with_rules(tmp_path: Path) -> None:
    """Modules with other bits and groups, plain ones, and a head."""
    section = {
        **gptq(4, 16).section,
        "lm_head": True,
        "dynamic": {
            r"-:model\.layers\.1\.mlp\..*": {},
            r"+:.*\.(k|v)_proj": {"bits": 8, "group_size": -1},
            r".*down_proj": {"bits": 3, "group_size": 32},
        },
    }
    wide, three = gptq(8, None), gptq(3, 32)
    rules = mixed(("layers.1.mlp", None), ("k_proj", wide), ("v_proj", wide), ("down", three), ("", gptq()))
    check_tokens(quantize(saved(tmp_path), rules, section, ends=("_proj", "lm_head")))


def test_auto_round_with_other_modules(tmp_path: Path) -> None:
    section = {
        **auto_round("auto_round:auto_gptq").section,
        "extra_config": {
            "model.layers.0.mlp.up_proj": {"bits": 8, "group_size": 32},
            r".*\.1\.self_attn.*": {"bits": 2},
            "model.layers.1.mlp.down_proj": {"bits": 16},
        },
    }
    rules = mixed(("0.mlp.up", gptq(8, 32)), ("1.self_attn", gptq(2)), ("1.mlp.down", None), ("", gptq()))
    check_tokens(quantize(saved(tmp_path), rules, section))


def test_compressed_tensors_with_several_groups(tmp_path: Path) -> None:
    """Names are looked for before patterns, and these before classes; other modules are plain."""
    groups: dict[str, Any] = {}
    others, pattern, named = compressed(), compressed(bits=8), compressed("int-quantized", 8, strategy="channel")
    targets = {"Linear": others, "re:.*self_attn.*": pattern, "model.layers.0.self_attn.o_proj": named}
    for target, variant in targets.items():
        groups[f"group_{len(groups)}"] = {
            **variant.section["config_groups"]["group_0"],
            "targets": [target],
            "format": variant.section["format"],
        }
    groups["attention"] = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {"num_bits": 8}}
    section = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ["lm_head", r"re:.*layers\.1\.mlp.*"],
        "kv_cache_scheme": None,
    }
    rules = mixed(("layers.1.mlp", None), ("0.self_attn.o_proj", named), ("self_attn", pattern), ("", others))
    check_tokens(quantize(saved(tmp_path), rules, section))


def test_a_section_of_an_older_tool(tmp_path: Path) -> None:
    """Files beside a config without a section, biases of zeros, and other keys."""
    folder = quantize(saved(tmp_path), gptq())
    config = json.loads((folder / "config.json").read_text())
    section = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: section[name] for name in ("bits", "group_size", "desc_act", "sym")}
    (folder / "quantize_config.json").write_text(json.dumps(kept))
    tensors = load_file(folder / "model.safetensors")
    packed = {name: words for name, words in tensors.items() if name.endswith(".qweight")}
    biases = {name.replace("qweight", "bias"): torch.zeros(words.shape[1]) for name, words in packed.items()}
    save_file({**tensors, **biases}, folder / "model.safetensors", metadata={"format": "pt"})
    check_tokens(folder)
    biases[f"{MODULE}.bias"] += 1
    save_file({**tensors, **biases}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"unexpected weights .*{MODULE}\.bias"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "values", "method"),
    [
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, "awq"),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "gptq"),
        ("quantization_config.json", {"quant_method": "intel/auto-round", "bits": 4}, "auto-round"),
    ],
)
def test_methods_in_files(tmp_path: Path, file: str, values: dict[str, Any], method: str) -> None:
    (tmp_path / file).write_text(json.dumps(values))
    section = quantization_section(object(), tmp_path)
    assert section is not None
    assert section["quant_method"] == method
    formats_of({"bits": 4, **section})


def test_names_of_vllm() -> None:
    assert {"gptq", "gptq_marlin", "auto_gptq"} <= vllm_names({"quant_method": "gptq"})
    assert vllm_names({"quant_method": "hqq"}) == {"hqq"}


COMPRESSED, GPTQ, AWQ = (variant.section for variant in (compressed(), gptq(), awq()))
WEIGHTS = COMPRESSED["config_groups"]["group_0"]["weights"]


def with_weights(**changes: Any) -> dict[str, Any]:
    group = {**COMPRESSED["config_groups"]["group_0"], "weights": {**WEIGHTS, **changes}}
    return {**COMPRESSED, "config_groups": {"group_0": group}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "quark"}, "method 'quark' is not supported; supported are .*gptq"),
    ({**GPTQ, "bits": 5}, "bits must be one of 2, 3, 4, 8, not 5"),
    ({**GPTQ, "bits": True}, "bits must be one of 2, 3, 4, 8, not True"),
    ({**GPTQ, "group_size": 0}, "group_size must be a positive integer or -1, not 0"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' .* supported are gptq and gptq_v2"),
    ({**GPTQ, "is_marlin_format": True}, "checkpoint_format 'marlin'"),
    ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype 'int16' of GPTQ is not supported, only int32"),
    ({**GPTQ, "dynamic": ["a"]}, "dynamic must be an object"),
    ({**GPTQ, "dynamic": {"+:(": {}}}, r"dynamic\['\+:\('\]: '\(' is no pattern"),
    ({**GPTQ, "dynamic": {".*": {"bits": 1}}}, r"dynamic\['\.\*'\]: bits must be one of 2, 3, 4, 8, not 1"),
    ({**AWQ, "version": "gemv_fast"}, "version 'gemv_fast' of AWQ is not supported; supported are gemm and gemv"),
    ({**AWQ, "bits": 8}, "bits must be one of 4, not 8"),
    (
        {**auto_round("auto_round:auto_gptq").section, "packing_format": "auto_round:fp8"},
        "packing_format 'auto_round:fp8' of AutoRound is not supported; supported are auto_gptq",
    ),
    ({**auto_round("auto_round").section, "data_type": "mx_fp"}, "data_type 'mx_fp' of AutoRound"),
    ({**auto_round("auto_round").section, "extra_config": {"a": 1}}, r"extra_config\['a'\] must be an object"),
    (
        {**COMPRESSED, "format": "marlin-24"},
        "group_0: format 'marlin-24' of int weights .* supported are pack-quantized of int",
    ),
    ({**COMPRESSED, "config_groups": {"W4A16": ["Linear"]}}, "W4A16 must be an object with weights and targets"),
    ({**COMPRESSED, "config_groups": None}, "config_groups must be an object, not None"),
    ({**COMPRESSED, "ignore": "lm_head"}, "ignore must be a list of texts, not 'lm_head'"),
    ({**COMPRESSED, "ignore": ["re:("]}, r"ignore: 're:\(' is no pattern"),
    ({**COMPRESSED, "sparsity_config": {"format": "sparse-24"}}, "sparsity_config of format 'sparse-24'"),
    (with_weights(num_bits="4"), r"group_0\.weights: num_bits must be 1 to 8, not '4'"),
    (with_weights(num_bits=9), r"group_0\.weights: num_bits must be 1 to 8, not 9"),
    (with_weights(type="nf"), "type must be int or float, not 'nf'"),
    (with_weights(strategy="rows"), "strategy must be one of tensor, channel, group, block, tensor_group, not 'rows'"),
    (with_weights(strategy="block", block_structure=[2, 2]), "strategy block is not supported for integers"),
    (with_weights(group_size=None), "strategy group needs a positive group_size, not None"),
    (with_weights(actorder="left"), "actorder must be group, weight or null, not 'left'"),
]


@pytest.mark.parametrize(("section", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_options_that_are_refused(section: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModel, match=text):
        formats_of(section)


BROKEN: list[tuple[str, Callable[[Tensors], object], type[ModelError], str]] = [
    ("gptq-4", lambda t: t.pop("scales"), BrokenFolder, r"\.qweight cannot be dequantized: .*\.scales is missing"),
    ("gptq-4", lambda t: t.pop("qzeros"), BrokenFolder, r"\.qzeros is missing"),
    ("gptq-4", lambda t: t.update(scales=t["scales"][1:]), BrokenFolder, r"scales has shape \(5, 48\).* \(6, 48\)"),
    ("gptq-4", lambda t: t.update(qzeros=t["qzeros"][:, 1:]), BrokenFolder, r"qzeros has shape \(6, 5\).* \(6, 6\)"),
    ("gptq-4", lambda t: t.update(qweight=t["qweight"].long()), BrokenFolder, r"\.qweight is int64, not int32"),
    ("gptq-4", lambda t: t.update(qweight=t["qweight"][0]), BrokenFolder, r"\.qweight has shape \(48,\)"),
    ("gptq-4", lambda t: t.update(scales=t["scales"].int()), BrokenFolder, r"\.scales is int32, not float16"),
    ("gptq-4-order", lambda t: t["g_idx"].fill_(6), BrokenFolder, r"\.g_idx has groups 6 to 6, but .* for 0 to 5"),
    ("gptq-4-order", lambda t: t["g_idx"].fill_(-1), BrokenFolder, r"\.g_idx has groups -1 to -1"),
    ("gptq-4-order", lambda t: t.update(g_idx=t["g_idx"][:50]), BrokenFolder, r"\.g_idx has shape \(50,\)"),
    ("awq-gemm", lambda t: t.pop("qzeros"), BrokenFolder, r"\.qzeros is missing"),
    ("awq-gemm", lambda t: t.update(scales=t["scales"].T), BrokenFolder, r"\.scales has shape \(48, 6\)"),
    ("awq-gemv", lambda t: t.update(scales=t["scales"][:, :5]), BrokenFolder, r"scales has shape \(48, 5\).* or more"),
    ("pack-4", lambda t: t.pop("weight_scale"), BrokenFolder, r"\.weight_packed .* \S+\.weight_scale is missing"),
    ("pack-4", lambda t: t.pop("weight_shape"), BrokenFolder, r"\.weight_shape is missing"),
    ("pack-4", lambda t: t["weight_shape"].fill_(-1), BrokenFolder, r"\.weight_shape is -1 x -1"),
    ("pack-4", lambda t: t["weight_shape"].fill_(1 << 40), BrokenFolder, r"\.weight_packed has shape \(48, 12\)"),
    ("pack-4-zeros", lambda t: t.pop("weight_zero_point"), BrokenFolder, r"\.weight_zero_point is missing"),
    ("pack-4-order", lambda t: t.pop("weight_g_idx"), BrokenFolder, r"\.weight_g_idx is missing"),
    ("pack-4-order", lambda t: t["weight_g_idx"].fill_(9), BrokenFolder, r"\.weight_g_idx has groups 9 to 9"),
    ("int-8", lambda t: t.pop("weight_scale"), BrokenFolder, r"\.weight_scale is missing"),
    ("int-8", lambda t: t.update(weight=t["weight"].short()), BrokenFolder, r"\.weight is int16, not int8"),
    ("int-8", lambda t: t.update(weight_scale=t["weight_scale"][:9]), BrokenFolder, r"weight_scale has shape \(9, "),
    ("hqq-4", lambda t: t.pop("zero"), BrokenFolder, r"\.zero is missing"),
    ("hqq-4", lambda t: t.update(packing=t["axis"]), UnsupportedModel, r"\.packing: '' is not supported; .* 8bit_u8"),
    ("hqq-4", lambda t: t["shape"].fill_(10**6), BrokenFolder, r"\.W_q has shape .* the weight needs 10{12}"),
    ("hqq-4", lambda t: t.update(scale=t["scale"][:7], zero=t["zero"][:7]), BrokenFolder, r"\.scale has 7 values"),
    ("hqq-4", lambda t: t.update(zero_q=t["zero"]), UnsupportedModel, r"\.zero_q: quantized scales and zeros of HQQ"),
    ("torchao-4", lambda t: t.pop("_weight_scale"), BrokenFolder, r"\._weight_scale is missing"),
    (
        "torchao-8",
        lambda t: t.update(_weight_scale=t["_weight_scale"][:5]),
        BrokenFolder,
        r"_weight_scale has 5 values",
    ),
]


@pytest.mark.parametrize(("name", "change", "error", "text"), BROKEN, ids=[f"{case[0]}-{case[3]}" for case in BROKEN])
def test_broken_weights(name: str, change: Callable[[Tensors], object], error: type[ModelError], text: str) -> None:
    variant, weight = VARIANTS[name], torch.randn(48, 96)
    tensors, _ = variant.pack(weight)
    change(tensors)
    stored = {f"{MODULE}.{part}": tensor for part, tensor in tensors.items()}
    metadata = None if variant.metadata is None else {f"{MODULE}.weight": variant.metadata(weight)}
    with pytest.raises(error, match=text):
        read(variant.section, stored, metadata)


@pytest.mark.parametrize(
    ("entry", "error", "text"),
    [
        (None, BrokenFolder, "the metadata of the file do not say what it is"),
        ("[", BrokenFolder, "its metadata cannot be used"),
        ('{"_type": "Int4Tensor", "_data": {"block_size": [1, 0]}}', BrokenFolder, "blocks of 1 x 0"),
        ('{"_type": "NVFP4Tensor", "_data": {}}', UnsupportedModel, "a NVFP4Tensor of torchao.* are Int4Tensor"),
    ],
)
def test_metadata_of_torchao(entry: str | None, error: type[ModelError], text: str) -> None:
    variant = VARIANTS["torchao-4"]
    stored = {f"{MODULE}.{part}": tensor for part, tensor in variant.pack(torch.randn(48, 96))[0].items()}
    with pytest.raises(error, match=text):
        read(variant.section, stored, {} if entry is None else {f"{MODULE}.weight": entry})


def test_errors_name_file_and_tensor(tmp_path: Path) -> None:
    folder = quantize(saved(tmp_path), gptq())
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{MODULE}.scales"][2, 3] = torch.inf
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(BrokenFolder, match=rf"{MODULE}\.weight has NaN or infinite values: the checkpoint is damaged"):
        load(folder)
    del tensors[f"{MODULE}.scales"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(BrokenFolder, match=rf"model\.safetensors: {MODULE}\.qweight .* {MODULE}\.scales is missing"):
        load(folder)


def test_transformers_models_are_refused(tmp_path: Path) -> None:
    """Weights of a method are read for Quire's own decoder."""
    folder = quantize(saved(tmp_path), gptq())
    with pytest.raises(UnsupportedModel, match="quantization method 'gptq' are read for Quire's own decoder only"):
        load(folder, model_impl="transformers")
