"""Qwen2.5-Omni: pictures, videos and audio in one prompt, against the part of transformers' model that reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM, WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire.config.options import ModelOptions
from quire.engine.client.pictures import VideoInfo
from quire.engine.client.protocol import AudioItem, MediaItem, PictureItem
from quire.engine.scheduling.items import PlaceholderRanges
from quire.multimodal.audio.items import audio_items, audio_placeholders, parts_of_sound, token_count
from quire.multimodal.picture_reader import RequestPicture, picture_placeholders
from quire.multimodal.placement import place_items
from quire.multimodal.videos.decode import PrepareVideo, prepare
from quire.multimodal.videos.layout import video_layout
from tests.support.audio_models import RATE, Samples, noise, span
from tests.support.engine import Engine, greedy
from tests.support.models import draw_weights
from tests.support.pictures import drawn
from tests.support.video_models import LIMITS, Clip, filmed, processed
from tests.support.vision_models import QWEN_VISION, seen

# Placeholders, and tokens before and behind them.
PICTURE, AUDIO, SIGHT, SOUND, END, VIDEO = 290, 291, 292, 293, 294, 295
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
    "video_token_index": VIDEO,
    "audio_token_index": AUDIO,
    "vision_start_token_id": SIGHT,
    "audio_start_token_id": SOUND,
    "tie_word_embeddings": False,
}
PICTURES = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 12})
FEATURES = WhisperFeatureExtractor(feature_size=16, chunk_length=3)


@dataclass(frozen=True)
class Film:
    """A clip, and its sound."""

    clip: Clip
    sound: Samples


CASES: dict[str, list[Any]] = {
    "picture": [[5, 9], drawn(60, 44), [20]],
    "audio of several chunks": [[5], noise(0, 0.93), [20, 31]],
    "audio of whole columns": [noise(1, 0.4), [7]],
    "both": [[4], drawn(30, 90), [8], noise(2, 0.5), [3], drawn(41, 40, seed=1), [6, 6]],
    "text": [[5, 9, 20, 8]],
    "video": [[5, 9], filmed(5, 60, 44, seed=1), [20]],
    "videos, a picture and audio": [
        filmed(4, 56, 60, seed=2),
        [8],
        drawn(30, 90),
        noise(2, 0.5),
        [7],
        filmed(2, 90, 40, seed=3),
        [3, 6],
    ],
}
# Parts of frames and of sound are two seconds long.
WITH_SOUND: dict[str, list[Any]] = {
    "the sound is longer": [[5, 9], Film(filmed(4, 60, 44, seed=1), noise(3, 2.6)), [20, 31]],
    "the frames are longer": [[5], Film(filmed(7, 44, 60, seed=2), noise(4, 0.7)), [20, 8, 9]],
    "both end together": [Film(filmed(6, 44, 60, seed=4), noise(5, 2.5)), [11]],
    "beside others": [
        [4],
        noise(6, 0.5),
        drawn(30, 90),
        [8],
        Film(filmed(3, 60, 44, seed=5), noise(7, 1.3)),
        [3],
        Film(filmed(9, 30, 44, seed=6), noise(8, 2.9)),
        drawn(41, 40, seed=1),
        [6, 6],
    ],
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


def video_of(engine: Engine) -> VideoInfo:
    """How videos are read, in a size that is small."""
    info = engine.pictures.video
    assert info is not None
    assert info.sound is not None
    small = msgspec.structs.replace(info.geometry, min_pixels=28 * 28 * 2, max_pixels=28 * 28 * 9)
    return msgspec.structs.replace(info, geometry=small)


def watched(engine: Engine, clip: Clip, sound: Samples | None, start: int) -> tuple[list[int], list[MediaItem]]:
    """The tokens of a video that begin at `start`, and its items, as a chat with them has them."""
    info = video_of(engine)
    assert info.sound is not None
    heard = [] if sound is None else audio_items(sound, engine.audio)
    layout = video_layout(info, clip.header, sum(item.length for item in heard))
    pixels = prepare(PrepareVideo(clip.content, clip.header, info), LIMITS)
    items = []
    for index, place in enumerate(layout.items):
        images = np.ascontiguousarray(pixels[index * place.images : (index + 1) * place.images])
        digest = hashlib.sha256(images.tobytes() + repr((images.shape, place)).encode()).digest()
        items.append(
            PictureItem(
                hash=digest,
                start=-int(place.text_before),
                length=place.length,
                pixels=images,
                text_offsets=place.text_offsets(),
                positions=place.positions(),
                advance=place.advance,
                is_video=True,
            )
        )
    kinds = picture_placeholders([RequestPicture(info, layout, tuple(items))])
    names = {info.token: VIDEO, info.sound.token: AUDIO, info.sound.before: SOUND, info.sound.after: END}
    text = layout.text
    tokens = []
    while text:
        name = next(name for name in names if text.startswith(name))
        tokens.append(names[name])
        text = text.removeprefix(name)
    if heard:
        parts = parts_of_sound(heard, info.sound.part, ends_video=not layout.items[-1].text_behind)
        kinds.append(audio_placeholders(parts, engine.audio))
    placed, media = place_items(np.array(tokens, np.int32), kinds)
    return placed.tolist(), [msgspec.structs.replace(item, start=item.start + start) for item in media]


def prompt_of(engine: Engine, parts: list[Any]) -> tuple[list[int], tuple[MediaItem, ...]]:
    tokens: list[int] = []
    items: list[MediaItem] = []
    for part in parts:
        if isinstance(part, list):
            tokens += part
            continue
        if isinstance(part, Clip | Film):
            clip, sound = (part, None) if isinstance(part, Clip) else (part.clip, part.sound)
            of_video, video_items = watched(engine, clip, sound, len(tokens) + 1)
            tokens += [SIGHT, *of_video, END]
            items += video_items
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


def inputs_to(parts: list[Any]) -> dict[str, Any]:
    """The arguments of `generate` for media."""
    pictures = [part for part in parts if isinstance(part, Image.Image)]
    clips = [part.clip if isinstance(part, Film) else part for part in parts if isinstance(part, Clip | Film)]
    heard = [part.sound if isinstance(part, Film) else part for part in parts]
    sounds: list[Samples] = [part for part in heard if isinstance(part, np.ndarray)]
    inputs: dict[str, Any] = dict(PICTURES(images=pictures, return_tensors="pt")) if pictures else {}
    inputs |= inputs_of(clips)
    inputs["use_audio_in_video"] = any(isinstance(part, Film) for part in parts)
    if sounds:
        made = FEATURES(
            sounds, sampling_rate=RATE, padding="max_length", return_attention_mask=True, return_tensors="pt"
        )
        inputs |= {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}
    return inputs


def expected_tokens(model: Any, prompt: list[int], parts: list[Any], count: int) -> list[int]:
    """Greedy tokens of transformers' `generate`."""
    ids, inputs = torch.tensor([prompt]), inputs_to(parts)
    model.model.rope_deltas = None  # of the call before
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **inputs
        )
    return [int(token) for token in out[0, len(prompt) :]]


