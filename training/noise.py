"""How people type: cases, punctuation, small talk around a request, slips of the finger."""

from __future__ import annotations

import re
from random import Random

from training.books import phrase_book
from training.grammar import SLOT

QUESTION = re.compile(
    r"^(what|who|whom|whose|where|when|which|why|how|is|are|am|was|do|does|did|can|could|may|will|would|should|shall"
    r"|has|have|any|whats|what's|who's|where's|how's)\b",
    re.IGNORECASE,
)
TYPO_RATE = 0.06
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def disturb(
    phrase: str, rng: Random, split: str = "train", *, frame: bool = True, suffix: bool = True, end: bool = True
) -> str:
    """A phrase (slots not yet filled) as somebody might type it.

    ``frame`` permits words before it, with ``suffix`` also after it; ``end`` permits punctuation at the end.
    """
    style = rng.random()
    framed = False
    question = bool(QUESTION.match(phrase))
    if split == "train" and rng.random() < TYPO_RATE:
        phrase = _slip(phrase, rng)
    if frame and rng.random() < 0.14:
        phrase, framed = rng.choice(phrase_book("style")["prefixes"][split]) + phrase, True
    if frame and suffix and rng.random() < 0.07 and phrase[-1:] not in "?.!:=":
        phrase += rng.choice(phrase_book("style")["suffixes"][split])
    if style < 0.35:
        return _lower(phrase) if rng.random() < 0.7 else phrase
    if style < 0.5:
        return _punctuate(phrase, question, rng) if end else phrase
    phrase = _capitalise(phrase)
    if framed and rng.random() < 0.3:
        phrase = phrase.replace(", ", "! ", 1)
    return _punctuate(phrase, question, rng) if end and style < 0.93 else phrase


def _lower(phrase: str) -> str:
    return "".join(part if SLOT.fullmatch(part) else part.lower() for part in _split(phrase))


def _split(phrase: str) -> list[str]:
    return [part for part in re.split(r"(\{\w+\})", phrase) if part]


def _capitalise(phrase: str) -> str:
    phrase = re.sub(r"\bi\b(?=[ ',.?!]|$)", "I", phrase)
    return phrase[:1].upper() + phrase[1:]


def _punctuate(phrase: str, question: bool, rng: Random) -> str:
    if phrase[-1:] in "?.!:=\"'})" and not (phrase.endswith("}") and rng.random() < 0.6):
        return phrase
    if question:
        return phrase + ("?" if rng.random() < 0.93 else " ?")
    return phrase + ("." if rng.random() < 0.85 else "!")


def _slip(phrase: str, rng: Random) -> str:
    """One slip of the finger in one longer word; slots, flags and paths stay whole."""
    parts = phrase.split(" ")
    places = [at for at, word in enumerate(parts) if len(word) > 3 and word.isalpha()]
    if not places:
        return phrase
    at = rng.choice(places)
    word = parts[at]
    spot = rng.randrange(1, len(word) - 1)
    kind = rng.randrange(4)
    if kind == 0:
        word = word[:spot] + word[spot + 1] + word[spot] + word[spot + 2 :]
    elif kind == 1:
        word = word[:spot] + word[spot + 1 :]
    elif kind == 2:
        word = word[:spot] + word[spot] + word[spot:]
    else:
        word = word[:spot] + rng.choice(LETTERS) + word[spot + 1 :]
    parts[at] = word
    return " ".join(parts)
