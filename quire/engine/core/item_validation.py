"""Validation of items in the core."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from quire.engine.client.audio import AudioInfo
from quire.engine.client.model_info import Generates, ModelKind, Pools, Transcribes
from quire.engine.client.picture_processor import INPUT_TYPES
from quire.engine.client.pictures import LARGEST_VALUE, PictureInfo, SmartResize, TransformersProcessor
from quire.engine.client.protocol import AudioItem, FeatureArray, MediaItem, PictureItem, only_audio, position_leap
from quire.engine.client.streaming import DelayedStreamsInfo, Streams, TransducerInfo

_MOST_POSITIONS = 1 << 24  # of a video; its time must be within the context as well


def invalid_items(
    items: Sequence[MediaItem], tokens: int, kind: ModelKind, context_len: int | None = None
) -> str | None:
    """Say what is wrong with the items of a prompt, or of a piece of one, for a model; None if they are valid.

    Args:
        items: the items.
        tokens: number of tokens of the prompt or piece.
        kind: what the model does.
        context_len: tokens of the context, of a whole prompt; None: of a piece, whose place is not known, and whose
            positions must be within it.
    """
    context_len = tokens if context_len is None else context_len
    match kind:
        case Transcribes():
            return _not_audio(items) or _invalid_whole(items, kind)
        case Generates(audio=audio, pictures=pictures):
            return _invalid_in_prompt(items, tokens, audio, pictures) or _invalid_times(items, context_len)
        case Pools(pictures=pictures):
            return (
                _not_alone(items, tokens, pictures)
                or _invalid_in_prompt(items, tokens, None, pictures)
                or _invalid_times(items, context_len)
            )
        case DelayedStreamsInfo() | TransducerInfo():
            return _not_audio(items) or _first(_invalid_frames(item, kind) for item in only_audio(items))


def _invalid_in_prompt(
    items: Sequence[MediaItem], tokens: int, audio: AudioInfo | None, pictures: PictureInfo | None
) -> str | None:
    """What is wrong with items that have tokens of the prompt."""
    return (
        _first(_not_accepted(item, audio, pictures) for item in items)
        or _invalid_spans(items, tokens)
        or _first(_invalid_placed(item, audio, pictures) for item in items)
    )


def _not_alone(items: Sequence[MediaItem], tokens: int, pictures: PictureInfo | None) -> str | None:
    if pictures is None or not pictures.alone or not items or (len(items) == 1 and tokens == 1):
        return None
    return f"a prompt is either a text or one picture with one token, not {len(items)} in {tokens} tokens"


def _first(reasons: Iterable[str | None]) -> str | None:
    return next(filter(None, reasons), None)


def _medium(item: MediaItem) -> str:
    return "audio" if isinstance(item, AudioItem) else "pictures"


def _not_audio(items: Sequence[MediaItem]) -> str | None:
    return "the model accepts audio, not pictures" if len(only_audio(items)) < len(items) else None


def _not_accepted(item: MediaItem, audio: AudioInfo | None, pictures: PictureInfo | None) -> str | None:
    medium, accepted = _medium(item), {"audio": audio is not None, "pictures": pictures is not None}
    if accepted[medium]:
        return None
    names = [name for name in accepted if accepted[name]]
    return f"the model does not accept {medium}, only {' and '.join([*names, 'text'])}"


def _invalid_placed(item: MediaItem, audio: AudioInfo | None, pictures: PictureInfo | None) -> str | None:
    """What is wrong with an item that has placeholder tokens, of a kind that the model accepts."""
    if isinstance(item, AudioItem):
        return None if audio is None else _invalid_span(item, audio)
    return None if pictures is None else _invalid_picture(item, pictures)


def _invalid_whole(items: Sequence[MediaItem], speech: Transcribes) -> str | None:
    if len(items) != 1:
        return f"the model needs exactly one audio item, not {len(items)}"
    (item,) = only_audio(items)
    rows, most = speech.num_mel_bins, speech.num_columns
    even = speech.kind == "whisper"
    if (item.start, item.length) != (0, 0):
        return "the model reads audio by cross-attention: its item must have start 0 and length 0"
    shape = item.features.shape
    fits = len(shape) == 2 and shape[0] == rows and shape[1] in range(speech.min_columns, most + 1)
    if item.features.dtype != np.float32 or not fits or (even and shape[1] % 2):
        return (
            f"the features are {item.features.dtype} {'x'.join(map(str, shape))}, not float32 {rows}x{most}, "
            f"or fewer columns{', an even number of them' if even else ''}, but at least {speech.min_columns}"
        )
    if item.encoded_columns is not None:
        return f"all columns of features are encoded, not {item.encoded_columns} of {shape[1]}"
    return _invalid_content(item)


def _invalid_spans(items: Sequence[MediaItem], tokens: int) -> str | None:
    end = 0
    for item in items:
        if item.length < 1:
            return f"an item has {item.length} tokens; it needs at least one"
        if item.start < end:
            return f"the item at token {item.start} must begin at token {end} or later"
        end = item.start + item.length + int(isinstance(item, AudioItem) and item.ends_video)
    return f"an item ends at token {end}, but the prompt has {tokens} tokens" if end > tokens else None


def _invalid_span(item: AudioItem, audio: AudioInfo) -> str | None:
    shape, rows = item.features.shape, audio.num_mel_bins
    if item.features.dtype != np.float32 or len(shape) != 2 or shape[0] != rows:
        return f"the features are {item.features.dtype} {'x'.join(map(str, shape))}, not float32 of {rows} rows"
    if item.columns_before not in (0, audio.columns_before):
        return (
            f"{item.columns_before} columns of features precede the encoded columns; accepted are 0 and "
            f"{audio.columns_before}"
        )
    columns, most = item.columns, min(shape[1] - item.columns_before, audio.item_columns)
    if not 1 <= columns <= most or shape[1] > item.columns_before + audio.item_columns + audio.columns_after:
        return f"{columns} of {shape[1]} columns of features are encoded; an item has 1 to {audio.item_columns} of them"
    if (length := audio.lengths.tokens(columns)) != item.length:
        return f"{columns} columns of features become {length} tokens, not {item.length}"
    return _invalid_content(item)


def _invalid_frames(item: AudioItem, streaming: Streams) -> str | None:
    if (item.start, item.length, item.columns_before) != (0, 0, 0) or item.encoded_columns is not None:
        return (
            "the model reads audio while it generates: an item must have start, length and columns_before 0, and no "
            "`encoded_columns`"
        )
    shape, each = item.features.shape, streaming.columns_per_frame if isinstance(streaming, DelayedStreamsInfo) else 1
    fits = len(shape) == 2 and shape[0] == streaming.num_mel_bins and shape[1] > 0 and shape[1] % each == 0
    if item.features.dtype != np.float32 or not fits:
        columns = "at least one column" if each == 1 else f"a multiple of {each} columns"
        return (
            f"the features are {item.features.dtype} {'x'.join(map(str, shape))}, not float32 of "
            f"{streaming.num_mel_bins} rows and {columns}"
        )
    return _not_finite(item)


def _invalid_picture(item: PictureItem, pictures: PictureInfo) -> str | None:
    reason = _invalid_offsets(item)  # which tell how many embeddings there are
    if reason is None:
        encoding = item.encoding
        if encoding is not None:
            reason = _invalid_encoding(item, encoding, pictures)
        elif isinstance(pictures.geometry, TransformersProcessor):
            reason = _invalid_inputs(item)
        else:
            reason = _invalid_pixels(item)
    if reason is not None:
        return reason
    if item.length > pictures.item_tokens:
        why = ", since one step computes all of them: --max-num-batched-tokens" if pictures.bidirectional else ""
        return f"a picture has {item.length} tokens; at most {pictures.item_tokens} are accepted{why}"
    if not item.hash:
        return "the hash of an item must not be empty"
    if pictures.bidirectional and item.text_offsets is not None:  # blocks do not know which text follows in the item
        return "the tokens of a picture attend in both directions: none of them may be text"
    return _invalid_positions(item, pictures)


def _invalid_inputs(item: PictureItem) -> str | None:
    """What is wrong with what transformers' processor has made of a picture."""
    names = [part.name for part in item.inputs]
    if not names or len(set(names)) < len(names) or item.pixels.size:
        return "a picture must have inputs of different names, as the model's processor makes them, and no pixels"
    for part in item.inputs:
        if part.values.dtype not in INPUT_TYPES or not part.values.size:
            return f"the input {part.name[:100]} of a picture must be an array of float32, integers or booleans"
        if part.values.dtype == np.float32 and not np.isfinite(part.values).all():
            return f"the input {part.name[:100]} of a picture has NaN or infinite values"
    return None


