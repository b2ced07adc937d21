"""Content parts with media: which there are, in the forms of all APIs, and checks of their fields."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from quire.multimodal.audio.formats import NAMES, recognized_name
from quire.multimodal.size_limit import SizeLimit
from quire.multimodal.sources import MediaSource, MediaSources
from quire.protocol.chat import Message, part_type
from quire.protocol.errors import InvalidRequest, shorten

MediaKind = Literal["audio", "image", "video", "document"]
_KINDS: Mapping[str, MediaKind] = {
    "input_audio": "audio",
    "audio_url": "audio",
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "video_url": "video",
    "input_video": "video",
    "video": "video",
    "image_embeds": "image",
    "file": "document",
    "input_file": "document",
    "document": "document",
}
# Of vLLM, and the stand-in of audio, which is not for clients.
_UNSUPPORTED = frozenset({"image_pil", "audio_embeds", "video_embeds", "prompt_embeds", "audio"})
_DETAILS = ("auto", "low", "high", "original")
_MAX_UUID = 256  # characters
_MAX_GRID = 1 << 16  # characters of a tensor with three numbers
_FILE_FIELDS = ("file_data", "file_url", "file_id")


@dataclass(frozen=True, slots=True)
class PartPlace:
    """A content part with media.

    Attributes:
        content: the content of its message.
        index: its place in that.
        where: its path in the request, for errors.
        type: its type.
        kind: what it has; None: something that is not supported.
    """

    content: list[Any]
    index: int
    where: str
    type: str
    kind: MediaKind | None

    @property
    def fields(self) -> dict[str, Any]:
        """The part itself."""
        part: dict[str, Any] = self.content[self.index]
        return part


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A content part whose fields are valid.

    Attributes:
        source: where its content comes from; None: it names content that was sent before, by its `uuid`.
        format: format of audio that the client has given.
        uuid: the client's name of the content.
        title: name of a document, and what the client says about it.
        grid: of a picture whose embeddings were sent: its patches, or a file with them.
        low_detail: the path of a `detail` that asks for the smallest form of a picture, or of those in a document.
    """

    place: PartPlace
    source: MediaSource | None
    format: str | None = None
    uuid: str | None = None
    title: str = ""
    grid: tuple[int, ...] | bytes | None = None
    low_detail: str | None = None

    @property
    def is_embeddings(self) -> bool:
        """Whether its content is not a picture, but the embeddings of one."""
        return self.place.type == "image_embeds"


def media_places(messages: Sequence[Message]) -> list[PartPlace]:
    """All content parts with media, in their order."""
    return list(_places(messages))


def place_of(content: list[Any], index: int, where: str) -> PartPlace:
    """The place of a content part that is not text. `where`: its path in the request."""
    kind = part_type(content[index])
    return PartPlace(content, index, where, kind, _KINDS.get(kind))


def title_fields(place: PartPlace) -> list[str]:
    """The paths of the fields of a document that are set and say what it is: the model would read them as text."""
    fields, where = place.fields, place.where
    if place.type == "file" and isinstance(inside := fields.get("file"), dict):
        fields, where = inside, f"{where}.file"
    names = ("title", "context") if place.type == "document" else ("filename",)
    return [f"{where}.{name}" for name in names if place.kind == "document" and fields.get(name)]


def _places(messages: Sequence[Message]) -> Iterator[PartPlace]:
    for number, message in enumerate(messages):
        content = message.content
        if not isinstance(content, list):
            continue
        for index, part in enumerate(content):
            kind = part_type(part)
            if kind in _KINDS or kind in _UNSUPPORTED:
                yield place_of(content, index, f"messages[{number}].content[{index}]")


