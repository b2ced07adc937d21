"""Audio that cannot be read is refused by the core, and says why; other requests go on. So are models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import MediaItem
from quire.engine.client.sampling_params import SamplingParams, TokenProbs
from quire.engine.models.errors import ModelError
from quire.engine.models.model_config import read_model_config
from tests.support.engine import Engine, greedy
from tests.support.streaming_models import (
    MELS,
    PAD,
    START,
    audio_of,
    features,
    make_streaming_model,
    save_streaming_model,
    streaming_info,
)

PROMPT = [START, PAD, PAD]


@pytest.fixture(scope="module")
def engine(streaming_folder: Path) -> Engine:
    return Engine(streaming_folder)


def changed(**fields: Any) -> Callable[[MediaItem], MediaItem]:
    return lambda item: msgspec.structs.replace(item, **fields)


ITEMS: dict[str, tuple[Callable[[MediaItem], MediaItem], str]] = {
    "rows": (changed(features=np.zeros((8, 80), np.float32)), f"float32 8x80, not float32 of {MELS} rows"),
    "flat": (changed(features=np.zeros(80, np.float32)), "float32 80, not"),
    "doubles": (changed(features=np.zeros((MELS, 80))), "float64 16x80"),
    "part of a frame": (changed(features=np.zeros((MELS, 81), np.float32)), "a multiple of 8 columns"),
    "nothing": (changed(features=np.zeros((MELS, 0), np.float32)), "a multiple of 8 columns"),
    "nan": (changed(features=np.full((MELS, 80), np.nan, np.float32)), "NaN or infinite"),
    "tokens": (changed(start=0, length=3), "must have start, length and columns_before 0"),
    "columns": (changed(encoded_columns=8), "no `encoded_columns`"),
    "columns before": (changed(columns_before=8), "must have start, length and columns_before 0"),
}


@pytest.mark.parametrize("name", ITEMS)
def test_audio(engine: Engine, name: str) -> None:
    change, text = ITEMS[name]
    item = change(audio_of(features(0, 10)))
    assert text in (engine.generate(PROMPT, greedy(2), items=(item,)).error or "")
    request = f"open-{name}"
    engine.add(request, PROMPT, greedy(99), items=(audio_of(features(0, 5)),), open=True)
    engine.run()
    engine.extend(request, [], items=(item,))
    assert text in (engine.results[request].error or "")
    engine.run()
    assert engine.blocks_used == engine.rows_used == 0


EXTENSIONS: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"tokens": [5], "items": (audio_of(features(0, 1)),)}, "only audio can be appended"),
    "a token outside of the vocabulary": ({"tokens": [300]}, "outside the vocabulary"),
    "too long": ({"items": (audio_of(features(0, 4092)),)}, "4097 frames, but the context allows at most 4096"),
}


@pytest.mark.parametrize("name", EXTENSIONS)
def test_extensions(engine: Engine, name: str) -> None:
    fields, text = EXTENSIONS[name]
    engine.add(name, PROMPT, greedy(99), items=(audio_of(features(0, 5)),), open=True)
    engine.add(f"beside-{name}", PROMPT, greedy(99), items=(audio_of(features(0, 20)),))
    engine.step()
    engine.extend(name, **{"tokens": [], **fields})
    engine.run()
    assert text in (engine.results[name].error or "")
    assert len(engine.results[f"beside-{name}"].tokens) == 17
    engine.extend(name, [], last=True)  # of a request that has ended: ignored
    assert engine.blocks_used == engine.rows_used == 0


def test_audio_after_its_end_ends_the_request(engine: Engine) -> None:
    engine.add("late", PROMPT, greedy(99), items=(audio_of(features(0, 50)),))
    engine.step()
    engine.extend("late", [], items=(audio_of(features(0, 1)),))
    assert engine.results["late"].error == "the audio is already complete"
    engine.run()
    assert engine.blocks_used == engine.rows_used == 0


def test_audio_that_ends_within_the_prompt(engine: Engine) -> None:
    short = engine.generate(PROMPT, greedy(9), items=(audio_of(features(0, 3)),)).error
    assert short == "the audio has 3 frames; there must be more than the prompt's 3 tokens"
    assert "0 frames" in (engine.generate(PROMPT, greedy(9)).error or "")
    engine.add("short", PROMPT, greedy(9), open=True)
    engine.extend("short", [], items=(audio_of(features(0, 3)),), last=True)
    assert engine.results["short"].error == "the audio ends after 3 frames; there must be more than the prompt's 3"
    assert not engine.busy
    long = engine.generate(PROMPT, greedy(9), items=(audio_of(features(0, 4097)),)).error
    assert long == "the audio has 4097 frames, but the context allows at most 4096"


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (PoolingParams(task="embed"), "no pooling tasks"),
        (SamplingParams(max_tokens=3, prompt_logprobs=1), "does not support prompt_logprobs"),
        (SamplingParams(max_tokens=3, token_probs=TokenProbs(0, (1,))), "does not support prompt_logprobs"),
        (SamplingParams(max_tokens=3, grammar="x"), "does not support prompt_logprobs"),
    ],
)
def test_unsupported_params(engine: Engine, params: SamplingParams | PoolingParams, text: str) -> None:
    assert text in (engine.generate(PROMPT, params, items=(audio_of(features(0, 9)),)).error or "")


def test_requests_without_audio_hold_nothing_and_do_not_keep_the_engine_busy(streaming_folder: Path) -> None:
    """One encoder: the first request with audio gets it, and keeps it while it waits for more."""
    engine = Engine(streaming_folder, encoder_cache_memory=1)
    for name in ("no audio", "first", "second"):
        engine.add(name, PROMPT, greedy(999), open=True)
        assert not engine.busy
    audio = features(0, 20)
    for name in ("first", "second"):
        engine.extend(name, [], items=(audio_of(audio),), last=name == "second")
        engine.run()
    assert len(engine.results["first"].tokens) == 18
    assert not engine.results["second"].tokens
    assert engine.rows_used == 1
    engine.abort("first")
    engine.run()
    assert engine.results["second"].tokens == engine.results["first"].tokens[:17]
    engine.abort("no audio")
    assert engine.blocks_used == engine.rows_used == 0
    assert not engine.core.scheduler._requests


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "frames": ({"audio_length_per_tok": 6}, {}, r"audio_length_per_tok is 6; it must be 2 \* downsample_factor"),
    "a window of nothing": ({}, {"sliding_window": 0}, "the sliding window is 0"),
    "delay": ({"default_num_delay_tokens": -1}, {}, "default_num_delay_tokens must be from 0 to 1000, not -1"),
    "no act": ({}, {"hidden_act": "none"}, "none"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_do_not_fit_are_refused(streaming_folder: Path, tmp_path: Path, name: str) -> None:
    outer, inner, text = CONFIGS[name]
    config = json.loads((streaming_folder / "config.json").read_text())
    config = {**config, **outer, "audio_config": {**config["audio_config"], **inner}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(streaming_folder / "model.safetensors")
    with pytest.raises(ModelError, match=text):
        Engine(tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hop_length": 100}, "hop_length is 100"),
        ({"feature_size": 80}, "makes 80 rows, but the encoder reads 16"),
        ({"global_log_mel_max": None}, "global_log_mel_max is None"),
    ],
)
def test_other_features_are_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    folder = save_streaming_model(make_streaming_model(), tmp_path)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelError, match=text):
        read_model_config(folder)


def test_tokens_of_the_prompt_come_from_the_tokenizer(tmp_path: Path) -> None:
    folder = save_streaming_model(make_streaming_model(), tmp_path)

    def written(**ids: int) -> None:
        added = [{"id": number, "content": text} for text, number in ids.items()]
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))

    assert streaming_info(folder).prompt == [1] + [32] * (32 + 3)
    written(**{"<s>": 7, "[STREAMING_PAD]": 9})
    assert set(streaming_info(folder).prompt) == {7, 9}
    written(**{"<s>": 300})
    with pytest.raises(ModelError, match="not in the vocabulary of 300"):
        read_model_config(folder)
    (folder / "tokenizer.json").write_text("[1]")
    with pytest.raises(ModelError, match="cannot be read"):
        read_model_config(folder)
    (folder / "tokenizer.json").unlink()
    listed = [{"rank": 5, "token_str": "<s>"}, {"rank": 6, "token_str": "[STREAMING_PAD]"}]
    (folder / "tekken.json").write_text(json.dumps({"special_tokens": listed}))
    assert set(streaming_info(folder).prompt) == {5, 6}


@pytest.mark.parametrize("missing", ["ada_rms_norm.linear1", "post_attention_layernorm"])
def test_a_missing_weight_is_named(streaming_folder: Path, tmp_path: Path, missing: str) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(streaming_folder / "model.safetensors")
    remaining = {name: tensor for name, tensor in weights.items() if f"layers.1.{missing}" not in name}
    assert len(remaining) == len(weights) - 1
    save_file(remaining, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((streaming_folder / "config.json").read_text())
    with pytest.raises(ModelError, match=r"layers\.1\."):
        Engine(tmp_path)
