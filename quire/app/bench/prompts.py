"""Prompts of random words, which are one token each in most tokenizers."""

from __future__ import annotations

import random

_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea body information
back parent face others level office door health person art war history party result change morning reason
research girl guy moment air teacher force education foot boy age policy music light voice paper market sense
river garden window table summer winter letter train stone bread north south green yellow silver simple quick
early late young small large open close clear strong quiet happy ready common human local final
""".split()  # noqa: SIM905 a page of words reads better than a list


class PromptMaker:
    """Makes prompts that have only a prefix in common."""

    def __init__(self, seed: int, prefix_len: int, input_len: int) -> None:
        self._random = random.Random(seed)
        self._prefix = self._words(prefix_len)
        self._input_len = input_len

    def next(self) -> str:
        """The next prompt: the prefix, then random words."""
        return " ".join([*self._prefix, *self._words(self._input_len)])

    def text(self, words: int) -> str:
        """A text of random words, without the prefix. `words`: number of words."""
        return " ".join(self._words(words))

    def _words(self, count: int) -> list[str]:
        return self._random.choices(_WORDS, k=count)
