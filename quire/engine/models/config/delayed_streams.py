"""Models that read a frame of audio with each token (delayed streams): config, and weights that depend on the delay."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine.client.streaming import DelayedStreamsInfo
from quire.engine.models.config.audio_language_model import check_log_mel
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.engine.models.specs.decoder import DecoderSpec

if TYPE_CHECKING:  # configs are read without torch
    from torch import Tensor

_LEFT_FRAMES = 32  # of silence before the audio, as Mistral's tokenizers have it
_MORE_RIGHT_FRAMES = 11  # of silence behind the audio, beside the delay: for a long last word
_START, _PAD = ("<s>", 1), ("[STREAMING_PAD]", 32)  # tokens, and their ids if no file has them
_MAX_DELAY = 1000  # frames
_LOUDEST = 1.5  # logarithm of the power that the floor is 8 powers of ten below
_RANGE = 8.0
_PARTS = ("post_attention_layernorm", "ada_rms_norm.linear1", "ada_rms_norm.linear2")
_FOLDED = re.compile(rf"(?P<layer>.*\blayers\.\d+\.)(?P<part>{'|'.join(map(re.escape, _PARTS))})\.weight")
_THETA = 10_000.0


def read_delayed_streams(folder: Path, config: Any, spec: DecoderSpec) -> DelayedStreamsInfo:
    """Read the facts about a model that the front end needs.

    Args:
        folder: the model's directory.
        config: the model's Hugging Face config.
        spec: its architecture.

    Raises:
        BrokenFolder: a file cannot be read, or a number in it cannot be used.
        UnsupportedModel: the feature extractor or the delay is not supported, or a token is missing.
    """
    assert spec.encoder is not None
    rows: int = config.audio_config.num_mel_bins
    extractor = check_log_mel(folder, rows)
    loudest = extractor.get("global_log_mel_max", _LOUDEST)
    if type(loudest) not in (float, int):
        raise UnsupportedModel(
            f"the feature extractor's global_log_mel_max is {loudest!r}: the floor of the features must not depend on "
            "all of the audio"
        )
    delay = config.default_num_delay_tokens
    if type(delay) is not int or not 0 <= delay <= _MAX_DELAY:
        raise UnsupportedModel(f"default_num_delay_tokens must be from 0 to {_MAX_DELAY}, not {delay!r}")
    ids = _special_ids(folder)
    start, pad = (_token(ids, *token, spec.vocab) for token in (_START, _PAD))
    return DelayedStreamsInfo(
        sample_rate=16_000,
        num_mel_bins=rows,
        columns_per_frame=config.audio_length_per_tok,
        floor=loudest - _RANGE,
        delay_frames=delay,
        left_frames=_LEFT_FRAMES,
        right_frames=delay + _MORE_RIGHT_FRAMES,
        start_token=start,
        pad_token=pad,
    )


def _special_ids(folder: Path) -> dict[str, int]:
    """Special tokens by their texts: those of tokenizer.json, or of Mistral's tekken.json."""
    for name, entries, text, token in (
        ("tokenizer.json", "added_tokens", "content", "id"),
        ("tekken.json", "special_tokens", "token_str", "rank"),
    ):
        path = folder / name
        if path.is_file():
            try:
                found = json.loads(path.read_text(encoding="utf-8")).get(entries) or []
                return {entry[text]: int(entry[token]) for entry in found}
            except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
                raise BrokenFolder(f"{path} cannot be read: {error}") from error
    return {}


def _token(ids: dict[str, int], text: str, usual: int, vocab: int) -> int:
    found = ids.get(text, usual)
    if not 0 <= found < vocab:
        raise UnsupportedModel(f"the token {text} is {found}, which is not in the vocabulary of {vocab}")
    return found


def fold_delay(tensors: Iterable[tuple[str, Tensor]], delay: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint, without the layers that read the delay.

    The norm before each feed-forward is multiplied by 1 + linear2(gelu(linear1(t))), where t are sines and cosines of
    the delay. They are constants, so they become part of the norm's weight.

    Args:
        tensors: names and tensors of the checkpoint.
        delay: number of frames.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        match = _FOLDED.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        parts = waiting.setdefault(match["layer"], {})
        # A copy: the pages behind a tensor are released once it has been read.
        parts[match["part"]] = tensor.float().clone()
        if len(parts) == len(_PARTS):
            del waiting[match["layer"]]
            yield f"{match['layer']}{_PARTS[0]}.weight", _folded(parts, delay).to(tensor.dtype)
    for layer, parts in waiting.items():
        for part, tensor in parts.items():  # the filler says what is missing
            yield f"{layer}{part}.weight", tensor


def _folded(parts: dict[str, Tensor], delay: int) -> Tensor:
    import torch  # noqa: PLC0415 configs are read without it

    norm, down, up = (parts[name] for name in _PARTS)
    half = len(norm) // 2
    angles = delay * torch.exp(-torch.log(torch.tensor(_THETA)) * torch.arange(half).float() / half)
    time = torch.cat((angles.cos(), angles.sin()))
    factors: Tensor = 1 + up @ torch.nn.functional.gelu(down @ time)
    return norm * factors
