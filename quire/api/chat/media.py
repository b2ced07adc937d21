"""Media in the messages of a chat: they are read, replaced by what stands for them, and prepared for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import msgspec

from quire.api.chat.audio import audio_preparation
from quire.api.chat.media_files import DocumentContents, MediaContent, MediaFiles
from quire.api.chat.media_inputs import MediaInputs
from quire.api.chat.media_parts import MediaPart, PartParser, PartPlace, title_fields
from quire.engine.client.audio import AudioInfo
from quire.engine.client.pictures import VideoInfo
from quire.engine.client.protocol import AudioItem
from quire.multimodal.audio.items import audio_placeholders, parts_of_sound
from quire.multimodal.audio.reader import AudioFile, AudioPreparation
from quire.multimodal.memory import MediaMemory
from quire.multimodal.picture_jobs import PictureFile
from quire.multimodal.picture_reader import (
    EmbeddingsFile,
    EmbeddingsPreparation,
    PicturePreparation,
    RequestPicture,
    picture_placeholders,
)
from quire.multimodal.picture_settings import (
    MEDIA_IO,
    PROCESSOR,
    background_color,
    frame_rate,
    with_frame_settings,
    with_low_detail,
    with_settings,
)
from quire.multimodal.pictures.cache import RequestCache
from quire.multimodal.placement import Placeholders
from quire.multimodal.preparation import Preparation, prepare_together
from quire.multimodal.sources import MediaFile
from quire.protocol.errors import InvalidRequest
from quire.rendering.messages import AUDIO_PART, IMAGE_PART, VIDEO_PART
from quire.rendering.picture_texts import PictureTexts
from quire.serving.models import AudioInput, PictureInput, ServedModel, ServerState
from quire.workers.tenant import current_tenant

Kind = TypeVar("Kind", bound=Preparation)
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

    @property
    def texts(self) -> list[tuple[str, str]] | None:
        """What the chat template writes for each content part, and its text in the prompt.

        None: the template writes all of that, and audio stands in no video.
        """
        if self.token:
            return [(self.token, self.token)] * len(self.places)
        if self.info.chat_text == self.info.placeholder_text:
            return None
        return [(self.info.placeholder_text, self.info.chat_text)] * len(self.places)


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
        """What stands for pictures, videos and audio in the rendered chat; None: it has what the template writes."""
        audio = None if self.audio is None else self.audio.texts
        if self.pictures is None:
            return None if audio is None else PictureTexts(audio)
        pictures = self.pictures.pictures
        layouts = [(picture.info.placeholder_text, picture.layout.text) for picture in pictures]
        in_order = len({picture.info.placeholder for picture in pictures}) == 1
        if self.audio is not None and audio is not None:
            for place, texts in reversed([*zip(self.audio.places, audio, strict=True)]):
                layouts.insert(place, texts)
            in_order = in_order or bool(self.audio.token and audio)
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
        request_cache: keeps pictures for the next prompts of the request; None: there are none.
    """

    part: MediaPart
    piece: MediaContent
    pictures: PictureInput | None = None
    request_cache: RequestCache | None = None

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
    def has_embeddings(self) -> bool:
        """Whether it is a picture whose embeddings were sent."""
        return self.part.is_embeddings and isinstance(self.piece, MediaFile)

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
        request_cache: keeps pictures for the next prompts of the request; None: there are none.
        unused_fields: paths of fields that have no effect.
    """

    parts: Sequence[MediaPart] = ()
    contents: Sequence[Sequence[MediaContent]] = ()
    pictures: PictureInput | None = None
    request_cache: RequestCache | None = None
    unused_fields: Sequence[str] = ()

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
            [await read_media(places, settings, model, state, stack)], settings, model, state, sequences
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
        if picture_input is not None:
            _start_processes(picture_input, places)
        files = MediaFiles(state.media_memory, stack)
        originals = await files.read_all(parts)
        contents = await DocumentContents(reads, state, files).of_parts(parts, originals)
    unused: list[str] = []
    if picture_input is not None and picture_input.info.without_text:
        unused = [
            name
            for place, pieces in zip(places, contents, strict=True)
            if any(not isinstance(piece, str) for piece in pieces)
            for name in title_fields(place)
        ]
        contents = [[piece for piece in pieces if not isinstance(piece, str)] or pieces for pieces in contents]
    _replace(parts, contents)
    return ReadMedia(parts, contents, picture_input, unused_fields=unused)


def _start_processes(picture_input: PictureInput, places: Sequence[PartPlace]) -> None:
    """Start what will decode pictures and videos, as soon as it is known that there are some."""
    kinds = {place.kind for place in places}
    if "image" in kinds:
        picture_input.reader.start(picture_input.info)
    if "video" in kinds and picture_input.info.video is not None:
        picture_input.reader.start(picture_input.info.video)


async def prepare_media(
    media: Sequence[ReadMedia], settings: MediaSettings, model: ServedModel, state: ServerState, sequences: int
) -> ChatMedia:
    """Make items of the media of one prompt.

    They are prepared one after the other. The memory for all of them is reserved at once, that of items for as long as
    they live.

    Args:
        media: those of each message, in their order. They may be prepared again for another prompt.
        settings, model, state, sequences: as of `take_media`.

    Raises:
        InvalidRequest, PromptError, QueueFull: as of `take_media`.
    """
    parts = [part for read in media for part in read.parts]
    if not parts:
        return ChatMedia(unused_fields=settings.names)
    contents = [
        _Content(part, piece, read.pictures, read.request_cache)
        for read in media
        for part, pieces in zip(read.parts, read.contents, strict=True)
        for piece in pieces
    ]
    audio_input, limits = MediaInputs.of(model).audio, _PromptLimits(model.info.max_model_len, sequences)
    with model.client.observers.preprocessing():
        heard, seen = await _prepared(contents, audio_input, limits, frame_rate(settings.media_io), state.media_memory)
    pictures = ChatPictures([seen[place] for place in sorted(seen)]) if seen else None
    audio = _audio(contents, heard, audio_input, pictures)
    unused = [] if any(not contents[place].part.is_embeddings for place in seen) else settings.names
    for read in media:
        unused = [*unused, *read.unused_fields]
        if pictures is None or not read.has_low_detail:
            unused = [*unused, *(part.low_detail for part in read.parts if part.low_detail is not None)]
    return ChatMedia(audio, pictures, unused)


@dataclass(frozen=True, slots=True)
class _PromptLimits:
    """Limits of a prompt: tokens of its context, and requests to the engine that will have its items."""

    max_tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class _Planned(Generic[Kind]):
    """Media of a kind that are to be prepared, and their places among the contents of the prompt."""

    places: Sequence[int]
    preparation: Kind


async def _prepared(
    contents: Sequence[_Content],
    audio_input: AudioInput | None,
    limits: _PromptLimits,
    fps: float | None,
    memory: MediaMemory,
) -> tuple[dict[int, list[AudioItem]], dict[int, RequestPicture]]:
    """What media become, by the places of their contents.

    Args:
        contents: all contents of the prompt.
        audio_input: how the model reads audio; None if it does not.
        limits: of the prompt.
        fps: of lists of frames, as the request says.
        memory: the memory for media.

    Returns:
        Items of audio, and of the sound of videos if it is asked for; pictures and videos.
    """
    audio_files = {} if audio_input is None else _audio_files(contents)
    pictures = await _planned_pictures(contents, limits, fps)
    planned: list[_Planned[Any]] = [*pictures, *await _planned_embeddings(contents, limits)]
    if audio_files and audio_input is not None:
        beside = sum(of_kind.preparation.need.peak for of_kind in planned)
        # It comes first: the layout of a video has the tokens of its sound.
        planned.insert(0, _planned_audio(contents, audio_files, audio_input, limits, pictures, beside))
    if not planned:
        return {}, {}
    results = await prepare_together(memory, [of_kind.preparation for of_kind in planned], current_tenant())
    placed = [dict(zip(of_kind.places, made, strict=True)) for of_kind, made in zip(planned, results, strict=True)]
    heard = placed.pop(0) if audio_files else {}
    return heard, {place: picture for pictures_of_kind in placed for place, picture in pictures_of_kind.items()}


async def _planned_pictures(
    contents: Sequence[_Content], limits: _PromptLimits, fps: float | None
) -> list[_Planned[PicturePreparation]]:
    """Pictures and videos, in a list that is empty if there are none. `fps`: of lists of frames."""
    files: dict[int, PictureFile] = {}
    used: PictureInput | None = None
    for place, content in enumerate(contents):
        piece, part = content.piece, content.part
        if content.pictures is None or content.kind not in ("image", "video") or content.has_embeddings:
            continue
        assert not isinstance(piece, str)
        used = content.pictures
        info = msgspec.structs.replace(used.info, video=None)  # pictures do not depend on it
        file = piece.content if isinstance(piece, MediaFile) else None
        if (video := content.video) is not None:
            silent = msgspec.structs.replace(video, sound=None)
            files[place] = PictureFile(
                file,
                piece.where,
                silent,
                part.uuid,
                fps,
                is_heard=content.has_heard_sound,
                request_cache=content.request_cache,
            )
        else:
            of_picture = info if part.low_detail is None else with_low_detail(info)
            files[place] = PictureFile(file, piece.where, of_picture, part.uuid, request_cache=content.request_cache)
    if used is None:
        return []
    preparation = await used.reader.plan(
        list(files.values()),
        max_tokens=limits.max_tokens,
        sequences=limits.sequences,
        background=used.background,
        tenant=current_tenant(),
    )
    return [_Planned(list(files), preparation)]


async def _planned_embeddings(
    contents: Sequence[_Content], limits: _PromptLimits
) -> list[_Planned[EmbeddingsPreparation]]:
    """Pictures whose embeddings are known, in a list that is empty if there are none."""
    files: dict[int, EmbeddingsFile] = {}
    used: PictureInput | None = None
    for place, content in enumerate(contents):
        piece = content.piece
        if content.pictures is None or not content.has_embeddings:
            continue
        assert isinstance(piece, MediaFile)
        used = content.pictures
        info = msgspec.structs.replace(used.info, video=None)
        files[place] = EmbeddingsFile(piece.content, piece.where, info, content.part.grid)
    if used is None:
        return []
    preparation = await used.reader.plan_embeddings(
        list(files.values()), max_tokens=limits.max_tokens, sequences=limits.sequences, tenant=current_tenant()
    )
    return [_Planned(list(files), preparation)]


def _audio_files(contents: Sequence[_Content]) -> dict[int, AudioFile]:
    """Files of audio, and videos whose sound is asked for, by the places of their contents."""
    files: dict[int, AudioFile] = {}
    for place, content in enumerate(contents):
        if content.kind != "audio" and not content.has_heard_sound:
            continue
        if not isinstance(content.piece, MediaFile):
            raise InvalidRequest(
                "A `uuid` without content is not supported for videos whose sound is heard: send it again.",
                content.part.place.where,
            )
        files[place] = AudioFile(content.piece.content, content.piece.where, is_video=content.kind == "video")
    return files


def _planned_audio(
    contents: Sequence[_Content],
    files: Mapping[int, AudioFile],
    audio_input: AudioInput,
    limits: _PromptLimits,
    pictures: Sequence[_Planned[PicturePreparation]],
    beside: int,
) -> _Planned[AudioPreparation[list[AudioItem]]]:
    """Audio, and the sound of videos if it is asked for.

    Args:
        contents: all contents of the prompt.
        files: of the audio, by the places of their contents.
        audio_input: how the model reads audio.
        limits: of the prompt.
        pictures: the videos, which get the tokens of their sound.
        beside: bytes that everything else in the prompt needs.
    """
    places = list(files)

    def hear(index: int, tokens: int) -> None:
        video = contents[places[index]].video
        if video is not None and video.sound is not None:
            (planned,) = pictures
            planned.preparation.hear(planned.places.index(places[index]), video.sound, tokens)

    preparation = audio_preparation(
        list(files.values()),
        [contents[place].part.format for place in places],
        audio_input,
        limits.max_tokens,
        limits.sequences,
        beside=beside,
        on_made=hear,
    )
    return _Planned(places, preparation)


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
