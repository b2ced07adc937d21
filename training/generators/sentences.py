"""Texts about a person, composed of clauses for name, age and city in any order, with unrelated clauses between."""

from __future__ import annotations

import re
from random import Random

from training.books import phrase_book
from training.generators.parts import part

BOOK = "sentences"
KEYS = ("name", "age", "city")
THIRD_PERSON_ENDINGS = {"is": "is", "has": "has", "s": "s", "es": "es", "ies": "ies"}
PERSONS = {
    "she": {"he": "she", "his": "her", "him": "her", "himself": "herself", **THIRD_PERSON_ENDINGS},
    "he": {"he": "he", "his": "his", "him": "him", "himself": "himself", **THIRD_PERSON_ENDINGS},
    "I": {"he": "I", "his": "my", "him": "me", "himself": "myself", "is": "am", "has": "have", "s": "", "es": "",
          "ies": "y"},
}  # fmt: skip
INFLECTION = re.compile(r"\{(he|his|him|himself|is|has|s|es|ies|np|npo|nps)\}")


def person_text(keys: set[str], rng: Random) -> str:
    """Return a text with the given keys (name, age, city), as a pattern with slots such as {name}."""
    chance = rng.random()
    if keys and chance < 0.1:
        return field_list(keys, rng)
    person = "I" if chance < 0.28 else rng.choice(("she", "he"))
    return Writer(person, rng).text(set(keys))


def field_list(keys: set[str], rng: Random) -> str:
    """Return name, age and city as a list of fields, without sentences."""
    if rng.random() < 0.35 and len(keys) > 1:
        # Without labels, the name precedes the city
        order = sorted(keys, key=("name", "city").index) if "age" not in keys else ["age", "city"]
        if "name" in keys and "age" in keys:
            order = ["name", "city"] if "city" in keys else ["name"]
            order.insert(rng.randrange(len(order) + 1), "age")
        head = part(BOOK, "heading", rng) + ": " if rng.random() < 0.4 else ""
        return head + raw_part("dash", rng).join(f"{{{key}}}" for key in order)
    shuffled = rng.sample(sorted(keys), len(keys))
    labels = {key: part(BOOK, f"label_{key}", rng) for key in KEYS}
    equals = raw_part("equals", rng)
    fields = [labels[key] + equals + f"{{{key}}}" for key in shuffled]
    fields += [labels[key] + equals + part(BOOK, "unknown", rng) for key in KEYS if key not in keys]
    if len(keys) < len(KEYS) and rng.random() < 0.5:
        fields = fields[: len(keys)]
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 3))):
        fields.insert(rng.randrange(len(fields) + 1), part(BOOK, "field", rng))
    if rng.random() < 0.3:
        rng.shuffle(fields)
    if rng.random() < 0.15:
        fields = [field[:1].upper() + field[1:] for field in fields]
    return raw_part("dash", rng).join(fields)


def raw_part(name: str, rng: Random) -> str:
    """Draw a separator or another part whose spaces matter, without normalizing its spaces."""
    return str(rng.choice(phrase_book(BOOK)[name]))


