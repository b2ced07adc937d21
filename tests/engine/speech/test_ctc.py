"""CTC models give each position the token that transformers gives it."""

from __future__ import annotations

import threading
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import MediaItem
from quire.engine.execution.encoder_runner import CTCRunner
from quire.engine.models.errors import ModelError
from quire.multimodal.audio.items import make_item
from tests.support.audio import voice
from tests.support.ctc import KINDS, expected_positions, make_ctc, save_ctc
from tests.support.engine import Engine, greedy
from tests.support.variants import slow_but

TASK = PoolingParams(task="ctc")
LENGTHS = (1600, 700, 16_000, 40_000, 5003)


def audio(length: int) -> NDArray[np.float32]:
    return voice(3.0, hertz=100.0 + length % 97)[:length]


def add(engine: Engine, length: int, name: str = "", flow: str = "") -> None:
    engine.add(name or str(length), [], TASK, items=(make_item(audio(length), engine.speech),), flow=flow)


def positions(engine: Engine, name: str) -> NDArray[np.float32]:
    pooled = engine.results[name].pooled
    assert pooled is not None, engine.results[name].error
    return pooled.data


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return make_ctc(request.param)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ctc(model, tmp_path_factory.mktemp("ctc"))


@pytest.mark.parametrize(
    ("model", "device"),
    slow_but(
        product(KINDS, ["cpu", "reference"]),
        *((kind, "cpu") for kind in KINDS),
        ("wav2vec2, norms first", "reference"),
        ("parakeet", "reference"),
    ),
    indirect=["model"],
)
def test_tokens_equal_transformers(model: Any, folder: Path, device: str) -> None:
    """All files together, and each alone."""
    engine = Engine(folder, model=ModelOptions(device=device))
    alone = Engine(folder, model=ModelOptions(device=device))
    for length in LENGTHS:
        add(engine, length)
    engine.run()
    assert engine.steps == 1
    seen: set[float] = set()
    for length in LENGTHS:
        expected = expected_positions(model, audio(length))
        add(alone, length)
        alone.run()
        for server in (engine, alone):
            actual = positions(server, str(length))
            assert actual.shape == expected.shape
            assert actual[:, 0].tolist() == expected[:, 0].tolist()
            np.testing.assert_allclose(actual[:, 1], expected[:, 1], atol=2e-3)
        seen |= set(expected[:, 0].tolist())
    assert len(seen) > 3, "the outputs say nothing about the inputs"


def test_steps_hold_as_many_positions_as_the_budget(folder: Path) -> None:
    """Long files come one by one, and their results are those of one step."""
    engine, whole = Engine(folder, max_num_batched_tokens=16), Engine(folder)
    for length in LENGTHS:
        add(engine, length, flow="one client")  # short requests of others would run beside the steps in flight
        add(whole, length)
    engine.run()
    whole.run()
    assert 3 <= engine.steps <= len(LENGTHS)
    for length in LENGTHS:
        assert positions(engine, str(length))[:, 0].tolist() == positions(whole, str(length))[:, 0].tolist()


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_low_precision_stays_close(folder: Path, quantization: str) -> None:
    exact = Engine(folder)
    rough = Engine(folder, model=ModelOptions(dtype="bfloat16", quantization=quantization))
    for engine in (exact, rough):
        add(engine, 40_000)
        engine.run()
    same = positions(exact, "40000")[:, 0] == positions(rough, "40000")[:, 0]
    assert same.mean() > 0.7


def test_facts_for_the_front_end(folder: Path) -> None:
    engine = Engine(folder)
    info = engine.info
    assert info.tasks == ("transcribe",)
    assert (info.num_blocks, info.cache_bytes) == (0, 0)
    speech = engine.speech
    banded = speech.num_mel_bins > 1
    assert (speech.kind, speech.window_seconds, speech.languages) == ("ctc", 30.0, {})
    assert speech.time_precision == pytest.approx(0.08 if banded else 0.02)
    assert speech.num_positions == (375 if banded else 1499)
    assert speech.min_columns == (1 if banded else 400)


def test_requests_that_cannot_be_run(folder: Path) -> None:
    engine = Engine(folder)
    speech = engine.speech
    good = make_item(audio(8000), speech)
    rows, columns = good.features.shape

    def refused(task: Any, *items: MediaItem, prompt: tuple[int, ...] = ()) -> str:
        return engine.generate(prompt, task, items=items).error or ""

    def changed(features: Any) -> MediaItem:
        return msgspec.structs.replace(good, features=features)

    assert "only the pooling task 'ctc'" in refused(greedy(2), good)
    assert "only the pooling task 'ctc'" in refused(PoolingParams(task="align"), good)
    assert "the prompt must be empty" in refused(TASK, good, prompt=(1,))
    assert "exactly one audio item, not 0" in refused(TASK)
    assert "NaN" in refused(TASK, changed(np.full((rows, columns), np.inf, np.float32)))
    assert "at least" in refused(TASK, changed(good.features[:, : speech.min_columns - 1]))
    assert "float32" in refused(TASK, changed(np.zeros((rows, speech.num_columns + 1), np.float32)))
    assert "float32" in refused(TASK, changed(np.zeros((rows + 1, columns), np.float32)))
    assert engine.generate([], TASK, items=(good,)).pooled is not None


