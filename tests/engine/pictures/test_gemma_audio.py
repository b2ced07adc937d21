"""Audio of Gemma 4, alone and beside pictures: features, encodings and tokens are those of transformers."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.config.options import ModelOptions
from quire.engine.client.protocol import MediaItem
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.models.layers.mobilenet import MobileNetV5
from quire.engine.models.model_config import read_model_config
from quire.multimodal.audio.items import audio_items, encoded_columns, longest_audio, token_count
from tests.support.audio_models import noise
from tests.support.engine import Engine, greedy
from tests.support.gemma_audio import (
    GEMMA_AUDIO,
    LONGEST,
    audio_inputs,
    expected_encoding,
    expected_of_media,
    media_prompt,
    save_hearing,
)
from tests.support.mobilenet import encode
from tests.support.pictures import drawn
from tests.support.variants import slow_but
from tests.support.vision_models import MadeWhenAsked, make_composite

# Parts of prompts: audio, seconds of it; pictures, their heights and widths; text.
PROMPTS: tuple[tuple[Any, ...], ...] = (
    ([5, 9], 0.63, [8]),
    ([5, 9], 0.3, [3, 4], 0.77, [8, 7]),
    ([5], (40, 60), [6], 0.41, [9]),
    (0.52, [6], (60, 31), [4], (20, 20), [7, 7], 0.3, [2]),
    ([5, 9, 77, 281, 292, 299],),
)
SCHEDULES: dict[str, dict[str, Any]] = {
    "small chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "two steps in flight": {"in_flight": 2, "max_num_batched_tokens": 9, "max_num_seqs": 5, "block_size": 4},
    "speculation": {"speculative_method": "ngram", "num_speculative_tokens": 4, "block_size": 4},
    "small blocks": {"block_size": 3},
}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """transformers' models by case."""
    return MadeWhenAsked(lambda case: make_composite(case, hears=True))


