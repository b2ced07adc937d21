"""Audio in the messages of a chat: its content parts, and the items that the engine gets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from tempfile import SpooledTemporaryFile
from typing import Any

from quire.engine.client.audio import AudioInfo
from quire.engine.client.protocol import AudioItem
from quire.multimodal.audio.decode import AudioError, DecodedAudio
from quire.multimodal.audio.features import SAMPLE_RATE
from quire.multimodal.audio.formats import NAMES, recognized_name
from quire.multimodal.audio.items import audio_items, feature_bytes, longest_audio, token_count, working_bytes
from quire.multimodal.audio.memory import Reservation
from quire.multimodal.audio.reader import AudioFile, AudioReader, AudioUse
from quire.multimodal.sources import MediaPolicy, MediaSource, base64_source, check_url
from quire.protocol.chat import Message
from quire.protocol.errors import InvalidRequest, shorten
from quire.rendering.messages import AUDIO_PART
from quire.serving.models import AudioInput, GeneratingModel
from quire.workers.tenant import current_tenant

_KINDS = ("input_audio", "audio_url")
_PICTURES = ("image_url", "input_image", "image", "image_pil", "image_embeds", "video_url", "video", "input_video")
_IN_MEMORY = 1 << 20  # bytes of a file; larger ones are on disk until they are decoded
Pieces = list[list[AudioItem]]  # the items of each piece of audio


@dataclass(frozen=True, slots=True)
class ChatAudio:
    """The audio of a chat: the items of each of its parts, and how the model reads them."""

    info: AudioInfo
    pieces: Pieces


@dataclass(frozen=True, slots=True)
class _Part:
    """A content part with audio: its position, the source of its content, and the format that the client has given."""

    where: str
    source: MediaSource
    format: str | None = None


async def take_audio(
    messages: Sequence[Message], model: GeneratingModel, policy: MediaPolicy, max_parts: int, sequences: int
) -> ChatAudio | None:
    """Replace the audio in messages by `AUDIO_PART`, and make items of it.

    Everything that costs little is checked first, for all parts. Then the files are read, one after the other; large
    ones wait on disk. Then one after the other is decoded and turned into features, so that a request never holds the
    samples of two. The memory for the items is reserved for as long as they live.

    Args:
        messages: messages of a chat; they are changed in place.
        model: the model that the chat is for.
        policy: the URLs that are allowed.
        max_parts: most parts with audio.
        sequences: requests to the engine that will have the items.

    Returns:
        The audio; None if there is none.

    Raises:
        InvalidRequest: the model takes no audio, or there are too many parts.
        PromptError: a part is not valid, not allowed, broken, or too long.
        QueueFull: too many files wait to be decoded.
    """
    if model.audio is not None:
        _refuse_pictures(messages, model)
    audio = audio_parts(messages)
    if not audio:
        return None
    if model.audio is None:
        kind = audio[0][0][audio[0][1]]["type"]
        raise InvalidRequest(
            f"Content parts of type {kind!r} are not supported: the model `{model.names[0]}` accepts text only.",
            audio[0][2],
        )
    if len(audio) > max_parts:
        raise InvalidRequest(
            f"A chat may have at most {max_parts} audio parts (--max-audio-parts), not {len(audio)}.", "messages"
        )
    parts = [_checked(content[index], where, policy, model.audio.reader.limits.size) for content, index, where in audio]
    for content, index, _ in audio:
        content[index] = dict(AUDIO_PART)
    with ExitStack() as stack:
        files = [await _file(part, model.audio.reader, stack) for part in parts]
        pieces = await _pieces(parts, files, model.audio, model.info.max_model_len, sequences)
    return ChatAudio(model.audio.info, pieces)


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


def _refuse_pictures(messages: Sequence[Message], model: GeneratingModel) -> None:
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
    return _Part(where, base64_source(data, max_size, where), _format(value, where))


def _format(value: dict[str, Any], where: str) -> str | None:
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


async def _file(part: _Part, reader: AudioReader, stack: ExitStack) -> AudioFile:
    """The content of a part, on disk if it is large."""
    with await reader.reserve(part.source.memory, current_tenant(), part.where):
        content = await part.source.read()
        file = stack.enter_context(SpooledTemporaryFile(_IN_MEMORY))  # noqa: SIM115 the stack closes it
        await asyncio.to_thread(file.write, content)
    return AudioFile(file, part.where)


async def _pieces(
    parts: Sequence[_Part],
    files: Sequence[AudioFile],
    audio_input: AudioInput,
    limit: int,
    sequences: int,
) -> Pieces:
    """The items of each part. `limit`: tokens of the context."""
    tenant, info, reader = current_tenant(), audio_input.info, audio_input.reader
    copies = 1 + sequences  # of features: here, and one for each request to the engine
    tokens = [0] * len(parts)

    async def make(index: int, audio: DecodedAudio, reservation: Reservation) -> list[AudioItem]:
        _check_length(audio, parts[index], limit, info, sum(tokens[:index]))
        items = await reader.run(partial(audio_items, audio.samples, info), tenant=tenant)
        for item in items:
            reservation.pass_on(item.features, copies * item.features.nbytes)
        tokens[index] = sum(item.length for item in items)
        return items

    use = AudioUse(
        while_made=lambda samples: 4 * samples + working_bytes(samples, info),
        result=lambda samples: copies * feature_bytes(samples, info),
    )
    return await reader.decode(files, use, make, tenant=tenant)


def _check_length(audio: DecodedAudio, part: _Part, limit: int, info: AudioInfo, before: int) -> None:
    if part.format is not None and audio.format != part.format:
        raise AudioError(f"The audio is {audio.format}, but its `format` is {part.format}.", part.where)
    samples = len(audio.samples)
    longest = longest_audio(info)
    if longest is not None and samples > longest:
        raise AudioError(
            f"The audio is {audio.seconds:.1f} s long; this model takes at most {longest / SAMPLE_RATE:g} s in one "
            "audio part.",
            part.where,
        )
    tokens = token_count(samples, info)
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