class Writer:
    """Write one text about one person: "she", "he", or "I" for the speaker."""

    def __init__(self, person: str, rng: Random) -> None:
        self.person, self.rng = person, rng
        self.named = False

    def text(self, keys: set[str]) -> str:
        """Return sentences with the keys, and unrelated sentences between them."""
        rng = self.rng
        speaks = "name" in keys and rng.random() < 0.05
        sentences = [self._speech(keys)] if speaks else self._statements(keys)
        for chance in (0.22, 0.08):
            if rng.random() < chance or not sentences:
                filler = self._finish(part(BOOK, "fill_sentence", rng), None)
                sentences.insert(rng.randrange(len(sentences) + 1), filler)
        return self._join(sentences)

    def _statements(self, left: set[str]) -> list[str]:
        rng, sentences = self.rng, []
        if self.person == "I":
            if "name" in left and rng.random() < 0.7:
                left.remove("name")
                sentences.append(self._finish(part(BOOK, "s_name_first", rng), "{he}"))
            elif not left:
                return []
        elif "name" in left:
            sentences.append(self._introduction(left))
        elif left and rng.random() < 0.75:
            sentences.append(self._clause(self._role(), left))
        elif not left and rng.random() < 0.7:
            return [self._clause(self._role(), left)] if rng.random() < 0.7 else []
        while left:
            sentences.append(self._next_sentence(left))
        return sentences

    # Sentences

    def _introduction(self, left: set[str]) -> str:
        """Return a first sentence that may contain the name, as subject or object."""
        chance = self.rng.random()
        if chance < 0.17:
            return self._clause(self._role(), left - {"name"}, left)
        left.remove("name")
        self.named = True
        if chance < 0.37:
            return self._finish(part(BOOK, "object", self.rng), self._noun_phrase(left))
        others = sorted(left)
        if others and chance < 0.57:
            key = self.rng.choice(others)
            left.remove(key)
            text = part(BOOK, f"s_{key}", self.rng)
            while "{np" not in text:
                text = part(BOOK, f"s_{key}", self.rng)
            return self._finish(text, self._noun_phrase(left, 0.0 if "{nps}" in text else 0.15))
        return self._clause(self._noun_phrase(left), set(left), left)

    def _clause(self, subject: str, keys: set[str], left: set[str] | None = None) -> str:
        """Return a sentence of a subject and predicates; the keys that it uses are removed from ``left``."""
        rng, left = self.rng, keys if left is None else left
        front = ""
        for key in rng.sample(sorted(keys - {"name"}), len(keys - {"name"})):
            if rng.random() < 0.14 and not front:
                front = self._inflect(part(BOOK, f"front_{key}", rng), None)
                front = front.rstrip("_") + (" " if front.endswith(":_") else ", " if rng.random() < 0.85 else " ")
                left.discard(key)
                keys = keys - {key}
        said = [key for key in rng.sample(sorted(keys), len(keys)) if rng.random() < 0.75]
        left.difference_update(said)
        predicates = [self._predicate(key) for key in said]
        if not predicates or rng.random() < 0.28:
            predicates.insert(rng.randrange(len(predicates) + 1), self._predicate("fill"))
        text = predicates[0]
        for predicate in predicates[1:]:
            text = part(BOOK, "and_vp", rng).replace("{a}", text).replace("{b}", predicate)
        if not front and rng.random() < 0.2:
            front = part(BOOK, "opener", rng).replace(" ,", ",")
            front += " "
        return self._finish(f"{front}{subject} {text}", None)

    def _predicate(self, key: str) -> str:
        if self.person == "I" and key == "city" and self.rng.random() < 0.1:
            return part(BOOK, "vp_city_first", self.rng)
        while True:
            text = part(BOOK, "fill_vp" if key == "fill" else f"vp_{key}", self.rng)
            if self.person != "I" or "_" not in text:
                return text

    def _next_sentence(self, left: set[str]) -> str:
        """Return a sentence about a person who has been introduced."""
        rng = self.rng
        key = rng.choice(sorted(left))
        if key == "name":
            left.remove(key)
            self.named = True
            name = "s_name_first" if self.person == "I" else "s_name"
            return self._finish(part(BOOK, name, rng), "{he}")
        subject = "{name}" if self.named and rng.random() < 0.15 else "{he}"
        if rng.random() < 0.35:
            left.remove(key)
            while True:
                text = part(BOOK, f"s_{key}", rng)
                if self.person != "I" or "_" not in text:
                    return self._finish(text, subject)
        return self._clause(subject, left - {"name"}, left)

    def _speech(self, left: set[str]) -> str:
        """Return direct speech with the name of the speaker."""
        left.remove("name")
        speaker, self.person = self._noun_phrase(set()), "I"
        statements = self._statements(left) or [self._clause("{he}", set())]
        speech = self._join(statements).rstrip(".")
        said = self._finish(part(BOOK, "said", self.rng), speaker)
        left.clear()
        return f'"{speech}," {said}' if self.rng.random() < 0.6 else f'{said[:1].upper()}{said[1:]}: "{speech}."'

    # Noun phrases

    def _role(self) -> str:
        return "{he}" if self.person == "I" else part(BOOK, "role", self.rng)

    def _noun_phrase(self, left: set[str], rate: float = 0.3) -> str:
        """Return a noun phrase with the name, possibly with age and city; these are removed from ``left``."""
        rng = self.rng
        if "age" in left and rng.random() < rate * 0.35:
            left.remove("age")
            noun = part(BOOK, "pre_age", rng) + " {name}"
        else:
            chance = rng.random()
            before = "" if chance < 0.68 else part(BOOK, "title" if chance < 0.77 else "relation", rng) + " "
            noun = before + "{name}"
        for key in rng.sample(("age", "city"), 2):
            if key in left and rng.random() < rate:
                left.remove(key)
                added = part(BOOK, f"np_{key}", rng)
                noun = noun.rstrip(",") + ("" if added[0] == "," else " ") + added
        return noun

    # Words

    def _inflect(self, text: str, noun: str | None) -> str:
        forms = PERSONS[self.person]
        if noun is not None:
            pronoun = noun == "{he}"
            bare = noun.rstrip(",")
            possessive = "{his}" if pronoun else "{name}'s" if noun.endswith((",", ")", "]", "-")) else f"{noun}'s"
            text = (
                text.replace("{nps}", possessive).replace("{npo}", "{him}" if pronoun else noun).replace("{np}", noun)
            )
            text = re.sub(re.escape(bare) + r",(?=$|[.;:])", lambda _: bare, text)
        return INFLECTION.sub(lambda match: forms.get(match[1], match[0]), text)

    def _finish(self, text: str, noun: str | None) -> str:
        """Fill in pronouns and verb endings, and clean up punctuation; without a full stop."""
        text = self._inflect(text, noun).replace("_", "")
        text = re.sub(r" +([,;:.?!])", r"\1", text)
        text = re.sub(r",[, ]*([,.;])", r"\1", text)
        return re.sub(r" {2,}", " ", text).strip(" ,;")

    def _join(self, sentences: list[str]) -> str:
        rng = self.rng
        text = ""
        for sentence in sentences:
            if text and rng.random() < 0.22 and text[-1] not in '.!?"':
                text = part(BOOK, "and_s", rng).replace("{a}", text).replace("{b}", sentence)
                continue
            gap = "\n" if rng.random() < 0.04 else " "
            sentence = sentence[:1].upper() + sentence[1:]
            if text:
                text += gap if text[-1] in '.!?"' else rng.choice((". ", ". ", ". ", "! ", "." + gap))
            text += sentence
        return text if text[-1:] in '.!?"' else text + rng.choice((".", ".", ".", ".", ".", "!", ""))
