"""The order of text and tool calls in an answer does not depend on how its tokens are grouped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.api.anthropic.translation import MessageStreamWriter, content_blocks
from quire.api.chat.chunks import ChatChunkFields, ChatChunkWriter
from quire.api.responses.writer import ItemWriter
from quire.engine.client.stream import Delta
from quire.parsing.answer import AnswerFormat
from quire.parsing.reasoning_registry import tags_named
from quire.parsing.tools.calls import CallDelta, Parsed
from quire.parsing.tools.choice import ToolPlan
from quire.parsing.tools.registry import FORMATS
from quire.protocol.anthropic import MessagesResponse, MessagesUsage

SCHEMAS: dict[str, dict[str, Any]] = {
    "now": {"type": "object"},
    "note": {"type": "object", "properties": {"text": {"type": "string"}}},
}
REASONING = "<think>\nhm\n</think>\n\n"
ANALYSIS = "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
# Format -> a call of each function, and the pattern of a text that is not a call.
CALLS: dict[str, tuple[str, str, str]] = {
    "hermes": (
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        '<tool_call>{"arguments": {"text": "a\\nb"}, "name": "note"}</tool_call>',
        "{}",
    ),
    "llama3_json": (
        '<|python_tag|>{"name": "now", "parameters": {}}',
        '<|python_tag|>{"name": "note", "parameters": {"text": "x"}}',
        "{}",
    ),
    "mistral": ("[TOOL_CALLS]now{}", '[TOOL_CALLS][{"name": "note", "arguments": {"text": "x"}}]', "{}"),
    "qwen3_coder": (
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "<tool_call>\n<function=note>\n<parameter=text>\na\n\nb\n</parameter>\n</function>\n</tool_call>",
        "{}",
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>note\n```json\n{"text": "x"}\n```<｜tool▁call▁end｜>',
        "{}",
    ),
    "glm45": (
        "<tool_call>now\n</tool_call>",
        "<tool_call>note\n<arg_key>text</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        "{}",
    ),
    "kimi_k2": (
        "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        '<|tool_call_begin|>functions.note:1<|tool_call_argument_begin|>{"text": "x"}<|tool_call_end|>',
        "{}",
    ),
    "openai": (
        "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
        '<|start|>assistant to=functions.note<|channel|>commentary<|message|>{"text": "x"}<|call|>',
        "<|start|>assistant<|channel|>final<|message|>{}<|end|>",
    ),
}
TEXTS = ("Let me see.", " a < b ", "\n\n", "[", "Done.\n")


def answer_format(name: str, *, parallel: bool = True, custom: frozenset[str] = frozenset()) -> AnswerFormat:
    form = FORMATS[name]
    plan = ToolPlan(format=form, schemas=SCHEMAS, parallel=parallel, custom=custom)
    return AnswerFormat(tags=tags_named("qwen3"), prompt="", plan=plan, tools=form if form.full_answer else None)


def cut(text: str, at: Iterable[int]) -> list[str]:
    places = [0, *sorted(at), len(text)]
    return [text[begin:end] for begin, end in pairwise(places)]


def parsed(read: AnswerFormat, pieces: Sequence[str]) -> Iterator[Parsed]:
    parser = read.parser()
    for piece in pieces:
        yield parser.push(piece)
    yield parser.push("", last=True)


def items(parts: Iterable[Parsed]) -> list[tuple[str, str, str]]:
    """Type, name and text of each item of a response."""
    writer = ItemWriter(reasoning=True, encode_reasoning=False)
    for part in parts:
        for event in writer.write(part):
            assert event["output_index"] == len(writer.items) - 1
    list(writer.end_turn("completed"))
    return [
        (item["type"], item.get("name", ""), str(item.get("arguments", item.get("input", item.get("content")))))
        for item in writer.items
    ]


def blocks(parts: Iterable[Parsed], *, thinking: bool) -> list[dict[str, Any]]:
    """Blocks of a message, put together from its events."""
    usage = MessagesUsage(input_tokens=0, output_tokens=0)
    writer = MessageStreamWriter(
        MessagesResponse(id="m", model="m", content=[], stop_reason=None, usage=usage), thinking=thinking
    )
    built: list[dict[str, Any]] = []
    events = [event for part in parts for event in writer.write(part)]
    for body in (json.loads(event.split(b"data: ")[1]) for event in events):
        if body["type"] == "content_block_start":
            built.append({**body["content_block"], "input": ""} if "id" in body["content_block"] else
                         body["content_block"])  # fmt: skip
        elif body["type"] == "content_block_delta":
            delta, block = body["delta"], built[body["index"]]
            name = {"input_json_delta": "input", "text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"])
            if name is not None:
                block[name] += delta["partial_json" if name == "input" else name]
    return [{name: value for name, value in block.items() if name != "id"} for block in built]


def chunks(read: AnswerFormat, pieces: Sequence[str]) -> list[list[Any]]:
    """Kind and text of the parts of a chat's chunks, in order; consecutive ones of a kind are merged."""
    writer = ChatChunkWriter(
        ChatChunkFields("c", 0, "m"), 0, role="assistant", echo="", parser=read.parser(), include_reasoning=True,
        formatter=None, prompt_token_ids=None,
    )  # fmt: skip
    merged: list[list[Any]] = []
    for piece in [*pieces, None]:
        delta = Delta(piece) if piece is not None else Delta(finish_reason="stop")
        for chunk in writer.write(delta, None):
            fields = json.loads(chunk.removeprefix(b"data: "))["choices"][0]["delta"]
            for kind in ("reasoning", "content"):
                if fields.get(kind):
                    _append(merged, kind, fields[kind])
            for call in fields.get("tool_calls", ()):
                called = call.get("function") or call["custom"]
                arguments = called["arguments"] if "function" in call else called["input"]
                _append(merged, f"call {call['index']}", called.get("name", "") + arguments)
    return merged