@pytest.fixture(scope="module")
def folders(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return MadeWhenAsked(lambda case: save_hearing(models[case], case, tmp_path_factory.mktemp(case)))


def engine_of(folders: dict[str, Path], case: str, **options: Any) -> Engine:
    """An engine whose steps have room for a picture, if it is computed as a whole."""
    if case == "gemma4_unified" and "max_num_batched_tokens" in options:
        options["max_num_batched_tokens"] += 70
    return Engine(folders[case], **options)


def media(parts: tuple[Any, ...]) -> list[Any]:
    """The audio, pictures and text of a prompt."""
    made: list[Any] = []
    for index, part in enumerate(parts):
        if isinstance(part, float):
            made.append(noise(index, part))
        else:
            made.append(drawn(*part, seed=index) if isinstance(part, tuple) else part)
    return made


@pytest.mark.parametrize("case", GEMMA_AUDIO)
def test_features_and_lengths_equal_those_of_the_extractors(folders: dict[str, Path], case: str) -> None:
    info = read_model_config(folders[case]).facts.audio
    assert info is not None
    for length in (513, 640, 641, 4801, 9999, 12_799):
        samples = noise(3, length / 16_000)
        (item,) = audio_items(samples, info)
        inputs = audio_inputs(case, [samples])
        expected = inputs["input_features"][0][inputs["input_features_mask"][0].bool()].T.numpy()
        assert encoded_columns(len(samples), info) == item.columns == expected.shape[1]
        np.testing.assert_allclose(item.features, expected, atol=2e-5)
        assert item.length == token_count(len(samples), info)
    assert token_count(longest_audio(info) or 0, info) == LONGEST[case]
    assert longest_audio(info) == (12_800 if case == "gemma3n" else 32_000)
    assert (token_count(160, info) == 0) == (case != "gemma4_unified")


@pytest.mark.parametrize("case", GEMMA_AUDIO)
def test_encodings_equal_those_of_transformers(models: dict[str, Any], folders: dict[str, Path], case: str) -> None:
    """In float32, and nearly so in bfloat16."""
    for dtype, bound in (("float32", 1e-5), ("bfloat16", 0.05)):
        engine = Engine(folders[case], model=ModelOptions(dtype=dtype))
        for seconds in (0.041, 0.25, 0.7):
            (item,) = audio_items(noise(5, seconds), engine.audio)
            encoded = engine.model.vision.encode_audio(item).float()
            expected = expected_encoding(models[case], case, noise(5, seconds))
            assert len(encoded) == item.length
            encoded = encoded[: len(expected)]
            assert ((encoded - expected).abs().mean() / expected.abs().mean()).item() < bound


@pytest.mark.parametrize("case", GEMMA_AUDIO)
def test_greedy_tokens_equal_transformers(models: dict[str, Any], folders: dict[str, Path], case: str) -> None:
    """All together in small chunks, then each alone."""
    engine = engine_of(folders, case, block_size=8, max_num_batched_tokens=11, max_num_seqs=5)
    expected = []
    for index, parts in enumerate(map(media, PROMPTS)):
        prompt, items = media_prompt(engine, *parts)
        engine.add(str(index), prompt, greedy(7), items=items)
        expected.append(expected_of_media(models[case], case, prompt, parts, 7))
    engine.run()
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "the outputs say nothing about the inputs"
    assert [engine.results[str(index)].tokens for index in range(len(expected))] == expected
    alone = Engine(folders[case])
    for index, parts in enumerate(map(media, PROMPTS)):
        prompt, items = media_prompt(alone, *parts)
        assert alone.generate(prompt, greedy(7), items=items).tokens == expected[index]


def workload(engine: Engine, seed: int) -> list[tuple[list[int], tuple[MediaItem, ...], SamplingParams]]:
    """Prompts with audio and pictures, of which there are some; many begin alike."""
    rng = random.Random(seed)
    requests = []
    for _ in range(8):
        parts: list[Any] = [[5, 9]]
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            number = rng.randint(0, 3)
            part = noise(number, 0.2 + 0.15 * number) if rng.random() < 0.6 else drawn(20 + 9 * number, 40, seed=number)
            parts += [part, [rng.randint(20, 22)] * rng.randint(0, 2)]
        prompt, items = media_prompt(engine, *parts, [rng.randint(0, 200)])
        temperature, drawn_seed = rng.choice([0.0, 0.0, 1.0]), rng.randint(0, 1 << 30)
        params = SamplingParams(max_tokens=rng.randint(1, 12), temperature=temperature, seed=drawn_seed)
        requests.append((prompt, items, params))
    return requests


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """The tokens of each request of a workload alone in the engine, without prefix caching, by case."""

    def generate(case: str) -> list[list[int]]:
        engine = Engine(folders[case], enable_prefix_caching=False)
        return [engine.generate(prompt, params, items=items).tokens for prompt, items, params in workload(engine, 1)]

    return MadeWhenAsked(generate)


def together(engine: Engine) -> list[list[int]]:
    """Run a workload, whose requests arrive at random steps."""
    rng = random.Random(2)
    pending = [(rng.randint(0, 8), f"r{index}", request) for index, request in enumerate(workload(engine, 1))]
    names = [name for _, name, _ in pending]
    step = 0
    while pending or engine.busy:
        for entry in [entry for entry in pending if entry[0] <= step]:
            pending.remove(entry)
            prompt, items, params = entry[2]
            engine.add(entry[1], prompt, params, items=items)
        if engine.busy:
            engine.step()
        step += 1
    assert engine.blocks_used == 0
    return [engine.results[name].tokens for name in names]


@pytest.mark.parametrize(
    ("case", "schedule"),
    slow_but(
        product(GEMMA_AUDIO, SCHEDULES),
        ("gemma4", "small chunks"),
        ("gemma4", "two steps in flight"),
        ("gemma4_unified", "small chunks"),
    ),
)
def test_tokens_do_not_depend_on_the_schedule(
    folders: dict[str, Path], alone: dict[str, list[list[int]]], case: str, schedule: str
) -> None:
    assert together(engine_of(folders, case, **SCHEDULES[schedule])) == alone[case]


def test_tokens_do_not_depend_on_preemption(folders: dict[str, Path], alone: dict[str, list[list[int]]]) -> None:
    """The cache holds little more than the longest request, so that they preempt each other.

    Of the other models most layers free what is before their window.
    """
    case = "gemma4_unified"
    roomy = Engine(folders[case], block_size=4)
    longest = max(len(prompt) + params.max_tokens for prompt, _, params in workload(roomy, 1))
    engine = Engine(
        folders[case],
        model=ModelOptions(max_model_len=longest),
        block_size=4,
        kv_cache_memory_bytes=(longest // 4 + 1) * roomy.block_bytes,
    )
    assert together(engine) == alone[case]
    assert engine.preemptions > 0


@pytest.mark.parametrize("case", GEMMA_AUDIO)
def test_prefixes_are_shared_on_equal_audio_only(folders: dict[str, Path], case: str) -> None:
    """The tokens are the same in all of these prompts."""
    engine, fresh = Engine(folders[case], block_size=4), Engine(folders[case], enable_prefix_caching=False)
    cached = []
    for seed in (0, 0, 1, 1):
        prompt, items = media_prompt(engine, [5, 9, 7, 8, 3], noise(seed, 0.6), [1, 2])
        result = engine.generate(prompt, greedy(4), items=items)
        cached.append(result.outputs[0].cached_tokens)
        assert result.tokens == fresh.generate(prompt, greedy(4), items=items).tokens
    whole = len(prompt) // 4 * 4
    assert cached == [0, whole - 4 * (whole == len(prompt)), 4, whole - 4 * (whole == len(prompt))]
    assert engine.items_encoded == 2


@pytest.mark.parametrize(
    ("case", "audio", "processor", "reason"),
    [
        ("gemma4", {"attention_chunk_size": 0}, {}, "attention_chunk_size is 0"),
        ("gemma4", {"num_attention_heads": 5}, {}, "cannot be split into 5 heads"),
        ("gemma4", {"subsampling_conv_channels": [8]}, {}, "subsampling_conv_channels is [8]"),
        ("gemma4", {}, {"feature_size": 40}, "makes 40 rows"),
        ("gemma4", {}, {"preemphasis": 0.97}, "preemphasis is 0.97"),
        ("gemma4_unified", {}, {"audio_samples_per_token": 320}, "audio_samples_per_token is 320"),
        ("gemma4_unified", {}, {"sampling_rate": 24_000}, "sampling_rate is 24000"),
        ("gemma3n", {"conf_reduction_factor": 0}, {}, "conf_reduction_factor is 0"),
        ("gemma3n", {"sscp_conv_stride_size": [[2, 2], [1, 1]]}, {}, "sscp_conv_stride_size is"),
        ("gemma3n", {}, {"mel_floor": 1e-3}, "mel_floor is 0.001"),
    ],
)
def test_what_is_not_supported_is_named(
    folders: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    case: str,
    audio: dict[str, Any],
    processor: dict[str, Any],
    reason: str,
) -> None:
    """The model reads text and pictures then."""
    for file in folders[case].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for name, part, changes in (
        ("config.json", "audio_config", audio),
        ("processor_config.json", "feature_extractor", processor),
    ):
        config = json.loads((tmp_path / name).read_text())
        config[part].update(changes)
        (tmp_path / name).write_text(json.dumps(config))
    config = read_model_config(tmp_path)
    assert config.facts.audio is None
    assert config.facts.pictures is not None
    assert reason in caplog.text


def test_a_model_without_its_encoder_of_audio(folders: dict[str, Path], tmp_path: Path) -> None:
    """It holds less weights, answers text and pictures as before, and refuses audio."""
    for file in folders["gemma4"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    processor = json.loads((tmp_path / "processor_config.json").read_text())
    processor["feature_extractor"]["mel_floor"] = 1.0
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    whole, deaf = Engine(folders["gemma4"]), Engine(tmp_path)
    assert deaf.info.weight_bytes < whole.info.weight_bytes
    prompt, items = media_prompt(whole, [5], drawn(40, 60), [7])
    assert deaf.generate(prompt, greedy(4), items=items).tokens == whole.generate(prompt, greedy(4), items=items).tokens
    prompt, items = media_prompt(whole, [5], noise(0, 0.4), [7])
    assert "does not accept audio" in (deaf.generate(prompt, greedy(4), items=items).error or "")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"vision_config": {"architecture": "resnet50"}}, "architecture is 'resnet50'"),
        ({"vision_config": {"model_args": {"channel_multiplier": 2}}}, "channel_multiplier is 2"),
        ({"vision_config": {"model_args": {"stem_size": 8}}}, "model_args has 'stem_size'"),
        ({"vision_config": {"vocab_offset": 270}}, "must follow each other"),
        ({"vision_soft_tokens_per_image": 9}, "vision_soft_tokens_per_image is 9"),
        ({"image_token_id": 17}, "image_token_id is 17"),
    ],
)
def test_pictures_of_gemma3n_that_are_not_supported(
    folders: dict[str, Path], tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    """The model reads text only then."""
    for file in folders["gemma3n"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    for name, value in fields.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    known = read_model_config(tmp_path)
    assert known.facts.audio is None
    assert known.facts.pictures is None
    assert reason in (known.text_only or "")


def test_mobilenet_in_plain_operators() -> None:
    """Of several sizes: two stages' results are joined, and averaged or interpolated."""
    torch.manual_seed(3)
    tower = MobileNetV5(0.04, 2).eval()
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.normal_(*((0.7, 0.3) if parameter.dim() == 1 else (0.0, 0.3)))
        weights: dict[str, torch.Tensor] = dict(tower.named_parameters())
        for size in (64, 128):
            pixels = torch.randn(2, 3, size, size)
            torch.testing.assert_close(tower(pixels), encode(weights, pixels, 2), atol=1e-4, rtol=1e-4)
