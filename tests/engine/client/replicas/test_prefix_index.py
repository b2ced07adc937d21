"""Which prefixes a replica probably has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.client.protocol import PictureItem
from quire.engine.client.replicas.load import AnswerLength, Load
from quire.engine.client.replicas.prefix_index import PrefixIndex, PromptKeys, block_keys
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.stream import GenerateRequest


def request(tokens: list[int], **fields: object) -> GenerateRequest:
    prompt = np.array(tokens, np.int32)
    return GenerateRequest(prompt=prompt, params=SamplingParams(max_tokens=1), **fields)  # type: ignore[arg-type]


def picture(content: bytes, start: int) -> PictureItem:
    return PictureItem(hash=content, start=start, length=4, pixels=np.zeros((1, 1, 1, 3), np.uint8))


def test_keys_are_of_full_blocks_and_all_that_is_before_them() -> None:
    whole = block_keys(request([1, 2, 3, 4, 5, 6, 7]), 2)
    assert len(whole) == 3
    assert block_keys(request([1, 2, 3, 4]), 2) == whole[:2]
    assert len({*block_keys(request([9, 2, 3, 4, 5, 6]), 2), *whole}) == 6
    assert block_keys(request([1]), 2) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "x"},
        {"items": (picture(b"a", 0),)},
        {"items": (picture(b"a", 3),)},
        {"items": (picture(b"b", 3),)},
    ],
)
def test_salts_and_media_make_other_keys(fields: dict[str, object]) -> None:
    tokens = [0] * 8
    plain, other = block_keys(request(tokens), 2), block_keys(request(tokens, **fields), 2)
    begins = 1 if fields.get("items") and fields["items"][0].start else 0  # type: ignore[index]
    assert other[:begins] == plain[:begins]
    assert not {*other[begins:]} & {*plain}


def test_the_keys_of_one_prompt_are_computed_once_but_not_taken_for_those_of_another() -> None:
    keys = PromptKeys()
    keys.block_size = 2
    first = request([1, 2, 3, 4])
    salted = GenerateRequest(prompt=first.prompt, params=first.params, cache_salt="x")
    assert keys.of(first) is keys.of(first)
    assert keys.of(salted) == block_keys(salted, 2)
    assert keys.of(request([5, 6])) == block_keys(request([5, 6]), 2)


def test_prompts_that_were_used_least_recently_leave_first_and_their_ends_before_their_beginnings() -> None:
    index = PrefixIndex(4)
    index.add([1, 2, 3])
    index.add([4, 5])
    assert index.matched([1, 2, 3]) == 2
    index.add([1])
    index.add([6])
    assert index.matched([1, 2]) == 1
    assert index.matched([4, 5]) == 2
    assert index.matched([7, 6]) == 0
    index.clear()
    assert len(index) == 0


@given(st.lists(st.lists(st.integers(0, 30), max_size=12, unique=True), max_size=30), st.integers(1, 8))
def test_the_bound_holds_and_all_keys_that_leave_are_told(prompts: list[list[int]], capacity: int) -> None:
    index = PrefixIndex(capacity)
    present: set[int] = set()
    for prompt in prompts:
        present |= set(prompt)
        present -= set(index.add(prompt))
        assert {key for key in range(31) if key in index} == present
        assert len(index) <= capacity
        assert index.matched(prompt[:capacity]) == len(prompt[:capacity])


def test_what_a_replica_tells_itself_does_not_change_the_order_of_what_is_known() -> None:
    index = PrefixIndex(3)
    index.add([1, 2])
    index.note([2, 5])
    assert index.recent(2) == [5, 1]
    index.resize(1)
    assert (len(index), index.capacity) == (1, 1)


def test_work_is_what_is_left_of_a_request() -> None:
    load = Load()
    first, second = load.begin(100, 20), load.begin(10, 5)
    assert (load.tokens, load.requests) == (135, 2)
    first.extend(7)
    assert load.tokens == 142
    first.advance(1)
    assert load.tokens == 34
    first.advance(50)  # more than was expected
    assert load.tokens == 15
    first.advance(50)
    first.end()
    first.end()
    first.advance(1)
    first.extend(1)
    assert (load.tokens, load.requests, first.generated) == (15, 1, 102)
    second.end()
    assert (load.tokens, load.requests) == (0, 0)


def test_answers_are_expected_to_be_as_long_as_they_were() -> None:
    length = AnswerLength()
    assert length.expected(10) == 10
    for _ in range(200):
        length.ended(30)
    assert length.expected(1000) == pytest.approx(30, abs=0.1)
