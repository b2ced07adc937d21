"""Groups of options for audio files and for media in messages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Field

from quire.config.lists import Origins
from quire.config.options import Options
from quire.config.types import NonNegativeInt, Seconds, SizeFromKiB, SizeFromMiB


class AudioOptions(Options):
    """Limits of audio files, and the events of transcriptions."""

    max_audio_size: SizeFromKiB = Field(
        ByteSize(25 << 20), description="largest audio file; --max-body-size must be larger"
    )
    max_audio_seconds: Annotated[float, Field(gt=0, le=24 * 3600)] = Field(
        3600.0,
        description="longest audio in seconds; an hour of audio takes 280 MiB of memory while it is transcribed, and "
        "440 MiB while it is decoded",
    )
    max_audio_decoded_size: SizeFromMiB = Field(
        ByteSize(4 << 30),
        description="largest audio file after decompression, counted with all channels at the sample rate of the file; "
        "a larger one is refused (files are decoded in pieces, so decoding takes less memory than this)",
    )
    max_audio_memory: SizeFromMiB = Field(
        ByteSize(1 << 30),
        description="memory for all audio at once: files while they are decoded, samples, features, and realtime "
        "sessions; audio that does not fit now, or not into the share of its client, waits, clients taking turns, and "
        "audio that can never fit is refused",
    )
    transcription_events: Literal["openai", "vllm"] = Field(
        "openai",
        description="format of streamed transcriptions without `stream_format`: OpenAI's events or vLLM's chunks",
    )


class MediaOptions(Options):
    """Media in messages, and the URLs that may be fetched."""

    allowed_media_domains: Origins = Field(
        (),
        description="host names from which audio in messages may be fetched, without redirects; default: none, so "
        "audio must be sent in data URLs",
    )
    allowed_local_media_path: Path | None = Field(
        None, description="directory whose files may be used in messages by file:// URLs; default: none"
    )
    media_fetch_timeout: Seconds = Field(10.0, description="timeout of fetching a URL in a message, in seconds")
    max_audio_parts: NonNegativeInt = Field(16, description="maximum number of audio content parts in a chat")
