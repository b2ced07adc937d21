"""Audio in the messages of a chat: the items that the engine gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from quire.engine.client.audio import AudioInfo
from quire.engine.client.protocol import AudioItem
from quire.multimodal.audio.decode import AudioError, DecodedAudio
from quire.multimodal.audio.features import SAMPLE_RATE
from quire.multimodal.audio.items import audio_items, feature_bytes, longest_audio, token_count, working_bytes
from quire.multimodal.audio.reader import AudioFile, AudioPreparation, AudioUse
from quire.multimodal.memory import Reservation
from quire.serving.models import AudioInput
from quire.workers.tenant import current_tenant


def audio_preparation(
    files: Sequence[AudioFile],
    formats: Sequence[str | None],
    audio_input: AudioInput,
    limit: int,
    sequences: int,
    *,
    beside: int = 0,
    on_made: Callable[[int, int], None] = lambda _index, _tokens: None,
) -> AudioPreparation[list[AudioItem]]:
    """The audio of a chat, which is decoded and turned into features, one file after the other.

    A request never holds the samples of two. The memory for the items is reserved for as long as they live. A video
    without sound has no items.

    Args:
        files: files of audio, and videos whose sound is heard.
        formats: the format of each that the client has given; None: it has given none.
        audio_input: how the model reads audio.
        limit: tokens of the context.
        sequences: requests to the engine that will have the items.
        beside: bytes that the other media of the chat need.
        on_made: is told the index of a file, and the number of its tokens.
    """
    tenant, info, reader = current_tenant(), audio_input.info, audio_input.reader
    copies = 1 + sequences  # of features: here, and one for each request to the engine
    tokens = [0] * len(files)

    async def make(index: int, audio: DecodedAudio, reservation: Reservation) -> list[AudioItem]:
        file = files[index]
        if formats[index] not in (None, audio.format):
            raise AudioError(f"The audio is {audio.format}, but its `format` is {formats[index]}.", file.param)
        if file.is_video and not token_count(len(audio.samples), info):
            return []
        _check_length(audio, file.param, limit, info, sum(tokens[:index]))
        items = await reader.run(partial(audio_items, audio.samples, info), tenant=tenant)
        for item in items:
            reservation.pass_on(item.features, copies * item.features.nbytes)
        tokens[index] = sum(item.length for item in items)
        on_made(index, tokens[index])
        return items

    use = AudioUse(
        while_made=lambda samples: 4 * samples + working_bytes(samples, info),
        result=lambda samples: copies * feature_bytes(samples, info),
    )
    return reader.preparation(files, use, make, tenant=tenant, beside=beside)


def _check_length(audio: DecodedAudio, where: str, limit: int, info: AudioInfo, before: int) -> None:
    samples = len(audio.samples)
    longest = longest_audio(info)
    if longest is not None and samples > longest:
        raise AudioError(
            f"The audio is {audio.seconds:.1f} s long; this model takes at most {longest / SAMPLE_RATE:g} s in one "
            "audio part.",
            where,
        )
    tokens = token_count(samples, info)
    if not tokens:
        raise AudioError(f"The audio is too short: its {audio.seconds:.3f} s give no audio token of this model.", where)
    if before + tokens >= limit:
        raise AudioError(
            f"This model's maximum context length is {limit} tokens. However, the audio has {before + tokens} tokens, "
            "and text and an answer must fit as well.",
            where,
        )
