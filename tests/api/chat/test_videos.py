"""Videos in all APIs: their frames become items where the message has them; what cannot be read is refused in time."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.engine.client.audio import AudioInfo, AudioLengths
from quire.engine.client.pictures import FixedSize, FrameSampling, SmartResize, VideoInfo, VideoSound
from quire.engine.client.protocol import AudioItem, PictureItem
from quire.engine.client.sampling_params import SamplingParams
from tests.support.audio import voice, wav
from tests.support.clips import sound_file, video_file
from tests.support.fake_core import FakeCore
from tests.support.picture_chat import (
    AUDIO,
    CHAT,
    IMAGE,
    MESSAGES,
    RESPONSES,
    TEXTS,
    TOKEN,
    VIDEO,
    PictureCore,
    asked,
    base64_of,
    data_url,
    image_url,
    painted,
    picture_server,
    refused,
    said,
)
from tests.support.server import until

RED, CLIP, OTHER = painted("red"), video_file(8, fps=4), video_file(8, fps=4, codec="mpeg4")
# Frames as pictures with a time in front, and with tokens of their own; two in a second.
TIMED = VideoInfo(
    placeholder=TOKEN[IMAGE],
    placeholder_text=VIDEO,
    token_text=IMAGE,
    geometry=FixedSize(height=8, width=8, tokens=2),
    sampling=FrameSampling(rule="qwen3_vl", fps=1.0),
    text="glm46v",
    before="<pic>",
    after="</pic>",
)
OWN = msgspec.structs.replace(TIMED, placeholder=TOKEN[VIDEO], token_text="", text="tokens", group=2)
FRAMES = f"<pic>{IMAGE * 2}</pic>0.0 seconds<pic>{IMAGE * 2}</pic>1.8 seconds"
PICTURE = f"<pic>{IMAGE * 4}</pic>"


def video_url(content: bytes, **fields: Any) -> dict[str, Any]:
    """A content part of vLLM's chats."""
    return {"type": "video_url", "video_url": {"url": data_url(content, "video/mp4")}, **fields}


def watching(info: VideoInfo = TIMED, **fields: Any) -> PictureCore:
    return PictureCore(video=info, **fields)


async def test_videos_become_items_between_pictures(tmp_path: Path) -> None:
    """Also where both have the same tokens."""
    core = watching()
    async with picture_server(tmp_path, core) as server:
        body = await said(server, asked("a", video_url(CLIP), "b", image_url(RED), video_url(OTHER), "c"))
    assert f"a{FRAMES}b{PICTURE}{FRAMES}c<|im_end|>" in core.prompts[0]
    (items,) = core.items
    assert [(item.length, item.is_video) for item in items] == [(2, True)] * 2 + [(4, False)] + [(2, True)] * 2
    brightness = [float(item.pixels.mean()) for item in items if item.is_video]
    assert brightness[0] < brightness[1]
    assert len({item.hash for item in items}) == 5
    assert body["usage"]["prompt_tokens_details"]["multimodal_tokens"] == {"image": 4, "video": 8}


async def test_videos_with_tokens_of_their_own(tmp_path: Path) -> None:
    """In groups of frames; the template may write texts."""
    core = watching(OWN)
    async with picture_server(tmp_path, core, template=TEXTS) as server:
        await said(server, asked(image_url(RED), video_url(CLIP), "?"))
    assert f"{PICTURE}\n<pic>{VIDEO * 2}</pic>\n?" in core.prompts[0]
    assert [item.pixels.shape for item in core.items[0]] == [(1, 8, 8, 3), (2, 8, 8, 3)]


