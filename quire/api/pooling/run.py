"""From the inputs of a pooling request to arrays: admission, tokenization, and the engine, one after the other.

Tokenized slices go to the engine while others are tokenized. A request holds one slot of the engine however many inputs
it has; `PooledBatch` takes further slots while enough are free.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request

from quire.api.http.admission import admit
from quire.api.http.request_head import answer_id
from quire.engine.client.batch import OnResult
from quire.engine.client.deadline import Deadline
from quire.engine.client.errors import RequestRefused
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import PooledArray, TokenArray
from quire.engine.client.stream import PoolRequest
from quire.protocol.common import CompletionTokensDetails, PromptTokensDetails, Usage
from quire.protocol.errors import InvalidRequest
from quire.rendering.pooling_prompts import InputNames, PairsJob, PoolingPrompt, TextsJob
from quire.serving.models import PoolingModel, ServerState
from quire.serving.result_memory import Reservation
from quire.workers.tenant import current_tenant, take_turn

_LENGTH_TOLERANCE = 1e-2  # of an embedding of length 1, which bfloat16 rounds


class ChunkedInputs:
    """The chunks of inputs beyond the context length, of which the mean is taken, weighted by their tokens.

    Chunks are numbered in the order of the inputs.

    Attributes:
        any_split: some input is longer than a chunk.
    """

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: of a chunk."""
        self._max_tokens = max_tokens
        self._first: list[int] = []  # the first chunk of each input
        self._weights: list[int] = []  # of each chunk
        self._activations: list[bool | None] = []  # of each input
        self.any_split = False

    def split(self, tokens: TokenArray, params: PoolingParams) -> list[tuple[TokenArray, PoolingParams]]:
        """The chunks of the next input, and their parameters. What is not pooled is in none, if it fills it."""
        self._first.append(len(self._weights))
        self._activations.append(params.use_activation)
        size = self._max_tokens
        if len(tokens) <= size:
            self._weights.append(1)
            return [(tokens, params)]
        self.any_split = True
        chunks = []
        for start in range(0, len(tokens), size):
            chunk = tokens[start : start + size]
            skipped = max(0, params.skip_tokens - start)
            if skipped < len(chunk):
                chunks.append((chunk, msgspec.structs.replace(params, skip_tokens=skipped)))
                self._weights.append(len(chunk) - skipped)
        return chunks

    def input_of(self, chunk: int) -> int:
        """The index of the input that a chunk belongs to."""
        return bisect_right(self._first, chunk) - 1

    def merge(self, arrays: Sequence[PooledArray]) -> list[PooledArray]:
        """The results of the inputs, from those of all chunks."""
        ends = [*self._first[1:], len(self._weights)]
        return [
            arrays[first]
            if end - first == 1
            else _mean(arrays[first:end], self._weights[first:end], normalizes=activation is not False)
            for first, end, activation in zip(self._first, ends, self._activations, strict=True)
        ]


def _mean(arrays: Sequence[PooledArray], weights: Sequence[int], *, normalizes: bool) -> PooledArray:
    """The weighted mean; of length 1, if that of all arrays is and it may be normalized."""
    total = np.zeros(arrays[0].shape, np.float32)
    for array, weight in zip(arrays, weights, strict=True):
        total += array * np.float32(weight)
        normalizes = normalizes and abs(float(np.linalg.norm(array)) - 1) <= _LENGTH_TOLERANCE
    total /= sum(weights)
    length = float(np.linalg.norm(total))
    return total / np.float32(length) if normalizes and length else total


_SLICE = 256  # prompts that are sent to the engine at a time, if they are tokenized already
# Begins to make prompts, in the order of the inputs.
PromptStream = Callable[[], AsyncGenerator[Sequence[PoolingPrompt], None]]
_MAX_VALUES = 1 << 24  # in all results of a request: 64 MiB, or 200 MB of JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingContext:
    """Values common to all inputs of a pooling request. `results`: memory held until the client has read them."""

    id: str
    model: PoolingModel
    results: Reservation
    priority: int = 0
    cache_salt: str | None = None
    deadline: Deadline = field(default_factory=Deadline)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """Name of the model in the response."""
        return self.model.names[0]


@dataclass(frozen=True, slots=True)
class InputGroup:
    """Inputs that have the same task: texts or pairs to tokenize, or prompts that are tokenized, or will be."""

    source: TextsJob | PairsJob | Sequence[PoolingPrompt] | PromptStream
    params: PoolingParams
    names: InputNames


@dataclass(frozen=True, slots=True)
class PoolingResults:
    """The arrays of all inputs, in order, and token counts."""

    arrays: list[PooledArray]
    tokens: int
    cached_tokens: int

    def usage(self) -> Usage:
        """Token counts as in responses."""
        return Usage(
            prompt_tokens=self.tokens,
            total_tokens=self.tokens,
            completion_tokens=0,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=0),
        )


