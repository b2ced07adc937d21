"""Pooling requests: arrays equal Hugging Face's hidden states, with any batching, preemption and prefix hits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import AddRequest
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.tokenizer import write_tokenizer

Kind = Literal["last", "mean", "cls", "all"]
KINDS: tuple[Kind, ...] = ("last", "mean", "cls", "all")
CASES = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "granite", "gpt2", "opt", "cohere")


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama"), tmp_path_factory.mktemp("model"))


def expected(model: Any, prompt: list[int], kind: Kind) -> NDArray[np.float32]:
    """Hugging Face's hidden states at the input of the output projection, pooled."""
    captured: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0][0]))
    with torch.inference_mode():
        model(torch.tensor([prompt]))
    hook.remove()
    (hidden,) = captured
    pooled = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0), "all": hidden}[kind]
    return pooled.float().numpy()


def raw(kind: Kind) -> PoolingParams:
    """Hidden states as they are."""
    if kind == "all":
        return PoolingParams(task="token_embed", use_activation=False)
    return PoolingParams(task="embed", pooling_type=kind, use_activation=False)


def pool(engine: Engine, prompt: list[int], kind: Kind) -> NDArray[np.float32]:
    """Run one request alone and return its array."""
    result = engine.generate(prompt, raw(kind))
    assert result.error is None
    assert result.pooled is not None
    return result.pooled.data


def assert_close(got: NDArray[np.float32], expected_array: NDArray[np.float32]) -> None:
    assert got.dtype == np.float32
    assert got.shape == expected_array.shape
    assert np.abs(got - expected_array).max() / np.abs(expected_array).max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_pooled_arrays_equal_hugging_face(model: Any, folder: Path, kind: Kind) -> None:
    """A whole prompt, one in chunks, and one of a single token."""
    for budget in (512, 16):
        engine = Engine(folder, block_size=8, max_num_batched_tokens=budget)
        for seed, length in ((1, 45), (2, 1)):
            prompt = random_prompt(seed, length)
            assert_close(pool(engine, prompt, kind), expected(model, prompt, kind))
        assert engine.blocks_used == 0


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 9, "max_num_seqs": 6}, {"in_flight": 2}])
def test_pooling_and_generation_share_steps(llama: Path, options: dict[str, Any]) -> None:
    """Neither changes the other's results."""
    prompts = [random_prompt(number, 7 + 6 * number) for number in range(4)]
    alone = Engine(llama, enable_prefix_caching=False)
    tokens = [alone.generate(prompt, greedy(12)).tokens for prompt in prompts]
    arrays = {kind: pool(alone, prompts[3], kind) for kind in KINDS}
    engine = Engine(llama, block_size=4, **options)
    for number, (prompt, kind) in enumerate(zip(prompts, KINDS, strict=True)):
        engine.add(f"generate-{number}", prompt, greedy(12))
        engine.step()
        engine.add(kind, prompts[3], raw(kind))
        engine.step()
    engine.run()
    assert [engine.results[f"generate-{number}"].tokens for number in range(4)] == tokens
    for kind in KINDS:
        pooled = engine.results[kind].pooled
        assert pooled is not None
        assert_close(pooled.data, arrays[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_pooling_uses_the_prefix_cache_only_for_the_last_token(llama: Path, kind: Kind) -> None:
    engine, prompt = Engine(llama, block_size=4), random_prompt(9, 50)
    fresh = pool(Engine(llama, enable_prefix_caching=False), prompt, kind)
    engine.generate(prompt, greedy(2))
    again = engine.generate(prompt, raw(kind)).pooled
    assert again is not None
    assert again.cached_tokens == (48 if kind == "last" else 0)
    assert_close(again.data, fresh)
    after = engine.generate(prompt, greedy(2)).outputs[0]
    assert after.cached_tokens == 48


@pytest.mark.parametrize("in_flight", [1, 2])
def test_documents_of_a_rerank_share_the_blocks_of_their_query(tmp_path: Path, in_flight: int) -> None:
    """All of them come at once, and only the first one computes what their prompts begin with."""
    folder = save_model(make_model("qwen3"), tmp_path)
    write_tokenizer(folder)
    options = ModelOptions(convert="classify", hf_overrides={"classifier_from_token": ["a", "b"]})
    query = random_prompt(1, 40)
    prompts = [query + random_prompt(seed, 5 + seed) for seed in range(2, 22)]
    scores = []
    for caching in (True, False):
        engine = Engine(folder, model=options, block_size=8, enable_prefix_caching=caching, in_flight=in_flight)
        for number, prompt in enumerate(prompts):
            engine.add(f"{number}", prompt, PoolingParams(task="score"), flow="rerank")
        engine.run()
        answers = [engine.results[f"{number}"].pooled for number in range(len(prompts))]
        assert sum(answer.cached_tokens for answer in answers if answer is not None) == (19 * 40 if caching else 0)
        scores.append([float(answer.data[0]) for answer in answers if answer is not None])
        assert engine.blocks_used == 0
    assert len(scores[0]) == len(prompts)
    assert np.allclose(scores[0], scores[1], atol=1e-5)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_pooled_arrays_do_not_depend_on_preemption(llama: Path, in_flight: int) -> None:
    """Chunked prompts are preempted halfway by earlier requests that need more blocks."""
    roomy = Engine(llama, block_size=4)
    prompt = random_prompt(5, 60)
    arrays = {kind: pool(roomy, prompt, kind) for kind in KINDS}
    engine = Engine(
        llama,
        model=ModelOptions(max_model_len=100),
        in_flight=in_flight,
        block_size=4,
        kv_cache_memory_bytes=25 * roomy.block_bytes,
        max_num_batched_tokens=8,
        max_num_seqs=3,
    )
    engine.add("first", random_prompt(1, 30), greedy(60))
    for kind in KINDS:
        engine.add(kind, prompt, raw(kind))
    engine.run()
    assert engine.preemptions > 0
    assert len(engine.results["first"].tokens) == 60
    for kind in KINDS:
        pooled = engine.results[kind].pooled
        assert pooled is not None
        assert_close(pooled.data, arrays[kind])
    assert engine.blocks_used == 0


def test_a_prompt_may_fill_the_whole_context(llama: Path) -> None:
    engine = Engine(llama)
    assert pool(engine, random_prompt(1, 256), "all").shape == (256, 64)
    engine.core._handle(AddRequest("long", np.zeros(257, np.int32), raw("last")))
    (rejection,) = [output for message in engine.channel.sent for output in message.outputs]
    assert "257 tokens" in rejection.error


def test_aborted_pooling_frees_its_blocks(llama: Path) -> None:
    engine = Engine(llama, max_num_batched_tokens=16)
    engine.add("a", random_prompt(1, 50), raw("mean"))
    engine.step()
    assert engine.blocks_used > 0
    engine.abort("a")
    assert engine.blocks_used == 0
    assert not engine.busy


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_both_devices_agree(dtype: Any, tmp_path: Path) -> None:
    folder = save_model(make_model("qwen3").to(getattr(torch, dtype)), tmp_path)
    prompt = random_prompt(4, 40)
    cpu, reference = (Engine(folder, model=ModelOptions(dtype=dtype, device=device)) for device in ("cpu", "reference"))
    tolerance = 1e-4 if dtype == "float32" else 0.1
    for kind in KINDS:
        actual, expected = pool(cpu, prompt, kind), pool(reference, prompt, kind)
        assert np.median(np.abs(actual - expected)) / np.abs(expected).max() < tolerance
