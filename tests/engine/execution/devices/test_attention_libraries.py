"""--attention-backend flash_attn and flashinfer, with stand-ins of the libraries.

Tokens equal transformers' and do not depend on the schedule; what a library lacks is refused before the model loads.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from quire.config.options import ModelOptions
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.attention.libraries import check_installed
from quire.engine.execution.cache import CacheMemory
from quire.engine.execution.cuda_graphs import GraphSteps
from quire.engine.execution.devices.select import find_device
from quire.engine.models.errors import UnavailableLibrary, UnsupportedModel
from tests.support import attention_libraries, oracle
from tests.support.attention_libraries import Calls
from tests.support.encoders import tiny_embedder
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.triton_device import InterpretedDevice
from tests.support.variants import covering, slow_but

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins compute on the CPU")

SHARED = random_prompt(1, 11)
PROMPTS = [SHARED + random_prompt(2, 4), SHARED + random_prompt(3, 2), random_prompt(4, 1), random_prompt(5, 40)]
PARAMS = [
    greedy(5),
    SamplingParams(max_tokens=4, temperature=1.0, top_k=20, seed=3, repetition_penalty=1.3),
    greedy(6, logprobs=2),
    SamplingParams(max_tokens=3, temperature=0.7, top_p=0.9, seed=4),
]
BLOCK_SIZES = {"flash_attn": 256, "flashinfer": 4}
# Attention: plain; with norms of heads; windowed with softcap in every other layer; of one head of keys; ALiBi.
CASES = [
    *((backend, case) for backend in BLOCK_SIZES for case in ("llama", "qwen3", "gemma2", "mistral")),
    ("flash_attn", "bloom"),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return attention_libraries.install(monkeypatch)


@cache
def save(case: str, folder: Path) -> Path:
    layers = 2 if case == "gemma2" else 1  # every other layer of gemma2 has a window
    changes = {"n_layer": layers} if case == "bloom" else {"head_dim": 64, "num_hidden_layers": layers}
    return save_model(make_model(case, **changes), folder / case)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def options_of(backend: str, **options: Any) -> dict[str, Any]:
    return {"attention_backend": backend, "block_size": BLOCK_SIZES[backend], "max_num_seqs": 4, **options}


def engine_of(folder: Path, backend: str, **options: Any) -> Engine:
    return Engine(folder, **{"device": InterpretedDevice(), **options_of(backend, **options)})


@cache
def expected(folder: Path) -> list[list[int]]:
    """The tokens of each request alone on the CPU's reference device."""
    engine = Engine(folder, model=ModelOptions(device="reference"), enable_prefix_caching=False)
    return [engine.generate(prompt, params).tokens for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def together(engine: Engine) -> list[list[int]]:
    """Run all requests, each entering while those before it run."""
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add(f"r{index}", prompt, params)
        engine.step()
    engine.run()
    assert engine.blocks_used == 0
    return [engine.results[f"r{index}"].tokens for index in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("backend", "case"),
    slow_but(
        CASES, ("flash_attn", "gemma2"), ("flash_attn", "bloom"), ("flashinfer", "qwen3"), ("flashinfer", "mistral")
    ),
)
def test_tokens_equal_those_of_transformers(backend: str, case: str, folders: Path, calls: Calls) -> None:
    """Batched, in chunks, padded to one size, with prefix hits in the second run."""
    options = options_of(backend, max_num_seqs=3, max_num_batched_tokens=24, cudagraph_capture_sizes=(3,))
    oracle.assert_equal(save(case, folders), PROMPTS[1:], tokens=3, device=InterpretedDevice(), **options)
    names = {"flash_attn": ("flash_attn_with_kvcache", "flash_attn_varlen_func"), "flashinfer": ("decode", "prefill")}
    assert all(calls.counts.get(name, calls.counts.get(f"{name} run", 0)) > 0 for name in names[backend])


@pytest.mark.parametrize("backend", slow_but(BLOCK_SIZES, "flash_attn"))
def test_sequences_of_several_blocks_equal_those_of_transformers(backend: str, tmp_path: Path, calls: Calls) -> None:
    """Blocks of 256 positions; the second of the sequences finds one of the first in the prefix cache."""
    changes: dict[str, Any] = {
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 32,
        "num_hidden_layers": 1, "max_position_embeddings": 512,
    }  # fmt: skip
    folder = save_model(make_model("llama", **changes), tmp_path)
    tokens = [1 + token for token in random_prompt(1, 270, 255)]  # transformers takes 0 for padding
    prompts = [tokens, tokens[:260]]
    options = options_of(backend, block_size=256, max_num_batched_tokens=128)
    engine = oracle.assert_equal(folder, prompts, tokens=3, device=InterpretedDevice(), **options)
    assert engine.results["1-1"].outputs[0].cached_tokens == 256


SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "small chunks, eager": {"max_num_batched_tokens": 7, "max_num_seqs": 3, "enforce_eager": True},
    "padded": {"cudagraph_capture_sizes": (3,)},
    "speculation": {"speculative_method": "ngram", "num_speculative_tokens": 3},
}


