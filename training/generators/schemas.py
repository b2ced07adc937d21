"""Structured output: texts, JSON schemas as pydantic writes them, and answers with the keys of these schemas.

A server holds the model to the schema without showing it, as a rule: then the model learns the values only, and the
keys are given, as the grammar gives them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

from training.books import phrase_book
from training.generators.records import BOOK, PERSON, Record, make_record
from training.generators.turn import Turn
from training.grammar import draw, fill
from training.heldout_models import HELDOUT_KEYS
from training.noise import add_noise
from training.values import Values

LIST_RATE = 0.13
ROOT_LIST_RATE = 0.12
WRAPPER_RATE = 0.07
GROUP_RATE = 0.1
OPTIONAL_RATE = 0.2
UNTOLD_RATE = 0.16
TEXT_AGE_RATE = 0.06
DESCRIPTION_RATE = 0.15
GROUPS = {"place": ("city", "country", "street", "number"), "work": ("job", "company"), "contact": ("email", "phone"),
          "person": ("name", "first_name", "last_name", "age", "owner")}  # fmt: skip
# Facts that a text about a person may leave out, with the types of their values.
UNTOLD = {"age": "integer", "city": "string", "email": "string", "phone": "string", "country": "string",
          "last_name": "string"}  # fmt: skip
EMPTY: dict[str, Any] = {"string": "", "integer": 0, "number": 0, "boolean": False, "array": []}
ENUMS = {"sentiment": ("positive", "negative", "neutral"), "urgency": ("low", "medium", "high")}
# Shares of the ways to ask: the text alone, a request, a system message, keys in the request, the schema in it.
WAYS = {"text": 0.13, "plain": 0.42, "system": 0.19, "keys": 0.14, "schema": 0.12}


@dataclass(frozen=True)
class Field:
    """A key of an object: its fact, the type of its value, and whether the value may be null."""

    fact: str
    key: str
    kind: str
    nullable: bool


@dataclass
class Written:
    """JSON text and the spans in it that a grammar gives, so that the model need not choose them."""

    text: str = ""
    given: list[tuple[int, int]] = field(default_factory=list)

    def add(self, text: str, given: bool = False) -> None:
        """Append text."""
        if given:
            self.given.append((len(self.text), len(self.text) + len(text)))
        self.text += text


def schema_turn(rng: Random, values: Values) -> Turn:
    """Return a text with a request for structured output, and the answer of a random schema."""
    while True:
        fields, records = _fields_and_records(rng, values)
        keys = tuple(field.key for field in fields)
        if keys and len(set(keys)) == len(keys) and keys not in HELDOUT_KEYS:
            break
    shape = _shape(fields, len(records), rng)
    text = " ".join(record.text for record in records)
    way = rng.choices(list(WAYS), list(WAYS.values()))[0]
    user, before = ask(way, text, shape, rng, values.split)
    hidden = way not in ("keys", "schema")
    written = Written()
    _write(shape, [record.facts for record in records], written)
    if way == "text":
        written.given.append((0, 1))
    given = tuple(written.given) if hidden else ()
    return Turn("schema", user, written.text, expect={"json": json.loads(written.text)}, before=before, given=given)


# Fields


def _fields_and_records(rng: Random, values: Values) -> tuple[list[Field], list[Record]]:
    """Return texts about one thing or several people, and the fields that all of them share."""
    first = make_record(rng, values)
    records = [first]
    if first.about == PERSON and rng.random() < LIST_RATE / 0.68:
        records += [make_record(rng, values, PERSON) for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3)))]
    shared = [fact for fact in first.facts if all(fact in record.facts for record in records)]
    if "last_name" in shared:
        name = rng.choice(
            (["name"], ["name"], ["first_name", "last_name"], ["first_name"], ["last_name", "first_name"])
        )
        shared = [fact for fact in shared if fact not in ("name", "first_name", "last_name")] + name
    chosen = rng.sample(shared, min(len(shared), rng.choice((1, 2, 2, 2, 3, 3, 3, 4, 5))))
    if "name" in shared and "name" not in chosen and rng.random() < 0.6:
        chosen.insert(rng.randrange(len(chosen) + 1), "name")
    if rng.random() < 0.6:  # most people write the name first
        chosen.sort(key=lambda fact: (fact not in ("name", "first_name", "pet_name", "product", "title"), 0))
    fields = [_told_field(fact, first.facts[fact], rng) for fact in chosen]
    if first.about == PERSON:
        untold = [fact for fact in UNTOLD if not any(fact in record.facts for record in records)]
        for fact in untold:
            if rng.random() < UNTOLD_RATE:
                fields.insert(
                    rng.randint(1, len(fields)), Field(fact, _key(fact, rng), UNTOLD[fact], rng.random() < 0.85)
                )
    return fields, records


def _told_field(fact: str, value: Any, rng: Random) -> Field:
    kind = kind_of(value)
    if kind == "integer" and rng.random() < TEXT_AGE_RATE:
        kind = "string"
    return Field(fact, _key(fact, rng), kind, rng.random() < OPTIONAL_RATE)


def _key(fact: str, rng: Random) -> str:
    return str(rng.choice(phrase_book(BOOK)["keys"][fact]["train"]))


def kind_of(value: Any) -> str:
    """Return the JSON type of a value."""
    names = {bool: "boolean", int: "integer", float: "number", list: "array"}
    return names.get(type(value), "string")


# Shapes: an object is {"title", "fields": [Field or (key, shape)]}, a list {"items": shape}


def _shape(fields: list[Field], count: int, rng: Random) -> dict[str, Any]:
    titles = phrase_book(BOOK)["titles"]["train"]
    shape: dict[str, Any] = {"title": rng.choice(titles), "fields": list(fields)}
    if count == 1 and rng.random() < GROUP_RATE / 0.5:
        _group(shape, rng)
    if count > 1 or rng.random() < 0.02:
        listed = {"items": shape}
        if rng.random() < ROOT_LIST_RATE:
            return listed
        return {"title": rng.choice(("People", "Persons", "PeopleList", "Group", "Team", "Answer", "Result", "Data")),
                "fields": [(_key("people", rng), listed)]}  # fmt: skip
    if rng.random() < WRAPPER_RATE:
        key = rng.choice(("person", "result", "data", "user", "record", "item", "output", "object", "entry"))
        return {"title": "Response", "fields": [(key, shape)]}
    return shape


def _group(shape: dict[str, Any], rng: Random) -> None:
    """Move some of the fields to a nested object."""
    for name in rng.sample(list(GROUPS), len(GROUPS)):
        inside = [field for field in shape["fields"] if field.fact in GROUPS[name]]
        outside = [field for field in shape["fields"] if field.fact not in GROUPS[name]]
        key = rng.choice(phrase_book(BOOK)["groups"][name])
        if inside and outside and key not in {field.key for field in outside}:
            nested = (key, {"title": key.replace("_", " ").title().replace(" ", ""), "fields": inside})
            outside.insert(rng.randint(0, len(outside)), nested)
            shape["fields"] = outside
            return


# JSON


def _write(shape: dict[str, Any], records: list[dict[str, Any]], out: Written) -> None:
    """Write the answer; what a grammar leaves no choice about is given."""
    if "items" in shape:
        out.add("[")
        for at, record in enumerate(records):
            out.add(", " if at else "")
            _write(shape["items"], [record], out)
        out.add("]")
        return
    out.add("{")
    for at, part in enumerate(shape["fields"]):
        out.add(", " if at else "")
        key = part.key if isinstance(part, Field) else part[0]
        out.add('"')
        out.add(key, given=True)
        if isinstance(part, Field):
            _write_value(part, records[0], out)
        else:
            out.add('": ')
            _write(part[1], records, out)
    out.add("}")


def _write_value(leaf: Field, facts: dict[str, Any], out: Written) -> None:
    value = facts.get(leaf.fact)
    if value is None and not leaf.nullable:
        out.add('": ' + ('"' if leaf.kind == "string" else ""), given=True)
        out.add(json.dumps(EMPTY[leaf.kind]).removeprefix('"' if leaf.kind == "string" else ""))
    elif leaf.kind == "string" and value is not None and not isinstance(value, str):
        out.add('": "', given=True)
        out.add(f'{value}"')
    else:
        out.add('": ' + json.dumps(value, ensure_ascii=False))


# Requests


def ask(way: str, text: str, shape: dict[str, Any], rng: Random, split: str) -> tuple[str, tuple[dict[str, Any], ...]]:
    """Return the user's message, and a system message before it or none; ``shape`` may be a JSON schema."""
    if way == "text":
        return text, ()
    asks = phrase_book(BOOK)["asks"]
    if way == "system":
        return text, ({"role": "system", "content": draw(rng.choice(asks["system"][split]), rng)},)
    phrase = draw_lines(rng.choice(asks[way][split]), rng)
    if split == "train" and way == "plain" and phrase.endswith("{text}"):
        phrase = add_noise(phrase.removesuffix("{text}").rstrip(" "), rng, split, end=False, suffix=False) + " {text}"
    shown = {"text": text}
    if way == "keys":
        shown["keys"] = _keys_text(shape, rng)
    if way == "schema":
        schema = shape if "fields" not in shape and "items" not in shape else schema_of(shape, rng)
        shown["schema"] = json.dumps(schema, ensure_ascii=False)
    return fill(phrase, shown), ()


