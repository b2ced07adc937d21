"""Checkpoints of FP8, FP4 and bitsandbytes: weights are what the formats' definitions make of them, whole and in parts.

Models compute with these.
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

from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.models.checkpoint.formats import formats_of
from quire.engine.models.checkpoint.formats.fp8 import Fp8Weight
from quire.engine.models.checkpoint.formats.mxfp4 import Mxfp4Weight
from quire.engine.models.checkpoint.formats.stored_groups import StoredGroups
from quire.engine.models.config.quantization import cache_scheme, quantization_section, vllm_names
from quire.engine.models.errors import BrokenFolder, ModelError, UnsupportedModel, WeightMismatch
from quire.engine.models.layers.linear import Linear
from quire.kernels.grouped import can_pack_groups
from quire.kernels.linear import PackedBFloat16
from quire.kernels.packed_groups import PackedGroups
from tests.support.engine import Engine, greedy, load, random_prompt
from tests.support.float_checkpoints import (
    VARIANTS,
    bnb_4bit,
    compressed,
    fp8,
    modelopt,
    quark,
)
from tests.support.integer_checkpoints import Tensors, Variant, quantize
from tests.support.models import make_model, save_model
from tests.support.oracle import generated, transformers_model
from tests.support.packed_checkpoints import save_gpt_oss
from tests.support.stored_weights import MODULE, TOKENS, check, check_tokens, packed, read
from tests.support.toy_format import twin_of
from tests.support.variants import slow_but

TP = {"tensor_parallel_size": 2}
HAS_KERNELS = can_pack_groups(torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_are_what_their_numbers_stand_for(name: str) -> None:
    """Whole, and the parts of ranks: rows, and inputs."""
    (weight_name, weight, tensors), values = packed(VARIANTS[name])
    assert weight_name == f"{MODULE}.weight"
    assert all(tensor.startswith(f"{MODULE}.") for tensor in tensors)
    assert weight.shape == (48, 96)
    for rows in (slice(None), slice(0, 24), slice(20, 45)):
        for columns in (slice(None), slice(0, 32), slice(32, 96)):
            if isinstance(weight, StoredGroups) and columns != slice(None) and 32 % weight.groups().group:
                continue
            check(weight.part((rows, columns)), values[rows, columns], VARIANTS[name])


RECORDED = Path(__file__).parent / "recordings" / "float_weights_of_tools.safetensors"


def test_files_of_the_tools() -> None:
    """Weights that the formats' own tools have written are the numbers that these tools make of them again.

    compressed-tensors computes in float32 here, bitsandbytes in the dtype of the weight. Those of int8 are rounded to
    float16, as the tools multiply by a rounded 1 / 127.
    """
    stored = load_file(RECORDED)
    with safe_open(RECORDED, "pt") as file:
        entries = {name: json.loads(text) for name, text in file.metadata().items()}
    assert {entry["tool"].partition(" ")[0] for entry in entries.values()} == {"compressed-tensors", "bitsandbytes"}
    for module, entry in entries.items():
        tensors = {name: tensor for name, tensor in stored.items() if name.startswith(f"{module}.")}
        values = read(entry["section"], tensors).weight.dequantize(torch.float32).to(getattr(torch, entry["dtype"]))
        assert zlib.crc32(values.contiguous().view(torch.uint8).numpy().tobytes()) == entry["crc32"], module


@pytest.mark.parametrize("shape", [(8, 128), (16, 32), (64, 16), (2, 4096), (6, 40), (3, 33)])
@pytest.mark.parametrize("block", [64, 128])
def test_blocks_of_the_flattened_weight(shape: tuple[int, int], block: int) -> None:
    """Several in a row, several rows in one, or neither."""
    variant = bnb_4bit(block=block)
    (_, weight, _), values = packed(variant, *shape)
    check(weight, values, variant)
    check(weight.part((slice(1, 3), slice(None))), values[1:3], variant)
    assert isinstance(weight, StoredGroups) == (shape[1] % block == 0 or block % shape[1] == 0)


def test_scales_of_blocks_of_modelopt() -> None:
    variant = fp8(modelopt("FP8_PB_WO"), (128, 128), shape=(2, 1, 3, 1))
    (_, weight, _), values = packed(variant, 200, 300)
    check(weight, values, variant)
    check(weight.part((slice(100, 200), slice(150, 300))), values[100:, 150:], variant)


def test_memory_of_groups() -> None:
    """FP4 and NF4 are tables of 16 values, rows of int8 have no minimums."""
    for name in ("modelopt-nvfp4", "compressed-mxfp4", "bnb-nf4-32"):
        weight = packed(VARIANTS[name])[0].weight
        assert isinstance(weight, StoredGroups)
        groups = weight.groups()
        assert (groups.bits, groups.minimums) == (4, None)
        assert groups.table is not None
    rows = packed(VARIANTS["bnb-int8"])[0].weight
    assert isinstance(rows, StoredGroups)
    assert rows.groups().minimums is None


@pytest.mark.parametrize("name", ["modelopt-nvfp4", "compressed-mxfp4"])
def test_ranks_cannot_share_a_group(name: str) -> None:
    (_, weight, _), _ = packed(VARIANTS[name])
    with pytest.raises(UnsupportedModel, match=r"a rank has inputs 0 to 40, but \d\d of them share a scale"):
        weight.part((slice(0, 48), slice(0, 40))).dequantize(torch.float32)


def saved(tmp_path: Path, case: str = "llama", **changes: Any) -> Path:
    return save_model(make_model(case, num_hidden_layers=2, **changes), tmp_path / "model")


@pytest.mark.skipif(not HAS_KERNELS, reason="no kernels for groups")
@pytest.mark.parametrize(
    "name", slow_but(["modelopt-nvfp4", "compressed-mxfp4", "bnb-nf4-32", "bnb-int8"], "modelopt-nvfp4")
)
def test_weights_stay_packed(tmp_path: Path, name: str) -> None:
    """Where a kernel multiplies with them; they take less memory."""
    folder = quantize(saved(tmp_path, intermediate_size=128), VARIANTS[name])
    packed, plain = (load(path, dtype="bfloat16") for path in (folder, twin_of(folder)))
    kinds = {type(module.packed) for module in packed.model.layers.modules() if isinstance(module, Linear)}
    assert kinds == {PackedGroups}
    assert packed.weight_bytes < (0.8 if name == "bnb-int8" else 0.7) * plain.weight_bytes


# Of models whose inputs groups divide.
CASES = [
    ("llama", "compressed-nvfp4"),
    ("qwen3", "bnb-nf4-nested"),
    ("qwen3_moe", "compressed-fp8-blocks"),
    *(("llama", name) for name in ("fbgemm", "modelopt-fp8", "modelopt-nvfp4", "mxfp8", "quark-fp8", "bnb-int8")),
    *(("llama-biased-tied", name) for name in ("fp8-blocks", "bnb-nf4-64", "compressed-mxfp4", "quark-mxfp4")),
    *(("qwen3", name) for name in ("bnb-fp4", "bnb-nf4-256", "modelopt-rows", "compressed-fp8-tensor")),
]


@pytest.mark.parametrize(("case", "variant"), slow_but(CASES, *CASES[:3]))
def test_tokens_of_transformers_on_the_same_numbers(tmp_path: Path, case: str, variant: str) -> None:
    changes = {} if case == "qwen3_moe" else {"intermediate_size": 128}
    folder = quantize(saved(tmp_path, case, **changes), VARIANTS[variant])
    prompt = random_prompt(1, 12)
    expected, _ = generated(transformers_model(twin_of(folder)), prompt, TOKENS)
    assert Engine(folder).generate(prompt, greedy(TOKENS)).tokens == expected


OF_RANKS = [
    ("llama", "modelopt-nvfp4"),
    *(("llama", name) for name in ("compressed-mxfp4", "bnb-nf4-32", "bnb-int8", "compressed-fp8-rows")),
    ("qwen3", "fp8-blocks"),
]


@pytest.mark.parametrize(("case", "variant"), slow_but(OF_RANKS, OF_RANKS[0]))
def test_ranks_have_parts(tmp_path: Path, case: str, variant: str) -> None:
    check_tokens(quantize(saved(tmp_path, case, intermediate_size=128), VARIANTS[variant]), ParallelOptions(**TP))


def test_mixed_precision_of_modelopt(tmp_path: Path) -> None:
    """Modules of FP8 and of NVFP4 in one model, with a file of its own in place of a section in the config."""
    eight, four = VARIANTS["modelopt-fp8"], VARIANTS["modelopt-nvfp4"]
    folder = saved(tmp_path, intermediate_size=128)
    quantize(folder, lambda module: four if "mlp" in module else eight, modelopt("MIXED_PRECISION"))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    quantization = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization})
    )
    check_tokens(folder)


def test_groups_of_floats_and_integers(tmp_path: Path) -> None:
    """Of compressed-tensors, with names that are not quantized."""
    eight, four = VARIANTS["compressed-fp8-rows"], VARIANTS["compressed-nvfp4"]
    groups: dict[str, Any] = {}
    for target, variant in (("re:.*self_attn.*", eight), ("Linear", four)):
        group = {**variant.section["config_groups"]["group_0"], "targets": [target]}
        groups[f"group_{len(groups)}"] = {**group, "format": variant.section["format"]}
    section = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    section["ignore"] = ["lm_head", "re:.*layers.1.mlp.*"]

    def chosen(module: str) -> Variant | None:
        return eight if "self_attn" in module else None if "1.mlp" in module else four

    check_tokens(quantize(saved(tmp_path, intermediate_size=128), chosen, section))


def test_experts_of_gpt_oss_stay_packed(tmp_path: Path) -> None:
    """Expert by expert, with the values that the unpacked ones have."""
    plain_folder, folder = save_gpt_oss(tmp_path)
    packed, plain = (load(path, dtype="bfloat16") for path in (folder, plain_folder))
    for layer, plain_layer in zip(packed.model.layers, plain.model.layers, strict=True):
        for expert, plain_expert in zip(layer.ffn.experts, plain_layer.ffn.experts, strict=True):
            assert {type(linear.packed) for linear in (expert.gate_up, expert.down)} == {PackedGroups}
            x = torch.randn(5, 64).bfloat16()
            expected = plain_expert(x).float()
            assert (expert(x).float() - expected).abs().max() < 0.05 * expected.abs().max()


def prompt_logprobs(folder: Path, parallel: dict[str, Any]) -> tuple[torch.Tensor, set[type]]:
    """Those of the tokens of a prompt in bfloat16, and the kinds of the experts' weights on the first rank."""
    model = ModelOptions(dtype="bfloat16")
    engine = Engine(folder, model=model, parallel=ParallelOptions(**parallel), kv_cache_memory_bytes=8 << 20)
    try:
        entries = engine.generate(random_prompt(4, 40), greedy(1, prompt_logprobs=0)).outputs[0].prompt_logprobs or ()
        linears = [module for name, module in engine.model.named_modules() if ".experts." in name]
        kinds = {type(module.packed) for module in linears if isinstance(module, Linear)}
        return torch.tensor([entry.logprobs[0] for entry in entries if entry]), kinds
    finally:
        engine.core.close()


