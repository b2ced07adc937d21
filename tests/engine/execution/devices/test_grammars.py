"""Structured outputs on a GPU's device: grammars follow tokens that the host reads while later steps run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.config.options import ModelOptions
from quire.engine.client.sampling_params import SamplingParams
from tests.support.engine import Engine, random_prompt
from tests.support.models import make_model, save_model
from tests.support.tokenizer import EOS, write_tokenizer
from tests.support.triton_device import gpu_device

# Of the regular expression [a-c]{2}(xy|z)+7; without the API, whose packages a GPU machine may not have.
GRAMMAR = '{"grammars": [{"lark_grammar": "start: T0\\nT0: /[a-c]{2}(xy|z)+7/"}]}'


def constrained(seed: int = 0, **fields: Any) -> SamplingParams:
    chosen = {"max_tokens": 12, "temperature": 1.0, "seed": seed, "eos_token_ids": (EOS,), **fields}
    return SamplingParams(grammar=GRAMMAR, **chosen)


def tokens_of(engine: Engine) -> list[list[int]]:
    requests = [constrained(seed) for seed in range(2)]
    requests += [constrained(temperature=0.0, max_tokens=6), SamplingParams(max_tokens=9, temperature=0.0)]
    for i, params in enumerate(requests):
        engine.add(f"r{i}", random_prompt(i, 9), params)
    engine.run()
    return [engine.results[f"r{i}"].tokens for i in range(len(requests))]


def test_structured_outputs_are_those_of_the_host(tmp_path: Path) -> None:
    save_model(make_model("llama", num_hidden_layers=1, max_position_embeddings=128), tmp_path)
    write_tokenizer(tmp_path)
    on_host = Engine(tmp_path, model=ModelOptions(device="cpu"))
    assert tokens_of(Engine(tmp_path, device=gpu_device(), max_num_seqs=4)) == tokens_of(on_host)
