"""Sampling defaults and end-of-sequence tokens from model files."""

from __future__ import annotations

import json
from pathlib import Path

from quire.engine.client.protocol import AddRequest
from quire.rendering.tokenizer import Tokenizer
from quire.serving.defaults import read_defaults
from tests.support.fake_core import FakeCore
from tests.support.server import running_server
from tests.support.tokenizer import EOS, VOCAB_SIZE, write_tokenizer

PATH = "/v1/completions"


def test_defaults_beyond_the_bounds_of_requests_are_left_out(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    numbers = {"temperature": -1, "top_p": 0.9, "top_k": "many", "repetition_penalty": 1e39, "max_new_tokens": 0}
    numbers |= {"eos_token_id": [1, -1, "x", None]}
    (tmp_path / "generation_config.json").write_text(json.dumps(numbers))
    defaults = read_defaults(tmp_path, tokenizer, "auto")
    assert (defaults.numbers.temperature, defaults.numbers.top_p, defaults.numbers.top_k) == (1.0, 0.9, 0)
    assert (defaults.numbers.repetition_penalty, defaults.max_tokens) == (1.0, None)
    assert defaults.eos_token_ids == (1, EOS)


def test_the_operator_may_replace_the_defaults(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.2, "top_p": 0.9}))
    defaults = read_defaults(tmp_path, tokenizer, "auto", {"temperature": 0.7, "max_new_tokens": 9})
    assert (defaults.numbers.temperature, defaults.numbers.top_p, defaults.max_tokens) == (0.7, 0.9, 9)
    defaults = read_defaults(tmp_path, tokenizer, "none", {"temperature": 0.7})
    assert (defaults.numbers.temperature, defaults.numbers.top_p) == (0.7, 1.0)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert 5 in read_defaults(tmp_path, tokenizer, "none").eos_token_ids
    replaced = read_defaults(tmp_path, tokenizer, "none", {}, {"eos_token_id": [6, 7]}).eos_token_ids
    assert {6, 7} <= set(replaced)
    assert 5 not in replaced


async def test_ends_that_the_model_does_not_have_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, VOCAB_SIZE]}))
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        await server.post(PATH, {"prompt": "hi"})
    (message,) = [message for message in core.received if isinstance(message, AddRequest)]
    assert message.sampling_params.eos_token_ids == (5, EOS)
