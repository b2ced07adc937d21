"""From the fields of a completion request to sequences that the engine can run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.config.options import LimitOptions
from quire.engine.client.origin import activity
from quire.engine.client.sampling_params import PromptTokenIds
from quire.engine.client.stream import GenerateRequest
from quire.parsing.logprobs import LogprobFormatter
from quire.parsing.structured.constraint import checked_grammar
from quire.protocol.completions import CompletionRequest
from quire.protocol.errors import InvalidRequest
from quire.rendering.prompts import Prompt
from quire.serving.beams.options import BeamOptions
from quire.serving.generation import UsageCounter
from quire.serving.models import GeneratingModel, ServerState
from quire.serving.params import plan_sequences, sequences_per_prompt
from quire.workers.tenant import current_tenant

MAX_PROMPT_LOGPROBS = 1 << 22  # entries, of about 70 bytes each
PromptInput = str | NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """A checked completion request: `n` sequences for each prompt, in the order of their choices' indices.

    Attributes:
        beams: options of the beam search; None: answers are sampled.
    """

    id: str
    created: int
    body: CompletionRequest
    model: GeneratingModel
    prompts: Sequence[Prompt]
    echoes: Sequence[str]
    requests: Sequence[GenerateRequest]
    beams: BeamOptions | None = None

    @property
    def n(self) -> int:
        """Answers for each prompt."""
        return self.body.n or 1

    @property
    def formatter(self) -> LogprobFormatter:
        """Formats log-probabilities."""
        return LogprobFormatter(self.model.renderer.tokenizer, as_ids=bool(self.body.return_tokens_as_token_ids))

    @property
    def drops_output(self) -> bool:
        """Whether only the prompt is returned. One token is generated nevertheless, and dropped."""
        return self.body.max_tokens == 0

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of a choice."""
        return self.prompts[index // self.n]

    def echo_of(self, index: int) -> str:
        """Text that precedes that of a choice, if the request asks for `echo`."""
        return self.echoes[index // self.n] if self.body.echo else ""

    def usage_counter(self) -> UsageCounter:
        """A counter of all tokens of the request."""
        return UsageCounter([len(prompt.token_ids) for prompt in self.prompts], self.n)


def count_sequences(body: CompletionRequest, limits: LimitOptions) -> int:
    """The number of sequences of a request, from its fields alone.

    Raises:
        InvalidRequest: there are no prompts, too many of them, or too many answers to each.
    """
    return len(_inputs(body, limits)) * sequences_per_prompt(body, limits)


async def prepare_completion(
    body: CompletionRequest,
    model: GeneratingModel,
    state: ServerState,
    response_id: str,
    prompt_token_ids: PromptTokenIds | None = None,
) -> PreparedCompletion:
    """Tokenize the prompts and check everything that can be checked before the request runs.

    `prompt_token_ids`: tokens to score in a single prompt.

    Raises:
        InvalidRequest: a field is not valid.
        PromptError: a prompt cannot be tokenized.
    """
    if body.suffix:
        raise InvalidRequest("`suffix`: fill-in-the-middle is not supported.", "suffix")
    sequences = plan_sequences(body, model, state, prompt_token_ids=prompt_token_ids)
    with activity("render"):
        prompts = [sequences.fit(prompt) for prompt in await _prompts(body, model, state.limits)]
    _check_prompt_logprobs(prompts, sequences.params.prompt_logprobs, sequences.n if body.stream else 1)
    grammar = await checked_grammar(body, model.grammars, model.reasoning, model.tools)
    requests = [request for prompt in prompts for request in sequences.requests(prompt, grammar)]
    echoes = [
        prompt.text
        if prompt.text is not None
        else await model.renderer.decode(prompt.token_ids, tenant=current_tenant())
        for prompt in (prompts if body.echo else ())
    ]
    return PreparedCompletion(response_id, int(time.time()), body, model, prompts, echoes, requests, sequences.beams)


def _check_prompt_logprobs(prompts: Sequence[Prompt], count: int | None, copies: int) -> None:
    """Check the number of log-probabilities that are kept until all prompts have been computed."""
    if count is None:
        return
    total = copies * (count + 1) * sum(len(prompt.token_ids) for prompt in prompts)
    if total > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"The request asks for {total} log-probabilities of prompt tokens; at most {MAX_PROMPT_LOGPROBS} are "
            "allowed. Please reduce `prompt_logprobs`, `logprobs`, or the number or length of the prompts.",
            "prompt_logprobs",
        )


def _inputs(body: CompletionRequest, limits: LimitOptions) -> Sequence[PromptInput]:
    inputs = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if not inputs:
        raise InvalidRequest("You must pass at least one prompt.", "prompt")
    if len(inputs) > limits.max_prompts:
        raise InvalidRequest(f"A request may have at most {limits.max_prompts} prompts, not {len(inputs)}.", "prompt")
    return inputs


async def _prompts(body: CompletionRequest, model: GeneratingModel, limits: LimitOptions) -> list[Prompt]:
    max_tokens = None if body.truncate_prompt_tokens is not None else model.info.max_model_len
    return [
        await model.renderer.text(
            prompt, add_special_tokens=body.add_special_tokens, max_tokens=max_tokens, tenant=current_tenant()
        )
        if isinstance(prompt, str)
        else Prompt(prompt)
        for prompt in _inputs(body, limits)
    ]
