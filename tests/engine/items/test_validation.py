"""Items that cannot be read are refused by the core, and say why; models that cannot be loaded, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.engine.client.protocol import MediaItem
from quire.engine.models.errors import ModelError
from quire.engine.models.model_config import read_model_config
from tests.support.audio_models import PLACEHOLDER, make_audio_model, noise, prompt_with, save_audio_model
from tests.support.engine import Engine, greedy


@pytest.fixture(scope="module")
def engine(audio_folders: dict[str, Path]) -> Engine:
    return Engine(audio_folders["qwen2_audio"])


def valid(engine: Engine) -> tuple[list[int], tuple[MediaItem, ...]]:
    return prompt_with(engine.audio, [1, 2], noise(0, 0.5), [3], noise(1, 0.5), [4])


def first(**fields: Any) -> Callable[[tuple[MediaItem, ...]], tuple[MediaItem, ...]]:
    return lambda items: (msgspec.structs.replace(items[0], **fields), *items[1:])


NAN = np.full((16, 52), np.nan, np.float32)
CASES: dict[str, tuple[Callable[[tuple[MediaItem, ...]], tuple[MediaItem, ...]], str]] = {
    "no tokens": (first(length=0), "0 tokens; it needs at least one"),
    "negative": (first(length=-3), "-3 tokens"),
    "before the prompt": (first(start=-1), "must begin at token 0 or later"),
    "out of order": (lambda items: items[::-1], "must begin at token"),
    "twice": (lambda items: (items[0], *items), "must begin at token"),
    "behind the prompt": (
        lambda items: (items[0], msgspec.structs.replace(items[1], start=900)),
        "the prompt has 28 tokens",
    ),
    "another length": (first(length=11), "50 columns of features become 12 tokens, not 11"),
    "other columns": (first(encoded_columns=40), "40 columns of features become 10 tokens, not 12"),
    "no columns": (first(encoded_columns=0), "0 of 52 columns"),
    "too many columns": (first(encoded_columns=53), "53 of 52 columns"),
    "too many features": (first(features=np.zeros((16, 300), np.float32)), "of 300 columns"),
    "rows": (first(features=np.zeros((8, 52), np.float32)), "float32 of 16 rows"),
    "flat": (first(features=np.zeros(52, np.float32)), "float32 of 16 rows"),
    "doubles": (first(features=np.zeros((16, 52))), "float64 16x52"),
    "nan": (first(features=NAN), "NaN or infinite"),
    "no hash": (first(hash=b""), "must not be empty"),
}


@pytest.mark.parametrize("name", CASES)
def test_items(engine: Engine, name: str) -> None:
    change, text = CASES[name]
    prompt, items = valid(engine)
    error = engine.generate(prompt, greedy(2), items=change(items)).error
    assert error is not None
    assert text in error
    assert engine.blocks_used == 0


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("out of order", "twice", "behind the prompt")])
def test_items_of_pieces(engine: Engine, name: str) -> None:
    """The request is dropped, and holds nothing."""
    change, text = CASES[name]
    prompt, items = valid(engine)
    request = f"open-{name}"
    engine.add(request, prompt[:2], greedy(2), open=True)
    engine.step()
    (item,) = change((msgspec.structs.replace(items[0], start=0),))
    engine.extend(request, prompt[2:14], items=(item,))
    assert text in (engine.results[request].error or "")
    engine.run()
    assert engine.blocks_used == 0


def test_placeholders_without_items_are_tokens_like_others(engine: Engine) -> None:
    assert engine.generate([1, PLACEHOLDER, PLACEHOLDER, 2], greedy(2)).error is None


def written(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


EXTRACTORS: dict[str, tuple[dict[str, Any], str]] = {
    "rate": ({"sampling_rate": 8000}, "sampling_rate is 8000; supported is 16000"),
    "hop": ({"hop_length": 100}, "hop_length is 100"),
    "dither": ({"dither": 0.1}, "dither is 0.1"),
    "rows": ({"feature_size": 80}, "makes 80 rows, but the encoder reads 16"),
    "min_length": ({"min_length": "long"}, "min_length must be a number of samples"),
}


@pytest.mark.parametrize("name", EXTRACTORS)
def test_other_features_are_refused(tmp_path: Path, name: str) -> None:
    changes, text = EXTRACTORS[name]
    folder = save_audio_model(make_audio_model("qwen3_asr"), tmp_path)
    written(folder, "preprocessor_config.json", **changes)
    with pytest.raises(ModelError, match=text):
        read_model_config(folder)


CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "placeholder": ("voxtral", {"audio_token_id": 300}, {}, "audio_token_id is 300"),
    "joined": ("voxtral", {}, {"intermediate_size": 70}, "not a multiple of 32"),
    "windows": ("qwen3_asr", {}, {"n_window_infer": 150}, "n_window_infer is 150"),
    "no window": ("qwen3_asr", {}, {"n_window": 0}, "cannot be used"),
    "projector": ("qwen3_asr", {}, {"output_dim": 48}, "outputs have size 48, but the hidden size is 64"),
    "groups": ("qwen2_audio", {}, {"max_source_positions": 51}, "positions, 51, is not a multiple of 2"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_do_not_fit_are_refused(tmp_path: Path, name: str) -> None:
    kind, outer, inner, text = CONFIGS[name]
    folder = save_audio_model(make_audio_model(kind), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    written(folder, "config.json", **outer, audio_config={**config["audio_config"], **inner})
    with pytest.raises(ModelError, match=text):
        read_model_config(folder)


PARTS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "context": ("granite_speech", "encoder_config", {"context_size": 25}, "context_size is 25, not from 1 to max_pos"),
    "no context": ("granite_speech", "encoder_config", {"context_size": 0}, "context_size is 0"),
    "odd rows": ("granite_speech", "encoder_config", {"input_dim": 15}, "15 rows of features, an odd number"),
    "no heads": (
        "granite_speech",
        "encoder_config",
        {"num_heads": 0},
        "heads is 0|cannot (read|be used)",
    ),
    "no kernel": ("granite_speech", "encoder_config", {"conv_kernel_size": 0}, "kernel is 0"),
    "no layers": ("granite_speech", "encoder_config", {"num_layers": 0}, "encoder has no layers"),
    "query heads": ("granite_speech", "projector_config", {"num_attention_heads": 5}, "cannot be split into 5 heads"),
    "texts": ("granite_speech", "projector_config", {"use_qformer_text_input": True}, "use_qformer_text_input"),
    "source": ("granite_speech", "projector_config", {"encoder_hidden_size": 64}, "reads 64 elements"),
    "another projector": ("granite_speech", "projector_config", {"model_type": "bert"}, "of type 'bert'"),
    "chunks": ("phi4_multimodal", "audio_config", {"chunk_size": 8}, "chunk_size is 8; supported is -1"),
    "channels": ("phi4_multimodal", "audio_config", {"ext_pw_out_channel": 64}, "is 64, not hidden_size, 32"),
    "reduction": ("phi4_multimodal", "audio_config", {"time_reduction": 6}, "time_reduction is 6, not a power of 2"),
    "bands": ("phi4_multimodal", "audio_config", {"input_size": 20}, "20, is not a multiple of 8"),
    "act": ("phi4_multimodal", "audio_config", {"nemo_activation": "gelu"}, "nemo_activation is 'gelu'"),
    "heads": ("phi4_multimodal", "audio_config", {"num_attention_heads": 5}, "cannot be split into 5 heads"),
    "distance": ("phi4_multimodal", "audio_config", {"bias_max_distance": 0}, "reach is 0"),
    "symmetric": ("phi4_multimodal", "audio_config", {"bias_symmetric": True}, "bias_symmetric is True"),
    "token": ("phi4_multimodal", "audio_config", {"audio_token_id": 300}, "audio_token_id is 300"),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, name: str) -> None:
    kind, part, changes, text = PARTS[name]
    folder = save_audio_model(make_audio_model(kind), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    written(folder, "config.json", **{part: {**config[part], **changes}})
    with pytest.raises(ModelError, match=text):
        read_model_config(folder)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"window_size": 14}, "window_size is 14, not a multiple of downsample_rate, 5"),
        ({"downsample_rate": 0}, "downsample_rate, 0"),
        ({"window_size": 30}, "projector_window_size is 15; supported is 30"),
        ({"text_config": {"model_type": "bert"}}, "of type 'bert' is not supported"),
    ],
)
def test_projectors_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    folder = save_audio_model(make_audio_model("granite_speech"), tmp_path)
    written(folder, "config.json", **changes)
    with pytest.raises(ModelError, match=text):
        read_model_config(folder)


@pytest.mark.parametrize("kind", ["granite_speech", "phi4_multimodal"])
@pytest.mark.parametrize(
    ("name", "value"), [("hop_length", 80), ("n_fft", 400), ("feature_size", 80), ("win_length", 320), ("extra", None)]
)
def test_other_spectrograms_are_refused(tmp_path: Path, kind: str, name: str, value: int | None) -> None:
    folder = save_audio_model(make_audio_model(kind), tmp_path)
    written(folder, "preprocessor_config.json", **{name: value})
    if value is None:
        assert read_model_config(folder).facts.audio is not None
        return
    with pytest.raises(ModelError, match=rf"{name} is {value}|makes {value} rows"):
        read_model_config(folder)


def test_the_text_of_the_placeholder_is_that_of_the_tokenizer(tmp_path: Path) -> None:
    folder = save_audio_model(make_audio_model("phi4_multimodal"), tmp_path)
    for added, text in (([{"id": PLACEHOLDER, "content": "<|endoftext11|>"}], "<|endoftext11|>"), ("x", "<|audio|>")):
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
        audio = read_model_config(folder).facts.audio
        assert audio is not None
        assert audio.placeholder_text == text


def test_columns_before_an_item(tmp_path: Path) -> None:
    """As many as the convolutions look back, or none."""
    engine = Engine(save_audio_model(make_audio_model("phi4_multimodal"), tmp_path))
    prompt, (item,) = prompt_with(engine.audio, [1], noise(0, 0.5))
    wrong = msgspec.structs.replace(item, columns_before=3, encoded_columns=item.columns - 3)
    assert "3 columns of features precede" in (engine.generate(prompt, greedy(1), items=(wrong,)).error or "")


@pytest.mark.parametrize("kind", ["qwen2_audio", "voxtral"])
def test_extractors_of_processors_are_read(tmp_path: Path, kind: str) -> None:
    """Recent versions of transformers write one file; without any, whisper's features are assumed."""
    folder = save_audio_model(make_audio_model(kind), tmp_path)
    settings_file = folder / "preprocessor_config.json"
    expected = read_model_config(folder).facts.audio
    extractor = json.loads(settings_file.read_text())
    settings_file.unlink()
    assert read_model_config(folder).facts.audio == expected
    (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": {**extractor, "hop_length": 5}}))
    with pytest.raises(ModelError, match="hop_length is 5"):
        read_model_config(folder)