def _invalid_pixels(item: PictureItem) -> str | None:
    if item.inputs:
        return "a picture of this model has pixels, and no inputs"
    shape = item.pixels.shape
    if item.pixels.dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or not all(shape):
        return (
            f"the pixels are {item.pixels.dtype} {'x'.join(map(str, shape))}, not uint8 of images, rows, columns and "
            "3 colours"
        )
    return None


def _invalid_encoding(item: PictureItem, encoding: FeatureArray, pictures: PictureInfo) -> str | None:
    """What is wrong with an encoding that a client has computed."""
    expected = item.embeddings, pictures.embedding_size
    if encoding.dtype != np.float32 or encoding.shape != expected or item.pixels.size:
        shape = "x".join(map(str, encoding.shape))
        return f"the encoding is {encoding.dtype} {shape}, not float32 {expected[0]}x{expected[1]} without pixels"
    is_valid = bool((np.abs(encoding) <= LARGEST_VALUE).all())  # not so with NaN either
    return None if is_valid else f"the encoding has NaN or infinite values, or values beyond {LARGEST_VALUE:.0f}"


def _invalid_offsets(item: PictureItem) -> str | None:
    """What is wrong with the offsets of text within a picture."""
    offsets = item.text_offsets
    if offsets is None:
        return None
    if offsets.dtype != np.int32 or offsets.ndim != 1:
        return "the text_offsets of a picture must be a 1-D array of int32"
    if len(offsets) and (offsets[0] < 0 or offsets[-1] >= item.length or bool((np.diff(offsets) <= 0).any())):
        return f"the text_offsets of a picture must ascend from 0 or more to less than its {item.length} tokens"
    return "a picture has text tokens only" if len(offsets) >= item.length else None