def draw_lines(pattern: str, rng: Random) -> str:
    """Draw one of the phrases of a pattern; line breaks stay."""
    return "\n".join(draw(line, rng) for line in pattern.split("\n"))


def _keys_text(shape: dict[str, Any], rng: Random) -> str:
    keys = list(_all_keys(shape))
    mark = rng.choice(("{}", "{}", "{}", "`{}`", '"{}"'))
    shown = [mark.format(key) for key in keys]
    if len(shown) == 1 or rng.random() < 0.5:
        return ", ".join(shown)
    return ", ".join(shown[:-1]) + " and " + shown[-1]


def _all_keys(shape: dict[str, Any]) -> list[str]:
    if "items" in shape:
        return _all_keys(shape["items"])
    keys: list[str] = []
    for part in shape["fields"]:
        keys += [part.key] if isinstance(part, Field) else [part[0], *_all_keys(part[1])]
    return keys


# Schemas


def schema_of(shape: dict[str, Any], rng: Random) -> dict[str, Any]:
    """Return the JSON schema of a shape, as pydantic writes it or as OpenAI's client sends it."""
    definitions: dict[str, Any] = {}
    strict = rng.random() < 0.4
    schema = _schema(shape, definitions, strict, rng.random() < DESCRIPTION_RATE, top=True)
    return {"$defs": definitions, **schema} if definitions else schema


