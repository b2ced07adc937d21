"""KV caches of int8 and float8 on the device of GPUs, against torch's operations on the same formats."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.devices.select import find_device
from quire.engine.models.errors import UnsupportedModel
from quire.kernels import gpu
from tests.support import oracle, whisper
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.triton_device import gpu_device
from tests.support.variants import slow_but

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SHARED = random_prompt(1, 9)
PROMPTS = [SHARED + random_prompt(2, 4), SHARED + random_prompt(3, 2), random_prompt(5, 14)]
PARAMS = [greedy(12), SamplingParams(max_tokens=12, temperature=1.5, seed=3), greedy(4, logprobs=2)]
SMALL: dict[str, Any] = {"max_num_seqs": 3, "block_size": 4}
MODEL = ModelOptions(max_model_len=28)
SCHEDULES: dict[str, dict[str, Any]] = {
    "preempted": {},
    "small chunks, eager": {"max_num_batched_tokens": 7, "enforce_eager": True},
    "speculation": {"speculative_method": "ngram", "num_speculative_tokens": 3},
}


@cache
def save(case: str, folder: Path) -> Path:
    layers = 1 if case == "llama" else 2  # of gemma2, one has a window; of deepseek_v3, one has experts
    return save_model(make_model(case, num_hidden_layers=layers), folder / case)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def reference_engine(folder: Path, dtype: str) -> Engine:
    """An engine of torch's operations, which have all formats of pages, float8 too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "computes_float8", lambda _: True)
        model = MODEL.model_copy(update={"device": "reference"})
        return Engine(folder, model=model, kv_cache_dtype=dtype, enable_prefix_caching=False)


@cache
def expected(folder: Path, dtype: str) -> list[list[int]]:
    """The tokens of each request alone."""
    engine = reference_engine(folder, dtype)
    return [engine.generate(prompt, params).tokens for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def logprobs(engine: Engine) -> torch.Tensor:
    """Those of a prompt's tokens."""
    entries = engine.generate(PROMPTS[2], greedy(1, prompt_logprobs=0)).outputs[0].prompt_logprobs
    return torch.tensor([entry.logprobs[0] for entry in entries or () if entry is not None])


@pytest.mark.parametrize(
    ("dtype", "schedule"),
    slow_but(
        product(DTYPES, SCHEDULES),
        ("int8", "small chunks, eager"),
        ("int8", "speculation"),
        ("fp8", "preempted"),
    ),
)
def test_tokens_do_not_depend_on_the_schedule(dtype: str, schedule: str, folders: Path) -> None:
    """Eight blocks, of which the requests need eighteen."""
    folder = save("llama", folders)
    options = {**SMALL, **SCHEDULES[schedule], "kv_cache_dtype": dtype}
    roomy = Engine(folder, model=MODEL, device=gpu_device(), **{**options, "enforce_eager": True})
    engine = Engine(folder, model=MODEL, device=gpu_device(), kv_cache_memory_bytes=8 * roomy.block_bytes, **options)
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add(f"r{index}", prompt, params)
        engine.step()
    engine.run()
    assert [engine.results[f"r{index}"].tokens for index in range(len(PROMPTS))] == expected(folder, dtype)
    assert engine.preemptions > 0 or schedule != "preempted"
    assert engine.blocks_used == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["llama", "gemma2", "deepseek_v3"])
def test_keys_and_values_are_rounded_as_by_torch(dtype: str, case: str, folders: Path) -> None:
    """Sums in another order may round an element to its other neighbour, which changes less than rounding itself."""
    folder = save(case, folders)
    engine = Engine(folder, model=MODEL, device=gpu_device(), kv_cache_dtype=dtype, enforce_eager=True, **SMALL)
    actual, rounded = logprobs(engine), logprobs(reference_engine(folder, dtype))
    exact = logprobs(reference_engine(folder, "auto"))
    assert (actual - rounded).abs().max() < 0.1 * (rounded - exact).abs().max()


