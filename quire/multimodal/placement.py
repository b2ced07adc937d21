"""Places items in a prompt: its placeholder tokens are repeated, and items get the indices of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from quire.engine.client.protocol import MediaItem, TokenArray
from quire.multimodal.errors import PromptError


@dataclass(frozen=True, slots=True)
class Placeholders:
    """The placeholders of one kind of media in a tokenized prompt.

    Attributes:
        token, text: the placeholder token, and its text.
        medium: "picture" or "audio".
        repeats: how often each of them is repeated, in their order.
        items: items, each with the index of the placeholder that its `start` counts from. It may begin before that.
    """

    token: int
    text: str
    medium: str
    repeats: Sequence[int]
    items: Sequence[tuple[int, MediaItem]]


def place_items(tokens: TokenArray, kinds: Sequence[Placeholders]) -> tuple[TokenArray, tuple[MediaItem, ...]]:
    """Repeat the placeholders of a prompt.

    Args:
        tokens: tokens of a prompt, with each placeholder once.
        kinds: the placeholders of each kind of media that it has.

    Returns:
        The tokens of the prompt, and the items of all kinds with their places in it, in the order of these.

    Raises:
        PromptError: there are more or fewer placeholders.
    """
    repeats = np.ones(len(tokens), np.int64)
    spots = []
    for kind in kinds:
        places = np.flatnonzero(tokens == kind.token)
        if len(places) != len(kind.repeats):
            raise PromptError(
                f"The rendered chat has {len(places)} {kind.medium} placeholders instead of {len(kind.repeats)}. "
                f"The chat template must write {kind.text} once for each part, and nowhere else.",
                "messages",
            )
        repeats[places] = kind.repeats
        spots.append(places)
    starts = np.cumsum(repeats) - repeats
    items = [
        msgspec.structs.replace(item, start=int(starts[places[index]]) + item.start)
        for kind, places in zip(kinds, spots, strict=True)
        for index, item in kind.items
    ]
    return np.repeat(tokens, repeats), tuple(sorted(items, key=lambda item: item.start))
