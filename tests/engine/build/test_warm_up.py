"""The steps before an engine is ready: requests need no variant of a kernel that these did not compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.config.options import ModelOptions
from quire.engine.build import warm_up
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.token_mask import token_mask
from quire.engine.execution.runner import Computed, ModelRunner
from quire.engine.scheduling.plan import ScheduledSequence
from quire.kernels import gpu
from quire.multimodal.audio.items import make_item
from tests.support import triton_interpreter
from tests.support.audio_models import make_audio_model, noise, prompt_with, save_audio_model
from tests.support.ctc import make_ctc, save_ctc
from tests.support.encoders import tiny_embedder
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.triton_device import InterpretedDevice
from tests.support.triton_variants import differences, recorded_variants
from tests.support.whisper import ENGLISH, START, TRANSCRIBE, make_whisper, save_whisper
from tests.support.whisper import item as whisper_item

triton_interpreter.prepare()

pytestmark = pytest.mark.skipif(not gpu.is_interpreted(), reason="the interpreter's calls are recorded")
SMALL: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 20, "block_size": 8}
PARAMS = [
    SamplingParams(max_tokens=4, seed=1, top_k=5, top_p=0.8, logprobs=3),
    SamplingParams(max_tokens=3, seed=2, min_p=0.2, frequency_penalty=0.5, min_tokens=2, eos_token_ids=(7,)),
    greedy(5, logit_bias={3: 2.0, 4: -1.0}, logprobs=0),
    greedy(3, repetition_penalty=1.2),
    SamplingParams(max_tokens=2, seed=3, top_p=0.5, presence_penalty=0.3, logprobs=20),
    greedy(2, prompt_logprobs=3),
    greedy(4, bad_words=((3, 4),)),
]
LENGTHS = (1, 5, 17, 2, 300, 33, 16)  # of prompts; decode attention divides more than 256 positions


def save(case: str, folder: Path) -> Path:
    layers = 2 if case == "gemma2" else 1  # every other layer of gemma2 has a window
    return save_model(make_model(case, num_hidden_layers=layers, max_position_embeddings=512), folder)


def run_requests(engine: Engine) -> None:
    """Requests of all kinds, alone and beside others."""
    allowed = token_mask(np.arange(50, dtype=np.int32), engine.info.vocab_size)
    engine.add("allowed", [1, 2, 3], greedy(3, allowed_tokens=allowed, frequency_penalty=0.1))
    for index, (params, length) in enumerate(zip(PARAMS, LENGTHS, strict=True)):
        engine.add(f"r{index}", random_prompt(index, length), params)
        if index % 3 == 0:
            engine.run()
    engine.run()
    assert {result.error for result in engine.results.values()} == {None}


def check(engine_of_device: Callable[[InterpretedDevice], Engine], run: Callable[[Engine], None]) -> None:
    """Requests need no variants but those of the warm-up."""
    with recorded_variants() as warm:
        engine = engine_of_device(InterpretedDevice(warms_up=True))
    with recorded_variants() as used:
        run(engine)
    assert len(used) > 5
    assert not (missing := differences(used, warm)), "\n".join(missing)


OPTIONS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "drafts": {"speculative_method": "ngram", "num_speculative_tokens": 2},
    "int8 pages": {"kv_cache_dtype": "int8", "cudagraph_capture_sizes": (2,)},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_requests_compile_nothing(options: str, tmp_path: Path) -> None:
    folder, model = save("llama", tmp_path), ModelOptions(dtype="bfloat16")

    def engine(device: InterpretedDevice) -> Engine:
        return Engine(folder, model=model, device=device, **{**SMALL, **OPTIONS[options]})

    check(engine, run_requests)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "quantization"), [("gemma2", "none"), ("qwen3_moe", "none"), ("deepseek_v3", "none"), ("llama", "int8")]
)
def test_other_architectures_and_formats(case: str, quantization: Any, tmp_path: Path) -> None:
    folder, model = save(case, tmp_path), ModelOptions(dtype="bfloat16", quantization=quantization)

    def engine(device: InterpretedDevice) -> Engine:
        return Engine(folder, model=model, device=device, **SMALL)

    check(engine, run_requests)


def test_embeddings_of_a_decoder(tmp_path: Path) -> None:
    folder, model = save("llama", tmp_path), ModelOptions(dtype="bfloat16", task="embed")

    def run(engine: Engine) -> None:
        for length in (3, 16, 19):
            engine.generate(random_prompt(length, length), PoolingParams(task="embed"))

    check(lambda device: Engine(folder, model=model, device=device, **SMALL), run)


def test_an_encoder_of_text(tmp_path: Path) -> None:
    folder = tiny_embedder(tmp_path)

    def run(engine: Engine) -> None:
        for step in ((3, 16), (7,)):  # one at a time: the interpreter is not made for several threads
            for length in step:
                engine.add(str(length), random_prompt(length, length, 20), PoolingParams(task="embed"))
            engine.run()
        assert all(result.pooled is not None for result in engine.results.values())

    options: dict[str, Any] = {"max_num_batched_tokens": 20, "max_num_seqs": 4}
    model = ModelOptions(dtype="bfloat16")
    check(lambda device: Engine(folder, model=model, device=device, **options), run)


def test_an_encoder_of_audio(tmp_path: Path) -> None:
    folder, model = save_ctc(make_ctc("wav2vec2"), tmp_path), ModelOptions(dtype="bfloat16")

    def run(engine: Engine) -> None:
        for length in (1600, 5003):
            item = make_item(noise(0, length / 16_000), engine.speech)
            engine.add(str(length), [], PoolingParams(task="ctc"), items=(item,))
            engine.run()
        assert all(result.pooled is not None for result in engine.results.values())

    options: dict[str, Any] = {"max_num_batched_tokens": 40, "max_num_seqs": 4}
    check(lambda device: Engine(folder, model=model, device=device, **options), run)


@pytest.mark.slow
def test_cross_attention_to_audio(tmp_path: Path) -> None:
    folder, model = save_whisper(make_whisper(), tmp_path), ModelOptions(dtype="bfloat16")

    def run(engine: Engine) -> None:
        for index in range(3):
            engine.add(str(index), [START, ENGLISH, TRANSCRIBE], greedy(3 + index), items=(whisper_item(index),))
        engine.run()
        assert {result.error for result in engine.results.values()} == {None}

    check(lambda device: Engine(folder, model=model, device=device, **SMALL), run)


@pytest.mark.slow
def test_audio_among_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an adapter for requests with audio."""
    folder, model = save_audio_model(make_audio_model("granite_speech"), tmp_path), ModelOptions(dtype="bfloat16")
    original = warm_up._audio_steps  # the longest audio would take minutes with the interpreter
    monkeypatch.setattr(
        warm_up,
        "_audio_steps",
        lambda limits, audio: original(limits, msgspec.structs.replace(audio, item_columns=32)),
    )

    def run(engine: Engine) -> None:
        for index, parts in enumerate(([[5, 9, 7]], [[3], noise(0, 0.3), [4]], [[8, 1], noise(1, 0.2)])):
            prompt, items = prompt_with(engine.audio, *parts)  # type: ignore[misc]
            engine.add(str(index), prompt, greedy(3 + index), items=items)
        engine.run()
        assert {result.error for result in engine.results.values()} == {None}

    check(lambda device: Engine(folder, model=model, device=device, **SMALL), run)


@pytest.mark.slow
def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    """Rows, blocks and tokens are those of an engine without a warm-up."""
    folder = save("llama", tmp_path)
    engines = [Engine(folder, device=InterpretedDevice(warms_up=warms_up), **SMALL) for warms_up in (True, False)]
    for engine in engines:
        engine.core.check()
        assert engine.blocks_used == 0
        assert len(engine.runner._table._free) == SMALL["max_num_seqs"]
        run_requests(engine)
    tokens = [[result.tokens for result in engine.results.values()] for engine in engines]
    assert tokens[0] == tokens[1]


def test_a_step_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server starts: other requests may work."""
    inner = ModelRunner._compute

    def compute(runner: ModelRunner, scheduled: Sequence[ScheduledSequence]) -> Computed:
        if any(sequence.count > 8 for sequence in scheduled):
            raise RuntimeError("out of registers")
        return inner(runner, scheduled)

    monkeypatch.setattr(ModelRunner, "_compute", compute)
    engine = Engine(save("llama", tmp_path), device=InterpretedDevice(warms_up=True), **SMALL)
    assert "a step of the warm-up failed: the model failed: RuntimeError: out of registers" in caplog.text
    assert len(engine.generate([1, 2, 3], greedy(3)).tokens) == 3