def inputs_of(clips: Sequence[Clip]) -> dict[str, Any]:
    """The arguments of `generate` for clips at two frames in a second."""
    if not clips:
        return {}
    made = processed("qwen2_5_vl", clips)
    names = ("pixel_values_videos", "video_grid_thw")
    inputs: dict[str, Any] = {name: torch.cat([clip[name] for clip in made]) for name in names}
    return {**inputs, "video_second_per_grid": torch.ones(len(clips))}


def test_greedy_tokens_equal_transformers(model: Any, folder: Path) -> None:
    """All together in small chunks."""
    engine = Engine(folder, block_size=8, max_num_batched_tokens=11, max_num_seqs=5)
    expected = {}
    for name, parts in [*CASES.items(), *WITH_SOUND.items()]:
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


@pytest.mark.parametrize("name", ["picture", "video", "videos, a picture and audio", *WITH_SOUND])
def test_rotary_positions_equal_transformers(model: Any, folder: Path, name: str) -> None:
    parts = {**CASES, **WITH_SOUND}[name]
    prompt, items = prompt_of(Engine(folder), parts)
    inputs = inputs_to(parts)
    mask = inputs.get("feature_attention_mask")
    ids = torch.tensor([prompt])
    expected, _ = model.get_rope_index(
        ids,
        inputs.get("image_grid_thw"),
        inputs.get("video_grid_thw"),
        torch.ones_like(ids),
        use_audio_in_video=inputs["use_audio_in_video"],
        audio_seqlens=None if mask is None else mask.sum(-1),
        second_per_grids=inputs.get("video_second_per_grid"),
    )
    positions = PlaceholderRanges(items, b"").rotary_positions(len(prompt))
    assert positions is not None
    assert positions.tokens.tolist() == expected[:, 0].tolist()
    assert positions.following == expected[0, 0, -1] + 1