class PartParser:
    """Check the fields of content parts, and find where their content comes from. Nothing is read."""

    def __init__(self, sources: MediaSources) -> None:
        self._sources = sources
        self._parsers: Mapping[str, Callable[[PartPlace], MediaPart]] = {
            "input_audio": self._input_audio,
            "audio_url": self._audio_url,
            "image_url": self._image_url,
            "input_image": self._image_url,
            "image": self._image,
            "video_url": self._video_url,
            "input_video": self._video_url,
            "video": self._video,
            "image_embeds": self._image_embeds,
            "file": self._file,
            "input_file": self._file,
            "document": self._document,
        }

    def parse(self, place: PartPlace) -> MediaPart:
        """Check the fields of a part of a supported type.

        Raises:
            InvalidRequest: a field is not valid.
            PromptError: a URL is not allowed.
        """
        return self._parsers[place.type](place)

    def _input_audio(self, place: PartPlace) -> MediaPart:
        value = place.fields.get("input_audio")
        uuid = _uuid(place)
        _check_content(value, uuid, place)
        data = value.get("data") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(data, str):
            raise InvalidRequest('`input_audio` must be an object {"data": BASE64, "format": FORMAT}.', place.where)
        source = self._sources.from_base64(data, self._sources.audio, place.where)
        return MediaPart(place, source, format=_audio_format(value, place.where), uuid=uuid)

    def _audio_url(self, place: PartPlace) -> MediaPart:
        value = place.fields.get("audio_url")
        uuid = _uuid(place)
        _check_content(value, uuid, place)
        url = value.get("url") if isinstance(value, dict) else value
        if not isinstance(url, str) or not url:
            raise InvalidRequest('`audio_url` must be an object {"url": URL}.', place.where)
        return MediaPart(place, self._sources.from_url(url, self._sources.audio, place.where), uuid=uuid)

    def _image_url(self, place: PartPlace) -> MediaPart:
        """OpenAI's chats have `image_url: {url, detail}`, Responses `image_url` and `detail` beside each other."""
        part, uuid = place.fields, _uuid(place)
        value = part.get("image_url")
        if part.get("file_id") is not None:
            if value is not None:
                raise InvalidRequest("A picture needs one of `image_url` and `file_id`, not both.", place.where)
            source, _ = self._stored(part["file_id"], self._sources.image, place.where)
            return MediaPart(place, source, uuid=uuid, low_detail=_low_detail(part, place.where, "detail"))
        if value is None and uuid is not None:
            return MediaPart(place, None, uuid=uuid, low_detail=_low_detail(part, place.where, "detail"))
        url = value.get("url") if isinstance(value, dict) else value
        if not isinstance(url, str) or not url:
            raise InvalidRequest('`image_url` must be an object {"url": URL}, or a URL.', place.where)
        if isinstance(value, dict) and value.get("detail") is not None:
            low_detail = _low_detail(value, place.where, "image_url.detail")
        else:
            low_detail = _low_detail(part, place.where, "detail")
        source = self._sources.from_url(url, self._sources.image, place.where)
        return MediaPart(place, source, uuid=uuid, low_detail=low_detail)

    def _video_url(self, place: PartPlace) -> MediaPart:
        value, uuid = place.fields.get("video_url"), _uuid(place)
        if place.fields.get("file_id") is not None:
            if value is not None:
                raise InvalidRequest("A video needs one of `video_url` and `file_id`, not both.", place.where)
            source, _ = self._stored(place.fields["file_id"], self._sources.video, place.where)
            return MediaPart(place, source, uuid=uuid)
        if value is None and uuid is not None:
            return MediaPart(place, None, uuid=uuid)
        url = value.get("url") if isinstance(value, dict) else value
        if not isinstance(url, str) or not url:
            raise InvalidRequest('`video_url` must be an object {"url": URL}, or a URL.', place.where)
        return MediaPart(place, self._sources.from_url(url, self._sources.video, place.where), uuid=uuid)

    def _video(self, place: PartPlace) -> MediaPart:
        """As Anthropic's pictures."""
        source, _ = self._anthropic_source(place, self._sources.video)
        return MediaPart(place, source, uuid=_uuid(place))

    def _image(self, place: PartPlace) -> MediaPart:
        """Anthropic's."""
        source, _ = self._anthropic_source(place, self._sources.image)
        return MediaPart(place, source, uuid=_uuid(place))

    def _image_embeds(self, place: PartPlace) -> MediaPart:
        """vLLM's: a tensor in base64, or an object of tensors."""
        if not self._sources.embeddings:
            raise InvalidRequest("`image_embeds` needs a server with --enable-mm-embeds.", place.where)
        value = place.fields.get("image_embeds")
        where = f"{place.where}.image_embeds"
        fields = value if isinstance(value, dict) else {"image_embeds": value}
        tensor = fields.get("image_embeds")
        if not isinstance(tensor, str) or not tensor:
            raise InvalidRequest("`image_embeds` must be a tensor in base64, or an object of tensors.", where)
        for name in fields:
            if name not in ("image_embeds", "image_grid_thw"):
                raise InvalidRequest(f"`{shorten(str(name))}` is not supported.", where)
        source = self._sources.from_base64(tensor, self._sources.image, where)
        return MediaPart(place, source, grid=_grid(fields.get("image_grid_thw"), f"{where}.image_grid_thw"))

    def _document(self, place: PartPlace) -> MediaPart:
        """Anthropic's; its sources with text have become text."""
        texts = []
        for name in ("title", "context"):
            text = place.fields.get(name)
            if text is not None and not isinstance(text, str):
                raise InvalidRequest(f"`{name}` must be a string.", f"{place.where}.{name}")
            texts += [text] if text else []
        source, name = self._anthropic_source(place, self._sources.document)
        return MediaPart(place, source, title="\n".join(texts) or name)

    def _anthropic_source(self, place: PartPlace, limit: SizeLimit) -> tuple[MediaSource, str]:
        """The source, and the name of a file that was uploaded."""
        source = place.fields.get("source")
        kind = source.get("type") if isinstance(source, dict) else None
        where = f"{place.where}.source"
        if isinstance(source, dict) and kind == "file":
            return self._stored(source.get("file_id"), limit, where)
        name = {"base64": "data", "url": "url"}.get(kind if isinstance(kind, str) else "")
        if not isinstance(source, dict) or name is None:
            raise InvalidRequest("`source` must be an object with the type `base64`, `url` or `file`.", where)
        content = source.get(name)
        if not isinstance(content, str) or not content:
            raise InvalidRequest(f"A source of type `{kind}` needs a string in `{name}`.", f"{where}.{name}")
        if kind == "url":
            return self._sources.from_url(content, limit, f"{where}.url"), ""
        return self._sources.from_base64(content, limit, f"{where}.data"), ""

    def _stored(self, identifier: Any, limit: SizeLimit, where: str) -> tuple[MediaSource, str]:
        """The source of an uploaded file, and its name."""
        where = f"{where}.file_id"
        if not isinstance(identifier, str) or not identifier:
            raise InvalidRequest("`file_id` must be the id of a file.", where)
        return self._sources.from_file_id(identifier, limit, where)

    def _file(self, place: PartPlace) -> MediaPart:
        """OpenAI's chats have `file: {file_data, filename}`, Responses the same fields beside the type."""
        inside = place.type == "file"
        value = place.fields.get("file") if inside else place.fields
        if not isinstance(value, dict):
            raise InvalidRequest('`file` must be an object {"file_data": DATA, "filename": NAME}.', place.where)
        where = f"{place.where}.file" if inside else place.where
        sent = [name for name in _FILE_FIELDS if value.get(name) is not None]
        if len(sent) != 1 or not isinstance(value[sent[0]], str) or not value[sent[0]]:
            raise InvalidRequest("A file needs a string in one of `file_data`, `file_url` and `file_id`.", where)
        filename = value.get("filename")
        if filename is not None and not isinstance(filename, str):
            raise InvalidRequest("`filename` must be a string.", f"{where}.filename")
        name, limit, field = "", self._sources.document, f"{where}.{sent[0]}"
        match sent:
            case ["file_id"]:
                source, name = self._stored(value["file_id"], limit, where)
            case ["file_url"]:
                source = self._sources.from_url(value["file_url"], limit, field)
            case _:
                source = self._sources.from_base64(value["file_data"], limit, field)
        return MediaPart(place, source, title=filename or name, low_detail=_low_detail(value, where, "detail"))


