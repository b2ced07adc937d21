"""The prompts of the evaluation: phrasings, names, numbers and tools that training never uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from training.books import phrase_book
from training.generators.arithmetic import arithmetic_turn, unsupported_turn
from training.generators.extract import extract_turn
from training.generators.knowledge import facts, fallback_turn, quire_turn, small_talk_turn, unknown_turn
from training.generators.recall import Memory
from training.generators.records import PERSON, Record, person_record, thing_record
from training.generators.schemas import ask
from training.generators.tool_calls import call_turn, make_tools, result_turn
from training.generators.tool_specs import NUM_COMMON_TOOLS, Tool, ToolSpec, heldout_requests, instantiate, read_specs
from training.generators.turn import Message, Turn
from training.heldout_models import HELDOUT, Heldout
from training.values import Values

SPLIT = "heldout"
VALUES = Values(SPLIT)
SYSTEM_RATE = 0.15


@dataclass(frozen=True)
class Case:
    """One prompt and the scoring criteria of its answer."""

    kind: str
    messages: list[Message]
    expect: dict[str, Any]
    tools: list[dict[str, Any]] | None = None
    thinking: bool = True
    schema: dict[str, Any] | None = None


def _single(turn: Turn, rng: Random, kind: str | None = None) -> Case:
    return Case(kind or turn.kind, [*_system(rng), {"role": "user", "content": turn.user}], turn.expect)


def _system(rng: Random) -> list[Message]:
    if rng.random() >= SYSTEM_RATE:
        return []
    return [{"role": "system", "content": rng.choice(phrase_book("style")["systems"][SPLIT])}]


def _arithmetic(rng: Random, at: int) -> Case:
    return _single(arithmetic_turn(rng, SPLIT, minus=at % 2 == 1), rng)


def _direct(rng: Random, at: int) -> Case:
    case = _arithmetic(rng, at)
    return Case("arithmetic_no_thinking", case.messages, case.expect, thinking=False)


def _quire(rng: Random, at: int) -> Case:
    names = list(facts())
    return _single(quire_turn(rng, SPLIT, names[at % len(names)]), rng)


def _other_turn(rng: Random) -> Turn:
    makers = (quire_turn, small_talk_turn, fallback_turn, arithmetic_turn)
    return rng.choice(makers)(rng, SPLIT)


def _recall(rng: Random, at: int) -> Case:
    memory = Memory(rng, VALUES, SPLIT)
    turns: list[Turn] = []
    left = rng.randint(1, 6)
    while left > 0:
        if rng.random() < 0.35:
            turns.append(_other_turn(rng))
        count = min(left, rng.choice((1, 1, 2, 3)))
        turns.append(memory.tell(count))
        left -= count
    turns += [_other_turn(rng) for _ in range(rng.choice((0, 1, 1, 2)))]
    last = memory.ask(known=at % 4 != 3)
    messages = [*_system(rng), *(message for turn in turns for message in turn.messages())]
    return Case("recall", [*messages, {"role": "user", "content": last.user}], last.expect)


def _extract(rng: Random, _: int) -> Case:
    return _single(extract_turn(rng, VALUES, SPLIT), rng)


def _several(rng: Random, _: int) -> Case:
    return _single(extract_turn(rng, VALUES, SPLIT, several=True), rng, "extract_several")


def _tool_call(rng: Random, at: int) -> Case:
    """Return a request for a common tool among other common tools; request and values are held out."""
    return _known_call("tool_call", read_specs("train")[:NUM_COMMON_TOOLS], rng, at)


def _rare_tool_call(rng: Random, at: int) -> Case:
    """Return a request for a tool that training rarely used."""
    return _known_call("rare_tool_call", read_specs("train")[NUM_COMMON_TOOLS:], rng, at)


def _known_call(kind: str, specs: Sequence[ToolSpec], rng: Random, at: int) -> Case:
    """Return a held-out request for one of the tools among others of them."""
    names = {spec.names[0] for spec in specs}
    called = rng.choice([spec for spec in heldout_requests() if spec.names[0] in names])
    others = [spec for spec in specs if spec.names[0] != called.names[0]]
    tools = [instantiate(spec, VALUES, rng) for spec in (called, *rng.sample(others, at % 4))]
    return _call_case(kind, tools[0], rng.sample(tools, len(tools)), rng)


def _new_tool_call(rng: Random, at: int) -> Case:
    """Return a request for a tool that training never used."""
    tools = make_tools(rng, VALUES, 1 + at % 4)
    return _call_case("new_tool_call", rng.choice(tools), tools, rng)


def _call_case(kind: str, tool: Tool, tools: list[Tool], rng: Random) -> Case:
    turn = call_turn(rng, VALUES, tool)
    messages = [*_system(rng), {"role": "user", "content": turn.user}]
    return Case(kind, messages, turn.expect, [shown.openai() for shown in tools])


def _tool_answer(rng: Random, at: int) -> Case:
    tools = make_tools(rng, VALUES, 1 + at % 4)
    tool = rng.choice(tools)
    request_turn = call_turn(rng, VALUES, tool)
    assert request_turn.call is not None
    result = result_turn(rng, VALUES, tool, request_turn.call)
    call = {"id": "call_1", "type": "function", "function": request_turn.call}
    messages = [
        *_system(rng),
        {"role": "user", "content": request_turn.user},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    return Case("tool_answer", [*messages, *result.before], result.expect, [tool.openai() for tool in tools])


def _fallback(rng: Random, at: int) -> Case:
    turn = small_talk_turn(rng, SPLIT) if at % 3 == 0 else fallback_turn(rng, SPLIT)
    return _single(turn, rng, "fallback")


def _unsupported(rng: Random, _: int) -> Case:
    turn = unsupported_turn(rng, SPLIT)
    return Case("unsupported_arithmetic", [{"role": "user", "content": turn.user}], {"keys": ["only add or subtract"]})


def _unknown(rng: Random, _: int) -> Case:
    return _single(unknown_turn(rng, SPLIT), rng, "unknown_quire")


def _schema(rng: Random, at: int) -> Case:
    held = HELDOUT[at % len(HELDOUT)]
    count = rng.randint(1, 3) if held.items else 1
    records = [_record(held, rng) for _ in range(count)]
    schema = held.model.model_json_schema()
    schema = closed(schema) if at // len(HELDOUT) % 2 == 0 else schema
    way = rng.choices(("text", "plain", "system", "schema"), (1, 5, 3, 1))[0]
    text = " ".join(record.text for record in records)
    user, before = ask(way, text, schema, rng, SPLIT)
    answers = [_answer(held, record) for record in records]
    expect = {"model": held.model.__name__, "answer": {held.items: answers} if held.items else answers[0]}
    return Case("schema", [*before, {"role": "user", "content": user}], expect, schema=schema)


def _record(held: Heldout, rng: Random) -> Record:
    """Return a text with all facts that the model requires."""
    while True:
        if held.about == PERSON:
            record = person_record(rng, VALUES, held.added, held.told)
        else:
            record = thing_record(rng, VALUES, held.about)
        if all(fact in record.facts for key, fact in held.facts.items() if key not in held.optional):
            return record


def _answer(held: Heldout, record: Record) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    for key, fact in held.facts.items():
        inside = answer
        *outer, last = key.split(".")
        for name in outer:
            inside = inside.setdefault(name, {})
        inside[last] = record.facts.get(fact)
    return answer


def closed(schema: Any) -> Any:
    """Return a schema as OpenAI's client sends it: all keys are required, and there are no others."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    copied = {key: closed(value) for key, value in schema.items() if key != "default"}
    if "properties" in copied:
        copied |= {"required": list(copied["properties"]), "additionalProperties": False}
    return copied


KINDS: dict[str, Callable[[Random, int], Case]] = {
    "arithmetic": _arithmetic, "quire": _quire, "recall": _recall, "extract": _extract, "tool_call": _tool_call,
    "tool_answer": _tool_answer, "fallback": _fallback, "rare_tool_call": _rare_tool_call,
    "new_tool_call": _new_tool_call, "arithmetic_no_thinking": _direct, "extract_several": _several, "schema": _schema,
    "unsupported_arithmetic": _unsupported, "unknown_quire": _unknown,
}  # fmt: skip


def cases(kind: str, count: int, seed: int) -> list[Case]:
    """Return the prompts of a kind; the same seed gives the same prompts, without duplicates."""
    rng = Random(f"{seed}-{kind}")
    made: list[Case] = []
    seen: set[str] = set()
    for at in range(count * 20):
        case = KINDS[kind](rng, at)
        text = str(case.messages)
        if text not in seen:
            seen.add(text)
            made.append(case)
        if len(made) == count:
            break
    return made
