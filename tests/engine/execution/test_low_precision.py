"""In bfloat16 and with int8 weights or pages, a token has the same bits in every schedule.

Sampled tokens at a high temperature follow from the last bits of the logits sooner or later, so they are compared.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.options import ModelOptions
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.models.layers.moe import MoELayer
from quire.kernels import native
from tests.support.engine import Engine, load, random_prompt
from tests.support.models import make_model, save_model
from tests.support.threads import threads
from tests.support.variants import covering, slow_but

pytestmark = pytest.mark.skipif(not native.has_bfloat16(), reason="needs dot products of bfloat16")

# Size of the heads that the compiled attention reads in place, and of heads that are padded for it.
HEAD_DIMS = (64, 20, 72, 80)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the model and of the engine
    "bfloat16": ({}, {}),
    "int8 weights": ({"quantization": "int8"}, {}),
    "int8 pages": ({}, {"kv_cache_dtype": "int8"}),
    "int8 weights and pages": ({"quantization": "int8"}, {"kv_cache_dtype": "int8"}),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "small chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "speculation": {"speculative_method": "ngram", "num_speculative_tokens": 5},
}


@cache
def requests(number: int) -> list[tuple[list[int], SamplingParams]]:
    """Half of the prompts share a prefix; most requests sample."""
    rng, shared = random.Random(number), random_prompt(number, 40)
    out = []
    for index in range(number):
        tail = random_prompt(1000 + index, rng.randint(1, 30))
        prompt = shared[: rng.choice([8, 24, 40])] + tail if rng.random() < 0.5 else tail
        temperature = rng.choice([0.0, 1.0, 1.5])
        out.append((prompt, SamplingParams(max_tokens=rng.randint(1, 40), temperature=temperature, seed=index)))
    return out


def engine_for(folder: Path, kind: str, max_model_len: int = 104, **options: Any) -> Engine:
    model, engine = KINDS[kind]
    chosen = ModelOptions(dtype="bfloat16", max_model_len=max_model_len, **model)
    return Engine(folder, model=chosen, **{"block_size": 4, **engine, **options})


def together(engine: Engine, number: int) -> list[list[int]]:
    for index, (prompt, params) in enumerate(requests(number)):
        engine.add(str(index), prompt, params)
    engine.run()
    return [engine.results[str(index)].tokens for index in range(number)]


@pytest.fixture(scope="module")
def head_dim(request: pytest.FixtureRequest) -> int:
    return int(request.param)


heads_and_kinds = pytest.mark.parametrize(("head_dim", "kind"), covering(HEAD_DIMS, KINDS), indirect=["head_dim"])


@pytest.fixture(scope="module")
def folder(head_dim: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(
        make_model("qwen3", head_dim=head_dim, num_hidden_layers=2).bfloat16(), tmp_path_factory.mktemp("model")
    )


# Other kinds of attention: windows with a softcap, sinks with experts, latent, keys that change in long sequences.
# Models that transformers runs are not among them: PyTorch's bfloat16 products depend on the number of rows.
OTHERS = ("gemma2", "gpt_oss", "deepseek_v3", "phi3-longrope")


@pytest.fixture(scope="module")
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model(request.param, num_hidden_layers=2).bfloat16(), tmp_path_factory.mktemp("model"))


others_and_kinds = pytest.mark.parametrize(("other", "kind"), covering(OTHERS, KINDS), indirect=["other"])
others_and_pages = pytest.mark.parametrize(
    ("other", "kind"), covering(OTHERS, ["bfloat16", "int8 pages"]), indirect=["other"]
)


@cache
def alone(folder: Path, kind: str, number: int) -> list[list[int]]:
    engine = engine_for(folder, kind, enable_prefix_caching=False)
    return [engine.generate(prompt, params).tokens for prompt, params in requests(number)]


@heads_and_kinds
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tokens_do_not_depend_on_the_schedule(folder: Path, kind: str, schedule: str) -> None:
    with threads(3 if schedule == "batched" else 1):
        assert together(engine_for(folder, kind, **SCHEDULES[schedule]), 12) == alone(folder, kind, 12)


@heads_and_kinds
def test_tokens_do_not_depend_on_preemption(folder: Path, head_dim: int, kind: str) -> None:
    """The cache has so few blocks that sequences preempt each other repeatedly, beside one that has enough."""
    roomy = engine_for(folder, kind)
    number = 200 if head_dim == HEAD_DIMS[0] else 40
    engine = engine_for(folder, kind, kv_cache_memory_bytes=60 * roomy.block_bytes, max_num_batched_tokens=48)
    assert together(engine, number) == together(roomy, number)
    assert engine.preemptions > number // 10
    assert roomy.preemptions == 0


def next_turns(folder: Path, kind: str, number: int) -> tuple[list[list[int]], list[list[int]], int]:
    """Answers to conversations whose last answer was just generated: with its blocks in the prefix cache, and without.

    And the number of generated tokens that came from the cache.
    """
    cached, recomputed = engine_for(folder, kind), engine_for(folder, kind, enable_prefix_caching=False)
    turns = []
    for index, tokens in enumerate(together(cached, number)):
        prompt, params = requests(number)[index]
        turns.append(([*prompt, *tokens, *random_prompt(2000 + index, 5)], params, len(prompt)))
    hits = 0
    for index, (turn, params, begin) in enumerate(turns):
        for engine in (cached, recomputed):
            engine.add(f"turn-{index}", turn, params)
        cached.run()
        hits += max(0, cached.results[f"turn-{index}"].outputs[0].cached_tokens - begin)
    recomputed.run()
    names = [f"turn-{index}" for index in range(number)]
    return [cached.results[name].tokens for name in names], [recomputed.results[name].tokens for name in names], hits


@heads_and_kinds
def test_the_blocks_of_an_answer_are_those_of_the_same_prompt(folder: Path, kind: str) -> None:
    cached, recomputed, hits = next_turns(folder, kind, 24)
    assert cached == recomputed
    assert hits > 100


@others_and_kinds
def test_the_blocks_of_an_answer_with_other_kinds_of_attention(other: Path, kind: str) -> None:
    cached, recomputed, hits = next_turns(other, kind, 12)
    assert cached == recomputed
    assert hits > 20


@others_and_pages
def test_other_kinds_of_attention_do_not_depend_on_preemption(other: Path, kind: str) -> None:
    roomy = engine_for(other, kind)
    engine = engine_for(other, kind, kv_cache_memory_bytes=60 * roomy.block_bytes, max_num_batched_tokens=48)
    assert together(engine, 30) == together(roomy, 30)
    assert engine.preemptions > 0


@others_and_pages
def test_other_kinds_of_attention_do_not_depend_on_the_batch(other: Path, kind: str) -> None:
    assert together(engine_for(other, kind), 12) == alone(other, kind, 12)


@pytest.mark.parametrize(
    ("case", "kind"),
    slow_but(
        product(["deepseek_v3", "deepseek_v3-wide"], KINDS),
        ("deepseek_v3", "bfloat16"),
        ("deepseek_v3-wide", "int8 weights and pages"),
    ),
)
def test_latent_attention_does_not_depend_on_the_schedule(case: str, kind: str, tmp_path: Path) -> None:
    """Its projections into the latent space and out of it, with heads that are padded in pages or not."""
    folder = save_model(make_model(case, num_hidden_layers=2).bfloat16(), tmp_path)
    for schedule in SCHEDULES.values():
        assert together(engine_for(folder, kind, **schedule), 6) == alone(folder, kind, 6)


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_routers_do_not_depend_on_the_batch(case: str, tmp_path: Path) -> None:
    """Bit for bit, so that experts have the same weights in any step."""
    model = load(save_model(make_model(case).bfloat16(), tmp_path), dtype="bfloat16").model
    layer = next(module for module in model.modules() if isinstance(module, MoELayer))
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    chosen, weights = layer.route(x)
    for count in (1, 3, 16):
        parts = [layer.route(part) for part in x.split(count)]
        assert torch.equal(torch.cat([part for part, _ in parts]), chosen)
        assert torch.equal(torch.cat([part for _, part in parts]), weights)
