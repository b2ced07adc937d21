"""Token masks hold any set of token ids in the size of the vocabulary."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.client.protocol import AddRequest, ClientMessage
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.token_mask import has_other_token, is_token_mask, token_ids, token_mask
from quire.engine.client.transport import MessageDecoder, MessageEncoder


@given(data=st.data(), vocab=st.integers(1, 200))
def test_a_mask_has_the_ids_that_it_was_made_of(data: st.DataObject, vocab: int) -> None:
    ids = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1))
    others = data.draw(st.sets(st.integers(0, vocab - 1)))
    mask = token_mask(np.array(ids, np.int32), vocab)
    assert token_ids(mask) == sorted(set(ids))
    assert is_token_mask(mask, vocab)
    assert has_other_token(mask, others) == (not others.issuperset(ids))


def test_masks_of_other_vocabularies_are_not_valid() -> None:
    mask = token_mask(np.array([35], np.int32), 40)
    assert not is_token_mask(mask, 35)
    assert not is_token_mask(mask, 400)
    assert not is_token_mask(mask.astype(np.int64), 40)
    assert not is_token_mask(np.zeros(2, np.uint32), 40)


def test_a_request_that_allows_a_million_tokens_is_small() -> None:
    vocab = 1_000_000
    mask = token_mask(np.arange(vocab, dtype=np.int32), vocab)
    sent = AddRequest("id", np.array([1], np.int32), SamplingParams(max_tokens=1, allowed_tokens=mask))
    frames = MessageEncoder().encode(sent)
    assert sum(map(len, frames)) < vocab / 7
    received = MessageDecoder[ClientMessage](ClientMessage).decode(frames)
    assert isinstance(received, AddRequest)
    assert received.sampling_params.allowed_tokens is not None
    assert received.sampling_params.allowed_tokens.tolist() == mask.tolist()
