"""Log-mel spectrograms of many windows at once; equal to `quire.multimodal.audio.features.log_mel` up to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.multimodal.audio.features import HOP, mel_filters

_WINDOW = 400  # samples of a frame
_FLOOR, _RANGE = 1e-10, 8.0


class LogMel:
    """The transform for a number of bands."""

    def __init__(self, mels: int) -> None:
        self._filters = torch.from_numpy(mel_filters(mels)).float()
        self._hann = torch.hann_window(_WINDOW)

    def __call__(self, samples: Tensor) -> Tensor:
        """Spectrograms (windows, frames, mels) of samples (windows, 160 * frames)."""
        spectrum = torch.stft(samples, _WINDOW, HOP, window=self._hann, center=True, return_complex=True)[..., :-1]
        power = spectrum.real.square() + spectrum.imag.square()
        levels = (self._filters @ power).clamp_min(_FLOOR).log10()
        levels = torch.maximum(levels, levels.amax((1, 2), keepdim=True) - _RANGE)
        return ((levels + 4.0) / 4.0).transpose(1, 2)