async def test_every_form_of_a_part(tmp_path: Path) -> None:
    """In any API, with and without a type; equal videos have equal items."""
    core = watching()
    (tmp_path / "clip.mp4").write_bytes(CLIP)
    url = data_url(CLIP, "video/mp4")
    block = {"type": "video", "source": {"type": "base64", "media_type": "video/mp4", "data": base64_of(CLIP)}}
    parts: list[dict[str, Any]] = [
        video_url(CLIP),
        {"type": "video_url", "video_url": url},
        {"video_url": url},
        {"video_url": {"url": url}},
        {"type": "video_url", "video_url": {"url": f"file://{tmp_path}/clip.mp4"}},
        {"type": "input_video", "video_url": url},
        block,
        {"type": "file", "file": {"file_data": url}},
        {"type": "input_file", "file_data": base64_of(CLIP)},
        {"type": "document", "source": block["source"]},
    ]
    async with picture_server(tmp_path / "m", core, allowed_local_media_path=tmp_path) as server:
        uploaded = await server.http.post("/v1/files", data={"purpose": "vision"}, files={"file": ("clip.mp4", CLIP)})
        stored = {"file_id": uploaded.json()["id"]}
        parts += [{"type": "input_video", **stored}, {"type": "video", "source": {"type": "file", **stored}}]
        parts += [{"type": "file", "file": stored}]
        for part in parts:
            answer = await server.post(CHAT, asked(part))
            assert answer.status_code == 200, answer.text
            assert "x-quire-ignored-fields" not in answer.headers
        for part in parts[0], parts[5], parts[8], parts[10]:
            await said(server, {"input": [{"role": "user", "content": [part]}]}, RESPONSES)
        result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
        await said(server, {"max_tokens": 4, "messages": [{"role": "user", "content": [block]}]}, MESSAGES)
        counted = await said(server, asked(parts[0]), "/tokenize")
        use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
        turns = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        await said(server, {"max_tokens": 4, "messages": turns}, MESSAGES)
    assert counted["tokens"].count(TOKEN[IMAGE]) == 4
    assert len({item.hash for items in core.items for item in items}) == 2
    assert all(FRAMES in prompt for prompt in core.prompts)


async def test_lists_of_frames(tmp_path: Path) -> None:
    """vLLM's form: all frames are read; the request may say how fast they follow each other."""
    core = watching()
    frames = ",".join(base64_of(painted(color, kind="JPEG")) for color in ("#000000", "#808080", "#ffffff"))
    part = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}}
    async with picture_server(tmp_path, core) as server:
        await said(server, asked(part))
        await said(server, asked(part, media_io_kwargs={"video": {"fps": 0.5}}))
        many = {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + "," * 20_000}}
        assert "20001 frames" in (await refused(server, asked(many)))["message"]
    assert [item.pixels[0, 0, 0, 0] for item in core.items[0]] == [0, 128, 255]
    assert "0.1 seconds" in core.prompts[0]
    assert "4.0 seconds" in core.prompts[1]


async def test_the_rate_of_lists_of_frames_where_the_model_chooses_frames_of_files(tmp_path: Path) -> None:
    core = watching(msgspec.structs.replace(TIMED, sampling=FrameSampling(rule="glm46v"), group=1))
    frames = ",".join(base64_of(painted(color, kind="JPEG")) for color in ("#000000", "#ffffff"))
    part = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}}
    rate = {"media_io_kwargs": {"video": {"fps": 0.5}}}
    async with picture_server(tmp_path, core) as server:
        await said(server, asked(part, **rate))
        for parts in ([video_url(CLIP)], [part, video_url(CLIP)]):
            assert (await refused(server, asked(*parts, **rate)))["param"] == "media_io_kwargs.video.fps"
    assert "2.0 seconds" in core.prompts[0]


async def test_which_frames_are_read(tmp_path: Path) -> None:
    core = watching()
    async with picture_server(tmp_path, core, media_io_kwargs={"video": {"num_frames": 3}}) as server:
        cards = (await server.http.get("/v1/models")).json()["data"]
        assert cards[0]["input_modalities"] == ["text", "image", "video"]
        for fields in (
            {},
            {"media_io_kwargs": {"video": {"num_frames": 4}}},
            {"media_io_kwargs": {"video": {"num_frames": -1, "fps": 4}}},
            {"media_io_kwargs": {"video": {"num_frames": 5, "fps": 4}}},
            {"mm_processor_kwargs": {"fps": 3}},
            {"mm_processor_kwargs": {"videos_kwargs": {"num_frames": 1}}},
        ):
            await said(server, asked(video_url(CLIP), **fields))
        cases: tuple[tuple[dict[str, Any], str], ...] = (
            ({"media_io_kwargs": {"video": {"fps": 0}}}, "media_io_kwargs.video.fps"),
            ({"media_io_kwargs": {"video": {"num_frames": 2.5}}}, "media_io_kwargs.video.num_frames"),
            ({"media_io_kwargs": {"video": {"backend": "x"}}}, "media_io_kwargs.video.backend"),
            ({"media_io_kwargs": {"video": 4}}, "media_io_kwargs.video"),
            ({"mm_processor_kwargs": {"fps": 1, "num_frames": 2}}, "mm_processor_kwargs"),
            ({"mm_processor_kwargs": {"videos_kwargs": {"size": {}}}}, "mm_processor_kwargs.size"),
        )
        for setting, param in cases:
            assert (await refused(server, asked(video_url(CLIP), **setting)))["param"] == param
    assert [len(items) for items in core.items] == [3, 4, 8, 5, 6, 1]


