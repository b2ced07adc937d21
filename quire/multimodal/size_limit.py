"""SizeLimit: the largest content of a URL or file; texts about URLs."""

from __future__ import annotations

from dataclasses import dataclass

from quire.multimodal.errors import PromptError

_SHOWN = 80  # characters of a URL in an error text


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """The largest content in bytes, and the flag that sets it."""

    size: int
    flag: str

    def refusal(self, subject: str, where: str) -> PromptError:
        """The error for content that is larger. `subject`: what it is, with its verb; `where`: the content part."""
        return PromptError(f"{subject} too large (limit: {self.size} bytes, {self.flag}).", where)


def shown(url: str) -> str:
    """A URL for an error text: its beginning, if it is long."""
    return repr(url if len(url) <= _SHOWN else f"{url[:_SHOWN]}...")
