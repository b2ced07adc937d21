"""Tokens that attend to each other in both directions: those of a picture (Gemma 3), or of a prompt (PaliGemma).

tests/engine/pictures/test_oracle.py compares them with transformers; here is what they mean for scheduling and caching.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.scheduling.plan import StepPlan
from tests.support.engine import Engine, greedy
from tests.support.pictures import drawn
from tests.support.vision_models import prompt_with_pictures

PICTURES, PROMPTS = "gemma3-narrow", "paligemma2"  # their pictures have 16 and 4 tokens


def chunks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, int]]]:
    """The tokens [start, end) of each request that each step computes, from now on."""
    computed: dict[str, list[tuple[int, int]]] = {}
    scheduler = engine.core.scheduler
    schedule = scheduler.schedule

    def record() -> StepPlan:
        plan = schedule()
        for part in plan.scheduled:
            computed.setdefault(part.request_id, []).append((part.start, part.start + part.count))
        return plan

    monkeypatch.setattr(scheduler, "schedule", record)
    return computed


def test_no_chunk_cuts_a_picture(seeing_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk ends before a picture for which it has too little room, also if a cached prefix ends in one."""
    engine = Engine(seeing_folders[PICTURES], max_num_batched_tokens=20, max_num_seqs=4, block_size=4)
    computed = chunks(engine, monkeypatch)
    prompt, items = prompt_with_pictures(engine.pictures, [5] * 9, drawn(60, 60), [7, 8], drawn(30, 40, seed=1), [3])
    assert [(item.start, item.length) for item in items] == [(9, 16), (27, 16)]
    engine.add("first", prompt, greedy(1), items=items)
    engine.run()
    assert computed["first"] == [(0, 9), (9, 27), (27, 44)]
    prompt, items = prompt_with_pictures(engine.pictures, [5] * 9, drawn(60, 60))
    for name in ("second", "third"):
        engine.add(name, prompt, greedy(3), items=items)
        engine.run()
    assert computed["second"][0] == (24, 25)  # six blocks are cached, which end within the picture
    assert engine.results["second"].tokens == engine.results["third"].tokens
    fresh = Engine(seeing_folders[PICTURES], enable_prefix_caching=False)
    assert engine.results["second"].tokens == fresh.generate(prompt, greedy(3), items=items).tokens


