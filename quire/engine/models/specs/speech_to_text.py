"""SpeechToTextSpec: how a model transcribes, beside its architecture."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.client.model_info import Transcribes


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechToTextSpec:
    """Transcription config of a model, in addition to its architecture.

    Attributes:
        info: facts for the front end.
        alignment_heads: layer and head of each head whose cross-attention follows the audio.
        median_width: positions of the median filter over these heads' weights.
    """

    info: Transcribes
    alignment_heads: tuple[tuple[int, int], ...] = ()
    median_width: int = 1
