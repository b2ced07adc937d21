"""Copying and lookup tasks: skills that recall, extraction and tool calls require."""

from __future__ import annotations

from random import Random
from typing import Any

from training.books import phrase_book, tool_parts
from training.generators import tool_names
from training.generators.tool_calls import call_turn, dump, make_value
from training.generators.tool_specs import Tool
from training.generators.turn import Turn
from training.grammar import draw, fill
from training.noise import add_noise
from training.values import Values

COPY_KINDS = (
    "sentence", "sentence", "query", "full_name", "email", "code", "handle", "path", "url", "task", "rare_name",
    "city", "digits", "address",
)  # fmt: skip
LOOKUP_KINDS = ("first_names", "cities", "code", "handle", "rare_word", "int 1 99", "thing", "digits")


def repeat_turn(rng: Random, values: Values, split: str = "train") -> Turn:
    """Return a turn with a text to repeat."""
    count = rng.choice((1, 1, 1, 2, 3))
    text = ", ".join(str(values.draw(rng.choice(COPY_KINDS), rng)) for _ in range(count))
    phrase = add_noise(rng.choice(phrase_book("drills")["repeat"][split]), rng, split, end=False)
    return Turn("repeat", fill(phrase, {"x": text}), text, expect={"text": text})


def echo_text(rng: Random, values: Values) -> str:
    """Return random values, to be copied literally."""
    return " ".join(str(values.draw(rng.choice(COPY_KINDS + LOOKUP_KINDS), rng)) for _ in range(rng.randint(4, 12)))


def lookup_turns(rng: Random, values: Values, split: str = "train") -> list[Turn]:
    """Return turns with a list of keys and values, and questions on it."""
    book = phrase_book("drills")
    kind = rng.choice(LOOKUP_KINDS)
    keys = list(dict.fromkeys(str(values.draw("rare_word", rng)) for _ in range(rng.randint(2, 6))))
    pairs = {key: str(values.draw(kind, rng)) for key in keys}
    sign = rng.choice((" = ", ": ", " is "))
    listed = ", ".join(f"{key}{sign}{value}" for key, value in pairs.items())
    turns = []
    for at, key in enumerate(rng.sample(keys, len(keys))):
        question = add_noise(draw(rng.choice(book["lookup"][split]), rng), rng, split, frame=False)
        if at == 0:
            question = fill(rng.choice(book["lists"][split]), {"q": question, "l": listed})
        turns.append(Turn("lookup", fill(question, {"k": key}), f"{pairs[key]}", expect={"text": pairs[key]}))
    return turns


def record_turns(rng: Random, values: Values) -> list[Turn]:
    """Return turns with questions on a JSON record, or a record to write."""
    book = phrase_book("drills")["records"]
    record = _record(rng, values)
    task = rng.choice(("value", "value", "keys", "key", "write", "write", "rename", "set", "fill", "fill"))
    if task == "write":
        record = {name: int(value) if str(value).isdigit() else value for name, value in record.items()}
    text, key = dump(record), rng.choice(list(record))
    slots = {"r": text, "k": key, "v": str(record[key]), "l": _as_text(record, rng), "s": _schema(record)}
    if task == "value":
        return _value_turns(record, slots, rng)
    if task == "keys":
        reply = ", ".join(record)
    elif task == "key":
        reply = next(name for name, value in record.items() if str(value) == slots["v"])
    elif task == "rename":
        slots["n"] = _unused_name(record, rng, values)
        reply = dump({slots["n"] if name == key else name: value for name, value in record.items()})
    elif task == "set":
        new_value = values.draw("int 1 99" if isinstance(record[key], int) else "rare_word", rng)
        slots["v"], reply = str(new_value), dump({**record, key: new_value})
    else:
        reply = text
    question = add_noise(rng.choice(book[task]), rng, suffix=False, end=False)
    return [Turn("record", fill(question, slots), reply, expect={"text": reply})]


def _record(rng: Random, values: Values) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for _ in range(rng.randint(1, 5)):
        record[_unused_name(record, rng, values)] = values.draw(rng.choice(COPY_KINDS + LOOKUP_KINDS), rng)
    return record


