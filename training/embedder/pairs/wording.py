"""Sentences with typos, in other words, or as keywords, and sums in different wordings."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from random import Random

from training.books import phrase_book
from training.embedder.pairs.pair import Pair, same
from training.generators.arithmetic import composed_request, draw_pair, in_words
from training.generators.knowledge import fallback_turn
from training.generators.recall import Memory
from training.generators.records import make_record
from training.generators.tool_calls import call_turn
from training.generators.tool_specs import heldout_requests, instantiate, read_specs
from training.grammar import draw, fill, normalize
from training.noise import add_noise
from training.values import Values

VALUES = {split: Values(split) for split in ("train", "heldout")}
KINDS = ("sentence", "sentence", "task", "query", "problem", "question", "scene")
KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
STOP_WORDS = frozenset(
    [
        "a",
        "about",
        "all",
        "am",
        "an",
        "and",
        "any",
        "are",
        "as",
        "at",
        "be",
        "been",
        "but",
        "by",
        "can",
        "could",
        "did",
        "do",
        "does",
        "for",
        "from",
        "had",
        "has",
        "have",
        "he",
        "her",
        "here",
        "him",
        "his",
        "how",
        "i",
        "if",
        "in",
        "is",
        "it",
        "its",
        "just",
        "me",
        "my",
        "no",
        "not",
        "of",
        "on",
        "or",
        "our",
        "out",
        "over",
        "she",
        "should",
        "so",
        "some",
        "than",
        "that",
        "the",
        "their",
        "them",
        "then",
        "there",
        "these",
        "they",
        "this",
        "to",
        "too",
        "under",
        "up",
        "us",
        "was",
        "we",
        "were",
        "what",
        "when",
        "where",
        "which",
        "who",
        "whose",
        "why",
        "will",
        "with",
        "would",
        "you",
        "your",
    ]
)
TYPO_RATES = (0.1, 0.2, 0.35, 0.5)
NUMBER_WORD_RATE = 0.15
MAX_TRIES = 30


def sentence(rng: Random, split: str) -> str:
    """Return a sentence of any kind."""
    values, chance = VALUES[split], rng.random()
    if chance < 0.5:
        return str(values.draw(rng.choice(KINDS), rng))
    if chance < 0.65:
        return make_record(rng, values).text
    if chance < 0.75:
        return Memory(rng, values, split).tell().user
    if chance < 0.9:
        tool = instantiate(rng.choice(read_specs("train") if split == "train" else heldout_requests()), values, rng)
        return call_turn(rng, values, tool).user
    return fallback_turn(rng, split).user


def passage(rng: Random, split: str) -> str:
    """Return a few sentences, joined."""
    count = rng.choice((1, 2, 2, 3, 4)) if rng.random() < 0.95 else rng.randint(5, 14)
    parts = [sentence(rng, split).strip() for _ in range(count)]
    return " ".join(part[:1].upper() + part[1:] + ("" if part[-1:] in ".!?" else ".") for part in parts)


def content_words(text: str) -> list[str]:
    """Return the words of a text that say something, in lower case and without repetition."""
    return list(dict.fromkeys(word for word in re.findall(r"[^\W_]+", text.lower()) if word not in STOP_WORDS))


# Typos


def typo(rng: Random, split: str) -> Pair:
    """Return a sentence with typos and the sentence; the wrong text has another word somewhere."""
    text = sentence(rng, split)
    return same(garble(text, rng), text, [normalize(text)], with_another_word(text, rng, split))


def garble(text: str, rng: Random) -> str:
    """Return the text as somebody in a hurry types it."""
    rate = rng.choice(TYPO_RATES)
    words = text.split(" ")
    changed = [_misspell(word, rng) if len(word) > 3 and rng.random() < rate else word for word in words]
    longest = max(range(len(words)), key=lambda at: len(words[at]))
    while changed == words and len(words[longest]) > 1:
        changed[longest] = _misspell(words[longest], rng)
    garbled = " ".join(changed)
    if len(words) > 2 and rng.random() < 0.1:
        garbled = garbled.replace(" ", "", 1)
    if rng.random() < 0.5:
        garbled = garbled.lower()
    return re.sub(r"[,.!?'\"]", "", garbled) if rng.random() < 0.4 else garbled


def _misspell(word: str, rng: Random) -> str:
    if len(word) < 2:
        return word
    at = rng.randrange(len(word) - 1)
    kind = rng.randrange(5)
    if kind == 0:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if kind == 1:
        return word[:at] + word[at + 1 :]
    if kind == 2:
        return word[: at + 1] + word[at] + word[at + 1 :]
    near = _neighbour(word[at], rng)
    return word[:at] + near + word[at + 1 :] if kind == 3 else word[: at + 1] + near + word[at + 1 :]


def _neighbour(letter: str, rng: Random) -> str:
    for row in KEYBOARD:
        at = row.find(letter.lower())
        if at >= 0:
            return row[max(0, min(len(row) - 1, at + rng.choice((-1, 1))))]
    return rng.choice("aeiou")


def with_another_word(text: str, rng: Random, split: str) -> str:
    """Return the text with one of its words replaced by an unrelated one."""
    words = content_words(text)
    if not words:
        return ""
    old = rng.choice(words)
    new = rng.choice(VALUES[split].words[rng.choice(("nouns", "adjectives"))])
    changed = re.sub(rf"\b{re.escape(old)}\b", new, text, count=1, flags=re.IGNORECASE)
    return changed if normalize(changed) != normalize(text) else ""


# Other words


@cache
def synonyms() -> dict[str, tuple[str, ...]]:
    """Return the words of equal meaning, by each of them."""
    wordings: dict[str, tuple[str, ...]] = {}
    for line in phrase_book("pairs")["synonyms"]["groups"]:
        group = tuple(part.strip() for part in line.split("|"))
        wordings.update({word: tuple(other for other in group if other != word) for word in group})
    return wordings


@cache
def _synonym_pattern() -> re.Pattern[str]:
    longest_first = sorted(synonyms(), key=lambda word: (-len(word), word))
    return re.compile(rf"\b({'|'.join(map(re.escape, longest_first))})\b", re.IGNORECASE)


def reword(text: str, rng: Random) -> str:
    """Return the text with some words replaced by others of equal meaning."""

    def other(match: re.Match[str]) -> str:
        options = synonyms().get(match[0].lower())
        if not options or rng.random() < 0.2:
            return match[0]
        chosen = rng.choice(options)
        return chosen.capitalize() if match[0][0].isupper() else chosen

    return _synonym_pattern().sub(other, text)


def other_words(rng: Random, split: str) -> Pair:
    """Return a sentence in other words and the sentence; the wrong text has another word somewhere."""
    for _ in range(MAX_TRIES):
        text = sentence(rng, split)
        query = reword(text, rng)
        if query != text and len(content_words(text)) > 1:
            break
    framed = add_noise(query.rstrip(".!?").replace("{", "(").replace("}", ")"), rng, split)
    return same(framed, text, [normalize(text)], with_another_word(text, rng, split))


def keywords(rng: Random, split: str) -> Pair:
    """Return some words of a text, as they are typed into a search box, and the text."""
    words: list[str] = []
    while len(words) < 2:
        text = passage(rng, split)
        words = content_words(text)
    start = rng.randrange(max(1, len(words) - 6))
    near = words[start : start + 8]
    chosen = rng.sample(near, rng.randint(2, min(5, len(near))))
    if rng.random() < 0.6:
        chosen.sort(key=words.index)
    shown = [reword(word, rng) if rng.random() < 0.15 else word for word in chosen]
    query = " ".join(shown)
    return Pair(garble(query, rng) if rng.random() < 0.1 else query, text, frozenset(chosen), frozenset(words))


# Sums


def arithmetic(rng: Random, split: str) -> Pair:
    """Return two wordings of a sum or difference; the wrong text has another number, or is the other operation."""
    minus = rng.random() < 0.5
    a, b = draw_pair(rng, split)
    query, text = _wording(minus, rng, split), _wording(minus, rng, split)
    if rng.random() < 0.25:
        text = "{a} - {b}" if minus else "{a} + {b}"
        text = f"{text} = {a - b if minus else a + b}." if rng.random() < 0.5 else text
    shown = _numbers(a, b, rng)
    mark = f"{a}-{b}" if minus else f"{min(a, b)}+{max(a, b)}"
    other = _other_number(a, rng), b
    negative = fill(text, _numbers(*(other if rng.random() < 0.5 else (a, _other_number(b, rng))), rng))
    if rng.random() < 0.25:
        negative = fill(_wording(not minus, rng, split), _numbers(a, b, rng))
    return same(fill(query, shown), fill(text, _numbers(a, b, rng)), [mark], negative)


def _wording(minus: bool, rng: Random, split: str) -> str:
    section = "sub" if minus else "add"
    phrase = (
        composed_request(rng, section)
        if split == "train"
        else draw(rng.choice(phrase_book("arithmetic")[section][split]), rng)
    )
    return add_noise(phrase, rng, split)


def _numbers(a: int, b: int, rng: Random) -> dict[str, str]:
    spell: Callable[[int], str] = in_words if rng.random() < NUMBER_WORD_RATE else str
    return {"a": spell(a), "b": spell(b)}


def _other_number(number: int, rng: Random) -> int:
    """Return a number close to another one."""
    while True:
        other = rng.choice((number + 1, number - 1, number + 10, number - 10, rng.randint(0, 99)))
        if 0 <= other <= 99 and other != number:
            return other
