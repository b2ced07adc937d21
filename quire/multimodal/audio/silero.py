"""Silero's network for voice activity, in NumPy: the package ships its weights, but its own code imports torch."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
FRAME = 512  # samples of a step: 32 ms at 16 kHz
CONTEXT = 64  # samples before a frame that are looked at with it
STATE = 128  # values of each of the two states
_FFT, _STRIDE, _REFLECTED = 256, 128, 64
_BINS = _FFT // 2 + 1


class SileroNetwork:
    """The network at 16 kHz: a spectrum, four convolutions, an LSTM cell. It has no state of its own."""

    def __init__(self, weights: dict[str, Array]) -> None:
        """Arrange the weights so that each layer is one matrix product."""
        self._basis = _contiguous(weights["stft_conv.weight"][:, 0].T)
        taps = {layer: weights[f"conv{layer}.weight"].transpose(2, 1, 0) for layer in range(1, 5)}
        self._conv1 = _contiguous(taps[1].reshape(-1, taps[1].shape[2]))
        self._conv2 = _contiguous(taps[2].reshape(-1, taps[2].shape[2]))
        # Of a sequence of two, and of one, the other taps only see the padding.
        self._conv3 = _contiguous(taps[3][1:].reshape(-1, taps[3].shape[2]))
        self._conv4 = _contiguous(taps[4][1])
        self._biases = [weights[f"conv{layer}.bias"] for layer in range(1, 5)]
        cell = np.concatenate([weights["lstm_cell.weight_ih"], weights["lstm_cell.weight_hh"]], axis=1)
        bias = weights["lstm_cell.bias_ih"] + weights["lstm_cell.bias_hh"]
        # sigmoid(x) = (1 + tanh(x / 2)) / 2: then one tanh serves all gates, and nothing overflows.
        scale = np.full(4 * STATE, 0.5, np.float32)
        scale[2 * STATE : 3 * STATE] = 1.0
        self._cell = _contiguous(cell * scale[:, None])
        self._cell_bias = bias * scale
        self._out = weights["final_conv.weight"][0, :, 0]
        self._out_bias = float(weights["final_conv.bias"][0])

    def encode(self, frames: Array) -> Array:
        """The part without state.

        Args:
            frames: (n, CONTEXT + FRAME) samples.

        Returns:
            Array of shape (n, 128).
        """
        n = len(frames)
        padded = np.concatenate([frames, frames[:, -2 : -2 - _REFLECTED : -1]], axis=1)
        parts = np.lib.stride_tricks.sliding_window_view(padded, _FFT, axis=1)[:, ::_STRIDE]
        spectrum = parts @ self._basis
        steps = spectrum.shape[1]
        inner = np.zeros((n, steps + 2, _BINS), np.float32)
        np.hypot(spectrum[..., :_BINS], spectrum[..., _BINS:], out=inner[:, 1:-1])
        rows = np.concatenate([inner[:, :-2], inner[:, 1:-1], inner[:, 2:]], axis=2)
        bias1, bias2, bias3, bias4 = self._biases
        outer = np.zeros((n, steps + 1, len(bias1)), np.float32)
        np.maximum(rows @ self._conv1 + bias1, 0, out=outer[:, 1:])
        pairs = np.stack([outer[:, :3].reshape(n, -1), outer[:, 2:5].reshape(n, -1)], axis=1)
        pairs = np.maximum(pairs @ self._conv2 + bias2, 0)
        third = np.maximum(pairs.reshape(n, -1) @ self._conv3 + bias3, 0)
        encoded: Array = np.maximum(third @ self._conv4 + bias4, 0)
        return encoded

    def step(self, encoded: Array, hidden: Array, cell: Array) -> tuple[float, Array, Array]:
        """The probability of speech in a frame, and the next states.

        Args:
            encoded: (128,), of the frame.
            hidden: (128,), zeros at the start.
            cell: (128,), zeros at the start.
        """
        gates = np.tanh(self._cell @ np.concatenate([encoded, hidden]) + self._cell_bias)
        enter, forget, new, out = gates.reshape(4, STATE)
        cell = 0.5 * ((1 + forget) * cell + (1 + enter) * new)
        hidden = 0.5 * (1 + out) * np.tanh(cell)
        logit = float(np.maximum(hidden, 0) @ self._out) + self._out_bias
        return 0.5 * (1 + float(np.tanh(logit / 2))), hidden, cell


@lru_cache(maxsize=1)
def network() -> SileroNetwork:
    """The network with the weights of the package silero-vad, which is not imported.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = find_spec("silero_vad")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the package silero-vad is not installed")
    return SileroNetwork(read_weights(Path(spec.submodule_search_locations[0]) / "data" / "silero_vad_16k.safetensors"))


def read_weights(path: Path) -> dict[str, Array]:
    """The float32 tensors of a safetensors file."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:start])
    return {
        name: np.frombuffer(
            content[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]], "<f4"
        ).reshape(entry["shape"])
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def _contiguous(array: Array) -> Array:
    return np.ascontiguousarray(array, np.float32)
