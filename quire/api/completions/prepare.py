"""A completion request from its fields to sequences that can run: what completions and generate have in common."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.api.answers.logprobs import LogprobFormatter
from quire.api.answers.structured.constraint import checked_grammar
from quire.api.http.errors import InvalidRequest
from quire.api.protocol.completions import CompletionRequest
from quire.api.serving.generation import Tally
from quire.api.serving.models import ServedModel, Services
from quire.api.serving.params import room_for_output, sampling_params, sequences, truncated
from quire.engine.wire.protocol import SamplingParams
from quire.engine.wire.stream import GenerateRequest
from quire.multimodal.renderer import Prompt


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A checked request: its sequences in order of their choices' indices, `n` for each prompt."""

    id: str
    created: int
    body: CompletionRequest
    model: ServedModel
    prompts: Sequence[Prompt]
    echoes: Sequence[str]
    requests: Sequence[GenerateRequest]

    @property
    def n(self) -> int:
        """Answers for each prompt."""
        return self.body.n or 1

    @property
    def formatter(self) -> LogprobFormatter:
        """Writes log-probabilities."""
        return LogprobFormatter(self.model.renderer.tokenizer, as_ids=bool(self.body.return_tokens_as_token_ids))

    @property
    def drops_output(self) -> bool:
        """Only the prompt is wanted; the one token that is generated behind it is not shown."""
        return self.body.max_tokens == 0

    def prompt_of(self, index: int) -> Prompt:
        """What a choice goes on with."""
        return self.prompts[index // self.n]

    def echo_of(self, index: int) -> str:
        """What stands before a choice's text."""
        return self.echoes[index // self.n] if self.body.echo else ""

    def tally(self) -> Tally:
        """Counts all tokens."""
        return Tally([len(prompt.token_ids) for prompt in self.prompts], self.n)


async def prepare_completion(
    body: CompletionRequest, model: ServedModel, services: Services, call_id: str
) -> CompletionCall:
    """Tokenise the prompts and check all that can be checked before they run.

    Raises:
        InvalidRequest: a field that cannot be granted.
        PromptError: a prompt that is none.
    """
    if body.suffix:
        raise InvalidRequest("`suffix` is not supported: models here continue texts, they do not fill gaps.", "suffix")
    prompts = [truncated(prompt, body, model) for prompt in await _prompts(body, model, services)]
    requests: list[GenerateRequest] = []
    grammar = await checked_grammar(body, model.grammars, model.reasoning, model.tools)
    for prompt in prompts:
        requests += sequences(body, prompt, _params(body, model, services, prompt, grammar), services.limits)
    echoes = [
        prompt.text if prompt.text is not None else await model.renderer.decode(prompt.token_ids.tolist())
        for prompt in (prompts if body.echo else ())
    ]
    return CompletionCall(call_id, int(time.time()), body, model, prompts, echoes, requests)


def _params(
    body: CompletionRequest, model: ServedModel, services: Services, prompt: Prompt, grammar: str
) -> SamplingParams:
    max_tokens = room_for_output(prompt, model, 1 if body.max_tokens == 0 else body.max_tokens)
    if body.echo and body.logprobs is not None:
        wanted = body.logprobs if body.prompt_logprobs is None else max(body.logprobs, body.prompt_logprobs)
        body = body.model_copy(update={"prompt_logprobs": wanted})
    return sampling_params(body, model, services.limits, max_tokens=max_tokens, logprobs=body.logprobs, grammar=grammar)


async def _prompts(body: CompletionRequest, model: ServedModel, services: Services) -> list[Prompt]:
    given = body.prompt
    several = given if isinstance(given, list) and not (given and isinstance(given[0], int)) else [given]
    if not several:
        raise InvalidRequest("You must pass at least one prompt.", "prompt")
    if len(several) > services.limits.max_prompts:
        raise InvalidRequest(
            f"A request may have at most {services.limits.max_prompts} prompts, not {len(several)}.", "prompt"
        )
    room = None if body.truncate_prompt_tokens is not None else model.info.max_model_len
    return [
        await model.renderer.text(one, add_special_tokens=body.add_special_tokens, room=room)
        if isinstance(one, str)
        else Prompt(np.array(one, np.int32))
        for one in several
    ]
