"""Sampling fields are declared once; what reads the declarations agrees on them."""

from __future__ import annotations

import pytest

from quire.engine.client.sampling_params import GREEDY, NUMBERS, SamplingParams
from quire.protocol.chat import ChatRequest
from quire.protocol.completions import CompletionRequest
from quire.protocol.generate import GenerateSamplingParams
from quire.protocol.responses import ResponsesRequest
from quire.protocol.sampling import CommonSamplingFields, ConstraintFields, NumberFields
from quire.protocol.speech_to_text import TranscriptionRequest, TranslationRequest
from quire.serving.params import numbers_of

# What beam search applies, or what has no part in the choice of a token.
_WITH_BEAMS = (
    {"model", "stream", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"}
    | {"priority", "cache_salt", "timeout", "vllm_xargs"}
)  # fmt: skip


def test_requests_and_the_engine_have_the_same_numbers() -> None:
    assert NumberFields.model_fields.keys() == NUMBERS.keys()
    endpoints = (CompletionRequest, ChatRequest, ResponsesRequest, GenerateSamplingParams)
    for model in (*endpoints, TranscriptionRequest, TranslationRequest):
        assert issubclass(model, NumberFields), model


def test_numbers_have_no_effect_at_their_defaults() -> None:
    params = SamplingParams(max_tokens=1)
    for name, number in NUMBERS.items():
        assert number.low <= getattr(params, name) <= number.high, name
        assert number.keeps_ranking or getattr(GREEDY, name) == getattr(params, name), name


@pytest.mark.parametrize("name", NUMBERS)
def test_the_numbers_of_a_request_replace_those_of_the_model(name: str) -> None:
    defaults = SamplingParams(max_tokens=1, temperature=0.5, top_p=0.5, top_k=3, min_p=0.5, repetition_penalty=1.5)
    body = TranscriptionRequest.model_validate({"temperature": 0.5, name: 1})
    assert getattr(numbers_of(body, defaults), name) == 1


def test_beam_search_refuses_every_other_sampling_field() -> None:
    """A field of `CommonSamplingFields` that beam search neither applies nor refuses would silently have no effect."""
    known = {*NUMBERS, *ConstraintFields.model_fields, *_WITH_BEAMS, "seed"}
    assert CommonSamplingFields.model_fields.keys() == known