@pytest.mark.parametrize(("backend", "schedule"), covering(BLOCK_SIZES, SCHEDULES))
def test_tokens_do_not_depend_on_the_schedule(backend: str, schedule: str, folders: Path, calls: Calls) -> None:
    """In float32, in which the stand-ins compute: the libraries promise no bits."""
    folder = save("llama", folders)
    assert together(engine_of(folder, backend, **SCHEDULES[schedule])) == expected(folder)


def test_tokens_do_not_depend_on_preemption(folders: Path, calls: Calls) -> None:
    """Two sequences grow to seven blocks each, of which there are eight."""
    folder, model = save("llama", folders), ModelOptions(max_model_len=28)
    roomy = engine_of(folder, "flashinfer", model=model)
    engine = engine_of(folder, "flashinfer", model=model, kv_cache_memory_bytes=8 * roomy.block_bytes)
    on_cpu = Engine(folder, model=ModelOptions(device="reference"), enable_prefix_caching=False)
    for index in range(2):
        engine.add(f"r{index}", random_prompt(index, 9), greedy(16))
    engine.run()
    for index in range(2):
        expected = on_cpu.generate(random_prompt(index, 9), greedy(16)).tokens
        assert engine.results[f"r{index}"].tokens == expected
    assert engine.preemptions > 0


@pytest.mark.parametrize("backend", BLOCK_SIZES)
def test_decode_steps_are_captured_and_replayed(backend: str, folders: Path, calls: Calls) -> None:
    """Two sequences are padded to the captured size of three."""
    device = InterpretedDevice()
    engine = engine_of(save("gemma2", folders), backend, device=device, cudagraph_capture_sizes=(1, 3))
    assert isinstance(engine.runner.steps, GraphSteps)
    assert sorted(engine.runner.steps.graphs) == [1, 3]
    for name in "ab":
        engine.add(name, PROMPTS[0], greedy(4))
    engine.run()
    assert len(device.replayed) == 3  # the step of the prompts samples the first tokens


def test_each_step_is_planned_once_for_each_kind_of_attention(folders: Path, calls: Calls) -> None:
    """gemma2 has two kinds in two layers."""
    engine = engine_of(save("gemma2", folders), "flashinfer", cudagraph_capture_sizes=(1,))
    calls.counts.clear()
    engine.generate(PROMPTS[0], greedy(4))
    assert calls.counts == {"prefill plan": 2, "prefill run": 2, "decode plan": 6, "decode run": 6}


@pytest.mark.parametrize("backend", BLOCK_SIZES)
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_queries_of_16_bits_are_those_of_the_own_kernels(backend: str, dtype: Any, folders: Path, calls: Calls) -> None:
    folder, results = save("llama", folders), []
    for name in (backend, "triton"):
        options = options_of(backend, attention_backend=name, model=ModelOptions(dtype=dtype), enforce_eager=True)
        entries = engine_of(folder, **{"backend": backend, **options}).generate(
            PROMPTS[3], greedy(1, prompt_logprobs=0)
        )
        reported = entries.outputs[0].prompt_logprobs or ()
        results.append(torch.tensor([entry.logprobs[0] for entry in reported if entry is not None]))
    assert (results[0] - results[1]).abs().max() < (0.02 if dtype == "float16" else 0.15)


@pytest.mark.parametrize(
    ("backend", "case", "options", "complaint"),
    [
        ("flash_attn", "llama", {"block_size": 16}, "needs --block-size 256, not 16; --attention-backend auto"),
        ("flash_attn", "llama", {"kv_cache_dtype": "int8"}, "needs --kv-cache-dtype auto, not int8"),
        ("flashinfer", "llama", {"kv_cache_dtype": "fp8"}, "needs --kv-cache-dtype auto, not fp8"),
        ("flash_attn", "deepseek_v3", {}, r"does not support latent attention \(MLA\)"),
        ("flashinfer", "deepseek_v3", {}, r"does not support latent attention \(MLA\)"),
        ("flash_attn", "gpt_oss", {}, "does not support attention sinks"),
        ("flashinfer", "gpt_oss", {}, "does not support attention sinks"),
        ("flashinfer", "bloom", {}, "does not support ALiBi biases"),
        ("flashinfer", "starcoder2", {}, "needs heads of 64, 128 or 256 elements; those of the model have 16"),
        ("flashinfer", "diffllama", {}, "works with .* only, not with --model-impl transformers"),
    ],
)
def test_what_a_library_lacks_is_refused_by_name(
    backend: str, case: str, options: dict[str, Any], complaint: str, tmp_path: Path, calls: Calls
) -> None:
    folder = save_model(make_model(case), tmp_path)
    (folder / "model.safetensors").unlink()  # it is not read
    with pytest.raises(UnsupportedModel, match=f"--attention-backend {backend} {complaint}"):
        engine_of(folder, backend, **options)


