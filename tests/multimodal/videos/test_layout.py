"""Frames, texts, tokens and pixels of videos are those of transformers' video processors."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from transformers.video_utils import VideoMetadata

from quire.engine.client.pictures import FrameSampling, SmartResize, VideoInfo, VideoSound
from quire.multimodal.videos.decode import PrepareVideo, prepare
from quire.multimodal.videos.layout import VideoHeader, in_words, video_layout
from quire.multimodal.videos.sampling import Timeline, chosen_frames
from tests.support.video_models import LIMITS, WATCHES, Clip, cases, filmed, processed, video_info

# Number of frames, their rate. With steps between frames that floats have exactly.
TIMELINES = [(8, 4.0), (30, 10.0), (64, 8.0), (96, 24.0), (240, 30.0), (480, 16.0), (900, 30.0), (1280, 0.5), (7, 1.0)]
# What a model of each kind writes around the tokens of frames.
_TOKENS = {
    "video_token": "<v>",
    "image_token": "<v>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
}


def _written(tokens: str) -> str:
    """A text with each run of placeholders as one."""
    while "<v><v>" in tokens:
        tokens = tokens.replace("<v><v>", "<v>")
    return tokens


@pytest.fixture(scope="module")
def infos(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], VideoInfo]:
    @cache
    def read(case: str) -> VideoInfo:
        info = video_info(case, tmp_path_factory.mktemp(case))
        assert info is not None
        return msgspec.structs.replace(info, token_text="<v>")

    return read


@pytest.mark.parametrize("case", cases("qwen2_vl", "qwen3_vl", "smolvlm", "internvl"))
def test_the_frames_that_are_read(infos: Callable[[str], VideoInfo], case: str) -> None:
    info, processor = infos(case), WATCHES[case].build()
    for frames, fps in TIMELINES:
        metadata = VideoMetadata(total_num_frames=frames, fps=fps, duration=frames / fps)
        expected = [int(index) for index in processor.sample_frames(metadata=metadata)]
        assert chosen_frames(info, Timeline(frames, fps)) == expected, (frames, fps)


@pytest.mark.parametrize("frames", [1, 2, 3])
@pytest.mark.parametrize("case", WATCHES)
def test_short_videos_are_read(infos: Callable[[str], VideoInfo], case: str, frames: int) -> None:
    """Transformers refuses some of them."""
    info = infos(case)
    for fps in (1 / 3600, 1.0, 30.0, 1000.0):
        chosen = chosen_frames(info, Timeline(frames, fps))
        assert chosen
        assert set(chosen) <= set(range(frames))
        header = VideoHeader(frames, fps, frames / fps, 40, 40, tuple(chosen))
        assert video_layout(info, header).tokens > 0


@pytest.mark.parametrize("case", cases("gemma4", "qwen3_vl"))
def test_pixels(infos: Callable[[str], VideoInfo], case: str) -> None:
    """After normalization and cutting into patches, where the processor does that."""
    info = infos(case)
    for clip in (filmed(5, 50, 70, seed=1), filmed(4, 120, 61, seed=2)):
        (made,) = processed(case, [clip])
        pixels = prepare(PrepareVideo(clip.content, clip.header, info), LIMITS)
        expected = made.get("pixel_values_videos", made.get("pixel_values"))
        normalized = (torch.tensor(pixels).permute(0, 3, 1, 2) / 255 - _column(case, "mean")) / _column(case, "std")
        layout = video_layout(info, clip.header)
        if "video_position_ids" in made:
            edge = 8 if case == "gemma4_unified" else 4
            squares = normalized.unfold(2, edge, edge).unfold(3, edge, edge)  # (frames, 3, rows, columns, edge, edge)
            patches = squares.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
            assert torch.allclose(patches, expected[:, : patches.shape[1]], atol=2e-6)
            assert layout.tokens == len(pixels) * made["num_soft_tokens_per_video"][0]
            continue
        if "video_grid_thw" not in made:
            assert torch.allclose(normalized, expected[0], atol=2e-6)
            continue
        grid = made["video_grid_thw"][0].tolist()
        assert [len(layout.items), *(14 * edge for edge in grid[1:])] == [grid[0], *pixels.shape[1:3]]
        processor = WATCHES[case].build()
        patches, *_ = processor.patchify(normalized[None], patch_size=14, merge_size=2, temporal_patch_size=2)
        assert torch.allclose(patches[0], expected, atol=2e-6)
        assert layout.tokens == np.prod(grid) // 4


def _column(case: str, name: str) -> torch.Tensor:
    return torch.tensor(getattr(WATCHES[case].build(), f"image_{name}"))[:, None, None]


def _expected_text(case: str, clip: Clip, monkeypatch: pytest.MonkeyPatch) -> str:
    """The text of transformers' processor."""
    family = {"qwen2_vl": "qwen2_5_vl", "qwen3_5": "qwen3_vl"}.get(case, case)
    module = importlib.import_module(f"transformers.models.{family}.processing_{family}")
    (cls,) = [getattr(module, name) for name in module.__all__ if name.endswith("Processor")]
    if case == "smolvlm":
        monkeypatch.setattr(module, "num2words", in_words)
    fields: dict[str, Any] = {
        "image_seq_length": 4,
        "image_seq_len": 4,
        "num_image_tokens": 4,
        "video_processor": WATCHES[case].build(),
        "_calculate_timestamps": partial(getattr(cls, "_calculate_timestamps", print), None),
        "replace_frame_token_id": None,
    }
    itself = SimpleNamespace(**_TOKENS, **fields)
    if hasattr(cls, "replace_frame_token_id"):
        itself.replace_frame_token_id = partial(cls.replace_frame_token_id, itself)
    (made,) = processed(case, [clip])
    return _written(cls.replace_video_token(itself, made, 0))


