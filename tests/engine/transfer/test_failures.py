"""Whatever becomes of a transfer: no block leaks, nothing waits forever, and a request fails or is computed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from quire.config.options import ModelOptions
from quire.engine.client.kv_transfer import RemoteBlocks
from quire.engine.client.protocol import ResetCaches, RunCommand, Sleep
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.process import free_port
from tests.support.transfer import Pair, held_blocks, pair_of, step, transfer_config

PROMPT = random_prompt(1, 60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama", num_hidden_layers=2), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    engine = Engine(folder, block_size=4)
    try:
        return engine.generate(PROMPT, greedy(8)).tokens
    finally:
        engine.core.close()


@pytest.fixture
def pair(folder: Path) -> Iterator[Pair]:
    with pair_of(folder) as engines:
        yield engines


def ask(pair: Pair, name: str, remote: RemoteBlocks) -> None:
    pair.decoder.add(name, PROMPT, greedy(8), remote=remote)


def nobody(port: int) -> RemoteBlocks:
    return RemoteBlocks(engine_id="x", host="127.0.0.1", port=port, request_id="x", num_tokens=len(PROMPT))


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_prefiller_that_is_not_there(folder: Path, expected: list[int], policy: str) -> None:
    with pair_of(folder, policy=policy) as pair:
        ask(pair, "a", nobody(free_port()))
        pair.run()
        result = pair.decoder.results["a"]
        if policy == "recompute":
            assert (result.error, result.tokens) == (None, expected)
        else:
            assert result.tokens == []
            assert not result.is_refused
            assert (result.error or "").startswith("The KV blocks of the prompt could not be read from the server that")
        assert pair.decoder.blocks_used == 0


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_blocks_that_have_expired(folder: Path, expected: list[int], policy: str) -> None:
    with pair_of(folder, policy=policy, extra={"abort_request_timeout": 0.001}) as pair:
        remote = pair.prefill("a", PROMPT)
        while held_blocks(pair.prefiller):
            pair.turn()
        pair.prefiller.core._handle(RunCommand(1, ResetCaches(prefixes=True)))  # nor are they in the prefix cache
        ask(pair, "a", remote)
        pair.run()
        result = pair.decoder.results["a"]
        assert (result.tokens == expected) == (policy == "recompute")
        assert (result.error is None) == (policy == "recompute")


def test_a_prefiller_that_does_not_answer(folder: Path) -> None:
    with pair_of(folder, extra={"load_timeout": 0.05}) as pair:
        ask(pair, "a", pair.prefill("a", PROMPT))
        while pair.decoder.busy:
            step(pair.decoder)  # the prefiller is not
        assert "0.05 s (load_timeout)" in (pair.decoder.results["a"].error or "")
        assert pair.decoder.blocks_used == 0
        pair.wait_until_released()


def test_a_request_that_is_aborted_twice_while_its_blocks_come(pair: Pair) -> None:
    ask(pair, "a", pair.prefill("a", PROMPT))
    pair.decoder.core.step()
    assert pair.decoder.core.is_loading
    assert pair.decoder.blocks_used == 14
    for _ in range(2):
        pair.decoder.abort("a")
        assert pair.decoder.blocks_used == 0
    assert not pair.decoder.busy
    pair.wait_until_released()


def test_a_request_that_is_aborted_before_its_blocks_are_asked_for(pair: Pair) -> None:
    ask(pair, "a", pair.prefill("a", PROMPT))
    pair.decoder.abort("a")
    pair.wait_until_released()


def test_blocks_that_the_decoder_has_are_not_read(pair: Pair, expected: list[int]) -> None:
    pair.decoder.generate(PROMPT, greedy(1))
    ask(pair, "a", pair.prefill("a", PROMPT))
    pair.run()
    result = pair.decoder.results["a"]
    assert (result.tokens, result.outputs[-1].loaded_tokens) == (expected, 0)
    pair.wait_until_released()


def test_others_run_while_a_request_waits_for_blocks(folder: Path, expected: list[int]) -> None:
    with pair_of(folder, extra={"load_timeout": 600}) as pair:
        ask(pair, "a", pair.prefill("a", PROMPT))
        pair.decoder.add("other", random_prompt(2, 9), greedy(5))
        while "other" not in {name for name, result in pair.decoder.results.items() if result.finish_reason}:
            step(pair.decoder)  # the prefiller is not
        assert pair.decoder.core.is_loading
        pair.run()
        assert pair.decoder.results["a"].tokens == expected


def test_a_request_waits_in_the_queue_until_there_is_room(folder: Path) -> None:
    """It is not computed instead, though it could be."""
    model = ModelOptions(max_model_len=80)
    with pair_of(folder, model=model) as roomy:
        memory = 24 * roomy.decoder.block_bytes
    with pair_of(folder, model=model, kv_cache_memory_bytes=memory, extra={"held_share": 0.9}) as pair:
        remote = pair.prefill("a", PROMPT)
        pair.decoder.add("long", random_prompt(3, 50), greedy(20))
        pair.decoder.step()
        ask(pair, "a", remote)
        pair.run()
        assert pair.decoder.results["a"].outputs[-1].loaded_tokens == 56


def test_a_reset_while_blocks_come_lets_the_request_be_computed(pair: Pair, expected: list[int]) -> None:
    ask(pair, "a", pair.prefill("a", PROMPT))
    pair.decoder.core.step()
    pair.decoder.core._handle(RunCommand(1, ResetCaches(prefixes=True)))
    pair.run()
    assert pair.decoder.results["a"].tokens == expected


def test_a_prefiller_that_sleeps_keeps_nothing(folder: Path) -> None:
    with pair_of(folder, enable_sleep_mode=True) as pair:
        remote = pair.prefill("a", PROMPT)
        pair.prefiller.core._handle(Sleep(1))
        assert held_blocks(pair.prefiller) == 0
        ask(pair, "a", remote)
        while pair.decoder.busy:
            pair.prefiller.core.take_loaded()
            step(pair.decoder)
        assert "never had them" in (pair.decoder.results["a"].error or "")


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", None])
def test_an_engine_refuses_what_is_not_its_role(folder: Path, role: str | None) -> None:
    engine = Engine(folder, kv_transfer_config={} if role is None else transfer_config(role))
    engine.add("kept", PROMPT, greedy(1), is_held=True)
    engine.add("read", PROMPT, greedy(1), remote=nobody(1))
    engine.core.close()
    refused = {name for name, result in engine.results.items() if result.is_refused}
    assert refused == {"kept", "read"} - {"kv_producer": {"kept"}, "kv_consumer": {"read"}}.get(role or "", set())


def test_damaged_blocks_are_noticed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(pair, "a", pair.prefill("a", PROMPT))
    numbers = itertools.count()
    monkeypatch.setattr("quire.engine.transfer.wire.checksum", lambda *_: b"%d" % next(numbers))
    pair.run()
    assert "the checksum of a block is another one" in (pair.decoder.results["a"].error or "")
    assert pair.decoder.blocks_used == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_size": 8}, "the block size is 4 at the decoder and 8 at the prefiller"),
        (
            {"kv_cache_dtype": "int8"},
            "the data type of the KV cache is float32 at the decoder and int8 at the prefiller",
        ),
        ({"prefix_caching_hash_algo": "xxhash"}, "the hash function of blocks is sha256 at the decoder and xxhash at"),
        ({"model": ModelOptions(dtype="bfloat16")}, "the data type is float32 at the decoder and bfloat16 at the"),
        ({"weights": 1}, "the digest of the weights is "),
    ],
)
def test_engines_that_differ_say_in_what(folder: Path, tmp_path: Path, changes: dict[str, object], named: str) -> None:
    options = {"block_size": 4, **changes}
    other = save_model(make_model("llama", num_hidden_layers=2, seed=1), tmp_path) if "weights" in changes else folder
    options.pop("weights", None)
    config = transfer_config()
    prefiller = Engine(other, kv_transfer_config=config, **options)  # type: ignore[arg-type]
    decoder = Engine(folder, block_size=4, kv_transfer_config=config)
    pair = Pair(prefiller, decoder)
    try:
        ask(pair, "a", pair.prefill("a", PROMPT))
        pair.run()
        assert named in (decoder.results["a"].error or "")
    finally:
        prefiller.core.close()
        decoder.core.close()


@pytest.mark.parametrize("transfers", [12, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_random_ends_of_either_side(folder: Path, policy: str, transfers: int) -> None:
    """Either engine ends with its connections and starts again; requests are aborted, caches reset, ids forged."""
    choices = random.Random(transfers)
    prompts = [random_prompt(10 + index, 30 + 5 * index) for index in range(6)]
    one = Engine(folder, block_size=4)
    tokens = {index: one.generate(prompt, greedy(6)).tokens for index, prompt in enumerate(prompts)}
    one.core.close()
    config = transfer_config(policy=policy, load_timeout=5.0)
    engines = [Engine(folder, block_size=4, kv_transfer_config=config) for _ in range(2)]
    pair = Pair(*engines)
    asked: dict[str, int] = {}
    computed = 0
    try:
        for number in range(transfers):
            name, index = f"{number}", choices.randrange(len(prompts))
            remote = pair.prefill(name, prompts[index])
            if choices.random() < 0.1:
                remote = msgspec.structs.replace(remote, request_id="forged")
            pair.decoder.add(name, prompts[index], greedy(6), remote=remote)
            asked[name] = index
            for _ in range(choices.randrange(4)):
                pair.turn()
            match choices.choice(("prefiller", "decoder", "abort", "reset", "run", "run", "run")):
                case "prefiller":
                    pair.prefiller.core.close()
                    pair.prefiller = Engine(folder, block_size=4, kv_transfer_config=config)
                case "decoder":
                    pair.decoder.core.close()
                    pair.decoder = Engine(folder, block_size=4, kv_transfer_config=config)
                case "abort":
                    pair.decoder.abort(name)
                    del pair.decoder.results[name]
                case "reset":
                    engine = choices.choice((pair.prefiller, pair.decoder))
                    engine.core._handle(RunCommand(number, ResetCaches(prefixes=True)))
                case _:
                    pair.run()
            for ended in [name for name, result in pair.decoder.results.items() if result.finish_reason]:
                result = pair.decoder.results.pop(ended)
                if result.error is None:
                    assert result.tokens == tokens[asked[ended]]
                    computed += 1
                else:
                    assert policy == "fail"
        pair.run()
        # What a dead decoder would have read, and its successor does not know of, is kept until it expires.
        pair.prefiller.core._handle(RunCommand(transfers, ResetCaches(prefixes=True)))
        assert pair.prefiller.blocks_used == pair.decoder.blocks_used == 0
        assert computed > transfers // 4
    finally:
        pair.prefiller.core.close()
        pair.decoder.core.close()
