"""Text that grows while somebody speaks, on a terminal or in a file."""

from __future__ import annotations

import shutil
from typing import TextIO

_CLEAR_LINE = "\r\033[K"


class Screen:
    """Prints utterances, a line for each. A terminal shows them while they grow."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._live = output.isatty()
        self._shown = ""  # of the utterance that is not complete

    def add(self, text: str) -> None:
        """More text of the current utterance."""
        self._shown += text
        if self._live:
            print(text, end="", file=self._output, flush=True)

    def complete(self, text: str) -> None:
        """The whole text of the current utterance, which may differ from what was shown."""
        shown, self._shown = self._shown, ""
        if not self._live:
            if text:
                print(text, file=self._output, flush=True)
            return
        if text != shown and len(shown) < shutil.get_terminal_size().columns:  # a longer one has several lines
            print(_CLEAR_LINE + text, end="", file=self._output)
        if text or shown:
            print(file=self._output, flush=True)
