"""Variations of typed text: case, punctuation, words around a request, typos."""

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
CONTRACTION_RATE = 0.3
MISSING_ARTICLE_RATE = 0.03
# Contractions, for training only. Some are correct only at the beginning of a clause.
CONTRACTIONS = [
    (r"\bdo not\b", "don't"), (r"\bdoes not\b", "doesn't"), (r"\bcannot\b", "can't"), (r"\bis not\b", "isn't"),
    (r"\bare not\b", "aren't"), (r"\bdid not\b", "didn't"), (r"\bi am (?=\w|\{)", "i'm "), (r"\bi would\b", "i'd"),
    (r"\bi will\b", "i'll"), (r"\bwe are (?=\w)", "we're "), (r"\bwhat is (?=\w|\{)", "what's "),
    (r"\blet us\b", "let's"), (r"\bwhere is (?=\w)", "where's "), (r"\bwho is (?=\w)", "who's "),
    (r"(^|[.,:] )it is (?=\w)", r"\1it's "), (r"(^|[.,:] )that is (?=\w)", r"\1that's "),
    (r"(^|[.,:] )there is (?=\w)", r"\1there's "), (r"\byou are (?=\w)", "you're "),
    (r"\bhow is (?=\w)", "how's "), (r"\bwant to\b", "wanna"),
]  # fmt: skip
QUESTION_END = re.compile(r"(, (how|what now|what then|right|any idea|is that possible)|\b(how|why))$", re.IGNORECASE)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def add_noise(
    phrase: str, rng: Random, split: str = "train", *, frame: bool = True, suffix: bool = True, end: bool = True
) -> str:
    """Return a random variation of a phrase with unfilled slots.

    ``frame`` allows words before it, with ``suffix`` also after it; ``end`` allows punctuation at the end.
    """
    style = rng.random()
    framed = False
    question = _is_question(phrase) if split == "train" else bool(QUESTION.match(phrase))
    if split == "train":
        phrase = _informal(phrase, rng)
    if frame and rng.random() < 0.14:
        phrase, framed = rng.choice(phrase_book("style")["prefixes"][split]) + phrase, True
    if frame and suffix and rng.random() < 0.07 and phrase[-1:] not in "?.!:=":
        phrase += rng.choice(phrase_book("style")["suffixes"][split])
    if style < 0.35:
        return _lower(phrase) if rng.random() < 0.7 else phrase
    if style < 0.5:
        return _punctuate(phrase, question, rng) if end else phrase
    phrase = _capitalise(phrase)
    if split == "train":
        phrase = re.sub(r"[.!?] [a-z]", lambda match: match[0].upper(), phrase)
    if framed and rng.random() < 0.3:
        phrase = phrase.replace(", ", "! ", 1)
    return _punctuate(phrase, question, rng) if end and style < 0.93 else phrase


def _is_question(phrase: str) -> bool:
    """Whether the last sentence of a phrase is a question."""
    last = re.split(r"[.:] ", phrase)[-1]
    if re.match(r"(have|has) (?!(you|i|we|they|the|it|any)\b)", last, re.IGNORECASE):
        return False
    return bool(QUESTION.match(last) or QUESTION.match(last.rsplit(", ", 1)[-1]) or QUESTION_END.search(last))


def _informal(phrase: str, rng: Random) -> str:
    """Add contractions, a missing article, or a typo."""
    if rng.random() < CONTRACTION_RATE:
        for pattern, contraction in CONTRACTIONS:
            phrase = re.sub(pattern, contraction, phrase, flags=re.IGNORECASE)
        if rng.random() < 0.25:
            phrase = re.sub(r"(?<=[a-z])'(?=(t|m|s|d)\b)", "", phrase)
    if rng.random() < MISSING_ARTICLE_RATE:
        phrase = re.sub(r"\b(the|an?) (?=[a-z])", "", phrase, count=1)
    return _typo(phrase, rng) if rng.random() < TYPO_RATE else phrase


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


def _typo(phrase: str, rng: Random) -> str:
    """Add one typo to one longer word; slots, flags and paths are not changed."""
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
