"""Texts and pairs for models that pool: slices, truncation, and errors that name the input."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.options import ChatOptions
from quire.multimodal.errors import PromptError
from quire.rendering import renderer as renderer_module
from quire.rendering.pooling_prompts import (
    InputNames,
    PairsJob,
    PoolingPrompt,
    TextsJob,
    Truncation,
    tokenize_pairs,
    tokenize_texts,
)
from quire.rendering.renderer import Renderer
from quire.rendering.tokenizer import Tokenizer
from tests.support.tokenizer import pair_tokenizer, write_tokenizer

TOKENIZER = Tokenizer(pair_tokenizer(), {})
NAMES = InputNames("input")


def texts_job(texts: Sequence[str], truncation: Truncation = Truncation(512), **fields: Any) -> TextsJob:  # noqa: B008 it is frozen
    return TextsJob(texts=texts, truncation=truncation, names=NAMES, **fields)


def pairs_job(texts: Sequence[tuple[str, str]], truncation: Truncation, **fields: Any) -> PairsJob:
    return PairsJob(texts=texts, truncation=truncation, names=NAMES, **fields)


def text_of(prompt: PoolingPrompt) -> str:
    return TOKENIZER.decode(prompt.token_ids.tolist(), skip_special_tokens=True)


async def collected(renderer: Renderer, job: TextsJob | PairsJob) -> list[PoolingPrompt]:
    return [prompt async for prompts in renderer.batch(job) for prompt in prompts]


@given(
    lengths=st.lists(st.sampled_from([0, 1, 10, 5000, 40_000]), min_size=1, max_size=700),
    first=st.integers(0, 3),
)
@settings(deadline=None, max_examples=50)
def test_slices_are_bounded_and_together_are_the_job(lengths: list[int], first: int) -> None:
    job = texts_job(["x" * length for length in lengths], first=first, prefix="p")
    slices = list(job.slices())
    assert [text for part in slices for text in part.texts] == list(job.texts)
    position = first
    for part in slices:
        assert part.first == position
        position += len(part.texts)
        assert 1 <= len(part.texts) <= 256
        assert len(part.texts) == 1 or sum(part.sizes()) <= 1 << 15, part.sizes()
        assert part.prefix == "p"


@given(text=st.text(max_size=60), limit=st.integers(1, 40), side=st.sampled_from(["left", "right"]))
@settings(deadline=None)
def test_a_cut_text_is_a_part_of_the_whole_one(text: str, limit: int, side: Any) -> None:
    (whole,) = tokenize_texts(texts_job([text]), TOKENIZER, lower_case=False)
    (cut,) = tokenize_texts(texts_job([text], Truncation(limit, truncate=True, side=side)), TOKENIZER, lower_case=False)
    ids, cut_ids = whole.token_ids.tolist(), cut.token_ids.tolist()
    assert len(cut_ids) == min(limit, len(ids))
    if len(cut_ids) >= 2:
        inner = ids[1:-1]
        assert (cut_ids[0], cut_ids[-1]) == (ids[0], ids[-1])
        assert cut_ids[1:-1] == (
            inner[: len(cut_ids) - 2] if side == "right" else inner[len(inner) - len(cut_ids) + 2 :]
        )


@given(
    pair=st.tuples(st.text(max_size=30), st.text(max_size=30)),
    limit=st.integers(5, 40),
    side=st.sampled_from(["left", "right"]),
)
@settings(deadline=None)
def test_pairs_are_cut_as_the_tokenizers_library_does(pair: tuple[str, str], limit: int, side: Any) -> None:
    (cut,) = tokenize_pairs(pairs_job([pair], Truncation(limit, truncate=True, side=side)), TOKENIZER, None)
    reference = pair_tokenizer()
    reference.enable_truncation(limit, strategy="longest_first", direction=side)
    expected = reference.encode(*pair)
    assert cut.token_ids.tolist() == expected.ids
    assert cut.second_text_start == expected.type_ids.index(1)


def test_errors_name_the_input_of_the_whole_request() -> None:
    for texts, complaint in ((["a", "b" * 600], "602 tokens"), (["a", "\ud800"], "invalid character")):
        with pytest.raises(PromptError, match=complaint) as raised:
            tokenize_texts(texts_job(texts, first=256), TOKENIZER, lower_case=False)
        assert raised.value.param == "input[257]"
    with pytest.raises(PromptError) as raised:
        tokenize_pairs(pairs_job([("a", "b"), ("a", "c" * 20)], Truncation(10), first=5), TOKENIZER, None)
    assert raised.value.param == "input[6]"
    alone = TextsJob(
        texts=[""], truncation=Truncation(5), names=InputNames("text", several=False), add_special_tokens=False
    )
    with pytest.raises(PromptError, match="no tokens") as raised:
        tokenize_texts(alone, TOKENIZER, lower_case=False)
    assert raised.value.param == "text"


@pytest.mark.parametrize(
    ("job", "param"),
    [
        (texts_job(["a"] * 2000, prefix="b" * 40_000), "input"),
        (pairs_job([("q" * 40_000, "a")] * 2000, Truncation(8, truncate=True)), "input"),
        (pairs_job([("q", "a")] * 2000, Truncation(8), instruction="i" * 40_000), "input"),
        (pairs_job([("q", "a")], Truncation(8), variables={"x": "y" * 5000}), "chat_template_kwargs"),
        (pairs_job([("q", "a")], Truncation(8), variables={"x": [1] * 300}), "chat_template_kwargs"),
    ],
)
async def test_what_is_repeated_for_each_input_is_bounded(tmp_path: Path, job: TextsJob | PairsJob, param: str) -> None:
    write_tokenizer(tmp_path, joins=True)
    renderer = Renderer(tmp_path, Tokenizer.load(tmp_path), ChatOptions(), 512)
    with pytest.raises(PromptError) as raised:
        await collected(renderer, job)
    assert raised.value.param == param
    await renderer.close()


def test_documents_and_queries_have_limits_of_their_own() -> None:
    job = pairs_job([("query", "d\u20aci"), ("query", "x")], Truncation(512), query_tokens=2, document_tokens=4)
    assert [text_of(prompt) for prompt in tokenize_pairs(job, TOKENIZER, None)] == ["qud\u20ac", "qux"]


async def test_texts_of_all_sizes_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the event loop, in threads, and in worker processes."""
    monkeypatch.setattr(renderer_module, "_LARGE_CHARACTERS", 5000)
    write_tokenizer(tmp_path, joins=True)
    renderer = Renderer(tmp_path, Tokenizer.load(tmp_path), ChatOptions(), 10_000)
    texts = ["short", *(f"text {i}" for i in range(600)), "long " * 500, "longest " * 1000]
    try:
        truncation = Truncation(10_000)
        actual = await collected(renderer, texts_job(texts, truncation, prefix="> "))
        assert [text_of(prompt) for prompt in actual] == [f"> {text}" for text in texts]
        (short,) = await collected(renderer, texts_job(["short"], truncation, prefix="> "))
        assert short.token_ids.tolist() == actual[0].token_ids.tolist()
        pairs = await collected(renderer, pairs_job([("query", text) for text in texts], truncation))
        assert [text_of(prompt) for prompt in pairs] == [f"query{text}" for text in texts]
        assert {prompt.second_text_start for prompt in pairs} == {7}
        with pytest.raises(PromptError) as raised:
            await collected(renderer, texts_job([*texts, "x" * 11_000], truncation))
        assert raised.value.param == "input[603]"
    finally:
        await renderer.close()