@pytest.mark.skipif(not HAS_KERNELS, reason="no kernels for groups")
@pytest.mark.parametrize(
    ("size", "parallel", "is_cut"),
    slow_but([(64, TP, False), (96, TP, True), (96, {**TP, "enable_expert_parallel": True}, False)], (96, TP, True)),
    ids=str,
)
def test_ranks_have_parts_of_stacked_experts(size: int, parallel: dict[str, Any], is_cut: bool, tmp_path: Path) -> None:
    """A projection whose inputs are cut inside of a group is dequantized."""
    plain, folder = save_gpt_oss(tmp_path, size)
    expected, _ = prompt_logprobs(plain, {})
    logprobs, kinds = prompt_logprobs(folder, parallel)
    assert kinds == ({PackedGroups, PackedBFloat16} if is_cut else {PackedGroups})
    assert (logprobs - expected).abs().median() < 0.3  # unrelated log-probabilities differ by 3


def test_weights_of_stacked_experts() -> None:
    """Of the whole weight, and of a part; not where a border is inside of a group."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(118, 132, (3, 10, 4), generator=generator).to(torch.uint8)
    whole = Mxfp4Weight(blocks, scales)
    for window in ((), (slice(1, 3), slice(32, 96), slice(2, 8))):
        part = whole.part(window)
        experts = part.experts()
        assert experts is not None
        values = torch.stack([expert.dequantize(torch.float32) for expert in experts])
        assert torch.equal(values, part.dequantize(torch.float32).mT)
    assert whole.part((slice(0, 3), slice(40, 96), slice(0, 10))).experts() is None


def test_a_model_with_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    _, folder = save_gpt_oss(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    changed = {f"{name}_{part}": tensors[f"{name}_{part}"][:-1].clone() for part in ("blocks", "scales")}
    save_file({**tensors, **changed}, folder / "model.safetensors", metadata={"format": "pt"})
    for dtype in ("bfloat16", "float32"):
        with pytest.raises(WeightMismatch, match=rf"{name} has shape .* but the model has \d+ experts"):
            load(folder, dtype=dtype)


@pytest.mark.parametrize(
    ("file", "values", "method"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt"),
        ("quantization_config.json", {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, "modelopt"),
    ],
)
def test_methods_in_files(tmp_path: Path, file: str, values: dict[str, Any], method: str) -> None:
    (tmp_path / file).write_text(json.dumps(values))
    section = quantization_section(object(), tmp_path)
    assert section is not None
    assert section["quant_method"] == method
    formats_of(section)


def test_names_of_vllm() -> None:
    assert {"modelopt", "modelopt_fp4"} <= vllm_names({"quant_method": "modelopt"})
    assert vllm_names({"quant_method": "bitsandbytes"}) == {"bitsandbytes"}


@pytest.mark.parametrize(
    ("section", "scheme"),
    [
        (None, None),
        ({"quant_method": "fp8"}, None),
        ({"kv_cache_scheme": None}, None),
        ({"kv_cache_scheme": "static"}, None),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head"}}, "fp8"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "int8"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "float4"),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
    ],
)
def test_caches_that_checkpoints_are_made_for(section: dict[str, Any] | None, scheme: str | None) -> None:
    assert cache_scheme(section) == scheme


def floats(stored_as: str, **changes: Any) -> dict[str, Any]:
    return compressed(stored_as, **{"num_bits": 8, "strategy": "tensor", **changes})


REFUSED: list[tuple[dict[str, Any], str]] = [
    (modelopt("W4A16_AWQ"), "quant_algo 'W4A16_AWQ' of ModelOpt is not supported; supported are FP8, .*NVFP4"),
    (modelopt("MIXED_PRECISION", quantized_layers=["a"]), "quantized_layers must be an object, not \\['a'\\]"),
    (
        modelopt("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "INT4"}}),
        r"quantized_layers\['a'\]\.quant_algo 'INT4' of ModelOpt",
    ),
    (modelopt("MIXED_PRECISION", quantized_layers={"a": 4}), r"quantized_layers\['a'\] must be an object"),
    (quark("int4", "per_group", group_size=128), "weights of 'int4' 'per_group' .* of Quark are not supported; .*fp4"),
    (quark("fp4", "per_group", group_size=16, scale_format="e8m0"), r"\(group_size 16\) of Quark"),
    ({**quark("fp8_e4m3", "per_tensor"), "export": {"pack_method": "dense"}}, "pack_method 'dense' of Quark"),
    (
        {**quark("fp8_e4m3", "per_tensor"), "layer_quant_config": {"*down": {"weight": {"dtype": "int8"}}}},
        r"layer_quant_config\['\*down'\]: weights of 'int8'",
    ),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "af4"},
        "bnb_4bit_quant_type 'af4' is not supported; supported are nf4, fp4",
    ),
    (floats("float-quantized", num_bits=4), r"group_0\.weights: num_bits must be 8 for this format of floats, not 4"),
    (floats("float-quantized", symmetric=False), "floats with zero points"),
    (
        floats("nvfp4-pack-quantized", num_bits=4),
        "strategy tensor is not supported for floats of 4 bits; .*tensor_group",
    ),
    (
        floats("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=16),
        "group_size must be 32 for this format of floats, not 16",
    ),
    (floats("pack-quantized"), "format 'pack-quantized' of float weights .* nvfp4-pack-quantized of float"),
]


@pytest.mark.parametrize(("section", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_options_that_are_refused(section: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModel, match=text):
        formats_of(section)


def with_state(tensors: Tensors, **changes: Any) -> None:
    """Change the state of a weight of bitsandbytes."""
    name = "weight.quant_state.bitsandbytes__nf4"
    state = {**json.loads(bytes(tensors[name].tolist())), **changes}
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


NF4 = "bnb-nf4-32"
STATE = r"\.weight\.quant_state\.bitsandbytes__nf4"
BROKEN: list[tuple[str, Callable[[Tensors], object], type[ModelError], str]] = [
    ("modelopt-fp8", lambda t: t.pop("weight_scale"), BrokenFolder, r"\.weight cannot .*\.weight_scale is missing"),
    ("modelopt-fp8", lambda t: t.update(weight=t["weight"][0]), BrokenFolder, r"\.weight has shape \(96,\)"),
    (
        "modelopt-fp8",
        lambda t: t.update(weight=t["weight"].float().to(torch.int8)),
        UnsupportedModel,
        r"\.weight is int8, which is not supported with ModelOpt",
    ),
    (
        "modelopt-nvfp4",
        lambda t: t.update(pre_quant_scale=torch.ones(96)),
        UnsupportedModel,
        r"\.pre_quant_scale: factors of inputs are not supported with ModelOpt",
    ),
    ("modelopt-nvfp4", lambda t: t.pop("weight_scale_2"), BrokenFolder, r"\.weight_scale_2 is missing"),
    ("modelopt-nvfp4", lambda t: t.update(weight=t["weight"][:, 1:]), BrokenFolder, "94 inputs, which groups of 16"),
    ("modelopt-nvfp4", lambda t: t.update(weight_scale=t["weight_scale"][1:]), BrokenFolder, r"shape \(47, 6\)"),
    ("compressed-nvfp4", lambda t: t.pop("weight_global_scale"), BrokenFolder, r"\.weight_global_scale is missing"),
    ("compressed-nvfp4", lambda t: t.pop("weight_scale"), BrokenFolder, r"\.weight_scale is missing"),
    (
        "compressed-nvfp4",
        lambda t: t.update(weight_scale=t["weight_scale"].float()),
        BrokenFolder,
        r"\.weight_scale is float32, not float8_e4m3fn",
    ),
    ("compressed-mxfp4", lambda t: t.update(weight_packed=t["weight_packed"].int()), BrokenFolder, "int32, not uint8"),
    (
        "compressed-fp8-blocks",
        lambda t: t.update(weight_scale=t["weight_scale"][1:]),
        BrokenFolder,
        r"\.weight_scale has shape \(2, 4\), .* need \(3, 4\)",
    ),
    ("compressed-fp8-rows", lambda t: t.pop("weight_scale"), BrokenFolder, r"\.weight_scale is missing"),
    (NF4, lambda t: t.pop("weight.absmax"), BrokenFolder, r"\.weight\.absmax is missing"),
    (NF4, lambda t: t.pop("weight.quant_map"), BrokenFolder, r"\.weight\.quant_map is missing"),
    (NF4, lambda t: t.pop(STATE.replace("\\", "")[1:]), BrokenFolder, rf"{STATE} is missing"),
    (NF4, lambda t: t.update({"weight.absmax": t["weight.absmax"][1:]}), BrokenFolder, r"absmax has shape \(143,\)"),
    (NF4, lambda t: t.update(weight=t["weight"][1:]), BrokenFolder, r"\.weight has 2303 bytes, .* needs 2304"),
    (NF4, lambda t: with_state(t, shape=[48, 1 << 50]), BrokenFolder, r"\.weight has 2304 bytes"),
    (NF4, lambda t: with_state(t, shape=[48]), BrokenFolder, rf"{STATE} cannot be used: shape must be two positive"),
    (NF4, lambda t: with_state(t, blocksize=0), BrokenFolder, rf"{STATE} cannot be used: blocks must be of 32 to 4096"),
    (NF4, lambda t: with_state(t, blocksize=True), BrokenFolder, "blocks must be of 32 to 4096"),
    (NF4, lambda t: t[STATE.replace("\\", "")[1:]].fill_(91), BrokenFolder, rf"{STATE} cannot be used"),
    ("bnb-nf4-nested", lambda t: t.pop("weight.nested_absmax"), BrokenFolder, r"\.nested_absmax is missing"),
    (
        "bnb-nf4-nested",
        lambda t: t.update({"weight.nested_quant_map": t["weight.nested_quant_map"][1:]}),
        BrokenFolder,
        r"nested_quant_map has shape \(255,\)",
    ),
    ("bnb-int8", lambda t: t.pop("SCB"), BrokenFolder, r"\.SCB is missing"),
    ("bnb-int8", lambda t: t["weight_format"].fill_(2), UnsupportedModel, r"\.weight_format is 2, but only rows \(0\)"),
    (
        "bnb-int8",
        lambda t: t.update(weight_format=torch.full((40, 40), 3)),
        UnsupportedModel,
        r"\.weight_format is 3, but",
    ),
]


@pytest.mark.parametrize(("name", "change", "error", "text"), BROKEN, ids=[f"{case[0]}-{case[3]}" for case in BROKEN])
def test_broken_weights(name: str, change: Callable[[Tensors], object], error: type[ModelError], text: str) -> None:
    tensors, _ = VARIANTS[name].pack(torch.randn(48, 96))
    change(tensors)
    with pytest.raises(error, match=text):
        read(VARIANTS[name].section, {f"{MODULE}.{part}": tensor for part, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t["_scales"][:-1], r"_scales has shape \(3, 10, 4\)"),
        (lambda t: t["_scales"].int(), "_scales is int32, not uint8"),
    ],
)
def test_broken_scales_of_experts(change: Callable[[Tensors], torch.Tensor], text: str) -> None:
    tensors = {"_blocks": torch.zeros(4, 10, 4, 16).to(torch.uint8), "_scales": torch.zeros(4, 10, 4).to(torch.uint8)}
    tensors["_scales"] = change(tensors)
    with pytest.raises(BrokenFolder, match=text):
        read({"quant_method": "mxfp4"}, {f"experts.down_proj{name}": tensor for name, tensor in tensors.items()})


def test_nan_is_refused(tmp_path: Path) -> None:
    folder = quantize(saved(tmp_path, intermediate_size=128), VARIANTS["modelopt-nvfp4"])
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{MODULE}.weight_scale"].view(torch.uint8)[2, 3] = 0x7F
    save_file(tensors, path, metadata={"format": "pt"})
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(BrokenFolder, match=rf"{MODULE}\.weight has NaN or infinite values"):
            load(folder, dtype=dtype)


def test_exponents_of_experts_that_are_not_numbers() -> None:
    scales = torch.full((1, 2, 1), 255, dtype=torch.uint8)
    weight = Mxfp4Weight(torch.zeros(1, 2, 1, 16, dtype=torch.uint8), scales)
    assert weight.dequantize(torch.float32).isnan().all()
    experts = weight.experts()
    assert experts is not None
    assert not experts[0].is_finite()


def test_fp8_scales_as_exponents() -> None:
    codes = torch.randn(4, 64).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[127, 128], [120, 127], [126, 125], [130, 127]], dtype=torch.uint8)
    values = codes.float() * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    for scales in (exponents, exponents.view(torch.float8_e8m0fnu)):
        assert torch.equal(Fp8Weight(codes, scales, (1, 32)).dequantize(torch.float32), values)


def test_scales_of_weights_that_are_not_fp8_are_weights() -> None:
    """As the gains of a norm or of a router, which some models call `scale`."""
    fp8_format, *_ = formats_of({"quant_method": "fp8"})
    codes = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)
    stored = {
        "router.scale": torch.ones(4),
        "norm.weight": torch.ones(4),
        "norm.scale": torch.ones(4),
        "proj.weight": codes,
        "proj.scale": torch.ones(1),
    }
    assert {name for name in stored if fp8_format.is_part(name, stored)} == {"proj.scale"}
    assert {name for name in stored if fp8_format.read(name, stored) is not None} == {"proj.weight"}
