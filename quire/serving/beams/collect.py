"""Runs the beam searches of a request: the engine computes one token of each beam at a time.

What beams share is in the prefix cache, up to the last whole block.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

import numpy as np
from msgspec import structs

from quire.engine.client.detokenizer import Detokenizer
from quire.engine.client.engine import Engine
from quire.engine.client.errors import RequestFailed
from quire.engine.client.records import SequenceGroup
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.stream import Delta, GenerateRequest
from quire.engine.client.timeline import RequestTimes
from quire.rendering.tokenizer import Tokenizer
from quire.serving.beams.options import BeamOptions
from quire.serving.beams.search import Beam, BeamSearch
from quire.serving.generation import SequenceResult, collect


async def collect_answers(
    client: Engine,
    requests: Sequence[GenerateRequest],
    beams: BeamOptions | None,
    tokenizer: Tokenizer,
    observe: Callable[[int, Delta], None] = lambda index, delta: None,
) -> list[SequenceResult]:
    """The answers of all sequences, sampled or, with `beams`, searched; see `collect`.

    Raises:
        EngineError: a sequence failed; the others are aborted.
    """
    if beams is None:
        return await collect(client, requests, observe)
    searches = [_PromptSearch(request, beams) for request in requests[:: beams.width]]
    while waiting := [search for search in searches if search.unfinished]:
        steps = [list(search.next_requests()) for search in waiting]
        results = await collect(client, [request for step in steps for request in step])
        for search, step in zip(waiting, steps, strict=True):
            search.advance(results[: len(step)])
            results = results[len(step) :]
    answers = [answer for search in searches for answer in search.answers(tokenizer)]
    for index, answer in enumerate(answers):
        observe(index, answer.total)
    return answers


async def best_answer(
    client: Engine, request: GenerateRequest, beams: BeamOptions, tokenizer: Tokenizer
) -> AsyncGenerator[Delta, None]:
    """The best answer to a prompt, as the only delta.

    Raises:
        EngineError: a sequence failed; the others are aborted.
    """
    best, *_ = await collect_answers(client, [request], beams, tokenizer)
    yield best.total


class _PromptSearch:
    """The search of one prompt's answers."""

    def __init__(self, request: GenerateRequest, options: BeamOptions) -> None:
        self._request = request
        self._options = options
        self._search = BeamSearch(options, request.params.max_tokens)
        self._alternatives = max(self._search.candidates, options.logprobs or 0)
        self._token_probs: list[float] | None = None
        self._cached_tokens = 0
        self._times: RequestTimes | None = None

    @property
    def unfinished(self) -> bool:
        """Whether there are beams to extend."""
        return bool(self._search.running)

    def next_requests(self) -> Iterator[GenerateRequest]:
        """A request for the next token of each beam."""
        first = self._times is None
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=self._alternatives,
            token_probs=self._request.params.token_probs if first else None,
        )
        for index, beam in enumerate(self._search.running):
            prompt = np.append(self._request.prompt, np.array(beam.tokens, np.int32)).astype(np.int32)
            group = SequenceGroup(self._options.width if first and not index else 0)
            yield structs.replace(self._request, prompt=prompt, params=params, group=group, is_search_step=True)

    def advance(self, results: Sequence[SequenceResult]) -> None:
        """Take the results of the requests.

        Raises:
            RequestFailed: the engine has aborted one of them.
        """
        if not all(result.total.logprobs for result in results):
            raise RequestFailed("The generation was aborted.")
        times = results[0].total.times
        if self._times is None:
            self._cached_tokens, self._times = results[0].total.cached_tokens, times
            self._token_probs = results[0].total.token_probs
        elif times is not None:
            self._times = structs.replace(self._times, last_token=times.last_token)  # the step's own are still counted
        reports = [result.total.logprobs[0] for result in results]
        if self._search.lacks_candidates(reports) and len(reports[0].token_ids) > self._alternatives:
            self._alternatives *= 2  # the same step again; with fewer tokens than asked for, there are no others
        else:
            self._search.advance(reports)

    def answers(self, tokenizer: Tokenizer) -> Iterator[SequenceResult]:
        """The best beams, best first."""
        for _, beam in self._search.best:
            yield self._answer(beam, tokenizer)

    def _answer(self, beam: Beam, tokenizer: Tokenizer) -> SequenceResult:
        detokenizer = Detokenizer(tokenizer.backend, self._request.prompt, self._request.text)
        stopped = beam.finished == "stop"
        last = beam.tokens[-1]
        result = SequenceResult()
        result.add(
            Delta(
                text=detokenizer.push(beam.tokens, last=True, stopped=stopped),
                token_ids=list(beam.tokens),
                logprobs=list(beam.entries),
                cached_tokens=self._cached_tokens,
                finish_reason="stop" if stopped else "length",
                stop_reason=last if stopped and last not in self._options.eos_token_ids else None,
                token_probs=self._token_probs,
                times=self._times,
            )
        )
        return result