def _append(merged: list[list[Any]], kind: str, text: str) -> None:
    if merged and merged[-1][0] == kind:
        merged[-1][1] += text
    else:
        merged.append([kind, text])


@pytest.mark.parametrize("name", sorted(CALLS))
def test_items_are_in_the_order_of_the_answer(name: str) -> None:
    now, note, text = CALLS[name]
    reasoning = ANALYSIS if name == "openai" else REASONING
    first, second, third = (text.replace("{}", word) for word in "abc")
    answer = reasoning + first + now + second + note + third
    for pieces in ([answer], list(answer)):
        actual = items(parsed(answer_format(name), pieces))
        assert [(kind, of) for kind, of, _ in actual] == [
            ("reasoning", ""), ("message", ""), ("function_call", "now"), ("message", ""), ("function_call", "note"),
            ("message", ""),
        ]  # fmt: skip
        texts = [content for kind, _, content in actual if kind == "message"]
        assert all(f"'text': '{word}'" in content for word, content in zip("abc", texts, strict=True))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_results_do_not_depend_on_how_tokens_are_grouped(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(CALLS)))
    now, note, text = CALLS[name]
    parts = st.sampled_from([now, note, ANALYSIS, *(text.replace("{}", content) for content in TEXTS)])
    answer = data.draw(st.sampled_from(["", REASONING])) + "".join(data.draw(st.lists(parts, max_size=7)))
    answer = answer[: data.draw(st.integers(0, len(answer)), "end")]
    pieces = cut(answer, data.draw(st.lists(st.integers(0, len(answer)), max_size=12)))
    custom = frozenset(data.draw(st.sets(st.sampled_from(["now", "note"]))))  # their arguments have no `input`
    read = answer_format(name, parallel=data.draw(st.booleans()), custom=custom)
    for cuts in (pieces, list(answer)):
        assert items(parsed(read, cuts)) == items(parsed(read, [answer]))
        assert chunks(read, cuts) == chunks(read, [answer])
        for thinking in (True, False):
            grouped = blocks(parsed(read, cuts), thinking=thinking)
            assert grouped == blocks(parsed(read, [answer]), thinking=thinking)