def test_time_beyond_the_tokens(model: Any, folder: Path) -> None:
    """Behind a video text counts on from its time; no answer goes beyond the context."""
    engine = Engine(folder, model=ModelOptions(max_model_len=160))
    parts: list[Any] = [[5], filmed(8, 40, 40, seed=1), [20, 31]]
    prompt, items = prompt_of(engine, parts)
    room = 160 - (1 + 1 + 3 * 25 + 1 + 1 + 2)  # frames at 0, 25, 50 and 75
    assert len(prompt) < 160 - room
    expected = expected_tokens(model, prompt, parts, room)
    assert engine.generate(prompt, greedy(room), items=items).tokens == expected
    error = engine.generate(prompt, greedy(room + 1), items=items).error
    assert error is not None
    assert error.endswith(f"at most {room} tokens may follow, not {room + 1}")


def test_the_same_film_is_found_in_the_prefix_cache(folder: Path) -> None:
    """With its sound only where it was computed with it."""
    engine = Engine(folder, block_size=4)
    film = Film(filmed(6, 44, 60, seed=4), noise(5, 2.5))
    cached = []
    for part in (film, film, film.clip, Film(film.clip, noise(6, 2.5))):
        prompt, items = prompt_of(engine, [[5, 9, 3], part, [11]])
        cached.append(engine.generate(prompt, greedy(2), items=items).outputs[0].cached_tokens)
        fresh = Engine(folder).generate(prompt, greedy(2), items=items)
        assert engine.generate(prompt, greedy(2), items=items).tokens == fresh.tokens
    assert cached[1] >= len(prompt) - 4
    assert [cached[0], cached[2]] == [0, 4]
    assert 4 < cached[3] < cached[1]  # the frames of the first part are the same


def test_audio_beside_pictures_is_encoded_once(folder: Path) -> None:
    engine = Engine(folder)
    sound = noise(2, 0.4)
    for parts in ([[5], sound, [7]], [[4], sound, drawn(30, 90), [3]]):
        prompt, items = prompt_of(engine, parts)
        assert engine.generate(prompt, greedy(2), items=items).error is None
    assert engine.items_encoded == 2


def test_positions_that_are_refused(folder: Path) -> None:
    engine = Engine(folder)
    prompt, items = prompt_of(engine, [[5, 9], Film(filmed(4, 60, 44, seed=1), noise(3, 0.4)), [20]])
    first, _, heard = items
    assert isinstance(first, PictureItem)
    assert first.positions is not None
    cases: list[tuple[MediaItem, str]] = [
        (msgspec.structs.replace(first, positions=first.positions - 9), "must not be negative"),
        (msgspec.structs.replace(first, positions=first.positions + 600), "its frames are too far apart"),
        (msgspec.structs.replace(first, advance=1 << 25), "the advance of a picture must be"),
    ]
    for wrong, reason in cases:
        assert reason in (engine.generate(prompt, greedy(2), items=(wrong, *items[1:])).error or "")
    end = len(prompt) - 3  # without the tokens behind the sound
    assert isinstance(heard, AudioItem)
    assert heard.start + heard.length == end
    assert "but the prompt has" in (engine.generate(prompt[:end], greedy(2), items=items).error or "")
    assert engine.generate(prompt, greedy(2), items=items).error is None
