"""EngineCore: validation of requests, aborts, end of sequences, and a loop that survives malformed messages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.config.options import ModelOptions
from quire.engine.client.errors import MalformedMessage
from quire.engine.client.protocol import AddRequest, Ping, Pong, Shutdown, StepOutput, TokensOutput
from quire.engine.client.sampling_params import PromptTokenIds, SamplingParams
from quire.engine.client.token_mask import TokenMask, token_mask
from quire.engine.core import loop as core_module
from quire.engine.core.loop import EngineCore
from quire.engine.execution.cache import OutOfCacheMemory
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.tokenizer import EOS, VOCAB_SIZE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama"), tmp_path_factory.mktemp("model"))


def mask(*tokens: int) -> TokenMask:
    return token_mask(np.array(tokens, np.int32), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("prompt", "message_part"),
    [
        (np.array([], np.int32), "non-empty"),
        (np.zeros((2, 2), np.int32), "1-D array"),
        (np.array([0.5]), "1-D array"),
        (np.array([-1], np.int32), "vocabulary"),
        (np.array([VOCAB_SIZE], np.int32), "vocabulary"),
        (np.zeros(256, np.int32), "context"),
    ],
)
def test_an_invalid_prompt_fails_only_its_request(folder: Path, prompt: Any, message_part: str) -> None:
    engine = Engine(folder)
    engine.add("good", random_prompt(1, 5), greedy(3))
    engine.core._handle(AddRequest("bad", prompt, greedy(3)))
    (rejection,) = [output for message in engine.channel.sent for output in message.outputs]
    engine.channel.sent.clear()
    assert rejection.request_id == "bad"
    assert message_part in rejection.error
    engine.run()
    assert engine.results["good"].finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "message_part"),
    [
        ({"repetition_penalty": 1e39}, "repetition_penalty"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty"),
        ({"repetition_penalty": math.nan}, "repetition_penalty"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 1e-40}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1 << 31}, "top_k"),
        ({"presence_penalty": -math.inf}, "presence_penalty"),
        ({"logprobs": -1}, "logprobs"),
        ({"bad_words": ((),)}, "empty word"),
        ({"bad_words": ((1, VOCAB_SIZE),)}, "bad_words"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "bias of token 1"),
        ({"allowed_tokens": np.zeros(1, np.uint32)}, "allowed_tokens"),
        ({"allowed_tokens": np.full(-(-VOCAB_SIZE // 32), 0xFFFFFFFF, np.uint32)}, "allowed_tokens"),
        ({"allowed_tokens": np.zeros(-(-VOCAB_SIZE // 32), np.uint32)}, "allowed_tokens"),
        ({"stop_token_ids": frozenset({1 << 70})}, "stop_token_ids"),
        (
            {
                "allowed_tokens": mask(EOS, 7),
                "min_tokens": 2,
                "eos_token_ids": (EOS,),
                "stop_token_ids": frozenset({7}),
            },
            "every allowed token",
        ),
        ({"allowed_tokens": mask(5, 6), "bad_words": ((5,), (6,))}, "every allowed token"),
        ({"bad_words": tuple((token,) for token in range(VOCAB_SIZE))}, "every allowed token"),
    ],
)
def test_invalid_params_fail_only_their_request(folder: Path, fields: dict[str, Any], message_part: str) -> None:
    engine = Engine(folder)
    engine.add("good", random_prompt(1, 5), greedy(3))
    params = SamplingParams(**{"max_tokens": 5, **fields})
    engine.core._handle(AddRequest("bad", np.array([1], np.int32), params))
    (rejection,) = [output for message in engine.channel.sent for output in message.outputs]
    engine.channel.sent.clear()
    assert rejection.request_id == "bad"
    assert message_part in rejection.error
    engine.run()
    assert engine.results["good"].finish_reason == "length"


def test_eos_tokens_outside_the_vocabulary_are_ignored(folder: Path) -> None:
    engine = Engine(folder)
    result = engine.generate([1, 2], greedy(3, min_tokens=2, eos_token_ids=(VOCAB_SIZE + 5,)))
    assert (len(result.tokens), result.finish_reason) == (3, "length")


def test_a_rejected_request_does_not_repeat_step_counters(folder: Path) -> None:
    engine = Engine(folder)
    engine.add("good", random_prompt(1, 50), greedy(30))
    engine.core.step()
    assert engine.channel.sent[-1].stats.step_tokens == 51  # 50 of the prompt, and a new one
    engine.core._handle(AddRequest("bad", np.array([], np.int32), greedy(3)))
    stats = engine.channel.sent[-1].stats
    assert (stats.step_tokens, stats.prefix_queries, stats.running) == (0, 0, 1)


def test_a_request_id_in_use_is_rejected(folder: Path) -> None:
    engine = Engine(folder)
    engine.add("same", random_prompt(1, 5), greedy(3))
    engine.core._handle(AddRequest("same", np.array([1], np.int32), greedy(3)))
    assert "in use" in engine.channel.sent[0].outputs[0].error


class ScriptedChannel:
    """A channel that receives scripted messages; a `MalformedMessage` is raised."""

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


def test_the_loop_continues_after_a_malformed_message(folder: Path) -> None:
    engine = Engine(folder)
    script = ScriptedChannel(
        MalformedMessage("invalid frames"),
        AddRequest("r", np.array([1, 2], np.int32), greedy(2)),
        MalformedMessage("invalid frames"),
        Ping(7),
        None,
        None,
        None,
        Shutdown(),
    )
    core = EngineCore(
        engine.core.scheduler,
        engine.core.executor,
        script,  # type: ignore[arg-type]
        vocab_size=VOCAB_SIZE,
    )
    core.run()
    assert Pong(7) in script.sent
    outputs = [output for message in script.sent if isinstance(message, StepOutput) for output in message.outputs]
    assert [output.finish_reason for output in outputs if isinstance(output, TokensOutput)] == [None, "length"]


def test_the_state_is_checked_once_in_each_idle_period(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "_CHECK_AFTER", 0.0)
    engine = Engine(folder)
    checks = []
    add = AddRequest("r", np.array([1, 2], np.int32), greedy(1))
    script = ScriptedChannel(
        add, None, Ping(1), None, Ping(2), None, Ping(3), None, add, None, Ping(4), None, Shutdown()
    )
    core = EngineCore(
        engine.core.scheduler,
        engine.core.executor,
        script,  # type: ignore[arg-type]
        vocab_size=VOCAB_SIZE,
    )
    monkeypatch.setattr(core, "check", lambda: checks.append(len(script.left)))
    core.run()
    assert checks == [9, 1]  # messages that were left


def test_large_server_seeds_give_different_tokens(folder: Path) -> None:
    free = SamplingParams(max_tokens=12, temperature=1.5)
    texts = {
        tuple(Engine(folder, seed=seed).generate([1, 2, 3], free).tokens) for seed in (0, 1 << 32, 1 << 33, 1 << 62)
    }
    assert len(texts) == 4


def test_an_abort_frees_the_blocks_immediately(folder: Path) -> None:
    engine = Engine(folder)
    engine.add("a", random_prompt(1, 50), greedy(50))
    engine.step()
    assert engine.blocks_used > 0
    engine.abort("a")
    assert engine.blocks_used == 0
    assert not engine.busy
    engine.abort("a")
    engine.abort("never came")


def test_requests_without_a_seed_sample_differently(folder: Path) -> None:
    engine = Engine(folder)
    free = SamplingParams(max_tokens=12, temperature=1.5)
    prompt = random_prompt(1, 5)
    texts = {tuple(engine.generate(prompt, free).tokens) for _ in range(5)}
    assert len(texts) == 5


def test_the_context_length_ends_a_sequence(folder: Path) -> None:
    engine = Engine(folder, model=ModelOptions(max_model_len=20))
    result = engine.generate(random_prompt(1, 15), greedy(100))
    assert (len(result.tokens), result.finish_reason) == (5, "length")


def test_eos_and_stop_tokens_end_a_sequence(folder: Path) -> None:
    engine = Engine(folder)
    prompt = random_prompt(2, 10)
    free = engine.generate(prompt, greedy(20)).tokens
    at = next(i for i in range(1, 20) if free[i] not in free[:i])
    eos = engine.generate(prompt, greedy(20, eos_token_ids=(free[at],)))
    assert (eos.tokens, eos.finish_reason, eos.outputs[-1].stop_reason) == (free[: at + 1], "stop", None)
    stop = engine.generate(prompt, greedy(20, stop_token_ids=frozenset({free[at]})))
    assert (stop.tokens, stop.finish_reason, stop.outputs[-1].stop_reason) == (free[: at + 1], "stop", free[at])


def test_a_small_cache_reduces_the_context_length(folder: Path) -> None:
    small = Engine(folder).info
    per_block = small.cache_bytes // small.num_blocks
    engine = Engine(folder, kv_cache_memory_bytes=5 * per_block)
    assert (engine.info.num_blocks, engine.info.max_model_len) == (5, 80)
    assert engine.model.context_len == 80
    with pytest.raises(OutOfCacheMemory, match="--max-model-len"):
        Engine(folder, model=ModelOptions(max_model_len=100), kv_cache_memory_bytes=5 * per_block)


def test_listed_tokens_are_scored_at_each_position_of_the_prompt(folder: Path) -> None:
    engine = Engine(folder, block_size=4)
    prompt = random_prompt(5, 30)
    whole = engine.generate(prompt, greedy(2, prompt_logprobs=VOCAB_SIZE)).outputs[0].prompt_logprobs
    rows = np.array([[(7 * i) % 64, i % 5, -1 if i % 2 else 9] for i in range(30 - 1 - 3)], np.int32)
    asked = PromptTokenIds(3, 3, rows.reshape(-1))
    entries = engine.generate(prompt, greedy(2, prompt_logprobs=0, prompt_token_ids=asked)).outputs[0].prompt_logprobs
    assert whole is not None
    assert entries is not None
    assert [entry and len(entry.token_ids) for entry in entries[:4]] == [None, 1, 1, 1]
    for row, entry, every in zip(rows.tolist(), entries[4:], whole[4:], strict=True):
        assert entry is not None
        assert every is not None
        expected = dict(zip(every.token_ids, every.logprobs, strict=True))
        listed = [token for token in row if token >= 0]
        assert entry.token_ids[1:] == listed
        assert entry.logprobs[1:] == pytest.approx([expected[token] for token in listed], abs=1e-5)
    wrong = PromptTokenIds(0, 3, rows.reshape(-1))
    refused = engine.generate(prompt, greedy(2, prompt_logprobs=0, prompt_token_ids=wrong))
    assert "rows" in (refused.error or "")


def test_prompt_logprobs_do_not_read_the_prefix_cache(folder: Path) -> None:
    engine = Engine(folder, block_size=4)
    prompt = random_prompt(5, 30)
    engine.generate(prompt, greedy(2))
    result = engine.generate(prompt, greedy(2, prompt_logprobs=1))
    assert result.outputs[0].cached_tokens == 0
    assert len(result.outputs[0].prompt_logprobs or ()) == 30
    assert all(output.prompt_logprobs is None for output in result.outputs[1:])


def test_steps_have_numbers_and_times(folder: Path) -> None:
    engine = Engine(folder)
    add = AddRequest("r", np.array([1, 2], np.int32), greedy(3))
    script = ScriptedChannel(add, None, None, None, None, Shutdown())
    core = EngineCore(
        engine.core.scheduler,
        engine.core.executor,
        script,  # type: ignore[arg-type]
        vocab_size=VOCAB_SIZE,
    )
    core.run()
    steps = [message.stats for message in script.sent if isinstance(message, StepOutput)]
    assert [stats.step for stats in steps] == [1, 2, 3]
    ends = [stats.ended_at for stats in steps]
    begins = [stats.ended_at - stats.step_seconds for stats in steps]
    assert sorted([*begins, *ends]) == [time for pair in zip(begins, ends, strict=True) for time in pair]
