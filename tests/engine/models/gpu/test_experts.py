"""Mixtures of experts on GPUs: weights in one tensor, tokens as those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.options import ModelOptions
from quire.engine.models.checkpoint import weights as weights_module
from quire.engine.models.checkpoint.weights import WeightFiller
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.moe import ExpertLinear, MoELayer
from quire.kernels import gpu, native
from quire.kernels.gpu_weights import GpuWeight
from tests.support.engine import Engine, greedy, load, random_prompt
from tests.support.models import make_model, save_model
from tests.support.packed_checkpoints import SCALINGS, pack_fp8
from tests.support.variants import covering, slow_but

CASES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]
TOKENS = 4


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", slow_but(CASES, "gpt_oss", "deepseek_v3"))
def test_tokens_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Alone, and in the same batch as other requests."""
    model = make_model(case, num_hidden_layers=2)
    engine = Engine(save_model(model, tmp_path), max_num_batched_tokens=8, max_num_seqs=4)
    prompts = [random_prompt(seed, length) for seed, length in ((1, 3), (2, 11))]
    with torch.inference_mode():
        expected = [
            model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)[
                0, len(prompt) :
            ]
            for prompt in prompts
        ]
    assert engine.generate(prompts[0], greedy(TOKENS)).tokens == expected[0].tolist()
    for index, prompt in enumerate(prompts):
        engine.add(f"together {index}", prompt, greedy(TOKENS))
    engine.run()
    for index, tokens in enumerate(expected):
        assert engine.results[f"together {index}"].tokens == tokens.tolist()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("case", "quantization"), covering(CASES, ["none", "int8", "fp8"]))
def test_a_layer_is_close_to_that_of_cpus(case: str, quantization: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = save_model(make_model(case, num_hidden_layers=2), tmp_path)
    model = load(folder, quantization=quantization).model
    with native.disabled():
        plain = _load_plain(folder)
    x = torch.randn(9, 64)
    layers = [(a, b) for a, b in zip(model.modules(), plain.modules(), strict=True) if isinstance(b, MoELayer)]
    assert layers
    for layer, reference in layers:
        assert isinstance(layer, MoELayer)
        with native.disabled():
            expected = reference(x)
        with native.disabled(), gpu.interpreted():
            out = layer(x)
        error = float((out - expected).norm() / expected.norm())
        assert error < {"none": 1e-5, "int8": 0.02, "fp8": 0.07}[quantization]
        assert all(linear.weight is None for linear in layer.modules() if isinstance(linear, ExpertLinear))


def _load_plain(folder: Path) -> Any:
    from quire.engine.execution.devices.host import ReferenceDevice
    from quire.engine.models.loader import load_model
    from quire.engine.models.model_config import read_model_config
    from tests.support.engine import no_progress

    options = ModelOptions(dtype="float32")
    config = read_model_config(folder, options.model_impl, options.hf_overrides)
    return load_model(folder, config, options, ReferenceDevice(), no_progress).model


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
def test_experts_exist_once(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain weights of at most two projections at a time; and no weight has memory twice when all are loaded."""
    filled: set[str] = set()
    most = 0
    copy_weight = WeightFiller._copy

    def copy_and_count(filler: WeightFiller, name: str, target: Any, tensor: torch.Tensor) -> None:
        nonlocal most
        if ".experts." in target.parameter and target.parameter.endswith("weight"):
            filled.add(target.parameter)
            most = max(most, len(filled))
        copy_weight(filler, name, target, tensor)
        filled.intersection_update(filler._parameters)

    monkeypatch.setattr(WeightFiller, "_copy", copy_and_count)
    loaded = load(save_model(make_model(case), tmp_path))
    assert 0 < most <= 2
    sizes = sum(parameter.nbytes for parameter in make_model(case).float().parameters())
    assert abs(loaded.weight_bytes - sizes) <= 0.01 * sizes


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_all_linear_layers_are_quantized(quantization: Any, tmp_path: Path) -> None:
    folder = save_model(make_model("qwen3"), tmp_path)
    loaded = load(folder, quantization=quantization)
    linears = [module for module in loaded.model.modules() if isinstance(module, Linear)]
    assert all(isinstance(linear.packed, GpuWeight) and linear.packed.data.scales is not None for linear in linears)
    assert loaded.weight_bytes < (0.33 if quantization == "int4" else 0.45) * load(folder).weight_bytes


@pytest.mark.usefixtures("interpreted")
def test_matrices_have_no_memory_until_they_are_filled() -> None:
    with torch.device("meta"):
        layer = Linear(64, 32, bias=True)
    weights_module.allocate(layer, torch.bfloat16, torch.device("cpu"))
    assert layer.weight is not None
    assert layer.weight.shape == (32, 64)
    assert layer.weight.untyped_storage().nbytes() == 0


@pytest.mark.usefixtures("interpreted")
def test_float8_checkpoints_keep_their_blocks(tmp_path: Path) -> None:
    folder = save_model(make_model("deepseek_v3", num_hidden_layers=2), tmp_path)
    pack_fp8(folder, SCALINGS["blocks of 128"])
    model = load(folder, quantization="fp8").model
    assert kinds_of(model) == {"blocks", "plain"}  # the router is not quantized
    plain = save_model(make_model("deepseek_v3", num_hidden_layers=2), tmp_path / "plain")
    model = load(plain, quantization="fp8").model
    assert kinds_of(model) == {"scaled", "plain"}


def kinds_of(model: torch.nn.Module) -> set[str]:
    """The formats of the packed weights of linear layers."""
    packed = [module.packed for module in model.modules() if isinstance(module, Linear)]
    return {weight.data.kind for weight in packed if isinstance(weight, GpuWeight)}
