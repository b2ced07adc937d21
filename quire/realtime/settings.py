"""Settings of sessions, independent of the dialect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.realtime.audio import PCM_24K, AudioFormat

Delay = Literal["minimal", "low", "medium", "high", "xhigh"]
NoiseReduction = Literal["near_field", "far_field"]
# Below these levels, in dBFS, is noise: close to a microphone, noise is quieter than speech by more.
_NOISE_FLOORS: dict[NoiseReduction, float] = {"near_field": -45.0, "far_field": -55.0}


@dataclass(frozen=True, slots=True)
class TurnDetection:
    """Settings of voice activity.

    Attributes:
        threshold: probability from which on audio counts as speech, 0 to 1.
        noise_floor: level in dBFS below which there is no speech; None: no such level.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    noise_floor: float | None = None


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """A session's settings. The defaults are those of OpenAI.

    Attributes:
        model: name of the model that transcribes; None until the client has named one.
        language: code of the language that is spoken; None: detected by the model.
        prompt: earlier text, as context for the model.
        delay: delay of interim transcripts; None: the server's setting.
        turn_detection: None if the client ends utterances by commits.
        logprobs: transcripts have the log-probabilities of their tokens.
    """

    audio_format: AudioFormat = PCM_24K
    model: str | None = None
    language: str | None = None
    prompt: str = ""
    delay: Delay | None = None
    noise_reduction: NoiseReduction | None = None
    turn_detection: TurnDetection | None = TurnDetection()
    logprobs: bool = False

    @property
    def effective_detection(self) -> TurnDetection | None:
        """The settings of voice activity with the noise floor that noise reduction stands for."""
        detection = self.turn_detection
        if detection is None or detection.noise_floor is not None or self.noise_reduction is None:
            return detection
        floor = _NOISE_FLOORS[self.noise_reduction]
        return TurnDetection(
            detection.threshold, detection.prefix_padding_ms, detection.silence_duration_ms, noise_floor=floor
        )
