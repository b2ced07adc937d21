"""The core's grammars: who waits for what, and what is held."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.engine.client.grammar import GrammarError, GrammarTokens
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.sampling import compiler as compiler_module
from quire.engine.execution.sampling import grammar as grammar_module
from quire.engine.execution.sampling.compiler import GrammarCompiler
from quire.kernels.sampling import mask_words
from tests.support.tokenizer import EOS, VOCAB_SIZE, byte_tokenizer, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    return folder


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that are compiled."""
    seen: list[str] = []
    matcher = GrammarTokens.matcher

    def recording(self: GrammarTokens, grammar: str) -> Any:
        seen.append(grammar)
        return matcher(self, grammar)

    monkeypatch.setattr(GrammarTokens, "matcher", recording)
    return seen


@pytest.fixture
def compiler(folder: Path) -> Iterator[Callable[..., GrammarCompiler]]:
    made: list[GrammarCompiler] = []

    def make(capacity: int, idle_capacity: int = 0) -> GrammarCompiler:
        made.append(GrammarCompiler(folder, VOCAB_SIZE, capacity, idle_capacity))
        return made[-1]

    yield make
    for each in made:
        each.close()


def asks(text: str, size: int = 1000) -> SamplingParams:
    """Parameters of a request for one text."""
    grammar = json.dumps({"grammars": [{"lark_grammar": f"start: {json.dumps(text)}"}]})
    return SamplingParams(max_tokens=5, grammar=grammar, grammar_size=size, eos_token_ids=(EOS,))


def done(*futures: Future[Any]) -> bool:
    return not wait(futures, timeout=60).not_done


def test_a_grammar_in_use_is_held_and_others_wait_for_room(
    compiler: Callable[..., GrammarCompiler], compiled: list[str]
) -> None:
    grammars = compiler(2500)
    first, second = grammars.prepare("1", asks("a")), grammars.prepare("2", asks("b"))
    assert done(first, second)
    third = grammars.prepare("3", asks("c"))
    grammars.advance()
    assert not third.done()
    assert len(compiled) == 2
    grammars.release("1")
    assert done(third)
    assert grammars.initial_state(asks("b")) is not None
    assert done(grammars.prepare("4", asks("b")))
    assert len(compiled) == 3
    grammars.release("3")
    assert done(grammars.prepare("5", asks("a")))  # which was not kept, as there is no room for idle ones
    assert len(compiled) == 4


def test_the_state_of_a_sequence_never_compiles(compiler: Callable[..., GrammarCompiler], compiled: list[str]) -> None:
    grammars = compiler(1)
    for name in "abc":
        assert done(grammars.prepare(name, asks(name)))
        before = len(compiled)
        state = grammars.initial_state(asks(name))
        mask = np.zeros(mask_words(VOCAB_SIZE), np.uint32)
        assert state is not None
        state.advance([], mask)
        assert state.error is None
        assert sum(int(word).bit_count() for word in mask) == 1
        assert len(compiled) == before
        grammars.release(name)
    assert len(compiled) == 3


def test_a_grammar_that_is_used_again_is_not_compiled_again(
    compiler: Callable[..., GrammarCompiler], compiled: list[str]
) -> None:
    grammars = compiler(10_000, 2500)
    for name in "aaabbaacab":
        assert done(grammars.prepare("request", asks(name)))
        grammars.release("request")
    assert [json.loads(text)["grammars"][0]["lark_grammar"][-2] for text in compiled] == ["a", "b", "c", "b"]


def test_a_grammar_that_grew_or_failed_is_not_kept(
    compiler: Callable[..., GrammarCompiler], compiled: list[str]
) -> None:
    grammars = compiler(10_000, 100_000)
    for fault in ("tokens", "failed"):
        assert done(grammars.prepare("request", asks("a")))
        state = grammars.initial_state(asks("a"))
        assert state is not None
        setattr(state._usage, fault, 1000)
        grammars.release("request")
    assert done(grammars.prepare("request", asks("a")))
    assert len(compiled) == 3


def test_a_request_that_left_while_it_waited_is_not_compiled(
    compiler: Callable[..., GrammarCompiler], compiled: list[str]
) -> None:
    grammars = compiler(1500)
    assert done(grammars.prepare("1", asks("a")))
    grammars.prepare("2", asks("b"))
    grammars.release("2")
    grammars.release("1")
    assert done(grammars.prepare("3", asks("c")))
    assert len(compiled) == 2


def test_an_invalid_grammar_fails_its_own_request(compiler: Callable[..., GrammarCompiler]) -> None:
    grammars = compiler(10_000)
    bad = SamplingParams(max_tokens=5, grammar="{", eos_token_ids=(EOS,))
    with pytest.raises(GrammarError):
        grammars.prepare("1", bad).result(60)
    grammars.release("1")
    assert done(grammars.prepare("2", asks("a")))


def test_stuck_grammars_block_neither_others_nor_the_end(
    compiler: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = threading.Event()
    matcher = GrammarTokens.matcher

    def blocking(self: GrammarTokens, grammar: str) -> Any:
        if "stuck" in grammar:
            stuck.wait(120)
        return matcher(self, grammar)

    monkeypatch.setattr(GrammarTokens, "matcher", blocking)
    monkeypatch.setattr(compiler_module, "_OVERDUE", 0.0)
    monkeypatch.setattr(compiler_module, "_JOIN", 0.01)
    grammars = compiler(1 << 30)
    blocked = [grammars.prepare(f"stuck {number}", asks(f"stuck {number}")) for number in range(3)]
    grammars.advance()
    grammars.advance()
    for future in blocked:
        with pytest.raises(GrammarError, match="took more than"):
            future.result(0)
    monkeypatch.setattr(compiler_module, "_OVERDUE", 120.0)
    assert done(grammars.prepare("fine", asks("fine")))
    grammars.close()
    stuck.set()


def test_a_sequence_whose_masks_take_too_long_ends(
    compiler: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of ways to read this text grows with the square of its length."""
    monkeypatch.setattr(grammar_module, "_AT_ONCE", 0.05)
    grammar = json.dumps({"grammars": [{"lark_grammar": 'start: e\ne: e e | "a" | "b" | e "c" e'}]})
    params = SamplingParams(max_tokens=5, grammar=grammar, eos_token_ids=(EOS,))
    grammars = compiler(1 << 30)
    assert done(grammars.prepare("1", params))
    state = grammars.initial_state(params)
    assert state is not None
    mask = np.zeros(mask_words(VOCAB_SIZE), np.uint32)
    tokens: list[int] = []
    for count in range(1000):
        state.advance(tokens, mask)
        if state.error is not None:
            break
        tokens = byte_tokenizer().encode("abc"[count % 2]).ids
    assert state.error is not None
    assert state.error.invalid
    assert "10 ms for each token" in state.error.message
    assert (mask == 0xFFFFFFFF).all()