def _invalid_positions(item: PictureItem, pictures: PictureInfo) -> str | None:
    """What is wrong with the rotary positions of a picture's tokens."""
    positions = item.positions
    is_timed = _is_timed(item, pictures)
    least, most = int(not item.is_video), _MOST_POSITIONS if is_timed else item.length
    if item.advance is not None and not least <= item.advance <= most:
        limit = f"{most} for a video" if is_timed else f"its {most} tokens"
        return f"the advance of a picture must be at least {least}, and at most {limit}, not {item.advance}"
    if positions is None:
        return None
    if positions.dtype != np.int32 or positions.shape != (3, item.length):
        return f"the positions of a picture must be int32 of shape 3x{item.length}"
    if not is_timed and (positions.min() < 0 or positions.max() >= item.length):
        return f"the positions of a picture must not be negative, and less than its {item.length} tokens"
    has_three = isinstance(pictures.geometry, SmartResize)
    return None if has_three else "the model has no rotary positions of time, height and width"


def _is_timed(item: PictureItem, pictures: PictureInfo) -> bool:
    """Whether positions of time count on from item to item, so that they may be larger than an item."""
    return item.is_video and pictures.video is not None and pictures.video.is_timed


def _invalid_times(items: Sequence[MediaItem], context_len: int) -> str | None:
    """Say that positions of time lie outside of the context."""
    end = position = 0
    for item in items:
        position += item.start - end
        end = item.start + item.length
        if isinstance(item, PictureItem) and item.positions is not None:
            last = position + int(item.positions.max())
            if last >= context_len:
                return (
                    f"a video has rotary positions of time up to {last}, and the context {context_len} of them: its "
                    "frames are too far apart"
                )
            if position + int(item.positions.min()) < 0:
                return "the rotary positions of a video must not be negative"
        position += item.length + position_leap(item)
    return None


def invalid_room(items: Sequence[MediaItem], tokens: int, generated: int, context_len: int) -> str | None:
    """Say that tokens behind a prompt would have positions beyond the context; None if they have not.

    Args:
        items: valid items.
        tokens: number of tokens of the prompt.
        generated: most tokens that follow.
        context_len: tokens of the context.
    """
    leap = sum(map(position_leap, items))
    if leap <= 0 or tokens + leap + generated <= context_len:
        return None
    return (
        f"the prompt has {tokens} tokens and, with the time of its videos, {tokens + leap} rotary positions; at most "
        f"{max(0, context_len - tokens - leap)} tokens may follow, not {generated}"
    )


def _invalid_content(item: AudioItem) -> str | None:
    if not item.hash:
        return "the hash of an item must not be empty"
    return _not_finite(item)


def _not_finite(item: AudioItem) -> str | None:
    return None if bool(np.isfinite(item.features).all()) else "the features have NaN or infinite values"