def _unused_name(record: dict[str, Any], rng: Random, values: Values) -> str:
    while True:
        name = tool_names.random_parameter_name(values, rng)
        if rng.random() < 0.3:
            name = str(rng.choice(rng.choice(tool_parts()["params"])["names"]))
        if name not in record:
            return name


def _value_turns(record: dict[str, Any], slots: dict[str, str], rng: Random) -> list[Turn]:
    book, turns = phrase_book("drills")["records"], []
    for at, key in enumerate(rng.sample(list(record), min(len(record), rng.choice((1, 1, 2, 3))))):
        question = add_noise(rng.choice(book["more" if at else "value"]), rng, suffix=False, end=False)
        reply = str(record[key])
        turns.append(Turn("record", fill(question, {**slots, "k": key}), reply, expect={"text": reply}))
    return turns


def _as_text(record: dict[str, Any], rng: Random, ordered: bool = True) -> str:
    """Format a record as text: width = 3, name = x."""
    sign = rng.choice((" = ", "=", ": ", " "))
    pairs = list(record.items())
    if not ordered:
        rng.shuffle(pairs)
    return rng.choice((", ", ", ", " and ", "; ")).join(f"{key}{sign}{value}" for key, value in pairs)


def _schema(record: dict[str, Any]) -> str:
    return dump({key: "integer" if isinstance(value, int) else "string" for key, value in record.items()})


def tool_quiz(rng: Random, values: Values, tools: list[Tool]) -> list[Turn]:
    """Return questions on the tools of the conversation, answered by copying names; some end with a dictated call."""
    turns: list[Turn] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        turn = _quiz_turn(rng, values, tools)
        if turn.user not in {known.user for known in turns}:
            turns.append(turn)
    if rng.random() < 0.45:
        call = _dictated_call(rng, values, rng.choice(tools))
        turns = [*turns[:1], call] if rng.random() < 0.4 else [call]
    return turns


def _quiz_turn(rng: Random, values: Values, tools: list[Tool]) -> Turn:
    tool = rng.choice(tools)
    names = [parameter.name for parameter in tool.parameters]
    slots, task, reply = {"t": tool.name}, rng.choice(("list", "which", "which", "arguments", "owner", "options")), ""
    if task == "owner" and names:
        slots["p"] = rng.choice(names)
        owners = [other.name for other in tools if any(p.name == slots["p"] for p in other.parameters)]
        reply = owners[0] if len(owners) == 1 else ""
    elif task == "options":
        enums = [parameter for parameter in tool.parameters if parameter.options]
        if enums:
            slots["p"], reply = enums[0].name, ", ".join(enums[0].options)
    elif task == "arguments":
        reply = ", ".join(names) or "none"
    elif task == "list":
        reply = ", ".join(other.name for other in tools)
    if not reply:
        task, reply = "which", tool.name
        if tool.about and rng.random() < 0.6:
            task, slots["u"] = "does", tool.about.rstrip(".")
            if rng.random() < 0.4:
                task, reply = "about", tool.about
    if task == "which":
        reply, slots["u"] = tool.name, call_turn(rng, values, tool).user
    phrase = rng.choice(phrase_book("drills")["quiz"][task])
    question = add_noise(phrase, rng, suffix=False, end="{u}" not in phrase)
    return Turn("quiz", fill(question, slots), reply, expect={"text": reply})


def _dictated_call(rng: Random, values: Values, tool: Tool) -> Turn:
    """Return a tool call for which the user names the tool and its arguments."""
    book = phrase_book("drills")["quiz"]
    parameters = [p for p in tool.parameters if p.required or not tool.lists_required or rng.random() < 0.5]
    arguments = {parameter.name: make_value(parameter, rng, values) for parameter in parameters}
    call = {"name": tool.name, "arguments": arguments}
    listed = _as_text(arguments, rng, ordered=rng.random() < 0.7)
    question = add_noise(rng.choice(book["call" if parameters else "bare"]), rng, suffix=False, end=False)
    return Turn("tool_call", fill(question, {"t": tool.name, "a": listed}), call=call, expect={"call": call})
