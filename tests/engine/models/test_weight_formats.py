"""A format of weights that Quire does not have fits without a change to loader, sharding or layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.models.checkpoint.formats import FORMATS
from quire.engine.models.errors import BrokenFolder, ModelError, UnsupportedModel, WeightMismatch
from quire.engine.models.layers.linear import Linear
from tests.support.engine import Engine, greedy, load, random_prompt
from tests.support.models import make_model, save_model
from tests.support.toy_format import METHOD, ToyFormat, ToyKernel, quantize, twin_of
from tests.support.variants import slow_but

TOKENS = 20
TP, EP = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}
# Of all cases: projections of the same input, fused or not in the checkpoint; experts; biases; layers that are exact.
CASES = ("llama", "llama-biased-tied", "phi3", "qwen3_moe", "deepseek_v3")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, METHOD, ToyFormat)


def saved(tmp_path: Path, case: str = "llama", **options: Any) -> Path:
    folder = save_model(make_model(case), tmp_path / "model")
    quantize(folder, **options)
    return folder


@contextmanager
def running(folder: Path, parallel: dict[str, Any], **fields: Any) -> Iterator[Engine]:
    engine = Engine(
        folder, parallel=ParallelOptions(**parallel), model=ModelOptions(**fields), kv_cache_memory_bytes=8 << 20
    )
    try:
        yield engine
    finally:
        engine.core.close()


def check_tokens(folder: Path, parallel: dict[str, Any], **fields: Any) -> None:
    """Check that a folder gives the tokens of its dequantized twin on one rank."""
    with running(folder, parallel, **fields) as engine, running(twin_of(folder), {}, **fields) as twin:
        for seed, length in ((1, 5), (2, 40)):
            prompt = random_prompt(seed, length)
            assert engine.generate(prompt, greedy(TOKENS)).tokens == twin.generate(prompt, greedy(TOKENS)).tokens


def kept(model: torch.nn.Module) -> set[str]:
    """The ends of the names of layers that multiply with weights as they are stored."""
    return {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, Linear) and isinstance(module.packed, ToyKernel)
    }


@pytest.mark.parametrize("case", CASES)
def test_tokens_of_the_dequantized_twin(tmp_path: Path, case: str) -> None:
    folder = saved(tmp_path, case)
    check_tokens(folder, {})
    loaded = load(folder)
    assert kept(loaded.model) >= {"out", "gate_up", "down"}
    assert loaded.weight_bytes < 0.8 * load(twin_of(folder)).weight_bytes


@pytest.mark.parametrize(
    ("case", "parallel"),
    slow_but(
        [*((case, TP) for case in CASES), ("qwen3_moe", EP)], ("phi3", TP), ("qwen3_moe", EP), ("deepseek_v3", TP)
    ),
)
def test_ranks_have_parts(tmp_path: Path, case: str, parallel: dict[str, Any]) -> None:
    check_tokens(saved(tmp_path, case), parallel)


def test_parts_stay_as_they_are_stored(tmp_path: Path) -> None:
    """Also where a rank has several stretches of rows of a weight, as of fused projections."""
    for case in ("llama", "phi3"):
        folder = saved(tmp_path / case, case)
        with running(folder, TP) as engine:
            assert kept(engine.model) == {"qkv", "out", "gate_up", "down"}


@pytest.mark.parametrize(
    "options", [{"device": "reference"}, {"dtype": "bfloat16"}, {"quantization": "int8", "dtype": "bfloat16"}], ids=str
)
def test_other_devices_and_dtypes(tmp_path: Path, options: dict[str, Any]) -> None:
    """A weight that is to be quantized in another way is dequantized."""
    folder = saved(tmp_path)
    check_tokens(folder, {}, **options)
    assert bool(kept(load(folder, **options).model)) == ("quantization" not in options)


GROUPS: dict[str, Callable[[str], int | None]] = {
    "a plain part": lambda name: None if "v_proj" in name else 8,
    "other groups": lambda name: 16 if "v_proj" in name else 8,
}


@pytest.mark.parametrize("parallel", [{}, TP], ids=str)
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_projections_that_do_not_fit_together(
    tmp_path: Path, group: Callable[[str], int | None], parallel: dict[str, Any]
) -> None:
    """They are dequantized; layers beside them are not."""
    folder = saved(tmp_path, group=group)
    check_tokens(folder, parallel)
    assert kept(load(folder).model) == {"out", "gate_up", "down"}


@pytest.mark.parametrize("parallel", [{}, TP], ids=str)
def test_without_a_kernel(tmp_path: Path, parallel: dict[str, Any]) -> None:
    folder = saved(tmp_path, has_kernel=False)
    check_tokens(folder, parallel)
    assert kept(load(folder).model) == set()


def test_ranks_cannot_share_a_group(tmp_path: Path) -> None:
    folder = saved(tmp_path, group=lambda name: 96 if "down_proj" in name else 8)
    check_tokens(folder, {})
    with pytest.raises(UnsupportedModel, match=r"down_proj\.weight: a rank has inputs 0 to 48, but 96 of them share"):
        Engine(folder, parallel=ParallelOptions(**TP))


def changed(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


KEY = "model.layers.1.self_attn.k_proj"
BROKEN: dict[str, tuple[Callable[[Path], None], type[ModelError], str]] = {
    "no scales": (
        changed(lambda tensors: tensors.pop(f"{KEY}.group_scales")),
        BrokenFolder,
        rf"model\.safetensors: {KEY}\.low has no {KEY}\.group_scales",
    ),
    "nothing": (
        changed(lambda tensors: [tensors.pop(f"{KEY}.{kind}") for kind in ("low", "high", "group_scales")]),
        WeightMismatch,
        rf"weights missing .*{KEY}\.weight",
    ),
    "NaN": (
        changed(lambda tensors: tensors[f"{KEY}.group_scales"].fill_(torch.nan)),
        BrokenFolder,
        rf"{KEY}\.weight has NaN or infinite values: the checkpoint is damaged",
    ),
    "another shape": (
        changed(
            lambda tensors: tensors.update(
                {f"{KEY}.{kind}": tensors[f"{KEY}.{kind}"][:8].clone() for kind in ("low", "high", "group_scales")}
            )
        ),
        WeightMismatch,
        rf"{KEY}\.weight has shape \(8, 64\), but the model's is \(32, 64\)",
    ),
    "a plain weight, too": (
        changed(lambda tensors: tensors.update({f"{KEY}.weight": torch.ones(32, 64)})),
        WeightMismatch,
        rf"{KEY}\.weight occurs more than once",
    ),
}


@pytest.mark.parametrize("parallel", [{}, TP], ids=str)
@pytest.mark.parametrize(("change", "error", "text"), BROKEN.values(), ids=BROKEN)
def test_broken_weights(
    tmp_path: Path, change: Callable[[Path], None], error: type[ModelError], text: str, parallel: dict[str, Any]
) -> None:
    folder = saved(tmp_path)
    change(folder)
    with pytest.raises(error, match=text):
        Engine(folder, parallel=ParallelOptions(**parallel))


def test_a_method_that_is_not_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path)
    monkeypatch.delitem(FORMATS, METHOD)
    with pytest.raises(UnsupportedModel, match=r"method 'toy' is not supported; supported are .*mxfp4"):
        load(folder)
