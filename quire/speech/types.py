"""Options and results of a transcription."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quire.engine.client.deadline import Deadline
from quire.engine.client.sampling_params import GREEDY, SamplingNumbers

SpeechTask = Literal["transcribe", "translate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceOptions:
    """Settings by which audio is cut by voice activity; see `quire.multimodal.audio.voice_activity`."""

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionOptions:
    """Options of a transcription.

    Attributes:
        language: ISO code; None: detected, if the model is multilingual.
        languages: ISO codes of those that are considered then; empty: all of them.
        prompt: earlier text, as context for style and vocabulary. Its last tokens are used.
        hotwords: words that are likely to occur; put before the prompt.
        numbers: how tokens are chosen. At a temperature of 0, higher temperatures are the fallback.
        timestamps: segments with times, as the model writes them; otherwise a window is one segment.
        words: times of words.
        logprobs: log-probabilities of tokens.
        live: text is given while it is generated. A window whose text was given is not decoded again.
        rehears: audio whose text is doubtful is heard again, moved by parts of an encoder's position, and the likeliest
            text is kept; not with `live`, temperatures and beams. Encoder-decoder models only.
        voice: leave out silence and cut between stretches of speech; None: cut in pauses.
        max_tokens: greatest number of tokens generated for a window; None: what the model can.
        beams: number of beams of a beam search, without temperature fallback; 0: no beam search.
        length_penalty: see `BeamOptions`.
        deadline, seed: as for completions.
    """

    task: SpeechTask = "transcribe"
    language: str | None = None
    languages: tuple[str, ...] = ()
    prompt: str = ""
    hotwords: str = ""
    numbers: SamplingNumbers = GREEDY
    timestamps: bool = False
    words: bool = False
    logprobs: bool = False
    live: bool = True
    rehears: bool = False
    voice: VoiceOptions | None = None
    max_tokens: int | None = None
    seed: int | None = None
    deadline: Deadline = field(default_factory=Deadline)
    beams: int = 0
    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token of the text."""

    token: str
    logprob: float
    bytes: bytes


@dataclass(frozen=True, slots=True)
class Word:
    """A word and when it is spoken, in seconds from the start of the audio."""

    word: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of the text with its times, in seconds from the start of the audio.

    Attributes:
        id: index of the segment.
        seek: start of its window, in hundredths of a second.
        tokens: tokens of the text, with its timestamps.
        temperature, avg_logprob, compression_ratio, no_speech_prob: values of its window.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionUsage:
    """Token counts and duration of a transcription.

    Attributes:
        seconds: duration of the audio in seconds.
        audio_tokens: positions of the encoder that held audio.
        text_tokens: tokens of all prompts: earlier text, and tokens for task and language.
        output_tokens: generated tokens, without those of discarded attempts.
    """

    seconds: float
    audio_tokens: int = 0
    text_tokens: int = 0
    output_tokens: int = 0

    @property
    def input_tokens(self) -> int:
        """Tokens of audio and text."""
        return self.audio_tokens + self.text_tokens


@dataclass(frozen=True, slots=True)
class TranscriptDelta:
    """The next piece of the text. All pieces together are the text.

    Attributes:
        input_tokens: tokens of audio and prompts that no piece before it has counted.
        output_tokens: generated tokens that no piece before it has counted.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SegmentDone:
    """A segment whose text was yielded, with word timestamps if requested."""

    segment: Segment
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionDone:
    """The end of a transcription.

    Attributes:
        text: the whole text, without white space at its ends.
        language: ISO code; None if it is not known.
        duration: duration of the audio in seconds.
        truncated: the text of a window ended at the `max_tokens` of the options.
    """

    text: str
    language: str | None
    duration: float
    usage: TranscriptionUsage
    segments: tuple[Segment, ...] = field(default=())
    words: tuple[Word, ...] = field(default=())
    truncated: bool = False


TranscriptionEvent = TranscriptDelta | SegmentDone | TranscriptionDone
