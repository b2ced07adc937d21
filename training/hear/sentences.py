"""Sentences composed of `phrases/spoken.toml`: as whisper would write them, and as espeak-ng has to read them."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random

from training.books import phrase_book
from training.grammar import SLOT, draw

LANGUAGES = ("en", "de")
KINDS = ("commands", "times", "numbers", "colours", "names", "short", "lists", "beginnings")
# Shares of the kinds in training.
MIX = {
    "commands": 0.18, "times": 0.12, "numbers": 0.17, "colours": 0.07, "names": 0.09, "short": 0.22, "lists": 0.07,
    "beginnings": 0.08,
}  # fmt: skip
HELDOUT = 8  # a sentence of so many is held out
_ACCUSATIVE = {"der": "den"}
_DATIVE = {"der": "dem", "die": "der", "das": "dem"}
_INDEFINITE = {"der": "ein", "die": "eine", "das": "ein"}
_INDEFINITE_ACCUSATIVE = {"der": "einen", "die": "eine", "das": "ein"}
_ORDINALS = {
    "en": (
        "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
        "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth",
        "twentieth",
    ),
    "de": (
        "erste", "zweite", "dritte", "vierte", "fünfte", "sechste", "siebte", "achte", "neunte", "zehnte", "elfte",
        "zwölfte", "dreizehnte", "vierzehnte", "fünfzehnte", "sechzehnte", "siebzehnte", "achtzehnte", "neunzehnte",
        "zwanzigste",
    ),
}  # fmt: skip
_UNITS = ["ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence.

    Attributes:
        language: ISO code.
        text: what has to be written.
        spoken: what is read aloud; differs in times and dates.
    """

    language: str
    kind: str
    text: str
    spoken: str

    @property
    def heldout(self) -> bool:
        """Whether training never uses it: an eighth of all sentences, by their text."""
        return zlib.crc32(f"{self.language} {normalized(self.text)}".encode()) % HELDOUT == 0


def normalized(text: str) -> str:
    """Words in lower case without punctuation, as word errors are counted."""
    return " ".join(re.findall(r"[\w':]*\w", text.lower()))


def make_sentence(rng: Random, language: str, kind: str | None = None) -> Sentence:
    """Draw a sentence. `kind`: one of KINDS; None: drawn from MIX."""
    if kind is None:
        kind = rng.choices(list(MIX), list(MIX.values()))[0]
    if kind == "beginnings":
        return _beginning(rng, language)
    pattern = draw(rng.choice(phrase_book("spoken")[language]["sentences"][kind]), rng)
    values = [_value(slot, rng, language) for slot in SLOT.findall(pattern)]
    parts = SLOT.split(pattern)[::2]
    texts = [_joined(parts, [value[side] for value in values], language) for side in (0, 1)]
    return Sentence(language, kind, *texts)


def _beginning(rng: Random, language: str) -> Sentence:
    """Draw the first words of a sentence: captions are made of speech that goes on."""
    sentence = make_sentence(rng, language, rng.choice(("commands", "short", "colours")))
    first = sentence.text.split()
    text = " ".join(first[: rng.randint(1, max(1, len(first) - 1))]).rstrip(",.?!")
    return Sentence(language, "beginnings", text, text)


def split_sentence(rng: Random, language: str, *, heldout: bool, kind: str | None = None) -> Sentence:
    """Draw a sentence of one side of the division."""
    while (sentence := make_sentence(rng, language, kind)).heldout != heldout:
        pass
    return sentence


def _joined(parts: list[str], values: list[str], language: str) -> str:
    text = "".join(part + value for part, value in zip(parts, [*values, ""], strict=True))
    text = re.sub(r"\s+([,.?!])", r"\1", re.sub(" {2,}", " ", text)).strip()
    if language == "en":
        text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    return text[:1].upper() + text[1:]


@cache
def words(language: str, name: str) -> tuple[str, ...]:
    """A word list of `phrases/spoken.toml`."""
    text: str = phrase_book("spoken")[language]["lists"][name]
    return tuple(word.strip() for word in text.replace("\n", " ").split(","))


