"""StepGraphs: replayed steps give the same tokens as eager steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from quire.engine.execution.step_graphs import StepGraphs
from quire.kernels import native
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.pictures import drawn
from tests.support.recurrent import recurrent_engine
from tests.support.vision_models import make_composite, prompt_with_pictures, save_seeing

pytestmark = pytest.mark.skipif(
    native.instructions() is None, reason="only calls of the compiled kernels can be captured"
)


def tokens(folder: Path, model: ModelOptions, **options: Any) -> tuple[list[list[int]], StepGraphs]:
    """Tokens of requests of different lengths, which start and finish at different steps."""
    engine = Engine(folder, model=model, **options)
    names = [str(number) for number in range(6)]
    for number, name in enumerate(names):
        engine.add(name, random_prompt(number, 5 + 9 * number), greedy(12 + 7 * (number % 3)))
        engine.step()
    engine.run()
    return [engine.results[name].tokens for name in names], engine.runner.steps


@pytest.mark.parametrize("case", ["qwen3", "gemma2"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
def test_replayed_steps_give_the_same_tokens(
    tmp_path: Path, case: str, quantization: str, cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(make_model(case, head_dim=32).bfloat16(), tmp_path)
    model = ModelOptions(quantization=quantization, dtype="bfloat16")
    replayed, step_graphs = tokens(folder, model, kv_cache_dtype=cache_dtype)
    assert len(step_graphs.graphs) == 2  # one of each kind
    monkeypatch.setattr(StepGraphs, "logits", lambda self, *args: self._eager.logits(*args))
    assert tokens(folder, model, kv_cache_dtype=cache_dtype)[0] == replayed


def tokens_with_states(folder: Path, **options: Any) -> tuple[list[list[int]], StepGraphs]:
    """Tokens of requests that enter while others decode, some of them into the slots of those that have ended."""
    model = ModelOptions(dtype="bfloat16")
    engine = recurrent_engine(
        folder, "compiled kernels", model=model, max_num_seqs=3, max_num_batched_tokens=16, **options
    )
    engine.generate(random_prompt(9, 5), greedy(8))  # alone, so that a step with one row is captured
    for number in range(7):
        engine.add(str(number), random_prompt(number, 1 + 9 * number), greedy(8 + 7 * (number % 3)))
        engine.step()
    engine.run()
    return [engine.results[str(number)].tokens for number in range(7)], engine.runner.steps


def test_steps_with_states_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps, and those with chunks of prompts."""
    folder = save_model(make_model("llama", head_dim=32), tmp_path)
    replayed, step_graphs = tokens_with_states(folder)
    assert len(step_graphs.graphs) == 2
    drafted, _ = tokens_with_states(folder, speculative_method="ngram")
    monkeypatch.setattr(StepGraphs, "logits", lambda self, *args: self._eager.logits(*args))
    assert tokens_with_states(folder)[0] == replayed == drafted


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("lfm2", {"layer_types": ["full_attention", "conv"]}),
        ("granitemoehybrid-dense", {"layer_types": ["full_attention", "linear_attention"]}),
        ("granitemoehybrid-dense", {"layer_types": ["linear_attention", "full_attention"]}),
        ("mamba", {}),
    ],
)
def test_steps_of_hybrids_with_chunks_of_prompts_are_replayed(
    tmp_path: Path, case: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks end where no token is sampled, and beside sequences that decode. Last layers have a state or attention."""
    heads: dict[str, Any] = {} if case == "mamba" else {"num_attention_heads": 2, "num_key_value_heads": 1}
    folder = save_model(make_model(case, num_hidden_layers=2, **heads, **options).bfloat16(), tmp_path)

    def run() -> tuple[list[list[int]], StepGraphs]:
        model = ModelOptions(dtype="bfloat16")
        engine = Engine(folder, model=model, max_num_seqs=4, max_num_batched_tokens=24, enable_prefix_caching=False)
        for number in range(7):
            engine.add(str(number), random_prompt(number, 70 if number > 2 else 8), greedy(12 + number))
            for _ in range(3):
                engine.step()
        engine.run()
        return [engine.results[str(number)].tokens for number in range(7)], engine.runner.steps

    replayed, step_graphs = run()
    assert len(step_graphs.graphs) == 2
    monkeypatch.setattr(StepGraphs, "logits", lambda self, *args: self._eager.logits(*args))
    assert run()[0] == replayed


def test_a_graph_captured_with_one_sequence_serves_several(tmp_path: Path) -> None:
    """Where tensors of one row lie in memory says nothing about rows behind it."""
    dense = {"num_local_experts": 0, "num_experts_per_tok": 0, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = make_model("granitemoehybrid", num_hidden_layers=2, **dense)
    folder = save_model(model.bfloat16(), tmp_path)
    engine = Engine(folder, model=ModelOptions(dtype="bfloat16"), enable_prefix_caching=False)
    prompts = [random_prompt(number, 5 + 3 * number) for number in range(4)]
    alone = [engine.generate(prompt, greedy(12)).tokens for prompt in prompts]
    assert engine.runner.steps.graphs
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, greedy(12))
    engine.run()
    assert [engine.results[str(number)].tokens for number in range(4)] == alone


def test_layers_that_run_in_torch_are_not_captured(tmp_path: Path) -> None:
    """As those of linear recurrences with small blocks."""
    small = {"num_attention_heads": 8, "num_key_value_heads": 1}
    folder = save_model(make_model("recurrent_gemma", **small).bfloat16(), tmp_path)
    _, step_graphs = tokens(folder, ModelOptions(dtype="bfloat16"))
    assert not step_graphs.graphs
    assert len(step_graphs.not_capturable) == 2


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_graph_captured_in_a_small_step_serves_larger_ones(
    tmp_path: Path, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence decodes alone, then in a batch with chunks of long prompts, some of which sample no token."""
    folder = save_model(make_model("qwen3", head_dim=32).bfloat16(), tmp_path)

    def run() -> tuple[list[list[int]], StepGraphs]:
        model = ModelOptions(quantization=quantization, dtype="bfloat16")
        engine = Engine(folder, model=model, max_num_seqs=8, max_num_batched_tokens=24)
        for name in ("first", "second"):
            engine.add(name, random_prompt(1, 30), greedy(40))
            for _ in range(6):
                engine.step()
        for number in range(6):
            engine.add(str(number), random_prompt(10 + number, 70), greedy(12))
        engine.run()
        return [result.tokens for result in engine.results.values()], engine.runner.steps

    replayed, step_graphs = run()
    assert len(step_graphs.graphs) == 2
    monkeypatch.setattr(StepGraphs, "logits", lambda self, *args: self._eager.logits(*args))
    assert run()[0] == replayed


def test_steps_that_are_too_large_for_a_graph(tmp_path: Path) -> None:
    """More tokens than the static inputs hold, and more sequences than the static logits hold."""
    folder = save_model(make_model("qwen3", head_dim=32, max_position_embeddings=2048).bfloat16(), tmp_path)
    model, prompt = ModelOptions(dtype="bfloat16"), random_prompt(1, 1500)
    small, large = (
        Engine(folder, model=model, max_num_seqs=seqs, max_num_batched_tokens=tokens)
        for seqs, tokens in ((8, 64), (200, 4096))
    )
    alone = small.generate(prompt, greedy(5)).tokens
    assert large.generate(prompt, greedy(5)).tokens == alone
    shorts = {str(number): small.generate(random_prompt(number, 9), greedy(6)).tokens for number in range(150)}
    for number, name in enumerate(shorts):
        large.add(name, random_prompt(number, 9), greedy(6))
    large.run()
    assert {name: large.results[name].tokens for name in shorts} == shorts


def tokens_after_pictures(folder: Path) -> tuple[list[list[int]], StepGraphs]:
    """Tokens of requests of which most have pictures with rotary positions of three axes, and text between."""
    engine = Engine(folder, model=ModelOptions(dtype="bfloat16"), max_num_batched_tokens=12, max_num_seqs=6)
    names = [str(number) for number in range(6)]
    for number, name in enumerate(names):
        pictures: list[Any] = [drawn(90, 40, seed=number), [7] * (25 + number), drawn(40, 90)] if number % 3 else []
        prompt, items = prompt_with_pictures(engine.pictures, [5, 9 + number], *pictures, [8])
        engine.add(name, prompt, greedy(14 + number), items=items)
        engine.step()
        engine.step()
    engine.run()
    return [engine.results[name].tokens for name in names], engine.runner.steps


def test_tokens_after_pictures_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their positions are less far on than their places in the sequence."""
    folder = save_seeing(make_composite("qwen2_5_vl-wide"), "qwen2_5_vl", tmp_path)
    replayed, step_graphs = tokens_after_pictures(folder)
    assert step_graphs.graphs
    monkeypatch.setattr(StepGraphs, "logits", lambda self, *args: self._eager.logits(*args))
    assert tokens_after_pictures(folder)[0] == replayed