def _schema(
    shape: dict[str, Any], definitions: dict[str, Any], strict: bool, described: bool, top: bool = False
) -> Any:
    if "items" in shape:
        return {"items": _schema(shape["items"], definitions, strict, described), "type": "array"}
    properties: dict[str, Any] = {}
    for part in shape["fields"]:
        if isinstance(part, Field):
            properties[part.key] = _property(part, described)
        else:
            inner = _schema(part[1], definitions, strict, described)
            title = {"title": part[0].replace("_", " ").title()} if "items" in part[1] else {}
            properties[part[0]] = {**inner, **title}
    schema: dict[str, Any] = {"properties": properties, "required": list(properties), "title": shape["title"],
                              "type": "object"}  # fmt: skip
    if strict:
        schema["additionalProperties"] = False
    if top:
        return schema
    definitions[shape["title"]] = schema
    return {"$ref": f"#/$defs/{shape['title']}"}


def _property(leaf: Field, described: bool) -> dict[str, Any]:
    title = leaf.key.replace("_", " ").title()
    kind: dict[str, Any] = {"type": leaf.kind}
    if leaf.kind == "array":
        kind = {"items": {"type": "string"}, "type": "array"}
    if leaf.fact in ENUMS:
        kind = {"enum": list(ENUMS[leaf.fact]), "type": "string"}
    if leaf.nullable:
        kind = {"anyOf": [kind, {"type": "null"}]}
    about = {"description": f"the {leaf.fact.replace('_', ' ')}"} if described else {}
    return {**about, **kind, "title": title}