def _value(slot: str, rng: Random, language: str) -> tuple[str, str]:
    """What stands in a slot: written, and spoken."""
    if slot in _VALUES:
        return _VALUES[slot](rng, language)
    if slot == "any":
        lists = sorted(phrase_book("spoken")[language]["lists"])
        return _value(rng.choice([*lists, "number"]), rng, language)
    name = slot.removeprefix("coloured_").removeprefix("a_").removesuffix("_acc").removesuffix("_dat")
    word = rng.choice(words(language, name))
    if name != slot:
        article, noun = word.split(" ", 1)
        if slot.startswith("coloured_"):
            noun = f"{rng.choice(words(language, 'colour'))}e {noun}"
        word = f"{_article(slot, article)} {noun}"
    return word, word


def _article(slot: str, article: str) -> str:
    if slot.startswith("a_"):
        return (_INDEFINITE_ACCUSATIVE if slot.endswith("_acc") else _INDEFINITE)[article]
    if slot.endswith("_dat"):
        return _DATIVE[article]
    return _ACCUSATIVE.get(article, article) if slot.endswith("_acc") else article


def _number(rng: Random, language: str) -> tuple[str, str]:
    top = rng.choices((20, 100, 1000, 10_000), (4, 8, 3, 1))[0]
    number = rng.randrange(2, top)
    if top == 10_000:
        number = number // 100 * 100 or 100
    return str(number), str(number)


def _few(rng: Random, language: str) -> tuple[str, str]:
    number = str(rng.randint(2, 12))
    return number, number


def _digits(rng: Random, language: str) -> tuple[str, str]:
    digits = " ".join(str(rng.randrange(10)) for _ in range(rng.randint(3, 8)))
    return digits, digits


def _time(rng: Random, language: str) -> tuple[str, str]:
    minute = rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50, 55, rng.randrange(60)))
    if language == "de":
        hour = rng.randrange(2, 24)
        return (f"{hour}:{minute:02} Uhr", f"{hour} Uhr {minute}") if minute else (f"{hour} Uhr", f"{hour} Uhr")
    hour = rng.randrange(1, 13)
    if not minute:
        return f"{hour} o'clock", f"{hour} o'clock"
    return f"{hour}:{minute:02}", f"{hour} {minute}" if minute > 9 else f"{hour} oh {minute}"


def ordinal(number: int, language: str) -> str:
    """The ordinal number in words, up to 39; in German as behind `der`."""
    names = _ORDINALS[language]
    if number <= len(names):
        return names[number - 1]
    tens, units = divmod(number, 10)
    if language == "en":
        return f"{('twenty', 'thirty')[tens - 2]} {names[units - 1]}" if units else "thirtieth"
    tens_name = ("zwanzigste", "dreißigste")[tens - 2]
    return f"{_UNITS[units - 1]}und{tens_name}" if units else tens_name


def _date(rng: Random, language: str, ending: str = "n") -> tuple[str, str]:
    day, month = rng.randint(1, 31), rng.choice(words(language, "month"))
    if language == "de":
        return f"{day}. {month}", f"{ordinal(day, language)}{ending} {month}"
    suffix = "th" if day // 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{month} {day}{suffix}", f"{month} {ordinal(day, language)}"


def _date_nominative(rng: Random, language: str) -> tuple[str, str]:
    return _date(rng, language, "")


def _year(rng: Random, language: str) -> tuple[str, str]:
    year = rng.randrange(1700, 2000) if rng.random() < 0.7 else rng.randrange(2000, 2040)
    if year >= 2000 or year % 100 == 0:
        return str(year), str(year)
    century, year_of_century = divmod(year, 100)
    if language == "de":
        return str(year), f"{century}hundert {year_of_century}"
    return str(year), f"{century} {year_of_century}" if year_of_century > 9 else f"{century} oh {year_of_century}"


_VALUES: dict[str, Callable[[Random, str], tuple[str, str]]] = {
    "number": _number, "few": _few, "digits": _digits, "time": _time, "date": _date, "date_nom": _date_nominative,
    "year": _year,
}  # fmt: skip
