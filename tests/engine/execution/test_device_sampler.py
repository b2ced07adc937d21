"""DeviceSampler chooses what Sampler chooses, with Triton's kernels (interpreted, or on a GPU) and without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("triton")

from quire.engine.client.sampling_params import SamplingParams, TimestampRule
from quire.engine.client.token_mask import token_mask
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.sampling.device_sampler import DeviceSampler
from quire.engine.execution.sampling.grammar import GrammarState
from quire.engine.execution.sampling.pending import SampledToken
from quire.engine.execution.sampling.row_settings import MAX_BIASES, fits_device
from quire.engine.execution.sampling.sampler import Sampler
from quire.engine.scheduling.plan import NewSequence, SequenceError, StepPlan
from quire.kernels import gpu
from tests.support import triton_interpreter

triton_interpreter.prepare()
VOCAB = 50
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


def kernels(triton: bool) -> AbstractContextManager[None]:
    return gpu.interpreted() if triton and not GPU else nullcontext()


@pytest.fixture(params=["triton", "reference"])
def triton(request: pytest.FixtureRequest) -> Iterator[bool]:
    if request.param == "reference" and GPU:
        pytest.skip("the kernels run on all tensors of a GPU")
    with kernels(request.param == "triton"):
        yield request.param == "triton"


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "temperature": 0.0, **fields})


class NextTokens:
    """Stand for the state of a grammar: one of the next five tokens may follow a token, and nothing may follow 13."""

    def __init__(self) -> None:
        self.last = 0
        self.error: SequenceError | None = None

    def advance(self, tokens: Sequence[int], mask: NDArray[np.uint32], allowed: float) -> None:
        self.last = tokens[-1] if tokens else self.last
        if self.last == 13:
            self.error = SequenceError("after 13 nothing may follow")
        else:
            mask[:] = token_mask(np.arange(self.last + 1, self.last + 6, dtype=np.int32) % VOCAB, VOCAB)


def grammar_state(row_params: SamplingParams) -> GrammarState | None:
    if row_params.grammar == "fails":
        raise ValueError("no such grammar")
    return cast("GrammarState", NextTokens()) if row_params.grammar else None


class Harness:
    """A sampler with a request table of its own, and some requests in it."""

    def __init__(self, *requests: SamplingParams, on_device: bool, vocab: int = VOCAB, rows: int = 8) -> None:
        self.table = RequestTable(rows, 64, 4)
        self.sampler: Sampler | DeviceSampler = (
            DeviceSampler(self.table, vocab, DEVICE, None, grammar_state)
            if on_device
            else Sampler(self.table, vocab, grammar_state)
        )
        self.on_device = on_device
        self.apply(StepPlan(new=[new(f"r{i}", request) for i, request in enumerate(requests)]))
        self.rows = [self.table.row_of(f"r{i}") for i in range(len(requests))]

    def apply(self, plan: StepPlan) -> None:
        self.sampler.update(*self.table.apply(plan)[:2])

    def sample(self, logits: torch.Tensor) -> list[SampledToken]:
        """`logits`: (requests, vocab)."""
        given_ = logits.clone().to(DEVICE if self.on_device else "cpu")
        return self.sampler.start(given_, self.rows).result()

    def verify(self, logits: torch.Tensor, drafts: list[list[int]]) -> list[list[SampledToken]]:
        return self.sampler.verify(logits.clone().to(DEVICE if self.on_device else "cpu"), self.rows, drafts)

    def tokens(self) -> list[list[int]]:
        return [self.table.known_tokens(row).tolist() for row in self.rows]


def new(request_id: str, row_params: SamplingParams, output: tuple[int, ...] = ()) -> NewSequence:
    return NewSequence(request_id, np.array([1, 2, 3, 2, *output], np.int32), 4, row_params, None)


def logits_of(rows: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def assert_same(actual: list[SampledToken], expected: list[SampledToken]) -> None:
    assert [sample.error for sample in actual] == [sample.error for sample in expected]
    assert [sample.token for sample in actual] == [sample.token for sample in expected]
    for result, other in zip(actual, expected, strict=True):
        assert (result.logprobs is None) == (other.logprobs is None)
        if result.logprobs is not None and other.logprobs is not None:
            assert result.logprobs.token_ids == other.logprobs.token_ids
            assert result.logprobs.ranks == other.logprobs.ranks
            assert result.logprobs.logprobs == pytest.approx(other.logprobs.logprobs, abs=2e-5)


tokens_ = st.integers(0, VOCAB - 1)
penalties = st.sampled_from([0.0, 0.0, 0.7, -0.6, 1.3])
MASKS = [token_mask(np.array(ids, np.int32), VOCAB) for ids in ([1, 2, 3], [*range(0, VOCAB, 3)], [VOCAB - 1])]
requests = st.builds(
    params,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 1.8]),
    top_k=st.sampled_from([0, 0, 1, 4, 30, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.93, 0.41, 0.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.11]),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.31, 0.8]),
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    logit_bias=st.dictionaries(tokens_, st.sampled_from([-100.0, -2.5, 3.5, 40.0]), max_size=3),
    min_tokens=st.integers(0, 3),
    eos_token_ids=st.lists(tokens_, max_size=2, unique=True).map(tuple),
    stop_token_ids=st.frozensets(tokens_, max_size=2),
    begin_suppress_tokens=st.lists(tokens_, max_size=2).map(tuple),
    allowed_tokens=st.sampled_from([None, None, None, *MASKS]),
    logprobs=st.sampled_from([None, None, 0, 3]),
    bad_words=st.sampled_from([(), (), (), ((5,), (7, 9))]),
    grammar=st.sampled_from(["", "", "next tokens"]),
)


def _check_batch(batch: list[SamplingParams], seed: int, steps: int) -> None:
    host, device = (Harness(*batch, on_device=on_device) for on_device in (False, True))
    alone = [Harness(row, on_device=True) for row in batch]
    for step in range(steps):
        logits = logits_of(len(batch), seed + step)
        expected, actual = host.sample(logits), device.sample(logits)
        assert_same(actual, expected)
        for i, harness in enumerate(alone):
            assert_same(harness.sample(logits[i : i + 1]), actual[i : i + 1])
    assert device.tokens() == host.tokens()
    for harness in (host, device, *alone):
        harness.sampler.close()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(batch=st.lists(requests, min_size=1, max_size=5), seed=st.integers(0, 10_000))
def test_the_same_tokens_as_on_the_host(batch: list[SamplingParams], seed: int) -> None:
    """With any parameters, in mixed batches and alone."""
    _check_batch(batch, seed, 3)


@settings(deadline=None, max_examples=6, derandomize=True)
@given(batch=st.lists(requests, min_size=2, max_size=4), seed=st.integers(0, 10_000))
def test_the_same_tokens_by_kernels(batch: list[SamplingParams], seed: int) -> None:
    with kernels(triton=True):
        _check_batch(batch, seed, 2)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    batch=st.lists(requests, min_size=1, max_size=4),
    lengths=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    wrong=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    seed=st.integers(0, 10_000),
)
def test_drafts_give_the_same_tokens(
    batch: list[SamplingParams], lengths: list[int], wrong: list[int], seed: int
) -> None:
    """Drafts that are confirmed partly or completely, and sequences without one."""
    host, device, ahead = (Harness(*batch, on_device=on_device) for on_device in (False, True, False))
    logits = [logits_of(5, seed + i) for i in range(len(batch))]
    future = [ahead.sample(torch.stack([logit[depth] for logit in logits])) for depth in range(4)]
    drafts = [[future[depth][i].token for depth in range(lengths[i])] for i in range(len(batch))]
    for draft, at in zip(drafts, wrong, strict=False):
        draft[at : at + 1] = [(token + 1) % VOCAB for token in draft[at : at + 1]]
    rows = torch.cat([logit[: 1 + len(draft)] for logit, draft in zip(logits, drafts, strict=True)])
    expected, actual = host.verify(rows, drafts), device.verify(rows, drafts)
    for i, (result, other) in enumerate(zip(actual, expected, strict=True)):
        assert_same(result, other)
        assert len(result) == 1 + min(lengths[i], wrong[i])
    assert device.tokens() == host.tokens()
    later = logits_of(len(batch), seed + 9)
    assert_same(device.sample(later), host.sample(later))


def test_a_confirmed_draft_is_what_greedy_sampling_gives(triton: bool) -> None:
    harness = Harness(params(frequency_penalty=0.5), params(), on_device=True)
    logits = torch.zeros(5, VOCAB)
    logits[:3, 7], logits[:3, 8] = 2.0, 1.8  # 7 is penalized once it was generated
    logits[3:, 9] = 1.0
    verified = harness.verify(logits, [[7, 8], [9]])
    assert [[sample.token for sample in part] for part in verified] == [[7, 8, 7], [9, 9]]
    assert [sample.token for sample in harness.sample(logits[[0, 3]])] == [8, 9]  # after 7, 8, 7


def test_rows_are_sampled_again_after_others_left(triton: bool) -> None:
    """A new sequence in a freed row has nothing of the one before; a resumed one keeps what it generated."""
    first = params(frequency_penalty=2.0, logit_bias={4: 50.0}, allowed_tokens=MASKS[1], logprobs=1)
    harness = Harness(first, on_device=True)
    assert harness.sample(logits_of(1, 0))[0].token % 3 == 0
    harness.apply(StepPlan(removed=["r0"], new=[new("r1", params())]))
    harness.rows = [harness.table.row_of("r1")]
    logits = logits_of(1, 1)
    assert harness.sample(logits)[0] == SampledToken(int(logits.argmax()), None)
    resumed = params(frequency_penalty=1.0)
    harness.apply(StepPlan(removed=["r1"], new=[new("r2", resumed, output=(10, 10))]))
    harness.rows = [harness.table.row_of("r2")]
    target = torch.zeros(1, VOCAB)
    target[0, 10], target[0, 11] = 3.0, 1.5
    assert harness.sample(target)[0].token == 11


def test_tokens_are_read_after_the_next_step_began(triton: bool) -> None:
    """Two steps in flight; penalties, seeds and min_tokens follow on the device."""
    batch = [
        params(temperature=1.0, seed=5, top_p=0.9, frequency_penalty=1.5),
        params(min_tokens=2, eos_token_ids=(3,)),
    ]
    host, device = Harness(*batch, on_device=False), Harness(*batch, on_device=True)
    steps = [logits_of(2, seed).index_fill_(1, torch.tensor([3]), 20.0) for seed in range(4)]
    expected = [host.sample(logits) for logits in steps]
    pending = [device.sampler.start(logits.clone().to(DEVICE), device.rows) for logits in steps[:2]]
    assert (device.table.tokens[device.rows[0], 4:6] == -1 - device.rows[0]).all()
    results = []
    for logits in steps[2:]:
        results.append(pending.pop(0).result())
        pending.append(device.sampler.start(logits.clone().to(DEVICE), device.rows))
    results += [sample.result() for sample in pending]
    for result, other in zip(results, expected, strict=True):
        assert_same(result, other)
    assert device.tokens() == host.tokens()


def test_grammars_follow_tokens_that_are_read_later(triton: bool) -> None:
    """With steps in flight. A sequence that left meanwhile does not advance the grammar of the next one in its row."""
    batch = [params(grammar="g"), params(), params(grammar="g", temperature=1.0, seed=3, logprobs=2)]
    host, device = Harness(*batch, on_device=False), Harness(*batch, on_device=True)
    steps = [logits_of(3, seed) for seed in range(4)]
    expected = [host.sample(logits) for logits in steps]
    pending = [device.sampler.start(logits.clone().to(DEVICE), device.rows) for logits in steps]
    for result, other in zip(pending, expected, strict=True):
        assert_same(result.result(), other)
    leaving = device.sampler.start(logits_of(3, 9).to(DEVICE), device.rows)
    device.apply(StepPlan(removed=["r0", "r1", "r2"], new=[new("r3", params(grammar="g"))]))
    device.rows = [device.table.row_of("r3")]
    leaving.result()
    first = device.sample(logits_of(1, 10))[0].token
    assert first in range(1, 6)
    assert device.sample(logits_of(1, 11))[0].token in range(first + 1, first + 6)


def test_a_grammar_that_fails_ends_its_sequence_only(triton: bool) -> None:
    harness = Harness(
        params(grammar="fails"), params(grammar="g", logit_bias={3: 90.0, 8: 80.0, 13: 70.0}), on_device=True
    )
    plain = Harness(params(), on_device=True)
    for step in range(3):
        logits = logits_of(2, step)
        failed, sampled = harness.sample(logits)
        assert failed.error is not None
        assert "no such grammar" in failed.error.message
        assert (sampled.token, sampled.error) == (3 + 5 * step, None)
        assert plain.sample(logits[:1])[0].error is None
    error = harness.sample(logits_of(2, 4))[1].error
    assert error is not None
    assert "after 13" in error.message


def test_a_token_of_a_sequence_that_left_is_not_written(triton: bool) -> None:
    harness = Harness(params(), params(), on_device=True)
    pending = harness.sampler.start(logits_of(2, 0).to(DEVICE), harness.rows)
    harness.apply(StepPlan(removed=["r0", "r1"], new=[new("r2", params())]))
    before = harness.table.tokens.copy()
    assert [sample.token for sample in pending.result()] == logits_of(2, 0).argmax(-1).tolist()
    assert (harness.table.tokens[harness.table.row_of("r2")] == before[harness.table.row_of("r2")]).all()


def test_last_tokens_stay_on_the_device(triton: bool) -> None:
    table, last = RequestTable(4, 64, 4), torch.full((4,), -5, device=DEVICE)
    sampler = DeviceSampler(table, VOCAB, DEVICE, last)
    sampler.update(*table.apply(StepPlan(new=[new("a", params()), new("b", params(temperature=1.0))]))[:2])
    rows = [table.row_of("a"), table.row_of("b")]
    tokens = [sample.token for sample in sampler.start(logits_of(2, 3).to(DEVICE), rows).result()]
    assert last[rows].tolist() == tokens
    assert sorted(last.tolist())[:2] == [-5, -5]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"grammar": "x"}, True),
        ({"grammar": "x", "bad_words": ((1,),)}, False),
        ({"bad_words": ((1, 2),)}, False),
        ({"logprobs": 3}, True),
        ({"logprobs": 0, "logprob_token_ids": (1,)}, False),
        ({"timestamp_rule": TimestampRule(begin=40, no_timestamps=39, end=38)}, False),
        ({"logit_bias": dict.fromkeys(range(MAX_BIASES), 1.0)}, True),
        ({"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1.0)}, False),
    ],
)
def test_which_requests_are_sampled_on_the_device(fields: dict[str, Any], expected: bool) -> None:
    assert fits_device(params(**fields)) is expected