async def test_the_same_video_is_decoded_once(tmp_path: Path) -> None:
    """A name stands for what was sent before."""
    core = watching()
    async with picture_server(tmp_path, core) as server:
        reader = server.state.models[0].pictures.reader  # type: ignore[attr-defined]
        await said(server, asked(video_url(CLIP, uuid="a")))
        size = reader.cache.size
        await said(server, asked({"type": "video_url", "video_url": None, "uuid": "a"}))
        await said(server, asked(video_url(CLIP)))
        metrics = (await server.http.get("/metrics")).text
        assert reader.cache.size == size == 2 * 8 * 8 * 3
        error = await refused(server, asked({"type": "video_url", "video_url": None, "uuid": "b"}))
        assert "The video of this `uuid` is not in the cache" in error["message"]
    assert 'quire:mm_cache_hits_total{engine="0",model_name="fake"} 2.0' in metrics
    assert len({item.hash for items in core.items for item in items}) == 2
    np.testing.assert_array_equal(core.items[0][1].pixels, core.items[2][1].pixels)


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "truncated": (video_url(CLIP[: len(CLIP) // 2]), "broken or truncated"),
    "a picture": (video_url(RED), "not a video of a supported format"),
    "audio": (video_url(sound_file()), "has no video stream"),
    "large": (video_url(video_file(2, size=(200, 200))), "--max-video-pixels"),
    "empty": (video_url(b""), "The content is empty"),
    "many bytes": (video_url(CLIP + bytes(100_000)), "--max-video-size"),
    "many frames": (video_url(video_file(40, fps=1)), "--max-video-frames"),
    "http": ({"type": "video_url", "video_url": {"url": "http://169.254.169.254/"}}, "This server fetches no URLs"),
    "file": ({"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}, "This server reads no files"),
    "number": ({"type": "video_url", "video_url": {"url": 5}}, "`video_url` must be"),
    "nothing": ({"type": "video_url"}, "`video_url` must be"),
    "id": ({"type": "video", "source": {"type": "file", "file_id": "f"}}, "no file 'f'"),
    "both": ({"type": "video_url", "video_url": "data:", "file_id": "f"}, "one of `video_url` and `file_id`"),
    "embeddings": ({"type": "video_embeds", "video_embeds": "AA"}, "accepts text, pictures and videos only"),
}


async def test_what_cannot_be_watched_is_refused(tmp_path: Path) -> None:
    core = watching()
    options: dict[str, Any] = {"max_video_pixels": 10_000, "max_video_size": "64KiB", "max_video_frames": 20}
    async with picture_server(tmp_path, core, **options) as server:
        for name, (part, reason) in HOSTILE.items():
            error = await refused(server, asked(image_url(RED), part))
            assert reason in error["message"], name
            assert error["param"].startswith("messages[0].content[1]"), name
        assert server.state.models[0].client.slots_in_use == 0
        await until(lambda: gc.collect() >= 0 and server.state.media_memory.held == 0)
        await said(server, asked(video_url(CLIP)))
    assert len(core.requests) == 1


async def test_limits(tmp_path: Path) -> None:
    async with picture_server(tmp_path, watching(context=30), max_video_parts=2) as server:
        many = await refused(server, asked(*[video_url(CLIP)] * 3))
        assert many["message"] == "A chat may have at most 2 videos (--max-video-parts), not 3."
        files = [{"type": "file", "file": {"file_data": data_url(CLIP, "video/mp4")}}] * 2
        many = await refused(server, asked(video_url(CLIP), *files))
        assert many["message"].startswith("The chat has too many videos, with those of its files")
        assert many["param"] == "messages[0].content[2]"
        settings = {"media_io_kwargs": {"video": {"num_frames": 8}}}
        long = await refused(server, asked(*[video_url(CLIP)] * 2, **settings))
        assert "the pictures and videos have 32 tokens" in long["message"]
        assert long["param"] == "messages[0].content[1]"
    async with picture_server(tmp_path / "b", PictureCore(), FakeCore()) as server:
        for model, accepted in (("fake", "text and pictures"), ("fake-1", "text")):
            error = await refused(server, {**asked(video_url(CLIP)), "model": model})
            assert error["message"].endswith(f"the model `{model}` accepts {accepted} only.")
            file = {"type": "file", "file": {"file_data": data_url(CLIP, "video/mp4")}}
            error = await refused(server, {**asked(file), "model": model})
            assert error["message"] == f"The file is a video, and the model `{model}` does not read videos."
            assert error["param"] == "messages[0].content[0]"


async def test_users_cannot_write_videos(tmp_path: Path) -> None:
    core = watching(OWN)
    async with picture_server(tmp_path, core) as server:
        await said(server, asked(f"I wrote {VIDEO}", video_url(CLIP)))
    assert core.requests[0].prompt.tolist().count(TOKEN[VIDEO]) == 2
    assert f"I wrote {VIDEO}<pic>" in core.prompts[0]


async def test_a_template_that_changes_the_order(tmp_path: Path) -> None:
    """Whose tokens are whose could not be told."""
    template = (
        "{% for m in messages %}{% for kind in ['image', 'video'] %}{% for c in m.content if c.type == kind %}"
        "<{{ kind }}>{% endfor %}{% endfor %}{% endfor %}"
    )
    async with picture_server(tmp_path, watching(), template=template) as server:
        await said(server, asked(image_url(RED), video_url(CLIP)))
        error = await refused(server, asked(video_url(CLIP), image_url(RED)))
        assert "must keep the order" in error["message"]
    async with picture_server(tmp_path / "b", watching(OWN), template=template) as server:
        await said(server, asked(video_url(CLIP), image_url(RED)))


# As of Qwen2.5-Omni.
HEARD = VideoInfo(
    placeholder=TOKEN[VIDEO],
    placeholder_text=VIDEO,
    geometry=SmartResize(multiple=4, min_pixels=16, max_pixels=12 * 16),
    sampling=FrameSampling(rule="qwen2_vl", fps=2.0, min_frames=2),
    group=2,
    is_timed=True,
    tokens_per_second=25,
    nominal_rate=2.0,
    ends_at_largest=True,
    sound=VideoSound(part=50, token=AUDIO, before="<pic>", after="</pic>"),
)
HEARING = AudioInfo(
    kind="qwen2_5_omni",
    placeholder=TOKEN[AUDIO],
    placeholder_text=AUDIO,
    sample_rate=16_000,
    num_mel_bins=8,
    item_columns=200,
    lengths=AudioLengths(200, 1, 2),
    padded_columns=1,
    silent_columns=2,
)
FILM = video_file(16, fps=4, sound=3.4)  # four pairs of frames, in two parts
ALOUD: dict[str, Any] = {"mm_processor_kwargs": {"use_audio_in_video": True}}


def film(frames: int, *sound: int) -> str:
    """The text of a video with so many groups of frames in a part, and its sound."""
    parts = [f"(?:{VIDEO}){{{frames * 12}}}(?:{AUDIO}){{{least},{least + 3}}}" for least in sound]
    return f"<pic>{''.join(parts)}</pic>"


async def test_the_sound_of_videos_stands_between_their_frames(tmp_path: Path) -> None:
    core = watching(HEARD, audio=HEARING)
    async with picture_server(tmp_path, core) as server:
        body = await said(server, asked("a", video_url(FILM), "b", **ALOUD))
        await said(server, asked("a", video_url(FILM), "b"))
        await said(server, asked("a", video_url(CLIP), "b", mm_processor_kwargs={"load_audio_from_video": True}))
        await said(
            server, asked("a", video_url(FILM), mm_processor_kwargs={"videos_kwargs": {"use_audio_in_video": True}})
        )
        file = {"type": "file", "file": {"file_data": data_url(FILM, "video/mp4")}}
        await said(server, asked("a", file, "b", **ALOUD))
    loud, silent, without, *others = core.prompts
    assert re.search(f"a{film(2, 50, 34)}b", loud)
    assert f"a{VIDEO * 48}b" in silent
    assert f"a{VIDEO * 24}b" in without
    assert all(re.search(f"a{film(2, 50, 34)}", prompt) for prompt in others)
    items = core.requests[0].items
    assert [type(item) for item in items] == [PictureItem, PictureItem, AudioItem, PictureItem, PictureItem, AudioItem]
    assert [item.ends_video for item in items if isinstance(item, AudioItem)] == [False, True]
    assert body["usage"]["prompt_tokens_details"]["multimodal_tokens"]["video"] == 48
    assert 84 <= body["usage"]["prompt_tokens_details"]["multimodal_tokens"]["audio"] < 88
    spans = [list(range(item.start, item.start + item.length)) for item in items]
    covered = [index for span in spans for index in span]
    assert covered == list(range(covered[0], covered[0] + len(covered))), "the first token around them belongs to them"


async def test_the_time_of_a_video_leaves_less_room_for_the_answer(tmp_path: Path) -> None:
    """Where the request does not say how long it may be."""
    core = watching(HEARD)
    async with picture_server(tmp_path, core) as server:
        await said(server, asked("a", video_url(FILM), "b"))
        for rate in (1e-9, 1e-300):
            error = await refused(server, asked(video_url(FILM), mm_processor_kwargs={"fps": rate}))
            assert "too far apart" in error["message"]
    (message,) = core.requests
    assert isinstance(message.params, SamplingParams)
    leap = 75 + 1 - 48  # pairs of frames at 0, 25, 50 and 75, of 12 tokens each
    assert message.params.max_tokens == core.context - len(message.prompt) - leap


async def test_films_beside_pictures_and_audio(tmp_path: Path) -> None:
    core = watching(HEARD, audio=HEARING)
    sound = {"type": "input_audio", "input_audio": {"data": base64_of(wav(voice(1.0)[:, None])), "format": "wav"}}
    async with picture_server(tmp_path, core) as server:
        parts = (sound, "a", video_url(FILM), image_url(RED), "b", video_url(CLIP), sound, video_url(FILM))
        await said(server, asked(*parts, **ALOUD))
    heard = f"(?:{AUDIO}){{25}}"
    pattern = f"{heard}a{film(2, 50, 34)}{PICTURE}b(?:{VIDEO}){{24}}{heard}{film(2, 50, 34)}"
    assert re.search(pattern, core.prompts[0])
    lengths = [item.length for item in core.requests[0].items if isinstance(item, AudioItem)]
    assert [lengths[index] for index in (0, 1, 3, 4)] == [25, 50, 25, 50]


async def test_sound_that_cannot_be_heard_is_refused(tmp_path: Path) -> None:
    core = watching(HEARD, audio=HEARING)
    async with picture_server(tmp_path, core, max_audio_seconds=2) as server:
        await said(server, asked(video_url(FILM, uuid="a")))
        for part, fields, param, reason in (
            (video_url(FILM), ALOUD, "messages[0].content[0]", "--max-audio-seconds"),
            ({"type": "video_url", "video_url": None, "uuid": "a"}, ALOUD, "messages[0].content[0]", "send it again"),
            (video_url(RED), ALOUD, "messages[0].content[0]", "not a video of a supported format"),
            (
                video_url(FILM),
                {"mm_processor_kwargs": {"use_audio_in_video": 1}},
                "mm_processor_kwargs.use_audio_in_video",
                "true or false",
            ),
        ):
            error = await refused(server, asked(part, **fields))
            assert (error["param"], reason in error["message"]) == (param, True), error
    async with picture_server(tmp_path / "b", watching()) as server:
        error = await refused(server, asked(video_url(FILM), **ALOUD))
        assert error["param"] == "mm_processor_kwargs.use_audio_in_video"
