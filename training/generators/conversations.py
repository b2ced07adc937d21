"""Complete training conversations, one theme each."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from training.books import phrase_book
from training.generators.arithmetic import arithmetic_turn, unsupported_turn
from training.generators.drills import lookup_turns, record_turns, repeat_turn, tool_quiz
from training.generators.extract import extract_turn
from training.generators.knowledge import fallback_turn, quire_turn, small_talk_turn, unknown_turn
from training.generators.recall import Memory
from training.generators.schemas import schema_turn
from training.generators.tool_calls import call_turn, make_tools, missing_turn, result_turn
from training.generators.tool_specs import Tool
from training.generators.turn import Conversation, Turn
from training.values import Values

SYSTEM_RATE = 0.15
DIRECT_RATE = 0.1
VALUES = Values("train")


def make_conversation(theme: str, rng: Random) -> Conversation:
    """Return a conversation of a theme; the same random state gives the same conversation."""
    conversation = Conversation(theme, thinking=rng.random() >= DIRECT_RATE)
    if rng.random() < SYSTEM_RATE:
        conversation.add([{"role": "system", "content": rng.choice(phrase_book("style")["systems"]["train"])}], False)
    if theme == "arithmetic_direct":
        conversation.thinking = False
        turns = [arithmetic_turn(rng)]
    else:
        turns = THEMES[theme](rng, conversation)
    for at, turn in enumerate(turns):
        last = at == len(turns) - 1
        conversation.add(turn.messages(), trained=last or not turn.think, given=turn.given)
        conversation.think = turn.think
    return conversation


def _other_turn(rng: Random) -> Turn:
    makers = (quire_turn, quire_turn, small_talk_turn, fallback_turn, arithmetic_turn, unknown_turn, unsupported_turn)
    return rng.choices(makers, (3, 3, 3, 3, 2, 0.5, 0.5))[0](rng)


def _arithmetic(rng: Random, _conversation: Conversation) -> list[Turn]:
    before = [_other_turn(rng) for _ in range(rng.choice((0, 0, 0, 0, 0, 0, 0, 1, 2)))]
    return [*before, unsupported_turn(rng) if rng.random() < 0.15 else arithmetic_turn(rng)]


def _quire(rng: Random, _conversation: Conversation) -> list[Turn]:
    turns = [quire_turn(rng) for _ in range(rng.choice((1, 1, 2, 3, 4)))]
    if rng.random() < 0.3:
        turns.insert(rng.randrange(len(turns) + 1), unknown_turn(rng))
    return turns


def _talk(rng: Random, _conversation: Conversation) -> list[Turn]:
    makers = (small_talk_turn, fallback_turn, unknown_turn, unsupported_turn)
    return [rng.choices(makers, (4, 5, 2, 2))[0](rng) for _ in range(rng.choice((1, 1, 2, 3, 4)))]


def _extract(rng: Random, _conversation: Conversation) -> list[Turn]:
    turns = [extract_turn(rng, VALUES, several=rng.random() < 0.07) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    if rng.random() < 0.1:
        turns.insert(0, _other_turn(rng))
    return turns


def _schema(rng: Random, conversation: Conversation) -> list[Turn]:
    turns = [schema_turn(rng, VALUES)]
    if turns[0].before:  # its system message replaces the other one
        conversation.messages.clear()
        conversation.trained.clear()
    elif rng.random() < 0.1:
        turns.insert(0, _other_turn(rng))
    return turns


def _recall(rng: Random, _conversation: Conversation) -> list[Turn]:
    memory = Memory(rng, VALUES)
    turns: list[Turn] = []
    facts = rng.choice((0, 1, 1, 2, 2, 3, 4, 5, 6))
    while facts > 0:
        if rng.random() < 0.3:
            turns.append(_other_turn(rng))
        count = min(facts, rng.choice((1, 1, 1, 2, 3)))
        turns.append(memory.tell(count))
        facts -= count
        if rng.random() < 0.2:
            turns.append(memory.ask(rng.random() < 0.75))
        if rng.random() < 0.07:
            turns.append(memory.tell(update=True))
    for _ in range(rng.choice((1, 2, 2, 3, 3, 4))):
        if rng.random() < 0.25:
            turns.append(_other_turn(rng))
        turns.append(_question(memory, rng))
    return turns


def _question(memory: Memory, rng: Random) -> Turn:
    chance = rng.random()
    if chance < 0.05:
        return memory.ask_everything()
    if chance < 0.1:
        return memory.tell_and_ask()
    return memory.ask(rng.random() < 0.75)


def _drill(rng: Random, conversation: Conversation) -> list[Turn]:
    chance = rng.random()
    if chance < 0.25:
        return lookup_turns(rng, VALUES)
    if chance < 0.45:
        return record_turns(rng, VALUES)
    if chance < 0.8:
        tools = make_tools(rng, VALUES, rng.choice((1, 1, 1, 2, 2, 3)))
        conversation.tools = [tool.openai() for tool in tools]
        return tool_quiz(rng, VALUES, tools)
    return [repeat_turn(rng, VALUES) for _ in range(rng.choice((1, 2, 3, 4)))]


def _few_tools(rng: Random, conversation: Conversation) -> list[Turn]:
    tools = make_tools(rng, VALUES, rng.choice((1, 1, 1, 2, 2)))
    return _tool_turns(rng, conversation, tools, rng.choice((1, 1, 1, 1, 2)))


def _tools(rng: Random, conversation: Conversation) -> list[Turn]:
    tools = make_tools(rng, VALUES, rng.choice((1, 2, 2, 3, 3, 4)))
    return _tool_turns(rng, conversation, tools, rng.choice((1, 1, 1, 2, 2, 3)))


def _calls(rng: Random, conversation: Conversation) -> list[Turn]:
    """Return several requests for the same tools, each answered by its call."""
    tools = make_tools(rng, VALUES, rng.choice((1, 1, 2, 2, 3, 3, 4, 4, 5)))
    conversation.tools = [tool.openai() for tool in tools]
    return [
        _turn_without_tool(rng, tools) if rng.random() < 0.06 else call_turn(rng, VALUES, rng.choice(tools))
        for _ in range(rng.randint(3, 9 - len(tools) // 2))
    ]


def _tool_turns(rng: Random, conversation: Conversation, tools: list[Tool], exchanges: int) -> list[Turn]:
    conversation.tools = [tool.openai() for tool in tools]
    turns: list[Turn] = []
    for _ in range(exchanges):
        chance = rng.random()
        if chance < 0.12:
            turns.append(_turn_without_tool(rng, tools))
            continue
        tool = rng.choice(tools)
        missing = missing_turn(rng, VALUES, tool) if chance < 0.18 else None
        if missing is not None:
            turns.append(missing)
            continue
        call = call_turn(rng, VALUES, tool)
        turns.append(call)
        assert call.call is not None
        turns.append(result_turn(rng, VALUES, tool, call.call))
    if turns and turns[-1].kind == "tool_answer" and rng.random() < 0.65:
        turns.pop()
    return turns


def _turn_without_tool(rng: Random, tools: list[Tool]) -> Turn:
    """Return a turn that needs no tool; off-topic requests share no word of four or more letters with the tools."""
    shown = " ".join(f"{tool.name} {tool.about}" for tool in tools).lower().replace("_", " ")
    while True:
        turn = rng.choices((quire_turn, small_talk_turn, fallback_turn), (3, 3, 3))[0](rng)
        if turn.kind != "fallback" or not any(
            word in shown for word in turn.user.lower().strip("?.!").split() if len(word) > 3
        ):
            return turn


def _mixed(rng: Random, _conversation: Conversation) -> list[Turn]:
    memory = Memory(rng, VALUES)
    turns: list[Turn] = []
    for _ in range(rng.randint(3, 8)):
        kind = rng.randrange(6)
        if kind == 0:
            turns.append(memory.tell(rng.choice((1, 1, 2))))
        elif kind == 1:
            turns.append(_question(memory, rng))
        elif kind == 2:
            turns.append(extract_turn(rng, VALUES))
        elif kind == 3:
            turns.append(repeat_turn(rng, VALUES))
        else:
            turns.append(_other_turn(rng))
    return turns


THEMES: dict[str, Callable[[Random, Conversation], list[Turn]]] = {
    "arithmetic": _arithmetic, "quire": _quire, "talk": _talk, "extract": _extract, "schema": _schema,
    "recall": _recall, "drill": _drill, "few_tools": _few_tools, "tools": _tools, "calls": _calls, "mixed": _mixed,
}  # fmt: skip
