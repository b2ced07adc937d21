"""Where the messages of a chat end in its prompt, and where the prompt of the next turn will part from it.

The template is rendered with a mark behind the text of each message, and with an answer and another question.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.engine.client.protocol import TokenArray

_MARK = "\ue000quire:end\ue000"
_OTHER_TEXT = "\ue000quire:other\ue000"
NEXT_TURN: tuple[dict[str, Any], ...] = (
    {"role": "assistant", "content": _OTHER_TEXT},
    {"role": "user", "content": _OTHER_TEXT},
)


def with_marks(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of normalized messages with a mark behind the text of each.

    White space stays behind it, as templates trim it.
    """
    return [{**message, "content": _marked(message["content"])} for message in messages]


def _marked(content: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return _with_mark(content)
    parts = [dict(part) for part in content]
    if parts and isinstance(text := parts[-1].get("text"), str):
        parts[-1]["text"] = _with_mark(text)
    return parts


def _with_mark(content: str) -> str:
    text = content.rstrip()
    return f"{text}{_MARK}{content[len(text) :]}" if text else content


def ends_in(marked: str, text: str) -> list[int] | None:
    """Return the positions of marks in a text; None: without its marks, `marked` is another text."""
    parts = marked.split(_MARK)
    if "".join(parts) != text:
        return None
    return list(itertools.accumulate(map(len, parts[:-1])))


def common_beginning(text: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    low, high = 0, min(len(text), len(other))
    while low < high:  # slices are compared faster than characters
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class MessageEnds:
    """Positions in the text of a prompt.

    Attributes:
        messages: behind its messages, in ascending order.
        next_turn: where the prompt of the next turn will part from it; 0: unknown.
    """

    messages: Sequence[int]
    next_turn: int = 0

    def in_tokens(self, offsets: Sequence[tuple[int, int]]) -> tuple[TokenArray, int]:
        """Return how many tokens of the prompt lie before these positions; of messages each number once.

        `offsets`: where the characters of each token begin and end; (0, 0) of those that are not in the text.
        """
        behind = np.maximum.accumulate(np.array([end for _, end in offsets], np.int64))
        counts = np.searchsorted(behind, np.array([*self.messages, self.next_turn], np.int64), side="right")
        messages = counts[:-1]
        return np.unique(messages[messages > 0]).astype(np.int32), int(counts[-1]) if self.next_turn else 0
