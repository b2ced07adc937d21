"""Audio in the messages of a chat: its content parts, and the items that the engine gets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.api.http.errors import InvalidRequest, shorten
from quire.api.http.tenant import current_tenant
from quire.api.protocol.chat import Message
from quire.api.serving.models import ServedModel
from quire.engine.wire.audio import AudioInfo
from quire.engine.wire.protocol import MediaItem
from quire.multimodal.audio.decode import AudioError, DecodedAudio
from quire.multimodal.audio.features import SAMPLE_RATE
from quire.multimodal.audio.formats import NAMES, recognized_name
from quire.multimodal.audio.items import audio_items, longest_audio, token_count
from quire.multimodal.audio.reader import AudioReader
from quire.multimodal.media.sources import MediaPolicy, Reader, check_url, decode_base64
from quire.multimodal.messages import AUDIO_PART

_KINDS = ("input_audio", "audio_url")
_PICTURES = ("image_url", "input_image", "image", "image_pil", "image_embeds", "video_url", "video", "input_video")
Pieces = list[list[MediaItem]]  # the items of each piece of audio


@dataclass(frozen=True, slots=True)
class _Part:
    """A content part with audio: its position, the function that reads it, and the format that the client has given."""

    where: str
    read: Reader
    format: str | None = None


async def take_audio(
    messages: Sequence[Message], model: ServedModel, policy: MediaPolicy, max_parts: int
) -> Pieces | None:
    """Replace the audio in messages by `AUDIO_PART`, and make items of it.

    Everything that costs little is checked first, for all parts. Then one part after the other is read, decoded and
    turned into features, so that a request never holds the samples of two.

    Args:
        messages: messages of a chat; they are changed in place.
        model: the model that the chat is for.
        policy: the URLs that are allowed.
        max_parts: most parts with audio.

    Returns:
        The items of each part in order; None if there are none.

    Raises:
        InvalidRequest: the model takes no audio, or there are too many parts.
        PromptError: a part is not valid, not allowed, broken, or too long.
        QueueFull: too many files wait to be decoded.
    """
    if model.info.audio is not None:
        _refuse_pictures(messages, model)
    found = audio_parts(messages)
    if not found:
        return None
    info, reader = model.info.audio, model.audio
    if info is None or reader is None:
        kind = found[0][0][found[0][1]]["type"]
        raise InvalidRequest(
            f"Content parts of type {kind!r} are not supported: the model `{model.names[0]}` accepts text only.",
            found[0][2],
        )
    if len(found) > max_parts:
        raise InvalidRequest(
            f"A chat may have at most {max_parts} audio parts (--max-audio-parts), not {len(found)}.", "messages"
        )
    parts = [_checked(content[index], where, policy, reader.limits.size) for content, index, where in found]
    for content, index, _ in found:
        content[index] = dict(AUDIO_PART)
    pieces: Pieces = []
    tokens = 0
    for part in parts:
        pieces.append(await _items(part, model, info, reader, tokens))
        tokens += sum(item.length for item in pieces[-1])
    return pieces


def audio_parts(messages: Sequence[Message]) -> list[tuple[list[Any], int, str]]:
    """The content, the index in it and the name of each part with audio."""
    return _parts(messages, _KINDS)


def _parts(messages: Sequence[Message], kinds: Sequence[str]) -> list[tuple[list[Any], int, str]]:
    return [
        (content, index, f"messages[{number}].content[{index}]")
        for number, message in enumerate(messages)
        if isinstance(content := message.content, list)
        for index, part in enumerate(content)
        if isinstance(part, dict) and part.get("type") in kinds
    ]


def _refuse_pictures(messages: Sequence[Message], model: ServedModel) -> None:
    for content, index, where in _parts(messages, _PICTURES):
        raise InvalidRequest(
            f"Content parts of type {content[index]['type']!r} are not supported: the model `{model.names[0]}` is "
            "served with text and audio only.",
            where,
        )


def _checked(part: dict[str, Any], where: str, policy: MediaPolicy, max_size: int) -> _Part:
    """A part whose fields are valid."""
    kind = part["type"]
    value = part.get(kind)
    if kind == "audio_url":
        url = value.get("url") if isinstance(value, dict) else value
        if not isinstance(url, str) or not url:
            raise InvalidRequest('`audio_url` must be an object {"url": URL}.', where)
        return _Part(where, check_url(url, policy, max_size, where))
    data = value.get("data") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(data, str):
        raise InvalidRequest('`input_audio` must be an object {"data": BASE64, "format": FORMAT}.', where)
    if data[:5].lower() == "data:":
        return _Part(where, check_url(data, policy, max_size, where), _format(value, where))
    return _Part(where, lambda: asyncio.to_thread(decode_base64, data, max_size, where), _format(value, where))


def _format(value: dict[str, Any], where: str) -> str | None:
    """The name under which the declared format is recognized; None if none is declared."""
    given = value.get("format")
    if given is None:
        return None
    name = recognized_name(given) if isinstance(given, str) else None
    if name is None:
        raise InvalidRequest(
            f"The audio format {shorten(str(given))!r} is not supported. Supported formats: {NAMES}.", where
        )
    return name


async def _items(part: _Part, model: ServedModel, info: AudioInfo, reader: AudioReader, before: int) -> list[MediaItem]:
    """The items of one part. `before`: tokens of the audio before it."""
    tenant = current_tenant()
    content = await part.read()
    try:
        audio = await reader.decode(content, tenant=tenant)
    except AudioError as error:
        raise AudioError(str(error), part.where) from error
    del content
    _check_length(audio, part, model, info, before)
    with reader.hold(audio, tenant=tenant):
        return await reader.run(partial(audio_items, audio.samples, info), tenant=tenant)


def _check_length(audio: DecodedAudio, part: _Part, model: ServedModel, info: AudioInfo, before: int) -> None:
    if part.format is not None and audio.format != part.format:
        raise AudioError(f"The audio is {audio.format}, but its `format` is {part.format}.", part.where)
    samples, longest = len(audio.samples), longest_audio(info)
    if longest is not None and samples > longest:
        raise AudioError(
            f"The audio is {audio.seconds:.1f} s long; this model takes at most {longest / SAMPLE_RATE:g} s in one "
            "audio part.",
            part.where,
        )
    tokens, limit = token_count(samples, info), model.info.max_model_len
    if not tokens:
        raise AudioError(
            f"The audio is too short: its {audio.seconds:.3f} s give no audio token of this model.", part.where
        )
    if before + tokens >= limit:
        raise AudioError(
            f"This model's maximum context length is {limit} tokens. However, the audio has {before + tokens} tokens, "
            "and text and an answer must fit as well.",
            part.where,
        )
