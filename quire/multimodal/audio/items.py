"""Items: the features of samples for an engine, and the placeholder tokens that stand for them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from quire.engine.client.audio import AudioInfo
from quire.engine.client.model_info import Transcribes
from quire.engine.client.protocol import AudioItem, FeatureArray
from quire.multimodal.audio.features import (
    HOP,
    kaldi_columns,
    kaldi_log_mel,
    log_mel,
    normalized_log_mel,
    normalized_samples,
    stacked_columns,
    stacked_log_mel,
)
from quire.multimodal.audio.usm_features import (
    preemphasized_columns,
    preemphasized_log_mel,
    sample_frames,
    semicausal_columns,
    semicausal_log_mel,
)
from quire.multimodal.placement import Placeholders

Samples = NDArray[np.float32]
_FLOAT = 4  # bytes
_WORKING_COPIES = 7  # of the samples' size: they are doubles, and there are two spectrograms of doubles at most


def encoded_columns(samples: int, info: AudioInfo) -> int:
    """Number of columns of features that are encoded for `samples` samples."""
    match info.features:
        case "stacked_log_mel":
            return stacked_columns(samples)
        case "kaldi_log_mel":
            return kaldi_columns(samples)
        case "semicausal_log_mel":
            return semicausal_columns(samples)
        case "preemphasized_log_mel":
            return preemphasized_columns(samples)
        case "sample_frames":
            return -(-samples // info.num_mel_bins)
    samples = max(samples, info.min_samples)
    if not info.padded_columns:
        return samples // HOP
    columns = -(-samples // HOP)
    return _whole(columns, info.padded_columns) if info.encodes_padding else columns


def token_count(samples: int, info: AudioInfo) -> int:
    """Number of placeholder tokens for `samples` samples; 0 if they are too few for the model."""
    return sum(info.lengths.tokens(columns) for _, columns in _pieces(encoded_columns(samples, info), info))


def longest_audio(info: AudioInfo) -> int | None:
    """Samples of the longest audio part that the model accepts; None: any length."""
    return None if info.max_items is None else info.max_items * info.item_columns * info.column_samples


def feature_bytes(samples: int, info: AudioInfo) -> int:
    """Bytes of the features of all items of a piece of audio."""
    pieces = list(_pieces(encoded_columns(samples, info), info))
    columns = sum(columns for _, columns in pieces) + len(pieces) * (info.columns_before + info.columns_after + 1)
    return _FLOAT * info.num_mel_bins * columns


def working_bytes(samples: int, info: AudioInfo) -> int:
    """Bytes that `audio_items` takes meanwhile, beside the samples and its result."""
    return _WORKING_COPIES * _FLOAT * round(_seconds(samples, info) * info.sample_rate)


def audio_items(samples: Samples, info: AudioInfo) -> list[AudioItem]:
    """The items of a piece of audio, one behind the other. May take milliseconds for each second of audio.

    Args:
        samples: 1-D at 16 kHz, of which `token_count` is at least 1, and not longer than `longest_audio`.
        info: facts about the model.

    Returns:
        Items, whose spans count from the first placeholder of the audio.
    """
    encoded = encoded_columns(len(samples), info)
    start = 0
    items = []
    features = _features(samples, info)
    for first, columns in _pieces(encoded, info):
        last = first + columns
        before = min(first, info.columns_before)
        # An even number: the second convolution reads columns in pairs.
        behind = min(features.shape[1], first + _whole(columns + info.columns_after, 2)) if info.columns_after else last
        part = np.ascontiguousarray(features[:, first - before : behind])
        length = info.lengths.tokens(columns)
        digest = hashlib.sha256(f"{before}:{columns}:{part.shape}".encode())
        digest.update(part.data)
        items.append(
            AudioItem(
                hash=digest.digest(),
                start=start,
                length=length,
                features=part,
                encoded_columns=columns,
                columns_before=before,
            )
        )
        start += length
    return items


def parts_of_sound(items: Sequence[AudioItem], tokens: int, *, ends_video: bool) -> list[list[AudioItem]]:
    """The items of a video's sound in parts, whose spans count from the first placeholder of theirs.

    Args:
        items: the items of all of it, none of which has tokens of two parts.
        tokens: number of tokens of a part.
        ends_video: no frames follow the last part.
    """
    parts: list[list[AudioItem]] = []
    for item in items:
        part, start = divmod(item.start, tokens)
        if part == len(parts):
            parts.append([])
        parts[part].append(structs.replace(item, start=start))
    last = parts[-1]
    last[-1] = structs.replace(last[-1], ends_video=ends_video)
    return parts


def _features(samples: Samples, info: AudioInfo) -> NDArray[np.float32]:
    match info.features:
        case "stacked_log_mel":
            return stacked_log_mel(samples, info.num_mel_bins // 2)
        case "kaldi_log_mel":
            return kaldi_log_mel(samples, info.num_mel_bins)
        case "semicausal_log_mel":
            return semicausal_log_mel(samples, info.num_mel_bins)
        case "preemphasized_log_mel":
            return preemphasized_log_mel(samples, info.num_mel_bins)
        case "sample_frames":
            return sample_frames(samples, info.num_mel_bins)
        case "log_mel":
            return log_mel(samples, info.num_mel_bins, _seconds(len(samples), info))


def _pieces(columns: int, info: AudioInfo) -> Iterator[tuple[int, int]]:
    """First column and number of columns of each item. A rest that would have no token is left out."""
    for first in range(0, columns, info.item_columns):
        count = min(info.item_columns, columns - first)
        if info.lengths.tokens(count):
            yield first, count


def _seconds(samples: int, info: AudioInfo) -> float:
    """Length of the audio that features are made of, with the silence behind it."""
    samples = max(samples, info.min_samples)
    if info.padded_columns:
        samples = (_whole(-(-samples // HOP), info.padded_columns) + info.silent_columns) * HOP
    return samples / info.sample_rate


def _whole(count: int, size: int) -> int:
    """`count`, rounded up to a multiple of `size`."""
    return -(-count // size) * size


def make_item(samples: NDArray[np.float32], info: Transcribes) -> AudioItem:
    """The item of audio. Takes up to some tens of milliseconds.

    Args:
        samples: 1-D at 16 kHz, at least one and at most `info.window_seconds`. Very short audio is padded with silence.
        info: facts about the model.
    """
    features = np.ascontiguousarray(_speech_features(samples, info))
    return AudioItem(hash=hashlib.sha256(features.data).digest(), features=features)


def _speech_features(samples: NDArray[np.float32], info: Transcribes) -> FeatureArray:
    match info.features:
        case "log_mel":
            return log_mel(samples, info.num_mel_bins, info.window_seconds)
        case "normalized_log_mel":
            return normalized_log_mel(samples, info.num_mel_bins)
        case "normalized_samples":
            samples = normalized_samples(samples)
        case "samples":
            samples = samples.astype(np.float32)
    return np.pad(samples, (0, max(0, info.min_columns - len(samples))))[None]


def audio_placeholders(pieces: Sequence[Sequence[AudioItem]], info: AudioInfo) -> Placeholders:
    """The placeholders of a prompt, one for each piece of audio. Spans of items count from the first one of theirs."""
    repeats = [sum(item.length for item in piece) for piece in pieces]
    items = [(index, item) for index, piece in enumerate(pieces) for item in piece]
    return Placeholders(info.placeholder, info.placeholder_text, "audio", repeats, items)