def test_heads_that_flash_attention_would_pad_are_refused(tmp_path: Path, calls: Calls) -> None:
    folder = save_model(make_model("llama", head_dim=20, num_hidden_layers=1), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"needs heads of multiples of 8 up to 256 elements; those .* have 20"):
        engine_of(folder, "flash_attn")


def test_float32_is_refused(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, make in attention_libraries.MODULES.items():
        monkeypatch.setitem(sys.modules, backend, make(Calls()))
        with pytest.raises(UnsupportedModel, match=f"{backend} needs --dtype float16 or bfloat16, not float32"):
            engine_of(save("llama", folders), backend)


def test_an_embedder_starts_with_a_library(tmp_path: Path, calls: Calls) -> None:
    engine = engine_of(tiny_embedder(tmp_path), "flash_attn")
    assert engine.info.tasks == ("embed", "token_embed", "score")


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("backend", ["triton", *BLOCK_SIZES])
def test_backends_of_gpus_are_refused_on_the_cpu(device: Any, backend: str, folders: Path) -> None:
    options: dict[str, Any] = {"attention_backend": backend, "device": find_device(device)}
    with pytest.raises(UnsupportedModel, match=f"{backend} needs a GPU, but the device is {device}; .*: auto"):
        Engine(save("llama", folders), **options)


@pytest.mark.parametrize("backend", BLOCK_SIZES)
def test_old_gpus_are_refused(backend: str, folders: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    device = InterpretedDevice()
    device.torch_device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(UnsupportedModel, match=r"needs a GPU of compute capability 8\.0 or more"):
        engine_of(save("llama", folders), backend, device=device)


def test_memory_of_the_library_is_not_given_to_the_cache(
    folders: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gemma2 has two kinds of attention."""
    reserved = list[int]()

    def cache_memory(_: Any, __: Any, ___: Any, nbytes: int, ____: Any) -> CacheMemory:
        reserved.append(nbytes)
        return CacheMemory(1 << 20, "--gpu-memory-utilization")

    monkeypatch.setattr(InterpretedDevice, "cache_memory", cache_memory)
    folder, model = save("gemma2", folders), ModelOptions(max_model_len=30)
    sizes: dict[str, Any] = {"kv_cache_memory_bytes": None, "max_num_seqs": 6, "enforce_eager": True}
    for name, block_size in (("triton", 4), ("flash_attn", 256), ("flashinfer", 4)):
        Engine(folder, device=InterpretedDevice(), attention_backend=name, block_size=block_size, model=model, **sizes)
    triton, flash_attn, flashinfer = reserved
    plans, lists = 5, 7 + 6 * 8 + 6
    assert flash_attn == triton
    of_plans = (plans + 1) // 2 * (20 << 20)  # the allocator's blocks hold two plans
    assert flashinfer - triton == 1024 + 4 * lists + of_plans


PACKAGES = {"flash_attn": "flash-attn 2.6", "flashinfer": "flashinfer-python 0.2"}


CAUSES = {
    "": "ModuleNotFoundError: ",  # not installed
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    "import ctypes; ctypes.CDLL('libnone.so.12')": "OSError: libnone.so.12: ",
    "raise RuntimeError('Could not find nvcc')": "RuntimeError: Could not find nvcc",
    "import torch; torch.no_such_function": "AttributeError: module 'torch' has no attribute 'no_such_function'",
}


@pytest.mark.parametrize("backend", BLOCK_SIZES)
@pytest.mark.parametrize("code", CAUSES)
def test_a_package_that_cannot_be_imported_is_named(
    backend: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if code:
        (tmp_path / f"{backend}.py").write_text(code, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setitem(sys.modules, backend, None)
    needs = f"--attention-backend {backend} needs the package {PACKAGES[backend]} or later, which cannot be imported: "
    with pytest.raises(UnavailableLibrary, match=re.escape(needs + CAUSES[code])):
        check_installed(backend)


def test_kernels_that_cannot_be_compiled_are_named(
    folders: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*_: Any, **__: Any) -> None:
        raise RuntimeError("Could not find nvcc")

    library: Any = sys.modules["flashinfer"]
    monkeypatch.setattr(library.BatchDecodeWithPagedKVCacheWrapper, "plan", plan)
    with pytest.raises(UnavailableLibrary, match="flashinfer cannot compile its kernels: RuntimeError: Could not find"):
        engine_of(save("llama", folders), "flashinfer")


@pytest.mark.parametrize("backend", BLOCK_SIZES)
def test_other_versions_of_a_package_are_refused(
    backend: str, folders: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[backend], "__version__", "0.1.6")
    with pytest.raises(UnavailableLibrary, match=f"{PACKAGES[backend]} or later; installed is 0.1.6$"):
        engine_of(save("llama", folders), backend)
    other: Any = ModuleType(backend)  # as flash-attn-4 without flash-attn: the package has other functions
    other.__version__ = "4.0.0"
    monkeypatch.setitem(sys.modules, backend, other)
    with pytest.raises(UnavailableLibrary, match=r"installed is 4\.0\.0, without .* and "):
        engine_of(save("llama", folders), backend)
