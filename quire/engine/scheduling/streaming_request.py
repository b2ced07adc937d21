"""StreamingRequest: the scheduler's state of a sequence that reads a frame of audio with each of its tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from quire.engine.client.protocol import AudioItem, FeatureArray, FinishReason
from quire.engine.scheduling.request import Request


@dataclass(slots=True, eq=False)
class StreamingRequest(Request):
    """One sequence. A token can be computed once the frame at its position has arrived.

    Attributes:
        columns_per_frame: number of columns of features of a frame.
        frames: number of frames that have arrived.
        encoded: number of frames that are encoded once the steps in flight have finished.
        complete: no more audio follows.
        last_step: number of the last step with this sequence.
    """

    columns_per_frame: int = 1
    frames: int = 0
    encoded: int = 0
    complete: bool = False
    last_step: int = 0
    _features: deque[FeatureArray] = field(default_factory=deque)  # of the frames that are not encoded

    def receive(self, items: Iterable[AudioItem], *, last: bool) -> None:
        """Append audio."""
        for item in items:
            self._features.append(item.features)
            self.frames += item.features.shape[1] // self.columns_per_frame
        self.complete = last

    def take(self, frames: int) -> FeatureArray:
        """The features of the next `frames` frames to encode; they count as encoded afterwards."""
        left, parts = frames * self.columns_per_frame, list[FeatureArray]()
        while left:
            part = self._features.popleft()
            if part.shape[1] > left:
                self._features.appendleft(part[:, left:])
                part = part[:, :left]
            parts.append(part)
            left -= part.shape[1]
        self.encoded += frames
        return parts[0] if len(parts) == 1 else np.concatenate(parts, 1)

    @property
    def ready(self) -> int:
        """Number of tokens that can be computed: they are known, and their audio has arrived."""
        return min(len(self.tokens), self.frames) - self.num_computed_tokens

    @property
    def has_ended(self) -> bool:
        """Whether there is a token for each frame, and no further audio."""
        return self.complete and len(self.tokens) >= self.frames

    def append(self, token: int, max_model_len: int) -> tuple[FinishReason | None, int | None]:
        """Append a sampled token; see `Request.append`. The end of the audio is a stop."""
        reason, stop = Request.append(self, token, max_model_len)
        return ("stop", None) if self.has_ended and reason != "stop" else (reason, stop)