@pytest.mark.parametrize("case", WATCHES)
def test_texts(infos: Callable[[str], VideoInfo], case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    info = infos(case)
    for clip in (filmed(5, 50, 70), filmed(4, 30, 30, fps=0.04), filmed(2, 30, 30, fps=7.3)):
        assert _written(video_layout(info, clip.header).text) == _expected_text(case, clip, monkeypatch)


@pytest.mark.parametrize("rate", [1.0, 1.7, 2.0, 3.0, 10.0])
@pytest.mark.parametrize("sound", [1, 49, 50, 51, 130, 400])
def test_frames_and_sound_take_turns_as_in_transformers(rate: float, sound: int) -> None:
    """Of Qwen2.5-Omni."""
    info = VideoInfo(
        placeholder=1,
        placeholder_text="<v>",
        geometry=SmartResize(multiple=28, min_pixels=784, max_pixels=784 * 6),
        sampling=FrameSampling(rule="qwen2_vl", fps=rate),
        group=2,
        is_timed=True,
        tokens_per_second=25,
        nominal_rate=2.0,
        ends_at_largest=True,
        sound=VideoSound(part=50, token="<a>", before="<bos>", after="<eos>"),
    )
    for groups in (1, 2, 3, 8, 17):
        header = VideoHeader(2 * groups, rate, groups, 56, 84, tuple(range(2 * groups)))
        layout = video_layout(info, header, sound)
        processor = SimpleNamespace(
            audio_bos_token="<bos>",
            audio_eos_token="<eos>",
            audio_token="<a>",
            video_token="<v>",
            video_processor=SimpleNamespace(merge_size=2),
            get_chunked_index=partial(Qwen2_5OmniProcessor.get_chunked_index, None),
        )
        videos = {"video_grid_thw": np.array([[groups, 4, 6]]), "video_second_per_grid": [2 / rate]}
        expected = Qwen2_5OmniProcessor.replace_video_with_audio_token(
            processor,
            videos,
            0,
            {"num_audio_tokens": [sound]},
            0,
            position_id_per_seconds=25,
            seconds_per_chunk=2.0,
        )
        assert layout.text.replace("<v>", "<v>" * 6) == re.sub("(<a>){1,50}", "<a>", expected)
        assert layout.tokens == 6 * groups + 1 + (layout.items[-1].text_behind)


def test_numbers_in_words() -> None:
    words = {
        0: "zero",
        13: "thirteen",
        20: "twenty",
        64: "sixty-four",
        100: "one hundred",
        101: "one hundred and one",
        768: "seven hundred and sixty-eight",
        1005: "one thousand and five",
        16384: "sixteen thousand, three hundred and eighty-four",
    }
    assert {number: in_words(number) for number in words} == words


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"video_processor_type": "NewVideoProcessor"}, "the video processor 'NewVideoProcessor' is not"),
    "bounded pixels": ({"cap_pixels_per_frame": True}, "cap_pixels_per_frame is True"),
    "a rate in words": ({"fps": "fast"}, "fps is 'fast'"),
    "another normalization": ({"image_mean": [0.0, 0.0, 0.0]}, "normalized in another way"),
    "raw values": ({"do_rescale": False}, "do_rescale must be true"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_configs_that_are_not_supported(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """The model reads no videos, and the log says why."""
    fields, text = UNSUPPORTED[name]
    assert video_info("qwen2_vl", tmp_path, **fields) is None
    assert text in caplog.text