def _grid(value: Any, where: str) -> tuple[int, ...] | bytes | None:
    """A grid of patches as numbers, which may be a list in a list, or a file in base64."""
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if isinstance(value, list) and all(type(number) is int for number in value):
        return tuple(value)
    if isinstance(value, str) and len(value) <= _MAX_GRID:
        with suppress(ValueError):
            return base64.b64decode(value, validate=True)
    raise InvalidRequest("`image_grid_thw` must be three integers, or a tensor of them in base64.", where)


def _uuid(place: PartPlace) -> str | None:
    """The client's name of the content; None if it gives none."""
    uuid = place.fields.get("uuid")
    if uuid is not None and (not isinstance(uuid, str) or not 0 < len(uuid) <= _MAX_UUID):
        raise InvalidRequest(f"`uuid` must be a string of 1 to {_MAX_UUID} characters.", f"{place.where}.uuid")
    return uuid


def _check_content(value: Any, uuid: str | None, place: PartPlace) -> None:
    """Refuse audio that is only named: it is not kept from one request to the next."""
    if value is None and uuid is not None:
        raise InvalidRequest(
            "A `uuid` without content is supported for pictures and videos only.", f"{place.where}.uuid"
        )


def _low_detail(value: Mapping[str, Any], where: str, name: str) -> str | None:
    """The path of a `detail` that asks for less than the model's own resolution; None if there is none."""
    detail = value.get("detail")
    if detail is not None and detail not in _DETAILS:
        raise InvalidRequest(f"`detail` must be one of {', '.join(_DETAILS)}.", f"{where}.{name}")
    return f"{where}.{name}" if detail == "low" else None


def _audio_format(value: Mapping[str, Any], where: str) -> str | None:
    """The name under which the declared format is recognized; None if none is declared."""
    requested = value.get("format")
    if requested is None:
        return None
    name = recognized_name(requested) if isinstance(requested, str) else None
    if name is None:
        raise InvalidRequest(
            f"The audio format {shorten(str(requested))!r} is not supported. Supported formats: {NAMES}.", where
        )
    return name
