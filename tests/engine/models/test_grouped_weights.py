"""Weights that a checkpoint stores in groups stay so: in linear layers, fused projections and tables of embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.models.checkpoint.formats import FORMATS
from quire.engine.models.errors import UnsupportedModel
from quire.kernels import native
from tests.support.engine import Engine, greedy, load, random_prompt
from tests.support.grouped_format import METHOD, GroupedFormat, packed_names, quantize
from tests.support.models import make_model, save_model
from tests.support.variants import slow_but

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="installed without a compiler")
TP = {"tensor_parallel_size": 2}
ALL = {"qkv", "out", "gate_up", "down", "head", "embed"}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, METHOD, GroupedFormat)


def mixed(name: str) -> str:
    """As in a file of Q4_K_M: values and embeddings have more bits."""
    return "int8" if "v_proj" in name or "embed" in name or "lm_head" in name else "int4"


def saved(tmp_path: Path, case: str) -> tuple[Path, Path]:
    """A folder, and its dequantized twin."""
    folder = save_model(make_model(case, hidden_size=128, intermediate_size=256).bfloat16(), tmp_path / "model")
    return folder, quantize(folder, mixed)


def logprobs(folder: Path, parallel: dict[str, Any], **options: Any) -> torch.Tensor:
    """Of the tokens of a prompt."""
    engine = Engine(
        folder,
        model=ModelOptions(dtype="bfloat16", **options),
        parallel=ParallelOptions(**parallel),
        kv_cache_memory_bytes=8 << 20,
    )
    try:
        reported = engine.generate(random_prompt(4, 40), greedy(1, prompt_logprobs=0)).outputs[0].prompt_logprobs or ()
        return torch.tensor([entry.logprobs[0] for entry in reported if entry])
    finally:
        engine.core.close()


@pytest.mark.parametrize(
    ("case", "parallel"),
    slow_but(
        [("llama-biased-tied", {}), ("llama", {}), ("qwen3_moe", {}), ("llama-biased-tied", TP), ("llama", TP)],
        ("llama-biased-tied", {}),
    ),
)
def test_log_probabilities_are_close(tmp_path: Path, case: str, parallel: dict[str, Any]) -> None:
    """To those of the dequantized twin."""
    folder, twin = saved(tmp_path, case)
    expected, given = logprobs(twin, {}), logprobs(folder, parallel)
    assert len(expected) == 39
    assert (given - expected).abs().median() < 0.3  # unrelated log-probabilities differ by 3


@pytest.mark.parametrize("tied", [True, False])
def test_all_weights_stay_as_they_are_stored(tmp_path: Path, tied: bool) -> None:
    """A tied table is stored once, a table alone is not dequantized either."""
    folder, twin = saved(tmp_path, "llama-biased-tied" if tied else "llama")
    loaded, plain = load(folder, dtype="bfloat16"), load(twin, dtype="bfloat16")
    assert packed_names(loaded.model) == ALL
    assert loaded.model.embed.weight is None
    assert (loaded.model.embed.packed is loaded.model.head.packed) == tied
    assert loaded.weight_bytes < 0.5 * plain.weight_bytes
    tokens = torch.tensor([0, 5, 255])
    torch.testing.assert_close(loaded.model.embed(tokens), plain.model.embed(tokens), rtol=2**-7, atol=2**-9)


def test_float32_is_exact(tmp_path: Path) -> None:
    """Weights are dequantized: tokens are those of the twin."""
    folder, twin = saved(tmp_path, "llama-biased-tied")
    assert packed_names(load(folder).model) == set()
    prompt = random_prompt(1, 10)
    tokens = [Engine(path).generate(prompt, greedy(12)).tokens for path in (folder, twin)]
    assert tokens[0] == tokens[1]


def test_inputs_that_are_not_rounded(tmp_path: Path) -> None:
    """The log probabilities are those of the twin."""
    folder, twin = saved(tmp_path, "llama-biased-tied")
    exact = logprobs(folder, {}, activation_quantization="none")
    assert torch.equal(exact, logprobs(twin, {}))
    assert not torch.equal(exact, logprobs(folder, {}))


def test_inputs_that_are_not_rounded_with_weights_that_are_while_they_load(tmp_path: Path) -> None:
    """Weights have the numbers that quantization leaves them, in 16 bits."""
    folder, _ = saved(tmp_path, "llama-biased-tied")
    rounded, exact = (
        load(folder, dtype="bfloat16", quantization="int4", activation_quantization=kind).model
        for kind in ("auto", "none")
    )
    assert packed_names(rounded) == ALL
    assert packed_names(exact) == set()
    assert exact.embed.packed is exact.head.packed
    for name in ("qkv", "out"):
        x = torch.eye(128, dtype=torch.bfloat16)
        left, right = (getattr(model.layers[0].attn, name) for model in (rounded, exact))
        torch.testing.assert_close(right(x), left(x), rtol=2**-6, atol=2**-9)
    with pytest.raises(UnsupportedModel, match="--activation-quantization none works with --dtype bfloat16"):
        load(folder, quantization="int4", activation_quantization="none")
