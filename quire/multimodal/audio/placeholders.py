"""Places audio in the tokens of a rendered chat."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from quire.engine.client.audio import AudioInfo
from quire.engine.client.protocol import MediaItem, TokenArray
from quire.multimodal.errors import PromptError


def place_audio(
    tokens: TokenArray, info: AudioInfo, pieces: Sequence[Sequence[MediaItem]]
) -> tuple[TokenArray, tuple[MediaItem, ...]]:
    """Repeat each placeholder as often as the audio that it stands for has embeddings.

    Args:
        tokens: tokens of a prompt, with one placeholder for each piece of audio.
        info: facts about the model.
        pieces: the items of each piece, whose spans count from its first placeholder.

    Returns:
        The tokens of the prompt, and the items with their places in it.

    Raises:
        PromptError: there are more or fewer placeholders.
    """
    spots = np.flatnonzero(tokens == info.placeholder)
    if len(spots) != len(pieces):
        raise PromptError(
            f"The rendered chat has {len(spots)} audio placeholders for {len(pieces)} audio parts. Texts must not "
            f"contain any ({info.placeholder_text}), and the chat template must render each part once.",
            "messages",
        )
    counts = [sum(item.length for item in piece) for piece in pieces]
    repeats = np.ones(len(tokens), np.int64)
    repeats[spots] = counts
    starts = spots + np.cumsum([0, *(count - 1 for count in counts[:-1])]) if counts else spots
    items = tuple(
        msgspec.structs.replace(item, start=int(start) + item.start)
        for start, piece in zip(starts, pieces, strict=True)
        for item in piece
    )
    return np.repeat(tokens, repeats), items