def admit_pooling(request: Request, state: ServerState, model: PoolingModel, kind: str, body: Any) -> PoolingContext:
    """Admit a request. The fields of `body` that it may lack have their defaults.

    Raises:
        EngineOverloaded: the queue is full.
        EngineDead: the engine has ended.
        InvalidRequest: it has a priority that the server does not know.
    """
    priority = getattr(body, "priority", None) or 0
    if priority and not model.priority_scheduling:
        raise InvalidRequest("`priority` requires a server with --scheduling-policy priority.", "priority")
    admit(request, model, 1, "input")
    return PoolingContext(
        id=answer_id(kind, request, getattr(body, "request_id", None)),
        model=model,
        results=state.results.reservation(current_tenant()),
        priority=priority,
        cache_salt=getattr(body, "cache_salt", None),
        deadline=Deadline(getattr(body, "timeout", None), state.limits.request_timeout),
    )


def check_count(count: int, state: ServerState, param: str) -> None:
    """Refuse a request with too many inputs.

    Raises:
        InvalidRequest: there are too many.
    """
    if count > state.limits.max_inputs:
        raise InvalidRequest(f"A request may have at most {state.limits.max_inputs} inputs, not {count}.", param)


async def run_pooling(
    context: PoolingContext, *groups: InputGroup, on_result: OnResult | None = None
) -> PoolingResults:
    """Run all inputs. They are aborted when this is cancelled, or one of them fails.

    Args:
        context: context of the request.
        groups: inputs of the request.
        on_result: from the index and array of a result to the array to keep; None: keep it as it is.

    Raises:
        InvalidRequest: the engine does not accept an input.
        PromptError: an input cannot be tokenized.
        EngineError: the engine failed.
        Overloaded: there is no memory for the results.
    """
    tokens = 0
    inputs = 0
    owners = []
    chunks = ChunkedInputs(context.model.info.max_model_len)
    with context.model.client.pool_batch(
        deadline=context.deadline, on_result=on_result, tenant=current_tenant()
    ) as batch:
        try:
            for group in groups:
                owners.append((inputs, group.names))
                async with aclosing(_prompts(context.model, group)) as slices:
                    async for prompts in slices:
                        requests = list(_requests(context, group.params, prompts, chunks))
                        if on_result is None:
                            size = _size(context.model, group.params, requests)
                            _check_size(context.results.values + size, group.names)
                            context.results.grow(size)
                        batch.add(requests)
                        inputs += len(prompts)
                        tokens += sum(len(prompt.token_ids) for prompt in prompts)
                        # Their media give back their memory once they are computed, while those of others wait for it.
                        del prompts, requests
            arrays = await batch.results()
            if chunks.any_split:  # their means may take a tenth of a second
                work = partial(chunks.merge, arrays)
                arrays = await context.model.scorer.run(work, tenant=current_tenant())
        except RequestRefused as error:
            failed = None if batch.failed is None else chunks.input_of(batch.failed)
            raise InvalidRequest(str(error), _name(owners, failed)) from error
        return PoolingResults(arrays, tokens, batch.cached_tokens)


def _size(model: PoolingModel, params: PoolingParams, requests: Sequence[PoolRequest]) -> int:
    """Numbers in the results of some requests."""
    facts = model.pools
    match params.task:
        case "embed":
            return len(requests) * (params.dimensions or facts.embedding_size)
        case "token_embed":
            return sum(len(request.prompt) for request in requests) * facts.token_embedding_size
        case "token_classify":
            return sum(len(request.prompt) for request in requests) * len(facts.labels)
        case "classify":
            return len(requests) * len(facts.labels)
        case _:
            return 0


def _check_size(values: int, names: InputNames) -> None:
    if values > _MAX_VALUES:
        raise InvalidRequest(
            f"The results of a request may have at most {_MAX_VALUES} values (inputs x dimensions). Please send fewer "
            "inputs.",
            names.field,
        )


def _prompts(model: PoolingModel, group: InputGroup) -> AsyncGenerator[Sequence[PoolingPrompt], None]:
    if isinstance(group.source, TextsJob | PairsJob):
        return model.renderer.batch(group.source, tenant=current_tenant())
    return group.source() if callable(group.source) else _slices(group.source)


async def _slices(prompts: Sequence[PoolingPrompt]) -> AsyncGenerator[Sequence[PoolingPrompt], None]:
    for start in range(0, len(prompts), _SLICE):
        await take_turn()
        yield prompts[start : start + _SLICE]


def _requests(
    context: PoolingContext, params: PoolingParams, prompts: Sequence[PoolingPrompt], chunks: ChunkedInputs
) -> Iterator[PoolRequest]:
    """The engine's requests for some inputs: one for each chunk."""
    for prompt in prompts:
        for tokens, chunk_params in chunks.split(prompt.token_ids, params):
            yield PoolRequest(
                prompt=tokens,
                params=chunk_params,
                priority=context.priority,
                cache_salt=context.cache_salt,
                flow=context.id,
                second_text_start=prompt.second_text_start,
                second_text_end=prompt.second_text_end,
                items=prompt.items,
            )


def _name(owners: Sequence[tuple[int, InputNames]], index: int | None) -> str | None:
    """The name of the input with this index among all groups."""
    if index is None:
        return None
    start, names = next(owner for owner in reversed(owners) if owner[0] <= index)
    return names.at(index - start)
