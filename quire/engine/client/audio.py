"""Facts about an audio language model, for the front end."""

from __future__ import annotations

from typing import Literal

import msgspec

AudioFeatures = Literal[
    "log_mel", "stacked_log_mel", "kaldi_log_mel", "semicausal_log_mel", "preemphasized_log_mel", "sample_frames"
]


class AudioLengths(msgspec.Struct, frozen=True, tag="convolutions"):
    """Compute the number of encoder positions of columns of features.

    Attributes:
        chunk: columns that convolutions see together; nothing reaches across the border of two chunks.
        halvings: convolutions that halve the number of positions, rounded up.
        pool: positions that become one token; those left over at the end are dropped.
    """

    chunk: int
    halvings: int
    pool: int

    def positions(self, columns: int) -> int:
        """Positions before pooling."""
        chunks, left = divmod(columns, self.chunk)
        return chunks * self._halved(self.chunk) + self._halved(left)

    def tokens(self, columns: int) -> int:
        """Tokens of an item."""
        return self.positions(columns) // self.pool

    def _halved(self, columns: int) -> int:
        return -(-columns // (1 << self.halvings))


class WindowLengths(msgspec.Struct, frozen=True, tag="windows"):
    """Compute the number of tokens that an encoder makes of windows of columns.

    Attributes:
        window: number of columns of a window.
        tokens_each: number of tokens of a window, also of an incomplete one.
    """

    window: int
    tokens_each: int

    def tokens(self, columns: int) -> int:
        """Tokens of an item."""
        return -(-columns // self.window) * self.tokens_each


class AudioInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How audio becomes items of an audio language model, with placeholder tokens in its prompts.

    Attributes:
        kind: selects the transcription prompt.
        placeholder: the token that stands for each of an item's embeddings.
        placeholder_text: text that stands for a whole piece of audio in a rendered chat, with one placeholder in it.
        before, after: texts that the front end puts around it there, because chat templates do not.
        sample_rate: sample rate of the audio that features are made from, in Hz.
        features: algorithm that makes them of samples: "log_mel" as Whisper's, "stacked_log_mel" as Granite Speech's,
            "kaldi_log_mel" as Phi-4's, "semicausal_log_mel" as Gemma 4's,
            "preemphasized_log_mel" as Gemma 3n's; "sample_frames": a column is the samples
            themselves, as many as there are rows.
        num_mel_bins: rows of the features.
        column_samples: samples between two columns.
        item_columns: most columns of an item that are encoded. Longer audio becomes several items, one behind the
            other.
        lengths: computes the number of positions and tokens of items.
        padded_columns: features are made of audio that silence extends to a multiple of so many columns; 0: of the
            audio alone.
        silent_columns: so many further columns of silence stand behind that.
        encodes_padding: whether that silence is encoded, too.
        columns_after: columns after those that are encoded, which convolutions read.
        columns_before: columns before those that are encoded, which convolutions read; of all items of a piece of audio
            but the first.
        min_samples: shorter audio is extended by silence.
        max_items: maximum number of items of one piece of audio; None: any number.
    """

    kind: Literal[
        "gemma3n", "gemma4", "granite_speech", "phi4_multimodal", "qwen2_5_omni", "qwen2_audio", "qwen3_asr", "voxtral"
    ]
    placeholder: int
    placeholder_text: str
    before: str = ""
    after: str = ""
    sample_rate: int
    features: AudioFeatures = "log_mel"
    num_mel_bins: int
    column_samples: int = 160
    item_columns: int
    lengths: AudioLengths | WindowLengths
    padded_columns: int = 0
    silent_columns: int = 0
    encodes_padding: bool = False
    columns_after: int = 0
    columns_before: int = 0
    min_samples: int = 0
    max_items: int | None = None

    @property
    def chat_text(self) -> str:
        """Text of a piece of audio in a prompt, with one placeholder in it."""
        return f"{self.before}{self.placeholder_text}{self.after}"
