"""Structured outputs on a GPU's device: grammars follow tokens that the host reads while later steps run."""

from __future__ import annotations

from pathlib import Path

from quire.engine.wire.sampling_params import SamplingParams
from tests.engine.test_structured_outputs import constrained, grammar_for
from tests.support.engine import Engine, random_prompt
from tests.support.models import make_model, save_model
from tests.support.tokenizer import write_tokenizer
from tests.support.triton_device import gpu_device


def _tokens(engine: Engine) -> list[list[int]]:
    grammar = grammar_for(regex="[a-c]{2}(xy|z)+7")
    requests = [constrained(grammar, seed, max_tokens=12) for seed in range(2)]
    requests += [constrained(grammar, temperature=0.0, max_tokens=6), SamplingParams(max_tokens=9, temperature=0.0)]
    for i, params in enumerate(requests):
        engine.add(f"r{i}", random_prompt(i, 9), params)
    engine.run()
    return [engine.results[f"r{i}"].tokens for i in range(len(requests))]


def test_structured_outputs_are_those_of_the_host(tmp_path: Path) -> None:
    save_model(make_model("llama", max_position_embeddings=128), tmp_path)
    write_tokenizer(tmp_path)
    assert _tokens(Engine(tmp_path, device=gpu_device())) == _tokens(Engine(tmp_path))
