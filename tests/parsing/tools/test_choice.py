"""Tools over HTTP: calls in answers, whole and streamed, and what requests may say about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.engine.client.protocol import AddRequest
from quire.parsing.tools.choice import tool_plan
from quire.parsing.tools.registry import FORMATS
from quire.protocol.chat import ChatRequest, FunctionDefinition, FunctionTool
from quire.protocol.custom import MAX_TOOLS
from quire.protocol.errors import InvalidRequest
from tests.support.fake_core import FakeCore, says
from tests.support.server import Server, running_server
from tests.support.tokenizer import EOS, byte_tokenizer

PATH = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TWO = f'Let me see.\n{ONE}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


async def ask(server: Server, **fields: Any) -> dict[str, Any]:
    answer = await server.post(PATH, {**ASK, **fields})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def stream(server: Server, **fields: Any) -> list[dict[str, Any]]:
    answer = await server.post(PATH, {**ASK, "stream": True, **fields})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines]


def serving(folder: Path, text: str, **settings: Any) -> Any:
    return running_server(folder, FakeCore(answer=says(text)), tool_call_parser="hermes", **settings)


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


async def test_calls_are_distinguished_from_text(tmp_path: Path) -> None:
    async with serving(tmp_path, TWO) as server:
        choice = await ask(server)
    message = choice["message"]
    assert calls_of(message) == [("weather", {"city": "Rome"}), ("now", {})]
    assert message["content"] == "Let me see."
    assert choice["finish_reason"] == "tool_calls"
    assert all(call["type"] == "function" and call["id"] for call in message["tool_calls"])


@pytest.mark.parametrize("choice", [None, "none", "auto"])
async def test_an_empty_list_of_tools_is_no_tools(tmp_path: Path, choice: str | None) -> None:
    async with serving(tmp_path, "hello") as server:
        answered = await ask(server, tools=[], tool_choice=choice)
    assert (answered["message"]["content"], answered["finish_reason"]) == ("hello", "stop")


NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *(("/v1/chat/completions", {"tool_choice": choice}) for choice in ("required", NAMED, ALLOWED)),
        *(
            ("/v1/responses", {"tool_choice": choice})
            for choice in ("required", {"type": "function", "name": "weather"})
        ),
        *(
            ("/v1/messages", {"tool_choice": choice})
            for choice in ({"type": "any"}, {"type": "tool", "name": "weather"})
        ),
    ],
)
@pytest.mark.parametrize("tools", [{}, {"tools": []}])
async def test_a_call_cannot_be_required_without_tools(
    tmp_path: Path, path: str, fields: dict[str, Any], tools: dict[str, Any]
) -> None:
    asked = (
        {"input": "hi"} if "responses" in path else {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    )
    async with serving(tmp_path, "hello") as server:
        answer = await server.post(path, {**asked, **fields, **tools})
    assert answer.status_code == 400
    assert "tool_choice" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["input_schema", "inputSchema", "schema"])
async def test_a_schema_of_arguments_in_the_wrong_place_is_refused(tmp_path: Path, name: str) -> None:
    function = {"name": "weather", name: {"type": "object"}}
    async with serving(tmp_path, "hello") as server:
        chat = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": function}]}
        answer = await server.post("/v1/chat/completions", chat)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0].function")
        answer = await server.post("/v1/responses", {"input": "hi", "tools": [{"type": "function", **function}]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0]")


async def test_every_chunk_has_token_ids_if_wanted(tmp_path: Path) -> None:
    """Null where a piece of text shares its tokens with the next piece, or has none."""
    async with serving(tmp_path, TWO) as server:
        chunks = await stream(server, return_token_ids=True)
        assert not any("token_ids" in chunk for chunk in await stream(server))
    assert chunks[0]["token_ids"] is None
    tokens = [token for chunk in chunks for token in chunk["token_ids"] or ()]
    assert tokens == [*byte_tokenizer().encode(TWO).ids, EOS]


async def test_a_stream_adds_up_to_the_same_calls(tmp_path: Path) -> None:
    async with serving(tmp_path, TWO) as server:
        chunks = await stream(server)
    deltas = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    first = [delta for delta in deltas if "id" in delta]
    assert [(delta["index"], delta["function"]["name"], delta["type"]) for delta in first] == [
        (0, "weather", "function"),
        (1, "now", "function"),
    ]
    arguments = ["", ""]
    for delta in deltas:
        arguments[delta["index"]] += delta["function"].get("arguments", "")
    assert [json.loads(text) for text in arguments] == [{"city": "Rome"}, {}]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "Let me see."
    assert chunks[-1]["finish_reason"] == "tool_calls"
    assert all(chunk["delta"].get("tool_calls") != [] for chunk in chunks)


async def test_without_a_call_nothing_is_said_of_calls(tmp_path: Path) -> None:
    async with serving(tmp_path, "Just text.") as server:
        choice = await ask(server)
        chunks = await stream(server)
    assert choice["message"]["content"] == "Just text."
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert not any("tool_calls" in chunk["delta"] for chunk in chunks)


async def test_content_is_null_beside_calls_only(tmp_path: Path) -> None:
    async with serving(tmp_path, ONE) as server:
        assert (await ask(server))["message"]["content"] is None


async def test_one_call_at_most_if_that_is_wanted(tmp_path: Path) -> None:
    async with serving(tmp_path, TWO) as server:
        choice = await ask(server, parallel_tool_calls=False)
        chunks = await stream(server, parallel_tool_calls=False)
    assert calls_of(choice["message"]) == [("weather", {"city": "Rome"})]
    assert {call["index"] for chunk in chunks for call in chunk["delta"].get("tool_calls", ())} == {0}


async def test_none_leaves_the_text_alone(tmp_path: Path) -> None:
    async with serving(tmp_path, ONE) as server:
        choice = await ask(server, tool_choice="none")
    assert choice["message"]["content"] == ONE
    assert choice["finish_reason"] == "stop"


async def test_calls_behind_reasoning(tmp_path: Path) -> None:
    async with serving(tmp_path, f"<think>\nhm\n</think>\n{ONE}") as server:
        message = (await ask(server))["message"]
    assert message["reasoning"] == "hm"
    assert calls_of(message) == [("weather", {"city": "Rome"})]


async def test_a_call_cut_short_goes_as_far_as_it_went(tmp_path: Path) -> None:
    async with serving(tmp_path, ONE) as server:
        choice = await ask(server, max_tokens=58)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"].startswith('{"city"')
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("choice", "finish", "functions"),
    [
        ("required", "tool_calls", {"weather", "now"}),
        ({"type": "function", "function": {"name": "weather"}}, "stop", {"weather"}),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "now"}}]}},
            "tool_calls",
            {"now"},
        ),
    ],
)
async def test_a_call_that_has_to_be_is_held_to_its_form(
    tmp_path: Path, choice: Any, finish: str, functions: set[str]
) -> None:
    core = FakeCore(answer=says(ONE))
    async with running_server(tmp_path, core, tool_call_parser="hermes") as server:
        answer = await ask(server, tool_choice=choice)
    assert calls_of(answer["message"]) == [("weather", {"city": "Rome"})]
    assert answer["finish_reason"] == finish
    (grammar,) = [
        json.loads(message.sampling_params.grammar) for message in core.received if isinstance(message, AddRequest)
    ]
    (schema,) = [part["json_schema"] for part in grammar["grammars"] if "json_schema" in part]
    assert {each["properties"]["name"]["const"] for each in schema["anyOf"]} == functions


async def test_a_strict_tool_is_held_to_its_schema_if_it_is_called(tmp_path: Path) -> None:
    core = FakeCore(answer=says("text"))
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]  # type: ignore[dict-item]
    async with running_server(tmp_path, core, tool_call_parser="hermes") as server:
        await ask(server, tools=strict)
        await ask(server)
    held, free = [message.sampling_params.grammar for message in core.received if isinstance(message, AddRequest)]
    assert '"required": ["city"]' in held
    assert free == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "missing"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [{"type": "other", "other": {"name": "x"}}]}, "tools"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "what"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
async def test_what_does_not_fit_together_is_refused(tmp_path: Path, fields: Any, param: str) -> None:
    async with serving(tmp_path, ONE) as server:
        answer = await server.post(PATH, {**ASK, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


async def test_without_a_known_format_tools_are_refused_unless_none(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(answer=says("x"))) as server:
        answer = await server.post(PATH, ASK)
        assert answer.status_code == 400
        assert "--tool-call-parser" in answer.json()["error"]["message"]
        assert (await server.post(PATH, {**ASK, "tool_choice": "none"})).status_code == 200


async def test_gpt_oss_answers_on_channels(tmp_path: Path) -> None:
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'
    for text, content, calls in (
        (f"{thought}<|channel|>final<|message|>Sunny.", "Sunny.", []),
        (f"{thought}{call}", None, [("weather", {"city": "Rome"})]),
    ):
        core = FakeCore(answer=says(text))
        async with running_server(tmp_path, core, tool_call_parser="openai") as server:
            answer = (await server.post(PATH, ASK)).json()
            chunks = await stream(server)
            plain = (await ask(server, tools=None))["message"]
        message = answer["choices"][0]["message"]
        assert message["reasoning"] == plain["reasoning"] == "hm"
        assert message["content"] == content
        assert [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in
                message.get("tool_calls", ())] == calls  # fmt: skip
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        assert "".join(chunk["delta"].get("reasoning", "") for chunk in chunks) == "hm"
        assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == (content or "")


@pytest.mark.parametrize(
    ("name", "thought", "said", "call"),
    [
        (
            "inkling",
            "<|content_thinking|>hm<|end_message|><|message_model|>",
            "<|content_text|>Sunny.<|end_message|>",
            '<|content_invoke_tool_json|>{"name": "weather", "args": {"city": "Rome"}}<|end_message|>',
        ),
        (
            "muse",
            " to=self<|message|>hm<|eom|><|start|>assistant",
            " to=user<|message|>Sunny.<|eot|>",
            ' to=weather<|message|><atem:function_calls><atem:invoke name="weather"><atem:parameter name="city">Rome'
            "</atem:parameter></atem:invoke></atem:function_calls><|eom|>",
        ),
        (
            "kimi_k3",
            "<|open|>think<|sep|>hm<|close|>think<|sep|>",
            "<|open|>response<|sep|>Sunny.<|close|>response<|sep|><|close|>message<|sep|>",
            '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"'
            "<|sep|>Rome<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        ),
        (
            "gemma4",
            "<|channel>thought\nhm<channel|>",
            "Sunny.",
            '<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|>',
        ),
    ],
)
async def test_models_with_messages_of_several_kinds(
    tmp_path: Path, name: str, thought: str, said: str, call: str
) -> None:
    for text, content, calls in (
        (thought + said, "Sunny.", []),
        (thought + call, None, [("weather", {"city": "Rome"})]),
    ):
        core = FakeCore(answer=says(text))
        async with running_server(tmp_path, core, tool_call_parser=name, reasoning_parser=name) as server:
            message = (await server.post(PATH, ASK)).json()["choices"][0]["message"]
            chunks = await stream(server)
            plain = (await ask(server, tools=None))["message"]
        assert (message["reasoning"], message["content"]) == ("hm", content)
        assert [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in
                message.get("tool_calls", ())] == calls  # fmt: skip
        assert "".join(chunk["delta"].get("reasoning") or "" for chunk in chunks) == "hm"
        assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == (content or "")
        assert plain["reasoning"] == "hm"
        assert calls or plain["content"] == "Sunny."


async def test_gpt_oss_holds_its_answer_to_a_form_on_the_final_channel(tmp_path: Path) -> None:
    core = FakeCore(answer=says("<|channel|>final<|message|>a"))
    async with running_server(tmp_path, core, tool_call_parser="openai", reasoning_parser="openai_gptoss") as server:
        await ask(server, tools=None, guided_choice=["a"])
    (grammar,) = [message.sampling_params.grammar for message in core.received if isinstance(message, AddRequest)]
    assert '\\"<|channel|>final<|message|>\\"' in grammar
    assert '\\"<|channel|>analysis<|message|>\\"' in grammar


def numbered_tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{number}"}} for number in range(count)]


async def test_the_number_of_tools_has_a_limit(tmp_path: Path) -> None:
    async with serving(tmp_path, "ok", chat_template="{{ messages[0].content }}") as server:
        await ask(server, tools=numbered_tools(MAX_TOOLS))
        for path, tools in (
            (PATH, numbered_tools(MAX_TOOLS + 1)),
            ("/tokenize", numbered_tools(MAX_TOOLS + 1)),
            ("/v1/messages", [{"name": f"f{number}", "input_schema": {}} for number in range(MAX_TOOLS + 1)]),
        ):
            answer = await server.post(path, {**ASK, "max_tokens": 5, "tools": tools})
            assert answer.status_code == 400
            assert f"at most {MAX_TOOLS}" in answer.text
            assert "tools" in answer.text


@pytest.mark.timeout(30)
def test_names_are_compared_in_linear_time() -> None:
    functions = (FunctionDefinition.model_construct(name=f"f{number}", parameters=None) for number in range(60_000))
    tools: list[Any] = [FunctionTool.model_construct(function=function) for function in functions]
    plan = tool_plan(ChatRequest.model_construct(messages=[], tools=tools), FORMATS["hermes"])
    assert plan is not None
    assert len(plan.schemas) == 60_000
    with pytest.raises(InvalidRequest, match="'f0'"):
        tool_plan(ChatRequest.model_construct(messages=[], tools=[*tools, tools[0]]), FORMATS["hermes"])


def function(parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


WRONG: list[Any] = [
    {"properties": 5}, {"properties": ["a"]}, {"properties": {"a": None}}, {"properties": {"a": 5}},
    {"properties": {"a": "string"}}, {"properties": {"a": []}}, {"properties": {"a": {"enum": 5}}},
    {"properties": {"a": {"type": "string", "enum": 5}}}, {"properties": {"a": {"type": "string", "enum": {"b": 1}}}},
    {"properties": {"a": {}}, "required": 5}, {"properties": {"a": {"type": 5}}},
]  # fmt: skip
NEVER: list[Any] = [  # no value satisfies them
    {"properties": {"a": {"type": "string", "enum": [1]}}, "required": ["a"]},
    {"properties": {"a": {"type": "string", "enum": []}}, "required": ["a"]},
    {"properties": {"a": False}, "required": ["a"]},
]
FINE: list[Any] = [
    {"properties": {"a": True}}, {"properties": {"a": True}, "required": ["a"]}, {"properties": {"a": {}}}, {},
    {"properties": {"a": {"type": "string", "enum": ["x", 1]}}}, {"properties": {"a": {"enum": ["x", 1, None]}}},
]  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "hermes", "openai"])
async def test_a_wrong_schema_is_refused_where_it_is_enforced(tmp_path: Path, name: str) -> None:
    forced: dict[str, Any] = {"tool_choice": "required"}
    async with running_server(tmp_path, tool_call_parser=name) as server:
        for parameters in WRONG + NEVER:
            answer = await server.post(PATH, {**ASK, "tools": [function(parameters)], **forced})
            assert answer.status_code == 400, (parameters, answer.text)
            assert answer.json()["error"]["param"] == "tools"
            for fields in ({"tools": [function(parameters)]}, {"tools": [function(parameters, strict=True)]}):
                assert (await server.post(PATH, {**ASK, **fields})).status_code in (200, 400), parameters
        for parameters in FINE:
            answer = await server.post(PATH, {**ASK, "tools": [function(parameters)], **forced})
            assert answer.status_code == 200, (parameters, answer.text)


async def test_a_call_is_found_whatever_its_schema(tmp_path: Path) -> None:
    text = "<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>"
    async with running_server(tmp_path, FakeCore(answer=says(text)), tool_call_parser="qwen3_coder") as server:
        for parameters in WRONG + NEVER + FINE:
            choice = await ask(server, tools=[function(parameters)])
            ((name, arguments),) = calls_of(choice["message"])
            assert (name, str(arguments["a"])) == ("f", "7")


CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"], "$defs": {"City": {}}}


@pytest.mark.parametrize("name", ["qwen3_coder", "hermes", "openai", "llama3_json", "mistral"])
async def test_references_start_at_the_schema_of_their_tool(tmp_path: Path, name: str) -> None:
    kinds: list[dict[str, Any]] = [{"type": "string"}, {"type": "integer"}, {"enum": ["Rome", "Oslo"]}]
    async with running_server(tmp_path, tool_call_parser=name) as server:
        for kind in kinds:
            tools = [function({**CITY, "$defs": {"City": kind}}), TOOLS[0]]
            answer = await server.post(PATH, {**ASK, "tools": tools, "tool_choice": "required"})
            assert answer.status_code == 200, (kind, answer.text)


@pytest.mark.timeout(30)
async def test_definitions_that_many_parameters_refer_to_have_a_limit(tmp_path: Path) -> None:
    """Each parameter is written by itself, with the definitions; without a limit these would be gigabytes."""
    definitions = {f"d{number}": {"items": {"$ref": f"#/$defs/d{(number + 1) % 5_000}"}} for number in range(5_000)}
    parameters = {"properties": {f"p{number}": {"$ref": "#/$defs/d1"} for number in range(5_000)}, "$defs": definitions}
    plain = {**parameters, "properties": {"p": {"type": "string"}}}
    async with running_server(tmp_path, tool_call_parser="qwen3_coder") as server:
        answer = await server.post(PATH, {**ASK, "tools": [function(parameters)], "tool_choice": "required"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools"
        assert "more than 1048576 characters" in answer.json()["error"]["message"]
        answer = await server.post(PATH, {**ASK, "tools": [function(plain)], "tool_choice": "required"})
        assert answer.status_code == 200


def test_a_referenced_string_is_parsed_as_text() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=city>\n7\n</parameter>\n</function>\n</tool_call>"
    for kind, city in (("string", "7"), ("integer", 7)):
        parser = FORMATS["qwen3_coder"].parser({"f": {**CITY, "$defs": {"City": {"type": kind}}}})
        (call,) = parser.push(text, last=True).calls
        assert json.loads(call.arguments) == {"city": city}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic", "mistral", "llama3_json", "glm45"])
@pytest.mark.parametrize("depth", [300, 1500, 20_000])
def test_deeply_nested_arguments_in_an_answer_are_returned(name: str, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    text = {
        "hermes": f'<tool_call>\n{{"name": "f", "arguments": {deep}}}\n</tool_call>',
        "qwen3_coder": f"<tool_call>\n<function=f>\n<parameter=a>\n{deep}\n</parameter>\n</function>\n</tool_call>",
        "glm45": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{deep}</arg_value>\n</tool_call>",
        "pythonic": f"[f(a={deep})]",
        "mistral": f'[TOOL_CALLS][{{"name": "f", "arguments": {{"a": {deep}}}}}]',
        "llama3_json": f'{{"name": "f", "parameters": {{"a": {deep}}}, "more": {deep}}}',
    }[name]
    parser = FORMATS[name].parser({"f": {}})
    parsed = parser.push(text, last=True)
    assert parsed.content or parsed.calls
