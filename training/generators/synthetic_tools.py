"""Synthetic tools: a verb, an object and parameters of many kinds, with matching requests. For training only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from training.books import tool_parts
from training.generators import tool_names
from training.generators.recall import with_article
from training.generators.tool_specs import Parameter, Tool, finish_about, make_parameter, restyle
from training.grammar import draw, fill
from training.values import Values

NAMED_RATE = 0.4
GIBBERISH_RATE = 0.1
UNRELATED_NAME_RATE = 0.12
OBJECT_VALUE_RATE = 0.35
PAIR_RATE = 0.12
ASKS = 3
NOT_AFTER_WANT_TO = {"please", "i", "can", "what", "where", "how", "let", "me"}
ARTICLES = ("the ", "the ", "the ", "", "my ", "a ", "this ", "our ", "that ", "one ")
RESULT_KEYS = (
    "id", "status", "result", "count", "total", "name", "message", "date", "price", "code", "value", "owner",
    "city",
)  # fmt: skip
RESULT_KINDS = (
    "code", "int 1 900", "rare_word", "full_name", "date", "city", "enum open closed done ok", "thing", "bool",
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """Verb and object of a synthetic tool, and the synonyms of the verb that users say."""

    verb: str
    object_name: str
    synonyms: tuple[str, ...]

    def after_want_to(self) -> list[str]:
        """Return the synonyms that fit after "i want to"."""
        return [synonym for synonym in self.synonyms if not NOT_AFTER_WANT_TO & set(synonym.split())] or [self.verb]


@dataclass(frozen=True)
class RequestPart:
    """A part of a request: a phrase with some of the values.

    ``own_sentence`` is the same as a separate sentence. With ``is_object``, the phrase is the object of the request.
    """

    text: str
    own_sentence: str = ""
    is_object: bool = False


def make_tool(values: Values, rng: Random) -> Tool:
    """Return a synthetic tool with some requests for it."""
    subject = _subject(values, rng)
    return _tool(subject, *_parameters(subject, values, rng), values, rng)


def make_family(values: Values, rng: Random, count: int) -> list[Tool]:
    """Return similar tools: one object with several verbs, or one verb with several objects.

    Some families share their parameters.
    """
    first = _subject(values, rng, gibberish=False)
    subjects = [first]
    one_object = rng.random() < 0.5
    while len(subjects) < count:
        other = _subject(values, rng, gibberish=False)
        other = (
            replace(other, object_name=first.object_name)
            if one_object
            else replace(first, object_name=other.object_name)
        )
        if not any(_ambiguous(other, known, one_object) for known in subjects):
            subjects.append(other)
    same_parameters = rng.random() < 0.4
    shared = _parameters(first, values, rng, object_value=False)
    return [
        _tool(subject, *(shared if same_parameters else _parameters(subject, values, rng)), values, rng)
        for subject in subjects
    ]


def _ambiguous(subject: Subject, other: Subject, by_verb: bool) -> bool:
    """Whether a request could mean either of two subjects."""
    if by_verb:
        return bool({subject.verb, *subject.synonyms} & {other.verb, *other.synonyms})
    return bool(set(subject.object_name.split()) & set(other.object_name.split()))


def _subject(values: Values, rng: Random, gibberish: bool | None = None) -> Subject:
    if gibberish or (gibberish is None and rng.random() < GIBBERISH_RATE):
        verb = tool_names.meaningless_word(values, rng)
        return Subject(verb, tool_names.draw_word(values, rng, 0.5), (verb, verb, f"call {verb} on", f"run {verb} for"))
    verb = rng.choice(list(tool_names.verbs()))
    chance = rng.random()
    noun = str(rng.choice(tool_names.nouns()) if chance < 0.75 else values.draw("noun", rng))
    if chance < 0.15:
        first = rng.choice(values.words["kinds"]) if chance < 0.07 else rng.choice(tool_names.nouns())
        noun = f"{first} {noun}".replace("_", " ")
    return Subject(verb, noun, (verb, *tool_names.verbs()[verb]))


def _tool(
    subject: Subject, parameters: list[Parameter], request_parts: list[RequestPart], values: Values, rng: Random
) -> Tool:
    unrelated_name = rng.random() < UNRELATED_NAME_RATE
    name, about = "", ""
    while not name or tool_names.is_heldout(name):
        name = tool_names.random_function_name(values, rng) if unrelated_name else _name(subject, values, rng)
    while not about:
        about = _about(subject, parameters, rng)
        if not unrelated_name:
            break
    shown = restyle(name, rng)
    if any(letter.isupper() for letter in shown) and rng.random() < 0.5:
        parameters = [replace(parameter, name=tool_names.camel(parameter.name)) for parameter in parameters]
    asks = tuple(_ask(subject, request_parts, rng) for _ in range(ASKS))
    gives = tuple(
        (rng.choice(RESULT_KEYS) if rng.random() < 0.5 else tool_names.draw_word(values, rng), rng.choice(RESULT_KINDS))
        for _ in range(rng.randint(1, 3))
    )
    return Tool(shown, about, tuple(parameters), asks, gives, lists_required=rng.random() < 0.75)


def _name(subject: Subject, values: Values, rng: Random) -> str:
    verb, slug = subject.verb, subject.object_name.replace(" ", "_").lower()
    table = tool_names.vocabulary()["affixes"]
    chance = rng.random()
    if chance < 0.15:
        return tool_names.add_affix(f"{verb}_{slug}", table["before"], table["after"], values, rng)
    if chance < 0.2:
        return f"{verb}_{rng.choice(('the', 'a', 'one', 'my', 'this'))}_{slug}"
    return rng.choice((f"{verb}_{slug}",) * 7 + (f"{slug}_{verb}", slug, f"{verb}_{slug}s"))


def _about(subject: Subject, parameters: list[Parameter], rng: Random) -> str:
    verb, object_name = subject.verb, subject.object_name
    table = tool_parts()["abouts"]
    synonyms = [other for other in subject.after_want_to() if other != verb] or [verb]
    synonym = rng.choice(synonyms)
    named = [parameter.name.replace("_", " ") for parameter in parameters[:3]]
    patterns = [pattern for pattern in table["train"] if named or "{p}" not in pattern]
    slots = {
        "v": verb, "V": verb.capitalize(), "vs": tool_names.third_person(verb),
        "o": object_name, "O": object_name.capitalize(),
        "Vs": tool_names.third_person(verb).capitalize(), "s": synonym, "S": synonym.capitalize(),
        "ao": with_article(object_name), "p": " and ".join([", ".join(named[:-1]), named[-1]] if named[1:] else named),
        "c": rng.choice(table["places"]),
    }  # fmt: skip
    return finish_about(fill(rng.choice(patterns).replace("{a} {o}", "{ao}"), slots), rng)


def _parameters(
    subject: Subject, values: Values, rng: Random, object_value: bool = True
) -> tuple[list[Parameter], list[RequestPart]]:
    """Return parameters, and the parts of a request with the values of the given ones."""
    parameters: list[Parameter] = []
    request_parts: list[RequestPart] = []
    count = rng.choice((0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4))
    if object_value and count and rng.random() < OBJECT_VALUE_RATE:
        _add_object_value(subject, parameters, request_parts, values, rng)
    if len(parameters) < count and rng.random() < PAIR_RATE:
        _add_pair(parameters, request_parts, values, rng)
    for _ in range(count * 3):
        if len(parameters) >= count:
            break
        _add(parameters, request_parts, values, rng)
    if rng.random() < 0.25:
        rng.shuffle(parameters)
    return parameters, request_parts


def _add(parameters: list[Parameter], request_parts: list[RequestPart], values: Values, rng: Random) -> None:
    """Add a parameter, unless its name or the words before its value are already used."""
    parts = tool_parts()
    if rng.random() < NAMED_RATE:
        listed = rng.random() < 0.35
        name = rng.choice(parts["named"]["words"]) if listed else tool_names.random_parameter_name(values, rng)
        kind, ways = rng.choice(parts["named"]["kinds"]), parts["named"]["phrases"]
    else:
        table: dict[str, Any] = rng.choice(parts["params"])
        name, kind, ways = rng.choice(table["names"]), table["kind"], table["phrases"]
        if rng.random() < 0.2:
            affixes = tool_names.vocabulary()["affixes"]
            name = tool_names.add_affix(name, affixes["arg_before"], affixes["arg_after"], values, rng)
    words = name if rng.random() < 0.15 else name.replace("_", " ")
    slot = f"s{len(parameters)}"
    text = fill(rng.choice(ways), {"p": words, "v": f"{{{slot}}}"})
    starts = {part.text.partition("{")[0] for part in request_parts}
    if any(other.name == name for other in parameters) or text.partition("{")[0] in starts:
        return
    required = rng.random() < 0.8 or not parameters
    parameters.append(make_parameter(slot, name, kind, required, values, rng))
    if required or rng.random() < 0.4:
        own_sentence = rng.choice(parts["named"]["own"])
        request_parts.append(
            RequestPart(text, fill(own_sentence, {"p": words, "P": words.capitalize(), "v": f"{{{slot}}}"}))
        )


def _add_object_value(
    subject: Subject, parameters: list[Parameter], request_parts: list[RequestPart], values: Values, rng: Random
) -> None:
    table = tool_parts()["itself"]
    name = fill(rng.choice(table["names"]), {"o": subject.object_name.replace(" ", "_").lower()})
    parameters.append(make_parameter("s0", name, rng.choice(table["kinds"]), True, values, rng))
    text = fill(rng.choice(table["phrases"]), {"o": subject.object_name, "v": "{s0}"})
    request_parts.append(RequestPart(text, is_object=True))


def _add_pair(parameters: list[Parameter], request_parts: list[RequestPart], values: Values, rng: Random) -> None:
    table = tool_parts()["pairs"]
    noun = tool_names.draw_word(values, rng, 0.9).replace(" ", "_").lower()
    names = [fill(name, {"n": noun}) for name in rng.choice(table["names"])]
    if {parameter.name for parameter in parameters} & set(names):
        return
    kind, at = rng.choice(table["kinds"]), len(parameters)
    parameters += [make_parameter(f"s{at + n}", name, kind, True, values, rng) for n, name in enumerate(names)]
    request_parts.append(RequestPart(fill(rng.choice(table["phrases"]), {"a": f"{{s{at}}}", "b": f"{{s{at + 1}}}"})))


def _ask(subject: Subject, request_parts: list[RequestPart], rng: Random) -> str:
    frames = tool_names.vocabulary()["frames"]
    head = next((part.text for part in request_parts if part.is_object), None)
    others = [part for part in request_parts if not part.is_object]
    if rng.random() < 0.4:
        rng.shuffle(others)
    later = [part.own_sentence for part in others if part.own_sentence and rng.random() < 0.15]
    inside = " ".join(part.text for part in others if part.own_sentence not in later).replace(" ,", ",")
    object_name = head or rng.choice(ARTICLES) + subject.object_name
    if head and not inside and rng.random() < 0.6:
        kinds, object_name, inside = ["value"], "", head
    else:
        kinds = ["any", "any", "verb", "verb", "done", "about"]
        if inside and inside[0].isalpha() and "," not in inside:
            kinds.append("front")
    ed = tool_names.participle(subject.verb)
    kind = rng.choice(kinds)
    patterns = [frame for frame in frames[kind] if ed or "{ed}" not in frame] or frames["any"]
    pattern = rng.choice(patterns)
    bare = kind == "any" or pattern.startswith("{v}")
    verb = rng.choice(subject.synonyms if bare else subject.after_want_to())
    if "{v} it" in pattern or rng.random() < 0.35:
        verb = subject.verb if subject.verb in subject.after_want_to() else verb
    text = draw(pattern.replace("{x}", "{x}" if inside else ""), rng)
    text = fill(text, {"v": verb, "o": object_name, "x": inside, "ed": ed})
    return " ".join([_clean_up(text) + ("." if later else ""), *later])


def _clean_up(text: str) -> str:
    """Remove spaces and punctuation left by empty parts."""
    for wrong, right in ((" ,", ","), (" .", "."), (" :", ":"), (" ?", "?"), ("  ", " ")):
        text = text.replace(wrong, right)
    return text.strip(" ,:")
