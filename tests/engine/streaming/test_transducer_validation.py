"""Audio that a transducer cannot read is refused by the core, and says why; other requests go on. So are models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import MediaItem
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.models.config.pooling import PoolingOptions
from quire.engine.models.errors import ModelError
from quire.engine.models.model_config import read_model_config
from tests.support.engine import Engine, greedy
from tests.support.transducer_models import MELS, audio_of, features, transducer_info


@pytest.fixture(scope="module")
def engine(transducer_folder: Path) -> Engine:
    return Engine(transducer_folder)


def changed(**fields: Any) -> Callable[[MediaItem], MediaItem]:
    return lambda item: msgspec.structs.replace(item, **fields)


ITEMS: dict[str, tuple[Callable[[MediaItem], MediaItem], str]] = {
    "rows": (changed(features=np.zeros((8, 80), np.float32)), f"float32 8x80, not float32 of {MELS} rows"),
    "flat": (changed(features=np.zeros(80, np.float32)), "float32 80, not"),
    "doubles": (changed(features=np.zeros((MELS, 80))), "float64 16x80"),
    "nothing": (changed(features=np.zeros((MELS, 0), np.float32)), "at least one column"),
    "nan": (changed(features=np.full((MELS, 80), np.nan, np.float32)), "NaN or infinite"),
    "tokens": (changed(start=0, length=3), "must have start, length and columns_before 0"),
    "columns": (changed(encoded_columns=8), "no `encoded_columns`"),
}


@pytest.mark.parametrize("name", ITEMS)
def test_audio(engine: Engine, name: str) -> None:
    change, text = ITEMS[name]
    item = change(audio_of(features(0, 10)))
    assert text in (engine.generate([], greedy(2), items=(item,)).error or "")
    request = f"open-{name}"
    engine.add(request, [], greedy(99), items=(audio_of(features(0, 60)),), open=True)
    engine.run()
    engine.extend(request, [], items=(item,))
    assert text in (engine.results[request].error or "")
    engine.run()
    assert engine.blocks_used == engine.rows_used == 0


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ([], PoolingParams(task="embed"), "no pooling tasks"),
        ([3], greedy(9), "the prompt must be empty"),
        ([], SamplingParams(max_tokens=3), "temperature must be 0"),
        ([], greedy(0), "max_tokens at least 1"),
        ([], greedy(9, logprobs=3), "logprobs None or 0"),
        ([], greedy(9, prompt_logprobs=1), "the most likely tokens"),
        ([], greedy(9, grammar="x"), "the most likely tokens"),
        ([], greedy(9, repetition_penalty=2.0), "the most likely tokens"),
        ([], greedy(9, stop_token_ids=frozenset({3})), "the most likely tokens"),
    ],
)
def test_requests(engine: Engine, prompt: list[int], params: SamplingParams | PoolingParams, text: str) -> None:
    assert text in (engine.generate(prompt, params, items=(audio_of(features(0, 9)),)).error or "")


def test_audio_that_is_empty_late_or_too_long(transducer_folder: Path) -> None:
    engine = Engine(transducer_folder)
    assert engine.generate([], greedy(9)).error == "the audio is empty"
    engine.add("empty", [], greedy(9), open=True)
    engine.extend("empty", [], last=True)
    assert engine.results["empty"].error == "the audio is empty"
    engine.add("text", [], greedy(9), open=True)
    engine.extend("text", [5], items=(audio_of(features(0, 9)),))
    assert "only audio can be appended" in (engine.results["text"].error or "")
    engine.add("late", [], greedy(99), items=(audio_of(features(0, 5000)),))
    engine.step()
    engine.extend("late", [], items=(audio_of(features(0, 1)),))
    assert engine.results["late"].error == "the audio is already complete"
    engine.extend("late", [], last=True)  # of a request that has ended: ignored
    engine.run()
    assert engine.blocks_used == engine.rows_used == 0


def test_the_context_bounds_the_audio(transducer_folder: Path) -> None:
    engine = Engine(transducer_folder, model=ModelOptions(max_model_len=10))
    assert engine.info.max_model_len == 10
    long = engine.generate([], greedy(9), items=(audio_of(features(0, 81)),)).error
    assert long == "the audio has 81 columns of features, but the context allows at most 80"
    engine.add("long", [], greedy(9), items=(audio_of(features(0, 80)),), open=True)
    engine.extend("long", [], items=(audio_of(features(0, 1)),))
    assert "would have 81 columns" in (engine.results["long"].error or "")
    assert Engine(transducer_folder).info.max_model_len == 1 << 20
    with pytest.raises(
        ModelError,
        match="--max-model-len 6 is too small: this model counts it in frames of audio, and needs at least 7",
    ):
        Engine(transducer_folder, model=ModelOptions(max_model_len=6))


def rewritten(folder: Path, to: Path, outer: dict[str, Any], inner: dict[str, Any]) -> Path:
    """A copy of a folder with another config."""
    config = json.loads((folder / "config.json").read_text())
    config = {**config, **outer, "encoder_config": {**config["encoder_config"], **inner}}
    (to / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "processor_config.json", "tokenizer.json", "generation_config.json"):
        (to / name).symlink_to(folder / name)
    return to


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "stride": ({}, {"subsampling_conv_stride": 3}, "subsampling_conv_stride must be 2"),
    "factor": ({}, {"subsampling_factor": 6}, "subsampling_factor a power of 2"),
    "lookahead": ({}, {"default_num_lookahead_tokens": -1}, "must be from 0 to 1000, not -1"),
    "not trained": ({}, {"default_num_lookahead_tokens": 5}, "was not trained with .* 5; with: 13, 6, 3, 1, 0"),
    "kernel": ({}, {"subsampling_conv_kernel_size": 1}, "subsampling_conv_kernel_size must be at least 2, not 1"),
    "window": ({}, {"sliding_window": 0}, "sliding_window must be at least 1"),
    "no act": ({}, {"hidden_act": "none"}, "none"),
    "no joint act": ({"hidden_act": "none"}, {}, "none"),
    "blank": ({"blank_token_id": 999}, {}, "blank"),
    "symbols": ({"max_symbols_per_step": 0}, {}, "max_symbols_per_step must be an integer from 1"),
    "layers": ({}, {"num_hidden_layers": 0}, "num_hidden_layers"),
    "many layers": ({"num_decoder_layers": 10_001}, {}, "num_decoder_layers"),
    "other sizes": ({"decoder_hidden_size": 25}, {}, r"encoder_projector|shape"),
    "no head": (
        {"architectures": ["NemotronAsrStreamingEncoder"]},
        {},
        "need a head for RNNT; the architecture is NemotronAsrStreamingEncoder",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_do_not_fit_are_refused(transducer_folder: Path, tmp_path: Path, name: str) -> None:
    outer, inner, text = CONFIGS[name]
    with pytest.raises(ModelError, match=text):
        Engine(rewritten(transducer_folder, tmp_path, outer, inner))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hop_length": 100}, "hop_length must be 160, not 100"),
        ({"feature_size": 80}, "makes 80 rows, but the encoder reads 16"),
        ({"sampling_rate": 8000}, "8000 Hz"),
        ({"mel_filters_dtype": "float16"}, "float32 or bfloat16, not 'float16'"),
    ],
)
def test_other_features_are_refused(transducer_folder: Path, tmp_path: Path, change: dict[str, Any], text: str) -> None:
    folder = rewritten(transducer_folder, tmp_path, {}, {})
    processor = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps({**processor["feature_extractor"], **change}))
    with pytest.raises(ModelError, match=text):
        read_model_config(folder)


def test_facts_for_the_front_end(transducer_folder: Path, tmp_path: Path) -> None:
    folder = rewritten(transducer_folder, tmp_path, {}, {})
    assert not transducer_info(folder).bfloat16_filters
    (folder / "processor_config.json").unlink()
    (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": {"mel_filters_dtype": "bfloat16"}}))
    assert transducer_info(folder).bfloat16_filters
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 3}))
    with pytest.raises(ModelError, match="decoder_start_token_id must be the blank"):
        read_model_config(folder)


def test_other_tasks_are_refused(transducer_folder: Path) -> None:
    with pytest.raises(ModelError, match="for transcription only"):
        read_model_config(transducer_folder, pooling=PoolingOptions("embed"))
    with pytest.raises(ModelError, match="only Quire's own implementation"):
        read_model_config(transducer_folder, "transformers")


@pytest.mark.parametrize("missing", ["decoder.lstm.bias_hh_l1", "encoder.layers.1.conv.norm.weight", "joint.head.bias"])
def test_a_missing_weight_is_named(transducer_folder: Path, tmp_path: Path, missing: str) -> None:
    folder = rewritten(transducer_folder, tmp_path, {}, {})
    weights = load_file(folder / "model.safetensors")
    del weights[missing]
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="weights missing from the checkpoint"):
        Engine(folder)
