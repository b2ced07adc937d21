"""Weights that a checkpoint stores in groups stay so on GPUs: in linear layers, tables of embeddings and experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from quire.engine.models.checkpoint.formats import FORMATS
from quire.engine.models.layers.embedding import Embedding
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.moe import ExpertLinear, MoELayer
from quire.engine.models.source import tensors_in
from quire.kernels import gpu, native
from quire.kernels.gpu_groups import GpuWeightParts, GroupedGpuWeight, format_groups
from quire.kernels.gpu_weights import PlainGpuWeight
from tests.support.engine import load
from tests.support.grouped_format import METHOD, GroupedFormat, quantize
from tests.support.groups import make_groups
from tests.support.integer_checkpoints import awq, gptq
from tests.support.integer_checkpoints import quantize as quantize_integers
from tests.support.models import make_model, save_model
from tests.support.toy_format import twin_of

pytestmark = pytest.mark.usefixtures("interpreted")


def mixed(name: str) -> str:
    """As in a file of Q4_K_M: values and embeddings have more bits."""
    return "int8" if "v_proj" in name or "embed" in name or "lm_head" in name else "int4"


def results(model: nn.Module) -> dict[str, Tensor]:
    """What layers make of random inputs, by name."""
    made = {}
    with native.disabled(), gpu.interpreted(), torch.inference_mode():
        for name, layer in model.named_modules():
            torch.manual_seed(0)
            if isinstance(layer, MoELayer):
                made[name] = layer(torch.randn(5, layer.router.size_in).bfloat16())
            elif isinstance(layer, Linear) and not isinstance(layer, ExpertLinear):
                made[name] = layer(torch.randn(5, layer.size_in).bfloat16())
            elif isinstance(layer, Embedding):
                made[name] = layer(torch.tensor([0, 5, 200]))
    return made


def assert_close(model: nn.Module, twin: nn.Module) -> None:
    """Layers compute what those of the dequantized twin do; scales are rounded, to float16.

    The interpreter truncates to bfloat16, which the values of a tile are rounded to on a GPU.
    """
    made, expected = results(model), results(twin)
    assert made.keys() == expected.keys()
    for name, out in made.items():
        assert (out - expected[name]).float().norm() < 2e-2 * expected[name].float().norm(), name


@pytest.mark.parametrize(
    "case",
    [
        "llama-biased-tied",
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        pytest.param("llama", marks=pytest.mark.slow),
    ],
)
def test_weights_stay_as_they_are_stored(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A projection with parts of several formats, and a tied table, which is stored once."""
    monkeypatch.setitem(FORMATS, METHOD, GroupedFormat)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    if case == "qwen3_moe":
        sizes["moe_intermediate_size"] = 128  # GPUs read whole blocks of inputs: of a few they would be mostly padding
    folder = save_model(make_model(case, **sizes).bfloat16(), tmp_path / "model")
    twin = load(quantize(folder, mixed), dtype="bfloat16")
    loaded = load(folder, dtype="bfloat16")
    attention = next(module for name, module in loaded.model.named_modules() if name.endswith("qkv"))
    assert type(attention.packed) is GpuWeightParts
    assert type(loaded.model.embed.packed) is GroupedGpuWeight
    assert (loaded.model.embed.packed is loaded.model.head.packed) == ("tied" in case)
    assert loaded.weight_bytes < 0.6 * twin.weight_bytes
    assert_close(loaded.model, twin.model)


@pytest.mark.parametrize(
    ("case", "ordered"),
    [("llama", True), ("qwen3_moe", False), pytest.param("qwen3_moe", True, marks=pytest.mark.slow)],
)
def test_integers(case: str, ordered: bool, tmp_path: Path) -> None:
    """Inputs in the order of activations, in linear layers; experts with such an order are dequantized."""
    folder = save_model(make_model(case, num_hidden_layers=1).bfloat16(), tmp_path / "model")
    quantize_integers(folder, gptq(ordered=True) if ordered else awq())
    loaded, twin = load(folder, dtype="bfloat16"), load(twin_of(folder), dtype="bfloat16")
    kinds = {type(layer.packed) for layer in loaded.model.layers.modules() if isinstance(layer, Linear)}
    assert GroupedGpuWeight in kinds
    stacks = [layer._stacks for layer in loaded.model.modules() if isinstance(layer, MoELayer)]
    assert {stack.data.kind for pair in stacks for stack in pair} <= {"plain" if ordered else "groups"}
    assert bool(stacks) == ("moe" in case)
    assert_close(loaded.model, twin.model)


def test_float32_is_exact(tmp_path: Path) -> None:
    """Weights are dequantized: tokens are those of the twin."""
    folder = save_model(make_model("llama"), tmp_path / "model")
    quantize_integers(folder, awq())
    kinds = {type(layer.packed) for layer in load(folder).model.modules() if isinstance(layer, Linear)}
    assert kinds <= {type(None), PlainGpuWeight}


def test_tensors_are_named_for_their_layout() -> None:
    """Weights that replace others while a model runs find no place in another layout, and are refused then."""

    def names(kind: str, group: int) -> set[str]:
        groups = make_groups(kind, 64, group, 128)
        data = format_groups(groups, torch.bfloat16, torch.device("cpu"))
        return {path for path, _ in tensors_in(GroupedGpuWeight(data))}

    layouts = [
        names(*layout) for layout in (("symmetric", 32), ("affine", 32), ("affine", 64), ("e2m1", 32), ("int8", 32))
    ]
    for index, layout in enumerate(layouts):
        assert all(layout - other for other in layouts[:index] + layouts[index + 1 :])
