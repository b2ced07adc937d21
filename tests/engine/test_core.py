"""The core's loop: what it refuses, and that nothing kills it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.config.options import ModelOptions
from quire.engine.core import EngineCore
from quire.engine.execution.cache import OutOfCacheMemory
from quire.engine.wire.errors import MalformedMessage
from quire.engine.wire.protocol import AddRequest, Ping, Pong, SamplingParams, Shutdown, StepOutput
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.tokenizer import VOCAB_SIZE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama"), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        (np.array([], np.int32), "non-empty"),
        (np.zeros((2, 2), np.int32), "non-empty"),
        (np.array([0.5]), "non-empty"),
        (np.array([-1], np.int32), "vocabulary"),
        (np.array([VOCAB_SIZE], np.int32), "vocabulary"),
        (np.zeros(256, np.int32), "context"),
    ],
)
def test_an_impossible_request_fails_alone(folder: Path, prompt: Any, complaint: str) -> None:
    engine = Engine(folder)
    engine.add("good", random_prompt(1, 5), greedy(3))
    engine.core._handle(AddRequest("bad", prompt, greedy(3)))
    (refusal,) = [output for message in engine.channel.sent for output in message.outputs]
    engine.channel.sent.clear()
    assert refusal.request_id == "bad"
    assert refusal.finish_reason == "error"
    assert complaint in refusal.error
    engine.run()
    assert engine.results["good"].finish_reason == "length"


def test_an_id_in_use_is_refused(folder: Path) -> None:
    engine = Engine(folder)
    engine.add("same", random_prompt(1, 5), greedy(3))
    engine.core._handle(AddRequest("same", np.array([1], np.int32), greedy(3)))
    assert "in use" in engine.channel.sent[0].outputs[0].error


class Script:
    """A channel whose messages, and malformed ones, are known beforehand."""

    def __init__(self, *messages: Any) -> None:
        self.left = list(messages)
        self.sent: list[Any] = []

    def receive(self, _: float | None) -> Any:
        message = self.left.pop(0) if self.left else None
        if isinstance(message, MalformedMessage):
            raise message
        return message

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_a_malformed_message_does_not_kill_the_loop(folder: Path) -> None:
    engine = Engine(folder)
    script = Script(
        MalformedMessage("nonsense"),
        AddRequest("r", np.array([1, 2], np.int32), greedy(2)),
        MalformedMessage("nonsense"),
        Ping(7),
        None,
        None,
        None,
        Shutdown(),
    )
    core = EngineCore(
        engine.core._scheduler,
        engine.core._execute,
        script,  # type: ignore[arg-type]
        vocab_size=VOCAB_SIZE,
    )
    core.run()
    assert Pong(7) in script.sent
    tokens = [output for message in script.sent if isinstance(message, StepOutput) for output in message.outputs]
    assert [output.finish_reason for output in tokens] == [None, "length"]


def test_aborted_requests_free_their_blocks_at_once(folder: Path) -> None:
    engine = Engine(folder)
    engine.add("a", random_prompt(1, 50), greedy(50))
    engine.step()
    assert engine.blocks_used > 0
    engine.abort("a")
    assert engine.blocks_used == 0
    assert not engine.busy
    engine.abort("a")
    engine.abort("never came")


def test_requests_without_a_seed_draw_differently(folder: Path) -> None:
    engine = Engine(folder)
    free = SamplingParams(max_tokens=12, temperature=1.5)
    prompt = random_prompt(1, 5)
    texts = {tuple(engine.generate(prompt, free).tokens) for _ in range(5)}
    assert len(texts) == 5


def test_the_context_ends_a_sequence(folder: Path) -> None:
    engine = Engine(folder, model=ModelOptions(max_model_len=20))
    result = engine.generate(random_prompt(1, 15), greedy(100))
    assert (len(result.tokens), result.finish_reason) == (5, "length")


def test_end_tokens_end_a_sequence_and_stop_tokens_are_named(folder: Path) -> None:
    engine = Engine(folder)
    prompt = random_prompt(2, 10)
    free = engine.generate(prompt, greedy(20)).tokens
    at = next(i for i in range(1, 20) if free[i] not in free[:i])
    eos = engine.generate(prompt, greedy(20, eos_token_ids=(free[at],)))
    assert (eos.tokens, eos.finish_reason, eos.outputs[-1].stop_reason) == (free[: at + 1], "stop", None)
    stop = engine.generate(prompt, greedy(20, stop_token_ids=(free[at],)))
    assert (stop.tokens, stop.finish_reason, stop.outputs[-1].stop_reason) == (free[: at + 1], "stop", free[at])


def test_a_cache_smaller_than_the_context_shortens_it(folder: Path) -> None:
    small = Engine(folder).info
    per_block = small.cache_bytes // small.num_blocks
    engine = Engine(folder, kv_cache_memory=5 * per_block)
    assert (engine.info.num_blocks, engine.info.max_model_len) == (5, 80)
    with pytest.raises(OutOfCacheMemory, match="--max-model-len"):
        Engine(folder, model=ModelOptions(max_model_len=100), kv_cache_memory=5 * per_block)


def test_prompt_logprobs_skip_the_prefix_cache(folder: Path) -> None:
    engine = Engine(folder, block_size=4)
    prompt = random_prompt(5, 30)
    engine.generate(prompt, greedy(2))
    result = engine.generate(prompt, greedy(2, prompt_logprobs=1))
    assert result.outputs[0].cached_tokens == 0
    assert len(result.outputs[0].prompt_logprobs or ()) == 30
    assert all(output.prompt_logprobs is None for output in result.outputs[1:])
