"""Made-up tools: a verb, an object and parameters of many kinds, with requests to match. For training only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from training.books import tool_parts
from training.generators import naming
from training.generators.recall import with_article
from training.generators.toolspec import Parameter, Tool, finish_about, make_parameter, restyle
from training.grammar import draw, fill
from training.values import Values

NAMED_RATE = 0.4
GIBBERISH_RATE = 0.1
OPAQUE_RATE = 0.12
ITSELF_RATE = 0.35
PAIR_RATE = 0.12
ASKS = 3
NOT_PLAIN = {"please", "i", "can", "what", "where", "how", "let", "me"}
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
    """What a made-up tool does to what, and what users say for the verb."""

    verb: str
    thing: str
    said: tuple[str, ...]

    def plain(self) -> list[str]:
        """What fits after "i want to"."""
        return [said for said in self.said if not NOT_PLAIN & set(said.split())] or [self.verb]


@dataclass(frozen=True)
class Share:
    """A part of a request: the phrase that carries some of the values; ``itself``: in place of the object."""

    text: str
    own: str = ""
    itself: bool = False


def make_tool(values: Values, rng: Random) -> Tool:
    """A made-up tool with some ways of asking for it."""
    subject = _subject(values, rng)
    return _tool(subject, *_parameters(subject, values, rng), values, rng)


def make_family(values: Values, rng: Random, count: int) -> list[Tool]:
    """Tools close to each other: one object and several verbs or the reverse, at times with the same parameters."""
    first = _subject(values, rng, gibberish=False)
    subjects = [first]
    one_object = rng.random() < 0.5
    while len(subjects) < count:
        other = _subject(values, rng, gibberish=False)
        other = replace(other, thing=first.thing) if one_object else replace(first, thing=other.thing)
        if not any(_close(other, known, one_object) for known in subjects):
            subjects.append(other)
    alike = rng.random() < 0.4
    shared = _parameters(first, values, rng, itself=False)
    return [
        _tool(subject, *(shared if alike else _parameters(subject, values, rng)), values, rng) for subject in subjects
    ]


def _close(one: Subject, other: Subject, by_verb: bool) -> bool:
    """Whether a request could mean either."""
    if by_verb:
        return bool({one.verb, *one.said} & {other.verb, *other.said})
    return bool(set(one.thing.split()) & set(other.thing.split()))


def _subject(values: Values, rng: Random, gibberish: bool | None = None) -> Subject:
    if gibberish or (gibberish is None and rng.random() < GIBBERISH_RATE):
        verb = naming.senseless(values, rng)
        return Subject(verb, naming.word(values, rng, 0.5), (verb, verb, f"call {verb} on", f"run {verb} for"))
    verb = rng.choice(list(naming.verbs()))
    chance = rng.random()
    noun = str(rng.choice(naming.nouns()) if chance < 0.75 else values.draw("noun", rng))
    if chance < 0.15:
        first = rng.choice(values.words["kinds"]) if chance < 0.07 else rng.choice(naming.nouns())
        noun = f"{first} {noun}".replace("_", " ")
    return Subject(verb, noun, (verb, *naming.verbs()[verb]))


def _tool(subject: Subject, parameters: list[Parameter], shares: list[Share], values: Values, rng: Random) -> Tool:
    opaque = rng.random() < OPAQUE_RATE
    name, about = "", ""
    while not name or naming.is_heldout(name):
        name = naming.any_name(values, rng) if opaque else _name(subject, values, rng)
    while not about:
        about = _about(subject, parameters, rng)
        if not opaque:
            break
    shown = restyle(name, rng)
    if any(letter.isupper() for letter in shown) and rng.random() < 0.5:
        parameters = [replace(parameter, name=naming.camel(parameter.name)) for parameter in parameters]
    asks = tuple(_ask(subject, shares, rng) for _ in range(ASKS))
    gives = tuple(
        (rng.choice(RESULT_KEYS) if rng.random() < 0.5 else naming.word(values, rng), rng.choice(RESULT_KINDS))
        for _ in range(rng.randint(1, 3))
    )
    return Tool(shown, about, tuple(parameters), asks, gives, lists_required=rng.random() < 0.75)


def _name(subject: Subject, values: Values, rng: Random) -> str:
    verb, slug = subject.verb, subject.thing.replace(" ", "_").lower()
    table = naming.vocabulary()["affixes"]
    chance = rng.random()
    if chance < 0.15:
        return naming.affixed(f"{verb}_{slug}", table["before"], table["after"], values, rng)
    if chance < 0.2:
        return f"{verb}_{rng.choice(('the', 'a', 'one', 'my', 'this'))}_{slug}"
    return rng.choice((f"{verb}_{slug}",) * 7 + (f"{slug}_{verb}", slug, f"{verb}_{slug}s"))


def _about(subject: Subject, parameters: list[Parameter], rng: Random) -> str:
    verb, thing = subject.verb, subject.thing
    table = tool_parts()["abouts"]
    said = [other for other in subject.plain() if other != verb] or [verb]
    synonym = rng.choice(said)
    named = [parameter.name.replace("_", " ") for parameter in parameters[:3]]
    patterns = [pattern for pattern in table["train"] if named or "{p}" not in pattern]
    slots = {
        "v": verb, "V": verb.capitalize(), "vs": naming.third_person(verb), "o": thing, "O": thing.capitalize(),
        "Vs": naming.third_person(verb).capitalize(), "s": synonym, "S": synonym.capitalize(),
        "ao": with_article(thing), "p": " and ".join([", ".join(named[:-1]), named[-1]] if named[1:] else named),
        "c": rng.choice(table["places"]),
    }  # fmt: skip
    return finish_about(fill(rng.choice(patterns).replace("{a} {o}", "{ao}"), slots), rng)


def _parameters(
    subject: Subject, values: Values, rng: Random, itself: bool = True
) -> tuple[list[Parameter], list[Share]]:
    """Parameters, and the parts of a request that carry the values of those which are given."""
    parameters: list[Parameter] = []
    shares: list[Share] = []
    count = rng.choice((0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4))
    if itself and count and rng.random() < ITSELF_RATE:
        _add_itself(subject, parameters, shares, values, rng)
    if len(parameters) < count and rng.random() < PAIR_RATE:
        _add_pair(parameters, shares, values, rng)
    for _ in range(count * 3):
        if len(parameters) >= count:
            break
        _add(parameters, shares, values, rng)
    if rng.random() < 0.25:
        rng.shuffle(parameters)
    return parameters, shares


def _add(parameters: list[Parameter], shares: list[Share], values: Values, rng: Random) -> None:
    """One more parameter, unless its name or the words before its value are there already."""
    parts = tool_parts()
    if rng.random() < NAMED_RATE:
        listed = rng.random() < 0.35
        name = rng.choice(parts["named"]["words"]) if listed else naming.any_parameter_name(values, rng)
        kind, ways = rng.choice(parts["named"]["kinds"]), parts["named"]["phrases"]
    else:
        table: dict[str, Any] = rng.choice(parts["params"])
        name, kind, ways = rng.choice(table["names"]), table["kind"], table["phrases"]
        if rng.random() < 0.2:
            affixes = naming.vocabulary()["affixes"]
            name = naming.affixed(name, affixes["arg_before"], affixes["arg_after"], values, rng)
    words = name if rng.random() < 0.15 else name.replace("_", " ")
    slot = f"s{len(parameters)}"
    text = fill(rng.choice(ways), {"p": words, "v": f"{{{slot}}}"})
    starts = {share.text.partition("{")[0] for share in shares}
    if any(other.name == name for other in parameters) or text.partition("{")[0] in starts:
        return
    required = rng.random() < 0.8 or not parameters
    parameters.append(make_parameter(slot, name, kind, required, values, rng))
    if required or rng.random() < 0.4:
        own = rng.choice(parts["named"]["own"])
        shares.append(Share(text, fill(own, {"p": words, "P": words.capitalize(), "v": f"{{{slot}}}"})))


def _add_itself(
    subject: Subject, parameters: list[Parameter], shares: list[Share], values: Values, rng: Random
) -> None:
    table = tool_parts()["itself"]
    name = fill(rng.choice(table["names"]), {"o": subject.thing.replace(" ", "_").lower()})
    parameters.append(make_parameter("s0", name, rng.choice(table["kinds"]), True, values, rng))
    text = fill(rng.choice(table["phrases"]), {"o": subject.thing, "v": "{s0}"})
    shares.append(Share(text, itself=True))


def _add_pair(parameters: list[Parameter], shares: list[Share], values: Values, rng: Random) -> None:
    table = tool_parts()["pairs"]
    noun = naming.word(values, rng, 0.9).replace(" ", "_").lower()
    names = [fill(name, {"n": noun}) for name in rng.choice(table["names"])]
    if {parameter.name for parameter in parameters} & set(names):
        return
    kind, at = rng.choice(table["kinds"]), len(parameters)
    parameters += [make_parameter(f"s{at + n}", name, kind, True, values, rng) for n, name in enumerate(names)]
    shares.append(Share(fill(rng.choice(table["phrases"]), {"a": f"{{s{at}}}", "b": f"{{s{at + 1}}}"})))


def _ask(subject: Subject, shares: list[Share], rng: Random) -> str:
    frames = naming.vocabulary()["frames"]
    head = next((share.text for share in shares if share.itself), None)
    rest = [share for share in shares if not share.itself]
    if rng.random() < 0.4:
        rng.shuffle(rest)
    later = [share.own for share in rest if share.own and rng.random() < 0.15]
    inside = " ".join(share.text for share in rest if share.own not in later).replace(" ,", ",")
    thing = head or rng.choice(ARTICLES) + subject.thing
    if head and not inside and rng.random() < 0.6:
        kinds, thing, inside = ["value"], "", head
    else:
        kinds = ["any", "any", "verb", "verb", "done", "about"]
        if inside and inside[0].isalpha() and "," not in inside:
            kinds.append("front")
    ed = naming.participle(subject.verb)
    kind = rng.choice(kinds)
    patterns = [frame for frame in frames[kind] if ed or "{ed}" not in frame] or frames["any"]
    pattern = rng.choice(patterns)
    bare = kind == "any" or pattern.startswith("{v}")
    verb = rng.choice(subject.said if bare else subject.plain())
    if "{v} it" in pattern or rng.random() < 0.35:
        verb = subject.verb if subject.verb in subject.plain() else verb
    text = draw(pattern.replace("{x}", "{x}" if inside else ""), rng)
    text = fill(text, {"v": verb, "o": thing, "x": inside, "ed": ed})
    return " ".join([_joined(text) + ("." if later else ""), *later])


def _joined(text: str) -> str:
    """Without the spaces and signs that empty parts leave behind."""
    for wrong, right in ((" ,", ","), (" .", "."), (" :", ":"), (" ?", "?"), ("  ", " ")):
        text = text.replace(wrong, right)
    return text.strip(" ,:")
