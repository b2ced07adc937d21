"""Where the messages of a chat end in its prompt: a template is rendered once more, with a mark behind each content."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire.engine.client.protocol import TokenArray

_MARK = "\ue000quire:end\ue000"


def with_marks(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of normalized messages with a mark behind the text of each.

    White space stays behind it, as templates trim it.
    """
    return [{**message, "content": _marked(message["content"])} for message in messages]


def _marked(content: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        text = content.rstrip()
        return f"{text}{_MARK}{content[len(text) :]}" if text else content
    parts = [dict(part) for part in content]
    if parts and isinstance(text := parts[-1].get("text"), str):
        parts[-1]["text"] = _marked(text)
    return parts


def ends_in(marked: str, text: str) -> list[int] | None:
    """Return the positions of marks in a text; None: without its marks, `marked` is another text."""
    parts = marked.split(_MARK)
    if "".join(parts) != text:
        return None
    return list(itertools.accumulate(map(len, parts[:-1])))


def token_ends(offsets: Sequence[tuple[int, int]], ends: Sequence[int]) -> TokenArray:
    """Return how many tokens of a prompt lie before positions of its text, in ascending order and each once.

    `offsets`: where the characters of each token begin and end; (0, 0) of those that are not in the text.
    """
    behind = np.maximum.accumulate(np.array([end for _, end in offsets], np.int64))
    counts = np.searchsorted(behind, np.array(ends, np.int64), side="right")
    return np.unique(counts[counts > 0]).astype(np.int32)
