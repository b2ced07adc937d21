"""With real weights, the next turn of a conversation has the same tokens over cached blocks of its last answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from quire.config.options import ModelOptions
from quire.engine.client.sampling_params import SamplingParams
from tests.support.engine import Engine, greedy
from tests.support.real import real_files

pytestmark = pytest.mark.real

KINDS = {
    "bfloat16": ({}, {}),
    "int8 weights": ({"quantization": "int8"}, {}),
    "int8 KV cache": ({}, {"kv_cache_dtype": "int8"}),
}
TOPICS = ("the sea", "bread", "a clock", "winter", "bees", "a bridge", "music", "the moon", "trains", "an old house")
TASKS = (
    "Explain",
    "Write a short story about",
    "List five facts about",
    "Compare yesterday and today for",
    "Give advice on",
)
QUESTIONS = ("Say it again, shorter.", "Why is that so?", "Give one example.", "What comes next?")


def conversations() -> list[tuple[str, str]]:
    """200 first messages and the messages that follow the answers."""
    openings = [f"{task} {topic}." for task in TASKS for topic in TOPICS]
    return [(opening, question) for question in QUESTIONS for opening in openings]


def answers(engine: Engine, prompts: Sequence[list[int]], name: str, tokens: int) -> list[list[int]]:
    """Half of them greedy, half sampled."""
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=tokens, seed=index) if index % 2 else greedy(tokens)
        engine.add(f"{name}-{index}", prompt, params)
    engine.run()
    return [engine.results[f"{name}-{index}"].tokens for index in range(len(prompts))]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_a_turn_over_cached_answers_is_the_same(name: str, kind: str) -> None:
    folder: Path = real_files(name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model, engine = KINDS[kind]
    options: dict[str, Any] = {"kv_cache_memory_bytes": 2 << 30, **engine}
    chosen = ModelOptions(dtype="bfloat16", max_model_len=1024, **model)
    cached = Engine(folder, model=chosen, **options)
    recomputed = Engine(folder, model=chosen, enable_prefix_caching=False, **options)
    openings = [tokenizer.encode(opening).ids for opening, _ in conversations()]
    turns = [
        [*prompt, *answer, *tokenizer.encode(f"\n\n{question}\n\n", add_special_tokens=False).ids]
        for prompt, answer, (_, question) in zip(
            openings, answers(cached, openings, "opening", 40), conversations(), strict=True
        )
    ]
    first, second = answers(cached, turns, "turn", 40), answers(recomputed, turns, "turn", 40)
    hits = [cached.results[f"turn-{index}"].outputs[0].cached_tokens for index in range(len(turns))]
    assert sum(hit > len(prompt) for hit, prompt in zip(hits, openings, strict=True)) > 190
    assert sum(text != other for text, other in zip(first, second, strict=True)) == 0