@pytest.mark.parametrize(("case", "kinds"), [(PICTURES, ("running", "waiting")), (PROMPTS, ("waiting",))])
def test_long_answers_do_not_delay_what_needs_a_whole_step(
    seeing_folders: dict[str, Path], case: str, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has no room for its tokens and for those of the answers, so these wait for once."""
    for kind in kinds:
        step = 16
        engine = Engine(seeing_folders[case], max_num_batched_tokens=step, max_num_seqs=4, block_size=4)
        computed = chunks(engine, monkeypatch)
        for name in ("a", "b"):
            engine.add(name, [4, 5], greedy(24))
        engine.step()
        head = [9, 9] if kind == "running" else []
        if case == PICTURES:
            prompt, items = prompt_with_pictures(engine.pictures, head, drawn(50, 40), [1])
        else:
            prompt, items = prompt_with_pictures(engine.pictures, drawn(50, 40), [1] * (step - 4))
        engine.add("long", prompt, greedy(1), items=items)
        for _ in range(5):
            engine.step()
        assert engine.results["long"].error is None
        assert len(engine.results["long"].tokens) == 1
        assert max(end - start for start, end in computed["long"]) == step
        engine.run()
        assert [len(engine.results[name].tokens) for name in ("a", "b")] == [24, 24]


def test_pictures_that_no_step_has_room_for_are_refused(seeing_folders: dict[str, Path]) -> None:
    engine = Engine(seeing_folders[PICTURES], max_num_batched_tokens=15, max_num_seqs=4)
    prompt, items = prompt_with_pictures(engine.pictures, [5], drawn(60, 60), [7])
    assert engine.generate(prompt, greedy(1), items=items).error == (
        "a picture has 16 tokens; at most 15 are accepted, since one step computes all of them: "
        "--max-num-batched-tokens"
    )
    assert engine.generate([5] * 40, greedy(2)).error is None


def test_prompts_that_no_step_has_room_for_are_refused(seeing_folders: dict[str, Path]) -> None:
    engine = Engine(seeing_folders[PROMPTS], max_num_batched_tokens=15, max_num_seqs=4)
    assert engine.generate([5] * 16, greedy(2)).error == (
        "the prompt has 16 tokens; at most 15 are accepted, since one step computes all of them: "
        "--max-num-batched-tokens"
    )
    assert len(engine.generate([5] * 15, greedy(40)).tokens) == 40
    engine.add("open", [5, 6], greedy(2), open=True)
    assert engine.results["open"].error == (
        "the model attends to its prompt in both directions: the prompt must be complete"
    )


def test_equal_prompts_share_blocks(seeing_folders: dict[str, Path]) -> None:
    """Keys depend on the whole prompt: one that begins alike shares none, an equal one all but the last token."""
    engine = Engine(seeing_folders[PROMPTS], block_size=4)
    fresh = Engine(seeing_folders[PROMPTS], enable_prefix_caching=False)
    parts: dict[str, tuple[Any, ...]] = {
        "first": (drawn(60, 60), [5, 6, 7, 8, 9]),
        "equal": (drawn(60, 60), [5, 6, 7, 8, 9]),
        "longer": (drawn(60, 60), [5, 6, 7, 8, 9, 10]),
        "another picture": (drawn(60, 60, seed=1), [5, 6, 7, 8, 9]),
    }
    for name, pieces in parts.items():
        prompt, items = prompt_with_pictures(engine.pictures, *pieces)
        result = engine.generate(prompt, greedy(12), items=items)
        assert result.outputs[0].cached_tokens == (8 if name == "equal" else 0)
        assert result.tokens == fresh.generate(prompt, greedy(12), items=items).tokens
    continued = engine.generate([*prompt, *result.tokens], greedy(2), items=items)
    assert continued.outputs[0].cached_tokens == 0  # answers attend to earlier tokens only


def test_samples_of_one_prompt(seeing_folders: dict[str, Path]) -> None:
    """Those that enter in one step compute the end of the prompt each."""
    engine = Engine(seeing_folders[PROMPTS], block_size=4)
    alone = Engine(seeing_folders[PROMPTS], enable_prefix_caching=False)
    prompt, items = prompt_with_pictures(engine.pictures, drawn(60, 60), [5, 6, 7, 8, 9])
    for seed in range(3):
        engine.add(str(seed), prompt, SamplingParams(max_tokens=8, temperature=1.0, seed=seed), items=items)
    engine.run()
    for seed in range(3):
        params = SamplingParams(max_tokens=8, temperature=1.0, seed=seed)
        assert engine.results[str(seed)].tokens == alone.generate(prompt, params, items=items).tokens


def test_encoded_pictures_need_nothing_of_a_steps_budget(seeing_folders: dict[str, Path]) -> None:
    """A prompt whose picture is encoded enters a step that encodes another one."""
    engine = Engine(seeing_folders[PROMPTS])
    cache = engine.core.scheduler._encoder_cache  # type: ignore[union-attr]
    cache._pixel_cost = 512 / (56 * 56)
    first, items = prompt_with_pictures(engine.pictures, drawn(60, 60), [5, 6])
    assert engine.generate(first, greedy(1), items=items).error is None
    again, seen = prompt_with_pictures(engine.pictures, drawn(60, 60), [7])
    other, unseen = prompt_with_pictures(engine.pictures, drawn(60, 60, seed=1), [7])
    engine.add("other", other, greedy(3), items=unseen)
    engine.add("again", again, greedy(3), items=seen)
    engine.step()
    assert [len(engine.results[name].tokens) for name in ("other", "again")] == [1, 1]


def test_a_picture_that_lacks_blocks_makes_no_answer_wait(seeing_folders: dict[str, Path]) -> None:
    """Room in a step is of no use to it before there are blocks."""
    options: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 4}
    folder = seeing_folders[PICTURES]
    whole = Engine(folder, **options)
    engine = Engine(
        folder, kv_cache_memory_bytes=9 * whole.block_bytes, model=ModelOptions(max_model_len=36), **options
    )
    engine.add("a", [4, 5] * 14, greedy(7))
    engine.step()
    engine.step()
    prompt, items = prompt_with_pictures(engine.pictures, drawn(50, 40), [1])
    engine.add("seeing", prompt, greedy(1), items=items)
    before = len(engine.results["a"].tokens)
    for step in range(1, 5):
        engine.step()
        assert len(engine.results["a"].tokens) == before + step
    engine.run()
    assert len(engine.results["seeing"].tokens) == 1
