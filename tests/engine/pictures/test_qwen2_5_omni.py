"""Qwen2.5-Omni: pictures and audio, alone and in one prompt, against the part of transformers' model that reads."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM, WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire.engine.client.protocol import MediaItem
from quire.multimodal.audio.items import token_count
from tests.support.audio_models import RATE, Samples, noise, span
from tests.support.engine import Engine, greedy
from tests.support.models import draw_weights
from tests.support.pictures import drawn
from tests.support.vision_models import QWEN_VISION, seen

PICTURE, AUDIO, SIGHT, SOUND, END = 290, 291, 292, 293, 294  # placeholders, and tokens before and behind them
CONFIG: dict[str, Any] = {
    "audio_config": {
        "num_mel_bins": 16,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "output_dim": 64,
        "n_window": 20,
        "max_source_positions": 100,
    },
    "vision_config": QWEN_VISION,
    "text_config": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": False,
    },
    "image_token_index": PICTURE,
    "audio_token_index": AUDIO,
    "vision_start_token_id": SIGHT,
    "audio_start_token_id": SOUND,
    "tie_word_embeddings": False,
}
PICTURES = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 12})
FEATURES = WhisperFeatureExtractor(feature_size=16, chunk_length=3)
CASES: dict[str, list[Any]] = {
    "picture": [[5, 9], drawn(60, 44), [20]],
    "audio of several chunks": [[5], noise(0, 0.93), [20, 31]],
    "audio of whole columns": [noise(1, 0.4), [7]],
    "both": [[4], drawn(30, 90), [8], noise(2, 0.5), [3], drawn(41, 40, seed=1), [6, 6]],
    "text": [[5, 9, 20, 8]],
}


@pytest.fixture(scope="module")
def model() -> Any:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2_5_omni_thinker", **deepcopy(CONFIG))
    made = AutoModelForMultimodalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    draw_weights(made, "qwen2_5_omni")
    made.generation_config.eos_token_id = None
    made.generation_config.pad_token_id = 0
    return made


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("omni")
    model.save_pretrained(path)
    config = {**json.loads(FEATURES.to_json_string()), **json.loads(PICTURES.to_json_string())}
    (path / "preprocessor_config.json").write_text(json.dumps(config))
    return path


def prompt_of(engine: Engine, parts: list[Any]) -> tuple[list[int], tuple[MediaItem, ...]]:
    tokens: list[int] = []
    items: list[MediaItem] = []
    for part in parts:
        if isinstance(part, list):
            tokens += part
            continue
        tokens.append(SIGHT if isinstance(part, Image.Image) else SOUND)
        if isinstance(part, Image.Image):
            of_picture, picture_items = seen(engine.pictures, part, len(tokens))
            tokens += of_picture
            items += picture_items
        else:
            items += span(part, engine.audio, len(tokens))
            tokens += [AUDIO] * token_count(len(part), engine.audio)
        tokens.append(END)
    return tokens, tuple(items)


def expected_tokens(model: Any, prompt: list[int], parts: list[Any], count: int) -> list[int]:
    """Greedy tokens of transformers' `generate`."""
    pictures = [part for part in parts if isinstance(part, Image.Image)]
    sounds: list[Samples] = [part for part in parts if not isinstance(part, Image.Image | list)]
    inputs: dict[str, Any] = dict(PICTURES(images=pictures, return_tensors="pt")) if pictures else {}
    if sounds:
        made = FEATURES(
            sounds, sampling_rate=RATE, padding="max_length", return_attention_mask=True, return_tensors="pt"
        )
        inputs |= {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}
    ids = torch.tensor([prompt])
    model.model.rope_deltas = None  # of the call before
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **inputs
        )
    return [int(token) for token in out[0, len(prompt) :]]


def test_greedy_tokens_equal_transformers(model: Any, folder: Path) -> None:
    """All together in small chunks."""
    engine = Engine(folder, block_size=8, max_num_batched_tokens=11, max_num_seqs=5)
    expected = {}
    for name, parts in CASES.items():
        prompt, items = prompt_of(engine, parts)
        expected[name] = expected_tokens(model, prompt, parts, 8)
        engine.add(name, prompt, greedy(8), items=items)
    engine.run()
    assert len(set(map(tuple, expected.values()))) == len(expected)
    assert {name: engine.results[name].error for name in expected} == dict.fromkeys(expected)
    assert {name: engine.results[name].tokens for name in expected} == expected


def test_the_whole_model_as_published(folder: Path, tmp_path: Path) -> None:
    """Its config has one for each part, and its weights those of the parts that speak."""
    for name in ("preprocessor_config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "thinker_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    weights = load_file(folder / "model.safetensors")
    renamed = {f"thinker.{name.removeprefix('thinker.')}": tensor for name, tensor in weights.items()}
    renamed |= {"talker.x.weight": torch.zeros(2), "token2wav.y.weight": torch.zeros(2)}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    engine, published = Engine(folder), Engine(tmp_path)
    prompt, items = prompt_of(engine, CASES["both"])
    expected = engine.generate(prompt, greedy(4), items=items).tokens
    assert published.generate(prompt, greedy(4), items=items).tokens == expected