def enlarged(case: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights with which keys and values are ten thousand times as large, and the results of attention are the same."""
    large = {}
    for name, weight in weights.items():
        factors = {"q_proj": 1e-4, "k_proj": 1e4, "v_proj": 1e4, "o_proj": 1e-4}
        if case == "deepseek_v3":  # the norm of the latent vector, its up-projections, and the part with positions
            factors = {"kv_a_layernorm": 1e4, "kv_b_proj": 1e-4}
        if factor := factors.get(name.split(".")[-2]):
            large[name] = weight * factor
        if case == "deepseek_v3" and "kv_a_proj" in name:
            large[name] = torch.cat((weight[:-8], weight[-8:] * 1e4))
        if case == "deepseek_v3" and "q_b_proj" in name:
            nope, rope = weight.unflatten(0, (4, -1)).split((16, 8), 1)
            large[name] = torch.cat((nope, rope * 1e-4), 1).flatten(0, 1)
    return large


@pytest.mark.parametrize("case", ["llama", "deepseek_v3"])
def test_scales_of_the_checkpoint_keep_large_values_in_range(case: str, tmp_path: Path) -> None:
    """Keys and values of some thousands are beyond float8_e4m3, whose largest number is 448."""
    folder = save_model(make_model(case, num_hidden_layers=2), tmp_path / "large")
    oracle.change_weights(folder, enlarged(case, load_file(folder / "model.safetensors")))
    exact, saturated = logprobs(reference_engine(folder, "auto")), logprobs(reference_engine(folder, "fp8"))
    scales = {f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor([1e4]) for layer in (0, 1) for kind in "kv"}
    oracle.change_weights(folder, scales)
    assert torch.equal(logprobs(reference_engine(folder, "auto")), exact)
    for dtype in ("auto", "fp8"):
        engine = Engine(folder, model=MODEL, device=gpu_device(), kv_cache_dtype=dtype, enforce_eager=True, **SMALL)
        actual, rounded = logprobs(engine), logprobs(reference_engine(folder, dtype))
        assert (actual - rounded).abs().max() < 0.1 * (rounded - exact).abs().max() or dtype == "auto"
        # A rounded input may let a router choose another expert for some token.
        assert (actual - exact).abs().mean() < 0.2 * (saturated - exact).abs().mean()


@pytest.mark.parametrize("per_head", [False, True])
def test_auto_is_what_the_checkpoint_was_made_for(per_head: bool, tmp_path: Path) -> None:
    """On a device that computes float8; elsewhere, and if it is named, the cache has the model's data type."""
    folder = save_model(make_model("llama", num_hidden_layers=1), tmp_path / "model")
    scale = torch.tensor([0.01, 0.03]) if per_head else torch.tensor([0.02])
    names = (f"model.layers.0.self_attn.{kind}_scale" for kind in "kv")
    oracle.change_weights(folder, {name: scale.clone() for name in names})
    path = folder / "config.json"
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head" if per_head else "tensor", "dynamic": False}
    section = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": section}))
    engine = Engine(folder, model=MODEL, device=gpu_device(), enforce_eager=True, **SMALL)
    actual, rounded = logprobs(engine), logprobs(reference_engine(folder, "auto"))
    exact = logprobs(Engine(folder, model=MODEL.model_copy(update={"device": "reference"})))
    assert (rounded - exact).abs().max() > 0
    assert (actual - rounded).abs().max() < 0.1 * (rounded - exact).abs().max()
    assert torch.equal(logprobs(reference_engine(folder, "fp8")), rounded)


def test_cross_attention_and_alignment_read_float8(tmp_path: Path) -> None:
    folder = whisper.save_whisper(whisper.make_whisper(), tmp_path)
    prompt = [whisper.START, whisper.ENGLISH, whisper.TRANSCRIBE, whisper.NO_TIMESTAMPS]
    on_gpu = Engine(folder, device=gpu_device(), kv_cache_dtype="fp8", enforce_eager=True, max_num_seqs=2)
    on_cpu = reference_engine(folder, "fp8")
    task = PoolingParams(task="align", skip_tokens=len(prompt), num_positions=20)
    actual, expected = (
        engine.generate([*prompt, 7, 8], task, items=(whisper.item(1),)).pooled for engine in (on_gpu, on_cpu)
    )
    assert actual is not None
    assert expected is not None
    assert actual.data == pytest.approx(expected.data, abs=1e-3)
    tokens = [engine.generate(prompt, greedy(2), items=(whisper.item(1),)).tokens for engine in (on_gpu, on_cpu)]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_float8_is_refused_on_the_cpu(device: Any, folders: Path) -> None:
    with pytest.raises(UnsupportedModel, match="--kv-cache-dtype fp8 needs a GPU of compute capability"):
        Engine(save("llama", folders), device=find_device(device), kv_cache_dtype="fp8")


@pytest.mark.parametrize(("capability", "computes"), [((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_float8_needs_a_gpu_that_converts_it(
    capability: tuple[int, int], computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert gpu.computes_float8(torch.device("cuda")) is computes
