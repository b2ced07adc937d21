"""The training recipe of quire-nano-hear: sizes, noise, learning rates."""

from __future__ import annotations

from dataclasses import dataclass, field

SEED = 20_26


@dataclass(frozen=True)
class Shape:
    """Sizes of the model.

    Attributes:
        text_tokens: of the tokenizer, before special tokens and timestamps.
        seconds: length of a window.
        targets: longest sequence of the decoder, in tokens.
    """

    text_tokens: int = 768
    seconds: int = 10
    mels: int = 80
    width: int = 192
    heads: int = 3
    encoder_layers: int = 4
    decoder_layers: int = 2
    inner: int = 768
    targets: int = 128

    @property
    def positions(self) -> int:
        """Positions of the encoder: one for 20 ms."""
        return 50 * self.seconds


@dataclass(frozen=True)
class Recipe:
    """All settings that determine the result, besides the phrases and voices.

    Attributes:
        shards: files of a thousand recordings.
        seconds: audio of a step.
        lengths: lengths of windows in seconds; all windows of a step have one of them.
        easy: first steps, whose windows are short and have one sentence each and little noise.
        easy_seconds: their length.
        silent: share of windows without speech.
        clean: share of windows without noise.
        loudest_noise: lowest ratio of speech to noise in dB; the highest is 30.
        timed: share of windows whose text has timestamps.
        earlier: share of windows with earlier text in the prompt.
        language_weight: of the language token in the loss; others have 1.
        ctc_weight: of the CTC loss on the encoder, which makes the first steps faster.
        rates: learning rates of the matrices and of the other parameters.
        decay_share: share of the steps over which the learning rates decay to 0.
    """

    seed: int = SEED
    shape: Shape = field(default_factory=Shape)
    shards: int = 28
    steps: int = 8000
    seconds: int = 120
    lengths: tuple[int, ...] = (3, 4, 4, 6, 10)
    easy: int = 1250
    easy_seconds: int = 3
    silent: float = 0.03
    clean: float = 0.2
    loudest_noise: float = 3.0
    timed: float = 0.5
    earlier: float = 0.08
    language_weight: float = 4.0
    ctc_weight: float = 0.3
    rates: tuple[float, float] = (0.015, 2e-3)
    weight_decay: float = 0.02
    warmup: int = 50
    decay_share: float = 0.4
