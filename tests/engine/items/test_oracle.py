"""Language models that read audio compute what transformers computes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.config.options import ModelOptions
from quire.multimodal.audio.items import audio_items, encoded_columns, token_count
from tests.support.audio_models import (
    KINDS,
    expected_tokens,
    make_audio_model,
    noise,
    prompt_with,
    save_audio_model,
    transformers_inputs,
)
from tests.support.engine import Engine, greedy
from tests.support.variants import slow_but

TOKENS = 7  # of each answer
# Seconds of the pieces of audio in each prompt; those of qwen2_audio have at most one second.
AUDIO: dict[str, list[list[float]]] = {
    "qwen2_audio": [[1.0], [0.3, 0.617], [0.0613], [0.5, 0.9999, 0.25], []],
    "voxtral": [[1.0], [0.3, 1.4], [2.6], []],
    "qwen3_asr": [[1.0], [0.2, 3.7], [2.05], [6.01], []],
    "granite_speech": [[1.0], [0.2, 1.7], [0.017], [2.61, 0.4, 0.8], [0.31], []],
    "granite_speech_plus": [[1.0], [0.2, 1.7], [0.017], []],
    "phi4_multimodal": [[1.0], [0.2, 3.7], [0.026], [0.4, 0.8, 1.3], []],
}


TRANSPOSED = ("granite_speech", "granite_speech_plus", "phi4_multimodal")  # transformers' features are columns first


def pieces(seconds: list[float]) -> list[Any]:
    """Audio with text between."""
    parts: list[Any] = [[5, 9, 77]]
    for index, length in enumerate(seconds):
        parts += [noise(index + round(100 * length), length), [20 + index, 31]]
    return [*parts, [8, 101]]


@pytest.mark.parametrize(
    ("kind", "device"),
    slow_but(
        product(KINDS, ["cpu", "reference"]),
        *((kind, "cpu") for kind in KINDS),
        ("qwen3_asr", "reference"),
        ("granite_speech", "reference"),
    ),
)
def test_greedy_tokens_equal_transformers(
    audio_models: dict[str, Any], audio_folders: dict[str, Path], kind: str, device: str
) -> None:
    """All together in small chunks, then each alone."""
    options = ModelOptions(device=device)
    engine = Engine(audio_folders[kind], model=options, block_size=8, max_num_batched_tokens=11, max_num_seqs=5)
    info = engine.audio
    expected = []
    for index, seconds in enumerate(AUDIO[kind]):
        parts = pieces(seconds)
        prompt, items = prompt_with(info, *parts)
        engine.add(str(index), prompt, greedy(TOKENS), items=items)
        audios = [part for part in parts if isinstance(part, np.ndarray)]
        expected.append(expected_tokens(audio_models[kind], prompt, audios, TOKENS))
    engine.run()
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "the outputs say nothing about the inputs"
    assert [engine.results[str(index)].tokens for index in range(len(expected))] == expected
    alone = Engine(audio_folders[kind], model=options)
    for index, seconds in enumerate(AUDIO[kind]):
        prompt, items = prompt_with(info, *pieces(seconds))
        assert alone.generate(prompt, greedy(TOKENS), items=items).tokens == expected[index]


@pytest.mark.parametrize("kind", KINDS)
def test_the_audio_is_heard(audio_folders: dict[str, Path], kind: str) -> None:
    """Other audio under the same tokens gives another text."""
    engine = Engine(audio_folders[kind])
    texts = set()
    for seed in range(4):
        prompt, items = prompt_with(engine.audio, [5, 9], noise(seed, 0.8), [7])
        texts.add(tuple(engine.generate(prompt, greedy(12), items=items).tokens))
    assert len(texts) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_features_and_lengths_equal_those_of_the_processors(audio_folders: dict[str, Path], kind: str) -> None:
    info = Engine(audio_folders[kind]).audio
    for seconds in (0.0613, 0.3, 0.5, 0.99, 1.0, 1.7, 3.21):
        if info.max_items is not None and seconds > 1:
            continue
        samples = noise(3, seconds)
        inputs = transformers_inputs(kind, [samples])
        items = audio_items(samples, info)
        features = np.concatenate([item.features[:, : item.columns] for item in items], 1)
        whole = inputs["audio_input_features" if kind == "phi4_multimodal" else "input_features"]
        if kind == "voxtral":
            rows = whole.transpose(0, 1).flatten(1).numpy()
        else:
            rows = whole[0].T.numpy() if kind in TRANSPOSED else whole[0].numpy()
        mask = inputs.get("feature_attention_mask", inputs.get("input_features_mask"))
        columns = rows.shape[1] if mask is None else int(mask.sum())
        assert encoded_columns(len(samples), info) == columns
        np.testing.assert_allclose(features, rows[:, : features.shape[1]], atol=2e-4)
        assert sum(item.length for item in items) == token_count(len(samples), info)


@pytest.mark.parametrize("kind", KINDS)
def test_old_names_of_weights(tmp_path: Path, kind: str) -> None:
    """Checkpoints that have each other's prefixes."""
    from safetensors.torch import load_file, save_file

    model = make_audio_model(kind)
    folder = save_audio_model(model, tmp_path)
    tokens = Engine(folder).generate([1, 2, 3], greedy(8)).tokens
    weights = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    inside = {name if name.startswith("lm_head") else f"model.{name}": tensor for name, tensor in bare.items()}
    for renamed in (bare, inside):
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
        assert Engine(folder).generate([1, 2, 3], greedy(8)).tokens == tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_low_precision_stays_close(audio_folders: dict[str, Path], kind: str, quantization: str) -> None:
    """Log-probabilities in bfloat16 and int8 are near those in float32."""
    exact = Engine(audio_folders[kind])
    prompt, items = prompt_with(exact.audio, [5, 9], noise(1, 0.8), [7])
    rough = Engine(audio_folders[kind], model=ModelOptions(dtype="bfloat16", quantization=quantization))
    probs = []
    for engine in (exact, rough):
        outputs = engine.generate(prompt, greedy(1, logprobs=300), items=items).outputs
        assert outputs[0].logprobs is not None
        entry = outputs[0].logprobs[0]
        row = torch.zeros(300)
        row[entry.token_ids] = torch.tensor(entry.logprobs).exp()
        probs.append(row)
    assert 0.5 * float((probs[0] - probs[1]).abs().sum()) < 0.25