def test_a_failure_ends_one_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(folder)
    compute = CTCRunner._compute

    def fails(self: CTCRunner, requests: Any) -> Any:
        if any(request.request_id == "bad" for request in requests):
            raise ZeroDivisionError("injected error")
        return compute(self, requests)

    monkeypatch.setattr(CTCRunner, "_compute", fails)
    for name in ("good", "bad", "other"):
        add(engine, 1600, name)
    engine.run()
    assert "injected error" in str(engine.results["bad"].error)
    assert positions(engine, "good").tolist() == positions(engine, "other").tolist()


def test_short_files_run_beside_long_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And have the result that they have alone."""
    engine, alone = Engine(folder), Engine(folder)
    compute, may_end = CTCRunner._compute, threading.Event()

    def waits(self: CTCRunner, requests: Any) -> Any:
        assert requests[0].request_id == "short" or may_end.wait(60)
        return compute(self, requests)

    monkeypatch.setattr(CTCRunner, "_compute", waits)
    names = [f"long-{number}" for number in range(engine.core.executor.max_steps_in_flight)]
    for name in names:
        add(engine, 40_000, name, "long")
        engine.step()
    add(engine, 1600, "short")
    while engine.results["short"].pooled is None:
        engine.step()
    assert all(engine.results[name].pooled is None for name in names)
    may_end.set()
    engine.run()
    for length in (40_000, 1600):
        add(alone, length)
        alone.run()
    assert positions(engine, "short").tolist() == positions(alone, "1600").tolist()
    assert all(positions(engine, name).tolist() == positions(alone, "40000").tolist() for name in names)


def test_old_and_plain_names_of_the_positions_weight(tmp_path: Path) -> None:
    """Checkpoints before PyTorch's parametrizations, and ones without weight normalization."""
    from safetensors.torch import load_file, save_file

    model = make_ctc("wav2vec2")
    expected = expected_positions(model, audio(16_000))[:, 0].tolist()
    save_ctc(model, tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    prefix = "wav2vec2.encoder.pos_conv_embed.conv."
    new = [f"{prefix}parametrizations.weight.original{index}" for index in (0, 1)]
    assert set(new) <= set(stored)
    norm, direction = (stored.pop(name) for name in new)
    plain = model.wav2vec2.encoder.pos_conv_embed.conv.weight.detach().clone()
    for names in ({f"{prefix}weight_g": norm, f"{prefix}weight_v": direction}, {f"{prefix}weight": plain}):
        save_file({**stored, **names}, path, {"format": "pt"})
        engine = Engine(tmp_path)
        add(engine, 16_000)
        engine.run()
        assert positions(engine, "16000")[:, 0].tolist() == expected


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            {"architectures": ["Wav2Vec2ForPreTraining"]},
            "need a head for CTC; the architecture is Wav2Vec2ForPreTraining",
        ),
        ({"architectures": []}, "has no `architectures`"),
        ({"add_adapter": True}, "add_adapter"),
        ({"adapter_attn_dim": 8}, "adapter for each language"),
        ({"feat_extract_norm": "batch"}, "feat_extract_norm"),
        ({"num_conv_pos_embedding_groups": 5}, "cannot be split"),
        ({"num_conv_pos_embedding_groups": 1 << 20}, "num_conv_pos_embedding_groups must be an integer"),
        ({"conv_stride": [10, 0, 4]}, "conv_stride must be a list of positive integers"),
        ({"conv_kernel": [10, "8", 5]}, "config"),
        ({"conv_kernel": [1 << 20, 8, 5]}, "max_positions is 0"),
        ({"hidden_act": "unheard"}, "activation 'unheard'"),
        ({"pad_token_id": 99}, "pad_token_id"),
        ({"pad_token_id": None}, "pad_token_id"),
        ({"num_hidden_layers": 9000}, "9000 layers"),
    ],
)
def test_folders_that_cannot_be_loaded(tmp_path: Path, overrides: dict[str, Any], text: str) -> None:
    save_ctc(make_ctc("wav2vec2"), tmp_path)
    with pytest.raises(ModelError, match=text):
        Engine(tmp_path, model=ModelOptions(hf_overrides=overrides))


def test_a_sample_rate_of_its_own(tmp_path: Path) -> None:
    save_ctc(make_ctc("hubert"), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"sampling_rate": 8000}')
    with pytest.raises(ModelError, match="at 8000 Hz; supported is 16000 Hz"):
        Engine(tmp_path)
    with pytest.raises(ModelError, match="only Quire's own implementation"):
        Engine(tmp_path, model=ModelOptions(model_impl="transformers"))
    with pytest.raises(ModelError, match="for transcription only"):
        Engine(tmp_path, model=ModelOptions(task="embed"))


def test_audio_for_which_the_model_computes_nan(folder: Path) -> None:
    """It ends with an error; the other file of the step does not."""
    engine, whole = Engine(folder), Engine(folder)
    add(whole, 1600)
    whole.run()
    speech = engine.speech
    loud = make_item(audio(1600), speech)
    loud = msgspec.structs.replace(loud, features=np.full_like(loud.features, 3e38))
    engine.add("bad", [], TASK, items=(loud,))
    add(engine, 1600)
    engine.run()
    assert "not a finite number" in (engine.results["bad"].error or "")
    assert engine.corrupted == 1
    assert positions(engine, "1600")[:, 0].tolist() == positions(whole, "1600")[:, 0].tolist()
