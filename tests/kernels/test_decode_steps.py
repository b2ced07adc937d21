"""Decode steps that follow each other in one native call, against the same steps one by one."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.kernels import native
from quire.kernels.capture import CapturedCalls, RowKind, Workspace, set_row_kind
from quire.kernels.linear import PackedBFloat16
from quire.kernels.sampling import NO_TOKEN, TokenChoices, argmax, sample
from quire.kernels.take_rows import take_rows

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="only compiled kernels can be captured")

VOCAB, ROWS, CONTEXT = 96, [2, 0], 16
STARTS = [3, 7]  # positions of the tokens of the first step, in rows 2 and 0 of the table


class Steps:
    """Logits that depend on the last token alone, by captured calls."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        int64, int32 = torch.int64, torch.int32
        self.known = torch.randint(VOCAB, (3, CONTEXT), dtype=int32)
        self.tokens, self.slots = torch.zeros(4, dtype=int64), torch.zeros(4, dtype=int64)
        self.positions = torch.zeros(4, dtype=int64)
        self.logits = torch.zeros(4, VOCAB)
        self.embeddings = torch.randn(VOCAB, 32).bfloat16()
        self._head = PackedBFloat16(torch.randn(VOCAB, 32).bfloat16())
        self.arrays = native.kernels.input_arrays(
            known_tokens=self.known,
            known_blocks=torch.arange(12, dtype=int32).view(3, 4),
            block_size=4,
            tokens=self.tokens,
            positions=self.positions,
            slots=self.slots,
            seq_lens=torch.zeros(4, dtype=int64),
            span_counts=torch.zeros(6, dtype=int64),
            block_tables=torch.zeros(4, 4, dtype=int32),
            end_rows=torch.zeros(4, dtype=int64),
            end_seq_lens=torch.zeros(4, dtype=int64),
            end_block_tables=torch.zeros(4, 4, dtype=int32),
        )
        self.calls = CapturedCalls(lambda: self.compute(3), Workspace(4), (3, 3))
        assert self.calls.complete

    def compute(self, rows: int) -> torch.Tensor:
        embedded = take_rows(self.embeddings, self.tokens[:rows])
        set_row_kind(RowKind.LOGITS)
        return self._head(embedded, None, out_dtype=torch.float32, out=self.logits[:rows])

    def decode(self, choices: TokenChoices, starts: list[int] = STARTS, inbox: int | None = None) -> list[list[int]]:
        return self.calls.decode([self.arrays], ROWS, starts, self.logits[: len(ROWS)], choices, inbox)

    def one_by_one(self, choices: TokenChoices) -> list[list[int]]:
        """The tokens of each row by steps that nothing ends."""
        chosen: list[list[int]] = [[] for _ in ROWS]
        last = [int(self.known[row, start]) for row, start in zip(ROWS, STARTS, strict=True)]
        for step in range(choices.steps):
            self.tokens[:2] = torch.tensor(last)
            randoms = choices.randoms[step * len(ROWS) : (step + 1) * len(ROWS)]
            logits = self.compute(2)
            if any(choices.temperatures):
                last = sample(
                    logits,
                    choices.temperatures,
                    randoms,
                    min_ps=choices.min_ps,
                    top_ks=choices.top_ks,
                    top_ps=choices.top_ps,
                )
            else:
                last = argmax(logits)
            for row_tokens, token in zip(chosen, last, strict=True):
                row_tokens.append(token)
        return chosen


def choices(**changes: Any) -> TokenChoices:
    greedy = TokenChoices([0.0, 0.0], [0.0, 0.0], [0, 0], [1.0, 1.0], [0.0] * 12, [], 6)
    return replace(greedy, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperatures": [1.5, 0.0], "randoms": [i * 0.37 % 1 for i in range(12)]},
        {
            "temperatures": [2.0, 1.0],
            "top_ks": [5, 0],
            "top_ps": [1.0, 0.7],
            "randoms": [i * 0.61 % 1 for i in range(12)],
        },
        {"temperatures": [2.0, 3.0], "min_ps": [0.1, 0.0], "randoms": [i * 0.53 % 1 for i in range(12)]},
    ],
)
def test_tokens_are_those_of_single_steps(changes: dict[str, Any]) -> None:
    """Each of them is in the request table behind the one that it follows."""
    steps = Steps()
    expected = steps.one_by_one(choices(**changes))
    assert steps.decode(choices(**changes)) == expected
    for row, start, tokens in zip(ROWS, STARTS, expected, strict=True):
        assert steps.known[row, start + 1 : start + 7].tolist() == tokens
    assert steps.positions[:2].tolist() == [8, 12], "those of the last step"
    assert steps.slots[:2].tolist() == [10 * 4 + 0, 3 * 4 + 0]


def test_steps_end_with_a_token_that_may_end_a_sequence() -> None:
    expected = Steps().one_by_one(choices())
    for row in range(2):
        for end in set(expected[row]):
            first = min(tokens.index(end) for tokens in expected if end in tokens)
            assert Steps().decode(choices(ends=[VOCAB, end])) == [tokens[: first + 1] for tokens in expected]


def test_steps_end_when_something_can_be_read_from_the_inbox() -> None:
    expected = Steps().one_by_one(choices())
    reading, writing = os.pipe()
    with open(reading, "rb"), open(writing, "wb", buffering=0) as written:
        assert Steps().decode(choices(), inbox=reading) == expected
        written.write(b"1")
        assert Steps().decode(choices(), inbox=reading) == [tokens[:1] for tokens in expected]


def test_steps_end_with_a_row_that_has_no_token() -> None:
    steps = Steps()
    second = steps.one_by_one(choices())[1][1]
    steps.embeddings[second] = torch.nan
    tokens = steps.decode(choices())
    assert len(tokens[0]) == len(tokens[1])
    assert tokens[1][1:] == [second, NO_TOKEN]
    assert int(steps.known[0, STARTS[1] + 3]) != NO_TOKEN


def test_the_last_position_of_a_context_is_computed_but_nothing_is_written_behind_it() -> None:
    steps = Steps()
    behind = steps.known[1].clone()
    tokens = steps.decode(choices(), [3, CONTEXT - 6])
    assert [len(row_tokens) for row_tokens in tokens] == [6, 6]
    assert steps.known[0, CONTEXT - 5 :].tolist() == tokens[1][:5]
    assert torch.equal(steps.known[1], behind)


@pytest.mark.parametrize(
    ("changes", "starts", "message"),
    [
        ({}, [3, CONTEXT - 5], "positions of the context are expected"),
        ({"steps": 0}, STARTS, "steps: at least one is expected"),
        ({"randoms": [0.0] * 11}, STARTS, "randoms: one for each row of each step is expected"),
        ({"top_ks": [1]}, STARTS, "top_ks: one for each row of logits is expected"),
    ],
)
def test_errors(changes: dict[str, Any], starts: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Steps().decode(choices(**changes), starts)
