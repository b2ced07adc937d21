"""Facts about models that transcribe audio while it arrives, for the front end."""

from __future__ import annotations

import msgspec


class DelayedStreamsInfo(msgspec.Struct, frozen=True, kw_only=True, tag="frames"):
    """A model that reads a frame of audio with each token: the frame's encoding is added to the token's embedding.

    Such models are called delayed streams (Zeghidour et al. 2025).

    Its text lags behind the audio by a delay. The prompt has a token for each frame of silence before the audio, and
    for each frame of the delay; then one token is generated for each frame, most of which stand for no text.

    Attributes:
        sample_rate: sample rate of the audio that features are made from, in Hz.
        num_mel_bins: number of rows of the features.
        columns_per_frame: number of columns of features of a frame.
        floor: smallest value of the features' logarithm to the base of 10.
        delay_frames: number of frames of the delay, which the model's weights contain.
        left_frames: number of frames of silence before the audio.
        right_frames: number of frames of silence after the audio, in which the last words are generated.
        start_token: first token of every prompt.
        pad_token: all other tokens of the prompt; generated where there is no text.
    """

    sample_rate: int
    num_mel_bins: int
    columns_per_frame: int
    floor: float
    delay_frames: int
    left_frames: int
    right_frames: int
    start_token: int
    pad_token: int

    @property
    def silent_frames(self) -> int:
        """Number of frames of silence around the audio."""
        return self.left_frames + self.right_frames

    @property
    def prompt(self) -> list[int]:
        """The tokens of every prompt."""
        return [self.start_token] + [self.pad_token] * (self.left_frames + self.delay_frames)


class TransducerInfo(msgspec.Struct, frozen=True, kw_only=True, tag="transducer"):
    """A model that encodes audio in chunks of frames, and generates tokens at each frame until one is the blank.

    Its prompts are empty. Its output is transformers', with the blanks: each ends a frame, as does the last of
    `max_symbols` other tokens in a row.

    Attributes:
        sample_rate: sample rate of the audio that features are made from, in Hz.
        num_mel_bins: number of rows of the features.
        columns_per_frame: number of columns of features of a frame.
        chunk_frames: number of frames that are encoded together: the delay of the text.
        blank_token: the token that stands for no text.
        max_symbols: most other tokens of a frame.
        bfloat16_filters: the filters of the features are rounded to bfloat16.
    """

    sample_rate: int
    num_mel_bins: int
    columns_per_frame: int
    chunk_frames: int
    blank_token: int
    max_symbols: int
    bfloat16_filters: bool = False


Streams = DelayedStreamsInfo | TransducerInfo
