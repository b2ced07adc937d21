"""Media in the messages of a chat: they are read, replaced by what stands for them, and prepared for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from quire.api.chat.audio import audio_pieces
from quire.api.chat.media_files import DocumentContents, MediaContent, MediaFiles
from quire.api.chat.media_inputs import MediaInputs
from quire.api.chat.media_parts import MediaPart, PartParser, PartPlace
from quire.engine.client.audio import AudioInfo
from quire.engine.client.pictures import VideoInfo
from quire.engine.client.protocol import AudioItem
from quire.multimodal.audio.items import audio_placeholders, parts_of_sound
from quire.multimodal.audio.reader import AudioFile
from quire.multimodal.picture_jobs import PictureFile
from quire.multimodal.picture_reader import EmbeddingsFile, RequestPicture, picture_placeholders
from quire.multimodal.picture_settings import (
    MEDIA_IO,
    PROCESSOR,
    background_color,
    frame_rate,
    with_frame_settings,
    with_low_detail,
    with_settings,
)
from quire.multimodal.placement import Placeholders
from quire.multimodal.sources import MediaFile
from quire.protocol.errors import InvalidRequest
from quire.rendering.messages import AUDIO_PART, IMAGE_PART, VIDEO_PART
from quire.rendering.picture_texts import PictureTexts
from quire.serving.models import AudioInput, PictureInput, ServedModel, ServerState
from quire.workers.tenant import current_tenant

_MAX_DOCUMENTS = 16  # of a chat


@dataclass(frozen=True, slots=True)
class ChatAudio:
    """The audio of a chat.

    Attributes:
        info: how the model reads it.
        pieces: the items that stand for each placeholder: a content part, or a part of a video's sound.
        token: text of its token, if videos have sound; otherwise empty.
        places: how many pictures and videos are in front of each content part with audio.
    """

    info: AudioInfo
    pieces: Sequence[Sequence[AudioItem]]
    token: str = ""
    places: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ChatPictures:
    """The pictures and videos of a chat, pages of documents among them."""

    pictures: Sequence[RequestPicture]


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """What a request says about its media: `mm_processor_kwargs` and `media_io_kwargs`."""

    processor: Mapping[str, Any]
    media_io: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        """The fields that are set."""
        return [*([PROCESSOR] if self.processor else []), *([MEDIA_IO] if self.media_io else [])]


@dataclass(frozen=True, slots=True)
class ChatMedia:
    """The media of a chat.

    Attributes:
        audio, pictures: None if there are none; `pictures` has videos as well.
        unused_fields: paths of fields that have no effect.
    """

    audio: ChatAudio | None = None
    pictures: ChatPictures | None = None
    unused_fields: Sequence[str] = ()

    @property
    def placeholder_texts(self) -> dict[str, str]:
        """Texts that stand for the media in messages that are texts; see `Conversation.media`."""
        texts = {} if self.audio is None else {"audio": self.audio.info.placeholder_text}
        for picture in () if self.pictures is None else self.pictures.pictures:
            kind = "video" if isinstance(picture.info, VideoInfo) else "image"
            texts[kind] = picture.info.placeholder_text
        return texts

    @property
    def picture_texts(self) -> PictureTexts | None:
        """What stands for pictures and videos in the rendered chat; None if there are none."""
        if self.pictures is None:
            return None
        pictures = self.pictures.pictures
        layouts = [(picture.info.placeholder_text, picture.layout.text) for picture in pictures]
        in_order = len({picture.info.placeholder for picture in pictures}) == 1
        if self.audio is not None and self.audio.token and self.audio.places:  # in videos and outside of them
            for place in reversed(self.audio.places):
                layouts.insert(place, (self.audio.token, self.audio.token))
            in_order = True
        return PictureTexts(layouts, in_order=in_order)

    @property
    def placeholders(self) -> list[Placeholders]:
        """The placeholder tokens in the tokenized chat."""
        kinds = []
        if self.audio is not None:
            kinds.append(audio_placeholders(self.audio.pieces, self.audio.info))
        if self.pictures is not None:
            kinds += picture_placeholders(self.pictures.pictures)
        return kinds


@dataclass(frozen=True, slots=True)
class _Content:
    """A content of a prompt.

    Attributes:
        part: the part that it comes from.
        piece: the content.
        pictures: how the model reads pictures and videos beside it; None if it reads none.
    """

    part: MediaPart
    piece: MediaContent
    pictures: PictureInput | None = None

    @property
    def kind(self) -> Literal["text", "audio", "image", "video"]:
        """What it is."""
        if isinstance(self.piece, str):
            return "text"
        kind = self.part.place.kind
        if kind in ("audio", "video"):
            return kind
        return "video" if isinstance(self.piece, MediaFile) and self.piece.is_video else "image"

    @property
    def stand_in(self) -> dict[str, Any]:
        """What stands for it in its message."""
        if isinstance(self.piece, str):
            return {"type": "text", "text": self.piece}
        return dict({"audio": AUDIO_PART, "video": VIDEO_PART}.get(self.kind, IMAGE_PART))

    @property
    def video(self) -> VideoInfo | None:
        """How the model reads it; None if it is no video."""
        return self.pictures.info.video if self.kind == "video" and self.pictures is not None else None

    @property
    def has_heard_sound(self) -> bool:
        """Whether it is a video whose sound is asked for."""
        return self.video is not None and self.video.sound is not None and self.video.sound.is_heard


@dataclass(frozen=True, slots=True)
class ReadMedia:
    """Media whose files were read, but not prepared yet. Messages have what stands for them in their place.

    Attributes:
        parts: their content parts.
        contents: of each of them, in files that an `ExitStack` closes.
        pictures: how the model reads pictures and videos of the request; None if it reads none.
    """

    parts: Sequence[MediaPart] = ()
    contents: Sequence[Sequence[MediaContent]] = ()
    pictures: PictureInput | None = None

    @property
    def has_low_detail(self) -> bool:
        """Whether the model knows a smaller form of pictures than its own."""
        return self.pictures is not None and with_low_detail(self.pictures.info) != self.pictures.info


async def take_media(
    places: Sequence[PartPlace], settings: MediaSettings, model: ServedModel, state: ServerState, sequences: int
) -> ChatMedia:
    """Replace media in messages by what stands for them, and make items of them.

    Args:
        places: content parts with media; the contents that they are in are changed.
        settings: of its pictures and videos.
        model: the model that the chat is for.
        state: where media may come from, and how many.
        sequences: requests to the engine that will have the items.

    Raises:
        InvalidRequest: a part is not valid, the model does not read it, or there are too many.
        PromptError: a part is not allowed, broken, or too long.
        QueueFull: too many files wait to be read.
    """
    with ExitStack() as stack:
        return await prepare_media(
            [await read_media(places, settings, model, state, stack)], settings, model, sequences
        )


async def read_media(
    places: Sequence[PartPlace], settings: MediaSettings, model: ServedModel, state: ServerState, stack: ExitStack
) -> ReadMedia:
    """Replace media in messages by what stands for them, and read their files.

    Everything that costs little is checked first, for all parts. Then the files are read, a few at a time; large ones
    are on disk until `stack` ends.

    Args:
        places, settings, model, state: as of `take_media`.
        stack: closes the files.

    Raises:
        InvalidRequest, PromptError, QueueFull: as of `take_media`.
    """
    reads = MediaInputs.of(model)
    reads.check_settings(settings.names)
    if not places:
        return ReadMedia()
    for place in places:
        reads.check(place)
    _check_counts(places, state)
    parser = PartParser(state.media)
    parts = [parser.parse(place) for place in places]
    picture_input = None if reads.pictures is None else _with_settings(reads.pictures, settings, parts)
    with model.client.observers.preprocessing():
        files = MediaFiles(state.media_memory, stack)
        originals = await files.read_all(parts)
        contents = await DocumentContents(reads, state, files).of_parts(parts, originals)
    _replace(parts, contents)
    return ReadMedia(parts, contents, picture_input)


async def prepare_media(
    media: Sequence[ReadMedia], settings: MediaSettings, model: ServedModel, sequences: int
) -> ChatMedia:
    """Make items of the media of one prompt.

    They are prepared one after the other. The memory for the items of all of them is reserved at once, for as long as
    they live.

    Args:
        media: those of each message, in their order. They may be prepared again for another prompt.
        settings, model, sequences: as of `take_media`.

    Raises:
        InvalidRequest, PromptError, QueueFull: as of `take_media`.
    """
    parts = [part for read in media for part in read.parts]
    if not parts:
        return ChatMedia(unused_fields=settings.names)
    contents = [
        _Content(part, piece, read.pictures)
        for read in media
        for part, pieces in zip(read.parts, read.contents, strict=True)
        for piece in pieces
    ]
    limit, audio_input = model.info.max_model_len, MediaInputs.of(model).audio
    with model.client.observers.preprocessing():
        heard = await _heard(contents, audio_input, limit, sequences)
        pictures = await _pictures(contents, heard, limit, sequences, frame_rate(settings.media_io))
    audio = _audio(contents, heard, audio_input, pictures)
    is_prepared = pictures is not None and not any(part.is_embeddings for part in parts)
    unused = [] if is_prepared else settings.names
    for read in media:
        if pictures is None or not read.has_low_detail:
            unused = [*unused, *(part.low_detail for part in read.parts if part.low_detail is not None)]
    return ChatMedia(audio, pictures, unused)


async def _pictures(
    contents: Sequence[_Content],
    sounds: Mapping[int, Sequence[AudioItem]],
    limit: int,
    sequences: int,
    fps: float | None,
) -> ChatPictures | None:
    """Prepare pictures and videos.

    Args:
        contents: all contents of the prompt.
        sounds: the items of the sound of videos, by the places of these.
        limit: tokens of the context.
        sequences: see `take_media`.
        fps: of lists of frames, as the request says.
    """
    files: list[PictureFile] = []
    embeddings: list[EmbeddingsFile] = []
    picture_input: PictureInput | None = None
    for index, content in enumerate(contents):
        piece, part = content.piece, content.part
        if content.kind == "audio" or isinstance(piece, str) or content.pictures is None:
            continue
        picture_input = content.pictures
        info = msgspec.structs.replace(picture_input.info, video=None)  # pictures do not depend on it
        file = piece.content if isinstance(piece, MediaFile) else None
        if (video := content.video) is not None:
            sound = sum(item.length for item in sounds.get(index, ()))
            video = video if sound else msgspec.structs.replace(video, sound=None)
            files.append(PictureFile(file, piece.where, video, part.uuid, fps, sound))
        elif part.is_embeddings and file is not None:
            embeddings.append(EmbeddingsFile(file, piece.where, info, part.grid))
        else:
            of_picture = info if part.low_detail is None else with_low_detail(info)
            files.append(PictureFile(file, piece.where, of_picture, part.uuid))
    if embeddings and files:
        raise InvalidRequest(
            "A prompt may have pictures and videos, or embeddings of pictures, not both.", embeddings[0].where
        )
    if picture_input is None:
        return None
    reader, tenant = picture_input.reader, current_tenant()
    if embeddings:
        return ChatPictures(await reader.embeddings(embeddings, max_tokens=limit, sequences=sequences, tenant=tenant))
    background = picture_input.background
    return ChatPictures(
        await reader.prepare(files, max_tokens=limit, sequences=sequences, background=background, tenant=tenant)
    )


def _with_settings(picture_input: PictureInput, settings: MediaSettings, parts: Sequence[MediaPart]) -> PictureInput:
    """How the model reads the pictures and videos of a request.

    Raises:
        PromptError: a setting is not one of this model, or its value is not valid.
    """
    videos = [part for part in parts if part.place.kind == "video"]
    are_lists = bool(videos) and all(part.source is not None and part.source.is_frames for part in videos)
    info = with_settings(picture_input.info, settings.processor)
    info = with_frame_settings(info, settings.media_io, are_lists=are_lists)
    return replace(picture_input, info=info, background=background_color(settings.media_io, picture_input.background))


def _check_counts(places: Sequence[PartPlace], state: ServerState) -> None:
    limits = {
        "audio": (state.max_audio_parts, "audio parts (--max-audio-parts)"),
        "image": (state.max_image_parts, "pictures (--max-image-parts)"),
        "video": (state.max_video_parts, "videos (--max-video-parts)"),
        "document": (_MAX_DOCUMENTS, "documents"),
    }
    for kind, (limit, name) in limits.items():
        count = sum(place.kind == kind for place in places)
        if count > limit:
            raise InvalidRequest(f"A chat may have at most {limit} {name}, not {count}.", "messages")


def _replace(parts: Sequence[MediaPart], contents: Sequence[Sequence[MediaContent]]) -> None:
    """Put what stands for media in place of their parts; in place of a document a list of all that it becomes."""
    for part, pieces in zip(parts, contents, strict=True):
        stand_ins = [_Content(part, piece).stand_in for piece in pieces]
        part.place.content[part.place.index] = stand_ins if part.place.kind == "document" else stand_ins[0]


async def _heard(
    contents: Sequence[_Content], audio_input: AudioInput | None, limit: int, sequences: int
) -> dict[int, Sequence[AudioItem]]:
    """The items of audio, and of the sound of videos if it is asked for, by the places of their contents.

    Args:
        contents: all contents of the prompt.
        audio_input: how the model reads audio; None if it does not.
        limit, sequences: see `audio_pieces`.
    """
    if audio_input is None:
        return {}
    files: dict[int, AudioFile] = {}
    for index, content in enumerate(contents):
        if content.kind != "audio" and not content.has_heard_sound:
            continue
        if not isinstance(content.piece, MediaFile):
            raise InvalidRequest(
                "A `uuid` without content is not supported for videos whose sound is heard: send it again.",
                content.part.place.where,
            )
        files[index] = AudioFile(content.piece.content, content.piece.where, is_video=content.kind == "video")
    if not files:
        return {}
    formats = [contents[index].part.format for index in files]
    pieces = await audio_pieces(list(files.values()), formats, audio_input, limit, sequences)
    return dict(zip(files, pieces, strict=True))


def _audio(
    contents: Sequence[_Content],
    heard: Mapping[int, Sequence[AudioItem]],
    audio_input: AudioInput | None,
    pictures: ChatPictures | None,
) -> ChatAudio | None:
    """The audio of a chat in its order; that of videos in parts, as it stands between their frames."""
    if audio_input is None or not any(heard.values()):
        return None
    pieces: list[Sequence[AudioItem]] = []
    places: list[int] = []
    token = ""
    seen = iter(() if pictures is None else pictures.pictures)
    before = 0
    for index, content in enumerate(contents):
        if content.kind == "audio":
            pieces.append(heard[index])
            places.append(before)
        elif content.kind != "text":
            picture = next(seen)
            before += 1
            if (items := heard.get(index)) and isinstance(picture.info, VideoInfo) and picture.info.sound is not None:
                token = picture.info.sound.token
                ends_video = not picture.layout.items[-1].text_behind
                pieces += parts_of_sound(items, picture.info.sound.part, ends_video=ends_video)
    return ChatAudio(audio_input.info, pieces, token, places)
