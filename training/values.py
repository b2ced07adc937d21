"""Random names, cities, codes, dates and other values; made-up spellings train the model to copy letter by letter."""

from __future__ import annotations

from random import Random
from typing import Any

from training.books import words
from training.grammar import fill, slots_of

ONSETS = [
    "b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z", "br", "cr", "dr",
    "fr", "gr", "pr", "tr", "bl", "cl", "fl", "gl", "pl", "sl", "st", "sp", "sk", "sh", "ch", "th", "qu", "kn",
    "sw",
]  # fmt: skip
VOWELS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ai", "ea", "ee", "ia", "io", "oa", "ou", "ie", "y", "au"]
CODAS = [
    "", "", "", "", "n", "r", "s", "l", "t", "m", "k", "d", "x", "ck", "ng", "st", "rt", "nd", "ld", "th", "sh",
    "ll", "ss", "ff", "lt", "mp", "nk",
]  # fmt: skip
CITY_PATTERNS = (
    "New {}", "San {}", "Santa {}", "Port {}", "Bad {}", "Saint {}", "El {}", "La {}", "Upper {}", "West {}",
    "Mount {}", "Fort {}", "Lake {}", "{} City", "{} City", "{} City", "{} Beach", "{} Falls", "{} Springs", "{} Bay",
    "{} Town", "{} Heights", "{} upon Sea", "{} del Mar",
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CONSONANTS = "BCDFGHJKLMNPQRSTVWXZ"
LISTS = {
    "colour": "colours", "food": "foods", "animal": "animals", "sport": "sports", "job": "jobs", "noun": "nouns",
    "language": "languages", "pet_name": "pet_names", "title": "titles", "room": "rooms", "door": "doors",
    "country": "countries", "surname": "surnames", "street": "streets",
}  # fmt: skip
TEXTS = {
    "sentence": "sentences", "task": "tasks", "event": "events", "query": "queries", "problem": "problems",
    "question": "questions", "scene": "scenes", "command": "commands", "sql": "sql",
}  # fmt: skip
TOP_LEVELS = {
    "train": ("com", "org", "net", "de", "io", "fr", "edu", "co.uk", "dev"),
    "heldout": ("com", "org", "it", "se"),
}
EXTENSIONS = {
    "train": ("txt", "csv", "pdf", "py", "md", "json", "log", "png", "docx", "xlsx"),
    "heldout": ("txt", "pdf", "yaml", "html", "mp3"),
}


class Values:
    """Draw values of a kind from one split; ``rare`` is the share of made-up spellings among names."""

    def __init__(self, split: str = "train", rare: float = 0.45) -> None:
        self.split = split
        self.rare = rare if split == "train" else 0.0
        self.words = words(split)

    def draw(self, kind: str, rng: Random) -> Any:
        """Draw a value of the kind: a string; a number for ``int``, ``float`` and ``bool``; or a list."""
        if kind.startswith("enum("):
            return rng.choice(kind[5:-1].split(","))
        name, _, arguments = kind.replace("(", " ").replace(")", "").replace(",", " ").partition(" ")
        if name == "int":
            low, high = arguments.split()
            return rng.randint(int(low), int(high))
        if name == "enum":
            return rng.choice(arguments.split())
        if name == "list":
            return [self.draw(arguments, rng) for _ in range(rng.randint(1, 4))]
        if name in LISTS:
            return rng.choice(self.words[LISTS[name]])
        if name in TEXTS:
            return self._text(TEXTS[name], rng)
        if name in self.words:
            return self._listed(name, rng)
        return getattr(self, f"_{name}")(rng)

    def enum(self, kind: str, rng: Random) -> list[str]:
        """Return the options of an ``enum ...`` or ``enum_random`` kind, in random order."""
        if kind.startswith("enum_random"):
            return rng.sample(self.words["kinds"], rng.randint(2, 5))
        options = kind.split()[1:]
        return rng.sample(options, len(options))

    def _listed(self, name: str, rng: Random) -> str:
        if name == "first_names":
            return self._first_name(rng)
        if name == "cities":
            return self._city(rng)
        if name == "pet_names" and rng.random() < self.rare:
            return self._made_up(rng).capitalize()
        return rng.choice(self.words[name])

    # Names and places

    def _made_up(self, rng: Random) -> str:
        if rng.random() < 0.12:
            return "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 8)))
        syllables = [rng.choice(ONSETS) + rng.choice(VOWELS) + (rng.choice(CODAS) if rng.random() < 0.4 else "")
                     for _ in range(rng.choice((1, 2, 2, 2, 2, 3)))]  # fmt: skip
        return "".join(syllables)

    def _spelling(self, name: str, rng: Random) -> str:
        """Draw a listed name, a made-up one, or a blend of two listed ones."""
        chance = rng.random()
        pool = self.words[name]
        if chance > self.rare:
            return rng.choice(pool)
        if chance < self.rare * 0.5:
            return self._made_up(rng).capitalize()
        first, second = rng.choice(pool), rng.choice(pool)
        return (first[: rng.randint(2, 4)] + second[rng.randint(1, 3) :].lower()).strip().capitalize()

    def _first_name(self, rng: Random) -> str:
        return self._spelling("first_names", rng)

    def _surname(self, rng: Random) -> str:
        return self._spelling("surnames", rng)

    def _full_name(self, rng: Random) -> str:
        return f"{self._first_name(rng)} {self._surname(rng)}"

    def _full_or_first_name(self, rng: Random) -> str:
        return self._first_name(rng) if rng.random() < 0.7 else self._full_name(rng)

    def _city(self, rng: Random) -> str:
        city = self._spelling("cities", rng)
        if self.rare and rng.random() < 0.1:
            return rng.choice(CITY_PATTERNS).format(city)
        return city

    def _place(self, rng: Random) -> str:
        chance = rng.random()
        if chance < 0.4:
            return self._city(rng)
        return self._address(rng) if chance < 0.75 else rng.choice(self.words["streets"])

    def _address(self, rng: Random) -> str:
        street = rng.choice(self.words["streets"])
        return f"{rng.randint(1, 199)} {street}" if rng.random() < 0.6 else f"{street} {rng.randint(1, 99)}"

    def _rare_word(self, rng: Random) -> str:
        if self.rare and rng.random() < 0.6:
            return self._made_up(rng)
        return str(rng.choice(self.words["nouns"])) if rng.random() < 0.8 else str(rng.choice(self.words["adjectives"]))

    def _rare_name(self, rng: Random) -> str:
        chance = rng.random()
        if chance < 0.4:
            return self._made_up(rng).capitalize() if self.rare else rng.choice(self.words["nouns"]).capitalize()
        if chance < 0.7:
            return f"{rng.choice(self.words['adjectives']).capitalize()} {rng.choice(self.words['nouns']).capitalize()}"
        return rng.choice(("Chez {}", "Casa {}", "The {}", "{} House", "Cafe {}", "{} Garden", "{}")).format(
            self._first_name(rng)
        )

    def _thing(self, rng: Random) -> str:
        chance = rng.random()
        noun = rng.choice(self.words["nouns"])
        if chance < 0.35:
            return str(noun)
        if chance < 0.8:
            return f"{rng.choice(self.words['adjectives'])} {noun}"
        return self._made_up(rng) if self.rare else f"{noun} {rng.choice(self.words['nouns'])}"

    # Codes and addresses

    def _code(self, rng: Random) -> str:
        letters = "".join(rng.choice(CONSONANTS) for _ in range(rng.randint(1, 3)))
        digits = self._digits(rng, rng.randint(1, 4))
        return rng.choice(
            (
                letters + digits,
                f"{letters}-{digits}",
                digits,
                digits + letters,
                f"{letters}{digits}{rng.choice(CONSONANTS)}",
            )
        )

    def _digits(self, rng: Random, count: int = 0) -> str:
        count = count or rng.randint(3, 8)
        return str(rng.randint(1, 9)) + "".join(str(rng.randint(0, 9)) for _ in range(count - 1))

    def _word(self, rng: Random) -> str:
        return self._made_up(rng) if self.rare and rng.random() < 0.4 else str(rng.choice(self.words["nouns"]))

    def _handle(self, rng: Random) -> str:
        first, second = self._word(rng), self._word(rng)
        name = self._first_name(rng).lower().replace(" ", "")
        return rng.choice((
            f"{first}-{second}", f"{first}_{second}", f"{first}{rng.randint(1, 99)}", first,
            f"{name}{rng.randint(1, 99)}", f"{name}.{second}", f"{first}-{rng.randint(1, 9)}",
            f"{name}_{rng.randint(1, 99)}",
        ))  # fmt: skip

    def _email(self, rng: Random) -> str:
        name = self._first_name(rng).lower().replace(" ", "")
        user = rng.choice(
            (
                name,
                f"{name}.{self._surname(rng).lower().replace(' ', '')}",
                f"{name}{rng.randint(1, 99)}",
                self._word(rng),
            )
        )
        return f"{user}@{self._word(rng)}.{rng.choice(TOP_LEVELS[self.split])}"

    def _url(self, rng: Random) -> str:
        host = f"{self._word(rng)}.{rng.choice(TOP_LEVELS[self.split])}"
        path = "" if rng.random() < 0.5 else f"/{self._word(rng)}"
        return rng.choice(("https://", "http://", "www.", "")) + host + path

    def _path(self, rng: Random) -> str:
        name = f"{self._word(rng)}.{rng.choice(EXTENSIONS[self.split])}"
        chance = rng.random()
        if chance < 0.5:
            return name
        if chance < 0.7:
            return f"/{self._word(rng)}/{name}"
        if chance < 0.85:
            return f"{self._word(rng)}/{name}"
        return f"/{self._word(rng)}/{self._word(rng)}" if chance < 0.95 else f"{self._word(rng)}_{rng.randint(1, 99)}"

    def _ticker(self, rng: Random) -> str:
        return "".join(rng.choice(LETTERS.upper()) for _ in range(rng.randint(2, 5)))

    def _currency(self, rng: Random) -> str:
        return str(rng.choice(self.words["currencies"]))

    # Dates and numbers

    def _date(self, rng: Random) -> str:
        day, month = rng.randint(1, 28), rng.choice(self.words["months"])
        if rng.random() < 0.45:
            return str(rng.choice(self.words["relative_dates"]))
        return rng.choice((
            f"{month} {day}", f"{day} {month}", f"{rng.randint(2023, 2030)}-{rng.randint(1, 12):02}-{day:02}",
            f"the {day}th of {month}", f"{day}.{rng.randint(1, 12)}.", f"{month} {day}, {rng.randint(2023, 2030)}",
        ))  # fmt: skip

    def _time(self, rng: Random) -> str:
        if rng.random() < 0.35:
            return str(rng.choice(self.words["times_of_day"]))
        hour, minute = rng.randint(0, 23), rng.choice((0, 0, 15, 30, 45, rng.randint(0, 59)))
        return rng.choice(
            (f"{hour:02}:{minute:02}", f"{hour}:{minute:02}", f"{hour % 12 + 1} {rng.choice(('am', 'pm'))}")
        )

    def _height(self, rng: Random) -> str:
        return f"{rng.randint(140, 205)} cm"

    def _float(self, rng: Random) -> float:
        return round(rng.uniform(0.1, 9.9), rng.choice((1, 2)))

    def _bool(self, rng: Random) -> bool:
        return rng.random() < 0.5

    def _expression(self, rng: Random) -> str:
        numbers = [str(rng.randint(1, rng.choice((20, 100, 1000)))) for _ in range(rng.choice((2, 2, 3)))]
        text = numbers[0]
        gap = rng.choice(("", " "))
        for number in numbers[1:]:
            text += f"{gap}{rng.choice('+-*/')}{gap}{number}"
        return text

    # Texts

    def _text(self, name: str, rng: Random) -> str:
        if name == "sentences" and self.rare and rng.random() < 0.2:
            return " ".join(self._any_word(rng) for _ in range(rng.randint(2, 6)))
        pattern = rng.choice(self.words[name])
        for slot in slots_of(pattern):
            pattern = fill_first(pattern, slot, self._slot(slot, rng))
        return str(pattern)

    def _any_word(self, rng: Random) -> str:
        chance = rng.random()
        if chance < 0.15:
            return self._made_up(rng)
        if chance < 0.35:
            return rng.choice(
                ("the", "a", "and", "is", "in", "of", "my", "not", "very", "we", "you", "it", "for", "with")
            )
        pool = self.words["nouns"] if chance < 0.8 else self.words["adjectives"]
        return str(rng.choice(pool))

    def _slot(self, slot: str, rng: Random) -> str:
        if slot == "n":
            return str(rng.randint(1, 99))
        if slot == "name":
            return self._first_name(rng)
        if slot == "adj":
            return str(rng.choice(self.words["adjectives"]))
        return str(self.draw(slot, rng))


def fill_first(pattern: str, slot: str, value: str) -> str:
    """Fill only the first of several slots with the same name."""
    head, separator, tail = pattern.partition("{" + slot + "}")
    return head + value + tail if separator else fill(pattern, {slot: value})