def test_a_whole_message_has_its_blocks_in_the_order_of_the_stream() -> None:
    now, note, _ = CALLS["hermes"]
    read = answer_format("hermes")
    answer = f"{REASONING}First.\n{now}\nThen.\n{note}"
    for thinking in (True, False):
        whole = content_blocks(read.parser().push(answer, last=True), thinking=thinking)
        streamed = blocks(parsed(read, list(answer)), thinking=thinking)
        assert [block["type"] for block in whole] == [block["type"] for block in streamed]
        assert [block["text"] for block in whole if "text" in block] == ["First.", "Then."]
        assert [block["input"] for block in whole if "input" in block] == [{}, {"text": "a\nb"}]


@pytest.mark.parametrize("name", ["hermes", "openai"])
def test_texts_around_a_call_are_on_lines_of_their_own(name: str) -> None:
    now, note, text = CALLS[name]
    answer = text.replace("{}", "First. ") + now + text.replace("{}", " Then.") + note + text.replace("{}", "\n\nLast.")
    for read in (
        answer_format(name),
        answer_format(name, parallel=False),
        answer_format(name, custom=frozenset(["note"])),
    ):
        assert read.parser().push(answer, last=True).content == "First.\nThen.\nLast."
        assert (
            "".join(chunk for kind, chunk in chunks(read, list(answer)) if kind == "content") == "First.\nThen.\nLast."
        )
    (*_, last) = items(parsed(answer_format(name, parallel=False), list(answer)))
    assert "'text': 'Then.\\nLast.'" in last[2]


def test_log_probabilities_are_those_of_the_text_before_the_first_call() -> None:
    tokens = [("a", "a"), ("b", "b"), ("<c>", ""), ("", ""), ("d", "d")]
    for size in (1, 2, 5):
        writer = ItemWriter(reasoning=True, encode_reasoning=False)
        for start in range(0, len(tokens), size):
            part = Parsed()
            for token, text in tokens[start : start + size]:
                part.add_text(text)
                if token == "<c>":
                    part.add_call(CallDelta(0, "id", "now", "{}"))
            entries = [{"token": token, "bytes": list(token.encode())} for token, _ in tokens[start : start + size]]
            list(writer.write_tokens(part, entries))
        list(writer.end_turn("completed"))
        contents = [item["content"][0] for item in writer.items if "content" in item]
        assert [[entry["token"] for entry in content["logprobs"]] for content in contents] == [["a", "b"], []]


# Sizes at which a cost that is quadratic takes minutes.


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek_v3", "openai"])
def test_long_arguments_are_parsed_in_linear_time(name: str) -> None:
    arguments = json.dumps({"text": ["ab"] * 200_000})
    begin = {
        "hermes": '<tool_call>{"name": "note", "arguments": ',
        "mistral": "[TOOL_CALLS]note",
        "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>note\n```json\n",
        "openai": "<|channel|>commentary to=functions.note<|message|>",
    }[name]
    (call,) = answer_format(name).parser().push(begin + arguments, last=True).calls
    assert call.arguments == arguments


@pytest.mark.timeout(30)
def test_many_calls_in_one_piece_are_parsed_in_linear_time() -> None:
    call = "<function=note>\n<parameter=text>\nx\n</parameter>\n</function>\n"
    parsed = answer_format("qwen3_coder").parser().push(call * 20_000, last=True)
    assert sum(piece.name == "note" for piece in parsed.calls) == 20_000
    parsed = answer_format("pythonic").parser().push("[" + ", ".join(['note(text="x")'] * 20_000) + "]", last=True)
    assert len(parsed.calls) == 20_000


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["xlam", "llama3_json", "pythonic", "hermes", "functiongemma"])
def test_signs_that_may_begin_a_call_are_read_in_linear_time(name: str) -> None:
    for text in ("{", '{"a": [', "<", "[now(", '{"name": "<', "[ "):
        text *= 20_000
        for pieces in ([text], cut(text, range(7, len(text), 7))):
            for _ in parsed(answer_format(name), pieces):
                pass
